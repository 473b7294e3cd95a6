"""The page says what the files say, survives every file, and carries nothing that could run or call out."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_up import claims, quantity, sample_calibration, sample_certificate, write_reproduction, write_run
from markupsafe import Markup

from loopscope.cli import main
from loopscope.cli.report import Report
from loopscope.errors import ConfigError, LoopscopeError, RunError, UnsupportedError
from loopscope.files import read_yaml
from loopscope.options import PushOptions
from loopscope.results.audit import Motion, Push, PushResult, Recipe, TokenMotion
from loopscope.results.measures import exit_failure, final_norm
from loopscope.results.record import load_record, write_record
from loopscope.results.run import Manifest
from loopscope.show import page as build
from loopscope.show.chart import Chart, Level, Style
from loopscope.show.inputs import Inputs, compare, group_runs, read_inputs
from loopscope.show.numbers import plain
from loopscope.show.page import build_report, render, write_report


@pytest.fixture
def drawn() -> None:
    """For tests that are about the page with its drawings."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch) -> None:
    """All others leave the drawing out, which takes a second, and look at the charts."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(build, "drawings", lambda: Undrawn)


class Undrawn:
    """A drawing without lines."""

    @staticmethod
    def svg(*charts: Chart) -> Markup:
        return Markup('<svg data-chart="{}"></svg>').format(charts[0].name)

    @staticmethod
    def swatch(style: Style) -> Markup:
        return Markup("<svg></svg>")


class Elements(HTMLParser):
    """Elements with their attributes, visible text, and what stands in script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.text += " "
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def charts_of(*paths: Path) -> dict[str, Chart]:
    """The charts of the page that have something in them, by name."""
    groups = group_runs(read_inputs(paths).runs)
    charts = [draw(groups) for *_, draws in build.CHAPTERS for draw in draws]
    return {chart.name: chart for chart in charts if chart.is_drawn}


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def words_of(page: str) -> str:
    return " ".join(Elements(page).text.split())


def text_of(*paths: Path) -> str:
    return words_of(build_report(paths).html)


def labels(*paths: Path) -> list[str]:
    return [group.label for group in group_runs(read_inputs(paths).runs)]


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_page_asks_for_nothing_and_its_policy_allows_its_own_scripts_alone(reproduction_page):
    page = reproduction_page
    elements = Elements(page)
    for tag, attributes in elements.found:
        assert "src" not in attributes and not any(name.startswith("on") for name in attributes), (tag, attributes)
        target = attributes.get("href")
        assert target is None or target.startswith("#") or target == "data:,"
    (policy,) = [meta["content"] for meta in elements.all("meta") if "http-equiv" in meta]
    assert policy is not None and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0] and "http" not in policy
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.findall(r"'sha256-([^']+)'", policy) == [digest]


def test_the_same_files_give_the_same_bytes(reproduction, reproduction_page, drawn):
    assert build_report([reproduction]).html == reproduction_page


def test_twenty_five_runs_stay_below_eight_megabytes(tmp_path, drawn):
    (run,) = read_inputs([write_run(tmp_path / "run", steps=10_000)]).runs
    page = render(Inputs([replace(run, name=f"run-{n:02}") for n in range(25)], []))
    assert page.num_runs == 25 and len(page.html.encode()) < 8e6


def test_building_a_page_does_not_import_torch(reproduction):
    code = (
        "import sys, pathlib; from loopscope.show.page import build_report; "
        f"build_report([pathlib.Path({str(reproduction)!r})]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_matplotlib_the_package_to_install_is_named(reproduction, monkeypatch, drawn):
    monkeypatch.setitem(sys.modules, "loopscope.show.drawing", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install 'loopscope[report]'")):
        build_report([reproduction])


# --- hostile and damaged files ---------------------------------------------------------------------------------------

PAYLOADS = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "<!--<script>", '"><svg onload=x()>']


@pytest.mark.parametrize("payload", PAYLOADS)
def test_every_text_of_every_file_is_only_text(tmp_path, payload, drawn):
    folder = write_reproduction(tmp_path / "grid", {"per-loop+rmsnorm": 1, "per-loop+raw": 1})
    row = folder / "rows" / "per-loop+raw-s42"
    clean = Elements(build_report([folder]).html)
    for path in (row / "manifest.json", row / "eval.json", folder / "grid.json"):
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()), payload)))
    audit = json.loads((row / "audit.json").read_text())
    (row / "audit.json").write_text(json.dumps(poisoned(audit, payload, but=("verdict", "motion"))))
    judged = json.loads((folder / "claims.json").read_text())
    (folder / "claims.json").write_text(json.dumps(poisoned(judged, payload)))
    edit(row / "row.json", state="failed", error=payload, recipe=payload)
    config = (row / "config.yaml").read_text().replace("placement: per-loop", f"placement: {json.dumps(payload)}")
    (row / "config.yaml").write_text(config.replace("data:\n  - builtin", f"data:\n  - {json.dumps(payload)}"))
    with (row / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "step": 1, "event": payload, "message": payload}) + "\n")
    page = build_report([folder], title=payload).html
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} == {tag for tag, _ in clean.found}, "no element comes out of a file"
    assert len(elements.all("script")) == 1 and not elements.all("img")
    assert "<!--" not in page, "nor a comment"
    assert payload in elements.text


