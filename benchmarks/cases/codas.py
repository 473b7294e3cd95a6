"""Codas: a readout that runs a layer of its own, C(x) = x + γ·B(x), before the head or before a last norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.nn import functional as F

import loopscope as ls
from cases.nets import Kind, Net, Planted, Readout, blank, built, centred, control, plant, rms


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _coda(net: Net, strength: float, norm: Callable[[Tensor], Tensor], attends: bool) -> Callable[[Tensor], Tensor]:
    """A layer of weights of its own: MLP, and attention to this and earlier tokens where it attends."""
    layer = Net(len(net.down), strength=strength, norm=norm, seed=1, mirrored=not attends)
    net.add_module("coda", layer)

    def run(x_BTD: Tensor) -> Tensor:
        if attends:
            return layer.loop(x_BTD, 0)
        return x_BTD + layer.strength * F.linear(F.gelu(F.linear(norm(x_BTD), layer.up)), layer.down)

    return run


def coda_before_a_norm(
    width: int,
    last: Callable[[Tensor], Tensor],
    *,
    strength: float = 0.01,
    attends: bool = False,
    channels: int = 0,
) -> Planted:
    """Features last(P·C(h)), C(h) = h + γ·B(rms h) invertible: N is DC⁻¹ of what the last norm hides of P·C(h).

    RMSNorm 1, LayerNorm 2, RMSNorm of Ph with c channels unread c + 1, Ph itself c: as without a coda. With γ = 0.01 N
    is span(h), span(1, h), M ⊕ span(h) and M up to 1 %, and the scale's free range behind a norm has no end: α → ∞
    turns C(αh)/α by γ·B only, noticed by ½·γ² = 5e-5 at most. The same where the coda attends to earlier tokens, of
    which it reads rms h.
    """
    net = Net(width)
    coda = _coda(net, strength, rms, attends)
    readout: Readout = lambda h, k: net.logits(last(blank(coda(h), channels) if channels else coda(h)))  # noqa: E731
    return plant(net, readout)


def strong_coda_before_a_norm(width: int) -> Planted:
    """Features rms(C(h)), γ = 1: N = span(v), v = DC⁻¹·C(h), which is near h and not equal to it.

    On the curve C(h(c)) = c·C(h) the logits never change, and it leads to infinity: h(c) → c·C(h). One direction is
    hidden, carried and read. Blind 1. (Along the ray α·h the exit notices the coda's share fading, so the verdict on
    scale by itself is not derived; the curve is scale all the same once it has left.)
    """
    return coda_before_a_norm(width, rms, strength=1.0)


def strong_coda_with_attention(width: int, last: Callable[[Tensor], Tensor], penalty: float = 0.0) -> Planted:
    """Features last(C(H)), γ = 1, C attending to earlier tokens.

    C(H(c)) = c·C(H) for all tokens at once: no logits change on that curve, and it leads to infinity, H(c) → c·C(H).
    If token t alone moved along its own curve, later tokens would see the direction of h_t turn; they make up for it in
    their own states, as (DC·V)_j = C_j asks of V. RMSNorm: blind 1 in every token.
    A penalty of 0.1 sees the curve as it sees any growth: 0.
    """
    planted = coda_before_a_norm(width, last, strength=1.0, attends=True)
    return replace(planted, terms=[ls.NormPenalty(penalty)] if penalty else ())


def coda_behind_a_norm(width: int, strength: float, attends: bool) -> Planted:
    """Features C(rms h): R(αh) = R(h) exactly, however strong the coda, and DC is invertible. N = span(h). Blind 1."""
    net = Net(width)
    coda = _coda(net, strength, _as_it_is, attends)
    return plant(net, lambda h, k: net.logits(coda(rms(h))))


def coda_without_a_last_norm(width: int, norm: Callable[[Tensor], Tensor], strength: float, attends: bool) -> Planted:
    """Features C(h) with nothing after it: J = W·DC, injective, be B normed or not. α·h is α·h + γ·B: seen. N = 0."""
    net = Net(width)
    coda = _coda(net, strength, norm, attends)
    return plant(net, lambda h, k: net.logits(coda(h)))


def coda_that_moves_channels(width: int, channels: int) -> Planted:
    """The coda adds R·m to the shown channels, R random of gain 1, and M is then left out: features P·(h + R·m).

    Every channel is shown, and yet d channels pass through d − c: N = {(−R·m, m)}, c directions. Blind c.
    """
    net = Net(width)

    def readout(h: Tensor, k: int) -> Tensor:
        added = F.linear(h[..., -channels:], net.out[:, -channels:])
        return net.logits(blank(h + added, channels))

    return plant(net, readout)


KINDS = (
    Kind("coda, rmsnorm", partial(coda_before_a_norm, last=rms), (32, 128), 1),
    Kind("coda with attention, rmsnorm", partial(coda_before_a_norm, last=rms, attends=True), (32,), 1),
    Kind("coda, layernorm", partial(coda_before_a_norm, last=centred), (32,), 2, mean="blind"),
    Kind("coda, 3 unread, rmsnorm", partial(coda_before_a_norm, last=rms, channels=3), (32,), 4),
    Kind(
        "coda with attention, 3 unread",
        partial(coda_before_a_norm, last=rms, attends=True, channels=3),
        (32,),
        4,
    ),
    Kind("coda, 3 unread, raw", partial(coda_before_a_norm, last=_as_it_is, channels=3), (32,), 3, scale="visible"),
    Kind("strong coda, rmsnorm", strong_coda_before_a_norm, (32,), 1, scale=None),
    Kind("strong coda with attention", partial(strong_coda_with_attention, last=rms), (32,), 1, scale=None),
    control("strong coda with attention, raw", partial(strong_coda_with_attention, last=_as_it_is), (32,)),
    control("strong coda with attention, penalty", partial(strong_coda_with_attention, last=rms, penalty=0.1), (32,)),
    Kind("coda ours, rmsnorm", partial(built, coda_layers=1, readout="rmsnorm"), (32,), 1, scale=None),
    control("coda ours, raw", partial(built, coda_layers=1, readout="raw"), (32,)),
    Kind("rmsnorm, coda", partial(coda_behind_a_norm, strength=0.3, attends=False), (32,), 1),
    Kind("rmsnorm, coda with attention", partial(coda_behind_a_norm, strength=0.3, attends=True), (32, 128), 1),
    control("coda, raw", partial(coda_without_a_last_norm, norm=rms, strength=0.3, attends=False), (32,)),
    control("coda with attention, raw", partial(coda_without_a_last_norm, norm=rms, strength=0.3, attends=True), (32,)),
    control(
        "coda without norms", partial(coda_without_a_last_norm, norm=_as_it_is, strength=0.3, attends=False), (32, 128)
    ),
    control(
        "coda with attention, no norms",
        partial(coda_without_a_last_norm, norm=_as_it_is, strength=0.3, attends=True),
        (32,),
    ),
    Kind("coda that moves channels", partial(coda_that_moves_channels, channels=3), (32,), 3, scale="visible"),
)
