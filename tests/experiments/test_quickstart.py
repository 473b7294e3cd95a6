"""The quickstart: four fair corners, audits that disagree as they should, and words that quote what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from made_up import write_made_up_grid

from loopscope.experiments.conditions import CONDITIONS, CORE
from loopscope.experiments.quickstart import Corner, corners, in_words, make_request
from loopscope.experiments.results import read_results


@pytest.fixture
def four() -> list[Corner]:
    norms = {"terminal+rmsnorm": 50.0, "terminal+raw": 3.0, "per-loop+rmsnorm": 400.0, "per-loop+raw": 4.0}
    verdicts = {"rmsnorm": ("blind-spot", ["scale"]), "raw": ("controlled", [])}
    return [Corner(c, [5.0, 4.0], [10.0, norms[c.name]], *verdicts[c.readout]) for c in CORE]


def test_the_request_is_the_four_corners_with_one_seed():
    request = make_request(seed=7, steps=3)
    assert request.seeds == {condition.name: (7,) for condition in CORE}
    assert {(CONDITIONS[name].placement, CONDITIONS[name].readout) for name in request.seeds} == {
        (placement, readout) for placement in ("terminal", "per-loop") for readout in ("rmsnorm", "raw")
    }


def test_the_words_quote_the_measured_numbers_and_verdicts(four):
    words = in_words(four)
    assert "norm 400 through the RMSNorm readout and at 4.0 through the raw one: 100 times less" in words
    assert "+1.00 nats" in words
    assert "blind spot (scale) in terminal + RMSNorm and per-loop + RMSNorm; controlled in terminal + raw" in words
    assert words.endswith("the loop goes on carrying it.")


def test_the_words_do_not_conclude_what_was_not_measured(four):
    few_steps = [replace(corner, norms_K=[4.0, 4.0]) for corner in four]
    assert in_words(few_steps).endswith("quickstart --steps 600 --out runs/longer")
    all_alike = [replace(corner, verdict="controlled", blind=[]) for corner in four]
    assert "please report this" in in_words(all_alike)


def test_only_the_rows_of_the_seed_asked_for_are_told(tmp_path):
    results = read_results(write_made_up_grid(tmp_path / "grid"))
    told = corners(results, 101)
    by_condition = {row.condition: row for row in results.rows if row.seed == 101 and CONDITIONS[row.condition] in CORE}
    assert {corner.condition.name for corner in told} == set(by_condition)
    for corner in told:
        row = by_condition[corner.condition.name]
        assert corner.ce_K == [row.score("valid", k, "ce") for k in range(1, row.num_loops + 1)]
    assert corners(results, 9) == []


def test_the_blind_spot_shows_within_thirty_steps_and_the_page_tells_it(tmp_path):
    command = [sys.executable, "-m", "loopscope", "quickstart", "--steps", "30", "--json", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    norms = {(each["placement"], each["readout"]): each["norm"][-1] for each in told["conditions"]}
    assert norms["per-loop", "rmsnorm"] > 10 * norms["per-loop", "raw"]
    for each in told["conditions"]:
        expected = ("blind-spot", ["scale"]) if each["readout"] == "rmsnorm" else ("controlled", [])
        assert (each["verdict"], each["blind"]) == expected
    assert "Blind spot in 2 of 4 audited runs" in (tmp_path / "report.html").read_text("utf-8")
