"""Runs by condition: what each is called, how it is drawn, what was the same in all and what varied. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loopscope.config import changes_learning, config_to_dict
from loopscope.files import setting
from loopscope.results.measures import Run
from loopscope.rows.conditions import CONDITIONS, FACTORS, RECIPES
from loopscope.show.numbers import ABSENT

NAMED = {"readout": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "final-only": "final-only norm"}}
KINDS = {tuple(getattr(condition, name) for name in FACTORS): condition.kind for condition in CONDITIONS.values()}
NUM_COLOURS = 8
DASHES = ("-", ":", "--", "-.")
PLACEMENTS = ("per-loop", "terminal", "gated", "weighted", "last-n")
SYMBOLS = ("o", "s", "D", "^", "v", "P", "X", "*")
ORDER = ("RMSNorm", "raw", "final-only norm", "penalty", "inter-loop norm", "LayerNorm")
"""Colours go to these first, so that the same condition looks the same on every page."""
MOST_NAMED = 2
"""Differing fields that a label names before it says how many more there are."""
SHA_DIGITS = 16


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one condition. Colour and mark tell what sees the scale; dash and open marks where the loss is."""

    index: int
    label: str
    placement: str
    kind: str
    runs: list[Run]
    colour: int
    symbol: str
    dash: str

    @property
    def is_open(self) -> bool:
        """Whether marks are drawn open: the loss is not placed at every loop."""
        return self.placement != PLACEMENTS[0]


@dataclass(frozen=True)
class Kind:
    """What sees or removes the scale, and what else such a run does differently from most."""

    name: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of one condition together, in the order of the paper's tables."""
    variants = _variants(runs)
    members: dict[tuple[str, Kind], list[Run]] = {}
    for run, variant in zip(runs, variants, strict=True):
        members.setdefault((placement_of(run), Kind(_kind(run, _penalties(runs)), variant)), []).append(run)
    kinds = sorted({kind for _, kind in members}, key=_rank)
    placements = sorted({placement for placement, _ in members}, key=lambda p: (_place(PLACEMENTS, p), p))
    keys = sorted(members, key=lambda key: (kinds.index(key[1]), placements.index(key[0])))
    return [
        Group(
            index=index,
            label=f"{placement} + {kind}",
            placement=placement,
            kind=str(kind),
            runs=sorted(members[placement, kind], key=lambda run: (run.seed or 0, run.name)),
            colour=_colour(kind, kinds) % NUM_COLOURS,
            symbol=SYMBOLS[_colour(kind, kinds) % len(SYMBOLS)],
            dash=DASHES[min(_place(PLACEMENTS, placement), len(DASHES) - 1)],
        )
        for index, (placement, kind) in enumerate(keys)
    ]


def placement_of(run: Run) -> str:
    """Where its loss is placed."""
    return run.config.objective.placement if run.config else "unknown loss"


def recipe_of(run: Run) -> str:
    """The recipe of a row of a grid; empty where it is the paper's or none is named."""
    return "" if run.recipe == RECIPES[0] else run.recipe


# --- what was fixed and what varied ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """One setting that was not the same in all runs."""

    name: str
    values: list[str]
    """One per group; several values within a group are joined."""
    learns: bool
    """Whether it changes what a run learns, or only how it is run and watched."""


@dataclass(frozen=True)
class Factors:
    """Every setting of all runs, divided into what was the same and what was not."""

    fixed: list[tuple[str, str]]
    varied: list[Factor]


def compare(groups: Sequence[Group]) -> Factors:
    """Divide the settings of all runs; a run whose files do not name a setting has no say in it."""
    runs = [run for group in groups for run in group.runs]
    settings = {run.name: _settings(run) for run in runs if run.config}
    names = list(dict.fromkeys(name for values in settings.values() for name in values))
    fixed, varied = [], []
    for name in names:
        found = {values[name] for values in settings.values() if name in values}
        if len(found) == 1:
            fixed.append((name, found.pop()))
            continue
        named = [[settings[run.name].get(name) for run in group.runs if run.name in settings] for group in groups]
        per_group = [_joined([value for value in values if value is not None]) for values in named]
        varied.append(Factor(name, per_group, changes_learning(name.rpartition(".")[2])))
    return Factors(fixed, varied)


