"""What decoding costs the model at hand: its speed at every depth, and nats under every cache policy.

Speed is timed side by side. Every round runs all depths and all ways of decoding one after the other, so that a machine
that is busy for a while is busy for all of them; what is given is the median over rounds with its quartiles.

Cache policies are compared on known text that is decoded under them token by token. Windows of text run side by side,
each a row of the cache. The first half of a window is its prompt. All policies are scored on the same targets, those of
the second half that a decoded token predicts:

    ΔCE = mean over windows of (CE under the policy − CE under the exact cache)
    standard error = standard deviation of that difference over windows / √windows

Shape legend: W windows, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import ProtocolError
from loopscope.inference.cache import CachePolicy
from loopscope.inference.decoding import ALL_EXACT, CachedRunner, Limits, Policies, decode, device_of, runner_for
from loopscope.protocol import Cached, LoopedModel
from loopscope.results.evaluation import PolicyCost, Timing

OnProgress = Callable[[str, float], None]
"""What is going on, and the share of it that is done."""

# --- speed -----------------------------------------------------------------------------------------------------------

ROUNDS = 7
"""Timed rounds; one more comes before them to warm up."""
TIMED_TOKENS = 32
"""Tokens that are decoded in each round of timing."""
PREFILL, DECODE = "prefill", "decode"

Tokens = Iterator[object]
"""Something for every token as it is decoded; the first comes when the prompt has run."""
Way = Callable[[LoopedModel, Sequence[int], int, int], Tokens]
"""A way to decode: model, prompt, number of loops, number of tokens → the tokens."""


def time_depths(
    model: LoopedModel,
    prompt: Sequence[int],
    depths: Sequence[int],
    *,
    tokens: int,
    ways: Mapping[str, Way] | None = None,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    progress: OnProgress = lambda what, share: None,
) -> list[Timing]:
    """Timings of each depth: prefill, decoding, and decoding in other `ways` by the name of what they add."""
    kept: dict[int, int | None] = {}

    def plainly(model: LoopedModel, prompt: Sequence[int], num_loops: int, count: int) -> Tokens:
        runner = runner_for(model, num_loops)
        yield from decode(runner, [prompt], limits=Limits(max_tokens=count))
        kept[num_loops] = runner.cache.bytes_per_token if isinstance(runner, CachedRunner) else None

    all_ways: dict[str, Way] = {DECODE: plainly}
    all_ways |= {f"{DECODE}, {name}": way for name, way in (ways or {}).items()}
    rates: dict[tuple[int, str], list[float]] = {}
    for number in range(1 + rounds):
        for k in depths:
            for what, way in all_ways.items():
                started, came = clock(), []
                for _ in way(model, prompt, k, tokens):
                    came.append(clock())
                if what == DECODE:
                    rates.setdefault((k, PREFILL), []).append(len(prompt) / (came[0] - started))
                rates.setdefault((k, what), []).append((len(came) - 1) / (came[-1] - came[0]))
        progress(f"round {number} of {rounds}", (number + 1) / (1 + rounds))
    timings = []
    for (k, what), each in rates.items():
        low, middle, high = statistics.quantiles(each[1:], n=4, method="inclusive")
        timings.append(Timing(k, what, middle, low, high, kept[k]))
    return timings


# --- cache policies --------------------------------------------------------------------------------------------------

PREFILL_TOO = "prefill and decode"


def shared_policies(num_loops: int) -> list[CachePolicy]:
    """Those that keep less than all loops. Nobody leaves early here, so that last-exited would be exact."""
    rings = [f"ring-{2**power}" for power in range(1, num_loops.bit_length()) if 2**power < num_loops]
    names = ["last-loop", "first-loop", *(["first-then-last"] if num_loops > 2 else []), *rings]
    return [CachePolicy(name) for name in names] if num_loops > 1 else []


def policy_costs(
    model: Cached,
    ids_WT: Tensor,
    targets_WT: Tensor,
    num_loops: int,
    *,
    batch: int,
    progress: OnProgress = lambda what, share: None,
) -> Iterator[PolicyCost]:
    """The exact cache, then every other policy: for decoding alone, and for prompts too."""
    cases = [("exact", PREFILL_TOO, ALL_EXACT)]
    for policy in shared_policies(num_loops):
        cases += [(policy.name, DECODE, Policies(policy)), (policy.name, PREFILL_TOO, Policies(policy, policy))]
    exact_W, exact_bytes = torch.empty(0), 1
    for number, (name, applies_to, policies) in enumerate(cases):
        ce_W, kept = _decoded_ce(model, ids_WT, targets_WT, num_loops, policies, batch)
        if policies == ALL_EXACT:
            exact_W, exact_bytes = ce_W, kept
        difference_W = ce_W - exact_W
        is_number = bool(ce_W.isfinite().all())
        windows = len(ce_W)
        yield PolicyCost(
            policy=name,
            applies_to=applies_to,
            bytes_per_token=kept,
            share=kept / exact_bytes,
            ce=float(ce_W.mean()) if is_number else None,
            delta_ce=float(difference_W.mean()) if is_number else None,
            standard_error=float(difference_W.std()) / math.sqrt(windows) if is_number and windows > 1 else None,
        )
        progress(f"cache policy {name}, {applies_to}", (number + 1) / len(cases))


@torch.no_grad()
def _decoded_ce(
    model: Cached, ids_WT: Tensor, targets_WT: Tensor, num_loops: int, policies: Policies, batch: int
) -> tuple[Tensor, int]:
    """Mean CE_W of each window's second half, and the bytes that the cache kept of a token."""
    tokens = ids_WT.shape[1]
    half, ce, kept = tokens // 2, [], 0
    for rows in torch.arange(len(ids_WT)).split(batch):
        ids_BT, targets_BT = ids_WT[rows], targets_WT[rows].to(device_of(model))
        runner = CachedRunner(model, num_loops, policies)
        total_B = torch.zeros(len(rows), dtype=torch.float64)
        try:
            runner.prefill(ids_BT[:, :half].tolist())
            for place in range(half, tokens):
                logits_BV = runner.step(range(len(rows)), ids_BT[:, place].tolist())
                total_B += F.cross_entropy(logits_BV.double(), targets_BT[:, place], reduction="none").cpu()
        except ProtocolError:  # logits that are no numbers: this policy breaks the model
            total_B.fill_(math.nan)
        ce.append(total_B / (tokens - half))
        kept = runner.cache.bytes_per_token
    return torch.cat(ce), kept
