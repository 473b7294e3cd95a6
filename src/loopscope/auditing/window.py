"""The loops and readouts of a model as maps of the joint state of a few neighbouring tokens.

A loop hands on h and whatever else it carries, for every token. The audit asks what becomes of a change in one token's
share of that; what later tokens make of it belongs to the answer. So the state under test is one long vector,

    w = (h_1, z_1, h_2, z_2, …, g)        h and the carried tensors z of each token, then what has no token

with everything before the window held fixed and nothing after it. A model that takes a cache runs the window alone
against the keys and values of the tokens before; any other model runs the whole prefix again. Many perturbed copies go
through as rows of one batch, unless the rows of a batch depend on one another (batch statistics): then each is a batch
of its own.

Shape legend: R rows (copies of one state), T tokens of the prefix, N tokens of the window, W width of the joint state,
X width of one token's share with what has no token, D width of h, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from loopscope.auditing.derivatives import with_the_same_noise
from loopscope.errors import NotFiniteError, ProtocolError
from loopscope.objectives.terms import Pass, Term
from loopscope.protocol import Cached, LinearReadout, LoopedModel, LoopState, LoopTrace, Slot

ROWS_OF_A_PREFIX = (3, 5, 7)
"""Copies of a prefix that are run, unlike tokens in number; two could be cosine and sine."""
SAME_ROW = 1e-9
"""Relative difference up to which a row is the same whatever else is in the batch."""
SAME_STATE = 1e-4
"""Relative difference up to which the cached and the whole run count as the same state."""
NOISE = 1e-3
"""Scale, in that of h, of what stands in for a carried tensor that is all zero: it has no direction of its own."""


@dataclass(frozen=True)
class Part:
    """One tensor of the state that is searched."""

    name: str
    """"h", or its name among the carried ones."""
    width: int
    """Of one token's share; of the whole, where it has no tokens."""
    per_token: bool = True
    label: str = ""
    """What it is called in results; its name, unless a named field of h has that."""


@dataclass(frozen=True)
class CarriedLayout:
    """How the joint state of N tokens lies in one vector."""

    parts: tuple[Part, ...]
    tokens: int

    @property
    def token_width(self) -> int:
        """Of one token's share."""
        return sum(part.width for part in self.parts if part.per_token)

    def block(self, token: int) -> Tensor:
        """Indices of one token's share, followed by what has no token."""
        width = self.token_width
        shared = sum(part.width for part in self.parts if not part.per_token)
        return torch.cat([torch.arange(width) + token * width, torch.arange(shared) + self.tokens * width])

    def repeated(self, values_X: Tensor) -> Tensor:
        """Numbers of one token's share, the same for every token of the window."""
        return torch.cat([values_X[: self.token_width].repeat(self.tokens), values_X[self.token_width :]])

    def columns(self) -> dict[str, slice]:
        """Where each tensor, by its label, lies within such a block."""
        found, start = {}, 0
        for part in sorted(self.parts, key=lambda part: not part.per_token):
            found[part.label or part.name] = slice(start, start + part.width)
            start += part.width
        return found


