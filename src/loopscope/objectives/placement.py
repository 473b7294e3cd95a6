"""Where the loss is placed: which loops are supervised, with what weight, and how deep a step goes.

Placement decides which *exits* get trained. It does not decide what a readout shows: per-loop cross-entropy through an
RMSNorm readout still never sees the scale of the state (Lemma 1).

Shape legend: K supervised loops, B batch, T tokens, N = B·T, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, DataError
from loopscope.objectives.cross_entropy import (
    IGNORE_INDEX,
    ReadoutLoss,
    logits_cross_entropy,
    multi_readout_cross_entropy,
    reference_cross_entropy,
)
from loopscope.objectives.terms import ExitDistribution, Pass, Term, terms_of
from loopscope.protocol import ExitGate, LinearReadout, LoopedModel, LoopTrace, OwnLosses, run_loops

Batch = tuple[Tensor, Tensor]
"""Ids and targets (B, T)."""

DEPTH_SIGMA = 0.5
"""Spread of the log-normal rate in Poisson-lognormal depth sampling (Huginn's)."""


@dataclass(frozen=True)
class ObjectiveResult:
    """A loss with everything a training log wants to know of it; all but `loss` without gradient."""

    loss: Tensor
    supervised: list[int]
    """Loops that got cross-entropy."""
    ce_K: Tensor
    """Cross-entropy at each supervised loop."""
    norms_K: Tensor
    """Mean ‖h_k‖ of every loop that was run, supervised or not."""
    trace: LoopTrace
    """The states themselves, for whoever wants to look closer; these carry gradient."""
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Terms of the loss besides the weighted cross-entropy (and its z-loss), by name."""


class Objective:
    """Turns a model, ids and targets into a loss, through the protocol only.

    The configuration says where cross-entropy is placed; `terms` are what the loss sums besides, by default those of
    the configuration. A model's own terms are its own: they come on top of either.
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        terms: Sequence[Term] | None = None,
        *,
        fused: bool = True,
        recompute: bool = False,
    ) -> None:
        self.config = config
        self.told = terms_of(config) if terms is None else list(terms)
        """Terms besides the model's own."""
        self.recompute = recompute
        self.progress = 0.0
        """Share of the training steps that are done, for what is scheduled; the trainer moves it."""
        self.cross_entropy: Callable[..., ReadoutLoss] = (
            multi_readout_cross_entropy if fused else reference_cross_entropy
        )

    def terms(self, model: LoopedModel) -> list[Term]:
        """What the loss sums besides cross-entropy: what was told, then the model's own."""
        own = OwnLosses.of(model)
        return [*self.told, *(() if own is None else own.losses())]

    def __call__(
        self, model: LoopedModel, ids_BT: Tensor, targets_BT: Tensor, *, num_loops: int | None = None
    ) -> ObjectiveResult:
        """The loss at `num_loops` loops (the trained depth by default; see `sample_depth` for random ones)."""
        if ids_BT.shape != targets_BT.shape:
            raise DataError(f"ids {tuple(ids_BT.shape)} and targets {tuple(targets_BT.shape)} differ in shape")
        backprop_loops = self.config.backprop_loops
        trace = run_loops(model, ids_BT, num_loops=num_loops, backprop_loops=backprop_loops, recompute=self.recompute)
        loops = supervised_loops(self.config, trace.num_loops)
        terms = self.terms(model)
        z_loss = sum(term.weight for term in terms if term.inside_cross_entropy)
        values: dict[str, Tensor] = {}
        exits: ExitDistribution | None = None
        if self.config.placement == "distilled":
            loss, loops, ce_K, values["distillation"] = self._distilled(model, trace, targets_BT.flatten(), z_loss)
        else:
            loss, ce_K, exits = self._cross_entropy(model, trace, loops, targets_BT.flatten(), z_loss)
        loss = loss * (1 - sum(term.weight for term in terms if term.replaces_cross_entropy))
        seen = Pass(trace, exits, model)
        for term in terms:
            if not term.inside_cross_entropy:
                value = term.value(seen)
                loss = loss + value
                values[term.name] = values.get(term.name, 0) + value.detach()
        return ObjectiveResult(loss, loops, ce_K, trace.norms_K(), trace, values)

    def _cross_entropy(
        self, model: LoopedModel, trace: LoopTrace, loops: list[int], targets_N: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor, ExitDistribution | None]:
        """Weighted loss, CE of every supervised loop, and the distribution of gated exits.

        Through features and head where the model has them; a readout of its own makes its logits itself.
        """
        linear, weights = LinearReadout.of(model), self._fixed_weights(loops, targets_N.device)
        exits: ExitDistribution | None = None
        if linear is None:
            if self.config.placement == "gated" or self.config.exit_fraction < 1:
                LinearReadout.needed(model, "an objective with gated exits or an exit_fraction below 1")
            logits_KNV = torch.stack([model.readout(trace.states[k], k).flatten(0, 1) for k in loops])
            every = logits_cross_entropy(logits_KNV, targets_N, loop_weights=weights, z_loss=z_loss)
            return every.loss, every.ce_K, None
        features_KND = torch.stack([linear.features(trace.states[k], k).flatten(0, 1) for k in loops])
        if self.config.placement == "gated":
            weights, exits = gated_weights(model, features_KND, targets_N != IGNORE_INDEX)
        share = self.config.exit_fraction
        if share == 1 or len(loops) == 1:
            every = self.cross_entropy(features_KND, linear.head, targets_N, loop_weights=weights, z_loss=z_loss)
            return every.loss, every.ce_K, exits
        # ExitDistribution below the last on a random share of positions: an unbiased estimate of the same loss.
        chosen = torch.randperm(len(targets_N), device=targets_N.device)[: math.ceil(share * len(targets_N))]
        thinned = self.cross_entropy(
            features_KND[:-1, chosen], linear.head, targets_N[chosen], loop_weights=weights[:-1], z_loss=z_loss
        )
        last = self.cross_entropy(features_KND[-1:], linear.head, targets_N, loop_weights=weights[-1:], z_loss=z_loss)
        return thinned.loss + last.loss, torch.cat([thinned.ce_K, last.ce_K]), exits

    def _distilled(
        self, model: LoopedModel, trace: LoopTrace, targets_N: Tensor, z_loss: float
    ) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """ELT's CE_K + λ·CE_j + (1 − λ)·D_j for an exit j drawn anew: loss, loops, their CE, and (1 − λ)·D_j.

        D_j = −Σ_v p_K(v)·log p_j(v), p_K without gradient, mean over the tokens that count.
        """
        linear = LinearReadout.needed(model, "placement = 'distilled'")
        last, share = trace.num_loops, 1 - self.progress
        j = int(torch.randint(min(self.config.distil_from, last), last + 1, ()))
        features_KND = torch.stack([linear.features(trace.states[k], k).flatten(0, 1) for k in (j, last)])
        weights_K = torch.tensor([share, 1.0], device=targets_N.device)
        every = self.cross_entropy(features_KND, linear.head, targets_N, loop_weights=weights_K, z_loss=z_loss)
        wide = torch.promote_types(features_KND.dtype, torch.float32)
        with torch.no_grad():
            teacher_NV = F.linear(features_KND[1], linear.head).to(wide).softmax(-1)
        student_NV = F.linear(features_KND[0], linear.head).to(wide)
        soft_N = F.cross_entropy(student_NV, teacher_NV, reduction="none")
        counted_N = targets_N != IGNORE_INDEX
        distillation = self.progress * (soft_N * counted_N).sum() / counted_N.sum().clamp(min=1)
        loops = [j, last][j == last :]  # of a loop that teaches itself, one cross-entropy is told
        return every.loss + distillation, loops, every.ce_K[-len(loops) :], distillation.detach()

    def _fixed_weights(self, loops: list[int], device: torch.device) -> Tensor:
        """Weights (K,) of the supervised loops, summing to 1."""
        given = self.config.loop_weights
        raw = torch.tensor([given[k - 1] if given else 1.0 for k in loops], device=device)
        return raw / raw.sum()


