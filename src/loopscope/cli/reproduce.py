"""`loopscope reproduce`: the paper's grid, its claims with verdicts, tables and figures."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from loopscope.checks import check_at_least, check_not_negative
from loopscope.cli.live import run_rows
from loopscope.cli.terminal import print_json, print_tables, print_words, say
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, RunError
from loopscope.options import AsJson, On, Retries, RowsAtOnce
from loopscope.rows.conditions import CONDITIONS, GROUPS, Recipe, Size, choose_seeds, parse_conditions

if TYPE_CHECKING:
    from loopscope.results.reproduction import ClaimsRecord, Judgement
    from loopscope.rows.grid import Request
    from loopscope.rows.ledger import RowStatus
    from loopscope.studies.results import Results


@dataclass(frozen=True, kw_only=True)
class Reproduce(
    Verb,
    command="reproduce",
    example=("reproduce --size nano", "the paper's claims, with verdicts, tables and figures"),
    renamed={"--scale": "--size"},
    out_is_folder=True,
):
    """Flags of `loopscope reproduce`."""

    size: Size = "nano"
    """Size of the models; demo, nano and micro are for CPUs, the paper's own for GPUs."""
    seeds: int = 3
    """Seeds per condition: the paper's 42, 101 and 202 first."""
    conditions: str = "all"
    """Conditions with commas between; NAME:N runs it with N seeds."""
    recipe: Recipe = "paper"
    """The paper's recipe, or with scaled initialisation, warm-up and rotary positions."""
    steps: int | None = None
    """Optimiser steps of a row; by default the preset's, and the paper's four epochs at its own sizes."""

    data: tuple[str, ...] | None = None
    """Training text, as in `loopscope train`; by default the preset's."""
    valid: tuple[str, ...] | None = None
    """Validation text; by default the corpus's own, or documents held out of the training text."""
    test_data: tuple[str, ...] | None = None
    """Test text; by default the corpus's own, or held-out documents, where there are any."""
    eval_tokens: int | None = None
    """Most tokens of each split a finished row is evaluated on; by default all."""
    audit: bool = True
    """Audit every row; without, the claims that need it are not measured."""

    out: Path | None = None
    """Output folder; by default runs/reproduce-SIZE."""
    on: On = "here"
    rows_at_once: RowsAtOnce = None
    threads: int = 1
    """CPU threads of a row."""
    gpus_per_row: int = 0
    """GPUs of a row: 0 or 1."""
    retries: Retries = 2
    rebuild: bool = False
    """Run nothing; only make claims, tables and figures from the rows that are there."""
    json: AsJson = False

    help: ClassVar[str] = f"""Train the paper's grid, audit it, and settle each claim of arXiv 2606.24898 at this size.

The same command resumes after an interruption; a second one on the same --out shares the work. Exit code 1 when a
claim that holds in the paper does not hold here, or a row failed.

conditions: {", ".join([*GROUPS, *CONDITIONS])}

examples:
  loopscope reproduce --size demo --seeds 1 --conditions 2x2
  loopscope reproduce --size nano --data train.txt --valid valid.txt --test-data test.txt
  loopscope reproduce --size nano --conditions 2x2,per-loop+penalty,all:1 --out runs/record
  loopscope reproduce --size nano --conditions 2x2:1 --recipe modern --out runs/record
  loopscope reproduce --size paper-44m --on ray:auto --gpus-per-row 1
  loopscope reproduce --rebuild --out runs/record

Figures 5 to 7 have commands of their own:
  loopscope reproduce ouro TARGET --help       the checks of Ouro 1.4B, on any checkpoint of its kind
  loopscope reproduce ouro-train --help        its design, trained with and without the norm before the head"""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "seeds", "steps", "eval_tokens", "rows_at_once", "threads")
        check_not_negative(self, "gpus_per_row", "retries")
        parse_conditions(self.conditions, self.seeds)

    def run(self) -> int:
        """Run what is not finished, then judge, and print."""
        from loopscope.rows.grid import laid_out
        from loopscope.studies.tables import publish

        out = self.out or Path("runs") / f"reproduce-{self.size}"
        rows: list[RowStatus] = []
        if not self.rebuild:
            command = ["loopscope", *sys.argv[1:]]
            rows = run_rows(
                lambda: laid_out(self._request(), out, command, say),
                retries=self.retries,
                on=self.on,
                rows_at_once=self.rows_at_once,
                threads=self.threads,
                gpus=self.gpus_per_row,
            )
        results, claims = publish(out, say)
        if not results.rows and not results.failures:
            raise RunError(f"{out} has no finished row yet; run the command of this grid again, without --rebuild")
        return self._report(out, rows, results, claims)

    def _request(self) -> Request:
        from loopscope.rows.grid import Request

        return Request(
            size=self.size,
            recipe=self.recipe,
            seeds={name: choose_seeds(count) for name, count in parse_conditions(self.conditions, self.seeds).items()},
            steps=self.steps,
            data=self.data,
            valid=self.valid,
            test_data=self.test_data,
            eval_tokens=self.eval_tokens,
            audit=self.audit,
            threads=self.threads,
        )

    def _report(self, out: Path, rows: list[RowStatus], results: Results, claims: ClaimsRecord) -> int:
        from loopscope.results.reproduction import FAILS
        from loopscope.studies.tables import claims_table

        mine = [claim for claim in claims.claims if self.rebuild or claim.recipe == self.recipe]
        failing = [claim for claim in mine if claim.split == "valid" and claim.verdict == FAILS]
        exit_code = EXIT_FINDINGS if failing or results.failures else EXIT_OK
        if self.json:
            failures = [vars(failure) for failure in results.failures]
            print_json(
                out=str(out),
                size=claims.size,
                rows=[
                    {
                        "name": row.spec.name,
                        "state": row.state,
                        "seconds": row.seconds,
                        "attempts": row.attempts,
                        "error": row.error,
                    }
                    for row in rows
                ],
                claims=msgspec.to_builtins(claims.claims),
                failures=failures,
            )
            return exit_code
        for recipe in results.recipes() if self.rebuild else [self.recipe]:
            if listed := claims.of(recipe, "valid"):
                made = replace(claims_table(listed), title=f"{claims.size}, {recipe} recipe, validation text", note="")
                print_tables(made.without("rule"), lines=True)
        print_words(_in_words(out, results, failing))
        return exit_code


def _in_words(out: Path, results: Results, failing: list[Judgement]) -> str:
    several = len(results.recipes()) > 1
    lines = []
    for claim in failing:
        recipe = f" ({claim.recipe} recipe)" if several else ""
        lines.append(f"{claim.id} {claim.verdict}{recipe}: {claim.reason}")
    lines += [f"{failure.name} failed: {failure.error} (log in {out}/rows)" for failure in results.failures]
    for recipe in results.recipes():
        count, suffix = len(results.grid.recipes[recipe].differences), "" if recipe == "paper" else f"-{recipe}"
        lines.append(f"{count} differences from the paper: {out}/tables/differences{suffix}.md")
    rows = f"{len(results.rows)} row{'' if len(results.rows) == 1 else 's'}"
    lines.append(f"{rows}; claims.json, tables and figures in {out}")
    return "\n".join(lines)
