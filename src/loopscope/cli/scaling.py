"""`loopscope scaling`: what a further loop is worth in parameters, from the losses of many runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
import tyro
from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_tables, print_text, print_words, say
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_OK, ConfigError
from loopscope.options import AsJson, ScalingOptions
from loopscope.show.numbers import span
from loopscope.show.table import Column, Table, columns

if TYPE_CHECKING:
    from loopscope.results.scaling import ScalingRecord


@dataclass(frozen=True, kw_only=True)
class Scaling(
    ScalingOptions,
    Verb,
    command="scaling",
    example=("scaling runs/", "what a further loop is worth, in parameters"),
    out_is_folder=True,
):
    """Flags of `loopscope scaling`."""

    runs: Positional[tuple[Path, ...]]
    """Run folders, or folders of them: several sizes, numbers of loops and token budgets."""
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",))] = Path("scaling")
    """Folder for scaling.json and the figure."""
    json: AsJson = False

    help: ClassVar[str] = """Fit what a loop is worth: L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β, φ with its interval.

Each finished run is a point: r its loops, N_rec the parameters of the loop, N_once its others without embeddings, D the
tokens it was trained on, L its validation loss. φ = 1 says that a loop is as good as parameters of its own, φ = 0 that
it is worth nothing; both are fitted beside, and judged on cells that were left out. Runs that cannot tell are refused
with what is missing; docs/scaling.md has a grid that can.

examples:
  loopscope scaling runs/scaling
  loopscope scaling runs/scaling --law parcae
  loopscope scaling runs/a runs/b runs/c -o laws --json"""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("name the folders of runs, or a folder that holds them: loopscope scaling runs/")
        super().__post_init__()

    def run(self) -> int:
        """Read the runs, fit, write and print."""
        from loopscope.show.inputs import read_inputs

        runs = read_inputs(self.runs).runs
        from loopscope.results.record import write_record
        from loopscope.studies.scaling import check_identifiable, points_of, scaling

        points, left_out = points_of(runs)
        for line in left_out:
            say(line)
        check_identifiable(points, self.law)
        say(f"fitting {len(points)} runs from {self.starts} starts, {self.bootstraps} bootstraps")
        found = scaling(points, self)
        self.out.mkdir(parents=True, exist_ok=True)
        write_record(self.out / "scaling.json", found)
        self._draw(found)
        if self.json:
            print_json(**msgspec.to_builtins(found))
            return EXIT_OK
        print_tables(_fits_table(found), *([_worth_table(found)] if found.is_told else []))
        print_words(found.summary)
        if found.test_time is not None:
            law = found.test_time
            says = f"At test time L(T) = L_∞ + {law.Z:.3g}·exp(−{law.z:.3g}·T/μ)"
            print_words(
                f"{says}, z in {span(law.z_low, law.z_high, '.3g')} over {law.runs} runs, missed by {law.error:.2%}."
            )
        print_text(f"scaling.json and the figure: {self.out}")
        return EXIT_OK

    def _draw(self, found: ScalingRecord) -> None:
        try:
            from loopscope.studies.figures import draw_scaling
        except ImportError as error:
            say(f"no figure: it needs {error.name}; run: pip install 'loopscope[report]'")
            return
        draw_scaling(found, self.out)


def _fits_table(found: ScalingRecord) -> Table:
    rows: list[list[object]] = []
    for fit in (found.fit, *found.beside):
        phi = f"{fit.phi:g} (fixed)" if fit.is_phi_fixed else found.told_phi
        rows.append([phi, fit.E, fit.A, fit.alpha, fit.B, fit.beta, fit.error, fit.held_out_error or 0.0])
    header = [Column("φ", align="left"), *columns(".3g", "E", "A", "α", "B", "β")]
    header += columns(".2%", "missed by", "left out: by")
    return Table("L = E + A·(N_once + r^φ·N_rec)^−α + B·D^−β", header, rows)


def _worth_table(found: ScalingRecord) -> Table:
    rows = [[str(each.loop), each.worth, span(each.low, each.high)] for each in found.worth]
    header = [Column("loop r"), Column("r^φ − (r−1)^φ", ".2f"), Column("95 % interval", align="right")]
    return Table("what the r-th loop is worth, in recurrent parameters", header, rows)
