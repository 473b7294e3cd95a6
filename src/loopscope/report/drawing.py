"""Small drawings as SVG: a scatter with numbered marks, and lines over loops. Plain text, no script, no library.

Colours are classes (c0 … c7, ink, muted, grid) that the page's style sheet defines, so that light and dark are decided
there. Every text of a file is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from loopscope.report.charts import plain

RADIUS = 9.5
"""Of a numbered mark."""
NEAR = 1.9 * RADIUS
"""Marks closer than this hide one another's numbers."""
ROUND = (1, 2, 5)
LEGEND_WIDTH = 250
LEAST_SPAN = math.log10(4)
"""Of a logarithmic line drawing, in decades: what hardly changes shall look flat."""
STANDALONE = """
text { font: 12px system-ui, sans-serif; fill: #1b1f24; } .muted { fill: #5a6370; } .grid { stroke: #e4e7eb; }
.axis { stroke: #b9c0c9; } .mark circle { fill: #0068ad; } .mark.bad circle { fill: #c8500a; }
.mark text { font-size: 10px; fill: #fff; } .leader, .level { stroke: #5a6370; } .paper { fill: #fff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed; } .muted { fill: #a3acb8; } .grid { stroke: #2c333b; } .axis { stroke: #4a535e; }
  .mark circle { fill: #5fb4f5; } .mark.bad circle { fill: #ff9550; } .mark text { fill: #14171b; }
  .leader, .level { stroke: #a3acb8; } .paper { fill: #14171b; }
}
"""


@dataclass(frozen=True)
class Mark:
    """A point of the scatter."""

    number: int
    name: str
    x: float
    y: float
    tone: str
    """bad or good: also told by its name and place, never by colour alone."""
    link: str
    setting: str


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
    """Numbered marks over a free range (to `furthest`, called no limit) and a growth, for the page."""
    return Markup(_scatter(marks, x_title, y_title, furthest, width=520, plot=520))


def standalone_scatter(marks: Sequence[Mark], *, x_title: str, y_title: str, furthest: float, title: str) -> str:
    """The same as a file of its own, with colours and the names of the numbers."""
    legend = [f'<text class="muted" x="530" y="30">{escape(title)}</text>']
    for n, mark in enumerate(sorted(marks, key=lambda each: each.number)):
        legend.append(
            f'<text x="530" y="{52 + 12.5 * n:.1f}" style="font-size:11px">{mark.number} {_text(mark)}</text>'
        )
    height = max(420.0, 60 + 12.5 * len(marks))
    inside = f'<style>{STANDALONE}</style><rect class="paper" width="100%" height="100%"/>{"".join(legend)}'
    drawn = _scatter(marks, x_title, y_title, furthest, width=520 + LEGEND_WIDTH, plot=520, inside=inside, tall=height)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def _text(mark: Mark) -> str:
    return escape(mark.name)


def _scatter(
    marks: Sequence[Mark],
    x_title: str,
    y_title: str,
    furthest: float,
    *,
    width: float,
    plot: float,
    inside: str = "",
    tall: float = 420.0,
) -> str:
    heights = [mark.y for mark in marks] or [1.0]
    low, high = min(0.5, *heights) / 1.3, max(2.0, *heights) * 1.3
    x = LogAxis(x_title, 1.0, furthest, 66.0, plot - 36.0, last="no limit")
    y = LogAxis(y_title, low, high, 360.0, 22.0)
    parts = [inside, *_frame(x, y), *_levels(x, y)]
    placed: dict[str, list[tuple[float, float]]] = {}
    drawn = []
    for mark in marks:
        true, taken = (x.place(mark.x), y.place(mark.y)), placed.setdefault(mark.setting, [])
        spot = _free_spot(true, taken, plot)
        taken.append(spot)
        drawn.append(_drawn(mark, spot))
        if math.dist(true, spot) > 1:  # leaders come before all marks, so that none crosses a number
            ends = f'x1="{true[0]}" y1="{true[1]}" x2="{spot[0]}" y2="{spot[1]}"'
            parts.append(f'<line class="leader" data-mark="{escape(mark.link)}" {ends}/>')
    body = "".join([*parts, *drawn])
    label = f"{escape(y_title)} against {escape(x_title)}; {len(marks)} marks"
    return f'<svg class="drawing" viewBox="0 0 {width:g} {tall:g}" role="group" aria-label="{label}">{body}</svg>'


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
    yield f'<text class="muted" x="{ten + 5}" y="{y.end + 10}">free from here on</text>'
    yield f'<line class="level" stroke-dasharray="3 4" x1="{x.start}" y1="{same}" x2="{x.end}" y2="{same}"/>'


def _free_spot(at: tuple[float, float], taken: Sequence[tuple[float, float]], plot: float) -> tuple[float, float]:
    """The nearest place, along a spiral, where the mark hides no other of its setting."""
    for turn in range(240):
        angle, away = 0.7 * turn, 1.1 * turn
        spot = (at[0] + away * math.cos(angle), at[1] + away * math.sin(angle))
        inside = 66 <= spot[0] <= plot - RADIUS and RADIUS <= spot[1] <= 362
        if inside and all(math.dist(spot, other) >= NEAR for other in taken):
            return round(spot[0], 1), round(spot[1], 1)
    return at


def _drawn(mark: Mark, spot: tuple[float, float]) -> str:
    told = f"{mark.name}: free range {'no limit' if mark.x >= 1e6 else plain(mark.x)}, growth {plain(mark.y)}"
    return (
        f'<a href="#{escape(mark.link)}" class="mark {mark.tone}" data-setting="{escape(mark.setting)}" '
        f'data-mark="{escape(mark.link)}" aria-label="{escape(told)}"><title>{escape(told)}</title>'
        f'<circle cx="{spot[0]}" cy="{spot[1]}" r="{RADIUS}"/>'
        f'<text x="{spot[0]}" y="{spot[1] + 3.6:.1f}" text-anchor="middle">{mark.number}</text></a>'
    )


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
