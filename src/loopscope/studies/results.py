"""What the rows of a grid ended with: their runs, checked for everything that claims, tables and figures rely on.

A finished row with a damaged file is refused, by the name of the file and with what mends it. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from loopscope.errors import RunError
from loopscope.results.measures import Measure, Run, read_run
from loopscope.results.reproduction import GridRecord
from loopscope.rows.conditions import CONDITIONS, Recipe
from loopscope.rows.grid import read_grid

REPAIR = "delete it and run the command of this grid again, without --rebuild: only what is missing is done"


@dataclass(frozen=True)
class Failure:
    """A row that was given up."""

    name: str
    error: str


@dataclass(frozen=True)
class Results:
    """Everything a grid's folder holds."""

    grid: GridRecord
    rows: list[Run]
    failures: list[Failure]
    notes: list[str] = field(default_factory=list)
    """What could not be read and is not needed."""

    def recipes(self) -> list[str]:
        """Recipes with at least one finished row."""
        return [recipe for recipe in self.grid.recipes if any(row.recipe == recipe for row in self.rows)]

    def view(self, recipe: str, split: str = "valid") -> View:
        """The rows of one recipe, with scores of one split."""
        return View(split, [row for row in self.rows if row.recipe == recipe])


@dataclass(frozen=True)
class View:
    """Rows of one recipe and scores of one split: what a claim or a table is computed from."""

    split: str
    rows: list[Run]

    def of(self, condition: str) -> dict[int, Run]:
        """The rows of a condition by seed."""
        rows = [row for row in self.rows if row.condition == condition]
        return {row.seed: row for row in rows if row.seed is not None}

    def conditions(self) -> list[str]:
        """Conditions that have rows, in the paper's order."""
        return [name for name in CONDITIONS if self.of(name)]

    def each(self, condition: str, measure: Measure) -> dict[int, float]:
        """A measure of each row of a condition, by seed."""
        found = {seed: measure(row, self.split) for seed, row in self.of(condition).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def paired(self, measure: Measure, *conditions: str) -> dict[int, tuple[float, ...]]:
        """A measure of several conditions, for the seeds that all of them have."""
        columns = [self.each(condition, measure) for condition in conditions]
        seeds = [seed for seed in columns[0] if all(seed in column for column in columns)]
        return {seed: tuple(column[seed] for column in columns) for seed in seeds}

    def paired_measures(self, condition: str, first: Measure, second: Measure) -> list[tuple[float, float]]:
        """Two measures of each row of a condition, where both are there."""
        ours, theirs = self.each(condition, first), self.each(condition, second)
        return [(value, theirs[seed]) for seed, value in ours.items() if seed in theirs]


def read_results(out: Path) -> Results:
    """All rows of a folder that are finished, and those that failed."""
    if not (out / "grid.json").is_file():
        raise RunError(f"{out} holds no grid: it has no grid.json; loopscope reproduce --out {out} makes one")
    grid = read_grid(out)
    rows, failures, notes = [], [], []
    for folder in sorted(path.parent for path in (out / "rows").glob("*/row.json")):
        run = read_run(folder, folder.name)
        _refuse(run, "row.json", "" if run.row and run.row.state else "names no state")
        if run.row and run.row.state == "finished":
            rows.append(_checked(run))
            notes += [f"{folder / name} {problem}" for name, problem in run.problems.items()]
        elif run.row and run.row.state == "failed":
            failures.append(Failure(folder.name, str(run.row.error)))
    order = list(CONDITIONS)
    rows.sort(key=lambda row: (order.index(row.condition), row.seed))
    return Results(grid, rows, failures, notes)


def _checked(run: Run) -> Run:
    """A finished row, unless a file that it needs is missing or damaged."""
    seed = run.row.seed if run.row else None
    if run.condition not in CONDITIONS or run.recipe not in get_args(Recipe) or seed is None:
        raise RunError(f"{run.folder}/row.json names no condition, recipe and seed that loopscope knows; {REPAIR}")
    is_evaluated = run.evaluation and run.evaluation.step is not None and run.evaluation.tokenizer and run.splits
    needed = {
        "config.yaml": "" if run.config else "is not there",
        "manifest.json": "" if (Path(run.folder) / "manifest.json").is_file() else "is not there",
        "eval.json": "" if is_evaluated else "has no step, tokenizer or scores",
    }
    for name in (*needed, "halting.json", "audit.json", "audit-untrained.json"):
        _refuse(run, name, needed.get(name, ""))
    return run


def _refuse(run: Run, name: str, missing: str) -> None:
    """Refuse a file that is not right, or that lacks something."""
    if problem := run.problems.get(name, missing):
        raise RunError(f"{run.folder}/{name} {problem.removesuffix('; it is left out')}; {REPAIR}")


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one value."""
    listed = list(values)
    return sum(listed) / len(listed)
