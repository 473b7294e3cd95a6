"""The audit against models whose blind subspace is known by derivation.

    python benchmarks/planted.py [--only NAME] [--largest 512]

Every case is a small looped model with one fault planted in it (or none: a control). Its docstring derives N, the
directions of the state that no supervised readout shows, and how many of them the loop carries, can write and reads:
the blind dimension. What all derivations use:

- Width d, K loops, state h = s·√d·û with ‖û‖ = 1, F one loop, W the head with its rows centred. W is random with
  V = 4d, so it is injective: what is hidden is hidden by the readout in front of it.
- RMSNorm: δ ↦ (I − ûûᵀ)δ/s. Null space span(h). LayerNorm: null space span(1, h).
- The plain core is F(h) = h + β·B(norm h) with β = 0.03, so DF = I + O(β): invertible. Every direction is reachable and
  carried with a gain within 0.05 of 1. RMSNorm blocks read all of h, its scale included: F(αh)/α moves with α. So
  blind = dim N, unless the case changes the loop.
- "In general position": random subspaces of dimensions a and b meet in max(0, a + b − d) dimensions.

Comparators, on the same models: a norm monitor (alarm when ‖h‖ grows by 2 over 30 loops) and the null space of the
head alone. Exit code 1 when a dimension or a verdict is wrong, or a control raises an alarm.

Shape legend: B batch, T tokens, D width, V vocabulary, H heads, C head width, R lost directions.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

import loopscope as ls

PREFIXES, TOKENS = 8, 24
MONITOR_LOOPS, MONITOR_GROWTH = 30, 2.0
HEAD_TOLERANCE = 1e-3
"""Singular values of the head below this share of the median count as zero in the comparator."""
HEAD_NOTHING = 1e-9
"""Below this share of the largest they are left out of that median."""

Loop = Callable[[Any, int], Any]
Readout = Callable[[Any, int], Tensor]


# --- the plain model -------------------------------------------------------------------------------------------------


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm without gains."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def centred(x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without gains: RMSNorm of x minus its mean."""
    return rms(x - x.mean(-1, keepdim=True), eps)


def blank(x: Tensor, channels: int) -> Tensor:
    """x with its last channels set to zero."""
    return F.pad(x[..., :-channels], (0, channels))


class Net(nn.Module):
    """Embedding, one pre-norm residual layer (attention and MLP) for the loop, and a head; random weights."""

    lost_DR: Tensor
    gains: nn.Parameter

    def __init__(
        self,
        width: int,
        *,
        vocab_size: int | None = None,
        norm: Callable[[Tensor], Tensor] = rms,
        strength: float = 0.03,
        scale: float = 1.0,
        head_std: float = 1.0,
        tied: bool = False,
        mirrored: bool = False,
    ) -> None:
        super().__init__()
        vocab_size = vocab_size or 4 * width
        self.norm, self.strength, self.num_heads = norm, strength * scale, 4
        self.random = torch.Generator().manual_seed(width)
        self.table = self.normal(vocab_size, width, std=scale)
        self.positions = self.normal(TOKENS, width, std=0.3 * scale)
        self.qkv = self.normal(3 * width, width, std=width**-0.5)
        self.out = self.normal(width, width, std=width**-0.5)
        self.up = self.normal(2 * width, width, std=width**-0.5)
        self.down = (
            nn.Parameter(self.up.detach().T.clone()) if mirrored else self.normal(width, 2 * width, std=width**-0.5)
        )
        self.head = self.table if tied else self.normal(vocab_size, width, std=head_std * width**-0.5)

    def normal(self, *shape: int, std: float) -> nn.Parameter:
        """A random matrix from the model's own generator."""
        return nn.Parameter(std * torch.randn(shape, generator=self.random))

    def embed(self, ids_BT: Tensor) -> Tensor:
        """h_0."""
        return self.table[ids_BT] + self.positions[: ids_BT.shape[1]]

    def loop(self, h_BTD: Tensor, k: int) -> Tensor:
        """F(h) = h + β·B(norm h), k ignored."""
        h_BTD = h_BTD + self.strength * self.attention(self.norm(h_BTD))
        return h_BTD + self.strength * F.linear(F.gelu(F.linear(self.norm(h_BTD), self.up)), self.down)

    def attention(self, x_BTD: Tensor) -> Tensor:
        """Causal self-attention, spelled out."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in F.linear(x_BTD, self.qkv).chunk(3, -1)
        )
        scores_BHTT = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future_TT = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        mixed_BHTC = scores_BHTT.masked_fill(future_TT, -math.inf).softmax(-1) @ v
        return F.linear(mixed_BHTC.transpose(1, 2).flatten(-2), self.out)

    def logits(self, features_BTD: Tensor) -> Tensor:
        """features @ head.T."""
        return F.linear(features_BTD, self.head)


@dataclass(frozen=True)
class Planted:
    """A model, what its objective supervises and sees, and its head for the comparator."""

    model: Any
    head_VD: Tensor
    supervised: str | Sequence[int] = "every-loop"
    terms: Sequence[ls.Term] = ()

    def ids(self) -> Tensor:
        """Random prefixes, the same on every call."""
        return torch.randint(len(self.head_VD), (PREFIXES, TOKENS), generator=torch.Generator().manual_seed(1))


def plant(net: Net, readout: Readout, *, loop: Loop | None = None, num_loops: int = 3, **objective: Any) -> Planted:
    """A looped model of a net, with a readout and perhaps a loop of the case's own."""
    model = ls.adapt(embed=net.embed, loop=loop or net.loop, readout=readout, num_loops=num_loops, module=net)
    return Planted(model, net.head, **objective)


