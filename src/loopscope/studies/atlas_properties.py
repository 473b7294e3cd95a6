"""The properties of an atlas: what each column asks, and the cell that answers it for a design. No torch here.

Tables and page show the same cells. A cell that is empty says why: not measured, not learnt, failed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from loopscope.results.atlas import FAR, AtlasRecord, Audited, Entry, Setting
from loopscope.results.audit import Variable
from loopscope.results.thresholds import TENFOLD
from loopscope.show.numbers import fold, padded
from loopscope.show.table import Table

Tone = Literal["good", "bad", "open", ""]
NOT_MEASURED = "–"
STEADY = 2.0
"""A growth of the norm up to this factor is called steady, as the monitor's alarm begins beyond it."""

TOLD = {"untrained": "untrained", "trained": "trained", "motion": "motion", "exit": "exit_gap", "cache": "cache"}
"""Where a row says why a part of the evidence is missing."""


@dataclass(frozen=True)
class Cell:
    """What a design shows of a property."""

    text: str
    value: float | None = None
    """By which it is sorted; None comes last."""
    tone: Tone = ""


@dataclass(frozen=True)
class Property:
    """A column: its name, its question for somebody who has not read the papers, where its evidence stands."""

    key: str
    title: str
    question: str
    part: str
    """The part of a design's evidence that the cell leads to."""
    cell: Callable[[Entry], Cell]


def cell_of(entry: Entry | None, of: Property) -> Cell:
    """The cell, or why there is none."""
    if entry is None:
        return Cell("not run", tone="open")
    made = of.cell(entry)
    if made.text != NOT_MEASURED and (entry.is_learnt is not False or of.key in ("untrained", "score")):
        return made
    if entry.is_learnt is False:
        return Cell("not learnt", tone="open")
    if entry.probe is not None and of.part in TOLD and TOLD[of.part] in entry.probe.problems:
        return Cell("not offered" if of.part == "cache" else "failed", tone="open" if of.part == "cache" else "bad")
    if entry.state in ("finished", ""):
        return made
    return Cell("failed" if entry.state == "failed" else entry.state, tone="bad" if entry.error else "open")


# --- the cells -------------------------------------------------------------------------------------------------------


def _variables(audited: Audited | None) -> Cell:
    """Every variable with its verdict and free range, blind ones first."""
    if audited is None or not audited.variables:
        return Cell(NOT_MEASURED)
    order = sorted(audited.variables, key=lambda one: (one.verdict != "blind", one.name != "scale"))
    told = [_variable(one) for one in order if one.verdict not in ("removed", "damped", "inert")]
    for verdict in ("removed", "damped", "inert"):
        if names := [one.name for one in order if one.verdict == verdict]:
            told.append(f"{', '.join(names)} {verdict}")
    tone: Tone = "bad" if audited.blind else "good" if audited.verdict == "controlled" else "open"
    return Cell("; ".join(told), audited.freest, tone)


def _variable(one: Variable) -> str:
    free = "" if one.free_range is None else f" {fold(one.free_range)}"
    return f"{one.name} {one.verdict}{free}"


def _growth(entry: Entry) -> Cell:
    """The factor, and from where to where: a state that began tiny grows manifold and may still be small."""
    factor = entry.growth_in_training
    if factor is None or entry.untrained is None or entry.trained is None:
        return Cell(NOT_MEASURED)
    before, after = (audited.norm(entry.num_loops) for audited in (entry.untrained, entry.trained))
    return Cell(f"×{padded(factor, 3)} ({padded(before, 3)} → {padded(after, 3)})", factor, _growth_tone(entry, factor))


def _far(entry: Entry) -> Cell:
    """The factor, or the last loop that leaves a finite state."""
    factor = entry.growth_beyond
    if factor is not None:
        return Cell(f"×{padded(factor, 3)}", factor, _growth_tone(entry, factor))
    last = _last_finite(entry)
    return Cell(NOT_MEASURED) if last is None else Cell(f"finite to loop {last}", sys.float_info.max, "bad")


def _last_finite(entry: Entry) -> int | None:
    norms = entry.trained.norms if entry.trained else []
    return max((k for k, norm in enumerate(norms, start=1) if norm is not None), default=None)


def _growth_tone(entry: Entry, factor: float) -> Tone:
    """Tenfold growth is bad where something is blind: elsewhere a loss saw it and let it be."""
    if factor < STEADY:
        return "good"
    return "bad" if factor >= TENFOLD and entry.trained and entry.trained.blind else "open"


def _motion(entry: Entry) -> Cell:
    moves = entry.probe.motion if entry.probe else None
    if moves is None or not moves.shares:
        return Cell(NOT_MEASURED)
    kinds = sorted(((share, kind) for kind, share in moves.shares.items() if share >= 0.005), reverse=True)
    tone: Tone = "good" if moves.shares.get("fixed", 0.0) >= 0.5 else ""
    return Cell(", ".join(f"{share:.0%} {kind}" for share, kind in kinds[:2]), moves.shares.get("fixed"), tone)


def _exit(entry: Entry) -> Cell:
    gap = entry.probe.exit_gap if entry.probe else None
    if gap is None or gap.gap is None:
        return Cell(NOT_MEASURED)
    if gap.verdict == "no gap":
        return Cell("no gap", gap.gap, "good")
    verdict = {"both": "partly badly read"}.get(gap.verdict, gap.verdict)
    return Cell(f"{gap.gap:+.2f} nats, {verdict}".replace("-", "−"), gap.gap)


