"""What an audit measures on a model: states, exits, interventions, free ranges, and the search at sampled tokens.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from loopscope.auditing import verdict as verdicts
from loopscope.auditing.activity import FAR, Lemma2, lemma_2, loop_activity, motion
from loopscope.auditing.derivative_checks import check_derivatives
from loopscope.auditing.derivatives import with_the_same_noise
from loopscope.auditing.free_range import FreeRange, Objections
from loopscope.auditing.interventions import CLAMPED, INTERVENTIONS, intervened_cross_entropy
from loopscope.auditing.result import Loop, Variable
from loopscope.auditing.search import LATER_LOOPS, Search, audited_loops, carried_on, channel_sizes
from loopscope.auditing.visibility import (
    ALPHAS,
    Field,
    alpha_sweep,
    field_shares,
    mean_cross_entropy,
    raw_readout_control,
    scale_curvatures,
)
from loopscope.auditing.window import Carried, Windows, keeps_its_cache, windows
from loopscope.errors import DataError, NotFiniteError, ProtocolError
from loopscope.machine import check_bf16_products
from loopscope.objectives.terms import Term
from loopscope.options import AuditOptions
from loopscope.protocol import LoopedModel, LoopState, check_products

Progress = Callable[[str, float], None]

SHARE_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HEAVIEST = 5
TOKENS_BEYOND = 64
"""Tokens that are followed beyond the trained depth."""
TOKENS_AFTER = 5
"""Tokens after an audited one that are asked what they read of it: one more than the loops a direction is followed."""
ROWS_DEPEND = (
    "the rows of a batch depend on one another (batch statistics?): every state was searched as a batch of its own"
)


@dataclass
class Survey:
    """One audit under way."""

    model: LoopedModel
    network: nn.Module | None
    ids_BT: Tensor
    targets_BT: Tensor
    weights: dict[int, float]
    """Of the supervised loops."""
    gated: bool
    terms: Sequence[Term]
    fields: dict[str, Field]
    untrained_scale: float
    options: AuditOptions
    progress: Progress
    notes: list[str] = field(default_factory=list)
    runnable: int | None = None
    """The last loop that the model runs and reads out, where that ends."""
    doubts: list[str] = field(default_factory=list)
    """Why no all-clear can be given."""

    @property
    def supervised(self) -> list[int]:
        """Loops that get cross-entropy."""
        return list(self.weights)


@dataclass
class Measured:
    """What a survey found out."""

    states: list[LoopState]
    causal: bool
    loops: list[Loop]
    motion: str
    alpha_sweep: dict[str, Any]
    interventions: list[dict[str, Any]]
    heaviest_tokens: list[dict[str, Any]]
    raw_readout_control: float
    found: verdicts.Found
    variables: list[Variable]


def measure(run: Survey) -> Measured:
    """Everything that runs the model."""
    check_products(run.model, run.ids_BT.device)
    num_loops = run.model.num_loops
    with torch.no_grad():
        run.progress("activity", 0.0)
        states = _roll_out(run)
        causal = _is_causal(run)
    loops = _loops(run, states)
    run.progress("visibility", 0.2)
    swept = sorted({run.supervised[0], run.supervised[-1]})
    sweeps = [{"k": k, "ce": alpha_sweep(run.model, states[k], k, run.targets_BT)} for k in swept]
    run.progress("interventions", 0.3)
    before, interventions = loops[num_loops - 1].ce, []
    for name, rewrite in INTERVENTIONS.items():
        ce = intervened_cross_entropy(run.model, run.ids_BT, run.targets_BT, num_loops, rewrite)
        interventions.append({"name": name, "clamps": CLAMPED.get(name), "ce": ce, "delta_ce": ce - before})
    run.progress("free ranges", 0.35)
    objections = Objections(
        run.model, states, run.weights, run.terms, gated=run.gated, untrained_scale=run.untrained_scale
    )
    audited = audited_loops(run.supervised)
    ranges = {name: objections.free_range(of, audited) for name, of in run.fields.items()}
    found, variables = _search(run, states, objections, ranges, causal)
    return Measured(
        states=states,
        causal=causal,
        loops=loops,
        motion=motion(states),
        alpha_sweep={"alphas": list(ALPHAS), "loops": sweeps},
        interventions=interventions,
        heaviest_tokens=_heaviest(run.ids_BT, states[num_loops].h_BTD),
        raw_readout_control=raw_readout_control(states[num_loops].h_BTD, run.targets_BT),
        found=found,
        variables=variables,
    )


def _roll_out(run: Survey) -> list[LoopState]:
    """h_0 … h_rollout, each checked; the search may run some loops more, which are tried here too."""
    states = [run.model.embed(run.ids_BT)]
    _check_state(states[0].h_BTD, "embed(ids)", 0)
    if states[0].h_BTD.dtype == torch.bfloat16 and run.ids_BT.device.type == "cpu":
        check_bf16_products()  # a network that is not shown may compute in it too
    searched = max(carried_on(run.supervised)) + max(LATER_LOOPS, run.supervised[-1])
    for k in range(1, max(run.options.rollout, run.model.num_loops + 1, searched) + 1):
        before = states[-1]
        if k > run.model.num_loops + 1:  # a few tokens tell where many loops lead
            rows = max(1, TOKENS_BEYOND // before.h_BTD.shape[1])
            before = before.take(torch.arange(min(rows, len(before.h_BTD)), device=before.h_BTD.device))
        try:
            state = _next(run, before, k)
        except Exception as error:
            if k <= run.model.num_loops:
                raise
            _stop(run, k, f"loop {k} fails with {type(error).__name__}: {error}")
            break
        if k > run.model.num_loops and not state.h_BTD.isfinite().all():
            run.notes.append(f"loop {k}, beyond the trained depth, leaves NaN or infinity: the rollout stops there")
            run.runnable = k - 1
            break
        _check_state(state.h_BTD, f"loop {k}", k)
        states.append(state)
    return states


def _next(run: Survey, before: LoopState, k: int) -> LoopState:
    """Loop k, which must leave its input alone and keep its shape."""
    version = before.h_BTD._version
    state = run.model.loop(before, k)
    if before.h_BTD._version != version:
        raise ProtocolError(f"loop {k} changes its input h_{k - 1} in place; clone it first")
    if state.h_BTD.shape != before.h_BTD.shape:
        was, became = tuple(before.h_BTD.shape), tuple(state.h_BTD.shape)
        raise ProtocolError(f"loop {k} changed the shape of the state from {was} to {became}")
    return state


def _stop(run: Survey, k: int, why: str) -> None:
    """A model with exactly K loop embeddings or readout gains has no loop K + 1: everything ends before it."""
    run.runnable = k - 1
    why = " ".join(why.split())
    run.notes.append(f"the model cannot be run beyond its trained depth: {why}; it is audited up to loop {k - 1}")


def _check_state(h_BTD: Tensor, what: str, k: int) -> None:
    if not h_BTD.is_floating_point():
        raise ProtocolError(f"{what} returns a state h_{k} of {h_BTD.dtype}: a state must be real numbers")
    if not h_BTD.isfinite().all():
        raise NotFiniteError(f"{what} leaves NaN or infinity in the state h_{k}")


def _is_causal(run: Survey) -> bool:
    """Whether a token's state stays the same when the last token is another one.

    Both runs have the same shape and the same random numbers, so that neither a state that starts from noise nor coarse
    arithmetic is taken for a look ahead.
    """
    ids_BT = run.ids_BT[:1]
    if ids_BT.shape[1] < 2:
        return True
    last = int(ids_BT[0, -1])
    others = run.ids_BT[run.ids_BT != last]
    changed_BT = ids_BT.clone()
    changed_BT[0, -1] = others[0] if len(others) else int(last == 0)

    def after_a_loop(ids_BT: Tensor) -> Tensor:
        return run.model.loop(run.model.embed(ids_BT), 1).h_BTD[:, :-1]

    one, other = (with_the_same_noise(after_a_loop, ids) for ids in (ids_BT, changed_BT))
    causal = bool((one - other).norm() <= 1e-4 * one.norm())
    if not causal:
        run.notes.append("the state of a token depends on later tokens: the model is not causal")
    return causal


def _loops(run: Survey, states: list[LoopState]) -> list[Loop]:
    """The loops that are reported, up to one beyond the trained depth that cannot be read out; states end with them."""
    reported = states[: max(run.options.rollout, run.model.num_loops + 1) + 1]
    loops: list[Loop] = []
    with torch.no_grad():
        first = states[1].take(torch.tensor([0], device=run.ids_BT.device))
        vocab_size = run.model.readout(first, 1).shape[-1]
    for k in range(1, len(states)):
        try:
            if k < len(reported):
                loops.append(_loop(run, reported, k, vocab_size))
            else:
                with torch.no_grad():
                    run.model.readout(states[k], k)
        except Exception as error:
            if k <= run.model.num_loops:
                raise
            _stop(run, k, f"the readout at loop {k} fails with {type(error).__name__}: {error}")
            break
    del states[len(loops) + 1 :]
    return loops


def _loop(run: Survey, states: list[LoopState], k: int, vocab_size: int) -> Loop:
    following = states[k + 1].h_BTD if k + 1 < len(states) else None
    here_BTD = states[k].h_BTD if following is None else states[k].h_BTD[: len(following)]
    tested = None if following is None else _lemma_2(run, states[k], k, following)
    activity, targets_BT = loop_activity(k, here_BTD, following, tested), run.targets_BT[: len(states[k].h_BTD)]
    with torch.no_grad():
        version = states[k].h_BTD._version
        logits_BTV = run.model.readout(states[k], k)
        if states[k].h_BTD._version != version:
            raise ProtocolError(f"the readout at loop {k} changes its state h_{k} in place; clone it first")
        if logits_BTV.shape[-1] != vocab_size:
            raise ProtocolError(f"the readout at loop {k} has {logits_BTV.shape[-1]} logits, at loop 1 {vocab_size}")
        if int(targets_BT.max()) >= vocab_size:
            raise DataError(f"target {int(targets_BT.max())} is outside the {vocab_size} logits of loop {k}")
        ce = mean_cross_entropy(logits_BTV, targets_BT)
    if k > run.model.num_loops:
        return Loop(False, ce, None, None, activity)
    shares = field_shares(run.model, states[k], k, run.targets_BT).abs()
    if not len(shares):
        return Loop(k in run.supervised, ce, None, None, activity)
    quantiles = torch.quantile(shares, torch.tensor(SHARE_QUANTILES, dtype=shares.dtype, device=shares.device))
    curvatures = scale_curvatures(run.model, states[k], k, run.targets_BT)
    return Loop(
        k in run.supervised,
        ce,
        float(shares.median()),
        quantiles.tolist(),
        activity,
        scale_curvature=None if curvatures is None else float(curvatures.mean()),
        scale_curvature_size=None if curvatures is None else float(curvatures.abs().median()),
    )


@torch.no_grad()
def _lemma_2(run: Survey, state: LoopState, k: int, next_BTD: Tensor) -> Lemma2 | None:
    """Lemma 2 from h_k to h_{k+1}; None where the loop fails at a hundred times the scale, which nobody promised."""
    state = state.take(torch.arange(len(next_BTD), device=next_BTD.device))
    try:
        far_BTD = run.model.loop(state.with_h(FAR * state.h_BTD), k + 1).h_BTD
    except Exception:
        return None
    return lemma_2(state.h_BTD, next_BTD, far_BTD) if far_BTD.isfinite().all() else None


def _heaviest(ids_BT: Tensor, h_BTD: Tensor) -> list[dict[str, Any]]:
    """The tokens with the largest final norm, once each."""
    norm_N = h_BTD.flatten(0, 1).double().norm(dim=-1)
    middle = float(norm_N.median())
    found: dict[int, dict[str, Any]] = {}
    for index in norm_N.argsort(descending=True).tolist():
        token = int(ids_BT.flatten()[index])
        size = float(norm_N[index])
        found.setdefault(
            token,
            {
                "token": token,
                "text": None,
                "position": index % ids_BT.shape[1],
                "norm": size,
                "ratio": size / max(middle, 1e-300),
            },
        )
        if len(found) == HEAVIEST:
            break
    return list(found.values())


def _search(
    run: Survey, states: list[LoopState], objections: Objections, ranges: dict[str, FreeRange], causal: bool
) -> tuple[verdicts.Found, list[Variable]]:
    """Sample tokens, examine each, and sum up."""
    options, generator = run.options, torch.Generator().manual_seed(run.options.seed)
    carried = Carried.of(states[: run.model.num_loops + 1], partial(_written, run, states), run.fields)
    run.notes.extend(carried.skipped)
    places = _places(run.ids_BT, options, generator)
    width = states[0].h_BTD.shape[-1] + sum(part.width for part in carried.searched)
    search = Search(
        run.model,
        objections.mean_weights(),
        [(term, objections.reference(term)) for term in run.terms],
        channels=channel_sizes(states, carried, audited_loops(run.supervised)),
        matrix_free=options.matrix_free(width),
        seed=options.seed,
        runnable=run.runnable,
    )
    every = carried_on(run.supervised)
    if len(search.audited) < len(every):
        loops = ", ".join(map(str, search.audited))
        run.notes.append(f"of the {len(every)} loops whose state goes on, {len(search.audited)} were searched: {loops}")
    findings: verdicts.Findings = []
    causal = causal and not _starts_from_noise(run)  # a text of another length would get other noise
    row_by_row, cached = (
        False,
        causal and not search.repeats and keeps_its_cache(run.model, run.ids_BT[0, :8], search.deepest),
    )
    for index, (row, position, end) in enumerate(places):
        share = partial(_report, run.progress, index, len(places))
        share(0.0)
        around = _around(run, search, run.ids_BT[row, :end], position, carried, causal, cached, row_by_row)
        if index == 0:
            if row_by_row := around.alone.rows_depend_on_one_another():
                around = around.row_by_row()
                run.notes.append(ROWS_DEPEND)
            if (note := check_derivatives(around.alone, run.fields)) is not None:
                run.notes.append(note)
        findings.append(search.examine(around, run.fields, ranges, share))
    _doubt_unread_states(run, findings)
    _doubt_rounding(run, findings)
    _note_disputes(run, findings)
    return verdicts.judge(findings, ranges, carried.constant)


def _starts_from_noise(run: Survey) -> bool:
    """Whether the same text is embedded differently at every call."""
    with torch.no_grad():
        one, other = (run.model.embed(run.ids_BT[:1]).h_BTD for _ in range(2))
    return not torch.equal(one, other)


def _written(run: Survey, states: Sequence[LoopState], name: str) -> bool | None:
    """Whether h or a weight that is trained reaches a carried tensor in the second loop; None: no weights are known.

    m ← m + W h with W = 0 or h = 0 leaves m as it was, and is its writer all the same: one of its derivatives is not 0.
    What the first loop sets and no other touches, as a clamped norm, is no recurrence: it is asked of a single loop
    only where there is no second.
    """
    k = min(2, run.model.num_loops)
    state = states[k - 1]
    weights = [] if run.network is None else [each for each in run.network.parameters() if each.requires_grad]
    if not weights:
        return None
    with torch.enable_grad():
        alone = pytree.tree_map_only(Tensor, Tensor.detach, state)
        alone.h_BTD.requires_grad_()
        tensor = run.model.loop(alone, k).carried[name]
        if not tensor.requires_grad:
            return False
        found = torch.autograd.grad(tensor, [*weights, alone.h_BTD], torch.randn_like(tensor), allow_unused=True)
    return any(one is not None and bool(one.any()) for one in found)


def _report(progress: Progress, state: int, states: int, share: float) -> None:
    progress("search", 0.4 + 0.6 * (state + share) / states)


def _around(
    run: Survey,
    search: Search,
    ids_T: Tensor,
    position: int,
    carried: Carried,
    causal: bool,
    cached: bool,
    row_by_row: bool,
) -> Windows:
    """One token to search; where no loop comes after the audited one, the last is run again in its stead."""
    around = partial(
        windows,
        run.model,
        ids_T,
        position,
        search.deepest,
        carried=carried,
        causal=causal,
        cached=cached,
        row_by_row=row_by_row,
    )
    if not search.repeats:
        return around()
    try:
        return around(last_loop=run.runnable)
    except Exception as error:
        raise ProtocolError(
            f"only loop {search.num_loops} is supervised, and nothing can be run after it ({type(error).__name__}: "
            f"{error}): what would be carried on cannot be measured"
        ) from error


def _doubt_unread_states(run: Survey, findings: verdicts.Findings) -> None:
    """A loop that starts as a function of the input alone (an injection W = [I | 0]) carries nothing, yet."""
    unread = [k for k in findings[0] if not any(one[k].is_read for one in findings)]
    if not unread:
        return
    which = f"loop {unread[0] + 1} does not depend on h_{unread[0]}"
    if len(unread) < len(findings[0]):
        run.notes.append(f"{which}: nothing of that state is carried on")
    elif any(one[k].hidden.basis_XH.shape[1] for one in findings for k in unread):
        run.doubts.append(
            f"no loop reads the state yet ({which}; an injection that starts with a weight of zero?), so what training "
            "will make it carry is not known; audit it after some steps"
        )
    else:
        run.notes.append(f"no loop reads the state yet ({which}), but its exits show all of it")


def _doubt_rounding(run: Survey, findings: verdicts.Findings) -> None:
    """A hidden direction that bf16 products blur looks like one that is shown a little."""
    for k in findings[0]:
        rounding = statistics.median(one[k].hidden.rounding for one in findings)
        blurred = statistics.median_high([one[k].hidden.undecided for one in findings])
        if blurred:
            whole = "" if run.network is None or list(run.network.parameters()) else " (adapt takes module=)"
            run.doubts.append(
                f"the arithmetic is too coarse for what an exit may hide: the readout at loop {k} shows {blurred} "
                f"directions so little that its rounding, {rounding:.0e} of an average direction, may be all of it; "
                f"audit the model in float32 or wider, or show its network so that it can be widened{whole}"
            )
            return


def _note_disputes(run: Survey, findings: verdicts.Findings) -> None:
    """A derivative that is not what the function does along a named field: a statistic that is detached, say."""
    for name in run.fields:
        readouts = [k for k in findings[0] if any(name in one[k].hidden.disputed for one in findings)]
        loops = [k + 1 for k in findings[0] if any(name in one[k].disputed for one in findings)]
        for what, at in (("readout at loop", readouts), ("loop", loops)):
            if at:
                run.notes.append(
                    f"the derivative of the {what} {', '.join(map(str, at))} along {name} is not what a change of the "
                    f"state does (a detached statistic inside?): the change is believed"
                )


def _places(ids_BT: Tensor, options: AuditOptions, generator: torch.Generator) -> list[tuple[int, int, int]]:
    """Tokens to search, as row, position and where the text that is run ends: some tokens after it, if there are."""
    length = ids_BT.shape[1]
    after = min(TOKENS_AFTER, length // 2)
    longest = min(options.prefix, length - after)
    count = min(options.states, ids_BT.numel())
    rows = torch.randint(len(ids_BT), (count,), generator=generator).tolist()
    prefixes = torch.randint((longest + 1) // 2, longest + 1, (count,), generator=generator).tolist()
    return [(row, prefix - 1, prefix + after) for row, prefix in zip(rows, prefixes, strict=True)]
