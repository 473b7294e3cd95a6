"""What monitoring costs: the scale monitor's share of the time of training.

    python benchmarks/monitor.py [--pairs 30]

Runs the real trainer with every second step watched, so that a plain step and a watched one are neighbours. A watched
step computes the radial gradient share of every supervised loop and the largest state, asks the monitor for alarms, and
writes the line of metrics. Norms are computed in every step, so they are timed by themselves and added in full:

    cost = (watched − plain) / (log_every · plain) + norms / plain

at log_every = 10, the default. The first term is the median over pairs of neighbours. Exit code 1 when a cost is above
its target.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import tyro
from torch import Tensor

from loopscope.config import Config, TrainingConfig
from loopscope.model.looped_lm import build
from loopscope.presets import preset
from loopscope.protocol import run_loops
from loopscope.runs import RunFolder
from loopscope.training.session import set_up
from loopscope.training.trainer import Trainer
from side_by_side import machine

TARGET = 0.01
LOG_EVERY = TrainingConfig().log_every
NEVER = 10**9
WARM_UP = 2
"""Pairs that are not counted."""


@dataclass
class ClockedTokens:
    """Random tokens for the trainer. Every step asks for its batch once, which makes this the clock."""

    config: Config
    asked: list[float] = field(default_factory=list)
    """When each step began."""

    def batch(self, step: int, *, rank: int, world_size: int, micro: int, accumulate: int) -> tuple[Tensor, Tensor]:
        """A batch that depends on the step only."""
        self.asked.append(time.perf_counter())
        shape = (2, self.config.training.batch, self.config.sequence_length)
        ids_BT, targets_BT = torch.randint(self.config.model.vocab_size, shape)
        return ids_BT, targets_BT


def step_seconds(config: Config, pairs: int) -> list[tuple[float, float]]:
    """(plain, watched) seconds of neighbouring steps of a training run."""
    steps = 2 * (pairs + WARM_UP) + 1  # the last one only stops the clock of the one before
    training = replace(config.training, steps=steps, log_every=2, save_every=NEVER, eval_every=NEVER)
    config = replace(config, training=training)
    stream = ClockedTokens(config)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.create(config)
        outcome = Trainer(config, run, stream, None).train()
    assert outcome == "finished" and len(stream.asked) == steps
    seconds = [after - before for before, after in zip(stream.asked, stream.asked[1:], strict=False)]
    return list(zip(seconds[0::2], seconds[1::2], strict=True))[WARM_UP:]


def norm_seconds(config: Config, runs: int = 20) -> float:
    """Median time of the norms of all loops, which every step computes."""
    model = build(config.model, seed=0)
    ids_BT = torch.randint(config.model.vocab_size, (config.training.batch, config.sequence_length))
    with torch.no_grad():
        trace = run_loops(model, ids_BT)
    return statistics.median(_seconds(trace.norms_K) for _ in range(runs))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def report(name: str, pairs: int) -> bool:
    """Measure one preset; true when monitoring costs no more than the target."""
    config = preset(name)
    set_up(config)
    measured = step_seconds(config, pairs)
    plain = statistics.median(plain for plain, _ in measured)
    watched = statistics.median(watched for _, watched in measured)
    extra = [(watched - plain) / (LOG_EVERY * plain) for plain, watched in measured]
    low, middle, high = statistics.quantiles(extra, n=4, method="inclusive")
    norms = norm_seconds(config) / plain
    cost = middle + norms
    print(f"\n{name}, {config.training.batch} × {config.sequence_length} tokens, n {len(measured)} pairs of steps")
    print(f"  plain step {plain * 1e3:.1f} ms, watched step {watched * 1e3:.1f} ms (medians)")
    print(f"  watching every {LOG_EVERY} steps {middle:.2%} [{low:.2%}, {high:.2%}], norms in every step {norms:.2%}")
    print(f"  monitoring {cost:.2%} of step time  target ≤ {TARGET:.0%}: {'met' if cost <= TARGET else 'MISSED'}")
    return cost <= TARGET


def main(pairs: int = 30, presets: tuple[str, ...] = ("nano", "micro")) -> int:
    """Measure the presets.

    Args:
        pairs: Pairs of a plain and a watched step of the smallest preset; micro, ten times as slow, gets a third.
        presets: Presets to measure.
    """
    print(machine())
    met = [report(name, pairs if name == "nano" else max(3, pairs // 3)) for name in presets]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
