"""benchmarks/README.md lists every benchmark, and says what was kept of their last runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench

BENCHMARKS = Path(bench.__file__).parent
NO_BENCHMARKS = {"bench", "side_by_side", "trained"}
"""The runner, and what several of them use."""


def test_every_benchmark_has_an_entry_and_every_entry_a_benchmark():
    files = {path.stem for path in BENCHMARKS.glob("*.py")} - NO_BENCHMARKS
    assert {entry.name.split("-")[0] for entry in bench.BENCHMARKS} == files


def test_the_page_is_what_the_kept_figures_say():
    assert (BENCHMARKS / "README.md").read_text("utf-8") == bench.page(), "run: python benchmarks/bench.py --write"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(bench, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(bench, "PAGE", tmp_path / "README.md")
    return tmp_path


def test_a_run_changes_its_own_entry_and_shows_its_verdicts_its_machine_and_its_date(elsewhere):
    output = elsewhere / "out.txt"
    output.write_text("a CPU, 90 GFLOP/s SGEMM\nnoise\n  time 3 s  target ≤ 10 s: met\n")
    assert bench.main(("report",), read=output, date="2026-01-02") == 0
    page = (elsewhere / "README.md").read_text("utf-8")
    assert "| met, 2026-01-02 |" in page and page.count("not run yet") == len(bench.BENCHMARKS) - 1
    assert (
        "2026-01-02; a CPU, 90 GFLOP/s SGEMM\n\n```\n  time 3 s  target ≤ 10 s: met\n```" in page
        and "noise" not in page
    )


def test_a_missed_target_is_shown_and_ends_with_exit_code_1(elsewhere):
    output = elsewhere / "out.txt"
    output.write_text("a CPU, 90 GFLOP/s SGEMM\n  time 30 s  target ≤ 10 s: MISSED\n")
    assert bench.main(("report",), read=output) == 1
    assert "| **missed**, " in (elsewhere / "README.md").read_text("utf-8")


def test_a_name_that_no_benchmark_has_is_told_with_those_there_are(elsewhere):
    with pytest.raises(SystemExit, match="no benchmark is called 'los'; there are: loss, train_step"):
        bench.main(("los",))
