"""What is checked for conformance: a model, and the ways in which it can be run.

A LoopedModel is known by the protocol alone: every loop can be looked at. Of a language model whose loops are inside,
ids go in and logits come out; what every user of such a model relies on can still be compared.

Shape legend: B rows, T new tokens, S all tokens, H heads, C head width, D width, V vocabulary.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from loopscope.errors import ConfigError, ProtocolError, in_a_line
from loopscope.inference.cache import CacheView, KVCache
from loopscope.inference.comparison import Computed, Stage, Tolerance, compare, nudged
from loopscope.inference.decoding import device_of
from loopscope.protocol import Cached, LoopedModel, LoopState, MixedDepths, Slot

TEXTS, TOKENS, FEWEST_TOKENS = 3, 12, 8
"""Texts of random ids that are run, their length, and the length below which ragged rows would have no room."""
BEYOND = 2
"""Loops beyond the trained depth that are run where the model allows it."""
LOGITS = Stage(None, "logits")
OnWrite = Callable[[str, int, int, Tensor, Tensor], None]
"""Module, its visit in this call counted from 1, index of the slot, new keys and values (B, H, T, C)."""


class Session(Protocol):
    """A text that is run piece by piece through a cache."""

    @property
    def length(self) -> int:
        """Of the text so far."""
        ...

    def run(self, ids_BT: Tensor, records: Sequence[Computed], deepest: int | None = None) -> None:
        """The next tokens, to all loops or to fewer."""
        ...

    def take_back(self, tokens: int) -> bool:
        """Forget the last tokens; False where the cache cannot."""
        ...


class Subject(ABC):
    """A model with the texts it is run on, what each should give, and how far rounding may move that."""

    is_looped: ClassVar[bool]
    num_loops: int | None
    deepest: int | None
    """Loops that are run."""
    lacks: Mapping[str, str]
    """By what a check may need, why it is not there."""
    vocab_size: int

    def __init__(self, tokens: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids_BT = torch.randint(self.vocab_size, (TEXTS, tokens), generator=generator).to(device)
        self.wrong_ids_T = torch.randint(self.vocab_size, (tokens,), generator=generator).to(device)
        self.notes: list[str] = []
        try:
            first = self.plain(self.ids_BT[:1])[0]
        except Exception as error:  # whatever somebody's model raises: there is nothing to compare
            raise ProtocolError(
                f"the model cannot run a text of {tokens} tokens{place_of(error)}: {in_a_line(error)}"
            ) from error
        if any(not values.isfinite().all() for stage in first.outputs.values() for values in stage.values()):
            self.notes.append("the model's own numbers are not finite: nothing that is compared means much")
        self._keyed: dict[int, Computed | None] = {}

    def find_tolerance(self) -> None:
        """What each text gives alone, and how far others may be: by the dtype of the logits, the layers run, and what
        a rounding grows to."""
        self.alone = [self.plain(ids_T[None])[0] for ids_T in self.ids_BT]
        """Each text by itself, whole, without a cache: what every other way should give."""
        stage = next(stage for stage in self.alone[0].outputs if stage.kind == "logits")
        self.dtype = self.alone[0].outputs[stage][0].dtype
        layers = self.deepest or 1
        if "cache" not in self.lacks:
            with suppress(Exception):  # a check will tell
                layers = len(self.pieces(0, [1]).writes.get(0, ())) or layers
        self.tolerance = Tolerance.of(self.dtype, layers, compare(self.rounded(), self.alone[0], 0.0).largest)

    @property
    def tokens(self) -> int:
        """Of each text."""
        return self.ids_BT.shape[1]

    # --- ways of running ---------------------------------------------------------------------------------------------

    @abstractmethod
    def plain(self, ids_BT: Tensor, deepest: int | None = None) -> list[Computed]:
        """Rows of equal length without a cache."""

    @abstractmethod
    def rounded(self) -> Computed:
        """The first text with a rounding put in on purpose."""

    @abstractmethod
    def session(self, rows: int = 1) -> Session:
        """An empty cache, for so many rows at once."""

    def pieces(self, text: int, sizes: Sequence[int]) -> Computed:
        """One text alone through a cache, in pieces of these sizes."""
        record, session = Computed(), self.session()
        for ids_T in self.ids_BT[text][: sum(sizes)].split(list(sizes)):
            session.run(ids_T[None], [record])
        return record

    def keyed(self, text: int = 0) -> Computed | None:
        """A cached run of a text whose outputs are those without a cache: its keys are the right ones."""
        if text not in self._keyed:
            self._keyed[text] = None
            for sizes in ([self.tokens], [1] * self.tokens):
                with suppress(Exception):  # the check of that way tells
                    record = self.pieces(text, sizes)
                    if compare(record, self.alone[text], self.tolerance.value).first is None:
                        self._keyed[text] = record
                        break
        return self._keyed[text]


def place_of(error: BaseException) -> str:
    """The line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" at {frame.filename}:{frame.lineno}"