def supervised_loops(which: ObjectiveConfig | str | Sequence[int] | None, num_loops: int) -> list[int]:
    """The loops that get cross-entropy when `num_loops` are run.

    `which` is an objective's configuration, "every-loop" (as is None), "terminal", or the loops themselves.
    """
    if isinstance(which, ObjectiveConfig):
        return _configured_loops(which, num_loops)
    if which in (None, "every-loop"):
        return list(range(1, num_loops + 1))
    if which == "terminal":
        return [num_loops]
    loops = [] if isinstance(which, str) else sorted(set(which or ()))
    if not loops or loops[0] < 1 or loops[-1] > num_loops:
        raise ConfigError.of("supervised", which, f"allowed: every-loop, terminal, or loops between 1 and {num_loops}")
    return loops


def exit_weights(which: ObjectiveConfig | str | Sequence[int] | None, num_loops: int) -> dict[int, float]:
    """The weight of each supervised loop, summing to 1; of gated exits, which weigh per token, equal ones."""
    loops = supervised_loops(which, num_loops)
    given = which.loop_weights if isinstance(which, ObjectiveConfig) else None
    raw = {k: given[k - 1] if given else 1.0 for k in loops}
    return {k: weight / sum(raw.values()) for k, weight in raw.items()}


def num_readouts(config: ObjectiveConfig, num_loops: int) -> int:
    """Loops that one step reads out: those supervised, of which distillation takes two at a time."""
    return 2 if config.placement == "distilled" else len(supervised_loops(config, num_loops))


