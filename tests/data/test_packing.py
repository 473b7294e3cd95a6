"""Packing: the tokens of the joined text, exact bytes, and a cache that is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.data import packing
from loopscope.data.corpora import Corpus, Shelf, joined
from loopscope.data.packing import PackedTokens, pack
from loopscope.data.tokenizers import Tokenizer, bytes_tokenizer, fit_tokenizer
from loopscope.errors import DataError
from loopscope.machine import cache_folder
from loopscope.results.record import as_json

DOCUMENTS = ["The river runs to the sea.", "  The sea, naïve 漢字, is not full", "zebra\n\n  the sea", "the river"]
BYTES = bytes_tokenizer()
BPE = fit_tokenizer("bpe", DOCUMENTS, 280)
WORD = fit_tokenizer("word", DOCUMENTS, 100)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, BPE, WORD], ids=lambda tokenizer: tokenizer.kind)


def corpus_of(documents: list[str], sha256: str = "0" * 64) -> Corpus:
    return Corpus("a corpus", {"train": [Shelf(documents)]}, sha256)


def packed_in(folder: Path, tokenizer: Tokenizer = BYTES, documents: list[str] = DOCUMENTS) -> PackedTokens:
    return pack(corpus_of(documents), "train", tokenizer, cache=folder)


def left_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "tokens").iterdir())


@TOKENIZERS
def test_packed_tokens_are_the_tokens_of_the_joined_text(tokenizer, tmp_path):
    packed = packed_in(tmp_path, tokenizer)
    text = "\n\n".join(DOCUMENTS)
    assert packed[:].tolist() == tokenizer.encode(text)
    assert (len(packed), packed.manifest.documents, packed.num_bytes) == (len(packed[:]), 4, len(text.encode()))


@given(st.lists(st.text().map(str.rstrip).filter(bool), min_size=1, max_size=5))
def test_tokens_and_bytes_are_those_of_the_joined_text_whatever_the_documents(documents):
    text = "\n\n".join(documents)
    with TemporaryDirectory() as folder:
        for tokenizer in (BYTES, BPE, WORD):
            packed = packed_in(Path(folder), tokenizer, documents)
            assert packed[:].tolist() == tokenizer.encode(text)
            assert packed.bytes_between(0, len(packed)) == packed.num_bytes == len(text.encode())


@TOKENIZERS
def test_the_bytes_of_every_run_of_tokens_are_counted_exactly(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "READ_TOKENS", 3)
    packed = packed_in(tmp_path, tokenizer)
    ((_, bytes_N),) = tokenizer.encode_counted(["\n\n".join(DOCUMENTS)])
    for start in range(len(packed) + 1):
        for stop in (start, start + 1, (start + len(packed)) // 2, len(packed)):
            assert packed.bytes_between(start, stop) == bytes_N[start:stop].sum()


def test_unknown_words_count_the_bytes_of_the_text_and_not_of_their_name(tmp_path):
    packed = packed_in(tmp_path, WORD)
    text = "\n\n".join(DOCUMENTS)
    unknown = WORD.encode("zebra")[0]
    (place,) = [place for place, token in enumerate(packed[:]) if token == unknown and _piece(text, place) == "zebra"]
    assert packed.bytes_between(place, place + 1) == 5


def _piece(text: str, place: int) -> str:
    return WORD.backend.pre_tokenizer.pre_tokenize_str(text)[place][0]


@TOKENIZERS
def test_runs_that_cross_shards_are_read_as_one(tokenizer, tmp_path, monkeypatch):
    whole = packed_in(tmp_path / "whole", tokenizer)[:]
    monkeypatch.setattr(packing, "SHARD_TOKENS", 7)
    packed = packed_in(tmp_path / "parts", tokenizer)
    counts = [shard.tokens for shard in packed.manifest.shards]
    assert len(counts) > 2 and set(counts[:-1]) == {7} and sum(counts) == len(whole)
    for start, stop in ((0, len(whole)), (6, 8), (7, 14), (3, 18), (5, 5), (len(whole) - 1, len(whole))):
        assert packed[start:stop].tolist() == whole[start:stop].tolist()


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path):
    definition = json.loads(WORD.definition)
    definition["model"]["vocab"] = {"<pad>": 0, "<unk>": 1, "river": 70_000}
    packed = packed_in(tmp_path, Tokenizer("file", json.dumps(definition)))
    assert packed.manifest.dtype == "<u4" and packed[:].max() == 70_000
    assert packed_in(tmp_path, WORD).manifest.dtype == "<u2"


def test_text_is_tokenized_once_and_found_again(tmp_path):
    first = packed_in(tmp_path)
    again = pack(Corpus("unread", {"train": [Shelf(_unreadable())]}, "0" * 64), "train", BYTES, cache=tmp_path)
    assert again.folder == first.folder and again[:].tolist() == first[:].tolist()


def _unreadable():
    raise AssertionError("the documents were read again")
    yield


def test_another_corpus_split_or_tokenizer_is_packed_anew(tmp_path):
    corpus = Corpus("a corpus", {"train": [Shelf(DOCUMENTS)], "valid": [Shelf(DOCUMENTS)]}, "0" * 64)
    folders = {
        pack(corpus, "train", BYTES, cache=tmp_path).folder,
        pack(corpus, "valid", BYTES, cache=tmp_path).folder,
        pack(corpus, "train", BPE, cache=tmp_path).folder,
        pack(corpus_of(DOCUMENTS, "1" * 64), "train", BYTES, cache=tmp_path).folder,
    }
    assert len(folders) == 4


def test_the_cache_is_where_the_caller_or_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "environment"))
    assert cache_folder(tmp_path) == tmp_path
    assert pack(corpus_of(DOCUMENTS), "train", BYTES).folder.parent == tmp_path / "environment" / "tokens"
    monkeypatch.delenv("LOOPSCOPE_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "loopscope"


def test_progress_counts_every_document_and_the_tokens_up_to_the_total(tmp_path, monkeypatch):
    monkeypatch.setattr("loopscope.data.packing.BATCH_CHARACTERS", 1)
    seen: list[tuple[int, int]] = []
    packed = pack(corpus_of(DOCUMENTS), "train", BYTES, cache=tmp_path, on_progress=lambda *now: seen.append(now))
    ends = np.cumsum([len(piece.encode()) for piece in joined(DOCUMENTS)]).tolist()
    assert seen == list(zip((1, 2, 3, 4), ends, strict=True)) and ends[-1] == len(packed)


LONG = " ".join(f"word{n}'s  {n * n}\n\tline;" for n in range(60))


@pytest.mark.parametrize("kind", ["bytes", "bpe", "word"])
def test_a_long_document_is_tokenized_in_pieces_and_its_tokens_are_those_of_the_whole(kind, tmp_path, monkeypatch):
    tokenizer = fit_tokenizer(kind, [LONG], 400)
    whole = tokenizer.encode(LONG)
    monkeypatch.setattr("loopscope.data.corpora.MOST_PIECE", 50)
    lengths = [len(piece) for piece in joined([LONG])]
    assert len(lengths) > 20 and max(lengths) <= 50
    packed = packed_in(tmp_path, tokenizer, [LONG])
    assert packed[:].tolist() == whole
    assert (packed.manifest.documents, packed.num_bytes) == (1, len(LONG.encode()))


@given(text=st.text(alphabet=" \n\t\x1cab\u3000.", max_size=200), most=st.integers(1, 20))
def test_pieces_join_to_their_text_and_none_is_longer_than_the_limit(text, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.data.corpora.MOST_PIECE", most)
        pieces = list(joined([text]))
    assert "".join(pieces) == text and max(map(len, pieces)) <= most


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink], ids=["truncated", "flipped", "missing"])
@pytest.mark.parametrize("name", ["tokens-00000.bin", "token-bytes.bin", "byte-exceptions.bin", "manifest.json"])
def test_a_damaged_cache_is_noticed_said_and_rebuilt(name, damage, tmp_path, caplog):
    packed = packed_in(tmp_path, WORD)
    expected = packed[:].tolist()
    damage(packed.folder / name)
    again = packed_in(tmp_path, WORD)
    assert again[:].tolist() == expected and again.bytes_between(0, len(again)) == again.num_bytes
    assert [record.message for record in caplog.records] == [
        f"the packed tokens in {packed.folder} are damaged; packing them again"
    ]
    assert packed_in(tmp_path, WORD).manifest == packed.manifest


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packing.os, "fsync", full)
    with pytest.raises(DataError, match=r"no space left for packed tokens in .*; free some, or set LOOPSCOPE_CACHE"):
        packed_in(tmp_path)
    assert left_in(tmp_path) == [".lock"]
    monkeypatch.undo()
    assert len(packed_in(tmp_path)) == len("\n\n".join(DOCUMENTS).encode())


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot keep packed tokens in .*: Not a directory; set LOOPSCOPE_CACHE"):
        packed_in(tmp_path / "file")


def test_an_error_in_the_documents_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BATCH_CHARACTERS", 1)

    def documents():
        yield "a document that is written before the error"
        raise DataError("the file is gone")

    with pytest.raises(DataError, match="the file is gone"):
        pack(Corpus("a corpus", {"train": [Shelf(documents())]}, ""), "train", BYTES, cache=tmp_path)
    assert left_in(tmp_path) == [".lock"]


def test_a_split_without_documents_is_refused(tmp_path):
    with pytest.raises(DataError, match="a corpus has no documents in its valid split; name some with --valid"):
        pack(corpus_of(DOCUMENTS), "valid", BYTES, cache=tmp_path)
    assert left_in(tmp_path) == [".lock"]


SLOW = """
import sys, time
from pathlib import Path
from loopscope.data.corpora import Corpus, Documents, Shelf
from loopscope.data import packing
from loopscope.data.tokenizers import bytes_tokenizer

