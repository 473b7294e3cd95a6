"""What the loop does to its state: scale, radial increment and its prediction, angular motion, over many loops.

Lemma 2 (activity, arXiv 2606.24898): for a pre-norm residual loop, with h = s·u, s = ‖h‖/√d and u of unit RMS, the
update b(u) = F(h) − h = a·u + b_⊥ gives s' = s + a + O(1/s) and u' = u + b_⊥/s + O(1/s²). Its estimator
ã_k = ⟨u_k, F(h_k) − h_k⟩ is a Euclidean product, so ã_k/d predicts s_{k+1} − s_k. All steps here are RMS.
ã_k comes from the very step that it predicts, so that their agreement is next to an identity. What tests the lemma is
b(u) from elsewhere: from one run of the loop on the same directions at a hundred times their scale.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopscope.protocol import LoopState

FIXED = 1e-4
"""Relative step below which the last loops stand still."""
RETURNED = 1e-2
"""Relative distance to an earlier state below which the loop has come back to it."""
LONGEST_CYCLE = 4
FAR = 100.0
"""How many times their scale states are put through the loop to learn b(u): what Lemma 2 leaves out is as much less."""
LARGE = 10.0
"""Scale over ‖b_⊥‖ from which a token counts: there the lemma leaves out a hundredth."""
NORM_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Lemma2:
    """Lemma 2 at one loop, as sums over the tokens with s_k ≥ 10·‖b_⊥(u_k)‖: what moved, and what it misses of that."""

    tokens: int
    scale_moved: float
    """Σ |s_{k+1} − s_k|."""
    scale_missed: float
    """Σ |s_{k+1} − s_k − a(u_k)|."""
    direction_moved: float
    """Σ ‖u_{k+1} − u_k‖·s_{k+1}."""
    direction_missed: float
    """Σ |‖u_{k+1} − u_k‖·s_{k+1} − ‖b_⊥(u_k)‖|."""


@dataclass(frozen=True)
class LoopActivity:
    """Means over tokens of one loop's state, and of what the next loop does to it."""

    k: int
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
    lemma_2: Lemma2 | None = None
    """None without a next loop, or where the loop does not run at a hundred times the scale."""


def loop_activity(k: int, h_BTD: Tensor, next_BTD: Tensor | None, tested: Lemma2 | None = None) -> LoopActivity:
    """Measure one loop; without a next state only what needs none."""
    h_ND = h_BTD.flatten(0, 1).double()
    norm_N = h_ND.norm(dim=-1)
    quantiles = torch.quantile(norm_N, torch.tensor(NORM_QUANTILES, dtype=torch.float64, device=norm_N.device))
    scale_N = norm_N / h_ND.shape[-1] ** 0.5
    moves = _moves(h_ND, scale_N, next_BTD.flatten(0, 1).double()) if next_BTD is not None else [None] * 6
    means = (float(scale_N.mean()), float(h_ND.mean()))
    activity = LoopActivity(k, float(norm_N.mean()), quantiles.tolist(), *means, *moves)
    return replace(activity, lemma_2=tested)


def lemma_2(h_BTD: Tensor, next_BTD: Tensor, far_BTD: Tensor) -> Lemma2:
    """How well the lemma foretells h → next, from far = F(100·h), which all tokens went through together.

    F(100·h) − 100·h = b(u) = a·u + b_⊥ at leading order; a foretells s' − s, and ‖b_⊥‖ foretells ‖u' − u‖·s'. With s
    for s' the second fails by arithmetic wherever the radial part is not small against s.
    """
    h_ND, next_ND, far_ND = (state_BTD.flatten(0, 1).double() for state_BTD in (h_BTD, next_BTD, far_BTD))
    scale_N, next_scale_N = _rms(h_ND), _rms(next_ND)
    unit_ND = h_ND / scale_N[:, None].clamp(min=1e-300)
    next_unit_ND = next_ND / next_scale_N[:, None].clamp(min=1e-300)
    update_ND = far_ND - FAR * h_ND
    radial_N = (unit_ND * update_ND).mean(-1)
    tangential_N = _rms(update_ND - radial_N[:, None] * unit_ND)
    moved_N, turned_N = next_scale_N - scale_N, _rms(next_unit_ND - unit_ND) * next_scale_N
    counted_N = (scale_N > 0) & (scale_N >= LARGE * tangential_N)
    sums = (moved_N.abs(), (moved_N - radial_N).abs(), turned_N, (turned_N - tangential_N).abs())
    return Lemma2(int(counted_N.sum()), *(float(values_N[counted_N].sum()) for values_N in sums))


def _moves(h_ND: Tensor, scale_N: Tensor, next_ND: Tensor) -> list[float]:
    width = h_ND.shape[-1]
    unit_ND = h_ND / scale_N[:, None].clamp(min=1e-300)
    next_scale_N = next_ND.norm(dim=-1) / width**0.5
    update_ND = next_ND - h_ND
    radial_N = (unit_ND * update_ND).sum(-1) / width  # ã/d, and at once the RMS length of the radial part
    tangential_ND = update_ND - radial_N[:, None] * unit_ND
    angular_N = _rms(next_ND / next_scale_N[:, None].clamp(min=1e-300) - unit_ND)
    measured = (next_scale_N - scale_N, radial_N, angular_N, angular_N * scale_N, radial_N.abs(), _rms(tangential_ND))
    return [float(values_N.mean()) for values_N in measured]


def motion(states: list[LoopState]) -> str:
    """Where many loops lead: to a fixed point, around a cycle, or on and on."""
    rows = len(states[-1].h_BTD)  # fewer are followed beyond the trained depth
    last = [state.h_BTD[:rows].flatten(0, 1).double() for state in states[-LONGEST_CYCLE - 2 :]]
    if _distance(last[-1], last[-2]) <= FIXED:
        return "fixed point"
    period = next((p for p in range(2, len(last)) if _distance(last[-1], last[-1 - p]) <= RETURNED), None)
    moving = _distance(last[-1], last[-2]) > 3 * RETURNED
    return "cycle" if period is not None and moving else "drift"


def _distance(one_ND: Tensor, other_ND: Tensor) -> float:
    """Median over tokens of the relative distance."""
    return float(((one_ND - other_ND).norm(dim=-1) / other_ND.norm(dim=-1).clamp(min=1e-300)).median())


def _rms(rows_ND: Tensor) -> Tensor:
    return rows_ND.square().mean(-1).sqrt()
