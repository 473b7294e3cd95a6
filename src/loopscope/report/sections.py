"""The sections of the page that are text: audits with remedies, claims, differences from the paper, every run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from loopscope.report.charts import Table, plain, signed
from loopscope.report.files import integer, mapping, mappings, number, shown, words
from loopscope.report.grouping import Group
from loopscope.report.records import Reproduction, Run
from loopscope.report.series import each_run

MOST_EVENTS = 20
MOST_DEPTHS = 32
"""Loops whose scores are printed; the charts have all of them."""
VERDICTS = {"holds": "good", "does not hold at this scale": "bad", "blind-spot": "bad", "controlled": "good"}
VERDICTS |= {"blind": "bad", "weak": "open", "visible": "good", "removed": "good", "damped": "good"}
"""How a verdict is coloured; what is not here stays neutral. The word itself is always printed."""
IN_WORDS = {"blind-spot": "blind spot"}


def tone(verdict: str) -> str:
    """good, bad or open."""
    return VERDICTS.get(verdict, "open")


# --- audits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """One recurrent variable as an audit judged it."""

    name: str
    verdict: str
    numbers: list[str]
    evidence: str
    remedy: str
    flag: str


@dataclass(frozen=True)
class AuditView:
    """An audit, ready to print."""

    group: Group
    run: Run
    verdict: str
    tone: str
    summary: str
    hidden: str
    variables: list[Variable]
    interventions: Table
    tokens: Table
    notes: list[str]

    @property
    def remedies(self) -> list[Variable]:
        """The variables that need one."""
        return [variable for variable in self.variables if variable.remedy or variable.flag]


def audit_views(groups: Sequence[Group]) -> list[AuditView]:
    """All audits, in the order of the page."""
    return [_audit_view(group, run) for group, run in each_run(groups) if run.audit]


def _audit_view(group: Group, run: Run) -> AuditView:
    audit, checks = run.audit, mapping(run.audit.get("checks"))
    notes = checks.get("notes")
    return AuditView(
        group=group,
        run=run,
        verdict=IN_WORDS.get(run.audit_verdict, run.audit_verdict) or "no verdict",
        tone=tone(run.audit_verdict),
        summary=words(audit.get("summary")),
        hidden=_hidden(mapping(audit.get("blind_directions"))),
        variables=[_variable(row) for row in mappings(audit.get("variables"))],
        interventions=Table(
            ["intervention", "CE", "change of CE"],
            [
                [words(row.get("name")), plain(number(row.get("ce"))), signed(number(row.get("delta_ce")), 4)]
                for row in mappings(audit.get("interventions"))
            ],
        ),
        tokens=Table(
            ["token", "position", "norm", "times the median"],
            [
                [
                    _quoted(words(row.get("text"))) or words(row.get("token")),
                    plain(number(row.get("position"))),
                    plain(number(row.get("norm"))),
                    plain(number(row.get("ratio"))),
                ]
                for row in mappings(audit.get("heaviest_tokens"))[:8]
            ],
        ),
        notes=[words(note) for note in notes] if isinstance(notes, list) else [],
    )


def _quoted(text: str) -> str:
    """A token's text with its blanks and line breaks to be seen."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _variable(row: dict[str, Any]) -> Variable:
    names = ("visibility", "delayed_visibility", "activity")
    return Variable(
        name=words(row.get("name")) or "unnamed",
        verdict=words(row.get("verdict")),
        numbers=[plain(number(row.get(name))) for name in names],
        evidence=words(row.get("evidence")),
        remedy=words(row.get("remedy")),
        flag=words(row.get("flag")),
    )


def _hidden(directions: dict[str, Any]) -> str:
    """How many directions of the state no loss sees, and which of them have names."""
    dimension = integer(directions.get("dimension"))
    if dimension is None:
        return ""
    named = [words(row.get("name")) for row in mappings(directions.get("named"))]
    names = f" ({', '.join(name for name in named if name)})" if any(named) else ""
    return f"{dimension} blind direction{'' if dimension == 1 else 's'}{names if dimension else ''}"


# --- claims ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimView:
    """One claim under one recipe and on one split."""

    id: str
    title: str
    measured: str
    rule: str
    paper: list[str]
    ours: list[str]
    seeds: list[str]
    verdict: str
    tone: str
    reason: str


