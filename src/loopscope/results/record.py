"""Records: frozen dataclasses that are files. Their fields are the file's keys; encoding and decoding is msgspec's.

    @dataclass(frozen=True, slots=True, kw_only=True)      # without slots a decoded object loses defaulted fields
    class Evaluation(Record):
        splits: dict[str, Split]
        speed: float | None = None                         # None: not measured. JSON has no NaN

A file that is not right is told in one sentence and not used at all: its place, and what was expected there. Where a
measurement may come to nothing its field is `float | None`, and whoever measures makes it None.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import msgspec

from loopscope.errors import ConfigError, RunError
from loopscope.files import (
    MOST_CHARACTERS,
    MOST_JSON_BYTES,
    Problems,
    read_bytes,
    read_limited,
    without_nan,
    write_atomically,
)

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things: whole, and one that a tensor holds."""
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that JSON can be written with."""
Text = Annotated[str, msgspec.Meta(max_length=MOST_CHARACTERS)]
"""A text that is shown; a file with a longer one is not ours."""

MOST_TOLD = 200
"""Characters of what is wrong with a file; a hostile one would have us repeat its whole text."""
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
"""JSON's types as msgspec calls them, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a whole file holds; other dataclasses are its parts."""

    schema_version: Literal[1] = 1

    def to_json(self) -> dict[str, Any]:
        """What its file holds, as Python's own lists and mappings."""
        plain: dict[str, Any] = as_json(self)
        return plain


@dataclass(frozen=True, slots=True)
class Choice:
    """An automatic choice: what was chosen, its value, and why."""

    name: str
    value: str | Whole | float | bool
    reason: str


class MisfitError(ValueError):
    """A text is not the record that was asked for; it says where, and what was expected there."""


def encode(record: object) -> bytes:
    """Strict JSON on one line: what is not finite is null, half of a surrogate pair is "?"."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:  # a path that is not UTF-8
        return msgspec.json.encode(without_nan(msgspec.to_builtins(record)))


def text_of(record: object) -> str:
    """The same as its file holds it: indented, with a line end."""
    return msgspec.json.format(encode(record), indent=2).decode() + "\n"


def as_json(record: object) -> Any:
    """The same as `json` takes it: dictionaries, lists and numbers, NaN among them."""
    return msgspec.to_builtins(record)


def record_in(value: object, kind: type[T]) -> T | None:
    """The record that a value of somebody else's JSON is; None where it is none."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return None


def write_record(path: Path, record: Record) -> None:
    """Write a record's file, whole or not at all."""
    write_atomically(path, text_of(record))


def measured(value: float) -> float | None:
    """A number, or None where measuring came to none: JSON knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None


def decode(data: bytes, kind: type[T]) -> T:
    """The record in a JSON text; a MisfitError says what is wrong with another one, in a few words."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise MisfitError(_cut(_told(str(error), kind))) from None
    except ConfigError as error:  # of options that a record holds: they check themselves
        raise MisfitError(_cut(f"does not fit: {error}")) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MisfitError("is not valid JSON") from None


def read_record(path: Path, kind: type[T], problems: Problems, *, most: int = MOST_JSON_BYTES) -> T | None:
    """A file's record; None where there is no file, and with a problem where it cannot be used."""
    data = read_limited(path, most, problems)
    if data is None:
        return None
    try:
        return decode(data, kind)
    except MisfitError as error:
        problems[path.name] = f"{error}; it is left out"
        return None


def load_record(path: Path, kind: type[T], *, most: int = MOST_JSON_BYTES) -> T:
    """A file's record for whoever cannot do without it."""
    try:
        return decode(read_bytes(path, most), kind)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except MisfitError as error:
        raise RunError(f"{path} {error}") from None


# --- sentences -------------------------------------------------------------------------------------------------------


def _told(error: str, kind: Any) -> str:
    """msgspec's message as a clause that goes on from a file's name: `does not fit at loops[2].ce: expected …`."""
    what, _, path = error.rpartition(" - at `$") if " - at `$" in error else (error, "", "")
    place = path.partition("`")[0].lstrip(".")
    if " - at `key` in `$" in error:
        what, _, path = error.rpartition(" - at `key` in `$")
        place = f"the names of {path.partition('`')[0].lstrip('.') or 'the whole'}"
    where = f" at {_cut(place)}" if place else ""
    if (missing := re.match("Object missing required field `(.*)`", what)) is not None:
        return f"does not fit{where}: it lacks {missing[1]!r}"
    if what.startswith("Invalid enum value") and (allowed := _allowed(kind, place)):
        return f"does not fit{where}: expected {' or '.join(map(str, allowed))}, found {what.split(maxsplit=3)[3]}"
    what = re.sub("`([^`]*)`", lambda quoted: _in_words(quoted[1]), what)
    return f"does not fit{where}: {what[:1].lower()}{what[1:]}"


def _in_words(types_named: str) -> str:
    """`float | null` → a number or null."""
    return " or ".join(KINDS.get(name, name) for name in types_named.split(" | "))


def _allowed(kind: Any, place: str) -> tuple[object, ...]:
    """The words of the Literal at a place like `loops[2].kind`; nothing where there is none."""
    for step in re.findall(r"\[[^]]*\]|[^.\[\]]+", place):
        kind = _within(kind, step)
    return next((typing.get_args(each) for each in _alternatives(kind) if typing.get_origin(each) is Literal), ())


def _within(kind: Any, step: str) -> Any:
    """The type of an item, or of a field."""
    for each in _alternatives(kind):
        origin = typing.get_origin(each)
        if step.startswith("[") and isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
            return typing.get_args(each)[-1 if issubclass(origin, Mapping) else 0]
        if not step.startswith("[") and is_dataclass(each):
            return typing.get_type_hints(each, include_extras=True).get(step)
    return None


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, without their bounds."""
    if typing.get_origin(kind) is Annotated:
        return _alternatives(typing.get_args(kind)[0])
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, Union) else (kind,)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TOLD else text[:MOST_TOLD] + "…"
