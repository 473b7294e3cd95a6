"""`loopscope.evaluate`: what exiting after each loop costs, for any target, each token once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.auditing.activity import loop_activity
from loopscope.data.packing import SplitTokens
from loopscope.data.stream import answer_batches, covered_bytes, evaluation_batches
from loopscope.data.task import TaskText
from loopscope.errors import ConfigError, DataError, RunError
from loopscope.inference.costs import DECODE, ROUNDS, TIMED_TOKENS, OnProgress, Way, policy_costs, time_depths
from loopscope.inference.decoding import Limits, decode
from loopscope.inference.exit_gap import ExitGap, measure_exit_gaps
from loopscope.inference.halting import Halting, HaltingRunner, halt_on_text, parse_halting
from loopscope.inference.speculation import Speculator
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.options import EvaluateOptions, chosen
from loopscope.protocol import Cached, LoopedModel, run_loops
from loopscope.results.evaluation import Beyond, CacheTable, Evaluation, HaltedScore, Split, Throughput, Timing, beyond
from loopscope.results.record import as_json, read_record, write_record
from loopscope.targets import Batch, Opened, Say, open_target, other_text_of, tokens_for, with_tokenizer
from loopscope.training.plan import check_logits
from loopscope.training.scores import evaluate_depths, score_answers, score_batch
from loopscope.training.session import set_up

BATCH = 16
"""Sequences evaluated at a time."""
WINDOWS = 64
"""Windows of text on which cache policies are compared."""
EXIT_WINDOWS = 256
"""Windows of text on which exits are calibrated and asked, half each: what comes first is fitted."""


@dataclass(frozen=True)
class EvaluationResult:
    """What `loopscope eval` prints: the scores of one text, with whose they are."""

    opened: Opened
    scores: Split
    """Of the depths that were asked for."""
    measured: Split
    """Of all depths up to the deepest of those."""
    text: str
    """What was read: "valid" for the target's validation split, else the sources that were named."""
    speed: list[Timing] = field(default_factory=list)
    """Of prefill and decoding at the depths that were asked for, where speed was."""
    cache: CacheTable | None = None
    """What cache policies cost, where that was asked for."""
    exit_gaps: list[ExitGap] = field(default_factory=list)
    """Of every exit below the trained depth, whether it is badly read or not yet computed, where that was asked for."""

    @property
    def beyond(self) -> Beyond | None:
        """The verdict on depths beyond the trained one, where such were measured."""
        return beyond(self.measured, self.opened.model.num_loops)

    def keep(self) -> Path:
        """Leave the scores in the eval.json of the run, beside those of other texts and depths, and say where.

        Only what a run folder stands at is kept there, and the eval.json of a grid's row is the grid's own. Reports
        compare runs by the first text in it, so it begins with validation text, down to the trained depth. Why nothing
        is kept is a RunError.
        """
        run, tokenizer = self.opened.run, self.opened.tokenizer
        if run is None or tokenizer is None or not self.opened.is_newest:
            raise RunError(f"{self.opened.name} is not what a run folder stands at")
        if (run.path / "row.json").exists():
            raise RunError(f"{run.path} is a row of a grid, which has measured it")
        path = run.path / "eval.json"
        before = read_record(path, Evaluation, {})
        before = before if before is not None and before.step == self.opened.step else None
        splits = {} if before is None else before.splits
        splits = {**splits, self.text: self.measured.joined(splits.get(self.text))}
        if "valid" not in splits or splits["valid"].at(self.opened.model.num_loops) is None:
            raise RunError(f"it begins with validation text down to the trained depth: loopscope eval {run.path}")
        evaluation = Evaluation(
            step=self.opened.step,
            tokenizer=tokenizer.kind,
            num_loops=self.opened.model.num_loops,
            splits=splits,
            throughput=[] if before is None else before.throughput,
            speed=self.speed or ([] if before is None else before.speed),
            cache=self.cache or (None if before is None else before.cache),
            threads=torch.get_num_threads(),
            device=set_up().device,
        )
        write_record(path, evaluation)
        return path

    def to_json(self) -> dict[str, Any]:
        """Target, step, tokenizer, tokens and bytes of the text, a row for every depth, and what else was asked for."""
        tokenizer, verdict = self.opened.tokenizer, self.beyond
        return {
            "target": self.opened.name,
            "step": self.opened.step,
            "tokenizer": None if tokenizer is None else tokenizer.kind,
            **as_json(self.scores),
            "beyond": None if verdict is None else {**as_json(verdict), "sentence": verdict.sentence},
            "speed": as_json(self.speed),
            "cache": as_json(self.cache),
            "exit_gaps": [each.to_json() for each in self.exit_gaps],
        }


