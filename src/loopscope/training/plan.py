"""What a training run costs, from its configuration alone: memory, time, devices; see also `flops`, `counting`."""

import dataclasses
import functools
import math
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from loopscope.config import Config
from loopscope.errors import ConfigError
from loopscope.machine import Choice, memory_bytes
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.cross_entropy import choose_chunk_rows
from loopscope.objectives.placement import num_readouts
from loopscope.training.counting import Counted, Kernels, kernels_of
from loopscope.training.flops import (
    CountedSteps,
    Passes,
    TokenFlops,
    active_parameters,
    expected_passes,
    flops_per_token,
    parameters_by_part,
    sampled_depths,
)
from loopscope.training.optimizers import split_parameters

FLOAT32 = 4
"""Bytes of a number in parameters, gradients, optimiser state, the residual stream and every statistic."""
BFLOAT16 = 2

MOST_OF_MEMORY = 1.5
"""A plan above so many times the device's memory is refused: no moment of a step holds all that a plan counts."""

# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
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

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
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


def largest_micro_batch(config: Config, devices: int) -> MicroBatch:
    """A device's share of the batch; one that cannot be split evenly is a mistake."""
    if devices < 1:
        raise ConfigError.of("devices", devices, "must be at least 1")
    sequences, left_over = divmod(config.training.batch, config.training.accumulate * devices)
    if left_over:
        why = f"cannot be split over {devices} devices × {config.training.accumulate} micro-batches"
        raise ConfigError.of("batch", config.training.batch, why)
    tokens, depth = sequences * config.sequence_length, max(sampled_depths(config))
    readouts = num_readouts(config.objective, depth)
    rows = math.ceil((1 + config.objective.exit_fraction * (readouts - 1)) * tokens)
    return MicroBatch(sequences, tokens, depth, readouts, rows)


def plan_memory(
    config: Config, *, devices: int = 1, device_type: str = "cpu", steps: CountedSteps | None = None
) -> Memory:
    """Memory of a training step, counted without numbers; see `Memory` for what each number holds."""
    model = build(config.design("a plan"), device="meta")
    kernels, batch = kernels_of(device_type), largest_micro_batch(config, devices)
    step = (steps or CountedSteps(config, sequences=batch.sequences, kernels=kernels)).at(batch.depth)
    parameters = FLOAT32 * sum(parameters_by_part(model).values())
    shards = devices if config.training.shard == "full" else 1
    copies = 0 if devices == 1 else 1 if config.training.shard == "none" else 2
    return Memory(
        parameters=math.ceil(parameters / shards),
        gradients=math.ceil(parameters / shards),
        optimizer=math.ceil(_optimizer_bytes(config, model) / shards),
        communication=copies * parameters,
        activations=step.saved,
        recomputed=step.recomputed,
        loss_gradients=loss_gradient_bytes(config, step),
        loss_workspace=_loss_workspace_bytes(config, kernels, batch, device_type),
    )


def check_memory(config: Config, *, devices: int, device_type: str) -> None:
    """Refuse a step that a device cannot hold, before any of it is allocated."""
    room, needed = memory_bytes(device_type), plan_memory(config, devices=devices, device_type=device_type).total
    if room is not None and needed > MOST_OF_MEMORY * room:
        why = f"a step takes about {needed / 2**30:,.0f} GB, and this {device_type} device has {room / 2**30:,.0f} GB; "
        one = dataclasses.replace(config, training=dataclasses.replace(config.training, batch=devices, accumulate=1))
        if plan_memory(one, devices=devices, device_type=device_type).total > MOST_OF_MEMORY * room:
            design = config.design("a plan")
            raise ConfigError(
                f"width {design.width:,}, vocab_size {design.vocab_size:,}, sequences of {config.sequence_length:,}: "
                f"{why}one sequence at a time would not fit either, so take a smaller model or --shard it over devices"
            )
        raise ConfigError.of("batch", config.training.batch, f"{why}take fewer sequences or --accumulate more")


def check_logits(tokens: int, vocab_size: int, *, batch: int, device_type: str) -> None:
    """Refuse so many tokens at a time that the logits of one loop, about what any model holds of them, do not fit."""
    room, needed = memory_bytes(device_type), 4 * tokens * vocab_size
    if room is not None and needed > MOST_OF_MEMORY * room:
        raise ConfigError.of(
            "batch",
            batch,
            f"the logits of {tokens:,} tokens at a time take {needed / 2**30:,.0f} GB, and this {device_type} device "
            f"has {room / 2**30:,.0f} GB; take fewer sequences",
        )


def _optimizer_bytes(config: Config, model: LoopedLM) -> int:
    matrices, others = (sum(p.numel() for p in part) for part in split_parameters(model))
    return FLOAT32 * ((1 if config.training.optimizer == "muon" else 2) * matrices + 2 * others)


def loss_gradient_bytes(config: Config, step: Counted) -> int:
    """What the fused loss saves: gradients of features and head in every call, and of the weights where they learn."""
    width, vocab_size = config.design("a plan").width, config.model.vocab_size
    return FLOAT32 * sum(width * (rows + vocab_size) + rows * learned for rows, learned in step.loss_calls)


