"""Damaged files, made from whole ones: a fixed corpus of what goes wrong, and strategies for what nobody thought of.

A format that has a structure is damaged in its structure too: a value becomes another, a name vanishes, and the rest
stays what it was. Damage to bytes alone rarely gets past a parser.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st

CANARY = "loopscope_canary"
"""Named by every content that would do something if it were run: whoever compiles or runs it is caught by the name."""
PICKLE = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()
"""A pickle that starts a process."""


class Case(NamedTuple):
    """What a file is replaced by."""

    name: str
    content: bytes


Path = tuple[str | int, ...]
MISSING = object()
WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf")),
    *(2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400, 10**4000),
    *("", "x", "nan", "1", "\x00", "\x1b[2J", "ä" * 3, "\ud800", "<script>alert(1)</script>", "x" * 5000),
    *("../../outside", "/etc/passwd", "/dev/zero", "hf:nobody/nothing", "os:system", f"{CANARY}:run"),
    *([], {}, [None], [[]], [[[[[[1]]]]]], {"": ""}, {"k": 1}, [1, "x", None, {}], list(range(1000)), MISSING),
)
"""What stands where something else was expected; MISSING: nothing does."""

HOSTILE: tuple[Case, ...] = (
    Case("empty", b""),
    Case("a blank", b" \n"),
    Case("a NUL", b"\x00"),
    Case("not UTF-8", b"\xff\xfe\xfa" * 20),
    Case("half a character", b'{"a": "\xe2\x82'),
    Case("null", b"null"),
    Case("a list", b"[]"),
    Case("a number", b"3.5"),
    Case("a text", b'"x"'),
    Case("an empty object", b"{}"),
    Case("brackets", b"[" * 100_000),
    Case("objects inside one another", b'{"a":' * 50_000),
    Case("10,000 digits", b'{"step": ' + b"1" * 10_000 + b"}"),
    Case("a huge exponent", b'{"step": 1e999999999}'),
    Case("NaN by name", b'{"step": NaN, "ce": [Infinity, -Infinity]}'),
    Case("a name twice", b'{"step": 1, "step": "x"}'),
    Case("a megabyte in a line", b'{"a": "' + b"x" * (1 << 20) + b'"}'),
    Case("50,000 names", b"{" + b",".join(b'"%d": 1' % n for n in range(50_000)) + b"}"),
    Case("a pickle", PICKLE),
    Case("a pickle of protocol 4", b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."),
    Case("gzip", gzip.compress(b"{}", mtime=0)),
    Case("an executable", b"#!/bin/sh\ntouch " + CANARY.encode() + b"\n"),
    Case("Python", f"__import__('os').system('touch {CANARY}')\n".encode()),
    Case("a YAML object", f"!!python/object/apply:os.system ['touch {CANARY}']\n".encode()),
    Case("a YAML module", f"a: !!python/module:{CANARY}\n".encode()),
    Case(
        "a YAML bomb",
        b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9 or [])) for n in range(1, 9)),
    ),
    Case("YAML in itself", b"a: &a [*a]\n"),
    Case("a YAML date", b"model: {width: 2024-99-99}\n"),
    Case("a YAML set", b"? a\n? b\n"),
    Case("a YAML key that is a list", b"[1, 2]: x\n"),
    Case("a YAML merge", b"<<: [1]\nmodel: 1\n"),
    Case("two YAML documents", b"a: 1\n---\nb: 2\n"),
    Case("a YAML number in base 60", b"training: {steps: 190:20:30}\n"),
    Case("TOML", b"[model]\nwidth = 64\n"),
    Case("HTML", b"<!doctype html><html></html>"),
    Case("a safetensors header of 2⁶² bytes", (1 << 62).to_bytes(8, "little") + b"{}"),
    Case("a safetensors header beyond the end", (99 << 20).to_bytes(8, "little") + b"{}"),
    Case("an empty safetensors header", (2).to_bytes(8, "little") + b"{}"),
    Case("a safetensors header that is a list", (2).to_bytes(8, "little") + b"[]"),
    Case("a nested safetensors header", (100_000).to_bytes(8, "little") + b"[" * 100_000),
)
"""Contents that fit nothing, or one format and are tried on all."""


# --- bytes -----------------------------------------------------------------------------------------------------------


def of_bytes(whole: bytes) -> Iterator[Case]:
    """The usual accidents of disks and networks."""
    size = len(whole)
    for share in (0.0, 0.01, 0.25, 0.5, 0.75, 0.99):
        yield Case(f"cut at {share:.0%}", whole[: max(int(size * share), 1)])
    yield Case("without its last byte", whole[:-1])
    yield Case("with bytes after its end", whole + b"\x00\xffgarbage")
    yield Case("twice", whole + whole)
    yield Case("zeros", bytes(size))
    yield Case("backwards", whole[::-1])
    yield Case("with a byte order mark", b"\xef\xbb\xbf" + whole)
    yield Case("as UTF-16", whole.decode("latin-1").encode("utf-16"))
    for eighth in range(8 if size else 0):
        place = min(size - 1, size * eighth // 8)
        yield Case(f"a bit flipped at byte {place}", whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        yield Case(f"a hole at byte {place}", whole[:place] + b"\x00" * 16 + whole[place + 16 :])


@st.composite
def damaged_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """A few edits at any place."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from((0, 1, 1, 2, 4, 8, 64, 4096)))
        new = draw(
            st.one_of(st.binary(max_size=12), st.sampled_from((b"\xff" * 8, bytes(8), b'"', b"[", b"}", b"-", b"9")))
        )
        data[start : start + length] = new
    return bytes(data)


