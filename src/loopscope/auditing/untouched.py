"""Borrow a model for an audit and give it back as it was: weights, buffers, gradients, mode and random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

AFFORDABLE_BYTES = 2 << 30
"""Weights that fit into this as float64 are audited in float64."""


def network_of(model: object) -> nn.Module | None:
    """The module whose parameters the model uses; None for functions that show none."""
    return model if isinstance(model, nn.Module) else None


@contextmanager
def borrowed(network: nn.Module | None) -> Iterator[None]:
    """Evaluation mode without dropout; afterwards every submodule's mode, every buffer and the RNG are as before."""
    modes = {} if network is None else {module: module.training for module in network.modules()}
    buffers = {} if network is None else {buffer: buffer.clone() for buffer in network.buffers()}
    state = torch.random.get_rng_state()
    try:
        if network is not None:
            network.eval()
        yield
    finally:
        torch.random.set_rng_state(state)
        for module, training in modes.items():
            module.training = training
        for buffer, value in buffers.items():
            buffer.data.copy_(value)


@contextmanager
def widened(network: nn.Module | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Run a module's floating weights in another dtype; its own storage comes back untouched, bit for bit."""
    tensors = [] if network is None or dtype is None else [*network.parameters(), *network.buffers()]
    own: list[tuple[Tensor, Tensor]] = [(tensor, tensor.data) for tensor in tensors if tensor.is_floating_point()]
    try:
        for tensor, data in own:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in own:
            tensor.data = data


def widest_affordable(network: nn.Module | None) -> torch.dtype | None:
    """float64 where the weights are small enough on a device that has it, else float32; None without a module."""
    weights = [] if network is None else [weight for weight in network.parameters() if weight.is_floating_point()]
    if not weights:
        return None
    small = 8 * sum(weight.numel() for weight in weights) <= AFFORDABLE_BYTES
    return torch.float64 if small and weights[0].device.type != "mps" else torch.float32