def built(width: int, **fields: Any) -> Planted:
    """One of our own models, default initialisation, dropout on in training mode."""
    config = ls.ModelConfig(
        **{"vocab_size": 4 * width, "width": width, "num_layers": 1, "num_loops": 3, "max_length": TOKENS} | fields
    )
    model = ls.build(config, seed=width)
    return Planted(model, model.head)


def trained(planted: Planted, steps: int = 25) -> Planted:
    """The same after some steps of per-loop cross-entropy on a text in which every token fixes the next."""
    optimizer = torch.optim.Adam(planted.model.parameters(), lr=3e-3)
    vocab_size = len(planted.head_VD)
    first_B = torch.arange(16) * 5 % vocab_size
    ids_BT = torch.stack([(first_B + 7 * t) % vocab_size for t in range(TOKENS)], dim=1)
    for _ in range(steps):
        states = ls.run_loops(planted.model, ids_BT).states
        logits = [planted.model.readout(states[k], k) for k in range(1, len(states))]
        loss = sum(F.cross_entropy(part[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()) for part in logits)
        optimizer.zero_grad()
        torch.as_tensor(loss).backward()
        optimizer.step()
    return planted


# --- faults: scale and mean ------------------------------------------------------------------------------------------


def rmsnorm_readout(width: int, scale: float = 1.0, strength: float = 0.03) -> Planted:
    """N = span(h), whatever the state's scale s as long as eps ≪ s². Blind 1: the scale (Lemma 1, arXiv 2606.24898).

    The first residual sublayer carries û unchanged however much it writes; the second changes it by O(β²) only.
    """
    net = Net(width, scale=scale, strength=strength, norm=partial(rms, eps=1e-6 * scale**2))
    return plant(net, lambda h, k: net.logits(net.norm(h)))


def rmsnorm_readout_in_float32(width: int) -> Planted:
    """Blind 1, also where the audit is not shown the module and has to work in the functions' own precision."""
    net = Net(width)
    readout: Readout = lambda h, k: net.logits(rms(h))  # noqa: E731
    return Planted(ls.adapt(embed=net.embed, loop=net.loop, readout=readout, num_loops=3), net.head)


def grouped_rmsnorm_readout(width: int, groups: int) -> Planted:
    """RMSNorm within each of g groups of channels: N holds the scale of every group. Blind g, whole scale included."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h.unflatten(-1, (groups, -1))).flatten(-2)))


def massive_channel(width: int, size: float) -> Planted:
    """One channel of every state is `size`, the others are about 1: û is nearly that channel, N = span(h). Blind 1."""
    net = Net(width)
    with torch.no_grad():
        net.positions[:, 0] += size
    return plant(net, lambda h, k: net.logits(rms(h)))


def rmsnorm_readout_trained(width: int) -> Planted:
    """Training changes weights, not the invariance R(αh) = R(h). Blind 1."""
    return trained(rmsnorm_readout(width))


def rmsnorm_readout_in_bf16(width: int) -> Planted:
    """The weights' precision changes their values, not the function's null space. Blind 1.

    Evaluated in bfloat16 the zero would drown in rounding errors of 4e-3: the audit has to compute more exactly.
    """
    planted = rmsnorm_readout(width)
    planted.model.to(torch.bfloat16)
    return planted


def our_rmsnorm_readout(width: int, **fields: Any) -> Planted:
    """N = span(h), and one pre-norm residual sublayer maps û to û exactly; the second one to leading order. Blind 1.

    Injected input e is added to the state, so DF is that of the core at h + e: still I + small.
    """
    return built(width, readout="rmsnorm", **fields)


def terminal_rmsnorm_readout(width: int) -> Planted:
    """Only loop K is supervised, so h_K is looked at: N = span(h_K), carried by the loops beyond K. Blind 1."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h)), supervised="terminal")


def scale_hidden_from_loop_2(width: int) -> Planted:
    """Raw at loop 1, RMSNorm from loop 2 on, K = 4. N_1 = 0, N_2 = span(h_2), N_3 = span(h_3); no later loop is raw.

    What happens to scale after loop 1 is shown to no loss. Blind 1.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h if k == 1 else rms(h)), num_loops=4)


def raw_at_odd_loops(width: int, supervised: Sequence[int]) -> Planted:
    """Raw at odd loops, RMSNorm at even ones, K = 4: the objective decides.

    supervised = [2, 4]: N_2 = span(h_2), and the raw readout of loop 3 is in no loss. Blind 1.
    supervised = [1, 3]: N_1 = N_3 = 0. Blind 0.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h if k % 2 else rms(h)), num_loops=4, supervised=supervised)


def layernorm_over_rmsnorm_blocks(width: int) -> Planted:
    """N = span(1, h). RMSNorm blocks read the mean like any other direction. Blind 2: scale and mean."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(centred(h)))


def layernorm_over_layernorm_blocks(width: int) -> Planted:
    """N = span(1, h). F(h + c·1) = F(h) + c·1: the mean is carried, and no block or readout ever reads it: inert.

    The scale of what is left is read, as under RMSNorm. Blind 1.
    """
    net = Net(width, norm=centred)
    return plant(net, lambda h, k: net.logits(centred(h)))


def alpha_readout(width: int, alpha: float) -> Planted:
    """Features h·s^(a−1): c times the scale multiplies the logits by c^a, and J shows h a times as strongly as others.

    With logits of rms 1 an exit notices ½·(c^a − 1)², which is 0.01 at c = 1.141^(1/a). a = 1e-4 and 0.01: beyond 10⁵,
    free; ten lengths along the tangent show 10·a, noticed by ½·0.1² = 0.005: hidden. Blind 1. a = 0.1: 3.7 times, weak,
    and ten lengths are noticed by ½. Blind 0.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h) * h.square().mean(-1, keepdim=True) ** (alpha / 2)))


