"""Coverage-guided fuzzing of the readers, outside CI: `python tests/fuzz/guided.py --minutes 10`.

Needs atheris (`pip install atheris`, Linux, Python up to 3.13), which is no dependency of ours. Every reader gets an
equal share of the time, in a process of its own, starts from the whole file and from the fixed corpus, and is asked for
what CI asks: a clear error or a right result, within the same limits and under the same audit hook. What breaks a
reader is printed in the form of `found.py`. Exit code 1 when anything did.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("adapters", "report", "experiments", "training"))]


def search(number: int, seconds: float) -> None:
    """Search for damage to one file that breaks its reader; runs until the time is over or something breaks."""
    import atheris
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.fsync = lambda handle: None  # what survives a power cut is not the question
    with atheris.instrument_imports(include=["loopscope", "yaml", "json"]):
        from damage import corpus
        from readers import READERS
        from test_fuzz_files import Bench

    with tempfile.TemporaryDirectory(prefix="loopscope-guided-") as name:
        bench = Bench(READERS[number], Path(name))
        seeds = Path(name) / "seeds"
        seeds.mkdir()
        cases = [bench.content, *(case.content for case in corpus(bench.reader.suffix, bench.content, turns=1))]
        for place, content in enumerate(cases):
            if len(content) < 1 << 16:
                (seeds / str(place)).write_bytes(content)

        def one(content: bytes) -> None:
            try:
                bench.try_("guided", content)
            except BaseException:
                reader = bench.reader
                sys.stdout.write(f"FOUND {(reader.name, reader.file)!r}: {content!r}\n")
                sys.stdout.flush()
                raise

        limits = [f"-max_total_time={int(seconds)}", "-rss_limit_mb=0", "-timeout=60", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={name}/", str(seeds)], one)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--reader", type=int, help="only this one, by its number in READERS")
    given = parser.parse_args()
    if given.reader is not None:
        search(given.reader, 60 * given.minutes)
        return 0
    from readers import READERS

    started, executed, broken = time.monotonic(), 0, 0
    for number, reader in enumerate(READERS):
        left = 60 * given.minutes - (time.monotonic() - started)
        minutes = max(left / (len(READERS) - number), 2) / 60
        command = [sys.executable, __file__, "--reader", str(number), "--minutes", str(minutes)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        counts = [line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        executed += int(counts[0]) if counts else 0
        broken += done.returncode != 0
        said = "" if done.returncode == 0 else "\n" + "\n".join([done.stdout[-4000:], done.stderr[-1500:]])
        sys.stdout.write(f"{reader.name}: {reader.file}: {counts[0] if counts else 'no'} cases{said}\n")
        sys.stdout.flush()
    minutes = (time.monotonic() - started) / 60
    sys.stdout.write(f"{executed:,} cases over {len(READERS)} readers in {minutes:.0f} minutes; {broken} broke\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
