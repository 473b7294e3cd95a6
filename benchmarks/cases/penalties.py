"""Further loss terms, loop weights and gates: how far they let a variable run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

import loopscope as ls
from cases.nets import Kind, Net, Planted, blank, built, centred, control, plant, rms
from loopscope.objectives.terms import Pass

# --- norm penalties --------------------------------------------------------------------------------------------------


def penalty(
    width: int, weight: float, norm: Callable[[Tensor], Tensor] = rms, channels: int = 0, scale: float = 1.0
) -> Planted:
    """A norm readout (perhaps of Ph) and a norm penalty of value λ·mean over loops and tokens of s².

    Moved at loop k and all later ones, which are a share W_k of the loops, the penalty's increase over W_k is
    λ·(α² − 1)·s_ref², with s_ref = 1 whatever the scale of the audited state. It is 0.01 at α = √(1 + 0.01/λ):

        λ      1e-14  1e-10  1e-8   1e-7  1e-6  1e-5  3e-5 | 3e-4 | 5e-3  0.01  0.1   1
        α      1e6    1e4    1000   316   100   32    18   | 5.9  | 1.7   1.4   1.05  1.005
                                                     blind | weak | visible

    Ten lengths along a hidden direction raise s² by 100, so a direction is hidden for λ < 1e-4: blind as without the
    penalty (RMSNorm 1, LayerNorm 2, with c unread channels c + 1) on the left, 0 on the right. The mean, at right
    angles to h, is noticed at α = 1 + √(0.01/λ): 101 and 1.3 for λ = 1e-6 and 0.1.
    """
    net = Net(width, scale=scale, norm=partial(rms, eps=1e-6 * scale**2))
    readout = lambda h, k: net.logits(norm(blank(h, channels) if channels else h))  # noqa: E731
    return plant(net, readout, terms=[ls.NormPenalty(weight)])


def terminal_penalty(width: int, weight: float) -> Planted:
    """Only loop K = 3 has an exit, W_K = 1, and only it is moved: a third of the penalty, λ·(α² − 1)/3 = 0.01.

    λ = 1e-5: α = 55, blind 1. λ = 0.1: α = 1.14, visible.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h)), supervised="terminal", terms=[ls.NormPenalty(weight)])


# --- scale anchors ---------------------------------------------------------------------------------------------------


def anchor(width: int, weight: float, target: float) -> Planted:
    """RMSNorm readout and w·(s − t)², counted from the scale r = max(1, t): w·((α·r − t)² − (r − t)²) = 0.01.

    t = 1: α = 1 + √(0.01/w); w = 1: 1.1, visible; w = 1e-6: 101, blind 1.
    t = 0.01: about √(1 + 0.01/w); w = 1: 1.005, visible; w = 1e-6: 100, blind 1.
    t = 100: 1 + √(0.01/w)/100; w = 0.01: 1.01, visible (from s = 1 it would read as 200); w = 1e-10: 101, blind 1.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h)), terms=[ls.ScaleAnchor(weight, target)])


def anchor_beside_unread_channels(width: int, channels: int, weight: float) -> Planted:
    """Readout rms(Ph): M ⊕ span(h) is hidden from it. The anchor w·(s − 1)² sees the length of all of h.

    It does not turn a direction of M at right angles to h away at once, but ten lengths along it raise s to √101 and
    cost 81·w: what it holds is a sphere, on which M can grow by √(d/c) and no further. w = 100/d: blind 0, scale
    visible. w = 1e-8: ten lengths cost 1e-6, the scale is free 1000-fold. Blind c + 1.
    """
    net = Net(width)
    readout = lambda h, k: net.logits(rms(blank(h, channels)))  # noqa: E731
    return plant(net, readout, terms=[ls.ScaleAnchor(weight)])


# --- terms that shift or reward --------------------------------------------------------------------------------------


def shift_channel(width: int, z_loss: float) -> Planted:
    """Raw, and column 0 of the head is constant, 1/√d: channel 0 shifts all logits alike, which softmax hides.

    N = span(e_0). Ten lengths shift lse ≈ ln V + ½ by 10, and the z-loss z·lse² notices z·(10² + 20·lse)·w_k/W_k, some
    60·z or more: z = 0.01, visible, blind 0. z = 1e-8 or none: blind 1. Scale is shown in all other channels.
    """
    net = Net(width)
    with torch.no_grad():
        net.head[:, 0] = width**-0.5
    return plant(net, lambda h, k: net.logits(h), terms=[ls.ZLoss(z_loss)] if z_loss else [])


def z_loss_behind_a_norm(width: int) -> Planted:
    """R(αh) = R(h) with every logit the same, lse too: a z-loss of 0.01 sees nothing of the scale. Blind 1."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h)), terms=[ls.ZLoss(0.01)])


@dataclass(frozen=True)
class ScaleReward(ls.Term):
    """w·mean s² with w < 0: it pays for growth."""

    weight: float
    name: str = "scale_reward"
    may_reward: ClassVar[bool] = True

    def value(self, seen: Pass) -> Tensor:
        return self.weight * torch.stack([h.square().mean() for h in seen.states]).mean()


