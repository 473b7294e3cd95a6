"""Run benchmarks, keep what they print, and write benchmarks/README.md from it: this is `make bench`.

    python benchmarks/bench.py                    # all but those that take hours
    python benchmarks/bench.py loss monitor       # some; only their entries change
    python benchmarks/bench.py --read out.txt kill_test   # what a run elsewhere printed
    python benchmarks/bench.py --write            # the page again, from what is kept

A benchmark prints the machine in its first line and its verdicts in lines that say "target", "met" or "MISSED", and its
exit code is 0 when every target is met. That is all this file relies on. The lines it shows, with command, date and
machine, are kept in figures/NAME.json. Figures of speed need a quiet machine.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from side_by_side import machine

HERE = Path(__file__).parent
FIGURES, PAGE = HERE / "figures", HERE / "README.md"
SHOWN = r"target|\bmet\b|MISSED"
"""Lines of the output that are figures, where an entry does not say otherwise."""


@dataclass(frozen=True)
class Benchmark:
    """One line of the page."""

    name: str
    question: str
    target: str
    arguments: str = ""
    shown: str = SHOWN
    hours: bool = False
    """Takes hours: `make bench` leaves it out, and it is run by its name."""
    earlier: str = ""
    """Where figures stand that its command printed before this page was written."""

    @property
    def command(self) -> str:
        """What a reader types."""
        return f"python benchmarks/{self.name.split('-')[0]}.py {self.arguments}".strip()

    @property
    def path(self) -> Path:
        """Where its last figures are kept."""
        return FIGURES / f"{self.name}.json"


KILLS = r"kills \(|restarts|identical|DIFFERENT|NOT RECOVERED"
BENCHMARKS = (
    Benchmark(
        "loss",
        "The multi-readout loss against plain and against torch's chunked one",
        "at most 0.8, 0.7 and 1.0 of plain's time at three sizes, 0.15 of its memory",
        shown=r"target|^V ",
    ),
    Benchmark(
        "train_step",
        "A training step of ours against a straightforward one",
        "faster, with less memory, by the factors of each size",
        shown=r"target|tokens, \d+ rounds",
    ),
    Benchmark(
        "loop_memory",
        "Memory and time of a step against the number of loops, each recomputed",
        "time per loop and memory flat within the printed limits",
    ),
    Benchmark(
        "monitor",
        "What watching the scale costs",
        "1 % of a step",
        shown="target|tokens, n",
        earlier="docs/monitoring.md",
    ),
    Benchmark(
        "audit_cost",
        "What an audit of paper-44m costs, and a search at width 2,048",
        "at most 20 training steps, one step's memory",
        shown="target|costs|width",
    ),
    Benchmark(
        "planted",
        "The audit against models whose blind subspace is known by derivation",
        "every dimension and verdict right, no control alarmed",
        shown=r"cases|models|right|WRONG|REFUSED",
    ),
    Benchmark(
        "predict",
        "Does training do what the audit of an untrained model says?",
        "rank correlation 0.8; precision and recall 0.9; every runaway called free",
        "train push drift audit report",
        shown="^met|^MISSED|rank correlation of free",
        hours=True,
        earlier="records/2026-11-16-predict-demo/README.md",
    ),
    Benchmark(
        "grid",
        "Rows per hour: two at a time against one",
        "1.6 times as many",
        earlier="docs/reproduce.md",
    ),
    Benchmark("report", "What a page of 25 runs costs", "10 s and 8 MB", earlier="docs/report.md"),
    Benchmark(
        "cache",
        "What extending and truncating a cache cost, however much it holds",
        "at 4,096 tokens at most twice the bytes and 1.5 times the time of 256; truncating writes nothing",
        shown=r"per appended|tokens$|truncating|cost",
    ),
    Benchmark(
        "decode",
        "A decoded token against recomputation, transformers' generate and the memory it reads",
        "2 times transformers' generate; a loop of micro within 1.5 times reading its weights once",
    ),
    Benchmark(
        "speculative",
        "Self-speculation against plain greedy decoding",
        "blocks 1.5 times plain decoding, waves above them, both at 0.85 of their bound",
        "--sizes nano --tokens 20000",
        shown="MISSED|met|K = |plain|acceptance|compared",
    ),
    Benchmark(
        "halting",
        "Certified halting: promises kept, exits that follow the steps needed, tokens per second, the probe's check",
        "at most 15 of 200 recalibrations fail while loops are saved; rank correlation 0.8; 0.9 of the speed that the "
        "loops allow; 0.1 of a readout",
        shown=r"\bmet\b|MISSED|loops|steps:|profile|units of",
    ),
    Benchmark("kill_test", "Kills at random moments, then resume", "no bit differs", "--kills 200", KILLS),
    Benchmark(
        "kill_test-ranks",
        "One of two ranks killed, resume on one or two",
        "no bit differs",
        "--kills 20 --ranks 2",
        KILLS,
    ),
    Benchmark(
        "kill_test-full-disk",
        "The disk fills at random moments",
        "no bit differs; one sentence",
        "--kills 20 --full-disk",
        KILLS,
    ),
    Benchmark(
        "kill_test-clock-back",
        "The clock set back, between and in lives",
        "no bit differs",
        "--kills 20 --clock-back",
        KILLS,
    ),
    Benchmark(
        "soak",
        "Train, eval and audit in turn for two hours, in one process",
        "memory within 5 %, handles, threads and files flat",
        "--minutes 120",
        shown="target|rounds of",
        hours=True,
    ),
)


@dataclass(frozen=True)
class Figures:
    """What a benchmark printed when it last ran."""

    command: str
    date: str
    machine: str
    met: bool
    minutes: float | None
    lines: list[str]
    schema_version: int = 1


def keep(benchmark: Benchmark, output: str, *, command: str, met: bool, minutes: float | None, date: str) -> None:
    """Write figures/NAME.json."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    named = next((line for line in lines if "SGEMM" in line), None)
    figures = [line for line in lines if re.search(benchmark.shown, line) and line != named]
    found = Figures(command, date, named or machine(), met, minutes, figures)
    FIGURES.mkdir(exist_ok=True)
    benchmark.path.write_text(json.dumps(asdict(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run(benchmark: Benchmark) -> bool:
    """Run a benchmark, showing what it prints, and keep that; true when it met its targets."""
    print(f"$ {benchmark.command}", flush=True)
    started, words = time.monotonic(), benchmark.command.split()[1:]
    command = [sys.executable, *words]
    with subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    met, minutes = process.returncode == 0, (time.monotonic() - started) / 60
    today = datetime.date.today().isoformat()
    keep(benchmark, "".join(lines), command=benchmark.command, met=met, minutes=minutes, date=today)
    return met


def page() -> str:
    """benchmarks/README.md, from what is kept."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` (`python benchmarks/bench.py`), which runs them one after another and keeps what they",
        "print. `python benchmarks/bench.py NAME` runs one and changes only its entry. A claim of speed is a ratio",
        "measured side by side in one run; timing never decides a test. Exit code 1 means that a target was missed.",
        "",
        "| benchmark | question | target | last run |",
        "|---|---|---|---|",
    ]
    kept = {benchmark: _kept(benchmark) for benchmark in BENCHMARKS}
    for benchmark, figures in kept.items():
        last = "not run yet" if figures is None else f"{'met' if figures.met else '**missed**'}, {figures.date}"
        lines.append(f"| [{benchmark.name}](#{benchmark.name}) | {benchmark.question} | {benchmark.target} | {last} |")
    for benchmark, figures in kept.items():
        lines += ["", f"## {benchmark.name}", "", f"`{figures.command if figures else benchmark.command}`"]
        lines[-1] += " (takes hours; not part of `make bench`)" if benchmark.hours else ""
        if figures is not None:
            took = "" if figures.minutes is None else f", {figures.minutes:.0f} minutes"
            lines += ["", f"{figures.date}{took}; {figures.machine}", "", "```", *figures.lines, "```"]
        else:
            before = f"; what it printed before is in [{benchmark.earlier}](../{benchmark.earlier})"
            lines += ["", f"Not run on this machine since this page is kept{before if benchmark.earlier else ''}."]
    return "\n".join(lines) + "\n"


def _kept(benchmark: Benchmark) -> Figures | None:
    return Figures(**json.loads(benchmark.path.read_text("utf-8"))) if benchmark.path.exists() else None


def main(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    read: Path | None = None,
    ran: str = "",
    date: str = "",
    write: bool = False,
) -> int:
    """Run benchmarks and write the page.

    Args:
        names: Which; by default all but those that take hours.
        read: Output of one that ran elsewhere, instead of running it.
        ran: The command that printed it, where it is not the entry's own.
        date: When that was; by default today.
        write: Only write the page again.
    """
    known = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(known)}")
    chosen = [known[name] for name in names] or [each for each in BENCHMARKS if not each.hours]
    met = True
    if read is not None:
        (benchmark,) = chosen
        output = read.read_text("utf-8")
        met = not re.search("MISSED|DIFFERENT|NOT RECOVERED|WRONG", output)
        today = date or datetime.date.today().isoformat()
        keep(benchmark, output, command=ran or benchmark.command, met=met, minutes=None, date=today)
    elif not write:
        for benchmark in chosen:
            met &= run(benchmark)
            PAGE.write_text(page(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