def _configured_loops(config: ObjectiveConfig, num_loops: int) -> list[int]:
    if config.placement == "terminal":
        return [num_loops]
    if config.placement == "distilled":
        return list(range(min(config.distil_from, num_loops), num_loops + 1))
    if config.placement == "last-n":
        return list(range(max(1, num_loops - (config.last_n or 1) + 1), num_loops + 1))
    if config.loop_weights is not None:
        if num_loops != len(config.loop_weights):
            raise ConfigError.of("loop_weights", config.loop_weights, f"cannot be matched to {num_loops} loops")
        return [k for k, weight in enumerate(config.loop_weights, start=1) if weight > 0]
    return list(range(1, num_loops + 1))


def sample_depth(config: ObjectiveConfig, num_loops: int, *, seed: int, step: int) -> int:
    """Loops of one training step: a function of (seed, step), so that it is the same on every rank and after a resume.

    Poisson-lognormal: 1 + Poisson(λ), log λ ~ N(log(K − 1) − σ²/2, σ²), whose mean is K = `num_loops`.
    """
    if config.depth == "fixed" or num_loops == 1:
        return num_loops
    rng = np.random.default_rng([seed, step])
    if config.depth == "uniform":
        return int(rng.integers(1, num_loops + 1))
    rate = rng.lognormal(math.log(num_loops - 1) - DEPTH_SIGMA**2 / 2, DEPTH_SIGMA)
    return 1 + int(rng.poisson(rate))


def exit_distribution(exit_logits_KN: Tensor) -> Tensor:
    """log p_KN of leaving at each loop: p_k = λ_k·Π_{j<k}(1 − λ_j), λ = σ(logit); the last loop takes the remainder."""
    log_stay_KN = F.logsigmoid(-exit_logits_KN[:-1]).cumsum(0)
    log_reach_KN = torch.cat([torch.zeros_like(exit_logits_KN[:1]), log_stay_KN])
    log_leave_KN = torch.cat([F.logsigmoid(exit_logits_KN[:-1]), torch.zeros_like(exit_logits_KN[:1])])
    return log_reach_KN + log_leave_KN


def gated_weights(model: LoopedModel, features_KND: Tensor, counted_N: Tensor) -> tuple[Tensor, ExitDistribution]:
    """Gated exits, Σ p_k·CE_k: the weights p_KN, and the distribution for the terms that look at it."""
    gated = ExitGate.needed(model, "placement = 'gated'")
    exit_logits_KN = torch.stack([gated.exit_logits(features_ND) for features_ND in features_KND])
    wide = torch.promote_types(exit_logits_KN.dtype, torch.float32)
    log_p_KN = exit_distribution(exit_logits_KN.to(wide))
    return log_p_KN.exp(), ExitDistribution(log_p_KN, counted_N)


def pairs_of(batches: Iterable[Tensor | Batch]) -> list[Batch]:
    """Batches as pairs of ids and targets; without targets, each token predicts the next."""
    pairs = []
    for batch in batches:
        ids_BT, targets_BT = batch if isinstance(batch, (tuple, list)) else (batch, None)
        if not isinstance(ids_BT, Tensor) or ids_BT.dim() != 2 or ids_BT.is_floating_point():
            got = f"{tuple(ids_BT.shape)} of {ids_BT.dtype}" if isinstance(ids_BT, Tensor) else type(ids_BT).__name__
            raise DataError(f"a batch must be a (batch, tokens) tensor of ids, or a pair with targets; got {got}")
        if targets_BT is None:
            ids_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
        pairs.append((ids_BT, targets_BT))
    if not pairs:
        raise DataError("a trial training needs at least one batch of token ids; got none")
    return pairs
