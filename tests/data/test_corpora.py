"""The built-in corpus: real text, found without importing or downloading anything."""

from __future__ import annotations

import ast
import hashlib
import sys

import pytest

from loopscope.data.corpora import Corpus, _clean, _docstrings, builtin_corpus
from loopscope.data.tokenizers import train_bpe
from loopscope.errors import ConfigError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return builtin_corpus()


def test_splits_share_no_document_and_no_document_repeats(corpus):
    everything = [document for documents in corpus.documents.values() for document in documents]
    assert len(everything) == len(set(everything))
    sizes = {split: sum(map(len, documents)) for split, documents in corpus.documents.items()}
    assert sizes["train"] > 5 * sizes["valid"] > 0 and sizes["test"] > 0
    assert sizes["train"] > 300_000


def test_the_hash_is_of_the_content_and_the_corpus_is_the_same_every_time(corpus):
    again = builtin_corpus()
    assert again == corpus
    everything = sorted(document for documents in corpus.documents.values() for document in documents)
    assert corpus.sha256 == hashlib.sha256("\0".join(everything).encode()).hexdigest()


def test_standard_library_modules_are_read_and_not_imported():
    before = set(sys.modules)
    builtin_corpus()
    assert "antigravity" not in sys.modules and "turtle" not in sys.modules
    assert not {name for name in set(sys.modules) - before if not name.startswith("pydoc_data")}


def test_documents_are_clean_text(corpus):
    for document in corpus.documents["valid"]:
        assert document == document.strip("\n")
        assert "\n\n\n" not in document
        assert document.encode("utf-8")


def test_cleaning_removes_indentation_and_runs_of_blank_lines():
    assert _clean("Title\n\n\n\n    body   \n      more\n\n") == "Title\n\nbody\n  more"


def test_a_file_that_does_not_parse_has_no_docstrings(tmp_path):
    for content in (b"def broken(:", b"\x00\x01", b"\xff\xfe"):
        path = tmp_path / "broken.py"
        path.write_bytes(content)
        assert list(_docstrings(path)) == []
    path.write_text('"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n')
    assert list(_docstrings(path)) == ["Module.", "Class.", "Method."]
    assert ast.get_docstring(ast.parse(path.read_text())) == "Module."


def test_byte_pairs_round_trip_any_text_and_use_the_whole_vocabulary(corpus):
    tokenizer = train_bpe(corpus.documents["train"][:200], 300)
    assert tokenizer.get_vocab_size() == 300
    for text in ("plain words", "  spaces\tand\nlines ", "naïve café 漢字 🙂", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least the 256 bytes"):
        train_bpe(["text"], 100)
