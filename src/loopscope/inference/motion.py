"""How every token's state moves over many loops: to a fixed point, round an orbit, along a slide, or none of these.

With n + 1 loops run and h_{n+1} as the reference, a token has the series s_t = cos(h_t, h_{n+1}), t = 1 … n. Its kind
follows the rules of arXiv 2604.11791 (there with 128 loops):

    fixed    s_t ≥ 0.95 in 90 % of the loops
    orbit    else, with M the RFFT of the detrended s under a Hann window: A = 4·max|M|/n ≥ 0.025, at ≥ 2 cycles
    slider   else, if s rises by more than 0.05/n a loop
    unknown  else

A sine of amplitude a has max|M| = a·n/4 under that window, so A is its amplitude, or up to 15 % less where it does not
make whole cycles. The reference's cosine with itself is 1 whatever the model does and stays out of the series: at 64
loops, that one number would tilt the line through noise by 6/65 > 0.05, and every token that is not fixed would be a
slider.

The rule for orbits has no notion of noise: directions drawn anew at every loop have cosines of about 1/√D, whose
spectrum peaks above 0.025 in states narrower than about a thousand. `purity` tells them apart: the share of the
spectrum's power within two bins of the peak, near 1 for an orbit and about 0.3 for noise over 63 loops.

Besides the kind, each token has a contraction rate ρ, the geometric rate of its steps, ‖h_{t+1} − h_t‖ ≈ c·ρ^t, fitted
by Theil and Sen (the median of all pairwise slopes of the logarithm: some odd loops do not matter), and the loop from
which its likeliest next token stays the same.

Only h is followed; further carried tensors move as they like. Cosines do not see scale, the rate does.

Shape legend: B batch, T tokens, N = B·T, D width, L loops of a series, F frequencies, P pairs of loops.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import ConfigError, DataError, NotFiniteError, UnsupportedError
from loopscope.protocol import LoopedModel, check_products
from loopscope.results.audit import Motion, MotionKind, TokenMotion
from loopscope.show import sentences
from loopscope.untouched import borrowed, network_of

LOOPS = 64
FIXED_COSINE, FIXED_LOOPS = 0.95, 0.9
ORBIT_AMPLITUDE, ORBIT_CYCLES = 0.025, 2
SLIDER_RISE = 0.05
FEWEST_LOOPS = 8
"""Below this no orbit of two cycles could be told from anything."""
ROUNDING = 64.0
"""Steps of so many roundings of ‖h‖ or fewer are rounding: a state that stands still has no rate."""
FEWEST_STEPS = 4
"""Steps above rounding that a rate takes."""


def measure_motion(model: LoopedModel, ids_BT: Tensor, *, loops: int = LOOPS) -> Motion:
    """How each token of `ids_BT` moves over so many loops, whatever depth was trained; the model comes back as it was.

    One that fails or overflows beyond its trained depth is followed as far as it goes, and a note says so.
    """
    if loops < FEWEST_LOOPS:
        raise ConfigError.of("loops", loops, f"how tokens move is told from {FEWEST_LOOPS} loops or more")
    if not ids_BT.numel():
        raise DataError("how tokens move is measured on a batch of at least one token; got none")
    check_products(model, ids_BT.device)
    with borrowed(network_of(model)), torch.no_grad():
        h_LND, likeliest_LN, notes = _run(model, ids_BT, loops)
    if len(h_LND) < FEWEST_LOOPS:
        raise UnsupportedError(
            f"how tokens move is told from {FEWEST_LOOPS} loops or more, and this model ends after {len(h_LND)}: "
            f"{' '.join(notes)}"
        )
    reference_ND = F.normalize(h_LND[-1].double(), dim=-1)
    cosine_LN = torch.stack([(F.normalize(each.double(), dim=-1) * reference_ND).sum(-1) for each in h_LND])
    tokens = _classified(cosine_LN[:-1], contraction_rates(h_LND), settling_loops(likeliest_LN))
    counts = Counter(token.kind for token in tokens)
    found = Motion(
        loops=len(h_LND),
        num_loops=model.num_loops,
        shares={kind: counts[kind] / len(tokens) for kind in get_args(MotionKind)},
        period=_median([token.period for token in tokens]),
        purity=_median([token.purity for token in tokens]),
        contraction_rate=_median([token.contraction_rate for token in tokens]),
        settled_at=float(statistics.median(token.settled_at for token in tokens)),
        settled_by_trained_depth=sum(token.settled_at <= model.num_loops for token in tokens) / len(tokens),
        tokens=list(tokens),
        median_cosine=cosine_LN.median(dim=1).values.tolist(),
        notes=notes,
    )
    return replace(found, summary=sentences.motion(found))


def _run(model: LoopedModel, ids_BT: Tensor, loops: int) -> tuple[list[Tensor], Tensor, list[str]]:
    """h_LND and likeliest_LN, the next token, of every loop as far as the model can be run and read out, with notes."""
    state, notes = model.embed(ids_BT), list[str]()
    states: list[Tensor] = []
    likeliest: list[Tensor] = []
    for k in range(1, loops + 1):
        try:
            state = model.loop(state, k)
            predicted_N = model.readout(state, k).argmax(-1).flatten()
        except Exception as error:  # beyond its depth a model may have no loop embedding or gain left
            if k <= model.num_loops:
                raise
            notes.append(f"loop {k} fails with {type(error).__name__}: {' '.join(str(error).split())}.")
            break
        if not state.h_BTD.isfinite().all():
            if k <= model.num_loops:
                raise NotFiniteError(f"loop {k} leaves NaN or infinity in the state h_{k}")
            notes.append(f"loop {k} leaves NaN or infinity.")
            break
        states.append(state.h_BTD.flatten(0, 1).clone())
        likeliest.append(predicted_N)
    return states, torch.stack(likeliest), notes


def _classified(s_LN: Tensor, rates: Sequence[float | None], settled: Sequence[int]) -> tuple[TokenMotion, ...]:
    n = len(s_LN)
    is_fixed_N = (s_LN >= FIXED_COSINE).double().mean(dim=0) >= FIXED_LOOPS
    t_L = torch.arange(n, dtype=s_LN.dtype) - (n - 1) / 2
    slope_N = t_L @ s_LN.cpu() / t_L.square().sum()
    detrended_LN = s_LN.cpu() - s_LN.cpu().mean(dim=0) - t_L[:, None] * slope_N
    window_L = torch.hann_window(n, periodic=True, dtype=s_LN.dtype)
    spectrum_FN = torch.fft.rfft(detrended_LN * window_L[:, None], dim=0).abs()
    tokens = []
    for index in range(s_LN.shape[1]):
        spectrum_F, rise = spectrum_FN[:, index], float(slope_N[index]) * n
        peak = int(spectrum_F[1:].argmax()) + 1
        amplitude = 4 * float(spectrum_F[peak]) / n
        if is_fixed_N[index]:
            kind: MotionKind = "fixed"
        elif amplitude >= ORBIT_AMPLITUDE and peak >= ORBIT_CYCLES:
            kind = "orbit"
        else:
            kind = "slider" if rise > SLIDER_RISE else "unknown"
        orbits = kind == "orbit"
        tokens.append(
            TokenMotion(
                kind=kind,
                period=n / _cycles(spectrum_F, peak) if orbits else None,
                amplitude=amplitude,
                purity=_purity(spectrum_F, peak) if orbits else None,
                rise=rise,
                contraction_rate=rates[index],
                settled_at=settled[index],
            )
        )
    return tuple(tokens)


def _cycles(spectrum_F: Tensor, peak: int) -> float:
    """Cycles of a sine between two bins: under a Hann window its two largest bins stand as (1 + δ) : (2 − δ)."""
    right = float(spectrum_F[peak + 1]) if peak + 1 < len(spectrum_F) else 0.0
    left, here = float(spectrum_F[peak - 1]), float(spectrum_F[peak])
    ratio = max(left, right) / here
    offset = (2 * ratio - 1) / (ratio + 1)
    return peak + (offset if right > left else -offset)


def _purity(spectrum_F: Tensor, peak: int) -> float:
    """Share of the power within two bins of the peak, which is as far as a Hann window spreads a sine."""
    power_F = spectrum_F[1:].square()
    around = power_F[max(0, peak - 3) : peak + 2]
    return float(around.sum() / power_F.sum())


def contraction_rates(h_LND: Sequence[Tensor]) -> list[float | None]:
    """ρ of every token: exp of the median over pairs of loops of the slope of log‖h_{t+1} − h_t‖, above rounding."""
    steps_LN = torch.stack([(b.double() - a.double()).norm(dim=-1) for a, b in pairwise(h_LND)])
    norms_LN = torch.stack([h_ND.double().norm(dim=-1) for h_ND in h_LND[1:]])
    counts_LN = steps_LN > ROUNDING * torch.finfo(h_LND[0].dtype).eps * norms_LN
    log_LN = torch.where(counts_LN, steps_LN, 1.0).log()
    first_P, second_P = torch.triu_indices(len(log_LN), len(log_LN), offset=1)
    slope_PN = (log_LN[second_P] - log_LN[first_P]) / (second_P - first_P)[:, None].to(log_LN)
    slope_PN[~(counts_LN[first_P] & counts_LN[second_P])] = math.nan
    enough_N = counts_LN.sum(dim=0) >= FEWEST_STEPS
    rates_N = slope_PN.nanmedian(dim=0).values.exp()
    return [rate if enough else None for rate, enough in zip(rates_N.tolist(), enough_N.tolist(), strict=True)]


def settling_loops(likeliest_LN: Tensor) -> list[int]:
    """The first loop of every token from which on all predictions are that of the last loop."""
    is_last_LN = (likeliest_LN == likeliest_LN[-1]).long()
    stays_LN = is_last_LN.flip(0).cumprod(0)
    return (len(likeliest_LN) + 1 - stays_LN.sum(dim=0)).tolist()


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
