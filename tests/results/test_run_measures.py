"""A run as its files tell it, and the measures that are taken from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import eval_row, made_up_audit, made_up_eval, train_row, write_row

from loopscope.files import without_nan, write_json
from loopscope.results.measures import (
    alpha_changes,
    alpha_range,
    exit_failure,
    final_norm,
    perplexity_at,
    radial_clamps,
    read_run,
    shares_by_loop,
)
from loopscope.results.record import as_json
from loopscope.runs import RunFolder


@pytest.fixture
def row(tmp_path) -> Path:
    return write_row(tmp_path, "per-loop+rmsnorm", 42)


def test_what_is_written_is_read_back(row):
    run = read_run(row, "row")
    assert run.problems == {}
    assert run.evaluation == made_up_eval([4.486, 4.481, 4.485, 4.496], 348.0, 0.0)
    assert run.row is not None and as_json(run.row) == json.loads((row / "row.json").read_text())
    audit = made_up_audit("per-loop+rmsnorm", 348.0)
    assert run.audit == audit and run.verdict == audit.verdict and audit.blind == ["scale"] and run.loops == audit.loops
    assert radial_clamps(run) == {"radial clamp: growth removed": -0.004, "radial clamp: frozen at loop 1": 0.001}


def test_measures_are_taken_at_the_trained_depth_and_on_the_split_asked_for(row):
    evaluation = json.loads((row / "eval.json").read_text())
    evaluation["splits"]["test"]["depths"][3] |= {"norm": 7.0, "ce": 1.0}
    write_json(row / "eval.json", evaluation)
    run = read_run(row, "row")
    assert (final_norm(run), final_norm(run, "valid"), final_norm(run, "test")) == (348.0, 348.0, 7.0)
    assert exit_failure(run, "test") == pytest.approx(3.486) and exit_failure(run, "valid") == pytest.approx(-0.01)
    assert perplexity_at(run, 4, "test") == pytest.approx(2.71828, abs=1e-5)
    assert final_norm(run, "nowhere") is None and exit_failure(run, "nowhere") is None


def test_without_eval_json_the_page_falls_back_on_training_and_a_claim_does_not(row):
    (row / "eval.json").unlink()
    folder = RunFolder(row)
    for line in (
        eval_row(5, [5.0, 4.0, 4.0, 4.0], [1.0, 2.0, 3.0, 4.0]),
        train_row(6, [5.0] * 4, [9.0] * 4, [0.1] * 4),
    ):
        folder.append_metrics(line)
    run = read_run(row, "row")
    assert (final_norm(run), exit_failure(run)) == (4.0, 1.0)
    assert final_norm(run, "valid") is None and exit_failure(run, "valid") is None


def test_shares_are_the_audits_or_else_the_last_that_training_logged(row):
    assert set(shares_by_loop(read_run(row, "row")).values()) == {2e-7}
    (row / "audit.json").unlink()
    RunFolder(row).append_metrics(replace(train_row(6, [5.0] * 2, [9.0] * 2, [0.1, 0.3]), loops=[2, 4]))
    assert shares_by_loop(read_run(row, "row")) == {2: 0.1, 4: 0.3}


def test_an_alpha_sweep_with_a_gap_has_changes_and_no_range(row):
    run = read_run(row, "row")
    assert alpha_range(run) == 0.0 and set(alpha_changes(run).values()) == {0.0}
    audit = json.loads((row / "audit.json").read_text())
    audit["alpha_sweep"]["loops"][0]["ce"][0] = None
    write_json(row / "audit.json", audit)
    run = read_run(row, "row")
    assert alpha_range(run) is None and len(alpha_changes(run)) == 4 and run.problems == {}


def test_json_is_written_without_nan(tmp_path):
    write_json(tmp_path / "x.json", {"a": [float("nan"), 1.0], "b": {"c": float("-inf")}, "d": (1, 2)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.0], "b": {"c": None}, "d": [1, 2]}
    assert without_nan("NaN") == "NaN"
