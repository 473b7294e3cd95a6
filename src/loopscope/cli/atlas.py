"""`loopscope atlas`: every published design, audited before and after a short training, on one page."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loopscope.checks import check_at_least, check_not_negative
from loopscope.cli.live import run_rows
from loopscope.cli.terminal import duration, print_json, print_tables, print_words, say
from loopscope.cli.verb import Verb
from loopscope.data.files import check_sources
from loopscope.designs import DESIGNS
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, RunError
from loopscope.options import AtlasOptions, On, Retries, RowsAtOnce
from loopscope.results.record import as_json
from loopscope.show.table import Table

if TYPE_CHECKING:
    from loopscope.results.atlas import AtlasRecord, Setting
    from loopscope.rows.spec import Layout

IN_TERMINAL = ("untrained", "trained", "growth", "far", "motion", "beyond")
"""Columns that fit a terminal; the page has all."""


@dataclass(frozen=True, kw_only=True)
class Atlas(
    AtlasOptions,
    Verb,
    command="atlas",
    example=("atlas", "every published design, audited: who hides what"),
    out_is_folder=True,
):
    """Flags of `loopscope atlas`."""

    out: Path = Path("runs/atlas")
    """Output folder: atlas.json, tables/, figures/, atlas.html, and a folder for every row."""
    on: On = "here"
    rows_at_once: RowsAtOnce = None
    retries: Retries = 1
    rebuild: bool = False
    """Run nothing; only make tables, figure and page from what is there."""
    json: bool = False
    """Print atlas.json."""

    help: ClassVar[str] = f"""Audit every published looped design, before and after a short training: who hides what?

Each design at demo size, under the paper's and a modern recipe on text, some on pointer chasing: blind, visible,
removed and damped variables of the state with their free ranges, growth of its norm, how tokens move, what the first
exit lacks, depths beyond training, safe cache policies, cost. The same command resumes after an interruption; other
--designs on the same --out are added. A design that fails is told in its cells, and by exit code 1.

{textwrap.fill(f"designs: {', '.join(DESIGNS)}", 118, break_on_hyphens=False)}

examples:
  loopscope atlas
  loopscope atlas --designs paper-rmsnorm,ouro,huginn --steps 30 --hops-steps 0
  loopscope atlas --on ray:auto --out runs/atlas-cluster
  loopscope atlas --rebuild --out runs/atlas"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "rows_at_once")
        check_not_negative(self, "retries")

    def run(self) -> int:
        """Run what is not finished, then write what was found, and print it."""
        check_sources(self.data or ())
        from loopscope.show.atlas import publish

        if not self.rebuild:
            run_rows(
                self._laid_out,
                retries=self.retries,
                on=self.on,
                rows_at_once=self.rows_at_once,
                threads=self.threads,
            )
        record = publish(self.out)
        failed = any(entry.state == "failed" for entry in record.entries)
        if not record.entries:
            raise RunError(f"{self.out} has no row yet; run its command again, without --rebuild")
        if self.json:
            print_json(**as_json(record))
            return EXIT_FINDINGS if failed else EXIT_OK
        print_tables(*(_brief(record, setting) for setting in record.settings()), lines=True)
        print_words("\n".join(_in_words(self.out, record)))
        return EXIT_FINDINGS if failed else EXIT_OK

    def _laid_out(self) -> Layout:
        """The rows, with a word on how long those that are left will take."""
        from loopscope.rows.backends import usable_cores
        from loopscope.rows.ledger import Ledger
        from loopscope.rows.probing import total_seconds
        from loopscope.studies.atlas import laid_out

        layout = laid_out(self, self.out, ["loopscope", *sys.argv[1:]], say)
        ledger = Ledger(layout.out)
        left = [spec for spec in layout.rows if ledger.status(spec).state != "finished"]
        if left and self.on == "here":
            slots = self.rows_at_once or max(1, usable_cores() // self.threads)
            say(f"timing a training step of each design; {len(left)} rows, {slots} side by side")
            say(f"about {duration(total_seconds(left, slots))} on this machine as busy as it is now")
        return layout


def _brief(record: AtlasRecord, setting: Setting) -> Table:
    """The columns that say most: a terminal is narrow."""
    from loopscope.studies.atlas_properties import PROPERTIES, atlas_table

    whole = atlas_table(record, setting)
    left_out = (each.title for each in PROPERTIES if each.key not in IN_TERMINAL)
    return replace(whole, title=setting.title, note="").without(*left_out)


def _in_words(out: Path, record: AtlasRecord) -> list[str]:
    trained = [entry for entry in record.entries if entry.trained is not None and entry.is_learnt is not False]
    blind = [entry for entry in trained if entry.trained is not None and entry.trained.blind]
    lines = [f"A blind variable in {len(blind)} of {len(trained)} trained rows of {len(record.designs)} designs."]
    for entry in record.entries:
        if entry.is_learnt is False:
            lines.append(f"{entry.row} did not learn its task: {entry.accuracy:.0%} right.")
        if entry.error:
            lines.append(f"{entry.row or entry.anchor} {entry.state}: {entry.error}")
    return [*lines, f"The matrix with its evidence: {out}/atlas.html; atlas.json, tables and figures beside it."]
