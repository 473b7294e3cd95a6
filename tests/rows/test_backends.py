"""Rows as real processes, here and on a real Ray cluster: pinned, logged, stopped, killed, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loopscope.config import Config, DataConfig, ModelConfig, TrainingConfig
from loopscope.errors import ConfigError, RunError
from loopscope.rows import backends
from loopscope.rows.backends import Here, Ray, launch, make_backend, usable_cores
from loopscope.rows.grid import Grid, Request, lay_out
from loopscope.rows.ledger import EXIT_GIVEN_UP, EXIT_TAKEN, Ledger, row_record
from loopscope.rows.schedule import Schedule
from loopscope.rows.spec import RowSpec

PATIENCE = 120.0


@pytest.fixture
def base(tmp_path, monkeypatch) -> Config:
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("".join(f"line {n} about rivers and {n * n} stones\n" for n in range(300)))
    (tmp_path / "valid.txt").write_text("another line about a river\n" * 20)
    return Config(
        model=ModelConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, num_loops=2, max_length=16),
        data=DataConfig(data=(str(tmp_path / "train.txt"),), valid=(str(tmp_path / "valid.txt"),), tokenizer="bytes"),
        training=TrainingConfig(steps=8, batch=4, threads=1, lr=0.01),
    )


def make_grid(base: Config, out: Path, steps: int, seeds: dict[str, tuple[int, ...]] | None = None) -> Grid:
    request = Request(size="demo", seeds=seeds or {"per-loop+raw": (42,)}, steps=steps, audit=False)
    return lay_out(request, out, lambda text: None, base)


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def step_of(ledger: Ledger, row: RowSpec) -> int:
    return ledger.status(row).step


def final_weights(ledger: Ledger, row: RowSpec) -> bytes:
    step = f"step-{row.config.training.steps:08d}"
    return (ledger.run(row).checkpoints / step / "model.safetensors").read_bytes()


def test_rows_run_side_by_side_fill_their_folders_and_are_not_done_twice(base, tmp_path):
    (tmp_path / "test.txt").write_text("a river of another kind\n" * 30)
    grid = make_grid(base, tmp_path / "out", 4, {"per-loop+raw": (42,), "per-loop+rmsnorm": (42,)})
    rows = [replace(row, test_data=(str(tmp_path / "test.txt"),)) for row in grid.rows()]
    ledger = Ledger(grid.out)
    final = Schedule(ledger, rows, Here(2, threads=1)).run()
    assert [status.state for status in final] == ["finished", "finished"]
    folder = ledger.run(rows[0]).path
    evaluation = json.loads((folder / "eval.json").read_text())
    assert [depth["k"] for depth in evaluation["splits"]["valid"]["depths"]] == [1, 2, 3, 4, 5, 6]
    test = evaluation["splits"]["test"]
    text = ("a river of another kind\n\n" * 30).rstrip("\n")
    assert test["tokens"] == test["bytes"] == len(text) - 1, "each token but the first is a target once"
    assert [speed["k"] for speed in evaluation["throughput"]] == [1, 2]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["threads"] == 1
    assert manifest["data"]["tokenizer_sha256"] == grid.data["tokenizer_sha256"], "the grid's own tokenizer"
    record = row_record(folder)
    assert record.attempts == 1 and set(record.seconds) == {"training", "evaluating", "calibrating"}
    assert "train step 4/4" in (folder / "log.txt").read_text()
    before = (folder / "row.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    assert launch(rows[0].to_json(), folder, 1, wait=0.0).wait(PATIENCE) == 0
    assert ((folder / "row.json").read_bytes(), (folder / "metrics.jsonl").read_bytes()) == before


def test_a_killed_row_is_resumed_and_ends_as_if_it_had_not_been_killed(base, tmp_path):
    grids = [make_grid(base, tmp_path / name, 120) for name in ("whole", "killed")]
    whole, killed = (Ledger(grid.out) for grid in grids)
    row = grids[0].rows()[0]
    Schedule(whole, [row], Here(1)).run()
    struck = []

    def strike(overview) -> None:
        if not struck and killed.run(row).checkpoints.joinpath("step-00000030").exists():
            struck.append(row_record(killed.run(row).path).pid)
            os.kill(struck[0], signal.SIGKILL)

    events = []
    schedule = Schedule(killed, [row], Here(1), on_event=lambda event: events.append(event.what), on_view=strike)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.rows.schedule.LOOK_SECONDS", 0.01)
        patch.setattr("loopscope.rows.schedule.POLL_SECONDS", 0.01)
        final = schedule.run()
    assert struck and events == ["started", "retried", "started", "finished"]
    assert final[0].state == "finished" and final[0].attempts == 2
    assert "resumed at step" in (killed.run(row).path / "log.txt").read_text()
    assert final_weights(whole, row) == final_weights(killed, row)


def test_a_stopped_row_saves_and_is_open_for_the_next(base, tmp_path):
    grid = make_grid(base, tmp_path / "out", 100_000)
    ledger, row = Ledger(grid.out), grid.rows()[0]
    handle = Here(1).start(row, ledger.run(row).path)
    wait_until(lambda: step_of(ledger, row) >= 20, "it trains")
    assert ledger.status(row).state == "running"
    handle.stop()
    wait_until(lambda: handle.poll() is not None, "it leaves")
    assert handle.poll() == 130 and ledger.status(row).state == "open"
    steps = sorted(path.name for path in ledger.run(row).checkpoints.iterdir())
    assert int(steps[-1].removeprefix("step-")) >= 20, "saved where it was, not at the last regular checkpoint"


def test_a_row_that_somebody_has_is_left_alone(base, tmp_path):
    grid = make_grid(base, tmp_path / "out", 4)
    ledger, row = Ledger(grid.out), grid.rows()[0]
    with ledger.run(row).locked():
        assert launch(row.to_json(), ledger.run(row).path, 1, wait=0.0).wait(PATIENCE) == EXIT_TAKEN
    assert not (ledger.run(row).path / "row.json").exists()


def test_a_mistake_is_given_up_with_its_sentence(base, tmp_path):
    grid = make_grid(base, tmp_path / "out", 4)
    ledger, row = Ledger(grid.out), grid.rows()[0]
    wrong = replace(row, test_data=("nowhere.txt",))
    assert launch(wrong.to_json(), ledger.run(row).path, 1, wait=0.0).wait(PATIENCE) == EXIT_GIVEN_UP
    assert "no such file: nowhere.txt" in ledger.status(row).error
    assert ledger.status(row).state == "failed"


def test_a_row_leaves_with_the_process_that_started_it(base, tmp_path):
    grid = make_grid(base, tmp_path / "out", 100_000)
    ledger, row = Ledger(grid.out), grid.rows()[0]
    code = (
        "import sys, time; from pathlib import Path; from loopscope.rows.backends import launch; "
        "launch(sys.argv[1], Path(sys.argv[2]), 1, wait=0.0); time.sleep(999)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, row.to_json(), str(ledger.run(row).path)])
    wait_until(lambda: step_of(ledger, row) >= 10, "it trains")
    parent.kill()
    parent.wait()
    wait_until(lambda: ledger.status(row).state == "open", "it saves and leaves")


def test_rows_are_pinned_to_their_threads_and_gpus_before_torch_is_there(monkeypatch, base, tmp_path):
    seen: list[dict[str, str]] = []

    class Process:
        def poll(self) -> None: ...

    def popen(command, env, **options):
        assert options["start_new_session"], "Ctrl-C reaches the schedule alone"
        seen.append(env)
        return Process()

    monkeypatch.setattr(backends.subprocess, "Popen", popen)
    row = make_grid(base, tmp_path / "out", 4).rows()[0]
    here = Here(2, threads=3, gpus=["4", "GPU-5"])
    for number in range(2):
        here.start(row, tmp_path / str(number))
    assert [environment["OMP_NUM_THREADS"] for environment in seen] == ["3", "3"]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in seen] == ["4", "GPU-5"]


def test_rows_at_once_default_to_the_cores_there_are(monkeypatch):
    monkeypatch.setattr(backends, "usable_cores", lambda: 8)
    options = {"gpus": 0, "retries": 2}
    assert make_backend("here", rows_at_once=None, threads=1, **options).slots == 8
    assert make_backend("here", rows_at_once=None, threads=3, **options).slots == 2
    assert make_backend("here", rows_at_once=None, threads=16, **options).slots == 1
    assert make_backend("here", rows_at_once=5, threads=1, **options).slots == 5
    with pytest.raises(ConfigError, match="expected here, ray"):
        make_backend("moon", rows_at_once=None, threads=1, **options)


def test_no_more_rows_run_at_once_than_there_are_gpus_for(monkeypatch):
    monkeypatch.setattr(backends, "usable_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    here = make_backend("here", rows_at_once=None, threads=1, gpus=1, retries=2)
    assert here.slots == 2 and list(here.gpus) == ["4", "5"]
    with pytest.raises(ConfigError, match="at most one GPU, and this machine shows 2"):
        make_backend("here", rows_at_once=None, threads=1, gpus=2, retries=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="this machine shows 0"):
        make_backend("here", rows_at_once=None, threads=1, gpus=1, retries=2)


# --- a real Ray cluster ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray(tmp_path_factory) -> Iterator[Ray]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOPSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))  # workers inherit it
        with Ray(None, rows_at_once=None, threads=usable_cores()) as cluster:  # each row takes the whole of it
            yield cluster


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_a_row_whose_ray_worker_is_killed_goes_on_in_another(ray, base, tmp_path):
    grid = make_grid(base, tmp_path / "out", 600)
    ledger, row = Ledger(grid.out), grid.rows()[0]
    struck: list[int] = []

    def strike(overview) -> None:
        if not struck and step_of(ledger, row) >= 50:
            struck.append(parent_of(row_record(ledger.run(row).path).pid))
            os.kill(struck[0], signal.SIGKILL)

    events: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loopscope.rows.schedule.LOOK_SECONDS", 0.05)
        patch.setattr("loopscope.rows.schedule.POLL_SECONDS", 0.05)
        on_event = lambda event: events.append(event.what)  # noqa: E731
        final = Schedule(ledger, [row], ray, retries=0, on_event=on_event, on_view=strike).run()
    assert struck and struck[0] != os.getpid()
    assert final[0].state == "finished" and final[0].attempts == 2
    assert events == ["started", "finished"], "Ray ran the task again; the schedule did not have to"
    log = (ledger.run(row).path / "log.txt").read_text()
    assert "interrupted" in log and "resumed at step" in log
    metrics = [line.step for line in ledger.run(row).read_metrics() if line.kind == "train"]
    assert metrics == sorted(set(metrics)), "no step twice"


def test_ray_sends_no_usage_reports_and_shows_no_dashboard(ray):
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    from ray._common.usage.usage_lib import usage_stats_enabled

    assert not usage_stats_enabled()
    assert not ray._ray._private.worker.global_worker.node.address_info.get("webui_url")


def test_a_stopped_ray_row_saves_and_rows_beyond_the_cluster_wait(ray, base, tmp_path):
    grid = make_grid(base, tmp_path / "out", 100_000, {"per-loop+raw": (42, 101, 202)})
    ledger, rows = Ledger(grid.out), grid.rows()
    handles = [ray.start(row, ledger.run(row).path) for row in rows]
    wait_until(lambda: any(step_of(ledger, row) >= 10 for row in rows), "one trains")
    states = [ledger.status(row).state for row in rows]
    assert sorted(states) == ["open", "open", "running"]
    for handle in handles:
        handle.stop()
    wait_until(lambda: all(handle.poll() is not None for handle in handles), "they leave")
    stopped = rows[states.index("running")]
    assert ledger.status(stopped).state == "open"
    assert "interrupted" in (ledger.run(stopped).path / "log.txt").read_text()


def test_a_cluster_that_is_not_there_is_one_sentence():
    pytest.importorskip("ray")
    with pytest.raises(RunError, match=r"cannot reach the Ray cluster 127\.0\.0\.1:1"):
        Ray("127.0.0.1:1", rows_at_once=None, threads=1)
