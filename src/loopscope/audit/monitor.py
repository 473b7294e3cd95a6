"""The online monitor: scale, radial gradient share and headroom while a model trains, and the alarm they raise.

Shape legend: B batch, T tokens, D width, K loops.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.protocol import LoopedModel, LoopTrace, readout

GROWTH = 10.0
"""A state this many times larger than at the start has left the range it was initialised for."""
HIDDEN_SHARE = 1e-3
"""A radial gradient share below this at every supervised loop means that no cross-entropy controls the scale."""
WINDOW = 8
"""Observations that the slope is fitted to."""
HEADROOM_DECADES = 2.0
"""Closer than this to the largest number of the dtype is an alarm, visible or not."""


def radial_gradient_shares(
    model: LoopedModel, trace: LoopTrace, targets_BT: Tensor, loops: Sequence[int]
) -> list[float]:
    """Median over tokens of |⟨∇_h CE_k, h⟩|/(‖∇_h CE_k‖·‖h‖) at each of the loops, on the batch's first row.

    h is a detached alias that feeds only the readout of loop k: what comes back through later loops is no signal of
    this exit. Through RMSNorm the share is eps/(s² + eps) of a raw one (Lemma 1, arXiv 2606.24898).
    """
    first = torch.tensor([0], device=targets_BT.device)
    shares = []
    for k in loops:
        state = trace.states[k].take(first)
        with torch.enable_grad():
            h_BTD = state.h_BTD.detach().requires_grad_()
            logits_BTV = readout(model, state.with_h(h_BTD), k).float()
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:1].flatten(), reduction="sum")
            (gradient_BTD,) = torch.autograd.grad(loss, h_BTD)
        cosine_BT = F.cosine_similarity(gradient_BTD.double(), h_BTD.detach().double(), dim=-1, eps=0.0)
        shares.append(cosine_BT.abs().nan_to_num().median().item())
    return shares


@dataclass(frozen=True)
class Observation:
    """What the monitor is told at a step."""

    step: int
    norm: float
    """Mean ‖h_K‖."""
    shares: Sequence[float]
    """Radial gradient share at each supervised loop."""
    controlled: bool
    """A loss term sees the scale itself (norm penalty, anchor)."""
    largest: float
    """Largest absolute value in the states."""


@dataclass(frozen=True)
class Alarm:
    """What, since when, how fast, and what to do."""

    kind: str
    message: str


class ScaleMonitor:
    """Follows ‖h_K‖ over training and raises each kind of alarm once."""

    def __init__(self, dtype_max: float) -> None:
        self.dtype_max = dtype_max
        self.start: float | None = None
        self.recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.raised: set[str] = set()

    def observe(self, seen: Observation) -> Alarm | None:
        """Take in one observation; an alarm when it is the first of its kind."""
        if not math.isfinite(seen.norm):
            return None  # the guards deal with non-finite steps
        self.start = seen.norm if self.start is None else self.start
        self.recent.append((seen.step, math.log(max(seen.norm, 1e-30))))
        alarm = self._blind_spot(seen) or self._headroom(seen)
        if alarm is None or alarm.kind in self.raised:
            return None
        self.raised.add(alarm.kind)
        return alarm

    def slope(self) -> float:
        """Least-squares slope of log ‖h_K‖ per step over the recent observations."""
        if len(self.recent) < 2:
            return 0.0
        mean_x = sum(x for x, _ in self.recent) / len(self.recent)
        mean_y = sum(y for _, y in self.recent) / len(self.recent)
        spread = sum((x - mean_x) ** 2 for x, _ in self.recent)
        return sum((x - mean_x) * (y - mean_y) for x, y in self.recent) / spread if spread else 0.0

    def _blind_spot(self, seen: Observation) -> Alarm | None:
        assert self.start is not None
        hidden = bool(seen.shares) and max(seen.shares) < HIDDEN_SHARE and not seen.controlled
        if not hidden or seen.norm < GROWTH * self.start:
            return None
        return Alarm(
            "blind-spot",
            f"step {seen.step}: ‖h_K‖ is {seen.norm:.3g}, {seen.norm / self.start:.0f} times its start, changing by "
            f"{100 * math.expm1(self.slope()):+.2g} % per step, and the radial gradient share is at most "
            f"{max(seen.shares):.1g}: no loss sees the scale. Remedy: --norm-penalty 0.01, --readout raw or "
            "final-only, or --inter-loop-norm rmsnorm",
        )

    def _headroom(self, seen: Observation) -> Alarm | None:
        decades = math.log10(self.dtype_max / max(seen.largest, 1e-30)) if math.isfinite(seen.largest) else -1.0
        if decades > HEADROOM_DECADES:
            return None
        what = f"step {seen.step}: the largest state is {seen.largest:.3g}, within {decades:.1f} decades of overflow"
        return Alarm("headroom", f"{what}. Remedy: a norm penalty, or a wider dtype")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"start": self.start, "recent": [list(pair) for pair in self.recent], "raised": sorted(self.raised)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.start, self.raised = state["start"], set(state["raised"])
        self.recent = deque(((int(step), float(log)) for step, log in state["recent"]), maxlen=WINDOW)
