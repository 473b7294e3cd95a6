"""Kill a training run again and again, and compare what it ends with to a run that was left alone.

    python benchmarks/kill_test.py [--kills 50] [--seed 0]

Trains a tiny model on the builtin corpus with `python -m loopscope train --resume auto`, saving at every step, and
sends SIGKILL at random moments: in the middle of a save, at any moment of training, or during start-up (the first kill
may fall into the building of the token cache). After the last kill the run is left to finish. Its final model,
optimiser, guards, monitor and metrics must equal those of an uninterrupted run with as many threads, bit for bit.
Dropout, sampled depth, a cosine schedule and evaluations take part.

A kill hit a save when it left a half-written checkpoint folder behind. SIGKILL ends a process, not the machine: what
the kernel was given is not lost, so fsync is not put to the test. Target: no difference. Exit code 1 otherwise.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from safetensors.torch import load_file

from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from side_by_side import machine

FLAGS = shlex.split(
    "--preset demo --tokenizer bytes --vocab-size 256 --width 32 --num-layers 1 --max-length 64 --batch 4 --threads 1 "
    "--depth uniform --schedule cosine --norm-penalty 0.01 "
    "--log-every 1 --eval-every 10 --eval-tokens 512 --save-every 1"
)
MOST_STEPS_OF_A_LIFE = 8
STEPS_PER_KILL = 10
"""More than a life can make, so that the run cannot finish before its last kill."""
PATIENCE = 300.0
"""Seconds without a checkpoint after which a run hangs."""
NOT_COMPARED = "tokens_per_second"
"""The one metric that depends on the clock."""

Moment = Literal["save", "any", "start-up"]
SHARES: dict[Moment, float] = {"save": 0.5, "any": 0.3, "start-up": 0.2}


@dataclass(frozen=True)
class Kill:
    """One kill and what it found."""

    moment: Moment
    """What it aimed at."""
    step: int | None
    """The newest whole checkpoint afterwards."""
    hit_save: bool
    went_on: bool
    """The killed process had made a checkpoint of its own: it had recovered from the kill before."""


class TrainingError(Exception):
    """The run ended, or hung, where it should have gone on."""


class Training:
    """A training run in a folder of its own, started as often as it takes."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.run = RunFolder(folder / "run")
        self.log = folder / "log.txt"
        folder.mkdir()

    def start(self) -> subprocess.Popen[bytes]:
        """The command a user would give again after a crash."""
        command = [sys.executable, "-m", "loopscope", "train", *FLAGS]
        command += ["--steps", str(self.steps), "--out", str(self.run.path), "--resume", "auto"]
        environment = {**os.environ, "LOOPSCOPE_CACHE": str(self.folder / "cache")}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log)

    def finish(self) -> None:
        """Start it and let it run to its end."""
        if (code := self.start().wait()) != 0:
            raise self.failure(f"ended with exit code {code}")

    def newest_step(self) -> int:
        """Number of the newest checkpoint, −1 before the first."""
        steps = checkpoint.list_steps(self.run.checkpoints)
        return int(steps[-1].name.removeprefix("step-")) if steps else -1

    def half_written(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether this process has begun a checkpoint that is not whole."""
        return any(self.run.checkpoints.glob(f".step-*.{process.pid}"))

    def failure(self, what: str) -> TrainingError:
        """An error with the end of the log."""
        return TrainingError(f"the run {what}; its last words:\n" + "\n".join(self.log.read_text().splitlines()[-12:]))


def kill_once(training: Training, moment: Moment, start_up: float, draw: random.Random) -> Kill:
    """Start the run, wait for the moment, kill it, and look at what is left."""
    before = training.newest_step()
    process = training.start()
    try:
        _wait_for(training, process, moment, start_up, draw)
    finally:
        process.send_signal(signal.SIGKILL)
        code = process.wait()
    if code != -signal.SIGKILL:
        raise training.failure(f"ended by itself with exit code {code}")
    found = checkpoint.newest(training.run.checkpoints, lambda text: None)
    newest = found.step if found else -1
    if newest < before:
        raise training.failure(f"lost checkpoint {before}")
    return Kill(moment, found.step if found else None, training.half_written(process), went_on=newest > before)


def _wait_for(
    training: Training, process: subprocess.Popen[bytes], moment: Moment, start_up: float, draw: random.Random
) -> None:
    newest = training.newest_step()
    if moment == "start-up":
        kill_at = time.monotonic() + draw.uniform(0.0, start_up)
        while time.monotonic() < kill_at and training.newest_step() == newest:  # start-up is over with a checkpoint
            time.sleep(0.01)
        return
    goal = newest + draw.randint(1, MOST_STEPS_OF_A_LIFE)
    deadline = time.monotonic() + PATIENCE
    while training.newest_step() < goal or (moment == "save" and not training.half_written(process)):
        if process.poll() is not None:
            return
        if time.monotonic() > deadline:
            raise training.failure(f"made no checkpoint {goal} in {PATIENCE:.0f} s")
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.005 if moment == "save" else 0.1))


def differences(whole: Training, killed: Training) -> list[str]:
    """What the two runs ended with differently, by name; nothing when they are equal bit for bit."""
    ends = [checkpoint.load(training.run.checkpoints / f"step-{whole.steps:08d}") for training in (whole, killed)]
    found = []
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = ({n: t.numpy().tobytes() for n, t in load_file(end.path / file).items()} for end in ends)
        names = sorted(ours.keys() | theirs.keys())
        found += [f"{file}: {name}" for name in names if ours.get(name) != theirs.get(name)]
    if ends[0].state != ends[1].state:
        found.append("state.json")
    if _metrics(whole) != _metrics(killed):
        found.append("metrics.jsonl")
    return found


def _metrics(training: Training) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != NOT_COMPARED} for row in training.run.read_metrics()]


def count_tensors(training: Training) -> int:
    """Tensors of the final model and optimiser."""
    end = training.run.checkpoints / f"step-{training.steps:08d}"
    return sum(len(load_file(end / file)) for file in ("model.safetensors", "optimizer.safetensors"))


def measure_start_up(training: Training) -> float:
    """Train uninterrupted; seconds until the first checkpoint."""
    started = time.monotonic()
    process = training.start()
    while training.newest_step() < 0 and process.poll() is None:
        time.sleep(0.01)
    start_up = time.monotonic() - started
    if (code := process.wait()) != 0:
        raise training.failure(f"ended with exit code {code}")
    return start_up


def kill_and_finish(training: Training, kills: int, start_up: float, seed: int) -> list[Kill]:
    """All kills with a line of progress each, and the last life, which is left alone."""
    draw = random.Random(seed)
    moments = draw.choices(list(SHARES), list(SHARES.values()), k=kills)
    done = []
    for index, moment in enumerate(["start-up", *moments[1:]] if kills else [], start=1):
        kill = kill_once(training, moment, start_up, draw)
        done.append(kill)
        at = "before the first checkpoint" if kill.step is None else f"newest whole checkpoint {kill.step}"
        print(f"kill {index:3}/{kills} aimed at {moment:8} {at}{', a save half-written' * kill.hit_save}", flush=True)
    training.finish()
    return done


def compare_runs(folder: Path, kills: int, seed: int) -> bool:
    """An uninterrupted run, a killed one, and the verdict; true when there is no difference."""
    steps = STEPS_PER_KILL * max(kills, 1)
    whole, killed = Training(folder / "whole", steps), Training(folder / "killed", steps)
    start_up = measure_start_up(whole)
    print(f"uninterrupted: {steps} steps, {start_up:.1f} s to the first checkpoint", flush=True)
    done = kill_and_finish(killed, kills, start_up, seed)
    aims = ", ".join(f"{count} at {moment}" for moment, count in Counter(kill.moment for kill in done).items())
    print(f"\n{len(done)} kills (aimed: {aims}); {sum(kill.hit_save for kill in done)} left a half-written save")
    lived = [kill.went_on for kill in done[1:]]
    print(
        f"restarts: {sum(lived)} made new checkpoints before the next kill, {lived.count(False)} were killed "
        f"before they could, the last finished at step {killed.newest_step()}; none failed"
    )
    if different := differences(whole, killed):
        print("DIFFERENT from the uninterrupted run: " + ", ".join(different))
        return False
    print(f"identical to the uninterrupted run bit for bit: {count_tensors(whole)} tensors, state and metrics")
    return True


def main(kills: int = 50, seed: int = 0) -> int:
    """Kill and compare.

    Args:
        kills: How often the run is killed.
        seed: Seed of the moments.
    """
    print(f"{machine()}; {kills} kills, seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="loopscope-kill-test-"))
    try:
        identical = compare_runs(folder, kills, seed)
    except TrainingError as error:
        print(f"NOT RECOVERED: {error}")
        identical = False
    if identical:
        shutil.rmtree(folder)
    else:
        print(f"kept for inspection: {folder}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
