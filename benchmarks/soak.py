"""Train, evaluate and audit in turn for hours in one process, and see whether memory, handles or files grow.

    python benchmarks/soak.py [--minutes 120] [--out soak.jsonl]

Every round gives three commands to the command line, in this process: `train` makes one and the same run twelve steps
longer, `eval` scores it, `audit` searches it. What is left afterwards is counted: resident and anonymous memory, open
handles, threads, and every file in the run, the cache, the home and the temporary folder, which are all below one
folder of this benchmark's own.

The first fifth of the rounds warms up. Of the rest the first and the last third are compared. Target: memory at most
5 % larger, handles and threads not one more, files no more than the one checkpoint that is kept as the best.
Exit code 1 otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro

from loopscope import cli
from side_by_side import machine

STEPS = 12
"""Of a round; a save, an evaluation and a few lines of metrics fall into it."""
TRAIN = shlex.split(
    "train --preset demo --tokenizer bytes --vocab-size 256 --width 32 --num-layers 1 --max-length 64 --batch 4 "
    "--threads 1 --norm-penalty 0.01 --log-every 3 --eval-every 6 --eval-tokens 512 --save-every 6"
)
EVAL = shlex.split("eval run --max-tokens 2048 --depths 1..6 --json")
AUDIT = shlex.split("audit run --states 2 --tokens 64 --loops 8 --json")
MOST_GROWTH = 1.05
WARM_UP = 0.2
BEST_CHECKPOINT = 4
"""Files of a checkpoint: the best one is kept besides the last two, and may be one of them or not."""
FEWEST_ROUNDS = 10
"""Rounds that say something about growth."""


@dataclass(frozen=True)
class Left:
    """What a round leaves behind."""

    round: int
    seconds: float
    """Of the round."""
    resident_mib: float
    anonymous_mib: float
    """Resident memory that no file backs: what a leak grows."""
    handles: int
    threads: int
    files: int


def run_round(number: int, folder: Path) -> Left:
    """The three commands once; any exit code but 0, and 1 of an audit that found something, ends the benchmark."""
    started = time.monotonic()
    for arguments in ([*TRAIN, "--out", "run", "--steps", str(STEPS * number)], EVAL, AUDIT):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = cli.main(arguments)
        if code not in ((0, 1) if arguments is AUDIT else (0,)):
            raise SystemExit(f"round {number}: {shlex.join(arguments)} ended with {code}:\n{said.getvalue()[-2000:]}")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and that the allocator kept would hide a leak for long
    return Left(number, time.monotonic() - started, *_memory_mib(), *_counts(folder))


def _memory_mib() -> tuple[float, float]:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, anonymous = (int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))
    return resident, anonymous


def _counts(folder: Path) -> tuple[int, int, int]:
    handles = len(list(Path("/proc/self/fd").iterdir())) - 1  # without the one that lists them
    threads = len(list(Path("/proc/self/task").iterdir()))
    return handles, threads, sum(1 for path in folder.rglob("*") if path.is_file())


def judge(rounds: list[Left]) -> bool:
    """Print first against last; true when nothing grew."""
    kept = rounds[int(len(rounds) * WARM_UP) :]
    third = max(1, len(kept) // 3)
    first, last = kept[:third], kept[-third:]
    flat = len(rounds) >= FEWEST_ROUNDS
    if not flat:
        print(f"only {len(rounds)} rounds: too few to say anything")
    for name, most in (("resident_mib", MOST_GROWTH), ("anonymous_mib", MOST_GROWTH)):
        before, after = (statistics.median(getattr(left, name) for left in part) for part in (first, last))
        flat &= after <= most * before
        verdict = "met" if after <= most * before else "MISSED"
        print(f"  {name:14} {before:8.1f} → {after:8.1f}  ×{after / before:.3f}  target ≤ ×{most:.2f}: {verdict}")
    for name, more in (("handles", 0), ("threads", 0), ("files", BEST_CHECKPOINT)):
        before, after = (max(getattr(left, name) for left in part) for part in (first, last))
        flat &= after <= before + more
        verdict = "met" if after <= before + more else "MISSED"
        print(f"  {name:14} {before:8} → {after:8}          target ≤ +{more}: {verdict}")
    return flat


def main(minutes: float = 120, out: Path | None = None) -> int:
    """Run rounds until the time is over, then judge; Ctrl-C judges what there is.

    Args:
        minutes: How long.
        out: Where to leave a line of JSON for every round.
    """
    torch.set_num_threads(1)
    print(f"{machine()}; {minutes:g} minutes", flush=True)
    lines = None if out is None else out.resolve()
    folder = Path(tempfile.mkdtemp(prefix="loopscope-soak-"))
    for name, value in (("HOME", "home"), ("TMPDIR", "tmp"), ("LOOPSCOPE_CACHE", "cache"), ("XDG_CACHE_HOME", "xdg")):
        (folder / value).mkdir()
        os.environ[name] = str(folder / value)
    tempfile.tempdir = None  # it was chosen for our own folder
    before = Path.cwd()
    os.chdir(folder)
    rounds: list[Left] = []
    started = time.monotonic()
    try:
        while time.monotonic() - started < 60 * minutes:
            rounds.append(run_round(len(rounds) + 1, folder))
            if lines is not None:
                with lines.open("a") as file:
                    file.write(json.dumps(asdict(rounds[-1])) + "\n")
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    spent = (time.monotonic() - started) / 60
    print(f"\n{len(rounds)} rounds of train, eval and audit in {spent:.0f} minutes, one process")
    return 0 if rounds and judge(rounds) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
