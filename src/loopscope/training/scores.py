"""Scores after each loop of a model: cross-entropy and norm, each token once; `results.evaluation` keeps them.

Shape legend: B batch, T tokens, N = B·T, K loops, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loopscope.errors import DataError
from loopscope.objectives.cross_entropy import IGNORE_INDEX, logits_cross_entropy, multi_readout_cross_entropy
from loopscope.protocol import LinearReadout, LoopedModel, LoopTrace, run_loops
from loopscope.results.evaluation import Accuracy, Answers, Depth, Split


@dataclass(frozen=True)
class BatchScores:
    """Sums over the tokens of one batch whose target counts."""

    ce_K: Tensor
    norm_K: Tensor
    tokens: int


def score_batch(model: LoopedModel, ids_BT: Tensor, targets_BT: Tensor, num_loops: int) -> BatchScores:
    """Scores after each of `num_loops` loops of one batch."""
    trace = run_loops(model, ids_BT, num_loops=num_loops)
    counted_BT = targets_BT != IGNORE_INDEX
    norms = [(state.h_BTD.float().norm(dim=-1) * counted_BT).sum() for state in trace.states[1:]]
    ce_KN = _cross_entropies(model, trace, targets_BT.flatten())
    return BatchScores(ce_KN.double().sum(-1), torch.stack(norms).double(), int(counted_BT.sum()))


def _cross_entropies(model: LoopedModel, trace: LoopTrace, targets_N: Tensor) -> Tensor:
    """CE_KN: fused where the model has a head, else loop by loop, since K×N×V logits at once may not fit."""
    loops = range(1, trace.num_loops + 1)
    if (linear := LinearReadout.of(model)) is not None:
        features_KND = torch.stack([linear.features(trace.states[k], k).flatten(0, 1) for k in loops])
        return multi_readout_cross_entropy(features_KND, linear.head, targets_N).ce_KN
    each = (model.readout(trace.states[k], k).flatten(0, 1)[None] for k in loops)
    return torch.cat([logits_cross_entropy(logits_1NV, targets_N).ce_KN for logits_1NV in each])


def evaluate_depths(
    score: Callable[[Tensor, Tensor, int], BatchScores], batches: Iterable[tuple[Tensor, Tensor]], num_loops: int
) -> Split:
    """Mean scores of depths 1..num_loops over all batches."""
    ce_K = norm_K = torch.zeros(num_loops, dtype=torch.float64)
    tokens = 0
    for ids_BT, targets_BT in batches:
        scores = score(ids_BT, targets_BT, num_loops)
        ce_K, norm_K, tokens = ce_K + scores.ce_K.cpu(), norm_K + scores.norm_K.cpu(), tokens + scores.tokens
    if tokens == 0:
        raise DataError("there is no text to evaluate on")
    rows = zip((ce_K / tokens).tolist(), (norm_K / tokens).tolist(), strict=True)
    return Split(depths=[Depth(k, ce, norm) for k, (ce, norm) in enumerate(rows, start=1)], tokens=tokens)


def score_answers(
    model: LoopedModel, batches: Iterable[tuple[Tensor, Tensor, Tensor]], num_loops: int
) -> list[Answers]:
    """By the steps that answers take, the share of them whose likeliest token is right after each of `num_loops` loops.

    `batches` are (ids_BT, targets_BT, steps_BT), steps being 0 where the target is no answer.
    """
    counts: Counter[int] = Counter()
    right: Counter[tuple[int, int]] = Counter()
    for ids_BT, targets_BT, steps_BT in batches:
        trace = run_loops(model, ids_BT, num_loops=num_loops)
        answers_BT = steps_BT > 0
        steps = steps_BT[answers_BT].tolist()
        counts.update(steps)
        for k in range(1, num_loops + 1):
            hits_BT = model.readout(trace.states[k], k).argmax(-1) == targets_BT
            for needed, hit in zip(steps, hits_BT[answers_BT].tolist(), strict=True):
                right[needed, k] += hit
    return [
        Answers(steps, count, [Accuracy(k, right[steps, k] / count) for k in range(1, num_loops + 1)])
        for steps, count in sorted(counts.items())
    ]
