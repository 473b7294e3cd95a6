"""Certified thresholds: p-values that keep their level, and a sequence that stops at the first doubt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loopscope.inference.calibration import (
    CLIP,
    betting_p_value,
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
