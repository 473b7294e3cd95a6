"""atlas.json: what an atlas was asked for and what it found, as it is written, read and made from rows. No torch here.

Every field is described in docs/atlas.md. The file stands alone: tables, figure and page are made from it, also where
the rows it was made from are gone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from loopscope.checks import check_at_least, check_not_negative
from loopscope.designs import DESIGNS, Design
from loopscope.errors import ConfigError, RunError, suggest
from loopscope.files import Part, Problems, read_as, without_nan, write_json
from loopscope.machine import provenance
from loopscope.options import written
from loopscope.readings import Run, read_run
from loopscope.results.audit import AuditResult, Variable
from loopscope.results.evaluation import Beyond, Split, beyond
from loopscope.results.record import as_json, of_part
from loopscope.results.thresholds import FURTHEST
from loopscope.rows.probe import Probe, read_probe
from loopscope.show import sentences

SCHEMA_VERSION = 1
FILE = "atlas.json"
STEPS = 400
"""Optimiser steps of a row of text: `loopscope quickstart` shows the paper's blind spot after 150."""
HOPS_STEPS = 1000
"""Of pointer chasing: what the preset hops takes to learn it."""
SEED = 42
HOPS = "hops"
"""The text of rows that are trained on pointer chasing, task:hops; empty is the text that rows share."""
FAR = 30
"""Loops that audits follow the norm through."""
LEARNT = 0.5
"""Share of right answers at the trained depth, mean over step counts, from which a task counts as learnt: guessing
among the ends of an array's paths is right for one in twelve or fewer, and answers of one step are not enough."""
NOT_BUILT = "not built"
"""State of a design that refuses a setting: there is no row."""


def parse_designs(text: str) -> tuple[str, ...]:
    """`huginn,ouro` or `all`, in the order of the registry; a wrong name gets a suggestion."""
    if text == "all":
        return tuple(DESIGNS)
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked:
        raise ConfigError.of("designs", text, "names of designs with commas between, or all; see docs/designs.md")
    for name in asked:
        if name not in DESIGNS:
            raise ConfigError.of("designs", name, suggest(name, DESIGNS))
    return tuple(name for name in DESIGNS if name in asked)


