"""The sections of the page that are text: audits with remedies, claims, differences from the paper, every run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from loopscope.config import config_to_yaml
from loopscope.files import setting, words
from loopscope.results.audit import AuditResult, Push, Variable
from loopscope.results.measures import Run
from loopscope.results.reproduction import FAILS, HOLDS, Judgement, Measured, Reproduction
from loopscope.results.run import LoggedEvent
from loopscope.show import sentences
from loopscope.show.inputs import Group, each_run
from loopscope.show.numbers import fold, percent, plain, signed
from loopscope.show.table import Column, Table, columns

MOST_EVENTS = 20
MOST_DEPTHS = 32
"""Loops whose scores are printed; the charts have all of them."""
VERDICTS = {HOLDS: "good", FAILS: "bad", "blind-spot": "bad", "controlled": "good"}
VERDICTS |= {"blind": "bad", "weak": "open", "visible": "good", "removed": "good", "damped": "good"}
"""How a verdict is coloured; what is not here stays neutral. The word itself is always printed."""
IN_WORDS = {"blind-spot": "blind spot"}


def tone(verdict: str) -> str:
    """good, bad or open."""
    return VERDICTS.get(verdict, "open")


# --- audits ----------------------------------------------------------------------------------------------------------


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
    free: list[str]
    """Of every blind variable, how far it is free and whether training drives it; nothing in audits without that."""
    numbers: Table
    """Every variable with all that was measured of it."""
    interventions: Table
    tokens: Table
    motion: str
    """How tokens move over many loops; empty where that was not asked for."""
    notes: list[str]

    @property
    def remedies(self) -> list[sentences.Advice]:
        """What to do about each blind variable."""
        return [remedy for variable in self.variables if (remedy := sentences.remedy(variable)) is not None]


def audit_views(groups: Sequence[Group]) -> list[AuditView]:
    """All audits, in the order of the page."""
    return [_audit_view(group, run, run.audit) for group, run in each_run(groups) if run.audit]


def _audit_view(group: Group, run: Run, audit: AuditResult) -> AuditView:
    return AuditView(
        group=group,
        run=run,
        verdict=IN_WORDS.get(audit.verdict, audit.verdict),
        tone=tone(audit.verdict),
        summary=sentences.summary(audit),
        hidden=_hidden(audit),
        variables=audit.variables,
        free=[told for variable in audit.variables if variable.verdict == "blind" and (told := _told(variable, audit))],
        numbers=_numbers(run, audit),
        interventions=Table(
            "Interventions on the scale",
            ["intervention", Column("CE", plain), Column("change of CE", partial(signed, decimals=4))],
            [[each.name, each.ce, each.delta_ce] for each in audit.interventions],
        ),
        tokens=Table(
            "Heaviest tokens",
            ["token", *columns(plain, "position", "norm", "times the median")],
            [
                [_quoted(each.text or "") or words(each.token), each.position, each.norm, each.ratio]
                for each in audit.heaviest_tokens[:8]
            ],
        ),
        motion=sentences.motion(audit.token_motion) if audit.token_motion else "",
        notes=audit.checks.notes,
    )


def _told(variable: Variable, audit: AuditResult) -> str:
    """`scale: free to grow 70-fold before it costs 1 % of perplexity; training drives it up by 4 % a step.`"""
    parts = [] if variable.free_range is None else [sentences.free_to_grow(variable.free_range, variable.free_tokens)]
    parts += filter(None, [sentences.driven(variable)])
    parts += [f"under a reward it {_pushed(push)}" for push in _pushes(audit) if push.name == variable.name]
    return f"{variable.name}: {'; '.join(parts)}." if parts else ""


def _pushes(audit: AuditResult) -> list[Push]:
    return audit.push.pushes if audit.push else []


def _pushed(push: Push) -> str:
    """`ran 17.6-fold, for +0.15 nats`."""
    return f"{'ran' if push.far else 'went'} {fold(push.growth)}, for {signed(push.paid)} nats"


def _numbers(run: Run, audit: AuditResult) -> Table:
    """A row for every variable; what no variable of this audit has is no column."""
    pushes = {push.name: _pushed(push) for push in _pushes(audit)}
    header = [
        *(Column("variable"), Column("verdict"), Column("free range", fold), Column("tokens free tenfold", percent)),
        *(Column("training"), Column("push test"), *columns(plain, "visibility", "delayed", "activity")),
        Column("evidence"),
    ]
    rows: list[list[object]] = []
    for each in audit.variables:
        seen = (each.visibility, each.delayed_visibility, each.activity, sentences.evidence(each))
        tried = (_drift(each), pushes.get(each.name))
        rows.append([each.name, each.verdict, each.free_range, each.free_tokens, *tried, *seen])
    return Table(f"Variables of {run.name}", header, rows).measured()


def _drift(variable: Variable) -> str | None:
    """+4 % a step, or not driven."""
    if variable.driven is None or variable.drift is None:
        return None
    return f"{'+' if variable.drift > 0 else '−'}{percent(variable.drift)} a step" if variable.driven else "not driven"


def _quoted(text: str) -> str:
    """A token's text with its blanks and line breaks to be seen."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _hidden(audit: AuditResult) -> str:
    """How many directions of the state no loss sees, and which of them have names."""
    found = audit.blind_directions
    names = f" ({', '.join(each.name for each in found.named)})" if found.named and found.dimension else ""
    return f"{found.dimension} blind direction{'' if found.dimension == 1 else 's'}{names}"


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
    """Reproduction, size and recipe."""
    split: str
    claims: list[ClaimView]
    is_folded: bool
    """Whether another split of the same stands before it."""

    @property
    def title(self) -> str:
        """What it is about and on which text."""
        return " · ".join(part for part in (self.about, self.split) if part)

    def with_tone(self, tone: str) -> list[ClaimView]:
        """Those that hold (good), do not (bad), or about which nothing is said (open)."""
        return [claim for claim in self.claims if claim.tone == tone]


