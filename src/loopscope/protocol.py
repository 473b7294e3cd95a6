"""The one protocol between a looped model and everything else: training, audit, inference, reports.

A model embeds tokens into a state, runs one loop at a time, and reads a state out. That is all the rest of loopscope
knows of it, so the audit of our own model and of somebody else's is the same code. What only some models have besides
(a head, a cache, an exit gate) are capabilities, each with a name and one way to ask for it.

Canonical cut: the state h_k is what loop k leaves *before* any inter-loop norm; that norm opens loop k + 1. Reported
norms then mean the same in every design. Loops are counted from 1: `loop(state, k)` turns h_{k-1} into h_k.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops, H heads, C head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from loopscope.errors import ConfigError, ProtocolError, UnsupportedError
from loopscope.machine import check_bf16_products


@dataclass
class LoopState:
    """Everything one loop hands to the next. A pytree; tensors lead with the batch, or are shared by all its rows."""

    h_BTD: Tensor
    """The carried state that is read out."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """Further carried tensors by name; some designs have two."""
    context: Any = None
    """What every loop may read and none may change: injected input, positions."""

    def take(self, rows: Tensor | slice) -> LoopState:
        """The state of some batch rows only (an index, a mask or a slice), carried tensors and context included.

        A tensor that does not lead with the batch size (rotary angles of shape (T, C), a scalar) is shared by all rows
        and stays as it is. Where there are as many rows as tokens the two look alike, and the tensor is taken for one
        with rows; a leading dimension of 1 makes a shared one certain.
        """
        batch = len(self.h_BTD)
        return pytree.tree_map_only(
            Tensor, lambda tensor: tensor[rows] if tensor.dim() and len(tensor) == batch else tensor, self
        )

    @staticmethod
    def joined(states: Sequence[LoopState], dim: int) -> LoopState:
        """States of different rows (dim 0) or of successive tokens (dim 1) as one, carried and context included.

        A tensor that is shared by all rows, or by all tokens, is taken from the first.
        """
        lead = states[0].h_BTD.shape[: dim + 1]

        def join(tensors: Sequence[Any]) -> Any:
            first = tensors[0]
            is_shared = not isinstance(first, Tensor) or first.shape[: dim + 1] != lead
            return first if is_shared else torch.cat(list(tensors), dim)

        leaves, spec = zip(*(pytree.tree_flatten(state) for state in states), strict=True)
        return pytree.tree_unflatten([join(each) for each in zip(*leaves, strict=True)], spec[0])

    def with_h(self, h_BTD: Tensor) -> LoopState:
        """The same state around another h."""
        return replace(self, h_BTD=h_BTD)


pytree.register_dataclass(LoopState)

Loop = int | tuple[int, ...]
"""The loop that all rows of a call are at, or one for each row (see `MixedDepths`)."""
Slot = tuple[str, Loop, int]
"""Part of the model ("prelude", "core", "coda"), loop, layer: the address of one key/value entry."""


class Cache(Protocol):
    """Keys and values of earlier tokens as one call of the model sees them; see `inference.cache`.

    A model asks for the positions of the new tokens when it embeds them, and in every attention for `extend`'s keys and
    values and for the mask.
    """

    def positions(self, tokens: int) -> Tensor:
        """Position_BT of each of so many new tokens, or position_1T where all rows have the same; on the CPU."""
        ...

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values of a slot and return all of them (B, H, S, C)."""
        ...

    def mask(self, tokens: int) -> Tensor | None:
        """Which keys each new token may see (B, 1, T, S), or None: the last one sees all S, the others are causal."""
        ...


class LoopedModel(Protocol):
    """What every looped model has. What only some have besides is a `Capability`."""

    num_loops: int
    """The depth it was trained at."""

    def embed(self, ids_BT: Tensor) -> LoopState:
        """State before the first loop, prelude included."""
        ...

    def loop(self, state: LoopState, k: int) -> LoopState:
        """Run loop k: h_{k-1} → h_k."""
        ...

    def readout(self, state: LoopState, k: int) -> Tensor:
        """Logits_BTV at loop k."""
        ...