# --- a LoopedModel ---------------------------------------------------------------------------------------------------


class Watched:
    """A view of the cache that keeps what is written through it; implements `protocol.Cache`."""

    def __init__(self, view: CacheView, records: Sequence[Computed], loops: tuple[int, ...] = ()) -> None:
        self.view, self.records, self.loops = view, records, loops
        """`loops`: that each row of the call is at, in truth."""

    def positions(self, tokens: int) -> Tensor:
        """Of the view."""
        return self.view.positions(tokens)

    def mask(self, tokens: int) -> Tensor | None:
        """Of the view."""
        return self.view.mask(tokens)

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Of the view, after noting it for every row."""
        positions_BT = self.positions(k_BHTC.shape[2]).expand(len(self.records), -1).tolist()
        for row, record in enumerate(self.records):
            part, loop, layer = slot
            own = (part, loop[row] if isinstance(loop, tuple) else loop, layer)
            record.write(own, part, self.loops[row], positions_BT[row], k_BHTC[row], v_BHTC[row])
        return self.view.extend(slot, k_BHTC, v_BHTC)


class LoopedSubject(Subject):
    """A LoopedModel, whose every loop is read."""

    is_looped = True

    def __init__(self, model: LoopedModel, vocab_size: int, context: int | None = None, seed: int = 0) -> None:
        if context is not None and context < FEWEST_TOKENS:
            raise ConfigError(f"a context of {context} tokens is too short to be checked; {FEWEST_TOKENS} is the least")
        self.model, self.vocab_size, self.context = model, vocab_size, context
        self.num_loops: int = model.num_loops
        self.deepest: int = model.num_loops
        cached = ("cache", "own positions", "mixed depths")
        mixed = "the model takes one loop for all rows of a call (no loopscope.MixedDepths)"
        self.lacks = {
            **({} if MixedDepths.of(model) else {"mixed depths": mixed}),
            **({} if Cached.of(model) else dict.fromkeys(cached, "the model takes no cache (loopscope.Cached)")),
            **({} if context else {"context": "the model does not say how many tokens it takes"}),
            "padding": "the protocol has no padding: rows of different lengths run at positions of their own (ragged)",
        }
        super().__init__(min(TOKENS, context or TOKENS), device_of(model), seed)
        try:
            self.plain(self.ids_BT[:1], self.num_loops + BEYOND)
            self.deepest += BEYOND
        except Exception as error:  # what is beyond the trained depth may be refused, in any way
            self.notes.append(f"loops beyond the trained {self.num_loops} are refused ({in_a_line(error)})")
        self.find_tolerance()

    @torch.no_grad()
    def rounded(self) -> Computed:
        """The state is rounded before every loop."""
        record, positions = Computed(), [range(self.tokens)]
        state = self.model.embed(self.ids_BT[:1])
        for k in range(1, self.deepest + 1):
            state = self.model.loop(state.with_h(nudged(state.h_BTD)), k)
            keep([record], positions, Stage(k, "state"), state.h_BTD)
            keep([record], positions, Stage(k, "logits"), self.model.readout(state, k))
        return record

    @torch.no_grad()
    def plain(self, ids_BT: Tensor, deepest: int | None = None) -> list[Computed]:
        """Every exit is read as soon as it is there."""
        records = [Computed() for _ in ids_BT]
        model, positions = self.model, [range(ids_BT.shape[1])] * len(ids_BT)
        state = model.embed(ids_BT)
        keep_state(records, positions, state, 0)
        for k in range(1, (deepest or self.deepest) + 1):
            state = model.loop(state, k)
            keep_state(records, positions, state, k)
            keep(records, positions, Stage(k, "logits"), model.readout(state, k))
        return records

    @torch.no_grad()
    def cached(self, view: CacheView, ids_BT: Tensor, records: Sequence[Computed], deepest: int | None = None) -> None:
        """Some tokens against earlier ones, every exit read."""
        model, watched = Cached.needed(self.model, "a cached run"), Watched(view, records, (0,) * len(records))
        positions = view.positions(ids_BT.shape[1]).expand(ids_BT.shape).tolist()
        state = model.embed(ids_BT, watched)
        keep_state(records, positions, state, 0)
        for k in range(1, (deepest or self.deepest) + 1):
            watched.loops = (k,) * len(records)
            state = model.loop(state, k, watched)
            keep_state(records, positions, state, k)
            keep(records, positions, Stage(k, "logits"), model.readout(state, k, watched))

    def new_cache(self, rows: int = 1) -> KVCache:
        """An exact one."""
        return KVCache(rows, num_loops=self.deepest)

    def session(self, rows: int = 1) -> LoopedSession:
        return LoopedSession(self, rows)


class LoopedSession:
    """Rows of one length, through an exact cache."""

    def __init__(self, subject: LoopedSubject, rows: int) -> None:
        self._subject, self._cache = subject, subject.new_cache(rows)

    @property
    def length(self) -> int:
        """Of the text so far."""
        return self._cache.lengths[0]

    def run(self, ids_BT: Tensor, records: Sequence[Computed], deepest: int | None = None) -> None:
        """The next tokens."""
        self._subject.cached(self._cache.append(ids_BT.shape[1]), ids_BT, records, deepest)

    def take_back(self, tokens: int) -> bool:
        """Always possible."""
        for row, length in enumerate(self._cache.lengths):
            self._cache.truncate(length - tokens, row)
        return True


def keep_state(records: Sequence[Computed], positions: Sequence[Sequence[int]], state: LoopState, k: int) -> None:
    """The state after loop k, with what it carries of every token."""
    keep(records, positions, Stage(k, "state"), state.h_BTD)
    for name, tensor in state.carried.items():
        if tensor.dim() >= 2 and tensor.shape[:2] == state.h_BTD.shape[:2]:
            keep(records, positions, Stage(k, f"carried {name}"), tensor)


def keep(records: Sequence[Computed], positions: Sequence[Sequence[int]], stage: Stage, values_BTD: Tensor) -> None:
    """One output of every row, each in its own record."""
    for record, own, values_TD in zip(records, positions, values_BTD, strict=True):
        record.keep(stage, own, values_TD.flatten(1))


# --- a model whose loops are inside ----------------------------------------------------------------------------------


class TextModel(Protocol):
    """A causal language model as a whole."""

    vocab_size: int
    device: torch.device
    takes_mask: bool
    """Whether rows may be padded on the left, with a mask that says where."""
    end_ids: Sequence[int]
    """Tokens that end a text."""

    def logits(
        self, ids_BT: Tensor, memory: Any = None, mask_BS: Tensor | None = None, on_write: OnWrite | None = None
    ) -> Tensor:
        """Logits_BTV of new tokens, against those in the memory, which has them afterwards."""
        ...

    def logits_of_rounded(self, ids_BT: Tensor) -> Tensor:
        """Logits_BTV of whole texts whose embedded tokens have been `nudged`."""
        ...

    def new_memory(self) -> Any:
        """An empty cache; None where the model has none."""
        ...

    def take_back(self, memory: Any, tokens: int) -> bool:
        """Forget the last tokens of all rows; False where the cache cannot."""
        ...

    def generate(self, ids_BT: Tensor, mask_BT: Tensor, count: int) -> Tensor | None:
        """So many greedy tokens after each row by the model's own way of generating; None where it has none."""
        ...