def our_alpha_readout(width: int, alpha: float) -> Planted:
    """The same from our own readout."""
    return built(width, readout="alpha", alpha=alpha, tie_head=False)


def slow_leak(width: int, decay: float) -> Planted:
    """F(h) = core(decay·h + e) under an RMSNorm readout: N = span(h), carried with a gain of about `decay`.

    0.99 per loop is above 0.95: blind 1. 0.5 per loop: damped, blind 0.
    """
    net = Net(width)
    return plant_injected(net, lambda h: decay * h, lambda h: net.logits(rms(h)))


# --- faults: channels and subspaces ----------------------------------------------------------------------------------


def unread_before_the_norm(width: int, channels: int) -> Planted:
    """Features rms(Ph), P blanks c channels M: N = {δ : Pδ ∈ span(Ph)} = M ⊕ span(h). Blind c + 1."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(blank(h, channels))))


def unread_after_the_norm(width: int, channels: int) -> Planted:
    """Features P·rms(h): Pδ' = 0 for δ' = (I − ûûᵀ)δ, so N = span(h) ⊕ (M ∩ û^⊥). Blind 1 + (c − 1) = c."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(blank(rms(h), channels)))


def unread_under_raw(width: int, channels: int) -> Planted:
    """Features Ph: N = M. Blind c; the scale is seen in the other channels."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(blank(h, channels)))


def rolled_channels(width: int, channels: int) -> Planted:
    """Each loop first moves all channels on by c; the exit of loop k leaves out those that were last at the start.

    N_k = M_k with DF M_k = M_{k+1} + O(β): what one exit hides arrives where the next one does not look. Blind c.
    """
    net = Net(width)

    def readout(h: Tensor, k: int) -> Tensor:
        return net.logits(blank(h.roll(-channels * k, -1), channels))

    return plant(net, readout, loop=lambda h, k: net.loop(h.roll(channels, -1), k))


def lost_subspace(width: int, directions: int, norm: Callable[[Tensor], Tensor] | None) -> Planted:
    """Features (I − QQᵀ)·h, with Q a random orthonormal basis of r directions: N = span(Q). Blind r.

    Of rms(h) instead of h: N = span(h) ⊕ (span(Q) ∩ û^⊥), again r directions.
    """
    net = Net(width)
    basis_DR = torch.linalg.qr(torch.randn(width, directions, generator=net.random)).Q
    net.register_buffer("lost_DR", basis_DR)

    def readout(h: Tensor, k: int) -> Tensor:
        features = h if norm is None else norm(h)
        return net.logits(features - features @ net.lost_DR @ net.lost_DR.T)

    return plant(net, readout)


def layernorm_of_shown_channels(width: int, channels: int, norm: Callable[[Tensor], Tensor] = rms) -> Planted:
    """LayerNorm over the d − c shown channels S alone: N = M ⊕ span(1_S, h_S). Blind c + 2 over RMSNorm blocks.

    Over LayerNorm blocks, which read all d channels less their mean, 1 = 1_S + 1_M ∈ N is inert. Blind c + 1.
    """
    net = Net(width, norm=norm)
    return plant(net, lambda h, k: net.logits(F.pad(centred(h[..., :-channels]), (0, channels))))


def layernorm_of_blanked_channels(width: int, channels: int) -> Planted:
    """LayerNorm of Ph over all d channels hides span(1, Ph), and Pδ = a·1 + b·Ph is zero in M only if a = 0.

    N = M ⊕ span(h): the zeros give the mean away. Blind c + 1.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(centred(blank(h, channels))))


def low_rank_head(width: int, vocab_size: int) -> Planted:
    """A tied head with V ≤ d, raw readout: centring leaves rank V − 1, so dim N = d − V + 1, all of it blind."""
    net = Net(width, vocab_size=vocab_size, tied=True)
    return plant(net, lambda h, k: net.logits(h))


def very_low_rank_head(width: int, vocab_size: int) -> Planted:
    """The same with V − 1 < d/2: most singular values of J are zero, and so is their median. Blind d − V + 1.

    One later readout shows V − 1 of these directions at order β, so it takes two loops (β²) to read them all; β is 0.1
    for that. An MLP UᵀφU has a Jacobian with (nearly) no negative part, so that none of the many is damped.
    """
    net = Net(width, vocab_size=vocab_size, tied=True, strength=0.1, mirrored=True)
    return plant(net, lambda h, k: net.logits(h))


