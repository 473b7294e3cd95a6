"""audit.json: what an audit says of a model. docs/audit.md describes every field.

Shapes of what is measured, and how, are in `auditing`; here is what became of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from loopscope.config import TrainingConfig
from loopscope.errors import ConfigError
from loopscope.options import PushOptions
from loopscope.results.record import Count, Record, Text

Positive = Annotated[float, msgspec.Meta(gt=0)]
AuditVerdict = Literal["blind-spot", "controlled", "undecided"]
"""Undecided: nothing blind was found, and a note says why that is no all-clear."""
Destination = Literal["fixed point", "cycle", "drift"]
"""Where many loops lead."""
VariableVerdict = Literal["blind", "visible", "weak", "removed", "damped", "memory", "inert"]
"""What becomes of a variable of the state; docs/audit.md says what each means."""
VariableKind = Literal["field", "tensor", "constant", "found", "memory"]
"""A named field of h, a tensor carried beside it, one that no loop writes, directions that the search found besides,
and what is hidden but bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedModel:
    """Which model was audited, and under which objective."""

    name: Text
    num_loops: Count
    width: Count
    vocab_size: Count
    parameters: Count
    dtype: Text
    """Of the weights."""
    audited_in: Text
    step: Count | None
    """None: untrained, or unknown."""
    supervised: list[Count]
    """Loops that get cross-entropy."""
    observables: list[Text]
    """Names of the other loss terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """The verdict on one variable of the state: a field, a carried tensor, or directions that the search found."""

    name: Text
    verdict: VariableVerdict
    visibility: float
    """‖J v‖ over the median singular value; this and the next two at the loop where the verdict is worst, the largest
    of several directions."""
    delayed_visibility: float
    """Effect on the logits of the next loops, over an average direction's."""
    activity: float
    """Gain through the next loop."""
    evidence: Text = ""
    """As `show.sentences` says it, like remedy, flag and the audit's summary; empty until the audit is whole."""
    remedy: Text | None = None
    flag: Text | None = None
    free_range: float | None = None
    """How many times the state's length it can run before the objective notices, a million at most; None where that was
    not asked."""
    free_tokens: float | None = None
    """Share of tokens for which that is tenfold or more; None for directions that the search found."""
    drift: float | None = None
    """Relative growth per step of training; None where it was not tried."""
    driven: bool | None = None
    """Whether that is 1 % a step or more, beyond chance."""
    kind: VariableKind
    loop: Count | None = None
    """The loop at which the verdict is worst; None for what no loop writes."""
    held_from: float | None = None
    """‖h‖ from which the terms of the loss alone notice a field; None where they never do."""
    directions: Count | None = None
    """How many of its directions are blind, of a tensor; how many there are, of a memory."""
    width: Count | None = None
    """All directions of a tensor."""
    is_zero: bool = False
    """Whether a tensor is zero at every token that was searched: it has no direction of its own to measure."""
    agreement: float | None = None
    """Share of the states at which the search found it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDirection:
    """A blind direction with a name, and the share of it that the name explains."""

    name: Text
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDirections:
    """How many directions the exit of loop k hides, and what becomes of them: medians over states."""

    k: Count
    hidden: Count
    weak: Count
    removed: Count
    unreachable: Count
    damped: Count
    inert: Count
    shown_later: Count
    memory: Count
    blind: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindDirections:
    """What the search found."""

    dimension: Count
    agreement: float
    """Share of states that have it."""
    states: Count
    spectrum: list[float]
    """√(nats/0.01) that ten lengths along each singular direction cost, descending: hidden below 1."""
    gap: float | None
    """Smallest shown over largest hidden; None where nothing is hidden."""
    named: list[NamedDirection]
    unnamed: Count
    loops: list[LoopDirections]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemma2:
    """Lemma 2 at one loop, as sums over the tokens with s_k ≥ 10·‖b_⊥(u_k)‖: what moved, and what it misses of that."""

    tokens: Count
    scale_moved: float
    """Σ |s_{k+1} − s_k|."""
    scale_missed: float
    """Σ |s_{k+1} − s_k − a(u_k)|."""
    direction_moved: float
    """Σ ‖u_{k+1} − u_k‖·s_{k+1}."""
    direction_missed: float
    """Σ |‖u_{k+1} − u_k‖·s_{k+1} − ‖b_⊥(u_k)‖|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedLoop:
    """One loop of the rollout, as means over tokens: its state, what the next loop does to it, and what its exit sees.

    Without a next loop, and without an exit that is trained, those measures are None.
    """

    k: Count
    norm: float
    norm_quantiles: list[float]
    scale: float
    mean: float
    radial_increment: float | None
    """s_{k+1} − s_k as measured."""
    predicted_increment: float | None
    """ã_k/d."""
    angular_step: float | None
    """‖u_{k+1} − u_k‖ in RMS."""
    angular_step_times_scale: float | None
    """About ‖b_⊥‖ in RMS where s is large."""
    radial_update: float | None
    """RMS of the part of h_{k+1} − h_k along h_k."""
    tangential_update: float | None
    """RMS of the part across it."""
    lemma_2: Lemma2 | None
    """None also where the loop does not run at a hundred times the scale."""
    supervised: bool
    ce: float | None
    """None where it is not finite."""
    radial_gradient_share: float | None
    """Median over tokens."""
    radial_gradient_quantiles: list[float] | None
    scale_curvature: float | None
    """Mean over tokens of d²CE/d(ln α)²: what a change of scale costs, beyond its first order."""
    scale_curvature_size: float | None
    """Median over tokens of its absolute value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptLoop:
    """CE of one exit at every α."""

    k: Count
    ce: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaSweep:
    """CE when a state is multiplied by α before the readout: flat where scale is hidden."""

    alphas: list[Positive]
    loops: list[SweptLoop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """What changing a variable between loops does to the loss at the last one."""

    name: Text
    clamps: Text | None
    """The variable that it holds still; None where it does something else to one."""
    ce: float | None
    delta_ce: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyToken:
    """One of the tokens with the longest states."""

    token: Count
    text: Text | None
    """None without a tokenizer."""
    position: Count
    norm: float
    ratio: float
    """To the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditChecks:
    """Whether the audit can be believed, and what a reader should know."""

    raw_readout_control: float | None
    """Radial share through a random raw head: must be far from 0. None where no token has a gradient."""
    causal: bool
    doubts: list[Text]
    """Why no all-clear can be given."""
    notes: list[Text]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCost:
    """What the audit took."""

    seconds: float


