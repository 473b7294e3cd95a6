"""eval.json: what reading out after every loop gives, the verdicts on that, what caches may drop, and speed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from loopscope.results.record import Count, Record, Text
from loopscope.results.thresholds import BROKEN, CERTAIN, HALVED, NOTICED

SPLITS = ("valid", "test")
"""Splits that are scored, in the order they are shown: choices are made on the first."""
MOST_PERPLEXITY_CE = 700.0
"""Nats above which exp(CE) is not a number any more."""


def perplexity_of(ce: float | None) -> float | None:
    """exp(CE), where that is a number: comparable only under the same tokenizer."""
    return None if ce is None or ce > MOST_PERPLEXITY_CE else math.exp(ce)


@dataclass(frozen=True, slots=True)
class Depth:
    """What reading out after loop k gives."""

    k: Count
    ce: float | None
    """Nats per token."""
    norm: float | None
    """Mean ‖h_k‖."""
    bits_per_byte: float | None = None
    perplexity: float | None = field(init=False, default=None)
    """Follows from CE; it is in the file for people."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "perplexity", perplexity_of(self.ce))


@dataclass(frozen=True, slots=True)
class HaltedScore:
    """A text under a halting policy: a point of the frontier between two fixed depths."""

    policy: Text
    """The file, or RULE:THRESHOLD."""
    rule: Text
    threshold: float | None
    """None: no token ever leaves early."""
    fill: Text
    mean_loops: float | None
    """Loops a token."""
    ce: float | None
    """Nats per token."""
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    """Of decoding at batch 1, where speed was asked for."""
    perplexity: float | None = field(init=False, default=None)
    """As of a depth."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "perplexity", perplexity_of(self.ce))

    @property
    def as_depth(self) -> Depth:
        """The same qualities as a fixed depth has, for whoever compares them; it has no whole number of loops."""
        return Depth(0, self.ce, None, self.bits_per_byte)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The share of answers that are right after loop k."""

    k: Count
    accuracy: float


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a task that take so many steps, and the share of them that is right after every loop."""

    steps: Count
    count: Count
    """Answers behind every share."""
    depths: list[Accuracy]

    @property
    def accuracy(self) -> dict[int, float]:
        """The shares by loop."""
        return {each.k: each.accuracy for each in self.depths}


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Scores at every depth on one text."""

    tokens: Count | None = None
    bytes: Count | None = None
    depths: list[Depth]
    answers: list[Answers] = field(default_factory=list)
    """Of a task, by the steps they take."""
    halting: list[HaltedScore] = field(default_factory=list)
    """Of halting policies, where some were named."""

    def at(self, k: int) -> Depth | None:
        """The scores after loop k."""
        return next((depth for depth in self.depths if depth.k == k), None)

    def of(self, ks: Iterable[int]) -> Split:
        """Some of the depths."""
        chosen = set(ks)
        answers = [replace(each, depths=[row for row in each.depths if row.k in chosen]) for each in self.answers]
        return replace(self, depths=[depth for depth in self.depths if depth.k in chosen], answers=answers)

    def joined(self, before: Split | None) -> Split:
        """These scores with earlier ones of the same model and text; where more of it was read then, those stay."""
        if before is None or (before.tokens or 0) < (self.tokens or 0):
            return self
        if before.tokens != self.tokens:
            return before
        depths = {depth.k: depth for depth in (*before.depths, *self.depths)}
        halting = {each.policy: each for each in (*before.halting, *self.halting)}
        answers = []
        for each in self.answers:
            earlier = [row for other in before.answers if other.steps == each.steps for row in other.depths]
            shares = {row.k: row for row in (*earlier, *each.depths)}
            answers.append(replace(each, depths=[shares[k] for k in sorted(shares)]))
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


