"""Documents in files: .txt, .jsonl and .parquet, each plain, .gz or .zst, read one document at a time.

A line of a .txt file is a document, as a record of the others is. Text whose line breaks matter belongs in the others.

A document is held in memory, a file never is: what one document, and one compressed file, may come to is bounded.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import io
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loopscope.data.tasks import is_task, open_task
from loopscope.errors import DataError, UnsupportedError
from loopscope.files import in_bytes, open_file

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
MOST_FIELDS = 20
"""Names of a record that an error shows."""
CHUNK = 1 << 17
"""Compressed bytes read at once."""
ZSTD_STEP = 1 << 10
"""Compressed bytes unpacked at once: a block of four bytes may stand for 128 kB, so this many for 32 MB at most."""
MOST_DOCUMENT_BYTES = 128 << 20
"""Longest line or document; the longest that are in use, whole encyclopedias in one line, have 100 MB."""
MOST_TIMES, ALWAYS_ALLOWED = 100, 1 << 30
"""A compressed file may unpack to so many times its size, and always to 1 GB: text packs 3 to 10 times, bombs 1,000."""


@dataclass(frozen=True)
class TextFile:
    """A file of documents as it was when the corpus was opened."""

    path: Path
    kind: str
    """One of KINDS."""
    compression: str
    """One of COMPRESSIONS, or empty."""
    text_field: str
    sha256: str
    """Of the bytes of the file."""
    stamp: tuple[int, int]
    """Size and time of change; a pass over a file that has changed since would not be the same corpus."""

    def documents(self) -> Iterator[str]:
        """The documents that are not blank, without trailing white space."""
        empty = True
        with _told(self.path):
            if _stamp(self.path) != self.stamp:
                raise DataError(f"{self.path} has changed since the corpus was opened; start again")
            for document in self._rows() if self.kind == ".parquet" else self._lines():
                if document := document.rstrip():
                    empty = False
                    yield document
        if empty:
            raise DataError(f"{self.path} holds no text")

    def _lines(self) -> Iterator[str]:
        with self._open() as stream:
            lines = iter(lambda: stream.readline(MOST_DOCUMENT_BYTES + 1), b"")
            for number, raw in enumerate(lines, 1):
                if len(raw) > MOST_DOCUMENT_BYTES:
                    raise _too_long(f"{self.path}, line {number}")
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = f"byte {error.start + 1} (0x{raw[error.start]:02x})"
                    raise DataError(f"{self.path}, line {number}: {byte} is not UTF-8") from None
                yield line if self.kind == ".txt" else self._text_of_line(line, number)

    def _text_of_line(self, line: str, number: int) -> str:
        if not line.strip():
            return ""
        try:
            record = json.loads(line, parse_int=float)  # only text is wanted, and a float takes any number of digits
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.path}, line {number}: not JSON ({first_line(error)})") from None
        if not isinstance(record, dict):
            raise DataError(f"{self.path}, line {number}: a record is a JSON object, this is a {_json_kind(record)}")
        return text_of(record, self.text_field, f"{self.path}, line {number}")

    def _rows(self) -> Iterator[str]:
        pyarrow = needed("pyarrow", "reading .parquet")
        parquet = importlib.import_module("pyarrow.parquet")
        try:
            with self._seekable() as stream, parquet.ParquetFile(stream) as table:
                if self.text_field not in (names := table.schema_arrow.names):
                    raise _no_field(self.text_field, names, str(self.path))
                batches = table.iter_batches(batch_size=1024, columns=[self.text_field])
                records = (record for batch in batches for record in batch.to_pylist())
                for number, record in enumerate(records, 1):
                    yield text_of(record, self.text_field, f"{self.path}, row {number}")
        except (pyarrow.ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{self.path} is damaged or not .parquet: {first_line(error)}") from None

    def _open(self) -> IO[bytes]:
        file = open_file(self.path)
        if not self.compression:
            return file
        unpacked: Any = gzip.GzipFile(fileobj=file) if self.compression == ".gz" else _ZstdReader(file)
        most = max(ALWAYS_ALLOWED, MOST_TIMES * self.stamp[0])
        return io.BufferedReader(_Bounded(self.path, unpacked, file, most), CHUNK)

    def _seekable(self) -> Any:
        """Parquet is read from its end: a compressed one is first unpacked, on disk, not in memory."""
        if not self.compression:
            return self._open()
        unpacked = tempfile.TemporaryFile()  # noqa: SIM115, the caller closes it
        with self._open() as stream:
            shutil.copyfileobj(stream, unpacked, CHUNK)
        unpacked.seek(0)
        return unpacked


def check_sources(names: Iterable[str]) -> None:
    """Refuse sources that name no file that can be read, without reading any; no torch is needed for that."""
    for name in names:
        if is_task(name):
            open_task(name)
        elif name != "builtin" and not name.startswith("hf:"):
            for path in _named_paths(name):
                with _told(path):
                    open_file(path).close()


def find_files(pattern: str, text_field: str) -> list[TextFile]:
    """The files a path or glob names, in the order of their names."""
    return [_text_file(path, text_field) for path in _named_paths(pattern)]


def _named_paths(pattern: str) -> list[Path]:
    """The files a path or glob names, all of a kind that can be read."""
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise DataError(f"{pattern} is a folder; name its files, for instance '{pattern}/*.txt'")
    if path.exists():
        found = [path]
    elif glob.has_magic(pattern):
        names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207, Path.glob takes no absolute pattern
        found = [match for match in map(Path, names) if match.is_file()]
        if not found:
            raise DataError(f"no file matches {pattern}")
    else:
        raise DataError(
            f"no such file: {pattern}; a source is builtin, a file or glob, hf:DATASET[:CONFIG], or task:NAME"
        )
    for match in found:
        if _kind_of(match)[0] not in KINDS:
            raise DataError(f"{match}: only {', '.join(KINDS)} can be read, each also with .gz or .zst added")
    return found


def _kind_of(path: Path) -> tuple[str, str]:
    """What the name says: the kind of file, and how it is compressed."""
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    return path.with_suffix("").suffix if compression else path.suffix, compression


def text_of(record: dict[str, Any], field: str, place: str) -> str:
    """The text of a record; null is empty, and anything that is not text is an error that names the place."""
    if field not in record:
        raise _no_field(field, list(record), place)
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{place}: the field {field!r} holds a {_json_kind(text)}, not text")
    try:
        if len(text.encode()) > MOST_DOCUMENT_BYTES:
            raise _too_long(place)
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: character {error.start + 1} is half of a surrogate pair, not text") from None
    return text


def _json_kind(value: object) -> str:
    """What a value is in the words of JSON: whole numbers were read as others are."""
    kinds = {bool: "truth value", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def needed(module: str, why: str) -> Any:
    """An optional module, or the sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UnsupportedError(f"{why} needs {module}; run: pip install 'loopscope[hf]'") from None


