"""The committed records: published again from their files, they are the same to the byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loopscope.show import atlas
from loopscope.studies.tables import publish

RECORDS = Path(__file__).parent.parent / "records"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("record", "again"),
    [
        ("2026-11-18-nano-wikitext2-seeds", lambda out: publish(out, print)),
        ("2026-11-18-atlas-demo", atlas.publish),
    ],
)
def test_claims_tables_figures_and_page_of_a_record_follow_from_its_files(tmp_path, record, again):
    out = Path(shutil.copytree(RECORDS / record, tmp_path / record))
    made = (*out.glob("*.html"), out / "claims.json", out / "tables", out / "figures")
    for path in made:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    again(out)
    (out / ".lock").unlink(missing_ok=True)
    there, committed = files_of(out), files_of(RECORDS / record)
    assert there.keys() == committed.keys()
    assert [name for name, content in committed.items() if there[name] != content] == []
