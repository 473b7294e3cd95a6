"""What the loop does to its state: scale, radial increment and its prediction, angular motion, over many loops.

Lemma 2 (activity, arXiv 2606.24898): for a pre-norm residual loop, with h = s·u, s = ‖h‖/√d and u of unit RMS, the
update b(u) = F(h) − h = a·u + b_⊥ gives s' = s + a + O(1/s) and u' = u + b_⊥/s + O(1/s²). Its estimator
ã_k = ⟨u_k, F(h_k) − h_k⟩ is a Euclidean product, so ã_k/d predicts s_{k+1} − s_k. All steps here are RMS.
ã_k comes from the very step that it predicts, so that their agreement is next to an identity. What tests the lemma is
b(u) from elsewhere: from one run of the loop on the same directions at a hundred times their scale.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loopscope.protocol import LoopState
from loopscope.results.audit import AuditedLoop, Destination, Lemma2

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


def loop_activity(k: int, h_BTD: Tensor, next_BTD: Tensor | None, tested: Lemma2 | None = None) -> AuditedLoop:
    """Measure one loop but its exit; without a next state only what needs none."""
    h_ND = h_BTD.flatten(0, 1).double()
    norm_N = h_ND.norm(dim=-1)
    quantiles = torch.quantile(norm_N, torch.tensor(NORM_QUANTILES, dtype=torch.float64, device=norm_N.device))
    scale_N = norm_N / h_ND.shape[-1] ** 0.5
    loop = AuditedLoop(
        k=k,
        norm=float(norm_N.mean()),
        norm_quantiles=quantiles.tolist(),
        scale=float(scale_N.mean()),
        mean=float(h_ND.mean()),
        radial_increment=None,
        predicted_increment=None,
        angular_step=None,
        angular_step_times_scale=None,
        radial_update=None,
        tangential_update=None,
        lemma_2=tested,
        supervised=False,
        ce=None,
        radial_gradient_share=None,
        radial_gradient_quantiles=None,
        scale_curvature=None,
        scale_curvature_size=None,
    )
    if next_BTD is None:
        return loop
    next_ND = next_BTD.flatten(0, 1).double()
    unit_ND = h_ND / scale_N[:, None].clamp(min=1e-300)
    next_scale_N = next_ND.norm(dim=-1) / h_ND.shape[-1] ** 0.5
    update_ND = next_ND - h_ND
    radial_N = (unit_ND * update_ND).sum(-1) / h_ND.shape[-1]  # ã/d, and at once the RMS length of the radial part
    angular_N = _rms(next_ND / next_scale_N[:, None].clamp(min=1e-300) - unit_ND)
    return replace(
        loop,
        radial_increment=float((next_scale_N - scale_N).mean()),
        predicted_increment=float(radial_N.mean()),
        angular_step=float(angular_N.mean()),
        angular_step_times_scale=float((angular_N * scale_N).mean()),
        radial_update=float(radial_N.abs().mean()),
        tangential_update=float(_rms(update_ND - radial_N[:, None] * unit_ND).mean()),
    )


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
    scale_missed_N, direction_missed_N = (moved_N - radial_N).abs(), (turned_N - tangential_N).abs()
    return Lemma2(
        tokens=int(counted_N.sum()),
        scale_moved=float(moved_N[counted_N].abs().sum()),
        scale_missed=float(scale_missed_N[counted_N].sum()),
        direction_moved=float(turned_N[counted_N].sum()),
        direction_missed=float(direction_missed_N[counted_N].sum()),
    )


def destination(states: list[LoopState]) -> Destination:
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
