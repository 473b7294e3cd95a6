"""`loopscope.generate`: text from any target, streamed, greedy or sampled, at any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import nn

from loopscope.data.tokenizers import Tokenizer
from loopscope.errors import ConfigError
from loopscope.inference.cache import CachePolicy
from loopscope.inference.decoding import (
    ALL_EXACT,
    Continuation,
    Limits,
    Policies,
    Runner,
    Sampling,
    TextStream,
    Token,
    decode,
    runner_for,
)
from loopscope.inference.halting import HaltingRunner, parse_halting
from loopscope.inference.speculation import PLAIN, Speculator, Tally, parse_plan
from loopscope.machine import check_bf16_products
from loopscope.options import GenerateOptions, chosen
from loopscope.protocol import Cached
from loopscope.targets import Opened, Say, bring, check_dtype, open_target, with_tokenizer
from loopscope.training.session import set_up


@dataclass(frozen=True)
class Generated:
    """One prompt and the text that followed."""

    prompt: str
    text: str
    tokens: list[Token] = field(repr=False)
    finish: str
    """length, end-of-text, context, or stop."""

    def __str__(self) -> str:
        return self.text

    @property
    def loops(self) -> int:
        """Loops that were run for all its tokens."""
        return sum(token.loops for token in self.tokens)

    def to_json(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """As `loopscope generate --json` prints it."""
        tokens = [
            {"id": token.id, "text": tokenizer.decode([token.id]), "logprob": token.logprob, "loops": token.loops}
            for token in self.tokens
        ]
        return {"prompt": self.prompt, "text": self.text, "finish": self.finish, "loops": self.loops, "tokens": tokens}


class Piece(NamedTuple):
    """Text that has become certain."""

    number: int
    """Of its prompt."""
    text: str
    loops: int
    """Of the token that made it certain."""


class Generation:
    """Pieces of text as they become certain: it runs while it is iterated over, one batch for all prompts.

    What cannot be done is told at once; `results` are there at the end.
    """

    def __init__(
        self,
        target: str | Path | Opened,
        prompts: Sequence[str],
        options: GenerateOptions,
        *,
        say: Say,
    ) -> None:
        self.options, self._plan = options, parse_plan(options.speculate)
        self._policies = Policies(CachePolicy(options.cache_policy), CachePolicy(options.prefill_policy))
        self._halting = None if options.halting is None else parse_halting(options.halting)
        if self._plan != PLAIN and self._policies != ALL_EXACT and self._halting is None:
            raise ConfigError.of("speculate", options.speculate, "needs an exact cache: leave --cache-policy out")
        if self._halting is not None and (self._plan != PLAIN or self._policies != ALL_EXACT):
            why = "goes with neither --speculate nor --cache-policy: tokens that left show the keys of their exit"
            raise ConfigError.of("halting", options.halting, why)
        check_dtype(options.dtype)
        self.opened = with_tokenizer(open_target(target, dtype=options.dtype), options.tokenizer)
        if self.opened.tokenizer is None:
            raise ConfigError(
                f"{self.opened.name} has no tokenizer to turn text into tokens; name one with --tokenizer (bytes, or a "
                "tokenizer.json)"
            )
        self.tokenizer = self.opened.tokenizer
        self.prompts = list(prompts)
        self.results: list[Generated] = []
        self._limits = Limits(
            max_tokens=options.max_tokens, context=self.opened.max_length, end_ids=self.opened.end_ids
        )
        self._ids = [self._encoded(prompt) for prompt in prompts]
        device = options.device or set_up().device
        bring(self.opened.model, device)
        if isinstance(self.opened.model, nn.Module):
            if options.dtype in ("bfloat16", "own") and torch.device(device).type == "cpu":
                check_bf16_products()
            self.opened.model.eval()
        self.num_loops = options.num_loops or self.opened.model.num_loops
        self._speculator: Speculator | None = None
        if self._plan != PLAIN:
            cached, sampling = Cached.needed(self.opened.model, "speculation"), Sampling.of(options)
            self._speculator = Speculator(
                cached, self.num_loops, sampling=sampling, limits=self._limits, plan=self._plan
            )
        if Cached.of(self.opened.model) is None:
            say(f"{self.opened.name} takes no cache: every token runs the whole text again")

    def __iter__(self) -> Iterator[Piece]:
        streams = [TextStream(self.tokenizer.backend, self.options.stop, ids) for ids in self._ids]
        texts, done = [""] * len(self.prompts), [Continuation([]) for _ in self.prompts]
        for continuation, token in self._tokens():
            stream, number = streams[token.number], token.number
            piece = "" if continuation.finish == "end-of-text" else stream.feed(token.id)
            if stream.stopped is not None:
                continuation.finish = "stop"
            if continuation.finish is not None:
                piece += stream.end()
                done[number] = continuation
            texts[number] += piece
            if piece:
                yield Piece(number, piece, token.loops)
        self.results = [
            Generated(prompt, text, each.tokens, each.finish or "")
            for prompt, text, each in zip(self.prompts, texts, done, strict=True)
        ]

    @property
    def tally(self) -> Tally | None:
        """What speculation did, where it was asked for."""
        return None if self._speculator is None else self._speculator.tally

    def _tokens(self) -> Iterator[tuple[Continuation, Token]]:
        if self._speculator is not None:
            return chain.from_iterable(self._speculator.decode(ids, number) for number, ids in enumerate(self._ids))
        runner: Runner
        if self._halting is None:
            runner = runner_for(self.opened.model, self.num_loops, self._policies)
        else:
            cached = Cached.needed(self.opened.model, "leaving early while decoding")
            self._halting.check_fits(cached, self.num_loops)
            runner = HaltingRunner(cached, self.num_loops, self._halting)
        return decode(runner, self._ids, sampling=Sampling.of(self.options), limits=self._limits)

    def _encoded(self, prompt: str) -> list[int]:
        ids, limits = self.tokenizer.encode(prompt), self._limits
        if self.options.truncate and limits.context is not None and len(ids) >= limits.context:
            # Half of the context is left to the prompt even where as many tokens are asked for as the model takes.
            ids = ids[-max(limits.context - limits.max_tokens, limits.context // 2, 1) :]
        limits.check_prompt(ids)
        return ids


@overload
def generate(
    target: str | Path | Opened, prompt: str, options: GenerateOptions | None = None, **fields: Any
) -> Generated: ...
@overload
def generate(
    target: str | Path | Opened, prompt: Sequence[str], options: GenerateOptions | None = None, **fields: Any
) -> list[Generated]: ...
def generate(
    target: str | Path | Opened,
    prompt: str | Sequence[str],
    options: GenerateOptions | None = None,
    *,
    on_text: Callable[[int, str], None] = lambda number, text: None,
    say: Say = lambda text: None,
    **fields: Any,
) -> Generated | list[Generated]:
    """Text after a prompt, or after each of several in one batch; `str()` of a result is its text.

    `fields` are those of GenerateOptions. `on_text` is called with the number of the prompt and each piece of text as
    soon as it is certain.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    generation = Generation(target, prompts, chosen(GenerateOptions(), options, fields), say=say)
    for piece in generation:
        on_text(piece.number, piece.text)
    return generation.results[0] if isinstance(prompt, str) else generation.results