def poisoned(value: Any, payload: str, but: tuple[str, ...] = ()) -> Any:
    """The same value with every text in it replaced, but those keys whose words a reader refuses if it does not know
    them.
    """
    if isinstance(value, dict):
        return {key: item if key in but else poisoned(item, payload, but) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, payload, but) for item in value]
    return payload if isinstance(value, str) else value


def test_a_folder_named_like_a_script_is_text_in_page_and_charts(tmp_path, drawn):
    write_run(tmp_path / "<script>alert(1)<" / "b>%{x}", files=())
    write_run(tmp_path / "<script>alert(1)<" / "other", "per-loop+raw", files=())
    page = build_report([tmp_path / "<script>alert(1)<"]).html
    assert "b>%{x}" in Elements(page).text
    assert "<title>per-loop + RMSNorm · b&gt;%{x}</title>" in page, "told over its line"


def test_numbers_that_are_not_finite_break_neither_json_nor_charts(make_run):
    folder = make_run()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[5:8]:
        row["norm"] = [None] * 4
    rows[-1]["ce"] = [None] * 4
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = charts_of(folder)
    (norms,) = charts["norm-training"].series
    assert (
        len(charts["norm-training"].points(norms)) == sum(row["kind"] == "train" for row in rows) - 2
    )  # rows 5..7 hold an evaluation too


def test_numbers_that_no_float_holds_are_left_out(make_run):
    folder = make_run()
    audit = (folder / "audit.json").read_text()
    (folder / "audit.json").write_text(audit.replace('"width": 64', f'"width": {10**400}'))
    edit(folder / "manifest.json", parameters="many")
    assert build_report([folder]).num_runs == 1


@pytest.mark.parametrize("name", ["manifest.json", "eval.json", "audit.json", "config.yaml", "row.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\x00\x01"])
def test_a_damaged_file_is_named_and_the_rest_is_shown(make_run, name, content):
    folder = make_run()
    (folder / name).write_text(content)
    page = build_report([folder])
    assert f"{name} " in Elements(page.html).text and "is left out" in Elements(page.html).text
    assert 'data-chart="norm-training"' in page.html, "what can be read is drawn"
    assert any("not right and left out" in sentence for sentence in page.verdict.sentences)


def test_bytes_that_are_no_text_are_survived(make_run):
    folder = make_run()
    (folder / "manifest.json").write_bytes(b'{"command": ["loopscope", "\xff\xfe \\ud800"]}')
    page = build_report([folder]).html
    assert page.encode("utf-8")
    assert "loopscope" in page


def test_a_last_line_that_is_being_written_is_no_problem_and_one_before_is(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert "unreadable" not in text_of(folder)
    before = len(read_inputs([folder]).runs[0].train)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"kind": "train", "step": 201}\n')
    assert f"metrics.jsonl is not valid JSON (line {before + 5}); it is left out" in text_of(folder)


BOMBS = {
    "uses YAML aliases": [
        "l0: &l0 [x]\n" + "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9)),
        "model: &self {width: *self}",
    ],
    "is nested more than 16 levels deep": ["[" * 60_000, "{" * 60_000, "- " * 30_000, "a: " + "[" * 50 + "]" * 50],
    "has a value of more than 3,000 characters": [
        "a: 0x" + "f" * 9000,
        "a: " + "1:" * 20_000 + "1",
        f"a: '{'x' * 60_000}'",
        "a\n" * 9000,
    ],
    "has more than 4,000 names and values": ["{" + "a: 1, " * 10_000 + "}", "? a\n" * 15_000],
    "is larger than 64 kB": ["[" * 100_000, "a: b\n" * 20_000],
    "is not valid YAML": [
        "a: !!python/object/apply:os.system [true]",
        "a: 2024-99-99",
        "\t- x",
        "a: !!int x",
        "%" * 9000,
        "? " * 10,
    ],
    "does not hold a mapping": ["", "1", "- a"],
}


@pytest.mark.parametrize(("sentence", "text"), [(sentence, text) for sentence in BOMBS for text in BOMBS[sentence]])
def test_a_hostile_configuration_is_named_and_costs_next_to_nothing(tmp_path, sentence, text):
    """What it costs is counted in memory, which says the same on every machine: no clock decides a test."""
    (tmp_path / "config.yaml").write_text(text)
    problems: dict[str, str] = {}
    tracemalloc.start()
    assert read_yaml(tmp_path / "config.yaml", problems) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert list(problems) == ["config.yaml"] and peak < 20e6
    assert sentence in problems["config.yaml"]


