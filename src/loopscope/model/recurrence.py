"""One loop: what turns h_{k-1} into h_k.

    h ← norm(h)                 inter-loop norm, opens every loop after the first
    h ← σ(γ)·h                  spectral damping, likewise: it acts between loops, as the paper's does
    h ← inject(h, e)            the embedded input e is read again
    h ← h + loop_embedding[k]
    h ← core(h)                 the shared layers

All but the core are off in the paper's model. Designs whose loop is another one altogether are subclasses
(`RECURRENCES`). Without a norm in this path a pre-norm core is F(h) = h + B(norm(h)), and
Lemma 2 (activity, arXiv 2606.24898) holds: with h = s·u, ‖u‖_rms = 1 and B = a·u + b_⊥,

    s' = √((s + a)² + ‖b_⊥‖²_rms) = s + a + O(1/s)        u' = u + b_⊥/s + O(1/s²)

Scale is carried on at leading order while direction moves ever more slowly.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.attention import Rotation
from loopscope.model.layers import Beside, Stack
from loopscope.model.norms import init_std, make_norm, make_optional_norm
from loopscope.objectives.terms import Pass, Term
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


class ForgetfulInjection(ConcatInjection):
    """W·[h, e] that starts as e alone: no loop reads the state until W has trained (nanoLOOP)."""

    @torch.no_grad()
    def initialise(self) -> None:
        """W = [0 | I]."""
        width = self.project.out_features
        self.project.weight.zero_()
        self.project.weight[:, width:].fill_diagonal_(1.0)


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
    "forgetful": ForgetfulInjection,
    "gated": GatedInjection,
    "diagonal": DiagonalInjection,
}


class Recurrence(nn.Module):
    """The loop itself; see the module's docstring for the order of its parts.

    Every other recurrence is a subclass: what it starts from, what a loop does, and what of the state is read out.
    """

    hands_on_the_state: ClassVar[bool] = True
    """Whether what `open` makes of h is what the core's layers read, so that keys can be made of a state alone."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_loops = config.num_loops
        self.inter_loop_norm = make_optional_norm(config.inter_loop_norm, config)
        self.damping = nn.Parameter(torch.tensor(DAMPING_LOGIT)) if config.spectral_damping else None
        self.injection = INJECTIONS[config.injection](config.width) if config.injection != "none" else None
        self.loop_embedding = nn.Embedding(config.num_loops, config.width) if config.loop_embedding else None
        self.core: Any = self.make_core(config)

    def make_core(self, config: ModelConfig) -> nn.Module:
        """The layers that all loops share."""
        return Stack(config, config.num_layers, "core")

    def start(self, state: LoopState) -> LoopState:
        """The state before the first loop, made of the plain one: h_0, and the embedded input in its context."""
        return state

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        """h_{k-1} → h_k."""
        context: Context = state.context
        return state.with_h(self.run(self.open(state.h_BTD, context.input_BTD, k), context, k, cache))

    def shown(self, state: LoopState) -> Tensor:
        """What of the state is read out, of the model's width."""
        return state.h_BTD

    def run(
        self,
        x_BTD: Tensor,
        context: Context,
        k: Loop,
        cache: Cache | None,
        query_BTD: Tensor | None = None,
        queried_B11: Tensor | None = None,
    ) -> Tensor:
        """The core, which must not depend on k, so that one compiled graph serves all loops; only cache slots need it.

        Every layer makes its queries of `query_BTD` where that is given, in the rows where `queried_B11` is true.
        """
        beside = Beside(context.ids_BT, context.input_BTD, query_BTD, queried_B11)
        out_BTD: Tensor = self.core(x_BTD, context.rotary, cache, k if cache is not None else 0, beside=beside)
        return out_BTD

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
                beside = Beside(context.ids_BT, context.input_BTD)
                opened[like] = [layer.keys_and_values(h_BTD, context.rotary, beside) for layer in self.core.layers]
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


class QueryRecurrence(Recurrence):
    """Fully Looped Transformer (arXiv 2605.18797): the state comes back as queries, and the stream restarts from e.

        loop 1        an ordinary pass of the stack over e
        loop k > 1    the same pass, in which every layer attends with Q = W_Q·norm(h_{k−1}); K, V of its own input

    Chosen here: the query goes through the layer's own norm, as its input does.
    """

    hands_on_the_state = False

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        context: Context = state.context
        if k == 1:
            return state.with_h(self.run(context.input_BTD, context, k, cache))
        beyond_B11 = None if isinstance(k, int) else _beyond_the_first(k, state.h_BTD)
        return state.with_h(self.run(context.input_BTD, context, k, cache, state.h_BTD, beyond_B11))


