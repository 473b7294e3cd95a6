"""The benchmark of predictive validity: its rows, and how it counts."""

from __future__ import annotations

import json
import math

import pytest
import torch

import predict
from loopscope.protocol import run_loops


def test_there_are_enough_rows_and_every_factor_varies():
    rows = predict.read_rows()
    assert len(rows) >= 44
    configs = [row.config for row in rows]
    assert {1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1} <= {config.objective.norm_penalty for config in configs}
    for factor in ("readout", "inter_loop_norm", "injection", "init"):
        assert len({getattr(config.model, factor) for config in configs}) > 1, factor
    assert {"per-loop", "terminal", "weighted"} == {config.objective.placement for config in configs}
    assert {"scale", "mean", "masked"} == {row.variable for row in rows}
    assert all(row.variable in row.fields for row in rows)


def test_a_twin_differs_in_the_penalty_alone_and_is_shared_by_rows_that_differ_in_it():
    rows = {row.name: row for row in predict.read_rows()}
    assert rows["penalty-1e-8"].twin.course == rows["rmsnorm"].twin.course == rows["penalty-1e-2"].course
    assert rows["layernorm"].course == rows["layernorm-mean"].course != rows["rmsnorm"].course
    assert rows["masked-16"].course != rows["raw"].course


def test_a_masked_readout_shows_nothing_of_the_masked_channels():
    row = next(row for row in predict.read_rows() if row.name == "masked-16")
    model = row.build().eval()
    state = run_loops(model, torch.arange(8)[None]).states[2]
    changed = state.h_BTD.clone()
    changed[..., -16:] += 5
    torch.testing.assert_close(model.readout(state.with_h(changed), 2), model.readout(state, 2))
    assert row.sizes["masked"](changed).sum() > row.sizes["masked"](state.h_BTD).sum()


def test_ranks_are_shared_by_equal_values():
    assert predict.ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert predict.rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert predict.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert predict.rank_correlation([1, 1, 1], [3, 2, 1]) == 0.0


def line(key: str, **values: object) -> str:
    return json.dumps({"key": key, **values}) + "\n"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Three rows with made-up outcomes: one free and run, one held, one free and not driven."""
    rows = [predict.Row(name=name, model={"readout": readout}) for name, readout in MADE_UP]
    monkeypatch.setattr(predict, "read_rows", lambda: rows)
    for row, (free, rate, growth) in zip(rows, MADE_UP.values(), strict=True):
        verdict = "blind" if free >= 10 else "visible"
        grown = [math.log(growth)] * predict.STEPS
        lines = {
            "audit": line(row.name, verdict=verdict, free_range=free),
            "drift": line(row.name, rate=rate, spread=0.0, driven=abs(rate) > 0.01),
            "push": line(row.name, growth=growth, reach=growth, size=growth, paid=0.1),
            "train": line(row.course, log_sizes={"scale": grown})
            + line(row.twin.course, log_sizes={"scale": [0.0] * predict.STEPS}),
        }
        for phase, text in lines.items():
            with (tmp_path / f"{phase}.jsonl").open("a") as file:
                file.write(text)
    return tmp_path


MADE_UP = {
    ("ran", "rmsnorm"): (1e6, 0.2, 20.0),
    ("held", "raw"): (1.1, -0.02, 1.5),
    ("idle", "layernorm"): (1e6, 0.0, 2.0),
}


def test_the_report_counts_hits_false_alarms_and_misses(measured, capsys):
    assert predict.report(measured) == 1
    written = json.loads((measured / "report.json").read_text())
    assert written["scores"]["blind → ran away"] == {
        "precision": 0.5,
        "recall": 1.0,
        "false_alarms": ["idle"],
        "missed": [],
    }
    assert written["scores"]["blind and driven up → ran away"]["precision"] == 1.0
    assert "false alarm: idle" in capsys.readouterr().out


def test_a_report_of_nothing_says_what_to_run(tmp_path, capsys):
    assert predict.report(tmp_path) == 2
    assert "run the phases" in capsys.readouterr().err


def test_a_phase_goes_on_where_it_was_stopped(tmp_path):
    done: list[str] = []

    def measure(name: str) -> dict:
        done.append(name)
        if name == "b" and done.count("b") == 1:
            raise KeyboardInterrupt
        return {"name": name}

    work = [(name, lambda name=name: measure(name)) for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        predict.run_phase(tmp_path, "train", work)
    predict.run_phase(tmp_path, "train", work)
    assert done == ["a", "b", "b", "c"]
    assert list(predict.lines_of(tmp_path / "train.jsonl")) == ["a", "b", "c"]
