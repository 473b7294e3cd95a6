"""Packing: the tokens of a split, written once into memory-mapped shards and found again by what they depend on.

A packed split is a folder named by the hash of its corpus, split, tokenizer and this format: complete or absent. It
also knows how many bytes of text any run of its tokens stands for, so that bits per byte is exact.

Shape legend: N tokens, V vocabulary, E exceptions.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from loopscope.data.corpora import Corpus, Split, joined
from loopscope.data.task import TaskText
from loopscope.data.tokenizers import Tokenizer
from loopscope.errors import DataError, RunError
from loopscope.files import sha256_of, sync_folder
from loopscope.machine import cache_folder
from loopscope.results.record import Count, encode, load_record, text_of

FORMAT = 3
"""Of packed tokens: those of another are packed again."""
SHARD_TOKENS = 1 << 27
"""Tokens of a full shard."""
BATCH_CHARACTERS = 1 << 20
"""Characters tokenized at once; the library uses all cores on such a batch."""
READ_TOKENS = 1 << 20
"""Tokens read at once when bytes are counted."""
MANIFEST_FILE = "manifest.json"
TOKEN_TYPES = ("<u2", "<u4")
EXCEPTION = np.dtype("<i8")

OnProgress = Callable[[int, int], None]
"""Called after each batch of BATCH_CHARACTERS with the documents and tokens packed so far."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """A file beside the manifest."""

    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard(PackedFile):
    """Some of the tokens."""

    tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedManifest:
    """manifest.json of packed tokens: what they depend on, and what whoever reads them relies on."""

    schema_version: Literal[3] = 3
    corpus: str
    corpus_sha256: str
    split: Split
    tokenizer: str
    tokenizer_sha256: str
    dtype: Literal["<u2", "<u4"]
    tokens: Count
    documents: Count
    bytes: Count
    shards: list[Shard]
    token_bytes: PackedFile
    byte_exceptions: PackedFile
    sha256: str = ""
    """Of everything else in it: a flipped digit of a count is noticed too."""

    def digest(self) -> str:
        """What `sha256` should be."""
        return hashlib.sha256(encode(replace(self, sha256=""))).hexdigest()


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a split on disk. `len` and slices work as on an array; a slice is read when it is asked for."""

    folder: Path
    manifest: PackedManifest

    @property
    def corpus(self) -> str:
        """Name of the text."""
        return self.manifest.corpus

    @property
    def corpus_sha256(self) -> str:
        """Its hash."""
        return self.manifest.corpus_sha256

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the joined text."""
        return self.manifest.bytes

    def __len__(self) -> int:
        return self.manifest.tokens

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(len(self))
        assert step == 1, "packed tokens are read in runs"
        first, last = np.searchsorted(self._starts, (start, stop - 1), side="right") - 1
        shards = zip(self._shards[first : last + 1], self._starts[first : last + 1], strict=True)
        parts = [shard[max(start - begin, 0) : max(stop - begin, 0)] for shard, begin in shards]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.manifest.dtype)

    def bytes_between(self, start: int, stop: int) -> int:
        """UTF-8 bytes of the text behind tokens start … stop − 1."""
        total = 0
        for first in range(start, stop, READ_TOKENS):
            total += int(self._bytes_V[self[first : min(first + READ_TOKENS, stop)]].sum())
        first, last = np.searchsorted(self._exceptions_E2[:, 0], (start, stop))
        return total + int(self._exceptions_E2[first:last, 1].sum())

    @cached_property
    def _shards(self) -> list[np.ndarray]:
        dtype = np.dtype(self.manifest.dtype)
        return [_mapped(self.folder / shard.file, dtype) for shard in self.manifest.shards]

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(shard.tokens for shard in self.manifest.shards[:-1])])

    @cached_property
    def _bytes_V(self) -> np.ndarray:
        return _mapped(self.folder / self.manifest.token_bytes.file, EXCEPTION)

    @cached_property
    def _exceptions_E2(self) -> np.ndarray:
        return _mapped(self.folder / self.manifest.byte_exceptions.file, EXCEPTION).reshape(-1, 2)


SplitTokens = PackedTokens | TaskText
"""A split in the tokens of a run: packed text, or a task, which is generated as it is read."""


def pack(
    corpus: Corpus,
    split: Split,
    tokenizer: Tokenizer,
    *,
    cache: Path | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> PackedTokens:
    """The tokens of a split, from the cache where they are there and intact, else packed now.

    Of several processes that ask at once one packs and the others wait for it.
    """
    root = cache_folder(cache) / "tokens"
    folder = root / _key(corpus, split, tokenizer)
    with _told(root):
        root.mkdir(parents=True, exist_ok=True)
        packed = _intact(folder)
        if packed is None:
            with _locked(folder.with_suffix(".lock")):
                packed = _intact(folder) or _build(folder, corpus, split, tokenizer, on_progress)
    return packed


def _key(corpus: Corpus, split: Split, tokenizer: Tokenizer) -> str:
    parts = [FORMAT, corpus.sha256, split, tokenizer.fingerprint]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _intact(folder: Path) -> PackedTokens | None:
    """The packed tokens in a folder; None when there are none, or when a file is not as its checksum says."""
    try:
        manifest = load_record(folder / MANIFEST_FILE, PackedManifest)
        return PackedTokens(folder, manifest) if _fits(folder, manifest) else None
    except (OSError, RunError):
        return None


def _fits(folder: Path, manifest: PackedManifest) -> bool:
    """Whether the manifest is as it was written, and every file what it says."""
    shards, files = manifest.shards, [*manifest.shards, manifest.token_bytes, manifest.byte_exceptions]
    if manifest.sha256 != manifest.digest() or any(Path(entry.file).name != entry.file for entry in files):
        return False
    sizes = [(folder / shard.file).stat().st_size // np.dtype(manifest.dtype).itemsize for shard in shards]
    counted = sizes == [shard.tokens for shard in shards] and sum(sizes) == manifest.tokens
    return counted and all(sha256_of(folder / entry.file) == entry.sha256 for entry in files)


def _build(folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, on_progress: OnProgress) -> PackedTokens:
    """Pack into a folder beside, then rename it: whatever happens in between leaves nothing at `folder`."""
    if folder.exists():
        _log.warning("the packed tokens in %s are damaged; packing them again", folder)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        manifest = _write(partial, corpus, split, tokenizer, on_progress)
        sync_folder(partial)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would not be packed again
        partial.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return PackedTokens(folder, manifest)


def _write(folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer, on_progress: OnProgress) -> PackedManifest:
    with _Writer(folder, tokenizer.vocab_size) as writer:

        def counted() -> Iterator[str]:
            for document in corpus.documents(split):
                writer.documents += 1
                yield document

        for texts in _batches(joined(counted())):
            for ids_N, bytes_N in tokenizer.encode_counted(texts):
                writer.add(ids_N, bytes_N)
            on_progress(writer.documents, writer.tokens)
    if not writer.tokens:
        remedy = "; name some with --valid" if split == "valid" else ""
        raise DataError(f"{corpus.name} has no documents in its {split} split{remedy}")
    manifest = writer.manifest(corpus, split, tokenizer)
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        file.write(text_of(manifest))
        file.flush()
        os.fsync(file.fileno())
    return manifest


class _Writer:
    """Writes shards, the bytes of each token of the vocabulary, and the places where a token stood for other bytes.

    Most tokens stand for the same bytes wherever they occur: what the first occurrence had goes into a table, and only
    occurrences that differ from it (unknown words, mostly) are written one by one.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.documents = self.tokens = self.bytes = 0
        self._folder = folder
        self._dtype = np.dtype(TOKEN_TYPES[vocab_size > 1 << 16])
        self._bytes_V = np.full(vocab_size, -1, dtype=EXCEPTION)
        self._exceptions = _HashedFile(folder / "byte-exceptions.bin")
        self._shards: list[_HashedFile] = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._exceptions, *self._shards[-1:]):
            file.close()

    def add(self, ids_N: np.ndarray, bytes_N: np.ndarray) -> None:
        """Append a document, or a piece of one."""
        new_N = self._bytes_V[ids_N] < 0
        self._bytes_V[ids_N[new_N]] = bytes_N[new_N]
        excess_N = bytes_N - self._bytes_V[ids_N]
        where_E = np.flatnonzero(excess_N)
        self._exceptions.write(np.stack([self.tokens + where_E, excess_N[where_E]], axis=1).astype(EXCEPTION))
        self.bytes += int(bytes_N.sum())
        while len(ids_N):
            room = SHARD_TOKENS - self.tokens % SHARD_TOKENS
            if room == SHARD_TOKENS:
                for full in self._shards[-1:]:
                    full.close()
                self._shards.append(_HashedFile(self._folder / f"tokens-{len(self._shards):05d}.bin"))
            self._shards[-1].write(ids_N[:room].astype(self._dtype))
            self.tokens += len(ids_N[:room])
            ids_N = ids_N[room:]

    def manifest(self, corpus: Corpus, split: Split, tokenizer: Tokenizer) -> PackedManifest:
        """What was written; to be asked once the writer is closed."""
        table = _HashedFile(self._folder / "token-bytes.bin")
        table.write(np.maximum(self._bytes_V, 0))
        table.close()
        shards = [
            Shard(file=each.name, sha256=each.sha256, tokens=each.size // self._dtype.itemsize) for each in self._shards
        ]
        manifest = PackedManifest(
            corpus=corpus.name,
            corpus_sha256=corpus.sha256,
            split=split,
            tokenizer=tokenizer.kind,
            tokenizer_sha256=tokenizer.fingerprint,
            dtype="<u4" if self._dtype.itemsize == 4 else "<u2",
            tokens=self.tokens,
            documents=self.documents,
            bytes=self.bytes,
            shards=shards,
            token_bytes=PackedFile(file=table.name, sha256=table.sha256),
            byte_exceptions=PackedFile(file=self._exceptions.name, sha256=self._exceptions.sha256),
        )
        return replace(manifest, sha256=manifest.digest())


class _HashedFile:
    """A file that is hashed while it is written and on disk once it is closed."""

    def __init__(self, path: Path) -> None:
        self.size, self.name = 0, path.name
        self._file = path.open("wb")
        self._hash = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def close(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def sha256(self) -> str:
        """Hash of what was written."""
        return self._hash.hexdigest()


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The file as an array; an empty file cannot be mapped."""
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock; a dead process does not hold it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _told(root: Path) -> Iterator[None]:
    """What can go wrong with the cache, as one sentence that names it."""
    try:
        yield
    except OSError as error:
        other = "set LOOPSCOPE_CACHE to a folder elsewhere"
        if error.errno == errno.ENOSPC:
            raise DataError(f"no space left for packed tokens in {root}; free some, or {other}") from None
        raise DataError(f"cannot keep packed tokens in {root}: {error.strerror or error}; {other}") from None
