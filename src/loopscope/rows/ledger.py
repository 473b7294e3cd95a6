"""The ledger: what each row of a grid has come to, read from its folder. No torch here.

A row is finished when its row.json says so and its results can be read, running while a process holds its lock, and
open otherwise: whatever a crash, a power cut or a damaged file leaves behind counts as open, and is resumed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from loopscope.config import config_to_dict
from loopscope.errors import RunError
from loopscope.results.atlas import PROBE, Probed
from loopscope.results.audit import AuditResult
from loopscope.results.evaluation import Evaluation
from loopscope.results.halting import CalibratedHalting
from loopscope.results.record import read_record, write_record
from loopscope.results.run import MANIFEST_FILE, ROW_FILE, LoggedStep, Manifest, RowRecord, RowState, last_step
from loopscope.rows.spec import RowSpec, first_difference
from loopscope.runs import RunFolder

EXIT_GIVEN_UP = 65
"""A row's process failed in a way that a retry would repeat."""
EXIT_TAKEN = 75
"""Another process has the row."""
STAGES = {"training": 0.0, "evaluating": 0.8, "auditing": 0.85, "calibrating": 0.9, "probing": 0.95}
"""Stages of a row, and the share of its time that lies before each; training moves within its share."""
TRAINED_AUDIT, UNTRAINED_AUDIT = "audit.json", "audit-untrained.json"
TAIL = 1 << 14
"""Bytes at the end of metrics.jsonl in which its last line surely begins."""


@dataclass(frozen=True)
class RowStatus:
    """What is known of a row right now."""

    spec: RowSpec
    state: RowState
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
        record = row_record(run.path)
        state: RowState = "failed" if record.state == "failed" else "open"
        if is_complete(run.path, spec):
            state = "finished"
        elif run.is_held():
            state = "running"
        last = _last_step(run.metrics_path)
        return RowStatus(
            spec=spec,
            state=state,
            stage=record.stage,
            step=last.step if last else 0,
            ce=last.ce[-1] if last and last.ce else None,
            norm=last.final_norm if last else None,
            attempts=record.attempts,
            seconds=sum(record.seconds.values()),
            error=record.error,
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
                write_record(run.path / ROW_FILE, replace(row_record(run.path), state="failed", error=error))
        except RunError:
            return

    def last_words(self, spec: RowSpec, lines: int = 12) -> list[str]:
        """The end of a row's log."""
        path = self.run(spec).path / "log.txt"
        return path.read_text("utf-8", errors="replace").splitlines()[-lines:] if path.exists() else []


def row_record(folder: Path) -> RowRecord:
    """What row.json says; a damaged one says nothing."""
    return read_record(folder / ROW_FILE, RowRecord, {}) or RowRecord()


def is_complete(folder: Path, spec: RowSpec) -> bool:
    """Whether everything that is asked of a row is there."""
    finished = row_record(folder).state == "finished" and is_measured(folder, spec)
    calibrated = not spec.halting or is_calibrated(folder, spec)
    return finished and calibrated and (not spec.probe or has_probe(folder, spec.config.training.steps))


def is_measured(folder: Path, spec: RowSpec) -> bool:
    """Whether it is evaluated and audited: then the row has been trained to its end, whatever became of its weights."""
    evaluated = read_record(folder / MANIFEST_FILE, Manifest, {}) is not None and is_evaluated(folder, spec)
    return evaluated and (not spec.audit or is_audited(folder, spec))


def is_calibrated(folder: Path, spec: RowSpec) -> bool:
    """Whether there is a whole halting.json of the row's last step."""
    found = read_record(folder / "halting.json", CalibratedHalting, {})
    return found is not None and found.step == spec.config.training.steps


def is_evaluated(folder: Path, spec: RowSpec) -> bool:
    """Whether there is an eval.json of the row's last step; what `loopscope eval` writes has no unigram model."""
    found = read_record(folder / "eval.json", Evaluation, {})
    return found is not None and bool(found.unigram_ce) and found.step == spec.config.training.steps


def is_audited(folder: Path, spec: RowSpec) -> bool:
    """Whether there are whole audits of the row's last step and, where asked for, of its untrained weights.

    In an atlas one that failed is done too, once it is told why.
    """
    told = told_problems(folder) if spec.probe else {}
    trained = "trained" in told or has_audit(folder / TRAINED_AUDIT, spec.config.training.steps)
    fresh = not spec.audit_untrained or "untrained" in told or has_audit(folder / UNTRAINED_AUDIT, None)
    return trained and fresh


def told_problems(folder: Path) -> dict[str, str]:
    """Why parts of a row of an atlas are missing."""
    found = read_record(folder / PROBE, Probed, {})
    return found.problems if found else {}


def has_probe(folder: Path, step: int) -> bool:
    """Whether there is a probe.json of that step, every part of which is there or told."""
    found = read_record(folder / PROBE, Probed, {})
    return found is not None and found.step == step and found.is_whole


def has_audit(path: Path, step: int | None) -> bool:
    """Whether there is a whole audit of that step."""
    found = read_record(path, AuditResult, {})
    return found is not None and found.model.step == step


def _last_step(path: Path) -> LoggedStep | None:
    """The last whole line of metrics about a training step."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL), os.SEEK_SET)
        return last_step(reversed(file.read().splitlines()))
