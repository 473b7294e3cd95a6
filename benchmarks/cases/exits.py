"""Later exits: what one exit hides, another may show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import loopscope as ls
from cases.nets import Kind, Net, Planted, blank, built, control, plant, rms


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


def final_only_norm(width: int) -> Planted:
    """Raw below K, RMSNorm at K: N_k = 0 at every supervised k < K, so the scale that enters loop K is controlled."""
    return built(width, readout="final-only")


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


def raw_last_leaves_out(width: int, channels: int, earlier: int, num_loops: int = 6) -> Planted:
    """RMSNorm exits below K = 6, a raw readout of Ph at K that leaves c channels M unread.

    Exits rms(h), `earlier` = 0: N_k = span(h), of which √(c/d) = 0.3 is hidden at K, and 0.95 shown. The last exit sees
    the scale, at half the weight from loop 5 on. Blind 0, scale visible.
    Exits rms(Ph), `earlier` = c: N_k = M ⊕ span(h). M stays hidden, h does not. Blind c, scale visible.
    """
    net = Net(width)

    def readout(h: Tensor, k: int) -> Tensor:
        if k >= num_loops:
            return net.logits(blank(h, channels))
        return net.logits(rms(blank(h, earlier) if earlier else h))

    return plant(net, readout, num_loops=num_loops)


def raw_last_of_low_rank(width: int, vocab_size: int) -> Planted:
    """RMSNorm exits below K = 6, raw at K, tied head with V − 1 < d: ker W has d − V + 1 = r dimensions.

    N_k = span(h) ⊕ (ker W ∩ û^⊥), N_K = ker W: r − 1 directions are hidden at both. Of h, a row of the head and some
    more, a fifth lies in ker W: shown at K. Blind r − 1, scale visible.
    """
    net = Net(width, vocab_size=vocab_size, tied=True)
    return plant(net, lambda h, k: net.logits(h if k >= 6 else rms(h)), num_loops=6)


def raw_in_the_middle(width: int) -> Planted:
    """RMSNorm exits but for a raw one at loop 3 of 6: N_1 and N_2 are shown there, N_4 = span(h_4) nowhere. Blind 1."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h if k == 3 else rms(h)), num_loops=6)


def unread_at_strength(width: int, channels: int, strength: float) -> Planted:
    """Raw readout of Ph at every exit, K = 6, blocks of strength β: N_k = M for all k.

    u = m + β·DB·m/s, ‖DB‖ about 1: a is about m, b about β/s_k of it. Weak blocks: β. Strong ones write β a loop, so
    that s_k is about β·k, and b is 1/k: near a at loop 1, a fifth of it at loop 5, the worst, which decides. Blind c,
    however strong the blocks are.
    """
    net = Net(width, strength=strength)
    return plant(net, lambda h, k: net.logits(blank(h, channels)), num_loops=6)


def read_by_blocks(width: int, channels: int, gain: float) -> Planted:
    """Raw readout of Ph; the blocks get M multiplied by `gain` = 10, ten times as strong as any other channel.

    u = m + O(10·β·DB·m) with β = 0.03: b is at most a third of a. Blind c.
    """
    net = Net(width)
    gains_D = torch.ones(width)
    gains_D[-channels:] = gain
    net.register_buffer("lost_DR", gains_D)
    net.norm = lambda x: rms(x * net.lost_DR)
    return plant(net, lambda h, k: net.logits(blank(h, channels)))


def copied_into_sight(width: int, channels: int, gain: float) -> Planted:
    """Raw readout of Ph; each loop adds g·(m − m_0) to c shown channels, m_0 being M before the first loop.

    m − m_0 is O(β), so the channels keep their rms of 1, but m ↦ (m, g·m): a = 1, b = g. g = 10, as no other channel is
    read: shown by the next exit, blind 0. g = 0.3: blind c.
    """
    net = Net(width)

    def embed(ids_BT: Tensor) -> ls.LoopState:
        h = net.embed(ids_BT)
        return ls.LoopState(h, context=h[..., -channels:])

    def loop(state: ls.LoopState, k: int) -> ls.LoopState:
        h = state.h_BTD
        moved = gain * (h[..., -channels:] - state.context)
        return state.with_h(net.loop(h, k) + F.pad(moved, (0, width - channels)))

    model = ls.adapt(
        embed=embed,
        loop=loop,
        readout=lambda state, k: net.logits(blank(state.h_BTD, channels)),
        num_loops=3,
        module=net,
    )
    return Planted(model, net.head)