class AnchoredRecurrence(Recurrence):
    """SCSE (arXiv 2607.27656): the loop acts on the distance to an anchor that the input sets.

        anchor = e + 0.1·P_a e        h_0 = e + 0.1·P_0 e        δ = h − anchor
        h ← anchor + δ + ½·m·G(δ)     m = 1 where ‖δ‖² > 1e-8, else 0: a state at its anchor stays there

    Chosen here: G(δ) is what the shared layers add to δ, core(δ) − δ; with pre-norm layers without biases G(0) = 0.
    """

    NEAR = 1e-8
    hands_on_the_state = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.to_anchor, self.to_start = (nn.Linear(config.width, config.width, bias=False) for _ in range(2))

    def start(self, state: LoopState) -> LoopState:
        """The anchor takes the place of the input in the context: it is all that loops read of it."""
        e_BTD = state.context.input_BTD
        context = replace(state.context, input_BTD=e_BTD + 0.1 * self.to_anchor(e_BTD))
        return replace(state, h_BTD=e_BTD + 0.1 * self.to_start(e_BTD), context=context)

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        context: Context = state.context
        delta_BTD = state.h_BTD - context.input_BTD
        added_BTD = self.run(delta_BTD, context, k, cache) - delta_BTD
        moves_BT1 = delta_BTD.square().sum(-1, keepdim=True) > self.NEAR
        return state.with_h(context.input_BTD + delta_BTD + 0.5 * moves_BT1 * added_BTD)


class HyperRecurrence(Recurrence):
    """Hyperloop (arXiv 2604.21254): n copies of the stream, read, written and kept by gates of their own.

        z = RMSNorm(flatten Y)        H = σ(a·W z + b) per loop and token: n numbers each to read, write and keep
        Y ← H_keep∘Y + 2·H_write∘(F(H_read·Y) + v_k)        h_0: n copies of e        read out: the mean over copies

    W, a, b and v belong to a loop, and loops beyond the trained depth use the last; a starts at 0.01, b and v at 0. The
    state h is all copies side by side, n·d wide. Chosen here: the norm of z has a gain, which all loops share.
    """

    COPIES = 4
    hands_on_the_state = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        wide, loops = self.COPIES * config.width, config.num_loops
        self.norm = make_norm("rmsnorm", wide, config.norm_eps)
        self.mix = nn.ModuleList(nn.Linear(wide, 3 * self.COPIES, bias=False) for _ in range(loops))
        self.strength = nn.Parameter(torch.full((loops, 3), 0.01))
        self.bias = nn.Parameter(torch.zeros(loops, 3, self.COPIES))
        self.offset = nn.Parameter(torch.zeros(loops, config.width))

    def start(self, state: LoopState) -> LoopState:
        """n copies of h_0."""
        return state.with_h(state.h_BTD.repeat(1, 1, self.COPIES))

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        copies_BTND = state.h_BTD.unflatten(-1, (self.COPIES, -1))
        each = [k] if isinstance(k, int) else list(k)
        loops = [min(loop, self.num_loops) - 1 for loop in each]
        rows = state.h_BTD.split(1) if len(loops) > 1 else [state.h_BTD]
        gates = [self.gates(h, loop) for h, loop in zip(rows, loops, strict=True)]
        read_BTN, write_BTN, keep_BTN = torch.cat(gates).unbind(-2)
        x_BTD = (read_BTN[..., None] * copies_BTND).sum(-2)
        new_BTD = self.run(x_BTD, state.context, k, cache) + self.offset[loops][:, None]
        mixed_BTND = keep_BTN[..., None] * copies_BTND + 2 * write_BTN[..., None] * new_BTD[..., None, :]
        return state.with_h(mixed_BTND.flatten(-2))

    def gates(self, h_BTX: Tensor, loop: int) -> Tensor:
        """σ(a·W z + b) of read, write and keep as (B, T, 3, n)."""
        z_BT3N = self.mix[loop](self.norm(h_BTX)).unflatten(-1, (3, -1))
        return (self.strength[loop][:, None] * z_BT3N + self.bias[loop]).sigmoid()

    def shown(self, state: LoopState) -> Tensor:
        """The mean over copies."""
        return state.h_BTD.unflatten(-1, (self.COPIES, -1)).mean(-2)


