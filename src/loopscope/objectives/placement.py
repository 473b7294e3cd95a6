"""Where the loss is placed: which loops are supervised, with what weight, and how deep a step goes.

Placement decides which *exits* get trained. It does not decide what a readout shows: per-loop cross-entropy through an
RMSNorm readout still never sees the scale of the state (Lemma 1).

Shape legend: K supervised loops, B batch, T tokens, N = B·T, D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, DataError, UnsupportedError
from loopscope.objectives.cross_entropy import (
    IGNORE_INDEX,
    ReadoutLoss,
    logits_cross_entropy,
    multi_readout_cross_entropy,
    reference_cross_entropy,
)
from loopscope.objectives.scale import norm_penalty, scale_anchor
from loopscope.protocol import LoopedModel, LoopTrace, own_readout, readout, run_loops

DEPTH_SIGMA = 0.5
"""Spread of the log-normal rate in Poisson-lognormal depth sampling (Huginn's)."""


class _GatedModel(LoopedModel, Protocol):
    def exit_logits(self, features_BTD: Tensor) -> Tensor: ...


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
    """Turns a model, ids and targets into a loss, through the protocol only."""

    def __init__(self, config: ObjectiveConfig, *, fused: bool = True, recompute: bool = False) -> None:
        self.config = config
        self.recompute = recompute
        self.cross_entropy = multi_readout_cross_entropy if fused else reference_cross_entropy

    def __call__(
        self, model: LoopedModel, ids_BT: Tensor, targets_BT: Tensor, *, num_loops: int | None = None
    ) -> ObjectiveResult:
        """The loss at `num_loops` loops (the trained depth by default; see `sample_depth` for random ones)."""
        if ids_BT.shape != targets_BT.shape:
            raise DataError(f"ids {tuple(ids_BT.shape)} and targets {tuple(targets_BT.shape)} differ in shape")
        backprop_loops = self.config.backprop_loops
        trace = run_loops(model, ids_BT, num_loops=num_loops, backprop_loops=backprop_loops, recompute=self.recompute)
        loops = supervised_loops(self.config, trace.num_loops)
        targets_N = targets_BT.flatten()
        terms = self._scale_terms(trace)
        if own_readout(model) is not None:
            loss, ce_K = self._own_readout_loss(model, trace, loops, targets_N)
        else:
            features_KND = torch.stack([model.features(trace.states[k], k).flatten(0, 1) for k in loops])
            weights = self._fixed_weights(loops, targets_N.device)
            if self.config.placement == "gated":
                weights, entropy = gated_weights(model, features_KND, targets_N != IGNORE_INDEX)
                terms["exit_entropy"] = -self.config.exit_entropy * entropy
            loss, ce_K = self._cross_entropy(features_KND, model.head, targets_N, weights)
        loss = loss + sum(terms.values())
        detached = {name: term.detach() for name, term in terms.items()}
        return ObjectiveResult(loss, loops, ce_K, trace.norms_K(), trace, detached)

    def _cross_entropy(
        self, features_KND: Tensor, head_VD: Tensor, targets_N: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weighted loss and CE per loop; exits below the last on a random share of positions if so configured."""
        z_loss, share = self.config.z_loss, self.config.exit_fraction
        if share == 1 or len(features_KND) == 1:
            every = self.cross_entropy(features_KND, head_VD, targets_N, loop_weights=weights, z_loss=z_loss)
            return every.loss, every.ce_K
        chosen = torch.randperm(len(targets_N), device=targets_N.device)[: math.ceil(share * len(targets_N))]
        exits: ReadoutLoss = self.cross_entropy(
            features_KND[:-1, chosen], head_VD, targets_N[chosen], loop_weights=weights[:-1], z_loss=z_loss
        )
        last = self.cross_entropy(features_KND[-1:], head_VD, targets_N, loop_weights=weights[-1:], z_loss=z_loss)
        return exits.loss + last.loss, torch.cat([exits.ce_K, last.ce_K])

    def _own_readout_loss(
        self, model: LoopedModel, trace: LoopTrace, loops: list[int], targets_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """For a model that makes its logits itself: the plain path on those."""
        if self.config.placement == "gated" or self.config.exit_fraction < 1:
            raise UnsupportedError(
                "a model with its own readout takes neither gated exits nor an exit_fraction below 1"
            )
        logits_KNV = torch.stack([readout(model, trace.states[k], k).flatten(0, 1) for k in loops])
        weights = self._fixed_weights(loops, targets_N.device)
        every = logits_cross_entropy(logits_KNV, targets_N, loop_weights=weights, z_loss=self.config.z_loss)
        return every.loss, every.ce_K

    def _fixed_weights(self, loops: list[int], device: torch.device) -> Tensor:
        """Weights (K,) of the supervised loops, summing to 1."""
        given = self.config.loop_weights
        raw = torch.tensor([given[k - 1] if given else 1.0 for k in loops], device=device)
        return raw / raw.sum()

    def _scale_terms(self, trace: LoopTrace) -> dict[str, Tensor]:
        states = [state.h_BTD for state in trace.states[1:]]
        terms: dict[str, Tensor] = {}
        if self.config.norm_penalty:
            terms["norm_penalty"] = norm_penalty(states, self.config.norm_penalty)
        if self.config.scale_anchor:
            terms["scale_anchor"] = scale_anchor(states, self.config.scale_anchor, self.config.anchor_scale)
        return terms


def supervised_loops(config: ObjectiveConfig, num_loops: int) -> list[int]:
    """The loops that get cross-entropy when `num_loops` are run."""
    if config.placement == "terminal":
        return [num_loops]
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


def gated_weights(model: LoopedModel, features_KND: Tensor, counted_N: Tensor) -> tuple[Tensor, Tensor]:
    """Ouro's exits, Σ p_k·CE_k − w·H(p): the weights p_KN and the mean entropy of p over the tokens that count."""
    if not hasattr(model, "exit_logits"):
        raise ConfigError("the gated objective needs a model with exit_logits(features); none found")
    gated: _GatedModel = model  # type: ignore[assignment]
    exit_logits_KN = torch.stack([gated.exit_logits(features_ND) for features_ND in features_KND])
    wide = torch.promote_types(exit_logits_KN.dtype, torch.float32)
    log_p_KN = exit_distribution(exit_logits_KN.to(wide))
    p_KN = log_p_KN.exp()
    entropy_N = -(p_KN * log_p_KN).sum(0)
    return p_KN, (entropy_N * counted_N).sum() / counted_N.sum().clamp(min=1)
