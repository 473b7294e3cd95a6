"""Guards: what to do when a step is not finite or the loss spikes. Pure bookkeeping, no tensors.

A bad step is skipped: its gradient is never applied. Too many in a row roll the run back to its last checkpoint with
half the learning rate; too many of those stop it, with a sentence that says what was seen. A model that is not finite
is never kept: it is rolled back at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from loopscope.config import TrainingConfig
from loopscope.results.checkpoint import GuardState

RECENT = 50
"""Losses whose median a spike is measured against; none is called before they are this many."""
ROLLBACK_FACTOR = 0.5


@dataclass(frozen=True)
class StepVerdict:
    """What to do with a step, and the sentence that says why."""

    action: Literal["apply", "skip", "rollback", "stop"]
    reason: str = ""


class StepGuard:
    """Judges every step by its loss and gradient norm."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.bad_in_a_row = 0
        self.rollbacks = 0

    @property
    def lr_factor(self) -> float:
        """The learning rate is halved by every rollback."""
        return ROLLBACK_FACTOR**self.rollbacks

    def judge(self, step: int, loss: float, gradient_norm: float) -> StepVerdict:
        """Apply the step, skip it, roll back, or stop."""
        fault = self._fault(loss, gradient_norm)
        if fault is None:
            self.recent.append(loss)
            self.bad_in_a_row = 0
            return StepVerdict("apply")
        self.bad_in_a_row += 1
        if self.bad_in_a_row <= self.config.max_skips:
            return StepVerdict("skip", f"step {step}: {fault}; skipped ({self.bad_in_a_row} in a row)")
        if self.rollbacks < self.config.max_rollbacks:
            fault += f", after {self.config.max_skips} skipped steps in a row"
        return self.judge_model(step, fault)

    def judge_model(self, step: int, fault: str) -> StepVerdict:
        """A model that is not finite is never kept: roll back, or stop when that has not helped."""
        if self.rollbacks < self.config.max_rollbacks:
            return StepVerdict("rollback", f"step {step}: {fault}")
        return StepVerdict(
            "stop", f"step {step}: {fault}, after {self.rollbacks} rollbacks at ever smaller learning rates"
        )

    def rolled_back(self) -> None:
        """A rollback has happened: start counting anew."""
        self.rollbacks += 1
        self.bad_in_a_row = 0
        self.recent.clear()

    def _fault(self, loss: float, gradient_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"the gradient norm is {gradient_norm} at a loss of {loss:.4g}"
        if len(self.recent) == RECENT:
            median = sorted(self.recent)[RECENT // 2]
            if loss > self.config.spike_factor * median > 0:
                return f"the loss spiked to {loss:.4g}, {loss / median:.1f} times its recent median"
        return None

    def state(self) -> GuardState:
        """What a checkpoint keeps."""
        return GuardState(recent=list(self.recent), bad_in_a_row=self.bad_in_a_row, rollbacks=self.rollbacks)

    def restore(self, state: GuardState) -> None:
        """Go on from a checkpoint."""
        self.recent = deque(state.recent, maxlen=RECENT)
        self.bad_in_a_row, self.rollbacks = state.bad_in_a_row, state.rollbacks
