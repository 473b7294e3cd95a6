"""Certified thresholds: p-values that keep their level, and a sequence that stops at the first doubt."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mapie.risk_control import FWERFixedSequenceTesting
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

from loopscope.inference.calibration import (
    CLIP,
    alike,
    article_means,
    betting_p_value,
    failures_allowed,
    hoeffding_bentkus_p_value,
    last_certified,
    units_needed,
)

B, DELTA = math.log(1.01), 0.05


def draws(kind, rng, n):
    """Units whose mean loss, clipped, is the bound itself: the least that H contains."""
    if kind == "all or nothing":
        return np.where(rng.random(n) < 1 / CLIP, CLIP * B, 0.0)
    if kind == "from end to end":
        return np.where(rng.random(n) < (CLIP + 1) / (2 * CLIP), CLIP * B, -CLIP * B)
    return rng.normal(B, B, n)


@pytest.mark.parametrize("kind", ["all or nothing", "from end to end", "normal"])
def test_a_rule_that_costs_the_bound_is_certified_no_more_often_than_allowed(kind):
    """2,000 calibrations of 80 units: a rate of 0.05 has a standard error of 0.005."""
    rng = np.random.default_rng(0)
    rate = np.mean([betting_p_value(draws(kind, rng, 80), B, DELTA) <= DELTA for _ in range(2000)])
    assert rate <= DELTA + 3 * 0.005


def test_a_rule_that_costs_nothing_is_certified_with_few_units():
    """What Hoeffding and Bentkus need 118 units for."""
    needed = units_needed(B, DELTA)
    assert needed <= 26
    assert betting_p_value([0.0] * (needed - 1), B, DELTA) > DELTA
    assert hoeffding_bentkus_p_value([0.0] * 117, B) > DELTA >= hoeffding_bentkus_p_value([0.0] * 118, B)


@pytest.mark.parametrize("kind", ["all or nothing", "from end to end", "normal"])
def test_betting_p_values_are_super_uniform_where_the_mean_is_the_bound_itself(kind):
    """P(p ≤ u) ≤ u at every level, also those that bets were not made for; three standard errors of 2,000 draws."""
    rng = np.random.default_rng(2)
    p_values = np.array([betting_p_value(draws(kind, rng, 60), B, DELTA) for _ in range(2000)])
    for u in (0.01, 0.05, 0.1, 0.25, 0.5, 0.9):
        assert (p_values <= u).mean() <= u + 3 * math.sqrt(u * (1 - u) / 2000)


def test_bets_are_made_before_a_unit_is_seen():
    """The wealth of the first units is the same whatever comes later, if as many come."""

    def wealths(x_N):
        later = np.full(20, CLIP * B)  # loses all that can be lost: the most that was ever had is before it
        return betting_p_value(np.concatenate([x_N, later]), B, DELTA)

    x_N = np.random.default_rng(0).normal(0, B, 40)
    expected, log_wealth, best, total, squares, m = 60, 0.0, 0.0, 0.5, 0.25, (CLIP + 1) / (2 * CLIP)
    for seen, y in enumerate((np.clip(x_N, -CLIP * B, CLIP * B) / B + CLIP) / (2 * CLIP), start=1):
        bet = min(0.75 / (1 - m), math.sqrt(2 * math.log(1 / DELTA) / (squares / seen * expected)))
        log_wealth += math.log(1 + bet * (m - y))
        best = max(best, log_wealth)
        total += y
        squares += (y - total / (seen + 1)) ** 2
    assert wealths(x_N) == pytest.approx(math.exp(-best))


@pytest.mark.parametrize("count", [7, 40, 118, 300])
def test_hoeffding_bentkus_agrees_with_mapie(count):
    rng = np.random.default_rng(count)
    for centre in (-3, 0, 0.5, 0.9, 1, 2, 4):
        x_N = rng.normal(centre * B, B, count).clip(-CLIP * B, CLIP * B)
        risk, bound = float((x_N.mean() / B + CLIP) / (2 * CLIP)), (CLIP + 1) / (2 * CLIP)
        (theirs,) = compute_hoeffding_bentkus_p_value(np.array([risk]), count, bound)[0]
        assert hoeffding_bentkus_p_value(x_N, B) == pytest.approx(min(1.0, theirs), rel=1e-9)


def test_the_fixed_sequence_agrees_with_mapie():
    rng = np.random.default_rng(0)
    for _ in range(200):
        p_values = np.where(rng.random(12) < 0.75, rng.uniform(0, DELTA, 12), rng.uniform(0, 1, 12))
        theirs = FWERFixedSequenceTesting().run(p_values, DELTA)
        ours = last_certified(p_values.tolist(), DELTA)
        assert list(range(0 if ours is None else ours + 1)) == sorted(theirs.tolist())


def test_units_of_one_article_that_share_their_luck_are_called_alike():
    rng, articles = np.random.default_rng(3), np.repeat(np.arange(12), 7)
    apart, together = rng.normal(0, B, 84), rng.normal(0, B, 84) + rng.normal(0, 2 * B, 12)[articles]
    assert alike(together, articles) <= 0.005
    assert alike(apart, articles) > 0.05
    assert alike(together, np.arange(84)) == 1, "one unit an article: nothing to be alike"
    assert alike(np.zeros(84), articles) == 1


def test_units_that_are_not_alike_are_called_so_as_rarely_as_the_level_says():
    rng, articles = np.random.default_rng(4), np.repeat(np.arange(10), [1, 2, 3, 4, 5, 6, 7, 8, 2, 4])
    p_values = np.array([alike(rng.exponential(B, 42), articles, seed) for seed in range(200)])
    assert (p_values <= 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)


def test_where_units_of_an_article_are_one_draw_only_the_article_keeps_the_level():
    """Eight copies of every draw: units counted as independent certify what costs the bound far too often."""
    rng, articles = np.random.default_rng(5), np.repeat(np.arange(30), 8)

    def rate(of_articles):
        certified = 0
        for _ in range(300):
            x_N = draws("from end to end", rng, 30)[articles]
            x_N = article_means(x_N, articles) if of_articles else rng.permutation(x_N)
            certified += betting_p_value(x_N, B, DELTA) <= DELTA
        return certified / 300

    assert rate(of_articles=False) > 0.15
    assert rate(of_articles=True) <= DELTA + 3 * math.sqrt(DELTA * (1 - DELTA) / 300)


def test_fifteen_of_two_hundred_may_fail_at_95_percent():
    assert failures_allowed(200, 0.95) == 15
    assert failures_allowed(1, 0.95) == 0
    assert failures_allowed(200, 0.5) > 100


def test_a_small_cost_is_told_from_a_large_one():
    rng = np.random.default_rng(1)
    assert betting_p_value(rng.normal(0.3 * B, B, 100), B, DELTA) < DELTA
    assert betting_p_value(rng.normal(1.5 * B, B, 100), B, DELTA) > DELTA


def test_one_dreadful_unit_is_clipped_and_still_counts_against():
    calm = [0.2 * B] * 60
    assert betting_p_value([*calm[:30], 1e9, *calm[30:]], B, DELTA) > betting_p_value(calm, B, DELTA)
    assert betting_p_value([*calm[:30], 1e9, *calm[30:]], B, DELTA) == betting_p_value(
        [*calm[:30], CLIP * B, *calm[30:]], B, DELTA
    )


def test_hoeffding_bentkus_is_the_formula():
    """n = 10, ȳ = 0.4, m = 0.6: exp(−10·h(0.4, 0.6)) against e·P(Binomial(10, 0.6) ≤ 4), summed by hand."""
    divergence = 0.4 * math.log(0.4 / 0.6) + 0.6 * math.log(0.6 / 0.4)
    tail = sum(math.comb(10, k) * 0.6**k * 0.4 ** (10 - k) for k in range(5))
    losses = [(0.4 * 2 * CLIP - CLIP) * B] * 10
    assert hoeffding_bentkus_p_value(losses, B) == pytest.approx(min(math.exp(-10 * divergence), math.e * tail))


def test_testing_stops_at_the_first_threshold_that_is_not_rejected():
    assert last_certified([0.01, 0.02, 0.2, 0.001], DELTA) == 1
    assert last_certified([0.3, 0.001], DELTA) is None
    assert last_certified([0.01, 0.01], DELTA) == 1