@dataclass(frozen=True)
class Carried:
    """What the loops of a model carry besides h."""

    searched: tuple[Part, ...] = ()
    constant: tuple[str, ...] = ()
    """The same after every loop, and no weight reaches it: an injected input that travels along. No loop writes it."""
    skipped: tuple[str, ...] = ()
    """Sentences about tensors that cannot be searched."""

    @classmethod
    def of(
        cls,
        states: Sequence[LoopState],
        written: Callable[[str], bool | None] = lambda name: None,
        fields: Container[str] = (),
    ) -> Carried:
        """From the states before the first loop and after each.

        `written` says whether a weight of a loop reaches a tensor; None where no weights are known. Then a tensor of
        zeros may be one whose writer starts at zero, and is searched. `fields` are the names of fields of h: a tensor
        that is called like one is carried['…'] in results.
        """
        last, searched, constant, skipped = states[-1], [], [], []
        for name, tensor in last.carried.items():
            label = f"carried[{name!r}]" if name in fields else name
            if name == "h":
                raise ProtocolError("carried['h'] has the name of the state itself: call it something else")
            if not tensor.is_floating_point():
                skipped.append(f"carried[{name!r}] holds {str(tensor.dtype).removeprefix('torch.')}: not searched")
            elif tensor.dim() == 0 or len(tensor) != len(last.h_BTD):
                skipped.append(f"carried[{name!r}] does not lead with the batch: not searched")
            elif any(name not in state.carried or state.carried[name].shape != tensor.shape for state in states[1:]):
                skipped.append(f"carried[{name!r}] is not there, or of another shape, after some loops: not searched")
            elif all(torch.equal(state.carried.get(name, tensor), tensor) for state in states) and not (
                written(name) if written(name) is not None else not tensor.any()
            ):
                constant.append(label)
            else:
                per_token = tensor.dim() > 1 and tensor.shape[1] == last.h_BTD.shape[1]
                width = tensor[0, 0].numel() if per_token else tensor[0].numel()
                searched.append(Part(name, width, per_token, label))
        return cls(tuple(searched), tuple(constant), tuple(skipped))


NOTHING_BESIDES = Carried()


