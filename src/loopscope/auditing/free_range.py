"""How far a variable can run before the objective notices: by 1 % of perplexity, 0.01 nats per token.

A named field f̂ moves the state of every token at loop k, and in itself at every later exit,

    h_j ← h_j + (α − 1)·‖h_j‖·f̂(h_j)        for all exits j ≥ k        (scale, f̂ = h/‖h‖: h_j ← α·h_j)

and what the loops compute from the change charges nothing: weights adapt to it, which is how a scale runs away. The
free range is the smallest α at which the objective has noticed 0.01 nats,

    Σ_{j ≥ k} w_j·e_j(α)/W_k + Σ_terms (value(α) − value(reference))/W_k        W_k = Σ_{j ≥ k} w_j

    e_j = max(½·mean_v x_v², ln mean_v exp(x_v))        x = max(1, 1/rms z)·Δz across z + (1/rms z)·Δz along z

An exit notices the response of its centred logits z and not the change of CE, which saturates on text that a model has
fitted. Tiny logits of an untrained model are lifted. A change along z, of the temperature alone, counts by its share of
z also where logits are large: how hot an untrained model is, is an accident of its initialisation, and weights undo it.

A term notices its own increase, counted from a reference that the design fixes and never from the audited state, which
may have run already: scale 1, that of the untrained states, or the scale at which the term is least, if larger.

Shape legend: A factors α, J exits, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopscope.auditing.visibility import Field
from loopscope.objectives.placement import exit_distribution
from loopscope.objectives.terms import Pass, Term
from loopscope.protocol import ExitGate, LinearReadout, LoopedModel, LoopState, LoopTrace
from loopscope.results.thresholds import FURTHEST, NOTICED

PER_DECADE = 4
"""Factors α − 1 per decade, from 0.01 to the furthest; between them the crossing is interpolated."""
MAJORITY, POPULATION = 0.5, 0.05
"""Shares of tokens that make a finding: free tenfold, and free a hundredfold."""
TOKENS = 96
"""Tokens that are moved: enough for a share, few enough for a large vocabulary."""
SAME_LOGITS = 0.95
"""Cosine of logits from which a state below scale 1 is judged at scale 1."""


@dataclass(frozen=True)
class FreeRange:
    """How far one variable can run, per loop from which it is moved."""

    median: dict[int, float]
    """Loop k → median over tokens; infinity where nothing up to a million is noticed."""
    tenfold: dict[int, float]
    """Loop k → share of tokens that are free tenfold or more."""
    hundredfold: dict[int, float]
    term_norm: dict[int, float]
    """Loop k → ‖h‖ at which the terms alone have noticed it; absent where they never do."""

    def is_free(self, k: int) -> bool:
        """Whether half of the tokens are free tenfold, or a population of 5 % a hundredfold."""
        return self.tenfold[k] >= MAJORITY or self.hundredfold[k] >= POPULATION


class Objections:
    """What an objective charges for moves of the states of one pass."""

    def __init__(
        self,
        model: LoopedModel,
        states: Sequence[LoopState],
        weights: Mapping[int, float],
        terms: Sequence[Term],
        *,
        gated: bool = False,
        untrained_scale: float = 1.0,
    ) -> None:
        """`untrained_scale` is that of the states before training; below 1 it is 1."""
        self.untrained_scale = untrained_scale
        self.model, self.weights, self.terms = model, dict(weights), [t for t in terms if not t.inside_cross_entropy]
        self.z_loss = sum(term.weight for term in terms if term.inside_cross_entropy)
        self.gate = ExitGate.needed(model, "an audit of gated exits") if gated else None
        self.rows = max(1, TOKENS // states[0].h_BTD.shape[1])
        first = torch.arange(min(self.rows, len(states[0].h_BTD)), device=states[0].h_BTD.device)
        loops = range(1, max(self.weights) + 1)
        self.states = {k: self._judged(states[k].take(first), k) for k in loops}

    @torch.no_grad()
    def free_range(self, of: Field, loops: Sequence[int]) -> FreeRange:
        """Of one variable, moved from each of the loops on."""
        furthest = math.log10(FURTHEST)
        alphas_A = 1 + 10 ** torch.linspace(-2, furthest, round((furthest + 2) * PER_DECADE) + 1, dtype=torch.float64)
        exits = {j: self._exit(of, j, alphas_A) for j in self.weights}
        weights_JN = self._weights()
        ranges, term_norm = {}, {}
        for k in loops:
            later = [j for j in self.weights if j >= k] or [max(self.weights)]
            total_N = sum(weights_JN[j] for j in later)
            terms_AN = self._terms(of, k, alphas_A)[:, None] / total_N
            weights_JAN = self._weights_moved(of, k, alphas_A)
            total_AN = torch.stack([weights_JAN[j] for j in later]).sum(0).clamp(min=1e-300)
            exits_AN = sum(weights_JAN[j] * exits[j] for j in later) / total_AN
            ranges[k] = _first_crossing(alphas_A, exits_AN + terms_AN)
            alone = float(_first_crossing(alphas_A, terms_AN).median())
            if math.isfinite(alone):
                width = self.states[k].h_BTD.shape[-1]
                term_norm[k] = alone * max(map(self.reference, self.terms)) * width**0.5
        return FreeRange(
            {k: float(range_N.median()) for k, range_N in ranges.items()},
            {k: float((range_N >= 10).double().mean()) for k, range_N in ranges.items()},
            {k: float((range_N >= 100).double().mean()) for k, range_N in ranges.items()},
            term_norm,
        )

    @torch.no_grad()
    def charge(self, of: Field, alpha: float) -> Tensor:
        """Nats that a move by α from the first loop on costs, for every token."""
        alphas_A, weights = torch.tensor([alpha], dtype=torch.float64), self._weights()
        exits = sum(weights[j] * self._exit(of, j, alphas_A)[0] for j in self.weights)
        return (exits + self._terms(of, 1, alphas_A)) / sum(weights.values())

    def mean_weights(self) -> dict[int, float]:
        """w_j of every exit, on average over tokens."""
        with torch.no_grad():
            return {j: float(weight_N.mean()) for j, weight_N in self._weights().items()}

    def _judged(self, state: LoopState, k: int) -> LoopState:
        """A state below scale 1 at scale 1, where its logits keep their direction: there a norm's eps leaks."""
        h_BTD = state.h_BTD
        scale_BT1 = _scale(h_BTD)
        if bool((scale_BT1 >= 1).all()):  # as in every step of a training but the first: two readouts saved
            return state
        grown = state.with_h(h_BTD / scale_BT1.clamp(max=1))
        here_BTV, there_BTV = self._centred(state, k), self._centred(grown, k)
        same_BT1 = torch.nn.functional.cosine_similarity(here_BTV, there_BTV, dim=-1)[..., None] >= SAME_LOGITS
        return state.with_h(torch.where(same_BT1, grown.h_BTD, h_BTD))

    def _centred(self, state: LoopState, k: int) -> Tensor:
        logits_BTV = self.model.readout(state, k).double()
        return logits_BTV - logits_BTV.mean(-1, keepdim=True)

    def _exit(self, of: Field, j: int, alphas_A: Tensor) -> Tensor:
        """e_j of every factor and token."""
        state = self.states[j]
        base_BTV = self.model.readout(state, j).double()
        centred_BTV = base_BTV - base_BTV.mean(-1, keepdim=True)
        rms_BT1 = centred_BTV.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        unit_BTV = centred_BTV / centred_BTV.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        charged = []
        for alpha in alphas_A.tolist():
            moved_BTV = self.model.readout(state.with_h(_moved(state.h_BTD, of, alpha)), j).double()
            change_BTV = moved_BTV - base_BTV
            change_BTV = change_BTV - change_BTV.mean(-1, keepdim=True)
            hotter_BTV = (change_BTV * unit_BTV).sum(-1, keepdim=True) * unit_BTV
            z_BTV = (change_BTV - hotter_BTV) / rms_BT1.clamp(max=1) + hotter_BTV / rms_BT1
            few_BT = z_BTV.logsumexp(-1) - math.log(z_BTV.shape[-1])
            noticed_BT = torch.maximum(z_BTV.square().mean(-1) / 2, few_BT)
            if self.z_loss:
                shift_BT = moved_BTV.logsumexp(-1) - base_BTV.logsumexp(-1)
                noticed_BT = noticed_BT + self.z_loss * shift_BT.square()
            charged.append(noticed_BT.flatten().nan_to_num(nan=math.inf))
        return torch.stack(charged)

    def _weights_moved(self, of: Field, k: int, alphas_A: Tensor) -> dict[int, Tensor]:
        """w_j of every factor and token when the states from loop k on are moved: a gate reads what has moved."""
        if self.gate is None:
            return {j: weight_N[None] for j, weight_N in self._weights().items()}
        moved = [self._weights(lambda j, h: _moved(h, of, alpha) if j >= k else h) for alpha in alphas_A.tolist()]  # noqa: B023
        return {j: torch.stack([weights[j] for weights in moved]) for j in self.weights}

    def _weights(self, rewrite: Callable[[int, Tensor], Tensor] = lambda j, h: h) -> dict[int, Tensor]:
        """w_j of every token: the configuration's, or the gate's exit probabilities at rewritten states."""
        some = next(iter(self.states.values())).h_BTD
        if self.gate is None:
            return {
                j: torch.full((some[..., 0].numel(),), weight, dtype=torch.float64)
                for j, weight in self.weights.items()
            }
        linear = LinearReadout.needed(self.model, "an audit of gated exits")
        states = {j: self.states[j].with_h(rewrite(j, self.states[j].h_BTD)) for j in self.weights}
        features = (linear.features(state, j) for j, state in states.items())
        logits = [self.gate.exit_logits(each).double().flatten() for each in features]
        return dict(zip(self.weights, exit_distribution(torch.stack(logits)).exp(), strict=True))

    def _terms(self, of: Field, k: int, alphas_A: Tensor) -> Tensor:
        """What all terms charge at each factor, each counted from its own reference scale."""
        charged_A = torch.zeros_like(alphas_A)
        for term in self.terms:
            reference = self.reference(term)
            base = self._value(term, reference)
            charged = [self._value(term, reference, of, k, alpha) - base for alpha in alphas_A.tolist()]
            # A reward drives and never holds: what it gives back does not make up for what the others charge.
            charged_A = charged_A + torch.tensor(charged, dtype=torch.float64).nan_to_num(nan=math.inf).clamp(min=0)
        return charged_A

    def reference(self, term: Term) -> float:
        """The scale from which a term counts: 1, that of the untrained states or where it is least, if larger."""
        if term.inside_cross_entropy:
            return max(1.0, self.untrained_scale)
        scales = [10 ** (exponent / 8) for exponent in range(-8, 41)]
        values = [self._value(term, scale) for scale in scales]
        return max(1.0, self.untrained_scale, scales[min(range(len(scales)), key=lambda index: values[index])])

    def _value(self, term: Term, scale: float, of: Field | None = None, k: int = 1, alpha: float = 1.0) -> float:
        """The term on states of that scale, those from loop k on moved."""
        states = []
        for j, state in self.states.items():
            h_BTD = state.h_BTD * (scale / _scale(state.h_BTD))
            if of is not None and j >= k:
                h_BTD = _moved(h_BTD, of, alpha)
            states.append(state.with_h(h_BTD))
        return float(term.value(Pass(LoopTrace([states[0], *states]))))


