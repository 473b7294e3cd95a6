"""Decoding: the next token of each sequence, through a cache where the model takes one.

Prompts of different lengths share a batch without padding: all of them run to the end of the shortest, the others go on
to the end of the next, and so on, so that every loop of every token is run once. From then on each row stands at a
position of its own.

Shape legend: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from loopscope.errors import ConfigError, DataError, NotFiniteError
from loopscope.inference.cache import EXACT, CachePolicy, KVCache
from loopscope.inference.sampling import Sampling
from loopscope.protocol import Cache, Cached, LinearReadout, LoopedModel, LoopState, check_products, run_loops


@dataclass(frozen=True)
class Policies:
    """What the cache keeps of the prompts' tokens, and of those that follow."""

    decode: CachePolicy = EXACT
    prefill: CachePolicy = EXACT
    """Exact: prompts run with all slots, and what `decode` does not keep is dropped at their end. Otherwise the policy
    of decoding: prompts then run token by token, as they would be decoded."""

    def __post_init__(self) -> None:
        if self.prefill not in (EXACT, self.decode):
            why = f"must be exact or that of decoding ({self.decode.name}): what it drops cannot be brought back"
            raise ConfigError.of("prefill_policy", self.prefill.name, why)


ALL_EXACT = Policies()


# --- running tokens --------------------------------------------------------------------------------------------------


class Runner(Protocol):
    """Runs the tokens of several sequences, counted from 0, through all loops."""

    num_loops: int

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits_V after each prompt."""
        ...

    def step(self, numbers: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits_BV after one more token of each of these sequences."""
        ...

    def spent(self, number: int) -> int:
        """Loops that were run for the last token of a sequence."""
        ...


def runner_for(model: LoopedModel, num_loops: int, policies: Policies = ALL_EXACT) -> Runner:
    """Through a cache where the model takes one; else everything is run again for every token."""
    check_products(model, device_of(model))
    cached = Cached.of(model)
    if cached is not None:
        return CachedRunner(cached, num_loops, policies)
    if policies != ALL_EXACT:
        Cached.needed(model, f"the cache policy {policies.decode.name}")
    return RecomputingRunner(model, num_loops)


