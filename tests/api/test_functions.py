"""The functions under the verbs: what they return is what the verbs print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import loopscope as ls
from loopscope.cli import main
from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig, load_config
from loopscope.errors import ConfigError
from loopscope.options import AuditOptions
from loopscope.training import checkpoint

QUICK = AuditOptions(states=2, prefix=6, tokens=48, rollout=5)
QUICK_FLAGS = ["--states", "2", "--prefix", "6", "--tokens", "48", "--loops", "5"]


def configure(text: Path, **sections) -> Config:
    model = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_loops": 3, "max_length": 16}
    training = {"steps": 6, "batch": 4, "lr": 0.01, "log_every": 2, "eval_every": 3, "save_every": 3, "threads": 1}
    return Config(
        model=ModelConfig(**{**model, **sections.get("model", {})}),
        objective=ObjectiveConfig(**sections.get("objective", {})),
        data=DataConfig(data=(str(text),), tokenizer="bytes"),
        training=TrainingConfig(eval_tokens=200, **{**training, **sections.get("training", {})}),
    )


@pytest.fixture
def verb(capsys):
    """Run a verb in this process; gives its exit code and its JSON."""

    def run(*arguments: object) -> tuple[int, dict]:
        capsys.readouterr()
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def run(text, tmp_path) -> Path:
    ls.train(configure(text), tmp_path / "run")
    return tmp_path / "run"


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def as_json(value: object) -> object:
    return json.loads(json.dumps(value))


def test_train_returns_what_the_verb_prints_and_makes_the_same_run(text, tmp_path, verb, one_thread):
    config = configure(text)
    file = tmp_path / "config.yaml"
    result = ls.train(config, tmp_path / "function")
    file.write_text((tmp_path / "function/config.yaml").read_text())
    code, printed = verb("train", "--config", file, "--out", tmp_path / "verb")
    assert code == 0
    assert {**printed, "run": None} == as_json({**result.to_json(), "run": None, "schema_version": 1})
    assert printed["run"] == str(tmp_path / "verb") and result.run.path == tmp_path / "function"
    assert metrics(tmp_path / "verb") == metrics(tmp_path / "function")
    states = [checkpoint.load(tmp_path / name / "checkpoints/step-00000006") for name in ("verb", "function")]
    one, other = (state.model_tensors() for state in states)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert load_config(tmp_path / "verb/config.yaml") == config


def test_evaluate_returns_what_the_verb_prints(run, verb):
    result = ls.evaluate(run, depths=[1, 2, 5], max_tokens=150)
    code, printed = verb("eval", run, "--depths", "1,2,5", "--max-tokens", "150")
    assert code == 0 and printed == as_json({**result.to_json(), "schema_version": 1})
    assert [row["k"] for row in printed["depths"]] == [1, 2, 5] and printed["tokens"] == 150
    assert result.scores.depths[1] == ls.evaluate(ls.open(run), max_tokens=150).scores.depths[1]


def test_the_scores_after_the_last_step_are_those_of_the_run_folder(run):
    """The trainer's scores and `evaluate` are one code."""
    scores = ls.evaluate(run, max_tokens=200, batch=4).scores
    last = [row for row in metrics(run) if row["kind"] == "eval"][-1]
    assert [score.ce for score in scores.depths] == pytest.approx(last["ce"], rel=1e-6)
    assert [score.norm for score in scores.depths] == pytest.approx(last["norm"], rel=1e-6)


def test_audit_returns_what_the_verb_prints_but_for_what_it_cost(run, verb):
    result = as_json(ls.audit(ls.open(run), options=QUICK).to_json())
    code, printed = verb("audit", run, *QUICK_FLAGS)
    assert code == 1 and result["verdict"] == "blind-spot"
    result.pop("cost"), printed.pop("cost")
    assert result == printed
    assert result["model"]["supervised"] == [1, 2, 3] and result["model"]["step"] == 6


def test_the_audit_of_a_design_takes_its_weights_from_the_seed(verb):
    code, printed = verb("audit", "preset:demo", *QUICK_FLAGS, "--seed", "3")
    result = as_json(ls.audit("preset:demo", options=replace(QUICK, seed=3)).to_json())
    result.pop("cost"), printed.pop("cost")
    assert (code, result) == (1, printed)


