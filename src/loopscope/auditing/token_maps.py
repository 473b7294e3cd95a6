"""The loops and readouts of a model as maps of one token's state, and their derivatives.

The audit asks what happens to the state of one token, everything before it held fixed and nothing after it: the last
position of a prefix. A model that takes a cache runs that position alone against the keys and values of the others;
any other model runs the whole prefix again. Many perturbed copies of the state go through as rows of one batch.

Shape legend: R rows (copies of one state), T tokens of the prefix, D width, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from loopscope.errors import ProtocolError
from loopscope.objectives.terms import Term
from loopscope.protocol import Cached, LinearReadout, LoopedModel, LoopState, Slot

ROWS_AT_ONCE = 512
"""Copies of a state that go through a loop in one batch: enough for the matrix multiply, little memory."""
SAME_STATE = 1e-4
"""Relative difference up to which the cached and the whole run count as the same state."""

Map = Callable[[Tensor], Tensor]
"""h_RD → anything with R rows; each row depends on the same row only."""


class PrefixCache:
    """Keys and values of a prefix: written while `frozen` is false, afterwards only read, for any number of rows."""

    def __init__(self) -> None:
        self.length = 0
        self.frozen = False
        self.slots: dict[Slot, tuple[Tensor, Tensor]] = {}

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix's keys and values followed by the new ones."""
        if slot in self.slots:
            rows = len(k_BHTC)
            before = (tensor.expand(rows, *tensor.shape[1:]) for tensor in self.slots[slot])
            k_BHTC, v_BHTC = (torch.cat(pair, dim=2) for pair in zip(before, (k_BHTC, v_BHTC), strict=True))
        if not self.frozen:
            self.slots[slot] = (k_BHTC, v_BHTC)
        return k_BHTC, v_BHTC


@dataclass(frozen=True)
class TokenMaps:
    """The last token of one prefix: its states h_0 … h_M, and the maps between them."""

    model: LoopedModel
    states: list[LoopState]
    """After 0 … M loops; one row, and either the last token alone (with a cache) or the whole prefix."""
    cache: PrefixCache | None

    def h_D(self, k: int) -> Tensor:
        """The token's state after loop k."""
        return self.states[k].h_BTD[0, -1]

    def loops(self, h_RD: Tensor, k: int, count: int) -> list[Tensor]:
        """h_k → [h_{k+1}, …, h_{k+count}], each R×D."""
        state, passed = self._with(h_RD, k), []
        for number in range(k + 1, k + count + 1):
            state = _loop(self.model, state, number, self.cache)
            passed.append(state.h_BTD[:, -1])
        return passed

    def loop(self, h_RD: Tensor, k: int) -> Tensor:
        """Loop k: h_{k-1} → h_k."""
        return self.loops(h_RD, k - 1, 1)[0]

    def shown(self, h_RD: Tensor, k: int) -> Tensor:
        """What the readout at loop k makes of the state: features where the model has a head, else logits."""
        linear, state = LinearReadout.of(self.model), self._with(h_RD, k)
        if linear is not None:
            return linear.features(state, k, self.cache)[:, -1]
        return self._logits(state, k)[:, -1]

    def logits(self, h_RD: Tensor, k: int) -> Tensor:
        """The logits that the readout at loop k makes of the state."""
        return self._logits(self._with(h_RD, k), k)[:, -1]

    def shown_by(self, term: Term, k: int, h_RD: Tensor) -> Tensor:
        """What a term of the loss shows of the state after loop k, as R×F; F is 0 where it shows nothing."""
        state = self._with(h_RD, k)
        shown = term.shows(state.h_BTD, lambda: self._logits(state, k))
        return h_RD[:, :0] if shown is None else shown[:, -1].flatten(1)

    def _logits(self, state: LoopState, k: int) -> Tensor:
        if self.cache is None:
            return self.model.readout(state, k)
        return Cached.needed(self.model, "a cache").readout(state, k, self.cache)

    def _with(self, h_RD: Tensor, k: int) -> LoopState:
        """R copies of the state after loop k, the last token's h replaced."""
        state = self.states[k].take(torch.zeros(len(h_RD), dtype=torch.long, device=h_RD.device))
        return state.with_h(torch.cat([state.h_BTD[:, :-1], h_RD[:, None]], dim=1))


def token_maps(model: LoopedModel, ids_T: Tensor, num_loops: int) -> TokenMaps:
    """The maps of the last token of a prefix, through a cache where the model takes one and gets it right."""
    with torch.no_grad():
        whole = _run(model, model.embed(ids_T[None]), num_loops)
        taking = Cached.of(model)
        cached = None if taking is None or len(ids_T) < 2 else _with_cache(model, taking, ids_T, num_loops)
        if cached is None or not _same_last_states(cached.states, whole):
            return TokenMaps(model, whole, None)
    return cached


