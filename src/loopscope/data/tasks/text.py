"""A task's instances as rows of tokens.

Shape legend: R rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from loopscope.data.tasks.base import HELD_OUT_INSTANCES, Instance, Split, Task


@dataclass(frozen=True)
class Rows:
    """Instances as tokens, each a row: its ids, and the steps of the answers among them."""

    ids_RT: np.ndarray
    steps_RT: np.ndarray


@dataclass(frozen=True)
class TaskText:
    """A split of a task in the tokens of a run; a row is an instance."""

    task: Task
    split: Split
    ids: Mapping[str, int]
    """The token of every symbol. Text is spelled symbol by symbol, whatever a tokenizer would join."""

    def __len__(self) -> int:
        """Tokens of the held-out split; the training split has no end, and counts as one of the same size."""
        return HELD_OUT_INSTANCES * self.task.length

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the same text; every symbol is one."""
        return len(self)

    @property
    def corpus(self) -> str:
        """Name of the task."""
        return self.task.word

    @property
    def corpus_sha256(self) -> str:
        """Its hash."""
        return self.task.sha256

    def training_rows(self, seed: int, first: int, count: int, most_steps: int) -> Rows:
        """Rows first … first + count − 1 of the endless row of instances that belongs to a seed."""
        return self._rows([self.task.instance(self.split, seed, first + row, most_steps) for row in range(count)])

    def batches(self, batch_size: int, max_tokens: int | None = None) -> Iterator[Rows]:
        """The held-out instances, so many rows at a time, up to `max_tokens` tokens but at least one row."""
        count = HELD_OUT_INSTANCES
        if max_tokens is not None:
            count = min(count, max(1, max_tokens // self.task.length))
        for first in range(0, count, batch_size):
            yield self._rows(self._held_out[first : min(first + batch_size, count)])

    @cached_property
    def _held_out(self) -> list[Instance]:
        return [self.task.instance(self.split, 0, index) for index in range(HELD_OUT_INSTANCES)]

    def _rows(self, instances: Sequence[Instance]) -> Rows:
        ids = [[self.ids[symbol] for symbol in instance.text] for instance in instances]
        return Rows(np.array(ids, dtype=np.int64), np.array([instance.steps for instance in instances], dtype=np.int64))