def erased_channels(
    width: int, unread: int, erased: int, norm: Callable[[Tensor], Tensor] | None, strength: float = 0.03
) -> Planted:
    """M is unread; the loop sets E ⊆ M, e of the c channels, to zero before its core, which writes to all of them.

    ker DF = E. range DF has dimension d − e and meets N in dim N − e directions (general position), none of them in E:
    each is carried by what it has outside E. Raw: N = M, blind c − e. RMSNorm of Ph: N = M ⊕ span(h), blind c + 1 − e.
    (Directions of N orthogonal to E are in general *not* in range DF: one may add any vector of E, which is hidden and
    will be erased. Reach is to be asked of N, not of those. With β = 0.3 the two differ by more than any tolerance.)
    """
    net = Net(width, strength=strength, mirrored=strength > 0.03)

    def readout(h: Tensor, k: int) -> Tensor:
        shown = blank(h, unread)
        return net.logits(shown if norm is None else norm(shown))

    return plant(net, readout, loop=lambda h, k: net.loop(blank(h, erased), k))


def write_only_channels(width: int, channels: int) -> Planted:
    """The core writes to M, but its blocks and the readout see rms(Ph) only.

    N = M ⊕ span(h). F(h + m) = F(h) + m for m ∈ M: nobody ever reads it, inert. Blind 1: the scale of Ph.
    """
    net = Net(width, norm=lambda x: rms(blank(x, channels)))
    return plant(net, lambda h, k: net.logits(rms(blank(h, channels))))


def undamped_unread_channels(width: int, channels: int) -> Planted:
    """Shown channels decay by 0.5 per loop, the unread ones M do not. Raw readout: N = M, gain 1. Blind c."""
    net = Net(width)
    return plant_injected(
        net,
        lambda h: torch.cat([0.5 * h[..., :-channels], h[..., -channels:]], dim=-1),
        lambda h: net.logits(blank(h, channels)),
    )


def leaky_unread_channels(width: int, channels: int, strength: float) -> Planted:
    """Only M decays by 0.5 per loop. Raw readout: N = M. What is left of m ∈ M *in N* after j loops is 0.5^j·m: damped.

    What the core has read of it meanwhile stays, of order β, but in shown channels: visible. Blind 0.
    """
    net = Net(width, strength=strength)

    def loop(h: Tensor, k: int) -> Tensor:
        return net.loop(torch.cat([h[..., :-channels], 0.5 * h[..., -channels:]], dim=-1), k)

    return plant(net, lambda h, k: net.logits(blank(h, channels)), loop=loop)


def damped_unread_channels(width: int, channels: int) -> Planted:
    """All channels decay by 0.5 per loop. Raw readout: N = M, gain 0.5: damped. Blind 0."""
    net = Net(width)
    return plant_injected(net, lambda h: 0.5 * h, lambda h: net.logits(blank(h, channels)))


def plant_injected(net: Net, keep: Callable[[Tensor], Tensor], readout: Callable[[Tensor], Tensor]) -> Planted:
    """F(h) = core(keep(h) + e): the embedding e travels in the state's context."""

    def embed(ids_BT: Tensor) -> ls.LoopState:
        e_BTD = net.embed(ids_BT)
        return ls.LoopState(e_BTD, context=e_BTD)

    def loop(state: ls.LoopState, k: int) -> ls.LoopState:
        return state.with_h(net.loop(keep(state.h_BTD) + state.context, k))

    model = ls.adapt(embed=embed, loop=loop, readout=lambda s, k: readout(s.h_BTD), num_loops=3, module=net)
    return Planted(model, net.head)


# --- faults: inter-loop norms ----------------------------------------------------------------------------------------


def with_gains(net: Net) -> Net:
    """Add uneven gains g of an inter-loop norm, log-uniform between e^−1.5 and e^1.5."""
    net.gains = nn.Parameter(torch.exp(3 * torch.rand(len(net.down), generator=net.random) - 1.5))
    return net


def norm_opens_the_loop(width: int) -> Planted:
    """F(h) = core(g·rms(h)), RMSNorm readout: N = span(h), and F(αh) = F(h), so DF h = 0: removed. Blind 0."""
    net = with_gains(Net(width))
    return plant(net, lambda h, k: net.logits(rms(h)), loop=lambda h, k: net.loop(net.gains * rms(h), k))


def norm_closes_the_loop(width: int) -> Planted:
    """The same loop cut after its norm, h_k = g·rms(x), RMSNorm readout: N = span(h_k) = span(Gû), û = x/‖x‖.

    range DF = G·û^⊥, at the distance 1/(‖Gû‖·‖G⁻¹û‖) ≥ 2/(√κ + 1/√κ) ≥ 0.42 from Gû (Kantorovich, κ = e³): no loop
    can write there. Blind 0, and the same verdict as of the other cut.
    """
    net = with_gains(Net(width))
    return plant(net, lambda h, k: net.logits(rms(h)), loop=lambda h, k: net.gains * rms(net.loop(h, k)))


def norm_closes_the_loop_raw(width: int) -> Planted:
    """h_k = g·rms(x), raw readout: N = 0. Blind 0. Scale is visible or removed, as one cuts the loop."""
    net = with_gains(Net(width))
    return plant(net, lambda h, k: net.logits(h), loop=lambda h, k: net.gains * rms(net.loop(h, k)))


def bounded_low_rank_head(width: int, vocab_size: int) -> Planted:
    """F(h) = core(rms(h)), tied head with V − 1 < d, raw: N has d − V + 1 directions, carried, reachable and read.

    The norm bounds the state however N moves: memory, not a fault. Blind 0.
    """
    net = Net(width, vocab_size=vocab_size, tied=True)
    return plant(net, lambda h, k: net.logits(h), loop=lambda h, k: net.loop(rms(h), k))


