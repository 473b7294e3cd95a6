"""What a training run will cost, as `loopscope plan --json` tells it; documented in docs/plan.md."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from loopscope.errors import ConfigError
from loopscope.results.record import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFlops:
    """FLOPs of one trained token, forward, backward and recomputation."""

    prelude: float
    core: float
    coda: float
    head: float
    """Head and exit gate."""
    attention: float
    """Scores and values of all layers, for the causal average length."""
    total: float
    """C: their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device, as if all gradients already existed when a forward pass ends.

    No moment of a step holds all of it; the temporaries of single operations are not counted.
    """

    parameters: int
    gradients: int
    optimizer: int
    """AdamW: two moments of everything; Muon: one momentum of the layers' matrices, two moments of the rest."""
    communication: int
    """Several devices: DDP's copy of the gradients, or FSDP2's gathered parameters and not yet reduced gradients."""
    activations: int
    """What autograd saves of one micro-batch, up to the features."""
    recomputed: int
    """Checkpointed loops: one loop's activations, computed again in the backward pass."""
    loss_gradients: int
    """What the fused loss saves: its V×d gradient of the head and its gradient of every row of features."""
    loss_workspace: int
    """What only the forward pass of the loss holds: stacked features and one chunk of logits."""
    total: int
    """Their sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The largest piece of work that one device does at once: a micro-batch at the deepest depth the run samples."""

    sequences: int
    tokens: int
    depth: int
    """Loops."""
    readouts: int
    """Loops that are read out."""
    rows: int
    """Rows that the head multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """What a run costs."""

    parameters: dict[str, int]
    """By part of the model."""
    active_parameters: int
    """Those that a token meets; with a mixture of experts fewer than are stored."""
    passes: Passes
    flops_per_token: TokenFlops
    memory: Memory
    devices: int
    shard: str
    micro_batch: MicroBatch
    tokens: int
    """Tokens of the run."""
    flops_per_second: float
    """Of one device, before utilisation."""
    utilisation: float
    choices: tuple[Choice, ...]
    flops: float
    """Of the whole run."""
    tokens_per_second: float
    """Of all devices together, if none waits for another."""
    seconds: float
    """Wall time of the run; evaluation and checkpoints come on top."""
    total_parameters: int

    def devices_for(self, seconds: float) -> int:
        """Fewest devices that finish the run in this time, if none waits for another."""
        if not seconds > 0:
            raise ConfigError.of("seconds", seconds, "must be above 0")
        needed = self.flops / max(self.flops_per_second * self.utilisation * seconds, sys.float_info.min)
        if not math.isfinite(needed):
            raise ConfigError(f"no number of devices finishes this run within {seconds:g} seconds")
        return math.ceil(needed)
