"""Kill a training run again and again, and compare what it ends with to a run that was left alone.

    python benchmarks/kill_test.py [--kills 50] [--seed 0] [--ranks 2 | --full-disk | --clock-back]

Trains a tiny model on the builtin corpus with `python -m loopscope train --resume auto`, saving at every step, and
sends SIGKILL at random moments: in the middle of a save, at any moment of training, or during start-up (the first kill
may fall into the building of the token cache). After the last kill the run is left to finish. Its final model,
optimiser, guards, monitor and metrics must equal those of an uninterrupted run with as many threads, bit for bit.
Dropout, sampled depth, a cosine schedule and evaluations take part.

--ranks 2: every life has one or two ranks, by chance, two of them replicated or sharded; one of them, by chance, is
killed. Sums over two ranks round differently than those of one, so the run left alone changes its ranks at the same
steps.
--full-disk: instead of a kill, the disk of the run (a tmpfs; needs root) fills up and stays full until the run ends,
which it must do with one sentence and exit code 2. --clock-back: a life starts a day before the one before it, and
while it is watched its clock is set back again and again by an hour (libfaketime; Debian's package faketime).

A kill hit a save when it left a half-written checkpoint folder behind. SIGKILL ends a process, not the machine: what
the kernel was given is not lost, so fsync is not put to the test. Target: no difference. Exit code 1 otherwise.
"""

from __future__ import annotations

import contextlib
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

from loopscope.results.record import as_json
from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from side_by_side import machine

FLAGS = shlex.split(
    "--preset demo --tokenizer bytes --vocab-size 256 --width 32 --num-layers 1 --max-length 64 --batch 4 --threads 1 "
    "--depth uniform --schedule cosine --norm-penalty 0.01 "
    "--log-every 1 --eval-every 10 --eval-tokens 512 --save-every 1"
)
FLAGS_OF_RANKS = shlex.split("--schedule constant --eval-every 1 --eval-tokens 128")
"""Where the run left alone ends and goes on at chosen steps: nothing may depend on which step is the last."""
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
DISK = "8m"
"""Room for a few checkpoints."""
FULL = "No space left on device"
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
class Life:
    """How the run is started."""

    ranks: int = 1
    shard: Literal["none", "full"] = "none"

    def __str__(self) -> str:
        return "one rank" if self.ranks == 1 else f"{self.ranks} ranks{', sharded' * (self.shard == 'full')}"


@dataclass(frozen=True)
class Kill:
    """One kill and what it found."""

    moment: Moment
    """What it aimed at."""
    life: Life
    step: int | None
    """The newest whole checkpoint afterwards."""
    hit_save: bool
    went_on: bool
    """The killed process had made a checkpoint of its own: it had recovered from the kill before."""


class TrainingError(Exception):
    """The run ended, or hung, where it should have gone on."""


