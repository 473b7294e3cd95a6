"""ouro.json: what `loopscope reproduce ouro` measured of one model, section by section; and ouro-train.json.

A section that is not measured yet is null, so that an interrupted command goes on with the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from loopscope.results.evaluation import Split, Throughput
from loopscope.results.record import Count, Record, Text
from loopscope.results.thresholds import FLAT, SHARP

OURO, OURO_TRAINING = "ouro.json", "ouro-train.json"

ReadoutKind = Literal["norm", "none", "frozen"]
AS_IT_IS: ReadoutKind = "norm"
"""The state is scaled before the norm that is part of the readout."""
REMOVED: ReadoutKind = "none"
"""There is no norm between the state and the head."""
FROZEN: ReadoutKind = "frozen"
"""The norm goes on dividing by the scale that the state had at α = 1: what a loss would see if nothing were hidden."""
READOUTS: dict[ReadoutKind, str] = {
    AS_IT_IS: "with the norm",
    REMOVED: "without the norm",
    FROZEN: "norm held at α = 1",
}

OuroVerdict = Literal["holds", "does not hold here", "not measured"]

NORM_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
EXIT_THRESHOLDS = (0.3, 0.5, 0.7, 0.9)
"""Of the cumulative exit probability at which a token would leave."""
Quantiles = Annotated[list[float | None], Meta(min_length=len(NORM_QUANTILES), max_length=len(NORM_QUANTILES))]


@dataclass(frozen=True, slots=True, kw_only=True)
class OuroRequest:
    """What a command asked for; another one does not go on with its results."""

    depths: list[Count]
    data: list[Text]
    """Empty: the target's own text."""
    tokenizer: Text
    length: Count | None
    max_tokens: Count | None
    sweep_tokens: Count | None
    """Tokens that sweeps, gradients, norms and gates are measured on."""
    tasks: list[Text] = field(default_factory=list)
    """Downstream tasks of lm-evaluation-harness."""
    task_folder: Text = ""
    """Where further tasks are."""
    limit: Count | None = None
    """Most questions of a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuroModel:
    """Which model it was."""

    name: Text
    step: Count | None
    num_loops: Count
    width: Count
    vocab_size: Count
    parameters: Count
    dtype: Text
    device: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStates:
    """What the states after loop k show."""

    k: Count
    sweep: dict[ReadoutKind, list[float | None]]
    """CE at each α."""
    radial_share: dict[ReadoutKind, float | None]
    """Median over tokens of |⟨∇_h CE, h⟩|/(‖∇_h CE‖‖h‖)."""
    norm: float | None
    """Mean over tokens of ‖h_k‖."""
    norm_quantiles: Quantiles

    def span(self, readout: ReadoutKind) -> float | None:
        """By how many nats CE varies over the sweep; None where it is not finite somewhere."""
        found = [ce for ce in self.sweep.get(readout, ()) if ce is not None]
        return max(found) - min(found) if found and len(found) == len(self.sweep[readout]) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OuroStates:
    """Sweeps, gradients and norms at every depth."""

    tokens: Count
    alphas: list[float]
    loops: list[LoopStates]

    def __post_init__(self) -> None:
        if any(len(ce) != len(self.alphas) for loop in self.loops for ce in loop.sweep.values()):
            raise ValueError("a sweep needs a CE for every α")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLoop:
    """The exit gate at loop k: λ_k, and p_k = λ_k·Π_{j<k}(1 − λ_j), the last loop taking the rest."""

    k: Count
    leaving: float | None
    """Mean over tokens of λ_k."""
    exit_probability: float | None
    """Mean over tokens of p_k."""
    exit_quantiles: Quantiles
    """Of p_k over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateThreshold:
    """Leaving at the first loop whose cumulative exit probability reaches a threshold."""

    threshold: float
    mean_loops: float | None
    shares: list[float]
    """Of tokens that leave at each loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSpread:
    """The distribution of exits at the trained depth."""

    tokens: Count
    expected_loops: float | None
    """Mean over tokens of Σ k·p_k."""
    loops: list[GateLoop]
    thresholds: Annotated[list[GateThreshold], Meta(min_length=len(EXIT_THRESHOLDS), max_length=len(EXIT_THRESHOLDS))]

    def __post_init__(self) -> None:
        if any(len(each.shares) < loop.k for each in self.thresholds for loop in self.loops):
            raise ValueError("a threshold needs a share for every loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScore:
    """One metric of a downstream task at one depth."""

    k: Count
    task: Text
    metric: Text
    value: float | None
    error: float | None
    """Standard error, where the harness gives one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuroRecord(Record):
    """ouro.json."""

    asked: OuroRequest
    subject: OuroModel
    text: Text
    """What was read."""
    text_sha256: Text
    """Of all of it."""
    depths: Split | None = None
    throughput: list[Throughput] = field(default_factory=list)
    states: OuroStates | None = None
    gate: GateSpread | None = None
    """Null for a model without one, too."""
    tasks: list[TaskScore] = field(default_factory=list)
    verdict: OuroVerdict = field(init=False, default="not measured")
    """Whether the final state's scale is hidden by the norm and would be seen without: Figure 5 in one line. It follows
    from the states."""

    def __post_init__(self) -> None:
        spans = {name: self.last.span(name) if self.last else None for name in (AS_IT_IS, REMOVED)}
        hidden, seen = spans[AS_IT_IS], spans[REMOVED]
        if hidden is not None or seen is not None:
            whole = (hidden is None or hidden <= FLAT) and (seen is None or seen >= SHARP)
            object.__setattr__(self, "verdict", "holds" if whole else "does not hold here")

    @property
    def last(self) -> LoopStates | None:
        """The states at the trained depth."""
        loops = self.states.loops if self.states else []
        return next((loop for loop in loops if loop.k == self.subject.num_loops), None)


# --- ouro-train.json -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOuro:
    """One row in numbers."""

    name: Text
    condition: Text
    seed: int
    steps: Count
    tokens: Count
    """Trained on."""
    num_loops: Count
    ce: float | None
    """At the trained depth, on validation text."""
    perplexity: float | None
    exit_failure: float | None
    """CE(1) − CE(K)."""
    norm: float | None
    """Mean ‖h_K‖."""
    sweep_span: float | None
    """Nats by which CE varies when the final state is scaled by 0.1 to 10 before the readout it was trained with."""
    radial_share: float | None
    verdict: OuroVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class OuroTraining(Record):
    """ouro-train.json."""

    size: Text
    rows: list[TrainedOuro]
