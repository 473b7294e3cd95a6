"""Faults that an audit had once, each as the few lines that showed it.

What other people's models do: leave a table behind, keep exactly K of something, draw noise, compute in coarse
arithmetic, detach a statistic. The audit answers with a finding or with the true cause, and leaves them as they were.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import loopscope as ls
import planted

WIDTH, VOCAB, LOOPS = 16, 64, 3
OPTIONS = ls.AuditOptions(states=3, prefix=8, rollout=6)


@pytest.fixture
def net():
    return planted.Net(WIDTH)


def looped(net, *, embed=None, loop=None, readout=None, num_loops=LOOPS, module="net"):
    return ls.adapt(
        embed=embed or net.embed,
        loop=loop or net.loop,
        readout=readout or (lambda h, k: net.logits(planted.rms(h))),
        num_loops=num_loops,
        module=net if module == "net" else module,
    )


def ids(rows=4, length=20, vocab=VOCAB):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(3))


def audit(model, *, options=OPTIONS, **arguments):
    return ls.audit(model, [ids()], options=options, **arguments)


def notes(result):
    return " ".join(result.checks["notes"])


# --- the model comes back as it was ----------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Everything that a forward pass can leave behind."""

    def __init__(self):
        super().__init__()
        self.net = planted.Net(WIDTH)
        self.register_buffer("assigned", torch.ones(WIDTH))
        self.register_buffer("written", torch.ones(WIDTH))
        self.register_buffer("lazy", None)
        self.plain = torch.ones(WIDTH)
        self.table = None

    def loop(self, h, k):
        self.assigned = (self.assigned * 2).to(torch.float16)
        self.written.mul_(0.5)
        self.lazy = h.detach().mean((0, 1))
        self.plain = h.detach().mean((0, 1))
        self.table = self.lazy_table = torch.ones_like(h)
        self.net.table.requires_grad_(False)
        if not self._forward_hooks:
            self.register_forward_hook(lambda *_: None)
        random.random(), np.random.rand(), torch.rand(1)
        return self.net.loop(h, k)


def test_whatever_a_forward_pass_leaves_behind_is_put_back():
    net = Stateful().train()
    kept = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}
    plain, gradient = net.plain, torch.ones_like(net.net.head)
    net.net.head.grad = gradient
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    audit(
        ls.adapt(
            embed=net.net.embed,
            loop=net.loop,
            readout=lambda h, k: net.net.logits(planted.rms(h)),
            num_loops=LOOPS,
            module=net,
        )
    )
    for name, (buffer, value) in kept.items():
        assert getattr(net, name) is buffer and buffer.dtype == value.dtype and torch.equal(buffer, value), name
    assert net.lazy is None and net.table is None and net.plain is plain and not hasattr(net, "lazy_table")
    assert net.net.table.requires_grad and not net._forward_hooks and net.training
    assert net.net.head.grad is gradient and torch.equal(gradient, torch.ones_like(gradient))
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert torch.equal(torch.get_rng_state(), generators[2])


def test_a_buffer_that_two_modules_share_is_one_buffer_in_the_audit_too():
    net = planted.Net(WIDTH)
    net.register_buffer("gain", torch.ones(WIDTH))
    other = nn.Module()
    other.register_buffer("gain", net.gain)
    net.other = other
    differences = []

    def loop(h, k):
        net.gain.add_(0.01)
        differences.append(float((net.gain - net.other.gain).abs().max()))
        return net.loop(h, k)

    audit(looped(net, loop=loop))
    assert max(differences) == 0 and net.gain is net.other.gain and float(net.gain.max()) == 1.0


def test_a_buffer_that_functions_hold_by_themselves_is_audited_in_the_same_dtype():
    net = planted.Net(WIDTH)
    net.register_buffer("gain", torch.rand(WIDTH) + 0.5)
    gain = net.gain
    result = audit(looped(net, readout=lambda h, k: net.logits(planted.rms(h) * gain)))
    assert result.model.audited_in == "float64" and result.verdict == "blind-spot"
    assert gain.dtype == torch.float32