@dataclass(frozen=True, kw_only=True)
class AtlasOptions:
    """What a user asks for."""

    designs: Annotated[Sequence[str], written(parse_designs, lambda names: "all")] = tuple(DESIGNS)
    """Designs with commas between; see docs/designs.md for their names."""
    steps: int = STEPS
    """Training steps of a row of text."""
    hops_steps: int = HOPS_STEPS
    """Training steps of a row of pointer chasing (task:hops), which at most six designs get; 0 leaves it out."""
    data: tuple[str, ...] | None = None
    """Training text, as in `loopscope train`; by default the built-in one."""
    seed: int = SEED
    """Seed of weights, batches and dropout."""
    threads: int = 1
    """CPU threads of a row."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "threads")
        check_not_negative(self, "hops_steps")
        if not 0 <= self.seed < 2**31:
            raise ConfigError.of("seed", self.seed, "must be between 0 and 2³¹ − 1")


class Setting(NamedTuple):
    """What a design is trained on, and by which recipe."""

    recipe: str
    text: str

    @property
    def key(self) -> str:
        """A word for it: paper, modern, hops."""
        return self.text or self.recipe

    @property
    def title(self) -> str:
        """For people."""
        return "pointer chasing" if self.text == HOPS else f"{self.recipe} recipe, {self.text or 'text'}"


SETTINGS = (Setting("paper", ""), Setting("modern", ""), Setting("modern", HOPS))
"""In the order they are shown."""


# --- what was asked for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What all rows of an atlas have in common."""

    size: str
    steps: int | None
    hops_steps: int | None
    """0: pointer chasing was left out."""
    seed: int | None
    data: list[str]
    corpus_sha256: str
    on_hops: dict[str, Any] = field(default_factory=dict)
    """Designs that are also trained on pointer chasing, with the reason for each."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """A design in words."""

    name: str
    title: str
    source: str
    summary: str
    text: str
    """The rest of its docstring: equations, what was open and how it was chosen."""


def described(design: Design) -> Described:
    """A design of the registry."""
    text = inspect.getdoc(design.make) or ""
    rest = text.partition("\n")[2].strip()
    return Described(
        name=design.name, title=design.title, source=design.source, summary=design.summary.strip(), text=rest
    )


# --- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Audited:
    """What an audit said of a design."""

    verdict: str
    """blind-spot, controlled or undecided."""
    summary: str
    variables: list[Variable]
    norms: list[float | None]
    """Mean ‖h_k‖ after loops 1, 2, … 30."""
    notes: list[str]

    @property
    def blind(self) -> list[str]:
        """Blind variables by name."""
        return [variable.name for variable in self.variables if variable.verdict == "blind"]

    @property
    def freest(self) -> float | None:
        """The largest free range of any variable that is not removed or inert: what can run furthest unseen."""
        held = ("removed", "inert")
        ranges = [one.free_range for one in self.variables if one.verdict not in held and one.free_range is not None]
        return min(max(ranges), FURTHEST) if ranges else None

    def norm(self, k: int) -> float | None:
        """‖h_k‖."""
        return self.norms[k - 1] if 0 < k <= len(self.norms) else None

    @classmethod
    def of(cls, audit: AuditResult | None) -> Self | None:
        """From audit.json."""
        if audit is None:
            return None
        norms: list[float | None] = [loop.norm for loop in audit.loops]
        return cls(
            verdict=audit.verdict,
            summary=sentences.summary(audit),
            variables=audit.variables,
            norms=norms[:FAR],
            notes=audit.checks.notes,
        )

    @classmethod
    def from_json(cls, part: Part) -> Self | None:
        """What can be read of it; None where there is none."""
        if not part.values:
            return None
        found = [of_part(row, Variable) for row in part.parts("variables")]
        return part.as_a(cls, variables=[one for one in found if one is not None])


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One design in one setting: everything that was measured of it, as far as it came."""

    design: str
    setting: Setting
    row: str = ""
    """Name of its folder; empty where there is none."""
    state: str = ""
    """finished, failed, open, running, or not built."""
    stage: str = ""
    error: str = ""
    seconds: float | None = None
    steps: int | None = None
    num_loops: int | None = None
    scores: Split | None = None
    """On validation text, after every loop up to some beyond the trained depth."""
    unigram_ce: float | None = None
    untrained: Audited | None = None
    trained: Audited | None = None
    probe: Probe | None = None
    problems: Problems = field(default_factory=dict)
    """What could not be read, by file."""

    @classmethod
    def failed(cls, design: str, setting: Setting, state: str, error: str) -> Self:
        """One that came to nothing."""
        return cls(design=design, setting=setting, state=state, error=error)

    @classmethod
    def of(cls, run: Run, folder: Path) -> Self:
        """From the files of a row; what is missing or damaged is a gap."""
        problems = dict(run.problems)
        probe = read_probe(folder, problems)
        row, valid = run.row, run.splits.get("valid")
        return cls(
            design=run.condition,
            setting=Setting(run.recipe, row.text if row else ""),
            row=folder.name,
            state=(row.state if row else "") or "",
            stage=(row.stage if row else "") or "",
            error=(row.error if row else "") or "",
            seconds=sum(row.seconds.values()) if row else None,
            steps=run.steps,
            num_loops=run.num_loops or None,
            scores=valid,
            unigram_ce=run.evaluation.unigram_ce.get("valid") if run.evaluation else None,
            untrained=Audited.of(run.untrained),
            trained=Audited.of(run.audit),
            probe=probe,
            problems=problems,
        )

    @property
    def anchor(self) -> str:
        """Where its evidence stands on the page."""
        return f"{self.design}-{self.setting.key}"

    @property
    def ce(self) -> float | None:
        """Validation cross-entropy at the trained depth."""
        full = self.scores.at(self.num_loops) if self.scores and self.num_loops else None
        return full.ce if full else None

    @property
    def accuracy(self) -> float | None:
        """Of a task: the share of right answers at the trained depth, mean over step counts."""
        answers = self.scores.answers if self.scores else []
        shares = [each.accuracy[self.num_loops] for each in answers if self.num_loops in each.accuracy]
        return sum(shares) / len(shares) if shares else None

    @property
    def is_learnt(self) -> bool | None:
        """Of a task: whether it is; of text None, where nothing is all or none."""
        return None if self.accuracy is None else self.accuracy >= LEARNT

    @property
    def growth_in_training(self) -> float | None:
        """‖h_K‖ after training over ‖h_K‖ before, on the same tokens."""
        return self._ratio(self.trained, self.num_loops, self.untrained, self.num_loops)

    @property
    def growth_beyond(self) -> float | None:
        """‖h_30‖ over ‖h_K‖ after training; None where it does not run so far."""
        return self._ratio(self.trained, FAR, self.trained, self.num_loops)

    @staticmethod
    def _ratio(above: Audited | None, k: int | None, below: Audited | None, base: int | None) -> float | None:
        high = above.norm(k) if above and k else None
        low = below.norm(base) if below and base else None
        return high / low if high is not None and low else None

    @property
    def beyond(self) -> Beyond | None:
        """The verdict on depths beyond the trained one."""
        return beyond(self.scores, self.num_loops) if self.scores and self.num_loops else None

    def to_json(self) -> dict[str, Any]:
        """As atlas.json keeps it, with what follows from it."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        verdict = self.beyond
        return {
            **plain,
            "recipe": self.setting.recipe,
            "text": self.setting.text,
            "scores": as_json(self.scores),
            "untrained": None if self.untrained is None else asdict(self.untrained),
            "trained": None if self.trained is None else asdict(self.trained),
            "probe": None if self.probe is None else self.probe.to_json(),
            "ce": self.ce,
            "accuracy": self.accuracy,
            "is_learnt": self.is_learnt,
            "growth_in_training": self.growth_in_training,
            "growth_beyond": self.growth_beyond,
            "beyond": None if verdict is None else verdict.sentence,
        }

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it; what follows from the rest is not read."""
        scores, probe, told = part.part("scores"), part.part("probe"), part.part("problems")
        return part.as_a(
            cls,
            setting=Setting(part.text("recipe"), part.text("text")),
            scores=of_part(scores, Split) if scores.values else None,
            untrained=Audited.from_json(part.part("untrained")),
            trained=Audited.from_json(part.part("trained")),
            probe=Probe.from_json(probe) if probe.values else None,
            problems={name: told.text(name) for name in told.values},
        )


