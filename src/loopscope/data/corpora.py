"""Corpora. `builtin` is the running interpreter's own documentation: real English, on every machine, offline."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "valid", "test"]

MIN_CHARACTERS = 80
"""Shorter documents are mostly signatures."""
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Documents by split, and the hash of them all."""

    name: str
    documents: dict[Split, list[str]]
    sha256: str

    def text(self, split: Split) -> str:
        """The documents of a split, joined with a blank line."""
        return "\n\n".join(self.documents[split])


def builtin_corpus() -> Corpus:
    """Help topics and standard-library docstrings, cleaned, deduplicated, and split by document.

    A document's split follows from its own hash, so it does not move when others come or go.
    """
    documents = sorted({clean for raw in _raw_documents() if len(clean := _clean(raw)) >= MIN_CHARACTERS})
    by_split: dict[Split, list[str]] = {"train": [], "valid": [], "test": []}
    for document in documents:
        by_split[_split_of(document)].append(document)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Corpus("builtin", by_split, digest)


def _raw_documents() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts):
            yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    """Docstrings of a source file, found without importing it; a file that does not parse has none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""


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