def _beyond(entry: Entry) -> Cell:
    found = entry.deeper
    if found is None:
        return Cell(NOT_MEASURED)
    holds = found.deepest if found.worse_from is None else found.worse_from - 1
    if found.broken_from is not None:
        return Cell(f"broken from {found.broken_from}", holds, "bad")
    if found.worse_from is not None:
        return Cell(f"worse from {found.worse_from}", holds, "open")
    word = "better" if found.better_until is not None else "flat"
    return Cell(f"{word} to {found.deepest}", holds, "good")


def _cache(entry: Entry) -> Cell:
    table = entry.probe.cache if entry.probe else None
    if table is None:
        return Cell(NOT_MEASURED)
    cheapest = table.cheapest
    if cheapest is None:
        return Cell("exact only", 1.0)
    return Cell(f"{cheapest.name}, {cheapest.share or 0:.0%}", cheapest.share, "good")


def _cost(entry: Entry) -> Cell:
    cost = entry.probe.cost if entry.probe else None
    if cost is None or cost.flops_per_token is None:
        return Cell(NOT_MEASURED)
    weights = "" if cost.parameters is None else f", {cost.parameters / 1e3:,.0f} k weights"
    return Cell(f"{cost.flops_per_token / 1e6:.3g} MFLOP{weights}", cost.flops_per_token)


def _score(entry: Entry) -> Cell:
    if entry.accuracy is not None:
        return Cell(f"{entry.accuracy:.0%} right", -entry.accuracy, "good" if entry.is_learnt else "bad")
    if entry.ce is None:
        return Cell(NOT_MEASURED)
    better = entry.unigram_ce is None or entry.ce < entry.unigram_ce
    return Cell(f"{entry.ce:.3f}", entry.ce, "" if better else "bad")


PROPERTIES = (
    Property(
        "untrained",
        "before training",
        "Which variables of the state does no loss see, in a fresh model? Behind each stands its free range: how far "
        "it can grow before it costs 1 % of perplexity.",
        "untrained",
        lambda entry: _variables(entry.untrained),
    ),
    Property(
        "trained",
        "after training",
        "The same after a short training.",
        "trained",
        lambda entry: _variables(entry.trained),
    ),
    Property(
        "growth",
        "growth in training",
        "How many times longer the state is after the last loop than before training, from and to which norm. ✗ is "
        "tenfold or more with something blind: no loss saw it grow.",
        "norms",
        _growth,
    ),
    Property(
        "far",
        f"growth to {FAR} loops",
        f"How many times longer it gets when the loop goes on from the trained depth to {FAR} loops; or the last "
        "loop that leaves a finite state.",
        "norms",
        _far,
    ),
    Property(
        "motion",
        "tokens",
        "How states of tokens move over 64 loops: to a fixed point, round an orbit, along a slide, or none of these.",
        "motion",
        _motion,
    ),
    Property(
        "exit",
        "first exit",
        "What reading out after the first loop costs, and whether that is badly read (a better readout would mend it) "
        "or not yet computed.",
        "exit",
        _exit,
    ),
    Property(
        "beyond",
        "more loops",
        "What happens to the loss when more loops are run than were trained.",
        "depths",
        _beyond,
    ),
    Property(
        "cache",
        "safe cache",
        "The smallest cache of keys and values that costs less than 1 % of perplexity, and its share of the exact one.",
        "cache",
        _cache,
    ),
    Property(
        "cost",
        "cost per token",
        "Floating-point operations of a token through all loops, and weights of the model.",
        "cost",
        _cost,
    ),
    Property(
        "score",
        "score",
        "Validation cross-entropy in nats per token at the trained depth; of pointer chasing, right answers.",
        "depths",
        _score,
    ),
)


# --- tables ----------------------------------------------------------------------------------------------------------


def atlas_tables(record: AtlasRecord) -> list[Table]:
    """One for every setting: designs × properties."""
    return [atlas_table(record, setting) for setting in record.settings()]


def atlas_table(record: AtlasRecord, setting: Setting) -> Table:
    """Designs × properties in one setting."""
    rows = []
    for design in record.designs:
        entry = record.entry(design.name, setting)
        if entry is not None:
            rows.append([design.title, *(cell_of(entry, each).text for each in PROPERTIES)])
    asked = record.asked
    steps = asked.hops_steps if setting.text else asked.steps
    note = (
        f"{steps} steps, seed {asked.seed}, one row each. – is not measured; every number's evidence is in atlas.json."
    )
    header = ["design", *(each.title for each in PROPERTIES)]
    return Table(f"The atlas: {setting.title}", header, rows, note, name=f"atlas-{setting.key}")


def free_range_and_growth(entry: Entry) -> tuple[float, float] | None:
    """A design's place in the chart: how far its freest variable may run, and how far its norm grows to 30 loops.

    A state that does not stay finite so far has grown without limit, inf.
    """
    free, growth = entry.trained.freest if entry.trained else None, entry.growth_beyond
    if growth is None and _last_finite(entry) is not None:
        growth = math.inf
    if free is None or entry.is_learnt is False or growth is None or not growth > 0:
        return None
    return max(free, 1.0), growth
