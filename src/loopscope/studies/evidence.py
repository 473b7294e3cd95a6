"""The evidence for the paper's claims C1–C11: numbers seed by seed, each with the rule its mean has to obey.

Rules that the paper gives no number for are ours. Most were fixed before the first run; C2's was made stricter after
it, and those of C5 and C6 were wrong and are others since (docs/reproduce.md says why). No torch here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from loopscope.readings import (
    AuditedLoop,
    Run,
    alpha_range,
    difference,
    exit_failure,
    final_norm,
    final_perplexity,
    is_raw_at,
    perplexity_at,
    radial_clamps,
    unigram_gain,
)
from loopscope.results.reproduction import Measured, OfSeed
from loopscope.results.thresholds import CLEAR, LINEAR_BELOW
from loopscope.show.numbers import padded
from loopscope.studies.results import View

RMSNORM, RAW, PENALTY = "per-loop+rmsnorm", "per-loop+raw", "per-loop+penalty"
CORNERS = ("terminal+rmsnorm", "terminal+raw", RMSNORM, RAW)
CONTROLLED = (RAW, "per-loop+final-only", PENALTY)
"""Per-loop models whose scale something controls."""
ROLLOUT = 30
"""Loops of the audit's rollout."""
RESAMPLES = 10_000
AUDITED = "valid"
"""The split whose text audits run on."""
INVARIANT, ADAPTIVE = 0.05, 0.1
"""Loops a token beyond the smallest certified fixed depth: below the first a halting rule saves nothing of its own,
from the second on it adapts, if that is above 0 over units of text too."""
LEARNED = 0.1
"""Nats below a unigram model from which a model has learned enough for its CE to say something."""


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


def symlog(nats: Any) -> Any:
    """The vertical axis of Figure 1, ±log(1 + |x|/0.1): about linear near zero, logarithmic beyond."""
    return np.sign(nats) * np.log1p(np.abs(nats) / LINEAR_BELOW)


def unsymlog(height: Any) -> Any:
    """The exit failure at a height of Figure 1."""
    return np.sign(height) * LINEAR_BELOW * np.expm1(np.abs(height))


def _ratio(view: View, above: str, below: str) -> dict[int, float]:
    return {seed: a / b for seed, (a, b) in view.paired(final_norm, above, below).items() if b}


def _norms(view: View, *conditions: str) -> list[Quantity]:
    return [Quantity(f"final norm, {name}", "‖H_K‖", view.each(name, final_norm)) for name in conditions]


def untaught(view: View, conditions: Sequence[str]) -> dict[str, float]:
    """Rows whose CE at full depth is not yet clearly below that of a unigram model: by name, how far it is."""
    rows = {f"{name}-s{seed}": row for name in conditions for seed, row in view.of(name).items()}
    gains = {name: unigram_gain(row, view.split) for name, row in rows.items()}
    return {name: gain for name, gain in gains.items() if gain is not None and gain < LEARNED}


def unguarded(view: View, conditions: Sequence[str]) -> bool:
    """Whether some row, of an older version, does not tell what a unigram model gives."""
    return any(unigram_gain(row, view.split) is None for name in conditions for row in view.of(name).values())


def c1(view: View) -> list[Quantity]:
    """How much larger the norm is through RMSNorm than raw."""
    ratio = Quantity("norm ratio", "×", _ratio(view, RMSNORM, RAW), Bound("at least", CLEAR))
    return [ratio, *_norms(view, RMSNORM, RAW)]


def c2(view: View) -> list[Quantity]:
    """Which factor moves exits and which moves norms, on the axes of Figure 1, and in which direction."""
    gaps, norms = view.paired(exit_failure, *CORNERS), view.paired(final_norm, *CORNERS)
    heights = {seed: tuple(map(symlog, corners)) for seed, corners in gaps.items()}
    lengths = {seed: tuple(map(math.log, corners)) for seed, corners in norms.items() if min(corners) > 0}
    gap_moves, norm_moves = ({seed: _moves(each) for seed, each in found.items()} for found in (heights, lengths))
    tiny = 1e-9
    by_placement = {seed: placement / max(readout, tiny) for seed, (placement, readout) in gap_moves.items()}
    by_readout = {seed: readout / max(placement, tiny) for seed, (placement, readout) in norm_moves.items()}
    exits = {seed: norm + raw - every_norm - every_raw for seed, (norm, raw, every_norm, every_raw) in heights.items()}
    scale = {seed: norm - raw + every_norm - every_raw for seed, (norm, raw, every_norm, every_raw) in lengths.items()}
    twice, upwards = Bound("at least", 2), Bound("at least", 0)
    return [
        Quantity("exit failure: moved by placement over moved by readout", "×", by_placement, twice, every=True),
        Quantity("norm: moved by readout over moved by placement", "×", by_readout, twice, every=True),
        Quantity("exit failure: terminal above per-loop", "", {s: v / 2 for s, v in exits.items()}, upwards),
        Quantity("log norm: RMSNorm above raw", "", {s: v / 2 for s, v in scale.items()}, upwards),
        *(Quantity(f"exit failure, {name}", "nats", view.each(name, exit_failure)) for name in CORNERS),
        *_norms(view, *CORNERS),
    ]


