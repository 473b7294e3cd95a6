"""`loopscope.generate`: text from any target, streamed, greedy or sampled, at any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import nn

from loopscope.config import MOST_LOOPS
from loopscope.data.tokenizers import Tokenizer
from loopscope.errors import ConfigError
from loopscope.inference.decoding import ALL_EXACT, Continuation, Limits, Policies, Runner, Token, decode, runner_for
from loopscope.inference.halting import HaltingRunner, parse_halting
from loopscope.inference.sampling import Sampling
from loopscope.inference.speculation import PLAIN, Speculator, Tally, parse_plan
from loopscope.inference.text import TextStream
from loopscope.machine import check_bf16_products
from loopscope.protocol import Cached
from loopscope.targets import Opened, check_dtype, open_target
from loopscope.training.session import set_up
from loopscope.verbs.text import Say, with_tokenizer


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


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What a generation is asked for, beside the prompts."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    num_loops: int | None = None
    """The trained depth by default."""
    halting: str | None = None
    """A policy file, or RULE:THRESHOLD: tokens leave as soon as the rule's score reaches the threshold."""
    truncate: bool = False
    """Drop the beginning of prompts that are too long for the model; what is kept leaves room for `max_tokens`, and has
    at least half of what the model takes."""
    policies: Policies = ALL_EXACT
    speculate: str = "plain"
    """auto, block:D,M or wave:D: draft with the first loops (`inference.speculation`); one prompt after another."""
    dtype: str | None = None
    """float32, bfloat16, float16, or own, as a folder stores its weights; see `loopscope.open`."""
    device: str | None = None
    """The best there is, by default."""

    def __post_init__(self) -> None:
        if self.num_loops is not None and not 1 <= self.num_loops <= MOST_LOOPS:
            raise ConfigError.of("num_loops", self.num_loops, f"a number of loops is between 1 and {MOST_LOOPS:,}")
        if self.halting is not None:
            parse_halting(self.halting)
            if parse_plan(self.speculate) != PLAIN or self.policies != ALL_EXACT:
                why = "goes with neither --speculate nor --cache-policy: tokens that left show the keys of their exit"
                raise ConfigError.of("halting", self.halting, why)
        if parse_plan(self.speculate) != PLAIN and self.policies != ALL_EXACT:
            raise ConfigError.of("speculate", self.speculate, "needs an exact cache: leave --cache-policy out")
        check_dtype(self.dtype)


class Piece(NamedTuple):
    """Text that has become certain."""

    number: int
    """Of its prompt."""
    text: str
    loops: int
    """Of the token that made it certain."""


class Generation:
    """A generation in progress (see `stream`): pieces of text as they become certain; then `results` is there."""

    def __init__(
        self,
        target: str | Path | Opened,
        prompts: Sequence[str],
        options: GenerateOptions,
        *,
        tokenizer: str | None,
        say: Say,
    ) -> None:
        self.options = options
        self.opened = with_tokenizer(open_target(target, dtype=options.dtype), tokenizer)
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
        _placed(self.opened, options)
        self.num_loops = options.num_loops or self.opened.model.num_loops
        self._speculator = self._speculating()
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

    def _speculating(self) -> Speculator | None:
        plan = parse_plan(self.options.speculate)
        if plan == PLAIN:
            return None
        model = Cached.needed(self.opened.model, "speculation")
        return Speculator(model, self.num_loops, sampling=self.options.sampling, limits=self._limits, plan=plan)

    def _tokens(self) -> Iterator[tuple[Continuation, Token]]:
        if self._speculator is None:
            runner: Runner
            if self.options.halting is None:
                runner = runner_for(self.opened.model, self.num_loops, self.options.policies)
            else:
                cached = Cached.needed(self.opened.model, "leaving early while decoding")
                halting = parse_halting(self.options.halting)
                halting.check_fits(cached, self.num_loops)
                runner = HaltingRunner(cached, self.num_loops, halting)
            return decode(runner, self._ids, sampling=self.options.sampling, limits=self._limits)
        return chain.from_iterable(self._speculator.decode(ids, number) for number, ids in enumerate(self._ids))

    def _encoded(self, prompt: str) -> list[int]:
        ids, limits = self.tokenizer.encode(prompt), self._limits
        if self.options.truncate and limits.context is not None and len(ids) >= limits.context:
            # Half of the context is left to the prompt even where as many tokens are asked for as the model takes.
            ids = ids[-max(limits.context - limits.max_tokens, limits.context // 2, 1) :]
        limits.check_prompt(ids)
        return ids


def stream(
    target: str | Path | Opened,
    prompts: Sequence[str],
    options: GenerateOptions | None = None,
    *,
    tokenizer: str | None = None,
    say: Say = lambda text: None,
) -> Generation:
    """A generation that runs while it is iterated over, one batch for all prompts; what cannot be done is told now."""
    return Generation(target, prompts, options or GenerateOptions(), tokenizer=tokenizer, say=say)


@overload
def generate(target: str | Path | Opened, prompt: str, **options: Any) -> Generated: ...
@overload
def generate(target: str | Path | Opened, prompt: Sequence[str], **options: Any) -> list[Generated]: ...
def generate(
    target: str | Path | Opened,
    prompt: str | Sequence[str],
    *,
    on_text: Callable[[int, str], None] = lambda number, text: None,
    tokenizer: str | None = None,
    say: Say = lambda text: None,
    **options: Any,
) -> Generated | list[Generated]:
    """Text after a prompt, or after each of several in one batch; `str()` of a result is its text.

    `options` are the fields of `Sampling` and of `GenerateOptions`. `on_text` is called with the number of the prompt
    and each piece of text as soon as it is certain.
    """
    sampling = {name: options.pop(name) for name in Sampling.__dataclass_fields__ if name in options}
    if sampling:
        options["sampling"] = Sampling(**sampling)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    generation = stream(target, prompts, GenerateOptions(**options), tokenizer=tokenizer, say=say)
    for piece in generation:
        on_text(piece.number, piece.text)
    return generation.results[0] if isinstance(prompt, str) else generation.results


def _placed(opened: Opened, options: GenerateOptions) -> None:
    """Bring the model to the device that is asked for."""
    model, device = opened.model, options.device or set_up().device
    if not isinstance(model, nn.Module):
        return
    try:
        if options.dtype in ("bfloat16", "own") and torch.device(device).type == "cpu":
            check_bf16_products()
        model.to(device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own words: no such device, or no build for it
        raise ConfigError.of("device", device, str(error).splitlines()[0]) from None
    model.eval()