def evaluate(
    target: str | Path | Opened,
    options: EvaluateOptions | None = None,
    *,
    ways: Mapping[str, Way] | None = None,
    say: Say = lambda text: None,
    progress: OnProgress = lambda what, share: None,
    **fields: Any,
) -> EvaluationResult:
    """Scores after each loop that is asked for, on the text that is named or the target's own.

    `fields` are those of EvaluateOptions. Where speed is asked for, other `ways` to decode are timed as well, by the
    name of what they add to plain decoding. `progress` is called after each batch with what is going on and the share
    of it that is done.
    """
    options = chosen(EvaluateOptions(), options, fields)
    data, batch, max_tokens = options.data, options.batch, options.max_tokens
    opened = with_tokenizer(open_target(target), options.tokenizer)
    depths = list(options.depths or range(1, opened.model.num_loops + 1))
    length = options.length or opened.sequence_length
    if options.length is not None and opened.max_length is not None and length > opened.max_length:
        raise ConfigError.of("length", length, f"must be between 1 and {opened.max_length}, the longest it takes")
    text = "valid" if data is None else ", ".join(data)
    cached = Cached.needed(opened.model, "comparing cache policies") if options.cache_policies else None
    haltings = _haltings(opened, options.policies or ())
    if data is None and opened.tokenizer is None and opened.batches is not None:
        scores = _depth_scores(opened.model, _pairs(opened.batches), max(depths))
        pairs: Iterable[tuple[Tensor, Tensor]] = list(_pairs(opened.batches))
    else:
        tokens = tokens_for(opened, data, say)
        if cached is not None and isinstance(tokens, TaskText):
            raise ConfigError.of("cache_policies", True, f"compares them on text, and {tokens.task.word} is a task")
        if data is None and other_text_of(opened, tokens) is not None:
            text = f"{tokens.corpus}, changed since training"
        at_once = min(batch * length, max_tokens or len(tokens), len(tokens))
        check_logits(at_once, opened.vocab_size, batch=batch, device_type=set_up().device)
        scores = score_tokens(
            opened.model, tokens, max(depths), length, batch=batch, max_tokens=max_tokens, progress=progress
        )
        pairs = _Again(lambda: evaluation_batches(tokens, length, batch, max_tokens))
    if haltings:
        halted = [_under(opened, name, halting, pairs, progress) for name, halting in haltings.items()]
        scores = replace(scores, halting=halted)
        scores = scores if scores.bytes is None else scores.with_bytes(scores.bytes)
    timings, table, gaps = [], None, []
    if options.speed or cached is not None or options.exit_gap:
        ids_WT, targets_WT = _windows(pairs, EXIT_WINDOWS if options.exit_gap else WINDOWS)
        if options.exit_gap:
            gaps = _exit_gaps(opened.model, ids_WT, targets_WT, depths, batch, progress)
        ids_WT, targets_WT = ids_WT[:WINDOWS], targets_WT[:WINDOWS]
        if options.speed:
            prompt = ids_WT[0, : ids_WT.shape[1] // 2].tolist()
            room = len(prompt) if opened.max_length is None else opened.max_length - len(prompt)
            count = max(2, min(TIMED_TOKENS, room))
            ways = {
                **({"speculating": _speculating(opened.max_length)} if Cached.of(opened.model) else {}),
                **(ways or {}),
            }
            timings = time_depths(opened.model, prompt, depths, tokens=count, ways=ways, progress=progress)
            if haltings:
                scores = replace(scores, halting=_timed(opened, haltings, scores.halting, prompt, count, progress))
        if cached is not None:
            table = _cache_table(opened.model, cached, ids_WT, targets_WT, batch, progress)
    return EvaluationResult(opened, scores.of(depths), scores, text, timings, table, gaps)


@dataclass(frozen=True)
class _Again:
    """Batches that can be gone through more than once."""

    read: Callable[[], Iterator[tuple[Tensor, Tensor]]]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.read()


def _haltings(opened: Opened, policies: Sequence[str]) -> dict[str, Halting]:
    """The policies by name, each refused where it is of another model."""
    haltings = {name: parse_halting(name, "policies") for name in policies}
    if haltings:
        cached = Cached.needed(opened.model, "halting on known text")
        for halting in haltings.values():
            halting.check_fits(cached, opened.model.num_loops)
    return haltings


@torch.no_grad()
def _under(
    opened: Opened,
    name: str,
    halting: Halting,
    pairs: Iterable[tuple[Tensor, Tensor]],
    progress: OnProgress,
) -> HaltedScore:
    """What the text costs under a policy, on the same tokens as the fixed depths."""
    device, cached = set_up().device, Cached.needed(opened.model, "halting on known text")
    total, loops, count = 0.0, 0, 0
    for ids_BT, targets_BT in pairs:
        ids_BT, targets_BT = ids_BT.to(device), targets_BT.to(device)
        halted = halt_on_text(cached, ids_BT, targets_BT, halting, num_loops=opened.model.num_loops)
        counted_BT = targets_BT != IGNORE_INDEX
        total += float(halted.ce_BT[counted_BT].double().sum())
        loops, count = loops + int(halted.exits_BT[counted_BT].sum()), count + int(counted_BT.sum())
        progress(f"{name}: {count:,} targets", 1.0)
    threshold = halting.threshold if math.isfinite(halting.threshold) else None
    return HaltedScore(name, halting.rule.name, threshold, halting.fill, loops / count, total / count)


def _timed(
    opened: Opened,
    haltings: Mapping[str, Halting],
    scores: Sequence[HaltedScore],
    prompt: Sequence[int],
    tokens: int,
    progress: OnProgress,
) -> list[HaltedScore]:
    """The same with the speed of decoding under each policy, in turns with full depth."""

    def way(halting: Halting) -> Way:
        def decoding(model: LoopedModel, prompt: Sequence[int], num_loops: int, count: int) -> Iterator[object]:
            runner = HaltingRunner(Cached.needed(model, "leaving early while decoding"), num_loops, halting)
            return decode(runner, [prompt], limits=Limits(max_tokens=count))

        return decoding

    ways = {name: way(halting) for name, halting in haltings.items()}
    depths = [opened.model.num_loops]
    timings = time_depths(opened.model, prompt, depths, tokens=tokens, ways=ways, progress=progress)
    rates = {each.what: each.tokens_per_second for each in timings}
    return [replace(each, tokens_per_second=rates[f"{DECODE}, {each.policy}"]) for each in scores]


def _speculating(context: int | None) -> Way:
    """Decoding that drafts with the first loops where that pays; what it learns of a depth stays for later rounds."""
    known: dict[int, Speculator] = {}

    def way(model: LoopedModel, prompt: Sequence[int], num_loops: int, tokens: int) -> Iterator[object]:
        cached, limits = Cached.needed(model, "speculation"), Limits(max_tokens=tokens, context=context)
        speculator = known.setdefault(num_loops, Speculator(cached, num_loops, limits=limits))
        return speculator.decode(prompt)

    return way


def score_tokens(
    model: LoopedModel,
    tokens: SplitTokens,
    num_loops: int,
    length: int,
    *,
    batch: int = BATCH,
    max_tokens: int | None = None,
    progress: OnProgress = lambda what, share: None,
) -> Split:
    """Scores of packed text after each of `num_loops` loops; of a task also which answers are right."""
    count = min(len(tokens) - 1, max_tokens or len(tokens))

    def followed() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for ids_BT, targets_BT in evaluation_batches(tokens, length, batch, max_tokens):
            yield ids_BT, targets_BT
            done = min(done + ids_BT.numel(), count)
            progress(f"{done:,} of {count:,} tokens", done / count)

    scores = _depth_scores(model, followed(), num_loops).with_bytes(covered_bytes(tokens, max_tokens))
    if not isinstance(tokens, TaskText):
        return scores
    device = set_up().device
    moved = (
        (ids_BT.to(device), targets_BT.to(device), steps_BT.to(device))
        for ids_BT, targets_BT, steps_BT in answer_batches(tokens, length, batch, max_tokens)
    )
    with torch.no_grad():
        return replace(scores, answers=score_answers(model, moved, num_loops))


def throughput(
    model: LoopedModel,
    vocab_size: int,
    length: int,
    depths: Sequence[int] | None = None,
    *,
    batch: int = BATCH,
    progress: OnProgress = lambda what, share: None,
) -> list[Throughput]:
    """Tokens per second of running k loops and reading out once: median of rounds in which all depths take turns."""
    device = set_up().device
    ids_BT = torch.randint(vocab_size, (batch, length), device=device)
    seconds: dict[int, list[float]] = {k: [] for k in depths or range(1, model.num_loops + 1)}
    with torch.no_grad():
        for number in range(1 + ROUNDS):  # the first warms up
            for k, times in seconds.items():
                started = time.perf_counter()
                model.readout(run_loops(model, ids_BT, num_loops=k).states[k], k)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
            progress(f"round {number} of {ROUNDS}", (number + 1) / (1 + ROUNDS))
    return [Throughput(k, ids_BT.numel() / statistics.median(times[1:])) for k, times in seconds.items()]


def _depth_scores(model: LoopedModel, batches: Iterable[tuple[Tensor, Tensor]], num_loops: int) -> Split:
    device = set_up().device
    if isinstance(model, nn.Module):
        model.to(device).eval()

    def score(ids_BT: Tensor, targets_BT: Tensor, num_loops: int) -> Any:
        return score_batch(model, ids_BT.to(device), targets_BT.to(device), num_loops)

    with torch.no_grad():
        return evaluate_depths(score, batches, num_loops)


def _exit_gaps(
    model: LoopedModel, ids_WT: Tensor, targets_WT: Tensor, depths: Sequence[int], batch: int, progress: OnProgress
) -> list[ExitGap]:
    """Every exit among the depths taken apart: fitted on the first half of the windows, asked on the second."""
    exits = [k for k in depths if k < model.num_loops]
    if not exits:
        raise ConfigError.of("exit_gap", True, f"none of the depths is an exit below the trained {model.num_loops}")
    if len(ids_WT) < 4:
        raise DataError(f"an exit is taken apart on at least 4 windows of text, got {len(ids_WT)}; name more text")
    half = len(ids_WT) // 2
    fit, test = (
        list(zip(ids.split(batch), targets.split(batch), strict=True))
        for ids, targets in ((ids_WT[:half], targets_WT[:half]), (ids_WT[half:], targets_WT[half:]))
    )
    return measure_exit_gaps(model, fit, test, loops=exits, progress=progress)


def _windows(pairs: Iterable[tuple[Tensor, Tensor]], count: int = WINDOWS) -> tuple[Tensor, Tensor]:
    """The first windows of a text that are full, ids_WT and targets_WT, all of one length."""
    ids: list[Tensor] = []
    targets: list[Tensor] = []
    for ids_BT, targets_BT in pairs:
        full_B = targets_BT[:, -1] != IGNORE_INDEX  # what is filled up is filled up at its end
        if ids and ids_BT.shape[1] != ids[0].shape[1]:
            break
        ids.append(ids_BT[full_B])
        targets.append(targets_BT[full_B])
        if sum(map(len, ids)) >= count:
            break
    if not sum(map(len, ids)) or ids[0].shape[1] < 4:
        raise DataError("the text has no whole window to decode, of at least 4 tokens; name more text, or --length")
    return torch.cat(ids)[:count], torch.cat(targets)[:count]


def _cache_table(
    model: LoopedModel, cached: Cached, ids_WT: Tensor, targets_WT: Tensor, batch: int, progress: OnProgress
) -> CacheTable:
    """What each cache policy costs at the trained depth, and how the loop moves there."""
    num_loops = model.num_loops
    with torch.no_grad():
        states = run_loops(model, ids_WT[:batch].to(set_up().device)).states
    moves = [loop_activity(k, states[k].h_BTD, states[k + 1].h_BTD) for k in range(1, num_loops)]
    last = loop_activity(num_loops, states[-1].h_BTD, None)
    updates = [math.hypot(move.radial_update or 0.0, move.tangential_update or 0.0) for move in moves]
    turns = [move.angular_step or 0.0 for move in moves]
    costs = policy_costs(cached, ids_WT, targets_WT, num_loops, batch=batch, progress=progress)
    return CacheTable(
        num_loops=num_loops,
        windows=len(ids_WT),
        tokens=ids_WT[:, ids_WT.shape[1] // 2 :].numel(),
        policies=list(costs),
        update_ratio=_ratio(updates),
        turning_ratio=_ratio(turns),
        scale_ratio=_ratio([each.scale for each in (*moves[:1], last)]),
    )


def _ratio(values: Sequence[float]) -> float | None:
    """The last over the first; None where that says nothing."""
    return values[-1] / values[0] if len(values) > 1 and values[0] > 0 else None


def _pairs(batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids alone predict the next id."""
    for batch in batches:
        ids_BT, targets_BT = batch if isinstance(batch, (tuple, list)) else (batch[:, :-1], batch[:, 1:])
        yield ids_BT, targets_BT.contiguous()
