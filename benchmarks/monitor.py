"""What monitoring costs: the scale monitor's share of the time of training.

    python benchmarks/monitor.py [--pairs 30]

In our trainer: runs it with every second step watched, so that a plain step and a watched one are neighbours. A watched
step computes the radial gradient share of every supervised loop, what tenfold scale is charged, the largest state and
how much of the scale a loop carries, asks the monitor for alarms, and writes the line of metrics. Norms are computed in
every step, so they are timed once more between steps and added:

    cost = (watched − plain) / (log_every · plain) + norms / plain

at log_every = 10, the default. In somebody else's loop: a plain PyTorch loop with `ls.watch`, whose look (a pass of its
own over one row) is timed next to the training step before it:

    cost = look / (every · step)

at every = 50, the default. Both figures are medians over pairs of neighbours. Exit code 1 when one is above the target.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import tyro
from torch import Tensor

from loopscope.auditing.monitor import EVERY, watch
from loopscope.config import Config, TrainingConfig
from loopscope.model.looped_lm import build
from loopscope.objectives.placement import Objective
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


class ClockedTokens:
    """Random tokens for the trainer. Every step asks for its batch once, so this is also the clock."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.asked: list[float] = []
        """When each step asked for its batch, which is when the one before had ended."""
        self.given: list[float] = []
        """When it got it."""
        self.norms: list[float] = []
        """Seconds that the norms of a forward pass took, measured between the steps."""
        with torch.no_grad():
            self.trace = run_loops(build(config.design("a benchmark"), seed=0), self._tokens()[0])

    def batch(self, step: int, *, rank: int, world_size: int, micro: int, accumulate: int) -> tuple[Tensor, Tensor]:
        """Random ids and targets."""
        self.asked.append(time.perf_counter())
        ids_BT, targets_BT = self._tokens()
        started = time.perf_counter()
        self.trace.norms_K()
        self.given.append(time.perf_counter())
        self.norms.append(self.given[-1] - started)
        return ids_BT, targets_BT

    def _tokens(self) -> Tensor:
        shape = (2, self.config.training.batch, self.config.sequence_length)
        return torch.randint(self.config.model.vocab_size, shape)


@dataclass(frozen=True)
class Pair:
    """Seconds of a plain step, of the watched one after it, and of the norms between them."""

    plain: float
    watched: float
    norms: float

    @property
    def watching(self) -> float:
        """Cost of watching one step in log_every, as a share of step time."""
        return (self.watched - self.plain) / (LOG_EVERY * self.plain)

    @property
    def cost(self) -> float:
        """The same and the norms of every step."""
        return self.watching + self.norms / self.plain


def measure_pairs(config: Config, pairs: int) -> list[Pair]:
    """Train with every second step watched."""
    steps = 2 * (pairs + WARM_UP) + 1  # the last one only stops the clock of the one before
    training = replace(config.training, steps=steps, log_every=2, save_every=NEVER, eval_every=NEVER)
    config = replace(config, training=training)
    stream = ClockedTokens(config)
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.create(config)
        outcome = Trainer(build(config.design("a benchmark"), seed=0), config, run, stream, None).train()
    assert outcome == "finished" and len(stream.asked) == steps
    seconds = [end - begin for begin, end in zip(stream.given, stream.asked[1:], strict=False)]
    plain, watched, norms = seconds[0::2], seconds[1::2], stream.norms[1::2]
    return [Pair(*values) for values in zip(plain, watched, norms, strict=True)][WARM_UP:]


@dataclass(frozen=True)
class Look:
    """Seconds of a training step and of the look that followed it."""

    step: float
    look: float

    @property
    def cost(self) -> float:
        """Cost of a look every EVERY steps, as a share of step time."""
        return self.look / (EVERY * self.step)


def measure_looks(config: Config, pairs: int) -> list[Look]:
    """Train in a plain loop and look after every step."""
    model, objective = build(config.design("a benchmark"), seed=0).train(), Objective(config.objective)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.lr)
    shape = (2, config.training.batch, config.sequence_length)
    looks = []
    with watch(model, every=1, on_alarm=lambda alarm: None) as monitor:
        for _ in range(pairs + WARM_UP):
            ids_BT, targets_BT = torch.randint(config.model.vocab_size, shape)
            started = time.perf_counter()
            objective(model, ids_BT, targets_BT).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stepped = time.perf_counter()
            seen = monitor.step(ids_BT, targets_BT)
            looks.append(Look(stepped - started, time.perf_counter() - stepped))
            assert seen is not None, monitor.failure
    return looks[WARM_UP:]


def report_looks(name: str, pairs: int) -> bool:
    """Measure `ls.watch` on one preset; true when it costs no more than the target."""
    config = preset(name)
    set_up(config.training)
    measured = measure_looks(config, pairs)
    step, look = (1e3 * statistics.median(getattr(pair, part) for pair in measured) for part in ("step", "look"))
    low, cost, high = statistics.quantiles([pair.cost for pair in measured], n=4, method="inclusive")
    print(
        f"\n{name} in a plain loop, {config.training.batch} × {config.sequence_length} tokens, n {len(measured)} looks"
    )
    print(f"  medians: step {step:.1f} ms, look {look:.1f} ms")
    verdict = f"target ≤ {TARGET:.0%}: {'met' if cost <= TARGET else 'MISSED'}"
    print(f"  ls.watch every {EVERY} steps {cost:.2%} [{low:.2%}, {high:.2%}] of step time  {verdict}")
    return cost <= TARGET


def report(name: str, pairs: int) -> bool:
    """Measure one preset; true when monitoring costs no more than the target."""
    config = preset(name)
    set_up(config.training)
    measured = measure_pairs(config, pairs)
    plain, watched, norms = (
        1e3 * statistics.median(getattr(pair, part) for pair in measured) for part in ("plain", "watched", "norms")
    )
    low, cost, high = statistics.quantiles([pair.cost for pair in measured], n=4, method="inclusive")
    watching = statistics.median(pair.watching for pair in measured)
    print(f"\n{name}, {config.training.batch} × {config.sequence_length} tokens, n {len(measured)} pairs of steps")
    print(f"  medians: plain step {plain:.1f} ms, watched step {watched:.1f} ms, norms {norms:.2f} ms")
    print(f"  watching one step in {LOG_EVERY}: {watching:.2%}")
    verdict = "met" if cost <= TARGET else "MISSED"
    print(f"  monitoring {cost:.2%} [{low:.2%}, {high:.2%}] of step time  target ≤ {TARGET:.0%}: {verdict}")
    return cost <= TARGET


def main(pairs: int = 30, presets: tuple[str, ...] = ("nano", "micro")) -> int:
    """Measure the presets.

    Args:
        pairs: Pairs of a plain and a watched step of the smallest preset; micro, ten times as slow, gets a third.
        presets: Presets to measure.
    """
    print(machine())
    met = [
        measure(name, pairs if name == "nano" else max(3, pairs // 3))
        for name in presets
        for measure in (report, report_looks)
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
