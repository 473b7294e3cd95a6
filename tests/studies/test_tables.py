"""Tables and figures: the right numbers in the right cells, escaped, and the same bytes from the same files."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import eval_row, event_row, row_config, write_made_up_grid, write_row

from loopscope.errors import LoopscopeError, RunError
from loopscope.results.measures import read_run
from loopscope.runs import RunFolder
from loopscope.show.table import Table
from loopscope.show.verdict import verdict_on
from loopscope.studies.paper_claims import judge_all
from loopscope.studies.results import read_results
from loopscope.studies.tables import all_tables, depths_csv, publish


@pytest.fixture
def grid(tmp_path) -> Path:
    return write_made_up_grid(tmp_path / "grid")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A grid with everything that follows from its rows. Drawing takes seconds."""
    out = write_made_up_grid(tmp_path_factory.mktemp("published") / "grid")
    publish(out, print)
    return out


def tables(out: Path) -> dict[str, Table]:
    results = read_results(out)
    return {table.name: table for table in all_tables(results, judge_all(results))}


def row_of(table: Table, first: str) -> dict[str, str]:
    return dict(zip(table.header, next(row for row in table.cells if row[0] == first), strict=True))


def test_the_tables_of_a_grid_have_the_right_numbers_in_the_right_cells(grid, golden):
    """Mean ± spread of three seeds and no spread of one; what was fixed and what varied; ours beside the paper's."""
    for name, norms in {"per-loop+rmsnorm": (900, 450), "per-loop+raw": (3, 6)}.items():
        for seed in (42, 101, 202):
            for step, norm in zip((5, 10), norms, strict=True):
                RunFolder(grid / "rows" / f"{name}-s{seed}").append_metrics(eval_row(step, [5.0, 4.0], [1.0, norm]))
    golden("tables.md", "\n".join(table.markdown() for table in tables(grid).values()))


def test_audits_that_disagree_between_seeds_are_counted(grid):
    write_row(grid, "per-loop+raw", 42, change=lambda evaluation, audit: audit.update(verdict="blind-spot"))
    assert row_of(tables(grid)["main"], "per-loop + raw")["audit"] == "1 blind-spot, 2 controlled"


def test_without_audits_their_cells_are_empty_and_the_rest_is_there(grid):
    for path in grid.glob("rows/*/audit.json"):
        path.unlink()
    made = tables(grid)
    assert row_of(made["main"], "per-loop + raw")["audit"] == "–"
    assert row_of(made["radial_gradient"], "per-loop + raw")["loop 1"] == "–"
    assert row_of(made["main"], "per-loop + raw")["‖H_K‖"].startswith("3.400")


def test_a_row_that_a_guard_touched_is_named(grid):
    RunFolder(grid / "rows" / "per-loop+raw-s42").append_metrics(event_row(3, "skip", "step 3 has no finite loss"))
    assert "A guard skipped or rolled back steps of per-loop+raw-s42 (1)." in tables(grid)["fixed_and_varied"].note


def test_anything_else_that_varied_is_called_out(grid):
    config = row_config("per-loop+raw", 101)
    other = replace(config, training=replace(config.training, lr=0.5, threads=7))
    RunFolder(grid / "rows" / "per-loop+raw-s101").create(other)
    note = tables(grid)["fixed_and_varied"].note
    assert note.startswith("These vary besides the named factors: training.lr.")


def test_the_folders_of_the_text_are_not_told(grid):
    for folder in (grid / "rows").iterdir():
        run = RunFolder(folder)
        config = run.config()
        run.create(replace(config, data=replace(config.data, data=("/home/somebody/train.txt",))))
    rows = {row[0]: row[2] for row in tables(grid)["fixed_and_varied"].rows}
    assert rows["data.data"] == "train.txt"


def test_a_row_that_cannot_tell_what_halting_saves_says_why_in_the_table(grid):
    path = grid / "rows" / "per-loop+layernorm-s42" / "halting.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reason": "the checkpoint is gone"}))
    assert row_of(tables(grid)["halting"], "per-loop + LayerNorm")["so it"] == "not measured: the checkpoint is gone"


def test_another_recipe_has_tables_of_its_own(grid):
    write_row(grid, "per-loop+raw", 42, recipe="modern")
    made = tables(grid)
    assert len(made["main-modern"].rows) == 1 and len(made["main"].rows) == 9
    assert "modern" in made["main-modern"].title


