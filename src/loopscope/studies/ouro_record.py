"""ouro.json: what `loopscope reproduce ouro` measured of one model, section by section. No torch here.

A section that is not measured yet is null, so that an interrupted command goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from loopscope.errors import RunError
from loopscope.files import Part, Problems, read_as, without_nan, write_json
from loopscope.results.evaluation import Split
from loopscope.results.record import as_json, of_part

SCHEMA_VERSION = 1
FILE = "ouro.json"

AS_IT_IS = "norm"
"""The state is scaled before the norm that is part of the readout."""
REMOVED = "none"
"""There is no norm between the state and the head."""
FROZEN = "frozen"
"""The norm goes on dividing by the scale that the state had at α = 1: what a loss would see if nothing were hidden."""
READOUTS = {AS_IT_IS: "with the norm", REMOVED: "without the norm", FROZEN: "norm held at α = 1"}

HOLDS, FAILS, NOT_MEASURED = "holds", "does not hold here", "not measured"

NORM_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
EXIT_THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
"""Of the cumulative exit probability at which a token would leave."""
FLAT, SHARP = 0.01, 0.1
"""Nats by which CE over α from 0.1 to 10 varies at most where scale is hidden, and at least where it is seen; as C7."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command asked for; another one does not go on with its results."""

    depths: list[int]
    data: list[str]
    """Empty: the target's own text."""
    tokenizer: str
    length: int | None
    max_tokens: int | None
    sweep_tokens: int | None
    """Tokens that sweeps, gradients, norms and gates are measured on."""
    tasks: list[str] = field(default_factory=list)
    """Downstream tasks of lm-evaluation-harness."""
    task_folder: str = ""
    """Where further tasks are."""
    limit: int | None = None
    """Most questions of a task."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Which model it was."""

    name: str
    step: int | None
    num_loops: int | None
    width: int | None
    vocab_size: int | None
    parameters: int | None
    dtype: str
    device: str


@dataclass(frozen=True, kw_only=True)
class LoopStates:
    """What the states after loop k show."""

    k: int
    sweep: dict[str, list[float | None]]
    """Readout → CE at each α."""
    radial_share: dict[str, float]
    """Readout → median over tokens of |⟨∇_h CE, h⟩|/(‖∇_h CE‖‖h‖)."""
    norm: float | None
    """Mean over tokens of ‖h_k‖."""
    norm_quantiles: list[float | None]

    def span(self, readout: str) -> float | None:
        """By how many nats CE varies over the sweep."""
        found = [ce for ce in self.sweep.get(readout, ()) if ce is not None]
        return max(found) - min(found) if found and len(found) == len(self.sweep[readout]) else None

    @classmethod
    def from_json(cls, part: Part, k: int) -> Self:
        """What can be read of it."""
        sweep = {name: part.part("sweep").numbers(name) for name in READOUTS if name in part.part("sweep").values}
        shares = part.part("radial_share")
        known = {name: share for name in READOUTS if (share := shares.number(name)) is not None}
        return part.as_a(cls, k=k, sweep=sweep, radial_share=known)


@dataclass(frozen=True, kw_only=True)
class States:
    """Sweeps, gradients and norms at every depth."""

    tokens: int | None
    alphas: list[float | None]
    loops: list[LoopStates]

    def at(self, k: int | None) -> LoopStates | None:
        """Those of loop k."""
        return next((loop for loop in self.loops if loop.k == k), None)

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        loops = [LoopStates.from_json(row, k) for k, row in part.by_number("loops").items()]
        return part.as_a(cls, loops=loops)


@dataclass(frozen=True, kw_only=True)
class GateLoop:
    """The exit gate at loop k: λ_k, and p_k = λ_k·Π_{j<k}(1 − λ_j), the last loop taking the rest."""

    k: int
    leaving: float | None
    """Mean over tokens of λ_k."""
    exit_probability: float | None
    """Mean over tokens of p_k."""
    exit_quantiles: list[float | None]
    """Of p_k over tokens."""


