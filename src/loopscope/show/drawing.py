"""Charts drawn by matplotlib: figures of a record as SVG and PDF, charts of the page as SVG in the page's colours.

The same numbers give the same bytes: no dates, fixed identifiers. On the page colours are variables of its style sheet,
so that light, dark and paper are decided there and no script draws.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator

from loopscope.files import file_written_whole
from loopscope.show.chart import Axis, Chart, Level, Series, Style
from loopscope.show.numbers import plain

SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "loopscope",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlesize": "medium",
    "text.parse_math": False,  # a name with two dollars is a name
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
}
NO_DATES: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
PAGE_COLOURS = {
    name: f"#0b0b{number:02x}"
    for number, name in enumerate(("ink", "muted", "rule", "grid", "paper", *(f"c{n}" for n in range(8))))
}
"""What matplotlib is given for the page's colours; in the SVG they become variables of the style sheet."""
ON_PAGE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 12,
    "text.color": PAGE_COLOURS["ink"],
    "axes.labelcolor": PAGE_COLOURS["ink"],
    "axes.edgecolor": PAGE_COLOURS["rule"],
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": PAGE_COLOURS["rule"],
    "ytick.color": PAGE_COLOURS["rule"],
    "xtick.labelcolor": PAGE_COLOURS["ink"],
    "ytick.labelcolor": PAGE_COLOURS["ink"],
    "grid.color": PAGE_COLOURS["grid"],
}
ON_FILE = {"muted": "#666666", "c0": "#d55e00", "c1": "#0072b2"}
"""The same names in a record."""
WIDTH, HEIGHT = 6.0, 4.0
"""Of a chart on the page, in inches: so narrow that its words can still be read where it is 400 pixels wide."""
FILE_WIDTHS, FILE_HEIGHT = (8.0, 10.5, 11.5), 4.1
"""Of one, two and three charts in a file."""
NAME_HEIGHT = 0.21
"""Inches from one name beside the frame to the next."""
PART = re.compile(r"(?P<kind>line|marks)-(?P<panel>\d+)-(?P<number>\d+)")
"""What the parts of a drawing are called in it that belong to a series."""
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


# --- in a file -------------------------------------------------------------------------------------------------------


