"""Decoding: the next token of each sequence, through a cache where the model takes one; how it is chosen, and its text.

Prompts of different lengths share a batch without padding: all of them run to the end of the shortest, the others go on
to the end of the next, and so on, so that every loop of every token is run once. From then on each row stands at a
position of its own.

Shape legend: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol, Self

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor, nn

from loopscope.errors import ConfigError, DataError, NotFiniteError
from loopscope.inference.cache import EXACT, CachePolicy, KVCache
from loopscope.options import SamplingOptions
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
        """Loops that were run for the last token of a sequence: all of them, unless tokens leave early."""
        return self.num_loops


def runner_for(model: LoopedModel, num_loops: int, policies: Policies = ALL_EXACT) -> Runner:
    """Through a cache where the model takes one; else everything is run again for every token."""
    check_products(model, device_of(model))
    cached = Cached.of(model)
    if cached is not None:
        return CachedRunner(cached, num_loops, policies)
    if policies != ALL_EXACT:
        Cached.needed(model, f"the cache policy {policies.decode.name}")
    return RecomputingRunner(model, num_loops)


class CachedRunner(Runner):
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

    def _run(self, ids_BT: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits_BV after the last of these tokens."""
        view = self.cache.append(ids_BT.shape[1], rows)
        state = self.model.embed(ids_BT, view)
        for k in range(1, self.num_loops + 1):
            state = self.model.loop(state, k, view)
        return last_logits(self.model, state, self.num_loops, view)


class RecomputingRunner(Runner):
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


# --- from logits to the next token -----------------------------------------------------------------------------------

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


# --- from tokens to text ---------------------------------------------------------------------------------------------

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder shows for bytes that are no character, or none yet."""
PROMPT_TOKENS = 8
"""Tokens of the prompt that new ones are decoded behind: some decoders drop the space that a text begins with."""


class TextStream:
    """Tokens in, text out, as soon as it is certain.

    A character may span tokens, and a stop string may: what could still become either is held back until the next token
    decides, or the end does. What stands after a stop string is dropped. New tokens are decoded behind those before
    them, and what these gave already is taken off: a decoder may see a token differently where nothing comes before.
    """

    def __init__(self, backend: Backend, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        if "" in stop:
            raise ConfigError.of("stop", "", "an empty string would stop every text at once")
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._backend, self._stop = backend, stop
        self._ids = list(prompt[-PROMPT_TOKENS:])
        self._window = 0
        """Where decoding begins: at the tokens that gave text last."""
        self._given = len(self._ids)
        """Tokens whose text has been given out."""
        self._held = ""

    def feed(self, token: int) -> str:
        """What is certain after one more token."""
        self._ids.append(token)
        new = self._new_text()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._window, self._given = self._given, len(self._ids)
        return self._release(self._held + new)

    def end(self) -> str:
        """What was held back; bytes that never became a character are shown as U+FFFD."""
        if self.stopped is not None:
            return ""
        text, self._held = self._release(self._held + self._new_text()) + self._held, ""
        return text

    def _new_text(self) -> str:
        before, now = (
            self._backend.decode(self._ids[self._window : end], skip_special_tokens=False)
            for end in (self._given, len(self._ids))
        )
        return now[len(before) :]

    def _release(self, text: str) -> str:
        # The one that is complete first, so that it does not matter how the text is cut into tokens.
        found = [(place + len(each), place, each) for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            _, place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
