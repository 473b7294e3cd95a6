"""Which runs and reproductions a page is about.

A run folder is what `loopscope train` makes; a reproduction folder is what `loopscope reproduce` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopscope.errors import RunError
from loopscope.results.measures import Run, read_run
from loopscope.results.reproduction import Reproduction, read_reproduction

RUN_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "row.json")
REPRODUCTION_FILES = ("grid.json", "claims.json")


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