def save(charts: Sequence[Chart], path: Path, *, title: str = "") -> None:
    """Write charts side by side as PATH.svg and PATH.pdf; of charts without anything take the earlier ones away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_empty = not any(chart.is_drawn for chart in charts)
    with mpl.rc_context(SETTINGS):
        figure = None if is_empty else _figure(charts, ON_FILE, FILE_WIDTHS[len(charts) - 1], FILE_HEIGHT)
        if figure is not None:
            _explain(figure, charts, title)
        for ending, metadata in NO_DATES.items():
            target = path.with_name(f"{path.name}.{ending}")
            if figure is None:
                target.unlink(missing_ok=True)
                continue
            with file_written_whole(target) as beside:
                figure.savefig(beside, format=ending, metadata=metadata, bbox_inches="tight")


def _figure(charts: Sequence[Chart], colours: dict[str, str], width: float, height: float) -> Figure:
    """Charts side by side; so high that every name on an axis has its line."""
    names = max(len(chart.y.ticks or ()) for chart in charts)
    figure = Figure(figsize=(width, max(height, names * NAME_HEIGHT)), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, axes in enumerate(figure.subplots(1, len(charts), squeeze=False)[0]):
        _draw(axes, charts[panel], colours, panel)
    return figure


def _explain(figure: Figure, charts: Sequence[Chart], title: str) -> None:
    """What stands around charts in a file: their titles, and one legend for all, unless an axis names the marks."""
    if title:
        figure.suptitle(title)
    for axes, chart in zip(figure.axes, charts, strict=True):
        axes.set_title(chart.title)
    told = {each.label: _shape(each, ON_FILE) for chart in charts for each in chart.series if each.label}
    handles = [Line2D([], [], label=label, **shape) for label, shape in told.items()]
    if handles and not charts[0].y.ticks:
        place: dict[str, Any] = {"loc": "outside right upper"}
        if len(charts) > 1:
            place = {"loc": "outside lower center", "ncols": 5 if len(charts) > 2 else 3}
        figure.legend(handles=handles, **place)


# --- on the page -----------------------------------------------------------------------------------------------------


def svg(*charts: Chart) -> Markup:
    """Charts side by side as an element of the page; whoever points at a series or a mark is told what it is."""
    with mpl.rc_context({**SETTINGS, **ON_PAGE, "svg.hashsalt": charts[0].name}):
        root = _svg(_figure(charts, PAGE_COLOURS, WIDTH, HEIGHT))
    for element in list(root.iter()):
        part = PART.fullmatch(element.get("id", ""))
        if part is None:
            continue
        del element.attrib["id"]
        chart = charts[int(part["panel"])]
        series = chart.series[int(part["number"])]
        _tell(element, series.label)
        if series.group:
            element.set("data-group", series.group)
        if series.link:
            element.tag = f"{{{SVG}}}a"
            element.set("href", f"#{series.link}")
            element.set("aria-label", series.label)
        if part["kind"] == "line" or series.link:
            continue
        for mark, (x, y) in zip(element.iter(f"{{{SVG}}}use"), chart.marks(series), strict=True):
            _tell(mark, f"{series.label}\n{chart.x.title}: {plain(x)}\n{chart.y.title}: {plain(y)}")
    root.set("class", "chart")
    root.set("data-chart", charts[0].name)
    root.set("role", "group" if any(series.link for chart in charts for series in chart.series) else "img")
    axes = "; ".join(f"{chart.y.title} against {chart.x.title}" if chart.y.title else chart.x.title for chart in charts)
    root.set("aria-label", f"Chart: {charts[0].title}. {axes}. The numbers are in a table.")
    return _markup(root)


def swatch(style: Style) -> Markup:
    """A piece of line with its mark, for a legend of the page."""
    with mpl.rc_context({**SETTINGS, **ON_PAGE}):
        figure = Figure(figsize=(0.6, 0.2))
        figure.add_artist(Line2D([0.02, 0.5, 0.98], [0.5] * 3, markevery=[1], **_style(style, PAGE_COLOURS)))
        root = _svg(figure)
    root.set("class", "swatch")
    root.set("aria-hidden", "true")
    return _markup(root)


def _svg(figure: Figure) -> ElementTree.Element:
    """What matplotlib writes, less its metadata, its style sheet and the names of its parts, which a page has once."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=NO_DATES["svg"])
    root = ElementTree.fromstring(written.getvalue())  # noqa: S314 (matplotlib wrote it)
    used = set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", written.getvalue()))
    kept = {name for pair in used for name in pair}
    for element in root.iter():
        if element.get("id", "") not in kept and not PART.fullmatch(element.get("id", "")):
            element.attrib.pop("id", None)
        for part in [part for part in element if part.tag.endswith(("metadata", "}style"))]:
            element.remove(part)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return root


def _tell(element: ElementTree.Element, words: str) -> None:
    """Words that are shown over an element."""
    title = ElementTree.Element(f"{{{SVG}}}title")
    title.text = words
    element.insert(0, title)


def _markup(root: ElementTree.Element) -> Markup:
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    text = ElementTree.tostring(root, encoding="unicode")
    names = {colour: f"var(--{name})" for name, colour in PAGE_COLOURS.items()}
    return Markup(re.sub("|".join(names), lambda found: names[found[0]], text))


# --- a chart on its axes ---------------------------------------------------------------------------------------------


