"""Scores after every loop, the verdicts on them, and eval.json, which keeps them.

No torch here: reports read what evaluations write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from loopscope.files import Part, without_nan
from loopscope.results.thresholds import BROKEN, CERTAIN, HALVED, NOTICED

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
class HaltedScore:
    """A text under a halting policy: a point of the frontier between two fixed depths."""

    policy: str
    """The file, or RULE:THRESHOLD."""
    rule: str
    threshold: float | None
    """None: no token ever leaves early."""
    fill: str
    mean_loops: float | None
    """Loops a token."""
    ce: float | None
    """Nats per token."""
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    """Of decoding at batch 1, where speed was asked for."""

    @property
    def perplexity(self) -> float | None:
        """As of a depth."""
        return self.as_depth.perplexity

    @property
    def as_depth(self) -> Depth:
        """The same qualities as a fixed depth has, for whoever compares them; it has no whole number of loops."""
        return Depth(0, self.ce, None, self.bits_per_byte)

    def to_json(self) -> dict[str, Any]:
        """As eval.json keeps it."""
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
    halting: list[HaltedScore] = field(default_factory=list)
    """Of halting policies, where some were named."""

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
        halting = {each.policy: each for each in (*before.halting, *self.halting)}
        return replace(
            self, depths=[depths[k] for k in sorted(depths)], answers=answers, halting=list(halting.values())
        )

    def with_bytes(self, num_bytes: int) -> Split:
        """The same with bits per byte: total nats in bits, over the true UTF-8 bytes of the text."""
        assert self.tokens is not None
        bits = self.tokens / math.log(2) / num_bytes
        depths = [replace(depth, bits_per_byte=None if depth.ce is None else depth.ce * bits) for depth in self.depths]
        halting = [replace(each, bits_per_byte=None if each.ce is None else each.ce * bits) for each in self.halting]
        return replace(self, depths=depths, halting=halting, bytes=num_bytes)

    def to_json(self) -> dict[str, Any]:
        """As eval.json keeps it."""
        depths, answers, halting = (
            [each.to_json() for each in rows] for rows in (self.depths, self.answers, self.halting)
        )
        return {
            "tokens": self.tokens, "bytes": self.bytes, "depths": depths, "answers": answers, "halting": halting
        }  # fmt: skip

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        answers = {steps: row for row in part.parts("answers") if (steps := row.integer("steps")) is not None}
        return part.as_a(
            cls,
            depths=[row.as_a(Depth, k=k) for k, row in part.by_number("depths").items()],
            answers=[Answers.from_json(row, steps) for steps, row in answers.items()],
            halting=[row.as_a(HaltedScore) for row in part.parts("halting")],
        )


# --- beyond the trained depth ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beyond:
    """What happens to CE at depths k beyond the trained one, K: each is better, flat, worse or broken.

    better   CE(k) ≤ CE(K) − NOTICED        worse    CE(k) ≥ CE(K) + NOTICED
    flat     in between                     broken   CE(k) ≥ CE(K) + BROKEN, or not a number
    """

    trained: int
    deepest: int
    better_until: int | None
    """The last better depth before any that is worse."""
    flat_until: int | None
    """The last depth before any that is worse."""
    worse_from: int | None
    """The first worse depth."""
    broken_from: int | None

    @property
    def sentence(self) -> str:
        """Better until 6, flat until 8, broken from 9."""
        parts = [] if self.better_until is None else [f"better until {self.better_until}"]
        if self.flat_until not in (None, self.better_until):
            parts.append(f"flat until {self.flat_until}")
        if self.worse_from not in (None, self.broken_from):
            parts.append(f"worse from {self.worse_from}")
        if self.broken_from is not None:
            parts.append(f"broken from {self.broken_from}")
        deepest = "" if self.worse_from is not None else ", the deepest measured"
        return f"Beyond the trained {self.trained} loops: {', '.join(parts)}{deepest}."


def beyond(split: Split, num_loops: int) -> Beyond | None:
    """The verdict on depths beyond `num_loops`; None where none was measured, or the trained one was not."""
    trained = split.at(num_loops)
    deeper = [depth for depth in split.depths if depth.k > num_loops]
    if trained is None or trained.ce is None or not deeper:
        return None
    cost = {depth.k: math.inf if depth.ce is None else depth.ce - trained.ce for depth in deeper}
    cost = {k: math.inf if math.isnan(by) else by for k, by in cost.items()}
    worse_from = next((k for k, by in cost.items() if by >= NOTICED), None)
    before = [k for k in cost if worse_from is None or k < worse_from]
    return Beyond(
        trained=num_loops,
        deepest=deeper[-1].k,
        better_until=next((k for k in reversed(before) if cost[k] <= -NOTICED), None),
        flat_until=before[-1] if before else None,
        worse_from=worse_from,
        broken_from=next((k for k, by in cost.items() if by >= BROKEN), None),
    )


# --- what a cache may drop -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyCost:
    """What a cache policy saves, and what it costs on text that is decoded under it."""

    policy: str
    applies_to: str
    """decode: prompts run with all slots; or prefill and decode."""
    bytes_per_token: int | None
    share: float | None
    """Of the bytes of an exact cache."""
    ce: float | None
    """Nats per token; None where the model gave no numbers any more."""
    delta_ce: float | None
    """CE − that of the exact cache, on the same tokens."""
    standard_error: float | None
    """Of `delta_ce`, over windows; None for a single one."""

    @property
    def verdict(self) -> str:
        """Safe below `NOTICED`, unsafe above, by two standard errors; else undecided, and more text would decide."""
        if self.delta_ce is None:
            return "unsafe"
        margin = CERTAIN * (self.standard_error or 0.0)
        if self.delta_ce + margin <= NOTICED:
            return "safe"
        return "unsafe" if self.delta_ce - margin > NOTICED else "undecided"

    @property
    def name(self) -> str:
        """The policy and where it applies, in words."""
        return f"{self.policy} ({'decode only' if self.applies_to == 'decode' else 'prefill too'})"


@dataclass(frozen=True, kw_only=True)
class CacheTable:
    """Every cache policy of one model, and how its loop moves."""

    num_loops: int | None
    windows: int | None
    tokens: int | None
    """Targets that each ΔCE is a mean of."""
    policies: list[PolicyCost]
    """The exact cache first."""
    update_ratio: float | None
    """‖h_K − h_{K−1}‖ over ‖h_2 − h_1‖: well below 1 where the loop contracts. None with fewer than three loops."""
    turning_ratio: float | None
    """The same of the directions u = h/s, which is what keys and values of a pre-norm model are made of."""
    scale_ratio: float | None
    """s_K / s_1."""

    @property
    def cheapest(self) -> PolicyCost | None:
        """The safe policy that keeps the fewest bytes, and of those the one that costs least."""
        safe = [each for each in self.policies[1:] if each.verdict == "safe"]
        return min(safe, key=lambda each: (each.share or 1.0, each.delta_ce or 0.0), default=None)

    @property
    def summary(self) -> str:
        """Which policies are safe, the cheapest of them, and how the loop moves."""
        others, cheapest = self.policies[1:], self.cheapest
        if not others:
            return "One loop has one slot: there is nothing to share."
        safe = [each.name for each in others if each.verdict == "safe"]
        if cheapest is not None:
            says = f"Safe at {NOTICED} nats a token: {', '.join(safe)}. "
            kept = "" if cheapest.share is None else f", {cheapest.share:.3g} of the exact bytes"
            says += f"Cheapest: {cheapest.name}{kept}."
        else:
            best = min(others, key=lambda each: math.inf if each.delta_ce is None else each.delta_ce)
            says = f"No policy is safe at {NOTICED} nats a token; the least costly is {best.name}"
            says += "." if best.delta_ce is None else f" at {best.delta_ce:+.4f}."
        if undecided := [each.name for each in others if each.verdict == "undecided"]:
            says += f" Undecided on this much text: {', '.join(undecided)}."
        return says + self._motion()

    def _motion(self) -> str:
        if self.update_ratio is None or self.turning_ratio is None or self.scale_ratio is None:
            return ""
        contracts = "contracts" if self.update_ratio <= HALVED else "does not contract"
        turns = "turns less and less" if self.turning_ratio <= HALVED else "goes on turning"
        drifts = "keeps its scale" if HALVED < self.scale_ratio < 1 / HALVED else "drifts in scale"
        return (
            f" The loop {contracts} (last update {self.update_ratio:.3g} of the first), {turns} "
            f"({self.turning_ratio:.3g}) and {drifts} (s_K/s_1 = {self.scale_ratio:.3g})."
        )

    def to_json(self) -> dict[str, Any]:
        """As `loopscope eval --cache-policies --json` prints it and eval.json keeps it."""
        costs = [{**asdict(each), "verdict": each.verdict} for each in self.policies]
        return {**vars(self), "policies": costs, "summary": self.summary}

    @classmethod
    def from_json(cls, part: Part) -> Self | None:
        """What can be read of it; None where there is no such table."""
        rows = [row.as_a(PolicyCost) for row in part.parts("policies")]
        return part.as_a(cls, policies=rows) if rows else None


# --- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Tokens per second of one way to run a depth: median and quartiles over rounds in which all take turns."""

    k: int | None
    what: str
    """prefill, decode, or decode with something besides."""
    tokens_per_second: float | None
    low: float | None
    high: float | None
    bytes_per_token: int | None
    """Of the cache; None without one."""


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
    speed: list[Timing] = field(default_factory=list)
    """Of prefill and decoding, where it was asked for."""
    cache: CacheTable | None = None
    """What cache policies cost, where it was asked for."""
    threads: int | None = None
    device: str = ""
    unigram_ce: dict[str, float] = field(default_factory=dict)
    """By split, the CE of a unigram model of the training text: what has to be beaten before a CE says anything."""

    def to_json(self) -> dict[str, Any]:
        """What eval.json holds."""
        speeds = [{"k": k, "tokens_per_second": speed} for k, speed in self.throughput.items()]
        splits = {name: split.to_json() for name, split in self.splits.items()}
        cache = None if self.cache is None else self.cache.to_json()
        timings = [asdict(each) for each in self.speed]
        plain = {**vars(self), "splits": splits, "throughput": speeds, "speed": timings, "cache": cache}
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
            speed=[row.as_a(Timing) for row in part.parts("speed")],
            cache=CacheTable.from_json(part.part("cache")),
        )
