"""Conformance: does a looped model give the same numbers however it is run?

A text may be run whole or in pieces, alone or among others, with or without a cache, to one depth or past it, forth and
back again. A model conforms if none of this changes what its tokens get, beyond rounding. Each check makes one such
claim, runs both ways, and names loop, layer and position where they part. What a model has no part in (no cache, no
rows at different loops) is not applicable, with the reason, and never passes silently.

Everything here knows a model by the protocol alone. `black_box` has the same for models whose loops are inside.

Shape legend: B rows of a call, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from loopscope.errors import ConfigError, ProtocolError
from loopscope.inference.cache import CacheView, KVCache
from loopscope.inference.comparison import Blame, Record, Stage, Tolerance, blame, compare, nudged, shared_slots
from loopscope.inference.decoding import device_of
from loopscope.protocol import Cached, LoopedModel, LoopState, MixedDepths, Slot

TEXTS, TOKENS, FEWEST_TOKENS = 3, 12, 8
"""Texts of random ids that are run, their length, and the length below which ragged rows would have no room."""
BEYOND = 2
"""Loops beyond the trained depth that are run where the model allows it."""
LONG_CONTEXT = 4096
"""Contexts up to this length are filled to see that the next token is refused; longer ones only by an embedding."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that differs and must not."""

    text: str
    part: str | None = None
    """prelude, core or coda; embedding, positions, opening (of a loop) or readout; a module's name; None: unknown."""
    loop: int | None = None
    layer: int | None = None
    """The last whose keys are right: what is wrong lies between them and those of the next."""
    position: int | None = None
    row: int | None = None
    """Of the batch, where there was one."""
    difference: float | None = None
    """rms of the difference over rms of what is expected; None where it is not a matter of size."""
    raised: str | None = None
    """The error that the model raised where it should have run."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What came of one check."""

    name: str
    claim: str
    findings: tuple[Finding, ...] = ()
    reason: str | None = None
    """Why it is not applicable."""
    ways: int = 0
    """Pairs of runs that were compared."""
    tokens: int = 0
    largest: float = 0.0
    """Largest difference of any output, relative to its size."""
    choices: int = 0
    """Logits compared: tokens times exits."""
    flips: int = 0
    """Of these, how many would choose another token greedily."""

    @property
    def status(self) -> str:
        """passed, found or not applicable."""
        return "found" if self.findings else "passed" if self.reason is None else "not applicable"


@dataclass(frozen=True, kw_only=True)
class Conformance:
    """What came of all checks."""

    num_loops: int | None
    """The trained depth; None where the loops are inside."""
    deepest: int | None
    """Loops that were run."""
    tokens: int
    """Of each text."""
    dtype: str
    tolerance: Tolerance
    checks: tuple[CheckResult, ...]
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> list[Finding]:
        """Of all checks."""
        return [finding for check in self.checks for finding in check.findings]

    def check(self, name: str) -> CheckResult:
        """The check of that name."""
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> dict[str, Any]:
        """As `loopscope check --json` prints it."""
        return {
            "num_loops": self.num_loops,
            "deepest": self.deepest,
            "tokens": self.tokens,
            "dtype": self.dtype,
            "tolerance": self.tolerance.value,
            "tolerance_reason": self.tolerance.why,
            "notes": list(self.notes),
            "checks": [
                {**vars(each), "status": each.status, "findings": [*map(vars, each.findings)]} for each in self.checks
            ],
        }


# --- one check -------------------------------------------------------------------------------------------------------


class NotApplicableError(Exception):
    """Raised by a check that the model gives no occasion for."""


@dataclass(frozen=True)
class Way:
    """A text run in some way, and what it should have given."""

    how: str
    got: Record
    expected: Record
    keyed: Record | None = None
    """A right run with keys, to name the layer; `expected` itself where it has keys."""
    row: int | None = None


