"""The page: read the files, judge, draw, and write one HTML file that opens offline.

Every value of a file goes through jinja2's escaping, through JSON without `<`, or both. The content security policy
allows exactly two scripts, by their hash, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from loopscope.errors import ConfigError, UnsupportedError
from loopscope.files import write_atomically
from loopscope.show import figures, sections
from loopscope.show.charts import Chart
from loopscope.show.grouping import Group, compare, group_runs
from loopscope.show.inputs import Inputs, read_inputs
from loopscope.show.verdict import Verdict, judge

HERE = Path(__file__).parent

Draw = Callable[[Sequence[Group]], Chart]
CHAPTERS: tuple[tuple[tuple[str, str, str, str], tuple[Draw, ...]], ...] = (
    (
        (
            "plane",
            "2×2 plane",
            "The 2×2 plane",
            "Two separate questions: can one leave early, and does the scale hold?",
        ),
        (figures.plane,),
    ),
    (
        (
            "norms",
            "Norms",
            "Norms over loops and over training",
            "How long the state is, loop by loop and step by step. Nothing holds a length that no loss sees.",
        ),
        (figures.norm_over_loops, figures.norm_over_training),
    ),
    (
        (
            "gradient",
            "Radial gradient",
            "What the loss can see: the radial gradient",
            "A loss can only correct what its gradient points at.",
        ),
        (figures.share_over_loops, figures.share_over_training),
    ),
    (
        (
            "alpha",
            "α-sweep",
            "What the loss can see: the α-sweep",
            "The same question, asked by experiment.",
        ),
        (figures.alpha_sweep,),
    ),
    (
        (
            "activity",
            "30 loops",
            "What the loop carries: 30 loops",
            "A hidden variable does harm only if the loop carries it on: here the loop runs far beyond its training.",
        ),
        (figures.scale_over_loops, figures.increments, figures.angular_motion),
    ),
    (
        (
            "frontier",
            "Depth and quality",
            "Depth and quality: the frontier",
            "What each further loop buys.",
        ),
        (figures.frontier, figures.halting, figures.certified, figures.speed),
    ),
    (
        (
            "halting",
            "Halting",
            "Leaving early: halting and gates",
            "Which loops a token can do without, and whether a gate can tell.",
        ),
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
        return [chart for chart in self.charts if chart.traces]


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
    chapters = [Chapter(*told, [draw(groups) for draw in draws]) for told, draws in CHAPTERS]
    audits, claims = sections.audit_views(groups), sections.claim_tables(inputs.reproductions)
    verdict = judge(groups, audits, claims, inputs.reproductions)
    scripts = [plotly_script(), (HERE / "page.js").read_text("utf-8")]
    html = (
        environment()
        .get_template("template.html")
        .render(
            title=title or _title(inputs),
            policy=content_policy(scripts),
            style=Markup((HERE / "page.css").read_text("utf-8")),
            scripts=[Markup(script) for script in scripts],
            data=embedded(page_data(groups, chapters)),
            groups=groups,
            verdict=verdict,
            chapters=[chapter for chapter in chapters if chapter.drawn],
            unmeasured=unmeasured(chapters, bool(audits)),
            audits=audits,
            claims=claims,
            claim_notes=sections.claim_notes(inputs.reproductions),
            factors=compare(groups),
            differences=sections.differences(inputs.reproductions),
            commands=sections.commands(inputs.reproductions),
            runs=sections.run_views(groups),
            problems=[f"{r.name}: {name} {what}" for r in inputs.reproductions for name, what in r.problems.items()],
        )
    )
    whole = html.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair in a file is no text
    return Page(whole, verdict, len(inputs.runs), len(groups))


def unmeasured(chapters: Sequence[Chapter], is_audited: bool) -> dict[str, list[str]]:
    """What the page leaves out, by the reason why."""
    found: dict[str, list[str]] = {}
    for chapter in chapters:
        if not chapter.drawn:
            found.setdefault(chapter.charts[0].missing, []).append(chapter.short)
            continue
        for chart in chapter.charts:
            if not chart.traces:
                found.setdefault(chart.missing, []).append(chart.title)
    if not is_audited:
        found.setdefault(figures.NEEDS_AUDIT, []).append("Audits and remedies")
    return found


def page_data(groups: Sequence[Group], chapters: Sequence[Chapter]) -> dict[str, Any]:
    """What the page's script needs: the colour of each group, and the charts without colours."""
    charts = [chart for chapter in chapters for chart in chapter.drawn]
    drawings = {chart.name: {"traces": chart.traces, "layout": chart.layout} for chart in charts}
    return {"groups": [group.colour for group in groups], "charts": drawings}


def embedded(value: object) -> Markup:
    """JSON that can stand in a script element: nothing in it ends the element or opens a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def content_policy(scripts: Sequence[str]) -> str:
    """Nothing from anywhere; these scripts alone; plotly writes styles of its own."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def plotly_script() -> str:
    """plotly.js as the plotly package ships it."""
    try:
        script: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError as error:
        raise UnsupportedError("the page needs plotly, which is missing: pip install 'loopscope[report]'") from error
    return script


def _title(inputs: Inputs) -> str:
    names = [reproduction.name for reproduction in inputs.reproductions]
    if not names and len(inputs.runs) == 1:
        return inputs.runs[0].name
    return ", ".join(names) or f"{len(inputs.runs)} runs"


@cache
def environment() -> Environment:
    """The templates of this folder; whatever they are given is escaped."""
    return Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
