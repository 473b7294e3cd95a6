"""Corpora: the built-in one, found without importing or downloading anything, and those that a configuration names."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from itertools import chain

import pytest

from loopscope.config import DataConfig
from loopscope.data import corpora
from loopscope.data.corpora import (
    SPLITS,
    Corpus,
    _clean,
    _docstrings,
    _library_files,
    builtin_corpus,
    joined,
    open_corpus,
    read_builtin,
)
from loopscope.errors import DataError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return builtin_corpus()


@pytest.fixture(scope="module")
def read_anew() -> tuple[list[str], set[str]]:
    """The documents of the built-in corpus, not remembered, and the modules that were imported to read them."""
    before = set(sys.modules)
    documents = read_builtin(_library_files())
    return documents, set(sys.modules) - before


def test_splits_share_no_document_and_no_document_repeats(corpus):
    everything = [document for documents in corpus.documents.values() for document in documents]
    assert len(everything) == len(set(everything))
    sizes = {split: sum(map(len, documents)) for split, documents in corpus.documents.items()}
    assert sizes["train"] > 5 * sizes["valid"] > 0 and sizes["test"] > 0
    assert sizes["train"] > 300_000


def test_the_hash_is_of_the_content_and_the_corpus_is_the_same_every_time(corpus, read_anew):
    assert builtin_corpus() == corpus, "remembered"
    assert read_anew[0] == sorted(chain(*corpus.documents.values())), "and read anew"
    everything = sorted(document for documents in corpus.documents.values() for document in documents)
    assert corpus.sha256 == hashlib.sha256("\0".join(everything).encode()).hexdigest()


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"sha256": "0", "documents": ["other text"]}', b"\xff"])
def test_what_is_remembered_of_the_built_in_corpus_is_checked_and_read_anew_where_it_is_damaged(
    monkeypatch, tmp_path, damage
):
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    module = tmp_path / "library" / "module.py"
    module.parent.mkdir()
    module.write_text(f'"""{"A docstring. " * 20}"""')
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: module.parent)
    fresh = builtin_corpus()
    assert any("A docstring." in document for document in chain(*fresh.documents.values()))
    (memory,) = (tmp_path / "cache" / "machine").iterdir()
    kept = memory.read_bytes()
    memory.write_bytes(damage)
    assert builtin_corpus() == fresh and memory.read_bytes() == kept
    module.write_text(f'"""{"Another text. " * 30}"""')
    assert builtin_corpus() != fresh, "a file that changed is read again"


def test_standard_library_modules_are_read_and_not_imported(read_anew):
    assert "antigravity" not in sys.modules and "turtle" not in sys.modules
    allowed = ("pydoc_data", "encodings.")  # the help topics, and the coding that a file declares
    assert not {name for name in read_anew[1] if not name.startswith(allowed)}


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


NESTED = """
if x:
    pass
else:
    async def g():
        'In an else.'
try:
    x
except E:
    for y in x:
        def f():
            'In a loop in a handler.'
finally:
    match x:
        case 1:
            class A:
                'In a case.'
