"""The push test: reward a variable for growing, and see how far it goes and what the objective charges.

After a few steps of warm-up the same steps are made twice from the same weights and optimiser state, on the same
batches: once on the objective alone (the twin), once on

    objective − weight · log size        (see `trial` for the size of a variable and its logarithm)

A variable that the objective does not notice runs away; one that it notices is held where a step further costs more
than the reward pays. It is an experiment on the weights, so it is right where derivatives at fixed weights can only
guess: whatever the weights can do to hide a change, they do here.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from loopscope.auditing.trial import Size, Trial, log_size, size_along, trial_weights
from loopscope.auditing.visibility import scale_field
from loopscope.errors import ConfigError, DataError, LoopscopeError, UnsupportedError
from loopscope.objectives.placement import Batch, Objective, pairs_of
from loopscope.options import PushOptions
from loopscope.protocol import LoopedModel
from loopscope.results.audit import Push, PushResult, Recipe
from loopscope.results.thresholds import RAN

LAST = 10
"""Steps at the end over which sizes and costs are averaged."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class _PushCourse:
    """What was seen in every step of a run, before the step was made."""

    log_sizes: dict[str, list[float]]
    log_lengths: list[float]
    """log ‖h‖."""
    losses: list[float]


def push(
    model: LoopedModel,
    batches: Iterable[Tensor | Batch],
    objective: Objective,
    sizes: Mapping[str, Size],
    *,
    recipe: Recipe | None = None,
    options: PushOptions | None = None,
    name: str | None = None,
    progress: Progress = lambda *_: None,
) -> PushResult:
    """Reward every variable in `sizes` in turn, each beside the same twin. The model comes back as it was.

    Step i is made on batch i; where there are fewer batches than steps they come round again, and a note says so.
    """
    started = time.perf_counter()
    options, recipe = options or PushOptions(), recipe or Recipe()
    if not sizes:
        raise ConfigError("a push needs at least one variable to push")
    needed = options.warm_up + options.steps
    pairs = pairs_of(islice(batches, needed))
    notes = [] if len(pairs) >= needed else [f"{len(pairs)} batches came round {needed / len(pairs):.3g} times"]
    length = size_along(scale_field)
    total, done = options.total_steps(len(sizes)), 0

    def run(trial: Trial, what: str, steps: range, pushed: str | None = None) -> _PushCourse:
        nonlocal done
        course = _PushCourse({of: [] for of in sizes}, [], [])
        reward = None if pushed is None else lambda trace: options.weight * log_size(trace, sizes[pushed])
        for index in steps:
            progress(what, done / total)
            done += 1
            torch.manual_seed(index)  # whatever a model or an objective draws is the same on both ways
            result = trial.step(pairs[index % len(pairs)], reward)
            course.losses.append(float(result.loss.detach()))
            with torch.no_grad():
                course.log_lengths.append(float(log_size(result.trace, length)))
                for of, size in sizes.items():
                    course.log_sizes[of].append(float(log_size(result.trace, size)))
        return course

    with trial_weights(model, "the push test"):
        trial = Trial(model, objective, recipe)
        _try_out(trial, pairs[0])
        for index in range(options.warm_up):
            progress("warm-up", done / total)
            done += 1
            torch.manual_seed(index)
            trial.step(pairs[index % len(pairs)])
        look = trial.look(pairs[options.warm_up % len(pairs)])
        start = {of: float(log_size(look.trace, size)) for of, size in sizes.items()}
        kept = [weight.data.clone() for weight in trial.weights]
        memory = copy.deepcopy(trial.optimizer.state_dict())
        parted = range(options.warm_up, needed)
        twin = run(trial, "twin", parted)
        pushes = []
        for of in sizes:
            for weight, data in zip(trial.weights, kept, strict=True):
                weight.data.copy_(data)
            trial.optimizer.load_state_dict(copy.deepcopy(memory))
            pushes.append(_compared(of, run(trial, of, parted, of), twin, start[of]))
    return PushResult(
        model=name or type(model).__name__,
        options=options,
        recipe=recipe,
        pushes=pushes,
        twin_loss=statistics.fmean(twin.losses[-LAST:]),
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _compared(of: str, course: _PushCourse, twin: _PushCourse, start: float) -> Push:
    """Means over the last steps of the logarithms of the sizes, and of the losses."""
    own, others = course.log_sizes[of], twin.log_sizes[of]
    size, twin_size = (statistics.fmean(values[-LAST:]) for values in (own, others))
    paid = [one - other for one, other in zip(course.losses, twin.losses, strict=True)]
    growth = math.exp(size - twin_size)
    return Push(
        name=of,
        growth=growth,
        reach=1 + (math.exp(size) - math.exp(twin_size)) / math.exp(statistics.fmean(twin.log_lengths[-LAST:])),
        paid=statistics.fmean(paid[-LAST:]),
        size=math.exp(size),
        twin_size=math.exp(twin_size),
        start_size=math.exp(start),
        growth_by_step=[math.exp(one - other) for one, other in zip(own, others, strict=True)],
        paid_by_step=paid,
        far=growth >= RAN,
    )


def _try_out(trial: Trial, batch: Batch) -> None:
    """One pass before the first step: what a stranger's model cannot do in float32 is told as such."""
    try:
        trial.look(batch)
    except LoopscopeError:
        raise
    except RuntimeError as error:
        raise UnsupportedError(f"the push test trains in float32, in which the model does not run: {error}") from error
    except (IndexError, ValueError) as error:
        raise DataError(f"the model cannot be run on the first batch: {type(error).__name__}: {error}") from error
