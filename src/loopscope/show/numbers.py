"""How numbers are printed, everywhere: tables, the page, sentences. What was not measured is an en dash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ABSENT = "–"
LIMITLESS = 1e6
"""A factor from here on has no limit that anybody would meet: the search for a free range ends here."""
ROUNDING = 1e-9
"""A spread this small against its mean is rounding."""


def plain(value: float | None, digits: int = 4) -> str:
    """A number for people: 39,207, 5.404, 0.0012, 3.10e-07; no zeros at its end."""
    if value is None:
        return ABSENT
    size, rounded = abs(value), float(f"{value:.{digits}g}")
    if size >= 1e7 or 0 < size < 1e-4:
        text = f"{value:.2e}"
    elif abs(rounded) >= 1000:
        text = f"{rounded if digits < 4 else value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "−", 1) if value < 0 else text


def brief(value: float | None) -> str:
    """Three digits: what is read aloud."""
    return plain(value, 3)


def padded(value: float | None, digits: int = 4, sign: str = "") -> str:
    """So many digits, zeros included, that numbers of a column compare: 5.400, 1,234, 1.20e-04; `sign` may be +."""
    if value is None:
        return ABSENT
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:{sign}.{max(digits - 2, 0)}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    return f"{value:{sign},.{decimals}f}"


def signed(value: float | None, decimals: int = 2) -> str:
    """A difference with its sign, unless it rounds to nothing: +0.96, −0.06, 0.00."""
    if value is None:
        return ABSENT
    text = f"{value:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def percent(rate: float) -> str:
    """A rate in percent, without its sign: 0.46 %, 4 %, 130 %."""
    size = abs(100 * rate)
    return f"{size:.2g} %" if size < 10 or size >= 1e6 else f"{size:,.0f} %"


def fold(factor: float) -> str:
    """A factor: 1.02-fold, 70-fold, 12,300-fold, without limit."""
    return "without limit" if factor >= LIMITLESS else f"{brief(factor)}-fold"


def mean_deviation(values: Iterable[float | None], sign: str = "") -> str:
    """Mean ± standard deviation of what was measured, the mean alone of one value; a + goes to a mean above zero."""
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    mean = sum(known) / len(known)
    text = padded(mean, sign=sign if mean > 0 else "")
    if len(known) == 1:
        return text
    spread = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    return f"{text} ± {padded(0.0 if spread < ROUNDING * abs(mean) else spread, 2)}"


def signed_mean_deviation(values: Iterable[float | None]) -> str:
    """The same of a difference."""
    return mean_deviation(values, "+")


def span(low: float | None, high: float | None, form: str = "z.2f") -> str:
    """An interval: [-0.06, 0.12]; what rounds to nothing has no sign."""
    return f"[{', '.join(ABSENT if end is None else format(end, form) for end in (low, high))}]"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Numbers as a row of bars from the least to the largest; equal numbers make a flat line."""
    low, high = min(values), max(values)
    if not high - low > 1e-3 * max(abs(high), abs(low)):
        return BARS[3] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)