def bounded_unread_channels(width: int, channels: int) -> Planted:
    """F(h) = core(rms(h)), readout rms(Ph): N = M ⊕ span(h). DF h = 0 (removed), M is bounded: memory. Blind 0."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(blank(h, channels))), loop=lambda h, k: net.loop(rms(h), k))


def bounded_mean(width: int) -> Planted:
    """F(h) = core(rms(h)) over RMSNorm blocks, LayerNorm readout: N = span(1, h). h is removed, the mean is memory.

    Writing 1 takes some h with it (range DF is a hyperplane), which the next norm removes. Blind 0.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(centred(h)), loop=lambda h, k: net.loop(rms(h), k))


def unread_channels_beside_the_norm(width: int, channels: int, closing: bool) -> Planted:
    """The inter-loop norm, the readout's norm too, see the shown channels S only; M is carried beside them.

    N = M ⊕ span(h_S). A norm that opens the loop removes h_S (DF h_S = 0); one that closes it leaves h_S unwritten (it
    is not in range DF). By either cut M is neither removed nor bounded. Blind c.
    """
    net = Net(width)

    def normed(h: Tensor) -> Tensor:
        return torch.cat([rms(h[..., :-channels]), h[..., -channels:]], dim=-1)

    def loop(h: Tensor, k: int) -> Tensor:
        return normed(net.loop(h, k)) if closing else net.loop(normed(h), k)

    return plant(net, lambda h, k: net.logits(rms(blank(h, channels))), loop=loop)


# --- faults and controls: further loss terms -------------------------------------------------------------------------


def penalty(width: int, weight: float, channels: int = 0) -> Planted:
    """RMSNorm readout (perhaps of Ph) and a norm penalty, which shows √λ·h: J stacked with √λ·I, injective for λ > 0.

    Hidden directions are then shown at √λ relative to a median of σ(W)/s, where σ(W) = 0.5·√(V/d) = 1 to within ±0.5
    (or √V times less, if logits are weighed by 1/V), and s ≈ 1. λ = 0.01: at least 0.05, visible. Blind 0.
    λ = 1e-14: at most 1e-7·√V, hidden still. Blind 1.
    """
    net = Net(width, head_std=0.5)
    terms = [ls.NormPenalty(weight)]
    return plant(net, lambda h, k: net.logits(rms(blank(h, channels) if channels else h)), terms=terms)


def anchor_beside_unread_channels(width: int, channels: int) -> Planted:
    """Readout rms(Ph): M ⊕ span(h) is hidden from it. An anchor on the scale shows s, whose derivative is û/√d.

    N = (M ⊕ span(h)) ∩ û^⊥. Blind c, and scale is visible.
    """
    net = Net(width)
    anchor = ls.ScaleAnchor(100 / width)  # shows 10·s
    return plant(net, lambda h, k: net.logits(rms(blank(h, channels))), terms=[anchor])


# --- controls --------------------------------------------------------------------------------------------------------


def raw_readout(width: int, *, vocab_size: int | None = None, scale: float = 1.0, head_std: float = 1.0) -> Planted:
    """Features h: J = W, injective for V − 1 ≥ d, at any scale of the state and of the logits. N = 0.

    A head of 1000 saturates the softmax: weighing logits by the model's own probabilities would see nothing.
    """
    net = Net(width, vocab_size=vocab_size, scale=scale, head_std=head_std, norm=partial(rms, eps=1e-6 * scale**2))
    return plant(net, lambda h, k: net.logits(h))


def strong_raw_readout(width: int) -> Planted:
    """N = 0 does not depend on the loop: here it writes ten times as much, and the norm grows in plain sight."""
    net = Net(width, strength=0.3)
    return plant(net, lambda h, k: net.logits(h))


def raw_readout_trained(width: int) -> Planted:
    """N = 0, and some steps of training do not make W singular."""
    return trained(raw_readout(width))


def raw_readout_in_bf16(width: int) -> Planted:
    """N = 0: rounding W to bfloat16 does not make it singular."""
    planted = raw_readout(width)
    planted.model.to(torch.bfloat16)
    return planted


def our_raw_readout(width: int) -> Planted:
    """N = 0."""
    return built(width, readout="raw")


def terminal_raw_readout(width: int) -> Planted:
    """Only loop K is supervised and looked at: N_K = 0."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h), supervised="terminal")


def final_only_norm(width: int) -> Planted:
    """Raw below K, RMSNorm at K: N_k = 0 at every supervised k < K, so the scale that enters loop K is controlled."""
    return built(width, readout="final-only")


def softcapped_logits(width: int, scale: float) -> Planted:
    """Raw, logits c·tanh(z/c) with z = Wh ≈ 1 and c = 5: J = diag(1 − tanh²)·W, factors above 0.5. N = 0.

    W makes up for the scale of the state. At another scale than its own the same readout would saturate.
    """
    net = Net(width, scale=scale, head_std=1 / scale, norm=partial(rms, eps=1e-6 * scale**2))
    return plant(net, lambda h, k: 5 * torch.tanh(net.logits(h) / 5))


def raw_last_readout(width: int, channels: int = 0) -> Planted:
    """RMSNorm exits (perhaps of Ph) below K and a supervised raw readout at K.

    N_k ≠ 0 at k < K, but DF = I + O(β) hands it on to h_K, where W shows it like everything else: the last loss
    controls it. Delayed visibility is 1 here, against O(β) where every later readout is a norm. Blind 0.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h if k >= 3 else rms(blank(h, channels) if channels else h)))


