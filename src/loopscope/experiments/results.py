"""What the rows of a grid ended with, read from their files. No torch here: tables and figures are made from this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from loopscope.config import config_to_dict
from loopscope.errors import RunError
from loopscope.experiments.conditions import CONDITIONS, Recipe
from loopscope.experiments.grid import read_grid
from loopscope.experiments.ledger import total_seconds
from loopscope.runs import RunFolder, read_json

SPLITS = ("valid", "test")
REPAIR = "delete it and give the command of this grid again, without --rebuild: only what is missing is done"
GUARDED = ("skip", "rolled-back")
"""Events of metrics.jsonl by which a guard changes a run."""


@dataclass(frozen=True)
class RowResult:
    """One finished row."""

    condition: str
    recipe: str
    seed: int
    config: dict[str, dict[str, Any]]
    evaluation: dict[str, Any]
    audit: dict[str, Any] | None
    manifest: dict[str, Any]
    seconds: float
    norms_in_training: dict[int, float]
    """‖H_K‖ on validation text by step."""
    guarded: int = 0
    """Steps that a guard skipped or rolled back: the row was not trained quite like the others."""

    @property
    def num_loops(self) -> int:
        """Loops K it was trained at."""
        return int(self.config["model"]["num_loops"])

    @property
    def width(self) -> int:
        """Width d."""
        return int(self.config["model"]["width"])

    def depth(self, split: str, k: int) -> dict[str, float] | None:
        """Scores after loop k on a split, or None where they were not measured."""
        depths = self.evaluation["splits"].get(split, {}).get("depths", ())
        return next((depth for depth in depths if depth["k"] == k), None)

    def score(self, split: str, k: int, name: str) -> float | None:
        """One finite score after loop k: ce, perplexity, bits_per_byte or norm."""
        return finite((self.depth(split, k) or {}).get(name))

    def loops(self) -> list[dict[str, Any]]:
        """The audit's rows per loop, or nothing."""
        return list(self.audit["loops"]) if self.audit else []


@dataclass(frozen=True)
class Failure:
    """A row that was given up."""

    name: str
    error: str


@dataclass(frozen=True)
class Results:
    """Everything a grid's folder holds."""

    grid: dict[str, Any]
    rows: list[RowResult]
    failures: list[Failure]

    def recipes(self) -> list[str]:
        """Recipes with at least one finished row."""
        return [recipe for recipe in self.grid["recipes"] if any(row.recipe == recipe for row in self.rows)]

    def view(self, recipe: str, split: str = "valid") -> View:
        """The rows of one recipe, with scores of one split."""
        return View(split, [row for row in self.rows if row.recipe == recipe])


Measure = Callable[[RowResult, str], float | None]
"""A number about a row on a split, or None where it was not measured."""


@dataclass(frozen=True)
class View:
    """Rows of one recipe and scores of one split: what a claim or a table is computed from."""

    split: str
    rows: list[RowResult]

    def of(self, condition: str) -> dict[int, RowResult]:
        """The rows of a condition by seed."""
        return {row.seed: row for row in self.rows if row.condition == condition}

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
    rows, failures = [], []
    for folder in sorted(path.parent for path in (out / "rows").glob("*/row.json")):
        record = _read(folder / "row.json", "state")
        if record["state"] == "finished":
            rows.append(_row(folder, record))
        elif record["state"] == "failed":
            failures.append(Failure(folder.name, str(record.get("error"))))
    order = list(CONDITIONS)
    rows.sort(key=lambda row: (order.index(row.condition), row.seed))
    return Results(grid, rows, failures)


def _row(folder: Path, record: dict[str, Any]) -> RowResult:
    run = RunFolder(folder)
    metrics = run.read_metrics()
    condition, recipe, seed = str(record.get("condition")), str(record.get("recipe")), record.get("seed")
    if condition not in CONDITIONS or recipe not in get_args(Recipe) or not isinstance(seed, int):
        raise RunError(f"{folder}/row.json names no condition, recipe and seed that loopscope knows; {REPAIR}")
    return RowResult(
        condition=condition,
        recipe=recipe,
        seed=seed,
        config=config_to_dict(run.config()),
        evaluation=_read(folder / "eval.json", "step", "tokenizer", "splits", "throughput"),
        audit=_read(folder / "audit.json", "verdict", "loops") if (folder / "audit.json").exists() else None,
        manifest=_read(folder / "manifest.json"),
        seconds=total_seconds(record),
        norms_in_training={row["step"]: row["norm"][-1] for row in metrics if row.get("kind") == "eval"},
        guarded=sum(row.get("event") in GUARDED for row in metrics),
    )


def _read(path: Path, *fields: str) -> dict[str, Any]:
    """A result of a row, with the fields that the rest relies on."""
    try:
        found = read_json(path)
    except RunError as error:
        raise RunError(f"{error}; {REPAIR}") from error
    if absent := [field for field in fields if field not in found]:
        raise RunError(f"{path} is damaged: it has no {', '.join(absent)}; {REPAIR}")
    return found


def finite(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return None


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean of at least one value."""
    listed = list(values)
    return sum(listed) / len(listed)


def deviation(values: Iterable[float]) -> float | None:
    """Standard deviation of a sample, or None of one value."""
    listed = list(values)
    if len(listed) < 2:
        return None
    middle = mean(listed)
    return math.sqrt(sum((value - middle) ** 2 for value in listed) / (len(listed) - 1))


def shown(value: float | None, digits: int = 4, sign: str = "") -> str:
    """A number for people: significant digits, thousands apart, no exponent where avoidable; `sign` may be +."""
    if value is None:
        return "–"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e7):
        return f"{value:{sign}.{digits - 2}e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    return f"{value:{sign},.{decimals}f}"


# --- measures that claims, tables and figures share ------------------------------------------------------------------


def final_norm(row: RowResult, split: str) -> float | None:
    """Mean ‖H_K‖."""
    return row.score(split, row.num_loops, "norm")


def final_perplexity(row: RowResult, split: str) -> float | None:
    """Perplexity at full depth."""
    return row.score(split, row.num_loops, "perplexity")


def exit_failure(row: RowResult, split: str) -> float | None:
    """CE(1) − CE(K): how much worse the first exit is than full depth."""
    return difference(row.score(split, 1, "ce"), row.score(split, row.num_loops, "ce"))


def difference(left: float | None, right: float | None) -> float | None:
    """left − right, where both were measured."""
    return None if left is None or right is None else left - right


def raw_at(row: RowResult, k: int) -> bool:
    """Whether loop k is read out without a norm."""
    readout = row.config["model"]["readout"]
    return readout == "raw" or (readout == "final-only" and k < row.num_loops)


def clamps(row: RowResult) -> Iterator[dict[str, Any]]:
    """The audit's interventions on the scale; it has others too."""
    for intervention in (row.audit or {}).get("interventions", ()):
        if intervention["name"].startswith("radial clamp") and finite(intervention.get("delta_ce")) is not None:
            yield intervention


def alpha_range(row: RowResult, split: str) -> float | None:
    """Largest minus smallest CE over α ∈ [0.1, 10] at full depth."""
    for loop in (row.audit or {}).get("alpha_sweep", {}).get("loops", ()):
        if loop["k"] == row.num_loops:
            ce = [value for value in map(finite, loop["ce"]) if value is not None]
            return max(ce) - min(ce) if len(ce) == len(loop["ce"]) else None
    return None
