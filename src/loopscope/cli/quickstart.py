"""`loopscope quickstart`: the paper's 2×2, small, on this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loopscope.checks import check_at_least, check_seed
from loopscope.cli.live import run_rows
from loopscope.cli.terminal import print_json, print_tables, print_text, print_words, say
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, UnsupportedError
from loopscope.options import AsJson
from loopscope.show.table import Column, Table, columns

if TYPE_CHECKING:
    from loopscope.results.evaluation import Depth
    from loopscope.results.measures import Run
    from loopscope.studies.results import Results


@dataclass(frozen=True, kw_only=True)
class Quickstart(
    Verb,
    command="quickstart",
    example=("quickstart", "the blind spot in a few minutes, on this machine"),
    out_is_folder=True,
):
    """Flags of `loopscope quickstart`."""

    steps: int = 150
    """Training steps per condition."""
    seed: int = 42
    """Seed of weights, batches and dropout; the same seed gives the same numbers on the same kind of processor."""
    out: Path = Path("runs/quickstart")
    """Output folder, as `loopscope reproduce` makes it; the page is report.html in it."""
    json: AsJson = False

    help: ClassVar[str] = """Train the paper's 2×2 small, audit it, and write a page about it, in a few minutes.

{terminal, per-loop} cross-entropy × {RMSNorm, raw} readout, on the interpreter's own documentation; nothing is
downloaded. One process per core, one row each. Ctrl-C saves, and the same command resumes.

examples:
  loopscope quickstart
  loopscope quickstart --seed 101
  loopscope quickstart --steps 300 --out runs/longer
  loopscope quickstart --json > quickstart.json"""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps")
        check_seed(self)

    def run(self) -> int:
        """Train, evaluate and audit the four rows, then say what they show."""
        from loopscope.rows.grid import laid_out
        from loopscope.studies.quickstart import corners, make_request
        from loopscope.studies.results import read_results

        request, command = make_request(self.seed, self.steps), ["loopscope", *sys.argv[1:]]
        rows = run_rows(lambda: laid_out(request, self.out, command, say), retries=1)
        results = read_results(self.out)
        page = self._write_page()
        self._print(results, corners(results, self.seed), page)
        for row in rows:
            if row.state == "failed":
                say(f"{row.spec.name} failed: {row.error} (log in {self.out}/rows)")
        return EXIT_FINDINGS if any(row.state == "failed" for row in rows) else EXIT_OK

    def _write_page(self) -> Path | None:
        """report.html, where what draws it is installed."""
        from loopscope.show.page import write_report

        page = self.out / "report.html"
        try:
            write_report((self.out,), page, None)
        except UnsupportedError as error:
            say(f"no page: {error}")
            return None
        return page

    def _print(self, results: Results, found: Sequence[Run], page: Path | None) -> None:
        from loopscope.rows.conditions import CORE
        from loopscope.show.verdict import verdict_on
        from loopscope.studies.quickstart import conclusion

        if self.json:
            conditions = [
                {
                    "placement": run.setting("objective", "placement"),
                    "readout": run.setting("model", "readout"),
                    "ce": [depth.ce for depth in _trained(run)],
                    "norm": [depth.norm for depth in _trained(run)],
                    "verdict": run.verdict,
                    "blind": run.audit.blind if run.audit else [],
                }
                for run in found
            ]
            print_json(
                seed=self.seed,
                steps=self.steps,
                corpus_sha256=results.grid.data.get("corpus_sha256"),
                conditions=conditions,
                out=str(self.out),
                report=None if page is None else str(page),
            )
            return
        if found:
            print_tables(_table(found))
        if len(found) == len(CORE):
            print_words("\n".join([*verdict_on(found).lines, conclusion(found)]))
        if page is not None:
            print_text(f"The whole story, with charts: {page}")


def _trained(run: Run) -> list[Depth]:
    """Scores after each loop up to the trained depth."""
    return [depth for depth in run.depths if depth.k <= run.num_loops]


def _table(found: Sequence[Run]) -> Table:
    loops = range(1, found[0].num_loops + 1)
    rows: list[list[object]] = []
    for run in found:
        depths, named = _trained(run), (run.setting("objective", "placement"), run.setting("model", "readout"))
        rows.append([*named, *(depth.ce for depth in depths), *(depth.norm for depth in depths), run.verdict])
    header = [Column("loss"), Column("readout"), *columns(".2f", *(f"CE {k}" for k in loops))]
    header += [*columns(".1f", *(f"‖h‖ {k}" for k in loops)), Column("audit")]
    return Table("validation, after each loop", header, rows)
