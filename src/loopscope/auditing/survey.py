"""The survey of an audit: which tokens are searched for blind directions, around what, and what may be doubted of it.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from loopscope.auditing import verdict as verdicts
from loopscope.auditing.derivatives import check_derivatives
from loopscope.auditing.free_range import FreeRange, Objections
from loopscope.auditing.search import Search, audited_loops, carried_on, channel_sizes
from loopscope.auditing.visibility import Field
from loopscope.auditing.window import Carried, Windows, keeps_its_cache, windows
from loopscope.errors import ProtocolError
from loopscope.objectives.terms import Term
from loopscope.options import AuditOptions
from loopscope.protocol import LoopedModel, LoopState
from loopscope.results.audit import Variable

Progress = Callable[[str, float], None]

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


def search_tokens(
    run: Survey, states: list[LoopState], objections: Objections, ranges: dict[str, FreeRange], causal: bool
) -> tuple[verdicts.Found, list[Variable]]:
    """Sample tokens, examine each, and sum up."""
    carried = Carried.of(states[: run.model.num_loops + 1], partial(_written, run, states), run.fields)
    run.notes.extend(carried.skipped)
    places = _places(run.ids_BT, run.options)
    width = states[0].h_BTD.shape[-1] + sum(part.width for part in carried.searched)
    search = Search(
        run.model,
        objections.mean_weights(),
        [(term, objections.reference(term)) for term in run.terms],
        channels=channel_sizes(states, carried, audited_loops(run.supervised)),
        matrix_free=run.options.matrix_free(width),
        seed=run.options.seed,
        runnable=run.runnable,
    )
    every = carried_on(run.supervised)
    if len(search.audited) < len(every):
        loops = ", ".join(map(str, search.audited))
        run.notes.append(f"of the {len(every)} loops whose state goes on, {len(search.audited)} were searched: {loops}")
    findings: verdicts.Findings = []
    with torch.no_grad():
        one, other = (run.model.embed(run.ids_BT[:1]).h_BTD for _ in range(2))
    causal = causal and torch.equal(one, other)  # a text of another length would get other noise
    cached = causal and not search.repeats and keeps_its_cache(run.model, run.ids_BT[0, :8], search.deepest)
    row_by_row = False
    for index, (row, position, end) in enumerate(places):

        def report(share: float, index: int = index) -> None:
            run.progress("search", 0.4 + 0.6 * (index + share) / len(places))

        report(0.0)
        around = _around(run, search, run.ids_BT[row, :end], position, carried, causal, cached)
        if index == 0 and (row_by_row := around.alone.rows_depend_on_one_another()):
            run.notes.append(ROWS_DEPEND)
        if row_by_row:
            around = around.row_by_row()
        if index == 0 and (note := check_derivatives(around.alone, run.fields)) is not None:
            run.notes.append(note)
        findings.append(search.examine(around, run.fields, ranges, report))
    _doubt_unread_states(run, findings)
    _doubt_rounding(run, findings)
    _note_disputes(run, findings)
    return verdicts.judge(findings, ranges, carried.constant)


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


def _around(
    run: Survey, search: Search, ids_T: Tensor, position: int, carried: Carried, causal: bool, cached: bool
) -> Windows:
    """One token to search; where no loop comes after the audited one, the last is run again in its stead."""
    around = partial(windows, run.model, ids_T, position, search.deepest, carried, causal=causal, cached=cached)
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


def _places(ids_BT: Tensor, options: AuditOptions) -> list[tuple[int, int, int]]:
    """Tokens to search, as row, position and where the text that is run ends: some tokens after it, if there are."""
    length = ids_BT.shape[1]
    after = min(TOKENS_AFTER, length // 2)
    longest = min(options.prefix, length - after)
    count = min(options.states, ids_BT.numel())
    generator = torch.Generator().manual_seed(options.seed)
    rows = torch.randint(len(ids_BT), (count,), generator=generator).tolist()
    prefixes = torch.randint((longest + 1) // 2, longest + 1, (count,), generator=generator).tolist()
    return [(row, prefix - 1, prefix + after) for row, prefix in zip(rows, prefixes, strict=True)]
