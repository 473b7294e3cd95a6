"""Measure variants of one computation side by side: interleaved, in one process, time and extra peak memory.

The machine is noisy, so every round runs all variants one after the other, and a ratio is the median over rounds of
ratios within a round; its spread is the range from the first to the third quartile.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Measured:
    """One variant: seconds of each round, and the extra peak memory of one run."""

    name: str
    seconds: list[float]
    extra_mib: float

    def ratio_to(self, other: Measured) -> tuple[float, float, float]:
        """Median, first and third quartile of our time over the other's, round by round."""
        ratios = [ours / theirs for ours, theirs in zip(self.seconds, other.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return middle, low, high


def measure(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Measured]:
    """Warm every variant up once, measure its memory, then time all of them `rounds` times in turn."""
    memory = {name: extra_peak_mib(run) for name, run in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    return {name: Measured(name, seconds[name], memory[name]) for name in variants}


def machine() -> str:
    """One line about where this ran."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    return f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, {sgemm_gflops():.0f} GFLOP/s SGEMM"


def sgemm_gflops(size: int = 2048) -> float:
    """Best of five square single-precision multiplications."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(left, right)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e9


def extra_peak_mib(run: Callable[[], object]) -> float:
    """Peak resident memory during a run minus resident memory before it (Linux counts both for us)."""
    run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that earlier runs freed and the allocator kept would hide ours
    before = status_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    run()
    return (status_kib("VmHWM") - before) / 1024


def status_kib(field: str) -> int:
    """A figure of this process's memory (VmRSS, VmHWM), as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field)))


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
