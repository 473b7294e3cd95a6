"""Memory and time of a training step against the number of loops, with each loop recomputed in the backward pass.

    python benchmarks/loop_memory.py [--rounds 5] [--batch 4]

Measured is forward, loss and backward of the trainer's own step; the optimiser is left out, it does not depend on K.
With --checkpoint-loops a step keeps, of B·T·d numbers each:
  terminal   K states between loops
  per-loop   the same, K features and their K gradients
and besides them, whatever K is, the activations of the one loop that is being run again, and the weights' gradients.

Every memory figure comes from a process of its own and is the peak resident memory during a step minus the resident
memory before it. "as run" is a process set up as `loopscope train` sets it up, and has the target. "tensors alone" maps
every tensor of 64 KiB or more by itself, so that the C library keeps no holes between tensors: what is truly held.
Time per loop is a step's time divided by K; ratios are medians over interleaved rounds.
Exit code 1 when a target is missed.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import tyro

from loopscope.config import Config, ObjectiveConfig, Placement, TrainingConfig
from loopscope.model.looped_lm import build
from loopscope.objectives.placement import Objective
from loopscope.presets import preset
from loopscope.training.session import set_up
from loopscope.training.trainer import TrainingStep
from side_by_side import extra_peak_mib, machine, measure

FEW, SOME, MANY = 4, 8, 16
"""Loops that are compared."""
MEMORY_TARGET = 1.3
TIME_TARGET = 1.10
VOCABULARY = 512
"""Small, so that a loop is the core and not the head."""
MAP_ALONE = "MALLOC_MMAP_THRESHOLD_"
"""Variable of glibc: allocations of this many bytes are mapped by themselves, and given back when freed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of training step at micro's size."""

    placement: Placement
    recompute: bool
    batch: int

    @property
    def config(self) -> Config:
        """The micro preset with few tokens, this objective, and loops recomputed or not."""
        micro = preset("micro")
        return Config(
            model=replace(micro.model, vocab_size=VOCABULARY),
            objective=ObjectiveConfig(placement=self.placement),
            training=TrainingConfig(checkpoint_loops=self.recompute, batch=self.batch),
        )

    def __str__(self) -> str:
        return f"{self.placement}, loops {'recomputed' if self.recompute else 'kept'}"


def training_step(case: Case) -> Callable[[int], None]:
    """Forward, loss and backward as the trainer runs them, for any number of loops."""
    config = case.config
    set_up(config.training)
    model = build(config.design("a benchmark"), seed=0).train()
    step = TrainingStep(model, Objective(config.objective, recompute=case.recompute))
    ids_BT, targets_BT = torch.randint(VOCABULARY, (2, case.batch, config.sequence_length))

    def run(num_loops: int) -> None:
        loss, _ = step(ids_BT, targets_BT, num_loops, "train")
        loss.backward()
        model.zero_grad(set_to_none=True)  # so that the gradients count as extra memory

    return run


def extra_mib(case: Case, num_loops: int) -> float:
    """Extra peak memory of one step in this process."""
    return extra_peak_mib(partial(training_step(case), num_loops))


def extra_mib_of_a_new_process(case: Case, num_loops: int, *, tensors_alone: bool) -> float:
    """The same in a process of its own: what one case leaves in the heap does not change the next."""
    environment = {MAP_ALONE: str(64 << 10)} if tensors_alone else {}
    os.environ.update(environment)
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(extra_mib, (case, num_loops))
    finally:
        for name in environment:
            del os.environ[name]


def report_memory(case: Case, *, tensors_alone: bool, target: float | None) -> bool:
    """Print the memory at few and at many loops; true when the target is met or there is none."""
    few, many = (extra_mib_of_a_new_process(case, k, tensors_alone=tensors_alone) for k in (FEW, MANY))
    how = "tensors alone" if tensors_alone else "as run"
    verdict = "" if target is None else f"  target ≤ {target:.2f}: {'met' if many <= target * few else 'MISSED'}"
    print(f"  {case!s:26} {how:13} K {FEW}: {few:7.1f} MiB  K {MANY}: {many:7.1f} MiB  ratio {many / few:.2f}{verdict}")
    return target is None or many <= target * few


def report_time(case: Case, rounds: int) -> bool:
    """Print the time per loop; true when it is the same within the target over all numbers of loops."""
    run = training_step(case)
    counts = (FEW, SOME, MANY)
    measured = measure({f"K {k}": partial(run, k) for k in counts}, rounds)
    few = measured[f"K {FEW}"]
    middles = []
    for k, one in zip(counts, measured.values(), strict=True):
        middle, low, high = (ratio * FEW / k for ratio in one.ratio_to(few))
        milliseconds = statistics.median(one.seconds) / k * 1e3
        print(f"  {one.name:5} {milliseconds:8.1f} ms per loop, {middle:.3f} [{low:.3f}, {high:.3f}] of K {FEW}'s")
        middles.append(middle)
    spread = max(middles) / min(middles)
    verdict = "met" if spread <= TIME_TARGET else "MISSED"
    print(f"  largest over smallest {spread:.3f}  target ≤ {TIME_TARGET:.2f}: {verdict}")
    return spread <= TIME_TARGET


def main(rounds: int = 5, batch: int = 4) -> int:
    """Compare steps of 4, 8 and 16 loops.

    Args:
        rounds: How often every number of loops is timed; ratios are medians over rounds.
        batch: Sequences of 256 tokens in a step.
    """
    print(f"{machine()}; micro with {VOCABULARY} tokens, batch {batch} × 256; {rounds} rounds")
    print("extra peak memory of a step (one run each)")
    met = True
    placements: tuple[Placement, ...] = ("terminal", "per-loop")
    for placement in placements:
        recomputed = Case(placement=placement, recompute=True, batch=batch)
        met &= report_memory(recomputed, tensors_alone=False, target=MEMORY_TARGET)
        report_memory(recomputed, tensors_alone=True, target=None)
        report_memory(replace(recomputed, recompute=False), tensors_alone=False, target=None)
    print("time per loop, per-loop objective, loops recomputed")
    met &= report_time(Case(placement="per-loop", recompute=True, batch=batch), rounds)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
