"""What cache policies cost the model at hand, on known text that is decoded under them token by token.

Windows of text run side by side, each a row of the cache. The first half of a window is its prompt. All policies are
scored on the same targets, those of the second half that a decoded token predicts:

    ΔCE = mean over windows of (CE under the policy − CE under the exact cache)
    standard error = standard deviation of that difference over windows / √windows

Shape legend: W windows, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import ProtocolError
from loopscope.inference.cache import CachePolicy
from loopscope.inference.decoding import ALL_EXACT, CachedRunner, Policies, device_of
from loopscope.protocol import Cached
from loopscope.results.evaluation import PolicyCost

DECODE, PREFILL_TOO = "decode", "prefill and decode"


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
    progress: Callable[[str, float], None] = lambda what, share: None,
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
