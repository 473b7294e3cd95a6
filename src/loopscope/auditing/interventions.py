"""What a variable is good for: change it between loops at inference, and see what the last exit loses.

Each intervention rewrites h_k after every loop below the last; ΔCE is against the untouched run. A blind scale can be
clamped at next to no cost (arXiv 2606.24898): the model never learned to use it.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.auditing.visibility import mean_cross_entropy
from loopscope.protocol import Cache, Cached, LinearReadout, LoopedModel, LoopState, OwnLosses
from loopscope.results.record import measured

Rewrite = Callable[[list[Tensor], Tensor], Tensor]
"""(earlier states h_0 … h_{k-1} as rewritten, h_k) → the h_k that goes on."""


def growth_removed(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Take the radial part out of the loop's update, from the second loop on."""
    if len(earlier) < 2:
        return h_BTD
    unit_BTD = earlier[-1] / earlier[-1].norm(dim=-1, keepdim=True).clamp(min=1e-30)
    update_BTD = h_BTD - earlier[-1]
    return h_BTD - (update_BTD * unit_BTD).sum(-1, keepdim=True) * unit_BTD


def frozen_at_loop_1(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Rescale every token to the norm it had after the first loop."""
    return h_BTD if len(earlier) < 2 else _rescaled(h_BTD, earlier[1].norm(dim=-1, keepdim=True))


def mean_clamped(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Give every token the mean over width that it had after the first loop."""
    return h_BTD if len(earlier) < 2 else h_BTD - h_BTD.mean(-1, keepdim=True) + earlier[1].mean(-1, keepdim=True)


def scale_swapped(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Give every token the norm of its left neighbour; the first keeps its own, since nothing may come from later."""
    norm_BT1 = h_BTD.norm(dim=-1, keepdim=True)
    return _rescaled(h_BTD, torch.cat([norm_BT1[:, :1], norm_BT1[:, :-1]], dim=1))


@dataclass(frozen=True)
class Change:
    """A rewrite, and the variable that it holds still; None where it does something else to one."""

    rewrite: Rewrite
    clamps: str | None


INTERVENTIONS = {
    "radial clamp: growth removed": Change(growth_removed, "scale"),
    "radial clamp: frozen at loop 1": Change(frozen_at_loop_1, "scale"),
    "mean clamp": Change(mean_clamped, "mean"),
    "scale swap between tokens": Change(scale_swapped, None),
}


@torch.no_grad()
def intervened_cross_entropy(
    model: LoopedModel, ids_BT: Tensor, targets_BT: Tensor, num_loops: int, rewrite: Rewrite | None = None
) -> float | None:
    """CE at loop `num_loops` when every state below it is rewritten; None where it is not finite."""
    last = rewritten_states(model, ids_BT, num_loops, rewrite)[-1]
    return measured(mean_cross_entropy(model.readout(last, num_loops), targets_BT))


@torch.no_grad()
def rewritten_states(
    model: LoopedModel, ids_BT: Tensor, num_loops: int, rewrite: Rewrite | None = None
) -> list[LoopState]:
    """The states of a run whose carried state is rewritten after every loop; what is read out at K is so too."""
    states = [model.embed(ids_BT)]
    for k in range(1, num_loops + 1):
        state = model.loop(states[-1], k)
        if rewrite is not None:
            state = state.with_h(rewrite([earlier.h_BTD for earlier in states], state.h_BTD))
        states.append(state)
    return states


def _rescaled(h_BTD: Tensor, norm_BT1: Tensor) -> Tensor:
    return h_BTD * (norm_BT1 / h_BTD.norm(dim=-1, keepdim=True).clamp(min=1e-30))


# --- the clamp as a model ---------------------------------------------------------------------------------------------

NORM = "clamped_norm"
"""Name of the carried norm."""


def clamped(model: LoopedModel) -> ClampedModel:
    """The model with its norm frozen at loop 1; head and cache go through where the model has both."""
    has_both = LinearReadout.of(model) is not None and Cached.of(model) is not None
    return ClampedLinearModel(model) if has_both else ClampedModel(model)


class ClampedModel(nn.Module, OwnLosses):
    """A LoopedModel around another: from loop 2 on, h_k is rescaled to ‖h_1‖ of its token."""

    def __init__(self, model: LoopedModel) -> None:
        super().__init__()
        self.model: Any = model
        self.num_loops = model.num_loops

    def embed(self, ids_BT: Tensor, cache: Cache | None = None) -> LoopState:
        """The wrapped model's."""
        return self.model.embed(ids_BT, *_given(cache))

    def loop(self, state: LoopState, k: int, cache: Cache | None = None) -> LoopState:
        """The wrapped model's loop, then the clamp."""
        new: LoopState = self.model.loop(state, k, *_given(cache))
        norm_BT1 = new.h_BTD.norm(dim=-1, keepdim=True)
        kept_BT1 = state.carried.get(NORM, norm_BT1)
        clamped_BTD = new.h_BTD * (kept_BT1 / norm_BT1.clamp(min=1e-30)) if NORM in state.carried else new.h_BTD
        return replace(new, h_BTD=clamped_BTD, carried={**new.carried, NORM: kept_BT1})

    def readout(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """The wrapped model's."""
        return self.model.readout(state, k, *_given(cache))

    def losses(self) -> Sequence[Any]:
        """The wrapped model's, if it has any."""
        own = OwnLosses.of(self.model)
        return () if own is None else own.losses()


class ClampedLinearModel(ClampedModel, LinearReadout, Cached):
    """The same around a model with a head and a cache."""

    readout = LinearReadout.readout

    @property
    def head(self) -> Tensor:
        """The wrapped model's."""
        return self.model.head

    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """The wrapped model's."""
        return self.model.features(state, k, cache)


def _given(cache: Cache | None) -> tuple[Cache, ...]:
    """A cache as arguments: none at all for models that take none."""
    return () if cache is None else (cache,)