def _moves(corners: tuple[float, ...]) -> tuple[float, float]:
    """How far placement and readout move a coordinate: means of absolute simple effects, which cannot cancel."""
    terminal_norm, terminal_raw, every_norm, every_raw = corners
    placement = (abs(terminal_norm - every_norm) + abs(terminal_raw - every_raw)) / 2
    readout = (abs(terminal_norm - terminal_raw) + abs(every_norm - every_raw)) / 2
    return placement, readout


def c3(view: View) -> list[Quantity]:
    """How much of the norm the penalty leaves."""
    ratio = Quantity("norm ratio", "×", _ratio(view, PENALTY, RMSNORM), Bound("at most", 0.2))
    return [ratio, *_norms(view, PENALTY, RMSNORM)]


def c4(view: View) -> list[Quantity]:
    """How much of the norm, and of its growth, an inter-loop norm leaves."""
    normed = "per-loop+inter-loop-norm"
    growth = Quantity(f"growth from loop K to {ROLLOUT}", "×", view.each(normed, _growth), Bound("at most", 1.1))
    return [
        Quantity("norm ratio", "×", _ratio(view, normed, RMSNORM), Bound("at most", 0.2)),
        *([growth] if view.split == AUDITED else []),
        *_norms(view, normed, RMSNORM),
    ]


def _growth(row: Run, split: str) -> float | None:
    norms = {loop.k: loop.norm for loop in row.loops}
    last, trained = norms.get(ROLLOUT), norms.get(row.num_loops)
    return last / trained if last is not None and trained else None


def c5(view: View) -> list[Quantity]:
    """What of the scale each readout shows the loss: a share of the gradient, and the response to a change.

    A visible scale is brought to its optimum by training, and there the mean radial gradient vanishes: a floor on the
    share is asked of untrained weights alone. The response does not vanish.
    """
    shares = {name: _at_exits(view, name, _share, raw=False) for name in view.conditions()}
    sizes = {name: _at_exits(view, name, _curvature_size, raw=False) for name in view.conditions()}
    raw = [name for name in view.conditions() if _at_exits(view, name, _share, raw=True)] or [RAW]
    most = Bound("at most", 1e-4)
    quantities = [
        Quantity("largest share through a norm", "share", _largest(shares), most, every=True),
        Quantity("largest median |d²CE/d(ln α)²| through a norm", "nats", _largest(sizes), most, every=True),
    ]
    for name in raw:
        curvatures = _at_exits(view, name, _curvature, raw=True)
        untrained = _smallest_share(view, name, untrained=True)
        quantities += [
            Quantity(
                f"smallest mean d²CE/d(ln α)² through raw, {name}",
                "nats",
                {seed: min(each) for seed, each in curvatures.items()},
                Bound("at least", 0.01),
                every=True,
            ),
            Quantity(
                f"untrained, smallest share through raw × √d, {name}",
                "share·√d",
                untrained,
                Bound("at least", 0.3),
                every=True,
            ),
            Quantity(f"smallest share through raw × √d, {name}", "share·√d", _smallest_share(view, name)),
        ]
    return quantities


OfLoop = Callable[[AuditedLoop], float | None]


def _share(loop: AuditedLoop) -> float | None:
    return loop.radial_gradient_share


def _curvature(loop: AuditedLoop) -> float | None:
    return loop.scale_curvature


def _curvature_size(loop: AuditedLoop) -> float | None:
    return loop.scale_curvature_size


