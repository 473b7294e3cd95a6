"""Every committed record is read by its type and written again to the same bytes: nothing in it is lost or invented."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopscope.results.atlas import AtlasRecord
from loopscope.results.audit import AuditResult
from loopscope.results.evaluation import Evaluation
from loopscope.results.halting import CalibratedHalting
from loopscope.results.record import load_record, text_of
from loopscope.results.reproduction import ClaimsRecord, GridRecord
from loopscope.results.run import Manifest, RowRecord, decode_line, line_of
from loopscope.results.scaling import ScalingRecord
from loopscope.show.sentences import with_sentences

RECORDS = Path(__file__).parents[2] / "records"
KINDS = {
    "audit.json": AuditResult,
    "audit-untrained.json": AuditResult,
    "eval.json": Evaluation,
    "halting.json": CalibratedHalting,
    "manifest.json": Manifest,
    "row.json": RowRecord,
    "grid.json": GridRecord,
    "claims.json": ClaimsRecord,
    "scaling.json": ScalingRecord,
    "atlas.json": AtlasRecord,
}
"""Type of a file by its name."""


def committed(*names: str) -> list[str]:
    return sorted(str(path.relative_to(RECORDS)) for name in names for path in RECORDS.rglob(name))


@pytest.mark.parametrize("path", committed(*KINDS))
def test_a_committed_record_is_its_type_byte_for_byte(path):
    file = RECORDS / path
    assert text_of(load_record(file, KINDS[file.name])) == file.read_text("utf-8")


@pytest.mark.parametrize("path", committed("metrics.jsonl"))
def test_committed_metrics_are_their_types_byte_for_byte(path):
    for line in (RECORDS / path).read_bytes().splitlines(keepends=True):
        row = decode_line(line)
        assert row is not None and line_of(row) == line


def test_every_kind_of_file_is_committed_somewhere():
    assert {Path(path).name for path in committed(*KINDS)} == set(KINDS)


@pytest.mark.parametrize("path", committed("audit.json", "audit-untrained.json"))
def test_the_sentences_of_a_committed_audit_are_those_of_its_fields(path):
    audit = load_record(RECORDS / path, AuditResult)
    assert with_sentences(audit) == audit