def half_in_common(width: int) -> Planted:
    """K = 2, raw: exit 1 leaves out channels 0 to 3, exit 2 channels 2 to 5. DF = I + O(β): 2 stay hidden. Blind 2."""
    net = Net(width)

    def readout(h: Tensor, k: int) -> Tensor:
        first = 0 if k == 1 else 2
        return net.logits(torch.cat([h[..., :first], 0 * h[..., first : first + 4], h[..., first + 4 :]], -1))

    return plant(net, readout, num_loops=2)


def turned(width: int, degrees: float) -> Planted:
    """K = 2, raw: exit 1 leaves out channel 0, exit 2 the direction cos θ·e_0 + sin θ·e_1.

    e_0 arrives with a = cos θ hidden and b = sin θ shown, up to O(β). θ = 20°: 0.94 and 0.34, blind 1. θ = 70°: 0.34
    and 0.94, blind 0.
    """
    net = Net(width)
    angle = math.radians(degrees)

    def readout(h: Tensor, k: int) -> Tensor:
        lost_D = torch.zeros_like(h[0, 0])
        lost_D[0], lost_D[1] = (1.0, 0.0) if k == 1 else (math.cos(angle), math.sin(angle))
        return net.logits(h - (h @ lost_D)[..., None] * lost_D)

    return plant(net, readout, num_loops=2)


KINDS = (
    Kind("scale hidden from loop 2", scale_hidden_from_loop_2, (32,), 1),
    Kind("raw at 1 and 3, loss at 2 and 4", partial(raw_at_odd_loops, supervised=[2, 4]), (32,), 1),
    control("final-only norm", final_only_norm, (32,)),
    control("raw last readout", raw_last_readout, (32,)),
    control("raw last readout, 3 unread", partial(raw_last_readout, channels=3), (32,)),
    control("raw at 1 and 3, loss there", partial(raw_at_odd_loops, supervised=[1, 3]), (32,)),
    control("unread in turn", partial(unread_in_turn, channels=3, strength=0.03), (32,)),
    control("unread in turn, strong blocks", partial(unread_in_turn, channels=3, strength=0.1), (32,)),
    control("raw last leaves 3 out", partial(raw_last_leaves_out, channels=3, earlier=0), (32, 128)),
    Kind("raw last, 3 never read", partial(raw_last_leaves_out, channels=3, earlier=3), (32, 128), 3, scale="visible"),
    Kind("raw last of low rank", partial(raw_last_of_low_rank, vocab_size=23), (32,), 9, scale="visible"),
    Kind("raw in the middle", raw_in_the_middle, (32,), 1),
    *(
        Kind(
            f"3 unread, strength {strength:g}",
            partial(unread_at_strength, channels=3, strength=strength),
            (32,),
            3,
            scale="visible",
        )
        for strength in (0.03, 0.1, 0.3, 1.0, 3.0)
    ),
    Kind("3 unread, blocks read 10 times", partial(read_by_blocks, channels=3, gain=10.0), (32,), 3, scale="visible"),
    control("3 unread, copied 10 times", partial(copied_into_sight, channels=3, gain=10.0), (32,)),
    Kind("3 unread, copied 0.3 times", partial(copied_into_sight, channels=3, gain=0.3), (32,), 3, scale="visible"),
    Kind("half in common", half_in_common, (16, 32), 2, scale="visible"),
    Kind("turned by 20 degrees", partial(turned, degrees=20.0), (32,), 1, scale="visible"),
    control("turned by 70 degrees", partial(turned, degrees=70.0), (32,)),
)