def missing_methods(model: object) -> list[str]:
    """What an object lacks to be a LoopedModel; nothing if it is one."""
    found = {name for name in ("embed", "loop", "readout") if callable(getattr(model, name, None))}
    found |= {"num_loops"} if isinstance(getattr(model, "num_loops", None), int) else set()
    return [name for name in ("num_loops", "embed", "loop", "readout") if name not in found]


# --- capabilities ----------------------------------------------------------------------------------------------------


class Capability(ABC):
    """Something that only some looped models have. A model has it by inheriting from it, and never by accident.

    There is one way to ask: `LinearReadout.of(model)` gives the model, typed as one that has it, or None;
    `LinearReadout.needed(model, "the exact Gram matrix")` gives it or raises a sentence that names what is missing.
    """

    what: ClassVar[str]
    """The capability in a few words, as the object of "needs"."""

    @classmethod
    def of(cls, model: object) -> Self | None:
        """The model, if it has this capability."""
        return model if isinstance(model, cls) else None

    @classmethod
    def needed(cls, model: object, why: str) -> Self:
        """The model, or the sentence that says what cannot be done with it and why."""
        found = cls.of(model)
        if found is None:
            raise UnsupportedError(f"{why} needs {cls.what} (loopscope.{cls.__name__}), which {_named(model)} lacks")
        return found


