"""Halting rules: how ready a token is to leave after a loop, decided from what is known there and then.

A rule gives a score, the larger the readier; the token leaves at the first loop whose score reaches the threshold
(`inference.halting`). Rules are per token and causal: nothing of later tokens, nothing of deeper loops. A new one is a
class with a name, and nothing else anywhere: `--rule`, `--halting` and `all` know it by its definition.

Shape legend: B rows, T tokens, N tokens looked at, D width, V vocabulary, K loops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import ConfigError, DataError, suggest
from loopscope.inference.decoding import check_finite, device_of
from loopscope.protocol import Cache, ExitGate, LinearReadout, LoopedModel, LoopState, run_loops
from loopscope.results.halting import Policy, ProbeWeights

NEVER = float("-inf")
"""Score of a token that a rule cannot judge yet."""

RIDGE = 1e-3
"""Of a probe's mean loss. Inputs have unit RMS; a weight of 1 then costs as much as 0.0005 nats, and where all tokens
have the same y the weights stay finite."""
MOST_TOKENS = 1 << 14
MOST_NUMBERS = 1 << 27
"""Tokens that a probe is fitted on, and channels of all their states that are held: 0.5 GB."""
NEWTON_STEPS = 50
GRADIENT = 1e-9
"""Largest entry of the gradient of a solution."""

# --- what a rule sees ------------------------------------------------------------------------------------------------


@dataclass
class Look:
    """What is known of some tokens after loop k; readouts are computed when a rule asks for them, once."""

    model: Any
    state: LoopState
    k: int
    num_loops: int
    cache: Cache
    before: Look | None
    """The same tokens one loop earlier; None at loop 1."""

    @cached_property
    def features_BTD(self) -> Tensor:
        """What the head multiplies."""
        return LinearReadout.needed(self.model, "this halting rule").features(self.state, self.k, self.cache)

    @cached_property
    def logits_BTV(self) -> Tensor:
        """Of the exit at loop k."""
        linear = LinearReadout.of(self.model)
        if linear is None:
            logits_BTV = self.model.readout(self.state, self.k, self.cache)
        else:
            logits_BTV = torch.nn.functional.linear(self.features_BTD, linear.head)
        check_finite(logits_BTV, self.k)
        return logits_BTV

    @cached_property
    def logprobs_BTV(self) -> Tensor:
        """Log-probabilities of the exit."""
        return self.logits_BTV.float().log_softmax(-1)

    @cached_property
    def margin_BT(self) -> Tensor:
        """By how much the likeliest token's logit is above the next."""
        best = self.logits_BTV.float().topk(2, -1).values
        return best[..., 0] - best[..., 1]

    @cached_property
    def stay_BT(self) -> Tensor:
        """Probability, by the model's own gate, of not having left at this loop or an earlier one."""
        gate = ExitGate.needed(self.model, "the halting rule gate")
        stay_BT = 1 - gate.exit_logits(self.features_BTD).float().sigmoid()
        return stay_BT if self.before is None else stay_BT * self.before.stay_BT

    def same(self, score: float) -> Tensor:
        """The same score of all tokens."""
        return torch.full(self.state.h_BTD.shape[:2], score, device=self.state.h_BTD.device)

    def take(self, rows: Tensor) -> Look:
        """Of some rows; what has been computed comes along."""
        before = None if self.before is None else self.before.take(rows)
        chosen = Look(self.model, self.state.take(rows), self.k, self.num_loops, self.cache, before)
        for name, value in vars(self).items():
            if isinstance(getattr(type(self), name, None), cached_property):
                vars(chosen)[name] = value[rows]
        return chosen


# --- rules -----------------------------------------------------------------------------------------------------------


RULES: dict[str, type[Rule]] = {}
"""By name, in the order in which they are defined; each adds itself."""


class Rule(ABC):
    """A score of how ready a token is to leave. `class Mine(Rule, name="mine")` is a rule that has a name."""

    name: ClassVar[str]
    is_adaptive: ClassVar[bool] = True
    """Whether tokens leave at loops of their own."""
    is_fitted: ClassVar[bool] = False
    """Whether it is made for one model, on text of its own (`fitted`), and read back from its policy (`of_policy`)."""
    divides_by_norm: ClassVar[bool] = False
    """Whether a state that merely grows looks as if it had settled: a false stop where scale drifts."""

    def __init_subclass__(cls, *, name: str | None = None) -> None:
        if name is not None:
            cls.name = name
            RULES[name] = cls

    @abstractmethod
    def score(self, look: Look) -> Tensor:
        """Score_BT after loop k; the larger, the readier."""

    @classmethod
    def suits(cls, model: object) -> bool:
        """Whether the model has what the rule reads."""
        return True

    @classmethod
    def fitted(
        cls, model: LoopedModel, texts: Iterable[Tensor], num_loops: int, bound: float, *, seed: int = 0
    ) -> Self:
        """The rule for this model, where leaving may cost `bound` nats a token; most have nothing to fit."""
        return cls()

    @classmethod
    def of_policy(cls, policy: Policy) -> Self:
        """The rule as a policy file has it; a ValueError says what is missing there."""
        return cls()

    @property
    def weights(self) -> ProbeWeights | None:
        """What a policy file keeps of it besides its threshold."""
        return None


