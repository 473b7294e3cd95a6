"""state.json of a checkpoint: everything that is not a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loopscope.results.record import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """What every checkpoint says; one that says no more can be started from, and not resumed."""

    format: Literal[1] = 1
    step: Count
    """Steps that had been made."""
    sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """What the guard of the steps has seen."""

    recent: list[float]
    """Losses of the last steps."""
    bad_in_a_row: Count
    rollbacks: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorState:
    """What the monitor of the scale has seen."""

    start: float | None
    since: Count | None
    recent: list[tuple[float, float]]
    """Steps and ln ‖h_K‖."""
    raised: list[str]
    """Kinds of alarms that were raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun(SavedWeights):
    """What a run goes on from."""

    penalty_on: bool
    best_ce: float | None
    best_step: Count | None
    guard: GuardState
    monitor: MonitorState
    world_size: Count
