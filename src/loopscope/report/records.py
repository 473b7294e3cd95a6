"""What the page knows of a run or a reproduction: everything from files, nothing taken on trust.

A run folder is what `loopscope train` makes; a reproduction folder is what `loopscope reproduce` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from loopscope.errors import RunError
from loopscope.report.files import integer, mapping, mappings, number, numbers, read_json, read_rows, read_yaml, words

RUN_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "row.json")
REPRODUCTION_FILES = ("grid.json", "claims.json")
SPLITS = ("", "valid", "validation", "test")
"""Splits of an eval.json, the one to show first."""
MOST_PERPLEXITY_CE = 700.0

State = Literal["finished", "unfinished", "stopped", "failed", "empty"]


@dataclass(frozen=True)
class Depth:
    """What reading out after loop k gives on validation text."""

    k: int
    ce: float | None
    norm: float | None
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float | None:
        """exp(CE), where that is a number."""
        return None if self.ce is None or self.ce > MOST_PERPLEXITY_CE else math.exp(self.ce)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder as far as it could be read."""

    name: str
    folder: str
    """The path as the user gave it."""
    config: dict[str, dict[str, Any]]
    manifest: dict[str, Any]
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluation: dict[str, Any]
    audit: dict[str, Any]
    row: dict[str, Any]
    problems: list[str]

    def setting(self, section: str, name: str) -> Any:
        """A value of the configuration, or None."""
        return self.config.get(section, {}).get(name)

    @property
    def seed(self) -> int | None:
        """Seed of weights and data order."""
        return integer(self.setting("training", "seed"))

    @property
    def recipe(self) -> str:
        """The reproduction's recipe; empty where it is the paper's or none is named."""
        found = words(self.row.get("recipe"))
        return "" if found == "paper" else found

    @property
    def num_loops(self) -> int | None:
        """The depth it was trained at."""
        configured = integer(self.setting("model", "num_loops")) or integer(
            mapping(self.audit.get("model")).get("num_loops")
        )
        return configured or (len(self.depths) or None)

    @property
    def width(self) -> int | None:
        """Width d of the state."""
        return integer(self.setting("model", "width")) or integer(mapping(self.audit.get("model")).get("width"))

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((integer(row.get("step")) or 0 for row in (*self.train, *self.evals)), default=0)

    @property
    def steps(self) -> int | None:
        """Steps it was to make."""
        return integer(self.setting("training", "steps"))

    @property
    def state(self) -> State:
        """How it ended, as far as its files say."""
        if self.row.get("state") in ("finished", "failed"):
            return "finished" if self.row["state"] == "finished" else "failed"
        if self.events and self._stopped_by(self.events[-1]):
            return "stopped"
        if self.steps is not None and self.step >= self.steps:
            return "finished"
        return "unfinished" if self.step else "empty"

    @property
    def state_in_words(self) -> str:
        """The same as a sentence of few words."""
        at = f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
        if self.state == "failed":
            return f"failed at {at}" + (f": {words(self.row['error'])}" if self.row.get("error") else "")
        if self.state == "stopped":
            return f"stopped at {at}: {words(self.events[-1].get('message'))}"
        if self.state == "unfinished":
            return f"at {at}, still going or interrupted"
        return f"finished at {at}" if self.state == "finished" else "nothing was logged yet"

    def _stopped_by(self, event: dict[str, Any]) -> bool:
        alarm = event.get("event") == "blind-spot" and self.setting("training", "on_blind_spot") == "stop"
        return event.get("event") == "stop" or alarm

    @cached_property
    def depths(self) -> list[Depth]:
        """Scores after each loop: of eval.json, or of the last evaluation while training."""
        splits = self.splits
        if splits:
            return next(iter(splits.values()))
        last = self.evals[-1] if self.evals else {}
        ce, norm = numbers(last.get("ce")), numbers(last.get("norm"))
        norm += [None] * (len(ce) - len(norm))
        return [Depth(k, c, n) for k, (c, n) in enumerate(zip(ce, norm, strict=False), start=1)]

    @cached_property
    def splits(self) -> dict[str, list[Depth]]:
        """Scores of eval.json by split, validation text first; `loopscope eval` writes one split without a name."""
        parts = {"": self.evaluation, **mapping(self.evaluation.get("splits"))}
        found = {name: _depths(mapping(part).get("depths")) for name, part in parts.items()}
        return {name: found[name] for name in sorted(found, key=_split_order) if found[name]}

    @property
    def depths_from(self) -> str:
        """Where the scores come from."""
        if self.splits:
            return ", ".join(part for part in ("eval.json", next(iter(self.splits))) if part)
        return f"validation at step {words(self.evals[-1].get('step'))}" if self.evals else ""

    def at_depth(self, k: int | None) -> Depth | None:
        """The scores after loop k."""
        return next((depth for depth in self.depths if depth.k == k), None)

    @property
    def final_norm(self) -> float | None:
        """‖h_K‖ on validation text, or the last one logged in training."""
        full = self.at_depth(self.num_loops)
        if full is not None and full.norm is not None:
            return full.norm
        return next((n for row in reversed(self.train) if (n := _last(numbers(row.get("norm")))) is not None), None)

    @property
    def exit_failure(self) -> float | None:
        """CE(1) − CE(K): how much worse the first exit is than full depth."""
        first, full = self.at_depth(1), self.at_depth(self.num_loops)
        if first is None or full is None or first.ce is None or full.ce is None:
            return None
        return first.ce - full.ce

    @property
    def tokenizer(self) -> str:
        """Kind and vocabulary of the tokenizer; perplexities compare only under the same."""
        data = mapping(self.manifest.get("data"))
        kinds = (self.evaluation.get("tokenizer"), data.get("tokenizer"), self.setting("data", "tokenizer"))
        kind = next((name for name in map(words, kinds) if name), "")
        size = integer(self.setting("model", "vocab_size"))
        return f"{kind}, {size:,} tokens" if kind and size else kind

    @property
    def tokenizer_sha256(self) -> str:
        """Hash of the tokenizer; empty where the manifest does not say."""
        return words(mapping(self.manifest.get("data")).get("tokenizer_sha256"))

    @property
    def audit_verdict(self) -> str:
        """blind-spot, controlled, or empty where there is no audit."""
        return words(self.audit.get("verdict"))

    @property
    def audit_loops(self) -> list[tuple[int, dict[str, Any]]]:
        """The audit's rows per loop, with their loop."""
        return [(k, row) for row in mappings(self.audit.get("loops")) if (k := integer(row.get("k"))) is not None]


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a reproduction folder says besides its rows."""

    name: str
    grid: dict[str, Any]
    claims: dict[str, Any]
    problems: list[str] = field(default_factory=list)


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
                reproductions.append(_read_reproduction(folder))
    runs = [folder for folder in folders.values() if _is(folder, RUN_FILES)]
    return Inputs([read_run(folder, name) for folder, name in zip(runs, _names(runs), strict=True)], reproductions)


def read_run(folder: Path, name: str) -> Run:
    """Everything that can be read of a run folder; what cannot is a sentence in `problems`."""
    problems: list[str] = []
    rows = read_rows(folder / "metrics.jsonl", problems)
    by_kind = {kind: [row for row in rows if row.get("kind") == kind] for kind in ("train", "eval", "event")}
    return Run(
        name=name,
        folder=str(folder),
        config={section: mapping(part) for section, part in read_yaml(folder / "config.yaml", problems).items()},
        manifest=read_json(folder / "manifest.json", problems),
        train=by_kind["train"],
        evals=by_kind["eval"],
        events=by_kind["event"],
        evaluation=read_json(folder / "eval.json", problems),
        audit=read_json(folder / "audit.json", problems),
        row=read_json(folder / "row.json", problems),
        problems=problems,
    )


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


def _read_reproduction(folder: Path) -> Reproduction:
    problems: list[str] = []
    grid, claims = (read_json(folder / name, problems) for name in REPRODUCTION_FILES)
    return Reproduction(name=folder.resolve().name, grid=grid, claims=claims, problems=problems)


def _depths(value: object) -> list[Depth]:
    rows = {k: row for row in mappings(value) if (k := integer(row.get("k"))) is not None}
    return [
        Depth(k, number(row.get("ce")), number(row.get("norm")), number(row.get("bits_per_byte")))
        for k, row in sorted(rows.items())
    ]


def _split_order(name: str) -> tuple[int, str]:
    return (SPLITS.index(name) if name in SPLITS else len(SPLITS), name)


def _last(values: list[float | None]) -> float | None:
    return values[-1] if values else None
