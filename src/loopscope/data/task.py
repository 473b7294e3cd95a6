"""Text that needs depth: tasks whose every answer says how many sequential steps it takes to find.

A task is generated, seeded and endless: instances drawn at random, in splits that share none. An instance belongs to a
split by the hash of what was asked, whatever seed drew it. A task is one subclass of `Task`, which registers itself
under its name; ours are in `tasks`.

Shape legend: R rows, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from loopscope.errors import DataError

if TYPE_CHECKING:
    import numpy as np

Split = Literal["train", "valid", "test"]

PREFIX = "task:"
FORMAT = 1
"""Counts up when instances change their meaning; when only their text changes, the hash says so by itself."""
HELD_OUT_INSTANCES = 1024
"""Instances of the validation split, and of the test split."""
MOST_DRAWS = 10_000
"""Draws until an instance belongs to a split; every eighth does where there are many of them."""
HASHED_INSTANCES = 64
"""Instances of every split that go into the hash of a task: enough to notice a generator that draws otherwise."""
BUCKETS: dict[Split, range] = {"train": range(192), "valid": range(192, 224), "test": range(224, 256)}
"""First byte of an instance's hash → its split."""


@dataclass(frozen=True)
class Instance:
    """A piece of text with answers in it."""

    text: str
    steps: tuple[int, ...]
    """For each character the sequential steps that it takes to find it as an answer; 0 where it is none."""
    asked: str
    """What makes it this instance and no other: two that share it are never in different splits."""
    belongs_to: Split | None = None
    """The split of an instance that is not left to chance: a fact that can only be known by heart, say."""

    @property
    def split(self) -> Split:
        """The split it belongs to, wherever it was drawn."""
        if self.belongs_to is not None:
            return self.belongs_to
        bucket = hashlib.sha256(self.asked.encode()).digest()[0]
        return next(split for split, buckets in BUCKETS.items() if bucket in buckets)


TASKS: dict[str, type[Task]] = {}
"""By name."""


class Task(ABC):
    """Instances of one length, drawn at random."""

    name: ClassVar[str]
    symbols: ClassVar[str]
    """Every character that it writes; each is one token."""
    length: ClassVar[int]
    """Characters of an instance."""
    limit: ClassVar[int]
    """The most steps that an answer can be asked to take."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TASKS[cls.name] = cls

    def __init__(self, most_steps: int | None = None) -> None:
        self.most_steps = self.limit if most_steps is None else most_steps

    @property
    def word(self) -> str:
        """What names it in `data`."""
        return PREFIX + self.name + ("" if self.most_steps == self.limit else f":{self.most_steps}")

    @abstractmethod
    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        """An instance whose answers take 1 … `most_steps` steps, a function of what the generator gives."""

    def instance(self, split: Split, seed: int, index: int, most_steps: int | None = None) -> Instance:
        """Instance `index` of an endless row of them: drawn until one belongs to the split."""
        rng = random.Random(f"{FORMAT} {self.name} {split} {seed} {index}")
        for _ in range(MOST_DRAWS):
            if (drawn := self.draw(rng, most_steps or self.most_steps)).split == split:
                return drawn
        raise DataError(f"{self.word} has too few instances: none of {MOST_DRAWS:,} belongs to the {split} split")

    @cached_property
    def sha256(self) -> str:
        """Of its name, its steps, and the first instances of every split as they come out here."""
        parts = [f"{FORMAT} {self.word} {HELD_OUT_INSTANCES}"]
        for split in BUCKETS:
            parts += [self.instance(split, 0, index).text for index in range(HASHED_INSTANCES)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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
        """Name of the text."""
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
        import numpy as np  # the command line names tasks without it

        ids = [[self.ids[symbol] for symbol in instance.text] for instance in instances]
        return Rows(np.array(ids, dtype=np.int64), np.array([instance.steps for instance in instances], dtype=np.int64))
