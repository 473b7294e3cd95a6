"""Scores after every loop, and eval.json, which keeps them. No torch here: reports read what evaluations write."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from loopscope.files import Part, without_nan

SCHEMA_VERSION = 1
SPLITS = ("valid", "test")
"""Splits that are scored, in the order they are shown: choices are made on the first."""
MOST_PERPLEXITY_CE = 700.0
"""Nats above which exp(CE) is not a number any more."""


@dataclass(frozen=True)
class Depth:
    """What reading out after loop k gives."""

    k: int
    ce: float | None
    """Nats per token."""
    norm: float | None
    """Mean ‖h_k‖."""
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float | None:
        """exp(CE), where that is a number: comparable only under the same tokenizer."""
        return None if self.ce is None or self.ce > MOST_PERPLEXITY_CE else math.exp(self.ce)

    def to_json(self) -> dict[str, Any]:
        """As eval.json keeps it; perplexity is there to be read by people."""
        return {**asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class Answers:
    """The answers of a task that take so many steps, and the share of them that is right after every loop."""

    steps: int
    count: int | None
    """Answers behind every share."""
    accuracy: dict[int, float]
    """By loop."""

    def of(self, ks: Iterable[int]) -> Answers:
        """After some of the loops."""
        return replace(self, accuracy={k: self.accuracy[k] for k in ks if k in self.accuracy})

    def to_json(self) -> dict[str, Any]:
        """As eval.json keeps it."""
        depths = [{"k": k, "accuracy": share} for k, share in self.accuracy.items()]
        return {"steps": self.steps, "count": self.count, "depths": depths}

    @classmethod
    def from_json(cls, part: Part, steps: int) -> Answers:
        """What can be read of it."""
        found = {k: row.number("accuracy") for k, row in part.by_number("depths").items()}
        return cls(steps, part.integer("count"), {k: share for k, share in found.items() if share is not None})


@dataclass(frozen=True)
class Split:
    """Scores at every depth on one text."""

    depths: list[Depth]
    tokens: int | None = None
    bytes: int | None = None
    answers: list[Answers] = field(default_factory=list)
    """Of a task, by the steps they take."""

    def at(self, k: int) -> Depth | None:
        """The scores after loop k."""
        return next((depth for depth in self.depths if depth.k == k), None)

    def of(self, ks: Iterable[int]) -> Split:
        """Some of the depths."""
        chosen = sorted(set(ks))
        answers = [each.of(chosen) for each in self.answers]
        return replace(self, depths=[depth for depth in self.depths if depth.k in chosen], answers=answers)

    def joined(self, before: Split | None) -> Split:
        """These scores with earlier ones of the same model and text; where more of it was read then, those stay."""
        if before is None or (before.tokens or 0) < (self.tokens or 0):
            return self
        if before.tokens != self.tokens:
            return before
        depths = {depth.k: depth for depth in (*before.depths, *self.depths)}
        earlier = {each.steps: each.accuracy for each in before.answers}
        shares = [earlier.get(each.steps, {}) | each.accuracy for each in self.answers]
        answers = [
            replace(each, accuracy=dict(sorted(by.items()))) for each, by in zip(self.answers, shares, strict=True)
        ]
        return replace(self, depths=[depths[k] for k in sorted(depths)], answers=answers)

    def with_bytes(self, num_bytes: int) -> Split:
        """The same with bits per byte: total nats in bits, over the true UTF-8 bytes of the text."""
        assert self.tokens is not None
        bits = self.tokens / math.log(2) / num_bytes
        depths = [replace(depth, bits_per_byte=None if depth.ce is None else depth.ce * bits) for depth in self.depths]
        return replace(self, depths=depths, bytes=num_bytes)

    def to_json(self) -> dict[str, Any]:
        """As eval.json keeps it."""
        depths, answers = ([each.to_json() for each in rows] for rows in (self.depths, self.answers))
        return {"tokens": self.tokens, "bytes": self.bytes, "depths": depths, "answers": answers}

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        answers = {steps: row for row in part.parts("answers") if (steps := row.integer("steps")) is not None}
        return part.as_a(
            cls,
            depths=[row.as_a(Depth, k=k) for k, row in part.by_number("depths").items()],
            answers=[Answers.from_json(row, steps) for steps, row in answers.items()],
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """eval.json: a model's scores at every depth on every split, and its speed."""

    step: int | None
    tokenizer: str
    num_loops: int | None
    """The depth it was trained at; scores may go beyond."""
    splits: dict[str, Split]
    """By name; one without a name is what `loopscope eval --json` prints."""
    throughput: dict[int, float] = field(default_factory=dict)
    """Tokens per second of k loops and one readout, by k."""
    threads: int | None = None
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        """What eval.json holds."""
        speeds = [{"k": k, "tokens_per_second": speed} for k, speed in self.throughput.items()]
        splits = {name: split.to_json() for name, split in self.splits.items()}
        plain = {**vars(self), "splits": splits, "throughput": speeds}
        return without_nan({"schema_version": SCHEMA_VERSION, **plain})

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it; validation text comes first."""
        found = {name: Split.from_json(split) for name, split in {"": part, **part.named_parts("splits")}.items()}
        order = ("", *SPLITS)
        names = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
        speeds = {k: row.number("tokens_per_second") for k, row in part.by_number("throughput").items()}
        return part.as_a(
            cls,
            splits={name: found[name] for name in names if found[name].depths},
            throughput={k: speed for k, speed in speeds.items() if speed is not None},
        )
