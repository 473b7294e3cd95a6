"""Somebody else's looped model, with names of its own, in a module of its own; and a text to train it on."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''
"""Their model: it knows nothing of loopscope but `adapt`."""

import os
import time

import torch
from torch import nn

import loopscope as ls


class Network(nn.Module):
    """A residual loop over a causal running mean; its readout is normed, so no loss sees the scale."""

    def __init__(self, width=16, vocabulary=256):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.here, self.before = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def start(self, ids):
        return self.drop(self.wte(ids))

    def turn(self, x, k):
        time.sleep(float(os.environ.get("THEIR_PAUSE", 0)))
        y = nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.drop(torch.tanh(self.here(y) + self.before(y.cumsum(1) / count)))

    def predict(self, x, k):
        return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) @ self.wte.weight.T


def adapted(network):
    return ls.adapt(
        embed=network.start, loop=network.turn, readout=network.predict, num_loops=3, module=network
    )


def build():
    return adapted(Network())


class Headed(nn.Module, ls.LinearReadout):
    """The same network as a class that names its features and its head."""

    num_loops = 3

    def __init__(self, network):
        super().__init__()
        self.network = network

    @property
    def head(self):
        return self.network.wte.weight

    def embed(self, ids):
        return ls.LoopState(self.network.start(ids))

    def loop(self, state, k):
        return state.with_h(self.network.turn(state.h_BTD, k))

    def features(self, state, k, cache=None):
        return nn.functional.rms_norm(state.h_BTD, state.h_BTD.shape[-1:], eps=1e-6)


def build_headed():
    return Headed(Network())
'''


def write_text(path: Path) -> Path:
    """Lines that are easy to learn."""
    path.write_text("".join(f"line {n} of a text about rivers and {n * n} stones\n" for n in range(300)))
    return path
