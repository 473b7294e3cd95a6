"""Corpora: the built-in one, files, and Hugging Face datasets, as documents by split; and tasks, which have no end.

`builtin` is the running interpreter's own documentation: real English, on every machine, offline.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from loopscope.config import DataConfig
from loopscope.data.files import find_files
from loopscope.data.hub import open_dataset
from loopscope.data.task import Task
from loopscope.data.tasks import is_task, open_task
from loopscope.errors import ConfigError, DataError
from loopscope.machine import memory_of, recall, remember
from loopscope.results.record import Choice

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

SEPARATOR = "\n\n"
"""Documents are joined with a blank line."""
MOST_PIECE = 1 << 20
"""Characters that a tokenizer is given at once."""
MIN_CHARACTERS = 80
"""Shorter documents of the built-in corpus are mostly signatures."""
BUILTIN_FORMAT = 1
"""Counts up when other documents come out of the same files: what was remembered before is then forgotten."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})
HEADING = re.compile(r" ?= (?!= )\S.*(?<! =) =")
"""A top-level heading as WikiText writes it, ` = Title =`; a deeper one is ` = = Section = =`."""
PEEKED = 1000
"""Documents among which a heading is looked for: a text of articles under headings has many in so many lines."""
HUB_SPLITS: dict[Split, str] = {"train": "train", "valid": "validation", "test": "test"}


@dataclass(frozen=True)
class Documents:
    """Documents that are read anew on every pass and never all held in memory."""

    read: Callable[[], Iterator[str]]

    def __iter__(self) -> Iterator[str]:
        return self.read()


@dataclass(frozen=True)
class Shelf:
    """The documents of one source in one split, and what they are to articles."""

    documents: Iterable[str]
    of_lines: bool = False
    """Whether a document is a line of a text file, and so only a part of whatever it belongs to."""
    is_scattered: bool = False
    """Whether the split was held out document by document: those that stand side by side were no neighbours."""

    def articles(self) -> Iterator[list[str]] | None:
        """The documents of each article; None where it cannot be told where articles begin.

        Among lines an article begins at a top-level heading, as in WikiText; what comes before the first is one too.
        Records are often lines themselves (WikiText on the hub): headings among the first tell. Any other record is an
        article. Lines without headings, and lines that were held out one by one, are of articles nobody can name.
        """
        has_headings = any(map(HEADING.fullmatch, islice(self.documents, PEEKED)))
        if not (self.of_lines or has_headings):
            return ([document] for document in self.documents)
        return _headed(self.documents) if has_headings and not self.is_scattered else None


def _headed(documents: Iterable[str]) -> Iterator[list[str]]:
    article: list[str] = []
    for document in documents:
        if article and HEADING.fullmatch(document):
            yield article
            article = []
        article.append(document)
    if article:
        yield article


@dataclass(frozen=True)
class Source:
    """What one word of `data` names: documents, in the splits that it has itself."""

    name: str
    documents: Mapping[Split, Iterable[str]]
    sha256: str
    choices: tuple[Choice, ...] = ()
    """Automatic choices that were made to open it."""
    of_lines: bool = False
    """Whether its documents are lines of text files."""

    def shelf(self, split: Split, *, hold_out: bool) -> Shelf:
        """Its documents of a split; where `hold_out`, splits that it lacks are taken out of its training documents."""
        own = self.documents
        is_whole = not hold_out or (split in own if split != "train" else set(SPLITS) <= set(own))
        return Shelf(Documents(partial(self._of_split, split, hold_out)), self.of_lines, not is_whole)

    def _of_split(self, split: Split, hold_out: bool) -> Iterator[str]:
        own = self.documents
        if split == "train" and "train" not in own:
            raise DataError(f"{self.name} has no train split; it has {', '.join(own)}")
        if not hold_out or (split in own and split != "train"):
            yield from own.get(split, ())
            return
        for document in own.get("train", ()):
            chosen = _split_of(document)
            if (chosen if chosen not in own else "train") == split:
                yield document

    def as_validation(self) -> Shelf:
        """All that a source named by `valid` is meant to give: its validation split, else everything."""
        own = self.documents
        read = Documents(lambda: iter(own.get("valid") or own.get("train") or own["test"]))
        return Shelf(read, self.of_lines)


