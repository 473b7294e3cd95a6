"""The radial clamp as a model: every token keeps the norm it had after the first loop. No training needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from loopscope.protocol import Cache, Cached, LinearReadout, LoopedModel, LoopState, OwnLosses

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
