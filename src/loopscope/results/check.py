"""What `loopscope check` says of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loopscope.results.record import Count, Record, Text

Status = Literal["passed", "found", "not applicable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One thing that differs and must not."""

    text: str
    part: str | None = None
    """prelude, core or coda; embedding, positions, opening (of a loop) or readout; a module's name; None: unknown."""
    loop: int | None = None
    layer: int | None = None
    """The last whose keys are right: what is wrong lies between them and those of the next."""
    position: int | None = None
    row: int | None = None
    """Of the batch, where there was one."""
    difference: float | None = None
    """rms of the difference over rms of what is expected; infinite, so null in JSON, where that is no number; None
    where it is not a matter of size."""
    raised: str | None = None
    """The error that the model raised where it should have run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What came of one check."""

    name: Text
    claim: Text
    findings: tuple[CheckFinding, ...] = ()
    reason: str | None = None
    """Why it is not applicable."""
    ways: Count = 0
    """Pairs of runs that were compared."""
    tokens: Count = 0
    largest: float | None = 0.0
    """Largest difference of any output, relative to its size; infinite, so null in JSON, where that is no number."""
    choices: Count = 0
    """Logits compared: tokens times exits."""
    flips: Count = 0
    """Of these, how many would choose another token greedily."""
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance(Record):
    """What came of all checks of a model."""

    target: str = ""
    num_loops: int | None
    """The trained depth; None where the loops are inside."""
    deepest: int | None
    """Loops that were run."""
    tokens: Count
    """Of each text."""
    dtype: Text
    tolerance: float
    tolerance_reason: Text
    notes: tuple[str, ...] = ()
    checks: tuple[CheckResult, ...]

    @property
    def findings(self) -> list[CheckFinding]:
        """Of all checks."""
        return [finding for check in self.checks for finding in check.findings]

    def check(self, name: str) -> CheckResult:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)
