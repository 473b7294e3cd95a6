"""The quickstart: four fair corners, audits that disagree as they should, and words that quote what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import write_made_up_grid, write_row

from loopscope.cli import main
from loopscope.results.measures import Run
from loopscope.results.thresholds import CLEAR
from loopscope.rows.conditions import CONDITIONS, CORE
from loopscope.show.verdict import verdict_on
from loopscope.studies.paper_claims import judge_all
from loopscope.studies.quickstart import conclusion, corners, make_request
from loopscope.studies.results import read_results


@pytest.fixture
def grid(tmp_path) -> Path:
    return write_made_up_grid(tmp_path / "grid")


def four(grid: Path) -> list[Run]:
    return corners(read_results(grid), 42)


def norms_times(factor: float):
    def change(evaluation, audit):
        for depth in evaluation["splits"]["valid"]["depths"]:
            depth["norm"] *= factor

    return change


def test_the_request_is_the_four_corners_with_one_seed():
    request = make_request(seed=7, steps=3)
    assert request.seeds == {condition.name: (7,) for condition in CORE}
    assert {(CONDITIONS[name].placement, CONDITIONS[name].readout) for name in request.seeds} == {
        (placement, readout) for placement in ("terminal", "per-loop") for readout in ("rmsnorm", "raw")
    }


def test_the_words_quote_the_measured_numbers_and_verdicts_as_the_page_does(grid):
    words = "\n".join(verdict_on(four(grid)).lines)
    assert "norm 348 through the RMSNorm readout, 102 times the 3.4 it ends at through the raw one" in words
    assert (
        "+4.80 nats" in words and "Blind spot in 2 of 4 audited runs: the loop carries the length of its state" in words
    )
    assert "Where: per-loop + RMSNorm and terminal + RMSNorm. Free of it: per-loop + raw and terminal + raw." in words
    assert conclusion(four(grid)).endswith("the loop goes on carrying it.")


def test_the_words_do_not_conclude_what_was_not_measured(grid):
    write_row(grid, "per-loop+rmsnorm", 42, change=lambda evaluation, audit: audit.update(verdict="controlled"))
    assert "please report this" in conclusion(four(grid))
    write_row(grid, "per-loop+rmsnorm", 42, change=norms_times(1 / 50))
    assert conclusion(four(grid)).endswith("quickstart --steps 600 --out runs/longer")


@pytest.mark.parametrize(("times", "is_clear"), [(0.99, False), (1.01, True)])
def test_a_contrast_counts_from_the_same_ratio_in_the_terminal_on_the_page_and_in_claim_1(grid, times, is_clear):
    write_row(grid, "per-loop+rmsnorm", 42, change=norms_times(times * CLEAR * 3.4 / 348))
    results = read_results(grid)
    assert ("So few steps" not in conclusion(four(grid))) == is_clear
    assert ("not a clear contrast" not in " ".join(verdict_on(four(grid)).lines)) == is_clear
    ratio = judge_all(replace(results, rows=four(grid))).of("paper", "valid")[0].quantities[0]
    assert ratio.obeyed == is_clear


def test_only_the_rows_of_the_seed_asked_for_are_told(grid):
    results = read_results(grid)
    told = corners(results, 101)
    assert [(run.condition, run.seed) for run in told] == [(condition.name, 101) for condition in CORE]
    assert corners(results, 9) == []


def test_the_blind_spot_shows_within_twenty_steps_and_the_page_tells_it(tmp_path, capsys):
    code = main(["quickstart", "--steps", "20", "--json", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert code == 0, said.err
    told = json.loads(said.out)
    norms = {(each["placement"], each["readout"]): each["norm"][-1] for each in told["conditions"]}
    assert norms["per-loop", "rmsnorm"] > 10 * norms["per-loop", "raw"]
    for each in told["conditions"]:
        expected = ("blind-spot", ["scale"]) if each["readout"] == "rmsnorm" else ("controlled", [])
        assert (each["verdict"], each["blind"]) == expected
    assert "Blind spot in 2 of 4 audited runs" in (tmp_path / "report.html").read_text("utf-8")
