"""What a chart is made of: lines of runs, axes, marks, and the table that says the same in text.

A chart is plain data for plotly.js. Colours are not in it: the page's script takes them from its style sheet, light or
dark. Texts of files are escaped here, because plotly reads a few tags in its labels.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loopscope.report.grouping import ABSENT, Group
from loopscope.report.records import Run

MOST_POINTS = 300
"""Points of a line; a longer one keeps first, last, and the extremes between."""
MOST_COLUMNS = 32
"""Columns of the text behind a chart."""
SIGNIFICANT = 6
"""Digits of a number on the page."""


@dataclass(frozen=True)
class Table:
    """Text in rows; the first cell of a row is its name."""

    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, what to look at in it, and the same as text; without traces it says what is missing."""

    name: str
    title: str
    look: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    table: Table
    missing: str
    note: str = ""

    @property
    def groups(self) -> list[int]:
        """Indices of the groups that are drawn."""
        return sorted({trace["group"] for trace in self.traces})


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


@dataclass(frozen=True)
class Axis:
    """One axis: its title and how values become places on it."""

    title: str
    kind: str = "linear"
    """linear, log, or signed-log: linear around 0 and logarithmic away from it on both sides."""
    width: float = field(default=1.0)
    """signed-log: values below this lie on the linear part."""
    floor: float | None = None
    """log: smaller values, zero included, are drawn here."""
    whole: bool = False
    """Ticks at whole numbers only."""

    def place(self, value: float | None) -> float | None:
        """Where a value is drawn; None where it cannot be."""
        if value is None:
            return None
        if self.kind == "signed-log":
            return rounded(math.asinh(value / self.width))
        if self.kind == "log":
            value = value if self.floor is None else max(value, self.floor)
            return rounded(value) if value > 0 else None
        return rounded(value)

    def layout(self, values: Sequence[float | None]) -> dict[str, Any]:
        """The axis for plotly, with ticks that fit the values."""
        axis: dict[str, Any] = {"title": {"text": self.title}}
        if self.kind == "signed-log":
            ticks = signed_ticks([value for value in values if value is not None], self.width)
            return axis | {
                "tickvals": [self.place(tick) for tick in ticks],
                "ticktext": [plain(tick) for tick in ticks],
            }
        if self.kind == "log":
            places = [place for value in values if (place := self.place(value)) is not None]
            return axis | {"type": "log", **log_ticks(min(places, default=1.0), max(places, default=1.0))}
        reach = max((value for value in values if value is not None), default=0.0)
        return axis | ({"tick0": 0, "dtick": 1 if reach <= 12 else 5 * math.ceil(reach / 60)} if self.whole else {})


def line_traces(
    lines: Sequence[Line], x: Axis, y: Axis, *, mode: str = "lines+markers", nested: bool = False
) -> list[dict[str, Any]]:
    """One trace per run; hovering tells condition, run and both values.

    Nested marks get smaller from group to group, so that marks which coincide are seen around one another.
    """
    traces = []
    groups = sorted({line.group.index for line in lines})
    for line in lines:
        points = thin([(a, b) for a, b in zip(line.xs, line.ys, strict=True) if y.place(b) is not None])
        if not points:
            continue
        rank = 1 - groups.index(line.group.index) / max(1, len(groups) - 1)
        traces.append(
            {
                "group": line.group.index,
                "type": "scatter",
                "mode": mode,
                "x": [x.place(a) for a, _ in points],
                "y": [y.place(b) for _, b in points],
                "customdata": [[plain(a), plain(b)] for a, b in points],
                "meta": escaped(line.label),
                "hovertemplate": f"<b>%{{meta}}</b><br>{x.title}: %{{customdata[0]}}<br>{y.title}: "
                "<b>%{customdata[1]}</b><extra></extra>",
                "line": {"dash": line.group.dash, "width": 2},
                "marker": {
                    "symbol": line.group.symbol + ("-open" if line.group.is_open else ""),
                    "size": rounded(6 + 10 * rank) if nested else 8,
                },
            }
        )
    return traces


def values_of(lines: Sequence[Line]) -> list[float | None]:
    """All values of some lines."""
    return [value for line in lines for value in line.ys]


def lines_table(lines: Sequence[Line], corner: str) -> Table:
    """A row per run, a column per place; of many places an even choice that has the last."""
    places = sorted({x for line in lines for x in line.xs})
    if len(places) > MOST_COLUMNS:
        longest = max(lines, key=lambda line: len(line.xs)).xs
        places = sorted({longest[round(n * (len(longest) - 1) / 11)] for n in range(12)})
    rows = []
    for line in lines:
        at = dict(zip(line.xs, line.ys, strict=True))
        rows.append([line.label, *(plain(at.get(place)) for place in places)])
    return Table([corner, *(plain(place) for place in places)], rows)


