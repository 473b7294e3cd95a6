"""`loopscope quickstart`: the paper's 2×2, small, on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from loopscope.cli.terminal import print_json, print_tables, print_text, progress, say
from loopscope.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.experiments.quickstart import ConditionResult, TokenSplits
    from loopscope.objectives.placement import ObjectiveResult


CLEAR = 10.0
"""Ratio of norms from which the contrast speaks for itself."""
CONCLUSION = "The norm readout hides scale from the loss, and the loop goes on carrying it."


@dataclass(frozen=True, kw_only=True)
class Quickstart:
    """Flags of `loopscope quickstart`."""

    steps: int = 150
    """Training steps per condition."""
    seed: int = 0
    """Seed of weights, batches and dropout; same seed and threads, same numbers."""
    json: bool = False
    """Print the result as JSON."""

    help: ClassVar[str] = """Train the paper's 2×2 small and print norm and cross-entropy after every loop.

{terminal, per-loop} cross-entropy × {RMSNorm, raw} readout, on the interpreter's own documentation; nothing is
downloaded. Ctrl-C prints the conditions that are finished.

examples:
  loopscope quickstart
  loopscope quickstart --seed 1 --steps 300
  loopscope quickstart --json > quickstart.json"""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError.of("steps", self.steps, "must be at least 1")
        if not 0 <= self.seed < 2**31:
            raise ConfigError.of("seed", self.seed, "must be between 0 and 2³¹ − 1")

    def run(self) -> int:
        """Train the four conditions one after the other and print what they ended with."""
        import torch

        from loopscope.data.corpora import builtin_corpus
        from loopscope.experiments.quickstart import CONDITIONS, tokenize

        torch.set_flush_denormal(True)
        say("reading the interpreter's own documentation as the corpus")
        corpus = builtin_corpus()
        results = self._train(tokenize(corpus))
        if self.json:
            conditions = [
                {**dataclasses.asdict(result.condition), "ce": result.ce_K, "norm": result.norms_K}
                for result in results
            ]
            print_json(
                seed=self.seed,
                steps=self.steps,
                threads=torch.get_num_threads(),
                corpus_sha256=corpus.sha256,
                conditions=conditions,
            )
        elif results:
            print_tables(_table(results))
        if len(results) < len(CONDITIONS):
            say(f"interrupted: {len(results)} of {len(CONDITIONS)} conditions finished")
            return EXIT_INTERRUPTED
        if not self.json:
            print_text(in_words(results))
        return EXIT_OK

    def _train(self, tokens: TokenSplits) -> list[ConditionResult]:
        """Results of the conditions that finished before the end or Ctrl-C."""
        from loopscope.experiments.quickstart import CONDITIONS, run_condition

        results: list[ConditionResult] = []
        with progress(len(CONDITIONS) * self.steps, every=50) as tell:

            def on_step(name: str, step: int, result: ObjectiveResult) -> None:
                tell(f"{name}: step {step}, loss {result.loss.item():.2f}, ‖h_K‖ {result.norms_K[-1].item():.1f}")

            try:
                for condition in CONDITIONS:
                    results.append(run_condition(condition, tokens, steps=self.steps, seed=self.seed, on_step=on_step))
            except KeyboardInterrupt:
                pass
        return results


def _table(results: list[ConditionResult]) -> Table:
    from rich.table import Table

    loops = range(1, len(results[0].ce_K) + 1)
    table = Table("loss", "readout", title="validation, after each loop", title_justify="left")
    for quantity in ("CE", "‖h‖"):
        for k in loops:
            table.add_column(f"{quantity} {k}", justify="right")
    for result in results:
        ce, norms = (f"{value:.2f}" for value in result.ce_K), (f"{value:.1f}" for value in result.norms_K)
        table.add_row(result.condition.placement, result.condition.readout, *ce, *norms)
    return table


def in_words(results: list[ConditionResult]) -> str:
    """What the four corners show, in sentences whose numbers are the measured ones."""
    by_name = {result.condition.name: result for result in results}
    rmsnorm, raw = by_name["per-loop + rmsnorm"], by_name["per-loop + raw"]
    terminal = by_name["terminal + rmsnorm"]
    ratio = rmsnorm.norms_K[-1] / raw.norms_K[-1]
    loops = len(raw.ce_K)
    return (
        f"Exits: CE(1) − CE({loops}) is {terminal.exit_failure:+.2f} nats when only the last loop is supervised and "
        f"{rmsnorm.exit_failure:+.2f} when every loop is.\n"
        f"Scale: with every loop supervised, the state ends at norm {rmsnorm.norms_K[-1]:.0f} "
        f"through the RMSNorm readout and at {raw.norms_K[-1]:.1f} through the raw one: {ratio:.0f} times less.\n"
        + (CONCLUSION if ratio >= CLEAR else "So few steps do not show the blind spot yet; try more --steps.")
    )
