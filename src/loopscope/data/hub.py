"""Datasets of the Hugging Face Hub, or local folders in its layout, through the `datasets` library."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from loopscope.data.files import first_line, needed, text_of
from loopscope.errors import DataError
from loopscope.results.record import Choice


@dataclass(frozen=True)
class HubDataset:
    """One configuration of a dataset, opened."""

    name: str
    """hf:NAME[:CONFIG[:DOCUMENTS]]"""
    text_field: str
    splits: dict[str, Any]
    """Its own split names → datasets.Dataset or IterableDataset."""
    sha256: str
    """Of its name, its files and their revision, not of their bytes: a stream is not read to be named."""
    streaming: Choice
    most: int | None = None
    """Records of each split that are read; None reads all."""

    def documents(self, split: str) -> Iterator[str]:
        """The documents of a split that are not blank, without trailing white space."""
        for number, record in enumerate(self._records(split), 1):
            if document := text_of(record, self.text_field, f"{self.name}, {split} record {number}").rstrip():
                yield document

    def _records(self, split: str) -> Iterator[dict[str, Any]]:
        try:
            yield from islice(self.splits[split], self.most)
        except Exception as error:  # whatever the library, its file formats or the network raise
            raise DataError(f"{self.name}, {split} cannot be read: {first_line(error)}") from error


def open_dataset(name: str, text_field: str) -> HubDataset:
    """`hf:NAME[:CONFIG[:DOCUMENTS]]`, downloaded once when it fits on the disk, else streamed.

    With DOCUMENTS only so many of each split are read, and streamed: nobody waits for terabytes to train on a part.
    """
    datasets = needed("datasets", f"reading {name}")
    path, _, rest = name.removeprefix("hf:").partition(":")
    config, _, count = rest.partition(":")
    if count and (not count.isdecimal() or len(count) > 18 or int(count) < 1):
        raise DataError(f"{name}: {count!r} is not a number of documents; expected hf:NAME[:CONFIG[:DOCUMENTS]]")
    most = int(count) if count else None
    try:
        builder = datasets.load_dataset_builder(path, config or None)
        if most is None:
            streaming = choose_streaming(builder)
        else:
            streaming = Choice("streaming", True, f"only the first {most:,} documents are read")
        if not streaming.value:
            builder.download_and_prepare()
        splits = builder.as_streaming_dataset() if streaming.value else builder.as_dataset()
    except Exception as error:  # not found, no such configuration, no network: the library's own words say which
        raise DataError(f"{name} cannot be opened: {first_line(error)}") from error
    return HubDataset(name, text_field, dict(splits), _fingerprint(builder, path, text_field, most), streaming, most)


def choose_streaming(builder: Any) -> Choice:
    """Stream what is not on this disk and would take more than half of what is free there."""
    cache = Path(builder.cache_dir)
    if cache.is_dir():
        return Choice("streaming", False, f"already prepared in {cache}")
    sizes = builder.info.download_size, builder.info.dataset_size
    if None in sizes:
        return Choice("streaming", True, "the dataset does not say how large it is")
    existing = next(folder for folder in cache.parents if folder.is_dir())
    size, free = sum(sizes), shutil.disk_usage(existing).free
    space = f"needs {size / 1e9:.1f} GB of {free / 1e9:.1f} GB free"
    return Choice("streaming", 2 * size > free, space)


def _fingerprint(builder: Any, path: str, text_field: str, most: int | None) -> str:
    files = builder.config.data_files or {}
    revision = {str(split): [list(map(str, found)), found.origin_metadata] for split, found in files.items()}
    parts: list[Any] = [path, builder.config.name, str(builder.hash), text_field, revision]
    parts += [] if most is None else [most]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
