"""The paper's checks of Ouro on small folders in its format, and its design trained with and without a norm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import OURO, ouro_tensors, save_folder
from torch.nn import functional as F

import loopscope as ls
from loopscope.auditing.visibility import ALPHAS
from loopscope.cli import main
from loopscope.config import config_to_dict
from loopscope.errors import ConfigError, RunError, UnsupportedError
from loopscope.results.ouro import AS_IT_IS, FROZEN, REMOVED, OuroRecord, OuroRequest
from loopscope.results.record import load_record
from loopscope.rows.conditions import CONDITIONS, OuroTrainingOptions
from loopscope.studies import ouro
from loopscope.studies.ouro import check_ouro, measure_gate, measure_states, readouts_of, without_readout_norm
from loopscope.studies.ouro_training import fineweb, shared, under

DOCS = Path(__file__).parents[2] / "docs" / "ouro.md"
FIGURE_5, FIGURE_7 = "figures/figure5_alpha_sweep.svg", "figures/figure7_variable_depth.svg"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint of three loops: nothing may lean on the four of the published one."""
    config = {**OURO, "total_ut_steps": 3}
    return save_folder(tmp_path_factory.mktemp("ouro") / "Ouro-tiny", config, ouro_tensors(config))


@pytest.fixture(scope="module")
def model(folder):
    return ls.open(folder).model.double().requires_grad_(False)