class WholeSubject(Subject):
    """A `TextModel`: nothing of its loops can be asked for."""

    is_looped = False
    num_loops = deepest = None

    def __init__(self, model: TextModel, seed: int = 0) -> None:
        self.model, self.vocab_size = model, model.vocab_size
        inside = "the loops are inside the model: nothing but its whole depth can be asked for"
        no_cache = "the model gives no past_key_values: it has no cache"
        self.lacks = {
            "loops": inside,
            "mixed depths": inside,
            "own positions": "rows of different lengths are padded in such a model (see padded)",
            "context": "a model of transformers leaves counting its tokens to whoever calls it",
            **({"cache": no_cache} if model.new_memory() is None else {}),
            **({} if model.takes_mask else {"padding": "the model takes no attention_mask"}),
        }
        super().__init__(TOKENS, model.device, seed)
        self.find_tolerance()

    @torch.no_grad()
    def rounded(self) -> Computed:
        """The embedded tokens are rounded."""
        record = Computed()
        record.keep(LOGITS, range(self.tokens), self.model.logits_of_rounded(self.ids_BT[:1])[0])
        return record

    @torch.no_grad()
    def plain(self, ids_BT: Tensor, deepest: int | None = None) -> list[Computed]:
        """Logits alone."""
        records = [Computed() for _ in ids_BT]
        for record, logits_TV in zip(records, self.model.logits(ids_BT), strict=True):
            record.keep(LOGITS, range(ids_BT.shape[1]), logits_TV)
        return records

    def session(self, rows: int = 1) -> WholeSession:
        return WholeSession(self.model)

    def left_padded(self) -> tuple[Tensor, Tensor]:
        """Texts of 12, 9 and 6 tokens as rows of 12, and where they are not padding."""
        ids_BS, mask_BS = torch.zeros_like(self.ids_BT), torch.ones_like(self.ids_BT)
        for row in range(TEXTS):
            ids_BS[row, 3 * row :] = self.ids_BT[row, : TOKENS - 3 * row]
            mask_BS[row, : 3 * row] = 0
        return ids_BS, mask_BS


