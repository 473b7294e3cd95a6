"""What an audit costs, against training steps of the same model; and the search on a wide model.

    python benchmarks/audit_cost.py [--skip-wide]

A full audit of paper-44m (untrained, its own defaults) against training steps of 4×256 tokens, timed before and after
it in this process; extra peak memory of both. Then the matrix-free search at width 2,048. Exit code 1 when a target is
missed: 20 steps of time, one step of memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import torch
import tyro

import loopscope as ls
from loopscope.config import Config, ModelConfig
from loopscope.targets import of_config
from loopscope.training.optimizers import Optimizers, clip_gradients
from side_by_side import extra_peak_mib, machine

STEPS_ALLOWED = 20
BATCH = 4


def training_step(config: Config) -> None:
    """One step from scratch, the optimiser included."""
    model = ls.build(config.design("a benchmark"), seed=0).train()
    optimizers, objective = Optimizers(model, config.training), ls.Objective(config.objective)
    ids_BT = torch.randint(config.model.vocab_size, (BATCH, config.sequence_length))
    model(ids_BT, ids_BT, objective).loss.backward()
    clip_gradients(model.parameters(), config.training.clip)
    optimizers.step(config.training.lr)


def step_seconds(config: Config, count: int) -> list[float]:
    """Seconds of forward, backward, clipping and optimiser, after one step of warm-up."""
    model = ls.build(config.design("a benchmark"), seed=0).train()
    optimizers, objective = Optimizers(model, config.training), ls.Objective(config.objective)
    ids_BT = torch.randint(config.model.vocab_size, (BATCH, config.sequence_length))
    seconds = []
    for _ in range(count + 1):
        started = time.perf_counter()
        model(ids_BT, ids_BT, objective).loss.backward()
        clip_gradients(model.parameters(), config.training.clip)
        optimizers.step(config.training.lr)
        optimizers.zero_grad()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def audit(config: Config, **options: object) -> ls.AuditResult:
    """A design-time audit."""
    return ls.audit(of_config("design", config, seed=0), options=ls.AuditOptions(**options))  # type: ignore[arg-type]


def report_cost(config: Config) -> bool:
    """Time and memory of the audit over those of a training step."""
    steps = step_seconds(config, 2)
    result = audit(config)
    steps += step_seconds(config, 2)
    step = statistics.median(steps)
    in_steps = result.cost.seconds / step
    step_mib, audit_mib = extra_peak_mib(lambda: training_step(config)), extra_peak_mib(lambda: audit(config, states=2))
    met = in_steps <= STEPS_ALLOWED and audit_mib <= step_mib
    print(f"paper-44m: {result.verdict}, {result.blind_directions.dimension} blind, {result.cost.seconds:.1f} s")
    print(f"  training step {step:.2f} s [{min(steps):.2f}, {max(steps):.2f}]: the audit costs {in_steps:.1f} steps")
    print(f"  extra peak memory: training step {step_mib:.0f} MiB, audit {audit_mib:.0f} MiB")
    print(f"  target ≤ {STEPS_ALLOWED} steps and ≤ 1 step's memory: {'met' if met else 'MISSED'}")
    return met


def report_wide() -> bool:
    """The matrix-free search where a loop's Jacobian has four million entries."""
    model = ModelConfig(vocab_size=4096, width=2048, num_layers=2, num_heads=16, max_length=64)
    started = time.perf_counter()
    result = audit(Config(model=model), states=2, tokens=64, rollout=4, method="matrix-free")
    seconds = time.perf_counter() - started
    dimension = result.blind_directions.dimension
    print(f"width 2,048, matrix-free, 2 states: {result.verdict}, dimension {dimension}, {seconds:.0f} s")
    return dimension == 1


def main(skip_wide: bool = False) -> int:
    """Measure both.

    Args:
        skip_wide: Leave the wide model out.
    """
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    print(machine())
    base = ls.preset("paper-44m")
    met = report_cost(replace(base, training=replace(base.training, batch=BATCH)))
    return 0 if (skip_wide or report_wide()) and met else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
