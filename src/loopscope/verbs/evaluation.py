"""`loopscope.evaluate`: what exiting after each loop costs, for any target, each token once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.config import MOST_LOOPS
from loopscope.data.packing import PackedTokens
from loopscope.data.stream import covered_bytes, evaluation_batches
from loopscope.errors import ConfigError
from loopscope.protocol import LoopedModel, run_loops
from loopscope.scores import Split
from loopscope.targets import Batch, Opened, open_target
from loopscope.training.scores import evaluate_depths, score_batch
from loopscope.training.session import set_up
from loopscope.verbs.text import Say, tokens_for, with_tokenizer

BATCH = 16
"""Sequences evaluated at a time."""
TIMED_ROUNDS = 7
"""Batches per depth whose median time gives the throughput."""


@dataclass(frozen=True)
class EvaluationResult:
    """What `loopscope eval` prints: the scores of one text, with whose they are."""

    opened: Opened
    scores: Split

    def to_json(self) -> dict[str, Any]:
        """Target, step, tokenizer, tokens and bytes of the text, and a row for every depth."""
        tokenizer = self.opened.tokenizer
        return {
            "target": self.opened.name,
            "step": self.opened.step,
            "tokenizer": None if tokenizer is None else tokenizer.kind,
            **self.scores.to_json(),
        }


def evaluate(
    target: str | Path | Opened,
    *,
    depths: Sequence[int] | None = None,
    data: Sequence[str] | None = None,
    tokenizer: str | None = None,
    batch: int = BATCH,
    length: int | None = None,
    max_tokens: int | None = None,
    say: Say = lambda text: None,
) -> EvaluationResult:
    """Scores after each of `depths` loops (by default 1 to the trained depth) on `data` or the target's own text."""
    opened = with_tokenizer(open_target(target), tokenizer)
    depths = list(range(1, opened.model.num_loops + 1)) if depths is None else list(depths)
    if not depths or min(depths) < 1 or max(depths) > MOST_LOOPS:
        raise ConfigError.of("depths", depths, f"depths count loops, from 1 up to {MOST_LOOPS:,}")
    length = _checked_length(opened, length)
    if data is None and opened.tokenizer is None and opened.batches is not None:
        scores = _depth_scores(opened.model, _pairs(opened.batches), max(depths))
    else:
        scores = score_tokens(
            opened.model, tokens_for(opened, data, say), max(depths), length, batch=batch, max_tokens=max_tokens
        )
    return EvaluationResult(opened, scores.of(depths))


def score_tokens(
    model: LoopedModel,
    tokens: PackedTokens,
    num_loops: int,
    length: int,
    *,
    batch: int = BATCH,
    max_tokens: int | None = None,
) -> Split:
    """Scores of packed text after each of `num_loops` loops."""
    batches = evaluation_batches(tokens, length, batch, max_tokens)
    return _depth_scores(model, batches, num_loops).with_bytes(covered_bytes(tokens, max_tokens))


def throughput(model: LoopedModel, vocab_size: int, length: int) -> dict[int, float]:
    """Tokens per second of running k loops and reading out once: median of rounds in which all depths take turns."""
    device = set_up().device
    ids_BT = torch.randint(vocab_size, (BATCH, length), device=device)
    seconds: dict[int, list[float]] = {k: [] for k in range(1, model.num_loops + 1)}
    with torch.no_grad():
        for _ in range(1 + TIMED_ROUNDS):  # the first warms up
            for k, times in seconds.items():
                started = time.perf_counter()
                model.readout(run_loops(model, ids_BT, num_loops=k).states[k], k)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
    return {k: ids_BT.numel() / statistics.median(times[1:]) for k, times in seconds.items()}


def _depth_scores(model: LoopedModel, batches: Iterable[tuple[Tensor, Tensor]], num_loops: int) -> Split:
    device = set_up().device
    if isinstance(model, nn.Module):
        model.to(device).eval()

    def score(ids_BT: Tensor, targets_BT: Tensor, num_loops: int) -> Any:
        return score_batch(model, ids_BT.to(device), targets_BT.to(device), num_loops)

    with torch.no_grad():
        return evaluate_depths(score, batches, num_loops)


def _pairs(batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids alone predict the next id."""
    for batch in batches:
        ids_BT, targets_BT = batch if isinstance(batch, (tuple, list)) else (batch[:, :-1], batch[:, 1:])
        yield ids_BT, targets_BT.contiguous()


def _checked_length(opened: Opened, length: int | None) -> int:
    if length is None:
        return opened.sequence_length
    if length < 1 or (opened.max_length is not None and length > opened.max_length):
        raise ConfigError.of("length", length, f"must be between 1 and {opened.max_length}, the longest it takes")
    return length