# --- the push test ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a trial steps: AdamW at a constant learning rate, gradients clipped. The defaults are those of training."""

    lr: float = TrainingConfig.lr
    weight_decay: float = TrainingConfig.weight_decay
    clip: float = TrainingConfig.clip

    def __post_init__(self) -> None:
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError.of(name, getattr(self, name), "must be a finite number above 0")

    @classmethod
    def of(cls, config: TrainingConfig | None) -> Recipe:
        """That of a run, at its peak learning rate; the usual one where nobody says."""
        return cls() if config is None else cls(lr=config.lr, weight_decay=config.weight_decay, clip=config.clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """How far one variable went when it was rewarded for growing."""

    name: Text
    growth: float
    """Its size over that of the twin, averaged over the last steps."""
    reach: float
    """1 + (its size − that of the twin)/(length of the twin's state): the unit of free ranges. The same as growth for
    scale; a mean that is a tenth of the state may grow tenfold and have reached 2."""
    paid: float
    """Nats by which the objective ended above the twin's, averaged over the last steps; negative where it gained."""
    size: float
    twin_size: float
    start_size: float
    """Size after the warm-up."""
    growth_by_step: list[float]
    """Its size over the twin's in every step."""
    paid_by_step: list[float]
    far: bool
    """Whether it ran away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult(Record):
    """The whole test."""

    model: Text
    options: PushOptions
    recipe: Recipe
    pushes: list[Push]
    twin_loss: float
    """The objective of the twin, averaged over the last steps."""
    notes: list[Text]
    seconds: float

    def push(self, name: str) -> Push:
        """That of one variable."""
        return next(push for push in self.pushes if push.name == name)


# --- how tokens move -------------------------------------------------------------------------------------------------

MotionKind = Literal["fixed", "orbit", "slider", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMotion:
    """How one token moves."""

    kind: MotionKind
    period: float | None
    """Loops of one turn; of an orbit."""
    amplitude: float
    """A, of the strongest oscillation of s_t."""
    purity: float | None
    """Share of the oscillation's power around its peak; of an orbit."""
    rise: float
    """n times the slope of s_t: how far the line through it rises over all loops."""
    contraction_rate: float | None
    """ρ of ‖h_{t+1} − h_t‖ ≈ c·ρ^t; None where fewer than four steps are more than rounding."""
    settled_at: Count
    """The first loop from which on the likeliest next token is that of the last loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Motion:
    """How the tokens of a text move through a model's loops: every token, and medians over them."""

    loops: Count
    """Loops that were run; the last is the reference."""
    num_loops: Count
    """The depth it was trained at."""
    shares: dict[MotionKind, float]
    """Share of tokens of every kind."""
    period: float | None
    """Of the tokens in orbit."""
    purity: float | None
    """Of the tokens in orbit."""
    contraction_rate: float | None
    """Below 1 the loop contracts."""
    settled_at: float
    """The loop from which the prediction stays."""
    settled_by_trained_depth: float
    """Share of tokens whose prediction no loop beyond the trained depth changes, of those that were run."""
    summary: Text = ""
    tokens: list[TokenMotion]
    median_cosine: list[float]
    """Median over tokens of cos(h_t, h_loops), for t = 1 … loops."""
    notes: list[Text]


# --- the audit -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult(Record):
    """The whole audit."""

    model: AuditedModel
    verdict: AuditVerdict
    summary: Text = ""
    variables: list[Variable]
    blind_directions: BlindDirections
    loops: list[AuditedLoop]
    motion: Destination
    """Where these loops lead."""
    alpha_sweep: AlphaSweep
    interventions: list[Intervention]
    heaviest_tokens: list[HeavyToken]
    checks: AuditChecks
    cost: AuditCost
    push: PushResult | None = None
    """The push test, where it was asked for."""
    token_motion: Motion | None = None
    """How every token moves over 64 loops, where it was asked for."""

    def variable(self, name: str) -> Variable:
        """The variable of that name."""
        return next(variable for variable in self.variables if variable.name == name)

    def loop(self, k: int) -> AuditedLoop | None:
        """Loop k, where the rollout came so far."""
        return next((loop for loop in self.loops if loop.k == k), None)

    @property
    def blind(self) -> list[str]:
        """Blind variables by name."""
        return [variable.name for variable in self.variables if variable.verdict == "blind"]

    @property
    def tests_of_lemma_2(self) -> list[Lemma2]:
        """One for each loop of the rollout that has a next one."""
        return [loop.lemma_2 for loop in self.loops if loop.lemma_2 is not None]

    @property
    def scale_missed(self) -> float | None:
        """Share of the motion of scale over all loops that Lemma 2 misses; None where no token could be counted."""
        tests = self.tests_of_lemma_2
        return _quotient([one.scale_missed for one in tests], [one.scale_moved for one in tests])

    @property
    def direction_missed(self) -> float | None:
        """The same of the motion of direction."""
        tests = self.tests_of_lemma_2
        return _quotient([one.direction_missed for one in tests], [one.direction_moved for one in tests])


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAudited:
    """A target that could not be audited, and why."""

    target: Text
    message: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralAudits(Record):
    """What `loopscope audit A B … --json` prints."""

    audits: list[AuditResult]
    errors: list[NotAudited]


def _quotient(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Σ above / Σ below: what hardly moves weighs as little."""
    return sum(above) / sum(below) if sum(below) else None
