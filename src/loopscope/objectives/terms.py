"""Terms of a loss besides cross-entropy, each one object: its value on a pass, and what it shows of a state.

The objective sums the values, the audit asks what is shown, the monitor whether the scale is seen, and the plan runs
it to count what it takes. All of them read the same object, so that none of them can forget a term.

    norm penalty    λ · mean over loops, tokens and width of h² = λ · mean s²        shows √(λ/d)·h
    scale anchor    w · mean over loops and tokens of (s − target)²                  shows √w·s
    z-loss          z · mean over exits of lse², lse = log Σ_v exp(logit_v)          shows √z·lse
    exit entropy    −w · mean over tokens of H(p), p the exit distribution           shows nothing: it only rewards
    exit prior      β · mean over tokens of KL(p ‖ geometric)                        shows nothing: it sees gates alone
    Jacobian        λ · ‖J v‖² of one more loop; the cross-entropy weighs 1 − λ      shows nothing of where the state is

Here s = √(mean over width of h²). A term shows f(h) when its value is, to second order, a squared length of f.
Shape legend: K loops, B batch, T tokens, N = B·T, D width, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError
from loopscope.protocol import LoopedModel, LoopState, LoopTrace


@dataclass(frozen=True)
class ExitDistribution:
    """Where tokens leave, as gates have it."""

    log_p_KN: Tensor
    """Log-probability of leaving at each loop."""
    counted_N: Tensor
    """Tokens that have a target."""

    def mean(self, values_N: Tensor) -> Tensor:
        """Mean over the tokens that count."""
        return (values_N * self.counted_N).sum() / self.counted_N.sum().clamp(min=1)

    def entropy(self) -> Tensor:
        """Mean H(p)."""
        return self.mean(-(self.log_p_KN.exp() * self.log_p_KN).sum(0))

    def divergence(self, rate: float) -> Tensor:
        """Mean KL(p ‖ q), q geometric: q_k = λ(1 − λ)^(k−1), and what remains of it on the last loop."""
        last = len(self.log_p_KN) - 1
        log_q = [k * math.log1p(-rate) + (math.log(rate) if k < last else 0.0) for k in range(last + 1)]
        log_q_K1 = torch.tensor(log_q, dtype=self.log_p_KN.dtype, device=self.log_p_KN.device)[:, None]
        return self.mean((self.log_p_KN.exp() * (self.log_p_KN - log_q_K1)).sum(0))


@dataclass(frozen=True)
class Pass:
    """What one forward pass of an objective leaves for its terms."""

    trace: LoopTrace
    exits: ExitDistribution | None = None
    """Where exits are gated."""
    model: LoopedModel | None = None
    """Whose pass it was; None where an audit asks what a term charges for a state alone."""

    @property
    def nothing(self) -> Tensor:
        """What a term charges that has nothing to look at."""
        return self.trace.states[-1].h_BTD.new_zeros((), dtype=torch.float32)

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

    replaces_cross_entropy: ClassVar[bool] = False
    """Whether the cross-entropy weighs 1 − weight beside it."""

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

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        """The term as a configuration asks for it; None where it does not, or where none can."""
        return None

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

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        return cls(config.norm_penalty) if config.norm_penalty > 0 else None

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

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        return cls(config.scale_anchor, config.anchor_scale) if config.scale_anchor > 0 else None

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

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        return cls(config.z_loss) if config.z_loss > 0 else None

    def value(self, seen: Pass) -> Tensor:
        raise AssertionError("the cross-entropy computes it where the logits are")

    def shows(self, h_BTD: Tensor, logits: Callable[[], Tensor]) -> Tensor:
        return self.weight**0.5 * logits().logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class ExitEntropy(Term):
    """−w·H(p): keeps the exit distribution from collapsing (Ouro)."""

    weight: float
    name: str = "exit_entropy"

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        return cls(config.exit_entropy) if config.placement == "gated" else None

    def value(self, seen: Pass) -> Tensor:
        return seen.nothing if seen.exits is None else -self.weight * seen.exits.entropy()


@dataclass(frozen=True)
class ExitPrior(Term):
    """β·KL(p ‖ geometric(λ_p)): pulls the exit distribution towards an expected depth of 1/λ_p (PonderNet)."""

    weight: float
    rate: float = 0.2
    name: str = "exit_prior"

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        return cls(config.exit_kl, config.exit_rate) if config.exit_kl > 0 else None

    def value(self, seen: Pass) -> Tensor:
        return seen.nothing if seen.exits is None else self.weight * seen.exits.divergence(self.rate)


@dataclass(frozen=True)
class JacobianPenalty(Term):
    """λ·‖J v‖², J of one more loop at the detached last state, v a random unit vector (STARS, arXiv 2605.26733).

        J v ≈ (F(h + ε·v) − F(h − ε·v))/2ε        ε = 0.01·‖h‖

    A difference, since neither flash attention nor our own kernels have a forward mode; its error is of order ε². It is
    taken without dropout, which would differ between the two. Chosen here: v is a unit vector of a whole sequence's
    state, and the value the mean over sequences.
    """

    weight: float
    name: str = "jacobian_penalty"
    STEP: ClassVar[float] = 0.01
    replaces_cross_entropy: ClassVar[bool] = True

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self | None:
        return cls(config.jacobian_penalty) if config.jacobian_penalty > 0 else None

    def check(self) -> None:
        """A weight of 1 would leave nothing of the cross-entropy."""
        super().check()
        if self.weight >= 1:
            raise ConfigError(f"JacobianPenalty: weight = {self.weight!r}: must be below 1")

    def value(self, seen: Pass) -> Tensor:
        if seen.model is None:
            return seen.nothing
        state = pytree.tree_map_only(Tensor, Tensor.detach, seen.trace.states[-1])
        v_BTD = torch.randn_like(state.h_BTD)
        v_BTD = v_BTD / _length(v_BTD)
        epsilon_B11 = self.STEP * _length(state.h_BTD)
        sides = [state.with_h(state.h_BTD + sign * epsilon_B11 * v_BTD) for sign in (1, -1)]
        with _undropped(seen.model):
            after = seen.model.loop(LoopState.joined(sides, 0), seen.trace.num_loops).h_BTD
        ahead_BTD, behind_BTD = _wide(after).chunk(2)
        image_BTD = (ahead_BTD - behind_BTD) / (2 * epsilon_B11)
        return self.weight * image_BTD.square().sum() / len(v_BTD)


def _length(x_BTD: Tensor) -> Tensor:
    """‖x‖ of every sequence (B, 1, 1)."""
    return _wide(x_BTD).flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-30)


@contextmanager
def _undropped(model: LoopedModel) -> Iterator[None]:
    """The model in evaluation mode."""
    modules = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module in modules:
            module.training = True


def terms_of(config: ObjectiveConfig) -> list[Term]:
    """The terms that a configuration turns on, in the order in which they are defined."""
    return [term for kind in Term.__subclasses__() if (term := kind.of(config)) is not None]


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
