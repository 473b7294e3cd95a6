"""Channels and subspaces that no exit reads: before and after a norm, by the head's rank, erased, leaking."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from cases.nets import Kind, Net, Planted, blank, centred, control, plant, plant_injected, rms


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


def head_of_vocabulary(width: int, vocab_size: int) -> Planted:
    """A raw readout of V ≤ d tokens shows V − 1 directions, for V = 2 a single one: blind d − V + 1. V > d + 1: none.

    The core is the plain one, β = 0.03: no hidden direction loses more than 3.4 % a loop (0.3 would damp some by 20 %).
    Its blocks read all of h, and so do the logits of later loops and tokens, for V = 2 and d = 16 by 6e-6 at least; at
    d = 64 they would need more exits than there are, so that the wide case has V = 17. Logits are lifted to rms 1: the
    scale is visible. The mean may lie near N or not: not derived.
    """
    net = Net(width, vocab_size=vocab_size, mirrored=True)
    return plant(net, lambda h, k: net.logits(h))


def leaking_channels(width: int, channels: int, leak: float) -> Planted:
    """Raw, but c channels are multiplied by ℓ before the head, at most all but one: ten lengths answer 10.4·ℓ·g.

    g = 1/rms z = 1.04⁻¹·√(d/(d − c)) where ℓ is small: at most √d for c = d − 1. The limit is 0.14/√w = 0.2 to 0.24.
    ℓ = 1e-4: 1e-3 to 6e-3, hidden whatever the share of channels. Blind c. ℓ = 2e-3, c = 3: 0.02, hidden. Blind c.
    ℓ = 0.1: 1.0 for c = 1, 5 for c = 31 of 32; ℓ = 0.05, c = 3: 0.5: noticed. Blind 0.
    """
    net = Net(width)
    gains_D = torch.ones(width)
    gains_D[-channels:] = leak
    net.register_buffer("lost_DR", gains_D)
    return plant(net, lambda h, k: net.logits(h * net.lost_DR))


def small_head(width: int, size: float) -> Planted:
    """*All* channels multiplied by 1e-4 are a raw readout with a small head: g = 1e4 lifts its logits. Blind 0."""
    net = Net(width, head_std=size)
    return plant(net, lambda h, k: net.logits(h))


KINDS = (
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
    *(
        Kind(
            f"vocabulary of {size}",
            partial(head_of_vocabulary, vocab_size=size),
            (16,),
            17 - size,
            scale="visible",
            mean=None,
        )
        for size in (2, 3, 5, 8, 16)
    ),
    Kind("vocabulary of 2, wide", partial(head_of_vocabulary, vocab_size=2), (32,), 31, scale="visible", mean=None),
    Kind("vocabulary of 17", partial(head_of_vocabulary, vocab_size=17), (64,), 48, scale="visible", mean=None),
    control("vocabulary of 24", partial(head_of_vocabulary, vocab_size=24), (16,)),
    *(
        Kind(
            f"{count} of 32 leak 1e-4",
            partial(leaking_channels, channels=count, leak=1e-4),
            (32,),
            count,
            scale="visible",
        )
        for count in (1, 15, 16, 17, 31)
    ),
    Kind("64 of 128 leak 1e-4", partial(leaking_channels, channels=64, leak=1e-4), (128,), 64, scale="visible"),
    Kind("3 of 32 leak 2e-3", partial(leaking_channels, channels=3, leak=2e-3), (32,), 3, scale="visible"),
    control("3 of 32 leak 0.05", partial(leaking_channels, channels=3, leak=0.05), (32,)),
    control("1 of 32 leaks 0.1", partial(leaking_channels, channels=1, leak=0.1), (32,)),
    control("16 of 32 leak 0.1", partial(leaking_channels, channels=16, leak=0.1), (32,)),
    control("31 of 32 leak 0.1", partial(leaking_channels, channels=31, leak=0.1), (32,)),
    control("head of 1e-4", partial(small_head, size=1e-4), (32,)),
)
