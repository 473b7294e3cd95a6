"""What an audit says: dataclasses that are audit.json. See docs/audit.md for every field."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from loopscope.auditing.activity import LoopActivity
from loopscope.auditing.motion import Motion
from loopscope.auditing.push import PushResult
from loopscope.files import without_nan

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Subject:
    """Which model was audited, and under which objective."""

    name: str
    num_loops: int
    width: int
    vocab_size: int
    parameters: int
    dtype: str
    audited_in: str
    step: int | None
    supervised: list[int]
    observables: list[str]


@dataclass(frozen=True)
class Variable:
    """The verdict on one variable of the state."""

    name: str
    verdict: str
    """blind, visible, weak, removed, damped, memory or inert."""
    visibility: float
    delayed_visibility: float
    activity: float
    evidence: str
    remedy: str | None
    flag: str | None
    free_range: float | None = None
    """How many times the state's length it can run before the objective notices, a million at most; null where that was
    not asked."""
    free_tokens: float | None = None
    """Share of tokens for which that is tenfold or more; null for directions that the search found."""
    drift: float | None = None
    """Relative growth per step of training; null where it was not tried."""
    driven: bool | None = None
    """Whether that is 1 % a step or more, beyond chance."""


@dataclass(frozen=True)
class BlindDirections:
    """What the search found."""

    dimension: int
    agreement: float
    states: int
    spectrum: list[float]
    gap: float | None
    named: list[dict[str, Any]]
    unnamed: int
    loops: list[dict[str, int]]


@dataclass(frozen=True)
class Loop:
    """One loop: its exit's visibility, and its activity."""

    supervised: bool
    ce: float
    radial_gradient_share: float | None
    radial_gradient_quantiles: list[float] | None
    activity: LoopActivity
    scale_curvature: float | None = None
    """Mean over tokens of d²CE/d(ln α)²: what a change of scale costs, beyond its first order. Trained loops only."""
    scale_curvature_size: float | None = None
    """Median over tokens of its absolute value."""

    def to_json(self) -> dict[str, Any]:
        """Activity and exit side by side."""
        own = {name: value for name, value in asdict(self).items() if name != "activity"}
        return {**asdict(self.activity), **own}


@dataclass(frozen=True)
class AuditResult:
    """The whole audit."""

    model: Subject
    verdict: str
    """blind-spot, controlled, or undecided: nothing blind was found, and a note says why that is no all-clear."""
    summary: str
    variables: list[Variable]
    blind_directions: BlindDirections
    loops: list[Loop]
    motion: str
    alpha_sweep: dict[str, Any]
    interventions: list[dict[str, Any]]
    heaviest_tokens: list[dict[str, Any]]
    checks: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    push: PushResult | None = None
    """The push test, where it was asked for."""
    token_motion: Motion | None = None
    """How every token moves over 64 loops, where it was asked for."""

    def variable(self, name: str) -> Variable:
        """The variable of that name."""
        return next(variable for variable in self.variables if variable.name == name)

    def to_json(self) -> dict[str, Any]:
        """audit.json; numbers that are not finite become null."""
        plain = {**asdict(self), "loops": [loop.to_json() for loop in self.loops]}
        plain["push"] = None if self.push is None else self.push.to_json()
        plain["token_motion"] = None if self.token_motion is None else self.token_motion.to_json()
        return without_nan({"schema_version": SCHEMA_VERSION, **plain})