class Fixed(Rule, name="fixed"):
    """Every token leaves at the same loop: the threshold."""

    is_adaptive = False

    def score(self, look: Look) -> Tensor:
        return look.same(float(look.k))


class Margin(Rule, name="margin"):
    """z_(1) − z_(2), the two largest logits."""

    def score(self, look: Look) -> Tensor:
        return look.margin_BT


class MaxProbability(Rule, name="max-probability"):
    """max_v p(v)."""

    def score(self, look: Look) -> Tensor:
        return look.logprobs_BTV.amax(-1).exp()


class Entropy(Rule, name="entropy"):
    """Σ p·ln p: minus the entropy, in nats."""

    def score(self, look: Look) -> Tensor:
        return (look.logprobs_BTV.exp() * look.logprobs_BTV).sum(-1)


class Divergence(Rule, name="kl"):
    """−KL(p_k ‖ p_{k−1}): the prediction has stopped changing."""

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return look.same(NEVER)
        now, then = look.logprobs_BTV, look.before.logprobs_BTV
        return -(now.exp() * (now - then)).sum(-1)


class StateDifference(Rule, name="state-difference"):
    """−‖h_k − h_{k−1}‖/‖h_k‖."""

    divides_by_norm = True

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return look.same(NEVER)
        now, then = look.state.h_BTD.float(), look.before.state.h_BTD.float()
        return -(now - then).norm(dim=-1) / now.norm(dim=-1).clamp(min=1e-30)


class Cosine(Rule, name="cosine"):
    """cos(h_k, h_{k−1})."""

    divides_by_norm = True

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return look.same(NEVER)
        return torch.cosine_similarity(look.state.h_BTD.float(), look.before.state.h_BTD.float(), dim=-1)


class GateRule(Rule, name="gate"):
    """Σ_{j ≤ k} p_j, the cumulative exit probability of the model's own gate (Ouro)."""

    @classmethod
    def suits(cls, model: object) -> bool:
        return ExitGate.of(model) is not None

    def score(self, look: Look) -> Tensor:
        return 1 - look.stay_BT


class Certain(Rule, name="certain"):
    """margin_k / (2·max_v |z_k − z_{k−1}|·(K − k)), logits centred.

    If no later loop moves the logits by more than the last one did, the remaining K − k loops move the margin by at
    most the denominator: from 1 on the decision cannot change any more.
    """

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return look.same(NEVER)
        moved_BTV = look.logits_BTV.float() - look.before.logits_BTV.float()
        moved_BT = (moved_BTV - moved_BTV.mean(-1, keepdim=True)).abs().amax(-1)
        return look.margin_BT / (2 * moved_BT * max(look.num_loops - look.k, 1)).clamp(min=1e-30)


