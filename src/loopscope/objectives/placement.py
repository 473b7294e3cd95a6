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
from loopscope.errors import ConfigError, DataError
from loopscope.objectives.cross_entropy import ReadoutLoss, multi_readout_cross_entropy, reference_cross_entropy
from loopscope.objectives.scale import norm_penalty, scale_anchor
from loopscope.protocol import LoopedModel, LoopTrace, run_loops

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
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Terms of the loss besides the weighted cross-entropy (and its z-loss), by name."""


class Objective:
    """Turns a model, ids and targets into a loss, through the protocol only."""

    def __init__(self, config: ObjectiveConfig, *, fused: bool = True) -> None:
        self.config = config
        self.cross_entropy = multi_readout_cross_entropy if fused else reference_cross_entropy

    def __call__(
        self, model: LoopedModel, ids_BT: Tensor, targets_BT: Tensor, *, num_loops: int | None = None
    ) -> ObjectiveResult:
        """The loss at `num_loops` loops (the trained depth by default; see `sample_depth` for random ones)."""
        if ids_BT.shape != targets_BT.shape:
            raise DataError(f"ids {tuple(ids_BT.shape)} and targets {tuple(targets_BT.shape)} differ in shape")
        trace = run_loops(model, ids_BT, num_loops=num_loops, backprop_loops=self.config.backprop_loops)
        loops = supervised_loops(self.config, trace.num_loops)
        features_KND = torch.stack([model.features(trace.states[k], k).flatten(0, 1) for k in loops])
        terms = self._scale_terms(trace)
        weights, entropy = self._weights(model, features_KND, loops)
        if entropy is not None:
            terms["exit_entropy"] = -self.config.exit_entropy * entropy
        readouts: ReadoutLoss = self.cross_entropy(
            features_KND, model.head, targets_BT.flatten(), loop_weights=weights, z_loss=self.config.z_loss
        )
        loss = readouts.loss + sum(terms.values())
        detached = {name: term.detach() for name, term in terms.items()}
        return ObjectiveResult(loss, loops, readouts.ce_K, trace.norms_K(), detached)

    def _weights(self, model: LoopedModel, features_KND: Tensor, loops: list[int]) -> tuple[Tensor, Tensor | None]:
        """Weights of the supervised loops: (K,) fixed ones, or for gated exits (K, N) with their mean entropy."""
        if self.config.placement == "gated":
            return gated_weights(model, features_KND)
        given = self.config.loop_weights
        raw = torch.tensor([given[k - 1] if given else 1.0 for k in loops], device=features_KND.device)
        return raw / raw.sum(), None

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


def gated_weights(model: LoopedModel, features_KND: Tensor) -> tuple[Tensor, Tensor]:
    """Ouro's exits, Σ p_k·CE_k − w·H(p): the weights p_KN and the mean entropy of p over tokens."""
    if not hasattr(model, "exit_logits"):
        raise ConfigError("the gated objective needs a model with exit_logits(features); none found")
    gated: _GatedModel = model  # type: ignore[assignment]
    log_p_KN = exit_distribution(torch.stack([gated.exit_logits(features_ND) for features_ND in features_KND]))
    p_KN = log_p_KN.exp()
    return p_KN, -(p_KN * log_p_KN).sum(0).mean()