class LaneRecurrence(Recurrence):
    """The simpler lanes of hyper-connections: learned numbers in place of gates (arXiv 2604.21254).

        u = Σ_i α_k,i·lane_i        lanes ← M_k·lanes + β_k·norm(F(u))        read out: the sum of the lanes

    α_k starts one-hot at k mod n, M_k at I and β_k at 1, all of them per loop; loops beyond the trained depth use the
    last. The state h is all lanes side by side. Chosen here: four lanes, each e at first.
    """

    LANES = 4

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        lanes, loops = self.LANES, config.num_loops
        self.norm = make_norm("rmsnorm", config.width, config.norm_eps)
        self.read = nn.Parameter(torch.eye(lanes)[[k % lanes for k in range(1, loops + 1)]])
        self.keep = nn.Parameter(torch.eye(lanes).repeat(loops, 1, 1))
        self.write = nn.Parameter(torch.ones(loops, lanes))

    def start(self, state: LoopState) -> LoopState:
        """h_0 in every lane."""
        return state.with_h(state.h_BTD.repeat(1, 1, self.LANES))

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        lanes_BTND = state.h_BTD.unflatten(-1, (self.LANES, -1))
        loops = [min(loop, self.num_loops) - 1 for loop in ([k] if isinstance(k, int) else k)]
        read_B1N1, write_B1N1 = (each[loops][:, None, :, None] for each in (self.read, self.write))
        new_BTD = self.norm(self.run((read_B1N1 * lanes_BTND).sum(-2), state.context, k, cache))
        kept_BTND = self.keep[loops][:, None] @ lanes_BTND
        return state.with_h((kept_BTND + write_B1N1 * new_BTD[..., None, :]).flatten(-2))

    def shown(self, state: LoopState) -> Tensor:
        """The sum of the lanes."""
        return state.h_BTD.unflatten(-1, (self.LANES, -1)).sum(-2)


class TwoStacks(nn.Module):
    """The two stacks of a cycle: low-level runs, then a high-level one; norms have no gain."""

    def __init__(self, config: ModelConfig, low_cycles: int) -> None:
        super().__init__()
        self.low_cycles, self.eps = low_cycles, config.norm_eps
        self.low, self.high = (Stack(config, config.num_layers, "core") for _ in range(2))

    def norm(self, x_BTD: Tensor) -> Tensor:
        """x/√(mean x² + eps)."""
        return F.rms_norm(x_BTD, x_BTD.shape[-1:], eps=self.eps)

    def forward(
        self, high_BTD: Tensor, low_BTD: Tensor, context: Context, cache: Cache | None, k: Loop
    ) -> tuple[Tensor, Tensor]:
        """(H(z_H + z_L), z_L) after three times z_L ← norm(L(z_L + z_H)); every run has cache slots of its own."""
        layers, beside = len(self.low.layers), Beside(context.ids_BT, context.input_BTD)
        for cycle in range(self.low_cycles):
            low_BTD = self.norm(self.low(low_BTD + high_BTD, context.rotary, cache, k, cycle * layers, beside))
        return self.high(high_BTD + low_BTD, context.rotary, cache, k, self.low_cycles * layers, beside), low_BTD


class TwoStateRecurrence(Recurrence):
    """HRM-Text: a slow state and a fast one, which is carried beside it; a loop is one high-level cycle.

        z_H ← norm(h_{k−1}) for k > 1, h_0 = e/std of the embedding at first; z_L = 0 at first
        z_L ← norm(L(z_L + z_H))  three times        h_k = H(z_H + z_L)

    L and H are stacks of `num_layers` layers each; norms have no gain. h_k is cut before the norm that closes H.
    """

    LOW_CYCLES = 3
    hands_on_the_state = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embedding_std = init_std(config) or 1.0

    def make_core(self, config: ModelConfig) -> nn.Module:
        """Both stacks."""
        return TwoStacks(config, self.LOW_CYCLES)

    def start(self, state: LoopState) -> LoopState:
        """The embedding over the std that it was drawn with, and nothing beside it."""
        h_BTD = state.h_BTD / self.embedding_std
        return replace(state, h_BTD=h_BTD, carried={"z_L": torch.zeros_like(h_BTD)})

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        high_BTD = between_loops(k, state.h_BTD, self.core.norm)
        slot = k if cache is not None else 0
        h_BTD, low_BTD = self.core(high_BTD, state.carried["z_L"], state.context, cache, slot)
        return replace(state, h_BTD=h_BTD, carried={"z_L": low_BTD})


