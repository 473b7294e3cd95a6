"""From logits to the next token: greedy or sampled, and the rule that keeps sampling exact under speculation.

Shape legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loopscope.errors import ConfigError

SMALLEST_TEMPERATURE = 1e-300
"""Division by less may be division by zero, where the processor takes denormal numbers for it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: the repetition penalty first, then temperature, top-k, top-p and min-p."""

    temperature: float = 0.0
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: int | None = None
    """Only so many of the likeliest tokens."""
    top_p: float | None = None
    """Only the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Only tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occurred are divided by it where positive, multiplied where negative."""
    seed: int = 0
    """Of the random numbers; each prompt has its own, whatever else is in the batch."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "must be 0 (greedy) or more, and finite"),
            ("top_k", self.top_k is None or self.top_k >= 1, "must be at least 1"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "must be between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be above 0, and finite"),
        )
        for name, is_right, why in checks:
            if not is_right:
                raise ConfigError.of(name, getattr(self, name), why)

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
