"""Reading files that may be missing, damaged, still being written, or hostile, and writing them whole or not at all.

Every file that somebody names is opened by `open_file`, which refuses what is not a regular file: a pipe would be
waited for without end, and a device has none. No file takes long either: what would is refused before it is built.
Whether a problem with a file is told beside the rest or ends a command, the caller decides.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
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

NOT_FILES: dict[Callable[[int], bool], str] = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}
"""What a path may lead to besides a file."""


# --- opening ---------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> BufferedReader:
    """A regular file, open for reading its bytes; anything else is an OSError that says what it is, without waiting."""
    check_regular(path, path.stat().st_mode)  # before it is opened: to open a device may already do something
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)  # it may have been replaced since
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: Path, most: float) -> bytes:
    """All bytes of a regular file that has no more than `most` of them; more is an OSError that says the limit."""
    with open_file(path) as file:
        data = file.read() if most == math.inf else file.read(int(most) + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {in_bytes(most)}", str(path))
    return data


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file's bytes."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, most: float, errors: str = "strict") -> str:
    """The text of such a file, which is UTF-8; where `errors` is strict, other bytes are a UnicodeDecodeError."""
    return read_bytes(path, most).decode("utf-8", errors)


def in_bytes(count: float) -> str:
    """A limit as a person reads it: 64 kB, 4 MB."""
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:g} bytes"


def check_regular(path: Path, mode: int) -> None:
    """Refuse what is not a regular file, by an OSError that says what it is."""
    if not stat.S_ISREG(mode):
        kind = next((kind for is_kind, kind in NOT_FILES.items() if is_kind(mode)), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


# --- values ----------------------------------------------------------------------------------------------------------


def words(value: object) -> str:
    """A text or number as text, and nothing for anything else."""
    if value is None or isinstance(value, list | dict):
        return ""
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def setting(value: object, levels: int = MOST_NESTED) -> str:
    """A setting as text; of lists and mappings inside one another the outer levels."""
    if isinstance(value, list | dict) and not levels:
        return "…"
    if isinstance(value, list):
        return ", ".join(setting(item, levels - 1) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{words(key)}: {setting(item, levels - 1)}" for key, item in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return words(value)


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead, at any depth. Half a surrogate pair is no text: "?" instead."""
    if isinstance(value, dict):
        return {without_nan(name): without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    if isinstance(value, str):  # a path that is not UTF-8, or a file that spells one out
        return value.encode("utf-8", "replace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value


Problems = dict[str, str]
"""What is wrong with files, by their names: "eval.json" → "is not valid JSON and is left out"."""


def read_yaml(path: Path, problems: Problems) -> dict[str, Any] | None:
    """The mapping in a YAML file, unless it is made to take without end."""
    data = read_limited(path, MOST_YAML_BYTES, problems)
    if data is None:
        return None
    try:
        found = parse_yaml(data.decode("utf-8", "replace"))
    except TrickError as trick:
        problems[path.name] = f"{trick} and is left out"
        return None
    except ValueError:
        problems[path.name] = "is not valid YAML and is left out"
        return None
    if not isinstance(found, dict):
        problems[path.name] = "does not hold a mapping and is left out"
        return None
    return {str(name): value for name, value in found.items()}


class TrickError(ValueError):
    """YAML that is small to write and huge, or long, to read."""


def parse_yaml(text: str) -> Any:
    """What a YAML text holds; a ValueError says where it is not YAML, or by what it would take without end."""
    try:
        if (trick := _yaml_trick(text)) is not None:
            raise TrickError(trick)
        return yaml.load(text, LOADER)  # noqa: S506 – a SafeLoader of either kind
    except TrickError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:  # PyYAML trips over some dates
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from error


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


def lines_of(path: Path, most: float, problems: Problems) -> Iterator[bytes]:
    """Lines with their ends, none where the file cannot be read; of one that is too long only its end."""
    try:
        if not _is_readable(path, most, problems):
            return
        with open_file(path) as file:
            while line := file.readline(MOST_LINE_BYTES):
                is_long = False
                while len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
                    is_long, line = True, file.readline(MOST_LINE_BYTES)
                if is_long:
                    yield b"\n"
                elif line.strip():
                    yield line
    except OSError as error:
        problems[path.name] = f"cannot be read: {error.strerror}"


def read_limited(path: Path, most: float, problems: Problems) -> bytes | None:
    """The bytes of a regular file of sensible size; None where there is none, or where a problem says why."""
    try:
        return read_bytes(path, most) if _is_readable(path, most, problems) else None
    except OSError as error:
        problems[path.name] = f"cannot be read: {error.strerror}"
        return None


def _is_readable(path: Path, most: float, problems: Problems) -> bool:
    """Whether there is a regular file of sensible size."""
    if not path.exists():
        return False
    if not path.is_file():
        problems[path.name] = "is not a regular file and is left out"
        return False
    if path.stat().st_size > most:
        problems[path.name] = f"is larger than {in_bytes(most)} and is left out"
        return False
    return True


# --- writing ----------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: dict[str, Any]) -> None:
    """JSON as our files are written: strict, and whole or not at all."""
    write_atomically(path, json.dumps(without_nan(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one, never half of it.

    Half of a surrogate pair, which JSON may hold and UTF-8 may not, is written as \\ud800: in JSON that is the same.
    """
    with file_written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def file_written_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that becomes `path` when the block ends well, and vanishes when it does not.

    Only a regular file is ever replaced, and the one that a link leads to: whoever may write to /dev would otherwise
    lose /dev/null to `--out /dev/null`.
    """
    if path.exists():
        check_regular(path, path.stat().st_mode)
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)  # what the user knows
        raise
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(path: Path, tag: str | None = None) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block ends well, and vanishes when it does not."""
    beside = path.with_name(f".{path.name}.{tag or os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        for file in sorted(beside.rglob("*")):
            if file.is_dir():
                sync_folder(file)
                continue
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_folder(beside)
        if path.exists():
            shutil.rmtree(path)
        beside.rename(path)
        sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def sync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
