"""Tokenizers: what round-trips, what counts as a word, how bytes are counted, and what is refused."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers, processors

from loopscope.data.tokenizers import (
    WORD_PATTERN,
    Tokenizer,
    bytes_tokenizer,
    fit_tokenizer,
    load_tokenizer,
    read_tokenizer,
    train_bpe,
    train_word,
)
from loopscope.errors import ConfigError, DataError

DOCUMENTS = [
    "The river runs to the sea, and the sea is not full.",
    "naïve café: the river\n  and the sea; naïve café.",
    "x_1 = f(x_0)  # the river, again",
] * 2
BYTES = bytes_tokenizer()
BPE = fit_tokenizer("bpe", DOCUMENTS, 300)
WORD = fit_tokenizer("word", DOCUMENTS, 1000)


@pytest.fixture(params=[BYTES, BPE, WORD], ids=lambda tokenizer: tokenizer.kind)
def tokenizer(request) -> Tokenizer:
    return request.param


def somebodys(**changes: object) -> Tokenizer:
    """The byte-pair tokenizer, changed in parts."""
    backend = Backend.from_str(BPE.definition)
    for name, value in changes.items():
        setattr(backend, name, value)
    return Tokenizer("file", backend.to_str())


@given(st.text())
def test_bytes_and_byte_pairs_round_trip_any_text(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text
    assert BPE.decode(BPE.encode(text)) == text


@given(st.lists(st.sampled_from(["the", "river", " ", ",", "café", "  ", "\n  "])))
def test_words_round_trip_text_made_of_known_words(words):
    text = ";".join(words)
    unknown = WORD.encode("zebra")[0]
    assert unknown not in WORD.encode(text)
    assert WORD.decode(WORD.encode(text)) == text


@given(st.text(st.characters(codec="ascii")))
def test_on_ascii_text_words_are_what_the_papers_pattern_finds(text):
    pieces = [piece for piece, _ in WORD.backend.pre_tokenizer.pre_tokenize_str(text)]
    assert pieces == re.findall(WORD_PATTERN, text)


@given(st.text())
def test_words_drop_no_character(text):
    pieces = [piece for piece, _ in WORD.backend.pre_tokenizer.pre_tokenize_str(text)]
    assert "".join(pieces) == text


def test_the_vocabulary_of_words_is_the_most_frequent_ones_seen_twice_in_order():
    documents = ["b a a, c", "a b c c_1 c_1 z"]
    counts = Counter(piece for document in documents for piece in re.findall(WORD_PATTERN, document))
    expected = sorted((piece for piece in counts if counts[piece] > 1), key=lambda piece: (-counts[piece], piece))
    assert expected == [" ", "a", "b", "c", "c_1"]
    for size in (4, 100):
        vocabulary = train_word(documents, size).backend.get_vocab()
        assert sorted(vocabulary, key=vocabulary.__getitem__) == ["<pad>", "<unk>", *expected][:size]


def test_the_name_of_the_unknown_token_in_a_text_is_three_words():
    word = train_word(["< unk > < unk >"], 10)
    assert word.decode(word.encode("<unk>")) == "<unk>"
    assert len(word.encode("<unk>")) == 3 and len(word.encode("zebra")) == 1


def test_the_blank_line_between_documents_is_a_known_word():
    word = fit_tokenizer("word", ["one", "two", "three"], 10)
    assert word.decode(word.encode("one\n\ntwo")) == "<unk>\n\n<unk>"


def test_training_twice_gives_the_same_tokenizer():
    for kind in ("bpe", "word"):
        assert fit_tokenizer(kind, DOCUMENTS, 300) == fit_tokenizer(kind, iter(DOCUMENTS), 300)


def test_an_error_in_the_documents_ends_the_training_with_that_error():
    def documents():
        yield "text"
        raise DataError("the file is gone")

    for kind in ("bpe", "word"):
        with pytest.raises(DataError, match="the file is gone"):
            fit_tokenizer(kind, documents(), 300)


@given(st.text())
def test_the_bytes_of_the_tokens_sum_to_the_bytes_of_the_text(text):
    composed = somebodys(normalizer=normalizers.NFD())
    spaced = somebodys(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    for tokenizer in (BYTES, BPE, WORD, composed, spaced):
        ((ids_N, bytes_N),) = tokenizer.encode_counted([text])
        assert ids_N.tolist() == tokenizer.encode(text)
        assert len(ids_N) == len(bytes_N)
        assert bytes_N.sum() == len(text.encode())
        assert (bytes_N >= 0).all()


def test_each_token_counts_the_bytes_it_stands_for():
    text = "the zebra, é漢 café"
    ((_, bytes_N),) = WORD.encode_counted([text])
    assert bytes_N.tolist() == [3, 1, 5, 1, 1, 5, 1, 3, 2]
    ((_, bytes_N),) = BYTES.encode_counted([text])
    assert bytes_N.tolist() == [1] * len(text.encode())
    ((ids_N, bytes_N),) = BPE.encode_counted(["the sea"])
    assert [len(BPE.decode([token])) for token in ids_N] == bytes_N.tolist()


def test_several_texts_are_counted_one_by_one(tokenizer):
    texts = ["the river", "", "naïve"]
    found = tokenizer.encode_counted(texts)
    assert [ids_N.tolist() for ids_N, _ in found] == [tokenizer.encode(text) for text in texts]


def test_a_saved_tokenizer_is_the_same_when_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert loaded == tokenizer and loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode("the naïve river") == tokenizer.encode("the naïve river")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["tokenizer-manifest.json", "tokenizer.json"]
    manifest = json.loads((tmp_path / "run" / "tokenizer-manifest.json").read_text())
    assert manifest["kind"] == tokenizer.kind and manifest["vocab_size"] == tokenizer.vocab_size


def test_a_tokenizer_changed_after_it_was_saved_is_refused(tmp_path):
    BPE.save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(WORD.definition)
    with pytest.raises(DataError, match="has changed since it was saved"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(BPE.definition[:100])
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_its_manifest_or_of_a_later_version_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read: No such file"):
        load_tokenizer(tmp_path)
    BPE.save(tmp_path)
    manifest = tmp_path / "tokenizer-manifest.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(DataError, match="does not fit at schema_version: expected 1, found 2"):
        load_tokenizer(tmp_path)
    manifest.unlink()
    with pytest.raises(DataError, match=r"tokenizer-manifest\.json is missing"):
        load_tokenizer(tmp_path)


def test_an_existing_tokenizer_is_named_by_its_file_or_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(BPE.definition)
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        found = fit_tokenizer(str(name), [], 300)
        assert found.kind == "file" and found.fingerprint == BPE.fingerprint
    BPE.save(tmp_path)
    assert fit_tokenizer(str(tmp_path), [], 300).kind == "bpe"


def test_somebody_elses_tokenizer_neither_truncates_nor_adds_tokens():
    backend = Backend.from_str(BPE.definition)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.post_processor = processors.TemplateProcessing(single="t $A t", special_tokens=[("t", BPE.encode("t")[0])])
    text = "the river runs to the sea"
    assert Tokenizer("file", backend.to_str()).encode(text) == BPE.encode(text)


def test_somebody_elses_special_tokens_count_their_own_bytes():
    backend = Backend.from_str(BPE.definition)
    backend.add_special_tokens(["<énd>"])
    ((ids_N, bytes_N),) = Tokenizer("file", backend.to_str()).encode_counted(["a<énd>b"])
    assert bytes_N.tolist() == [1, 6, 1] and ids_N[1] == 300


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path):
    BPE.save(tmp_path)
    for name, size in ((str(tmp_path), 299), ("bytes", 255)):
        with pytest.raises(ConfigError, match=rf"vocab_size = {size}: is smaller than the \d+ tokens"):
            fit_tokenizer(name, [], size)
    assert fit_tokenizer(str(tmp_path), [], 300) == BPE


def test_vocabularies_too_small_for_their_kind_are_refused():
    with pytest.raises(ConfigError, match="at least the 256 bytes"):
        train_bpe(["text"], 100)
    with pytest.raises(ConfigError, match="at least one word"):
        train_word(["text"], 2)


def test_a_name_that_is_no_tokenizer_is_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'word'"):
        fit_tokenizer("words", [], 300)
    with pytest.raises(ConfigError, match=r"no such file; name a tokenizer\.json or one of bytes, bpe, word"):
        fit_tokenizer("/nowhere/tokenizer.json", [], 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer\.json"):
        fit_tokenizer(str(tmp_path / "tokenizer.json"), [], 300)


def test_a_text_that_a_tokenizer_cannot_encode_is_one_sentence():
    definition = json.loads(WORD.definition)
    definition["model"]["vocab"] = {"the": 0}
    with pytest.raises(DataError, match=r"the tokenizer \(file\) cannot encode this text: .*Missing \[UNK\]"):
        Tokenizer("file", json.dumps(definition)).encode("zebra")


def test_byte_pairs_use_the_whole_vocabulary():
    assert BPE.vocab_size == 300
    assert len(BPE.encode(DOCUMENTS[0])) < len(DOCUMENTS[0].encode()) / 2


def test_a_token_id_that_would_need_gigabytes_is_refused(tmp_path):
    definition = json.loads(bytes_tokenizer().definition)
    definition["model"]["vocab"]["a"] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(DataError, match=r"has the token id 2,147,483,648; ids are below 16,777,216"):
        read_tokenizer(tmp_path / "tokenizer.json")
