"""The page: read the files, judge, draw, and write one HTML file that opens offline.

Every value of a file goes through jinja2's escaping, or stands in an element that the standard library wrote. The
content security policy allows exactly one script, by its hash, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loopscope.errors import ConfigError, UnsupportedError
from loopscope.files import write_atomically
from loopscope.show import figures, sections
from loopscope.show.chart import Chart
from loopscope.show.inputs import Group, Inputs, compare, group_runs, read_inputs
from loopscope.show.verdict import Verdict, judge

HERE = Path(__file__).parent

Draw = Callable[[Sequence[Group]], Chart]
CHAPTERS: tuple[tuple[str, str, str, str, tuple[Draw, ...]], ...] = (
    (
        "plane",
        "2×2 plane",
        "The 2×2 plane",
        "Two separate questions: can one leave early, and does the scale hold?",
        (figures.plane,),
    ),
    (
        "norms",
        "Norms",
        "Norms over loops and over training",
        "How long the state is, loop by loop and step by step. Nothing holds a length that no loss sees.",
        (figures.norm_over_loops, figures.norm_over_training),
    ),
    (
        "gradient",
        "Radial gradient",
        "What the loss can see: the radial gradient",
        "A loss can only correct what its gradient points at.",
        (figures.share_over_loops, figures.share_over_training),
    ),
    (
        "alpha",
        "α-sweep",
        "What the loss can see: the α-sweep",
        "The same question, asked by experiment.",
        (figures.alpha_sweep,),
    ),
    (
        "activity",
        "30 loops",
        "What the loop carries: 30 loops",
        "A hidden variable does harm only if the loop carries it on: here the loop runs far beyond its training.",
        (figures.scale_over_loops, figures.increments, figures.angular_motion),
    ),
    (
        "frontier",
        "Depth and quality",
        "Depth and quality: the frontier",
        "What each further loop buys.",
        (figures.frontier, figures.halting, figures.certified, figures.speed),
    ),
    (
        "halting",
        "Halting",
        "Leaving early: halting and gates",
        "Which loops a token can do without, and whether a gate can tell.",
        (figures.gates,),
    ),
)
"""The chapters with charts: anchor, short and full title, a word on why, charts. Before them stands the verdict."""


@dataclass(frozen=True)
class Chapter:
    """A part of the page with charts."""

    anchor: str
    short: str
    title: str
    why: str
    charts: list[Chart]

    @property
    def drawn(self) -> list[Chart]:
        """The charts with something in them."""
        return [chart for chart in self.charts if chart.is_drawn]


@dataclass(frozen=True)
class Page:
    """The page as text, and what it says first."""

    html: str
    verdict: Verdict
    num_runs: int
    num_conditions: int


def build_report(paths: Sequence[Path], title: str | None = None) -> Page:
    """The page about everything that the paths hold. The same files give the same bytes."""
    return render(read_inputs(paths), title)


def write_report(paths: Sequence[Path], out: Path, title: str | None = None) -> Page:
    """Build the page and write it, whole or not at all."""
    if out.is_dir():
        raise ConfigError.of("out", str(out), "is a folder; name a file, such as report.html")
    page = build_report(paths, title)
    write_atomically(out, page.html)
    return page


def render(inputs: Inputs, title: str | None = None) -> Page:
    """The page about runs and reproductions that were read."""
    groups = group_runs(inputs.runs)
    chapters = [
        Chapter(anchor, short, name, why, [draw(groups) for draw in draws])
        for anchor, short, name, why, draws in CHAPTERS
    ]
    drawn = [chapter for chapter in chapters if chapter.drawn]
    audits, claims = sections.audit_views(groups), sections.claim_tables(inputs.reproductions)
    verdict = judge(groups, audits, claims, inputs.reproductions)
    differences, missing = sections.differences(inputs.reproductions), unmeasured(chapters, bool(audits))
    parts = [
        *(("main", "Verdict", True), *((chapter.anchor, chapter.short, True) for chapter in drawn)),
        *(("audits", "Audits", audits), ("claims", "Claims", claims)),
        *(("factors", "Fixed and varied", len(inputs.runs) > 1 or differences), ("runs", "Runs", inputs.runs)),
        ("unmeasured", "Not measured", missing),
    ]
    html = framed(
        "report",
        title or _title(inputs),
        [(anchor, short) for anchor, short, is_there in parts if is_there],
        styles=("page.css",),
        groups=groups,
        swatches=[drawings().swatch(group.style) for group in groups],
        verdict=verdict,
        chapters=drawn,
        unmeasured=missing,
        audits=audits,
        claims=claims,
        claim_notes=sections.claim_notes(inputs.reproductions),
        factors=compare(groups),
        differences=differences,
        commands=sections.commands(inputs.reproductions),
        runs=sections.run_views(groups),
        problems=[f"{r.name}: {name} {what}" for r in inputs.reproductions for name, what in r.problems.items()],
    )
    return Page(html, verdict, len(inputs.runs), len(groups))


def framed(kind: str, title: str, parts: Sequence[tuple[str, str]], *, styles: Sequence[str], **values: object) -> str:
    """KIND.html in the frame of every page, with KIND.js as its only script; `parts` are anchors and names of them."""
    script = (HERE / f"{kind}.js").read_text("utf-8")
    style = Markup("".join((HERE / name).read_text("utf-8") for name in styles))
    drawing = {"svg": drawings().svg, "script": Markup(script), "style": style, "policy": content_policy(script)}
    html = (
        environment().get_template(f"{kind}.html").render(kind=kind, title=title, sections=parts, **drawing, **values)
    )
    return html.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair in a file is no text


def unmeasured(chapters: Sequence[Chapter], is_audited: bool) -> dict[str, list[str]]:
    """What the page leaves out, by the reason why."""
    found: dict[str, list[str]] = {}
    for chapter in chapters:
        if not chapter.drawn:
            found.setdefault(chapter.charts[0].missing, []).append(chapter.short)
            continue
        for chart in chapter.charts:
            if not chart.is_drawn:
                found.setdefault(chart.missing, []).append(chart.title)
    if not is_audited:
        found.setdefault(figures.NEEDS_AUDIT, []).append("Audits and remedies")
    return found


def content_policy(script: str) -> str:
    """Nothing from anywhere, and this script alone; drawings have styles of their own."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def drawings() -> ModuleType:
    """What draws, if matplotlib is there."""
    try:
        return importlib.import_module("loopscope.show.drawing")
    except ImportError as error:
        missing = f"the page needs {error.name}, which is missing: pip install 'loopscope[report]'"
        raise UnsupportedError(missing) from error


def _title(inputs: Inputs) -> str:
    names = [reproduction.name for reproduction in inputs.reproductions]
    if not names and len(inputs.runs) == 1:
        return inputs.runs[0].name
    return ", ".join(names) or f"{len(inputs.runs)} runs"


@cache
def environment() -> Environment:
    """The templates of this folder; whatever they are given is escaped."""
    made = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"tag": tag, "ICONS": ICONS}
    return made


ICONS = {"good": "✓", "bad": "✗", "open": "○"}


def tag(word: str, tone: str) -> Markup:
    """A verdict with its icon: never told by colour alone."""
    return Markup('<span class="tag {}">{} {}</span>').format(tone, ICONS[tone], word)