def test_our_own_configurations_are_read_whole(make_run):
    folder = make_run("run", "per-loop+penalty")
    problems: dict[str, str] = {}
    assert read_yaml(folder / "config.yaml", problems) == yaml.safe_load((folder / "config.yaml").read_text())
    assert problems == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"verdict": ' + "[" * 100_000, "does not fit at verdict"),
        ('{"verdict": ' + "9" * 10_000 + "}", "does not fit at verdict"),
        ('{"verdict": "' + "x" * (5 << 20) + '"}', "is larger than 4 MB"),
    ],
)
def test_a_hostile_json_file_is_named(make_run, content, sentence):
    folder = make_run()
    (folder / "audit.json").write_text(content)
    assert f"audit.json {sentence}" in text_of(folder) and "is left out" in text_of(folder)


def test_json_that_only_just_can_be_read_is_shown_in_bounds(make_run):
    """Values nested a few hundred deep, long texts, and the same name twice, of which the last counts."""
    folder = make_run()
    deep, text = "[" * 400 + "]" * 400, "x" * 1_000_000
    long = f'"command": ["loopscope", "{text}"], "choices": [{{"name": "long", "value": "{text}", "reason": "{text}"}}]'
    (folder / "manifest.json").write_text(f'{{"parameters": 1, "parameters": 1234, "of old": {deep}, {long}}}')
    page = build_report([folder])
    assert "1,234" in page.html and "x" * 4000 + "…" in page.html and "x" * 4001 not in page.html
    assert page.verdict.tone == "bad", "the rest is read as ever"


@pytest.mark.parametrize("line", ['{"kind": "train", "step": 1, "loss": [' + "1, " * 9000 + "1]}", "[" * 900])
def test_metrics_with_a_line_that_never_ends_are_left_out(make_run, monkeypatch, line):
    monkeypatch.setattr("loopscope.files.MOST_LINE_BYTES", 2000)
    folder = make_run(files=())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    (run,) = read_inputs([folder]).runs
    assert run.train == [] and list(run.problems) == ["metrics.jsonl"]


def test_a_file_that_is_huge_is_not_read(make_run, monkeypatch):
    folder = make_run()
    with (folder / "eval.json").open("wb") as file:
        file.truncate(100 << 20)
    monkeypatch.setattr("loopscope.results.run.MOST_METRICS_BYTES", 1 << 10)
    text = text_of(folder)
    assert "eval.json is larger than 4 MB and is left out" in text
    assert "metrics.jsonl is larger than 1 kB and is left out" in text


# --- what is read ----------------------------------------------------------------------------------------------------


def test_runs_reproductions_and_folders_of_them_mix_and_nothing_counts_twice(reproduction, tmp_path):
    single = write_run(tmp_path / "runs" / "single")
    write_run(tmp_path / "runs" / "second", "per-loop+raw")
    (tmp_path / "runs" / "notes").mkdir()
    inputs = read_inputs([reproduction, tmp_path / "runs", single, reproduction / "rows" / "per-loop+raw-s42"])
    assert len(inputs.runs) == 9 + 2 and len(inputs.reproductions) == 1


def test_runs_of_the_same_name_are_told_apart_by_their_folder(tmp_path):
    for place in ("one", "two"):
        write_run(tmp_path / place / "run")
    names = [run.name for run in read_inputs([tmp_path / "one", tmp_path / "two"]).runs]
    assert names == ["one/run", "two/run"]


def test_a_record_with_claims_and_without_rows_is_a_page(reproduction, tmp_path):
    (tmp_path / "record").mkdir()
    shutil.copy(reproduction / "claims.json", tmp_path / "record")
    page = build_report([tmp_path / "record"])
    assert page.num_runs == 0 and "C9 does not hold at this size" in " ".join(page.verdict.sentences)


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_a_place_without_runs_is_one_sentence(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=path):
        build_report([tmp_path / path])


def test_without_evaluation_the_last_one_of_training_counts_and_the_page_says_so(make_run):
    folder = make_run(files=())
    (run,) = read_inputs([folder]).runs
    assert exit_failure(run) == pytest.approx(run.depths[0].ce - run.depths[3].ce)
    assert run.depths_from == "validation at step 200" and "validation at step 200" in text_of(folder)


def test_exits_and_norms_are_taken_at_the_trained_depth_and_not_at_the_deepest_measured(make_run):
    (run,) = read_inputs([make_run()]).runs
    assert len(run.depths) == 8 and run.num_loops == 4
    assert final_norm(run) == run.depths[3].norm and exit_failure(run) == run.depths[0].ce - run.depths[3].ce


