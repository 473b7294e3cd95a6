"""What a training run costs, from its configuration alone: FLOPs, memory, time, devices; counted in `counting`.

With K loops, of which B are back-propagated, and R readouts (means, where depth is sampled), a trained token of our
plain model takes so many FLOPs:

    C = 6·W_pre + (2K + 4B)·W_core + 6R·W_coda + 6R·V·d + attention
    attention = 4·a·L·[3.5·n_pre + (K + 2.5B)·n_core + 3.5R·n_coda]           L = (T + 1)/2 keys: causal, on average

W counts the weights that multiply a token (matrices, not norms or tables), n the layers, and a the channels of all
heads, usually d. Checkpointed loops run forward once more: + 2B·W_core + 4·a·L·B·n_core. Without injection a truncated
gradient (B < K) never reaches the prelude, which then costs 2 instead of 6.

Legend: T tokens of a sequence, V vocabulary, d width.
"""

import dataclasses
import functools
import math
import time
from typing import Any

import torch

from loopscope.config import Config
from loopscope.errors import ConfigError
from loopscope.machine import memory_bytes
from loopscope.model.looped_lm import build
from loopscope.objectives.cross_entropy import choose_chunk_rows
from loopscope.objectives.placement import num_readouts
from loopscope.options import PlanOptions, chosen
from loopscope.results.plan import Memory, MicroBatch, TrainingPlan
from loopscope.results.record import Choice
from loopscope.training.counting import (
    FLOAT32,
    CountedSteps,
    active_parameters,
    kernels_of,
    parameters_by_part,
    sampled_depths,
)
from loopscope.training.optimizers import split_parameters

BFLOAT16 = 2

MOST_OF_MEMORY = 1.5
"""A plan above so many times the device's memory is refused: no moment of a step holds all that a plan counts."""

# --- memory ----------------------------------------------------------------------------------------------------------


def largest_micro_batch(config: Config, devices: int) -> MicroBatch:
    """A device's share of the batch; one that cannot be split evenly is a mistake."""
    sequences, left_over = divmod(config.training.batch, config.training.accumulate * devices)
    if left_over:
        why = f"cannot be split over {devices} devices × {config.training.accumulate} micro-batches"
        raise ConfigError.of("batch", config.training.batch, why)
    tokens, depth = sequences * config.sequence_length, max(sampled_depths(config))
    readouts = num_readouts(config.objective, depth)
    rows = math.ceil((1 + config.objective.exit_fraction * (readouts - 1)) * tokens)
    return MicroBatch(sequences=sequences, tokens=tokens, depth=depth, readouts=readouts, rows=rows)


def plan_memory(
    config: Config, *, devices: int = 1, device_type: str = "cpu", steps: CountedSteps | None = None
) -> Memory:
    """Memory of a training step, counted without numbers; see `Memory` for what each number holds."""
    design = config.design("a plan")
    model, batch, kernels = build(design, device="meta"), largest_micro_batch(config, devices), kernels_of(device_type)
    steps = steps or CountedSteps(config, sequences=batch.sequences, kernels=kernels, flops=False)
    step = steps.at(batch.depth)
    parameters = FLOAT32 * sum(parameters_by_part(model).values())
    shards = devices if config.training.shard == "full" else 1
    copies = 0 if devices == 1 else 1 if config.training.shard == "none" else 2
    matrices, others = (sum(p.numel() for p in part) for part in split_parameters(model))
    moments = (1 if config.training.optimizer == "muon" else 2) * matrices + 2 * others
    # The workspace of the loss: stacked features (an exit gate saves them anyway) and a chunk of logits.
    stacked = 0 if config.objective.placement == "gated" else batch.readouts * batch.tokens * design.width
    chunk = int(_loss_chunk(config, batch, device_type).value) * design.vocab_size
    autocast_copies = design.width * (batch.rows + design.vocab_size) + chunk if kernels.autocast else 0
    parts = {
        "parameters": math.ceil(parameters / shards),
        "gradients": math.ceil(parameters / shards),
        "optimizer": math.ceil(FLOAT32 * moments / shards),
        "communication": copies * parameters,
        "activations": step.saved,
        "recomputed": step.recomputed,
        "loss_gradients": step.loss_gradients,
        "loss_workspace": FLOAT32 * (stacked + chunk) + BFLOAT16 * autocast_copies,
    }
    return Memory(**parts, total=sum(parts.values()))


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
    return Choice("flops_per_second", flops_per_second, "given")


def choose_precision(device_type: str) -> Choice:
    """What memory is counted in."""
    if not kernels_of(device_type).autocast:
        return Choice("precision", "float32", f"no autocast on {device_type}")
    return Choice("precision", "bfloat16", "autocast: layers in bf16; weights, gradients and residual stream float32")


# --- the plan -------------------------------------------------------------------------------------------------------


def plan_training(config: Config, options: PlanOptions | None = None, **fields: Any) -> TrainingPlan:
    """The cost of training `config` on some devices; `fields` are those of PlanOptions."""
    options = chosen(PlanOptions(), options, fields)
    devices, device_type = options.devices, options.device_type
    model, batch = build(config.design("a plan"), device="meta"), largest_micro_batch(config, devices)
    speed, utilisation = choose_speed(device_type, options.flops_per_second), choose_utilisation(device_type)
    steps = CountedSteps(config, sequences=batch.sequences, kernels=kernels_of(device_type))
    parameters, per_token = parameters_by_part(model), steps.flops_per_token()
    tokens = options.tokens or config.training.steps * config.training.batch * config.sequence_length
    tokens_per_second = devices * float(speed.value) * float(utilisation.value) / per_token.total
    return TrainingPlan(
        parameters=parameters,
        active_parameters=active_parameters(model),
        passes=steps.passes(),
        flops_per_token=per_token,
        memory=plan_memory(config, devices=devices, device_type=device_type, steps=steps),
        devices=devices,
        shard=config.training.shard,
        micro_batch=batch,
        tokens=tokens,
        flops_per_second=float(speed.value),
        utilisation=float(utilisation.value),
        choices=(speed, utilisation, choose_precision(device_type), _loss_chunk(config, batch, device_type)),
        flops=per_token.total * tokens,
        tokens_per_second=tokens_per_second,
        seconds=tokens / tokens_per_second,
        total_parameters=sum(parameters.values()),
    )
