"""What a claim is: quantities that are measured seed by seed, each with a rule for its mean, and the verdict on them.

A claim holds when the mean over seeds obeys every rule of it (or every seed, where the rule says so); seeds are listed
one by one. It fails as soon as one measured rule is broken, and is not measured while one is missing. Of claims about
CE it is too early to speak while one of their models is hardly better than a unigram model. No torch here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loopscope.results.measures import unigram_gain
from loopscope.results.reproduction import (
    FAILS,
    HOLDS,
    NOT_MEASURED,
    TOO_EARLY,
    Judgement,
    Measured,
    OfSeed,
    PaperValue,
    Verdict,
)
from loopscope.show.numbers import padded
from loopscope.studies.results import View

RESAMPLES = 10_000
LEARNED = 0.1
"""Nats below a unigram model from which a model has learned enough for its CE to say something."""
UNGUARDED = "rows of an older version do not tell whether it is too early to say: they have no unigram model"


@dataclass(frozen=True)
class Bound:
    """The rule a mean has to obey."""

    kind: Literal["at least", "at most", "below", "above"]
    limit: float

    def obeyed(self, value: float) -> bool:
        """Whether a value obeys it."""
        rules = {"at least": operator.ge, "at most": operator.le, "below": operator.lt, "above": operator.gt}
        return bool(rules[self.kind](value, self.limit))

    def __str__(self) -> str:
        return f"{self.kind} {self.limit:g}"


@dataclass(frozen=True)
class Quantity:
    """A measured number, seed by seed; without a bound it is there to be read."""

    name: str
    unit: str
    seeds: dict[int, float]
    bound: Bound | None = None
    every: bool = False
    """Not only the mean: every seed has to obey the bound."""
    told: bool = False
    """Shown with the claim although no rule is about it."""
    signed: bool = False
    """Shown with its sign, + included."""

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return float(np.mean(list(self.seeds.values()))) if self.seeds else None

    @property
    def obeyed(self) -> bool | None:
        """Whether the mean (or every seed) obeys the bound; None without a bound or a measurement."""
        if self.bound is None or self.mean is None:
            return None
        return all(map(self.bound.obeyed, self.seeds.values())) if self.every else self.bound.obeyed(self.mean)

    def in_words(self) -> str:
        """Name, mean, rule, and how many seeds obey it by themselves."""
        assert self.bound is not None
        agreeing = sum(self.bound.obeyed(value) for value in self.seeds.values())
        return f"{self.name} {padded(self.mean)} (must be {self.bound}; {agreeing} of {len(self.seeds)} seeds)"

    def summary(self) -> Measured:
        """With what follows from the seeds, as claims.json keeps it."""
        low, high = bootstrap(list(self.seeds.values())) or (None, None)
        return Measured(
            name=self.name,
            unit=self.unit,
            seeds=[OfSeed(seed, float(value)) for seed, value in self.seeds.items()],
            n=len(self.seeds),
            mean=self.mean,
            low=low,
            high=high,
            rule=None if self.bound is None else str(self.bound),
            obeyed=self.obeyed,
            headline=self.told or self.bound is not None,
            signed=self.signed,
        )


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % percentile interval of the mean over resampled values: of two or three, their range; one has none."""
    if len(values) < 2:
        return None
    draws = np.random.default_rng(0).choice(np.array(values), (RESAMPLES, len(values)))
    low, high = np.percentile(draws.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


Evidence = Callable[[View], list[Quantity]]


@dataclass(frozen=True)
class Claim:
    """A claim: what is measured, the rule, what the paper reports."""

    id: str
    title: str
    measured: str
    rule: str
    paper: tuple[PaperValue, ...]
    evidence: Evidence
    """The numbers it is about, each with its rule."""
    on_validation_alone: bool = False
    """Measured by audits or by calibration alone, which run on validation text; judged on no other."""
    compares_ce: tuple[str, ...] = ()
    """Conditions whose CE it is about: twelve steps make differences of CE as large as one likes, and mean nothing."""

    def judge(self, view: View, recipe: str) -> Judgement:
        """The claim on the rows of one recipe and split."""
        quantities = self.evidence(view)
        verdict, reason = self._verdict(view, quantities)
        return Judgement(
            recipe=recipe,
            split=view.split,
            id=self.id,
            title=self.title,
            measured=self.measured,
            rule=self.rule,
            paper=list(self.paper),
            quantities=[quantity.summary() for quantity in quantities],
            verdict=verdict,
            reason=reason,
        )

    def _verdict(self, view: View, quantities: list[Quantity]) -> tuple[Verdict, str]:
        missing = [quantity.name for quantity in quantities if quantity.bound and not quantity.seeds]
        judged = [quantity for quantity in quantities if quantity.obeyed is not None]
        words = [quantity.in_words() for quantity in judged] + [f"not measured: {name}" for name in missing]
        if judged and (early := untaught(view, self.compares_ce)):
            rows = ", ".join(f"{name} {padded(gain, 3, '+')}" for name, gain in early.items())
            asked = f"must be at least {LEARNED:g}"
            return TOO_EARLY, f"nats by which a unigram model of the same text is worse ({asked}): {rows}"
        if unguarded(view, self.compares_ce):
            words.append(UNGUARDED)
        if not all(quantity.obeyed for quantity in judged):
            return FAILS, "; ".join(words)
        return NOT_MEASURED if missing or not judged else HOLDS, "; ".join(words)


def untaught(view: View, conditions: Sequence[str]) -> dict[str, float]:
    """Rows whose CE at full depth is not yet clearly below that of a unigram model: by name, how far it is."""
    rows = {f"{name}-s{seed}": row for name in conditions for seed, row in view.of(name).items()}
    gains = {name: unigram_gain(row, view.split) for name, row in rows.items()}
    return {name: gain for name, gain in gains.items() if gain is not None and gain < LEARNED}


def unguarded(view: View, conditions: Sequence[str]) -> bool:
    """Whether some row, of an older version, does not tell what a unigram model gives."""
    return any(unigram_gain(row, view.split) is None for name in conditions for row in view.of(name).values())