def scale_reward(width: int, norm: Callable[[Tensor], Tensor] | None) -> Planted:
    """A term −1e-3·s² rewards the scale: it drives, and never holds. Behind RMSNorm: blind 1.

    Raw: the exits notice 0.01 at α = 1.14, where the reward is 3e-4. Visible, blind 0.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h if norm is None else norm(h)), terms=[ScaleReward(-1e-3)])


# --- loop weights and gates ------------------------------------------------------------------------------------------


def _weighted(net: Net, weights: tuple[float, ...], raw: Callable[[int], bool]) -> Planted:
    """Loops of the given weights, K of them; raw readout where it says so, RMSNorm elsewhere."""
    objective = ls.ObjectiveConfig(placement="weighted", loop_weights=weights)
    readout = lambda h, k: net.logits(h if raw(k) else rms(h))  # noqa: E731
    return plant(net, readout, num_loops=len(weights), supervised=objective)


def final_only_weights(width: int, weight: float) -> Planted:
    """Raw below K = 4, RMSNorm at K, loop weights [w, w, w, 1].

    Moved at loop 3, the worst, the scale is seen by one exit of weight w/(1 + w): ½·w/(1 + w)·(1.04·(α − 1))² = 0.01.

        w      1e-10   1e-8   1e-6  1e-5  5e-5 | 1e-3 | 0.05  0.1   1
        α      13600   1360   137   44    20   | 5.3  | 1.6   1.5   1.2
                                         blind | weak | visible

    On the left *every* direction is hidden from the exits below K (ten lengths cost 54·w), and only span(h) from the
    last: blind 1. On the right ten lengths are noticed at once: blind 0.
    """
    return _weighted(Net(width), (weight, weight, weight, 1.0), lambda k: k < 4)


def raw_with_small_weights(width: int, weight: float) -> Planted:
    """Raw everywhere, loop weights [w, w, w, 1]: the last exit shows everything at full weight. Blind 0."""
    return _weighted(Net(width), (weight, weight, weight, 1.0), lambda k: True)


def raw_last_of_small_weight(width: int, weight: float) -> Planted:
    """RMSNorm below K = 4, raw at K, loop weights [1, 1, 1, w]: only the last exit sees the scale, ½·w/(1 + w)·1.08·….

    w = 1e-6: α = 137 from loop 3 on, and ten lengths of anything are hidden there: N_3 = span(h) stays. Blind 1.
    w = 0.2: α = 1.3, and h_K is shown. Blind 0.
    """
    return _weighted(Net(width), (1.0, 1.0, 1.0, weight), lambda k: k == 4)


def weights_of_zero(width: int) -> Planted:
    """Raw below K = 4, RMSNorm at K, loop weights [0, 0, 0, 1]: only h_K is supervised. N = span(h_K). Blind 1."""
    return _weighted(Net(width), (0.0, 0.0, 0.0, 1.0), lambda k: k < 4)


def gated_exits(width: int, probability: float) -> Planted:
    """Ours, raw below K = 3 and RMSNorm at K; a gate of weight 0 and bias logit p leaves with probability p at each.

    The same as loop weights of p, p·(1 − p) and the rest, and they do not move with the state. Raw
    logits have rms 8.6 (d = 32), so the scale is noticed from loop 2 on at α = 1 + √(0.02/p)/8.6. p = 1e-7: 53, and
    ten lengths of anything cost 4e-4 below the last exit: blind 1. p = 0.3: 1.03, visible.
    """
    planted = built(width, readout="final-only", exit_gate=True)
    with torch.no_grad():
        planted.model.exit_gate.weight.zero_()
        planted.model.exit_gate.bias.fill_(math.log(probability / (1 - probability)))
    return Planted(planted.model, planted.head_VD, supervised=ls.ObjectiveConfig(placement="gated"))


@dataclass(frozen=True)
class MeanSize(ls.Term):
    """λ · mean over loops, tokens and width of |h|; it says its value, and not what it shows."""

    weight: float
    name: str = "mean_size"

    def value(self, seen: Pass) -> Tensor:
        return self.weight * torch.stack([h_BTD.abs().mean() for h_BTD in seen.states]).mean()


def term_that_shows_nothing(width: int, weight: float) -> Planted:
    """RMSNorm readout and λ·mean |h|, a term of somebody's own without `shows`: its value alone says what it notices.

    mean |h| ≈ 0.8·s: λ·0.8·(α − 1) is 0.01 at α = 1.13 for λ = 0.1, and ten lengths along h cost 0.8: visible, blind 0.
    For λ = 1e-6 at α = 12,500: blind 1.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h)), terms=[MeanSize(weight)])


