"""multi_readout_cross_entropy against plain and against torch's chunked linear cross-entropy, forward and backward.

    python benchmarks/loss.py [--rounds 7]

(a) plain: linear + cross-entropy per loop.  (b) torch.nn.functional.linear_cross_entropy per loop, default options.
(c) ours, one operation over all loops. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

from loopscope.objectives.cross_entropy import choose_chunk_rows, multi_readout_cross_entropy
from side_by_side import Measured, machine, measure

LOOPS, TOKENS = 4, 1024


@dataclass(frozen=True)
class Case:
    """A size, and the most our time and memory may be as a fraction of (a)'s and (b)'s."""

    vocab_size: int
    width: int
    time_to_plain: float
    time_to_torch: float | None = None
    memory_to_plain: float | None = None


CASES = (
    Case(20_000, 512, time_to_plain=0.80, time_to_torch=0.40, memory_to_plain=0.15),
    Case(16_384, 192, time_to_plain=0.70),
    Case(2_048, 128, time_to_plain=1.00),
)


def variants(case: Case) -> dict[str, Callable[[], None]]:
    """Forward and backward of (a), (b) and (c) on the same tensors."""
    torch.manual_seed(0)
    features_KND = torch.randn(LOOPS, TOKENS, case.width, requires_grad=True)
    head_VD = torch.randn(case.vocab_size, case.width).mul_(0.05).requires_grad_()
    targets_N = torch.randint(case.vocab_size, (TOKENS,))
    options = torch.nn.LinearCrossEntropyOptions()

    def backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            loss().backward()
            features_KND.grad = head_VD.grad = None  # so that the gradients count as extra memory

        return run

    def plain() -> Tensor:
        return torch.stack([F.cross_entropy(F.linear(f_ND, head_VD), targets_N) for f_ND in features_KND]).mean()

    def torchs_own() -> Tensor:
        losses = [F.linear_cross_entropy(f_ND, head_VD, targets_N, options=options) for f_ND in features_KND]
        return torch.stack(losses).mean()

    def ours() -> Tensor:
        return multi_readout_cross_entropy(features_KND, head_VD, targets_N).loss

    return {"a plain": backward(plain), "b torch": backward(torchs_own), "c ours": backward(ours)}


def report(case: Case, plain: Measured, torchs_own: Measured, ours: Measured) -> bool:
    """Print one case; true when every target is met."""
    chunk = choose_chunk_rows(LOOPS * TOKENS, case.vocab_size, 4, "cpu")
    print(f"\nV {case.vocab_size:,}, d {case.width}, {TOKENS:,} tokens, K {LOOPS}")
    print(f"  chunk of {chunk.value} rows: {chunk.reason}")
    for measured in (plain, torchs_own, ours):
        seconds = sorted(measured.seconds)
        middle = seconds[len(seconds) // 2] * 1e3
        print(
            f"  {measured.name:8} {middle:8.1f} ms (best {seconds[0] * 1e3:.1f})  extra {measured.extra_mib:7.1f} MiB"
        )
    met = _compare("time c/a", ours.ratio_to(plain), case.time_to_plain)
    met &= _compare("time c/b", ours.ratio_to(torchs_own), case.time_to_torch)
    memory = ours.extra_mib / plain.extra_mib
    return met & _compare("memory c/a", (memory, memory, memory), case.memory_to_plain)


def _compare(name: str, ratio: tuple[float, float, float], target: float | None) -> bool:
    middle, low, high = ratio
    verdict = "" if target is None else f"  target ≤ {target:.2f}: {'met' if middle <= target else 'MISSED'}"
    spread = "" if low == high else f" [{low:.3f}, {high:.3f}]"
    print(f"  {name:10} {middle:.3f}{spread}{verdict}")
    return target is None or middle <= target


def main(rounds: int = 7) -> int:
    """Run all cases.

    Args:
        rounds: How often every variant is timed; ratios are medians over rounds.
    """
    print(f"{machine()}; {rounds} rounds")
    met = [report(case, *measure(variants(case), rounds).values()) for case in CASES]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
