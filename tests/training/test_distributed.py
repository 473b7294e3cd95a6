"""Two real processes with gloo: the same losses, sharded checkpoints on any number of ranks, under torchrun a kill.

torchrun is in two of the tests; elsewhere the two processes come out of one interpreter (`forked_ranks.py`), and a
single one is this process: an import of torch costs more than all that is trained here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import synthetic
import torch
import torch.distributed as dist
from synthetic import CONFIG

from loopscope.errors import RunError, UnsupportedError
from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from loopscope.training.distributed import join

SCRIPTS = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
UNDER_TORCHRUN = [*TORCHRUN, str(SCRIPTS / "synthetic.py")]
TWO = [sys.executable, str(SCRIPTS / "forked_ranks.py")]


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
    """Start ranks and wait for their end.

    Of some hundred starts one stood still, on a busy machine, nobody knows where. What stands still is ended with
    all its ranks and started once more, if it has trained nothing yet.
    """
    process = start(command, folder, shard, steps)
    try:
        output, _ = process.communicate(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        assert not RunFolder(folder).metrics_path.exists(), "stood still in training: " + process.communicate()[0]
        process = start(command, folder, shard, steps)
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output


def train_here(folder: Path, steps: int = 20) -> None:
    """One rank, in this process."""
    threads = torch.get_num_threads()
    try:
        synthetic.main(str(folder), "none", str(steps), "0.0")
    finally:
        torch.set_num_threads(threads)


def losses(folder: Path) -> list[float]:
    return [row.loss for row in RunFolder(folder).read_metrics() if row.kind == "train"]


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    train_here(folder)
    return folder


@pytest.fixture(scope="module")
def replicated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("replicated")
    train(UNDER_TORCHRUN, folder, "none")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    train(TWO, folder, "full")
    return folder


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_processes_make_the_losses_of_one_to_five_digits(single, kind, request):
    folder = request.getfixturevalue(kind)
    assert len(losses(folder)) == 20
    assert losses(folder) == pytest.approx(losses(single), rel=1e-5)
    whole = checkpoint.newest(single / "checkpoints", print).model_tensors()
    for name, tensor in checkpoint.newest(folder / "checkpoints", print).model_tensors().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)


def test_a_sharded_checkpoint_resumes_on_one_rank(single, tmp_path):
    train(TWO, tmp_path, "full", steps=8)
    train_here(tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(single), rel=1e-5)


def test_a_whole_checkpoint_resumes_on_two_ranks(single, tmp_path):
    train_here(tmp_path, steps=8)
    train(TWO, tmp_path, "full")
    assert losses(tmp_path) == pytest.approx(losses(single), rel=1e-5)


def test_sharded_checkpoints_hold_no_pickle(sharded):
    files = {path.suffix for path in sharded.rglob("*") if path.is_file()}
    assert files <= {".safetensors", ".json", ".jsonl", ".yaml"}
    for path in checkpoint.list_steps(sharded / "checkpoints"):
        assert checkpoint.load(path).state.sharded
        assert len(list(path.glob("*.safetensors"))) >= 2


def worker_pids(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children]


def test_a_dead_rank_ends_the_others_promptly_and_the_run_resumes(single, tmp_path):
    process = start(UNDER_TORCHRUN, tmp_path, "none", 2000)
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


@pytest.fixture
def one_of_two(monkeypatch):
    """This process as rank 0 of two, without any other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)


def test_the_survivor_of_a_killed_rank_says_so_in_one_sentence(one_of_two):
    with pytest.raises(RunError, match="rank 0 lost the other processes"), join("cpu"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:35062")


def test_an_error_of_our_own_under_torchrun_stays_one(one_of_two):
    with pytest.raises(RuntimeError, match="shapes"), join("cpu"):
        raise RuntimeError("shapes cannot be multiplied")


def test_an_environment_that_only_half_describes_the_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UnsupportedError, match="torchrun starts them together"), join("cpu"):
        pass