class CachedRunner:
    """Every token is run once; the cache has a row for every sequence."""

    def __init__(self, model: Cached, num_loops: int, policies: Policies = ALL_EXACT) -> None:
        self.model, self.num_loops, self.policies = model, num_loops, policies
        self.device = device_of(model)
        self.cache = KVCache(0, policies.prefill, num_loops=num_loops)
        self.row: list[int] = []
        """Of each sequence."""

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits_V after each prompt; prompts of different lengths go in steps, as long as the shortest that is left.

        The longest prompt gets the first row, so that those that go on always lie side by side.
        """
        rows = self.cache.take_rows(len(prompts))
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        by_number = dict(zip(order, rows, strict=True))
        self.row = [by_number[number] for number in range(len(prompts))]
        logits: dict[int, Tensor] = {}
        start = 0
        while order:
            end = len(prompts[order[-1]])
            one_by_one = self.policies.prefill != EXACT
            for first in range(start, end) if one_by_one else (start,):
                last = first + 1 if one_by_one else end
                ids_BT = torch.tensor([prompts[number][first:last] for number in order], device=self.device)
                logits_BV = self._run(ids_BT, [self.row[number] for number in order])
            while order and len(prompts[order[-1]]) == end:
                logits[order[-1]] = logits_BV[len(order) - 1]
                order.pop()
            start = end
        if self.policies.prefill != self.policies.decode:
            self.cache.thin(self.policies.decode, self.num_loops)
        return [logits[number] for number in range(len(prompts))]

    @torch.inference_mode()
    def step(self, numbers: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits_BV after one more token of each of these sequences."""
        return self._run(torch.tensor(ids, device=self.device)[:, None], [self.row[number] for number in numbers])

    def spent(self, number: int) -> int:
        """All of them."""
        return self.num_loops

    def _run(self, ids_BT: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits_BV after the last of these tokens."""
        view = self.cache.append(ids_BT.shape[1], rows)
        state = self.model.embed(ids_BT, view)
        for k in range(1, self.num_loops + 1):
            state = self.model.loop(state, k, view)
        return last_logits(self.model, state, self.num_loops, view)


class RecomputingRunner:
    """For models without a cache: every token runs the whole sequence again."""

    def __init__(self, model: LoopedModel, num_loops: int) -> None:
        self.model, self.num_loops = model, num_loops
        self.device = device_of(model)
        self.ids: list[list[int]] = []

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits_V after each prompt."""
        self.ids = [list(prompt) for prompt in prompts]
        return [self._run(ids) for ids in self.ids]

    @torch.no_grad()
    def step(self, numbers: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits_BV after one more token of each of these sequences."""
        for number, new in zip(numbers, ids, strict=True):
            self.ids[number].append(new)
        return torch.stack([self._run(self.ids[number]) for number in numbers])

    def spent(self, number: int) -> int:
        """All of them."""
        return self.num_loops

    def _run(self, ids: Sequence[int]) -> Tensor:
        state = run_loops(self.model, torch.tensor([ids], device=self.device), num_loops=self.num_loops).states[-1]
        return last_logits(self.model, state, self.num_loops)[0]


def last_logits(model: LoopedModel | Cached, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
    """Logits_BV of the last token, without those of the others where the readout is features times a head."""
    given = () if cache is None else (cache,)
    if (linear := LinearReadout.of(model)) is not None:
        logits_BV = nn.functional.linear(linear.features(state, k, *given)[:, -1], linear.head)
    else:
        logits_BV = model.readout(state, k, *given)[:, -1]
    check_finite(logits_BV, k)
    return logits_BV


def check_finite(logits: Tensor, k: int) -> None:
    """Refuse to choose a token from NaN or infinity."""
    if not logits.isfinite().all():
        raise NotFiniteError(f"the logits after loop {k} are not finite numbers: no token can be chosen from them")


def device_of(model: object) -> torch.device:
    """Where the model's weights are; the CPU where it has none."""
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return torch.device("cpu") if weight is None else weight.device


# --- generating ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Token:
    """One generated token."""

    number: int
    """Of its sequence, counted from 0."""
    id: int
    logprob: float
    """By the model's own distribution: no temperature, no penalty."""
    loops: int
    """Loops that were run to choose it."""


@dataclass
class Continuation:
    """A prompt and what has been generated after it."""

    prompt: list[int]
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None
    """Why it ended: "length", "end-of-text", "context", or what the caller said; None while it goes on."""

    @property
    def ids(self) -> list[int]:
        """Of the prompt and of what follows."""
        return [*self.prompt, *(token.id for token in self.tokens)]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a sequence ends."""

    max_tokens: int = 128
    """Generated tokens."""
    context: int | None = None
    """Tokens the model takes, prompt included; None: any number."""
    end_ids: Collection[int] = ()
    """Tokens that end the text; they are not part of it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError.of("max_tokens", self.max_tokens, "must be at least 1")

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt of no tokens, and one that leaves no room for another token."""
        if not ids:
            raise DataError("a prompt must have at least one token")
        if self.context is not None and len(ids) >= self.context:
            raise DataError(
                f"the prompt has {len(ids):,} tokens, and the model takes {self.context:,} with what follows; "
                "shorten it, or drop its beginning with --truncate"
            )

    def reached(self, continuation: Continuation) -> str | None:
        """Why a sequence ends here, or None."""
        if continuation.tokens and continuation.tokens[-1].id in self.end_ids:
            return "end-of-text"
        if len(continuation.tokens) >= self.max_tokens:
            return "length"
        if self.context is not None and len(continuation.prompt) + len(continuation.tokens) >= self.context:
            return "context"
        return None


def decode(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
) -> Iterator[tuple[Continuation, Token]]:
    """Tokens as they are chosen, of all sequences in turn; a caller ends one early by setting its `finish`."""
    sampling, limits = sampling or Sampling(), limits or Limits()
    for prompt in prompts:
        limits.check_prompt(prompt)
    running = {number: Continuation(list(prompt)) for number, prompt in enumerate(prompts)}
    generators = [sampling.generator(number) for number in running]
    logits = dict(enumerate(runner.prefill(prompts)))
    while True:
        for number, continuation in running.items():
            logits_V = logits[number]
            chosen = sampling.draw(logits_V, continuation.ids, generators[number])
            token = Token(number, chosen, logprob(logits_V, chosen), runner.spent(number))
            continuation.tokens.append(token)
            continuation.finish = limits.reached(continuation)
            yield continuation, token
        running = {number: each for number, each in running.items() if each.finish is None}
        if not running:
            return
        last = [each.tokens[-1].id for each in running.values()]
        logits = dict(zip(running, runner.step(list(running), last), strict=True))


def logprob(logits_V: Tensor, chosen: int) -> float:
    """Log-probability of a token by the model's own distribution."""
    logits_V = logits_V.double()
    return float(logits_V[chosen] - logits_V.logsumexp(-1))
