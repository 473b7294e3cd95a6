"""One loop: what turns h_{k-1} into h_k.

    h ← norm(h)                 inter-loop norm, opens every loop after the first
    h ← σ(γ)·h                  spectral damping, likewise: it acts between loops, as the paper's does
    h ← inject(h, e)            the embedded input e is read again
    h ← h + loop_embedding[k]
    h ← core(h)                 the shared layers

All but the core are off in the paper's model. Without a norm in this path a pre-norm core is F(h) = h + B(norm(h)), and
Lemma 2 (activity, arXiv 2606.24898) holds: with h = s·u, ‖u‖_rms = 1 and B = a·u + b_⊥,

    s' = √((s + a)² + ‖b_⊥‖²_rms) = s + a + O(1/s)        u' = u + b_⊥/s + O(1/s²)

Scale is carried on at leading order while direction moves ever more slowly.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.layers import Rotation, Stack, make_optional_norm
from loopscope.protocol import Cache, Loop, LoopState

DAMPING_LOGIT = 3.0
"""Spectral damping starts at σ(3) = 0.95."""


@dataclass(frozen=True)
class Context:
    """What every loop may read: the embedded input, the rotary angles, and for value embeddings the ids."""

    input_BTD: Tensor
    rotary: Rotation | None
    ids_BT: Tensor | None = None


torch.utils._pytree.register_dataclass(Context)


class AddInjection(nn.Module):
    """h + e."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return h_BTD + e_BTD


class ConcatInjection(nn.Module):
    """W·[h, e] (Huginn's adapter)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(2 * width, width, bias=False)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        return self.project(torch.cat([h_BTD, e_BTD], dim=-1))


class GatedInjection(nn.Module):
    """g·h + (1 − g)·e with g = σ(W·[h, e])."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(2 * width, width, bias=False)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        gate_BTD = self.gate(torch.cat([h_BTD, e_BTD], dim=-1)).sigmoid()
        return gate_BTD * h_BTD + (1 - gate_BTD) * e_BTD


class DiagonalInjection(nn.Module):
    """h·exp(−Δ·exp(A)) + Δ·(B e) with Δ = softplus(dt) > 0: every channel decays, so the loop contracts (Parcae)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.zeros(width))
        self.step_bias = nn.Parameter(torch.zeros(width))
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        step_D = F.softplus(self.step_bias)
        return h_BTD * torch.exp(-step_D * self.log_rate.exp()) + step_D * self.project(e_BTD)


INJECTIONS: dict[str, Callable[[int], nn.Module]] = {
    "add": AddInjection,
    "concat": ConcatInjection,
    "gated": GatedInjection,
    "diagonal": DiagonalInjection,
}


class Recurrence(nn.Module):
    """The loop itself; see the module's docstring for the order of its parts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_loops = config.num_loops
        self.inter_loop_norm = make_optional_norm(config.inter_loop_norm, config)
        self.damping = nn.Parameter(torch.tensor(DAMPING_LOGIT)) if config.spectral_damping else None
        self.injection = INJECTIONS[config.injection](config.width) if config.injection != "none" else None
        self.loop_embedding = nn.Embedding(config.num_loops, config.width) if config.loop_embedding else None
        self.core = Stack(config, config.num_layers, "core")

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        """h_{k-1} → h_k."""
        context: Context = state.context
        h_BTD = self.open(state.h_BTD, context.input_BTD, k)
        # The core must not depend on k, so that one compiled graph serves all loops; only cache slots need it.
        h_BTD = self.core(h_BTD, context.rotary, cache, k if cache is not None else 0, ids_BT=context.ids_BT)
        return state.with_h(h_BTD)

    def project(self, state: LoopState, loops: Sequence[int], cache: Cache) -> None:
        """Keys and values that every core layer makes of the state as it enters each of these loops, into the cache.

        What opens a loop is the same for all loops beyond the first unless there is a loop embedding: then one
        projection serves them all.
        """
        context: Context = state.context
        opened: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for k in loops:
            like = k if self.loop_embedding is not None else min(k, 2)
            if like not in opened:
                h_BTD = self.open(state.h_BTD, context.input_BTD, k)
                opened[like] = [
                    layer.keys_and_values(h_BTD, context.rotary, context.ids_BT)  # type: ignore[operator]
                    for layer in self.core.layers
                ]
            for index, (k_BHTC, v_BHTC) in enumerate(opened[like]):
                cache.extend((self.core.part, k, index), k_BHTC, v_BHTC)

    def open(self, h_BTD: Tensor, e_BTD: Tensor, k: Loop) -> Tensor:
        """Everything that happens to the carried state before the core."""
        if self.inter_loop_norm is not None:
            h_BTD = between_loops(k, h_BTD, self.inter_loop_norm)
        if self.damping is not None:
            h_BTD = between_loops(k, h_BTD, self.damping.sigmoid().mul)
        if self.injection is not None:
            h_BTD = self.injection(h_BTD, e_BTD)
        if self.loop_embedding is not None:
            # Loops beyond the trained depth see the last embedding.
            table, last = self.loop_embedding.weight, self.num_loops
            if isinstance(k, int):
                return h_BTD + table[min(k, last) - 1]
            return h_BTD + table[[min(each, last) - 1 for each in k]][:, None]
        return h_BTD


def between_loops(k: Loop, h_BTD: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """What opens every loop but the first, for the rows that are beyond it."""
    if isinstance(k, int):
        return h_BTD if k == 1 else change(h_BTD)
    return torch.where(torch.tensor(k, device=h_BTD.device)[:, None, None] > 1, change(h_BTD), h_BTD)
