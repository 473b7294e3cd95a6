"""What other people's code does besides: number types, tables of exactly K entries, many loops, fitted text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import loopscope as ls
from cases.nets import Kind, Net, Planted, Readout, control, plant, regular_text, rms

Norm = Callable[[Tensor], Tensor]


def raw(x: Tensor) -> Tensor:
    """No norm."""
    return x


# --- number types ----------------------------------------------------------------------------------------------------


def in_dtype(width: int, dtype: torch.dtype, norm: Norm, module: bool) -> Planted:
    """Weights and arithmetic in another type. It changes W's values, not what the readout hides: RMSNorm 1, raw 0.

    Evaluated in bfloat16 the zero drowns in rounding errors of 4e-3 of the logits. That is far below the 0.1 of an exit
    that notices, and ten lengths along a shown direction are 10: the verdict is the same where the audit is not shown
    the module and cannot widen it.
    """
    net = Net(width).to(dtype)
    readout: Readout = lambda h, k: net.logits(norm(h))  # noqa: E731
    model = ls.adapt(embed=net.embed, loop=net.loop, readout=readout, num_loops=3, module=net if module else None)
    return Planted(model, net.head.float())


def head_in(width: int, dtype: torch.dtype, norm: Norm) -> Planted:
    """The features are cast to a coarse type before the head, and the head with them: RMSNorm 1, raw 0."""
    net = Net(width)
    return plant(net, lambda h, k: F.linear(norm(h).to(dtype), net.head.to(dtype)).float())


def detached_statistic(width: int, undone: bool) -> Planted:
    """h · rsqrt(mean h²), the statistic detached: an RMSNorm whose derivative is that of a raw readout.

    What counts is the function: R(αh) = R(h), blind 1. Multiplied by √(mean h²) again it is h itself, with a derivative
    along h that is twice too large: raw, blind 0.
    """
    net = Net(width)

    def readout(h: Tensor, k: int) -> Tensor:
        square = h.square().mean(-1, keepdim=True)
        return net.logits(h * square.rsqrt().detach() * (square.sqrt() if undone else 1))

    return plant(net, readout)


# --- tables of exactly K entries, contexts ---------------------------------------------------------------------------


def with_loop_embeddings(width: int, norm: Norm, supervised: str = "every-loop") -> Planted:
    """h ← core(h + E[k]) with E of exactly K rows: no loop K + 1. A shift changes no derivative: RMSNorm 1, raw 0."""
    net = Net(width)
    net.gains = net.normal(3, width, std=0.1)
    planted = plant(
        net,
        lambda h, k: net.logits(norm(h)),
        loop=lambda h, k: net.loop(h + net.gains[k - 1], k),
        supervised=supervised,
    )
    return Planted(planted.model, planted.head_VD, supervised, most_loops=3)


def with_readout_gains(width: int, norm: Norm) -> Planted:
    """Logits W·(g_k ⊙ norm(h)), exactly K rows of gains between e^−½ and e^½: invertible. RMSNorm 1, raw 0."""
    net = Net(width)
    net.gains = nn.Parameter(torch.exp(torch.rand(3, width, generator=net.random) - 0.5))
    return plant(net, lambda h, k: net.logits(net.gains[k - 1] * norm(h)))


def context_without_batch(width: int, norm: Norm) -> Planted:
    """h ← core(h + 0.1·p), the positions p of shape (T, d) in the context, shared by all rows. RMSNorm 1, raw 0."""
    net = Net(width)

    def embed(ids_BT: Tensor) -> ls.LoopState:
        return ls.LoopState(net.embed(ids_BT), context=net.positions[: ids_BT.shape[1]])

    model = ls.adapt(
        embed=embed,
        loop=lambda state, k: state.with_h(net.loop(state.h_BTD + 0.1 * state.context, k)),
        readout=lambda state, k: net.logits(norm(state.h_BTD)),
        num_loops=3,
        module=net,
    )
    return Planted(model, net.head)


# --- depth, fitted text ----------------------------------------------------------------------------------------------


def of_depth(width: int, num_loops: int, norm: Norm) -> Planted:
    """K loops, K exits: RMSNorm 1, raw 0, whatever K is.

    One of K exits has the weight 1/K: ten lengths along a direction of a raw readout cost 54/K nats or more, 0.8 at
    K = 64; a direction that only one exit shows would stay hidden from K = 5400 on.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(norm(h)), num_loops=num_loops)


