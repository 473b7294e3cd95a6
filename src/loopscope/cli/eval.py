"""`loopscope eval`: what exiting after each loop costs, each token once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_tables, progress, say
from loopscope.config import MOST_LOOPS
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from loopscope.words import check_word

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.verbs.evaluation import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Flags of `loopscope eval`."""

    target: Positional[str]
    """Run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, configuration file, or
    package.module:factory."""
    depths: str | None = None
    """Depths to report, as 1..8 or 1,2,4; by default 1 to the trained depth."""
    data: tuple[str, ...] | None = None
    """Text to evaluate on instead of the run's validation split."""
    tokenizer: str | None = None
    """bytes or a tokenizer.json, for a target that brings no tokenizer."""
    batch: int = 16
    """Sequences at a time."""
    length: int | None = None
    """Tokens of a sequence; by default as in training, and 256 for models that do not say."""
    max_tokens: int | None = None
    """Stop after so many tokens."""
    json: bool = False
    """Print the result as JSON."""

    help: ClassVar[str] = """Cross-entropy, perplexity, bits per byte and norm at every depth, each token once.

The scores of a run's newest checkpoint are also left in its eval.json, where reports find them.

examples:
  loopscope eval runs/nano-per-loop-rmsnorm-s42 --depths 1..8
  loopscope eval downloads/Ouro-1.4B --data wiki/test.txt --depths 1..8
  loopscope eval runs/raw --data wiki/test.txt --json"""

    def __post_init__(self) -> None:
        parse_depths(self.depths or "1")
        for name in ("batch", "length", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError.of(name, value, "must be at least 1")

    def run(self) -> int:
        """Evaluate and print."""
        check_word(self.target)
        check_sources(self.data or ())
        from loopscope.verbs.evaluation import evaluate

        with progress(self.target) as advance:
            result = evaluate(
                self.target,
                depths=None if self.depths is None else parse_depths(self.depths),
                data=self.data,
                tokenizer=self.tokenizer,
                batch=self.batch,
                length=self.length,
                max_tokens=self.max_tokens,
                say=say,
                progress=advance,
            )
        try:
            kept = result.keep()
        except OSError as error:  # a folder that may only be read: what was measured is printed all the same
            kept = None
            say(f"eval.json is not written: {error.strerror}")
        if kept is not None:
            say(f"scores are in {kept}")
        if self.json:
            print_json(**result.to_json())
        else:
            print_tables(_table(result), *([_answer_table(result)] if result.scores.answers else []))
        if (loop := _first_not_finite(result)) is None:
            return EXIT_OK
        say(f"{result.opened.name} is not finite: its CE or norm after loop {loop} is not a number")
        return EXIT_FINDINGS


def _first_not_finite(result: EvaluationResult) -> int | None:
    """The first loop whose scores are not finite numbers."""
    for depth in result.scores.depths:
        if not all(value is not None and math.isfinite(value) for value in (depth.ce, depth.norm)):
            return depth.k
    return None


def parse_depths(text: str) -> list[int]:
    """1..8 or 1,2,4 as numbers of loops."""
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        depths = list(range(_depth(span[1]), _depth(span[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        depths = [_depth(part) for part in text.split(",")]
    else:
        raise ConfigError.of("depths", text, "expected something like 1..8 or 1,2,4")
    if not depths or min(depths) < 1:
        raise ConfigError.of("depths", text, "depths count loops, from 1 up")
    return depths


def _depth(digits: str) -> int:
    if len(digits) > len(str(MOST_LOOPS)) or int(digits) > MOST_LOOPS:
        raise ConfigError.of("depths", digits[:40], f"must be at most {MOST_LOOPS:,} loops")
    return int(digits)


def _answer_table(result: EvaluationResult) -> Table:
    """Accuracy over steps and loops; a row is a number of steps, so that a staircase shows what a loop does."""
    from rich.table import Table

    scores = result.scores
    table = Table(title="right answers in %, by the steps they take and the loops run", title_justify="left")
    for name in ("steps", "answers", *(f"{depth.k}" for depth in scores.depths)):
        table.add_column(name, justify="right")
    for row in scores.answers:
        shares = (row.accuracy.get(depth.k) for depth in scores.depths)
        table.add_row(str(row.steps), str(row.count), *("" if it is None else f"{100 * it:.0f}" for it in shares))
    return table


def _table(result: EvaluationResult) -> Table:
    from rich.table import Table

    opened, scores = result.opened, result.scores
    parts = [opened.name, opened.stage if opened.step is None else f"step {opened.step}"]
    parts += [] if opened.tokenizer is None else [f"{opened.tokenizer.kind} tokenizer"]
    what = "answers" if scores.answers else "tokens"
    table = Table(title=", ".join([*parts, f"{scores.tokens:,} {what}"]), title_justify="left")
    for name in ("loops", "CE (nats/token)", "perplexity", "bits per byte", "‖h‖"):
        table.add_column(name, justify="right")
    for score in scores.depths:
        numbers = ((score.ce, ".4f"), (score.perplexity, ".2f"), (score.bits_per_byte, ".4f"), (score.norm, ".4g"))
        table.add_row(str(score.k), *("" if number is None else format(number, form) for number, form in numbers))
    return table