@dataclass(frozen=True)
class Corpus:
    """The documents of some sources by split, and the hash of them all; or a task.

    Documents do not end in white space and are not empty.
    """

    name: str
    shelves: Mapping[Split, Sequence[Shelf]]
    """The documents source by source."""
    sha256: str
    choices: tuple[Choice, ...] = ()
    task: Task | None = None
    """What generates it, instead of documents."""

    def documents(self, split: Split) -> Documents:
        """The documents of a split."""
        shelves = self.shelves.get(split, ())
        return Documents(lambda: chain.from_iterable(shelf.documents for shelf in shelves))

    def articles(self, split: Split) -> Iterator[list[str]] | None:
        """The documents of each article of a split, in order; None where some source does not tell its articles."""
        found = [shelf.articles() for shelf in self.shelves[split]]
        return None if None in found else chain.from_iterable(each for each in found if each is not None)


def joined(documents: Iterable[str]) -> Iterator[str]:
    """The joined text in pieces: every document but the first opens with the blank line.

    A token never reaches back over the white space that opens a piece, since no document ends in white space, so the
    tokens of the pieces are the tokens of the joined text. A blank line by itself would be other tokens.
    """
    for number, document in enumerate(documents):
        yield from pieces_of(SEPARATOR + document if number else document)


