"""scaling.json: the law of loops that many runs follow, with the runs it was fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loopscope.results.record import Count, Record, Text
from loopscope.show.numbers import span

Law = Literal["iso-depth", "parcae"]

WIDE = 1.0
"""An interval of φ from this width on reaches from a loop that is worth nothing to one that is worth a full one."""
MOST_AT_BOUND = 0.05
"""Share of bootstraps whose φ may run into its bounds: beyond, the bounds make the interval and not the runs."""


@dataclass(frozen=True, slots=True)
class Point:
    """The loss of one run."""

    name: Text
    loops: Count
    once: Count
    """Non-embedding parameters outside the loop."""
    recurrent: Count
    """Parameters of the loop, its injection included."""
    tokens: Count
    loss: float
    """Nats per token on validation text at the trained depth."""
    depths: tuple[tuple[int, float], ...] = ()
    """Loss by loops at test time."""
    predicted: float | None = None
    """By the law, once there is one."""

    @property
    def size(self) -> tuple[int, int]:
        """What tells one size from another."""
        return self.once, self.recurrent

    @property
    def cell(self) -> tuple[int, int]:
        """Budget and loops: what is drawn in a bootstrap."""
        return self.tokens, self.loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law with its numbers."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    phi: float
    is_phi_fixed: bool
    objective: float
    """Sum of the Huber loss over all points."""
    error: float
    """Mean |L̂ − L|/L over all points."""
    held_out_error: float | None = None
    """The same where every cell is predicted by a law that was fitted without it."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What the r-th loop is worth, in recurrent parameters: r^φ − (r−1)^φ."""

    loop: int
    worth: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TestTime:
    """L(T) = L_∞ + Z·exp(−z·T/μ): Z and z of all runs together, L_∞ of every run its own."""

    __test__ = False  # no test, whatever pytest thinks of its name

    z: float
    z_low: float
    z_high: float
    """95 % interval over runs."""
    Z: float
    runs: Count
    error: float
    """Mean |L̂ − L|/L."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord(Record):
    """scaling.json: what runs say about loops."""

    law: Law
    phi_low: float | None
    phi_high: float | None
    """95 % interval over cells."""
    cells: Count
    starts: Count
    bootstraps: Count
    at_bound: float
    """Share of bootstraps whose φ ran into its bounds."""
    fit: Fit
    """φ free under the iso-depth law; 1 under Parcae's."""
    beside: list[Fit]
    """φ = 0 and φ = 1."""
    worth: list[Worth]
    test_time: TestTime | None
    points: list[Point]
    notes: list[Text]
    """What to mind."""
    summary: Text
    """The law in words, its interval said plainly."""

    @property
    def is_told(self) -> bool:
        """Whether the interval of φ says anything: it is not wide, and no bound holds it."""
        if self.phi_low is None or self.phi_high is None:
            return False
        return self.phi_high - self.phi_low < WIDE and self.at_bound <= MOST_AT_BOUND

    @property
    def told_phi(self) -> str:
        """φ with its interval, where it has one."""
        phi = f"{self.fit.phi:.2f}"
        if self.phi_low is None or self.phi_high is None:
            return phi
        return f"{phi} {span(self.phi_low, self.phi_high)}"
