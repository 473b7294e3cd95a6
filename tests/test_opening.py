"""Whatever is not a regular file is refused at once, with what it is, by every reader of a file that a user names."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from loopscope.adapters.foreign import read_json as read_foreign_json
from loopscope.config import load_config
from loopscope.data.files import find_files
from loopscope.data.tokenizers import read_tokenizer
from loopscope.errors import LoopscopeError
from loopscope.files import Problems, open_file, read_text, read_yaml
from loopscope.results.record import read_record
from loopscope.results.run import RowRecord, read_metrics


def special(folder: Path, kind: str) -> Path:
    path = folder / "some.txt"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        os.chdir(folder)  # the path of a socket may have a hundred characters
        socket.socket(socket.AF_UNIX).bind(path.name)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


KINDS = ["a pipe", "a socket", "a device", "a folder"]
NAMED: list[Callable[[Path], object]] = [load_config, read_tokenizer, read_foreign_json]


@pytest.fixture(autouse=True)
def _stay(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_regular_file_is_an_error_that_says_what_it_is(kind, tmp_path):
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        open_file(special(tmp_path, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", NAMED)
def test_every_reader_refuses_it_in_one_sentence(read, kind, tmp_path):
    with pytest.raises(LoopscopeError, match=f"it is {kind}, not a regular file") as caught:
        read(special(tmp_path, kind))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_text_is_read_from_regular_files_only(kind, tmp_path):
    with pytest.raises(LoopscopeError, match=f"it is {kind}, not a regular file"):
        find_files(str(special(tmp_path, kind)), "text")


def read_row(path: Path, problems: Problems) -> RowRecord | None:
    return read_record(path, RowRecord, problems)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [read_row, read_metrics, read_yaml])
def test_readers_of_run_folders_leave_it_out_with_a_sentence(read, kind, tmp_path):
    problems: dict[str, str] = {}
    assert not read(special(tmp_path, kind), problems)
    assert problems == {"some.txt": "is not a regular file and is left out"}


def test_a_file_that_becomes_a_pipe_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    pipe, plain = special(tmp_path, "a pipe"), tmp_path / "plain.txt"
    plain.write_text("a")
    seen = plain.stat()
    monkeypatch.setattr(Path, "stat", lambda path, **_: seen)
    assert stat.S_ISREG(pipe.stat().st_mode)
    with pytest.raises(OSError, match="it is a pipe, not a regular file"):
        open_file(pipe)


def test_a_file_above_its_limit_is_refused_with_the_limit(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text("a" * 2049)
    assert len(read_text(path, 2049)) == 2049
    with pytest.raises(OSError, match="it is larger than 2 kB"):
        read_text(path, 2048)
