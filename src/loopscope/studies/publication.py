"""From the files of a grid's rows to claims.json, tables/ and figures/: again at any time, and without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from loopscope.errors import RunError
from loopscope.files import write_atomically
from loopscope.results.record import write_record
from loopscope.results.reproduction import CLAIMS, ClaimsRecord
from loopscope.rows.conditions import OURO_TRAIN
from loopscope.rows.grid import read_grid, update_differences
from loopscope.studies.paper_claims import judge_all
from loopscope.studies.results import Results, read_results
from loopscope.studies.tables import all_tables, depths_csv


def publish(out: Path, say: Callable[[str], None]) -> tuple[Results, ClaimsRecord]:
    """Write everything that follows from the rows; gives them, and what claims.json holds."""
    results = read_results(out)
    if results.grid.size.startswith(OURO_TRAIN):
        raise RunError(
            f"{out} has rows of `loopscope reproduce {OURO_TRAIN}`, of which no claim speaks; give that again"
        )
    if results.rows:
        update_differences(out, bf16=any(row.manifest.choice("autocast") == "bfloat16" for row in results.rows))
        results = replace(results, grid=read_grid(out))
    for note in results.notes:
        say(note)
    claims = judge_all(results)
    write_record(out / CLAIMS, claims)
    (out / "tables").mkdir(exist_ok=True)
    for table in all_tables(results, claims):
        table.write(out / "tables")
    write_atomically(out / "tables" / "depths.csv", depths_csv(results))
    try:
        from loopscope.studies.figures import draw_all
    except ImportError as error:
        say(f"no figures: they need {error.name}; run: pip install 'loopscope[report]'")
    else:
        draw_all(results, out / "figures")
    return results, claims