def _at_exits(view: View, condition: str, of: OfLoop, *, raw: bool, untrained: bool = False) -> dict[int, list[float]]:
    """By seed, a measure at the loops that are read out raw, or through a norm."""
    found: dict[int, list[float]] = {}
    for seed, row in view.of(condition).items():
        audit = row.untrained if untrained else row.audit
        for loop in audit.loops.values() if audit else ():
            if (value := of(loop)) is not None and is_raw_at(row, loop.k) == raw:
                found.setdefault(seed, []).append(value)
    return found


def _largest(by_condition: dict[str, dict[int, list[float]]]) -> dict[int, float]:
    """By seed, the largest value of any condition and loop."""
    seeds = sorted({seed for found in by_condition.values() for seed in found})
    return {seed: max(max(found[seed]) for found in by_condition.values() if seed in found) for seed in seeds}


def _smallest_share(view: View, condition: str, untrained: bool = False) -> dict[int, float]:
    """By seed, the smallest share of the raw loops in units of 1/√d: two directions picked by chance have 0.8."""
    shares = _at_exits(view, condition, _share, raw=True, untrained=untrained)
    return {seed: math.sqrt(view.of(condition)[seed].width) * min(each) for seed, each in shares.items()}


def c6(view: View) -> list[Quantity]:
    """How much of both motions Lemma 2 misses, over all tokens and loops of the rollout at which the scale is large."""
    limit = Bound("at most", 0.1)
    return [
        Quantity("missed of the motion of scale", "share", view.each(RMSNORM, _scale_missed), limit, every=True),
        Quantity(
            "missed of the motion of direction", "share", view.each(RMSNORM, _direction_missed), limit, every=True
        ),
        Quantity("tokens × loops with s ≥ 10·‖b⊥‖", "pairs", view.each(RMSNORM, _counted)),
    ]


def _scale_missed(row: Run, split: str) -> float | None:
    return row.audit.scale_missed if row.audit else None


def _direction_missed(row: Run, split: str) -> float | None:
    return row.audit.direction_missed if row.audit else None


def _counted(row: Run, split: str) -> float | None:
    tests = row.audit.tests_of_lemma_2 if row.audit else []
    return float(sum(one.tokens or 0 for one in tests)) if tests else None


def c7(view: View) -> list[Quantity]:
    """How much the loss changes when the final state is scaled."""
    return [
        Quantity("range of CE, RMSNorm", "nats", view.each(RMSNORM, alpha_range), Bound("at most", 0.01)),
        Quantity("range of CE, raw", "nats", view.each(RAW, alpha_range), Bound("at least", 0.1)),
    ]


def c8(view: View) -> list[Quantity]:
    """What removing or freezing the growth of scale costs."""
    signed = view.each(RMSNORM, largest_clamp)
    return [
        Quantity("largest |ΔCE|", "nats", _sizes(signed), Bound("at most", 0.01)),
        Quantity("that ΔCE with its sign", "nats", signed, told=True, signed=True),
    ]


def _sizes(signed: dict[int, float]) -> dict[int, float]:
    """Absolute values: signed ones could cancel between seeds."""
    return {seed: abs(value) for seed, value in signed.items()}


def largest_clamp(row: Run, split: str) -> float | None:
    """The ΔCE of largest size among the radial clamps, with its sign."""
    return max(radial_clamps(row).values(), key=abs, default=None)


def c9(view: View) -> list[Quantity]:
    """What loops gain, and whether that beats the RMSNorm model at every depth."""
    flat = _sizes(view.each(RMSNORM, _gain))
    quantities = [Quantity("|ΔCE| from 1 to K, RMSNorm", "nats", flat, Bound("at most", 0.02))]
    for name in CONTROLLED:
        gain = Quantity(f"ΔCE from 1 to K, {name}", "nats", view.each(name, _gain), Bound("below", 0))
        worst = _worst_excess(view, name)
        quantities += [gain, Quantity(f"largest PPL excess at K ≥ 2, {name}", "PPL", worst, Bound("below", 0))]
    changes = [
        Quantity(f"ΔPPL from 1 to K, {name}", "PPL", view.each(name, _ppl_gain)) for name in (RMSNORM, *CONTROLLED)
    ]
    return quantities + changes


def _gain(row: Run, split: str) -> float | None:
    lost = exit_failure(row, split)
    return None if lost is None else -lost


def _ppl_gain(row: Run, split: str) -> float | None:
    return difference(final_perplexity(row, split), perplexity_at(row, 1, split))


