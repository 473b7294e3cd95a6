"""Two real processes under torchrun, with gloo: the same losses, sharded checkpoints on any number of ranks, a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from synthetic import CONFIG

from loopscope.runs import RunFolder
from loopscope.training import checkpoint

SCRIPT = Path(__file__).parent / "synthetic.py"
ONE = [sys.executable, str(SCRIPT)]
TWO = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(SCRIPT)]


def start(command: list[str], folder: Path, shard: str, steps: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "ERROR"}
    return subprocess.Popen(
        [*command, str(folder), shard, str(steps), "0.0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def train(command: list[str], folder: Path, shard: str, steps: int = 20) -> None:
    process = start(command, folder, shard, steps)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in RunFolder(folder).read_metrics() if row["kind"] == "train"]


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    train(ONE, folder, "none")
    return folder


@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_processes_make_the_losses_of_one_to_five_digits(single, tmp_path, shard):
    train(TWO, tmp_path, shard)
    assert len(losses(tmp_path)) == 20
    assert losses(tmp_path) == pytest.approx(losses(single), rel=1e-5)
    whole = checkpoint.newest(single / "checkpoints", print).model_tensors()
    for name, tensor in checkpoint.newest(tmp_path / "checkpoints", print).model_tensors().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("first", "then"), [(TWO, ONE), (ONE, TWO)], ids=["two ranks, then one", "one rank, then two"])
def test_a_sharded_checkpoint_resumes_on_another_number_of_ranks(single, tmp_path, first, then):
    train(first, tmp_path, "full" if first is TWO else "none", steps=8)
    train(then, tmp_path, "none" if then is ONE else "full", steps=20)
    assert losses(tmp_path) == pytest.approx(losses(single), rel=1e-5)


def test_sharded_checkpoints_hold_no_pickle(tmp_path):
    train(TWO, tmp_path, "full", steps=4)
    files = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {".safetensors", ".json", ".jsonl", ".yaml"}
    (path,) = (p for p in checkpoint.list_steps(tmp_path / "checkpoints") if p.name.endswith("4"))
    assert checkpoint.load(path).state["sharded"] is True
    assert len(list(path.glob("*.safetensors"))) >= 2


def worker_pids(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children]


def test_a_dead_rank_ends_the_others_promptly_and_the_run_resumes(single, tmp_path):
    process = start(TWO, tmp_path, "none", 2000)
    deadline = time.time() + 60
    while len(losses(tmp_path)) < 6 and time.time() < deadline:
        time.sleep(0.05)
    os.kill(worker_pids(process.pid)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Signal 9" in output or "SIGKILL" in output
    survivor = checkpoint.newest(tmp_path / "checkpoints", print)
    assert survivor is not None
    reached = survivor.step + 4
    train(TWO, tmp_path, "none", steps=reached)
    assert checkpoint.newest(tmp_path / "checkpoints", print).step == reached
    assert CONFIG.training.save_every == 4