def _moved(h_BTD: Tensor, of: Field, alpha: float) -> Tensor:
    direction_BTD = of(h_BTD)
    unit_BTD = direction_BTD / direction_BTD.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return h_BTD + (alpha - 1) * h_BTD.norm(dim=-1, keepdim=True) * unit_BTD


def _scale(h_BTD: Tensor) -> Tensor:
    return h_BTD.norm(dim=-1, keepdim=True).clamp(min=1e-30) / h_BTD.shape[-1] ** 0.5


def _first_crossing(alphas_A: Tensor, charged_AN: Tensor) -> Tensor:
    """The smallest α at which a charge reaches the limit, interpolated in logarithms; infinity where none does."""
    over_AN = charged_AN >= NOTICED
    first_N = over_AN.int().argmax(0)
    before_N = (first_N - 1).clamp(min=0)
    columns = torch.arange(charged_AN.shape[1])
    low_N, high_N = (charged_AN[rows, columns].clamp(min=1e-300).log() for rows in (before_N, first_N))
    share_N = ((math.log(NOTICED) - low_N) / (high_N - low_N)).nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)
    moves_A = (alphas_A - 1).log()
    crossing_N = 1 + (moves_A[before_N] + share_N * (moves_A[first_N] - moves_A[before_N])).exp()
    return torch.where(over_AN.any(0), crossing_N, math.inf)