def test_every_score_of_every_row_is_in_the_csv(grid):
    lines = list(csv.DictReader(io.StringIO(depths_csv(read_results(grid)))))
    assert len(lines) == 19 * 2 * 8
    line = next(
        e for e in lines if (e["condition"], e["seed"], e["split"], e["loops"]) == ("per-loop+raw", "42", "test", "2")
    )
    assert float(line["ce"]) == 4.417


def test_every_sign_of_the_real_tables_is_one_that_latex_knows(grid):
    for table in tables(grid).values():
        assert table.latex().isascii(), [sign for sign in table.latex() if not sign.isascii()]


def test_figures_are_a_drawing_and_a_page_and_tables_are_text_for_three_readers(published):
    figures = {path.name for path in (published / "figures").iterdir()}
    names = ("figure1_exit_plane", "figure2_visibility_activity", "figure3_thirty_loops", "figure4_frontier")
    assert figures == {f"{name}.{end}" for name in (*names, "alpha_sweep", "gates") for end in ("svg", "pdf")}
    written = {path.name for path in (published / "tables").iterdir()}
    assert {f"{name}.{ending}" for name in tables(published) for ending in ("md", "csv", "tex")} <= written


def test_figures_change_with_their_numbers(grid, published):
    names = sorted(path.name for path in (published / "figures").glob("*.svg"))
    before = {name: (published / "figures" / name).read_bytes() for name in names}

    def change(evaluation, audit):
        evaluation["splits"]["valid"]["depths"][0]["ce"] += 1
        evaluation["splits"]["valid"]["depths"][0]["perplexity"] += 9
        audit["variables"][0]["visibility"] = 0.5
        audit["loops"][0]["scale"] *= 2
        audit["alpha_sweep"]["loops"][0]["ce"][0] += 1

    write_row(grid, "per-loop+raw", 42, change=change)
    path = grid / "rows" / "per-loop+raw-s42" / "halting.json"
    halting = json.loads(path.read_text())
    halting["gates"][0]["loops"][1]["logit"] = 900.0
    path.write_text(json.dumps(halting))
    publish(grid, print)
    assert [name for name in names if (grid / "figures" / name).read_bytes() == before[name]] == []


def test_the_frontier_does_not_take_the_noise_of_a_busy_machine_for_a_slow_condition(grid):
    from loopscope.studies.figures import frontier

    def busy(evaluation, audit):
        for each in evaluation["throughput"]:
            each["tokens_per_second"] /= 3

    write_row(grid, "per-loop+raw", 42, change=busy)
    (chart,) = frontier(read_results(grid).view("paper"))
    speeds = {tuple(series.xs) for series in chart.series}
    assert speeds == {(50_000, 25_000, 50_000 / 3, 12_500)}


def test_figures_that_have_no_numbers_are_not_drawn(grid, published):
    shutil.copytree(published / "figures", grid / "figures")
    for path in grid.glob("rows/*/audit.json"):
        path.unlink()
    publish(grid, print)  # and those of before are gone
    assert {path.stem for path in (grid / "figures").iterdir()} == {"figure1_exit_plane", "figure4_frontier", "gates"}


def test_without_matplotlib_everything_else_is_made_and_a_sentence_says_what_is_missing(grid, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("loopscope.studies.figures", "loopscope.show.drawing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    said: list[str] = []
    publish(grid, said.append)
    assert "no figures: they need matplotlib" in said[0]
    assert (grid / "tables" / "main.md").exists() and not (grid / "figures").exists()


def test_a_folder_without_a_grid_is_one_sentence(tmp_path):
    with pytest.raises(RunError, match=r"has no grid\.json"):
        read_results(tmp_path)


def test_a_damaged_file_is_named(grid):
    path = grid / "rows" / "per-loop+raw-s42" / "eval.json"
    path.write_text("{")
    with pytest.raises(RunError, match=re.escape(str(path))):
        read_results(grid)


def test_failed_rows_are_listed_and_unfinished_ones_left_out(grid):
    for name, state in (("per-loop+raw-s42", "failed"), ("per-loop+raw-s101", "running")):
        path = grid / "rows" / name / "row.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": state, "error": "boom"}))
    results = read_results(grid)
    assert [(failure.name, failure.error) for failure in results.failures] == [("per-loop+raw-s42", "boom")]
    assert len(results.rows) == 17