class WholeSession:
    """Rows of one length, padded or not, through the model's own cache."""

    def __init__(self, model: TextModel) -> None:
        self._model, self._memory, self.length = model, model.new_memory(), 0

    @torch.no_grad()
    def run(
        self,
        ids_BT: Tensor,
        records: Sequence[Computed],
        deepest: int | None = None,
        mask_BS: Tensor | None = None,
    ) -> None:
        """The next tokens; with a mask, positions count from the first token that is no padding."""
        ends = [0] * len(ids_BT) if mask_BS is None else (mask_BS == 0).sum(1).tolist()
        positions = [range(self.length - padded, self.length - padded + ids_BT.shape[1]) for padded in ends]

        def write(module: str, visit: int, slot: int, k_BHTC: Tensor, v_BHTC: Tensor) -> None:
            for row, record in enumerate(records):
                record.write(("slot", 0, slot), module, visit, positions[row], k_BHTC[row], v_BHTC[row])

        logits_BTV = self._model.logits(ids_BT, self._memory, mask_BS, write)
        for row, record in enumerate(records):
            record.keep(LOGITS, positions[row], logits_BTV[row])
        self.length += ids_BT.shape[1]

    def take_back(self, tokens: int) -> bool:
        """As far as the model's cache can."""
        self.length -= tokens
        return self._model.take_back(self._memory, tokens)