folder = Path(sys.argv[1])
packing.BATCH_CHARACTERS = 1

def documents():
    with (folder / "passes").open("a") as file:
        file.write("pass\\n")
    for number in range(int(sys.argv[2])):
        yield f"document {number}"
        time.sleep(0.01)

corpus = Corpus("slow", {"train": [Shelf(Documents(documents))]}, "0")
packed = packing.pack(corpus, "train", bytes_tokenizer(), cache=folder)
print(packed.manifest.documents, len(packed), packed[:].sum())
"""


def slow_packing(folder: Path, documents: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW, str(folder), str(documents)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_at_once_one_packs_and_the_other_waits_for_it(tmp_path):
    processes = [slow_packing(tmp_path, 60) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].startswith("60 ")
    assert (tmp_path / "passes").read_text() == "pass\n"
    assert left_in(tmp_path) == ["", ".lock"]


def test_a_process_killed_while_packing_leaves_no_cache_and_no_lock(tmp_path):
    process = slow_packing(tmp_path, 100_000)
    while not any((tmp_path / "tokens").glob("*.partial/tokens-00000.bin")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert left_in(tmp_path) == [".lock", ".partial"]
    successor = slow_packing(tmp_path, 3)
    assert successor.communicate(timeout=60)[0].startswith("3 ")
    assert left_in(tmp_path) == ["", ".lock"]


def test_every_field_of_the_manifest_is_documented(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    manifest = as_json(packed_in(tmp_path).manifest)
    nested = [manifest["token_bytes"], manifest["byte_exceptions"], *manifest["shards"]]
    for name in {*manifest, *(name for entry in nested for name in entry)}:
        assert f"`{name}`" in page, f"{name} is not in docs/data.md"


def test_the_manifest_counts_what_is_in_the_files(tmp_path):
    packed = packed_in(tmp_path, BPE)
    manifest = json.loads((packed.folder / "manifest.json").read_text())
    assert manifest == as_json(packed.manifest) and manifest["schema_version"] == 3
    (shard,) = manifest["shards"]
    stored = np.fromfile(packed.folder / shard["file"], dtype=manifest["dtype"])
    assert stored.tolist() == BPE.encode("\n\n".join(DOCUMENTS)) and shard["tokens"] == manifest["tokens"]
    assert (manifest["corpus_sha256"], manifest["tokenizer_sha256"]) == ("0" * 64, BPE.fingerprint)


@pytest.mark.parametrize("name", ["bytes", "documents", "tokens", "dtype", "split"])
def test_a_manifest_in_which_one_value_is_another_is_packed_again(name, tmp_path):
    """No file would tell: a wrong count of bytes is a wrong number of bits per byte."""
    packed = packed_in(tmp_path)
    path = packed.folder / "manifest.json"
    other = {"dtype": "<u4", "split": "valid"}.get(name, 7)
    path.write_text(json.dumps({**as_json(packed.manifest), name: other}))
    assert packed_in(tmp_path).manifest == packed.manifest
