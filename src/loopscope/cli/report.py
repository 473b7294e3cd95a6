"""`loopscope report`: one HTML page about runs and reproductions, made from their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_text, print_words
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_OK, ConfigError
from loopscope.options import AsJson


@dataclass(frozen=True, kw_only=True)
class Report(
    Verb,
    command="report",
    example=("report runs/ -o report.html", "one page about runs, to send to a colleague"),
    needs_torch=False,
):
    """Flags of `loopscope report`."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, reproduction folders, or folders of them."""
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",))] = Path("report.html")
    """The page to write."""
    title: str | None = None
    """Title of the page; by default what it is about."""
    json: AsJson = False

    help: ClassVar[str] = """Write one self-contained page about runs: verdict, charts, audits, claims, configurations.

Opens offline in any browser. Runs that are still going, failed, or not audited are shown as far as their files go.

examples:
  loopscope report runs/
  loopscope report runs/rmsnorm runs/raw -o comparison.html
  loopscope report reproduction/ -o report.html --json"""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError(
                "name at least one run folder, reproduction folder or folder of them: loopscope report runs/"
            )

    def run(self) -> int:
        """Build the page, write it, and say what it says first."""
        from loopscope.show.page import write_report

        page = write_report(self.runs, self.out, self.title)
        size = self.out.stat().st_size
        if self.json:
            print_json(
                report=str(self.out),
                bytes=size,
                runs=page.num_runs,
                conditions=page.num_conditions,
                tone=page.verdict.tone,
                verdict=page.verdict.headline,
                sentences=page.verdict.sentences,
            )
            return EXIT_OK
        print_words("\n".join(page.verdict.lines))
        print_text(f"{self.out}: {page.num_runs} run{'' if page.num_runs == 1 else 's'}, {size / 1e6:.1f} MB")
        return EXIT_OK
