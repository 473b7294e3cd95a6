"""The run folder: configuration, manifest, metrics, checkpoints, and a lock. No torch here: reports read it too.

config.yaml        the resolved configuration
manifest.json      versions, git state, seed, hardware, automatic choices with reasons, data hash
metrics.jsonl      one JSON object per logged step, evaluation or event
checkpoints/       step-N/, complete or absent
.lock              held by the training process; a dead process does not hold it
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from loopscope.config import Config, config_to_yaml, load_config
from loopscope.errors import RunError
from loopscope.files import file_written_whole, lines_of, write_atomically
from loopscope.results.run import METRICS_FILE, Logged, line_of, read_metrics, step_of

WRITTEN_UNDER_LOCK = (
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
    "tokenizer/chat_template.jinja",
    "tokenizer/tokenizer-manifest.json",
)
"""Files that only the holder of the lock writes, each through a temporary one beside it."""
GLANCE_SECONDS = 0.5
"""Somebody who only looks whether a run is locked shares the lock for an instant, never for longer than this."""


class RunFolder:
    """One training run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per line."""
        return self.path / METRICS_FILE

    def config(self) -> Config:
        """The configuration the run was started with."""
        if not self.config_path.exists():
            raise RunError(f"{self.path} is not a run folder: it has no config.yaml")
        return load_config(self.config_path)

    def create(self, config: Config) -> None:
        """Make the folder and write the configuration."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config_path, config_to_yaml(config))

    def append_metrics(self, row: Logged) -> None:
        """Add one line to metrics.jsonl."""
        try:
            with self.metrics_path.open("ab") as file:
                file.write(line_of(row))
        except OSError as error:
            error.filename = str(self.metrics_path)  # a disk that is full says so without a name
            raise

    def read_metrics(self) -> list[Logged]:
        """All rows; a line torn by a kill is left out."""
        return read_metrics(self.metrics_path, {})

    def last_step(self) -> int:
        """The last step that metrics.jsonl tells of; 0 without any."""
        return max((step for step, _ in self._lines()), default=0)

    def forget_metrics_after(self, step: int) -> None:
        """Drop lines of steps that a resume is going to repeat, and those that are damaged."""
        kept = [line for at, line in self._lines() if at <= step]
        with file_written_whole(self.metrics_path) as beside:
            beside.write_bytes(b"".join(kept))

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines with their steps."""
        for line in lines_of(self.metrics_path, math.inf, {}):  # whoever rewrites the file must not lose a long one
            if (step := step_of(line)) is not None and line.endswith(b"\n"):
                yield step, line

    @contextmanager
    def locked(self, wait: float = 0.0) -> Iterator[None]:
        """Hold the run's lock, or refuse after `wait` seconds. The kernel drops the lock of a process that dies."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock_path.open("a+") as file:
            if not _flock_within(file, fcntl.LOCK_EX, wait + GLANCE_SECONDS):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(f"{self.path} is in use by {holder}; wait for it, or choose another --out")
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            for name in WRITTEN_UNDER_LOCK:  # of a process that was killed while it wrote
                file_itself = self.path / name
                for left in file_itself.parent.glob(f".{file_itself.name}.*"):
                    left.unlink(missing_ok=True)
            yield

    def is_held(self) -> bool:
        """Whether a living process holds the run's lock. A glance: it shares the lock for an instant."""
        if not self._lock_path.exists():
            return False
        with self._lock_path.open("a") as file:
            return not _flock_within(file, fcntl.LOCK_SH, 0.0)

    @property
    def _lock_path(self) -> Path:
        return self.path / ".lock"


def _flock_within(file: IO[str], kind: int, seconds: float) -> bool:
    """Whether the lock could be had within that time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True