@dataclass(frozen=True)
class Check:
    """A claim, and the pairs of runs that prove it or do not."""

    name: str
    claim: str
    run: Callable[[], Iterator[Way | Finding]]


def carry_out(check: Check, tolerance: float) -> CheckResult:
    """Compare all ways of a check. Of those that differ, the first is named, with how many others do."""
    findings, failed = list[Finding](), 0
    ways = tokens = choices = flips = 0
    largest = 0.0
    try:
        for each in check.run():
            if isinstance(each, Finding):
                findings.append(each)
                continue
            compared = compare(each.got, each.expected, tolerance)
            ways, tokens = ways + 1, tokens + compared.tokens
            choices, flips = choices + compared.choices, flips + compared.flips
            largest = max(largest, compared.largest)
            if compared.first is not None:
                failed += 1
                if failed == 1:
                    keyed = each.keyed if each.keyed is not None else each.expected
                    where = blame(each.got, keyed, compared.first, tolerance)
                    first, row = compared.first, each.row
                    text = (
                        f"{each.how}: position {first.position}, {first.stage}: off by {first.size:.2g} of its rms "
                        f"(tolerance {tolerance:.1g}). {where.how[0].upper()}{where.how[1:]}. {compared.differing} of "
                        f"{compared.tokens} tokens differ; {compared.flips} greedy choices change"
                    )
                    findings.append(_finding(text, where, first.position, row, first.size))
    except NotApplicableError as why:
        return CheckResult(name=check.name, claim=check.claim, reason=str(why))
    except Exception as error:  # whatever somebody's model raises: it could not do what the check asks
        raised = _in_a_line(error)
        findings.append(Finding(text=f"it failed{_place_of(error)}: {raised}", raised=raised))
    if failed > 1:
        findings = [_more(each, failed - 1, ways) if each.difference is not None else each for each in findings]
    return CheckResult(
        name=check.name,
        claim=check.claim,
        findings=tuple(findings),
        ways=ways,
        tokens=tokens,
        largest=largest,
        choices=choices,
        flips=flips,
    )


def _finding(text: str, where: Blame, position: int, row: int | None, size: float) -> Finding:
    return Finding(
        text=text, part=where.part, loop=where.loop, layer=where.layer, position=position, row=row, difference=size
    )


def _more(finding: Finding, others: int, ways: int) -> Finding:
    return Finding(**{**vars(finding), "text": f"{finding.text}. So do {others} other ways of {ways}"})


def cannot_run(tokens: int, error: Exception) -> ProtocolError:
    """The user's mistake, where there is nothing to compare: a model that fails on a plain text."""
    return ProtocolError(f"the model cannot run a text of {tokens} tokens{_place_of(error)}: {_in_a_line(error)}")