def first_line(error: BaseException) -> str:
    """An error of another library as the first line of its message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class _Bounded(io.RawIOBase):
    """Unpacked bytes of a compressed file, and the sentence that ends them where they are more than text comes to."""

    def __init__(self, path: Path, unpacked: Any, file: IO[bytes], most: int) -> None:
        self._path, self._unpacked, self._file, self._most = path, unpacked, file, most
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._unpacked.readinto(buffer)
        self._count += count
        if self._count > self._most:
            raise DataError(
                f"{self._path} unpacks to more than {in_bytes(self._most)}, which is more than text does; "
                "unpack it first if it is to be read"
            )
        return int(count)

    def close(self) -> None:
        self._unpacked.close()
        self._file.close()
        super().close()


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of a .zst file; unlike zstandard's own reader it notices a file that ends too soon."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._zstandard = needed("zstandard", "reading .zst")
        self._frame: Any = None
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            chunk = self._file.read(ZSTD_STEP)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the compressed data ends too soon")
                return 0
            self._waiting = memoryview(self._decompressed(chunk))
        count = min(len(buffer), len(self._waiting))
        buffer[:count], self._waiting = self._waiting[:count], self._waiting[count:]
        return count

    def _decompressed(self, chunk: bytes) -> bytes:
        parts = []
        while chunk:
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                parts.append(self._frame.decompress(chunk))
            except self._zstandard.ZstdError as error:
                raise EOFError(first_line(error)) from None
            chunk = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        return b"".join(parts)


def _text_file(path: Path, text_field: str) -> TextFile:
    kind, compression = _kind_of(path)
    if compression == ".zst":
        needed("zstandard", "reading .zst")
    with _told(path), open_file(path) as file:
        stamp = _stamp(path)
        if not stamp[0]:
            raise DataError(f"{path} is empty")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return TextFile(path, kind, compression, text_field, digest, stamp)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _too_long(place: str) -> DataError:
    return DataError(
        f"{place} is longer than {in_bytes(MOST_DOCUMENT_BYTES)}, the longest document; cut it into several"
    )


def _no_field(field: str, names: list[str], place: str) -> DataError:
    found = ", ".join(map(repr, names[:MOST_FIELDS])) or "no fields"
    found += f" and {len(names) - MOST_FIELDS:,} more" if len(names) > MOST_FIELDS else ""
    return DataError(f"{place}: no field {field!r}; it has {found} (flag --text-field)")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What can go wrong while a file is read, as one sentence that names it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path} is no longer there") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {first_line(error)}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or first_line(error)}") from None