def _with_cache(model: LoopedModel, taking: Cached, ids_T: Tensor, num_loops: int) -> TokenMaps:
    cache = PrefixCache()
    before = _run(model, taking.embed(ids_T[None, :-1], cache), num_loops, cache)
    for k in range(1, num_loops + 1):
        taking.readout(before[k], k, cache)  # a coda keeps keys and values too
    cache.frozen = True
    states = _run(model, taking.embed(ids_T[None, -1:], cache), num_loops, cache)
    return TokenMaps(model, states, cache)


def _loop(model: LoopedModel, state: LoopState, k: int, cache: PrefixCache | None) -> LoopState:
    return model.loop(state, k) if cache is None else Cached.needed(model, "a cache").loop(state, k, cache)


def _run(model: LoopedModel, state: LoopState, num_loops: int, cache: PrefixCache | None = None) -> list[LoopState]:
    states = [state]
    for k in range(1, num_loops + 1):
        states.append(_loop(model, states[-1], k, cache))
        if not states[-1].h_BTD.isfinite().all():
            raise ProtocolError(f"loop {k} leaves NaN or infinity in the state h_{k}: nothing can be said about it")
    return states


def _same_last_states(cached: list[LoopState], whole: list[LoopState]) -> bool:
    pairs = zip(cached, whole, strict=True)
    return all(
        (one.h_BTD[0, -1] - other.h_BTD[0, -1]).norm() <= SAME_STATE * other.h_BTD[0, -1].norm() for one, other in pairs
    )


def push(function: Callable[[Tensor], list[Tensor]], h_D: Tensor, tangents_RD: Tensor) -> list[Tensor]:
    """Jacobian-vector products of every output of `function` at h, one row for every tangent."""
    parts = [_push(function, h_D, rows_RD) for rows_RD in tangents_RD.to(h_D.dtype).split(ROWS_AT_ONCE)]
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


def pull(function: Map, h_D: Tensor, cotangents_RF: Tensor) -> Tensor:
    """Vector-Jacobian products at h, one row for every cotangent."""
    with _derivatives(), torch.enable_grad():
        h_RD = h_D.expand(len(cotangents_RF), -1).clone().requires_grad_()
        out_RF = function(h_RD)
        if not out_RF.requires_grad:
            return torch.zeros_like(h_RD)
        (pulled_RD,) = torch.autograd.grad(out_RF, h_RD, cotangents_RF.to(out_RF.dtype), materialize_grads=True)
    return pulled_RD


def jacobian(function: Map, h_D: Tensor) -> Tensor:
    """Dense ∂f/∂h as F×D, in float64."""
    identity_DD = torch.eye(len(h_D), dtype=h_D.dtype, device=h_D.device)
    return push(lambda h_RD: [function(h_RD)], h_D, identity_DD)[0].double().T


def _push(function: Callable[[Tensor], list[Tensor]], h_D: Tensor, tangents_RD: Tensor) -> list[Tensor]:
    try:
        return _push_forward(function, h_D, tangents_RD)
    except RuntimeError:  # of an operation without a forward-mode derivative; any other fault is raised again there
        return _push_by_two_backward_passes(function, h_D, tangents_RD)


def _push_forward(function: Callable[[Tensor], list[Tensor]], h_D: Tensor, tangents_RD: Tensor) -> list[Tensor]:
    with _derivatives(), torch.no_grad(), forward_ad.dual_level():
        outputs = function(forward_ad.make_dual(h_D.expand_as(tangents_RD).clone(), tangents_RD))
        pushed = [forward_ad.unpack_dual(output) for output in outputs]
        return [torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in pushed]


def _push_by_two_backward_passes(
    function: Callable[[Tensor], list[Tensor]], h_D: Tensor, tangents_RD: Tensor
) -> list[Tensor]:
    """J v as the derivative of w ↦ Jᵀw along v: for operations without a forward-mode derivative."""
    pushed = []
    with _derivatives(), torch.enable_grad():
        h_RD = h_D.expand_as(tangents_RD).clone().requires_grad_()
        for output in function(h_RD):
            weights = torch.zeros_like(output, requires_grad=True)
            if not output.requires_grad:
                pushed.append(torch.zeros_like(output))
                continue
            (back_RD,) = torch.autograd.grad(output, h_RD, weights, create_graph=True, materialize_grads=True)
            (out,) = torch.autograd.grad(back_RD, weights, tangents_RD, retain_graph=True, materialize_grads=True)
            pushed.append(out)
    return [out.detach() for out in pushed]


@contextmanager
def _derivatives() -> Iterator[None]:
    """The one attention backend that has every derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