def _loss_workspace_bytes(config: Config, kernels: Kernels, batch: MicroBatch, device_type: str) -> int:
    """Stacked features (an exit gate saves them anyway) and a chunk of logits; autocast copies both, and the head."""
    design = config.design("a plan")
    width, vocab_size = design.width, design.vocab_size
    chunk = int(_loss_chunk(config, batch, device_type).value) * vocab_size
    stacked = 0 if config.objective.placement == "gated" else batch.readouts * batch.tokens * width
    copies = BFLOAT16 * (width * (batch.rows + vocab_size) + chunk) if kernels.autocast else 0
    return FLOAT32 * (stacked + chunk) + copies


def _loss_chunk(config: Config, batch: MicroBatch, device_type: str) -> Choice:
    return choose_chunk_rows(batch.rows, config.model.vocab_size, FLOAT32, device_type)


# --- time ------------------------------------------------------------------------------------------------------------


@functools.cache
def measure_flops(device_type: str = "cpu", *, repeats: int = 5) -> float:
    """FLOP/s of one device: the best of several square matrix products, in the dtype that layers compute in.

    A process asks once: what it asks for does not change, and the answer costs a third of a second.
    """
    size, dtype = (8192, torch.bfloat16) if device_type == "cuda" else (1024, torch.float32)
    try:
        matrix = torch.randn(size, size, dtype=dtype, device=device_type)
    except (AssertionError, RuntimeError) as error:
        why = f"there is no {device_type} device here to measure; give the FLOP/s of one"
        raise ConfigError.of("flops_per_second", None, why) from error
    best = min(seconds_of_product(matrix) for _ in range(repeats + 1))
    return 2 * size**3 / best


def seconds_of_product(matrix: torch.Tensor) -> float:
    """Of one product of the matrix with itself."""
    start = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # reading a number waits for the device
    return time.perf_counter() - start


def choose_utilisation(device_type: str) -> Choice:
    """Share of a large matrix product's FLOP/s that a training step is assumed to reach."""
    if device_type == "cpu":
        return Choice("utilisation", 0.7, "assumed: CPUs spend most of a step in matrix products")
    return Choice("utilisation", 0.4, "assumed: on GPUs norms, attention and launches wait for memory; measure yours")


def choose_speed(device_type: str, flops_per_second: float | None) -> Choice:
    """FLOP/s of one device: as given, or measured here."""
    if flops_per_second is None:
        measured = measure_flops(device_type)
        return Choice("flops_per_second", measured, f"measured: best of several square products on this {device_type}")
    if not (flops_per_second > 0 and math.isfinite(flops_per_second)):
        raise ConfigError.of("flops_per_second", flops_per_second, "must be a finite number above 0")
    return Choice("flops_per_second", flops_per_second, "given")


def choose_precision(device_type: str) -> Choice:
    """What memory is counted in."""
    if not kernels_of(device_type).autocast:
        return Choice("precision", "float32", f"no autocast on {device_type}")
    return Choice("precision", "bfloat16", "autocast: layers in bf16; weights, gradients and residual stream float32")


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingPlan:
    """What a run costs; `to_dict` is its JSON, documented in docs/plan.md."""

    parameters: dict[str, int]
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

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return self.flops_per_token.total * self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together, if none waits for another."""
        return self.devices * self.flops_per_second * self.utilisation / self.flops_per_token.total

    @property
    def seconds(self) -> float:
        """Wall time of the run; evaluation and checkpoints come on top."""
        return self.tokens / self.tokens_per_second

    def devices_for(self, seconds: float) -> int:
        """Fewest devices that finish the run in this time, if none waits for another."""
        if not seconds > 0:
            raise ConfigError.of("seconds", seconds, "must be above 0")
        needed = self.flops / max(self.flops_per_second * self.utilisation * seconds, sys.float_info.min)
        if not math.isfinite(needed):
            raise ConfigError(f"no number of devices finishes this run within {seconds:g} seconds")
        return math.ceil(needed)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, the derived ones included, as plain JSON values."""
        plan = dataclasses.asdict(self)
        plan["choices"] = list(plan["choices"])
        for name in ("flops_per_token", "memory"):
            plan[name]["total"] = getattr(self, name).total
        derived = {name: getattr(self, name) for name in ("flops", "tokens_per_second", "seconds")}
        return {**plan, **derived, "total_parameters": sum(self.parameters.values())}


def plan_training(
    config: Config,
    *,
    devices: int = 1,
    flops_per_second: float | None = None,
    tokens: int | None = None,
    device_type: str = "cpu",
) -> TrainingPlan:
    """The cost of training `config` on some devices; FLOP/s are measured here unless given.

    `tokens` replaces the configuration's own budget of steps × batch × sequence_length.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError.of("tokens", tokens, "must be at least 1")
    model, batch = build(config.design("a plan"), device="meta"), largest_micro_batch(config, devices)
    speed, utilisation = choose_speed(device_type, flops_per_second), choose_utilisation(device_type)
    steps = CountedSteps(config, sequences=batch.sequences, kernels=kernels_of(device_type))
    memory = plan_memory(config, devices=devices, device_type=device_type, steps=steps)
    return TrainingPlan(
        parameters=parameters_by_part(model),
        active_parameters=active_parameters(model),
        passes=expected_passes(config, steps),
        flops_per_token=flops_per_token(config, steps),
        memory=memory,
        devices=devices,
        shard=config.training.shard,
        micro_batch=batch,
        tokens=tokens or config.training.steps * config.training.batch * config.sequence_length,
        flops_per_second=float(speed.value),
        utilisation=float(utilisation.value),
        choices=(speed, utilisation, choose_precision(device_type), _loss_chunk(config, batch, device_type)),
    )
