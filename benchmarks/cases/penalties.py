"""Further loss terms, loop weights and gates: how far they let a variable run."""

from __future__ import annotations

from functools import partial

import loopscope as ls
from cases.nets import Kind, Net, Planted, blank, control, plant, rms


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


KINDS = (
    Kind("penalty", partial(penalty, weight=0.01), (32, 128), 0, scale="visible"),
    Kind("penalty too small", partial(penalty, weight=1e-14), (32,), 1),
    Kind("anchor, 3 unread", partial(anchor_beside_unread_channels, channels=3), (32,), 3, scale="visible"),
    control("penalty, 3 unread", partial(penalty, weight=0.01, channels=3), (32,)),
)
