"""A stranger's model through every verb: trained, killed, resumed, evaluated, audited, remedied, or refused by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import loopscope as ls
from loopscope.cli import main
from loopscope.config import Config, DataConfig, ObjectiveConfig, TargetConfig, TrainingConfig, load_config
from loopscope.errors import ConfigError, ProtocolError, RunError, UnsupportedError
from loopscope.options import AuditOptions
from loopscope.training import checkpoint

QUICK = AuditOptions(states=2, prefix=6, tokens=48, rollout=5)
FLAGS = [
    "--preset", "demo", "--tokenizer", "bytes", "--sequence-length", "16", "--batch", "4", "--steps", "12",
    "--log-every", "1", "--eval-every", "4", "--save-every", "4", "--eval-tokens", "200", "--lr", "0.01",
    "--schedule", "constant", "--warmup", "0", "--threads", "1",
]  # fmt: skip
HARD = {"norm_penalty": 0.01, "depth": "uniform"}


def configure(word: str, text: Path, objective: dict | None = None, **training) -> Config:
    usual = {"steps": 12, "batch": 4, "lr": 0.01, "log_every": 1, "eval_every": 4, "save_every": 4, "eval_tokens": 200}
    return Config(
        model=TargetConfig(target=word, num_loops=3, vocab_size=256, max_length=16),
        objective=ObjectiveConfig(**(objective or {})),
        data=DataConfig(data=(str(text),), tokenizer="bytes"),
        training=TrainingConfig(**{**usual, "threads": 1, **training}),
    )


def state_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a checkpoint."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    return {**checkpoint.load(folder).model_tensors(), **checkpoint.load_file(folder / "optimizer.safetensors")}


def assert_identical(one: Path, other: Path, step: int = 12) -> None:
    a, b = state_at(one, step), state_at(other, step)
    assert a.keys() == b.keys() and len(a) > 5
    assert all(torch.equal(a[name], b[name]) for name in a)


def metrics(run: Path) -> list[dict]:
    """All rows but what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def stopping_at(step: int):
    """Somebody presses Ctrl-C during a step."""

    @contextmanager
    def watching(trainer):
        def press(row):
            if row.step == step:
                signal.raise_signal(signal.SIGINT)

        trainer.listeners = (*trainer.listeners, press)
        yield

    return watching


# --- train -----------------------------------------------------------------------------------------------------------


def test_it_learns_under_our_objective_and_its_run_opens_as_the_trained_model(theirs, text, tmp_path):
    config = configure(theirs(), text, {"norm_penalty": 0.01}, steps=40, eval_every=20)
    result = ls.train(config, tmp_path / "run")
    rows = metrics(tmp_path / "run")
    ce = [row["ce"][-1] for row in rows if row["kind"] == "eval"]
    assert (result.outcome, result.step) == ("finished", 40) and ce[-1] < ce[0] - 0.2
    trained = [row for row in rows if row["kind"] == "train"]
    assert all(row["tenfold_charge"] >= 0.01 and row["loops"] == [1, 2, 3] for row in trained)
    penalty = sum(norm**2 for norm in trained[0]["norm"]) / 3 / 16 * 0.01
    assert trained[0]["terms"]["norm_penalty"] == pytest.approx(penalty, rel=0.1)
    opened = ls.open(tmp_path / "run")
    assert type(opened.model.module).__name__ == "Network" and not opened.model.training
    assert (opened.step, opened.tokenizer.kind, opened.objective.norm_penalty) == (40, "bytes", 0.01)
    scores = ls.evaluate(opened, max_tokens=200, batch=4).scores
    assert [s.ce for s in scores.depths] == pytest.approx(result.evaluation.ce, rel=1e-5)