@dataclass(frozen=True)
class ClaimTable:
    """The claims of one reproduction under one recipe and on one split."""

    about: str
    """Reproduction, scale and recipe."""
    split: str
    claims: list[ClaimView]
    is_folded: bool
    """Whether another split of the same stands before it."""

    @property
    def title(self) -> str:
        """What it is about and on which text."""
        return " · ".join(part for part in (self.about, self.split) if part)

    def with_tone(self, tone: str) -> list[ClaimView]:
        """Those that hold (good), do not (bad), or were not measured (open)."""
        return [claim for claim in self.claims if claim.tone == tone]


SPLIT_NAMES = {"valid": "validation"}


def claim_tables(reproductions: Sequence[Reproduction]) -> list[ClaimTable]:
    """A table per reproduction, recipe and split, in the order of the files."""
    tables: dict[str, dict[str, list[ClaimView]]] = {}
    for reproduction in reproductions:
        scale = words(reproduction.claims.get("scale"))
        for row in mappings(reproduction.claims.get("claims")):
            recipe, split = words(row.get("recipe")), words(row.get("split"))
            parts = (reproduction.name, scale, recipe and f"{recipe} recipe")
            splits = tables.setdefault(" · ".join(part for part in parts if part), {})
            splits.setdefault(split and f"{SPLIT_NAMES.get(split, split)} text", []).append(_claim_view(row))
    return [
        ClaimTable(about, split, claims, is_folded=place > 0)
        for about, splits in tables.items()
        for place, (split, claims) in enumerate(splits.items())
    ]


def _claim_view(row: dict[str, Any]) -> ClaimView:
    verdict = words(row.get("verdict")) or "not measured"
    quantities = mappings(row.get("quantities"))
    judged = [quantity for quantity in quantities if quantity.get("headline", quantity.get("rule"))] or quantities
    return ClaimView(
        id=words(row.get("id")),
        title=words(row.get("title")),
        measured=words(row.get("measured")),
        rule=words(row.get("rule")),
        paper=[f"{words(v.get('value'))} [{words(v.get('source'))}]" for v in mappings(row.get("paper"))],
        ours=[_quantity(quantity) for quantity in judged if number(quantity.get("mean")) is not None],
        seeds=[_seeds(quantity) for quantity in quantities if mappings(quantity.get("seeds"))],
        verdict=verdict,
        tone=tone(verdict),
        reason=words(row.get("reason")),
    )


def _quantity(row: dict[str, Any]) -> str:
    """`norm ratio: 225 × [180, 260], n = 3`."""
    name = words(row.get("name"))
    low, middle, high = (_with_sign(row.get(field), name) for field in ("low", "mean", "high"))
    interval = f"[{low}, {high}]" if number(row.get("low")) is not None and number(row.get("high")) is not None else ""
    n = integer(row.get("n"))
    count = f", n\u00a0=\u00a0{n}" if n is not None else ""
    return f"{name}: {' '.join(filter(None, (middle, words(row.get('unit')), interval)))}{count}"


def _with_sign(value: object, name: str) -> str:
    known = number(value)
    return f"{'+' if name.endswith('with its sign') and (known or 0) > 0 else ''}{plain(known)}"


def _seeds(row: dict[str, Any]) -> str:
    each = [f"{words(s.get('seed'))}: {plain(number(s.get('value')))}" for s in mappings(row.get("seeds"))]
    return f"{words(row.get('name'))} ({words(row.get('unit'))}), by seed {'; '.join(each)}"


def claim_notes(reproductions: Sequence[Reproduction]) -> list[str]:
    """Where the paper's values are quoted from, and what the intervals are."""
    notes: dict[str, None] = {}
    for reproduction in reproductions:
        sources = mapping(reproduction.claims.get("sources"))
        notes |= dict.fromkeys(f"[{name}] {words(text)}" for name, text in sources.items())
        if interval := words(reproduction.claims.get("interval")):
            notes[f"Brackets: {interval}"] = None
    return list(notes)


