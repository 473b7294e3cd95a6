"""Every type of record: whatever bytes its file holds, they are that record or one short sentence, and never more.

Which types there are is asked of `loopscope.results`; records of each are made from the types of their fields.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal

import pytest
from damage import HOSTILE, damaged
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from made_up import write_reproduction

import loopscope.results
from loopscope.errors import ConfigError
from loopscope.results.audit import AuditResult
from loopscope.results.evaluation import Evaluation
from loopscope.results.halting import CalibratedHalting, Calibration
from loopscope.results.record import MisfitError, Record, decode, encode
from loopscope.results.reproduction import ClaimsRecord, GridRecord
from loopscope.results.run import KINDS, Manifest, RowRecord
from loopscope.show.page import build_report

LONGEST_SENTENCE = 300
MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(loopscope.results.__path__, "loopscope.results.")
]
PARTS = {each for module in MODULES for each in vars(module).values() if isinstance(each, type) and is_dataclass(each)}
FILES = {part for part in PARTS if issubclass(part, Record) and part is not Record} | set(KINDS.values())
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8) | st.just("<script>alert(1)</script>"),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.none() | st.text(max_size=3),
}


@st.composite
def sound(draw, part):
    """One of its type whose fields do not contradict each other; what has a default is drawn as well."""
    hints = typing.get_type_hints(part, include_extras=True)
    drawn = {field.name: values(hints[field.name]) for field in fields(part) if field.init}
    try:
        return draw(st.builds(part, **drawn))
    except (ValueError, ConfigError):
        reject()


@cache
def values(hint: Any, least: float | None = None, most: float | None = None) -> st.SearchStrategy[Any]:
    """What a field of this type may hold, within its bounds."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is int:
        return st.integers(-(2**63) if least is None else int(least), 2**63 - 1 if most is None else int(most))
    if hint is float:
        return st.floats(least, most, allow_nan=False, allow_infinity=False, allow_subnormal=False)
    if origin is Annotated:
        bounds = [[getattr(bound, name, None) for bound in inside[1:]] for name in ("ge", "le", "min_length")]
        low, high, length = (next((each for each in found if each is not None), None) for found in bounds)
        drawn = values(inside[0], low, high)
        return drawn if length is None else drawn.filter(lambda value: len(value) >= length)
    if origin is Literal:
        return st.sampled_from(inside)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, inside))
    if origin is list or inside[1:] == (...,):
        return st.lists(values(inside[0]), max_size=4).map(origin)
    if origin is tuple:
        return st.tuples(*map(values, inside))
    if origin is dict:
        return st.dictionaries(values(inside[0]), values(inside[1]), max_size=3)
    return PLAIN[hint] if hint in PLAIN else sound(hint)


every_file = pytest.mark.parametrize("kind", sorted(FILES, key=lambda kind: kind.__name__))
search = settings(max_examples=30, suppress_health_check=list(HealthCheck), deadline=None)


def read(data: bytes, kind: type) -> None:
    """Bytes are a record, which its own file gives again, or one sentence."""
    try:
        found = decode(data, kind)
    except MisfitError as error:
        assert 10 < len(str(error)) < LONGEST_SENTENCE and "\n" not in str(error)
    else:
        assert encode(decode(encode(found), kind)) == encode(found)


@every_file
@search
@given(data=st.data())
def test_a_record_that_is_written_can_be_read(kind, data):
    read(encode(data.draw(values(kind))), kind)


@every_file
@search
@given(data=st.data())
def test_damage_to_a_record_gives_another_or_one_sentence(kind, data):
    read(data.draw(damaged(".json", encode(data.draw(values(kind))))), kind)


@every_file
def test_a_hostile_file_is_one_sentence_or_a_record(kind):
    for case in HOSTILE:
        read(case.content, kind)


OF_A_ROW = {
    "eval.json": Evaluation, "manifest.json": Manifest, "row.json": RowRecord, "halting.json": CalibratedHalting,
    "calibration.json": Calibration, "audit.json": AuditResult,
}  # fmt: skip
OF_A_GRID = {"grid.json": GridRecord, "claims.json": ClaimsRecord}


@settings(search, max_examples=6)
@given(data=st.data(), name=st.sampled_from([*OF_A_ROW, *OF_A_GRID, "metrics.jsonl"]))
def test_no_values_of_any_record_stop_the_page(tmp_path_factory, data, name):
    folder = write_reproduction(tmp_path_factory.mktemp("page") / "grid", {"per-loop+rmsnorm": 1})
    path = folder / name if name in OF_A_GRID else folder / "rows" / "per-loop+rmsnorm-s42" / name
    if name == "metrics.jsonl":
        lines = data.draw(st.lists(st.one_of(*map(values, KINDS.values())), max_size=6))
        path.write_bytes(b"".join(encode(line) + b"\n" for line in lines))
    else:
        path.write_bytes(encode(data.draw(values((OF_A_ROW | OF_A_GRID)[name]))))
    page = build_report([folder]).html
    assert page.rstrip().endswith("</html>") and "<script>alert" not in page
