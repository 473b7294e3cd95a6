"""How numbers are printed."""

import math

from hypothesis import given
from hypothesis import strategies as st

from loopscope.show.numbers import (
    brief,
    fold,
    mean_deviation,
    padded,
    percent,
    plain,
    signed,
    signed_mean_deviation,
    span,
)


def test_numbers_are_written_for_people():
    assert [plain(v) for v in (39207.4, 5.4041, 0.00123, 3.1e-7, -2.5, 0.0, None)] == [
        "39,207", "5.404", "0.00123", "3.10e-07", "−2.5", "0", "–",
    ]  # fmt: skip
    assert [brief(v) for v in (39207.4, 5.4041, 0.5, 1.0, -12345678, None)] == [
        "39,200", "5.4", "0.5", "1", "−1.23e+07", "–",
    ]  # fmt: skip
    assert [padded(v) for v in (5.4, 39207.4, 0.00123, 0.00012, 0.0, -0.1, None)] == [
        "5.400", "39,207", "0.001230", "1.20e-04", "0", "-0.1000", "–",
    ]  # fmt: skip
    assert padded(0.25, 2, "+") == "+0.25" and padded(1.5e9, 3) == "1.5e+09"


def test_a_difference_has_its_sign_unless_it_is_nothing():
    assert signed(0.957) == "+0.96" and signed(-0.06) == "−0.06" and signed(-0.001) == "0.00" and signed(None) == "–"
    assert signed(-0.001, 4) == "−0.0010"


def test_rates_and_factors_say_what_they_are():
    assert [percent(v) for v in (0.0046, -0.041, 1.3, 1e5)] == ["0.46 %", "4.1 %", "130 %", "1e+07 %"]
    assert [fold(v) for v in (1.0163, 70.04, 999.7, 12345.0, 1e6, math.inf)] == [
        "1.02-fold", "70-fold", "1,000-fold", "12,300-fold", "without limit", "without limit",
    ]  # fmt: skip


def test_a_spread_stands_only_where_there_are_several():
    assert mean_deviation([1.0, None, 3.0]) == "2.000 ± 1.4" and mean_deviation([1.5, None]) == "1.500"
    assert mean_deviation([None]) == mean_deviation([]) == "–"
    assert mean_deviation([0.1 + 0.2, 0.3]) == "0.3000 ± 0", "rounding is no spread"
    assert signed_mean_deviation([0.5]) == "+0.5000" and signed_mean_deviation([-0.5]) == "-0.5000"
    assert span(-0.06, 0.125, "+.2f") == "[-0.06, +0.12]"
    assert span(-0.001, 0.87) == "[0.00, 0.87]" and span(-0.5, -0.0) == "[-0.50, 0.00]"


@given(st.floats(-1e300, 1e300))
def test_every_number_can_be_read_back_to_its_digits(value):
    for text, digits in ((plain(value), 3), (padded(value), 3), (brief(value), 3)):
        read = float(text.replace("−", "-").replace(",", ""))
        assert read == value or math.isclose(read, value, rel_tol=0.5 * 10 ** (1 - digits) * 1.01)