# --- beyond the trained depth ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """What a cache policy saves, and what it costs on text that is decoded under it."""

    policy: Text
    applies_to: Text
    """decode: prompts run with all slots; or prefill and decode."""
    bytes_per_token: Count | None
    share: float | None
    """Of the bytes of an exact cache."""
    ce: float | None
    """Nats per token; None where the model gave no numbers any more."""
    delta_ce: float | None
    """CE − that of the exact cache, on the same tokens."""
    standard_error: float | None
    """Of `delta_ce`, over windows; None for a single one."""
    verdict: Literal["safe", "unsafe", "undecided"] = field(init=False, default="unsafe")
    """Safe below `NOTICED`, unsafe above, by two standard errors; else undecided, and more text would decide."""

    def __post_init__(self) -> None:
        if self.delta_ce is None:
            return
        margin = CERTAIN * (self.standard_error or 0.0)
        is_safe, is_unsafe = self.delta_ce + margin <= NOTICED, self.delta_ce - margin > NOTICED
        object.__setattr__(self, "verdict", "safe" if is_safe else "unsafe" if is_unsafe else "undecided")

    @property
    def name(self) -> str:
        """The policy and where it applies, in words."""
        return f"{self.policy} ({'decode only' if self.applies_to == 'decode' else 'prefill too'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTable:
    """Every cache policy of one model, and how its loop moves."""

    num_loops: Count
    windows: Count
    tokens: Count
    """Targets that each ΔCE is a mean of."""
    policies: list[PolicyCost]
    """The exact cache first."""
    update_ratio: float | None
    """‖h_K − h_{K−1}‖ over ‖h_2 − h_1‖: well below 1 where the loop contracts. None with fewer than three loops."""
    turning_ratio: float | None
    """The same of the directions u = h/s, which is what keys and values of a pre-norm model are made of."""
    scale_ratio: float | None
    """s_K / s_1."""

    summary: str = field(init=False, default="")
    """Which policies are safe, the cheapest of them, and how the loop moves."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", self._summary())

    @property
    def cheapest(self) -> PolicyCost | None:
        """The safe policy that keeps the fewest bytes, and of those the one that costs least."""
        safe = [each for each in self.policies[1:] if each.verdict == "safe"]
        return min(safe, key=lambda each: (each.share or 1.0, each.delta_ce or 0.0), default=None)

    def _summary(self) -> str:
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


# --- speed -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """Tokens per second of one way to run a depth: median and quartiles over rounds in which all take turns."""

    k: Count
    what: Text
    """prefill, decode, or decode with something besides."""
    tokens_per_second: float | None
    low: float | None
    high: float | None
    bytes_per_token: Count | None
    """Of the cache; None without one."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens per second of k loops and one readout."""

    k: Count
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Record):
    """A model's scores at every depth on every split, and its speed."""

    step: Count | None
    tokenizer: Text
    num_loops: Count
    """The depth it was trained at; scores may go beyond."""
    splits: dict[Text, Split]
    """By name, validation text first."""
    throughput: list[Throughput] = field(default_factory=list)
    speed: list[Timing] = field(default_factory=list)
    """Of prefill and decoding, where it was asked for."""
    cache: CacheTable | None = None
    """What cache policies cost, where it was asked for."""
    threads: Count | None = None
    device: Text = ""
    unigram_ce: dict[Text, float] = field(default_factory=dict)
    """By split, the CE of a unigram model of the training text: what has to be beaten before a CE says anything."""


@dataclass(frozen=True, slots=True)
class TaskDepth:
    """One metric of a task after k loops."""

    k: Count
    value: float | None
    stderr: float | None = None
    """None where the harness gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetric:
    """One metric of one task at every depth."""

    task: Text
    metric: Text
    """With the harness's filter behind it where that is not "none": exact_match,strict."""
    higher_is_better: bool | None
    samples: Count | None
    depths: list[TaskDepth]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvaluation(Record):
    """What `loopscope eval --tasks` prints."""

    target: Text
    step: Count | None
    harness: Text
    """Version of lm-evaluation-harness."""
    tasks: list[TaskMetric]
