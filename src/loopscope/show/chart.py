"""A chart as plain data: series along two axes, levels across, words around it, and the table that says the same.

show/drawing.py draws it, for a record and for the page; what a chart says is tested here, without a drawing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from loopscope.show.table import Table

LARGEST = 1e100
"""What is larger is not drawn: powers of it are no numbers any more, and an axis needs some."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a series is drawn, in matplotlib's words for marks and dashes."""

    colour: str
    """A colour, or the name of one of the page's: c0 … c7, muted."""
    marker: str = "o"
    dash: str = "-"
    is_open: bool = False
    size: float = 5.0
    width: float = 1.5


@dataclass(frozen=True)
class Axis:
    """One axis: its title, its scale, and what it always shows."""

    title: str
    scale: Literal["linear", "log", "signed-log"] = "linear"
    """signed-log is linear around 0 and logarithmic away from it on both sides."""
    linear_below: float = 1.0
    """signed-log: the size up to which it is linear."""
    floor: float | None = None
    """Smaller values, zero included, are drawn here."""
    shows: tuple[float, ...] = ()
    """Values that are always in view, so that what is small looks small."""
    top: float | None = None
    """Where the frame ends, though there are values beyond."""
    whole: bool = False
    """Loops: whole numbers."""
    ticks: Mapping[float, str] | None = None
    """Ticks with names of their own; none at all where it is empty."""

    def place(self, value: float | None) -> float | None:
        """Where a value is drawn; None where it cannot be."""
        if value is None or not abs(value) <= LARGEST:
            return None
        value = value if self.floor is None else max(value, self.floor)
        return None if self.scale == "log" and value < 1 / LARGEST else value


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values that belong together, drawn as a line, as marks or as both."""

    label: str
    """What it is called over it and in a legend; empty for what needs no name."""
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: Style
    mode: Literal["both", "lines", "marks"] = "both"
    group: str = ""
    """What it is switched off with on the page."""
    link: str = ""
    """Where its marks lead on the page."""
    ends: Sequence[tuple[float, float]] = ()
    """Of every mark, the interval that is drawn as a bar."""


@dataclass(frozen=True)
class Level:
    """A dotted line across, at a value of the y axis or at one of the x axis, with its meaning at its end."""

    value: float
    text: str = ""
    of: Literal["x", "y"] = "y"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, what to look at in it, and the same as text; without series it says what is missing."""

    name: str
    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    levels: Sequence[Level] = ()
    look: str = ""
    note: str = ""
    table: Table = field(default_factory=lambda: Table("", [], []))
    missing: str = ""
    is_nested: bool = False
    """Whether earlier series are larger, so that those which coincide are seen around one another."""

    def points(self, series: Series) -> list[tuple[float, float]]:
        """What of a series can be drawn; a line goes on over what cannot."""
        places = zip(map(self.x.place, series.xs), map(self.y.place, series.ys), strict=True)
        return [(x, y) for x, y in places if x is not None and y is not None]

    def marks(self, series: Series) -> list[tuple[float, float]]:
        """The points of a series within the frame; its line may leave it."""
        top = math.inf if self.y.top is None else self.y.top
        return [(x, y) for x, y in self.points(series) if y <= top]

    @property
    def is_drawn(self) -> bool:
        """Whether there is anything in it."""
        return any(map(self.points, self.series))

    @property
    def groups(self) -> set[str]:
        """Groups that are drawn."""
        return {each.group for each in self.series}

    @property
    def as_text(self) -> Table:
        """The table with its caption."""
        return replace(self.table, title=f"{self.title}: {self.y.title}")