# --- values inside one another ---------------------------------------------------------------------------------------


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place of a value, outermost first; of long lists only the first and the last item."""
    yield at
    if isinstance(value, dict):
        for name, item in value.items():
            yield from places(item, (*at, name))
    if isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from places(value[index], (*at, index))


def replaced(value: Any, at: Path, new: Any) -> Any:
    """A copy with something else, or nothing, at a place."""
    if not at:
        return None if new is MISSING else new
    found = copy.deepcopy(value)
    inner = found
    for step in at[:-1]:
        inner = inner[step]
    if new is MISSING:
        del inner[at[-1]]
    else:
        inner[at[-1]] = new
    return found


def of_values(whole: Any, write: Callable[[Any], bytes], turns: int) -> Iterator[Case]:
    """So many wrong values at every place; all of them take turns."""
    number = 0
    for at in places(whole):
        for _ in range(turns):
            new = WRONG_VALUES[number % len(WRONG_VALUES)]
            number += 1
            name = ".".join(map(str, at)) or "the whole"
            yield Case(f"{name} = {'nothing' if new is MISSING else repr(new)[:40]}", write(replaced(whole, at, new)))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged_value(draw: st.DrawFn, whole: Any) -> Any:
    """Other values at one to three places."""
    value = whole
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(places(value))))
        new = draw(JSON_VALUES | st.sampled_from([each for each in WRONG_VALUES if each is not MISSING]))
        value = replaced(value, at, copy.deepcopy(new))
    return value


# --- formats ---------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """How a file is taken apart and written again."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


def _write_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


def _read_lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def _write_lines(value: Any) -> bytes:
    rows = value if isinstance(value, list) else [value]
    return b"".join(_write_json(row) + b"\n" for row in rows)


def _write_yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value, allow_unicode=False, sort_keys=False).encode("utf-8", "surrogatepass")
    except yaml.YAMLError:
        return repr(value).encode("utf-8", "surrogatepass")


def _read_tensors(data: bytes) -> list[Any]:
    """The header of a safetensors file, and its data as characters."""
    length = int.from_bytes(data[:8], "little")
    return [json.loads(data[8 : 8 + length]), data[8 + length :].decode("latin-1")]


def _write_tensors(value: Any) -> bytes:
    header, data = value if isinstance(value, list) and len(value) == 2 else (value, "")
    text = _write_json(header)
    return (
        len(text).to_bytes(8, "little") + text + (data.encode("latin-1", "replace") if isinstance(data, str) else b"")
    )


FORMATS = {
    ".json": Format(json.loads, _write_json),
    ".jsonl": Format(_read_lines, _write_lines),
    ".yaml": Format(yaml.safe_load, _write_yaml),
    ".safetensors": Format(_read_tensors, _write_tensors),
}


def corpus(suffix: str, whole: bytes, turns: int) -> Iterator[Case]:
    """Every fixed damage to a file of a kind: hostile contents, accidents, and `turns` wrong values at each place."""
    yield from HOSTILE
    yield from of_bytes(whole)
    if suffix in FORMATS:
        form = FORMATS[suffix]
        yield from of_values(form.read(whole), form.write, turns)


def damaged(suffix: str, whole: bytes) -> st.SearchStrategy[bytes]:
    """Any damage to a file of a kind."""
    anything = damaged_bytes(whole)
    if suffix in FORMATS:
        form = FORMATS[suffix]
        return anything | damaged_value(form.read(whole)).map(form.write)
    return anything
