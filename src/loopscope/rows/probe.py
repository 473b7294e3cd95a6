"""probe.json: what an atlas measures of a row besides scores and audits, as it is written and read. No torch here.

How tokens move over many loops, what the first exit lacks, what cache policies cost, and what a token costs. Each part
stands alone: one that a design does not offer, or that fails, is a sentence in `problems`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from loopscope.files import Part, Problems, read_as, without_nan
from loopscope.results.evaluation import CacheTable
from loopscope.results.record import as_json, of_part

PROBE = "probe.json"
SCHEMA_VERSION = 1
PARTS = ("motion", "exit_gap", "cache", "cost")
AUDITS = ("untrained", "trained")
"""Under which a row tells why an audit is missing."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How the tokens of a text move, as `inference.motion` says it."""

    loops: int | None
    """Loops that were run."""
    shares: dict[str, float]
    """Of tokens: fixed, orbit, slider, unknown."""
    period: float | None
    purity: float | None
    contraction_rate: float | None
    settled_at: float | None
    settled_by_trained_depth: float | None
    median_cosine: list[float | None]
    summary: str

    @property
    def commonest(self) -> tuple[str, float] | None:
        """The kind that most tokens are of, and their share."""
        return max(self.shares.items(), key=lambda pair: pair[1], default=None)


@dataclass(frozen=True, kw_only=True)
class Mend:
    """What one map would mend of an exit's gap."""

    name: str
    share: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Exit:
    """What the first exit lacks, as `inference.exit_gap` says it."""

    loop: int | None
    ce_exit: float | None
    ce_full: float | None
    gap: float | None
    gap_low: float | None
    gap_high: float | None
    verdict: str
    """badly read, not yet computed, both or no gap."""
    summary: str
    mends: list[Mend]
    notes: list[str]

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        return part.as_a(cls, mends=[row.as_a(Mend) for row in part.parts("mends")])


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a token costs at the trained depth, counted on the model itself."""

    parameters: int | None
    flops_per_token: float | None
    """Of a forward pass through all loops and the last readout."""
    cache_bytes_per_token: int | None
    """Of the exact cache; None where it was not measured."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """All that an atlas asks of a trained row besides."""

    step: int | None
    motion: Moves | None = None
    exit_gap: Exit | None = None
    cache: CacheTable | None = None
    cost: Cost | None = None
    problems: dict[str, str] = field(default_factory=dict)
    """Why a part is missing, by its name; `trained` and `untrained` are audits."""

    def to_json(self) -> dict[str, Any]:
        """What probe.json holds."""
        cache = as_json(self.cache)
        return without_nan({"schema_version": SCHEMA_VERSION, **asdict(self), "cache": cache})

    @classmethod
    def from_json(cls, part: Part) -> Self:
        """What can be read of it."""
        motion, exit_gap, cost, told = (part.part(name) for name in ("motion", "exit_gap", "cost", "problems"))
        return cls(
            step=part.integer("step"),
            motion=motion.as_a(Moves) if motion.values else None,
            exit_gap=Exit.from_json(exit_gap) if exit_gap.values else None,
            cache=of_part(part.part("cache"), CacheTable) if part.part("cache").values else None,
            cost=cost.as_a(Cost) if cost.values else None,
            problems={name: told.text(name) for name in told.values},
        )


def read_probe(folder: Path, problems: Problems) -> Probe | None:
    """What can be read of a row's probe.json."""
    return read_as(folder / PROBE, Probe.from_json, problems)


def told_problems(folder: Path) -> dict[str, str]:
    """Why parts of a row are missing."""
    found = read_probe(folder, {})
    return {} if found is None else found.problems


def has_probe(folder: Path, step: int) -> bool:
    """Whether there is a whole probe.json of that step, every part of which is there or told."""
    problems: Problems = {}
    found = read_probe(folder, problems)
    if found is None or problems or found.step != step:
        return False
    return all(getattr(found, name) is not None or name in found.problems for name in PARTS)
