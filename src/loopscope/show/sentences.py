"""What an audit found, in sentences: each is rendered from fields, here and nowhere else. No torch.

An audit that is written carries them too, for whoever reads the file; nobody here reads them back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from loopscope.config import PAPER_PENALTY
from loopscope.results.audit import AuditResult, Motion, Variable
from loopscope.results.thresholds import FURTHEST, TENFOLD
from loopscope.show.numbers import fold, percent


class Advice(NamedTuple):
    """What to do about a blind variable, and the flag that does it, where one does."""

    text: str
    flag: str | None


REMEDIES = {
    "scale": Advice(
        "let a loss see the scale (a norm penalty; a raw or final-only readout) or take it out of the loop "
        "(an inter-loop norm)",
        f"--norm-penalty {PAPER_PENALTY}",
    ),
    "mean": Advice("read out through RMSNorm or raw, or norm between loops with LayerNorm", "--readout rmsnorm"),
}
"""Of named fields."""
OTHER_REMEDY = Advice(
    "let the readout see these directions, or add a loss term on them", f"--norm-penalty {PAPER_PENALTY}"
)
TENSOR_REMEDY = Advice("let an exit read this tensor, add a loss term on it, or norm it between loops", None)


# --- clauses ---------------------------------------------------------------------------------------------------------


def free_to_grow(factor: float, tokens: float | None = None) -> str:
    """What a free range says: free to grow 70-fold before it costs 1 % of perplexity.

    Where the median token is held and others are free, `tokens` is the share of those.
    """
    if tokens is not None and factor < TENFOLD:
        few = f"{percent(tokens)} of the tokens ({fold(factor)} for the median one)"
        return f"free to grow tenfold or more before it costs 1 % of perplexity, for {few}"
    if factor >= FURTHEST:
        return "free to grow without limit (a million-fold does not cost 1 % of perplexity)"
    return f"free to grow {fold(factor)} before it costs 1 % of perplexity"


def driven_by_training(rate: float) -> str:
    """What a drift says: training drives it up by 4 % a step."""
    return f"training drives it {'up' if rate > 0 else 'down'} by {percent(rate)} a step"


def driven(variable: Variable) -> str:
    """What training does to a variable; empty where that was not tried."""
    if variable.driven is None or variable.drift is None:
        return ""
    return driven_by_training(variable.drift) if variable.driven else "training from these weights does not drive it"


def _lengths(free: float) -> str:
    many = "any number of" if free >= FURTHEST else fold(free).removesuffix("-fold")
    return f"{many} lengths of the state"


# --- one variable ----------------------------------------------------------------------------------------------------


def evidence(variable: Variable) -> str:
    """Why a variable got its verdict: a claim, what training does to it, and of what is blind the numbers."""
    claim, numbers = {
        "field": _of_a_field,
        "tensor": _of_a_tensor,
        "constant": lambda _: ("carried beside h, and the same after every loop: no loop writes it", ""),
        "found": _of_what_was_found,
        "memory": _of_a_memory,
    }[variable.kind](variable)
    claim = "; ".join(filter(None, (claim, driven(variable))))
    return ". ".join(filter(None, (claim, numbers)))


def _of_a_field(one: Variable) -> tuple[str, str]:
    is_held = one.verdict in ("visible", "weak")
    free = "its free range was not measured"
    if one.free_range is not None:
        free = free_to_grow(one.free_range, None if is_held else one.free_tokens)
    held = "" if one.held_from is None else f" (the penalty begins to cost from ‖h‖ ≈ {one.held_from:,.0f})"
    gain = f"(loop {one.loop}, gain {one.activity:.2g})"
    if one.verdict == "blind":
        return f"{free}{held}", (
            f"At loop {one.loop}, {100 * (one.free_tokens or 0.0):.0f} % of tokens are free tenfold or more, the next "
            f"loop carries it on with gain {one.activity:.2g}, and later exits depend on it "
            f"({one.delayed_visibility:.1g})"
        )
    return {
        "visible": f"{free}, from loop {one.loop} on",
        "weak": f"{free}{held}, from loop {one.loop} on",
        "removed": f"{free}, but no loop carries or writes it {gain}",
        "damped": f"{free}, but dying out by more than 5 % a loop {gain}",
        "inert": f"{free} and carried (loop {one.loop}), but nothing ever reads it; only its range is at risk",
        "memory": f"{free}, carried and read (loop {one.loop}), but bounded by the loop",
    }[one.verdict], ""


def _of_a_tensor(one: Variable) -> tuple[str, str]:
    if one.verdict == "blind":
        what = f"{one.directions} of its {one.width} directions are blind"
    else:
        what = f"most of it is {one.verdict}"
    if one.free_range is not None:
        what += f", {_lengths(one.free_range)} along them go unnoticed"
    numbers = (
        f"along itself its exit shows {one.visibility:.1g} of an average direction, the next loop passes on "
        f"{one.activity:.2g}, later exits depend on it by {one.delayed_visibility:.1g}"
    )
    return (
        f"carried beside h: {what} "
        f"(loop {one.loop}; {'zero at every token that was searched' if one.is_zero else numbers})"
    ), ""


def _of_what_was_found(one: Variable) -> tuple[str, str]:
    return f"{_lengths(FURTHEST if one.free_range is None else one.free_range)} along it go unnoticed", (
        f"At loop {one.loop} the next loop carries it on with gain {one.activity:.2g}, and later exits depend on it "
        f"({one.delayed_visibility:.1g}); found by the search at {100 * (one.agreement or 0.0):.0f} % of the states"
    )


def _of_a_memory(one: Variable) -> tuple[str, str]:
    return (
        f"loop {one.loop}: {one.directions} hidden directions ({one.visibility:.0e}) are carried (gain "
        f"{one.activity:.2g}) and read later ({one.delayed_visibility:.1g}), but the loop bounds the state as a whole"
    ), ""


def remedy(variable: Variable) -> Advice | None:
    """What to do about a blind variable; None about another."""
    if variable.verdict != "blind":
        return None
    if variable.kind == "tensor":
        return TENSOR_REMEDY
    return REMEDIES.get(variable.name.removeprefix("a direction near "), OTHER_REMEDY)


# --- the audit -------------------------------------------------------------------------------------------------------


def summary(audit: AuditResult) -> str:
    """The audit in one sentence."""
    if audit.verdict == "undecided":
        return f"Undecided: {next(iter(audit.checks.doubts), 'nobody said why')}."
    if audit.verdict == "controlled":
        scale = next((f"; scale is {one.verdict}" for one in audit.variables if one.name == "scale"), "")
        return f"No blind spot: every direction that the loop carries is shown to a loss{scale}."
    found = audit.blind_directions.dimension
    plural, them = ("s", "them") if found > 1 else ("", "it")
    return (
        f"{found} blind direction{plural} ({', '.join(audit.blind)}): the loop carries {them} on and no loss sees "
        f"{them}."
    )


def motion(found: Motion) -> str:
    """How tokens move: shares, rate and settling, in a sentence or two."""
    named = [f"{share:.0%} {kind}" for kind, share in found.shares.items() if share]
    says = f"Over {found.loops} loops {len(found.tokens)} tokens are {', '.join(named)}"
    if found.period is not None and found.purity is not None:
        says += f" (median period {found.period:.3g} loops, {found.purity:.0%} of the power at its peak)"
    if found.contraction_rate is not None:
        says += f"; steps change by a factor of {found.contraction_rate:.3g} a loop"
    return says + (
        f". The prediction settles at loop {found.settled_at:g} (median); for {found.settled_by_trained_depth:.0%} of "
        f"tokens no loop beyond the trained {found.num_loops} changes it."
    )


def with_sentences(audit: AuditResult) -> AuditResult:
    """An audit as it is written: with everything that is said of it."""
    variables = []
    for one in audit.variables:
        what = remedy(one)
        variables.append(
            replace(one, evidence=evidence(one), remedy=what.text if what else None, flag=what.flag if what else None)
        )
    return replace(audit, variables=variables, summary=summary(audit))
