"""What a chart is made of: lines of runs, axes, marks, and the table that says the same in text.

A chart is plain data for plotly.js. Colours are not in it: the page's script takes them from its style sheet, light or
dark. Texts of files are escaped here, because plotly reads a few tags in its labels.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loopscope.readings import Run
from loopscope.show.grouping import Group
from loopscope.show.numbers import plain
from loopscope.show.table import Table, columns

MOST_POINTS = 300
"""Points of a line; a longer one keeps first, last, and the extremes between."""
MOST_COLUMNS = 32
"""Columns of the text behind a chart."""
SIGNIFICANT = 6
"""Digits of a number on the page."""
POINT_DECADES = 0.02
"""A logarithmic axis with less on it than this is shown a factor of two to both sides."""
ROUND = ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7), (1, 1.5, 2, 3, 4, 5, 7))
PLAIN = (1e-3, 1e6)
"""Ticks between these are written out; beyond, as powers of ten."""
MARGIN = 0.04
"""Of a frame that is not plotly's own."""


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

    @property
    def as_text(self) -> Table:
        """The table with its caption."""
        return replace(self.table, title=f"{self.title}: {self.layout['yaxis']['title']['text']}")


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
    shows: tuple[float, ...] = ()
    """Values that are always in view, so that what is small looks small."""
    whole: bool = False
    """Loops: whole numbers from 1 on."""

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
        known = [value for value in (*values, *self.shows) if value is not None]
        places = [place for value in known if (place := self.place(value)) is not None] or [1.0]
        low, high = min(places), max(places)
        if self.kind == "signed-log":
            ticks = signed_ticks(known, self.width)
            named = {"tickvals": [self.place(tick) for tick in ticks], "ticktext": [plain(tick) for tick in ticks]}
            return axis | named | {"range": _padded(low, high)}
        if self.kind == "log":
            if math.log10(high / low) < POINT_DECADES:
                low, high = low / 2, high * 2
            framed = (
                {"range": _padded(math.log10(low), math.log10(high))} if self.shows or len(set(places)) == 1 else {}
            )
            return axis | {"type": "log", **log_ticks(low, high), **framed}
        if self.whole:
            step = 1 if high <= 12 else 5 * math.ceil(high / 60)
            start, end = _padded(min(1.0, low), max(1.0, high))
            return axis | {"tick0": 0, "dtick": step, "range": [max(start, 0.5), end]}
        return axis


def line_traces(
    lines: Sequence[Line], x: Axis, y: Axis, *, mode: str = "lines+markers", nested: bool = False
) -> list[dict[str, Any]]:
    """One trace per run; hovering tells condition, run and both values.

    Nested marks differ in size from group to group, open ones being the largest, so that marks which coincide are seen
    around one another.
    """
    traces = []
    groups = sorted({(not line.group.is_open, line.group.index) for line in lines})
    for line in lines:
        points = thin([(a, b) for a, b in zip(line.xs, line.ys, strict=True) if y.place(b) is not None])
        if not points:
            continue
        rank = 1 - groups.index((not line.group.is_open, line.group.index)) / max(1, len(groups) - 1)
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
        rows.append([line.label, *map(at.get, places)])
    return Table("", [corner, *columns(plain, *map(plain, places))], rows)


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
    """Ticks of a logarithmic axis: the fewest round numbers that are three; powers of ten where they get too long."""
    decades = math.log10(high / low)
    if decades > 1 and (low < PLAIN[0] or high > PLAIN[1] or decades > 6):
        return {"dtick": 1 if decades <= 8 else 2, "exponentformat": "power"}
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ROUND:
        ticks = [tick for power in powers for digit in digits if low <= (tick := rounded(digit * 10.0**power)) <= high]
        if len(ticks) >= 3:
            return {"tickvals": ticks, "ticktext": [plain(tick) for tick in ticks]}
    return {"nticks": 5}


def _padded(low: float, high: float) -> list[float]:
    margin = MARGIN * (high - low) or 0.5
    return [rounded(low - margin), rounded(high + margin)]


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


def escaped(text: str) -> str:
    """A text of a file as plotly shows it literally; plotly reads tags and turns entities back."""
    return html.escape(text, quote=False)


def level(axis: Axis, value: float, text: str, *, along: str = "x", inside: bool = False) -> dict[str, Any]:
    """A dotted line at a value of the y axis (along x) or of the x axis, with its meaning beside it, for `layout`.

    The label stands outside the frame, at the right or top end, where no data is; inside, under the left end.
    """
    across = "y" if along == "x" else "x"
    place = axis.place(value)
    assert place is not None
    log_place = math.log10(place) if axis.kind == "log" else place  # plotly's labels count decades, its lines do not
    ends = {f"{along}ref": "paper", f"{along}0": 0, f"{along}1": 1, f"{across}0": place, f"{across}1": place}
    spot = {f"{along}ref": "paper", along: 0 if inside else 1, f"{across}ref": across, across: log_place, "text": text}
    anchors = ("left", "top" if inside else "middle") if along == "x" else ("center", "bottom")
    label = {**spot, "xanchor": anchors[0], "yanchor": anchors[1], "showarrow": False}
    return {"shapes": [{"type": "line", **ends}], "annotations": [label]}


def layout(x: Axis, y: Axis, lines: Sequence[Line], *levels: dict[str, Any]) -> dict[str, Any]:
    """Both axes fitted to the lines, and levels drawn across."""
    places = [place for line in lines for place in line.xs]
    return {
        "xaxis": x.layout(places),
        "yaxis": y.layout(values_of(lines)),
        "shapes": [shape for each in levels for shape in each["shapes"]],
        "annotations": [label for each in levels for label in each["annotations"]],
    }
