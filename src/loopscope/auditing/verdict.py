"""From findings at many states to verdicts: dimension with agreement, a name for what is blind, evidence, remedy.

Shape legend: D width, C blind directions.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loopscope.auditing.free_range import FURTHEST, FreeRange
from loopscope.auditing.result import BlindDirections, Variable
from loopscope.auditing.search import CLASSES, HIDDEN, StateFindings, median_dimension
from loopscope.config import PAPER_PENALTY

SEVERITY = ("visible", "weak", "removed", "damped", "inert", "memory", "blind")
"""From harmless to alarm; over loops the last one counts."""
EXPLAINED = 0.98
"""Share of a direction (or of a subspace) that a name must explain."""

REMEDIES: dict[str, tuple[str, str | None]] = {
    "scale": (
        "let a loss see the scale (a norm penalty; a raw or final-only readout) or take it out of the loop "
        "(an inter-loop norm)",
        f"--norm-penalty {PAPER_PENALTY}",
    ),
    "mean": ("read out through RMSNorm or raw, or norm between loops with LayerNorm", "--readout rmsnorm"),
}
OTHER_REMEDY = ("let the readout see these directions, or add a loss term on them", f"--norm-penalty {PAPER_PENALTY}")

Findings = list[dict[int, StateFindings]]
"""One entry per state: loop → findings."""


def blind_directions(findings: Findings, pc_DC: Tensor, states_at: dict[int, list[Tensor]]) -> BlindDirections:
    """The dimension at the loop where it is largest, with its spectrum and its names."""
    loops = sorted(findings[0])
    medians = {k: median_dimension([one[k].fate.counts["blind"] for one in findings]) for k in loops}
    worst = max(loops, key=lambda k: medians[k][0])
    dimension, agreement = medians[worst]
    spectrum = torch.stack([one[worst].hidden.spectrum for one in findings]).median(0).values
    named, unnamed = _names([one[worst].fate.blind_DC for one in findings], states_at[worst], pc_DC, dimension)
    return BlindDirections(
        dimension=dimension,
        agreement=agreement,
        states=len(findings),
        spectrum=spectrum.tolist(),
        gap=_gap(spectrum),
        named=named,
        unnamed=unnamed,
        loops=[_loop_row(k, [one[k] for one in findings]) for k in loops],
    )


def _loop_row(k: int, at_states: Sequence[StateFindings]) -> dict[str, int]:
    """Median over states of how many directions end in each class."""
    hidden = statistics.median_low([one.hidden.basis_DN.shape[1] for one in at_states])
    weak = statistics.median_low([one.hidden.weak for one in at_states])
    classes = {name: statistics.median_low([one.fate.counts[name] for one in at_states]) for name in CLASSES}
    return {"k": k, "hidden": int(hidden), "weak": int(weak), **{name: int(count) for name, count in classes.items()}}


def _gap(spectrum: Tensor) -> float | None:
    """Smallest shown over largest hidden singular value; None when nothing is hidden."""
    hidden, shown = spectrum[spectrum <= HIDDEN], spectrum[spectrum > HIDDEN]
    return float(shown.min() / hidden.max().clamp(min=1e-300)) if len(hidden) and len(shown) else None


def _names(
    bases_DC: list[Tensor], states_D: list[Tensor], pc_DC: Tensor, dimension: int
) -> tuple[list[dict[str, object]], int]:
    """Names of the blind subspace that most states agree on, with the share each explains; what is left is unnamed."""
    if dimension == 0:
        return [], 0
    per_state = [
        dict(_names_at(basis_DC, h_D, pc_DC))
        for basis_DC, h_D in zip(bases_DC, states_D, strict=True)
        if basis_DC.shape[1] == dimension
    ]
    counts = Counter(name for names in per_state for name in names)
    common = [name for name, count in counts.items() if count > len(per_state) / 2]
    shares = {name: statistics.median(names[name][0] for names in per_state if name in names) for name in common}
    taken = sum(max(names[name][1] for names in per_state if name in names) for name in common)
    return [{"name": name, "share": shares[name]} for name in common], max(dimension - taken, 0)


def _names_at(basis_DC: Tensor, h_D: Tensor, pc_DC: Tensor) -> list[tuple[str, tuple[float, int]]]:
    """(name, (share explained, dimensions taken)) at one state: scale, mean, channels, principal components."""
    found: list[tuple[str, tuple[float, int]]] = []
    fields = {"scale": h_D.double(), "mean": torch.ones_like(h_D, dtype=torch.float64)}
    fields |= {f"principal component {index + 1}": pc_DC[:, index] for index in range(pc_DC.shape[1])}
    rest_DC = basis_DC
    for name, field_D in list(fields.items())[:2]:
        rest_DC = _take(name, field_D, basis_DC, rest_DC, found)
    channels = _channels(rest_DC)
    if channels is not None:
        found.append((channels, (EXPLAINED, rest_DC.shape[1])))
        return found
    for name, field_D in list(fields.items())[2:]:
        rest_DC = _take(name, field_D, basis_DC, rest_DC, found)
    return found


def _take(
    name: str, field_D: Tensor, basis_DC: Tensor, rest_DC: Tensor, found: list[tuple[str, tuple[float, int]]]
) -> Tensor:
    """Note a field that lies in the subspace, and return what is left of the subspace without it."""
    unit_D = field_D / field_D.norm()
    share = float((basis_DC.T @ unit_D).square().sum())
    if share < EXPLAINED or rest_DC.shape[1] == 0:
        return rest_DC
    inside_C = rest_DC.T @ unit_D
    if inside_C.norm() < 1 - EXPLAINED:  # a combination of names that are already there
        return rest_DC
    found.append((name, (share, 1)))
    _, _, right = torch.linalg.svd(inside_C[None])
    return rest_DC @ right.T[:, 1:]


def _channels(rest_DC: Tensor) -> str | None:
    """The few channels that hold the whole subspace, if there are such (one more than dimensions at most)."""
    dimension = rest_DC.shape[1]
    if dimension == 0:
        return None
    energy_D = rest_DC.square().sum(-1)
    held, order = energy_D.sort(descending=True)
    count = int((held.cumsum(0) < EXPLAINED * dimension).sum()) + 1
    if count > dimension + 1 or count == len(energy_D):
        return None
    return "channels " + ", ".join(str(c) for c in sorted(order[:count].tolist()))


def variables(findings: Findings, found: BlindDirections, ranges: Mapping[str, FreeRange]) -> list[Variable]:
    """Scale and mean (and users' fields) first, then what the search found besides them."""
    names = list(next(iter(findings[0].values())).fields)
    known = [_field_variable(name, findings, ranges[name]) for name in names]
    blind = [one.name for one in known if one.verdict == "blind"]
    extra = [str(named["name"]) for named in found.named if named["name"] not in blind]
    # A blind direction may lie close to a named one that is not blind itself: it is another one.
    others = [_discovered(f"a direction near {name}" if name in names else name, findings, found) for name in extra]
    if found.unnamed or (found.dimension and not blind and not extra):
        others.append(_discovered(f"unnamed ({found.unnamed or found.dimension} dimensions)", findings, found))
    return known + others + _memory(findings, found)


def _memory(findings: Findings, found: BlindDirections) -> list[Variable]:
    """What is carried in sight of no exit, and bounded."""
    k, count = max(((row["k"], row["memory"]) for row in found.loops), key=lambda row: row[1])
    if not count:
        return []
    numbers = _strength("memory", k, findings)
    evidence = (
        f"loop {k}: {count} hidden directions ({numbers[0]:.0e}) are carried (gain {numbers[2]:.2g}) and read later "
    )
    evidence += f"({numbers[1]:.1g}), but the loop bounds the state as a whole"
    return [Variable(f"hidden memory ({count} dimensions)", "memory", *numbers, evidence, None, None)]


def _strength(name: str, k: int, findings: Findings) -> tuple[float, float, float]:
    """Visibility, delayed visibility and activity of what is `name` at a loop: medians over the states that have it."""
    at = [one[k].fate.strengths[name] for one in findings if name in one[k].fate.strengths]
    visibility, delayed, activity = (
        statistics.median(getattr(one, number) for one in at) for number in ("visibility", "delayed", "activity")
    )
    return visibility, delayed, activity


def _field_variable(name: str, findings: Findings, ranges: FreeRange) -> Variable:
    """The worst verdict over loops: how far it is free, and where it is, its most frequent fate over states."""
    by_loop = {}
    for k in findings[0]:
        if not ranges.is_free(k):
            by_loop[k] = "weak" if ranges.median[k] >= WEAK_RANGE else "visible"
            continue
        fates = Counter(one[k].fields[name].fate for one in findings)
        by_loop[k] = max(fates, key=lambda fate: (fates[fate], SEVERITY.index(fate)))
    worst = max(by_loop, key=lambda k: (SEVERITY.index(by_loop[k]), ranges.median[k]))
    verdict = by_loop[worst]
    at_worst = [one[worst].fields[name] for one in findings]
    visibility, delayed, activity = (
        statistics.median(getattr(one, number) for one in at_worst) for number in ("visibility", "delayed", "activity")
    )
    remedy, flag = REMEDIES.get(name, OTHER_REMEDY) if verdict == "blind" else (None, None)
    far = "without limit" if ranges.median[worst] == math.inf else f"{ranges.median[worst]:.3g}-fold"
    evidence = EVIDENCE[verdict].format(
        k=worst, free=far, share=ranges.tenfold[worst], delayed=delayed, activity=activity
    )
    return Variable(
        name,
        verdict,
        visibility,
        delayed,
        activity,
        evidence,
        remedy,
        flag,
        min(ranges.median[worst], FURTHEST),
        ranges.tenfold[worst],
    )


WEAK_RANGE = 3.0
"""A variable that is free threefold is held, but weakly."""
EVIDENCE = {
    "visible": "loop {k}: free to run {free} before it costs 1 % of perplexity",
    "weak": "loop {k}: free to run {free} before it costs 1 % of perplexity",
    "removed": "loop {k}: free to run {free}, but no loop carries or writes it (gain {activity:.2g})",
    "damped": "loop {k}: free to run {free}, but dying out by more than 5 % a loop (gain {activity:.2g})",
    "inert": "loop {k}: free to run {free} and carried, but nothing ever reads it; only its range is at risk",
    "memory": "loop {k}: free to run {free}, carried and read, but bounded by the loop",
    "blind": "loop {k}: free to run {free} before it costs 1 % of perplexity ({share:.0%} of tokens tenfold or more); "
    "the next loop carries it on with gain {activity:.2g}, and later exits depend on it ({delayed:.1g})",
}


def _discovered(name: str, findings: Findings, found: BlindDirections) -> Variable:
    """What the search found besides named fields; its numbers are the largest of all such directions of a state."""
    remedy, flag = OTHER_REMEDY
    k = max(found.loops, key=lambda row: row["blind"])["k"]
    numbers = _strength("blind", k, findings)
    evidence = (
        f"loop {k}: ten lengths of the state along it go unnoticed; the next loop carries it on with gain "
        f"{numbers[2]:.2g}, and later exits depend on it ({numbers[1]:.1g}); found by the search at "
        f"{found.agreement:.0%} of the states"
    )
    return Variable(name, "blind", *numbers, evidence, remedy, flag)


def summary(verdict: str, found: BlindDirections, known: list[Variable]) -> str:
    """The audit in one sentence."""
    if verdict == "controlled":
        scale = next(one for one in known if one.name == "scale")
        return f"No blind spot: every direction that the loop carries is shown to a loss; scale is {scale.verdict}."
    names = ", ".join(one.name for one in known if one.verdict == "blind")
    if found.dimension == 0:  # a field that is free for some tokens, or tenfold along a curve that no tangent follows
        return f"Blind ({names}): the loop carries on what the objective lets run tenfold or more."
    plural, them = ("s", "them") if found.dimension > 1 else ("", "it")
    return f"{found.dimension} blind direction{plural} ({names}): the loop carries {them} on and no loss sees {them}."
