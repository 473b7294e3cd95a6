"""Training, and rows of a grid, as they go on: a live table on a terminal, a line per event elsewhere."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from loopscope.cli.terminal import duration, interruptible, say
from loopscope.results.run import Logged, LoggedEvaluation, LoggedEvent, LoggedStep
from loopscope.show.table import Column, Table, columns

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from loopscope.rows.ledger import Ledger, RowStatus
    from loopscope.rows.schedule import Event, Overview
    from loopscope.rows.spec import Layout
    from loopscope.training.trainer import Trainer


class Watch:
    """Turns rows of metrics into what a person wants to know: where, how fast, how good, how large, how long still."""

    def __init__(self, trainer: Trainer) -> None:
        self.steps = trainer.config.training.steps
        self.first_step, self.started = trainer.progress.step, time.perf_counter()
        self.tokens_per_step = trainer.config.training.batch * trainer.config.sequence_length
        self.peak_tokens = _peak_tokens_per_second(trainer)
        self.now = lambda: trainer.progress.step
        """The step that the run is at."""

    def rates(self, step: int) -> str:
        """Tokens per second since the start, model FLOPs utilisation where FLOPs are known, and the time left."""
        seconds = time.perf_counter() - self.started
        done = max(1, step - self.first_step)
        speed = done * self.tokens_per_step / seconds
        left = duration((self.steps - step) * seconds / done)
        utilisation = [] if self.peak_tokens is None else [f"MFU {speed / self.peak_tokens:.2f}"]
        return ", ".join([f"{speed:,.0f} tokens/s", *utilisation, f"{left} left"])

    def line(self, row: Logged) -> str:
        """One line of text."""
        if isinstance(row, LoggedEvent):
            return row.message
        loops = f"CE {_each(row.ce, '.3f')}, ‖h‖ {_each(row.norm, '.3g')}"
        if isinstance(row, LoggedEvaluation):
            return f"step {row.step}: validation {loops}"
        shares = _each(row.radial_gradient_share, ".1g")
        return (
            f"step {row.step}/{self.steps}: loss {row.loss:.4f}, {loops}, radial share {shares}, {self.rates(row.step)}"
        )

    def table(self, train: LoggedStep, evaluation: LoggedEvaluation | None, events: list[str]) -> Table:
        """The live view."""
        step = max(self.now(), train.step)  # the row is as old as the last logged step, the run goes on
        title = f"step {step}/{self.steps}   loss {train.loss:.4f}   lr {train.lr:.2g}   {self.rates(step)}"
        supervised = dict(zip(train.loops, zip(train.ce, train.radial_gradient_share, strict=True), strict=True))
        scored = dict(enumerate([] if evaluation is None else evaluation.ce, start=1))
        rows = [
            [str(k), *supervised.get(k, (None, None)), norm, scored.get(k)]
            for k, norm in enumerate(train.norm, start=1)
        ]
        header = [Column("loop"), Column("CE", ".4f"), Column("radial gradient share", ".1e"), Column("‖h‖", ".4g")]
        return Table(title, [*header, Column("validation CE", ".4f")], rows, "\n".join(events[-3:]), absent="")


def _peak_tokens_per_second(trainer: Trainer) -> float | None:
    """What the devices could do at best; None for a model whose FLOPs are not known."""
    from loopscope.config import ModelConfig
    from loopscope.training.counting import CountedSteps
    from loopscope.training.plan import measure_flops

    if not isinstance(trainer.config.model, ModelConfig):
        return None
    peak = measure_flops(trainer.ranks.device.type) * trainer.ranks.world_size
    return peak / CountedSteps(trainer.config).flops_per_token().total


@contextmanager
def watching(trainer: Trainer) -> Iterator[None]:
    """Show the run while the block trains it; only the first rank does."""
    if not trainer.ranks.is_first:
        yield
        return
    watch = Watch(trainer)
    if not sys.stderr.isatty():
        trainer.listeners = (*trainer.listeners, lambda row: say(watch.line(row)))
        yield
        return
    from rich.console import Console
    from rich.live import Live

    last: LoggedStep | None = None
    scores: LoggedEvaluation | None = None
    events: list[str] = []

    def view() -> RichTable | str:
        if last is None:
            return f"step {watch.now() + 1}/{watch.steps}"
        return watch.table(last, scores, events).terminal()

    def remember(row: Logged) -> None:
        nonlocal last, scores
        if isinstance(row, LoggedEvent):
            events.append(row.message)
        elif isinstance(row, LoggedEvaluation):
            scores = row
        else:
            last = row

    trainer.listeners = (*trainer.listeners, remember)
    with Live(get_renderable=view, console=Console(stderr=True), refresh_per_second=4):  # made anew at every refresh
        yield


def _each(values: list[float | None], form: str) -> str:
    return " ".join(format(value, form) for value in values)


# --- rows ------------------------------------------------------------------------------------------------------------


def run_rows(
    lay_out: Callable[[], Layout],
    *,
    retries: int,
    on: str = "here",
    rows_at_once: int | None = None,
    threads: int = 1,
    gpus: int = 0,
    processes: int = 1,
) -> list[RowStatus]:
    """Run what is not finished. Ctrl-C and SIGTERM let the running rows save and leave as KeyboardInterrupt."""
    from loopscope.rows.backends import make_backend
    from loopscope.rows.ledger import Ledger
    from loopscope.rows.schedule import Schedule

    with (
        interruptible(rows_saved()),
        _terminated_like_ctrl_c(),
        closing(
            make_backend(
                on, rows_at_once=rows_at_once, threads=threads, gpus=gpus, retries=retries, processes=processes
            )
        ) as backend,
    ):
        layout = lay_out()
        ledger, rows = Ledger(layout.out), layout.rows
        count = f"{len(rows)} row{'' if len(rows) == 1 else 's'} of {layout.each}"
        say(f"{count} in {layout.out}; log of each row in rows/NAME/log.txt")
        with _shown(len(rows), ledger) as (on_event, on_view):
            return Schedule(ledger, rows, backend, retries=retries, on_event=on_event, on_view=on_view).run()


def rows_saved() -> str:
    """How a command that runs rows goes on after Ctrl-C."""
    return f"rows were saved. Resume with: loopscope {shlex.join(sys.argv[1:])}"


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
        latest: Overview | None = None

        def line(event: Event) -> None:
            still = ""
            if event.what == "finished" and latest is not None:
                still = f" ({latest.finished} of {total} rows, {_left(latest)})"
            for text in [f"{event.row.name} {event.what}: {event.message}{still}", *_quoted_log(ledger, event)]:
                say(text)

        def remember(overview: Overview) -> None:
            nonlocal latest
            latest = overview

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

        yield news, lambda overview: live.update(_live_table(overview).terminal())


def _quoted_log(ledger: Ledger, event: Event) -> list[str]:
    """The end of the log of a row that did not do what it should."""
    if event.what not in ("failed", "retried"):
        return []
    return [f"  | {line}" for line in ledger.last_words(event.row, lines=5)]


def _live_table(overview: Overview) -> Table:
    begun = [row for row in overview.rows if row.state != "open" or row.step]
    rows: list[list[object]] = []
    for row in begun:
        state = f"{row.state}: {row.stage}" if row.state == "running" and row.stage else row.state
        step = f"{row.step}/{row.spec.config.training.steps}"
        rows.append([row.spec.name, state, step, row.ce, row.norm, row.attempts or None, row.seconds])
    header = [Column("row"), Column("state"), Column("step", align="right"), *columns(".4g", "CE", "‖h_K‖")]
    header += [Column("attempt", "d"), Column("seconds", ".0f")]
    title = f"{overview.finished} of {len(overview.rows)} rows finished, {_left(overview)}"
    waiting = len(overview.rows) - len(begun)
    return Table(title, header, rows, f"and {waiting} rows that have not begun" if waiting else "", absent="")


def _left(overview: Overview) -> str:
    left = overview.seconds_left
    return "time left not known yet" if left is None else f"{timedelta(seconds=round(left))} left"