_PLAIN = ("design", "row", "state", "stage", "error", "seconds", "steps", "num_loops", "unigram_ce", "problems")


@dataclass(frozen=True, kw_only=True)
class AtlasRecord:
    """atlas.json."""

    asked: Asked
    commands: list[list[str]]
    designs: list[Described]
    entries: list[Entry]
    versions: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    system: str = ""
    started: str = ""

    @classmethod
    def here(cls, asked: Asked, command: list[str], designs: list[Described], entries: list[Entry]) -> Self:
        """A request that is made on this machine, now."""
        return cls(
            asked=asked,
            commands=[command],
            designs=designs,
            entries=entries,
            **provenance(),
        )

    def settings(self) -> list[Setting]:
        """Settings that something was measured in, in the order they are shown."""
        there = {entry.setting for entry in self.entries}
        return [setting for setting in SETTINGS if setting in there]

    def entry(self, design: str, setting: Setting) -> Entry | None:
        """One design in one setting; None where it was not asked for, or has not begun."""
        return next((one for one in self.entries if (one.design, one.setting) == (design, setting)), None)

    def to_json(self) -> dict[str, Any]:
        """What atlas.json holds."""
        plain = {
            **vars(self),
            "asked": asdict(self.asked),
            "designs": [asdict(design) for design in self.designs],
            "entries": [entry.to_json() for entry in self.entries],
        }
        return without_nan({"schema_version": SCHEMA_VERSION, **plain})

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        return part.as_a(
            cls,
            asked=part.part("asked").as_a(Asked),
            designs=[row.as_a(Described) for row in part.parts("designs") if row.text("name")],
            entries=[entry for row in part.parts("entries") if (entry := Entry.from_json(row)).design],
            git=part.part("git").values or None,
        )


