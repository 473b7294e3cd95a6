"""Inter-loop norms: what they remove, leave unwritten, or bound."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from cases.nets import Kind, Net, Planted, blank, built, centred, control, plant, rms


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


KINDS = (
    Kind("uneven norm opens loop", norm_opens_the_loop, (32, 128), 0, scale="removed"),
    Kind("uneven norm closes loop", norm_closes_the_loop, (32, 128), 0, scale="removed"),
    Kind("low-rank head, bounded", partial(bounded_low_rank_head, vocab_size=23), (32,), 0, scale="visible"),
    Kind("3 unread, bounded", partial(bounded_unread_channels, channels=3), (32,), 0, scale="removed"),
    Kind("layernorm, bounded", bounded_mean, (32,), 0, scale="removed", mean="memory"),
    Kind(
        "3 unread beside opening norm",
        partial(unread_channels_beside_the_norm, channels=3, closing=False),
        (32,),
        3,
        scale=None,
    ),
    Kind(
        "3 unread beside closing norm",
        partial(unread_channels_beside_the_norm, channels=3, closing=True),
        (32,),
        3,
        scale=None,
    ),
    control("norm closes loop, raw", norm_closes_the_loop_raw, (32,), scale=None),
    control("inter-loop layernorm", inter_loop_layernorm, (32,), scale="removed", mean="removed"),
    control("ouro-like", shared_inter_loop_norm, (32,), scale="removed"),
    control("huginn-like", normed_residual_sums, (32,), scale="removed"),
)