SPLIT_NAMES = {"valid": "validation"}


def claim_tables(reproductions: Sequence[Reproduction]) -> list[ClaimTable]:
    """A table per reproduction, recipe and split, in the order of the files."""
    tables: dict[str, dict[str, list[ClaimView]]] = {}
    for reproduction in reproductions:
        claims = reproduction.claims
        for claim in claims.claims if claims else []:
            parts = (reproduction.name, claims.size if claims else "", claim.recipe and f"{claim.recipe} recipe")
            splits = tables.setdefault(" · ".join(part for part in parts if part), {})
            split = claim.split and f"{SPLIT_NAMES.get(claim.split, claim.split)} text"
            splits.setdefault(split, []).append(_claim_view(claim))
    return [
        ClaimTable(about, split, claims, is_folded=place > 0)
        for about, splits in tables.items()
        for place, (split, claims) in enumerate(splits.items())
    ]


def _claim_view(claim: Judgement) -> ClaimView:
    judged = [quantity for quantity in claim.quantities if quantity.headline] or claim.quantities
    return ClaimView(
        id=claim.id,
        title=claim.title,
        measured=claim.measured,
        rule=claim.rule,
        paper=[f"{value.value} [{value.source}]" for value in claim.paper],
        ours=[_quantity(quantity) for quantity in judged if quantity.mean is not None],
        seeds=[_seeds(quantity) for quantity in claim.quantities if quantity.seeds],
        verdict=claim.verdict,
        tone=tone(claim.verdict),
        reason=claim.reason,
    )


def _quantity(quantity: Measured) -> str:
    """`norm ratio: 225 × [180, 260], n = 3`."""

    def text(value: float | None) -> str:
        return f"{'+' if quantity.signed and (value or 0) > 0 else ''}{plain(value)}"

    has_interval = quantity.low is not None and quantity.high is not None
    interval = f"[{text(quantity.low)}, {text(quantity.high)}]" if has_interval else ""
    parts = " ".join(filter(None, (text(quantity.mean), quantity.unit, interval)))
    return f"{quantity.name}: {parts}, n\u00a0=\u00a0{quantity.n}"


