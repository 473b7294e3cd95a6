"""FLOPs of training, from the configuration alone.

FLOPs of one trained token, with K loops of which B are back-propagated and R readouts (means, where depth is sampled):

    C = 6·W_pre + (2K + 4B)·W_core + 6R·W_coda + 6R·V·d + attention
    attention = 4·a·L·[3.5·n_pre + (K + 2.5B)·n_core + 3.5R·n_coda]           L = (T + 1)/2 keys: causal, on average

W counts the weights that multiply a token (matrices, not norms or tables), n the layers, and a the channels of all
heads, usually d. A product costs 2 forward
and 4 backward per weight; attention has two products forward and five backward, where the scores are computed again.
Checkpointed loops run forward once more: + 2B·W_core + 4·a·L·B·n_core. Without injection a truncated gradient (B < K)
never reaches the prelude, which then costs 2 instead of 6.

Legend: T tokens of a sequence, V vocabulary, d width.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass

from torch import nn

from loopscope.config import Config
from loopscope.model.looped_lm import LoopedLM, build, count_parameters
from loopscope.objectives.placement import sample_depth, supervised_loops

FLASH_BACKWARD = 2.5
"""Cost of attention's backward pass over its forward: five products against two."""

SAMPLED_STEPS = 4096
"""Sampled depths are averaged over the run's own first steps, at most so many."""


PARTS = {
    "embedding": "embedding",
    "positions": "positions",
    "prelude": "prelude",
    "prelude_norm": "prelude",
    "recurrence": "core",
    "coda_norm": "coda",
    "coda_map": "coda",
    "coda": "coda",
    "readout_map": "readout",
    "unembedding": "head",
    "exit_gate": "gate",
}
"""Module of the model → part of the plan."""


def parameters_by_part(model: LoopedLM) -> dict[str, int]:
    """Parameters of every part, 0 where it has none; shared ones are counted once (a tied head is the embedding)."""
    counts = count_parameters(model)
    parts = dict.fromkeys(PARTS.values(), 0)
    for module, part in PARTS.items():
        parts[part] += counts.get(module, 0)
    return parts


def multiplied_weights(module: nn.Module) -> int:
    """Weights of all linear maps: those that cost a multiplication per token, unlike gains, biases and tables."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


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


def sampled_depths(config: Config) -> Counter[int]:
    """How many of the run's (first 4,096) steps have which depth: the very draws that the trainer will make."""
    steps = range(min(config.training.steps, SAMPLED_STEPS))
    seed, num_loops = config.training.seed, config.model.num_loops
    return Counter(sample_depth(config.objective, num_loops, seed=seed, step=step) for step in steps)


def passes_at(config: Config, depth: int) -> Passes:
    """Passes of a step of `depth` loops."""
    backprop = min(config.objective.backprop_loops or depth, depth)
    readouts = len(supervised_loops(config.objective, depth))
    head_rows = 1 + config.objective.exit_fraction * (readouts - 1)
    reached = backprop == depth or config.design("a plan").injection != "none"
    return Passes(depth, backprop, readouts, head_rows, float(reached))


def expected_passes(config: Config) -> Passes:
    """Mean passes of a step, over the depths that the run samples."""
    depths = sampled_depths(config)
    passes = [(passes_at(config, depth), count / depths.total()) for depth, count in depths.items()]
    names = [field.name for field in dataclasses.fields(Passes)]
    return Passes(**{name: sum(getattr(at, name) * share for at, share in passes) for name in names})


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


def flops_per_token(config: Config, model: LoopedLM | None = None) -> TokenFlops:
    """C and its parts; see the module's docstring for the formula."""
    model = model or build(config.design("a plan"), device="meta")
    passes = expected_passes(config)
    recomputed = passes.backprop_loops if config.training.checkpoint_loops else 0.0
    core = 2 * (passes.loops + recomputed) + 4 * passes.backprop_loops
    gate = 0 if model.exit_gate is None else passes.readouts * model.exit_gate.weight.numel()
    return TokenFlops(
        prelude=(2 + 4 * passes.prelude_backward) * multiplied_weights(model.prelude),
        core=core * multiplied_weights(model.recurrence),
        coda=6 * passes.readouts * sum(multiplied_weights(part) for part in (model.coda, model.coda_map) if part),
        head=6 * (passes.head_rows * model.head.numel() + gate),
        attention=_attention_flops(config, passes, recomputed),
    )


def _attention_flops(config: Config, passes: Passes, recomputed: float) -> float:
    """4·a·L per layer forward (scores and values), 2.5 times that backward."""
    model = config.design("a plan")
    layers = model.prelude_layers * (1 + FLASH_BACKWARD * passes.prelude_backward)
    layers += model.num_layers * (passes.loops + recomputed + FLASH_BACKWARD * passes.backprop_loops)
    layers += model.coda_layers * passes.readouts * (1 + FLASH_BACKWARD)
    return layers * 4 * model.attention_width * (config.sequence_length + 1) / 2