def _in_a_line(error: BaseException) -> str:
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def _place_of(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f" at {frame.filename}:{frame.lineno}"


# --- running a model -------------------------------------------------------------------------------------------------


class Watched:
    """A view of the cache that keeps what is written through it; implements `protocol.Cache`."""

    def __init__(self, view: CacheView, records: Sequence[Record]) -> None:
        self.view, self.records = view, records
        self.loops: tuple[int, ...] = ()
        """That each row of the call is at, in truth."""

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


class LoopedChecks:
    """The checks of a LoopedModel."""

    def __init__(self, model: LoopedModel, vocab_size: int, context: int | None, seed: int = 0) -> None:
        if context is not None and context < FEWEST_TOKENS:
            raise ConfigError(f"a context of {context} tokens is too short to be checked; {FEWEST_TOKENS} is the least")
        self.model, self.context = model, context
        tokens = min(TOKENS, context or TOKENS)
        generator = torch.Generator().manual_seed(seed)
        self.ids_BT = torch.randint(vocab_size, (TEXTS, tokens), generator=generator).to(device_of(model))
        self.wrong_ids_T = torch.randint(vocab_size, (tokens,), generator=generator).to(self.ids_BT)
        self.notes: list[str] = []
        self.deepest = model.num_loops
        self._find_deepest()
        self.alone = [self.plain(ids_T[None])[0] for ids_T in self.ids_BT]
        """Each text by itself, whole, without a cache: what every other way should give."""
        self.tolerance = self._find_tolerance()

    def _find_deepest(self) -> None:
        """Run the trained depth, which must work, and then what is beyond it, which may be refused."""
        try:
            state = self.plain(self.ids_BT[:1])[0]
        except Exception as error:
            raise cannot_run(self.ids_BT.shape[1], error) from error
        if any(not values.isfinite().all() for stage in state.outputs.values() for values in stage.values()):
            self.notes.append("the model's own numbers are not finite: nothing that is compared means much")
        try:
            self.deepest += BEYOND
            self.plain(self.ids_BT[:1])
        except Exception as error:
            self.deepest = self.model.num_loops
            self.notes.append(f"loops beyond the trained {self.deepest} are refused ({_in_a_line(error)})")

    @torch.no_grad()
    def _find_tolerance(self) -> Tolerance:
        """From the dtype of the logits, the layers run, and what a rounding of the state before every loop grows to."""
        model, records, positions = self.model, [Record()], [range(self.ids_BT.shape[1])]
        state = model.embed(self.ids_BT[:1])
        for k in range(1, self.deepest + 1):
            state = model.loop(state.with_h(nudged(state.h_BTD)), k)
            _keep(records, positions, Stage(k, "state"), state.h_BTD)
            _keep(records, positions, Stage(k, "logits"), model.readout(state, k))
        grown = compare(records[0], self.alone[0], 0.0).largest
        dtype = next(iter(self.alone[0].outputs[Stage(1, "logits")].values())).dtype
        layers = self.deepest
        if Cached.of(self.model) is not None:
            with suppress(Exception):  # a check will tell
                layers = len(self.pieces(0, [1]).writes.get(0, ())) or layers
        return Tolerance.of(dtype, layers, grown)

    # --- ways of running ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def plain(self, ids_BT: Tensor, deepest: int | None = None) -> list[Record]:
        """Rows of equal length without a cache, every exit read as soon as it is there."""
        records = [Record() for _ in ids_BT]
        model, positions = self.model, [range(ids_BT.shape[1])] * len(ids_BT)
        state = model.embed(ids_BT)
        _keep_state(records, positions, state, 0)
        for k in range(1, (deepest or self.deepest) + 1):
            state = model.loop(state, k)
            _keep_state(records, positions, state, k)
            _keep(records, positions, Stage(k, "logits"), model.readout(state, k))
        return records

    @torch.no_grad()
    def cached(self, view: CacheView, ids_BT: Tensor, records: Sequence[Record], deepest: int | None = None) -> None:
        """Some tokens against earlier ones, every exit read."""
        model, watched = Cached.needed(self.model, "a cached run"), Watched(view, records)
        positions = view.positions(ids_BT.shape[1]).expand(ids_BT.shape).tolist()
        watched.loops = (0,) * len(records)
        state = model.embed(ids_BT, watched)
        _keep_state(records, positions, state, 0)
        for k in range(1, (deepest or self.deepest) + 1):
            watched.loops = (k,) * len(records)
            state = model.loop(state, k, watched)
            _keep_state(records, positions, state, k)
            _keep(records, positions, Stage(k, "logits"), model.readout(state, k, watched))

    def new_cache(self, rows: int = 1) -> KVCache:
        """An exact one."""
        return KVCache(rows, num_loops=self.deepest)

    def pieces(self, text: int, sizes: Sequence[int]) -> Record:
        """One text alone through a cache, in pieces of these sizes."""
        record, cache = Record(), self.new_cache()
        for ids_T in self.ids_BT[text][: sum(sizes)].split(list(sizes)):
            self.cached(cache.append(len(ids_T)), ids_T[None], [record])
        return record

    @cached_property
    def keyed(self) -> Record | None:
        """A cached run of the first text whose outputs are those without a cache: its keys are the right ones."""
        tokens = self.ids_BT.shape[1]
        for sizes in ([tokens], [1] * tokens):
            try:
                record = self.pieces(0, sizes)
            except Exception:  # noqa: S112 – the check of that way tells
                continue
            if compare(record, self.alone[0], self.tolerance.value).first is None:
                return record
        return None

    def _needs_cache(self) -> None:
        if Cached.of(self.model) is None:
            raise NotApplicableError("the model takes no cache (loopscope.Cached)")

    # --- the checks --------------------------------------------------------------------------------------------------

    def all(self) -> list[Check]:
        """In an order in which a fault is first named by the check that says most about it."""
        return [
            Check("two-runs", "two runs of the same text agree", self.two_runs),
            Check("depth", "depth n of a deeper run is a run of n loops", self.depth),
            Check("causal", "a token does not depend on later ones", self.causal),
            Check("neighbours", "a row does not depend on its neighbours", self.neighbours),
            Check("slots", "every loop and layer keeps its keys in a slot of its own", self.slots),
            Check(
                "cached", "a cached run is an uncached one, token for token, at every depth", self.cached_is_uncached
            ),
            Check("split", "a prompt may be split anywhere", self.split),
            Check("ragged", "rows at positions of their own are as each alone", self.ragged),
            Check("padded", "a padded batch is as each row alone", self.padded),
            Check("rollback", "tokens that were taken back leave nothing behind", self.rollback),
            Check("mixed-depths", "rows at different loops in one call are as each alone", self.mixed_depths),
            Check("context", "positions beyond the context are refused", self.beyond_context),
        ]

    def two_runs(self) -> Iterator[Way | Finding]:
        """At the trained depth, before anything else has been run twice."""
        once = self.plain(self.ids_BT, self.model.num_loops)
        again = self.plain(self.ids_BT, self.model.num_loops)
        for row, (got, expected) in enumerate(zip(again, once, strict=True)):
            yield Way("the same call twice", got, expected, row=row)

    def depth(self) -> Iterator[Way | Finding]:
        """Exits of one deep run, read at its end, against runs that stop there; with a cache, after a deeper prefix."""
        ids_BT, trained = self.ids_BT[:1], self.model.num_loops
        positions = [range(ids_BT.shape[1])]
        deep = Record()
        with torch.no_grad():
            states = [self.model.embed(ids_BT)]
            for k in range(1, self.deepest + 1):
                states.append(self.model.loop(states[-1], k))
            for k, state in enumerate(states[1:], 1):
                _keep_state([deep], positions, state, k)
                _keep([deep], positions, Stage(k, "logits"), self.model.readout(state, k))
        for n in range(1, self.deepest + 1):
            how = f"a run of {n} loops after one of {self.deepest}"
            yield Way(how, self.plain(ids_BT, n)[0], deep)
        if Cached.of(self.model) is None:
            return
        last = ids_BT.shape[1] - 1
        cache, prefix = self.new_cache(), Record()
        self.cached(cache.append(last), ids_BT[:, :last], [prefix])
        expected = self.pieces(0, [last, 1])
        for n in sorted({1, trained - 1, trained, self.deepest} - {0}):
            got = Record()
            self.cached(cache.append(1), ids_BT[:, last:], [got], n)
            cache.truncate(last)
            yield Way(f"a token at {n} loops after a prefix at {self.deepest}", got, expected)

    def causal(self) -> Iterator[Way | Finding]:
        tokens = self.ids_BT.shape[1]
        for end in (1, tokens // 2, tokens - 1):
            yield Way(f"the first {end} tokens by themselves", self.plain(self.ids_BT[:1, :end])[0], self.alone[0])

    def neighbours(self) -> Iterator[Way | Finding]:
        for row, got in enumerate(self.plain(self.ids_BT)):
            yield Way(f"row {row} in a batch of {TEXTS}", got, self.alone[row], row=row)
        flipped = self.plain(self.ids_BT.flip(0))[-1]
        yield Way(f"row 0 as the last of a batch of {TEXTS}", flipped, self.alone[0], row=TEXTS - 1)
        if Cached.of(self.model) is None:
            return
        half, tokens = self.ids_BT.shape[1] // 2, self.ids_BT.shape[1]
        cache, records = self.new_cache(TEXTS), [Record() for _ in range(TEXTS)]
        for ids_BT in self.ids_BT.split([half, *[1] * (tokens - half)], 1):
            self.cached(cache.append(ids_BT.shape[1]), ids_BT, records)
        for row, got in enumerate(records):
            expected = self.pieces(row, [half, *[1] * (tokens - half)])
            yield Way(f"row {row} in a cached batch of {TEXTS}", got, expected, row=row)

    def slots(self) -> Iterator[Way | Finding]:
        """In one pass over a token no slot is written twice, and every loop writes the slots of the same layers."""
        self._needs_cache()
        writes = self.pieces(0, [2]).writes.get(1, [])
        if not writes:
            yield Finding(text="no slot is written: the model takes a cache and keeps nothing in it", position=1)
        twice = shared_slots(writes)
        if twice:
            first, again = twice[0]
            others = f"; so do {len(twice) - 1} other writes" if len(twice) > 1 else ""
            text = f"{again} writes the slot {first.slot} that {first} has written: they share one memory{others}"
            yield Finding(text=text, part=again.part, loop=again.loop, layer=again.slot[2], position=1)
        layers = {k: {each.slot[2] for each in writes if each.loop == k and each.part == "core"} for k in self._loops()}
        every = set().union(*layers.values())
        for k, own in layers.items():
            if own != every:
                layer = min(every - own)
                text = f"core layer {layer} keeps no keys in loop {k}, and does in other loops"
                yield Finding(text=text, part="core", loop=k, layer=layer, position=1)
                return

    def _loops(self) -> range:
        return range(1, self.deepest + 1)

    def cached_is_uncached(self) -> Iterator[Way | Finding]:
        self._needs_cache()
        tokens = self.ids_BT.shape[1]
        ways = {
            "the whole text through a cache": [tokens],
            "half of the text, then token by token": [tokens // 2, *[1] * (tokens - tokens // 2)],
            "token by token": [1] * tokens,
        }
        for how, sizes in ways.items():
            yield Way(how, self.pieces(0, sizes), self.alone[0], self.keyed)

    def split(self) -> Iterator[Way | Finding]:
        """In two at every place, and in three; against the whole text through a cache."""
        self._needs_cache()
        tokens = self.ids_BT.shape[1]
        whole = self.pieces(0, [tokens])
        sizes = [[first, tokens - first] for first in range(1, tokens)]
        for each in (*sizes, [3, 4, tokens - 7], [1, tokens - 2, 1]):
            how = f"the text in pieces of {', '.join(map(str, each))} tokens"
            yield Way(how, self.pieces(0, each), whole, self.keyed or whole)

    def ragged(self) -> Iterator[Way | Finding]:
        """Rows of different lengths go on together, one token and then two at a time, in another order, over rubbish.

        What lies beyond a row's length holds the keys of tokens that were taken back: a mask must hide them.
        """
        self._needs_cache()
        tokens = self.ids_BT.shape[1]
        lengths = [2, tokens - 5, 1]
        cache, records = self.new_cache(TEXTS), [Record() for _ in range(TEXTS)]
        self.cached(cache.append(tokens), self.wrong_ids_T.expand(TEXTS, -1), [Record() for _ in range(TEXTS)])
        for row, length in enumerate(lengths):
            cache.truncate(0, row)
            self.cached(cache.append(length, [row]), self.ids_BT[row : row + 1, :length], [records[row]])
        for size, rows in ((1, [0, 1, 2]), (2, [2, 0, 1]), (2, [0, 1, 2])):
            starts = [cache.lengths[row] for row in rows]
            ids_BT = torch.stack(
                [self.ids_BT[row, start : start + size] for row, start in zip(rows, starts, strict=True)]
            )
            self.cached(cache.append(size, rows), ids_BT, [records[row] for row in rows])
        for row, got in enumerate(records):
            expected = self.pieces(row, [lengths[row], 1, 2, 2])
            yield Way(
                f"row {row}, from position {lengths[row]} on, beside rows at other positions", got, expected, row=row
            )

    def padded(self) -> Iterator[Way | Finding]:
        raise NotApplicableError(
            "the protocol has no padding: rows of different lengths run at positions of their own (ragged)"
        )
        yield

    def rollback(self) -> Iterator[Way | Finding]:
        """Wrong tokens are run, to all loops or to the first only, and taken back; then the right ones."""
        self._needs_cache()
        tokens = self.ids_BT.shape[1]
        start = tokens // 2
        sizes = [start, 1, tokens - start - 1]
        expected = self.pieces(0, sizes)
        for count, deepest in ((3, self.deepest), (1, self.deepest), (2, 1)):
            cache, got = self.new_cache(), Record()
            for ids_T in self.ids_BT[0].split(sizes):
                self.cached(cache.append(len(ids_T)), ids_T[None], [got])
                if cache.lengths[0] + count > tokens:
                    continue
                before = cache.lengths[0]
                self.cached(cache.append(count), self.wrong_ids_T[None, :count], [Record()], deepest)
                cache.truncate(before)
            yield Way(f"after {count} tokens at {deepest} loops were taken back", got, expected)

    def mixed_depths(self) -> Iterator[Way | Finding]:
        """Lanes that start one call after another, so that each is at another loop: of different rows, and of one."""
        self._needs_cache()
        if MixedDepths.of(self.model) is None:
            raise NotApplicableError("the model takes one loop for all rows of a call (no loopscope.MixedDepths)")
        lengths = [4, 2, 5]
        cache, records = self.new_cache(TEXTS), [Record() for _ in range(TEXTS)]
        for row, length in enumerate(lengths):
            self.cached(cache.append(length, [row]), self.ids_BT[row : row + 1, :length], [records[row]])
            cache.append(1, [row])
        self._staggered(cache, [0, 1, 2], lengths, records)
        for row, got in enumerate(records):
            yield Way(f"row {row}, beside rows at other loops", got, self.pieces(row, [lengths[row], 1]), row=row)
        cache, record = self.new_cache(), Record()
        self.cached(cache.append(4), self.ids_BT[:1, :4], [record])
        cache.append(TEXTS)
        self._staggered(cache, [0] * TEXTS, [4, 5, 6], [record] * TEXTS)
        yield Way("three successive tokens, each a loop behind the one before", record, self.pieces(0, [4, 1, 1, 1]))

    @torch.no_grad()
    def _staggered(self, cache: KVCache, rows: list[int], starts: list[int], records: list[Record]) -> None:
        """One new token per lane; lane i runs loop k in call k + i."""
        model = MixedDepths.needed(self.model, "rows at different loops")
        states: dict[int, LoopState] = {}
        for call in range(1, self.deepest + len(rows)):
            lanes = [lane for lane in range(len(rows)) if 1 <= call - lane <= self.deepest]
            for lane in lanes:
                if call - lane == 1:
                    watched = Watched(cache.at([rows[lane]], [starts[lane]]), [records[lane]])
                    watched.loops = (0,)
                    ids_BT = self.ids_BT[rows[lane], starts[lane]].view(1, 1)
                    states[lane] = model.embed(ids_BT, watched)
            loops = tuple(call - lane for lane in lanes)
            view = cache.at([rows[lane] for lane in lanes], [starts[lane] for lane in lanes])
            watched = Watched(view, [records[lane] for lane in lanes])
            watched.loops = loops
            joined = model.loop(LoopState.joined([states[lane] for lane in lanes], 0), loops, watched)
            for place, lane in enumerate(lanes):
                states[lane] = joined.take(torch.tensor([place], device=joined.h_BTD.device))
                single, record, k = (
                    Watched(cache.at([rows[lane]], [starts[lane]]), [records[lane]]),
                    [records[lane]],
                    loops[place],
                )
                single.loops = (k,)
                _keep_state(record, [[starts[lane]]], states[lane], k)
                _keep(record, [[starts[lane]]], Stage(k, "logits"), model.readout(states[lane], k, single))

    @torch.no_grad()
    def beyond_context(self) -> Iterator[Way | Finding]:
        """The last position of the context works, and the next raises an error: any, but an error."""
        if self.context is None:
            raise NotApplicableError("the model does not say how many tokens it takes")
        context, first = self.context, self.ids_BT[:1, :1]
        if context <= LONG_CONTEXT:
            self.model.embed(first.expand(1, context))
            if _runs(lambda: self.model.loop(self.model.embed(first.expand(1, context + 1)), 1)):
                text = f"a text of {context + 1} tokens is taken without a word, and the context has {context}"
                yield Finding(text=text, part="embedding", loop=0, position=context)
        model = Cached.of(self.model)
        if model is None:
            return

        def one_more(position: int) -> None:
            cache = self.new_cache()
            cache.lengths[0] = position
            view = cache.append(1)
            state = model.embed(first, view)
            if context <= LONG_CONTEXT:
                model.loop(state, 1, view)

        one_more(context - 1)
        if _runs(lambda: one_more(context)):
            text = f"a token at position {context} of a cache is taken without a word, and the context has {context}"
            yield Finding(text=text, part="embedding", loop=0, position=context)


def _runs(action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception:
        return False
    return True


def _keep_state(records: Sequence[Record], positions: Sequence[Sequence[int]], state: LoopState, k: int) -> None:
    _keep(records, positions, Stage(k, "state"), state.h_BTD)
    for name, tensor in state.carried.items():
        if tensor.dim() >= 2 and tensor.shape[:2] == state.h_BTD.shape[:2]:
            _keep(records, positions, Stage(k, f"carried {name}"), tensor)


def _keep(records: Sequence[Record], positions: Sequence[Sequence[int]], stage: Stage, values_BTD: Tensor) -> None:
    for record, own, values_TD in zip(records, positions, values_BTD, strict=True):
        record.keep(stage, own, values_TD.flatten(1))


def check_looped(
    model: LoopedModel,
    vocab_size: int,
    context: int | None = None,
    *,
    seed: int = 0,
    progress: Progress = lambda what, share: None,
) -> Conformance:
    """All checks of a LoopedModel, on texts of random ids."""
    checks = LoopedChecks(model, vocab_size, context, seed)
    dtype = str(next(iter(checks.alone[0].outputs[Stage(1, "logits")].values())).dtype).removeprefix("torch.")
    return Conformance(
        num_loops=model.num_loops,
        deepest=checks.deepest,
        tokens=checks.ids_BT.shape[1],
        dtype=dtype,
        tolerance=checks.tolerance,
        checks=tuple(results(checks.all(), checks.tolerance.value, progress)),
        notes=tuple(checks.notes),
    )


def results(checks: Sequence[Check], tolerance: float, progress: Progress) -> Iterator[CheckResult]:
    """Of each check; nothing can be compared in a model whose two runs do not agree."""
    unsteady = False
    for number, check in enumerate(checks):
        progress(check.claim, number / len(checks))
        if unsteady:
            yield CheckResult(name=check.name, claim=check.claim, reason="two runs of the same text differ already")
            continue
        result = carry_out(check, tolerance)
        unsteady = check.name == "two-runs" and result.status == "found"
        yield result