def unread_in_turn(width: int, channels: int, strength: float) -> Planted:
    """Raw, but each loop's exit leaves out c other channels: N_k = M_k with M_1, M_2, M_3 disjoint.

    DF = I + O(β) hands M_k on to loop k + 1, where it is shown in full but for O(β). Blind 0.
    """
    net = Net(width, strength=strength)

    def readout(h: Tensor, k: int) -> Tensor:
        start = channels * ((k - 1) % 3)
        return net.logits(
            torch.cat([h[..., :start], 0 * h[..., start : start + channels], h[..., start + channels :]], -1)
        )

    return plant(net, readout)


def head_with_an_outlier(width: int, size: float) -> Planted:
    """W plus a rank-one matrix `size` times as large: its largest singular value grows, none vanishes. N = 0."""
    net = Net(width)
    with torch.no_grad():
        vocab_size = len(net.head)
        left_V1, right_1D = net.normal(vocab_size, 1, std=1.0), net.normal(1, width, std=width**-0.5)
        net.head.add_(size * left_V1 * right_1D)
    return plant(net, lambda h, k: net.logits(h))


def norm_with_a_large_epsilon(width: int) -> Planted:
    """h/√(s² + eps) with eps = 100·s² shows the share eps/(s² + eps) = 0.99 of a raw readout's scale. N = 0."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h, eps=100.0)))


def inter_loop_layernorm(width: int) -> Planted:
    """F(h) = core(centred(h)), LayerNorm readout: N = span(1, h) = ker DF: both removed."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(centred(h)), loop=lambda h, k: net.loop(centred(h), k))


def shared_inter_loop_norm(width: int) -> Planted:
    """Ouro: one RMSNorm is readout and inter-loop norm. N = span(h), DF h = 0: removed."""
    return built(width, readout="rmsnorm", inter_loop_norm="rmsnorm", share_readout_norm=True)


def normed_residual_sums(width: int) -> Planted:
    """Huginn: every residual sum is normalised, so the loop ends in a norm. N = span(h) ∉ range DF: none writes it."""
    return built(width, readout="rmsnorm", norm_placement="sum")


def diagonal_injection(width: int) -> Planted:
    """Parcae: h decays by exp(−softplus(0)) = 0.5 per loop. N = span(h): damped."""
    return built(width, readout="rmsnorm", injection="diagonal")


# --- the cases -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A planted model at several widths, with what its docstring derives. None: not derived, not checked."""

    name: str
    make: Callable[[int], Planted]
    widths: tuple[int, ...]
    blind: int
    scale: str | None = "blind"
    mean: str | None = "visible"
    control: bool = False