@pytest.mark.parametrize(
    ("done", "row", "sentence"),
    [
        (200, {}, "finished at step 200 of 200"),
        (120, {}, "Mind: at step 120 of 200, still going or interrupted"),
        (0, {}, "nothing was logged yet"),
        (
            120,
            {"state": "failed", "error": "killed twice"},
            "Failed. This run broke off before it was audited.",
        ),
        (120, {"state": "failed", "error": "killed twice"}, "Mind: failed at step 120 of 200: killed twice"),
        (120, {"state": "running"}, "at step 120 of 200, still going or interrupted"),
    ],
)
def test_how_a_run_ended_is_said(make_run, done, row, sentence):
    folder = make_run(done=done, files=())
    if row:
        (folder / "row.json").write_text(json.dumps(row))
    assert sentence in text_of(folder)


def test_a_run_that_a_guard_stopped_says_why(make_run):
    folder = make_run(done=100, files=())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "step": 101, "event": "stop", "message": "rolled back 3 times"}) + "\n")
    assert "stopped at step 100 of 200: rolled back 3 times" in text_of(folder)


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_the_verdict_names_the_blind_conditions_and_gives_the_measured_contrast(reproduction):
    verdict = build_report([reproduction]).verdict
    assert "the loop carries the length of its state, and no loss sees it" in verdict.headline
    assert verdict.tone == "bad" and verdict.headline.startswith("Blind spot in 4 of 9 audited runs: ")
    where, free, scale, exits, remedy, claims = verdict.sentences
    assert where.startswith("Where: per-loop + RMSNorm and terminal + RMSNorm. Free of it: per-loop + raw")
    assert free.startswith("Free range: scale is free to grow without limit")
    assert free.endswith("and training drives it up by 4.1 % a step at most (in 4 of 4 runs it is driven).")
    runs = read_inputs([reproduction]).runs
    by_name = {
        name: [final_norm(r) for r in runs if r.name.startswith(name)] for name in ("per-loop+rmsnorm", "per-loop+raw")
    }
    ratio = sum(by_name["per-loop+rmsnorm"]) / sum(by_name["per-loop+raw"])
    assert f"{float(f'{ratio:.3g}'):g} times" in scale
    assert "+4.80 nats" in exits and "−0.01 when every loop is" in exits
    assert "--norm-penalty 0.01" in remedy
    assert "1 of 3 hold; C9 does not hold at this size; C10 was not measured" in claims


def test_a_controlled_run_is_called_controlled(make_run):
    verdict = build_report([make_run("run", "per-loop+raw")]).verdict
    assert verdict.tone == "good" and verdict.headline.startswith("Controlled.")


def test_without_an_audit_the_page_says_what_training_saw_and_no_more(make_run):
    hidden = build_report([make_run("run", files=())]).verdict
    assert hidden.tone == "open" and "the loss hardly sees the scale" in hidden.headline
    seen = build_report([make_run("other", "per-loop+raw", files=())]).verdict
    assert seen.tone == "open" and "Nothing that training logged points to a blind spot" in seen.headline


def test_an_inter_loop_norm_is_not_called_hidden(make_run):
    verdict = build_report([make_run("run", "per-loop+inter-loop-norm", files=())]).verdict
    assert "Nothing that training logged points to a blind spot" in verdict.headline


def test_an_alarm_while_training_is_the_verdict_until_an_audit(make_run):
    folder = make_run(files=())
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "step": 90, "event": "blind-spot", "message": "‖h_K‖ is 565"}) + "\n")
    assert build_report([folder]).verdict.headline.startswith("Alarm. In this run the scale ran away")
    write_run(folder, files=("audit.json",))
    assert build_report([folder]).verdict.headline.startswith("Blind spot.")


def test_a_single_run_tells_its_growth_and_the_price_of_its_exits(make_run):
    sentences = " ".join(build_report([make_run("run", "terminal+rmsnorm")]).verdict.sentences)
    assert "times the" in sentences and "of the first logged step" in sentences
    assert "costs much: +4.80 nats per token, 122 times the perplexity" in sentences
    cheaper = " ".join(build_report([make_run("cheaper", "per-loop+final-only")]).verdict.sentences)
    assert "costs something: +0.11 nats per token, 1.12 times the perplexity" in cheaper


def test_runs_without_an_audit_are_counted_beside_those_with_one(make_run, tmp_path):
    make_run("audited")
    make_run("other", "per-loop+raw", files=())
    assert "Mind: 1 has not been audited." in build_report([tmp_path]).verdict.sentences


def test_runs_that_are_not_finished_are_counted_as_such(make_run, tmp_path):
    make_run("whole", files=())
    make_run("part", "per-loop+raw", done=100, files=())
    assert "Mind: 1 run is not finished and counts as far as it is." in build_report([tmp_path]).verdict.sentences
    make_run("other", "terminal+raw", done=100, files=())
    assert "Mind: 2 runs are not finished and count as far as they are." in build_report([tmp_path]).verdict.sentences


def test_rows_that_were_asked_for_and_never_started_are_counted(reproduction, tmp_path):
    folder = shutil.copytree(reproduction, tmp_path / "grid")
    shutil.rmtree(folder / "rows" / "per-loop+penalty-s42")
    write_run(tmp_path / "another")
    sentences = " ".join(build_report([folder, tmp_path / "another"]).verdict.sentences)
    assert "1 of 9 rows are not here: not begun yet, or kept elsewhere" in sentences


