"""What the files of the runs give to the charts: values along loops, steps, depths and factors. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loopscope.results.audit import AuditedLoop
from loopscope.results.evaluation import Depth, Split
from loopscope.results.measures import Run, alpha_changes, shares_by_loop
from loopscope.results.run import LoggedStep
from loopscope.show.chart import Series, Style
from loopscope.show.grouping import Group
from loopscope.show.numbers import plain
from loopscope.show.table import Table, columns

Points = list[tuple[float, float | None]]
OfDepth = Callable[[Depth], float | None]
MOST_COLUMNS = 32
"""Columns of the text behind a chart."""


@dataclass(frozen=True)
class Line:
    """A run's values along an axis."""

    group: Group
    run: Run
    xs: Sequence[float]
    ys: Sequence[float | None]
    part: str = ""
    """Which of several lines of a run it is."""

    @property
    def label(self) -> str:
        """Condition, run and part."""
        return " · ".join(text for text in (self.group.label, self.run.name, self.part) if text)


def drawn(lines: Sequence[Line], mode: Literal["both", "lines", "marks"] = "both") -> list[Series]:
    """Lines as they are drawn; open marks first, which are larger where others may lie on them."""
    ordered = sorted(lines, key=lambda line: not line.group.is_open)
    return [
        Series(
            label=each.label,
            xs=each.xs,
            ys=each.ys,
            style=replace(style_of(each.group), size=8.0 if mode == "marks" else 5.0),
            mode=mode,
            group=str(each.group.index),
        )
        for each in ordered
    ]


def style_of(group: Group) -> Style:
    """How the runs of a condition are drawn."""
    return Style(colour=f"c{group.colour}", marker=group.symbol, dash=group.dash, is_open=group.is_open)


def lines_table(lines: Sequence[Line], corner: str) -> Table:
    """A row per run, a column per place; of many places an even choice that has the last."""
    places = sorted({x for line in lines for x in line.xs})
    if len(places) > MOST_COLUMNS:
        longest = max(lines, key=lambda line: len(line.xs)).xs
        places = sorted({longest[round(n * (len(longest) - 1) / 11)] for n in range(12)})
    rows = [[line.label, *map(dict(zip(line.xs, line.ys, strict=True)).get, places)] for line in lines]
    return Table("", [corner, *columns(plain, *map(plain, places))], rows)


def each_run(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    """All runs with their groups, in the order of the page."""
    return [(group, run) for group in groups for run in group.runs]


def lines_of(groups: Sequence[Group], points_of: Callable[[Run], Points], part: str = "") -> list[Line]:
    """A line for every run that gives at least one value."""
    lines = []
    for group, run in each_run(groups):
        points = points_of(run)
        if any(value is not None for _, value in points):
            lines.append(Line(group, run, [x for x, _ in points], [y for _, y in points], part))
    return lines


def at_depths(of: OfDepth) -> Callable[[Run], Points]:
    """A quantity after each loop, on validation text."""
    return lambda run: [(depth.k, of(depth)) for depth in run.depths]


def while_training(of: Callable[[LoggedStep], float | None]) -> Callable[[Run], Points]:
    """A quantity that training logs, by step."""
    return lambda run: [(row.step, of(row)) for row in run.train]


def audited(of: Callable[[AuditedLoop], float | None]) -> Callable[[Run], Points]:
    """A quantity that the audit gives per loop."""
    return lambda run: [(loop.k, value) for loop in run.loops if (value := of(loop)) is not None]


def shares(run: Run) -> Points:
    """Radial gradient share per loop."""
    return list(shares_by_loop(run).items())


def alphas(run: Run) -> Points:
    """α and the change of CE at the trained depth."""
    return list(alpha_changes(run).items())


def common(groups: Sequence[Group], of: Callable[[Run], int]) -> int | None:
    """What all runs agree on, or None."""
    found = {of(run) for _, run in each_run(groups)}
    return found.pop() if len(found) == 1 else None


def quality(groups: Sequence[Group]) -> tuple[str, OfDepth, str]:
    """How to compare the runs' quality, and why: perplexity under one tokenizer, else bits per byte."""
    runs = [run for _, run in each_run(groups) if run.depths]
    names, hashes = {run.tokenizer for run in runs} - {""}, {run.tokenizer_sha256 for run in runs} - {""}
    if len(names) <= 1 and len(hashes) <= 1:
        note = f"Perplexity per token ({next(iter(names), '')}): comparable only under the same tokenizer."
        return "perplexity", lambda depth: depth.perplexity, note if names else ""
    if any(depth.bits_per_byte is not None for run in runs for depth in run.depths):
        note = "The runs use different tokenizers, so quality is shown in bits per byte."
        return "bits per byte", lambda depth: depth.bits_per_byte, note
    note = "The runs use different tokenizers: their perplexities cannot be compared with one another."
    return "perplexity", lambda depth: depth.perplexity, note


def splits_table(groups: Sequence[Group], name: str, of: OfDepth) -> Table:
    """Every split of every run at every depth, also in bits per byte."""
    deepest = max((depth.k for _, run in each_run(groups) for depth in run.depths), default=0)
    ks = range(1, min(deepest, 32) + 1)
    measures: dict[str, OfDepth] = {name: of, "bits per byte": lambda depth: depth.bits_per_byte}
    rows = []
    for group, run in each_run(groups):
        for split, scores in (run.splits or {run.depths_from: Split(depths=run.depths)}).items():
            at = {depth.k: depth for depth in scores.depths}
            for measure, take in measures.items():
                values = [take(at[k]) if k in at else None for k in ks]
                if any(value is not None for value in values):
                    label = " · ".join(part for part in (group.label, run.name, split, measure) if part)
                    rows.append([label, *values])
    return Table("", ["run \\ loops", *columns(plain, *map(str, ks))], rows)
