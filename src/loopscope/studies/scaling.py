"""Laws of loops: what is a further loop worth, in parameters? Fitted to the losses of many runs.

Iso-depth law (arXiv 2604.21106), r loops of N_rec recurrent and N_once other non-embedding parameters on D tokens:

    L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β

φ = 1: a loop is worth as much as so many parameters of their own; φ = 0: loops are worth nothing. The r-th loop is
worth r^φ − (r−1)^φ of the recurrent parameters. Parcae's law (arXiv 2604.12946) counts parameters unrolled, which is
φ = 1, and adds what fewer or more loops T at test time do to a model trained at μ:

    L(T) = L_∞ + Z·exp(−z·T/μ)

The fit is that of the source: Huber loss (δ = 1e-3) of log L̂ − log L, with log L̂ the log-sum-exp of
(a − α·ln N_eff, b − β·ln D, e), from 500 starts within bounds, and 200 bootstraps over (budget, r) cells. There
L-BFGS-B is run start by start. Here all starts go side by side through one projected Levenberg–Marquardt on numpy:
six parameters and a sum of squares (Huber by reweighting) are what it is made for, all starts and bootstraps together
take seconds, and scipy, which brings L-BFGS-B, stays out of the dependencies. A test holds both to the same minimum.

Shape legend: S starts (or bootstraps × starts), n points, P = 6 parameters (a, b, e, α, β, φ).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopscope.errors import ConfigError, DataError
from loopscope.model.attention import ValueEmbedding
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.options import ScalingOptions, chosen
from loopscope.results.measures import Run
from loopscope.results.scaling import MOST_AT_BOUND, WIDE, Fit, Law, Point, ScalingRecord, TestTime, Worth
from loopscope.training.counting import PARTS, parameters_by_part

Array = NDArray[np.float64]

NAMES = ("a", "b", "e", "alpha", "beta", "phi")
LOW_P = np.array([-5.0, -5.0, -3.0, 0.0, 0.0, -3.0])
HIGH_P = np.array([35.0, 35.0, 2.0, 2.5, 2.5, 3.0])
PHI = 5
DELTA = 1e-3
"""Of the Huber loss, in nats of log loss: beyond, a point counts by its distance and no longer by its square."""
STARTS, BOOTSTRAPS = ScalingOptions.starts, ScalingOptions.bootstraps
KEPT = 12
"""Best different minima from which bootstraps and left-out cells start again: the law hardly moves between them."""
ITERATIONS = 400
INTERVAL = (0.025, 0.975)
FEWEST_POINTS, FEWEST_BUDGETS = 8, 3
"""Six parameters; E, B and β need losses at three budgets."""


# --- the runs --------------------------------------------------------------------------------------------------------

EMBEDDING = ("embedding", "positions", "head")
"""Parts that the laws do not count: they look tokens up, or answer with one. Nor do they count tables of values."""


def points_of(runs: Sequence[Run]) -> tuple[list[Point], list[str]]:
    """A point for every run that is finished and scored, and a sentence for every other.

    Losses are compared, so runs must share text and tokenizer.
    """
    points, left_out, read_in = [], [], dict[tuple[str, str], str]()
    for run in runs:
        point = _point(run)
        if isinstance(point, str):
            left_out.append(f"{run.name} is left out: {point}")
            continue
        points.append(point)
        read_in.setdefault(
            (run.manifest.data.corpus_sha256 if run.manifest.data else "", run.tokenizer_sha256), run.name
        )
    if len(read_in) > 1:
        first, other = list(read_in.values())[:2]
        raise DataError(
            f"{first} and {other} were trained on other text, or in other tokens: their losses do not compare"
        )
    return points, left_out


def _point(run: Run) -> Point | str:
    """The point of a run, or why there is none."""
    try:
        if run.config is None:
            return f"config.yaml {run.problems.get('config.yaml', 'is not there')}"
        design = run.config.design("a law of loops")
    except ConfigError as error:
        return str(error)
    full = run.depth(run.num_loops)
    if run.state != "finished":
        return run.state_in_words
    if full is None or full.ce is None or full.ce <= 0:
        return "it has no validation loss at its trained depth"
    once, recurrent = counted_by_the_laws(build(design, device="meta"))
    return Point(
        name=run.name,
        loops=design.num_loops,
        once=once,
        recurrent=recurrent,
        tokens=run.step * run.config.training.batch * run.config.sequence_length,
        loss=full.ce,
        depths=tuple((depth.k, depth.ce) for depth in run.depths if depth.ce is not None),
    )


def counted_by_the_laws(model: LoopedLM) -> tuple[int, int]:
    """Parameters outside the loop and in it, without what is looked up by a token."""
    counted = {part: count for part, count in parameters_by_part(model).items() if part not in EMBEDDING}
    for name, module in model.named_modules():
        if isinstance(module, ValueEmbedding):
            counted[PARTS[name.split(".")[0]]] -= module.table.weight.numel()
    recurrent = counted.pop("core")
    return sum(counted.values()), recurrent


def check_identifiable(points: Sequence[Point], law: Law) -> None:
    """Refuse points that leave a parameter of the law open, with everything that is missing."""
    loops, budgets = sorted({p.loops for p in points}), sorted({p.tokens for p in points})
    sizes = [len({p.size for p in points if p.loops == r}) for r in loops]
    missing = []
    if len(points) < FEWEST_POINTS:
        missing.append(f"{FEWEST_POINTS} runs or more ({len(points)} here)")
    if law == "iso-depth" and len(loops) < 2:
        missing.append(f"runs at two numbers of loops or more (all have {loops[0] if loops else 'none'})")
    if max(sizes, default=0) < 2:
        missing.append(
            "two sizes or more at the same number of loops (each number of loops has one size, and then a loop cannot "
            "be told from a parameter)"
        )
    if len(budgets) < FEWEST_BUDGETS:
        told = ", ".join(f"{budget:,}" for budget in budgets) or "none"
        missing.append(f"{FEWEST_BUDGETS} token budgets or more (here {told})")
    if missing:
        raise DataError(
            f"these runs cannot tell what a loop is worth; missing: {'; '.join(missing)}; see docs/scaling.md"
        )


# --- the law ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """Points as columns."""

    log_loss_n: Array
    log_tokens_n: Array
    once_n: Array
    recurrent_n: Array
    loops_n: Array

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Data:
        def column(values: Iterator[float]) -> Array:
            return np.array(list(values), dtype=np.float64)

        return cls(
            column(math.log(p.loss) for p in points),
            column(math.log(p.tokens) for p in points),
            column(float(p.once) for p in points),
            column(float(p.recurrent) for p in points),
            column(float(p.loops) for p in points),
        )


def predicted_log_loss(theta_SP: Array, data: _Data) -> tuple[Array, Array]:
    """log L̂ (S, n) and its derivatives (S, n, P)."""
    a, b, e, alpha, beta, phi = (theta_SP[:, [place]] for place in range(len(NAMES)))
    unrolled_Sn = data.loops_n**phi * data.recurrent_n
    effective_Sn = data.once_n + unrolled_Sn
    log_effective_Sn = np.log(effective_Sn)
    terms_S3n = np.stack(
        [a - alpha * log_effective_Sn, b - beta * data.log_tokens_n, e + 0.0 * log_effective_Sn], axis=1
    )
    top_Sn = terms_S3n.max(axis=1)
    shares_S3n = np.exp(terms_S3n - top_Sn[:, None])
    total_Sn = shares_S3n.sum(axis=1)
    shares_S3n /= total_Sn[:, None]
    size, text, rest = shares_S3n[:, 0], shares_S3n[:, 1], shares_S3n[:, 2]
    by_phi_Sn = -size * alpha * unrolled_Sn * np.log(data.loops_n) / effective_Sn
    slopes = [size, text, rest, -size * log_effective_Sn, -text * data.log_tokens_n, by_phi_Sn]
    return top_Sn + np.log(total_Sn), np.stack(slopes, axis=-1)


def huber(residual: Array) -> Array:
    """r²/2 up to δ, δ·(|r| − δ/2) beyond."""
    size = np.abs(residual)
    return np.where(size <= DELTA, 0.5 * residual**2, DELTA * (size - 0.5 * DELTA))


def fit_side_by_side(data: _Data, starts_SP: Array, counts_Sn: Array, fixed: Sequence[int] = ()) -> tuple[Array, Array]:
    """Every start to its minimum within the bounds; gives parameters (S, P) and objectives (S).

    Levenberg–Marquardt: solve (JᵀWJ + λ·diag) Δ = −JᵀWr, W the Huber weights min(1, δ/|r|) times `counts`, cut Δ at the
    bounds, accept what lowers the objective, and raise λ where nothing does. What stands at a bound and wants beyond is
    left out of the step, as are `fixed` parameters.
    """
    theta_SP, size = np.clip(starts_SP, LOW_P, HIGH_P).copy(), len(starts_SP)
    found_S, damping_S = np.full(size, np.inf), np.full(size, 1e-2)
    active = np.arange(size)
    held_P = np.zeros(len(NAMES), dtype=bool)
    held_P[list(fixed)] = True
    log_S_n, slopes = predicted_log_loss(theta_SP, data)
    found_S = (counts_Sn * huber(log_S_n - data.log_loss_n)).sum(axis=1)
    for _ in range(ITERATIONS):
        theta, counts = theta_SP[active], counts_Sn[active]
        logs_Sn, slopes = predicted_log_loss(theta, data)
        residual_Sn = logs_Sn - data.log_loss_n
        weight_Sn = counts * np.minimum(1.0, DELTA / np.maximum(np.abs(residual_Sn), 1e-300))
        gradient_SP = np.einsum("snp,sn->sp", slopes, weight_Sn * residual_Sn)
        curvature_SPP = np.einsum("snp,sn,snq->spq", slopes, weight_Sn, slopes)
        stuck_SP = ((theta <= LOW_P) & (gradient_SP > 0)) | ((theta >= HIGH_P) & (gradient_SP < 0)) | held_P
        step_SP = _step(gradient_SP, curvature_SPP, damping_S[active], stuck_SP)
        moved_SP = np.clip(theta + step_SP, LOW_P, HIGH_P)
        logs_Sn, _ = predicted_log_loss(moved_SP, data)
        objective_S = (counts * huber(logs_Sn - data.log_loss_n)).sum(axis=1)
        better_S = objective_S < found_S[active]
        gained_S = np.where(better_S, found_S[active] - objective_S, np.inf)
        theta_SP[active[better_S]], found_S[active[better_S]] = moved_SP[better_S], objective_S[better_S]
        damping_S[active] *= np.where(better_S, 0.3, 4.0)
        done_S = (gained_S < 1e-12 * np.maximum(found_S[active], 1e-300)) | (damping_S[active] > 1e10)
        active = active[~done_S]
        if not len(active):
            break
    return theta_SP, found_S


def _step(gradient_SP: Array, curvature_SPP: Array, damping_S: Array, stuck_SP: NDArray[np.bool_]) -> Array:
    """−(H + λ·diag H)⁻¹ g over the parameters that are free to move."""
    free_SP = (~stuck_SP).astype(np.float64)
    matrix = curvature_SPP * free_SP[:, :, None] * free_SP[:, None, :]
    diagonal = np.einsum("spp->sp", matrix)
    scale_S1 = np.maximum(diagonal.max(axis=1, keepdims=True), 1e-300)
    damped = damping_S[:, None] * np.maximum(diagonal, 1e-9 * scale_S1) + 1e-14 * scale_S1
    diagonal += np.where(stuck_SP, scale_S1, damped)  # in place: the diagonal is a view
    solved: Array = np.linalg.solve(matrix, (gradient_SP * free_SP)[..., None]).astype(np.float64)
    return -solved[..., 0]


def random_starts(count: int, seed: int, phi: float | None = None) -> Array:
    """Uniform within the bounds; with a fixed φ, at that φ."""
    starts_SP = np.random.default_rng(seed).uniform(LOW_P, HIGH_P, size=(count, len(NAMES)))
    if phi is not None:
        starts_SP[:, PHI] = phi
    return starts_SP


# --- fits ------------------------------------------------------------------------------------------------------------


def predicted_losses(fit: Fit, points: Sequence[Point]) -> list[float]:
    """L̂ of runs."""
    logs = [math.log(max(value, 1e-300)) for value in (fit.A, fit.B, fit.E)]
    theta_P = np.array([*logs, fit.alpha, fit.beta, fit.phi])
    return np.exp(predicted_log_loss(theta_P[None], _Data.of(points))[0][0]).tolist()


def fit_law(
    points: Sequence[Point], *, phi: float | None = None, starts: int = STARTS, seed: int = 0
) -> tuple[Fit, Array]:
    """The best of all starts, and the best different minima, from which others may start."""
    data = _Data.of(points)
    starts_SP = random_starts(starts, seed, phi)
    fixed = () if phi is None else (PHI,)
    theta_SP, found_S = fit_side_by_side(data, starts_SP, np.ones((starts, len(points))), fixed)
    order = np.argsort(found_S)
    kept: list[Array] = []
    for place in order:
        if all(np.abs(theta_SP[place] - other).max() > 1e-3 for other in kept):
            kept.append(theta_SP[place])
        if len(kept) == KEPT:
            break
    best_P = theta_SP[order[0]]
    error = float(np.abs(np.expm1(predicted_log_loss(best_P[None], data)[0][0] - data.log_loss_n)).mean())
    A, B, E = (math.exp(value) for value in best_P[:3])
    fit = Fit(
        E=E,
        A=A,
        B=B,
        alpha=float(best_P[3]),
        beta=float(best_P[4]),
        phi=float(best_P[5]),
        is_phi_fixed=phi is not None,
        objective=float(found_S[order[0]]),
        error=error,
    )
    return fit, np.array(kept)


def _refitted(data: _Data, counts_Wn: Array, from_KP: Array, fixed: Sequence[int]) -> Array:
    """The best law under each of W ways to count points, started from a few known minima; (W, P)."""
    ways, kept = len(counts_Wn), len(from_KP)
    starts = np.tile(from_KP, (ways, 1))
    theta_SP, found_S = fit_side_by_side(data, starts, np.repeat(counts_Wn, kept, axis=0), fixed)
    best_W = found_S.reshape(ways, kept).argmin(axis=1)
    return theta_SP.reshape(ways, kept, -1)[np.arange(ways), best_W]


def bootstrapped(points: Sequence[Point], from_KP: Array, *, draws: int = BOOTSTRAPS, seed: int = 0) -> Array:
    """Parameters of laws fitted to cells that were drawn with replacement; (draws, P)."""
    cells, of_n = _cells(points)
    drawn = np.random.default_rng(seed).integers(len(cells), size=(draws, len(cells)))
    counts_WC = np.stack([np.bincount(row, minlength=len(cells)) for row in drawn]).astype(np.float64)
    return _refitted(_Data.of(points), counts_WC[:, of_n], from_KP, ())


def held_out_error(points: Sequence[Point], from_KP: Array, fixed: Sequence[int] = ()) -> float:
    """Mean |L̂ − L|/L where every cell is predicted by a law that was fitted without it."""
    data = _Data.of(points)
    cells, of_n = _cells(points)
    counts_Cn = (of_n[None] != np.arange(len(cells))[:, None]).astype(np.float64)
    theta_CP = _refitted(data, counts_Cn, from_KP, fixed)
    logs_Cn, _ = predicted_log_loss(theta_CP, data)
    return float(np.abs(np.expm1(logs_Cn[of_n, np.arange(len(points))] - data.log_loss_n)).mean())


def _cells(points: Sequence[Point]) -> tuple[list[tuple[int, int]], NDArray[np.int64]]:
    cells = sorted({p.cell for p in points})
    return cells, np.array([cells.index(p.cell) for p in points])


# --- test time -------------------------------------------------------------------------------------------------------


def fit_test_time(points: Sequence[Point], *, draws: int = BOOTSTRAPS, seed: int = 0) -> TestTime | None:
    """None where no run was measured at three depths or more.

    Given z the law is linear: L_∞ of a run is its mean, Z one slope; z is searched on a fine logarithmic grid.
    """
    used = [p for p in points if len(p.depths) >= 3]
    if not used:
        return None
    z_G = np.geomspace(0.02, 20.0, 1200)
    above_RG, below_RG, squares_R = [], [], []
    for p in used:
        ks, losses = (np.array(each, dtype=np.float64) for each in zip(*p.depths, strict=True))
        x_GT = np.exp(-z_G[:, None] * ks[None] / p.loops)
        x_GT -= x_GT.mean(axis=1, keepdims=True)
        y_T = losses - losses.mean()
        above_RG.append(x_GT @ y_T)
        below_RG.append((x_GT**2).sum(axis=1))
        squares_R.append(float(y_T @ y_T))
    above, below, squares = np.array(above_RG), np.array(below_RG), np.array(squares_R)
    drawn = np.random.default_rng(seed).integers(len(used), size=(draws, len(used)))
    weights = np.stack([np.ones(len(used)), *(np.bincount(row, minlength=len(used)) for row in drawn)])
    left = (weights @ squares)[:, None] - (weights @ above) ** 2 / np.maximum(weights @ below, 1e-300)
    best = left.argmin(axis=1)
    z, Z = float(z_G[best[0]]), float(above[:, best[0]].sum() / below[:, best[0]].sum())
    low, high = np.quantile(z_G[best[1:]], INTERVAL) if draws else (z, z)
    errors = []
    for p in used:
        curve = [Z * math.exp(-z * k / p.loops) for k, _ in p.depths]
        rest = sum(loss - c for (_, loss), c in zip(p.depths, curve, strict=True)) / len(curve)
        errors += [abs(rest + c - loss) / loss for (_, loss), c in zip(p.depths, curve, strict=True)]
    return TestTime(z=z, z_low=float(low), z_high=float(high), Z=Z, runs=len(used), error=sum(errors) / len(errors))


# --- the whole -------------------------------------------------------------------------------------------------------


def scaling(points: Sequence[Point], options: ScalingOptions | None = None, **fields: Any) -> ScalingRecord:
    """Fit a law to runs; what they cannot identify is refused with what is missing. `fields`: of ScalingOptions."""
    options = chosen(ScalingOptions(), options, fields)
    law, starts, bootstraps, seed = options.law, options.starts, options.bootstraps, options.seed
    check_identifiable(points, law)
    fits = []
    for phi in (None, 0.0, 1.0) if law == "iso-depth" else (1.0, 0.0):
        fit, kept = fit_law(points, phi=phi, starts=starts, seed=seed)
        fixed = () if phi is None else (PHI,)
        fits.append((replace(fit, held_out_error=held_out_error(points, kept, fixed)), kept))
    (fit, kept), beside = fits[0], [each for each, _ in fits[1:]]
    low = high = None
    at_bound, worth, notes = 0.0, [], []
    if law == "iso-depth":
        phi_W = bootstrapped(points, kept, draws=bootstraps, seed=seed)[:, PHI]
        low, high = (float(value) for value in np.quantile(phi_W, INTERVAL))
        at_bound = float(np.mean((phi_W <= LOW_P[PHI] + 1e-6) | (phi_W >= HIGH_P[PHI] - 1e-6)))
        worth = _worth(fit.phi, phi_W, max(p.loops for p in points))
        notes = [*_notes(low, high, at_bound), *_bounds_reached(fit)]
    losses = predicted_losses(fit, points)
    made = ScalingRecord(
        law=law,
        phi_low=low,
        phi_high=high,
        cells=len({p.cell for p in points}),
        starts=starts,
        bootstraps=bootstraps,
        at_bound=at_bound,
        fit=fit,
        beside=beside,
        worth=worth,
        test_time=fit_test_time(points, draws=bootstraps, seed=seed) if law == "parcae" else None,
        points=[replace(p, predicted=loss) for p, loss in zip(points, losses, strict=True)],
        notes=notes,
        summary="",
    )
    return replace(made, summary=_in_words(made))


def _in_words(found: ScalingRecord) -> str:
    if found.phi_low is None:
        says = f"With parameters counted unrolled the law misses the losses by {found.fit.error:.2%}"
    else:
        says = f"φ = {found.told_phi}, over {found.cells} cells of {len(found.points)} runs"
    if found.fit.held_out_error is not None:
        says += f"; cells left out are missed by {found.fit.held_out_error:.2%}"
    says += "".join(f", with φ = {each.phi:g} by {each.held_out_error or 0:.2%}" for each in found.beside)
    return " ".join([f"{says}.", *found.notes])


def _worth(phi: float, phi_W: Array, most: int) -> list[Worth]:
    made = []
    for r in range(1, most + 1):
        values_W = float(r) ** phi_W - (float(r - 1) ** phi_W if r > 1 else 0.0)
        low, high = np.quantile(values_W, INTERVAL)
        made.append(Worth(r, r**phi - ((r - 1) ** phi if r > 1 else 0.0), float(low), float(high)))
    return made


def _notes(low: float, high: float, at_bound: float) -> list[str]:
    notes = []
    if high - low >= WIDE or at_bound > MOST_AT_BOUND:
        notes.append(
            "That interval is too wide to say what a loop is worth: more sizes at every number of loops, or a wider "
            "range of them, would narrow it."
        )
    elif low <= 0 <= high:
        notes.append("It holds 0: these runs do not show that a loop is worth anything.")
    elif low <= 1 <= high:
        notes.append("It holds 1: these runs do not show that a loop is worth less than parameters of its own.")
    return notes


def _bounds_reached(fit: Fit) -> list[str]:
    """Parameters other than φ that the bounds of the search hold, and not the runs."""
    reached = {
        "A": math.log(fit.A),
        "B": math.log(fit.B),
        "E": math.log(fit.E),
        "α": fit.alpha,
        "β": fit.beta,
    }
    held = [
        name
        for (name, value), low, high in zip(reached.items(), LOW_P, HIGH_P, strict=False)
        if not low + 1e-6 < value < high - 1e-6
    ]
    return [f"Held by the bounds of the fit and not by the runs: {', '.join(held)}."] if held else []