def pieces_of(text: str) -> Iterator[str]:
    """A text in pieces of at most MOST_PIECE characters, all but the first opening with white space.

    A tokenizer holds some eighty bytes for each character it is given at once. Where so many characters hold no white
    space, they are cut where they come, and the tokens at the cut may differ from those of the whole text.
    """
    start = 0
    while len(text) - start > MOST_PIECE:
        end = start + MOST_PIECE
        cut = max(text.rfind(blank, start + 1, end) for blank in (" ", "\n", "\t"))
        while cut > start + 1 and text[cut - 1].isspace():
            cut -= 1
        if cut > start and not text[cut - 1].isspace():
            end = cut
        yield text[start:end]
        start = end
    yield text[start:]


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that `data` and `valid` name, always with all three splits.

    A split that a source does not have is held out of its training documents by hash, unless `valid` is given: then
    nothing is held out, and a test split exists only where a source has its own.
    """
    if any(map(is_task, (*config.data, *(config.valid or ())))):
        return _task_corpus(config)
    sources = [_source(name, config.text_field) for name in config.data]
    others = [_source(name, config.text_field) for name in config.valid or ()]
    hold_out = config.valid is None
    shelves = {split: [source.shelf(split, hold_out=hold_out) for source in sources] for split in SPLITS}
    if not hold_out:
        shelves["valid"] = [other.as_validation() for other in others]
    hashes = [[source.sha256 for source in group] for group in (sources, others)]
    digest = hashlib.sha256(json.dumps([hashes, hold_out]).encode()).hexdigest()
    choices = tuple(choice for source in (*sources, *others) for choice in source.choices)
    return Corpus(" + ".join(config.data), shelves, digest, choices)


def _task_corpus(config: DataConfig) -> Corpus:
    """A task, whose splits are its own; it stands alone, since text of other kinds has no steps."""
    if len(config.data) > 1 or config.valid not in (None, config.data):
        others = [name for name in (*config.data, *(config.valid or ())) if not is_task(name)]
        beside = f"{others[0]} beside it" if others else "two of them"
        raise ConfigError.of(
            "data", config.data, f"a task brings its own validation text and stands alone, not {beside}"
        )
    task = open_task(config.data[0])
    return Corpus(task.word, {}, task.sha256, task=task)


def builtin_corpus() -> Source:
    """Help topics and standard-library docstrings, cleaned, deduplicated, and split by document.

    A document's split follows from its own hash, so it does not move when others come or go. Parsing the standard
    library takes seconds, so the documents are remembered for as long as its files stay the same.
    """
    files = list(_library_files())
    stamps = [[str(path), (status := path.stat()).st_size, status.st_mtime_ns] for path in files]
    memory = memory_of("builtin", BUILTIN_FORMAT, stamps)
    documents = _intact_documents(recall(memory))
    if documents is None:
        documents = read_builtin(files)
        remember(memory, {"schema_version": 1, "sha256": _digest(documents), "documents": documents})
    by_split: dict[Split, list[str]] = {"train": [], "valid": [], "test": []}
    for document in documents:
        by_split[_split_of(document)].append(document)
    return Source("builtin", by_split, _digest(documents))


def _source(name: str, text_field: str) -> Source:
    """The source of a name: the built-in corpus, a dataset, or files."""
    if name == "builtin":
        return builtin_corpus()
    if name.startswith("hf:"):
        dataset = open_dataset(name, text_field)
        own = {split: theirs for split, theirs in HUB_SPLITS.items() if theirs in dataset.splits}
        if not own:
            has = ", ".join(dataset.splits)
            raise DataError(f"{name} has none of the splits train, validation and test; it has {has}")
        documents = {split: Documents(partial(dataset.documents, theirs)) for split, theirs in own.items()}
        return Source(name, documents, dataset.sha256, (dataset.streaming,))
    files = find_files(name, text_field)
    contents = [[file.kind, file.compression, file.text_field, file.sha256] for file in files]
    digest = hashlib.sha256(json.dumps(contents).encode()).hexdigest()
    of_lines = any(file.kind == ".txt" for file in files)
    everything = Documents(lambda: chain.from_iterable(file.documents() for file in files))
    return Source(name, {"train": everything}, digest, of_lines=of_lines)


def _library_files() -> Iterator[Path]:
    """Source files of the standard library. Folders to skip are not entered: the tests alone are half of it."""
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = sorted(name for name in inside if name not in SKIPPED_FOLDERS)
        paths = (Path(folder, name) for name in sorted(names) if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())  # not a link that leads nowhere


def read_builtin(files: Iterable[Path]) -> list[str]:
    """The documents of the built-in corpus, in order: help topics, and the docstrings of these files."""
    from pydoc_data.topics import topics

    raw = chain(topics.values(), chain.from_iterable(map(_docstrings, files)))
    return sorted({clean for text in raw if len(clean := _clean(text)) >= MIN_CHARACTERS})


def _intact_documents(remembered: object) -> list[str] | None:
    match remembered:
        case {"sha256": str(digest), "documents": [*documents]} if all(isinstance(one, str) for one in documents):
            return documents if _digest(documents) == digest else None
    return None


def _digest(documents: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a source file, found without importing it; a file that does not parse has none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            waiting: deque[ast.AST] = deque([ast.parse(path.read_bytes())])
    except (SyntaxError, ValueError, OSError):
        return
    while waiting:  # ast.walk would enter every expression, and no expression holds a docstring
        node = waiting.popleft()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(inside := getattr(node, name, None), list):
                waiting.extend(inside)


def _clean(raw: str) -> str:
    """Valid UTF-8 without indentation, trailing spaces, or runs of blank lines."""
    text = raw.encode("utf-8", "replace").decode("utf-8")
    lines = (line.rstrip() for line in inspect.cleandoc(text).splitlines())
    return "\n\n".join(block.strip("\n") for block in "\n".join(lines).split("\n\n") if block.strip())


def _split_of(document: str) -> Split:
    bucket = hashlib.sha256(document.encode()).digest()[0]
    if bucket < 230:
        return "train"
    return "valid" if bucket < 243 else "test"
