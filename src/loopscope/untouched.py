"""Borrow a model and give it back as it was: weights, buffers, gradients, modes, hooks and every random generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

AFFORDABLE_BYTES = 2 << 30
"""Weights that fit into this as float64 are audited in float64."""


def network_of(model: object) -> nn.Module | None:
    """The module whose parameters the model uses; None for functions that show none."""
    return model if isinstance(model, nn.Module) else None


@contextmanager
def borrowed(network: nn.Module | None) -> Iterator[list[Tensor]]:
    """Evaluation mode without dropout; afterwards the network and all random generators are as before.

    Buffers are copies meanwhile, so that one that a forward pass writes to is not even touched, and one that it assigns
    anew (whatever its dtype) is put back. The same holds for tensors that a module keeps as plain attributes: a table
    that is built lazily in the audit's dtype would break the next training step. Yields the buffers themselves, for
    those who reach them by another way than through the module.
    """
    modules = [] if network is None else list(network.modules())
    give_back = [_keep(module) for module in modules]
    parameters = [] if network is None else network.parameters()
    weights = [(weight, weight.requires_grad, weight.grad) for weight in parameters]
    originals = list({id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}.values())
    copies = {id(buffer): buffer.detach().clone() for buffer in originals}  # one of a buffer that two modules share
    restore_generators = _generators()
    try:
        for module in modules:
            module.training = False
            named = module._buffers.items()
            module._buffers.update({name: copies[id(one)] for name, one in named if one is not None})
        for weight, _, gradient in weights:
            if gradient is not None:
                weight.grad = None  # so that nothing can be added to it
        yield originals
    finally:
        for undo in give_back:
            undo()
        for weight, requires_grad, gradient in weights:
            if weight.requires_grad != requires_grad:
                weight.requires_grad_(requires_grad)
            if weight.grad is not gradient:
                weight.grad = gradient
        restore_generators()


def _keep(module: nn.Module) -> Callable[[], None]:
    """What puts a module back: its mode, its tables (parameters, buffers, submodules, hooks) and its own tensors."""
    training, own = module.training, dict(module.__dict__)
    tables = {name: (table, dict(table)) for name, table in own.items() if isinstance(table, dict) and name[0] == "_"}

    def give_back() -> None:
        for name, value in list(module.__dict__.items()):
            if name not in own and isinstance(value, Tensor):
                del module.__dict__[name]
        for name, value in own.items():
            now = module.__dict__.get(name)
            if now is not value and (isinstance(value, Tensor) or isinstance(now, Tensor)):
                module.__dict__[name] = value
        for table, content in tables.values():
            if table.keys() != content.keys() or any(table[name] is not one for name, one in content.items()):
                table.clear()
                table.update(content)
        module.training = training

    return give_back


def _generators() -> Callable[[], None]:
    """What puts torch's generators (CUDA's where it is in use), numpy's and Python's back to where they are now."""
    python, numpy_, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy_)
        torch.random.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    return restore


@contextmanager
def widened(network: nn.Module | None, dtype: torch.dtype | None, held: Iterable[Tensor] = ()) -> Iterator[None]:
    """Run a module's floating weights in another dtype; its own storage comes back untouched, bit for bit.

    `held` are tensors that belong to it and are reached by another way.
    """
    tensors = [] if network is None or dtype is None else [*network.parameters(), *network.buffers(), *held]
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