def fitted(width: int, norm: Norm, steps: int = 150) -> Planted:
    """Embeddings and head trained on a text in which every token fixes the next, until CE < 0.01; the loop is plain.

    Cross-entropy is at its floor there, and does not change when the scale of a raw readout doubles; its logits do.
    Raw 0, RMSNorm 1.
    """
    planted = of_depth(width, 3, norm)
    net = planted.model.module
    ids_BT = regular_text(len(net.head))
    optimizer = torch.optim.Adam([net.table, net.head], lr=0.03)
    for _ in range(steps):
        logits = planted.model.readout(ls.run_loops(planted.model, ids_BT).states[-1], 3)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.01, f"the text is not fitted: {loss.item():.3f}"
    return Planted(planted.model, planted.head_VD, text_BT=ids_BT)


BF16, FP16 = torch.bfloat16, torch.float16


def started_from_noise(width: int, norm: Norm) -> Planted:
    """h₀ = e + ½·noise, drawn anew in every pass, of a text of any length. What an exit hides: RMSNorm 1, raw 0."""
    net = Net(width)
    return plant(
        net,
        lambda h, k: net.logits(norm(h)),
        embed=lambda ids_BT: net.embed(ids_BT) + 0.5 * torch.randn(*ids_BT.shape, width).to(net.head),
    )


KINDS = (
    Kind("started from noise", partial(started_from_noise, norm=rms), (32,), 1),
    control("started from noise, raw", partial(started_from_noise, norm=raw), (32,)),
    Kind("float32, no module", partial(in_dtype, dtype=torch.float32, norm=rms, module=False), (32,), 1),
    control("float32, no module, raw", partial(in_dtype, dtype=torch.float32, norm=raw, module=False), (32,)),
    Kind("bf16", partial(in_dtype, dtype=BF16, norm=rms, module=True), (32, 128), 1),
    control("bf16, raw", partial(in_dtype, dtype=BF16, norm=raw, module=True), (32,)),
    Kind("bf16, no module", partial(in_dtype, dtype=BF16, norm=rms, module=False), (32,), 1),
    control("bf16, no module, raw", partial(in_dtype, dtype=BF16, norm=raw, module=False), (32,)),
    Kind("bf16 head", partial(head_in, dtype=BF16, norm=rms), (32,), 1),
    control("bf16 head, raw", partial(head_in, dtype=BF16, norm=raw), (32,)),
    Kind("float16 head", partial(head_in, dtype=FP16, norm=rms), (32,), 1),
    control("float16 head, raw", partial(head_in, dtype=FP16, norm=raw), (32,)),
    Kind("detached statistic", partial(detached_statistic, undone=False), (32, 128), 1),
    control("detached statistic, undone", partial(detached_statistic, undone=True), (32,)),
    Kind("exactly K loop embeddings", partial(with_loop_embeddings, norm=rms), (32, 128), 1),
    control("exactly K loop embeddings, raw", partial(with_loop_embeddings, norm=raw), (32,)),
    Kind("exactly K, terminal", partial(with_loop_embeddings, norm=rms, supervised="terminal"), (32,), 1),
    control("exactly K, terminal, raw", partial(with_loop_embeddings, norm=raw, supervised="terminal"), (32,)),
    Kind("exactly K readout gains", partial(with_readout_gains, norm=rms), (32,), 1),
    control("exactly K readout gains, raw", partial(with_readout_gains, norm=raw), (32,)),
    Kind("context without batch", partial(context_without_batch, norm=rms), (32,), 1),
    control("context without batch, raw", partial(context_without_batch, norm=raw), (32,)),
    *(Kind(f"K = {num}", partial(of_depth, num_loops=num, norm=rms), (16,), 1) for num in (1, 2, 5, 8, 16, 64)),
    *(control(f"K = {num}, raw", partial(of_depth, num_loops=num, norm=raw), (16,)) for num in (1, 2, 8, 64)),
    Kind("fitted text", partial(fitted, norm=rms), (32,), 1),
    control("fitted text, raw", partial(fitted, norm=raw), (32, 128)),
)
