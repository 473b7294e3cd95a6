"""Reading files that may be missing, damaged, still being written, or hostile: what cannot be used becomes a sentence.

Nothing here raises for what a file says, and no file takes long: what would is refused before it is built. Numbers that
are not finite are None from here on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MOST_JSON_BYTES = 4 << 20
"""Largest JSON file that is read; the largest that loopscope writes are a hundred times smaller."""
MOST_YAML_BYTES = 64 << 10
"""Largest configuration that is read; a usual one has 2 kB."""
MOST_YAML_DEPTH = 16
"""Levels inside one another; a configuration has three, and PyYAML takes minutes over a few thousand brackets."""
MOST_VALUES = 4000
"""Names and values in YAML; a usual configuration has two hundred."""
MOST_VALUE = 3000
"""Characters of one value in YAML. A whole number of more digits than this is one that Python refuses to print."""
MOST_LINE_BYTES = 1 << 20
"""Longest line of metrics that is read; a usual one has less than 1 kB."""
MOST_METRICS_BYTES = 256 << 20
"""Largest file of metrics that is read."""
MOST_CHARACTERS = 4000
"""Of a text; what is beyond is not shown."""
MOST_NESTED = 3
"""Lists inside lists that are shown."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where PyYAML was built with it: ten times as fast."""


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
    if value is None or isinstance(value, list | dict):
        return ""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def shown(value: object, levels: int = MOST_NESTED) -> str:
    """A setting as text; of lists and mappings inside one another the outer levels."""
    if isinstance(value, list | dict) and not levels:
        return "…"
    if isinstance(value, list):
        return ", ".join(shown(item, levels - 1) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{words(key)}: {shown(item, levels - 1)}" for key, item in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return words(value)


def mapping(value: object) -> dict[str, Any]:
    """A mapping with names as texts; empty for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def mappings(value: object) -> list[dict[str, Any]]:
    """The mappings in a list."""
    return [mapping(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none, with a sentence where there is one that cannot be read."""
    text = _text(path, MOST_JSON_BYTES, problems)
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
    """The mapping in a YAML file, unless it is made to take without end."""
    text = _text(path, MOST_YAML_BYTES, problems)
    if text is None:
        return {}
    try:
        if (trick := _yaml_trick(text)) is not None:
            problems.append(f"{path.name} {trick} and is left out")
            return {}
        found = yaml.load(text, LOADER)  # a SafeLoader of either kind
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError):  # PyYAML trips over some dates
        problems.append(f"{path.name} is not valid YAML and is left out")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} does not hold a mapping and is left out")
    return mapping(found)


def _yaml_trick(text: str) -> str | None:
    """What makes a small YAML file a huge value or a long task, found without building any of it."""
    depth = count = 0
    for event in yaml.parse(text, LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            return "uses YAML aliases"
        if depth > MOST_YAML_DEPTH:
            return f"is nested more than {MOST_YAML_DEPTH} levels deep"
        count += isinstance(event, yaml.ScalarEvent)
        if count > MOST_VALUES:
            return f"has more than {MOST_VALUES:,} names and values"
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_VALUE:
            return f"has a value of more than {MOST_VALUE:,} characters"
    return None


def read_rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The objects in a file with one JSON object per line; a last line without an end is still being written."""
    rows, damaged = [], 0
    try:
        for line in _lines(path, problems):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                damaged += line.endswith(b"\n")
                continue
            if isinstance(found, dict):
                rows.append(mapping(found))
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    if damaged:
        problems.append(f"{path.name} has {damaged} unreadable line{'s' if damaged > 1 else ''}, left out")
    return rows


def _lines(path: Path, problems: list[str]) -> Iterator[bytes]:
    """Lines with their ends; of one that is too long only its end, which is no JSON."""
    if not path.is_file() or _is_too_large(path, MOST_METRICS_BYTES, problems):
        return
    with path.open("rb") as file:
        while line := file.readline(MOST_LINE_BYTES):
            is_long = False
            while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
                is_long, line = True, file.readline(MOST_LINE_BYTES)
            if is_long:
                yield b"\n"
            elif line.strip():
                yield line


def _text(path: Path, most: int, problems: list[str]) -> str | None:
    """The text of a regular file of sensible size, or None."""
    try:
        if not path.is_file() or _is_too_large(path, most, problems):
            return None
        return path.read_text("utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return None


def _is_too_large(path: Path, most: int, problems: list[str]) -> bool:
    if path.stat().st_size <= most:
        return False
    size = f"{most >> 20} MB" if most >> 20 else f"{most >> 10} kB"
    problems.append(f"{path.name} is larger than {size} and is left out")
    return True
