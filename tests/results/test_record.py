"""A record's file is its fields, and what is not right about a file is one sentence."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.errors import RunError
from loopscope.files import MOST_CHARACTERS, Problems
from loopscope.results.record import (
    Count,
    MisfitError,
    Record,
    Text,
    decode,
    encode,
    load_record,
    read_record,
    text_of,
    write_record,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Of a record."""

    name: Text
    kind: Literal["blind", "visible"] = "visible"
    count: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Record):
    """A file."""

    ce: float | None
    parts: list[Part] = field(default_factory=list)
    by_loop: dict[int, Part] = field(default_factory=dict)
    parameters: tuple[int, ...] = ()


NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.builds(
    Part,
    name=st.text(st.characters(exclude_categories=["Cs"])),
    kind=st.sampled_from(["blind", "visible"]),
    count=st.none() | st.integers(0, 2**63 - 1),
)


@given(ce=NUMBERS, parts=st.lists(PARTS, max_size=3), by_loop=st.dictionaries(st.integers(0, 64), PARTS, max_size=3))
def test_a_record_comes_back_as_it_was_and_is_written_the_same_again(
    ce: float | None, parts: list[Part], by_loop: dict[int, Part]
) -> None:
    record = Whole(ce=ce, parts=parts, by_loop=by_loop, parameters=(1, 2))
    again = decode(text_of(record).encode(), Whole)
    assert again == record
    assert text_of(again) == text_of(record)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null(number: float) -> None:
    assert json.loads(encode(Whole(ce=number)))["ce"] is None


def test_half_of_a_surrogate_pair_is_a_question_mark() -> None:
    assert json.loads(encode(Part(name="a\ud800")))["name"] == "a?"


def test_a_file_holds_its_schema_version_first(tmp_path: Path) -> None:
    write_record(tmp_path / "one.json", Whole(ce=1.5))
    assert (tmp_path / "one.json").read_text().startswith('{\n  "schema_version": 1,\n  "ce": 1.5,')


MISFITS = {
    "not-json": (b"{", "is not valid JSON"),
    "empty": (b"", "is not valid JSON"),
    "nan": (b'{"ce": NaN}', "is not valid JSON"),
    "not-utf-8": (b'{"ce": 1, "parts": [{"name": "\xff"}]}', "is not valid JSON"),
    "half-a-pair": (b'{"ce": 1, "parts": [{"name": "\\ud800"}]}', "is not valid JSON"),
    "deep": (b'{"x":' + b"[" * 100_000, "is not valid JSON"),
    "list": (b"[]", "does not fit: expected an object, got a list"),
    "lacks": (b'{"parts": []}', "does not fit: it lacks 'ce'"),
    "lacks-inside": (b'{"ce": 1, "parts": [{}]}', "does not fit at parts[0]: it lacks 'name'"),
    "kind": (b'{"ce": true}', "does not fit at ce: expected a number or null, got true or false"),
    "huge": (b'{"ce": ' + b"1" * 400 + b"}", "does not fit at ce: number out of range"),
    "infinite": (b'{"ce": 1e999}', "does not fit at ce: number out of range"),
    "negative": (
        b'{"ce": 1, "parts": [{"name": "a", "count": -1}]}',
        "does not fit at parts[0].count: expected a whole number >= 0",
    ),
    "many-digits": (
        b'{"ce": 1, "parts": [{"name": "a", "count": ' + b"9" * 400 + b"}]}",
        "does not fit at parts[0].count: expected a whole number <= 9223372036854775807",
    ),
    "word": (
        b'{"ce": 1, "parts": [{"name": "a", "kind": "blidn"}]}',
        "does not fit at parts[0].kind: expected blind or visible, found 'blidn'",
    ),
    "word-in-a-mapping": (
        b'{"ce": 1, "by_loop": {"3": {"name": "a", "kind": "blidn"}}}',
        "does not fit at by_loop[...].kind: expected blind or visible, found 'blidn'",
    ),
    "version": (b'{"schema_version": 2, "ce": 1}', "does not fit at schema_version: expected 1, found 2"),
    "name-of-a-loop": (
        b'{"ce": 1, "by_loop": {"first": {"name": "a"}}}',
        "does not fit at the names of by_loop: expected a whole number, got a text",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_is_wrong_with_a_file_is_told_with_its_place_and_what_was_expected(name: str) -> None:
    data, told = MISFITS[name]
    with pytest.raises(MisfitError) as error:
        decode(data, Whole)
    assert str(error.value) == told


def test_a_text_longer_than_is_shown_is_refused() -> None:
    with pytest.raises(MisfitError, match=r"does not fit at name: expected a text of length <= 4000"):
        decode(json.dumps({"name": "a" * (MOST_CHARACTERS + 1)}).encode(), Part)


def test_what_a_hostile_file_says_is_not_repeated_at_length() -> None:
    with pytest.raises(MisfitError) as error:
        decode(json.dumps({"name": "a", "kind": "b" * 100_000}).encode(), Part)
    assert len(str(error.value)) < 300


def test_names_that_a_record_does_not_have_are_passed_over() -> None:
    assert decode(b'{"name": "a", "colour": "red"}', Part) == Part(name="a")


def test_no_file_is_no_problem_and_a_wrong_one_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    problems: Problems = {}
    assert read_record(tmp_path / "eval.json", Whole, problems) is None
    assert problems == {}
    (tmp_path / "eval.json").write_text('{"ce": "low"}')
    assert read_record(tmp_path / "eval.json", Whole, problems) is None
    assert problems == {"eval.json": "does not fit at ce: expected a number or null, got a text; it is left out"}


def test_a_file_that_is_needed_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"eval\.json is missing$"):
        load_record(tmp_path / "eval.json", Whole)
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(RunError, match=r"eval\.json does not fit: it lacks 'ce'$"):
        load_record(tmp_path / "eval.json", Whole)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(" " * 100 + '{"ce": 1}')
    problems: Problems = {}
    assert read_record(tmp_path / "eval.json", Whole, problems, most=50) is None
    assert problems == {"eval.json": "is larger than 50 bytes and is left out"}
