"""Later exits: what one exit hides, another may show."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

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


KINDS = (
    Kind("scale hidden from loop 2", scale_hidden_from_loop_2, (32,), 1),
    Kind("raw at 1 and 3, loss at 2 and 4", partial(raw_at_odd_loops, supervised=[2, 4]), (32,), 1),
    control("final-only norm", final_only_norm, (32,)),
    control("raw last readout", raw_last_readout, (32,)),
    control("raw last readout, 3 unread", partial(raw_last_readout, channels=3), (32,)),
    control("raw at 1 and 3, loss there", partial(raw_at_odd_loops, supervised=[1, 3]), (32,)),
    control("unread in turn", partial(unread_in_turn, channels=3, strength=0.03), (32,)),
    control("unread in turn, strong blocks", partial(unread_in_turn, channels=3, strength=0.1), (32,)),
)