class PrefixCache:
    """Keys and values of a prefix: written while `frozen` is false, afterwards only read, for any number of rows."""

    def __init__(self) -> None:
        self.length = 0
        """Tokens of the prefix, once it is frozen."""
        self.frozen = False
        self.slots: dict[Slot, tuple[Tensor, Tensor]] = {}

    def positions(self, tokens: int) -> Tensor:
        """Of the new tokens, the same in all rows."""
        return torch.arange(self.length, self.length + tokens)[None]

    def mask(self, tokens: int) -> Tensor | None:
        """No row is longer than another."""
        return None

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
class Window:
    """A few neighbouring tokens of one prefix: their joint states after 0 … M loops, and the maps between them."""

    model: LoopedModel
    states: list[LoopState]
    """After 0 … M loops; a few equal rows, and either the window alone (with a cache) or the whole prefix."""
    cache: PrefixCache | None
    start: int
    """Where the window begins among the tokens of the states."""
    tokens: int
    at: int = 0
    """The audited token within the window."""
    carried: Carried = NOTHING_BESIDES
    last_loop: int | None = None
    """The last number that the model knows a loop of; further ones are that loop again."""
    row_by_row: bool = False
    """Whether every copy of the state goes through as a batch of its own."""

    def layout(self, k: int) -> CarriedLayout:
        """Of the state after loop k; before the first loop a carried tensor may not be there yet."""
        own = self.states[k]
        there = [part for part in self.carried.searched if part.name in own.carried]
        if k == 0:
            there = [part for part in there if own.carried[part.name].shape == self.states[1].carried[part.name].shape]
        return CarriedLayout((Part("h", own.h_BTD.shape[-1]), *there), self.tokens)

    def vector(self, k: int) -> Tensor:
        """The joint state after loop k."""
        return self._flat(self.states[k].take(torch.zeros(1, dtype=torch.long)), self.layout(k))[0]

    def block(self, k: int, token: int | None = None) -> Tensor:
        """Indices, in the joint state after loop k, of a token's share; of the audited one's, if none is named."""
        return self.layout(k).block(self.at if token is None else token)

    def h_D(self, k: int, token: int | None = None) -> Tensor:
        """h of one token after loop k; of the audited one, if none is named."""
        return self.states[k].h_BTD[0, self.start + (self.at if token is None else token)]

    def placed(self, rows_RX: Tensor, k: int, token: int | None = None) -> Tensor:
        """Directions of one token's share as directions of the joint state."""
        placed_RW = rows_RX.new_zeros(len(rows_RX), len(self.vector(k)))
        placed_RW[:, self.block(k, token)] = rows_RX
        return placed_RW

    def lengths(self, k: int, token: int | None = None) -> Tensor:
        """How long each tensor of a token's share is, over h and per √channel; one of zeros counts as long as h."""
        layout, x_X = self.layout(k), self.vector(k)[self.block(k, token)].double()
        units_X, columns = torch.ones_like(x_X), layout.columns()
        h_norm, width = float(x_X[columns["h"]].norm()), layout.parts[0].width
        for name, where in columns.items():
            if name == "h":
                continue
            share = float(x_X[where].norm()) / max(h_norm, 1e-300)
            alike = ((where.stop - where.start) / width) ** 0.5
            units_X[where] = share if share > 2 * NOISE * alike else alike
        return units_X

    def loops(self, w_RW: Tensor, k: int, count: int) -> list[Tensor]:
        """w_k → [w_{k+1}, …, w_{k+count}], each R×W."""
        if self.row_by_row and len(w_RW) > 1:
            return [torch.cat(rows) for rows in zip(*(self.loops(w, k, count) for w in w_RW.split(1)), strict=True)]
        state, passed = self._with(w_RW, k), []
        for number in range(k + 1, k + count + 1):
            state = _loop(self.model, state, self.number(number), self.cache)
            passed.append(self._flat(state, self.layout(number)))
        return passed

    def loop(self, w_RW: Tensor, k: int) -> Tensor:
        """Loop k: w_{k-1} → w_k."""
        return self.loops(w_RW, k - 1, 1)[0]

    def shown(self, w_RW: Tensor, k: int) -> Tensor:
        """What the readout at loop k makes of every token, R×(N·F): features, or logits where there is no head."""
        if self.row_by_row and len(w_RW) > 1:
            return torch.cat([self.shown(w, k) for w in w_RW.split(1)])
        linear, state = LinearReadout.of(self.model), self._with(w_RW, k)
        if linear is not None:
            return self._of_window(linear.features(state, self.number(k), self.cache)).flatten(1)
        return self._of_window(self._logits(state, k)).flatten(1)

    def logits(self, w_RW: Tensor, k: int) -> Tensor:
        """The logits R×N×V that the readout at loop k makes of the window."""
        return self._of_window(self._logits(self._with(w_RW, k), k))

    def shown_by(self, term: Term, k: int, w_RW: Tensor) -> Tensor:
        """What a term of the loss shows of the window after loop k, as R×F; F is 0 where it shows nothing."""
        if self.row_by_row and len(w_RW) > 1:
            return torch.cat([self.shown_by(term, k, w) for w in w_RW.split(1)])
        state = self._with(w_RW, k)
        shown = term.shows(state.h_BTD, lambda: self._logits(state, k))
        return w_RW[:, :0] if shown is None else self._of_window(shown).flatten(1)

    def charged_by(self, term: Term, k: int, w_RW: Tensor, token: int) -> Tensor:
        """What a term of the loss charges for one token of the window after loop k, as if it were all there is."""
        here, charged = self.start + token, []
        per_token = {part.name for part in self.carried.searched if part.per_token}
        for w_W in w_RW:
            state = self._with(w_W[None], k)
            carried = {name: z[:, here : here + 1] if name in per_token else z for name, z in state.carried.items()}
            lone = replace(state, h_BTD=state.h_BTD[:, here : here + 1], carried=carried)
            charged.append(term.value(Pass(LoopTrace([lone, lone]))).double())
        return torch.stack(charged)

    def rows_depend_on_one_another(self) -> bool:
        """Whether some loop or readout of a state changes with the other rows of its batch.

        Both batches have the same shape, so that the arithmetic of the first row is the same to the last bit.
        """
        for k in range(1, self.model.num_loops + 1):
            maps = ((partial(self.loop, k=k), self.vector(k - 1)), (partial(self.shown, k=k), self.vector(k)))
            for function, w_W in maps:
                alone, beside = (
                    with_the_same_noise(function, torch.stack([w_W, other_W]))[0].double() for other_W in (w_W, 3 * w_W)
                )
                if not (alone - beside).norm() <= SAME_ROW * alone.norm():
                    return True
        return False

    def number(self, k: int) -> int:
        """Of loop k, as the model is told."""
        return k if self.last_loop is None else min(k, self.last_loop)

    def _of_window(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.start : self.start + self.tokens]

    def _logits(self, state: LoopState, k: int) -> Tensor:
        if self.cache is None:
            return self.model.readout(state, self.number(k))
        return Cached.needed(self.model, "a cache").readout(state, self.number(k), self.cache)

    def _flat(self, state: LoopState, layout: CarriedLayout) -> Tensor:
        """The joint state of every row as one vector."""
        tokens, shared = [], []
        for part in layout.parts:
            tensor = state.h_BTD if part.name == "h" else state.carried[part.name].to(state.h_BTD.dtype)
            if part.per_token:
                tokens.append(self._of_window(tensor).reshape(len(tensor), self.tokens, -1))
            else:
                shared.append(tensor.flatten(1))
        return torch.cat([torch.cat(tokens, dim=-1).flatten(1), *shared], dim=-1)

    def _with(self, w_RW: Tensor, k: int) -> LoopState:
        """R copies of the state after loop k, the window replaced."""
        layout = self.layout(k)
        state = self.states[k].take(torch.zeros(len(w_RW), dtype=torch.long, device=w_RW.device))
        per_token = self.tokens * layout.token_width
        rows_RNX, shared_RG = w_RW[:, :per_token].unflatten(1, (self.tokens, -1)), w_RW[:, per_token:]
        carried, h_BTD, token_column, shared_column = dict(state.carried), state.h_BTD, 0, 0
        for part in layout.parts:
            whole = state.h_BTD if part.name == "h" else state.carried[part.name]
            if part.per_token:
                piece = rows_RNX[..., token_column : token_column + part.width]
                token_column += part.width
                piece = piece.reshape(len(w_RW), self.tokens, *whole.shape[2:]).to(whole.dtype)
                ends = (whole[:, : self.start], whole[:, self.start + self.tokens :])
                new = torch.cat([ends[0], piece, ends[1]], dim=1) if self.tokens < whole.shape[1] else piece
            else:
                piece = shared_RG[:, shared_column : shared_column + part.width]
                shared_column += part.width
                new = piece.reshape(len(w_RW), *whole.shape[1:]).to(whole.dtype)
            if part.name == "h":
                h_BTD = new
            else:
                carried[part.name] = new
        return replace(state, h_BTD=h_BTD, carried=carried)


