"""What a page is about: which runs and reproductions, which runs are of one condition, and how that is drawn. No torch.

A run folder is what `loopscope train` makes; a reproduction folder is what `loopscope reproduce` makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopscope.config import changes_learning, config_to_dict
from loopscope.errors import RunError
from loopscope.files import setting
from loopscope.results.measures import Run, read_run
from loopscope.results.reproduction import Reproduction, read_reproduction
from loopscope.rows.conditions import CONDITIONS, FACTORS, RECIPES
from loopscope.show.chart import Style
from loopscope.show.numbers import ABSENT

RUN_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "row.json")
REPRODUCTION_FILES = ("grid.json", "claims.json")
NAMED = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "final-only": "final-only norm"}
"""Readouts by other names than the configuration's."""
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


@dataclass(frozen=True)
class Inputs:
    """Everything the page is made from."""

    runs: list[Run]
    reproductions: list[Reproduction]


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """All runs and reproductions that the paths mean: folders of either kind, or folders that hold some."""
    folders: dict[Path, Path] = {}
    reproductions = []
    for path in paths:
        if not path.is_dir():
            raise RunError(f"{path} is not a folder; give run folders, reproduction folders, or a folder of them")
        found = list(_find(path))
        if not found:
            names = ", ".join((*RUN_FILES[:3], *REPRODUCTION_FILES))
            raise RunError(f"{path} holds no run and no reproduction: none of {names} is in it or one folder below")
        for folder, kind in found:
            if folder.resolve() in folders:
                continue
            folders[folder.resolve()] = folder
            if kind == "reproduction":
                reproductions.append(read_reproduction(folder))
    runs = [folder for folder in folders.values() if _is(folder, RUN_FILES)]
    return Inputs([read_run(folder, name) for folder, name in zip(runs, _names(runs), strict=True)], reproductions)


def _find(path: Path) -> Iterator[tuple[Path, str]]:
    """Folders of runs and reproductions: the path itself and its rows, or what lies one folder below."""
    if _is(path, REPRODUCTION_FILES) or (path / "rows").is_dir():
        yield path, "reproduction"
        yield from ((row, "run") for row in _folders(path / "rows") if _is(row, RUN_FILES))
    elif _is(path, RUN_FILES):
        yield path, "run"
    else:
        for below in _folders(path):
            if _is(below, (*RUN_FILES, *REPRODUCTION_FILES)) or (below / "rows").is_dir():
                yield from _find(below)


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")) if path.is_dir() else []


def _is(folder: Path, files: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in files)


def _names(folders: list[Path]) -> list[str]:
    """Folder names, with as much of the path before them as makes them different."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max((len(part) for part in parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


# --- conditions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Group:
    """The runs of one condition."""

    index: int
    label: str
    placement: str
    kind: str
    runs: list[Run]
    style: Style
    """Colour and mark tell what sees the scale; dash and open marks tell where the loss is."""


@dataclass(frozen=True)
class Kind:
    """What sees or removes the scale, and what else such a run does differently from most."""

    name: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs of one condition together, in the order of the paper's tables."""
    penalties = {run.config.objective.norm_penalty for run in runs if run.config} - {0.0}
    members: dict[tuple[str, Kind], list[Run]] = {}
    for run, variant in zip(runs, _variants(runs), strict=True):
        placement = run.config.objective.placement if run.config else "unknown loss"
        members.setdefault((placement, Kind(_kind(run, penalties), variant)), []).append(run)
    # Named kinds first, variants after them, the rest by name.
    kinds = sorted(
        {kind for _, kind in members}, key=lambda kind: (bool(kind.variant), _place(ORDER, kind.name), str(kind))
    )
    placements = sorted({placement for placement, _ in members}, key=lambda p: (_place(PLACEMENTS, p), p))
    keys = sorted(members, key=lambda key: (kinds.index(key[1]), placements.index(key[0])))
    return [
        Group(
            index=index,
            label=f"{placement} + {kind}",
            placement=placement,
            kind=str(kind),
            runs=sorted(members[placement, kind], key=lambda run: (run.seed or 0, run.name)),
            style=Style(
                colour=f"c{_colour(kind, kinds)}",
                marker=SYMBOLS[_colour(kind, kinds)],
                dash=DASHES[min(_place(PLACEMENTS, placement), len(DASHES) - 1)],
                is_open=placement != "per-loop",
            ),
        )
        for index, (placement, kind) in enumerate(keys)
    ]


def each_run(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    """All runs with their groups, in the order of the page."""
    return [(group, run) for group in groups for run in group.runs]


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
    settings = {run.name: _settings(run) for _, run in each_run(groups) if run.config}
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
    parts = [NAMED.get(readout, readout)]
    if penalty := run.setting("objective", "norm_penalty"):
        parts.append(f"penalty {penalty:g}")
    if anchor := run.setting("objective", "scale_anchor"):
        parts.append(f"anchor {anchor:g}")
    if (run.setting("model", "inter_loop_norm") or "none") != "none":
        parts.append("inter-loop norm")
    return " + ".join(parts)


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


def _colour(kind: Kind, kinds: Sequence[Kind]) -> int:
    """The fixed colour of a named kind; further kinds take the colours that are left."""
    fixed = {other: ORDER.index(other.name) for other in kinds if other.name in ORDER and not other.variant}
    if kind in fixed:
        return fixed[kind]
    free = [colour for colour in range(NUM_COLOURS) if colour not in fixed.values()] or list(range(NUM_COLOURS))
    return free[[other for other in kinds if other not in fixed].index(kind) % len(free)]
