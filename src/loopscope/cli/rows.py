"""Running rows under a verb's eyes: a live table on a terminal, a line per event elsewhere."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from loopscope.cli.terminal import say

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.rows.backends import Backend
    from loopscope.rows.ledger import Ledger, RowStatus
    from loopscope.rows.schedule import Event, Overview
    from loopscope.rows.spec import Layout


def run_rows(lay_out: Callable[[], Layout], make_backend: Callable[[], Backend], retries: int) -> list[RowStatus]:
    """Run what is not finished. Ctrl-C and SIGTERM let the running rows save and leave as KeyboardInterrupt."""
    from loopscope.rows.ledger import Ledger
    from loopscope.rows.schedule import Schedule

    with _terminated_like_ctrl_c(), closing(make_backend()) as backend:
        layout = lay_out()
        ledger, rows = Ledger(layout.out), layout.rows
        count = f"{len(rows)} row{'' if len(rows) == 1 else 's'} of {layout.each}"
        say(f"{count} in {layout.out}; log of each row in rows/NAME/log.txt")
        with _shown(len(rows), ledger) as (on_event, on_view):
            return Schedule(ledger, rows, backend, retries=retries, on_event=on_event, on_view=on_view).run()


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    """SIGTERM stops rows as Ctrl-C does: they save."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown(total: int, ledger: Ledger) -> Iterator[tuple[Callable[[Event], None], Callable[[Overview], None]]]:
    """What to do with events and with views of the whole."""
    if not sys.stderr.isatty():
        latest: list[Overview] = []

        def line(event: Event) -> None:
            for text in [_event_line(event, latest[-1] if latest else None, total), *_quoted_log(ledger, event)]:
                say(text)

        def remember(overview: Overview) -> None:
            latest[:] = [overview]

        yield line, remember
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=4, transient=True) as live:

        def news(event: Event) -> None:
            if event.what in ("failed", "retried", "finished"):
                for text in [f"{event.row.name} {event.what}: {event.message}", *_quoted_log(ledger, event)]:
                    console.print(text, markup=False)

        yield news, lambda overview: live.update(_live_table(overview))


def _event_line(event: Event, overview: Overview | None, total: int) -> str:
    text = f"{event.row.name} {event.what}: {event.message}"
    if event.what != "finished" or overview is None:
        return text
    return f"{text} ({overview.finished} of {total} rows, {_left(overview)})"


def _quoted_log(ledger: Ledger, event: Event) -> list[str]:
    """The end of the log of a row that did not do what it should."""
    if event.what not in ("failed", "retried"):
        return []
    return [f"  | {line}" for line in ledger.last_words(event.row, lines=5)]


def _live_table(overview: Overview) -> Table:
    from rich.table import Table

    title = f"{overview.finished} of {len(overview.rows)} rows finished, {_left(overview)}"
    table = Table("row", "state", title=title, title_justify="left")
    for name in ("step", "CE", "‖h_K‖", "attempt", "seconds"):
        table.add_column(name, justify="right")
    for row in overview.rows:
        if row.state == "open" and not row.step:
            continue
        state = f"{row.state}: {row.stage}" if row.state == "running" and row.stage else row.state
        ce, norm = (f"{value:.4g}" if value is not None else "" for value in (row.ce, row.norm))
        step = f"{row.step}/{row.spec.config.training.steps}"
        table.add_row(row.spec.name, state, step, ce, norm, str(row.attempts or ""), f"{row.seconds:.0f}")
    waiting = sum(row.state == "open" and not row.step for row in overview.rows)
    if waiting:
        table.caption, table.caption_justify = f"and {waiting} rows that have not begun", "left"
    return table


def _left(overview: Overview) -> str:
    left = overview.seconds_left
    return "time left not known yet" if left is None else f"{timedelta(seconds=round(left))} left"