class Training:
    """A training run in a folder of its own, started as often as it takes."""

    def __init__(
        self, folder: Path, steps: int, *flags: str, full_disk: bool = False, clock_back: bool = False
    ) -> None:
        self.folder, self.steps, self.flags = folder, steps, flags
        self.disk, self.clock = folder / "disk", folder / "clock" if clock_back else None
        self.run = RunFolder(self.disk / "run")
        self.log = folder / "log.txt"
        self.hours_back = 0
        self.is_mounted = full_disk
        self.disk.mkdir(parents=True)
        if full_disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", self.disk], check=True)

    def start(self, life: Life = Life(), steps: int | None = None) -> subprocess.Popen[bytes]:  # noqa: B008, it is frozen
        """The command a user would give again after a crash."""
        many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(life.ranks)]
        command = [sys.executable, *(many if life.ranks > 1 else ()), "-m", "loopscope", "train", *FLAGS, *self.flags]
        command += ["--shard", life.shard] if life.shard != "none" else []
        command += ["--steps", str(steps or self.steps), "--out", str(self.run.path), "--resume", "auto"]
        environment = {**os.environ, "LOOPSCOPE_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        if self.clock is not None:
            self.set_clock_back(24)
            environment |= {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self.clock)}
            environment |= {"FAKETIME_NO_CACHE": "1", "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def set_clock_back(self, hours: int) -> None:
        """Let the run's clock be so many hours earlier than it would be."""
        assert self.clock is not None
        self.hours_back += hours
        self.clock.write_text(f"-{self.hours_back}h\n")

    def fill_disk(self, process: subprocess.Popen[bytes]) -> int:
        """Take all room there is until the process has ended, then give it back; the exit code."""
        deadline, filler = time.monotonic() + PATIENCE, self.disk / "filler"
        with filler.open("wb", buffering=0) as file:
            while process.poll() is None:
                try:
                    file.write(bytes(1 << 12))
                except OSError:
                    time.sleep(0.001)
                if time.monotonic() > deadline:
                    raise self.failure("went on with a full disk")
        filler.unlink()
        return process.wait()

    def clean_up(self) -> None:
        """Unmount the disk."""
        if self.is_mounted:
            subprocess.run(["umount", self.disk], check=True)

    def finish(self, life: Life = Life(), steps: int | None = None) -> None:  # noqa: B008, it is frozen
        """Start it and let it run to its end, or to an earlier step."""
        if (code := self.start(life, steps).wait()) != 0:
            raise self.failure(f"ended with exit code {code}")

    def newest_step(self) -> int:
        """Number of the newest checkpoint, −1 before the first."""
        steps = checkpoint.list_steps(self.run.checkpoints)
        return int(steps[-1].name.removeprefix("step-")) if steps else -1

    def half_written(self) -> bool:
        """Whether a checkpoint was begun that is not whole."""
        return any(self.run.checkpoints.glob(".step-*"))

    def failure(self, what: str) -> TrainingError:
        """An error with the end of the log."""
        return TrainingError(f"the run {what}; its last words:\n" + "\n".join(self.log.read_text().splitlines()[-12:]))


def kill_once(training: Training, life: Life, moment: Moment, start_up: float, draw: random.Random) -> Kill:
    """Start the run, wait for the moment, kill it, and look at what is left."""
    before = training.newest_step()
    written = training.log.stat().st_size if training.log.exists() else 0
    process = training.start(life)
    try:
        _wait_for(training, process, moment, start_up, draw)
        if training.is_mounted:
            code, expected = training.fill_disk(process), 2
        else:
            os.kill(draw.choice(_ranks(process)) if life.ranks > 1 else process.pid, signal.SIGKILL)
            code, expected = process.wait(PATIENCE), -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whoever a failing torchrun left behind
    said = training.log.read_bytes()[written:].decode(errors="replace")
    if code == 0 or (life.ranks == 1 and code != expected) or "bug in loopscope" in said:
        raise training.failure(f"ended by itself with exit code {code}")
    if training.is_mounted and FULL not in said:
        raise training.failure("did not say that the disk is full")
    found = checkpoint.newest(training.run.checkpoints, lambda text: None)
    newest = found.step if found else -1
    if newest < before:
        raise training.failure(f"lost checkpoint {before}")
    hit_save = f"{FULL}: {training.run.checkpoints}" in said if training.is_mounted else training.half_written()
    return Kill(moment, life, found.step if found else None, hit_save, went_on=newest > before)


def _ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes that torchrun has started, or itself while there are none."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children] or [process.pid]


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
    while training.newest_step() < goal or (moment == "save" and not training.half_written()):
        if process.poll() is not None:
            return
        if training.clock is not None and draw.random() < 0.005:
            training.set_clock_back(1)
        if time.monotonic() > deadline:
            raise training.failure(f"made no checkpoint {goal} in {PATIENCE:.0f} s")
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.005 if moment == "save" else 0.1))


def differences(whole: Training, killed: Training) -> list[str]:
    """What the two runs ended with differently, by name; nothing when they are equal bit for bit."""
    ends = [checkpoint.load(training.run.checkpoints / f"step-{whole.steps:08d}") for training in (whole, killed)]
    found = []
    for file in sorted({path.name for end in ends for path in end.path.glob("*.safetensors")}):
        ours, theirs = ({n: t.numpy().tobytes() for n, t in load_file(end.path / file).items()} for end in ends)
        names = sorted(ours.keys() | theirs.keys())
        found += [f"{file}: {name}" for name in names if ours.get(name) != theirs.get(name)]
    if ends[0].resumable() != ends[1].resumable():
        found.append("state.json")
    if _metrics(whole) != _metrics(killed):
        found.append("metrics.jsonl")
    return found