@dataclass(frozen=True, kw_only=True)
class GateThreshold:
    """Leaving at the first loop whose cumulative exit probability reaches a threshold."""

    threshold: float | None
    mean_loops: float | None
    shares: list[float | None]
    """Of tokens that leave at each loop."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The distribution of exits at the trained depth."""

    tokens: int | None
    expected_loops: float | None
    """Mean over tokens of Σ k·p_k."""
    loops: list[GateLoop]
    thresholds: list[GateThreshold]

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        loops = [row.as_a(GateLoop, k=k) for k, row in part.by_number("loops").items()]
        return part.as_a(cls, loops=loops, thresholds=[row.as_a(GateThreshold) for row in part.parts("thresholds")])


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of k loops and one readout."""

    k: int
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One metric of a downstream task at one depth."""

    k: int
    task: str
    metric: str
    value: float | None
    error: float | None
    """Standard error, where the harness gives one."""


@dataclass(frozen=True, kw_only=True)
class OuroRecord:
    """ouro.json."""

    asked: Asked
    subject: Subject
    text: str
    """What was read."""
    text_sha256: str = ""
    """Of all of it."""
    depths: Split | None = None
    throughput: list[Speed] = field(default_factory=list)
    states: States | None = None
    gate: Gate | None = None
    """Null for a model without one, too."""
    tasks: list[TaskScore] = field(default_factory=list)

    @property
    def last(self) -> LoopStates | None:
        """The states at the trained depth."""
        return None if self.states is None else self.states.at(self.subject.num_loops)

    @property
    def verdict(self) -> str:
        """Whether the final state's scale is hidden by the norm and would be seen without: Figure 5 in one line."""
        if self.last is None:
            return NOT_MEASURED
        hidden, seen = self.last.span(AS_IT_IS), self.last.span(REMOVED)
        if hidden is None and seen is None:
            return NOT_MEASURED
        whole = (hidden is None or hidden <= FLAT) and (seen is None or seen >= SHARP)
        return HOLDS if whole else FAILS

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        plain = {**asdict(self), "depths": as_json(self.depths)}
        return without_nan({"schema_version": SCHEMA_VERSION, **plain, "verdict": self.verdict})

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        there = {name for name, value in part.values.items() if value is not None}
        return part.as_a(
            cls,
            asked=part.part("asked").as_a(Asked, depths=part.part("asked").integers("depths")),
            subject=part.part("subject").as_a(Subject),
            depths=of_part(part.part("depths"), Split) if "depths" in there else None,
            throughput=[row.as_a(Speed, k=k) for k, row in part.by_number("throughput").items()],
            states=States.from_json(part.part("states")) if "states" in there else None,
            gate=Gate.from_json(part.part("gate")) if "gate" in there else None,
            tasks=[row.as_a(TaskScore, k=k) for row in part.parts("tasks") if (k := row.integer("k")) is not None],
        )

    def write(self, folder: Path) -> Self:
        """Keep it, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, self.to_json())
        return self


def begun(folder: Path, fresh: OuroRecord, say: Callable[[str], None]) -> OuroRecord:
    """What an earlier command has measured already for the same request, model and text, or the fresh record.

    Results of another request are not overwritten, and those of a damaged file are measured again.
    """
    problems: Problems = {}
    found = read_as(folder / FILE, OuroRecord.from_json, problems)
    if found is None or problems:
        if (folder / FILE).exists():
            say(f"{folder / FILE} is damaged: measuring again")
        return fresh
    for what, before, now in (("model", found.subject, fresh.subject), ("request", found.asked, fresh.asked)):
        if before != now:
            names = (name for name, value in asdict(now).items() if asdict(before)[name] != value)
            raise RunError(f"{folder / FILE} is about another {what} ({', '.join(names)}); choose another --out")
    if found.text_sha256 not in ("", fresh.text_sha256):
        raise RunError(
            f"{folder / FILE} is about text of SHA-256 {found.text_sha256}, and {fresh.text} now has "
            f"{fresh.text_sha256}; restore the text, or choose another --out"
        )
    return replace(found, text=fresh.text, text_sha256=fresh.text_sha256)
