"""The order of training data, as a pure function of the step, and evaluation that covers every token once.

The whole state of the loader is the step: no shuffled list, no generator to save. Window i of epoch e is at a place
given by a permutation of (seed, e, i) that is computed for the rows asked for.

Shape legend: B batch, T tokens of a sequence, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from loopscope.config import DataConfig
from loopscope.data.packing import READ_TOKENS, SplitTokens
from loopscope.data.task import HELD_OUT_INSTANCES, Rows, TaskText
from loopscope.errors import ConfigError, DataError
from loopscope.objectives.cross_entropy import IGNORE_INDEX

ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class TokenSequence(Protocol):
    """Token ids that can be sliced: packed ones, or a NumPy array."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class TrainingStream:
    """Batches of training windows; every window exactly once per epoch, in an order of its own each epoch.

    Batches run on across the end of an epoch. The order depends on the seed and on nothing else.
    """

    tokens: TokenSequence
    length: int
    """Tokens T of a sequence; its targets are one token on."""
    stride: int
    """Tokens between the starts of windows."""
    batch_size: int
    """Sequences of a step, over all ranks and micro-batches."""
    seed: int

    def __post_init__(self) -> None:
        if self.windows < 1:
            count = len(self.tokens)
            raise DataError(f"the training text has {count} tokens; one sequence needs {self.length + 1}")

    @property
    def windows(self) -> int:
        """Windows of an epoch: those that start at a multiple of the stride and have all their targets."""
        return max(0, (len(self.tokens) - 1 - self.length) // self.stride + 1)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that the first sequence of a step (from 0) belongs to."""
        return step * self.batch_size // self.windows

    def batch(
        self, step: int, rank: int = 0, world_size: int = 1, micro: int = 0, accumulate: int = 1
    ) -> tuple[Tensor, Tensor]:
        """(ids_BT, targets_BT) of one rank's micro-batch of a step, counted from 0.

        Ranks, and within them micro-batches, take consecutive rows: put together they are the batch of one process.
        """
        first, rows = _share(self.batch_size, step, rank, world_size, micro, accumulate)
        epochs_R, index_R = np.divmod(first + np.arange(rows), self.windows)
        starts_R = permuted(index_R, self.windows, self.seed, epochs_R) * self.stride
        windows = np.stack([self.tokens[int(start) : int(start) + self.length + 1] for start in starts_R])
        windows_RT = torch.from_numpy(windows.astype(np.int64))
        return windows_RT[:, :-1].contiguous(), windows_RT[:, 1:].contiguous()


@dataclass(frozen=True)
class TaskStream:
    """Batches of a task's training instances: no epochs, since there is no end; the order depends on the seed alone.

    Only answers are targets. The text before them is drawn at random, and learning to predict it teaches nothing.
    """

    text: TaskText
    batch_size: int
    """Instances of a step, over all ranks and micro-batches."""
    seed: int
    curriculum: int | None = None
    """Training steps after which answers may take one step more, from one on; None: any number from the start.

    A function of the step alone, so that a resumed run sees what it would have seen.
    """

    def batch(
        self, step: int, rank: int = 0, world_size: int = 1, micro: int = 0, accumulate: int = 1
    ) -> tuple[Tensor, Tensor]:
        """(ids_BT, targets_BT) of one rank's micro-batch of a step, counted from 0; rows as in `TrainingStream`."""
        first, rows = _share(self.batch_size, step, rank, world_size, micro, accumulate)
        most_steps = self.text.task.most_steps
        if self.curriculum is not None:
            most_steps = min(most_steps, 1 + step // self.curriculum)
        ids_BT, targets_BT, _ = _answers(self.text.training_rows(self.seed, first, rows, most_steps))
        return ids_BT, targets_BT


def training_stream(
    tokens: TokenSequence | TaskText, length: int, batch_size: int, seed: int, data: DataConfig | None = None
) -> TrainingStream | TaskStream:
    """Training batches of `length` tokens, at the stride that `data` says; of a task an instance a row."""
    data = data or DataConfig()
    if isinstance(tokens, TaskText):
        _check_room(tokens, length)
        return TaskStream(tokens, batch_size, seed, data.curriculum)
    return TrainingStream(tokens, length, data.stride or length, batch_size, seed)


def permuted(index_R: np.ndarray, size: int, seed: int, epochs_R: np.ndarray) -> np.ndarray:
    """Where a permutation of 0 … size − 1, one for each (seed, epoch), puts each index.

    A Feistel network permutes the smallest even power of two that holds `size`; what falls outside goes through it
    again until it is inside ("cycle walking"), which keeps it one-to-one.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    seed_key = _mixed(np.array([seed & _WORD], dtype=np.uint64) + _GOLDEN)
    keys_R = _mixed(seed_key ^ epochs_R.astype(np.uint64))
    value_R = _feistel(index_R.astype(np.uint64), keys_R, half)
    while (outside_R := value_R >= size).any():
        value_R[outside_R] = _feistel(value_R[outside_R], keys_R[outside_R], half)
    return value_R.astype(np.int64)


def evaluation_batches(
    tokens: TokenSequence | TaskText, length: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids_BT, targets_BT) in which each token but the first is a target exactly once, up to `max_tokens` targets.

    Windows do not overlap. The last one is filled up with id 0 and target IGNORE_INDEX. Of a task a row is an instance,
    and only answers are targets.
    """
    if isinstance(tokens, TaskText):
        yield from ((ids, targets) for ids, targets, _ in answer_batches(tokens, length, batch_size, max_tokens))
        return
    count = _num_targets(tokens, max_tokens)
    for first in range(0, count, length * batch_size):
        starts = range(first, min(first + length * batch_size, count), length)
        rows = [tokens[start : min(start + length, count) + 1] for start in starts]
        ids_BT = np.stack([_filled(row[:-1], length, 0) for row in rows])
        targets_BT = np.stack([_filled(row[1:], length, IGNORE_INDEX) for row in rows])
        yield torch.from_numpy(ids_BT), torch.from_numpy(targets_BT)


def answer_batches(
    text: TaskText, length: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(ids_BT, targets_BT, steps_BT) of a task's held-out instances; steps are 0 where the target is no answer.

    `max_tokens` counts the tokens of text, as it does of any other text, not the answers among them.
    """
    _check_room(text, length)
    for rows in text.batches(batch_size, max_tokens):
        yield _answers(rows)


def covered_bytes(tokens: SplitTokens, max_tokens: int | None = None) -> int:
    """UTF-8 bytes of text behind the targets of `evaluation_batches`: bits per byte = total nats / ln 2 / this."""
    if isinstance(tokens, TaskText):
        return sum(int((rows.steps_RT > 0).sum()) for rows in tokens.batches(1, max_tokens))  # an answer is a byte
    return tokens.bytes_between(1, 1 + _num_targets(tokens, max_tokens))


def unigram_cross_entropy(
    train: SplitTokens | TokenSequence,
    text: SplitTokens | TokenSequence,
    vocab_size: int,
    max_tokens: int | None = None,
) -> float:
    """Nats per target of `evaluation_batches` of a model that knows how often each token occurs in the training text.

    p(v) = (count of v + 1)/(number of tokens + V): one more of each, so that a token nobody has seen costs a finite
    amount. A model that is not better than this has not learned to read what stands before a token.
    """
    if isinstance(train, TaskText) or isinstance(text, TaskText):
        assert isinstance(train, TaskText) and isinstance(text, TaskText), "a task stands alone"
        seen_V, asked_V = 1.0 + _answer_counts(train, vocab_size), _answer_counts(text, vocab_size, max_tokens)
    else:
        seen_V = 1.0 + _counts(train, 0, len(train), vocab_size)
        asked_V = _counts(text, 1, 1 + _num_targets(text, max_tokens), vocab_size)
    return float(asked_V @ -np.log(seen_V / seen_V.sum()) / asked_V.sum())


def _counts(tokens: TokenSequence, start: int, stop: int, vocab_size: int) -> np.ndarray:
    """How often each id occurs among tokens start … stop − 1, read in pieces."""
    counts_V = np.zeros(vocab_size)
    for first in range(start, stop, READ_TOKENS):
        counts_V += np.bincount(tokens[first : min(first + READ_TOKENS, stop)], minlength=vocab_size)
    return counts_V


def _answer_counts(text: TaskText, vocab_size: int, max_tokens: int | None = None) -> np.ndarray:
    """How often each id is an answer of a task; of its training split, among as many instances as are held out."""
    counts_V = np.zeros(vocab_size)
    for rows in text.batches(HELD_OUT_INSTANCES, max_tokens):
        counts_V += np.bincount(rows.ids_RT[rows.steps_RT > 0], minlength=vocab_size)
    return counts_V


def _share(batch_size: int, step: int, rank: int, world_size: int, micro: int, accumulate: int) -> tuple[int, int]:
    """The first row of one rank's micro-batch, counted over all steps, and how many rows it has."""
    parts = world_size * accumulate
    if batch_size % parts:
        why = f"must be a multiple of {world_size} processes × {accumulate} micro-batches"
        raise ConfigError.of("batch", batch_size, why)
    rows = batch_size // parts
    return step * batch_size + (rank * accumulate + micro) * rows, rows


def _answers(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, the next ids where they are answers, and the steps that those take."""
    ids_RT, steps_RT = torch.from_numpy(rows.ids_RT), torch.from_numpy(rows.steps_RT)[:, 1:].contiguous()
    targets_RT = torch.where(steps_RT > 0, ids_RT[:, 1:], IGNORE_INDEX)
    return ids_RT[:, :-1].contiguous(), targets_RT, steps_RT


def _check_room(text: TaskText, length: int) -> None:
    """An instance without its last character, which nothing follows, must fit into a sequence."""
    if length < text.task.length - 1:
        why = f"is too short for an instance of {text.task.word}, which has {text.task.length - 1} tokens"
        raise ConfigError.of("sequence_length", length, why)


def _num_targets(tokens: TokenSequence, max_tokens: int | None) -> int:
    count = len(tokens) - 1
    if count < 1:
        raise DataError(f"the evaluation text has {len(tokens)} tokens; it needs at least 2")
    return count if max_tokens is None else min(count, max_tokens)


def _filled(row: np.ndarray, length: int, filler: int) -> np.ndarray:
    return np.pad(row.astype(np.int64), (0, length - len(row)), constant_values=filler)


def _feistel(value_R: np.ndarray, keys_R: np.ndarray, half: int) -> np.ndarray:
    """A permutation of the numbers of 2 × half bits: each round mixes one half into the other."""
    mask = (1 << half) - 1
    left_R, right_R = value_R >> half, value_R & mask
    for number in range(1, ROUNDS + 1):
        round_R = _mixed(right_R + keys_R + (number * _GOLDEN & _WORD)) & mask
        left_R, right_R = right_R, left_R ^ round_R
    return left_R << half | right_R


def _mixed(value_R: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every bit of the input changes about half of the bits of the output."""
    value_R = (value_R ^ (value_R >> 30)) * 0xBF58476D1CE4E5B9
    value_R = (value_R ^ (value_R >> 27)) * 0x94D049BB133111EB
    return value_R ^ (value_R >> 31)