BROKEN = ("{broken", "[]")
EMPTY = ("", "null", "{}")
DAMAGED = [
    (name, content)
    for name in ("row.json", "eval.json", "audit.json", "audit-untrained.json")
    for content in (*BROKEN, *EMPTY)
]
DAMAGED += [("manifest.json", content) for content in (*BROKEN, "", "null")]  # nothing in it is needed
DAMAGED += [("config.yaml", content) for content in BROKEN]  # an empty one is the default configuration


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_result_is_one_sentence_that_names_the_file(grid, name, content):
    folder = grid / "rows" / "per-loop+raw-s42"
    (folder / name).write_text(content)
    with pytest.raises(LoopscopeError, match=re.escape(str(folder / name))):
        publish(grid, print)


@pytest.mark.parametrize("record", [{"condition": "unheard-of"}, {"recipe": "of old"}, {"seed": None}])
def test_a_row_of_something_unknown_is_refused(grid, record):
    path = grid / "rows" / "per-loop+raw-s42" / "row.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | record))
    with pytest.raises(RunError, match="names no condition, recipe and seed that loopscope knows"):
        read_results(grid)


WRONG = [("row.json", "state", "asleep"), ("eval.json", "splits.valid.depths.0.ce", "4.4")]
WRONG += [("audit.json", "loops.3.scale", [1.0]), ("audit-untrained.json", "loops.3.lemma_2", 7)]


def put(value, path: str, wrong) -> None:
    """Set what a path of names and places leads to."""
    *before, last = path.split(".")
    for name in before:
        value = value[int(name) if isinstance(value, list) else name]
    value[int(last) if isinstance(value, list) else last] = wrong


@pytest.mark.parametrize(("name", "path", "wrong"), WRONG)
def test_a_value_of_the_wrong_kind_is_one_sentence_that_names_file_and_place_and_no_stop_for_a_page(
    grid, name, path, wrong
):
    file = grid / "rows" / "per-loop+raw-s42" / name
    content = json.loads(file.read_text())
    put(content, path, wrong)
    file.write_text(json.dumps(content))
    with pytest.raises(RunError, match=re.escape(f"{file} ")) as caught:
        read_results(grid)
    assert path.split(".")[0] in str(caught.value) and "delete it and run" in str(caught.value)
    run = read_run(file.parent, "run")
    assert list(run.problems) == [name] and verdict_on([run]).headline


@pytest.mark.parametrize(
    ("path", "wrong"), [("recipes", {}), ("recipes.paper.epochs", "x"), ("recipes.paper.config.model.width", "x")]
)
def test_a_value_of_the_wrong_kind_in_grid_json_is_one_sentence_that_names_it(grid, path, wrong):
    content = json.loads((grid / "grid.json").read_text())
    put(content, path, wrong)
    (grid / "grid.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=re.escape(f"{grid / 'grid.json'}")):
        read_results(grid)


def test_metrics_with_a_wrong_line_are_told_and_left_out(grid):
    run = RunFolder(grid / "rows" / "per-loop+raw-s42")
    run.append_metrics(eval_row(5, [5.0, 4.0], [1.0, 3.0]))
    assert row_of(tables(grid)["norms_in_training"], "per-loop + raw")["5"] == "3.000"
    with run.metrics_path.open("a") as file:
        file.write('{"kind": "eval", "step": 10, "ce": [5.0, 4.0], "norm": [1.0, "x"]}\n')
    told = "does not fit at norm[1]: expected a number or null, got a text (line 2); it is left out"
    assert f"{run.metrics_path} {told}" in read_results(grid).notes
    assert read_run(run.path, "run").evals == []


@pytest.mark.parametrize("name", ["eval.json", "audit.json", "row.json", "manifest.json", "config.yaml"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "huge", "no text", "long number", "deep"])
def test_a_hostile_file_is_one_sentence_that_names_it(grid, name, kind):
    path = grid / "rows" / "per-loop+raw-s42" / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(100 << 20)
    else:
        path.write_bytes({"no text": b"\xff\xfe{", "long number": b"9" * 10_000, "deep": b"[" * 60_000}[kind])
    with pytest.raises(RunError, match=re.escape(str(path))):
        read_results(grid)