# --- conditions, fixed and varied ------------------------------------------------------------------------------------


def test_conditions_have_the_names_and_the_order_of_the_paper(reproduction):
    assert labels(reproduction) == [
        "per-loop + RMSNorm",
        "terminal + RMSNorm",
        "per-loop + raw",
        "terminal + raw",
        "per-loop + penalty",
    ]


def test_a_condition_looks_the_same_on_every_page_and_no_two_look_alike(tmp_path, reproduction):
    write_reproduction(tmp_path / "all", {"per-loop+penalty": 1, "per-loop+layernorm": 1}, modern=("per-loop+raw",))

    def looks(path: Path) -> dict[str, Style]:
        groups = group_runs(read_inputs([path]).runs)
        return {group.label: group.style for group in groups}

    small, large = looks(reproduction), looks(tmp_path / "all")
    assert small["per-loop + penalty"] == large["per-loop + penalty"]
    for found in (small, large):
        assert len(set(found.values())) == len(found)


def test_another_recipe_is_another_condition(tmp_path):
    folder = write_reproduction(tmp_path / "grid", {"per-loop+raw": 1}, modern=("per-loop+raw",))
    assert labels(folder) == ["per-loop + raw", "per-loop + raw (modern)"]


def test_runs_that_differ_in_something_else_are_not_mixed(tmp_path):
    for n, steps in enumerate((200, 200, 400)):
        write_run(tmp_path / f"run-{n}", seed=n, steps=steps)
    assert labels(tmp_path) == ["per-loop + RMSNorm", "per-loop + RMSNorm (steps 400)"]


def test_different_penalties_are_different_conditions(tmp_path):
    for penalty in ("0.01", "0.1"):
        folder = write_run(tmp_path / penalty, "per-loop+penalty")
        config = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(config.replace("norm_penalty: 0.01", f"norm_penalty: {penalty}"))
    assert labels(tmp_path) == ["per-loop + RMSNorm + penalty 0.01", "per-loop + RMSNorm + penalty 0.1"]


def test_what_was_fixed_and_what_varied_comes_from_the_resolved_configurations(reproduction, tmp_path):
    folder = shutil.copytree(reproduction, tmp_path / "grid")
    edit(folder / "rows" / "per-loop+raw-s101" / "manifest.json", threads=2)
    (folder / "rows" / "terminal+raw-s42" / "manifest.json").unlink()
    factors = compare(group_runs(read_inputs([folder]).runs))
    varied = {factor.name: factor.values for factor in factors.varied}
    assert varied == {
        "model.readout": ["rmsnorm", "rmsnorm", "raw", "raw", "rmsnorm"],
        "objective.placement": ["per-loop", "terminal", "per-loop", "terminal", "per-loop"],
        "objective.norm_penalty": ["0.0", "0.0", "0.0", "0.0", "0.01"],
        "training.seed": ["42, 101", "42, 101", "42, 101", "42, 101", "42"],
        "machine.threads": ["1", "1", "1, 2", "1", "1"],
    }
    assert ("training.lr", "0.002") in factors.fixed and ("parameters", "172288") in factors.fixed


# --- the charts ------------------------------------------------------------------------------------------------------


def test_every_chart_has_a_sentence_and_a_table_with_the_numbers_it_draws(reproduction, reproduction_page):
    page, charts = reproduction_page, charts_of(reproduction)
    drawings = [attributes for tag, attributes in Elements(page).found if "data-chart" in attributes]
    assert [drawing["data-chart"] for drawing in drawings] == list(charts) and len(charts) == 11
    assert all(drawing["role"] == "img" and "The numbers are in" in str(drawing["aria-label"]) for drawing in drawings)
    assert page.count('class="look"') == 11 == page.count("The same as a table")
    for name, chart in charts.items():
        section = page.split(f'data-chart="{name}"')[1].split("<details>")[1].split("</figure>")[0]
        for series in chart.series:
            shown = [value for value in series.ys if value is not None]
            assert plain(shown[0]) in section and plain(shown[-1]) in section, (name, series.label)


def test_the_plane_has_norm_and_exit_failure_of_every_run(reproduction):
    runs = {run.name: run for run in read_inputs([reproduction]).runs}
    series = charts_of(reproduction)["plane"].series
    assert len(series) == len(runs)
    for each in series:
        run = runs[each.label.split(" · ")[1]]
        assert (each.xs, each.ys) == ([final_norm(run)], [exit_failure(run)])


def test_the_alpha_sweep_is_a_change_against_alpha_one(reproduction):
    for series in charts_of(reproduction)["alpha"].series:
        assert series.ys[list(series.xs).index(1.0)] == 0.0
        assert (max(series.ys) == 0) == ("raw" not in series.label)