@dataclass(frozen=True)
class Probe(Rule, name="probe"):
    """w_k·h_k/‖h_k‖_rms + b_k: a linear map of the state's direction, fitted on text of its own; D products a check.

    After loop k it is asked whether going on would still change the prediction:

        y = 1 where KL(p_K ‖ p_k) ≤ b        P(y = 1) = σ(w_k·u_k + b_k),  u = h/‖h‖_rms

    KL(p_K ‖ p_k) is what leaving costs on average, nats a token, if the token that comes is drawn from what the full
    depth predicts. The cost at the token that did come has the same mean where the model is right, and far more noise.
    Weights are fitted by logistic regression with a ridge, in float64, by Newton's method: the problem is strictly
    convex, so there is one answer and nothing to tune.
    """

    weights_KD: Sequence[Sequence[float]]
    """One row for every loop but the last."""
    biases_K: Sequence[float]
    is_fitted: ClassVar[bool] = True

    def score(self, look: Look) -> Tensor:
        h_BTD = look.state.h_BTD.float()
        inverse_BT = h_BTD.square().mean(-1).clamp(min=1e-30).rsqrt()
        return (h_BTD @ self._tensor_KD[look.k - 1].to(h_BTD.device)) * inverse_BT + self.biases_K[look.k - 1]

    @cached_property
    def _tensor_KD(self) -> Tensor:
        return torch.tensor(self.weights_KD)

    @classmethod
    def fitted(
        cls, model: LoopedModel, texts: Iterable[Tensor], num_loops: int, bound: float, *, seed: int = 0
    ) -> Self:
        """A probe of every loop but the last, fitted on all tokens of these ids_BT.

        Also on those that are no answer of a task: they leave by the same score, and answers look at what they show.
        """
        states: list[list[Tensor]] = [[] for _ in range(num_loops - 1)]
        settled: list[list[Tensor]] = [[] for _ in range(num_loops - 1)]
        texts, generator = list(texts), torch.Generator().manual_seed(seed)
        count = sum(ids_BT.numel() for ids_BT in texts)
        with torch.no_grad():
            for ids_BT in texts:
                trace = run_loops(model, ids_BT.to(device_of(model)), num_loops=num_loops).states
                most = min(MOST_TOKENS, MOST_NUMBERS // (trace[0].h_BTD.shape[-1] * num_loops))
                asked_BT = torch.rand(ids_BT.shape, generator=generator) * count < most
                asked_BT = asked_BT.to(trace[0].h_BTD.device)
                last_NV = model.readout(trace[num_loops], num_loops)[asked_BT].float().log_softmax(-1)
                for k in range(1, num_loops):
                    early_NV = model.readout(trace[k], k)[asked_BT].float().log_softmax(-1)
                    divergence_N = (last_NV.exp() * (last_NV - early_NV)).sum(-1)
                    settled[k - 1].append((divergence_N <= bound).double().cpu())
                    states[k - 1].append(trace[k].h_BTD[asked_BT].float().cpu())
        weights, biases = [], []
        for parts, targets in zip(states, settled, strict=True):
            h_ND, y_N = torch.cat(parts).double(), torch.cat(targets)
            if not len(h_ND):
                raise DataError("there is no text to fit a probe on; name more text with --data")
            u_ND = h_ND * h_ND.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()
            w_D, c = logistic(u_ND, y_N)
            weights.append(w_D.tolist())
            biases.append(float(c))
        return cls(weights, biases)

    @classmethod
    def of_policy(cls, policy: Policy) -> Self:
        if policy.probe is None:
            raise ValueError("the rule is a probe, and there are no weights of one")
        return cls(policy.probe.weights, policy.probe.biases)

    @property
    def weights(self) -> ProbeWeights:
        return ProbeWeights(weights=tuple(map(tuple, self.weights_KD)), biases=tuple(self.biases_K))


def logistic(x_ND: Tensor, y_N: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """(w_D, c) of the least mean ln(1 + e^z) − y·z + ridge/2·(‖w‖² + c²), z = x·w + c, by Newton's method, float64."""
    x_NE = torch.cat([x_ND, x_ND.new_ones(len(x_ND), 1)], 1).double()
    y_N = y_N.double()
    theta_E = x_NE.new_zeros(x_NE.shape[1])

    def loss(theta_E: Tensor) -> Tensor:
        z_N = x_NE @ theta_E
        return (F.softplus(z_N) - y_N * z_N).mean() + ridge / 2 * theta_E.square().sum()

    for _ in range(NEWTON_STEPS):
        p_N = (x_NE @ theta_E).sigmoid()
        gradient_E = x_NE.T @ (p_N - y_N) / len(y_N) + ridge * theta_E
        if gradient_E.abs().max() <= GRADIENT:
            break
        hessian_EE = (x_NE.T * (p_N * (1 - p_N))) @ x_NE / len(y_N)
        hessian_EE.diagonal().add_(ridge)
        step_E = torch.cholesky_solve(gradient_E[:, None], torch.linalg.cholesky(hessian_EE))[:, 0]
        before, size = loss(theta_E), 1.0
        # Far from the solution a whole step may overshoot: halve it until the loss falls as it should.
        while size > 1e-6 and loss(theta_E - size * step_E) > before - 1e-4 * size * (gradient_E @ step_E):
            size /= 2
        theta_E = theta_E - size * step_E
    return theta_E[:-1], theta_E[-1]


# --- by name ---------------------------------------------------------------------------------------------------------


def rule_named(name: str, flag: str) -> type[Rule]:
    """The kind of rule; `flag` is where it was named."""
    if name not in RULES:
        raise ConfigError.of(flag, name, suggest(name, RULES))
    return RULES[name]


def rule_of(name: str, flag: str = "halting") -> Rule:
    """A rule that needs nothing but a threshold."""
    kind = rule_named(name, flag)
    if kind.is_fitted:
        raise ConfigError.of(
            flag, name, f"is fitted to a model: `loopscope calibrate TARGET --rule {name} -o policy.json` writes it"
        )
    return kind()


def rules_for(model: object) -> list[str]:
    """Rules that a model can be asked about, fixed depth aside."""
    return [name for name, kind in RULES.items() if kind.is_adaptive and kind.suits(model)]