BESIDE = partial(unread_channels_beside_the_norm, channels=3)
FAULTS = (
    Kind("rmsnorm", rmsnorm_readout, (16, 64, 512), 1),
    Kind("rmsnorm tiny state", partial(rmsnorm_readout, scale=1e-3), (32,), 1),
    Kind("rmsnorm huge state", partial(rmsnorm_readout, scale=1e4), (32,), 1),
    Kind("rmsnorm strong blocks", partial(rmsnorm_readout, strength=0.3), (32,), 1),
    Kind("rmsnorm float32", rmsnorm_readout_in_float32, (32,), 1),
    Kind("rmsnorm in 4 groups", partial(grouped_rmsnorm_readout, groups=4), (32, 128), 4),
    Kind("rmsnorm massive channel", partial(massive_channel, size=300.0), (32,), 1),
    Kind("rmsnorm trained", rmsnorm_readout_trained, (32,), 1),
    Kind("rmsnorm bf16", rmsnorm_readout_in_bf16, (32,), 1),
    Kind("rmsnorm terminal", terminal_rmsnorm_readout, (32,), 1),
    Kind("rmsnorm ours", our_rmsnorm_readout, (32, 256), 1),
    Kind("rmsnorm ours, injection", partial(our_rmsnorm_readout, injection="add"), (32,), 1),
    Kind("scale hidden from loop 2", scale_hidden_from_loop_2, (32,), 1),
    Kind("raw at 1 and 3, loss at 2 and 4", partial(raw_at_odd_loops, supervised=[2, 4]), (32,), 1),
    Kind("layernorm, rmsnorm blocks", layernorm_over_rmsnorm_blocks, (32, 128), 2, mean="blind"),
    Kind("layernorm, layernorm blocks", layernorm_over_layernorm_blocks, (32, 128), 1, mean="inert"),
    Kind("alpha 1e-4", partial(alpha_readout, alpha=1e-4), (32,), 1),
    Kind("alpha 1e-4 ours", partial(our_alpha_readout, alpha=1e-4), (64,), 1),
    Kind("alpha 0.01", partial(alpha_readout, alpha=0.01), (32,), 1),
    Kind("alpha 0.01 ours", partial(our_alpha_readout, alpha=0.01), (64,), 1),
    Kind("alpha 0.1", partial(alpha_readout, alpha=0.1), (32,), 0, scale="weak"),
    Kind("leak of 0.99", partial(slow_leak, decay=0.99), (32,), 1),
    Kind("1 unread before norm", partial(unread_before_the_norm, channels=1), (16, 64), 2),
    Kind("3 unread before norm", partial(unread_before_the_norm, channels=3), (32,), 4),
    Kind("8 unread before norm", partial(unread_before_the_norm, channels=8), (32, 512), 9),
    Kind("1 unread after norm", partial(unread_after_the_norm, channels=1), (16, 64), 1),
    Kind("3 unread after norm", partial(unread_after_the_norm, channels=3), (32,), 3),
    Kind("8 unread after norm", partial(unread_after_the_norm, channels=8), (32, 256), 8),
    Kind("3 unread, raw", partial(unread_under_raw, channels=3), (32,), 3, scale="visible"),
    Kind("3 unread, rolled", partial(rolled_channels, channels=3), (32,), 3, scale="visible"),
    Kind("lost subspace, raw", partial(lost_subspace, directions=5, norm=None), (32, 128), 5, scale="visible"),
    Kind("lost subspace, rmsnorm", partial(lost_subspace, directions=4, norm=rms), (32,), 4),
    Kind("layernorm of shown channels", partial(layernorm_of_shown_channels, channels=3), (32,), 5, mean="blind"),
    Kind(
        "shown channels, layernorm blocks",
        partial(layernorm_of_shown_channels, channels=3, norm=centred),
        (32,),
        4,
        mean="inert",
    ),
    Kind("layernorm of blanked channels", partial(layernorm_of_blanked_channels, channels=3), (32,), 4),
    Kind("low-rank head", partial(low_rank_head, vocab_size=23), (32,), 10, scale="visible"),
    Kind("very low-rank head", partial(very_low_rank_head, vocab_size=16), (32,), 17, scale="visible"),
    Kind("erased unread, raw", partial(erased_channels, unread=3, erased=3, norm=None), (32,), 0, scale="visible"),
    Kind("erased unread, rmsnorm", partial(erased_channels, unread=1, erased=1, norm=rms), (32,), 1),
    Kind(
        "erased unread, rmsnorm, strong", partial(erased_channels, unread=1, erased=1, norm=rms, strength=0.3), (32,), 1
    ),
    Kind("8 unread, 3 erased", partial(erased_channels, unread=8, erased=3, norm=None), (64,), 5, scale="visible"),
    Kind(
        "8 unread, 3 erased, strong",
        partial(erased_channels, unread=8, erased=3, norm=None, strength=0.3),
        (32,),
        5,
        scale="visible",
    ),
    Kind("write-only channels", partial(write_only_channels, channels=3), (32,), 1),
    Kind("undamped unread channels", partial(undamped_unread_channels, channels=3), (32,), 3, scale="visible"),
    Kind("damped unread channels", partial(damped_unread_channels, channels=3), (32,), 0, scale="visible"),
    Kind("leaky unread", partial(leaky_unread_channels, channels=3, strength=0.03), (32,), 0, scale="visible"),
    Kind("leaky unread, strong", partial(leaky_unread_channels, channels=3, strength=0.6), (32,), 0, scale="visible"),
    Kind("damped injection", partial(slow_leak, decay=0.5), (32, 128), 0, scale="damped"),
    Kind("uneven norm opens loop", norm_opens_the_loop, (32, 128), 0, scale="removed"),
    Kind("uneven norm closes loop", norm_closes_the_loop, (32, 128), 0, scale="removed"),
    Kind("low-rank head, bounded", partial(bounded_low_rank_head, vocab_size=23), (32,), 0, scale="visible"),
    Kind("3 unread, bounded", partial(bounded_unread_channels, channels=3), (32,), 0, scale="removed"),
    Kind("layernorm, bounded", bounded_mean, (32,), 0, scale="removed", mean="memory"),
    Kind("3 unread beside opening norm", partial(BESIDE, closing=False), (32,), 3, scale=None),
    Kind("3 unread beside closing norm", partial(BESIDE, closing=True), (32,), 3, scale=None),
    Kind("penalty", partial(penalty, weight=0.01), (32, 128), 0, scale="visible"),
    Kind("penalty too small", partial(penalty, weight=1e-14), (32,), 1),
    Kind("anchor, 3 unread", partial(anchor_beside_unread_channels, channels=3), (32,), 3, scale="visible"),
)

_control = partial(Kind, blind=0, scale="visible", control=True)
CONTROLS = (
    _control("raw", raw_readout, (16, 64, 512)),
    _control("raw trained", raw_readout_trained, (32,)),
    _control("raw, growing norm", strong_raw_readout, (32,)),
    _control("raw ours", our_raw_readout, (32, 256)),
    _control("raw terminal", terminal_raw_readout, (32,)),
    _control("raw bf16", raw_readout_in_bf16, (32,)),
    _control("saturated softmax", partial(raw_readout, head_std=1000.0), (32,)),
    _control("tiny state", partial(raw_readout, scale=1e-3), (32,)),
    _control("huge state", partial(raw_readout, scale=1e4), (32,)),
    _control("tiny state, softcapped", partial(softcapped_logits, scale=1e-3), (32,)),
    _control("large vocabulary", partial(raw_readout, vocab_size=32_768), (32,)),
    _control("final-only norm", final_only_norm, (32,)),
    _control("raw last readout", raw_last_readout, (32,)),
    _control("raw last readout, 3 unread", partial(raw_last_readout, channels=3), (32,)),
    _control("raw at 1 and 3, loss there", partial(raw_at_odd_loops, supervised=[1, 3]), (32,)),
    _control("unread in turn", partial(unread_in_turn, channels=3, strength=0.03), (32,)),
    _control("unread in turn, strong blocks", partial(unread_in_turn, channels=3, strength=0.1), (32,)),
    _control("head with an outlier", partial(head_with_an_outlier, size=1e4), (32,)),
    _control("norm with a large epsilon", norm_with_a_large_epsilon, (32,)),
    _control("penalty, 3 unread", partial(penalty, weight=0.01, channels=3), (32,)),
    _control("norm closes loop, raw", norm_closes_the_loop_raw, (32,), scale=None),
    _control("inter-loop layernorm", inter_loop_layernorm, (32,), scale="removed", mean="removed"),
    _control("ouro-like", shared_inter_loop_norm, (32,), scale="removed"),
    _control("huginn-like", normed_residual_sums, (32,), scale="removed"),
    _control("parcae-like", diagonal_injection, (32,), scale="damped"),
)


