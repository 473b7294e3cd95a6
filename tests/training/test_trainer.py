"""The trainer: resumed equals uninterrupted bit for bit, guards act, alarms act, checkpoints are whole or absent."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
import torch
from synthetic import CONFIG, RandomTokens, change, make_trainer, valid

import loopscope as ls
from loopscope.api.training import copy_weights
from loopscope.config import ObjectiveConfig
from loopscope.errors import RunError
from loopscope.results.run import Logged
from loopscope.runs import RunFolder
from loopscope.targets import load, of_run
from loopscope.training import checkpoint
from loopscope.training.scores import evaluate_depths
from loopscope.training.session import check_resume, checkpoint_path, find_checkpoint
from loopscope.training.trainer import Trainer

SCRIPT = Path(__file__).parent / "synthetic.py"


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    path = folder / "checkpoints" / f"step-{step:08d}"
    found = checkpoint.load(path)
    optimizer = {} if found.state.sharded else checkpoint.load_file(path / "optimizer.safetensors")
    return {**found.model_tensors(), **optimizer}


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


VARIANTS = {
    "dropout, sampled depth, cosine, penalty": {},
    "muon, accumulation, truncated": {
        "training": {"optimizer": "muon", "accumulate": 2},
        "objective": {"backprop_loops": 1},
    },
    "taper readout, recomputed loops": {"model": {"readout": "taper"}, "training": {"checkpoint_loops": True}},
    "thinned exits, noise state": {
        "model": {"injection": "add", "state_init": "noise"},
        "objective": {"exit_fraction": 0.5, "depth": "fixed"},
    },
    "distilled exits, experts, recomputed loops": {
        "model": {"num_experts": 4},
        "objective": {"placement": "distilled"},
        "training": {"checkpoint_loops": True},
    },
    "pondering, tapered norms, Jacobian": {
        "model": {"recurrence": "pondering", "norm": "taper"},
        "objective": {"placement": "terminal", "jacobian_penalty": 0.1},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, variant):
    config = change(CONFIG, **VARIANTS[variant])
    assert make_trainer(tmp_path / "whole", config).train() == "finished"
    for stop in (5, 9):  # off the save interval: a signal arrives in the middle of a step
        trainer = make_trainer(tmp_path / "parts", config)
        trainer.listeners = (lambda row, s=stop: signal.raise_signal(signal.SIGINT) if row.step == s else None,)
        assert trainer.train() == "interrupted"
        torch.manual_seed(random.randrange(10**6))  # whatever else happened in between
    assert make_trainer(tmp_path / "parts", config).train() == "finished"
    assert_identical(weights(tmp_path / "whole", 12), weights(tmp_path / "parts", 12))


def test_training_learns(tmp_path):
    rows: list[Logged] = []
    make_trainer(tmp_path, change(CONFIG, training={"steps": 60}), listeners=(rows.append,)).train()
    ce = [row.ce[-1] for row in rows if row.kind == "eval"]
    assert ce[-1] < 0.7 * ce[0]
    assert RunFolder(tmp_path).read_metrics() == rows


@pytest.mark.parametrize("steps", [10, 11])
def test_a_schedule_ends_with_the_last_step_and_starts_from_what_the_hold_ended_with(tmp_path, steps):
    """Of 10 steps the hold's end is a step, of 11 it is not: γ₂ is γ of the last checkpoint whose gate is at 1."""
    config = change(CONFIG, model={"norm": "taper", "readout": "taper"}, objective={"norm_penalty": 1.0})
    config = change(config, training={"steps": steps, "save_every": 1, "keep_last": steps + 1})
    trainer = make_trainer(tmp_path, config)
    trainer.train()
    assert trainer.step_module.objective.progress == 1.0
    names = [name.removesuffix(".gate") for name in weights(tmp_path, steps) if name.endswith(".gate")]
    assert len(names) == 3
    for name in names:
        gates = [weights(tmp_path, step)[f"{name}.gate"].item() for step in range(steps + 1)]
        assert gates[0] == 1 and gates[-1] == 0 and gates == sorted(gates, reverse=True)
        first = gates.index(next(gate for gate in gates if gate < 1))
        assert torch.equal(
            weights(tmp_path, first)[f"{name}.linear_weight"], weights(tmp_path, first)[f"{name}.weight"]
        )
        assert not torch.equal(
            weights(tmp_path, first)[f"{name}.weight"], weights(tmp_path, first - 1)[f"{name}.weight"]
        )


def test_accumulated_micro_batches_make_the_same_step_as_one_batch(tmp_path):
    base = change(CONFIG, model={"dropout": 0.0}, training={"steps": 3, "save_every": 3}, objective={"depth": "fixed"})
    for name, accumulate in (("one", 1), ("four", 4)):
        make_trainer(tmp_path / name, change(base, training={"accumulate": accumulate})).train()
    one, four = weights(tmp_path / "one", 3), weights(tmp_path / "four", 3)
    for name in one:
        torch.testing.assert_close(four[name], one[name], rtol=1e-3, atol=1e-5)


