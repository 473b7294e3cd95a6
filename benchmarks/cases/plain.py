"""Scale and mean: what a norm in front of the head hides, and raw readouts as controls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cases.nets import Kind, Net, Planted, built, centred, control, plant, plant_injected, rms, trained


def rmsnorm_readout(width: int, scale: float = 1.0, strength: float = 0.03) -> Planted:
    """N = span(h), whatever the state's scale s as long as eps ≪ s². Blind 1: the scale (Lemma 1, arXiv 2606.24898).

    The first residual sublayer carries û unchanged however much it writes; the second changes it by O(β²) only.
    """
    net = Net(width, scale=scale, strength=strength, norm=partial(rms, eps=1e-6 * scale**2))
    return plant(net, lambda h, k: net.logits(net.norm(h)))


def tiny_state_with_eps(width: int) -> Planted:
    """RMSNorm with eps = 1e-6 at s = 1e-3: half of the scale leaks through eps. The state grows, and the leak ends.

    Judged at scale 1, where the logits have the same direction: N = span(h). Blind 1.
    """
    net = Net(width, scale=1e-3, norm=partial(rms, eps=1e-12))
    return plant(net, lambda h, k: net.logits(rms(h)))


def grouped_rmsnorm_readout(width: int, groups: int, scale: float = 1.0) -> Planted:
    """RMSNorm within each of g groups of channels: N holds the scale of every group. Blind g, whole scale included.

    At s = 1e-3 the norm's eps of 1e-6 leaks half of it; judged at scale 1, where the logits are nearly the same (the
    groups' own eps weigh them by √(x/(x + 1)), x = s²/eps, mostly 0.6 to 0.8: a cosine of 0.99), nothing of it
    leaks. Blind g.
    """
    net = Net(width, scale=scale, norm=partial(rms, eps=1e-6 * scale**2))
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


def our_rmsnorm_readout(width: int, **fields: Any) -> Planted:
    """N = span(h), and one pre-norm residual sublayer maps û to û exactly; the second one to leading order. Blind 1.

    Injected input e is added to the state, so DF is that of the core at h + e: still I + small.
    """
    return built(width, readout="rmsnorm", **fields)


def terminal_rmsnorm_readout(width: int) -> Planted:
    """Only loop K is supervised, so h_K is looked at: N = span(h_K), carried by the loops beyond K. Blind 1."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(rms(h)), supervised="terminal")


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


def our_raw_readout(width: int) -> Planted:
    """N = 0."""
    return built(width, readout="raw")


def terminal_raw_readout(width: int) -> Planted:
    """Only loop K is supervised and looked at: N_K = 0."""
    net = Net(width)
    return plant(net, lambda h, k: net.logits(h), supervised="terminal")


def softcapped_logits(width: int, scale: float) -> Planted:
    """Raw, logits c·tanh(z/c) with z = Wh ≈ 1 and c = 5: J = diag(1 − tanh²)·W, factors above 0.5. N = 0.

    W makes up for the scale of the state. At another scale than its own the same readout would saturate.
    """
    net = Net(width, scale=scale, head_std=1 / scale, norm=partial(rms, eps=1e-6 * scale**2))
    return plant(net, lambda h, k: 5 * torch.tanh(net.logits(h) / 5))


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


def diagonal_injection(width: int) -> Planted:
    """Parcae: h decays by exp(−softplus(0)) = 0.5 per loop. N = span(h): damped."""
    return built(width, readout="rmsnorm", injection="diagonal")


KINDS = (
    Kind("rmsnorm", rmsnorm_readout, (16, 64, 512), 1),
    Kind("rmsnorm tiny state", partial(rmsnorm_readout, scale=1e-3), (32,), 1),
    Kind("rmsnorm huge state", partial(rmsnorm_readout, scale=1e4), (32,), 1),
    Kind("rmsnorm strong blocks", partial(rmsnorm_readout, strength=0.3), (32,), 1),
    Kind("rmsnorm in 4 groups", partial(grouped_rmsnorm_readout, groups=4), (32, 128), 4),
    Kind("rmsnorm in 4 groups, tiny", partial(grouped_rmsnorm_readout, groups=4, scale=1e-3), (32,), 4),
    Kind("rmsnorm tiny state, eps", tiny_state_with_eps, (32,), 1),
    Kind("rmsnorm massive channel", partial(massive_channel, size=300.0), (32,), 1),
    Kind("rmsnorm trained", rmsnorm_readout_trained, (32,), 1),
    Kind("rmsnorm terminal", terminal_rmsnorm_readout, (32,), 1),
    Kind("rmsnorm ours", our_rmsnorm_readout, (32, 256), 1),
    Kind("rmsnorm ours, injection", partial(our_rmsnorm_readout, injection="add"), (32,), 1),
    Kind("layernorm, rmsnorm blocks", layernorm_over_rmsnorm_blocks, (32, 128), 2, mean="blind"),
    Kind("layernorm, layernorm blocks", layernorm_over_layernorm_blocks, (32, 128), 1, mean="inert"),
    Kind("alpha 1e-4", partial(alpha_readout, alpha=1e-4), (32,), 1),
    Kind("alpha 1e-4 ours", partial(our_alpha_readout, alpha=1e-4), (64,), 1),
    Kind("alpha 0.01", partial(alpha_readout, alpha=0.01), (32,), 1),
    Kind("alpha 0.01 ours", partial(our_alpha_readout, alpha=0.01), (64,), 1),
    Kind("alpha 0.1", partial(alpha_readout, alpha=0.1), (32,), 0, scale="weak"),
    Kind("leak of 0.99", partial(slow_leak, decay=0.99), (32,), 1),
    Kind("damped injection", partial(slow_leak, decay=0.5), (32, 128), 0, scale="damped"),
    control("raw", raw_readout, (16, 64, 512)),
    control("raw trained", raw_readout_trained, (32,)),
    control("raw, growing norm", strong_raw_readout, (32,)),
    control("raw ours", our_raw_readout, (32, 256)),
    control("raw terminal", terminal_raw_readout, (32,)),
    control("saturated softmax", partial(raw_readout, head_std=1000.0), (32,)),
    control("tiny state", partial(raw_readout, scale=1e-3), (32,)),
    control("huge state", partial(raw_readout, scale=1e4), (32,)),
    control("tiny state, softcapped", partial(softcapped_logits, scale=1e-3), (32,)),
    control("large vocabulary", partial(raw_readout, vocab_size=32_768), (32,)),
    control("head with an outlier", partial(head_with_an_outlier, size=1e4), (32,)),
    control("norm with a large epsilon", norm_with_a_large_epsilon, (32,)),
    control("parcae-like", diagonal_injection, (32,), scale="damped"),
)
