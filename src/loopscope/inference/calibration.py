"""A halting threshold with a promise: with confidence 1 − δ, leaving early costs at most b nats a token.

Learn-then-Test with a fixed sequence: thresholds are ordered from "always K loops" outwards before any of them is
tested, each hypothesis H: E x > b is tested at level δ on calibration units, and testing stops at the first that is not
rejected; the last rejected threshold is certified. Because the order is fixed, no correction for many tests is needed.

x is a unit's mean ΔCE against full depth, clipped to ±CLIP·b so that it is bounded. The p-value is that of betting
(Waudby-Smith and Ramdas): somebody who bets against H with money that H would keep fair ends rich only by chance δ. The
bound of Hoeffding and Bentkus is computed beside it; it is valid too, and looser.

Shape legend: N units, A articles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

CLIP = 5.0
"""Units' losses are clipped to so many times the bound. Clipping from below is conservative."""
SHARE_OF_MOST = 0.75
"""Largest bet, as a share of the one that a single unit could lose altogether: wealth that is gone never comes back."""

REGROUPINGS = 999
"""Random regroupings that article means are compared with; p-values are then multiples of 0.001."""
PASSES = 0.95
"""How often a verification should pass a procedure that fails exactly as often as it may."""

PValue = Callable[[np.ndarray, float, float], float]
"""Losses, bound, level → p-value."""


def clipped(losses_N: Sequence[float] | np.ndarray, b: float) -> np.ndarray:
    """Losses within ±CLIP·b."""
    return np.clip(np.asarray(losses_N, dtype=np.float64), -CLIP * b, CLIP * b)


def _scaled(losses_N: Sequence[float] | np.ndarray, b: float) -> tuple[np.ndarray, float]:
    """Clipped losses in [0, 1], and where the bound then lies."""
    span = CLIP * b
    return (clipped(losses_N, b) + span) / (2 * span), (b + span) / (2 * span)


def betting_p_value(losses_N: Sequence[float] | np.ndarray, b: float, delta: float) -> float:
    """p-value of H: E x > b, valid for any bounded distribution, x clipped to ±CLIP·b.

        y = (x + C)/(2C) ∈ [0, 1] with C = CLIP·b, m = (b + C)/(2C)
        wealth_t = Π_{i≤t} (1 + λ_i·(m − y_i)),  p = 1/max_t wealth_t

    Under H the wealth is a supermartingale that begins at 1 and never is negative, as long as 0 ≤ λ_i ≤ 1/(1 − m) is
    chosen before y_i is seen: by Ville's inequality P(max wealth ≥ 1/p) ≤ p. The bets are those that would be best
    for the mean and variance seen so far and the level δ that is asked for.
    """
    y_N, m = _scaled(losses_N, b)
    count, seen_N = len(y_N), np.arange(1, len(y_N) + 1)
    # Mean and variance begin with one imagined unit, in the middle and of the largest variance.
    mean_N = (0.5 + np.cumsum(y_N)) / (seen_N + 1)
    squares_N = 0.25 + np.concatenate([[0.0], np.cumsum((y_N - mean_N) ** 2)[:-1]])
    best_N = np.sqrt(2 * math.log(1 / delta) * seen_N / (squares_N * count))
    wealth_N = np.cumsum(np.log1p(np.minimum(SHARE_OF_MOST / (1 - m), best_N) * (m - y_N)))
    return math.exp(-max(0.0, float(wealth_N.max(initial=0.0))))


def hoeffding_bentkus_p_value(losses_N: Sequence[float] | np.ndarray, b: float, delta: float | None = None) -> float:
    """p-value of H: E x > b by the bound of Hoeffding and Bentkus, x clipped to ±CLIP·b.

    It does not depend on the level δ that it is asked at.

        min{exp(−n·h(min(ȳ, m), m)), e·P(Binomial(n, m) ≤ ⌈n·ȳ⌉)},  h(a, m) = a·ln(a/m) + (1 − a)·ln((1 − a)/(1 − m))
    """
    y_N, m = _scaled(losses_N, b)
    count, mean = len(y_N), float(y_N.mean())
    low = min(mean, m)
    divergence = sum(p * math.log(p / q) if p > 0 else 0.0 for p, q in ((low, m), (1 - low, 1 - m)))
    hits = math.ceil(count * mean - 1e-9)
    logs = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * math.log(m)
        + (count - k) * math.log1p(-m)
        for k in range(min(hits, count) + 1)
    ]  # fmt: skip
    return min(1.0, math.exp(-count * divergence), math.e * math.fsum(map(math.exp, logs)))


def units_needed(b: float, delta: float, p_value: PValue = betting_p_value, most: int = 10_000) -> int:
    """Units at which a rule that changes nothing would be certified: fewer cannot promise anything."""
    return next(n for n in range(1, most) if p_value(np.zeros(n), b, delta) <= delta)


def last_certified(p_values: Sequence[float], delta: float) -> int | None:
    """Index of the last threshold of a fixed sequence whose hypothesis, and all before it, is rejected."""
    passed = next((index for index, p in enumerate(p_values) if p > delta), len(p_values))
    return passed - 1 if passed else None


def alike(losses_N: Sequence[float] | np.ndarray, articles_N: Sequence[int], seed: int = 0) -> float:
    """p-value of "units of one article are no more alike than units of different ones".

    The statistic is the spread of article means, Σ_a n_a·(x̄_a − x̄)²; its distribution without any likeness is that of
    the same units dealt to articles of the same sizes at random, REGROUPINGS times. Where it is small, units are not
    independent draws and what a unit adds to the evidence is counted too high: the article must be the unit.
    """
    x_N = np.asarray(losses_N, dtype=np.float64)
    _, home_N = np.unique(np.asarray(articles_N), return_inverse=True)
    sizes_A = np.bincount(home_N)
    x_N = x_N - x_N.mean()

    def spread(values_N: np.ndarray) -> float:
        return float((np.bincount(home_N, weights=values_N) ** 2 / sizes_A).sum())

    rng, observed = np.random.default_rng(seed), spread(x_N)
    # Equal spreads count as reached: with one unit an article, or all units equal, nothing can be told.
    reached = sum(spread(rng.permutation(x_N)) >= observed * (1 - 1e-9) for _ in range(REGROUPINGS))
    return (1 + reached) / (1 + REGROUPINGS)


def article_means(losses_N: np.ndarray, articles_N: Sequence[int]) -> np.ndarray:
    """One loss an article, in the order in which articles first occur."""
    homes = list(dict.fromkeys(articles_N))
    members_N = np.asarray(articles_N)
    return np.array([losses_N[members_N == home].mean() for home in homes])


def failures_allowed(draws: int, confidence: float) -> int:
    """The most failures among so many recalibrations that chance explains: P(Binomial(n, 1 − confidence) ≤ c) ≥ 0.95.

    A procedure that fails exactly as often as it may passes with that probability; 15 of 200 at 95 %.
    """
    rate, total = 1 - confidence, 0.0
    for count in range(draws + 1):
        logs = math.lgamma(draws + 1) - math.lgamma(count + 1) - math.lgamma(draws - count + 1)
        total += math.exp(logs + count * math.log(rate) + (draws - count) * math.log1p(-rate))
        if total >= PASSES:
            return count
    return draws
