"""Checkpoints whose checksums are right and whose content is not: whatever is in them, one sentence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import loopscope as ls
from loopscope.config import TrainingConfig
from loopscope.errors import RunError
from loopscope.results.checkpoint import GuardState, MonitorState, SavedRun
from loopscope.training import checkpoint
from loopscope.training.optimizers import Optimizers

STATE = SavedRun(
    step=3,
    penalty_on=False,
    best_ce=None,
    best_step=None,
    guard=GuardState(recent=[4.5, 4.0], bad_in_a_row=0, rollbacks=0),
    monitor=MonitorState(start=1.5, since=None, recent=[(1, 0.5)], raised=["runaway"]),
    world_size=1,
)


def small() -> tuple[Any, Optimizers]:
    model = ls.build(ls.ModelConfig(vocab_size=16, width=8, num_heads=2, num_layers=1, max_length=8), seed=0)
    return model, Optimizers(model, TrainingConfig())


def forge(path: Path, name: str, content: bytes) -> None:
    """Put other content into a file of a checkpoint, with the checksum that belongs to it."""
    (path / name).write_bytes(content)
    sums = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps({**sums, name: hashlib.sha256(content).hexdigest()}))


@pytest.fixture
def path(tmp_path) -> Path:
    return checkpoint.save(tmp_path, *small(), STATE)


def resume(path: Path) -> None:
    found = checkpoint.load(path)
    found.resumable()
    found.restore_tensors(*small())


def test_a_checkpoint_that_nobody_forged_is_resumed(path):
    resume(path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:4],
        lambda data: b"",
        lambda data: (1 << 62).to_bytes(8, "little") + b"{}",
        lambda data: (99 << 20).to_bytes(8, "little") + b"{}",
        lambda data: (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
    ids=["truncated", "four bytes", "empty", "huge header", "header beyond the end", "nested header"],
)
def test_tensors_that_cannot_be_read_are_one_sentence(path, name, damage: Callable[[bytes], bytes]):
    forge(path, name, damage((path / name).read_bytes()))
    with pytest.raises(RunError, match=rf"checkpoint {path} is damaged or incomplete: ") as caught:
        resume(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": ' + b"1" * 10_000 + b"}"])
@pytest.mark.parametrize("name", ["state.json", "checksums.json"])
def test_a_file_that_holds_no_object_is_named(path, name, content):
    if name == "state.json":
        forge(path, name, content)
    else:
        (path / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"checkpoint {path} is damaged: {name} "):
        checkpoint.load(path)


@pytest.mark.parametrize("wrong", ["x", -0.5, [1], {"a": 1}, True])
@pytest.mark.parametrize(
    "place",
    ["step", "best_step", "guard", "guard.rollbacks", "monitor", "monitor.since", "monitor.recent", "monitor.raised"],
)
def test_a_value_of_the_wrong_kind_is_named_by_its_place(path, place, wrong):
    state = json.loads((path / "state.json").read_text())
    *outer, name = place.split(".")
    (state[outer[0]] if outer else state)[name] = wrong
    forge(path, "state.json", json.dumps(state).encode())
    with pytest.raises(RunError, match=rf"is damaged: state.json does not fit at {place}\S*: "):
        resume(path)


def test_a_missing_value_is_named(path):
    state = json.loads((path / "state.json").read_text())
    del state["penalty_on"]
    forge(path, "state.json", json.dumps(state).encode())
    with pytest.raises(RunError, match=r"is damaged: state.json does not fit: it lacks 'penalty_on'"):
        resume(path)


def test_a_checkpoint_that_claims_to_be_sharded_and_is_not_is_one_sentence(path):
    state = json.loads((path / "state.json").read_text())
    forge(path, "state.json", json.dumps({**state, "sharded": True}).encode())
    with pytest.raises(RunError, match=rf"checkpoint {path} is damaged or incomplete: "):
        resume(path)


def test_checksums_of_files_elsewhere_are_refused(path):
    (path / "checksums.json").write_text(json.dumps({"../../elsewhere": "0"}))
    with pytest.raises(RunError, match=r"names '../../elsewhere', which is not a file of it"):
        checkpoint.load(path)


@pytest.mark.parametrize("damage", ["shape", "slot", "name"])
def test_a_state_of_the_optimiser_that_does_not_fit_is_named(tmp_path, damage):
    model, optimizers = small()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers.step(1e-3)
    path = checkpoint.save(tmp_path, model, optimizers, STATE)
    tensors = load_file(path / "optimizer.safetensors")
    value = tensors.pop("embedding.weight/exp_avg")
    others = {"shape": {"embedding.weight/exp_avg": value[:1].clone()}, "slot": {}, "name": {"x/exp_avg": value}}
    tensors |= others[damage]
    forge(path, "optimizer.safetensors", save(tensors))
    with pytest.raises(RunError, match=r"is damaged or incomplete: the optimiser's state (of embedding|is about 'x')"):
        resume(path)


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        ("step", {"step": -5}),
        ("step", {"step": 10**30}),
        ("guard.rollbacks", {"guard": {"recent": [], "bad_in_a_row": 0, "rollbacks": -5000}}),
        ("one of step 4", {"step": 4}),
    ],
)
def test_counts_that_no_run_can_have_are_damage(tmp_path, place, changes):
    path = checkpoint.save(tmp_path, *small(), STATE)
    state = {**json.loads((path / "state.json").read_text()), **changes}
    forge(path, "state.json", json.dumps(state).encode())
    with pytest.raises(RunError, match=place):
        checkpoint.load(path).resumable()
