"""`loopscope eval`: what exiting after each loop costs, each token once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_tables, say
from loopscope.errors import EXIT_OK, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.config import Config
    from loopscope.data.packing import PackedTokens
    from loopscope.data.tokenizers import Tokenizer
    from loopscope.training.evaluate import DepthScore


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Flags of `loopscope eval`."""

    target: Positional[Path]
    """Run folder, or one of its checkpoints."""
    depths: str | None = None
    """Depths to report, as 1..8 or 1,2,4; by default 1 to the trained depth."""
    data: tuple[str, ...] | None = None
    """Text to evaluate on instead of the run's validation split."""
    batch: int = 16
    """Sequences at a time."""
    max_tokens: int | None = None
    """Stop after so many tokens."""
    json: bool = False
    """Print the result as JSON."""

    help: ClassVar[str] = """Cross-entropy, perplexity, bits per byte and norm at every depth, each token once.

examples:
  loopscope eval runs/nano-per-loop-rmsnorm-s42 --depths 1..8
  loopscope eval runs/raw --data wiki/test.txt --json"""

    def __post_init__(self) -> None:
        parse_depths(self.depths or "1")
        for name in ("batch", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError.of(name, value, "must be at least 1")

    def run(self) -> int:
        """Evaluate and print."""
        import torch

        from loopscope.data.stream import covered_bytes, evaluation_batches
        from loopscope.data.tokenizers import load_tokenizer
        from loopscope.training.evaluate import evaluate_depths, score_batch
        from loopscope.training.session import checkpoint_path, load, run_of

        torch.set_flush_denormal(True)
        run = run_of(self.target)
        config, tokenizer = run.config(), load_tokenizer(run.path / "tokenizer")
        model = load(self.target)
        depths = parse_depths(self.depths or f"1..{config.model.num_loops}")
        tokens = self._tokens(config, tokenizer)
        batches = evaluation_batches(tokens, config.sequence_length, self.batch, self.max_tokens)
        with torch.no_grad():
            scores = evaluate_depths(lambda *batch: score_batch(model, *batch), batches, max(depths))
        num_bytes = covered_bytes(tokens, self.max_tokens)
        chosen = [score for score in scores if score.k in depths]
        step = checkpoint_path(self.target).name
        if self.json:
            rows = [_row(score, num_bytes) for score in chosen]
            print_json(run=str(run.path), checkpoint=step, tokenizer=tokenizer.kind, bytes=num_bytes, depths=rows)
        else:
            print_tables(_table(chosen, num_bytes, f"{run.path} {step}, {tokenizer.kind} tokenizer"))
        return EXIT_OK

    def _tokens(self, config: Config, tokenizer: Tokenizer) -> PackedTokens:
        """The run's own validation split, or the text of --data."""
        from loopscope.data.corpora import open_corpus
        from loopscope.data.prepare import evaluation_tokens, pack_split

        if self.data is not None:
            return evaluation_tokens(self.data, config.data.text_field, tokenizer, say)
        return pack_split(open_corpus(config.data), "valid", tokenizer, say)


def parse_depths(text: str) -> list[int]:
    """1..8 or 1,2,4 as numbers of loops."""
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        depths = list(range(int(span[1]), int(span[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        depths = [int(part) for part in text.split(",")]
    else:
        raise ConfigError.of("depths", text, "expected something like 1..8 or 1,2,4")
    if not depths or min(depths) < 1:
        raise ConfigError.of("depths", text, "depths count loops, from 1 up")
    return depths


def _row(score: DepthScore, num_bytes: int) -> dict[str, float | int]:
    return {
        "k": score.k,
        "ce": score.ce,
        "perplexity": score.perplexity,
        "bits_per_byte": score.bits_per_byte(num_bytes),
        "norm": score.norm,
        "tokens": score.tokens,
    }


def _table(scores: list[DepthScore], num_bytes: int, title: str) -> Table:
    from rich.table import Table

    table = Table(title=f"{title}, {scores[0].tokens:,} tokens", title_justify="left")
    for name in ("loops", "CE (nats/token)", "perplexity", "bits per byte", "‖h‖"):
        table.add_column(name, justify="right")
    for score in scores:
        bits = f"{score.bits_per_byte(num_bytes):.4f}"
        table.add_row(str(score.k), f"{score.ce:.4f}", f"{score.perplexity:.2f}", bits, f"{score.norm:.4g}")
    return table
