"""Conformance of a language model whose loops are inside: ids in, logits out, and a cache of its own.

Nothing of the loops can be asked for, so depth, rows at different loops and exits are not applicable. What can be
compared is what every user of such a model relies on: cached and uncached, whole and in pieces, padded and alone.

Shape legend: B rows, T new tokens, S all tokens, H heads, C head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from loopscope.inference.comparison import Record, Stage, Tolerance, compare, shared_slots
from loopscope.inference.conformance import (
    TEXTS,
    TOKENS,
    Check,
    Conformance,
    Finding,
    NotApplicableError,
    Progress,
    Way,
    cannot_run,
    results,
)

LOGITS = Stage(None, "logits")
OnWrite = Callable[[str, int, int, Tensor, Tensor], None]
"""Module, its visit in this call counted from 1, index of the slot, new keys and values (B, H, T, C)."""


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


class BlackBoxChecks:
    """The checks of a `TextModel`."""

    def __init__(self, model: TextModel, seed: int = 0) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        self.ids_BT = torch.randint(model.vocab_size, (TEXTS, TOKENS), generator=generator).to(model.device)
        self.wrong_ids_T = torch.randint(model.vocab_size, (TOKENS,), generator=generator).to(model.device)
        try:
            self.alone = [self.plain(ids_T[None])[0] for ids_T in self.ids_BT]
        except Exception as error:
            raise cannot_run(TOKENS, error) from error
        self.tolerance = self._find_tolerance()

    @torch.no_grad()
    def _find_tolerance(self) -> Tolerance:
        """From the dtype of the logits, the layers run, and what a rounding of the embedded tokens grows to."""
        record = Record()
        record.keep(LOGITS, range(TOKENS), self.model.logits_of_rounded(self.ids_BT[:1])[0])
        layers = 1
        if self.model.new_memory() is not None:
            with suppress(Exception):  # a check will tell
                layers = len(self.pieces(0, [1]).writes.get(0, ())) or layers
        dtype = self.alone[0].outputs[LOGITS][0].dtype
        return Tolerance.of(dtype, layers, compare(record, self.alone[0], 0.0).largest)

    # --- ways of running ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def plain(self, ids_BT: Tensor) -> list[Record]:
        """Rows of equal length without a cache."""
        records = [Record() for _ in ids_BT]
        for record, logits_TV in zip(records, self.model.logits(ids_BT), strict=True):
            record.keep(LOGITS, range(ids_BT.shape[1]), logits_TV)
        return records

    @torch.no_grad()
    def cached(
        self, memory: Any, start: int, ids_BT: Tensor, records: Sequence[Record], mask_BS: Tensor | None = None
    ) -> None:
        """New tokens against those in the memory; with a mask, positions count from the first token that is none."""
        ends = [0] * len(ids_BT) if mask_BS is None else (mask_BS == 0).sum(1).tolist()
        positions = [range(start - padded, start - padded + ids_BT.shape[1]) for padded in ends]

        def write(module: str, visit: int, slot: int, k_BHTC: Tensor, v_BHTC: Tensor) -> None:
            for row, record in enumerate(records):
                record.write(("slot", 0, slot), module, visit, positions[row], k_BHTC[row], v_BHTC[row])

        logits_BTV = self.model.logits(ids_BT, memory, mask_BS, write)
        for row, record in enumerate(records):
            record.keep(LOGITS, positions[row], logits_BTV[row])

    def pieces(self, text: int, sizes: Sequence[int]) -> Record:
        """One text alone through a cache, in pieces of these sizes."""
        record, memory, start = Record(), self.model.new_memory(), 0
        for ids_T in self.ids_BT[text][: sum(sizes)].split(list(sizes)):
            self.cached(memory, start, ids_T[None], [record])
            start += len(ids_T)
        return record

    def _keyed(self, text: int) -> Record | None:
        """A cached run whose logits are those without a cache."""
        for sizes in ([TOKENS], [1] * TOKENS):
            record = self.pieces(text, sizes)
            if compare(record, self.alone[text], self.tolerance.value).first is None:
                return record
        return None

    def _needs_memory(self) -> None:
        if self.model.new_memory() is None:
            raise NotApplicableError("the model gives no past_key_values: it has no cache")

    # --- the checks --------------------------------------------------------------------------------------------------

    def all(self) -> list[Check]:
        """In the order of those of a LoopedModel."""
        inside = "the loops are inside the model: nothing but its whole depth can be asked for"
        return [
            Check("two-runs", "two runs of the same text agree", self.two_runs),
            Check("depth", "depth n of a deeper run is a run of n loops", lambda: _not_applicable(inside)),
            Check("causal", "a token does not depend on later ones", self.causal),
            Check("neighbours", "a row does not depend on its neighbours", self.neighbours),
            Check("slots", "every loop and layer keeps its keys in a slot of its own", self.slots),
            Check("cached", "a cached run is an uncached one, token for token", self.cached_is_uncached),
            Check("split", "a prompt may be split anywhere", self.split),
            Check(
                "ragged",
                "rows at positions of their own are as each alone",
                lambda: _not_applicable("rows of different lengths are padded in such a model (see padded)"),
            ),
            Check("padded", "a padded batch is as each row alone", self.padded),
            Check("rollback", "tokens that were taken back leave nothing behind", self.rollback),
            Check(
                "mixed-depths", "rows at different loops in one call are as each alone", lambda: _not_applicable(inside)
            ),
            Check(
                "context",
                "positions beyond the context are refused",
                lambda: _not_applicable("a model of transformers leaves counting its tokens to whoever calls it"),
            ),
            Check("generate", "its own generate gives the tokens of recomputing every one", self.generate),
        ]

    def two_runs(self) -> Iterator[Way | Finding]:
        for row, (got, expected) in enumerate(zip(self.plain(self.ids_BT), self.plain(self.ids_BT), strict=True)):
            yield Way("the same call twice", got, expected, row=row)

    def causal(self) -> Iterator[Way | Finding]:
        for end in (1, TOKENS // 2, TOKENS - 1):
            yield Way(f"the first {end} tokens by themselves", self.plain(self.ids_BT[:1, :end])[0], self.alone[0])

    def neighbours(self) -> Iterator[Way | Finding]:
        for row, got in enumerate(self.plain(self.ids_BT)):
            yield Way(f"row {row} in a batch of {TEXTS}", got, self.alone[row], row=row)

    def slots(self) -> Iterator[Way | Finding]:
        """In one pass no slot is written twice."""
        self._needs_memory()
        writes = self.pieces(0, [2]).writes.get(1, [])
        if not writes:
            raise NotApplicableError("what the model keeps in its cache cannot be seen")
        for first, again in shared_slots(writes)[:1]:
            text = f"{again} writes the slot {first.slot[2]} that {first} has written: they share one memory"
            yield Finding(text=text, part=again.part, loop=again.loop, layer=again.slot[2], position=1)

    def cached_is_uncached(self) -> Iterator[Way | Finding]:
        self._needs_memory()
        half, keyed = TOKENS // 2, self._keyed(0)
        ways = {
            "the whole text through a cache": [TOKENS],
            "half of the text, then token by token": [half, *[1] * (TOKENS - half)],
            "token by token": [1] * TOKENS,
        }
        for how, sizes in ways.items():
            yield Way(how, self.pieces(0, sizes), self.alone[0], keyed)

    def split(self) -> Iterator[Way | Finding]:
        self._needs_memory()
        whole, keyed = self.pieces(0, [TOKENS]), self._keyed(0)
        sizes = [[first, TOKENS - first] for first in range(1, TOKENS)]
        for each in (*sizes, [3, 4, TOKENS - 7], [1, TOKENS - 2, 1]):
            how = f"the text in pieces of {', '.join(map(str, each))} tokens"
            yield Way(how, self.pieces(0, each), whole, keyed or whole)

    def padded(self) -> Iterator[Way | Finding]:
        """Rows of different lengths, padded on the left: in one pass, and with a cache over the last tokens."""
        ids_BS, mask_BS = self._left_padded()
        whole = [Record() for _ in self.ids_BT]
        with torch.no_grad():
            logits_BSV = self.model.logits(ids_BS, mask_BS=mask_BS)
        for row, length in enumerate(mask_BS.sum(1).tolist()):
            whole[row].keep(LOGITS, range(length), logits_BSV[row, TOKENS - length :])
            yield Way(f"row {row}, padded by {TOKENS - length} tokens", whole[row], self.alone[row], row=row)
        if self.model.new_memory() is None:
            return
        decoded, memory, start = [Record() for _ in self.ids_BT], self.model.new_memory(), 0
        for ids_BT in ids_BS.split([TOKENS - 3, 1, 1, 1], 1):
            end = start + ids_BT.shape[1]
            self.cached(memory, start, ids_BT, decoded, mask_BS[:, :end])
            start = end
        for row, length in enumerate(mask_BS.sum(1).tolist()):
            how = f"row {row}, padded by {TOKENS - length} tokens, with a cache"
            yield Way(how, decoded[row], self.alone[row], self._keyed(row), row)

    def _left_padded(self) -> tuple[Tensor, Tensor]:
        """Texts of 12, 9 and 6 tokens as rows of 12, and where they are not padding."""
        if not self.model.takes_mask:
            raise NotApplicableError("the model takes no attention_mask")
        ids_BS, mask_BS = torch.zeros_like(self.ids_BT), torch.ones_like(self.ids_BT)
        for row in range(TEXTS):
            ids_BS[row, 3 * row :] = self.ids_BT[row, : TOKENS - 3 * row]
            mask_BS[row, : 3 * row] = 0
        return ids_BS, mask_BS

    def rollback(self) -> Iterator[Way | Finding]:
        self._needs_memory()
        start = TOKENS // 2
        expected = self.pieces(0, [start, 1, TOKENS - start - 1])
        memory, got = self.model.new_memory(), Record()
        self.cached(memory, 0, self.ids_BT[:1, :start], [got])
        self.cached(memory, start, self.wrong_ids_T[None, :3], [Record()])
        if not self.model.take_back(memory, 3):
            raise NotApplicableError("the model's cache takes no tokens back (no crop)")
        self.cached(memory, start, self.ids_BT[:1, start : start + 1], [got])
        self.cached(memory, start + 1, self.ids_BT[:1, start + 1 :], [got])
        yield Way("after 3 tokens were taken back", got, expected)

    @torch.no_grad()
    def generate(self) -> Iterator[Way | Finding]:
        """A padded batch through the model's own way of generating; ties within the tolerance may fall either way."""
        ids_BS, mask_BS = self._left_padded()
        made_BN = self.model.generate(ids_BS, mask_BS, TOKENS)
        if made_BN is None:
            raise NotApplicableError("the model has no generate")
        for row, made in enumerate(made_BN.tolist()):
            text = ids_BS[row][mask_BS[row] == 1].tolist()
            for place, token in enumerate(made):
                logits_V = self.model.logits(torch.tensor([text], device=self.model.device))[0, -1].double()
                best = int(logits_V.argmax())
                gap = float((logits_V[best] - logits_V[token]) / logits_V.square().mean().sqrt())
                if gap > self.tolerance.value:
                    text_so_far = f"row {row} of a padded batch: token {place + 1} of its text is {token}"
                    yield Finding(
                        text=f"{text_so_far}, and {best} is likelier by {gap:.2g} of the logits' rms "
                        f"(tolerance {self.tolerance.value:.1g})",
                        position=len(text),
                        row=row,
                        difference=gap,
                    )
                    return
                if best != token or token in self.model.end_ids:
                    break
                text.append(token)


def _not_applicable(why: str) -> Iterator[Way | Finding]:
    raise NotApplicableError(why)


def check_text_model(model: TextModel, *, seed: int = 0, progress: Progress = lambda what, share: None) -> Conformance:
    """All checks of a language model as a whole, on texts of random ids."""
    checks = BlackBoxChecks(model, seed)
    return Conformance(
        num_loops=None,
        deepest=None,
        tokens=TOKENS,
        dtype=str(checks.alone[0].outputs[LOGITS][0].dtype).removeprefix("torch."),
        tolerance=checks.tolerance,
        checks=tuple(results(checks.all(), checks.tolerance.value, progress)),
    )
