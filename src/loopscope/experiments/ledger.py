"""The ledger: what each row of a grid has come to, read from its folder. No torch here.

A row is finished when its row.json says so and its results can be read, running while a process holds its lock, and
open otherwise: whatever a crash, a power cut or a damaged file leaves behind counts as open, and is gone on with.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loopscope.config import config_to_dict
from loopscope.errors import RunError
from loopscope.experiments.grid import SCHEMA_VERSION, RowSpec, first_difference
from loopscope.runs import RunFolder, read_json, write_json

State = Literal["open", "running", "finished", "failed"]
EXIT_GIVEN_UP = 65
"""A row's process failed in a way that a retry would repeat."""
EXIT_TAKEN = 75
"""Another process has the row."""
STAGES = {"training": 0.0, "evaluating": 0.8, "auditing": 0.9}
"""Stages of a row, and the share of its time that lies before each; training moves within its share."""
TAIL = 1 << 14
"""Bytes at the end of metrics.jsonl in which its last line surely begins."""


@dataclass(frozen=True)
class RowStatus:
    """What is known of a row right now."""

    spec: RowSpec
    state: State
    stage: str | None = None
    step: int = 0
    ce: float | None = None
    norm: float | None = None
    attempts: int = 0
    seconds: float = 0.0
    error: str | None = None

    @property
    def share_done(self) -> float:
        """Share of the row's work that is done, between 0 and 1."""
        if self.state == "finished":
            return 1.0
        trained = STAGES["evaluating"] * min(1.0, self.step / self.spec.config.training.steps)
        return max(trained, STAGES.get(self.stage or "training", 0.0))


class Ledger:
    """The rows of an output folder."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def run(self, spec: RowSpec) -> RunFolder:
        """The run folder of a row."""
        return RunFolder(self.out / "rows" / spec.name)

    def status(self, spec: RowSpec) -> RowStatus:
        """Where a row is."""
        run = self.run(spec)
        record = read_record(run.path)
        state: State = "failed" if record.get("state") == "failed" else "open"
        if is_complete(run.path, spec):
            state = "finished"
        elif run.is_held():
            state = "running"
        last = _last_row(run.metrics_path)
        return RowStatus(
            spec=spec,
            state=state,
            stage=record.get("stage"),
            step=last.get("step", 0),
            ce=last["ce"][-1] if last.get("ce") else None,
            norm=last["norm"][-1] if last.get("norm") else None,
            attempts=record.get("attempts", 0),
            seconds=total_seconds(record),
            error=record.get("error"),
        )

    def check(self, spec: RowSpec) -> None:
        """Refuse a row that was run with another configuration."""
        run = self.run(spec)
        if not run.config_path.is_file():
            return
        before, now = config_to_dict(run.config()), config_to_dict(spec.config)
        if (found := first_difference(before, now)) is not None:
            name, theirs, ours = found
            raise RunError(f"{run.path} was run with {name} = {theirs!r}, not {ours!r}; choose another --out")

    def fail(self, spec: RowSpec, error: str) -> None:
        """Note that a row was given up; whoever holds its lock meanwhile knows better."""
        run = self.run(spec)
        try:
            with run.locked():
                write_record(run.path, {**read_record(run.path), "state": "failed", "error": error})
        except RunError:
            return

    def last_words(self, spec: RowSpec, lines: int = 12) -> list[str]:
        """The end of a row's log."""
        path = self.run(spec).path / "log.txt"
        return path.read_text("utf-8", errors="replace").splitlines()[-lines:] if path.exists() else []


def read_record(folder: Path) -> dict[str, Any]:
    """row.json, or nothing where there is none that can be read."""
    try:
        return read_json(folder / "row.json")
    except RunError:
        return {}


def total_seconds(record: dict[str, Any]) -> float:
    """Seconds of all stages of a row.json."""
    seconds = record.get("seconds")
    return float(sum(seconds.values())) if isinstance(seconds, dict) else 0.0


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write row.json; only the holder of the row's lock may."""
    write_json(folder / "row.json", {"schema_version": SCHEMA_VERSION, **record})


def is_complete(folder: Path, spec: RowSpec) -> bool:
    """Whether everything that is asked of a row is there."""
    finished = read_record(folder).get("state") == "finished" and _is_readable(folder / "manifest.json")
    return finished and is_evaluated(folder, spec) and (not spec.audit or is_audited(folder, spec))


def _is_readable(path: Path) -> bool:
    try:
        read_json(path)
    except RunError:
        return False
    return True


def is_evaluated(folder: Path, spec: RowSpec) -> bool:
    """Whether there is a readable eval.json of the row's last step."""
    return _measured_step(folder / "eval.json", "step") == spec.config.training.steps


def is_audited(folder: Path, spec: RowSpec) -> bool:
    """Whether there is a readable audit.json of the row's last step."""
    return _measured_step(folder / "audit.json", "model", "step") == spec.config.training.steps


def _measured_step(path: Path, *keys: str) -> object:
    """The step a result was measured at, or None where there is no readable result."""
    try:
        value: Any = read_json(path)
        for key in keys:
            value = value[key]
    except (RunError, KeyError, TypeError):
        return None
    return value


def _last_row(path: Path) -> dict[str, Any]:
    """The last whole line of metrics about a training step."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL), os.SEEK_SET)
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and row.get("kind") == "train":
            return row
    return {}