@dataclass(frozen=True)
class Case:
    """One planted model at one width."""

    kind: Kind
    width: int

    def __str__(self) -> str:
        return f"{self.kind.name}, d {self.width}"


CASES = tuple(Case(kind, width) for kind in FAULTS + CONTROLS for width in kind.widths)


# --- comparators -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def norm_monitor(planted: Planted) -> bool:
    """What a plot of the norm says: alarm when the mean ‖h‖ at loop 30 is twice that at loop 1."""
    planted.model.eval()
    norms_K = ls.run_loops(planted.model, planted.ids(), num_loops=MONITOR_LOOPS).norms_K()
    return bool(norms_K[-1] >= MONITOR_GROWTH * norms_K[0])


@torch.no_grad()
def head_null_space(head_VD: Tensor) -> int:
    """What the head alone hides: d minus the rank of W with its rows centred."""
    head_VD = head_VD.double()
    values = torch.linalg.svdvals(head_VD - head_VD.mean(0))
    middle = values[values > HEAD_NOTHING * values[0]].median()
    return head_VD.shape[1] - int((values > HEAD_TOLERANCE * middle).sum())


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the audit and the comparators say of a case."""

    case: Case
    found: int
    agreement: float
    alarm: bool
    scale: str
    mean: str
    norm_alarm: bool
    head_null: int
    seconds: float

    @property
    def dimension_right(self) -> bool:
        """The blind dimension is the derived one."""
        return self.found == self.case.kind.blind

    @property
    def verdicts_right(self) -> bool:
        """The overall verdict and those of scale and mean are the derived ones."""
        kind = self.case.kind
        pairs = ((self.scale, kind.scale), (self.mean, kind.mean))
        return self.alarm == (kind.blind > 0) and all(wanted in (None, said) for said, wanted in pairs)

    @property
    def false_alarm(self) -> bool:
        """A blind spot is reported where there is none."""
        return self.alarm and self.case.kind.blind == 0


def examine(case: Case, options: ls.AuditOptions | None = None) -> Row:
    """Audit one planted model and ask the comparators."""
    planted = case.kind.make(case.width)
    started = time.perf_counter()
    result = ls.audit(
        planted.model,
        [planted.ids()],
        supervised=planted.supervised,
        terms=planted.terms,
        options=options,
    )
    seconds = time.perf_counter() - started
    verdicts = {variable.name: variable.verdict for variable in result.variables}
    directions = result.blind_directions
    return Row(
        case=case,
        found=directions.dimension,
        agreement=directions.agreement,
        alarm=result.verdict == "blind-spot",
        scale=verdicts["scale"],
        mean=verdicts["mean"],
        norm_alarm=norm_monitor(planted),
        head_null=head_null_space(planted.head_VD.detach()),
        seconds=seconds,
    )


COLUMNS = (
    f"{'case':32} {'d':>4} {'expected':>8} {'found':>5} {'agree':>5}  {'scale':8} {'mean':8} "
    f"{'norm':5} {'head':>4} {'seconds':>7}"
)


def show(row: Row) -> None:
    """Print one line of the table, with what is wrong in it."""
    kind = row.case.kind
    wrong = "" if row.dimension_right else "  WRONG DIMENSION"
    if not row.verdicts_right:
        wrong += f"  WRONG VERDICT: scale {kind.scale}, mean {kind.mean}, alarm {kind.blind > 0} derived"
    print(
        f"{kind.name:32} {row.case.width:4} {kind.blind:8} {row.found:5} {row.agreement:5.0%}  "
        f"{row.scale:8} {row.mean:8} {'alarm' if row.norm_alarm else '-':5} {row.head_null:4} {row.seconds:7.1f}"
        f"{wrong}",
        flush=True,
    )


def summary(rows: Sequence[Row]) -> str:
    """Totals of the audit and of the comparators."""
    right, verdicts = sum(row.dimension_right for row in rows), sum(row.verdicts_right for row in rows)
    false_alarms = sum(row.false_alarm for row in rows)
    norm = sum(row.norm_alarm == (row.case.kind.blind > 0) for row in rows)
    head = sum(row.head_null == row.case.kind.blind for row in rows)
    total = len(rows)
    return (
        f"audit: {right}/{total} dimensions right, {verdicts}/{total} verdicts right, {false_alarms} false alarms; "
        f"norm monitor: {norm}/{total} alarms right; head SVD: {head}/{total} dimensions right"
    )


def main(only: str = "", largest: int = 512) -> int:
    """Audit the planted models and compare with what was derived.

    Args:
        only: Cases whose name contains this.
        largest: Largest width.
    """
    cases = [case for case in CASES if only in case.kind.name and case.width <= largest]
    if not cases:
        print(f"no case is called {only!r}; there are: {', '.join(kind.name for kind in FAULTS + CONTROLS)}")
        return 2
    print(COLUMNS)
    rows = []
    for case in cases:
        rows.append(examine(case))
        show(rows[-1])
    print(summary(rows))
    return 0 if all(row.dimension_right and row.verdicts_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