def _worst_excess(view: View, name: str) -> dict[int, float]:
    """By seed, the largest PPL(controlled) − PPL(RMSNorm) over depths 2..K."""
    found = {}
    for seed, row in view.of(name).items():
        if (other := view.of(RMSNORM).get(seed)) is None:
            continue
        excess = [
            difference(perplexity_at(row, k, view.split), perplexity_at(other, k, view.split))
            for k in range(2, row.num_loops + 1)
        ]
        if known := [value for value in excess if value is not None]:
            found[seed] = max(known)
    return found


def c10(view: View) -> list[Quantity]:
    """What a calibrated halting rule saves beyond the smallest fixed depth that is certified at the same bound."""
    invariant = view.each(RMSNORM, loops_saved)
    best: dict[int, Run] = {}
    open_seeds: dict[int, list[str]] = {}
    for seed in sorted({seed for name in (RMSNORM, *CONTROLLED) for seed in view.of(name)}):
        rows = {name: row for name in CONTROLLED if (row := view.of(name).get(seed)) and loops_saved(row) is not None}
        chosen = max(rows.values(), key=lambda row: (is_adaptive(row), loops_saved(row) or 0.0), default=None)
        if chosen is not None and (is_adaptive(chosen) or len(rows) == len(CONTROLLED)):
            best[seed] = chosen
        else:  # one that was not measured may be the one that adapts
            open_seeds[seed] = [name for name in CONTROLLED if name not in rows]
    most = {seed: loops for seed, row in best.items() if (loops := loops_saved(row)) is not None}
    low = {seed: interval[0] for seed, row in best.items() if (interval := saved_interval(row)) is not None}
    saved = "loops saved beyond the smallest certified fixed depth"
    quantities = [
        Quantity(f"{saved}, {RMSNORM}", "loops", invariant, Bound("below", INVARIANT), every=True),
        Quantity(
            f"most {saved}, of raw, final-only and penalty", "loops", most, Bound("at least", ADAPTIVE), every=True
        ),
        Quantity("the lower end of its interval over units", "loops", low, Bound("above", 0), every=True),
    ]
    if most:  # where no seed is decided, the quantities above are missing by themselves
        quantities += [
            Quantity(f"halting of {', '.join(names)}, seed {seed}", "loops", {}, Bound("at least", ADAPTIVE))
            for seed, names in open_seeds.items()
        ]
    each = [Quantity(f"{saved}, {name}", "loops", view.each(name, loops_saved)) for name in CONTROLLED]
    means = [
        Quantity(f"mean loops, {name}", "loops", view.each(name, mean_loops), told=True)
        for name in (RMSNORM, *CONTROLLED)
    ]
    return quantities + each + means


def mean_loops(row: Run, split: str | None = None) -> float | None:
    """Loops a token under the calibrated rule, on test units."""
    return row.halting.mean_loops if row.halting else None


def loops_saved(row: Run, split: str | None = None) -> float | None:
    """Loops a token that the calibrated rule saves beyond the smallest certified fixed depth."""
    return row.halting.saved if row.halting and row.halting.is_whole else None


def saved_interval(row: Run) -> tuple[float, float] | None:
    """95 % bootstrap interval of that over the test units."""
    found = row.halting
    if found is None or loops_saved(row) is None or found.fixed_depth is None:
        return None
    return bootstrap([found.fixed_depth - loops for loops in found.unit_loops if loops is not None])


def is_adaptive(row: Run) -> bool:
    """Whether that is clear: large enough to be worth a rule, and above 0 over units of text."""
    saved, interval = loops_saved(row), saved_interval(row)
    return saved is not None and saved >= ADAPTIVE and interval is not None and interval[0] > 0


def c11(view: View) -> list[Quantity]:
    """What terminal supervision wins at full depth and loses at exits."""

    def advantage(terminal: str, dense: str) -> dict[int, float]:
        return {seed: a - b for seed, (a, b) in view.paired(final_perplexity, terminal, dense).items()}

    terminal, terminal_raw = CORNERS[:2]
    unusable = view.each(terminal, exit_failure)
    return [
        Quantity("PPL(K), terminal − per-loop", "PPL", advantage(terminal, RMSNORM), Bound("below", 0)),
        Quantity("CE(1) − CE(K), terminal", "nats", unusable, Bound("at least", 1)),
        Quantity("PPL(K), terminal − per-loop, raw readouts", "PPL", advantage(terminal_raw, RAW)),
        Quantity("CE(1) − CE(K), terminal, raw readout", "nats", view.each(terminal_raw, exit_failure)),
    ]
