"""What halting saves, and what it costs: halting.json of a row, calibration.json of a run, and policy.json.

A threshold of null never leaves: infinity is no JSON. Where nothing is certified either, `mean_loops` is null too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from loopscope.config import MOST_LOOPS
from loopscope.results.record import Count, Record, Text

MOST_WIDTH = 1 << 17
"""Widest state that a policy's probe is read for."""

Fill = Literal["copy", "project"]
"""What a token that has left shows at deeper loops: the keys and values of its exit, or those made of its state."""
Homes = Literal["article", "block", "instances"]
"""What a unit belongs to as a whole: an article; a block where articles are unknown; of a task nothing but itself."""
Reads = Literal["h", "norm(h)"]
"""What a linear gate multiplies."""
Loops = Annotated[float, msgspec.Meta(ge=0)]
"""Loops a token, or a fixed depth."""

# --- halting.json ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExitShare:
    """The share of tokens that leave after loop k."""

    k: Count
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedLoop:
    """What a gate says after loop k, and how long the state is that it reads."""

    k: Count
    norm: float | None
    """Mean ‖h_k‖."""
    logit: float | None
    """Mean |logit|."""
    saturated: float | None
    """Share of tokens whose exit probability is within 0.001 of 0 or 1: a loss could hardly move it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One linear gate, trained on the frozen model, and what it saves at the bound of the rule beside it."""

    reads: Reads
    loss: float | None
    """Cross-entropy of its exit probability on text it was not trained on, nats."""
    constant_loss: float | None
    """That of a gate that always says the same: what has to be beaten."""
    mean_loops: Loops | None
    fixed_depth: Loops | None
    loops: tuple[GatedLoop, ...]

    @property
    def saved(self) -> float | None:
        """Loops a token that it saves beyond the smallest certified fixed depth."""
        return _beyond(self.fixed_depth, self.mean_loops)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedHalting(Record):
    """halting.json: what a calibrated halting rule saves of a row's loops, and what of that a fixed depth saves too."""

    step: Count
    num_loops: Count
    split: Text = ""
    """The text, dealt to fit, calibration and test units."""
    rule: Text = ""
    max_ppl_increase: float | None = None
    confidence: float | None = None
    units: dict[str, Count] = field(default_factory=dict)
    """By split of the calibration."""
    units_needed: Count | None = None
    threshold: float | None = None
    """None: nobody leaves early."""
    p_value: float | None = None
    ppl_increase: float | None = None
    """On the test units, as are mean_loops, unit_loops and exits."""
    mean_loops: Loops | None = None
    fixed_depth: Loops | None = None
    """The smallest fixed depth that is certified at the same bound."""
    unit_loops: tuple[Loops, ...] = ()
    """Loops a token of each test unit."""
    exits: tuple[ExitShare, ...] = ()
    gates: tuple[Gate, ...] = ()
    notes: tuple[Text, ...] = ()
    reason: Text = ""
    """Why nothing was measured; empty where something was."""

    def __post_init__(self) -> None:
        if not self.reason and (self.saved is None or not self.unit_loops):
            raise ValueError("says neither what was saved nor why that is not known")

    @property
    def saved(self) -> float | None:
        """Loops a token that the rule saves beyond that depth: what is adaptive about it."""
        return _beyond(self.fixed_depth, self.mean_loops)


