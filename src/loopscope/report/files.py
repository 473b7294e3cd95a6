"""Reading files that may be missing, damaged, still being written, or hostile: what cannot be used becomes a sentence.

Nothing here raises for what a file says. Numbers that are not finite are None from here on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 64 << 20
"""Largest JSON or YAML file that is read whole, and largest line of metrics."""


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(value: object) -> list[float | None]:
    """A list of finite numbers, with None where one is not; empty for anything that is no list."""
    return [number(item) for item in value] if isinstance(value, list) else []


def integer(value: object) -> int | None:
    """A whole number, or None for anything else."""
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def words(value: object) -> str:
    """A text or number as text, and nothing for anything else."""
    if isinstance(value, str):
        return value
    return "" if value is None or isinstance(value, list | dict) else str(value)


def mapping(value: object) -> dict[str, Any]:
    """A mapping with names as texts; empty for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def mappings(value: object) -> list[dict[str, Any]]:
    """The mappings in a list."""
    return [mapping(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none, with a sentence where there is one that cannot be read."""
    text = _text(path, problems)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        problems.append(f"{path.name} is not valid JSON and is left out")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} does not hold an object and is left out")
    return mapping(found)


def read_yaml(path: Path, problems: list[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Aliases are refused: they make a small file a huge value."""
    text = _text(path, problems)
    if text is None:
        return {}
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            problems.append(f"{path.name} uses YAML aliases and is left out")
            return {}
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        problems.append(f"{path.name} is not valid YAML and is left out")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} does not hold a mapping and is left out")
    return mapping(found)


def read_rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects in a file with one JSON object per line; a last line that is torn is still being written."""
    rows, damaged, torn = [], 0, False
    try:
        for line in _lines(path):
            damaged += torn
            torn = False
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                torn = True
                continue
            if isinstance(found, dict):
                rows.append(mapping(found))
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    if damaged:
        problems.append(f"{path.name} has {damaged} unreadable line{'s' if damaged > 1 else ''}, left out")
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        while line := file.readline(MOST_BYTES):
            if line.strip():
                yield line


def _text(path: Path, problems: list[str]) -> str | None:
    """The text of a regular file of sensible size, or None."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MOST_BYTES:
            problems.append(f"{path.name} is larger than {MOST_BYTES >> 20} MB and is left out")
            return None
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return None