def test_predicted_and_measured_growth_are_both_drawn_and_both_in_the_table(reproduction, reproduction_page):
    chart = charts_of(reproduction)["activity-increments"]
    assert sorted({series.mode for series in chart.series}) == ["lines", "marks"]
    assert "per-loop + raw · per-loop+raw-s42 · predicted" in reproduction_page
    assert {len(series.xs) for series in chart.series} == {29}, "the last loop has no increment"


def test_exits_far_worse_than_any_full_depth_leave_the_frame_and_the_page_says_so(reproduction, reproduction_page):
    chart = charts_of(reproduction)["frontier"]
    assert max(max(series.ys) for series in chart.series) > chart.y.top
    assert "leave the frame at the top" in reproduction_page
    assert max(series.ys[3] for series in chart.series) < chart.y.top, "no full depth does"


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    for name, sha in (("a", "1" * 64), ("b", "2" * 64)):
        folder = write_run(tmp_path / name)
        manifest = load_record(folder / "manifest.json", Manifest)
        assert manifest.data is not None
        write_record(folder / "manifest.json", replace(manifest, data=replace(manifest.data, tokenizer_sha256=sha)))
    page = build_report([tmp_path]).html
    assert charts_of(tmp_path)["frontier"].y.title == "bits per byte"
    assert "different tokenizers" in page


def test_policies_that_were_evaluated_stand_beside_the_fixed_depths_of_their_run(tmp_path):
    folder = tmp_path / "run"
    write_run(folder)
    splits = json.loads((folder / "eval.json").read_text())["splits"]
    point = {"policy": "p.json", "rule": "margin", "threshold": 2.5, "fill": "copy", "mean_loops": 2.25, "ce": 4.0}
    splits["valid"]["halting"] = [point]
    edit(folder / "eval.json", splits=splits)
    charts = charts_of(folder)
    depths, mark = charts["halting"].series
    assert mark.xs == [2.25] and mark.ys == [pytest.approx(math.exp(4.0))] and "p.json" in mark.label
    assert depths.ys == charts["frontier"].series[0].ys


def test_rules_that_are_certified_at_the_same_bound_are_drawn_with_the_bound(tmp_path):
    folder = write_run(tmp_path / "run")
    kl, gate = sample_certificate("kl", -0.1, 2.5, 0.008), sample_certificate("gate", None, None, None)
    found = sample_calibration(sample_certificate("fixed", 3.0, 3.0), kl, gate)
    write_record(folder / "calibration.json", found)
    chart = charts_of(folder)["certified"]
    assert [(series.xs, series.ys) for series in chart.series] == [([3.0], [0.2]), ([2.5], [0.8])]
    assert chart.levels == [Level(1.0, "allowed")]
    assert "no halting rule was certified" in build_report([write_run(tmp_path / "other")]).html


def test_depths_that_were_timed_are_drawn_as_quality_against_the_speed_of_decoding(tmp_path):
    folder = write_run(tmp_path / "timed")
    rates = {1: 400.0, 2: 200.0, 4: 100.0}
    timings = [
        {"k": k, "what": what, "tokens_per_second": rate * factor, "low": rate, "high": rate, "bytes_per_token": 64 * k}
        for k, rate in rates.items()
        for what, factor in (("prefill", 50), ("decode", 1))
    ]
    edit(folder / "eval.json", speed=timings)
    charts = charts_of(folder)
    (series,), frontier = charts["speed"].series, charts["frontier"].series[0]
    assert series.xs == [400.0, 200.0, 100.0]
    assert series.ys == [frontier.ys[k - 1] for k in rates]
    untimed = write_run(tmp_path / "untimed")
    assert "no run has been timed" in build_report([untimed]).html


def test_what_is_not_measured_is_said_and_not_drawn_empty(make_run):
    page = build_report([make_run(done=40, files=())]).html
    drawn = re.findall(r'data-chart="([^"]+)"', page)
    assert drawn == ["norm-training", "share-loops", "share-training"]
    text = Elements(page).text
    assert "α-sweep, 30 loops, Audits and remedies: no run has been audited" in " ".join(text.split())
    assert text.count("Depth and quality") == 1, "said once, though two charts are missing"
    assert not re.findall(r'id="(plane|alpha|activity|frontier|audits|claims|factors)"', page), "no empty section"
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(re.findall(r'id="([^"]+)"', page))


def test_what_is_small_looks_small(make_run):
    """A single run whose loss notices next to nothing is no steep line: the axes keep their reach."""
    charts = charts_of(make_run())
    assert charts["alpha"].y.shows == (-1.0, 1.0) and set(charts["alpha"].series[0].ys) == {0.0}
    assert charts["plane"].x.shows == (3.0, 300.0)
    assert charts["activity-increments"].y.scale == "linear", "growth of one size"


# --- audits, claims, runs --------------------------------------------------------------------------------------------


def test_audits_print_verdict_evidence_remedy_and_heaviest_tokens(reproduction_page):
    text = words_of(reproduction_page)
    assert "✗ blind spot" in text and "✓ controlled" in text and "1 blind direction (scale)" in text
    assert "let a loss see the scale" in text and "the next loop carries it on with gain 0.99" in text
    assert "−0.0040" in text and "<b>the</b>" in text


