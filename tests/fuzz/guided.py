"""Coverage-guided fuzzing of the readers, outside CI: `python tests/fuzz/guided.py --minutes 10`.

Needs atheris (`pip install atheris`, Linux, Python up to 3.13), which is no dependency of ours. Every reader gets an
equal share of the time, in a process that is forked from a warm one. It starts from the whole file and from the fixed
corpus, and is asked for what CI asks: a clear error or a right result, within the same limits and under the same audit
hook. What breaks a reader is printed in the form of `found.py`. Exit code 1 when anything did.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shared"), str(HERE.parent / "training")]


def search(atheris: Any, bench: Any, cases: list[bytes], seconds: float) -> None:
    """Search for damage to one file that breaks its reader; ends the process."""
    seeds = bench.folder.parent / "seeds"
    seeds.mkdir()
    for place, content in enumerate(cases):
        if len(content) < 1 << 16:  # libFuzzer makes nothing longer than the longest seed
            (seeds / str(place)).write_bytes(content)

    def one(content: bytes) -> None:
        try:
            bench.try_("guided", content)
        except BaseException:
            sys.stderr.write(f"FOUND {(bench.reader.name, bench.reader.file)!r}: {content!r}\n")
            raise

    limits = [f"-max_total_time={int(seconds)}", "-rss_limit_mb=0", "-timeout=120", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={seeds.parent}/", str(seeds)], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--readers", default="", help="only those whose name and file hold this")
    given = parser.parse_args()
    minutes = given.minutes
    import atheris
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.fsync = lambda handle: None  # what survives a power cut is not the question
    with atheris.instrument_imports(include=["loopscope", "yaml", "json"]):
        from damage import corpus
        from readers import READERS
        from test_fuzz_files import Bench

    started, executed, broken = time.monotonic(), 0, 0
    readers = [reader for reader in READERS if given.readers in f"{reader.name}: {reader.file}"]
    for number, reader in enumerate(readers):
        left = 60 * minutes - (time.monotonic() - started)
        folder = Path(tempfile.mkdtemp(prefix="loopscope-guided-"))  # a TemporaryDirectory would end with the child
        log = folder / "log.txt"
        if not (child := os.fork()):  # an import of torch costs more than most searches
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            bench = Bench(reader, folder / "bench")
            cases = [bench.content, *(case.content for case in corpus(reader.suffix, bench.content, turns=1))]
            search(atheris, bench, cases, max(left / (len(readers) - number), 2))
            os._exit(70)  # a search ends its process itself
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = log.read_text(errors="replace")
        shutil.rmtree(folder, ignore_errors=True)
        count = int(found[1]) if (found := re.search(r"number_of_executed_units: (\d+)", said)) else 0
        executed, broken = executed + count, broken + (code != 0)
        sys.stdout.write(f"{reader.name}: {reader.file}: {count} cases\n" + (said[-5000:] if code else ""))
        sys.stdout.flush()
    took = (time.monotonic() - started) / 60
    sys.stdout.write(f"{executed:,} cases over {len(readers)} readers in {took:.0f} minutes; {broken} broke\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
