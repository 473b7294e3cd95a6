"""Files of documents: every kind and compression read the same, and every damage is one sentence."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from loopscope.data.files import CHUNK, find_files
from loopscope.errors import DataError, UnsupportedError

DOCUMENTS = ["first document", "  indented, naïve 漢字 🙂", *(f"document number {n}" for n in range(50))]


def compressed(data: bytes, compression: str) -> bytes:
    if compression == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor().compress(data) if compression == ".zst" else data


def content(kind: str, documents: list[str], tmp_path) -> bytes:
    if kind == ".txt":
        return "\n".join(documents).encode()
    records = [{"id": number, "text": document} for number, document in enumerate(documents)]
    if kind == ".jsonl":
        return "\n".join(map(json.dumps, records)).encode()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "raw", row_group_size=7)
    return (tmp_path / "raw").read_bytes()


def read(path, text_field: str = "text") -> list[str]:
    return [document for file in find_files(str(path), text_field) for document in file.documents()]


def written(tmp_path, name: str, data: bytes):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_the_same_documents_come_out_of_every_kind_of_file(kind, compression, tmp_path):
    path = written(tmp_path, f"some{kind}{compression}", compressed(content(kind, DOCUMENTS, tmp_path), compression))
    assert read(path) == DOCUMENTS


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
def test_blank_documents_and_trailing_white_space_are_dropped(kind, tmp_path):
    documents = ["  a \t", "", " \t ", "b"]
    assert read(written(tmp_path, f"some{kind}", content(kind, documents, tmp_path))) == ["  a", "b"]


def test_windows_line_ends_and_a_byte_order_mark_are_not_text(tmp_path):
    assert read(written(tmp_path, "some.txt", b"\xef\xbb\xbfone\r\n\r\ntwo\r\n")) == ["one", "two"]


def test_null_text_is_a_blank_document(tmp_path):
    assert read(written(tmp_path, "some.jsonl", b'{"text": null}\n\n{"text": "a"}')) == ["a"]


def test_a_zst_file_of_several_frames_larger_than_the_buffers_is_read_whole(tmp_path):
    text = os.urandom(3 * CHUNK).hex()
    data = b"".join(compressed(part.encode(), ".zst") for part in (text, "\n" + text[::-1], "\nend"))
    assert read(written(tmp_path, "some.txt.zst", data)) == [text, text[::-1], "end"]


def test_a_glob_names_files_in_the_order_of_their_names(tmp_path):
    for name in ("b", "c", "a"):
        written(tmp_path, f"{name}.txt", name.encode())
    (tmp_path / "folder.txt").mkdir()
    assert read(tmp_path / "*.txt") == ["a", "b", "c"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    written(tmp_path, "a.txt", b"other")
    assert read(written(tmp_path, "[a].txt", b"this")) == ["this"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", r"no such file: .*missing\.txt; a source is builtin"),
        ("*.parquet", r"no file matches .*\*\.parquet"),
        ("", r"is a folder; name its files"),
        ("table.csv", r"table\.csv: only \.txt, \.jsonl, \.parquet can be read"),
        ("some.gz", r"some\.gz: only \.txt"),
        ("empty.txt", r"empty\.txt is empty"),
    ],
)
def test_a_source_that_is_no_text_file_is_refused_when_the_corpus_is_opened(name, message, tmp_path):
    for existing, data in (("table.csv", b"a,b"), ("some.gz", b"data"), ("empty.txt", b"")):
        written(tmp_path, existing, data)
    with pytest.raises(DataError, match=message):
        find_files(str(tmp_path / name), "text")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("blank.txt", b" \n\n\t\n", r"blank\.txt holds no text"),
        ("blank.txt.gz", gzip.compress(b"", mtime=0), r"blank\.txt\.gz holds no text"),
        ("latin.txt", b"fine\ncaf\xe9 bad\n", r"latin\.txt, line 2: byte 4 \(0xe9\) is not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', r"broken\.jsonl, line 2: not JSON"),
        ("list.jsonl", b"[1]\n", r"list\.jsonl, line 1: a record is a JSON object, this is a list"),
        ("field.jsonl", b'{"body": "a", "id": 1}', r"line 1: no field 'text'; it has 'body', 'id' \(flag --text-field"),
        ("number.jsonl", b'{"text": 5}', r"number\.jsonl, line 1: the field 'text' holds a number, not text"),
        ("half.jsonl", rb'{"text": "a\ud800"}', r"half\.jsonl, line 1: character 2 is half of a surrogate pair"),
        ("no.txt.gz", b"not compressed", r"no\.txt\.gz is damaged: Not a gzipped file"),
        ("short.txt.gz", gzip.compress(bytes(1000), mtime=0)[:-9], r"short\.txt\.gz is damaged: Compressed file ended"),
        ("no.txt.zst", b"not compressed", r"no\.txt\.zst is damaged: "),
        ("short.txt.zst", compressed(b"word " * 9999, ".zst")[:-1], r"short\.txt\.zst is damaged: .* ends too soon"),
        ("no.parquet", b"not a table", r"no\.parquet is damaged or not \.parquet"),
    ],
)
def test_damaged_text_is_an_error_that_names_the_file_and_the_line(name, data, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        read(written(tmp_path, name, data))
    assert "\n" not in str(caught.value)


def test_a_parquet_file_damaged_in_the_middle_is_an_error_that_names_it(tmp_path):
    data = bytearray(content(".parquet", [f"{number:060d}" for number in range(500)], tmp_path))
    data[200:2000] = bytes(1800)
    with pytest.raises(DataError, match=r"some\.parquet"):
        read(written(tmp_path, "some.parquet", bytes(data)))


def test_a_wrong_field_of_a_parquet_file_is_told_with_the_fields_it_has(tmp_path):
    path = written(tmp_path, "some.parquet", content(".parquet", ["a"], tmp_path))
    with pytest.raises(DataError, match=r"no field 'body'; it has 'id', 'text'"):
        read(path, text_field="body")


def test_a_file_that_changes_between_passes_is_an_error(tmp_path):
    path = written(tmp_path, "some.txt", b"one")
    (file,) = find_files(str(path), "text")
    assert list(file.documents()) == ["one"]
    path.write_bytes(b"another")
    with pytest.raises(DataError, match="has changed since the corpus was opened"):
        list(file.documents())


@pytest.mark.parametrize(("name", "module"), [("some.txt.zst", "zstandard"), ("some.parquet", "pyarrow")])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(name, module, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=rf"needs {module}; run: pip install 'loopscope\[hf\]'"):
        read(written(tmp_path, name, b"data"))


def test_only_one_document_at_a_time_is_read(tmp_path):
    path = written(tmp_path, "some.jsonl", b'{"text": "a"}\n{"text": "b"}\nbroken')
    documents = find_files(str(path), "text")[0].documents()
    assert next(documents) == "a" and next(documents) == "b"
    with pytest.raises(DataError, match="line 3"):
        next(documents)


def test_a_number_of_ten_thousand_digits_is_a_number_and_beside_the_text_no_matter(tmp_path):
    digits = b"1" * 10_000
    assert read(written(tmp_path, "some.jsonl", b'{"text": "a"}\n{"text": "b", "n": ' + digits + b"}")) == ["a", "b"]
    with pytest.raises(DataError, match=r"other\.jsonl, line 1: the field 'text' holds a number, not text"):
        read(written(tmp_path, "other.jsonl", b'{"text": ' + digits + b"}"))


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_line_that_is_too_long_is_refused_with_the_limit(kind, compression, tmp_path, monkeypatch):
    monkeypatch.setattr("loopscope.data.files.MOST_DOCUMENT_BYTES", 1 << 10)
    documents = ["short", "x" * (1 << 10) + "y"]
    path = written(tmp_path, f"some{kind}{compression}", compressed(content(kind, documents, tmp_path), compression))
    with pytest.raises(DataError, match=r", line 2 is longer than 1 kB, the longest document; cut it into several"):
        read(path)


def test_a_row_of_parquet_that_is_too_long_is_refused_with_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("loopscope.data.files.MOST_DOCUMENT_BYTES", 1 << 10)
    path = written(tmp_path, "some.parquet", content(".parquet", ["short", "x" * 1025], tmp_path))
    with pytest.raises(DataError, match=r", row 2 is longer than 1 kB, the longest document"):
        read(path)


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".parquet"])
@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_file_that_unpacks_to_far_more_than_text_does_is_refused(compression, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("loopscope.data.files.ALWAYS_ALLOWED", 1 << 10)
    data = compressed(b'{"text": "a"}\n' * (1 << 18), compression)
    with pytest.raises(DataError, match=r"unpacks to more than [\d.]+ kB, which is more than text does"):
        read(written(tmp_path, f"some{kind}{compression}", data))


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_bomb_is_refused_before_much_of_it_is_in_memory(compression, tmp_path):
    """One line of 300 MB in a few hundred kB: what is held is a line of the limit, not all of it."""
    data = compressed(b"a" * (300 << 20), compression)
    script = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (600 << 20, 600 << 20))
from loopscope.data.files import find_files
from loopscope.errors import DataError
try:
    list(find_files({str(written(tmp_path, f"some.txt{compression}", data))!r}, "text")[0].documents())
except DataError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "line 1 is longer than 128 MB" in told.stdout, told.stderr


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt cannot be read: it is a pipe, not a regular file"):
        read(tmp_path / "pipe.txt")
