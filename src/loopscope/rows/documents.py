"""grid.json and claims.json: what they hold, as it is written and as it is read. No torch here.

Reading is tolerant, as in `readings`: what cannot be used is a gap and a problem. Files from before a word changed are
read in today's words.
"""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from loopscope.files import Part, Problems, read_as
from loopscope.machine import git_state, versions

SCHEMA_VERSION = 1
HOLDS, FAILS, NOT_MEASURED = "holds", "does not hold at this size", "not measured"
TOO_EARLY = "too early to say"
"""Of a claim about CE, while a model it names has learned next to nothing."""
FAILED_BEFORE = "does not hold at this scale"
"""The verdict in files from before a model's size was called its size."""
SIGNED_BEFORE = "that ΔCE with its sign"
"""The one quantity that is shown with its sign, in files from before quantities said so."""


# --- grid.json -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One thing that is not as in the paper."""

    field: str
    paper: str
    here: str


@dataclass(frozen=True, kw_only=True)
class RecipeRecord:
    """What a grid holds under one recipe."""

    config: dict[str, Any]
    """The common configuration, resolved."""
    epochs: float | None
    seeds: dict[str, list[int]]
    """By condition."""
    differences: list[Difference]
    """From the paper."""

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        seeds = part.part("seeds")
        return part.as_a(
            cls,
            seeds={name: seeds.integers(name) for name in seeds.values},
            differences=[row.as_a(Difference) for row in part.parts("differences")],
        )


@dataclass(frozen=True, kw_only=True)
class GridRecord:
    """grid.json: what was asked for, on what data, where and when."""

    size: str
    commands: list[list[str]]
    recipes: dict[str, RecipeRecord]
    data: dict[str, Any]
    """What a manifest keeps of the data."""
    test_data: list[str] | None
    eval_tokens: int | None
    versions: dict[str, Any] = field(default_factory=dict)
    git: dict[str, Any] | None = None
    system: str = ""
    started: str = ""

    @classmethod
    def here(
        cls,
        size: str,
        command: list[str],
        recipes: dict[str, RecipeRecord],
        data: dict[str, Any],
        test_data: list[str] | None,
        eval_tokens: int | None,
    ) -> Self:
        """A request that is made on this machine, now."""
        return cls(
            size=size,
            commands=[command],
            recipes=recipes,
            data=data,
            test_data=test_data,
            eval_tokens=eval_tokens,
            versions=versions(),
            git=git_state(Path.cwd()),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )

    def to_json(self) -> dict[str, Any]:
        """What grid.json holds."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it; `scale` is what `size` was called before."""
        return part.as_a(
            cls,
            size=part.text("size") or part.text("scale"),
            recipes={name: RecipeRecord.from_json(recipe) for name, recipe in part.named_parts("recipes").items()},
            test_data=None if part.values.get("test_data") is None else part.texts("test_data"),
            git=part.part("git").values or None,
        )


# --- claims.json -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperValue:
    """What the paper reports, and where that is quoted from."""

    value: str
    source: str
    """P or R: see `sources`."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A quantity of a claim, with what follows from its seeds."""

    name: str
    unit: str
    seeds: list[tuple[int | None, float | None]]
    """Seed and value."""
    n: int
    mean: float | None
    low: float | None
    high: float | None
    rule: str | None
    """None: there to be read."""
    obeyed: bool | None
    headline: bool
    """Whether it is shown with the claim."""
    signed: bool
    """Whether it is shown with its sign, + included."""

    def to_json(self) -> dict[str, Any]:
        """As claims.json keeps it."""
        return {**vars(self), "seeds": [{"seed": seed, "value": value} for seed, value in self.seeds]}

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        headline, signed = part.flag("headline"), part.flag("signed")
        return part.as_a(
            cls,
            seeds=[(row.integer("seed"), row.number("value")) for row in part.parts("seeds")],
            n=part.integer("n") or 0,
            headline=bool(part.text("rule")) if headline is None else headline,
            signed=part.text("name") == SIGNED_BEFORE if signed is None else signed,
        )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One claim under one recipe and on one split."""

    recipe: str
    split: str
    id: str
    title: str
    measured: str
    rule: str
    paper: list[PaperValue]
    quantities: list[Measured]
    verdict: str
    """holds, does not hold at this size, too early to say, or not measured."""
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As claims.json keeps it."""
        paper = [asdict(value) for value in self.paper]
        return {**vars(self), "paper": paper, "quantities": [quantity.to_json() for quantity in self.quantities]}

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        verdict = part.text("verdict")
        return part.as_a(
            cls,
            paper=[row.as_a(PaperValue) for row in part.parts("paper")],
            quantities=[Measured.from_json(row) for row in part.parts("quantities")],
            verdict=FAILS if verdict == FAILED_BEFORE else verdict or NOT_MEASURED,
        )


@dataclass(frozen=True, kw_only=True)
class ClaimsRecord:
    """claims.json: every claim under every recipe and on every split that was measured."""

    size: str
    sources: dict[str, str]
    interval: str
    claims: list[Judgement]

    def of(self, recipe: str, split: str) -> list[Judgement]:
        """The claims under one recipe and on one split."""
        return [claim for claim in self.claims if (claim.recipe, claim.split) == (recipe, split)]

    def to_json(self) -> dict[str, Any]:
        """What claims.json holds."""
        claims = [claim.to_json() for claim in self.claims]
        return {"schema_version": SCHEMA_VERSION, **vars(self), "claims": claims}

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it; `scale` is what `size` was called before."""
        sources = part.part("sources")
        return part.as_a(
            cls,
            size=part.text("size") or part.text("scale"),
            sources={name: sources.text(name) for name in sources.values},
            claims=[Judgement.from_json(row) for row in part.parts("claims")],
        )


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a reproduction folder says besides its rows, as far as it could be read."""

    name: str
    grid: GridRecord | None
    claims: ClaimsRecord | None
    problems: Problems


def read_reproduction(folder: Path) -> Reproduction:
    """grid.json and claims.json of a folder."""
    problems: Problems = {}
    grid = read_as(folder / "grid.json", GridRecord.from_json, problems)
    claims = read_as(folder / "claims.json", ClaimsRecord.from_json, problems)
    return Reproduction(name=folder.resolve().name, grid=grid, claims=claims, problems=problems)