def _metrics(training: Training) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != NOT_COMPARED} for row in as_json(training.run.read_metrics())]


def count_tensors(training: Training) -> int:
    """Tensors of the final model and optimiser."""
    end = training.run.checkpoints / f"step-{training.steps:08d}"
    return sum(len(load_file(file)) for file in end.glob("*.safetensors"))


def measure_start_up(training: Training, life: Life) -> float:
    """Train uninterrupted; seconds until the first checkpoint."""
    started = time.monotonic()
    process = training.start(life)
    while training.newest_step() < 0 and process.poll() is None:
        time.sleep(0.01)
    start_up = time.monotonic() - started
    if (code := process.wait()) != 0:
        raise training.failure(f"ended with exit code {code}")
    return start_up


def kill_and_finish(training: Training, kills: int, ranks: int, start_up: float, seed: int) -> list[Kill]:
    """All kills with a line of progress each, and the last life, which is left alone."""
    draw = random.Random(seed)
    moments = draw.choices(list(SHARES), list(SHARES.values()), k=kills)
    done = []
    for index, moment in enumerate(["start-up", *moments[1:]] if kills else [], start=1):
        life = draw.choice((Life(), Life(ranks), Life(ranks, "full"))) if ranks > 1 else Life()
        kill = kill_once(training, life, moment, start_up, draw)
        done.append(kill)
        at = "before the first checkpoint" if kill.step is None else f"newest whole checkpoint {kill.step}"
        how = f" ({life})" if ranks > 1 else ""
        hit = ", a save half-written" * kill.hit_save
        print(f"kill {index:3}/{kills}{how} aimed at {moment:8} {at}{hit}", flush=True)
    training.finish(Life(ranks))
    return done


def compare_runs(folder: Path, kills: int, ranks: int, seed: int, **faults: bool) -> bool:
    """An uninterrupted run, a killed one, and the verdict; true when there is no difference."""
    steps, flags = STEPS_PER_KILL * max(kills, 1), FLAGS_OF_RANKS if ranks > 1 else []
    whole, killed = Training(folder / "whole", steps, *flags), Training(folder / "killed", steps, *flags, **faults)
    try:
        if ranks == 1:
            start_up = measure_start_up(whole, Life())
            print(f"uninterrupted: {steps} steps, {start_up:.1f} s to the first checkpoint", flush=True)
        else:
            start_up = measure_start_up(Training(folder / "first", 1, *flags), Life(ranks))
        done = kill_and_finish(killed, kills, ranks, start_up, seed)
        if ranks > 1:
            for kill in done:
                if kill.went_on and kill.step:
                    whole.finish(kill.life, kill.step)
            whole.finish(Life(ranks))
            print(f"left alone: {steps} steps with the same ranks", flush=True)
        return _judge(whole, killed, done)
    finally:
        killed.clean_up()


def _judge(whole: Training, killed: Training, done: list[Kill]) -> bool:
    """Print how the two runs compare."""
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


def main(kills: int = 50, seed: int = 0, ranks: int = 1, full_disk: bool = False, clock_back: bool = False) -> int:
    """Kill and compare.

    Args:
        kills: How often the run is killed.
        seed: Seed of the moments.
        ranks: Most ranks of a life.
        full_disk: Fill the disk instead of killing.
        clock_back: Set the clock back, from life to life and within one.
    """
    if ranks > 1 and full_disk:
        raise SystemExit("--ranks and --full-disk are tried one at a time")
    if clock_back and not FAKETIME.exists():
        raise SystemExit(f"--clock-back needs {FAKETIME}; run: apt-get install faketime")
    how = f", up to {ranks} ranks" * (ranks > 1) + ", by a full disk" * full_disk + ", the clock set back" * clock_back
    print(f"{machine()}; {kills} kills{how}, seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="loopscope-kill-test-"))
    try:
        identical = compare_runs(folder, kills, ranks, seed, full_disk=full_disk, clock_back=clock_back)
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