class PonderingRecurrence(Recurrence):
    """ACT (arXiv 1603.08983) as Universal Transformers have it: a mean of the states, weighted by when a token halts.

        p_n = σ(w·h_{n−1} + b)        N = first n with Σ_{j≤n} p_j > 1 − 0.01        R = 1 − Σ_{n<N} p_n
        read out after loop k: Σ_{n<k} p_n·h_n + (what is left)·h_k, up to N

    Carried beside h: the `average` so far, and what is `left` of the weight, 0 for a token that has halted. At b = 1
    the first p is about 0.73. Chosen here: the states of halted tokens go on for the others to attend to.
    """

    THRESHOLD = 0.01

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.halting = nn.Linear(config.width, 1)
        nn.init.ones_(self.halting.bias)

    def start(self, state: LoopState) -> LoopState:
        """Nothing is weighted yet."""
        left_BT1 = torch.ones_like(state.h_BTD[..., :1])
        return replace(state, carried={"average": torch.zeros_like(state.h_BTD), "left": left_BT1})

    def forward(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        left_BT1, p_BT1 = state.carried["left"], self.halting(state.h_BTD).sigmoid()
        h_BTD = super().forward(state, k, cache).h_BTD
        halts_BT1 = p_BT1 > left_BT1 - self.THRESHOLD  # a halted token halts again, with nothing left to give
        weight_BT1 = torch.where(halts_BT1, left_BT1, p_BT1)
        average_BTD = state.carried["average"] + weight_BT1 * h_BTD
        left_BT1 = torch.where(halts_BT1, torch.zeros_like(left_BT1), left_BT1 - p_BT1)
        return replace(state, h_BTD=h_BTD, carried={"average": average_BTD, "left": left_BT1})

    def shown(self, state: LoopState) -> Tensor:
        """The average, to which the current state gives what is left."""
        return state.carried["average"] + state.carried["left"] * state.h_BTD


@dataclass(frozen=True)
class PonderCost(Term):
    """τ·mean over tokens of N + R, the loops until a token halts and what was left of its weight then (ACT).

    Read from the carried weights `left` of every loop; only R has a gradient.
    """

    weight: float
    name: str = "ponder_cost"

    def value(self, seen: Pass) -> Tensor:
        lefts = [state.carried["left"] for state in seen.trace.states if "left" in state.carried]
        if not lefts:
            return seen.nothing
        before_KBT1 = torch.stack(lefts[:-1])
        runs_KBT1 = before_KBT1 > 0
        runs_on_KBT1 = torch.cat([runs_KBT1[1:], torch.zeros_like(runs_KBT1[:1])])
        remainder_BT1 = (before_KBT1 * (runs_KBT1 & ~runs_on_KBT1)).sum(0)
        return self.weight * (runs_KBT1.sum(0) + remainder_BT1).mean()


# A further recurrence is one class, one line here, and its name among those of `ModelConfig.recurrence`.
RECURRENCES: dict[str, type[Recurrence]] = {
    "plain": Recurrence,
    "query": QueryRecurrence,
    "anchored": AnchoredRecurrence,
    "hyper": HyperRecurrence,
    "lanes": LaneRecurrence,
    "two-state": TwoStateRecurrence,
    "pondering": PonderingRecurrence,
}


def between_loops(k: Loop, h_BTD: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """What opens every loop but the first, for the rows that are beyond it."""
    if isinstance(k, int):
        return h_BTD if k == 1 else change(h_BTD)
    return torch.where(_beyond_the_first(k, h_BTD), change(h_BTD), h_BTD)


def _beyond_the_first(k: tuple[int, ...], h_BTD: Tensor) -> Tensor:
    """Which rows are past their first loop (B, 1, 1)."""
    return torch.tensor(k, device=h_BTD.device)[:, None, None] > 1
