"""FLOPs of a trained token, from steps that are counted on the real modules (see `counting`).

Of our plain model, with K loops of which B are back-propagated and R readouts (means, where depth is sampled), they are

    C = 6·W_pre + (2K + 4B)·W_core + 6R·W_coda + 6R·V·d + attention
    attention = 4·a·L·[3.5·n_pre + (K + 2.5B)·n_core + 3.5R·n_coda]           L = (T + 1)/2 keys: causal, on average

W counts the weights that multiply a token (matrices, not norms or tables), n the layers, and a the channels of all
heads, usually d. Checkpointed loops run forward once more: + 2B·W_core + 4·a·L·B·n_core. Without injection a truncated
gradient (B < K) never reaches the prelude, which then costs 2 instead of 6.

Legend: T tokens of a sequence, V vocabulary, d width.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from loopscope.config import MOST_LOOPS, Config
from loopscope.model.layers import MixtureOfExperts
from loopscope.model.looped_lm import LoopedLM, count_parameters
from loopscope.objectives.placement import num_readouts, sample_depth
from loopscope.training.counting import PARTS, Counted, Kernels, count_step, kernels_of

SAMPLED_STEPS = 4096
"""Sampled depths are averaged over the run's own first steps, at most so many."""


def parameters_by_part(model: LoopedLM) -> dict[str, int]:
    """Parameters of every part, 0 where it has none; shared ones are counted once (a tied head is the embedding)."""
    counts = count_parameters(model)
    parts = dict.fromkeys(PARTS.values(), 0)
    for module, part in PARTS.items():
        parts[part] += counts.get(module, 0)
    return parts


def active_parameters(model: LoopedLM) -> int:
    """Parameters that a token meets, loops counted once: all but those of the experts that it does not go to."""
    idle = sum(module.idle_parameters for module in model.modules() if isinstance(module, MixtureOfExperts))
    return sum(parameters_by_part(model).values()) - idle


@dataclass(frozen=True)
class Passes:
    """How often one training step runs each part; means over steps where depth is sampled."""

    loops: float
    """K: loops run."""
    backprop_loops: float
    """B: loops back-propagated."""
    readouts: float
    """R: loops read out, each through the whole coda."""
    head_rows: float
    """Rows per token that the head multiplies: R, less what `exit_fraction` leaves out."""
    prelude_backward: float
    """1 where the gradient reaches the prelude, 0 where truncation cuts it off."""


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one trained token, forward, backward and recomputation."""

    prelude: float
    core: float
    coda: float
    head: float
    """Head and exit gate."""
    attention: float
    """Scores and values of all layers, for the causal average length."""

    @property
    def total(self) -> float:
        """C of the module's docstring."""
        return self.prelude + self.core + self.coda + self.head + self.attention


Means = TypeVar("Means", Passes, TokenFlops)


def sampled_depths(config: Config) -> Counter[int]:
    """How many of the run's (first 4,096) steps have which depth: the very draws that the trainer will make."""
    steps = range(min(config.training.steps, SAMPLED_STEPS))
    seed, num_loops = config.training.seed, config.model.num_loops
    return Counter(sample_depth(config.objective, num_loops, seed=seed, step=step) for step in steps)


def expected_passes(config: Config, steps: CountedSteps | None = None) -> Passes:
    """Mean passes of a step, over the depths that the run samples."""
    return _mean(config, (steps or CountedSteps(config)).passes, Passes)


def flops_per_token(config: Config, steps: CountedSteps | None = None) -> TokenFlops:
    """C and its parts, counted; the mean over the depths that the run samples."""
    return _mean(config, (steps or CountedSteps(config)).flops, TokenFlops)


def _mean(config: Config, at: Callable[[int], Means], kind: type[Means]) -> Means:
    """The mean over the run's own depths, field by field."""
    depths = sampled_depths(config)
    values = [(at(depth), count / depths.total()) for depth, count in depths.items()]
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: sum(getattr(value, name) * share for value, share in values) for name in names})


class CountedSteps:
    """Steps of any number of loops, of which only a few are counted, when they are asked for.

    From a few loops on (more than are back-propagated or supervised) each further one takes as much as the last, so a
    step of a thousand loops is as soon known as one of four.
    """

    def __init__(self, config: Config, *, sequences: int = 1, kernels: Kernels | None = None) -> None:
        self.config, self.sequences, self.kernels = config, sequences, kernels or kernels_of("cpu")
        objective = config.objective
        self.regular = 1 + max(objective.backprop_loops or 1, objective.last_n or 1)
        if objective.placement in ("weighted", "distilled"):  # loops of weight 0 are not read; exits are drawn
            self.regular = MOST_LOOPS
        self.counted: dict[int, Counted] = {}

    def at(self, depth: int) -> Counted:
        """A step of `depth` loops."""
        if depth > self.regular + 1:
            return self.at(self.regular).further(self.at(self.regular + 1), depth - self.regular)
        if depth not in self.counted:
            config = self.config
            if config.objective.depth == "fixed":  # a design may hold weights for each loop
                config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_loops=depth))
            self.counted[depth] = count_step(config, depth=depth, sequences=self.sequences, kernels=self.kernels)
        return self.counted[depth]

    def passes(self, depth: int) -> Passes:
        """Passes of a step of `depth` loops."""
        objective = self.config.objective
        backprop = min(objective.backprop_loops or depth, depth)
        readouts, reached = num_readouts(objective, depth), self.at(depth).prelude_reached
        return Passes(depth, backprop, readouts, 1 + objective.exit_fraction * (readouts - 1), float(reached))

    def flops(self, depth: int) -> TokenFlops:
        """FLOPs per token of a step of `depth` loops."""
        step = self.at(depth)
        parts = {part: step.flops(part) for part in (*set(PARTS.values()), "attention")}
        tokens = self.sequences * self.config.sequence_length
        head = parts["head"] + parts["gate"] + parts["readout"]
        return TokenFlops(
            prelude=parts["prelude"] / tokens,
            core=parts["core"] / tokens,
            coda=parts["coda"] / tokens,
            head=head / tokens,
            attention=parts["attention"] / tokens,
        )