def thin(points: list[tuple[float, float | None]], most: int = MOST_POINTS) -> list[tuple[float, float | None]]:
    """At most so many points: the first, the last, and the lowest and highest of even stretches between, in order."""
    if len(points) <= most:
        return points
    stretches = (most - 2) // 2
    kept = {0, len(points) - 1}
    for n in range(stretches):
        stretch = range(n * len(points) // stretches, (n + 1) * len(points) // stretches)
        kept |= {min(stretch, key=lambda i: points[i][1] or 0.0), max(stretch, key=lambda i: points[i][1] or 0.0)}
    return [points[i] for i in sorted(kept)]


def signed_ticks(values: Sequence[float], width: float) -> list[float]:
    """0 and powers of ten on both sides as far as the values reach, few enough to be read."""
    reaches = {sign: max((sign * value for value in values), default=0.0) for sign in (-1, 1)}
    widest = max(0, math.floor(math.log10(max(*reaches.values(), width) / width) + 0.05))
    digits = (1, 3) if widest <= 1 else (1,)
    ticks = [0.0]
    for sign, reach in reaches.items():
        powers = range(0, widest + 1, 1 if widest <= 4 else 2)
        sizes = [rounded(width * digit * 10.0**power) for power in powers for digit in digits]
        ticks += [sign * size for size in sizes if size <= reach * 1.3]
    return sorted(ticks)


def log_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks of a logarithmic axis: powers of ten over many decades, round numbers over few, else what plotly takes."""
    decades = math.log10(high / low)
    if decades > 2.2:
        return {"dtick": 1 if decades <= 8 else 2, "exponentformat": "power"}
    if decades < 0.2:
        return {"nticks": 5}
    digits = (1, 1.5, 2, 3, 5, 7) if decades < 0.8 else (1, 2, 5)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [rounded(digit * 10.0**power) for power in powers for digit in digits]
    return {"tickvals": ticks, "ticktext": [plain(tick) for tick in ticks]}


def linear_width(values: Sequence[float | None]) -> float:
    """A power of ten below most values, at most four decades below the largest."""
    sizes = sorted(abs(value) for value in values if value)
    if not sizes:
        return 1.0
    low, high = math.log10(sizes[len(sizes) // 10]), math.log10(sizes[-1])
    return float(10.0 ** max(math.floor(low), math.floor(high) - 4))


def rounded(value: float) -> float:
    """As many digits as anybody reads: the page stays small."""
    return float(f"{value:.{SIGNIFICANT}g}")


def plain(value: float | None) -> str:
    """A number for people: 39,207, 5.404, 0.0012, 3.1e-07."""
    if value is None:
        return ABSENT
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.2e}".replace("-", "−", 1) if value < 0 else f"{value:.2e}"
    text = f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
    return text.replace("-", "−")


def signed(value: float | None, digits: int = 2) -> str:
    """A difference with its sign: +0.96, −0.06."""
    return ABSENT if value is None else f"{value:+.{digits}f}".replace("-", "−")


def escaped(text: str) -> str:
    """A text of a file as plotly shows it literally; plotly reads tags and turns entities back."""
    return html.escape(text, quote=False)


def level(axis: Axis, value: float, text: str, *, along: str = "x", end: int = 1) -> dict[str, Any]:
    """A dotted line at a value of the y axis (along x) or of the x axis, with its meaning beside it, for `layout`.

    A label along x stands under its line, at its left (0) or right (1) end.
    """
    across = "y" if along == "x" else "x"
    place = axis.place(value)
    assert place is not None
    log_place = math.log10(place) if axis.kind == "log" else place  # plotly's labels count decades, its lines do not
    ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": place, f"{across}1": place}
    spot = {
        f"{along}ref": "paper",
        along: 1 if along == "y" else end,
        across: log_place,
        f"{across}ref": across,
        "text": text,
    }
    anchor = {"xanchor": "left" if along == "y" or end == 0 else "right", "yanchor": "top"}
    return {"shapes": [{"type": "line", **ends}], "annotations": [{**spot, **anchor, "showarrow": False}]}


def layout(x: Axis, y: Axis, lines: Sequence[Line], *levels: dict[str, Any]) -> dict[str, Any]:
    """Both axes fitted to the lines, and levels drawn across."""
    places = [place for line in lines for place in line.xs]
    return {
        "xaxis": x.layout(places),
        "yaxis": y.layout(values_of(lines)),
        "shapes": [shape for each in levels for shape in each["shapes"]],
        "annotations": [label for each in levels for label in each["annotations"]],
    }
