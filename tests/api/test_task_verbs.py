"""Tasks through the verbs: the table of answers, a run that resumes, and everything else that takes a corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import loopscope as ls
from loopscope.api.remedies import remedied
from loopscope.cli import main
from loopscope.config import Config, DataConfig, ModelConfig, TrainingConfig, config_from_dict
from loopscope.data.tasks import Hops
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import ConfigError
from loopscope.options import AuditOptions
from loopscope.results.evaluation import Accuracy, Answers, Depth, Evaluation, Split
from loopscope.results.record import load_record
from loopscope.targets import Opened
from loopscope.training import checkpoint

QUICK = AuditOptions(states=2, prefix=6, tokens=16, rollout=5)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))


def configure(word: str = "task:hops", **training) -> Config:
    each = {"steps": 6, "batch": 4, "lr": 0.01, "log_every": 2, "eval_every": 3, "save_every": 3, "threads": 1}
    return Config(
        model=ModelConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, num_loops=3, max_length=43),
        data=DataConfig(data=(word,)),
        training=TrainingConfig(eval_tokens=440, **{**each, **training}),
    )


# --- the table -------------------------------------------------------------------------------------------------------


def follows_pointers(per_loop: int) -> Opened:
    """A model that follows so many pointers a loop at every token, and shows the character that it has arrived at.

    The state is that character itself, one channel a byte.
    """
    cells = torch.full((256,), -1)
    cells[torch.tensor([ord(cell) for cell in Hops.cells])] = torch.arange(len(Hops.cells))

    def embed(ids_BT: torch.Tensor) -> ls.LoopState:
        return ls.LoopState(torch.nn.functional.one_hot(ids_BT, 256).float(), context=ids_BT)

    def loop(state: ls.LoopState, k: int) -> ls.LoopState:
        here_BT = state.h_BTD.argmax(-1)
        for _ in range(per_loop):
            place_BT = cells[here_BT]
            held_BT = state.context.gather(1, place_BT.clamp(min=0))
            here_BT = torch.where(place_BT >= 0, held_BT, here_BT)
        return state.with_h(torch.nn.functional.one_hot(here_BT, 256).float())

    model = ls.adapt(embed=embed, loop=loop, readout=lambda state, k: 9 * state.h_BTD, num_loops=4)
    return Opened(name="by hand", model=model, tokenizer=bytes_tokenizer(), vocab_size=256)


@pytest.mark.parametrize("per_loop", [1, 3])
def test_a_model_that_follows_pointers_is_right_after_exactly_the_loops_it_needs(per_loop):
    result = ls.evaluate(follows_pointers(per_loop), data=["task:hops"], depths=range(1, 18), max_tokens=9000)
    table = {row.steps: row for row in result.scores.answers}
    assert sorted(table) == list(range(1, 17)) and sum(row.count for row in table.values()) == result.scores.tokens
    for steps, row in table.items():
        assert row.accuracy == {k: float(per_loop * k >= steps) for k in range(1, 18)}, "also beyond the trained depth"


def test_the_verb_prints_the_table_and_its_json_has_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "by_hand.py").write_text(
        "from test_task_verbs import follows_pointers\ndef build():\n    return follows_pointers(1)\n"
    )
    monkeypatch.syspath_prepend(Path(__file__).parent)
    flags = ["eval", "by_hand:build", "--data", "task:hops", "--depths", "1,2,6", "--max-tokens", "8800"]
    assert main(flags) == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[2:] for row in lines if row and row[0] == "2" and len(row) == 5][-1] == ["0", "100", "100"]
    assert main([*flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["steps"] for row in printed["answers"]] == list(range(1, 17))
    two = printed["answers"][1]
    assert two["count"] > 20 and [(row["k"], row["accuracy"]) for row in two["depths"]] == [(1, 0), (2, 1), (6, 1)]


def test_eval_json_keeps_the_table_and_joins_depths(tmp_path):
    ls.train(configure(), tmp_path / "run")
    for depths in ([1, 2, 3], [5]):
        result = ls.evaluate(tmp_path / "run", depths=depths, max_tokens=2200)
        path = result.keep()
    assert path is not None
    kept = load_record(path, Evaluation).splits["valid"]
    assert [row.steps for row in kept.answers] == [row.steps for row in result.measured.answers]
    assert all(sorted(row.accuracy) == [1, 2, 3, 4, 5] for row in kept.answers)
    assert sum(row.count or 0 for row in kept.answers) == kept.tokens == 200


def right(steps: int, count: int, shares: dict[int, float]) -> Answers:
    return Answers(steps, count, [Accuracy(k, share) for k, share in shares.items()])


def scored(ce: float, k: int, *answers: Answers) -> Split:
    return Split(depths=[Depth(k, ce, 1.0)], tokens=10, bytes=10, answers=list(answers))


def test_earlier_depths_of_the_same_text_stay_in_the_table():
    before = scored(2.0, 1, right(1, 6, {1: 0.5}), right(2, 4, {1: 0.0}))
    now = scored(1.0, 2, right(1, 6, {2: 1.0}), right(2, 4, {2: 0.25}))
    assert now.joined(before).answers == [right(1, 6, {1: 0.5, 2: 1.0}), right(2, 4, {1: 0.0, 2: 0.25})]


def test_cache_policies_are_not_compared_on_a_task(tmp_path):
    opened = ls.open("preset:hops")
    with pytest.raises(ConfigError, match="task:hops is a task"):
        ls.evaluate(opened, data=["task:hops"], tokenizer="bytes", cache_policies=True)


def test_a_text_has_no_answers(tmp_path):
    (tmp_path / "text.txt").write_text("a line of text that is no task\n" * 40)
    result = ls.evaluate(follows_pointers(1), data=[str(tmp_path / "text.txt")], length=40)
    assert result.to_json()["answers"] == []


# --- training --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_on_a_task_equals_an_uninterrupted_one_bit_for_bit(tmp_path, one_thread):
    config = config_from_dict({"data": {"curriculum": 2}}, configure())  # it goes on where it was
    ls.train(config_from_dict({"training": {"steps": 3}}, config), tmp_path / "resumed")
    ls.train(config, tmp_path / "resumed", resume="must")
    ls.train(config, tmp_path / "whole")
    states = [checkpoint.load(tmp_path / name / "checkpoints/step-00000006") for name in ("resumed", "whole")]
    one, other = (state.model_tensors() for state in states)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_manifest_says_which_task_and_a_resume_with_another_is_refused(tmp_path):
    ls.train(configure(steps=3), tmp_path / "run")
    data = json.loads((tmp_path / "run/manifest.json").read_text())["data"]
    assert data["corpus"] == "task:hops" and data["corpus_sha256"] == Hops().sha256
    assert data["tokenizer"] == "bytes" and data["tokens"]["train"] is None
    with pytest.raises(ls.LoopscopeError, match="data"):
        ls.train(configure("task:hops:4"), tmp_path / "run")


def test_a_task_is_audited_pushed_and_remedied_like_any_text(tmp_path):
    ls.train(configure(), tmp_path / "run")
    audited = ls.audit(tmp_path / "run", options=QUICK)
    assert audited.variable("scale").verdict == "blind"
    fixed = ls.remedy(tmp_path / "run", steps=3, out=tmp_path / "fixed", options=QUICK)
    rows = 64 * 43 // 44  # sequences that a remedy measures on, in tokens, as whole instances
    assert fixed.after.scores.tokens == fixed.before.scores.tokens == 4 * rows
    assert ls.push(tmp_path / "run", options=ls.PushOptions(steps=2)).pushes[0].name == "scale"


def test_a_fine_tuning_does_not_begin_the_curriculum_again():
    config = config_from_dict({"data": {"curriculum": 50}}, configure())
    assert remedied(config, "penalty", 300, None).data.curriculum is None


def test_a_design_is_planned_on_a_task(capsys):
    assert main(["plan", "--preset", "hops", "--flops-per-second", "1e10", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["config"]["data"]["data"] == ["task:hops:8"]


def test_a_wrong_task_is_one_sentence(capsys):
    assert main(["train", "--preset", "demo", "--data", "task:hop"]) == 2
    assert "did you mean 'hops'?" in capsys.readouterr().err


def test_a_model_too_short_for_an_instance_is_told_so(tmp_path):
    config = configure()
    with pytest.raises(ConfigError, match="sequence_length = 16: is too short for an instance of task:hops"):
        ls.train(config_from_dict({"model": {"max_length": 16}}, config), tmp_path / "run")