def _draw(axes: Axes, chart: Chart, colours: dict[str, str], panel: int) -> None:
    axes.set_xscale(**_scale(chart.x))
    axes.set_yscale(**_scale(chart.y))
    for number, series in enumerate(chart.series):
        rank = 1 - number / max(1, len(chart.series) - 1)
        style = series.style
        if chart.is_nested:
            style = replace(style, size=style.size + 7 * rank, width=style.width + 2 * rank)
        drawn = _shape(replace(series, style=style), colours)
        points = chart.points(series)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if series.mode != "marks":
            axes.plot(xs, ys, **{**drawn, "marker": ""}, gid=f"line-{panel}-{number}")
        if series.mode != "lines":
            inside = chart.marks(series)
            xs, ys = [x for x, _ in inside], [y for _, y in inside]
            axes.plot(xs, ys, **{**drawn, "linestyle": ""}, gid=f"marks-{panel}-{number}")
        for (x, _), (low, high) in zip(points, series.ends, strict=False):
            axes.plot([x, x], [low, high], color=drawn["color"], linewidth=style.width, marker="_")
    for level in chart.levels:
        _draw_level(axes, level, colours)
    for axis, at in ((chart.x, axes.xaxis), (chart.y, axes.yaxis)):
        _finish(axis, at)


def _style(style: Style, colours: dict[str, str]) -> dict[str, Any]:
    colour = colours.get(style.colour, style.colour)
    edge = {"markerfacecolor": "none", "markeredgewidth": 1.5} if style.is_open else {"markeredgewidth": 0}
    line = {"linestyle": style.dash, "linewidth": style.width}
    return {"color": colour, "marker": style.marker, "markersize": style.size, "markeredgecolor": colour} | edge | line


def _shape(series: Series, colours: dict[str, str]) -> dict[str, Any]:
    """Line and mark of a series, as far as it has them."""
    left_out = {"lines": {"marker": ""}, "marks": {"linestyle": ""}, "both": {}}
    return _style(series.style, colours) | left_out[series.mode]


def _scale(axis: Axis) -> dict[str, Any]:
    return {"value": "symlog", "linthresh": axis.linear_below} if axis.scale == "signed-log" else {"value": axis.scale}


def _finish(axis: Axis, at: DrawnAxis) -> None:
    """Limits, title and ticks, once everything is drawn."""
    low, high = at.get_view_interval()
    shown = [each for each in axis.shows if axis.place(each) is not None]
    low, high = min([low, *shown]), max([high, *shown])
    at.set_view_interval(low, high if axis.top is None else axis.top, ignore=True)
    at.set_label_text(axis.title)
    at.set_minor_locator(NullLocator())
    at.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    if axis.ticks is not None:
        at.set_major_locator(FixedLocator(list(axis.ticks)))
        at.set_major_formatter(FuncFormatter(lambda value, _: axis.ticks.get(value, "") if axis.ticks else ""))
    elif axis.whole:
        at.set_major_locator(MaxNLocator(integer=True))
    elif axis.scale == "signed-log":
        at.set_major_locator(SymmetricalLogLocator(base=10, linthresh=axis.linear_below))
    elif axis.scale == "log" and high / low < 8:
        at.set_major_locator(MaxNLocator(5))
    elif axis.scale == "log":
        decades = math.log10(high / low)
        at.set_major_locator(LogLocator(subs=(1.0, 3.0) if decades < 3 else (1.0,), numticks=8))


def _draw_level(axes: Axes, level: Level, colours: dict[str, str]) -> None:
    line: dict[str, Any] = {"color": colours["muted"], "linewidth": 1.0, "linestyle": (0, (2, 2))}
    words: dict[str, Any] = {"color": colours["muted"], "textcoords": "offset points"}
    if level.of == "y":
        axes.axhline(level.value, **line)
        words |= {"xycoords": axes.get_yaxis_transform(), "xytext": (3, 0), "va": "center"}
        axes.annotate(level.text, (1, level.value), **words)
    else:
        axes.axvline(level.value, **line)
        words |= {"xycoords": axes.get_xaxis_transform(), "xytext": (0, 3), "ha": "center"}
        axes.annotate(level.text, (level.value, 1), **words)
