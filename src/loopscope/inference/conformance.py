"""Conformance: does a looped model give the same numbers however it is run?

A text may be run whole or in pieces, alone or among others, with or without a cache, to one depth or past it, forth and
back again. A model conforms if none of this changes what its tokens get, beyond rounding. Each check makes one such
claim, runs both ways, and names loop, layer and position where they part. What a model has no part in (no cache, no
rows at different loops) is not applicable, with the reason, and never passes silently. A new check is a function under
`claims`, and nothing else anywhere.

Everything here knows a model as a `subjects.Subject`: a LoopedModel, or a language model whose loops are inside.

Shape legend: B rows of a call, T tokens, N generated tokens, S all tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from loopscope.errors import in_a_line
from loopscope.inference.cache import KVCache
from loopscope.inference.comparison import Computed, Stage, blame, compare, shared_slots
from loopscope.inference.subjects import LOGITS as WHOLE_LOGITS
from loopscope.inference.subjects import (
    TEXTS,
    TOKENS,
    LoopedSubject,
    Subject,
    Watched,
    WholeSession,
    WholeSubject,
    keep,
    keep_state,
    place_of,
)
from loopscope.protocol import Cached, LoopState, MixedDepths
from loopscope.results.check import CheckFinding, CheckResult, Conformance

LONG_CONTEXT = 4096
"""Contexts up to this length are filled to see that the next token is refused; longer ones only by an embedding."""

Progress = Callable[[str, float], None]


# --- one check -------------------------------------------------------------------------------------------------------


class NotApplicableError(Exception):
    """Raised by a check that the model gives no occasion for."""


@dataclass(frozen=True)
class Way:
    """A text run in some way, and what it should have given."""

    how: str
    got: Computed
    expected: Computed
    keyed: Computed | None = None
    """A right run with keys, to name the layer; `expected` itself where it has keys."""
    row: int | None = None


Ways = Iterator[Way | CheckFinding]


@dataclass(frozen=True)
class Question:
    """A claim, and the pairs of runs that prove it or do not."""

    name: str
    claim: str
    needs: tuple[str, ...]
    """What a subject may lack: loops, cache, own positions, mixed depths, padding or context."""
    of_whole_models: bool
    """Whether it is asked of models whose loops are inside alone."""
    run: Callable[[Any], Ways]


CHECKS: dict[str, Question] = {}
"""In an order in which a fault is first named by the check that says most about it."""


Run = TypeVar("Run", bound=Callable[..., Ways])


def claims(name: str, claim: str, *needs: str, of_whole_models: bool = False) -> Callable[[Run], Run]:
    """A check of that name."""

    def register(run: Run) -> Run:
        CHECKS[name] = Question(name, claim, needs, of_whole_models, run)
        return run

    return register


def carry_out(check: Question, subject: Subject) -> CheckResult:
    """Compare all ways of a check. Of those that differ, the first is named, with how many others do."""
    lacking = next((subject.lacks[need] for need in check.needs if need in subject.lacks), None)
    if lacking is not None:
        return _not_applicable(check, lacking)
    tolerance, findings, failed = subject.tolerance.value, list[CheckFinding](), 0
    ways = tokens = choices = flips = 0
    largest = 0.0
    try:
        for each in check.run(subject):
            if isinstance(each, CheckFinding):
                findings.append(each)
                continue
            compared = compare(each.got, each.expected, tolerance)
            ways, tokens = ways + 1, tokens + compared.tokens
            choices, flips = choices + compared.choices, flips + compared.flips
            largest = max(largest, compared.largest)
            if (first := compared.first) is None:
                continue
            failed += 1
            if failed == 1:
                where = blame(each.got, each.keyed or each.expected, first, tolerance)
                findings.append(
                    CheckFinding(
                        text=f"{each.how}: position {first.position}, {first.stage}: off by {first.size:.2g} of its "
                        f"rms (tolerance {tolerance:.1g}). {where.how[0].upper()}{where.how[1:]}. "
                        f"{compared.differing} of {compared.tokens} tokens differ; "
                        f"{compared.flips} greedy choices change",
                        part=where.part,
                        loop=where.loop,
                        layer=where.layer,
                        position=first.position,
                        row=each.row,
                        difference=first.size,
                    )
                )
    except NotApplicableError as why:
        return _not_applicable(check, str(why))
    except Exception as error:  # whatever somebody's model raises: it could not do what the check asks
        raised = in_a_line(error)
        findings.append(CheckFinding(text=f"it failed{place_of(error)}: {raised}", raised=raised))
    if failed > 1:
        others = f". So do {failed - 1} other ways of {ways}"
        findings = [each if each.difference is None else replace(each, text=each.text + others) for each in findings]
    return CheckResult(
        name=check.name,
        claim=check.claim,
        status="found" if findings else "passed",
        findings=tuple(findings),
        ways=ways,
        tokens=tokens,
        largest=largest,
        choices=choices,
        flips=flips,
    )


def _not_applicable(check: Question, why: str) -> CheckResult:
    return CheckResult(name=check.name, claim=check.claim, status="not applicable", reason=why)


# --- the checks ------------------------------------------------------------------------------------------------------


@claims("two-runs", "two runs of the same text agree")
def two_runs(subject: Subject) -> Ways:
    """At the trained depth, before anything else has been run twice."""
    once, again = (subject.plain(subject.ids_BT, subject.num_loops) for _ in range(2))
    for row, (got, expected) in enumerate(zip(again, once, strict=True)):
        yield Way("the same call twice", got, expected, row=row)


@claims("depth", "depth n of a deeper run is a run of n loops", "loops")
def depth(subject: LoopedSubject) -> Ways:
    """Exits of one deep run, read at its end, against runs that stop there; with a cache, after a deeper prefix."""
    model, ids_BT, trained, deepest = subject.model, subject.ids_BT[:1], subject.num_loops, subject.deepest
    positions, deep = [range(ids_BT.shape[1])], Computed()
    with torch.no_grad():
        states = [model.embed(ids_BT)]
        for k in range(1, deepest + 1):
            states.append(model.loop(states[-1], k))
        for k, state in enumerate(states[1:], 1):
            keep_state([deep], positions, state, k)
            keep([deep], positions, Stage(k, "logits"), model.readout(state, k))
    for n in range(1, deepest + 1):
        yield Way(f"a run of {n} loops after one of {deepest}", subject.plain(ids_BT, n)[0], deep)
    if "cache" in subject.lacks:
        return
    last, session = subject.tokens - 1, subject.session()
    session.run(ids_BT[:, :last], [Computed()])
    expected = subject.pieces(0, [last, 1])
    for n in sorted({1, trained - 1, trained, deepest} - {0}):
        got = Computed()
        session.run(ids_BT[:, last:], [got], n)
        session.take_back(1)
        yield Way(f"a token at {n} loops after a prefix at {deepest}", got, expected)


@claims("causal", "a token does not depend on later ones")
def causal(subject: Subject) -> Ways:
    """Beginnings by themselves, against the whole."""
    for end in (1, subject.tokens // 2, subject.tokens - 1):
        how = f"the first {end} tokens by themselves"
        yield Way(how, subject.plain(subject.ids_BT[:1, :end])[0], subject.alone[0])


@claims("neighbours", "a row does not depend on its neighbours")
def neighbours(subject: Subject) -> Ways:
    """Texts in one batch, in either order, and through one cache."""
    for row, got in enumerate(subject.plain(subject.ids_BT)):
        yield Way(f"row {row} in a batch of {TEXTS}", got, subject.alone[row], row=row)
    if not subject.is_looped:
        return
    flipped = subject.plain(subject.ids_BT.flip(0))[-1]
    yield Way(f"row 0 as the last of a batch of {TEXTS}", flipped, subject.alone[0], row=TEXTS - 1)
    if "cache" in subject.lacks:
        return
    half, tokens = subject.tokens // 2, subject.tokens
    sizes, session, records = [half, *[1] * (tokens - half)], subject.session(TEXTS), [Computed() for _ in range(TEXTS)]
    for ids_BT in subject.ids_BT.split(sizes, 1):
        session.run(ids_BT, records)
    for row, got in enumerate(records):
        yield Way(f"row {row} in a cached batch of {TEXTS}", got, subject.pieces(row, sizes), row=row)


@claims("slots", "every loop and layer keeps its keys in a slot of its own", "cache")
def slots(subject: Subject) -> Ways:
    """In one pass over a token no slot is written twice, and every loop writes the slots of the same layers."""
    writes = subject.pieces(0, [2]).writes.get(1, [])
    if not writes and not subject.is_looped:
        raise NotApplicableError("what the model keeps in its cache cannot be seen")
    if not writes:
        yield CheckFinding(text="no slot is written: the model takes a cache and keeps nothing in it", position=1)
    twice = shared_slots(writes)
    if twice:
        first, again = twice[0]
        slot = first.slot if subject.is_looped else first.slot[2]
        others = f"; so do {len(twice) - 1} other writes" if len(twice) > 1 else ""
        text = f"{again} writes the slot {slot} that {first} has written: they share one memory{others}"
        yield CheckFinding(text=text, part=again.part, loop=again.loop, layer=again.slot[2], position=1)
    loops = range(1, (subject.deepest or 0) + 1)
    layers = {k: {each.slot[2] for each in writes if each.loop == k and each.part == "core"} for k in loops}
    every = set().union(*layers.values())
    for k, own in layers.items():
        if own != every:
            layer = min(every - own)
            text = f"core layer {layer} keeps no keys in loop {k}, and does in other loops"
            yield CheckFinding(text=text, part="core", loop=k, layer=layer, position=1)
            return


@claims("cached", "a cached run is an uncached one, token for token, at every depth", "cache")
def cached_is_uncached(subject: Subject) -> Ways:
    """Whole, in two ways of cutting, and token by token."""
    tokens, half = subject.tokens, subject.tokens // 2
    ways = {
        "the whole text through a cache": [tokens],
        "half of the text, then token by token": [half, *[1] * (tokens - half)],
        "token by token": [1] * tokens,
    }
    for how, sizes in ways.items():
        yield Way(how, subject.pieces(0, sizes), subject.alone[0], subject.keyed())


@claims("split", "a prompt may be split anywhere", "cache")
def split(subject: Subject) -> Ways:
    """In two at every place, and in three; against the whole text through a cache."""
    tokens = subject.tokens
    whole = subject.pieces(0, [tokens])
    sizes = [[first, tokens - first] for first in range(1, tokens)]
    for each in (*sizes, [3, 4, tokens - 7], [1, tokens - 2, 1]):
        how = f"the text in pieces of {', '.join(map(str, each))} tokens"
        yield Way(how, subject.pieces(0, each), whole, subject.keyed() or whole)


@claims("ragged", "rows at positions of their own are as each alone", "own positions")
def ragged(subject: LoopedSubject) -> Ways:
    """Rows of different lengths go on together, one token and then two at a time, in another order, over rubbish.

    What lies beyond a row's length holds the keys of tokens that were taken back: a mask must hide them.
    """
    tokens, texts = subject.tokens, subject.ids_BT
    lengths = [2, tokens - 5, 1]
    cache, records = subject.new_cache(TEXTS), [Computed() for _ in range(TEXTS)]
    rubbish_BT = subject.wrong_ids_T.expand(TEXTS, -1)
    subject.cached(cache.append(tokens), rubbish_BT, [Computed() for _ in range(TEXTS)])
    for row, length in enumerate(lengths):
        cache.truncate(0, row)
        subject.cached(cache.append(length, [row]), texts[row : row + 1, :length], [records[row]])
    for size, rows in ((1, [0, 1, 2]), (2, [2, 0, 1]), (2, [0, 1, 2])):
        starts = [cache.lengths[row] for row in rows]
        ids_BT = torch.stack([texts[row, start : start + size] for row, start in zip(rows, starts, strict=True)])
        subject.cached(cache.append(size, rows), ids_BT, [records[row] for row in rows])
    for row, got in enumerate(records):
        how = f"row {row}, from position {lengths[row]} on, beside rows at other positions"
        yield Way(how, got, subject.pieces(row, [lengths[row], 1, 2, 2]), row=row)


@claims("padded", "a padded batch is as each row alone", "padding")
def padded(subject: WholeSubject) -> Ways:
    """Rows of different lengths, padded on the left: in one pass, and with a cache over the last tokens."""
    ids_BS, mask_BS = subject.left_padded()
    whole = [Computed() for _ in subject.ids_BT]
    with torch.no_grad():
        logits_BSV = subject.model.logits(ids_BS, mask_BS=mask_BS)
    for row, length in enumerate(mask_BS.sum(1).tolist()):
        whole[row].keep(WHOLE_LOGITS, range(length), logits_BSV[row, TOKENS - length :])
        yield Way(f"row {row}, padded by {TOKENS - length} tokens", whole[row], subject.alone[row], row=row)
    if "cache" in subject.lacks:
        return
    decoded, session = [Computed() for _ in subject.ids_BT], WholeSession(subject.model)
    for ids_BT in ids_BS.split([TOKENS - 3, 1, 1, 1], 1):
        session.run(ids_BT, decoded, mask_BS=mask_BS[:, : session.length + ids_BT.shape[1]])
    for row, length in enumerate(mask_BS.sum(1).tolist()):
        how = f"row {row}, padded by {TOKENS - length} tokens, with a cache"
        yield Way(how, decoded[row], subject.alone[row], subject.keyed(row), row)


@claims("rollback", "tokens that were taken back leave nothing behind", "cache")
def rollback(subject: Subject) -> Ways:
    """Wrong tokens are run, to all loops or to the first only, and taken back; then the right ones."""
    start = subject.tokens // 2
    sizes = [start, 1, subject.tokens - start - 1]
    expected = subject.pieces(0, sizes)
    for count, deepest in ((3, subject.deepest), (1, subject.deepest), (2, 1))[: 3 if subject.is_looped else 1]:
        session, got = subject.session(), Computed()
        for ids_T in subject.ids_BT[0].split(sizes):
            session.run(ids_T[None], [got])
            if session.length + count > subject.tokens:
                continue
            session.run(subject.wrong_ids_T[None, :count], [Computed()], deepest)
            if not session.take_back(count):
                raise NotApplicableError("the model's cache takes no tokens back (no crop)")
        loops = "" if deepest is None else f" at {deepest} loops"
        yield Way(f"after {count} tokens{loops} were taken back", got, expected)


@claims("mixed-depths", "rows at different loops in one call are as each alone", "mixed depths")
def mixed_depths(subject: LoopedSubject) -> Ways:
    """Lanes that start one call after another, so that each is at another loop: of different rows, and of one."""
    lengths = [4, 2, 5]
    cache, records = subject.new_cache(TEXTS), [Computed() for _ in range(TEXTS)]
    for row, length in enumerate(lengths):
        subject.cached(cache.append(length, [row]), subject.ids_BT[row : row + 1, :length], [records[row]])
        cache.append(1, [row])
    _staggered(subject, cache, [0, 1, 2], lengths, records)
    for row, got in enumerate(records):
        yield Way(f"row {row}, beside rows at other loops", got, subject.pieces(row, [lengths[row], 1]), row=row)
    cache, record = subject.new_cache(), Computed()
    subject.cached(cache.append(4), subject.ids_BT[:1, :4], [record])
    cache.append(TEXTS)
    _staggered(subject, cache, [0] * TEXTS, [4, 5, 6], [record] * TEXTS)
    yield Way("three successive tokens, each a loop behind the one before", record, subject.pieces(0, [4, 1, 1, 1]))


@torch.no_grad()
def _staggered(
    subject: LoopedSubject, cache: KVCache, rows: list[int], starts: list[int], records: list[Computed]
) -> None:
    """One new token per lane; lane i runs loop k in call k + i."""
    model = MixedDepths.needed(subject.model, "rows at different loops")
    states: dict[int, LoopState] = {}

    def alone(lane: int, k: int) -> Watched:
        return Watched(cache.at([rows[lane]], [starts[lane]]), [records[lane]], (k,))

    for call in range(1, subject.deepest + len(rows)):
        lanes = [lane for lane in range(len(rows)) if 1 <= call - lane <= subject.deepest]
        for lane in lanes:
            if call - lane == 1:
                states[lane] = model.embed(subject.ids_BT[rows[lane], starts[lane]].view(1, 1), alone(lane, 0))
        loops = tuple(call - lane for lane in lanes)
        view = cache.at([rows[lane] for lane in lanes], [starts[lane] for lane in lanes])
        watched = Watched(view, [records[lane] for lane in lanes], loops)
        joined = model.loop(LoopState.joined([states[lane] for lane in lanes], 0), loops, watched)
        for place, (lane, k) in enumerate(zip(lanes, loops, strict=True)):
            states[lane] = joined.take(torch.tensor([place], device=joined.h_BTD.device))
            keep_state([records[lane]], [[starts[lane]]], states[lane], k)
            logits_BTV = model.readout(states[lane], k, alone(lane, k))
            keep([records[lane]], [[starts[lane]]], Stage(k, "logits"), logits_BTV)


@claims("context", "positions beyond the context are refused", "context")
@torch.no_grad()
def context(subject: LoopedSubject) -> Ways:
    """The last position of the context works, and the next raises an error: any, but an error."""
    context, first, plain = subject.context, subject.ids_BT[:1, :1], subject.model
    assert context is not None, "the subject lacks none"
    if context <= LONG_CONTEXT:
        plain.embed(first.expand(1, context))
        if _runs(lambda: plain.loop(plain.embed(first.expand(1, context + 1)), 1)):
            text = f"a text of {context + 1} tokens is taken without a word, and the context has {context}"
            yield CheckFinding(text=text, part="embedding", loop=0, position=context)
    model = Cached.of(subject.model)
    if model is None:
        return

    def one_more(position: int) -> None:
        cache = subject.new_cache()
        cache.lengths[0] = position
        view = cache.append(1)
        state = model.embed(first, view)
        if context <= LONG_CONTEXT:
            model.loop(state, 1, view)

    one_more(context - 1)
    if _runs(lambda: one_more(context)):
        text = f"a token at position {context} of a cache is taken without a word, and the context has {context}"
        yield CheckFinding(text=text, part="embedding", loop=0, position=context)


def _runs(action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception:
        return False
    return True


@claims("generate", "its own generate gives the tokens of recomputing every one", "padding", of_whole_models=True)
@torch.no_grad()
def generate(subject: WholeSubject) -> Ways:
    """A padded batch through the model's own way of generating; ties within the tolerance may fall either way."""
    model, tolerance = subject.model, subject.tolerance.value
    ids_BS, mask_BS = subject.left_padded()
    made_BN = model.generate(ids_BS, mask_BS, TOKENS)
    if made_BN is None:
        raise NotApplicableError("the model has no generate")
    for row, made in enumerate(made_BN.tolist()):
        ids = ids_BS[row][mask_BS[row] == 1].tolist()
        for place, token in enumerate(made):
            logits_V = model.logits(torch.tensor([ids], device=model.device))[0, -1].double()
            best = int(logits_V.argmax())
            gap = float((logits_V[best] - logits_V[token]) / logits_V.square().mean().sqrt())
            if gap > tolerance:
                text = f"row {row} of a padded batch: token {place + 1} of its text is {token}"
                text += f", and {best} is likelier by {gap:.2g} of the logits' rms (tolerance {tolerance:.1g})"
                yield CheckFinding(text=text, position=len(ids), row=row, difference=gap)
                return
            if best != token or token in model.end_ids:
                break
            ids.append(token)


# --- all of them -----------------------------------------------------------------------------------------------------


def check_all(subject: Subject, progress: Progress = lambda what, share: None) -> Conformance:
    """Each check's result; nothing can be compared in a model whose two runs do not agree."""
    checks = [check for check in CHECKS.values() if not (check.of_whole_models and subject.is_looped)]
    results: list[CheckResult] = []
    for number, check in enumerate(checks):
        progress(check.claim, number / len(checks))
        if results and results[0].status == "found":  # two-runs
            results.append(_not_applicable(check, "two runs of the same text differ already"))
        else:
            results.append(carry_out(check, subject))
    return Conformance(
        num_loops=subject.num_loops,
        deepest=subject.deepest,
        tokens=subject.tokens,
        dtype=str(subject.dtype).removeprefix("torch."),
        tolerance=subject.tolerance.value,
        tolerance_reason=subject.tolerance.why,
        checks=tuple(results),
        notes=tuple(subject.notes),
    )