def _seeds(quantity: Measured) -> str:
    each = [f"{one.seed}: {plain(one.value)}" for one in quantity.seeds]
    return f"{quantity.name} ({quantity.unit}), by seed {'; '.join(each)}"


def claim_notes(reproductions: Sequence[Reproduction]) -> list[str]:
    """Where the paper's values are quoted from, and what the intervals are."""
    notes: dict[str, None] = {}
    for claims in (reproduction.claims for reproduction in reproductions if reproduction.claims):
        notes |= dict.fromkeys(f"[{name}] {text}" for name, text in claims.sources.items())
        if claims.interval:
            notes[f"Brackets: {claims.interval}"] = None
    return list(notes)


def differences(reproductions: Sequence[Reproduction]) -> list[Table]:
    """What each grid does differently from the paper, by recipe."""
    found = []
    for reproduction in reproductions:
        for recipe, part in reproduction.grid.recipes.items() if reproduction.grid else ():
            rows = [[each.field, each.paper, each.here] for each in part.differences]
            if rows:
                title = f"{reproduction.name}, {recipe} recipe: what differs from the paper"
                found.append(Table(title, ["setting", "in the paper", "here"], rows))
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
    events = [_event(row) for row in run.events]
    more = [f"… and {len(events) - MOST_EVENTS} more before these"] if len(events) > MOST_EVENTS else []
    return RunView(
        group=group,
        run=run,
        command=command_line(manifest.command),
        config=config_to_yaml(run.config) if run.config else "",
        facts=[(name, value) for name, value in _facts(run) if value],
        versions=", ".join(f"{name} {value}" for name, value in manifest.versions.items() if value),
        choices=Table(
            "Every automatic choice with its reason",
            ["choice", "value", "reason"],
            [[choice.name, setting(choice.value), words(choice.reason)] for choice in manifest.choices],
        ),
        events=[*more, *events[-MOST_EVENTS:]],
    )


def _event(event: LoggedEvent) -> str:
    """`step 20, blind-spot: ‖h_K‖ is 557`; most messages name their step themselves."""
    step = f"step {event.step}"
    return f"{step}, {event.event}: {event.message.removeprefix(f'{step}: ')}"


def _facts(run: Run) -> list[tuple[str, str]]:
    manifest, data, git = run.manifest, run.manifest.data, run.manifest.git
    scores = " ".join(plain(depth.ce) for depth in run.depths[:MOST_DEPTHS])
    norms = " ".join(plain(depth.norm) for depth in run.depths[:MOST_DEPTHS])
    where = f" ({run.depths_from})" if scores else ""
    changed = " with uncommitted changes" if git and git.changed else ""
    seconds = list(run.row.seconds.values()) if run.row else []
    attempts = run.row.attempts if run.row else 0
    return [
        ("folder", run.folder),
        ("seed", words(run.seed)),
        ("parameters", plain(manifest.parameters) if manifest.parameters else ""),
        (f"CE after each loop{where}", scores),
        (f"norm after each loop{where}", norms),
        ("tokenizer", run.tokenizer),
        ("data", f"{data.corpus} {data.corpus_sha256[:16]}".strip() if data else ""),
        ("git", git.commit[:12] + changed if git else ""),
        ("system", manifest.system),
        (
            "threads × processes",
            f"{manifest.threads} × {manifest.world_size or ''}" if manifest.threads else "",
        ),
        ("attempts", str(attempts) if attempts > 1 else ""),
        ("time", f"{sum(seconds):,.0f} s" if seconds else ""),
    ]


def command_line(command: Sequence[str]) -> str:
    """A command as one would type it; where the program lay on somebody's disk is left out."""
    if not command:
        return ""
    first, *rest = map(words, command)
    name = PurePath(first).name
    return shlex.join(["loopscope" if name in ("__main__.py", "loopscope") else name, *rest])


def commands(reproductions: Sequence[Reproduction]) -> list[str]:
    """The commands that made the reproductions."""
    grids = [reproduction.grid for reproduction in reproductions if reproduction.grid]
    return [line for grid in grids for command in grid.commands if (line := command_line(command))]