def test_recomputed_loops_make_the_same_step_and_keep_less(tmp_path):
    base = change(CONFIG, training={"steps": 2, "save_every": 2})
    for name, recompute in (("kept", False), ("recomputed", True)):
        make_trainer(tmp_path / name, change(base, training={"checkpoint_loops": recompute})).train()
    kept, recomputed = (weights(tmp_path / name, 2) for name in ("kept", "recomputed"))
    for name in kept:
        torch.testing.assert_close(recomputed[name], kept[name])


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").write_bytes(b""),
        lambda path: os.truncate(path / "optimizer.safetensors", 100),
        lambda path: (path / "state.json").write_text("{}"),
        lambda path: (path / "checksums.json").unlink(),
        lambda path: (path / "checksums.json").write_text("[1, 2]"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, damage, capsys):
    make_trainer(tmp_path).train()
    damage(tmp_path / "checkpoints" / "step-00000012")
    said: list[str] = []
    found = find_checkpoint(RunFolder(tmp_path), "auto", said.append)
    assert found is not None and found.step == 8
    assert "step-00000012" in said[0] and "trying the one before" in said[0]


def test_when_no_checkpoint_is_whole_nothing_is_overwritten(tmp_path):
    make_trainer(tmp_path).train()
    for path in checkpoint.list_steps(tmp_path / "checkpoints"):
        (path / "state.json").write_text("")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole"):
        find_checkpoint(RunFolder(tmp_path), "auto", lambda text: None)


def test_the_last_checkpoints_and_the_best_are_kept(tmp_path):
    trainer = make_trainer(tmp_path, change(CONFIG, training={"steps": 24, "keep_last": 2}))
    trainer.train()
    trainer.progress.best_step = 4
    kept = {int(path.name[5:]) for path in checkpoint.list_steps(tmp_path / "checkpoints")}
    assert {20, 24} <= kept and len(kept) <= 3
    assert checkpoint.load(tmp_path / "checkpoints" / "step-00000024").resumable().best_step in kept


def test_a_full_disk_during_a_save_keeps_the_checkpoints_before(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    trainer.train()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    trainer.progress.step = 13
    with pytest.raises(OSError, match="No space left"):
        trainer.save()
    assert checkpoint.newest(tmp_path / "checkpoints", lambda text: None).step == 12
    assert not list((tmp_path / "checkpoints").glob(".step*"))


@pytest.mark.parametrize(
    ("resume", "sentence"), [("must", "no checkpoint to resume from"), ("nowhere", "neither a checkpoint")]
)
def test_resume_says_what_is_missing(tmp_path, resume, sentence):
    run = RunFolder(tmp_path)
    run.create(CONFIG)
    with pytest.raises(RunError, match=sentence):
        find_checkpoint(run, resume, lambda text: None)


def test_resume_never_refuses_to_overwrite(tmp_path):
    make_trainer(tmp_path).train()
    with pytest.raises(RunError, match="already has checkpoints"):
        find_checkpoint(RunFolder(tmp_path), "never", lambda text: None)


def test_a_resume_may_change_the_number_of_steps_and_nothing_it_learns(tmp_path):
    run = RunFolder(tmp_path)
    run.create(CONFIG)
    check_resume(run, change(CONFIG, training={"steps": 99, "log_every": 5}))
    with pytest.raises(RunError, match=r"was trained with lr = 0\.01, not 0\.02 \(flag --lr\)"):
        check_resume(run, change(CONFIG, training={"lr": 0.02}))
    with pytest.raises(RunError, match="readout = 'rmsnorm', not 'raw'"):
        check_resume(run, change(CONFIG, model={"readout": "raw"}))


def test_init_from_carries_over_what_fits_and_lists_the_rest(tmp_path):
    make_trainer(tmp_path).train()
    model = ls.build(replace(CONFIG.model, readout="raw", inter_loop_norm="rmsnorm"))
    listed = copy_weights(model, of_run(tmp_path))
    assert listed == [
        "recurrence.inter_loop_norm.weight starts fresh",
        "readout_map.norm.weight of the checkpoint is not used",
    ]
    assert torch.equal(model.embedding.weight, load(tmp_path).embedding.weight)


def test_a_loaded_model_is_the_trained_one_in_evaluation_mode(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    model = load(tmp_path)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True))
    assert checkpoint_path(tmp_path).name == "step-00000012"


# --- guards and alarms -----------------------------------------------------------------------------------------------


class Poisoned(RandomTokens):
    """Makes the loss non-finite at some steps, by way of the model's own weights."""

    def __init__(self, trainer: Trainer, steps: range) -> None:
        self.trainer, self.steps = trainer, steps

    def batch(self, step, **where):
        penalty = 1e300 if step in self.steps else 0.01
        self.trainer.step_module.objective = ls.Objective(replace(self.trainer.config.objective, norm_penalty=penalty))
        return super().batch(step, **where)