"""


def test_docstrings_are_found_in_every_block(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text(NESTED)
    assert sorted(filter(None, _docstrings(path))) == ["In a case.", "In a loop in a handler.", "In an else."]


LINES = [f"line {number} of a small text" for number in range(400)]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES))
    return path


def splits(*data: str, valid: tuple[str, ...] | None = None) -> dict[str, list[str]]:
    corpus = open_corpus(DataConfig(data=data, valid=valid))
    return {split: list(corpus.documents(split)) for split in SPLITS}


def test_the_default_configuration_opens_the_built_in_corpus_as_it_is(corpus):
    opened = open_corpus(DataConfig())
    assert {split: list(opened.documents(split)) for split in SPLITS} == corpus.documents


def test_a_file_is_split_by_document_without_loss_or_overlap(lines):
    found = splits(str(lines))
    assert sorted(chain(*found.values())) == sorted(LINES)
    assert 300 < len(found["train"]) < 400 and found["valid"] and found["test"]
    assert found["train"] == [line for line in LINES if line in set(found["train"])]


def test_a_document_stays_in_its_split_when_others_come_and_go(lines):
    before = splits(str(lines))
    lines.write_text("\n".join(["something new", *LINES[100:]]))
    after = splits(str(lines))
    for split in SPLITS:
        assert set(before[split]) & set(LINES[100:]) == set(after[split]) & set(LINES[100:])


def test_named_validation_text_is_the_validation_split_and_nothing_is_held_out(lines, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("one\ntwo\n")
    assert splits(str(lines), valid=(str(other),)) == {"train": LINES, "valid": ["one", "two"], "test": []}


def test_the_built_in_corpus_as_validation_text_gives_its_validation_split(lines, corpus):
    assert splits(str(lines), valid=("builtin",))["valid"] == corpus.documents["valid"]


def test_documents_can_be_read_again_and_are_read_from_the_file_each_time(lines):
    documents = open_corpus(DataConfig(data=(str(lines),))).documents("train")
    assert list(documents) == list(documents)
    lines.unlink()
    with pytest.raises(DataError, match=r"lines\.txt is no longer there"):
        list(documents)


def test_the_hash_follows_the_content_and_not_the_place(lines, tmp_path):
    def digest(*data: object, **options: object) -> str:
        return open_corpus(DataConfig(data=tuple(map(str, data)), **options)).sha256

    copy = tmp_path / "copy.txt"
    copy.write_bytes(lines.read_bytes())
    assert digest(lines) == digest(copy)
    assert digest(lines) != digest(lines, copy)
    assert digest(lines) != digest(lines, valid=(str(copy),))
    copy.write_text("other")
    assert len({digest(lines), digest(copy), digest(lines, copy), digest(copy, lines)}) == 4


def test_several_sources_follow_one_another(lines, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "last"}')
    everything = chain(*splits(str(lines), str(other)).values())
    assert sorted(everything) == sorted([*LINES, "last"])


def test_joined_pieces_make_the_joined_text(corpus):
    documents = corpus.documents["valid"][:20]
    pieces = list(joined(documents))
    assert "".join(pieces) == "\n\n".join(documents)
    assert len(pieces) == 20 and pieces[0] == documents[0]


# --- articles --------------------------------------------------------------------------------------------------------

WIKI = """
 = First =

 Of rivers .

 = = Section = =

 More of rivers = water .
 = Second of two =
 Of stones .
"""


def articles_of(tmp_path, name, text, split="valid", valid=True):
    path = tmp_path / name
    path.write_text(text)
    config = DataConfig(data=(str(path),), valid=(str(path),) if valid else None)
    found = open_corpus(config).articles(split)
    return None if found is None else list(found)


def test_an_article_of_wikitext_begins_at_a_top_level_heading_and_at_no_other(tmp_path):
    first = [" = First =", " Of rivers .", " = = Section = =", " More of rivers = water ."]
    assert articles_of(tmp_path, "wiki.txt", WIKI) == [first, [" = Second of two =", " Of stones ."]]


def test_what_stands_before_the_first_heading_is_an_article_of_its_own(tmp_path):
    found = articles_of(tmp_path, "wiki.txt", " the end of another\n" + WIKI)
    assert [article[0] for article in found] == [" the end of another", " = First =", " = Second of two ="]


def test_lines_without_headings_are_of_articles_that_nobody_can_name(tmp_path):
    assert articles_of(tmp_path, "plain.txt", "a line\n= = only a section = =\nanother\n") is None


def test_lines_that_were_held_out_one_by_one_have_lost_their_articles(tmp_path):
    many = WIKI * 40
    assert articles_of(tmp_path, "wiki.txt", many, "valid", valid=False) is None
    assert articles_of(tmp_path, "wiki.txt", many, "train", valid=False) is None


def test_a_record_is_an_article_unless_records_are_the_lines_of_a_wiki(tmp_path):
    records = "\n".join(json.dumps({"text": text}) for text in ("one", "two\n\n = not alone = \nof two"))
    assert articles_of(tmp_path, "records.jsonl", records) == [["one"], ["two\n\n = not alone = \nof two"]]
    lines = "\n".join(json.dumps({"text": line + "\n"}) for line in WIKI.splitlines())
    assert [len(article) for article in articles_of(tmp_path, "lines.jsonl", lines)] == [4, 2]


def test_articles_of_several_sources_never_run_into_one_another(tmp_path):
    (tmp_path / "wiki.txt").write_text(WIKI)
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "a record"}))
    names = tuple(str(tmp_path / name) for name in ("wiki.txt", "more.jsonl"))
    corpus = open_corpus(DataConfig(data=names, valid=names))
    assert [len(article) for article in corpus.articles("valid")] == [4, 2, 1]
    (tmp_path / "plain.txt").write_text("a line\n")
    names = (*names, str(tmp_path / "plain.txt"))
    assert open_corpus(DataConfig(data=names, valid=names)).articles("valid") is None