@dataclass(frozen=True)
class Windows:
    """One audited token of a prefix, alone, with the token before it, and with those after it.

    What is asked of a whole Jacobian is asked of the token alone, which is cheap; of the wider windows only a few
    directions are asked about.
    """

    alone: Window
    ahead: Window
    """The audited token first, then those after it."""
    ids_T: Tensor
    position: int
    causal: bool

    def with_the_token_before(self) -> Window:
        """The token before the audited one, which is not the first of a text, and that one."""
        ids_T = self.ids_T[: self.position + 1] if self.causal else self.ids_T
        cached = self.alone.cache is not None
        window = _window(self.alone, ids_T, self.position - 1, 2, len(self.alone.states) - 1, cached)
        return replace(window, at=1)

    def row_by_row(self) -> Windows:
        """The same, every copy of a state a batch of its own."""
        return replace(self, alone=replace(self.alone, row_by_row=True), ahead=replace(self.ahead, row_by_row=True))


def windows(
    model: LoopedModel,
    ids_T: Tensor,
    position: int,
    num_loops: int,
    carried: Carried = NOTHING_BESIDES,
    *,
    causal: bool = True,
    cached: bool = True,
    last_loop: int | None = None,
) -> Windows:
    """The windows around one token of a text; through a cache, where the model takes one that `keeps_its_cache`."""
    like = Window(model, [], None, 0, 1, carried=carried, last_loop=last_loop)
    window = partial(_window, like, num_loops=num_loops, cached=cached and causal)
    alone = window(ids_T[: position + 1] if causal else ids_T, position, 1)
    after = len(ids_T) - position - 1
    return Windows(alone, window(ids_T, position, after + 1) if after else alone, ids_T, position, causal)


