"""Reading files that may be missing, damaged, still being written, or hostile, and writing them whole or not at all.

Every file that somebody names is opened by `open_file`, which refuses what is not a regular file: a pipe would be
waited for without end, and a device has none. No file takes long either: what would is refused before it is built.
Beyond those two, nothing here raises for what a file says. Numbers that are not finite are None from here on. Whether
a problem is told beside the rest or ends a command, the caller decides.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

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
MOST_MISFITS = 1000
"""Values of the wrong kind that are counted in one file."""
MOST_NAME = 40
"""Characters of a name in the place of a misfit; a hostile one may have millions."""

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where PyYAML was built with it: ten times as fast."""


T = TypeVar("T")

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


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


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


def mapping(value: object) -> dict[str, Any]:
    """A mapping with names as texts; empty for anything else."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null instead, at any depth. Half a surrogate pair is no text: "?" instead."""
    if isinstance(value, dict):
        return {without_nan(name): without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(one) for one in value]
    if isinstance(value, str):  # a path that is not UTF-8, or a file that spells one out
        return value.encode("utf-8", "replace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Part:
    """An object of a file, taken apart name by name.

    What is absent, null or not finite is a gap. What is there and of another kind than asked for is a gap too, and a
    misfit: its place is noted, so that whoever reads can show the rest of the file or refuse the whole.
    """

    values: dict[str, Any]
    place: str = ""
    misfits: list[str] = field(default_factory=list)
    """Places of misfits, shared by all parts of a file."""

    def number(self, name: str) -> float | None:
        """A finite number."""
        return self._number(self.values.get(name), name)

    def numbers(self, name: str) -> list[float | None]:
        """Finite numbers, with gaps between."""
        return [self._number(item, f"{name}[{n}]") for n, item in enumerate(self._list(name))]

    def integer(self, name: str) -> int | None:
        """A whole number."""
        found = self.number(name)
        if found is not None and found != int(found):
            self._misfit(name)
            return None
        return None if found is None else int(found)

    def integers(self, name: str) -> list[int]:
        """Whole numbers, without gaps."""
        found = [(item, integer(item)) for item in self._list(name)]
        for item, value in found:
            if value is None and not _is_gap(item):
                self._misfit(name)
        return [value for _, value in found if value is not None]

    def flag(self, name: str) -> bool | None:
        """True or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            self._misfit(name)
            return None
        return value

    def text(self, name: str) -> str:
        """A text; empty where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            self._misfit(name)
            return ""
        return words(value)

    def texts(self, name: str) -> list[str]:
        """Texts, without gaps."""
        found = self._list(name)
        if not all(isinstance(item, str) for item in found):
            self._misfit(name)
        return [words(item) for item in found if isinstance(item, str)]

    def choice(self, name: str, allowed: Collection[str]) -> str:
        """One of some words; empty where there is none."""
        found = self.text(name)
        if found and found not in allowed:
            self._misfit(name)
        return found if found in allowed else ""

    def named_numbers(self, name: str) -> dict[str, float]:
        """The finite numbers of a mapping from names to numbers."""
        inside = self.part(name)
        found = {key: inside.number(key) for key in inside.values}
        return {key: value for key, value in found.items() if value is not None}

    def text_lists(self, name: str) -> list[list[str]]:
        """Lists of texts in a list."""
        inside = Part({f"{name}[{n}]": item for n, item in enumerate(self._list(name))}, self.place, self.misfits)
        return [inside.texts(key) for key in inside.values]

    def part(self, name: str) -> Part:
        """An object inside; an empty one where there is none."""
        return self._part(self.values.get(name), name)

    def parts(self, name: str) -> list[Part]:
        """The objects of a list."""
        found = [(self._part(item, f"{name}[{n}]"), item) for n, item in enumerate(self._list(name))]
        return [part for part, item in found if isinstance(item, dict)]

    def named_parts(self, name: str) -> dict[str, Part]:
        """The objects of a mapping from names to objects."""
        inside = self.part(name)
        found = {key: inside._part(value, key) for key, value in inside.values.items()}
        return {key: part for key, part in found.items() if isinstance(inside.values[key], dict)}

    def by_number(self, name: str) -> dict[int, Part]:
        """The objects of a list by their whole number k, in its order; of two with the same number the last counts."""
        found = {k: part for part in self.parts(name) if (k := part.integer("k")) is not None}
        return dict(sorted(found.items()))

    def as_a(self, kind: Callable[..., T], **given: Any) -> T:
        """A dataclass made of this object: what is not given is read by its name and its annotation."""
        asked = {name: hint for name, hint in _annotations(kind).items() if name not in given}
        return kind(**{name: KINDS[hint](self, name) for name, hint in asked.items()}, **given)

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            self._misfit(name)
        return value if isinstance(value, list) else []

    def _part(self, value: object, name: str) -> Part:
        if value is not None and not isinstance(value, dict):
            self._misfit(name)
        return Part(mapping(value), self._at(name), self.misfits)

    def _number(self, value: object, name: str) -> float | None:
        found = number(value)
        if found is None and not _is_gap(value):
            self._misfit(name)
        return found

    def _misfit(self, name: str) -> None:
        if len(self.misfits) < MOST_MISFITS:
            self.misfits.append(self._at(name))

    def _at(self, name: str) -> str:
        return ".".join(filter(None, (self.place, words(name)[:MOST_NAME])))


KINDS: dict[Any, Callable[[Part, str], Any]] = {
    float | None: Part.number,
    int | None: Part.integer,
    bool | None: Part.flag,
    str: Part.text,
    str | None: lambda part, name: part.text(name) or None,
    list[float | None]: Part.numbers,
    list[str]: Part.texts,
    list[list[str]]: Part.text_lists,
    dict[str, float]: Part.named_numbers,
    dict[str, Any]: lambda part, name: part.part(name).values,
}
"""How a field of a dataclass is read, by its annotation."""


@cache
def _annotations(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_gap(value: object) -> bool:
    """Whether no number is what a number may be: absent, not finite, or larger than a float holds."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


Problems = dict[str, str]
"""What is wrong with files, by their names: "eval.json" → "is not valid JSON and is left out"."""


def read_as(path: Path, take: Callable[[Part], T], problems: Problems) -> T | None:
    """What `take` makes of the object in a JSON file; None where there is none, which is no problem by itself."""
    found = read_json(path, problems)
    if found is None:
        return None
    part = Part(found)
    taken = take(part)
    note_misfits(path.name, part.misfits, problems)
    return taken


def note_misfits(name: str, misfits: Sequence[str], problems: Problems) -> None:
    """Add to what is wrong with a file how many of its values are misfits, and where the first is."""
    if misfits:
        count = f"{'at least ' if len(misfits) >= MOST_MISFITS else ''}{len(misfits)}"
        values = "value" if len(misfits) == 1 else "values"
        told = f"has {count} {values} of the wrong kind, left out; the first is {misfits[0]}"
        problems[name] = f"{problems[name]}; it {told}" if name in problems else told


def read_json(path: Path, problems: Problems) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none, with a problem where there is one that cannot be read."""
    text = _text(path, MOST_JSON_BYTES, problems)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also a whole number of more digits than Python reads
        problems[path.name] = "is not valid JSON and is left out"
        return None
    if not isinstance(found, dict):
        problems[path.name] = "does not hold an object and is left out"
        return None
    return found


def read_yaml(path: Path, problems: Problems) -> dict[str, Any] | None:
    """The mapping in a YAML file, unless it is made to take without end."""
    text = _text(path, MOST_YAML_BYTES, problems)
    if text is None:
        return None
    try:
        found = parse_yaml(text)
    except TrickError as trick:
        problems[path.name] = f"{trick} and is left out"
        return None
    except ValueError:
        problems[path.name] = "is not valid YAML and is left out"
        return None
    if not isinstance(found, dict):
        problems[path.name] = "does not hold a mapping and is left out"
        return None
    return mapping(found)


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


def _text(path: Path, most: float, problems: Problems) -> str | None:
    """The text of a regular file of sensible size, or None."""
    data = read_limited(path, most, problems)
    return None if data is None else data.decode("utf-8", "replace")


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
