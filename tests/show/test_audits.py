"""An audit as terminal, files and page tell it: one result, the same facts everywhere."""

from __future__ import annotations

import json
import re

import pytest
from made_up import made_up_audit, write_run

from loopscope.cli.audit import print_audit
from loopscope.results.record import text_of
from loopscope.show import formats
from loopscope.show.page import build_report


@pytest.mark.parametrize(
    ("name", "condition", "norm"),
    [("blind", "per-loop+rmsnorm", 348.0), ("controlled", "per-loop+raw", 3.4)],
)
def test_an_audit_is_told_as_it_was(golden, monkeypatch, capsys, tmp_path, name, condition, norm):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(formats, "own_version", lambda: "0.1.0")
    result = made_up_audit(condition, norm)
    print_audit(result)
    golden(f"audits/{name}.txt", capsys.readouterr().out)
    golden(f"audits/{name}.json", text_of(result))
    told = [formats.AuditedTarget("runs/x", result)]
    golden(f"audits/{name}.lines", "\n".join(formats.lines(told)) + "\n")
    golden(f"audits/{name}.sarif", json.dumps(formats.sarif(told), indent=1, ensure_ascii=False) + "\n")
    golden(f"audits/{name}.xml", formats.junit(told) + "\n")
    html = build_report([write_run(tmp_path / "run", condition)]).html
    section = html.split('id="audits"')[1].split("</section>")[0]
    golden(f"audits/{name}.html", re.sub(r">\s+<", ">\n<", section))