def test_an_opened_model_is_audited_under_the_terms_it_says_unless_others_are_named(text, tmp_path):
    config = configure(text, objective={"norm_penalty": 0.01, "placement": "terminal"})
    ls.train(config, tmp_path / "run")
    opened = ls.open(tmp_path / "run")
    said = ls.audit(opened, options=QUICK)
    assert (said.model.observables, said.model.supervised) == (["norm_penalty"], [3])
    assert said.variable("scale").verdict == "visible"
    without = ls.audit(opened, terms=[], supervised="every-loop", options=QUICK)
    assert (without.model.observables, without.model.supervised) == ([], [1, 2, 3])
    assert without.variable("scale").verdict == "blind"


def test_a_model_itself_is_audited_on_the_batches_it_is_given(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    result = ls.audit(model, [ids_BT], supervised="terminal", terms=[ls.ScaleAnchor(0.1)], options=QUICK)
    assert result.variable("scale").verdict == "visible" and result.model.supervised == [3]
    with pytest.raises(ConfigError, match="takes batches of ids"):
        ls.audit(model)
    with pytest.raises(ConfigError, match="takes batches of ids"):
        ls.audit(model, [ids_BT], data=["text.txt"])


def test_remedy_returns_what_the_verb_prints(run, tmp_path, verb, one_thread):
    result = ls.remedy(run, how="penalty", steps=3, out=tmp_path / "function")
    code, printed = verb("remedy", run, "--how", "penalty", "--steps", "3", "--out", tmp_path / "verb")
    assert code == (0 if result.outcome == "fixed" else 1) and printed["outcome"] == result.outcome
    assert {**printed, "run": None} == as_json({**result.to_json(), "run": None, "schema_version": 1})
    assert metrics(tmp_path / "verb") == metrics(tmp_path / "function")
    audits = [json.loads((tmp_path / name / "audit.json").read_text()) for name in ("verb", "function")]
    for found in audits:
        found.pop("cost")
        found["model"]["name"] = None
    assert audits[0] == audits[1]


def test_a_function_says_nothing_on_stdout(text, tmp_path, capsys):
    ls.train(configure(text), tmp_path / "run")
    ls.evaluate(tmp_path / "run", max_tokens=50)
    ls.audit(tmp_path / "run", options=QUICK)
    ls.remedy(tmp_path / "run", how="clamp", options=QUICK)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_evaluation_needs_at_least_one_loop(run):
    for depths in ([], [0, 1]):
        with pytest.raises(ConfigError, match="depths count loops"):
            ls.evaluate(run, depths=depths)


# --- files of earlier versions ---------------------------------------------------------------------------------------

OLD_MODEL = """
model:
  vocab_size: 256
  width: 16
  num_layers: 1
  num_loops: 3
  num_heads: 2
  max_length: 16
  norm_placement: sandwich
  readout: rmsnorm
objective:
  placement: per-loop
  norm_penalty: 0.01
data:
  tokenizer: bytes
training:
  steps: 6
  batch: 4
  lr: 1e-2
"""
NEWER = {"model": ("norm_placement", "share_readout_norm"), "training": ("on_blind_spot",), "data": ("stride",)}
"""Fields that a file may lack: whatever has a default."""


def age(run: Path) -> None:
    """Make a run folder what an earlier version would have left: fewer fields in the files that only grow."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    for section, names in NEWER.items():
        for name in names:
            del config[section][name]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    old = [{name: value for name, value in row.items() if name != "tenfold_charge"} for row in rows]
    assert old != rows
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))


def test_a_run_folder_without_the_newer_fields_opens_and_is_resumed_as_the_same_run(text, tmp_path, verb, one_thread):
    config = configure(text)
    ls.train(config, tmp_path / "whole")
    ls.train(replace(config, training=replace(config.training, steps=3)), tmp_path / "old")
    age(tmp_path / "old")
    opened = ls.open(tmp_path / "old")
    assert opened.config.model == config.model and opened.step == 3
    assert ls.audit(opened, options=QUICK).verdict == "blind-spot"
    assert ls.train(config, tmp_path / "old", resume="must").step == 6
    newest = [checkpoint.load(tmp_path / name / "checkpoints/step-00000006") for name in ("whole", "old")]
    one, other = (found.model_tensors() for found in newest)
    assert all(torch.equal(one[name], other[name]) for name in one)
    code, page = main(["report", str(tmp_path / "old"), "-o", str(tmp_path / "page.html")]), tmp_path / "page.html"
    assert code == 0 and "old" in page.read_text()


def test_a_configuration_file_of_the_version_before_opens_to_the_same_design(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(OLD_MODEL)
    opened = ls.open(path)
    assert opened.model.config.norm_placement == "sandwich" and opened.config.training.lr == 0.01
    assert opened.objective.norm_penalty == 0.01 and opened.model.num_loops == 3


OLD_TENSORS = {
    *("embedding", "positions", "recurrence.inter_loop_norm", "exit_gate"),
    *(f"{part}.layers.0.{kind}.{name}" for part in ("prelude", "recurrence.core") for kind, name in (
        ("attention", "qkv"), ("attention", "out"), ("feed_forward", "up"), ("feed_forward", "out"),
        ("attention_norms", "norm"), ("attention_norms", "branch_norm"),
        ("feed_forward_norms", "norm"), ("feed_forward_norms", "branch_norm"),
    )),
}  # fmt: skip
"""Tensors, without `.weight`, of a checkpoint that version 0.1.0 of 16 November 2026 wrote."""


def test_the_names_of_a_checkpoints_tensors_are_those_of_the_version_before(text, tmp_path):
    model = {"norm_placement": "sandwich", "prelude_layers": 1, "inter_loop_norm": "rmsnorm", "exit_gate": True}
    ls.train(configure(text, model={**model, "share_readout_norm": True}, training={"steps": 1}), tmp_path / "run")
    names = checkpoint.load(tmp_path / "run/checkpoints/step-00000001").model_tensors().keys()
    assert names == {f"{name}.weight" for name in OLD_TENSORS} | {"exit_gate.bias"}


# --- push ------------------------------------------------------------------------------------------------------------

PUSH = ls.PushOptions(warm_up=2, steps=3)


def test_a_push_of_a_run_is_made_on_its_training_text_with_its_recipe(run):
    result = ls.push(run, options=PUSH)
    assert result.model == str(run) and result.recipe.lr == 0.01 and not result.notes
    assert ls.push(run, options=PUSH).to_json() | {"seconds": 0} == result.to_json() | {"seconds": 0}
    assert ls.push(run, options=PUSH, lr=0.1).recipe.lr == 0.1


def test_a_push_of_a_design_fits_the_tokenizer_that_its_training_would(text):
    config = configure(text)
    opened = replace(ls.open("preset:demo"), name="mine", config=config, model=ls.build(config.model, seed=0))
    assert ls.push(opened, options=PUSH).notes == []


def test_a_push_of_strangers_needs_no_configuration(theirs):
    result = ls.push(theirs(), options=PUSH)
    assert "random token ids" in result.notes[0]
    assert result.recipe.lr == TrainingConfig().lr


def test_fields_and_sizes_of_the_users_own_are_pushed(run):
    model, ids = ls.open(run).model, torch.randint(256, (2, 12))
    result = ls.push(
        model,
        [ids] * 5,
        variables=["scale", "first"],
        fields={"first": lambda h: torch.eye(16)[0].expand_as(h)},
        sizes={"last two": lambda h: h[..., -2:].norm(dim=-1)},
        options=PUSH,
    )
    assert [push.name for push in result.pushes] == ["scale", "first", "last two"]
    assert all(push.growth > 1 for push in result.pushes)


def test_what_cannot_be_pushed_is_told(run):
    model = ls.open(run).model
    with pytest.raises(ConfigError, match=r"did you mean 'scale'"):
        ls.push(run, variables=["scales"])
    with pytest.raises(ConfigError, match="takes batches"):
        ls.push(model)


def test_a_push_and_an_audit_that_disagree_say_so(run):
    from loopscope.api.audits import with_push

    audited, pushed = ls.audit(run, options=QUICK), ls.push(run, options=PUSH)
    assert audited.variable("scale").verdict == "blind"
    (still,) = (replace(push, growth=1.1) for push in pushed.pushes)
    assert "moved it only 1.1-fold" in with_push(audited, replace(pushed, pushes=[still])).checks.notes[-1]
    far = replace(still, growth=50.0, far=True)
    assert with_push(audited, replace(pushed, pushes=[far])).checks == audited.checks