class LinearReadout(Capability):
    """logits = features @ head.T: lets the loss be fused and what an exit shows be measured without V logits.

    A subclass that overrides `readout` is taken at its word: it no longer has this capability.
    """

    what = "a readout that is features times a head"

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """W_VD."""

    @abstractmethod
    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """What the head multiplies at loop k: coda and readout norm applied, or h itself."""

    def readout(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """Logits_BTV at loop k."""
        return nn.functional.linear(self.features(state, k, cache), self.head)

    @classmethod
    def of(cls, model: object) -> Self | None:
        """The model, if its readout is the one of this class."""
        found = super().of(model)
        return found if found is not None and type(found).readout is LinearReadout.readout else None


class Cached(Capability):
    """Takes a cache: new tokens run against the keys and values of earlier ones, one slot per part, loop and layer."""

    what = "a key-value cache"

    @abstractmethod
    def embed(self, ids_BT: Tensor, cache: Cache | None = None) -> LoopState:
        """As in `LoopedModel`; the cache says at which positions the new tokens stand."""

    @abstractmethod
    def loop(self, state: LoopState, k: int, cache: Cache | None = None) -> LoopState:
        """As in `LoopedModel`."""

    @abstractmethod
    def readout(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """As in `LoopedModel`."""


class MixedDepths(Cached):
    """Runs rows at different loops in one call: `loop(state, (3, 2, 1), cache)`. The weights are the same."""

    what = "loops that take rows at different depths"

    @abstractmethod
    def loop(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        """As in `LoopedModel`, with one loop for all rows or one for each."""


class ProjectedKeys(Cached):
    """Makes keys and values of a state without running a loop on it: what a token that has left may go on showing."""

    what = "key and value maps that a state can be put through alone"

    @property
    def can_project(self) -> bool:
        """Whether this model really can; of one class some may, by their configuration, and some may not."""
        return True

    @classmethod
    def of(cls, model: object) -> Self | None:
        """The model, if it can."""
        found = super().of(model)
        return found if found is not None and found.can_project else None

    @abstractmethod
    def project(self, state: LoopState, loops: Sequence[int], cache: Cache) -> None:
        """Give `cache.extend` what the maps of every core layer make of this state as it enters each of these loops.

        Nothing is attended to and the state does not advance: layers see the state itself, not one another's output.
        """


class ExitGate(Capability):
    """A learned probability of leaving at each loop."""

    what = "an exit gate"

    @abstractmethod
    def exit_logits(self, features_BTD: Tensor) -> Tensor:
        """Logit_BT of leaving at this loop, given that no earlier loop was left at."""


class DeclaredVisibility(Capability):
    """Says itself what its readouts hide."""

    what = "a declaration of what its readouts hide"

    @abstractmethod
    def hides(self, k: int) -> frozenset[str] | None:
        """Subset of {"scale", "mean"} that the readout at loop k hides; None where nothing is declared."""


class OwnLosses(Capability):
    """Loss terms of the model itself: load balance, ponder cost."""

    what = "loss terms of its own"

    @abstractmethod
    def losses(self) -> Sequence[Any]:
        """The terms (`objectives.terms.Term`), for the objective to sum and for the audit to ask."""


class SharedCore(Capability):
    """Names the layers that all loops share: what is compiled, and what is sharded as one unit."""

    what = "a named shared core"

    @property
    @abstractmethod
    def core(self) -> nn.Module:
        """The shared layers."""


class Scheduled(Capability):
    """Changes with the progress of its training."""

    what = "a training schedule of its own"

    @abstractmethod
    def at_progress(self, share: float) -> None:
        """Set whatever is scheduled, for a share of the training steps between 0 and 1."""


def _named(model: object) -> str:
    return f"this model ({type(model).__name__})"


# --- running loops ---------------------------------------------------------------------------------------------------


@dataclass
class LoopTrace:
    """The states of all loops of one forward pass."""

    states: list[LoopState]
    """states[0] is before the first loop, states[k] is after loop k."""

    @property
    def num_loops(self) -> int:
        """Loops that were run."""
        return len(self.states) - 1

    @property
    def h_KBTD(self) -> Tensor:
        """h_1 … h_K stacked (a copy)."""
        return torch.stack([state.h_BTD for state in self.states[1:]])

    def norms_K(self) -> Tensor:
        """Mean over tokens of ‖h_k‖₂ for k = 1..K, without gradient: the norm every report shows."""
        states = [state.h_BTD.detach() for state in self.states[1:]]
        return torch.stack([h.to(torch.promote_types(h.dtype, torch.float32)).norm(dim=-1).mean() for h in states])


def run_loops(
    model: LoopedModel,
    ids_BT: Tensor,
    *,
    num_loops: int | None = None,
    backprop_loops: int | None = None,
    recompute: bool = False,
    cache: Cache | None = None,
) -> LoopTrace:
    """Embed and run `num_loops` loops (any number ≥ 1; the trained depth by default), keeping every state.

    With `backprop_loops = B` all but the last B loops run without gradient: truncated back-propagation through depth.
    With `recompute` each loop is run again in the backward pass (activation checkpointing), so that only the states
    between loops are kept.
    """
    num_loops = model.num_loops if num_loops is None else num_loops
    if num_loops < 1:
        raise ConfigError.of("num_loops", num_loops, "a looped model runs at least one loop")
    first_with_grad = 1 if backprop_loops is None else num_loops - backprop_loops + 1
    check_products(model, ids_BT.device)
    embed, loop = model.embed, model.loop
    if cache is not None:
        cached = Cached.needed(model, "running tokens against earlier ones")
        embed, loop = partial(cached.embed, cache=cache), partial(cached.loop, cache=cache)
    states = [_checked(embed(ids_BT), "embed(ids)", None)]
    for k in range(1, num_loops + 1):
        with nullcontext() if k >= first_with_grad else torch.no_grad():
            if recompute and torch.is_grad_enabled():
                state = checkpoint(loop, states[-1], k, use_reentrant=False)
            else:
                state = loop(states[-1], k)
        states.append(_checked(state, f"loop {k}", states[-1]))
    return LoopTrace(states)


def _checked(state: object, what: str, before: LoopState | None) -> LoopState:
    """The state that somebody's `embed` or `loop` returned; what is none, or has changed its shape, is refused."""
    if not isinstance(state, LoopState):
        raise ProtocolError(f"{what} must return a LoopState, got {type(state).__name__}")
    if before is not None and state.h_BTD.shape != before.h_BTD.shape:
        was, became = tuple(before.h_BTD.shape), tuple(state.h_BTD.shape)
        raise ProtocolError(f"{what} changed the shape of the state from {was} to {became}")
    return state


def check_products(model: LoopedModel, device: torch.device) -> None:
    """Refuse bf16 products on a CPU where they would end the process (see `machine`)."""
    if device.type != "cpu":
        return
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    if torch.bfloat16 in (autocast, None if weight is None else weight.dtype):
        check_bf16_products()


class _Plain:
    """Context of an adapted state whose functions know only a tensor."""


_PLAIN = _Plain()


class AdaptedModel(nn.Module):
    """Somebody else's looped model, as three plain functions; made by `adapt`."""

    def __init__(
        self,
        embed: Callable[[Tensor], Any],
        loop: Callable[[Any, int], Any],
        readout: Callable[[Any, int], Tensor],
        num_loops: int,
        module: nn.Module | None,
    ) -> None:
        super().__init__()
        if num_loops < 1:
            raise ConfigError.of("num_loops", num_loops, "a looped model runs at least one loop")
        self.num_loops = num_loops
        self.module = module
        self._embed, self._loop, self._readout = embed, loop, readout

    def embed(self, ids_BT: Tensor) -> LoopState:
        """`embed(ids)` → h_BTD, or a whole LoopState for designs that carry more than h."""
        state = self._as_state(self._embed(ids_BT), LoopState(torch.empty(0), context=_PLAIN), "embed(ids)")
        if state.h_BTD.dim() != 3 or state.h_BTD.shape[:2] != ids_BT.shape:
            raise ProtocolError(
                f"embed(ids) must return a state of shape (batch, tokens, width) for ids of shape "
                f"{tuple(ids_BT.shape)}, got {tuple(state.h_BTD.shape)}"
            )
        return state

    def loop(self, state: LoopState, k: int) -> LoopState:
        """`loop(h, k)` → h of the same shape."""
        new = self._as_state(self._loop(self._unwrap(state), k), state, f"loop(h, {k})")
        if new.h_BTD.shape != state.h_BTD.shape:
            before, after = tuple(state.h_BTD.shape), tuple(new.h_BTD.shape)
            raise ProtocolError(f"loop(h, {k}) changed the shape of the state from {before} to {after}")
        return new

    def readout(self, state: LoopState, k: int) -> Tensor:
        """`readout(h, k)` → logits_BTV."""
        logits = self._readout(self._unwrap(state), k)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != state.h_BTD.shape[:-1]:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ProtocolError(f"readout(h, {k}) must return logits of shape (batch, tokens, vocabulary), got {shape}")
        return logits

    def _unwrap(self, state: LoopState) -> Any:
        """What the functions see: the tensor alone where they returned a tensor alone."""
        return state.h_BTD if isinstance(state.context, _Plain) else state

    def _as_state(self, result: object, before: LoopState, call: str) -> LoopState:
        if isinstance(result, LoopState):
            return result
        if not isinstance(result, Tensor):
            raise ProtocolError(f"{call} must return a tensor or a LoopState, got {type(result).__name__}")
        return before.with_h(result)


def adapt(
    *,
    embed: Callable[[Tensor], Any],
    loop: Callable[[Any, int], Any],
    readout: Callable[[Any, int], Tensor],
    num_loops: int,
    module: nn.Module | None = None,
) -> AdaptedModel:
    """A LoopedModel of three plain functions: embed(ids) → h, loop(h, k) → h, readout(h, k) → logits.

    Cut the loop where the state has not yet been through an inter-loop norm. `module` is the network the functions
    call: pass it so that its parameters and its train/eval mode are seen. A design that carries more than one tensor
    returns a `LoopState` from `embed` and gets one in `loop` and `readout`.
    """
    return AdaptedModel(embed, loop, readout, num_loops, module)
