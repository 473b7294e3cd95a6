"""Terms of a loss besides cross-entropy, each one object: its value on a pass, and what it shows of a state.

The objective sums the values, the audit asks what is shown, the monitor whether the scale is seen, and the plan runs
it to count what it takes. All of them read the same object, so that none of them can forget a term.

    norm penalty    λ · mean over loops, tokens and width of h² = λ · mean s²        shows √(λ/d)·h
    scale anchor    w · mean over loops and tokens of (s − target)²                  shows √w·s
    z-loss          z · mean over exits of lse², lse = log Σ_v exp(logit_v)          shows √z·lse
    exit entropy    −w · mean over tokens of H(p), p the exit distribution           shows nothing: it only rewards

Here s = √(mean over width of h²). A term shows f(h) when its value is, to second order, a squared length of f.
Shape legend: K loops, B batch, T tokens, N = B·T, D width, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError
from loopscope.protocol import LoopTrace


@dataclass(frozen=True)
class Pass:
    """What one forward pass of an objective leaves for its terms."""

    trace: LoopTrace
    entropy: Tensor | None = None
    """Mean entropy of the exit distribution, where exits are gated."""

    @property
    def states(self) -> list[Tensor]:
        """h_1 … h_K."""
        return [state.h_BTD for state in self.trace.states[1:]]


class Term(ABC):
    """A term of a loss. A model may have terms of its own (`protocol.OwnLosses`), a user may write some."""

    name: str
    weight: float
    inside_cross_entropy: ClassVar[bool] = False
    """Computed where the logits are, by the cross-entropy itself; `value` is not asked."""
    may_reward: ClassVar[bool] = False
    """Whether its weight may be negative: then it pays instead of charging, and `shows` must not take its root."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse a weight that is no finite number, or negative where the term is there to charge.

        Terms that are dataclasses are checked when they are made, any other when an audit or an objective gets it.
        """
        try:
            weight = float(self.weight)
        except (TypeError, ValueError):
            weight = math.nan
        if not math.isfinite(weight):
            raise ConfigError(f"{type(self).__name__}: weight = {self.weight!r}: must be a finite number")
        if weight < 0 and not self.may_reward:
            raise ConfigError(f"{type(self).__name__}: weight = {self.weight!r}: must not be negative")

    @abstractmethod
    def value(self, seen: Pass) -> Tensor:
        """What it adds to the loss, weight included."""

    def shows(self, h_BTD: Tensor, logits: Callable[[], Tensor]) -> Tensor | None:
        """f_BTF(h), of which the value is a squared length; `logits()` reads the state out. None shows nothing."""
        return None


@dataclass(frozen=True)
class NormPenalty(Term):
    """λ · mean over loops, tokens and width of h² (arXiv 2606.24898)."""

    weight: float
    name: str = "norm_penalty"

    def value(self, seen: Pass) -> Tensor:
        return norm_penalty(seen.states, self.weight)

    def shows(self, h_BTD: Tensor, logits: Callable[[], Tensor]) -> Tensor:
        return (self.weight / h_BTD.shape[-1]) ** 0.5 * h_BTD


@dataclass(frozen=True)
class ScaleAnchor(Term):
    """w · mean over loops and tokens of (s − target)²: it sees the length and nothing else."""

    weight: float
    target: float = 1.0
    name: str = "scale_anchor"

    def check(self) -> None:
        """Its target is a scale besides."""
        super().check()
        if not 0 < self.target < math.inf:
            raise ConfigError(f"ScaleAnchor: target = {self.target!r}: must be a finite number above 0")

    def value(self, seen: Pass) -> Tensor:
        return scale_anchor(seen.states, self.weight, self.target)

    def shows(self, h_BTD: Tensor, logits: Callable[[], Tensor]) -> Tensor:
        return (self.weight / h_BTD.shape[-1]) ** 0.5 * h_BTD.norm(dim=-1, keepdim=True)


@dataclass(frozen=True)
class ZLoss(Term):
    """z · lse² at every exit, weighted like its cross-entropy: it sees a shift of all logits, which softmax hides."""

    weight: float
    name: str = "z_loss"
    inside_cross_entropy: ClassVar[bool] = True

    def value(self, seen: Pass) -> Tensor:
        raise AssertionError("the cross-entropy computes it where the logits are")

    def shows(self, h_BTD: Tensor, logits: Callable[[], Tensor]) -> Tensor:
        return self.weight**0.5 * logits().logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class ExitEntropy(Term):
    """−w·H(p): keeps the exit distribution from collapsing (Ouro)."""

    weight: float
    name: str = "exit_entropy"

    def value(self, seen: Pass) -> Tensor:
        assert seen.entropy is not None, "Config allows an exit entropy with gated exits only"
        return -self.weight * seen.entropy


def terms_of(config: ObjectiveConfig) -> list[Term]:
    """The terms that a configuration turns on."""
    gated = config.placement == "gated"
    terms: dict[Term, bool] = {
        NormPenalty(config.norm_penalty): config.norm_penalty > 0,
        ScaleAnchor(config.scale_anchor, config.anchor_scale): config.scale_anchor > 0,
        ZLoss(config.z_loss): config.z_loss > 0,
        ExitEntropy(config.exit_entropy): gated,
    }
    return [term for term, is_on in terms.items() if is_on]


def norm_penalty(states_KBTD: Tensor | Sequence[Tensor], weight: float) -> Tensor:
    """λ · mean over loops, tokens and width of h² = λ · mean s² (arXiv 2606.24898; there λ = 0.01).

    Takes the states stacked, or as a sequence of (B, T, D) tensors, which saves the copy.
    """
    return weight * torch.stack([_wide(h_BTD).square().mean() for h_BTD in states_KBTD]).mean()


def scale_anchor(states_KBTD: Tensor | Sequence[Tensor], weight: float, target: float) -> Tensor:
    """w · mean over loops and tokens of (s − target)²."""
    scales_KBT = torch.stack([_scale(h_BTD) for h_BTD in states_KBTD])
    return weight * (scales_KBT - target).square().mean()


def _scale(h_BTD: Tensor) -> Tensor:
    """s of every token; the norm's gradient at h = 0 is 0, the square root's would be infinite."""
    return _wide(h_BTD).norm(dim=-1) / h_BTD.shape[-1] ** 0.5


def _wide(h_BTD: Tensor) -> Tensor:
    """In float32 at least: squares of half-precision states overflow."""
    return h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
