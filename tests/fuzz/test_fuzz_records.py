"""Every type of record: whatever bytes its file holds, they are that record or one short sentence, and never more.

Which types there are is asked of `loopscope.results`; records of each are made from its fields.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields, is_dataclass

import pytest
from damage import HOSTILE, damaged
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import loopscope.results
from loopscope.results.record import MisfitError, Record, decode, encode
from loopscope.results.run import KINDS

LONGEST_SENTENCE = 300
MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(loopscope.results.__path__, "loopscope.results.")
]
PARTS = {each for module in MODULES for each in vars(module).values() if isinstance(each, type) and is_dataclass(each)}
FILES = {part for part in PARTS if issubclass(part, Record) and part is not Record} | set(KINDS.values())


@st.composite
def sound(draw, part):
    """One of its type whose fields do not contradict each other; what has a default is drawn as well."""
    drawn = {field.name: ... for field in fields(part) if field.init and field.name != "schema_version"}
    try:
        return draw(st.builds(part, **drawn))
    except ValueError:
        reject()


for part in PARTS:
    st.register_type_strategy(part, sound(part))

every_file = pytest.mark.parametrize("kind", sorted(FILES, key=lambda kind: kind.__name__))
search = settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)


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
    read(encode(data.draw(st.from_type(kind))), kind)


@every_file
@search
@given(data=st.data())
def test_damage_to_a_record_gives_another_or_one_sentence(kind, data):
    read(data.draw(damaged(".json", encode(data.draw(st.from_type(kind))))), kind)


@every_file
def test_a_hostile_file_is_one_sentence_or_a_record(kind):
    for case in HOSTILE:
        read(case.content, kind)
