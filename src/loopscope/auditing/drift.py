"""What training does to a variable: a few steps on a borrowed model, after which it is what it was.

Only training answers whether something drives a variable, and how far it can be driven. The steps are AdamW's, on
copies of the weights, in evaluation mode (no dropout: two trials on the same batches differ in what is asked and in
nothing else), at the trained depth, with an optimiser state of their own.

The size of a variable at a state is a number per token: ‖h‖ for scale, |⟨h, f̂⟩| for a field f, ‖P h‖ for a subspace.
What is followed is its logarithm at the last loop whose state is carried on,

    log size = mean over tokens of ½·log(size² + (0.1·rms size)²)

**Drift** is how far training pushes a variable with every step, whether or not anything holds it. A few short trials
start from the audited weights, each with batches of its own and a fresh AdamW at the run's learning rate. The rate of a
trial is the mean change per step of the variable's log size over the second half of its steps,

    rate = (log size after n steps − log size after n/2) / (n/2)

measured on the batches of all trials. The first half is not counted: Adam's first steps have the size of the learning
rate in every weight, noise or not, and become a direction only when its averages have formed. States below scale 1 are
measured as if they had scale 1, as everywhere in an audit: a scaled initialisation grows to its working scale at first,
in every design, and that is no runaway. A variable is driven when training moves it by 1 % a step or more (a doubling
within 70 steps) and the trials agree: the rate is more than three times its standard error over them, which noise
reaches in one of twenty.

**The push test** rewards a variable for growing, and sees how far it goes and what the objective charges. After a few
steps of warm-up the same steps are made twice from the same weights and optimiser state, on the same batches: once on
the objective alone (the twin), once on

    objective − weight · log size

A variable that the objective does not notice runs away; one that it notices is held where a step further costs more
than the reward pays. It is an experiment on the weights, so it is right where derivatives at fixed weights can only
guess: whatever the weights can do to hide a change, they do here.

Shape legend: B batch, T tokens, D width, K loops.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from loopscope.auditing.survey import Progress
from loopscope.auditing.visibility import Field, scale_field
from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, DataError, LoopscopeError, UnsupportedError
from loopscope.objectives.placement import Batch, Objective, ObjectiveResult, pairs_of, supervised_loops
from loopscope.objectives.terms import Term
from loopscope.options import PushOptions
from loopscope.protocol import LoopedModel, LoopTrace
from loopscope.results.audit import Push, PushResult, Recipe
from loopscope.results.thresholds import DRIVEN_FROM, RAN
from loopscope.untouched import borrowed, network_of

Size = Callable[[Tensor], Tensor]
"""h_BTD → how large the variable is at each token (B, T)."""

FLOOR = 0.1
"""Share of the rms over tokens below which a size counts no further: a token at which a mean happens to cross zero has
a logarithm of −∞, and must not decide."""


class TrialObjective(Objective):
    """The loss that an audit is told of: cross-entropy where `supervised` says, `terms`, and the model's own terms.

    Without `terms`, those of `supervised` where it is a configuration.
    """

    def __init__(
        self,
        supervised: ObjectiveConfig | str | Sequence[int] | None,
        terms: Sequence[Term] | None,
        num_loops: int,
    ) -> None:
        if not isinstance(supervised, ObjectiveConfig):
            loops = supervised_loops(supervised, num_loops)
            weights = tuple(float(k in loops) for k in range(1, num_loops + 1))
            supervised = ObjectiveConfig(placement="weighted", loop_weights=weights)
        super().__init__(supervised, terms)


def size_along(field: Field) -> Size:
    """|⟨h, f̂(h)⟩|: ‖h‖ for scale, √d·|mean of h| for the mean."""

    def size(h_BTD: Tensor) -> Tensor:
        direction_BTD = field(h_BTD)
        length_BT = direction_BTD.detach().norm(dim=-1).clamp(min=1e-30)
        # Along h itself the derivative of h·f̂ is that of the length: the direction may be taken as constant.
        return ((h_BTD * direction_BTD.detach()).sum(-1) / length_BT).abs()

    return size


def size_within(basis_DN: Tensor) -> Size:
    """‖P h‖ of the projection on the span of orthonormal columns: directions that a search found."""

    def size(h_BTD: Tensor) -> Tensor:
        return (h_BTD @ basis_DN.to(h_BTD)).norm(dim=-1)

    return size


def log_size(trace: LoopTrace, size: Size, *, lifted: bool = False) -> Tensor:
    """Mean over tokens of the logarithm of a variable's size, floored; see the module's docstring.

    `lifted` measures states below scale 1 as if they had scale 1.
    """
    # the last state that is carried on: that of K − 1, for h_K goes nowhere; of a single loop, its own
    h_BTD = trace.states[max(1, trace.num_loops - 1)].h_BTD
    h_BTD = h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
    if lifted:
        scale_BT1 = h_BTD.norm(dim=-1, keepdim=True) / h_BTD.shape[-1] ** 0.5
        h_BTD = h_BTD / scale_BT1.clamp(min=1e-30, max=1)
    size_BT = size(h_BTD)
    if size_BT.shape != h_BTD.shape[:2]:
        raise DataError(f"the size of a variable must be a number per token, got {tuple(size_BT.shape)}")
    floor = FLOOR**2 * size_BT.detach().square().mean()
    return 0.5 * (size_BT.square() + floor).clamp(min=1e-60).log().mean()


class Trial:
    """One short training: step, and look."""

    def __init__(self, model: LoopedModel, objective: Objective, recipe: Recipe) -> None:
        self.model, self.objective, self.recipe = model, objective, recipe
        self.weights = [weight for weight in trainable(model, "a trial").parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=recipe.lr, weight_decay=recipe.weight_decay)

    def step(self, batch: Batch, reward: Callable[[LoopTrace], Tensor] | None = None) -> ObjectiveResult:
        """One step on the objective, minus a reward; returns the objective alone, as it was before the step."""
        with torch.enable_grad():
            result = self.objective(self.model, *batch)
            loss = result.loss if reward is None else result.loss - reward(result.trace)
            if not loss.isfinite():
                raise DataError(f"the loss of a trial step is {loss.item()}: nothing can be learned from it")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    @torch.no_grad()
    def look(self, batch: Batch) -> ObjectiveResult:
        """The objective and its states on a batch, without a step."""
        return self.objective(self.model, *batch)


def trainable(model: LoopedModel, why: str) -> nn.Module:
    """The model's network, or the sentence that says that it has no weights to train."""
    network = network_of(model)
    if network is None or not any(weight.requires_grad for weight in network.parameters()):
        raise UnsupportedError(
            f"{why} trains the model a little, and this one shows no weights to train (adapt takes module=)"
        )
    return network


@contextmanager
def trial_weights(model: LoopedModel, why: str) -> Iterator[None]:
    """Copies for weights and buffers, in float32 at least; the model's own are never written to."""
    network = trainable(model, why)
    with borrowed(network) as held:
        tensors = {id(tensor): tensor for tensor in [*network.parameters(), *network.buffers(), *held]}
        own = [(tensor, tensor.data) for tensor in tensors.values() if tensor.is_floating_point()]
        try:
            for tensor, data in own:
                # bf16 would round the steps away
                tensor.data = data.to(torch.promote_types(data.dtype, torch.float32), copy=True)
            yield
        finally:
            for tensor, data in own:
                tensor.data = data


# --- drift -----------------------------------------------------------------------------------------------------------

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


# --- push ------------------------------------------------------------------------------------------------------------

LAST = 10
"""Steps at the end over which sizes and costs are averaged."""


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
        run(trial, "warm-up", range(options.warm_up))
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
