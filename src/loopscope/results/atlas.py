"""atlas.json, and the probe.json of its rows: what an atlas was asked for, and everything that was found.

Every field is described in docs/atlas.md. atlas.json stands alone: tables, figure and page are made from it, also where
the rows it was made from are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from loopscope.results.audit import AuditVerdict, MotionKind, Variable
from loopscope.results.evaluation import Beyond, CacheTable, Split, beyond
from loopscope.results.record import Count, Record, Text
from loopscope.results.run import GitState
from loopscope.results.thresholds import FURTHEST

ATLAS, PROBE = "atlas.json", "probe.json"
HOPS = "hops"
"""The text of rows that are trained on pointer chasing, task:hops; empty is the text that rows share."""
FAR = 30
"""Loops that audits follow the norm through."""
LEARNT = 0.5
"""Share of right answers at the trained depth, mean over step counts, from which a task counts as learnt: guessing
among the ends of an array's paths is right for one in twelve or fewer, and answers of one step are not enough."""


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


# --- probe.json ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """How the tokens of a text move: what an atlas keeps of `audit.Motion`."""

    loops: Count
    """Loops that were run."""
    shares: dict[MotionKind, float]
    """Of tokens."""
    period: float | None
    purity: float | None
    contraction_rate: float | None
    settled_at: float
    settled_by_trained_depth: float
    median_cosine: list[float]
    summary: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class MendedShare:
    """What one map would mend of an exit's gap."""

    name: Text
    share: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstExit:
    """What the first exit lacks, as `auditing.exit_gap` says it."""

    loop: Count
    ce_exit: float | None
    ce_full: float | None
    gap: float | None
    gap_low: float | None
    gap_high: float | None
    verdict: Literal["badly read", "not yet computed", "both", "no gap"]
    summary: Text
    mends: list[MendedShare]
    notes: list[Text]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """What a token costs at the trained depth, counted on the model itself."""

    parameters: Count | None
    flops_per_token: float
    """Of a forward pass through all loops and the last readout."""
    cache_bytes_per_token: Count | None
    """Of the exact cache; None where it was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed(Record):
    """probe.json: what an atlas measures of a row besides scores and audits.

    Each part stands alone: one that a design does not offer, or that fails, is a sentence in `problems`.
    """

    step: Count | None
    motion: Moves | None = None
    exit_gap: FirstExit | None = None
    cache: CacheTable | None = None
    cost: TokenCost | None = None
    problems: dict[str, Text] = field(default_factory=dict)
    """Why a part is missing, by its name; `trained` and `untrained` are audits."""

    @property
    def is_whole(self) -> bool:
        """Whether every part is there or told."""
        parts = {"motion": self.motion, "exit_gap": self.exit_gap, "cache": self.cache, "cost": self.cost}
        return all(part is not None or name in self.problems for name, part in parts.items())


# --- atlas.json ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasRequest:
    """What all rows of an atlas have in common."""

    size: Text
    steps: Count
    hops_steps: Count
    """0: pointer chasing was left out."""
    seed: int
    data: list[Text]
    corpus_sha256: Text
    on_hops: dict[str, Text] = field(default_factory=dict)
    """Designs that are also trained on pointer chasing, with the reason for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A design in words."""

    name: Text
    title: Text
    source: Text
    summary: Text
    text: Text
    """The rest of its docstring: equations, what was open and how it was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What an atlas keeps of an audit."""

    verdict: AuditVerdict
    summary: Text
    variables: list[Variable]
    norms: list[float | None]
    """Mean ‖h_k‖ after loops 1, 2, … 30."""
    notes: list[Text]

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

    def norm(self, k: int | None) -> float | None:
        """‖h_k‖."""
        return self.norms[k - 1] if k and 0 < k <= len(self.norms) else None


EntryState = Literal["", "finished", "failed", "open", "running", "not built"]
NOT_BUILT: EntryState = "not built"
"""Of a design that refuses a setting: there is no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One design in one setting: everything that was measured of it, as far as it came."""

    design: Text
    row: Text = ""
    """Name of its folder; empty where there is none."""
    state: EntryState = ""
    stage: Text = ""
    error: Text = ""
    seconds: float | None = None
    steps: Count | None = None
    num_loops: Count | None = None
    unigram_ce: float | None = None
    problems: dict[str, Text] = field(default_factory=dict)
    """What could not be read, by file."""
    recipe: Text
    text: Text
    scores: Split | None = None
    """On validation text, after every loop up to some beyond the trained depth."""
    untrained: Audited | None = None
    trained: Audited | None = None
    probe: Probed | None = None

    ce: float | None = field(init=False, default=None)
    """Validation cross-entropy at the trained depth. It follows from the rest, as what comes after it does."""
    accuracy: float | None = field(init=False, default=None)
    """Of a task: the share of right answers at the trained depth, mean over step counts."""
    is_learnt: bool | None = field(init=False, default=None)
    """Of a task: whether it is; of text None, where nothing is all or none."""
    growth_in_training: float | None = field(init=False, default=None)
    """‖h_K‖ after training over ‖h_K‖ before, on the same tokens."""
    growth_beyond: float | None = field(init=False, default=None)
    """‖h_30‖ over ‖h_K‖ after training; None where it does not run so far."""
    beyond: Text | None = field(init=False, default=None)
    """The verdict on depths beyond the trained one, in a sentence."""

    def __post_init__(self) -> None:
        depth = self.num_loops
        full = self.scores.at(depth) if self.scores and depth else None
        answers = self.scores.answers if self.scores else []
        shares = [each.accuracy[depth] for each in answers if depth in each.accuracy]
        accuracy = sum(shares) / len(shares) if shares else None
        after, before = (each.norm(depth) if each else None for each in (self.trained, self.untrained))
        far = self.trained.norm(FAR) if self.trained else None
        found = self.deeper
        follows = {
            "ce": full.ce if full else None,
            "accuracy": accuracy,
            "is_learnt": None if accuracy is None else accuracy >= LEARNT,
            "growth_in_training": after / before if after is not None and before else None,
            "growth_beyond": far / after if far is not None and after else None,
            "beyond": found.sentence if found else None,
        }
        for name, value in follows.items():
            object.__setattr__(self, name, value)

    @property
    def setting(self) -> Setting:
        """What it was trained on, and by which recipe."""
        return Setting(self.recipe, self.text)

    @property
    def anchor(self) -> str:
        """Where its evidence stands on the page."""
        return f"{self.design}-{self.setting.key}"

    @property
    def deeper(self) -> Beyond | None:
        """The verdict on depths beyond the trained one."""
        return beyond(self.scores, self.num_loops) if self.scores and self.num_loops else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtlasRecord(Record):
    """atlas.json."""

    asked: AtlasRequest
    commands: list[list[Text]]
    designs: list[Described]
    entries: list[Entry]
    versions: dict[str, Text | None]
    git: GitState | None
    system: Text
    started: Text

    def settings(self) -> list[Setting]:
        """Settings that something was measured in, in the order they are shown."""
        there = {entry.setting for entry in self.entries}
        return [setting for setting in SETTINGS if setting in there]

    def entry(self, design: str, setting: Setting) -> Entry | None:
        """One design in one setting; None where it was not asked for, or has not begun."""
        return next((one for one in self.entries if (one.design, one.setting) == (design, setting)), None)