# --- the file --------------------------------------------------------------------------------------------------------


def read_atlas(out: Path) -> AtlasRecord:
    """atlas.json, whole."""
    path, problems = out / FILE, Problems()
    if not path.is_file():
        raise RunError(f"{out} holds no atlas: it has no {FILE}; loopscope atlas --out {out} makes one")
    found = read_as(path, AtlasRecord.from_json, problems)
    problem = problems.get(FILE, "" if found is not None and found.designs else "names no design")
    problem = problem.removesuffix(" and is left out")  # a file that is refused is not
    if found is None or problem:
        raise RunError(f"{path} {problem}; move it away and run its command again: finished rows are not run again")
    return found


def note_request(out: Path, asked: AtlasRecord) -> None:
    """Write atlas.json before any row runs, or add the request to the one that is there; its findings stay."""
    if (out / FILE).exists():
        before = read_atlas(out)
        _check_same(out, before.asked, asked.asked)
        new = [command for command in asked.commands if command not in before.commands]
        names = {design.name for design in asked.designs}
        kept = {(entry.design, entry.setting): entry for entry in (*before.entries, *asked.entries)}
        asked = replace(
            asked,
            commands=[*before.commands, *new],
            designs=[*(design for design in before.designs if design.name not in names), *asked.designs],
            entries=list(kept.values()),
            started=before.started or asked.started,
        )
    write_json(out / FILE, asked.to_json())


def _check_same(out: Path, before: Asked, now: Asked) -> None:
    for name in ("size", "steps", "hops_steps", "seed", "data", "corpus_sha256"):
        theirs, ours = getattr(before, name), getattr(now, name)
        if theirs != ours and not (name == "hops_steps" and not (theirs and ours)):
            flag = f"--{name.replace('_', '-')}"
            if name == "corpus_sha256":
                told = f"was started on text of SHA-256 {theirs}, and --data now has {ours}: restore the text, or"
                raise RunError(f"{out} {told} choose another --out")
            raise RunError(f"{out} was started with {flag} {theirs!r}, not {ours!r}; choose another --out")


def collect(out: Path, order: Sequence[str]) -> AtlasRecord:
    """atlas.json with what the rows say now; rows that are gone stay as they were told. Written back.

    `order` is that of designs: the registry's, whatever order they were asked for in.
    """
    record = read_atlas(out)
    entries = {(entry.design, entry.setting): entry for entry in record.entries}
    for folder in sorted(path.parent for path in (out / "rows").glob("*/row.json")):
        entry = Entry.of(read_run(folder, folder.name), folder)
        if entry.design and entry.setting in SETTINGS:
            entries[entry.design, entry.setting] = entry
    place = {name: n for n, name in enumerate(order)}
    designs = sorted(record.designs, key=lambda each: place.get(each.name, len(place)))
    names = {design.name: n for n, design in enumerate(designs)}
    listed = [entry for entry in entries.values() if entry.design in names and entry.setting in SETTINGS]
    listed.sort(key=lambda entry: (names[entry.design], SETTINGS.index(entry.setting)))
    record = replace(record, designs=designs, entries=listed)
    write_json(out / FILE, record.to_json())
    return record
