"""Small drawings as SVG: a scatter with named marks, and lines over loops. Plain text, no script, no library.

Colours are classes (c0 … c7, ink, muted, grid) that the page's style sheet defines, so that light and dark are decided
there. Every text of a file is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

from loopscope.show.numbers import plain

WIDTH = 760
LEFT, RIGHT, TOP = 64.0, 530.0, 50.0
"""The plot; the names of what lies at its right end stand beside it."""
LINE = 14.5
"""From one name to the next."""
BEYOND = 100.0
"""Growths above are drawn on the upper edge with their value beside the name: a runaway shall not flatten the rest."""
ROUND = (1, 2, 5)
LEAST_SPAN = math.log10(4)
"""Of a logarithmic line drawing, in decades: what hardly changes shall look flat."""
STANDALONE = """
text { font: 12px system-ui, sans-serif; fill: #1b1f24; } .title { font-weight: 650; } .muted { fill: #5a6370; }
.grid { stroke: #e4e7eb; } .axis { stroke: #b9c0c9; } .level { stroke: #5a6370; } .leader { stroke: #b9c0c9; }
circle { fill: #0068ad; stroke: #fff; } .mark text { paint-order: stroke; stroke: #fff; stroke-width: 3px; }
.bad circle { fill: #c8500a; } .paper { fill: #fff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed; } .muted { fill: #a3acb8; } .grid { stroke: #2c333b; } .axis { stroke: #4a535e; }
  .level { stroke: #a3acb8; } .leader { stroke: #4a535e; }
  circle { fill: #5fb4f5; stroke: #14171b; } .mark text { stroke: #14171b; }
  .bad circle { fill: #ff9550; } .paper { fill: #14171b; }
}
"""


@dataclass(frozen=True)
class Mark:
    """A point of the scatter."""

    name: str
    x: float
    y: float
    tone: str
    """bad or good: also told by its place, never by colour alone."""
    link: str


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis between two ends of a drawing."""

    title: str
    low: float
    high: float
    start: float
    end: float
    last: str = ""
    """What the highest tick is called instead of its number."""

    def place(self, value: float) -> float:
        """Where a value lies, cut at the ends."""
        share = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        return round(self.start + min(max(share, 0.0), 1.0) * (self.end - self.start), 2)

    def ticks(self) -> list[tuple[float, str]]:
        """Powers of ten, or 1, 2, 5 where there are few of them."""
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        found = [10.0**power for power in range(low, high + 1)]
        if len(found) < 3:
            powers = range(low - 1, high + 1)
            found = [digit * 10.0**power for power in powers for digit in ROUND]
            found = [value for value in found if self.low <= value * 1.0001 and value <= self.high * 1.0001]
        every = math.ceil(len(found) / 8)
        named = [(value, plain(value)) for value in found[::every]]
        return [(v, self.last if self.last and v >= self.high * 0.999 else text) for v, text in named]


def scatter(marks: Sequence[Mark], *, x_title: str, y_title: str, furthest: float) -> Markup:
    """Marks at a free range (to `furthest`, called no limit) and a growth, each a link with its name, for the page."""
    return Markup(_scatter(marks, x_title, y_title, furthest))


def standalone_scatter(marks: Sequence[Mark], *, x_title: str, y_title: str, furthest: float, title: str) -> str:
    """The same as a file of its own, with its colours and a title."""
    inside = f'<style>{STANDALONE}</style><rect class="paper" width="100%" height="100%"/>'
    inside += f'<text class="title" x="{LEFT:g}" y="16">{escape(title)}</text>'
    plain_marks = [replace(mark, link="") for mark in marks]
    drawn = _scatter(plain_marks, x_title, y_title, furthest, inside=inside)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _scatter(marks: Sequence[Mark], x_title: str, y_title: str, furthest: float, *, inside: str = "") -> str:
    middle = math.sqrt(furthest)
    sides = [[mark for mark in marks if mark.x < middle], [mark for mark in marks if mark.x >= middle]]
    bottom = TOP + max(300.0, LINE * max(map(len, sides)) + 8)
    heights = [min(mark.y, BEYOND) for mark in marks]
    low, high = min([0.5, *heights]) / 1.2, max([2.0, *heights])
    x = LogAxis(x_title, 1.0, furthest, LEFT, RIGHT, last="no limit")
    y = LogAxis(y_title, low, high if high == BEYOND else high * 1.2, bottom, TOP)
    drawn = [part for side in sides for part in _named(side, x, y)]
    body = "".join([inside, *_frame(x, y), *_levels(x, y), *drawn])
    label = f"{escape(y_title)} against {escape(x_title)}; {len(marks)} marks"
    size = f'viewBox="0 0 {WIDTH} {bottom + 56:g}"'
    return f'<svg class="drawing" {size} role="group" aria-label="{label}">{body}</svg>'


def _frame(x: LogAxis, y: LogAxis) -> Iterator[str]:
    for value, text in x.ticks():
        at = x.place(value)
        yield f'<line class="grid" x1="{at}" y1="{y.end}" x2="{at}" y2="{y.start}"/>'
        yield f'<text class="muted" x="{at}" y="{y.start + 18}" text-anchor="middle">{escape(text)}</text>'
    for value, text in y.ticks():
        at = y.place(value)
        yield f'<line class="grid" x1="{x.start}" y1="{at}" x2="{x.end}" y2="{at}"/>'
        yield f'<text class="muted" x="{x.start - 8}" y="{at + 4}" text-anchor="end">{escape(text)}</text>'
    middle_x, middle_y = (x.start + x.end) / 2, (y.start + y.end) / 2
    yield f'<text x="{middle_x}" y="{y.start + 42}" text-anchor="middle">{escape(x.title)}</text>'
    yield (
        f'<text transform="rotate(-90)" x="{-middle_y}" y="16" text-anchor="middle">{escape(y.title)}</text>'
        f'<path class="axis" fill="none" d="M{x.start} {y.end}V{y.start}H{x.end}"/>'
    )


def _levels(x: LogAxis, y: LogAxis) -> Iterator[str]:
    """From tenfold on nothing holds a variable; above 1 the norm grows."""
    ten, same = x.place(10.0), y.place(1.0)
    yield f'<line class="level" stroke-dasharray="3 4" x1="{ten}" y1="{y.end}" x2="{ten}" y2="{y.start}"/>'
    yield f'<text class="muted" x="{ten}" y="{y.end - 12}">unnoticed from here on</text>'
    yield f'<line class="level" stroke-dasharray="3 4" x1="{x.start}" y1="{same}" x2="{x.end}" y2="{same}"/>'


def _named(marks: Sequence[Mark], x: LogAxis, y: LogAxis) -> Iterator[str]:
    """Marks at their places, their names in a column beside the freest, from the one that grows most downwards."""
    if not marks:
        return
    falling = sorted(marks, key=lambda mark: (-mark.y, mark.x))
    column = max(*(x.place(mark.x) + 26 for mark in marks), x.place(10.0) + 8)  # no name across the line at tenfold
    places = [(x.place(mark.x), y.place(mark.y)) for mark in falling]
    rows = spread([at for _, at in places], LINE, y.end, y.start - 8)
    for mark, place, row in zip(falling, places, rows, strict=True):
        yield _drawn(mark, place, (column, row))


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Rising places at least `gap` apart between `low` and `high`, moved from the wanted ones by the least squares.

    Neighbours that would come too near form a block around the mean of what they want.
    """
    blocks: list[tuple[float, int]] = []  # where the first of a block would lie, and how many it holds
    for n, at in enumerate(wanted):
        start, many = at - n * gap, 1
        while blocks and blocks[-1][0] > start:
            before, count = blocks.pop()
            start, many = (before * count + start * many) / (count + many), count + many
        blocks.append((start, many))
    last = high - (len(wanted) - 1) * gap
    starts = [max(low, min(last, start)) for start, many in blocks for _ in range(many)]
    return [round(start + n * gap, 1) for n, start in enumerate(starts)]


def _drawn(mark: Mark, place: tuple[float, float], name: tuple[float, float]) -> str:
    growth = plain(mark.y) if math.isfinite(mark.y) else "not finite"
    told = f"{mark.name}: free range {'no limit' if mark.x >= 1e6 else plain(mark.x)}, growth {growth}"
    shown = f"{mark.name} ({growth})" if mark.y > BEYOND else mark.name
    inside = (
        f"<title>{escape(told)}</title>"
        f'<line class="leader" x1="{place[0]}" y1="{place[1]}" x2="{name[0] - 4:.1f}" y2="{name[1]}"/>'
        f'<circle cx="{place[0]}" cy="{place[1]}" r="4.5"/>'
        f'<text x="{name[0]:.1f}" y="{name[1] + 4:.1f}">{escape(shown)}</text>'
    )
    if not mark.link:
        return f'<g class="mark {mark.tone}">{inside}</g>'
    link = escape(mark.link)
    return f'<a href="#{link}" class="mark {mark.tone}" data-mark="{link}" aria-label="{escape(told)}">{inside}</a>'


def lines(series: Mapping[str, Sequence[float | None]], title: str, *, log: bool = True) -> Markup:
    """Values after loops 1, 2, …, a line each, with its last value beside it; empty where nothing was measured."""
    points = {name: [(k, v) for k, v in enumerate(values, 1) if _drawable(v, log)] for name, values in series.items()}
    points = {name: each for name, each in points.items() if len(each) > 1}
    if not points:
        return Markup("")
    values = [v for each in points.values() for _, v in each if v is not None]
    most = max(k for each in points.values() for k, _ in each)
    low, high = (min(values), max(values)) if log else (min(0.0, *values), max(1.0, *values))
    if log:
        low, high = math.log10(low), math.log10(high)
        slack = max(0.0, LEAST_SPAN - (high - low)) / 2
        low, high = low - slack, high + slack
    span = high - low

    def place(k: int, v: float | None) -> str:
        assert v is not None
        share = ((math.log10(v) if log else v) - low) / span
        return f"{10 + 300 * (k - 1) / max(1, most - 1):.1f},{86 - 72 * share:.1f}"

    drawn = []
    for colour, (name, each) in enumerate(points.items()):
        path, (k, last) = " ".join(place(*point) for point in each), each[-1]
        y = float(place(k, last).split(",")[1])
        drawn.append(f'<polyline class="line c{colour}" fill="none" points="{path}"/>')
        drawn.append(f'<text class="c{colour}" x="318" y="{y + 4:.1f}">{escape(name)} {plain(last)}</text>')
    axis = '<text class="muted" x="10" y="104">loop 1</text>'
    axis += f'<text class="muted" x="310" y="104" text-anchor="end">{most}</text>'
    label = f"{escape(title)}, {'logarithmic, ' if log else ''}over {most} loops"
    return Markup(
        f'<svg class="lines" viewBox="0 0 480 110" role="img" aria-label="{label}">{"".join(drawn)}{axis}</svg>'
    )


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)