VARIANTS = {
    "every loop": ({}, {}),
    "penalty, sampled depth": (HARD, {}),
    "recomputed loops, accumulation": (HARD, {"checkpoint_loops": True, "accumulate": 2}),
    "terminal, truncated": ({"placement": "terminal", "backprop_loops": 2, "z_loss": 0.01}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_interrupted_and_resumed_it_is_the_uninterrupted_run_bit_for_bit(theirs, text, tmp_path, one_thread, variant):
    objective, training = VARIANTS[variant]
    config = configure(theirs(), text, objective, **training)
    assert ls.train(config, tmp_path / "whole").outcome == "finished"
    for stop in (3, 9):  # off the save interval
        result = ls.train(config, tmp_path / "parts", watching=stopping_at(stop))
        assert (result.outcome, result.step, result.was_signalled) == ("interrupted", stop, True)
        torch.manual_seed(stop)  # whatever else happened in between
    assert ls.train(config, tmp_path / "parts").outcome == "finished"
    assert_identical(tmp_path / "whole", tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_dropout_really_depends_on_the_step(theirs, text, tmp_path, one_thread):
    """The comparison above means nothing for a model whose randomness is switched off."""
    word = theirs(
        "still", "def still():\n    network = Network()\n    network.drop.p = 0.0\n    return adapted(network)\n"
    )
    ls.train(configure(word, text, steps=4), tmp_path / "still")
    ls.train(configure("their_model:build", text, steps=4), tmp_path / "dropped")
    a, b = state_at(tmp_path / "still", 4), state_at(tmp_path / "dropped", 4)
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_recomputed_loops_make_the_same_steps(theirs, text, tmp_path, one_thread):
    word = theirs()
    for name, recompute in (("kept", False), ("again", True)):
        ls.train(configure(word, text, steps=4, checkpoint_loops=recompute), tmp_path / name)
    a, b = state_at(tmp_path / "kept", 4), state_at(tmp_path / "again", 4)
    for name in a:
        torch.testing.assert_close(a[name], b[name])


def test_killed_with_sigkill_the_same_command_goes_on_bit_for_bit(theirs, text, tmp_path, one_thread, capsys):
    flags = ["train", theirs(), *FLAGS, "--data", str(text), "--norm-penalty", "0.01", "--depth", "uniform"]
    assert main([*flags, "--out", "whole"]) == 0
    command = [sys.executable, "-m", "loopscope", *flags, "--out", "parts"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THEIR_PAUSE": "0.05", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "parts/checkpoints/step-00000004/state.json").exists() and process.poll() is None:
        assert time.monotonic() < deadline, "the run never saved"
        time.sleep(0.02)
    process.kill()
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err.decode()
    assert not (tmp_path / "parts/checkpoints/step-00000012").exists()
    capsys.readouterr()
    assert main([*flags, "--out", "parts", "--resume", "must", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 12
    assert_identical(tmp_path / "whole", tmp_path / "parts")
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")


def test_the_run_folder_says_whose_model_it_is_and_another_one_is_refused(theirs, text, tmp_path):
    word = theirs()
    ls.train(configure(word, text, steps=2), tmp_path / "run")
    assert load_config(tmp_path / "run/config.yaml").model == TargetConfig(
        target=word, num_loops=3, vocab_size=256, max_length=16
    )
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert manifest["parameters"] == 256 * 16 + 2 * (16 * 16 + 16)
    with pytest.raises(RunError, match="was trained with target = 'their_model:build', not 'their_model:build_headed'"):
        ls.train(configure("their_model:build_headed", text, steps=2), tmp_path / "run")


def test_a_model_of_ours_from_a_factory_keeps_the_factorys_weights_and_class(theirs, text, tmp_path):
    """What a factory returns is what is trained, also where it is one of our own classes with something changed."""
    code = (
        "from loopscope.config import ModelConfig\n"
        "class Doubled(ls.LoopedLM):\n"
        "    def readout(self, state, k, cache=None):\n"
        "        return 2 * super().readout(state, k, cache)\n"
        "def changed(kind=Doubled):\n"
        "    size = {'vocab_size': 256, 'width': 16, 'num_heads': 2, 'max_length': 16}\n"
        "    model = kind(ModelConfig(num_layers=1, num_loops=2, **size))\n"
        "    torch.nn.init.constant_(model.positions.weight, 0.25)\n"
        "    return model\n"
        "def weights():\n"
        "    return changed(ls.LoopedLM)\n"
    )
    theirs("changed", code)
    for factory in ("changed", "weights"):
        out = tmp_path / factory
        assert main(["train", f"their_model:{factory}", *FLAGS, "--steps", "1", "--lr", "1e-9", "--weight-decay", "0",
                     "--data", str(text), "--out", str(out)]) == 0  # fmt: skip
        trained = ls.open(out).model
        assert trained.positions.weight.mean().item() == pytest.approx(0.25, abs=1e-5)
    assert type(ls.open(tmp_path / "changed").model).__name__ == "Doubled"


# --- evaluate, audit, remedy -----------------------------------------------------------------------------------------


def test_it_is_evaluated_beyond_its_depth_like_the_same_network_with_a_head(theirs, text):
    theirs()
    plain, headed = (
        ls.evaluate(f"their_model:{name}", depths=range(1, 7), data=[str(text)], tokenizer="bytes", length=16,
                    max_tokens=600)
        for name in ("build", "build_headed")
    )  # fmt: skip
    assert [score.k for score in plain.scores.depths] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(plain.scores.depths, headed.scores.depths, strict=True):
        assert (a.ce, a.norm) == pytest.approx((b.ce, b.norm), rel=1e-6)
    assert plain.scores.depths[5].norm > plain.scores.depths[0].norm
    assert plain.scores.bytes == headed.scores.bytes == 600


def test_the_evaluation_is_the_cross_entropy_of_its_own_readout(theirs):
    opened = ls.open(theirs("pair", "def pair():\n    return build(), [torch.arange(40).reshape(2, 20)]\n"))
    ids, targets = torch.arange(40).reshape(2, 20)[:, :-1], torch.arange(40).reshape(2, 20)[:, 1:]
    trace = ls.run_loops(opened.model, ids, num_loops=5)
    for score in ls.evaluate(opened, depths=[2, 5]).scores.depths:
        logits = opened.model.readout(trace.states[score.k], score.k)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        assert score.ce == pytest.approx(expected.item(), rel=1e-5)


def test_its_objective_is_the_same_with_and_without_a_head(theirs):
    theirs()
    plain, headed = (ls.open(f"their_model:{name}", seed=1).model for name in ("build", "build_headed"))
    ids, targets = torch.randint(256, (2, 9)), torch.randint(256, (2, 9))
    for changes in ({}, {"placement": "terminal", "z_loss": 0.1}, {"placement": "weighted", "loop_weights": (1, 0, 3)}):
        changes = {name: tuple(map(float, v)) if isinstance(v, tuple) else v for name, v in changes.items()}
        objective = ls.Objective(ObjectiveConfig(**changes))
        a, b = objective(plain, ids, targets), objective(headed, ids, targets)
        assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-6) and a.supervised == b.supervised
        torch.testing.assert_close(a.ce_K, b.ce_K)


def test_its_audit_is_the_same_with_and_without_a_head_and_the_penalty_lifts_the_blind_spot(theirs):
    theirs()
    plain, headed = (ls.audit(f"their_model:{name}", options=QUICK) for name in ("build", "build_headed"))
    for result in (plain, headed):
        assert result.verdict == "blind-spot" and result.variable("scale").verdict == "blind"
    assert [loop.ce for loop in plain.loops] == pytest.approx([loop.ce for loop in headed.loops], rel=1e-9)
    penalised = ls.audit("their_model:build", options=QUICK, terms=[ls.NormPenalty(0.01)])
    assert penalised.variable("scale").verdict == "visible"


def test_clamped_it_is_the_clamped_model_with_a_head(theirs):
    theirs()
    ids = torch.randint(256, (2, 9))
    plain, headed = (ls.clamped(ls.open(f"their_model:{name}", seed=1).model) for name in ("build", "build_headed"))
    one, other = (ls.run_loops(model, ids, num_loops=5) for model in (plain, headed))
    torch.testing.assert_close(one.norms_K(), one.norms_K()[:1].expand(5))
    torch.testing.assert_close(one.h_KBTD, other.h_KBTD)
    torch.testing.assert_close(plain.readout(one.states[5], 5), headed.readout(other.states[5], 5))


def test_the_penalty_remedies_it_on_the_same_text_before_and_after(theirs, text, tmp_path):
    options = {"data": [str(text)], "tokenizer": "bytes", "options": QUICK, "out": tmp_path / "fixed"}
    result = ls.remedy(theirs(), how="penalty", steps=4, lr=1e-9, **options)
    was, now = result.before, result.after
    assert (was.audit.verdict, now.audit.verdict) == ("blind-spot", "controlled")
    assert was.audit.variable("scale").verdict == "blind" and now.audit.variable("scale").verdict == "visible"
    # Four steps at no learning rate change nothing but the objective: all numbers are of one text and one model.
    assert now.scores.tokens == was.scores.tokens and now.scores.bytes == was.scores.bytes
    for old, new in zip(was.scores.depths, now.scores.depths, strict=True):
        assert (new.ce, new.norm) == pytest.approx((old.ce, old.norm), rel=1e-4)
    ce = ([loop.ce for loop in measured.audit.loops] for measured in (was, now))
    assert next(ce) == pytest.approx(next(ce), rel=1e-4)
    written = json.loads((tmp_path / "fixed/remedy.json").read_text())
    assert written == {"schema_version": 1, **json.loads(json.dumps(result.to_json()))}
    assert ls.open(tmp_path / "fixed").objective.norm_penalty == 0.01


def test_the_clamp_remedies_it_without_training(theirs, text, tmp_path):
    options = {"data": [str(text)], "tokenizer": "bytes", "options": QUICK, "out": tmp_path / "clamped"}
    result = ls.remedy(theirs(), how="clamp", **options)
    norms = [score.norm for score in result.after.scores.depths]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert result.before.scores.depths[2].norm > 1.05 * norms[0]
    assert result.before.scores.depths[0].ce == pytest.approx(result.after.scores.depths[0].ce, rel=1e-6)
    assert result.before.audit.verdict == "blind-spot" and result.after.audit.verdict == "controlled"
    assert not (tmp_path / "clamped/checkpoints").exists()


def test_a_run_of_theirs_is_remedied_too(theirs, text, tmp_path):
    ls.train(configure(theirs(), text, steps=4), tmp_path / "run")
    result = ls.remedy(tmp_path / "run", steps=2, options=QUICK)
    assert result.out == tmp_path / "run-penalty" and result.after.audit.verdict == "controlled"
    assert result.before.audit.model.step == 4 and result.after.audit.model.step == 2


def test_a_pair_without_a_tokenizer_is_not_fine_tuned_on_other_text_than_it_is_measured_on(theirs, tmp_path):
    word = theirs("pair", "def pair():\n    return build(), [torch.arange(40).reshape(2, 20)]\n")
    with pytest.raises(ConfigError, match=r"no tokenizer.*--tokenizer"):
        ls.remedy(word, steps=1, options=QUICK, out=tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()
    assert ls.remedy(word, how="clamp", options=QUICK, out=tmp_path / "c").after.scores.tokens == 2 * 19


def test_batches_that_can_be_read_once_serve_every_measurement(theirs, tmp_path):
    code = "def pair():\n    return build(), (torch.arange(40).reshape(2, 20) for _ in range(1))\n"
    result = ls.remedy(theirs("pair", code), how="clamp", options=QUICK, out=tmp_path / "c")
    assert result.before.scores.tokens == result.after.scores.tokens == 2 * 19


# --- refusals --------------------------------------------------------------------------------------------------------


REFUSED = {
    "gated exits": (["--objective", "gated"], "LinearReadout"),
    "thinned exits": (["--exit-fraction", "0.5"], "LinearReadout"),
    "muon": (["--optimizer", "muon"], "layer"),
    "compile": (["--compile", "on"], "SharedCore"),
    "a flag of our model": (["--width", "32"], "brings its own"),
    "weights from elsewhere": (["--init-from", "preset:demo"], "already names what to start from"),
    "too many loops of weights": (["--objective", "weighted", "--loop-weights", "1", "1"], "each of 3 loops"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_with_it_is_one_sentence_that_names_what_is_missing(theirs, text, tmp_path, capsys, case):
    flags, word = REFUSED[case]
    assert main(["train", theirs(), *FLAGS, "--data", str(text), "--out", "run", *flags]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err and word in said.err.splitlines()[-1], said.err
    assert not (tmp_path / "run/checkpoints").exists()


def test_gated_exits_on_a_model_with_a_head_name_the_gate(theirs, text, tmp_path):
    with pytest.raises(UnsupportedError, match=r"gated.*an exit gate \(loopscope\.ExitGate\).*Headed"):
        ls.train(configure(theirs("build_headed"), text, {"placement": "gated"}), tmp_path / "run")


def test_thinned_exits_work_on_a_model_with_a_head(theirs, text, tmp_path):
    config = configure(theirs("build_headed"), text, {"exit_fraction": 0.5}, steps=4)
    assert ls.train(config, tmp_path / "run").outcome == "finished"
    assert len(metrics(tmp_path / "run")[0]["ce"]) == 3


@pytest.mark.parametrize("how", ["raw", "final-only", "inter-loop-norm"])
def test_a_change_of_design_is_refused_for_a_model_that_is_not_ours(theirs, text, tmp_path, capsys, how):
    flags = ["--data", str(text), "--tokenizer", "bytes", "--out", "fixed"]
    assert main(["remedy", theirs(), "--how", how, *flags]) == 2
    said = capsys.readouterr()
    assert f"--how {how} changes the design" in said.err and "their_model:build is not one" in said.err
    assert not (tmp_path / "fixed").exists()


def test_a_model_without_parameters_is_told_how_to_show_them(theirs, text, tmp_path):
    code = (
        "def hidden():\n"
        "    n = Network()\n"
        "    return ls.adapt(embed=n.start, loop=n.turn, readout=n.predict, num_loops=3)\n"
    )
    with pytest.raises(ProtocolError, match=r"no parameters to train; .* module="):
        ls.train(configure(theirs("hidden", code), text), tmp_path / "run")


def test_without_a_tokenizer_text_is_refused_with_the_flag_that_gives_one(theirs, text, capsys):
    assert main(["eval", theirs(), "--data", str(text)]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert main(["eval", "their_model:build", "--data", str(text), "--tokenizer", "bpe"]) == 2
    assert "name bytes, or a tokenizer.json" in capsys.readouterr().err
