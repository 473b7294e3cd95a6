"""Loss terms that see the scale of the state, whatever the readout hides.

Here s = √(mean over width of h²). Shape legend: K loops, B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_penalty(states_KBTD: Tensor | Sequence[Tensor], weight: float) -> Tensor:
    """λ · mean over loops, tokens and width of h² = λ · mean s² (arXiv 2606.24898; there λ = 0.01).

    Takes the states stacked, or as a sequence of (B, T, D) tensors, which saves the copy.
    """
    return weight * torch.stack([_wide(h_BTD).square().mean() for h_BTD in states_KBTD]).mean()


def scale_anchor(states_KBTD: Tensor | Sequence[Tensor], weight: float, target: float) -> Tensor:
    """w · mean over loops and tokens of (s − target)²."""
    scales_KBT = torch.stack([_scale(h_BTD) for h_BTD in states_KBTD])
    return weight * (scales_KBT - target).square().mean()


def _scale(h_BTD: Tensor) -> Tensor:
    """s of every token; the norm's gradient at h = 0 is 0, the square root's would be infinite."""
    return _wide(h_BTD).norm(dim=-1) / h_BTD.shape[-1] ** 0.5


def _wide(h_BTD: Tensor) -> Tensor:
    """In float32 at least: squares of half-precision states overflow."""
    return h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
