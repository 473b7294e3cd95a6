"""`loopscope check`: conformance of anybody's looped model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, get_args

from tyro.conf import Positional

from loopscope.cli.terminal import print_record, print_tables, print_text, progress
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_FINDINGS, EXIT_OK
from loopscope.options import CheckOptions
from loopscope.results.check import Status
from loopscope.show.table import Column, Table
from loopscope.words import check_word

if TYPE_CHECKING:
    from loopscope.results.check import CheckResult, Conformance


@dataclass(frozen=True, kw_only=True)
class Check(
    CheckOptions,
    Verb,
    command="check",
    example=("check runs/NAME", "is cached = uncached, padded = alone, every depth?"),
):
    """Flags of `loopscope check`."""

    target: Positional[str]
    """Run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, design:NAME, configuration
    file, or package.module:factory, which may also return a causal language model of transformers."""
    json: bool = False
    """Print every check and finding as JSON."""

    help: ClassVar[str] = """Does a looped model give the same numbers however it is run? Exit code 1 on findings.

Cached = uncached, split anywhere, ragged or padded = alone, rollback, rows at different loops, every depth. A finding
names loop, layer and position. A check that does not apply says why.

examples:
  loopscope check preset:nano
  loopscope check runs/nano-per-loop-rmsnorm-s42
  loopscope check downloads/Ouro-1.4B --json > check.json
  loopscope check my_package.my_model:build"""

    def run(self) -> int:
        """Check and print."""
        check_word(self.target)
        from loopscope.api.audits import check

        with progress(self.target) as advance:
            checked = check(self.target, self, progress=advance)
        if self.json:
            print_record(checked)
        else:
            print_checked(checked)
        return EXIT_FINDINGS if checked.findings else EXIT_OK


def print_checked(result: Conformance) -> None:
    """The verdict, a table of all checks, and what was found."""
    loops = "loops inside" if result.num_loops is None else f"{result.num_loops} loops, run to {result.deepest}"
    print_text(f"{result.target}: {loops}; texts of {result.tokens} tokens in {result.dtype}")
    by_status = {status: sum(each.status == status for each in result.checks) for status in get_args(Status)}
    print_text(", ".join(f"{count} {status}" for status, count in by_status.items()) + "\n")
    print_tables(_table(result.checks))
    for each in result.checks:
        for finding in each.findings:
            print_text(f"{each.name}: {finding.text}")
    print_text(f"tolerance {result.tolerance:.1g}: {result.tolerance_reason}")
    for note in result.notes:
        print_text(f"note: {note}")


def _table(checks: tuple[CheckResult, ...]) -> Table:
    rows = []
    for each in checks:
        claim = each.claim if each.reason is None else f"{each.claim}: {each.reason}"
        flips = f"{each.flips} of {each.choices}" if each.ways else None
        rows.append([each.name, claim, each.status, each.largest if each.ways else None, flips])
    header = [Column("check"), Column("claim"), Column("result"), Column("largest difference", ".1g")]
    return Table("", [*header, Column("changed choices", align="right")], rows, absent="")