def change_variables(folder: Path, *changes: dict[str, Any], push: dict[str, Any] | None = None) -> Path:
    """Change the first variables of an audit; further changes are further variables."""
    audit = json.loads((folder / "audit.json").read_text())
    known = audit["variables"]
    unmeasured = dict.fromkeys(("free_range", "free_tokens", "drift", "driven"))
    known += [{**known[0], **unmeasured} for _ in changes[len(known) :]]
    for variable, change in zip(known, changes, strict=False):
        variable.update(change)
    edit(folder / "audit.json", variables=known, push=push)
    return folder


def columns_of(page: str) -> list[str]:
    """The columns of the table of variables."""
    return re.findall(r"<th scope=\"col\">(.*?)</th>", page.split('class="cards variables"')[1].split("</thead>")[0])


def test_a_blind_variable_says_how_far_it_is_free_and_how_training_drives_it(make_run):
    folder = change_variables(make_run(), {"free_range": 70.04, "free_tokens": 0.98, "drift": 0.041, "driven": True})
    page = build_report([folder])
    claim = "free to grow 70-fold before it costs 1 % of perplexity"
    assert f"scale: {claim}; training drives it up by 4.1 % a step." in words_of(page.html)
    assert f"Free range: scale is {claim}, and training drives it up by 4.1 % a step." in page.verdict.sentences
    assert "70-fold 98 % +4.1 % a step" in words_of(page.html), "the numbers, in the table of variables"


def test_a_free_range_without_end_and_a_variable_that_training_leaves_alone_are_said_as_such(make_run):
    folder = change_variables(make_run(), {"free_range": 1e6, "free_tokens": 1.0, "drift": 0.002, "driven": False})
    text = text_of(folder)
    assert "without limit 100 % not driven" in text and "1,000,000" not in text
    assert "training from these weights does not drive it" in text


def test_a_variable_that_is_free_for_a_minority_of_tokens_is_not_given_the_range_of_the_others(make_run):
    text = text_of(change_variables(make_run(), {"free_range": 1.1, "free_tokens": 0.08}))
    assert "free to grow tenfold or more before it costs 1 % of perplexity, for 8 % of the tokens (1.1-fold" in text


def test_a_variable_that_training_drives_down_has_a_minus(make_run):
    assert "−2 % a step" in text_of(change_variables(make_run(), {"drift": -0.02, "driven": True}))


def test_free_ranges_of_several_runs_go_from_the_smallest_to_the_largest(tmp_path):
    change_variables(write_run(tmp_path / "one"), {"free_range": 70.0, "driven": False})
    change_variables(write_run(tmp_path / "two", seed=7), {"free_range": 700.0, "drift": 0.1, "driven": True})
    (free,) = [
        sentence for sentence in build_report([tmp_path]).verdict.sentences if sentence.startswith("Free range: ")
    ]
    assert "scale is free to grow 70-fold before it costs 1 % of perplexity, 700-fold in others" in free
    assert "drives it up by 10 % a step at most (in 1 of 2 runs it is driven)" in free


def test_how_tokens_move_stands_with_the_audit_where_it_was_asked_for(make_run):
    folder = make_run()
    token = TokenMotion(
        kind="slider", period=None, amplitude=0.0, purity=None, rise=1.0, contraction_rate=None, settled_at=4
    )
    motion = Motion(
        loops=64,
        num_loops=4,
        shares={"slider": 1.0},
        period=None,
        purity=None,
        contraction_rate=None,
        settled_at=4.0,
        settled_by_trained_depth=1.0,
        tokens=[token] * 252,
        median_cosine=[],
        notes=[],
    )
    edit(folder / "audit.json", token_motion=asdict(motion))
    assert "252 tokens are 100% slider" in words_of(build_report([folder]).html)


def test_a_push_test_stands_beside_its_variable(make_run):
    scale = Push(
        name="scale",
        growth=17.6,
        reach=17.6,
        paid=0.149,
        size=100.0,
        twin_size=100 / 17.6,
        start_size=5.0,
        growth_by_step=[17.6],
        paid_by_step=[0.149],
        far=True,
    )
    pushed = PushResult(
        model="demo", options=PushOptions(), recipe=Recipe(), pushes=[scale], twin_loss=4.0, notes=[], seconds=1.0
    )
    page = build_report([change_variables(make_run(), push=asdict(pushed))]).html
    assert "ran 17.6-fold, for +0.15 nats" in words_of(page) and "push test" in columns_of(page)
    assert "under a reward it ran 17.6-fold" in words_of(page)


