"""Readouts: the part of the state that the head, and so every cross-entropy, gets to see.

Lemma 1 (visibility, arXiv 2606.24898): if features(αh) = features(h) for all α > 0, then ⟨∇_h CE, h⟩ = 0 and no loss
on the logits can control the scale of h. Each readout declares what it hides, as a function of its current
parameters; tests prove the declarations in both directions.

Here s = √(mean h² + eps) is the scale of a token's state. Shape legend: B batch, T tokens, D width, K loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from loopscope.config import ModelConfig
from loopscope.model.norms import TaperNorm, make_norm, scale_of

HIDDEN_BELOW = 1e-4
"""A scale exponent (or taper share) below this is not a training signal: the readout counts as hiding scale."""

NOTHING: frozenset[str] = frozenset()
SCALE = frozenset({"scale"})
SCALE_AND_MEAN = frozenset({"scale", "mean"})


def hidden_by(norm: str) -> frozenset[str]:
    """What nobody behind a norm of this kind gets to see."""
    return SCALE if norm == "rmsnorm" else SCALE_AND_MEAN


class Readout(nn.Module):
    """State → features. `hides(k)` names the directions of h that the features at loop k do not show."""

    def forward(self, h_BTD: Tensor, k: int) -> Tensor:
        raise NotImplementedError

    def hides(self, k: int) -> frozenset[str]:
        """Subset of {"scale", "mean"} that is invisible at loop k with the current parameters."""
        raise NotImplementedError


class Raw(Readout):
    """features = h: everything is visible."""

    def forward(self, h_BTD: Tensor, k: int) -> Tensor:
        return h_BTD

    def hides(self, k: int) -> frozenset[str]:
        return NOTHING


class Norm(Readout):
    """features = norm(h). RMSNorm hides scale; LayerNorm hides scale and mean. The only leak is eps/(s² + eps)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.readout
        self.norm = make_norm(config.readout, config.width, config.norm_eps)

    def forward(self, h_BTD: Tensor, k: int) -> Tensor:
        return self.norm(h_BTD)

    def hides(self, k: int) -> frozenset[str]:
        return hidden_by(self.kind)


class FinalOnly(Readout):
    """Raw below the trained depth, RMSNorm from it on: the raw exits keep scale visible to the loss.

    "Final" is the trained depth, whatever number of loops is run: an exit is read out as it was trained.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_loops = config.num_loops
        self.norm = make_norm("rmsnorm", config.width, config.norm_eps)

    def forward(self, h_BTD: Tensor, k: int) -> Tensor:
        return self.norm(h_BTD) if k >= self.num_loops else h_BTD

    def hides(self, k: int) -> frozenset[str]:
        return SCALE if k >= self.num_loops else NOTHING


class Alpha(Readout):
    """features = γ·h/s with γ = s_ref^(1−a)·s^a: a dial from RMSNorm (a = 0) to raw (a = 1).

    Scaling h by c scales the features by c^a, so the radial gradient is a times the raw one.
    """

    alpha: Tensor
    log_reference: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        exponents = torch.full((config.num_loops if config.alpha_mode == "per-loop" else 1,), config.alpha)
        _register(self, "alpha", exponents, learned=config.alpha_mode != "fixed")
        log_reference = torch.tensor(math.log(config.reference_scale))
        _register(self, "log_reference", log_reference, learned=config.reference_mode == "learned")
        self.mean_scale = MeanScale(config.reference_scale) if config.reference_mode == "ema" else None

    def exponent(self, k: int) -> Tensor:
        """a at loop k; loops beyond the trained depth use the last one."""
        return self.alpha[min(k, len(self.alpha)) - 1]

    def forward(self, h_BTD: Tensor, k: int) -> Tensor:
        s_BT1 = scale_of(h_BTD, self.eps)
        log_reference = self.log_reference if self.mean_scale is None else self.mean_scale(s_BT1).log()
        exponent = self.exponent(k)
        gain_BT1 = torch.exp((1 - exponent) * log_reference + (exponent - 1) * s_BT1.log())
        return (gain_BT1 * h_BTD).to(h_BTD.dtype)

    def hides(self, k: int) -> frozenset[str]:
        return SCALE if abs(self.exponent(k).item()) <= HIDDEN_BELOW else NOTHING


class Taper(Readout):
    """TaperNorm (arXiv 2602.10408): from RMSNorm at gate 1 to a fixed map at 0. Only at 1 is scale hidden."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = TaperNorm(config.width, config.norm_eps, config.taper_gate)

    def forward(self, h_BTD: Tensor, k: int) -> Tensor:
        return self.norm(h_BTD)

    def hides(self, k: int) -> frozenset[str]:
        return SCALE if 1 - self.norm.gate.item() <= HIDDEN_BELOW else NOTHING


class MeanScale(nn.Module):
    """Running mean of a scale over training batches; a non-finite batch leaves it as it was."""

    mean: Tensor

    def __init__(self, start: float, momentum: float = 0.01) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.tensor(start))

    def forward(self, s_BT1: Tensor) -> Tensor:
        """The running mean, updated first in training mode."""
        if self.training:
            batch = s_BT1.detach().mean().to(self.mean.dtype)
            self.mean.copy_(torch.where(batch.isfinite(), torch.lerp(self.mean, batch, self.momentum), self.mean))
        return self.mean.clone()


def _register(module: nn.Module, name: str, value: Tensor, *, learned: bool) -> None:
    if learned:
        module.register_parameter(name, nn.Parameter(value))
    else:
        module.register_buffer(name, value)


_READOUTS: dict[str, Callable[[ModelConfig], Readout]] = {
    "rmsnorm": Norm,
    "layernorm": Norm,
    "raw": lambda config: Raw(),
    "final-only": FinalOnly,
    "alpha": Alpha,
    "taper": Taper,
}


def make_readout(config: ModelConfig) -> Readout:
    """The readout a configuration asks for."""
    return _READOUTS[config.readout](config)
