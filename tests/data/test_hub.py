"""Hugging Face datasets, on local folders in the Hub's layout: the same code path, offline."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from loopscope.config import DataConfig
from loopscope.data.corpora import SPLITS, open_corpus
from loopscope.data.hub import choose_streaming
from loopscope.errors import DataError, UnsupportedError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def make(tmp_path):
    def make(**splits: list[str]) -> str:
        folder = tmp_path / "dataset"
        folder.mkdir(exist_ok=True)
        for split, documents in splits.items():
            records = [json.dumps({"id": number, "text": text}) for number, text in enumerate(documents)]
            (folder / f"{split}.jsonl").write_text("\n".join(records))
        return f"hf:{folder}"

    return make


def splits(name: str, **options: object) -> dict[str, list[str]]:
    corpus = open_corpus(DataConfig(data=(name,), **options))
    return {split: list(corpus.documents(split)) for split in SPLITS}


TRAIN = [f"training document {number}" for number in range(300)]


def test_a_dataset_keeps_its_own_splits(make):
    name = make(train=[*TRAIN, " ", ""], validation=["v \n"], test=["t1", "t2"])
    assert splits(name) == {"train": TRAIN, "valid": ["v"], "test": ["t1", "t2"]}


def test_only_the_splits_a_dataset_lacks_are_held_out_of_its_training_documents(make):
    found = splits(make(train=TRAIN, validation=["v"]))
    assert found["valid"] == ["v"]
    assert found["test"] and sorted(found["train"] + found["test"]) == sorted(TRAIN)
    assert found["test"] == splits(make(train=TRAIN))["test"]


def test_as_validation_text_a_dataset_gives_its_validation_split(make, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("line")
    assert splits(str(text), valid=(make(train=TRAIN, validation=["v"]),))["valid"] == ["v"]


def test_streamed_and_prepared_datasets_give_the_same_documents_and_hash(make):
    name = make(train=TRAIN, validation=["v"], test=["t"])
    streamed = open_corpus(DataConfig(data=(name,)))
    assert streamed.choices[0].value is True
    datasets.load_dataset_builder(name.removeprefix("hf:")).download_and_prepare()
    prepared = open_corpus(DataConfig(data=(name,)))
    assert prepared.choices[0].value is False and "already prepared" in prepared.choices[0].reason
    assert prepared.sha256 == streamed.sha256
    for split in SPLITS:
        assert list(prepared.documents(split)) == list(streamed.documents(split)) == list(streamed.documents(split))


def test_the_hash_changes_with_the_files_and_the_field(make):
    before = open_corpus(DataConfig(data=(make(train=TRAIN),))).sha256
    assert open_corpus(DataConfig(data=(make(),), text_field="id")).sha256 != before
    assert open_corpus(DataConfig(data=(make(train=TRAIN[:-1]),))).sha256 != before


@pytest.mark.parametrize(("size", "streams"), [(10**3, False), (10**17, True)])
def test_what_does_not_fit_is_streamed_and_the_reason_gives_both_sizes(size, streams, tmp_path):
    info = SimpleNamespace(download_size=size, dataset_size=size)
    choice = choose_streaming(SimpleNamespace(cache_dir=str(tmp_path / "a" / "b"), info=info))
    assert choice.value is streams
    assert f"needs {2 * size / 1e9:.1f} GB of" in choice.reason


def test_a_wrong_field_is_told_with_the_fields_there_are(make):
    with pytest.raises(DataError, match=r"train record 1: no field 'body'; it has 'id', 'text'"):
        splits(make(train=["a"]), text_field="body")


def test_a_dataset_or_configuration_that_does_not_exist_is_one_sentence(make, tmp_path):
    with pytest.raises(DataError, match=r"hf:.*nowhere cannot be opened: .*nowhere"):
        splits(f"hf:{tmp_path}/nowhere")
    with pytest.raises(DataError, match=r":other cannot be opened: .*'other' not found. Available: \['default'\]"):
        splits(make(train=["a"]) + ":other")


def test_a_dataset_without_training_documents_is_refused_as_training_text(make):
    with pytest.raises(DataError, match="has no train split; it has test"):
        splits(make(test=["a"]))


def test_a_file_that_vanishes_between_passes_is_one_sentence(make):
    name = make(train=TRAIN)
    documents = open_corpus(DataConfig(data=(name,))).documents("train")
    assert list(documents)
    (Path(name.removeprefix("hf:")) / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"train cannot be read: .*train\.jsonl"):
        list(documents)


def test_a_missing_library_is_named_with_the_command_that_installs_it(make, monkeypatch):
    name = make(train=["a"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnsupportedError, match=r"needs datasets; run: pip install 'loopscope\[hf\]'"):
        splits(name)


def test_a_number_behind_the_configuration_reads_only_so_many_documents_and_streams_them(make):
    whole = make(train=TRAIN)
    corpus = open_corpus(DataConfig(data=(f"{whole}::40",)))
    read = [document for split in SPLITS for document in corpus.documents(split)]
    assert sorted(read) == sorted(TRAIN[:40]) and list(corpus.documents("valid"))
    (streaming,) = corpus.choices
    assert streaming.value is True and "first 40 documents" in streaming.reason
    hashes = {open_corpus(DataConfig(data=(f"{whole}{part}",))).sha256 for part in ("", "::40", "::41")}
    assert len(hashes) == 3, "another part is another corpus"


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5"])
def test_a_part_that_is_no_number_is_refused_by_name(make, count):
    with pytest.raises(DataError, match="is not a number of documents"):
        open_corpus(DataConfig(data=(f"{make(train=TRAIN)}::{count}",)))
