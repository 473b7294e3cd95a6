"""Every file we read, damaged in every way we can think of and in some that we cannot: a clear error or a right result.

A case is one read of one damaged file, in this process. It may not take long, nor much memory, nor run, start, connect
to or write anything (`watching.py`). How many cases ran, the slowest and the largest are printed after the tests.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from damage import corpus, damaged
from found import FOUND
from hypothesis import HealthCheck, given, seed, settings
from readers import READERS, Reader
from watching import Watch, peak_memory

from loopscope.errors import LoopscopeError

FEWEST_CASES = 3000
MOST_MIB = 300
"""By which resident memory may rise above what is in use; the largest file of a case has a megabyte."""
SLOW = ("page", "page of an atlas", "claims and tables", "Huginn folder", "Parcae folder")
"""Readers that take tens of milliseconds, or read as another one does: a third of the corpus has to do."""
READ_FROM = {(reader.name, reader.file): reader for reader in READERS}

seen: dict[str, Watch] = {}
"""By test."""


@pytest.fixture(scope="module", autouse=True)
def quiet_and_quick() -> Iterator[None]:
    """Nothing here is about what survives a power cut, and waiting for the disk takes longer than all the rest."""
    logging.disable(logging.WARNING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("loopscope.machine.git_state", lambda folder: None)  # git is a process, and not what is tested
        undrawn = SimpleNamespace(svg=lambda *charts: "", swatch=lambda style: "")  # tests/show/test_drawing.py draws
        patch.setattr("loopscope.show.page.drawings", lambda: undrawn)
        yield
    logging.disable(logging.NOTSET)


class Bench:
    """A folder with one file to damage, made whole again after every case."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        self.reader, self.folder = reader, folder / "case"
        self.folder.mkdir(parents=True)
        reader.make(self.folder)
        self.files = {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}
        self.folders = {path for path in self.folder.rglob("*") if path.is_dir()}
        self.path = self.folder / reader.file
        self.content = self.files[self.path]
        self.watch = seen[f"{reader.name}: {reader.file}"] = Watch(self.folder.resolve())
        self.whole = reader.read(self.folder)
        self.restore()

    def restore(self) -> None:
        """Put back what the last case changed, moved or added."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and path not in self.folders:
                shutil.rmtree(path)
            elif path.is_file() and path not in self.files:
                path.unlink()
        for path in sorted(self.folders):
            path.mkdir(exist_ok=True)
        for path, content in self.files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def try_(self, name: str, content: bytes) -> None:
        """One case: a clear error or a right result."""
        reader = self.reader
        self.path.write_bytes(content)
        if reader.mend is not None:
            reader.mend(self.folder, self.path)
        try:
            result = self._read(name)
            assert result is NOTHING or reader.right(result, self.whole), f"{name}: {result!r:.300} is not right"
        finally:
            self.restore()
        assert self.watch.faults == []

    def _read(self, name: str) -> Any:
        try:
            with self.watch.one(name):
                return self.reader.read(self.folder)
        except LoopscopeError as error:
            assert 10 < len(str(error)) < 20_000, f"{name}: {error!s:.300} says too little, or too much"
        except OSError as error:  # the command line tells it with its file
            assert error.strerror, f"{name}: {error!r}"
        return NOTHING


NOTHING = object()


def name_of(reader: Reader) -> str:
    return f"{reader.name}: {Path(reader.file).name}"


@pytest.fixture(params=READERS, ids=name_of)
def bench(request, tmp_path_factory, record_property) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path_factory.mktemp("fuzz"))
    with peak_memory() as peak:
        yield made
    record_property("fuzz", [made.watch.cases, made.watch.slowest, made.watch.slowest_case, peak[0]])
    shutil.rmtree(made.folder)
    assert peak[0] < MOST_MIB


def test_a_damaged_file_is_a_clear_error_or_a_right_result(bench: Bench):
    reader = bench.reader
    cases = list(corpus(reader.suffix, bench.content, turns=1))
    for case in cases[:: 3 if reader.name in SLOW else 1]:
        bench.try_(case.name, case.content)
    for number, content in enumerate(FOUND.get((reader.name, reader.file), [])):
        bench.try_(f"found {number}", content)

    @seed(0)
    @settings(max_examples=8 if reader.name in SLOW else 25, suppress_health_check=list(HealthCheck))
    @given(damaged(reader.suffix, bench.content))
    def anything(content: bytes) -> None:
        bench.try_(f"{content!r:.80}", content)

    anything()


def test_every_case_that_was_found_belongs_to_a_reader():
    assert FOUND.keys() <= READ_FROM.keys()


def test_as_many_cases_ran_as_are_promised():
    if len(seen) < len(READERS):
        pytest.skip("not all readers were asked for")
    assert sum(watch.cases for watch in seen.values()) >= FEWEST_CASES