def differences(reproductions: Sequence[Reproduction]) -> list[tuple[str, Table]]:
    """What each grid does differently from the paper, by recipe."""
    found = []
    for reproduction in reproductions:
        for recipe, part in mapping(reproduction.grid.get("recipes")).items():
            rows = [
                [words(row.get(name)) for name in ("field", "paper", "here")]
                for row in mappings(mapping(part).get("differences"))
            ]
            if rows:
                title = f"{reproduction.name}, {recipe} recipe: what differs from the paper"
                found.append((title, Table(["setting", "in the paper", "here"], rows)))
    return found


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunView:
    """A run with its command, configuration and versions, ready to print."""

    group: Group
    run: Run
    command: str
    config: str
    facts: list[tuple[str, str]]
    versions: str
    choices: Table
    events: list[str]


def run_views(groups: Sequence[Group]) -> list[RunView]:
    """All runs, in the order of the page."""
    return [_run_view(group, run) for group, run in each_run(groups)]


def _run_view(group: Group, run: Run) -> RunView:
    manifest = run.manifest
    versions = mapping(manifest.get("versions"))
    events = [_event(row) for row in run.events]
    more = [f"… and {len(events) - MOST_EVENTS} more before these"] if len(events) > MOST_EVENTS else []
    return RunView(
        group=group,
        run=run,
        command=command_line(manifest.get("command")),
        config=yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
        facts=[(name, value) for name, value in _facts(run) if value],
        versions=", ".join(f"{name} {words(value)}" for name, value in versions.items() if value),
        choices=Table(
            ["choice", "value", "reason"],
            [
                [words(row.get("name")), shown(row.get("value")), words(row.get("reason"))]
                for row in mappings(manifest.get("choices"))
            ],
        ),
        events=[*more, *events[-MOST_EVENTS:]],
    )


def _event(row: dict[str, Any]) -> str:
    """`step 20, blind-spot: ‖h_K‖ is 557`; most messages name their step themselves."""
    step = f"step {words(row.get('step'))}"
    message = words(row.get("message")).removeprefix(f"{step}: ")
    return f"{step}, {words(row.get('event'))}: {message}"


def _facts(run: Run) -> list[tuple[str, str]]:
    manifest, data, git = run.manifest, mapping(run.manifest.get("data")), mapping(run.manifest.get("git"))
    scores = " ".join(plain(depth.ce) for depth in run.depths[:MOST_DEPTHS])
    norms = " ".join(plain(depth.norm) for depth in run.depths[:MOST_DEPTHS])
    where = f" ({run.depths_from})" if scores else ""
    changed = " with uncommitted changes" if git.get("changed") else ""
    seconds = [number(value) or 0.0 for value in mapping(run.row.get("seconds")).values()]
    attempts = integer(run.row.get("attempts"))
    return [
        ("folder", run.folder),
        ("seed", words(run.seed)),
        ("parameters", plain(number(manifest.get("parameters"))) if manifest.get("parameters") else ""),
        (f"CE after each loop{where}", scores),
        (f"norm after each loop{where}", norms),
        ("tokenizer", run.tokenizer),
        ("data", " ".join(part for part in (words(data.get("corpus")), words(data.get("corpus_sha256"))[:16]) if part)),
        ("git", words(git.get("commit"))[:12] + changed if git.get("commit") else ""),
        ("system", words(manifest.get("system"))),
        (
            "threads × processes",
            f"{words(manifest.get('threads'))} × {words(manifest.get('world_size'))}"
            if manifest.get("threads")
            else "",
        ),
        ("attempts", words(attempts) if attempts and attempts > 1 else ""),
        ("time", f"{sum(seconds):,.0f} s" if seconds else ""),
    ]


def command_line(command: object) -> str:
    """A command as one would type it; where the program lay on somebody's disk is left out."""
    if not isinstance(command, list) or not command:
        return ""
    first, *rest = (words(part) for part in command)
    name = PurePath(first).name
    return shlex.join(["loopscope" if name in ("__main__.py", "loopscope") else name, *rest])


def commands(reproductions: Sequence[Reproduction]) -> list[str]:
    """The commands that made the reproductions."""
    found = [
        command_line(c)
        for r in reproductions
        for c in (r.grid.get("commands") or [])
        if isinstance(r.grid.get("commands"), list)
    ]
    return [command for command in found if command]
