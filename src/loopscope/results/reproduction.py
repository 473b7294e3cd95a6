"""grid.json and claims.json: what a reproduction was asked for, and what it says of the paper's claims."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from loopscope.files import Problems
from loopscope.results.record import Count, Record, Text, read_record
from loopscope.results.run import GitState

GRID, CLAIMS = "grid.json", "claims.json"


# --- grid.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as in the paper."""

    field: Text
    paper: Text
    here: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeRecord:
    """What a grid holds under one recipe."""

    config: dict[str, dict[str, Any]]
    """The common configuration, resolved."""
    epochs: float
    seeds: dict[str, list[int]]
    """By condition."""
    differences: list[Difference]
    """From the paper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRecord(Record):
    """grid.json: what was asked for, on what data, where and when."""

    size: Text
    commands: list[list[Text]]
    recipes: Annotated[dict[str, RecipeRecord], Meta(min_length=1)]
    data: dict[str, Any]
    """What a manifest keeps of the data."""
    test_data: list[Text] | None
    eval_tokens: int | None
    versions: dict[str, Text | None]
    git: GitState | None
    system: Text
    started: Text


# --- claims.json -----------------------------------------------------------------------------------------------------

Verdict = Literal["holds", "does not hold at this size", "too early to say", "not measured"]
HOLDS: Verdict = "holds"
FAILS: Verdict = "does not hold at this size"
NOT_MEASURED: Verdict = "not measured"
TOO_EARLY: Verdict = "too early to say"
"""Of a claim about CE, while a model it names has learned next to nothing."""


@dataclass(frozen=True, slots=True)
class PaperValue:
    """What the paper reports, and where that is quoted from."""

    value: Text
    source: Text
    """P or R: see `sources`."""


@dataclass(frozen=True, slots=True)
class OfSeed:
    """The value of one seed."""

    seed: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A quantity of a claim, with what follows from its seeds."""

    name: Text
    unit: Text
    seeds: list[OfSeed]
    n: Count
    mean: float | None
    low: float | None
    high: float | None
    rule: Text | None
    """None: there to be read."""
    obeyed: bool | None
    headline: bool
    """Whether it is shown with the claim."""
    signed: bool
    """Whether it is shown with its sign, + included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One claim under one recipe and on one split."""

    recipe: Text
    split: Text
    id: Text
    title: Text
    measured: Text
    rule: Text
    paper: list[PaperValue]
    quantities: list[Measured]
    verdict: Verdict
    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsRecord(Record):
    """claims.json: every claim under every recipe and on every split that was measured."""

    size: Text
    sources: dict[str, Text]
    interval: Text
    claims: list[Judgement]

    def of(self, recipe: str, split: str) -> list[Judgement]:
        """The claims under one recipe and on one split."""
        return [claim for claim in self.claims if (claim.recipe, claim.split) == (recipe, split)]


# --- both ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a reproduction folder says besides its rows."""

    name: str
    grid: GridRecord | None
    claims: ClaimsRecord | None
    problems: Problems


def read_reproduction(folder: Path) -> Reproduction:
    """grid.json and claims.json of a folder; one that does not fit is a problem."""
    problems: Problems = {}
    return Reproduction(
        name=folder.resolve().name,
        grid=read_record(folder / GRID, GridRecord, problems),
        claims=read_record(folder / CLAIMS, ClaimsRecord, problems),
        problems=problems,
    )
