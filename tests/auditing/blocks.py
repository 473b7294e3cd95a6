"""Layers that other people's looped models are made of, small and spelled out.

Gains of norms start at 1 in all of these models and are left out. Matrices that write to the residual stream are called
`out`, so that an initialisation can tell them from the others.

Shape legend: B batch, T tokens, D width, H heads, C head width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[Tensor], Tensor]


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + eps)."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@functools.cache
def rotations(num_tokens: int, head_width: int) -> Tensor:
    """R_TCC of rotary positions: channels c and c + C/2 turn by t·10000^(−2c/C).

    One product with these is several times quicker under forward-mode derivatives than sums of halves.
    """
    half = head_width // 2
    angles = torch.arange(num_tokens)[:, None].double() * 1e4 ** (-torch.arange(half) / half)
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat([torch.cat([cos, sin], -1), torch.cat([-sin, cos], -1)], -2)


def rotated(x_BHTC: Tensor) -> Tensor:
    """x_t R_t: rotary positions."""
    return (x_BHTC[..., None, :] @ rotations(*x_BHTC.shape[-2:]).to(x_BHTC)).squeeze(-2)


class Attention(nn.Module):
    """Causal self-attention; `gated` multiplies what it has gathered by a sigmoid of its input."""

    def __init__(
        self, width: int, *, num_heads: int = 2, rotary: bool = True, qk_norm: bool = False, gated: bool = False
    ) -> None:
        super().__init__()
        self.num_heads, self.rotary, self.qk_norm = num_heads, rotary, qk_norm
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False) if gated else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, -1))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        if self.qk_norm:
            q, k = rms(q), rms(k)
        scores_BHTT = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future_TT = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        gathered_BTD = (scores_BHTT.masked_fill(future_TT, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(-2)
        return self.out(gathered_BTD if self.gate is None else gathered_BTD * torch.sigmoid(self.gate(x_BTD)))


class Mlp(nn.Module):
    """out(φ(in x)) with GELU or ReLU², or the gated out(silu(gate x)·in x)."""

    def __init__(self, width: int, activation: str) -> None:
        super().__init__()
        hidden = 4 * width
        self.into = nn.Linear(width, hidden, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False) if activation == "swiglu" else None
        self.out = nn.Linear(hidden, width, bias=False)
        self.activation = activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        y = self.into(x_BTD)
        if self.gate is not None:
            return self.out(F.silu(self.gate(x_BTD)) * y)
        return self.out(F.gelu(y) if self.activation == "gelu" else F.relu(y).square())


class PreNorm(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, width: int, activation: str, norm: Norm = rms, **attention: bool) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = Attention(width, **attention), Mlp(width, activation), norm

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm(x_BTD))
        return x_BTD + self.mlp(self.norm(x_BTD))


class Sandwich(PreNorm):
    """norm(x + attention(norm x)), then norm(x + mlp(norm x)): every residual sum leaves through a norm."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(x_BTD + self.attention(self.norm(x_BTD)))
        return self.norm(x_BTD + self.mlp(self.norm(x_BTD)))


def initialise(module: nn.Module, fill: Callable[[Tensor], object], fill_out: Callable[[Tensor], object]) -> None:
    """Fill the matrices of a module; those that write to the residual stream have an initialisation of their own."""
    for name, weight in module.named_parameters():
        (fill_out if name.endswith("out.weight") else fill)(weight)