def poisoned(tmp_path, steps: range, **fields) -> tuple[Trainer, list[Logged]]:
    rows: list[Logged] = []
    config = change(CONFIG, training={"max_skips": 2, "max_rollbacks": 1, **fields})
    trainer = make_trainer(tmp_path, config, listeners=(rows.append,))
    trainer.stream = Poisoned(trainer, steps)
    return trainer, rows


def test_a_non_finite_step_is_skipped_and_leaves_weights_and_optimiser_untouched(tmp_path):
    trainer, rows = poisoned(tmp_path, range(5, 6), save_every=1, keep_last=99)
    assert trainer.train() == "finished"
    (event,) = (row for row in rows if row.kind == "event")
    assert event.event == "skip" and "the loss is inf" in event.message
    assert_identical(weights(tmp_path, 5), weights(tmp_path, 6))
    assert not torch.equal(weights(tmp_path, 6)["embedding.weight"], weights(tmp_path, 7)["embedding.weight"])


def test_repeated_non_finite_steps_roll_back_with_half_the_learning_rate_then_stop(tmp_path):
    trainer, rows = poisoned(tmp_path, range(5, 100))
    assert trainer.train() == "stopped"
    events = [row.event for row in rows if row.kind == "event"]
    assert events == ["skip", "skip", "rollback", "rolled-back", "skip", "skip", "stop"]
    rolled_back = next(row for row in rows if row.kind == "event" and row.event == "rolled-back")
    assert rolled_back.message == "rolled back to step 4, learning rate × 0.5 from here on"
    assert "after 1 rollbacks" in rows[-1].message
    assert all(
        tensor.isfinite().all()
        for tensor in checkpoint.newest(tmp_path / "checkpoints", print).model_tensors().values()
    )


def test_rollbacks_are_counted_across_rollbacks_to_the_same_checkpoint(tmp_path):
    """The checkpoint holds the count of its own time: taking it over would let the run go back for ever."""
    trainer, rows = poisoned(tmp_path, range(5, 100), max_rollbacks=3)
    assert trainer.train() == "stopped"
    told = [row.message for row in rows if row.kind == "event" and row.event == "rolled-back"]
    assert [message.split(", ")[1] for message in told] == [
        f"learning rate × {factor} from here on" for factor in (0.5, 0.25, 0.125)
    ]


def blind(**training):
    """The paper's blind spot, small: per-loop cross-entropy, RMSNorm readout, unit-normal embedding."""
    config = change(CONFIG, training={"steps": 40, "lr": 0.05, "schedule": "constant", **training})
    return replace(config, objective=ObjectiveConfig())


@pytest.mark.parametrize("reaction", ["warn", "penalize", "stop"])
def test_a_blind_spot_is_answered_as_configured(tmp_path, reaction):
    rows: list[Logged] = []
    trainer = make_trainer(tmp_path, blind(on_blind_spot=reaction), listeners=(rows.append,))
    outcome = trainer.train()
    events = [row.event for row in rows if row.kind == "event"]
    assert events[0] == "blind-spot"
    assert outcome == ("stopped" if reaction == "stop" else "finished")
    assert ("penalty-on" in events) is (reaction == "penalize")
    assert any(row.terms for row in rows if row.kind == "train") is (reaction == "penalize")
    if reaction == "penalize":
        resumed = make_trainer(tmp_path, blind(on_blind_spot=reaction))
        assert resumed.step_module.objective.config.norm_penalty == 0.01


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1])
def test_three_kills_at_random_moments_lose_nothing(tmp_path, seed):
    """SIGKILL, some of them during a save; the run goes on each time and ends with the uninterrupted weights."""
    steps = "60"

    def start(folder: str) -> subprocess.Popen:
        command = [sys.executable, str(SCRIPT), str(tmp_path / folder), "none", steps, "0.1"]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    synthetic.main(str(tmp_path / "whole"), "none", steps, "0.1")
    draw = random.Random(seed)
    for _ in range(3):
        process = start("killed")
        deadline = time.time() + 60
        while not (tmp_path / "killed" / "metrics.jsonl").exists() and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start("killed").wait(timeout=120) == 0
    assert_identical(weights(tmp_path / "whole", 60), weights(tmp_path / "killed", 60))


def test_evaluation_counts_each_token_once_and_matches_a_single_pass(tmp_path):
    trainer = make_trainer(tmp_path)
    ids_BT, targets_BT = next(valid())
    scores = trainer.evaluate()
    model = trainer.model.eval()
    trace = ls.run_loops(model, ids_BT)
    for k, score in enumerate(scores, start=1):
        logits = model.readout(trace.states[k], k)
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())
        assert score.ce == pytest.approx(expected.item(), rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(score.ce))
    counted = evaluate_depths(trainer._score, valid(), 3).with_bytes(100)
    assert counted.tokens == targets_BT.numel()
    for score in counted.depths:
        assert score.bits_per_byte == pytest.approx(score.ce * counted.tokens / math.log(2) / 100)
