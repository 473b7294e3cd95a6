"""From logits to the next token: greedy or sampled, and the rule that keeps sampling exact under speculation.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from loopscope.options import SamplingOptions

SMALLEST_TEMPERATURE = 1e-300
"""Division by less may be division by zero, where the processor takes denormal numbers for it."""


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions):
    """The choice of the next token, as the options say; each prompt has random numbers of its own."""

    @classmethod
    def of(cls, options: SamplingOptions) -> Self:
        """That of options which say more."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(SamplingOptions)})

    @property
    def is_greedy(self) -> bool:
        """Whether chance plays no part."""
        return self.temperature == 0

    def generator(self, number: int) -> torch.Generator:
        """Random numbers of the prompt of this number."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)

    def penalised(self, logits_V: Tensor, seen: Sequence[int]) -> Tensor:
        """Logits after the repetition penalty."""
        if self.repetition_penalty == 1 or not seen:
            return logits_V
        ids = torch.tensor(sorted(set(seen)), device=logits_V.device)
        own = logits_V[ids]
        changed = torch.where(own > 0, own / self.repetition_penalty, own * self.repetition_penalty)
        return logits_V.index_copy(0, ids, changed)

    def probabilities(self, logits_V: Tensor, seen: Sequence[int]) -> Tensor:
        """The distribution that is drawn from, on the CPU in float64; one token has all of it when greedy."""
        logits_V = self.penalised(logits_V, seen)
        if self.is_greedy:
            return torch.nn.functional.one_hot(logits_V.argmax(), len(logits_V)).double().cpu()
        logits_V = logits_V.double().cpu()
        # The largest logit is taken off first: divided by a tiny temperature it would not be a number any more.
        p_V = torch.softmax((logits_V - logits_V.max()) / max(self.temperature, SMALLEST_TEMPERATURE), -1)
        if self.top_k is not None or self.top_p is not None:
            ordered_V, order_V = p_V.sort(descending=True, stable=True)  # of equals the first: top-k 1 is greedy
            kept_V = torch.arange(len(p_V)) < (len(p_V) if self.top_k is None else self.top_k)
            if self.top_p is not None and self.top_p < 1:
                before_V = ordered_V.cumsum(0) - ordered_V  # the token that crosses the limit stays
                kept_V &= before_V < self.top_p * (ordered_V * kept_V).sum()
            p_V = p_V.index_fill(0, order_V[~kept_V], 0.0)
        if self.min_p is not None:
            p_V = p_V * (p_V >= self.min_p * p_V.max())
        return p_V / p_V.sum()

    def draw(self, logits_V: Tensor, seen: Sequence[int], generator: torch.Generator) -> int:
        """The next token."""
        if self.is_greedy:
            return int(self.penalised(logits_V, seen).argmax())
        return int(torch.multinomial(self.probabilities(logits_V, seen), 1, generator=generator))


def accept(drafted: int, draft_V: Tensor, target_V: Tensor, generator: torch.Generator) -> int:
    """The token that stands after verification, distributed as `target_V` (p) whatever drafted it (from q = `draft_V`).

    x ~ q is kept with probability min(1, p(x)/q(x)), else a token is drawn from max(p − q, 0), normalised:
    P(y) = min(p, q)(y) + (1 − Σ min(p, q))·max(p − q, 0)(y)/Σ max(p − q, 0) = p(y)
    """
    chance = float(target_V[drafted] / draft_V[drafted])
    if chance >= 1 or float(torch.rand((), generator=generator, dtype=torch.float64)) < chance:
        return drafted
    left_V = (target_V - draft_V).clamp(min=0)
    if not left_V.any():  # p = q but for rounding
        return drafted
    return int(torch.multinomial(left_V, 1, generator=generator))