def keeps_its_cache(model: LoopedModel, ids_T: Tensor, num_loops: int) -> bool:
    """Whether the model takes a cache and computes the same states with it as without."""
    half = len(ids_T) // 2
    if Cached.of(model) is None or half == 0:
        return False
    like = Window(model, [], None, 0, 1)
    with_it, without = (_window(like, ids_T, half, len(ids_T) - half, num_loops, cached) for cached in (True, False))
    pairs = ((with_it.vector(k), without.vector(k)) for k in range(num_loops + 1))
    return all(bool((one - other).norm() <= SAME_STATE * other.norm()) for one, other in pairs)


def _window(like: Window, ids_T: Tensor, first: int, tokens: int, num_loops: int, cached: bool) -> Window:
    """Some tokens of a text. The text is run as a few equal rows, unlike its tokens in number: so `LoopState.take` can
    tell what has rows from what all rows share.
    """
    model = like.model
    rows = next(number for number in ROWS_OF_A_PREFIX if number not in (len(ids_T), tokens))
    ids_BT = ids_T.repeat(rows, 1)
    numbers = [like.number(k) for k in range(1, num_loops + 1)]
    taking = Cached.of(model) if cached and first > 0 and like.last_loop is None else None
    cache: PrefixCache | None = None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a state that starts from noise is then the same in every window of a text
        if taking is None:
            states = _run(model, model.embed(ids_BT), numbers)
        else:
            states, cache = _with_cache(model, taking, ids_BT, first, numbers)
    states = [_without_zeros(state, like.carried) for state in states]
    return replace(like, states=states, cache=cache, start=first if cache is None else 0, tokens=tokens)


def _with_cache(
    model: LoopedModel, taking: Cached, ids_BT: Tensor, first: int, numbers: list[int]
) -> tuple[list[LoopState], PrefixCache]:
    cache = PrefixCache()
    before = _run(model, taking.embed(ids_BT[:, :first], cache), numbers, cache)
    for k in numbers:
        taking.readout(before[k], k, cache)  # a coda keeps keys and values too
    cache.frozen, cache.length = True, first
    return _run(model, taking.embed(ids_BT[:, first:], cache), numbers, cache), cache


def _without_zeros(state: LoopState, carried: Carried) -> LoopState:
    """Small noise in place of carried tensors that are all zero."""
    zero = [part.name for part in carried.searched if part.name in state.carried and not state.carried[part.name].any()]
    if not zero:
        return state
    generator = torch.Generator().manual_seed(0)
    size = NOISE * float(state.h_BTD.double().square().mean().sqrt())
    noise = {}
    for name in zero:
        tensor = state.carried[name]
        row = torch.randn(tensor.shape[1:], generator=generator, dtype=torch.float64)
        noise[name] = (size * row).to(tensor).expand_as(tensor).clone()
    return replace(state, carried={**state.carried, **noise})


def _loop(model: LoopedModel, state: LoopState, k: int, cache: PrefixCache | None) -> LoopState:
    return model.loop(state, k) if cache is None else Cached.needed(model, "a cache").loop(state, k, cache)


def _run(
    model: LoopedModel, state: LoopState, numbers: Iterable[int], cache: PrefixCache | None = None
) -> list[LoopState]:
    states = [state]
    for k in numbers:
        states.append(_loop(model, states[-1], k, cache))
        if not states[-1].h_BTD.isfinite().all():
            raise NotFiniteError(f"loop {k} leaves NaN or infinity in the state h_{k}: nothing can be said about it")
    return states