def _settings(run: Run) -> dict[str, str]:
    """All settings of a run by name, with what its manifest says of data and machine."""
    settings = {
        f"{section}.{name}": setting(value)
        for section, part in (config_to_dict(run.config) if run.config else {}).items()
        for name, value in part.items()
    }
    manifest = run.manifest
    extra = {
        "parameters": manifest.parameters,
        "data.corpus_sha256": manifest.data and manifest.data.corpus_sha256[:SHA_DIGITS],
        "data.tokenizer_sha256": run.tokenizer_sha256[:SHA_DIGITS],
        "machine.system": manifest.system,
        "machine.threads": manifest.threads,
        "machine.torch": manifest.versions.get("torch"),
        "machine.loopscope": manifest.versions.get("loopscope"),
    }
    return settings | {name: setting(value) for name, value in extra.items() if value not in (None, "")}


def _joined(values: list[str]) -> str:
    distinct = list(dict.fromkeys(values))
    return ", ".join(distinct[:4]) + (", …" if len(distinct) > 4 else "") if distinct else ABSENT


# --- names -----------------------------------------------------------------------------------------------------------


def _kind(run: Run, penalties: set[float]) -> str:
    """What sees or removes the scale: the readout, and what else acts on it."""
    factors = tuple(
        run.setting("objective" if name in ("placement", "norm_penalty") else "model", name) for name in FACTORS
    )
    title = KINDS.get(factors)
    if title is not None and len(penalties) <= 1:
        return title
    readout = run.setting("model", "readout") or "unknown readout"
    parts = [NAMED["readout"].get(readout, readout)]
    if penalty := run.setting("objective", "norm_penalty"):
        parts.append(f"penalty {penalty:g}")
    if anchor := run.setting("objective", "scale_anchor"):
        parts.append(f"anchor {anchor:g}")
    if (run.setting("model", "inter_loop_norm") or "none") != "none":
        parts.append("inter-loop norm")
    return " + ".join(parts)


def _penalties(runs: Sequence[Run]) -> set[float]:
    found = {run.config.objective.norm_penalty for run in runs if run.config}
    return found - {0.0}


def _variants(runs: Sequence[Run]) -> list[str]:
    """For each run what else, besides condition and seed, it does differently from most; empty for most."""
    told = {*FACTORS, "scale_anchor", "seed"}
    others = [_others(run, told) for run in runs]
    known = [
        (recipe_of(run), tuple(sorted(other.items()))) for run, other in zip(runs, others, strict=True) if run.config
    ]
    if len({other for _, other in known}) <= 1:
        return [recipe_of(run) for run in runs] if len({recipe_of(run) for run in runs}) > 1 else ["" for _ in runs]
    usual = Counter([other for recipe, other in known if not recipe] or [other for _, other in known])
    most = min(usual, key=lambda other: (-usual[other], other))
    common = dict(most)
    different = [_difference(other, common) if run.config else [] for run, other in zip(runs, others, strict=True)]
    short = [recipe_of(run) or _listed(fields, MOST_NAMED) for run, fields in zip(runs, different, strict=True)]
    if len(set(short)) == len({tuple(fields) for fields in different}):
        return short
    return [_listed(fields, len(fields)) for fields in different]


def _others(run: Run, told: set[str]) -> dict[str, str]:
    parts = config_to_dict(run.config).values() if run.config else ()
    fields: dict[str, Any] = {name: value for part in parts for name, value in part.items()}
    return {name: setting(value) for name, value in fields.items() if changes_learning(name) and name not in told}


def _difference(other: dict[str, str], common: dict[str, str]) -> list[str]:
    names = sorted(other.keys() | common.keys())
    return [f"{name} {other.get(name, ABSENT)}" for name in names if other.get(name) != common.get(name)]


def _listed(fields: list[str], most: int) -> str:
    more = f" and {len(fields) - most} more" if len(fields) > most else ""
    return ", ".join(fields[:most]) + more


def _place(order: Sequence[str], item: str) -> int:
    return order.index(item) if item in order else len(order)


def _rank(kind: Kind) -> tuple[bool, int, str]:
    """Named kinds first, variants after them, the rest by name."""
    return (bool(kind.variant), _place(ORDER, kind.name), str(kind))


def _colour(kind: Kind, kinds: Sequence[Kind]) -> int:
    """The fixed colour of a named kind; further kinds take the colours that are left."""
    fixed = {other: ORDER.index(other.name) for other in kinds if other.name in ORDER and not other.variant}
    if kind in fixed:
        return fixed[kind]
    free = [colour for colour in range(NUM_COLOURS) if colour not in fixed.values()] or list(range(NUM_COLOURS))
    return free[[other for other in kinds if other not in fixed].index(kind) % len(free)]
