"""Rows per hour: two rows at a time with one thread each, against one row at a time with two threads.

    python benchmarks/grid.py [--size nano] [--steps 60] [--rounds 3]

Each round runs a pair of rows (per-loop + RMSNorm and per-loop + raw) both ways, as `loopscope reproduce` does: own
processes, start-up, training, evaluation, no audit. The two ways take turns, and which comes first alternates. The
built-in corpus is packed beforehand. A row of a real grid is longer, so start-up weighs less there. How much longer a
row by itself takes is printed too. Target: at least 1.6 times the rows per hour. Exit code 1 otherwise.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from loopscope.rows.backends import Here, usable_cores
from loopscope.rows.grid import Request, lay_out
from loopscope.rows.ledger import Ledger
from loopscope.rows.schedule import Schedule
from side_by_side import machine

TARGET = 1.6
PAIR = {"per-loop+rmsnorm": (42,), "per-loop+raw": (42,)}
EVAL_TOKENS = 8192


@dataclass(frozen=True)
class Way:
    """How a pair of rows is run."""

    name: str
    rows_at_once: int
    threads: int


WAYS = (Way("two at a time, 1 thread each", 2, 1), Way("one at a time, 2 threads", 1, 2))


@dataclass(frozen=True)
class Pair:
    """A pair of rows: seconds of both together, and of the training within each."""

    seconds: float
    training: float


def run_pair(way: Way, size: Literal["demo", "nano", "micro"], steps: int, out: Path) -> Pair:
    """A fresh pair of rows."""
    request = Request(size=size, seeds=PAIR, steps=steps, eval_tokens=EVAL_TOKENS, audit=False, threads=way.threads)
    grid = lay_out(request, out, lambda text: None)
    schedule = Schedule(Ledger(out), grid.rows(), Here(way.rows_at_once, way.threads))
    started = time.perf_counter()
    rows = schedule.run()
    seconds = time.perf_counter() - started
    if any(row.state != "finished" for row in rows):
        raise SystemExit(f"a row failed: {[row.error for row in rows]}, see {out}")
    return Pair(seconds, statistics.mean(row.seconds for row in rows))


def measure(size: Literal["demo", "nano", "micro"], steps: int, rounds: int, folder: Path) -> dict[str, list[Pair]]:
    """Both ways in every round, in alternating order."""
    pairs: dict[str, list[Pair]] = {way.name: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            pair = run_pair(way, size, steps, folder / f"{number}-{way.rows_at_once}")
            pairs[way.name].append(pair)
            print(f"round {number + 1}: {way.name:30} {7200 / pair.seconds:7.1f} rows per hour", flush=True)
    return pairs


def main(size: Literal["demo", "nano", "micro"] = "nano", steps: int = 60, rounds: int = 3) -> int:
    """Measure and compare.

    Args:
        size: Size of the rows.
        steps: Steps of a row.
        rounds: Pairs run each way.
    """
    print(f"{machine()}, {usable_cores()} cores; {size}, {steps} steps a row", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="loopscope-grid-"))
    os.environ.setdefault("LOOPSCOPE_CACHE", str(folder / "cache"))
    pairs = measure(size, steps, rounds, folder)
    shutil.rmtree(folder)
    together, alone = (pairs[way.name] for way in WAYS)
    ratios = [b.seconds / a.seconds for a, b in zip(together, alone, strict=True)]
    ratio = statistics.median(ratios)
    rates = [7200 / statistics.median(pair.seconds for pair in way) for way in (together, alone)]
    slower = statistics.median(a.training / b.training for a, b in zip(together, alone, strict=True))
    print(
        f"\n{rates[0]:.1f} against {rates[1]:.1f} rows per hour: {ratio:.2f} times as many "
        f"(range {min(ratios):.2f} to {max(ratios):.2f} over {rounds} rounds, target {TARGET}); "
        f"a row by itself takes {slower:.2f} times as long"
    )
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
