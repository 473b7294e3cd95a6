"""Decoding: the next token of each sequence, through a cache where the model takes one.

Prompts of different lengths share a batch without padding: all of them run to the end of the shortest, the others go on
to the end of the next, and so on, so that every loop of every token is run once. From then on each row stands at a
position of its own.

Shape legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from loopscope.errors import ConfigError, DataError
from loopscope.inference.cache import EXACT, CachePolicy, KVCache
from loopscope.inference.sampling import Sampling
from loopscope.protocol import Cache, Cached, LinearReadout, LoopedModel, LoopState, check_products, run_loops


@dataclass(frozen=True)
class Policies:
    """What the cache keeps of the prompts' tokens and of those that follow."""

    prefill: CachePolicy = EXACT
    """Other than exact, prompts run token by token, as they would be decoded."""
    decode: CachePolicy = EXACT

    def __post_init__(self) -> None:
        if self.prefill not in (EXACT, self.decode):
            why = f"must be exact or that of decoding ({self.decode.name}): what it drops cannot be brought back"
            raise ConfigError.of("prefill_policy", self.prefill.name, why)


@dataclass(frozen=True)
class Token:
    """One token of one sequence."""

    number: int
    """Of its prompt, counted from 0."""
    id: int
    logprob: float
    """By the model's own distribution: no temperature, no penalty."""
    loops: int
    """Loops that were run to choose it."""


@dataclass
class Sequence_:
    """A prompt and what has been generated after it."""

    number: int
    ids: list[int]
    prompt_length: int
    generator: torch.Generator
    logits_V: Tensor | None = None
    """What the next token is chosen from."""
    tokens: list[Token] = field(default_factory=list)


class Runner(Protocol):
    """Runs tokens of several sequences through K loops."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits_V after each prompt."""
        ...

    def step(self, rows: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits_BV after one more token of each of these sequences."""
        ...