# --- calibration.json ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeWeights:
    """A fitted probe."""

    weights: tuple[tuple[float, ...], ...]
    """A row, as wide as the state, for every loop but the last."""
    biases: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The furthest threshold of one rule whose cost is certified, and what it does on text it was not chosen on."""

    rule: Text
    threshold: float | None
    p_value: float | None
    hoeffding_bentkus: float | None
    mean_loops: Loops | None
    """On the test split; None: nothing is certified, not even full depth, since there are too few units."""
    ppl_increase: float | None
    """On the test split, unclipped: exp(mean ΔCE) − 1."""
    clipped_above: Count
    """Calibration units whose loss was clipped from above: the promise is then about the clipped loss."""
    clipped_ppl_increase: float | None = None
    """The same of the clipped loss, which is what the promise is about: exp(mean x) − 1."""
    test_clipped_above: Count = 0
    """Test units whose loss was clipped from above."""
    exits: dict[int, float] = field(default_factory=dict)
    """Share of the test tokens that left at each loop."""
    unit_loops: tuple[Loops, ...] = ()
    """Loops a token of each test unit: what an interval of `mean_loops` is made from."""
    tokens_per_second: float | None = None
    """Of decoding test text at batch 1 under this rule; None where it was not timed."""
    verified: Count | None = None
    """Of so many recalibrations, how many held."""
    passed: bool | None = None
    """Whether no more failed than chance explains."""

    @property
    def is_certified(self) -> bool:
        """Whether anything is promised."""
        return self.mean_loops is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Record):
    """calibration.json: what `loopscope calibrate` found."""

    target: Text
    num_loops: Count
    max_ppl_increase: float
    confidence: float
    units: dict[str, Count]
    """By split."""
    unit_tokens: Count
    units_needed: Count
    """Pieces of evidence (see `evidence`) below which nothing can be promised."""
    fixed: Certificate
    """The smallest fixed depth that is certified at the same bound."""
    certificates: tuple[Certificate, ...]
    """One for every rule that was asked for."""
    notes: tuple[Text, ...] = ()
    homes: Homes = "block"
    """What units are parts of: articles, blocks where articles are unknown, or nothing (instances of a task)."""
    articles: dict[str, Count] = field(default_factory=dict)
    """Articles or blocks by split."""
    dropped_tokens: Count = 0
    dropped_articles: Count = 0
    """Ends of articles, and articles, that are no whole unit."""
    evidence: Literal["unit"] | Homes = "unit"
    """What one loss is the mean of: a unit; or all units of an article (or block), where those are alike."""
    alike_p_value: float | None = None
    """Of "units of one article are no more alike than others", on the fit split; the smallest of all rules."""
    units_needed_hoeffding_bentkus: Count | None = None
    """What `units_needed` would be by the bound that is not used."""
    fill: Fill = "copy"
    """What a token that has left shows at deeper loops."""
    scale_ratio: float | None = None
    """s_K / s_1 of the state, by the run's audit where there is one."""
    tokens_per_second: float | None = None
    """Of decoding the same test text at full depth, in turns with the rules; None where it was not timed."""
    verify: Count = 0
    """Recalibrations that were asked for."""
    failures_allowed: Count | None = None
    """Of those, how many may fail by chance."""
    width: Count | None = None
    """Of the state."""
    step: Count | None = None
    """Training steps behind the weights; None where they are not known."""
    probe: ProbeWeights | None = None
    """The probe that was fitted, where that rule was asked for; None in a file, since its policy has it."""
    saved: tuple[float | None, ...] = ()
    """Of each certificate, `saved_beyond_fixed`."""

    @property
    def every(self) -> tuple[Certificate, ...]:
        """That of the fixed depth, and those of all rules."""
        return (self.fixed, *self.certificates)

    @property
    def best(self) -> Certificate | None:
        """The certificate with the fewest loops on the test split."""
        certified = [(each.mean_loops, each) for each in self.certificates if each.mean_loops is not None]
        return min(certified, key=lambda pair: pair[0])[1] if certified else None

    @property
    def calibration_evidence(self) -> int:
        """Losses that the promise rests on."""
        return (self.units if self.evidence == "unit" else self.articles)["calibration"]

    def saved_beyond_fixed(self, certificate: Certificate) -> float | None:
        """Loops a token that a rule saves beyond the smallest certified fixed depth: what is adaptive about it."""
        return _beyond(self.fixed.mean_loops, certificate.mean_loops)


# --- policy.json -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What was certified, and of what."""

    max_ppl_increase: float
    confidence: float
    units: Count
    """Pieces of evidence that it rests on."""
    unit_tokens: Count | None = None
    clipped_above: Count = 0
    about: Text = ""
    """The text that it holds for, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnTest:
    """What the policy does on text it was not chosen on."""

    mean_loops: Loops | None
    ppl_increase: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Record):
    """policy.json: a halting rule with its threshold, and what is promised of it."""

    rule: Text
    threshold: float | None
    fill: Fill = "copy"
    num_loops: Annotated[int, msgspec.Meta(ge=1, le=MOST_LOOPS)] | None = None
    """The full depth, and the width of the state, of the model it was calibrated on; another one is refused."""
    width: Annotated[int, msgspec.Meta(ge=1, le=MOST_WIDTH)] | None = None
    target: Text = ""
    promise: Promise | None = None
    test: OnTest | None = None
    fixed_depth: Loops | None = None
    """The smallest fixed depth certified at the same bound; None: none."""
    probe: ProbeWeights | None = None
    """Of that rule."""

    def __post_init__(self) -> None:
        if self.probe is None:
            return
        rows, biases = self.probe.weights, self.probe.biases
        if self.num_loops is None or not len(rows) == len(biases) == self.num_loops - 1:
            raise ValueError("probe is not a row of weights and a bias for every loop but the last")
        if any(len(row) != self.width for row in rows):
            raise ValueError("probe is not a row of width weights for every loop")


def _beyond(fixed_depth: float | None, mean_loops: float | None) -> float | None:
    return None if fixed_depth is None or mean_loops is None else fixed_depth - mean_loops