@pytest.fixture
def pairs():
    ids = torch.randint(300, (3, 17), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[0, -4:] = -100  # a window that was filled up
    return [(ids[:2, :-1], targets[:2]), (ids[2:, :-1], targets[2:])]


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of a text about {n % 7} rivers and {n * 31 % 97} fish\n" for n in range(400)))
    return path


def asked(text: Path, **changes) -> OuroRequest:
    usual = {"depths": [1, 3, 5], "tokenizer": "bytes", "length": 16, "max_tokens": 300, "sweep_tokens": 60}
    return OuroRequest(data=[str(text)], **{**usual, **changes})


# --- readouts --------------------------------------------------------------------------------------------------------


def test_without_the_norm_the_head_gets_the_state_and_the_loop_keeps_its_own(model, pairs):
    ids_BT, _ = pairs[0]
    bare = without_readout_norm(model)
    ours, theirs = ls.run_loops(bare, ids_BT, num_loops=5).states, ls.run_loops(model, ids_BT, num_loops=5).states
    for k in range(1, 6):
        assert torch.equal(ours[k].h_BTD, theirs[k].h_BTD), "the norm inside the loop stays"
        assert torch.allclose(bare.readout(ours[k], k), F.linear(theirs[k].h_BTD, model.head), rtol=1e-12)
        normed = F.rms_norm(theirs[k].h_BTD, (16,), model.readout_map.norm.weight, 1e-6)
        assert torch.allclose(model.readout(theirs[k], k), F.linear(normed, model.head), rtol=1e-12), "and is there yet"


def test_a_model_with_another_readout_is_refused_with_what_to_do_instead():
    opened = ls.open("design:huginn")
    with pytest.raises(UnsupportedError, match=r"design:huginn is not read out as Ouro is.*loopscope audit"):
        readouts_of(opened.model, opened.name)


# --- the states ------------------------------------------------------------------------------------------------------


def test_the_sweep_is_that_of_the_equations_at_every_depth(model, pairs):
    """The state is scaled before the norm, at the loop that is read out, also where that is not the fourth."""
    found = measure_states(model, readouts_of(model, "it"), pairs, [1, 3, 5])
    gain, head = model.readout_map.norm.weight, model.head
    for loop in found.loops:
        total = {name: torch.zeros(len(ALPHAS), dtype=torch.float64) for name in (AS_IT_IS, REMOVED, FROZEN)}
        for ids_BT, targets_BT in pairs:
            h = ls.run_loops(model, ids_BT, num_loops=loop.k).states[loop.k].h_BTD
            scale = (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            for place, alpha in enumerate(ALPHAS):
                moved = alpha * h
                features = {
                    AS_IT_IS: gain * moved / (moved.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
                    REMOVED: moved,
                    FROZEN: gain * moved / scale,
                }
                for name, each in features.items():
                    logits = F.linear(each, head)
                    total[name][place] += F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        for name, sums in total.items():
            assert loop.sweep[name] == pytest.approx((sums / found.tokens).tolist(), abs=1e-9), (loop.k, name)
        assert loop.span(AS_IT_IS) < 1e-4 and loop.span(REMOVED) > 1 and loop.span(FROZEN) > 1
        assert loop.sweep[FROZEN][ALPHAS.index(1.0)] == pytest.approx(loop.sweep[AS_IT_IS][ALPHAS.index(1.0)])
    assert found.tokens == 3 * 16 - 4, "what a window is filled up with does not count"


def test_the_radial_gradient_vanishes_with_the_norm_and_not_without(model, pairs):
    for loop in measure_states(model, readouts_of(model, "it"), pairs, [1, 2, 3, 4]).loops:
        assert loop.radial_share[AS_IT_IS] < 1e-6
        assert loop.radial_share[REMOVED] > 0.3 / 16**0.5, "chance, as of an untrained raw readout"


def test_norms_are_those_of_all_tokens_before_any_norm(model, pairs):
    (loop,) = measure_states(model, readouts_of(model, "it"), pairs, [2]).loops
    states = [ls.run_loops(model, ids_BT, num_loops=2).states[2].h_BTD for ids_BT, _ in pairs]
    norms = torch.cat([h.norm(dim=-1)[targets != -100] for h, (_, targets) in zip(states, pairs, strict=True)])
    assert loop.norm == pytest.approx(float(norms.mean()))
    assert loop.norm_quantiles[-1] == pytest.approx(float(norms.max()))
    assert loop.norm_quantiles[2] == pytest.approx(float(norms.median()), rel=0.05)


def test_the_gate_gives_the_last_loop_the_rest_and_leaves_at_the_first_loop_that_reaches_a_threshold(model, pairs):
    gate = measure_gate(model, pairs)
    assert sum(loop.exit_probability for loop in gate.loops) == pytest.approx(1.0)
    exits: dict[float, list[int]] = {each.threshold: [] for each in gate.thresholds}
    expected = []
    for ids_BT, targets_BT in pairs:
        states = ls.run_loops(model, ids_BT).states
        lam = [torch.sigmoid(model.exit_logits(model.features(states[k], k))) for k in (1, 2, 3)]
        for row, column in (targets_BT != -100).nonzero().tolist():
            one, two = float(lam[0][row, column]), float(lam[1][row, column])
            p = [one, two * (1 - one), (1 - one) * (1 - two)]
            expected.append(sum(k * each for k, each in enumerate(p, 1)))
            for threshold, leaving in exits.items():
                leaving.append(next((k for k in (1, 2) if sum(p[:k]) >= threshold), 3))
    assert gate.expected_loops == pytest.approx(sum(expected) / len(expected))
    for each in gate.thresholds:
        leaving = exits[each.threshold]
        assert each.mean_loops == pytest.approx(sum(leaving) / len(leaving))
        assert each.shares == pytest.approx([leaving.count(k) / len(leaving) for k in (1, 2, 3)])


# --- the command -----------------------------------------------------------------------------------------------------


def command(folder: Path, text: Path, out: Path, *flags: str) -> list[str]:
    usual = ["--tokenizer", "bytes", "--length", "16", "--max-tokens", "300", "--sweep-tokens", "60"]
    return ["reproduce", "ouro", str(folder), "--data", str(text), "--out", str(out), *usual, *flags]


def keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_the_command_writes_json_tables_and_figures_and_goes_on_where_it_was(folder, text, tmp_path, capsys):
    arguments = command(folder, text, tmp_path / "out", "--depths", "1..4")
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "flat with RMSNorm and sharp without: holds" in said.out and "3*" in said.out
    record = load_record(tmp_path / "out" / "ouro.json", OuroRecord)
    assert [depth.k for depth in record.depths.depths] == [1, 2, 3, 4] and record.subject.num_loops == 3
    assert all((tmp_path / "out" / name).read_text().startswith("<?xml") for name in (FIGURE_5, FIGURE_7))
    table = (tmp_path / "out" / "tables" / "variable_depth.md").read_text()
    assert f"| 3* | {record.depths.at(3).ce:.4g} |" in table
    assert main([*arguments, "--json"]) == 0
    again = capsys.readouterr()
    assert "scores after" not in again.err and "states of" not in again.err, "nothing is measured twice"
    printed = json.loads(again.out)
    assert printed["throughput"] == [{"k": s.k, "tokens_per_second": s.tokens_per_second} for s in record.throughput]
    page = DOCS.read_text("utf-8")
    for key in keys(printed):
        assert f"`{key}`" in page, f"{key} of ouro.json is not in docs/ouro.md"


def test_an_interrupted_command_keeps_what_it_has_and_measures_only_the_rest(folder, text, tmp_path, monkeypatch):
    out, done = tmp_path / "out", []

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ouro, "throughput", interrupted)
        with pytest.raises(KeyboardInterrupt):
            check_ouro(folder, asked(text), out, say=done.append)
    before = json.loads((out / "ouro.json").read_text())
    assert before["depths"]["depths"] and before["states"] is None
    done.clear()
    whole = check_ouro(folder, asked(text), out, say=done.append)
    assert not any("scores after" in line for line in done) and any("throughput" in line for line in done)
    assert json.loads((out / "ouro.json").read_text())["depths"] == before["depths"]
    fresh = check_ouro(folder, asked(text), tmp_path / "fresh")
    assert fresh.states == whole.states and fresh.gate == whole.gate


def test_downstream_tasks_are_scored_at_every_depth(folder, text, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    questions, tasks = tmp_path / "tasks/questions.jsonl", tmp_path / "tasks"
    tasks.mkdir()
    rows = ({"question": f"{n} rivers and", "choices": ["fish", "stone"], "answer": n % 2} for n in range(6))
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "choice.yaml").write_text(
        f"task: choice\noutput_type: multiple_choice\ndataset_path: json\n"
        f'dataset_kwargs: {{data_files: {{test: "{questions}"}}}}\ntest_split: test\ndoc_to_text: "{{{{question}}}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}]\n'
    )
    asked_for = ["--tasks", "choice", "--task-folder", str(tasks), "--depths", "1..2", "--json"]
    assert main(command(folder, text, tmp_path / "out", *asked_for)) == 0
    scores = json.loads(capsys.readouterr().out)["tasks"]
    assert [(score["k"], score["task"], score["metric"]) for score in scores] == [(k, "choice", "acc") for k in (1, 2)]
    assert all(0 <= score["value"] <= 1 for score in scores)
    table = (tmp_path / "out" / "tables" / "downstream.md").read_text()
    assert "| choice | acc | " in table and "| task | metric | K = 1 | K = 2 |" in table


def test_results_of_another_request_are_not_taken_for_these(folder, text, tmp_path):
    check_ouro(folder, asked(text), tmp_path)
    with pytest.raises(RunError, match=r"another request \(sweep_tokens\); choose another --out"):
        check_ouro(folder, asked(text, sweep_tokens=61), tmp_path)


def test_results_on_other_text_of_the_same_name_are_not_taken_for_these(folder, text, tmp_path):
    moved = tmp_path / "text.txt"
    moved.write_text(text.read_text())
    before = check_ouro(folder, asked(moved), tmp_path / "out")
    moved.write_text(text.read_text()[::-1])
    with pytest.raises(
        RunError, match=f"about text of SHA-256 {before.text_sha256}, and {moved} now has [0-9a-f]{{64}}"
    ):
        check_ouro(folder, asked(moved), tmp_path / "out")


def test_a_damaged_file_is_measured_again_and_that_is_said(folder, text, tmp_path):
    before, told = check_ouro(folder, asked(text), tmp_path), []
    (tmp_path / "ouro.json").write_text((tmp_path / "ouro.json").read_text()[:-200])
    assert check_ouro(folder, asked(text), tmp_path, say=told.append).states == before.states
    assert told[0] == f"{tmp_path / 'ouro.json'} is damaged: measuring again"


def test_a_batch_that_no_memory_holds_is_refused_before_anything_is_measured(folder, text, tmp_path):
    with pytest.raises(ConfigError, match="batch = 1000000000: the logits of "):
        check_ouro(folder, asked(text), tmp_path, batch=10**9)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ourro", "x"], "unknown command 'loopscope reproduce ourro'; did you mean 'ouro'"),
        (["ouro", "nowhere"], "nowhere"),
        (["ouro", "preset:demo", "--depths", "0..2"], "depths"),
        (["ouro", "preset:demo", "--sweep-tokens", "0"], "sweep_tokens = 0: must be at least 1 (flag --sweep-tokens)"),
        (["ouro-train", "--conditions", "per-loop+rms"], "did you mean 'per-loop+rmsnorm'"),
        (["ouro-train", "--processes-per-row", "2", "--rows-at-once", "2"], "one at a time"),
        (["ouro-train", "--accumulate", "3", "--size", "demo"], "must divide batch"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said


# --- trained with and without the norm -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["demo", "nano", "micro", "ouro-1.4b"])
def test_the_rows_differ_in_loss_and_readout_alone_and_keep_the_norm_inside_the_loop(size):
    common = shared(OuroTrainingOptions(size=size))
    assert common.model.norm_placement == "sandwich" and common.model.positions == "rope"
    with_norm, without = (under(CONDITIONS[name], common) for name in ("per-loop+rmsnorm", "per-loop+raw"))
    assert with_norm.model.inter_loop_norm == without.model.inter_loop_norm == "rmsnorm"
    changed = {"readout": "raw", "share_readout_norm": False}
    assert without == replace(with_norm, model=replace(with_norm.model, **changed))
    terminal = under(CONDITIONS["terminal+rmsnorm"], common)
    ours, theirs = config_to_dict(terminal), config_to_dict(with_norm)
    assert ours.pop("objective")["placement"] == "terminal" and theirs.pop("objective")["placement"] == "per-loop"
    assert ours == theirs, "the same batches of the same text"


def test_both_have_as_many_parameters():
    common = shared(OuroTrainingOptions(size="demo"))
    sizes = {
        sum(parameter.numel() for parameter in ls.build(under(CONDITIONS[name], common).model).parameters())
        for name in ("per-loop+rmsnorm", "per-loop+raw", "terminal+rmsnorm", "terminal+raw")
    }
    assert len(sizes) == 1


def test_fineweb_is_streamed_as_far_as_the_steps_take():
    assert fineweb(230 * 400) == ("hf:HuggingFaceFW/fineweb:sample-10BT:256",)
    assert shared(OuroTrainingOptions(size="demo")).data.data[0].startswith("hf:HuggingFaceFW")


def test_a_small_design_is_trained_with_and_without_and_shows_figure_6(text, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--size", "demo", "--steps", "3", "--batch", "4", "--data", str(text), "--tokenizer", "bytes"]
    limits = ["--eval-tokens", "500", "--sweep-tokens", "128", "--out", str(out), "--length", "32"]
    arguments = ["reproduce", "ouro-train", *flags, *limits, "--conditions", "per-loop+rmsnorm,per-loop+raw", "--json"]
    code = main(arguments)
    said = capsys.readouterr()
    assert code == 0, said.err
    result = json.loads(said.out)
    with_norm, without = result["rows"]
    assert with_norm["tokens"] == without["tokens"] == 3 * 4 * 32
    assert with_norm["sweep_span"] < 1e-3 and without["sweep_span"] > 0.1
    assert with_norm["radial_share"] < 1e-5 < without["radial_share"]
    assert (out / "figures/figure6_trained_alpha_sweep.svg").exists()
    assert "per-loop+raw-s42" in (out / "tables/trained.md").read_text()
    page = DOCS.read_text("utf-8")
    for key in keys(result):
        assert f"`{key}`" in page, f"{key} of ouro-train --json is not in docs/ouro.md"
    assert main(arguments) == 0
    again = capsys.readouterr()
    assert "skipped: finished already" in again.err and "scores after" not in again.err
    assert json.loads(again.out)["rows"] == result["rows"]


def test_a_row_may_be_several_processes_that_share_one_model(text, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--size", "demo", "--steps", "2", "--batch", "4", "--length", "16", "--data", str(text)]
    limits = ["--tokenizer", "bytes", "--eval-tokens", "100", "--sweep-tokens", "32", "--out", str(out)]
    shared = ["--processes-per-row", "2", "--shard", "full", "--conditions", "terminal+raw"]
    assert main(["reproduce", "ouro-train", *flags, *limits, *shared]) == 0, capsys.readouterr().err
    row = out / "rows" / "terminal+raw-s42"
    assert json.loads((row / "row.json").read_text())["state"] == "finished"
    assert json.loads((row / "manifest.json").read_text())["world_size"] == 2
    assert json.loads((row / "ouro.json").read_text())["verdict"] == "holds"
