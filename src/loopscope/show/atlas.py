"""The page of an atlas: a matrix of designs × properties, a chart, and the evidence behind every cell.

In the frame of every page, with the same tables and charts as the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from loopscope.files import write_atomically
from loopscope.results.atlas import FAR, AtlasRecord, Audited, Described, Entry, Setting
from loopscope.results.thresholds import FURTHEST, TENFOLD
from loopscope.show import sentences
from loopscope.show.chart import Axis, Chart, Level, Series, Style
from loopscope.show.numbers import fold, plain, signed, span, sparkline
from loopscope.show.page import drawings, framed
from loopscope.show.table import Column, Table, columns
from loopscope.studies.atlas import collect
from loopscope.studies.atlas_properties import (
    PROPERTIES,
    Cell,
    Property,
    atlas_tables,
    cell_of,
    free_range_and_growth,
)

PAGE = "atlas.html"
BEYOND = 100.0
"""Growths above are drawn here: a runaway shall not flatten the rest."""
FREE_TICKS = {1.0: "1", 10.0: "10", FURTHEST: "no limit"}
GROWTH_TICKS = {1.0: "1", 10.0: "10", BEYOND: "≥ 100"}
FREE = Axis("free range", "log", shows=tuple(FREE_TICKS), ticks=FREE_TICKS)
GROWTH = Axis(f"growth of ‖h‖, {FAR} loops", "log", shows=(0.5, BEYOND), ticks=GROWTH_TICKS)


@dataclass(frozen=True)
class NormLine:
    """A row of the matrix."""

    design: Described
    setting: Setting
    cells: list[tuple[Property, Cell]]
    anchor: str
    is_blind: bool | None
    """Whether anything is blind after training; None where that is not known."""


@dataclass(frozen=True)
class Evidence:
    """What stands behind the cells of one design in one setting, ready to print."""

    entry: Entry
    headline: str
    audits: list[tuple[str, str, Audited | None, Table]]
    """Part, title, audit, and its variables."""
    norms: Table
    cosine: Table
    depths: Table
    answers: Table
    mends: Table
    cache: Table
    facts: list[tuple[str, str]]


def publish(out: Path) -> AtlasRecord:
    """Read the rows; write atlas.json, tables, figure and page."""
    record = collect(out)
    for table in atlas_tables(record):
        table.write(out / "tables")
    for setting in record.settings():
        charts = free_and_growing(record, setting)
        drawings().save(charts, out / "figures" / charts[0].name)
    write_atomically(out / PAGE, render(record))
    return record


def render(record: AtlasRecord) -> str:
    """The page. The same record gives the same bytes."""
    settings = record.settings()
    return framed(
        "atlas",
        f"{len(record.designs)} looped designs",
        (
            *(("main", "Matrix"), ("columns", "What the columns ask"), ("ranges", "Free range and growth")),
            *(("designs", "Every design"), ("made", "How it was made")),
        ),
        styles=("page.css", "atlas.css"),
        record=record,
        properties=PROPERTIES,
        settings=settings,
        shown=next((each for each in settings if each.key == "modern"), settings[0] if settings else None),
        matrix=matrix(record),
        ranges=[(setting, free_and_growing(record, setting)) for setting in settings],
        headlines=headlines(record),
        evidence={design.name: evidence_of(record, design.name) for design in record.designs},
        far=FAR,
    )


def matrix(record: AtlasRecord) -> list[NormLine]:
    """Every design in every setting that it was asked for."""
    made = []
    for setting in record.settings():
        for design in record.designs:
            entry = record.entry(design.name, setting)
            if entry is None and setting.text:
                continue  # pointer chasing is asked of a few
            cells = [(each, cell_of(entry, each)) for each in PROPERTIES]
            known = entry is not None and entry.trained is not None and entry.is_learnt is not False
            blind = bool(entry.trained.blind) if known and entry and entry.trained else None
            anchor = entry.anchor if entry else f"design-{design.name}"
            made.append(NormLine(design, setting, cells, anchor, blind))
    return made


def headlines(record: AtlasRecord) -> list[str]:
    """What the matrix says, in a sentence for each setting."""
    found = []
    for setting in record.settings():
        lines_ = [line for line in matrix(record) if line.setting == setting]
        known = [line for line in lines_ if line.is_blind is not None]
        blind = [line.design.title for line in known if line.is_blind]
        says = f"{setting.title}: {len(blind)} of {len(known)} trained designs carry something that no loss sees"
        says += f" ({_listed(blind)})." if blind else "."
        entries = {line.design.title: record.entry(line.design.name, setting) for line in lines_}
        unlearnt = [title for title, entry in entries.items() if entry is not None and entry.is_learnt is False]
        failed = [title for title, entry in entries.items() if entry is not None and entry.error]
        says += f" Not learnt: {_listed(unlearnt)}." if unlearnt else ""
        says += f" Failed: {_listed(failed)}." if failed else ""
        found.append(says[0].upper() + says[1:])
    return found


def _listed(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def free_and_growing(record: AtlasRecord, setting: Setting) -> list[Chart]:
    """How free the freest variable of every trained design is, and beside it how far its norm grows, where known.

    The freest stand on top, and of those the ones that grow most: what is far to the right in both runs away unseen.
    """
    entries = [entry for design in record.designs if (entry := record.entry(design.name, setting)) is not None]
    placed = sorted(
        (place, n) for n, entry in enumerate(entries) if (place := free_range_and_growth(entry)) is not None
    )
    titles = {design.name: design.title for design in record.designs}
    names = Axis("", ticks={float(y): titles[entries[n].design] for y, (_, n) in enumerate(placed)})
    sides: tuple[list[Series], list[Series]] = ([], [])
    for y, (place, n) in enumerate(placed):
        entry = entries[n]
        blind = bool(entry.trained and entry.trained.blind)
        style = Style(colour="c0" if blind else "c1", is_open=not blind, size=6.0)
        for side, value in zip(sides, place, strict=True):
            at = min(value, BEYOND) if side is sides[1] else value
            label = f"{titles[entry.design]}: free range {fold(place[0])}, growth {plain(place[1])}"
            mark = Series(label=label, xs=[at], ys=[float(y)], style=style, mode="marks", group=entry.anchor)
            side.append(replace(mark, link=entry.anchor))
    key = f"free-range-and-growth-{setting.key}"
    title = f"{setting.title[0].upper()}{setting.title[1:]}"
    free = Chart(name=key, title=title, x=FREE, y=names, series=sides[0], levels=[Level(TENFOLD, of="x")])
    beside = replace(names, ticks=dict.fromkeys(names.ticks or (), ""))
    return [free, Chart(name=key, title="", x=GROWTH, y=beside, series=sides[1], levels=[Level(1.0, of="x")])]


# --- evidence --------------------------------------------------------------------------------------------------------


def evidence_of(record: AtlasRecord, design: str) -> list[Evidence]:
    """Of every setting of a design."""
    entries = (record.entry(design, setting) for setting in record.settings())
    return [_evidence(entry) for entry in entries if entry is not None]


def _evidence(entry: Entry) -> Evidence:
    probe = entry.probe
    norms = {
        name: audited.norms
        for name, audited in (("trained", entry.trained), ("untrained", entry.untrained))
        if audited is not None
    }
    return Evidence(
        entry=entry,
        headline=_headline(entry),
        audits=[
            (part, title, audited, variables_table(audited, title))
            for part, title, audited in (
                ("untrained", "The state before training", entry.untrained),
                ("trained", "The state after training", entry.trained),
            )
        ],
        norms=_over_loops("norm of the state", norms),
        cosine=_over_loops(
            "cosine with the last loop", {"median cosine": probe.motion.median_cosine} if probe and probe.motion else {}
        ),
        depths=_depths_table(entry),
        answers=_answers_table(entry),
        mends=_mends_table(entry),
        cache=_cache_table(entry),
        facts=_facts(entry),
    )


def _over_loops(what: str, found: Mapping[str, Sequence[float | None]]) -> Table:
    """Values after loops 1, 2, … as bars, with the first and the last; nothing of what was measured less than twice."""
    rows = []
    for name, values in found.items():
        known = [value for value in values if value is not None and math.isfinite(value)]
        if len(known) > 1:
            bars = sparkline([math.log(value) for value in known] if min(known) > 0 else known)
            rows.append([name, known[0], bars, known[-1]])
    return Table(what, ["", Column("loop 1", plain), "over loops", Column("the last", plain)], rows)


def _headline(entry: Entry) -> str:
    if entry.is_learnt is False:
        return f"not learnt: {entry.accuracy or 0:.0%} of answers right"
    if entry.trained is not None:
        return {"blind-spot": "blind spot"}.get(entry.trained.verdict, entry.trained.verdict)
    return f"{entry.state} while {entry.stage}" if entry.stage else entry.state or "nothing measured"


def variables_table(audited: Audited | None, title: str) -> Table:
    """Every variable with its verdict, free range, what training does to it, and the evidence."""
    rows = []
    for one in audited.variables if audited else ():
        moved = "does not drive it" if one.driven is False else sentences.driven(one) or None
        rows.append([one.name, one.verdict, one.free_range, moved, sentences.evidence(one)])
    free = Column("free range", fold)
    return Table(f"{title}: its variables", ["variable", "verdict", free, "training", "evidence"], rows)


def _depths_table(entry: Entry) -> Table:
    depths = entry.scores.depths if entry.scores else []
    rows = [
        [f"{depth.k}{' (trained)' if depth.k == entry.num_loops else ''}", depth.ce, depth.norm] for depth in depths
    ]
    return Table("Validation scores after each loop", ["loops", *columns(plain, "CE, nats per token", "‖h‖")], rows)


def _answers_table(entry: Entry) -> Table:
    answers = entry.scores.answers if entry.scores else []
    loops = sorted({k for each in answers for k in each.accuracy})
    rows = [[f"{each.steps} steps", *map(each.accuracy.get, loops)] for each in answers]
    header = [Column("right answers"), *columns(".0%", *(f"{k} loops" for k in loops))]
    return Table("Right answers by the steps they take and the loops run", header, rows)


def _mends_table(entry: Entry) -> Table:
    gap = entry.probe.exit_gap if entry.probe else None
    rows = []
    for mend in gap.mends if gap else ():
        share = None if mend.share is None else f"{mend.share:.0%} {span(mend.low, mend.high, '.0%')}"
        rows.append([mend.name, share])
    return Table("What a better reading would mend", ["map", "of the gap that it mends"], rows)


def _cache_table(entry: Entry) -> Table:
    table = entry.probe.cache if entry.probe else None
    header = [Column("policy"), Column("bytes", ".0%"), Column("ΔCE, nats", partial(signed, decimals=4))]
    rows = [
        [each.name, each.share, each.delta_ce, each.standard_error, each.verdict]
        for each in (table.policies if table else ())
    ]
    return Table("Cache policies on decoded text", [*header, Column("standard error", ".4f"), "verdict"], rows)


def _facts(entry: Entry) -> list[tuple[str, str]]:
    cost = entry.probe.cost if entry.probe else None
    found: list[tuple[str, float | None, str]] = [
        ("operations per token", cost.flops_per_token if cost else None, " FLOP"),
        ("weights", cost.parameters if cost else None, ""),
        ("exact cache per token", cost.cache_bytes_per_token if cost else None, " bytes"),
        ("loops, training steps", None, ""),
        ("validation CE of a unigram model", entry.unigram_ce, " nats"),
        ("time of the row", entry.seconds, " s"),
    ]
    told = {name: f"{plain(value)}{unit}" for name, value, unit in found if value is not None}
    if entry.num_loops and entry.steps:
        told["loops, training steps"] = f"{entry.num_loops}, {entry.steps:,}"
    if entry.growth_in_training is not None:
        told["‖h‖ after the last loop, trained over untrained"] = plain(entry.growth_in_training)
    return list(told.items())