def test_a_carried_tensor_is_a_variable_by_its_name(make_run):
    tensor = {"name": "z_low", "kind": "tensor", "verdict": "blind", "free_range": 1e6, "directions": 3, "width": 8}
    page = build_report([change_variables(make_run(), {}, {}, tensor)])
    assert "z_low: free to grow without limit" in words_of(page.html)
    assert "3 of its 8 directions are blind" in words_of(page.html) and "let an exit read this tensor" in words_of(
        page.html
    )
    assert "z_low blind without limit – –" in words_of(page.html), "its drift is not tried, and that is a gap"
    assert any("z_low is free to grow without limit" in sentence for sentence in page.verdict.sentences)


def test_an_audit_that_measured_no_free_ranges_is_shown_without_them(make_run):
    gone = dict.fromkeys(("free_range", "free_tokens", "drift", "driven"))
    folder = change_variables(make_run(), gone, gone)
    (run,) = read_inputs([folder]).runs
    page = build_report([folder])
    assert run.problems == {} and page.verdict.tone == "bad"
    assert columns_of(page.html) == ["variable", "verdict", "visibility", "delayed", "activity", "evidence"]
    assert "free to grow" not in words_of(page.html)


def test_a_claim_for_which_it_is_too_early_is_neither_held_nor_broken_nor_unmeasured(reproduction, tmp_path):
    folder = Path(shutil.copytree(reproduction, tmp_path / "early"))
    path = folder / "claims.json"
    path.write_text(path.read_text().replace("does not hold at this size", "too early to say"))
    page = build_report([folder])
    assert "1 of 3 hold; for C9 it is too early to say; C10 was not measured" in page.verdict.sentences[-1]
    assert "○ too early to say" in words_of(page.html)


def test_claims_print_ours_the_papers_value_and_a_plain_verdict(reproduction_page):
    text = words_of(reproduction_page)
    assert "✓ holds" in text and "✗ does not hold at this size" in text and "○ not measured" in text
    assert "norm ratio: 226 × [226, 248.6], n = 2" in text and "39,207 (44M) against tens [P]" in text
    assert "by seed 42: 226; 101: 248.6" in text


def test_every_run_has_command_configuration_and_versions_without_the_place_on_disk(reproduction_page):
    text = words_of(reproduction_page)
    assert "loopscope train --preset demo --out runs/per-loop+raw-s42" in text and "/somewhere" not in text
    assert "torch 2.13.0" in text and "wandb" not in text and "placement: terminal" in text
    assert "loopscope reproduce --size demo --out grid" in text
    assert "model.width 512 64" in text, "what differs from the paper"


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_prints_the_verdict(reproduction, tmp_path, capsys, drawn):
    assert Report(runs=(reproduction,), out=tmp_path / "page.html").run() == 0
    out = capsys.readouterr().out
    assert out.startswith("Blind spot in 4 of 9 audited runs: ") and "page.html: 9 runs, 0." in out
    assert (tmp_path / "page.html").read_text("utf-8").lstrip().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_command_prints_json(reproduction, tmp_path, capsys):
    assert Report(runs=(reproduction,), out=tmp_path / "page.html", title="A title", json=True).run() == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runs"] == 9 and result["conditions"] == 5 and result["tone"] == "bad"
    assert result["bytes"] == (tmp_path / "page.html").stat().st_size and len(result["sentences"]) == 6
    assert "<title>loopscope: A title</title>" in (tmp_path / "page.html").read_text("utf-8")


def test_a_page_cannot_be_a_folder(reproduction, tmp_path):
    with pytest.raises(ConfigError, match="--out"):
        write_report([reproduction], tmp_path)
    assert issubclass(ConfigError, LoopscopeError) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [([], "name at least one run folder"), ([".", "-o", "no/such/page.html"], "no/such/page.html")],
)
def test_a_report_about_nothing_or_to_nowhere_is_a_mistake(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    assert main(["report", *arguments]) == 2
    assert sentence in capsys.readouterr().err and list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_a_remedy_that_only_some_runs_need_comes_with_their_names(tmp_path):
    folder = write_reproduction(tmp_path / "grid", {"per-loop+rmsnorm": 1, "per-loop+layernorm": 1})
    path = folder / "rows" / "per-loop+layernorm-s42" / "audit.json"
    audit = json.loads(path.read_text())
    audit["variables"][1] |= {"verdict": "blind"}
    path.write_text(json.dumps(audit))
    sentences = " ".join(build_report([folder]).verdict.sentences)
    assert "training with --norm-penalty 0.01 and --readout rmsnorm for per-loop + LayerNorm; see" in sentences


def test_signs_are_kept_and_units_that_are_none_leave_no_gap(tmp_path):
    folder = write_reproduction(tmp_path / "grid", {"per-loop+rmsnorm": 1})
    told = [quantity("ΔCE", "nats", 0.25, signed=True), quantity("a height", "", 0.25)]
    judged = replace(claims().claims[0], quantities=told)
    write_record(folder / "claims.json", replace(claims(), claims=[judged]))
    page = build_report([folder]).html
    assert "ΔCE: +0.25 nats [+0.25, +0.275], n" in page and "a height: 0.25 [0.25, 0.275], n" in page
