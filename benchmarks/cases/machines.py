"""What other people's code does besides: number types, tables of exactly K entries, many loops, fitted text."""

from __future__ import annotations

import torch

import loopscope as ls
from cases.nets import Kind, Net, Planted, Readout, control, rms
from cases.plain import raw_readout, rmsnorm_readout


def rmsnorm_readout_in_float32(width: int) -> Planted:
    """Blind 1, also where the audit is not shown the module and has to work in the functions' own precision."""
    net = Net(width)
    readout: Readout = lambda h, k: net.logits(rms(h))  # noqa: E731
    return Planted(ls.adapt(embed=net.embed, loop=net.loop, readout=readout, num_loops=3), net.head)


def rmsnorm_readout_in_bf16(width: int) -> Planted:
    """The weights' precision changes their values, not the function's null space. Blind 1.

    Evaluated in bfloat16 the zero would drown in rounding errors of 4e-3: the audit has to compute more exactly.
    """
    planted = rmsnorm_readout(width)
    planted.model.to(torch.bfloat16)
    return planted


def raw_readout_in_bf16(width: int) -> Planted:
    """N = 0: rounding W to bfloat16 does not make it singular."""
    planted = raw_readout(width)
    planted.model.to(torch.bfloat16)
    return planted


KINDS = (
    Kind("rmsnorm float32", rmsnorm_readout_in_float32, (32,), 1),
    Kind("rmsnorm bf16", rmsnorm_readout_in_bf16, (32,), 1),
    control("raw bf16", raw_readout_in_bf16, (32,)),
)
