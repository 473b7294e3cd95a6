"""The loops and readouts of a model as maps of one token's state, and their derivatives.

The audit asks what happens to the state of one token, everything before it held fixed and nothing after it: the last
position of a prefix. A model that takes a cache runs that position alone against the keys and values of the others;
any other model runs the whole prefix again. Many perturbed copies of the state go through as rows of one batch, unless
the rows of a batch depend on one another (batch statistics): then each is a batch of its own.

Shape legend: R rows (copies of one state), T tokens of the prefix, D width, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from loopscope.errors import ProtocolError
from loopscope.objectives.terms import Term
from loopscope.protocol import Cached, LinearReadout, LoopedModel, LoopState, Slot

ROWS_AT_ONCE = 512
"""Copies of a state that go through a loop in one batch: enough for the matrix multiply, little memory."""
ROWS_OF_A_PREFIX = (3, 5)
"""Copies of a prefix that are run: two could be cosine and sine."""
SAME_ROW = 1e-9
"""Relative difference up to which a row is the same whatever else is in the batch."""
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
            before = (tensor[:1].expand(rows, *tensor.shape[1:]) for tensor in self.slots[slot])
            k_BHTC, v_BHTC = (torch.cat(pair, dim=2) for pair in zip(before, (k_BHTC, v_BHTC), strict=True))
        if not self.frozen:
            self.slots[slot] = (k_BHTC, v_BHTC)
        return k_BHTC, v_BHTC


@dataclass(frozen=True)
class TokenMaps:
    """The last token of one prefix: its states h_0 … h_M, and the maps between them."""

    model: LoopedModel
    states: list[LoopState]
    """After 0 … M loops; a few equal rows, and either the last token alone (with a cache) or the whole prefix."""
    cache: PrefixCache | None
    last_loop: int | None = None
    """The last number that the model knows a loop of; further ones are that loop again."""
    row_by_row: bool = False
    """Whether every copy of the state goes through as a batch of its own."""

    def h_D(self, k: int) -> Tensor:
        """The token's state after loop k."""
        return self.states[k].h_BTD[0, -1]

    def loops(self, h_RD: Tensor, k: int, count: int) -> list[Tensor]:
        """h_k → [h_{k+1}, …, h_{k+count}], each R×D."""
        if self.row_by_row and len(h_RD) > 1:
            return [torch.cat(rows) for rows in zip(*(self.loops(h, k, count) for h in h_RD.split(1)), strict=True)]
        state, passed = self._with(h_RD, k), []
        for number in range(k + 1, k + count + 1):
            state = _loop(self.model, state, self._number(number), self.cache)
            passed.append(state.h_BTD[:, -1])
        return passed

    def loop(self, h_RD: Tensor, k: int) -> Tensor:
        """Loop k: h_{k-1} → h_k."""
        return self.loops(h_RD, k - 1, 1)[0]

    def shown(self, h_RD: Tensor, k: int) -> Tensor:
        """What the readout at loop k makes of the state: features where the model has a head, else logits."""
        if self.row_by_row and len(h_RD) > 1:
            return torch.cat([self.shown(h, k) for h in h_RD.split(1)])
        linear, state = LinearReadout.of(self.model), self._with(h_RD, k)
        if linear is not None:
            return linear.features(state, self._number(k), self.cache)[:, -1]
        return self._logits(state, k)[:, -1]

    def logits(self, h_RD: Tensor, k: int) -> Tensor:
        """The logits that the readout at loop k makes of the state."""
        return self._logits(self._with(h_RD, k), k)[:, -1]

    def shown_by(self, term: Term, k: int, h_RD: Tensor) -> Tensor:
        """What a term of the loss shows of the state after loop k, as R×F; F is 0 where it shows nothing."""
        if self.row_by_row and len(h_RD) > 1:
            return torch.cat([self.shown_by(term, k, h) for h in h_RD.split(1)])
        state = self._with(h_RD, k)
        shown = term.shows(state.h_BTD, lambda: self._logits(state, k))
        return h_RD[:, :0] if shown is None else shown[:, -1].flatten(1)

    def rows_depend_on_one_another(self) -> bool:
        """Whether some loop or readout of a state changes with the other rows of its batch.

        Both batches have the same shape, so that the arithmetic of the first row is the same to the last bit.
        """
        for k in range(1, self.model.num_loops + 1):
            for function, h_D in ((partial(self.loop, k=k), self.h_D(k - 1)), (partial(self.shown, k=k), self.h_D(k))):
                alone, beside = (
                    with_the_same_noise(function, torch.stack([h_D, other_D]))[0].double() for other_D in (h_D, 3 * h_D)
                )
                if not (alone - beside).norm() <= SAME_ROW * alone.norm():
                    return True
        return False

    def _number(self, k: int) -> int:
        return k if self.last_loop is None else min(k, self.last_loop)

    def _logits(self, state: LoopState, k: int) -> Tensor:
        if self.cache is None:
            return self.model.readout(state, self._number(k))
        return Cached.needed(self.model, "a cache").readout(state, self._number(k), self.cache)

    def _with(self, h_RD: Tensor, k: int) -> LoopState:
        """R copies of the state after loop k, the last token's h replaced."""
        state = self.states[k].take(torch.zeros(len(h_RD), dtype=torch.long, device=h_RD.device))
        return state.with_h(torch.cat([state.h_BTD[:, :-1], h_RD[:, None]], dim=1))


def token_maps(
    model: LoopedModel, ids_T: Tensor, num_loops: int, *, last_loop: int | None = None, row_by_row: bool = False
) -> TokenMaps:
    """The maps of the last token of a prefix, through a cache where the model takes one and gets it right.

    The prefix is run as a few equal rows, unlike its tokens in number: so `LoopState.take` can tell what has rows from
    what all rows share.
    """
    rows = next(number for number in ROWS_OF_A_PREFIX if number != len(ids_T))
    ids_BT = ids_T.repeat(rows, 1)
    numbers = [k if last_loop is None else min(k, last_loop) for k in range(1, num_loops + 1)]
    with torch.no_grad():
        whole = TokenMaps(model, _run(model, model.embed(ids_BT), numbers), None, last_loop, row_by_row)
        taking = Cached.of(model)
        if taking is None or len(ids_T) < 2 or last_loop is not None:
            return whole
        states, cache = _with_cache(model, taking, ids_BT, numbers)
        return replace(whole, states=states, cache=cache) if _same_last_states(states, whole.states) else whole


def _with_cache(
    model: LoopedModel, taking: Cached, ids_BT: Tensor, numbers: list[int]
) -> tuple[list[LoopState], PrefixCache]:
    cache = PrefixCache()
    before = _run(model, taking.embed(ids_BT[:, :-1], cache), numbers, cache)
    for k in numbers:
        taking.readout(before[k], k, cache)  # a coda keeps keys and values too
    cache.frozen = True
    return _run(model, taking.embed(ids_BT[:, -1:], cache), numbers, cache), cache


def with_the_same_noise(function: Map, h_RD: Tensor) -> Tensor:
    """A model that draws random numbers draws the same ones at every call through here."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return function(h_RD).detach()


def _loop(model: LoopedModel, state: LoopState, k: int, cache: PrefixCache | None) -> LoopState:
    return model.loop(state, k) if cache is None else Cached.needed(model, "a cache").loop(state, k, cache)


def _run(model: LoopedModel, state: LoopState, numbers: list[int], cache: PrefixCache | None = None) -> list[LoopState]:
    states = [state]
    for k in numbers:
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
