"""What verbs print with: results on stdout, words and progress on stderr, bars only on a terminal."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from loopscope.files import without_nan

if TYPE_CHECKING:
    from loopscope.results.record import Record
    from loopscope.show.table import Table

SCHEMA_VERSION = 1
REPORT_SECONDS = 10.0
"""Between two lines of progress where there is no bar."""


def say(message: str) -> None:
    """A line of news on stderr."""
    sys.stderr.write(f"loopscope: {message}\n")


def print_text(text: str) -> None:
    """Text on stdout, exactly as it is."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def print_words(text: str) -> None:
    """Sentences on stdout: on a terminal no word is broken at its edge, elsewhere a line stays a line."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        wrap = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(map(wrap, text.splitlines()))
    print_text(text)


def print_tables(*tables: Table, lines: bool = False) -> None:
    """Tables on stdout, with lines between long rows; no colours and a fixed width when it is not a terminal."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.capture() as captured:  # rich would turn a closed pipe into an exit code of its own
        for table in tables:
            console.print(table.terminal(lines=lines))
    sys.stdout.write(captured.get())


def print_json(**values: Any) -> None:
    """One strict JSON object on stdout: what is not a finite number is null."""
    strict = without_nan({"schema_version": SCHEMA_VERSION, **values})
    sys.stdout.write(json.dumps(strict, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_record(record: Record) -> None:
    """A record on stdout, as its file would hold it."""
    from loopscope.results.record import text_of

    sys.stdout.write(text_of(record))


def duration(seconds: float) -> str:
    """A time as 3:04:05, and in years where that would be hard to read."""
    years = seconds / (365.25 * 24 * 3600)
    return str(timedelta(seconds=round(seconds))) if years < 100 else f"{years:,.3g} years"


@contextmanager
def progress(of: str) -> Iterator[Callable[[str, float], None]]:
    """A function to call with what is going on and the share that is done: a bar on a terminal, else a line.

    A line halfway and at the end, and in between whenever there was none for so long that one wonders.
    """
    if not sys.stderr.isatty():
        told, last = 0, time.monotonic()

        def line(what: str, share: float) -> None:
            nonlocal told, last
            if int(2 * share) > told or time.monotonic() - last >= REPORT_SECONDS:
                told, last = max(told, int(2 * share)), time.monotonic()
                say(f"{of}: {share:.0%}, {what}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, completed=share, description=f"{of}: {what}")


@contextmanager
def interruptible(how_to_go_on: str) -> Iterator[None]:
    """Ctrl-C in the block also says how the command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_go_on) from None


def bar(share: float, width: int) -> str:
    """A share of so many characters as a bar, to an eighth of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