KINDS = (
    control("mean size 0.1", partial(term_that_shows_nothing, weight=0.1), (32,)),
    Kind("mean size 1e-6", partial(term_that_shows_nothing, weight=1e-6), (32,), 1),
    Kind("penalty 1e-14", partial(penalty, weight=1e-14), (32,), 1),
    Kind("penalty 1e-10", partial(penalty, weight=1e-10), (32,), 1),
    Kind("penalty 1e-8", partial(penalty, weight=1e-8), (32,), 1),
    Kind("penalty 1e-7", partial(penalty, weight=1e-7), (16,), 1),
    Kind("penalty 1e-6", partial(penalty, weight=1e-6), (32, 256), 1),
    Kind("penalty 1e-5", partial(penalty, weight=1e-5), (16,), 1),
    Kind("penalty 3e-5", partial(penalty, weight=3e-5), (32,), 1),
    Kind("penalty 3e-4", partial(penalty, weight=3e-4), (32, 128), 0, scale="weak"),
    control("penalty 5e-3", partial(penalty, weight=5e-3), (32,)),
    control("penalty 0.01", partial(penalty, weight=0.01), (32, 128)),
    control("penalty 0.1", partial(penalty, weight=0.1), (16,)),
    control("penalty 1", partial(penalty, weight=1.0), (32,)),
    Kind("penalty 1e-6, state run to 50", partial(penalty, weight=1e-6, scale=50.0), (32,), 1),
    control("penalty 0.01, state run to 50", partial(penalty, weight=0.01, scale=50.0), (32,)),
    Kind("penalty 1e-6, layernorm", partial(penalty, weight=1e-6, norm=centred), (32,), 2, mean="blind"),
    control("penalty 0.1, layernorm", partial(penalty, weight=0.1, norm=centred), (32,)),
    Kind("penalty 1e-6, 3 unread", partial(penalty, weight=1e-6, channels=3), (32,), 4),
    control("penalty 0.01, 3 unread", partial(penalty, weight=0.01, channels=3), (32,)),
    Kind("penalty 1e-5, terminal", partial(terminal_penalty, weight=1e-5), (32,), 1),
    control("penalty 0.1, terminal", partial(terminal_penalty, weight=0.1), (32,)),
    control("anchor at 1", partial(anchor, weight=1.0, target=1.0), (32, 128)),
    Kind("anchor at 1, weight 1e-6", partial(anchor, weight=1e-6, target=1.0), (32,), 1),
    control("anchor at 0.01", partial(anchor, weight=1.0, target=0.01), (32,)),
    Kind("anchor at 0.01, weight 1e-6", partial(anchor, weight=1e-6, target=0.01), (32,), 1),
    control("anchor at 100", partial(anchor, weight=0.01, target=100.0), (32,)),
    Kind("anchor at 100, weight 1e-10", partial(anchor, weight=1e-10, target=100.0), (32,), 1),
    control("anchor, 3 unread", partial(anchor_beside_unread_channels, channels=3, weight=100 / 32), (32,)),
    Kind("weak anchor, 3 unread", partial(anchor_beside_unread_channels, channels=3, weight=1e-8), (32,), 4),
    Kind("shift channel", partial(shift_channel, z_loss=0.0), (32, 128), 1, scale="visible"),
    Kind("shift channel, z-loss 1e-8", partial(shift_channel, z_loss=1e-8), (32,), 1, scale="visible"),
    control("shift channel, z-loss 0.01", partial(shift_channel, z_loss=0.01), (32,)),
    Kind("z-loss behind rmsnorm", z_loss_behind_a_norm, (32,), 1),
    Kind("negative weight, rmsnorm", partial(scale_reward, norm=rms), (32,), 1),
    control("negative weight, raw", partial(scale_reward, norm=None), (32,)),
    Kind("final-only, weights 1e-10", partial(final_only_weights, weight=1e-10), (32,), 1),
    Kind("final-only, weights 1e-8", partial(final_only_weights, weight=1e-8), (16,), 1),
    Kind("final-only, weights 1e-6", partial(final_only_weights, weight=1e-6), (32, 128), 1),
    Kind("final-only, weights 1e-5", partial(final_only_weights, weight=1e-5), (16,), 1),
    Kind("final-only, weights 5e-5", partial(final_only_weights, weight=5e-5), (32,), 1),
    Kind("final-only, weights 1e-3", partial(final_only_weights, weight=1e-3), (32,), 0, scale="weak"),
    control("final-only, weights 0.05", partial(final_only_weights, weight=0.05), (32,)),
    control("final-only, weights 0.1", partial(final_only_weights, weight=0.1), (16,)),
    control("final-only, weights 1", partial(final_only_weights, weight=1.0), (32, 128)),
    control("raw, weights 1e-6", partial(raw_with_small_weights, weight=1e-6), (32,)),
    Kind("raw last, weight 1e-6", partial(raw_last_of_small_weight, weight=1e-6), (32,), 1),
    control("raw last, weight 0.2", partial(raw_last_of_small_weight, weight=0.2), (32,)),
    Kind("final-only, weights 0", weights_of_zero, (32,), 1),
    Kind("final-only, gate 1e-7", partial(gated_exits, probability=1e-7), (32,), 1),
    control("final-only, gate 0.3", partial(gated_exits, probability=0.3), (32,)),
)
