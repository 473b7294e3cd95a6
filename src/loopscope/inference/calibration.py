"""A halting threshold with a promise: with confidence 1 − δ, leaving early costs at most b nats a token.

Learn-then-Test with a fixed sequence: thresholds are ordered from "always K loops" outwards before any of them is
tested, each hypothesis H: E x > b is tested at level δ on calibration units, and testing stops at the first that is not
rejected; the last rejected threshold is certified. Because the order is fixed, no correction for many tests is needed.

x is a unit's mean ΔCE against full depth, clipped to ±CLIP·b so that it is bounded. The p-value is that of betting
(Waudby-Smith and Ramdas): somebody who bets against H with money that H would keep fair ends rich only by chance δ. The
bound of Hoeffding and Bentkus is computed beside it; it is valid too, and looser.

Shape legend: N units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CLIP = 5.0
"""Units' losses are clipped to so many times the bound. Clipping from below is conservative."""
SHARE_OF_MOST = 0.75
"""Largest bet, as a share of the one that a single unit could lose altogether."""


def clipped(losses_N: Sequence[float] | np.ndarray, b: float) -> np.ndarray:
    """Losses within ±CLIP·b."""
    return np.clip(np.asarray(losses_N, dtype=np.float64), -CLIP * b, CLIP * b)


def betting_p_value(losses_N: Sequence[float] | np.ndarray, b: float, delta: float) -> float:
    """p-value of H: E x > b, valid for any bounded distribution, x clipped to ±CLIP·b.

        y = (x + C)/(2C) ∈ [0, 1] with C = CLIP·b, m = (b + C)/(2C)
        wealth_t = Π_{i≤t} (1 + λ_i·(m − y_i)),  p = 1/max_t wealth_t

    Under H the wealth is a supermartingale that begins at 1 and never is negative, as long as 0 ≤ λ_i ≤ 1/(1 − m) is
    chosen before y_i is seen: by Ville's inequality P(max wealth ≥ 1/p) ≤ p. The bets are those that would be best
    for the mean and variance seen so far and the level δ that is asked for.
    """
    span = CLIP * b
    y_N, m = (clipped(losses_N, b) + span) / (2 * span), (b + span) / (2 * span)
    count, most = len(y_N), SHARE_OF_MOST / (1 - m)
    log_wealth = best = 0.0
    total, squares = 0.5, 0.25  # one imagined unit, in the middle and of the largest variance
    for seen, y in enumerate(y_N, start=1):
        variance = squares / seen
        bet = min(most, math.sqrt(2 * math.log(1 / delta) / (variance * count)))
        log_wealth += math.log1p(bet * (m - y))
        best = max(best, log_wealth)
        total += y
        squares += (y - total / (seen + 1)) ** 2
    return math.exp(-best)


def hoeffding_bentkus_p_value(losses_N: Sequence[float] | np.ndarray, b: float) -> float:
    """p-value of H: E x > b by the bound of Hoeffding and Bentkus, x clipped to ±CLIP·b.

    min{exp(−n·h(min(ȳ, m), m)), e·P(Binomial(n, m) ≤ ⌈n·ȳ⌉)},  h(a, m) = a·ln(a/m) + (1 − a)·ln((1 − a)/(1 − m))
    """
    span = CLIP * b
    y_N, m = (clipped(losses_N, b) + span) / (2 * span), (b + span) / (2 * span)
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


def units_needed(b: float, delta: float, most: int = 10_000) -> int:
    """Units at which a rule that changes nothing would be certified: fewer cannot promise anything."""
    return next(n for n in range(1, most) if betting_p_value([0.0] * n, b, delta) <= delta)


def last_certified(p_values: Sequence[float], delta: float) -> int | None:
    """Index of the last threshold of a fixed sequence whose hypothesis, and all before it, is rejected."""
    passed = next((index for index, p in enumerate(p_values) if p > delta), len(p_values))
    return passed - 1 if passed else None
