"""Driven: how far training pushes a variable with every step, whether or not anything holds it.

A few short trials start from the audited weights, each with batches of its own and a fresh AdamW at the run's learning
rate. The rate of a trial is the mean change per step of the variable's log size over the second half of its steps,

    rate = (log size after n steps − log size after n/2) / (n/2)

measured on the batches of all trials. The first half is not counted: Adam's first steps have the size of the learning
rate in every weight, noise or not, and become a direction only when its averages have formed. States below scale 1 are
measured as if they had scale 1, as everywhere in an audit: a scaled initialisation grows to its working scale at first,
in every design, and that is no runaway.

A variable is driven when training moves it by 1 % a step or more (a doubling within 70 steps) and the trials agree: the
rate is more than three times its standard error over them, which noise reaches in one of twenty.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopscope.auditing.trial import Size, Trial, log_size, trial_weights
from loopscope.errors import ConfigError
from loopscope.objectives.placement import Batch, Objective, pairs_of
from loopscope.protocol import LoopedModel
from loopscope.results.audit import Recipe
from loopscope.results.thresholds import DRIVEN_FROM
from loopscope.untouched import network_of

TRIALS, STEPS = 4, 8
"""Fewer trials know no spread, fewer steps no direction; 32 steps of a few hundred tokens cost about one of a run."""
AFFORDABLE_BYTES = 1 << 30
"""Weights up to this size in float32; a trial holds a copy of them, their gradients, and Adam's two averages."""
CERTAIN = 3.0
"""Standard errors that a rate must be away from zero."""


@dataclass(frozen=True)
class Drift:
    """What a step of training does to one variable."""

    rate: float
    """Relative growth per step: 0.04 is 4 % a step; negative where it shrinks."""
    spread: float
    """Standard error of the rate over the trials."""
    driven: bool
    """Whether it is at least 1 % a step, and three times its spread."""


def affordable(model: LoopedModel) -> bool:
    """Whether there are weights to train, and few enough that an audit may hold them five times."""
    network = network_of(model)
    weights = [] if network is None else [weight.numel() for weight in network.parameters() if weight.requires_grad]
    return 0 < 4 * sum(weights) <= AFFORDABLE_BYTES


def drift(
    model: LoopedModel,
    batches: Iterable[Tensor | Batch],
    objective: Objective,
    sizes: Mapping[str, Size],
    *,
    recipe: Recipe | None = None,
    trials: int = TRIALS,
    steps: int = STEPS,
) -> dict[str, Drift]:
    """The drift of each variable in `sizes`. The model comes back as it was.

    The batches are dealt out to the trials; where there are fewer than trials, several trials share one, and the spread
    is too small.
    """
    if trials < 2 or steps < 2:
        raise ConfigError(f"a drift needs at least 2 trials of 2 steps; got {trials} of {steps}")
    pairs = pairs_of(batches)
    rates: dict[str, list[float]] = {name: [] for name in sizes}
    for number in range(trials):
        own = pairs[number::trials] or [pairs[number % len(pairs)]]
        with trial_weights(model, "the drift"):
            torch.manual_seed(number)
            trial = Trial(model, objective, recipe or Recipe())
            half = steps // 2
            for index in range(half):
                trial.step(own[index % len(own)])
            before = _log_sizes(trial, pairs, sizes)
            for index in range(half, steps):
                trial.step(own[index % len(own)])
            after = _log_sizes(trial, pairs, sizes)
        for name in sizes:
            rates[name].append((after[name] - before[name]) / (steps - half))
    found = {}
    for name, values in rates.items():
        mean, error = statistics.fmean(values), statistics.stdev(values) / trials**0.5
        rate = math.expm1(mean)
        found[name] = Drift(rate, error, abs(rate) >= DRIVEN_FROM and abs(mean) > CERTAIN * error)
    return found


def _log_sizes(trial: Trial, pairs: Sequence[Batch], sizes: Mapping[str, Size]) -> dict[str, float]:
    """Mean over all batches of each log size, at scale 1 at least."""
    seen = [trial.look(pair).trace for pair in pairs]
    return {
        name: statistics.fmean(float(log_size(trace, size, lifted=True)) for trace in seen)
        for name, size in sizes.items()
    }
