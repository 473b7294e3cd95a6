"""The schedule: starts rows while there is room, tries failed ones again, waits for rows that others run.

Two invocations on one folder share the work: a row belongs to the process that holds its lock. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from loopscope.errors import EXIT_INTERRUPTED, EXIT_OK
from loopscope.rows.backends import Backend, Handle
from loopscope.rows.ledger import EXIT_GIVEN_UP, EXIT_TAKEN, Ledger, RowStatus
from loopscope.rows.spec import RowSpec

RETRIES = 2
"""Further attempts at a row whose process crashed."""
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""Between two looks at rows that others run, and between two views of the whole."""

What = Literal["skipped", "started", "elsewhere", "finished", "retried", "failed"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a row."""

    what: What
    row: RowSpec
    message: str


@dataclass(frozen=True)
class Overview:
    """All rows at one moment."""

    rows: list[RowStatus]
    elapsed: float
    done_before: float
    """Rows' worth of work that was there when this invocation began."""

    @property
    def finished(self) -> int:
        """Rows that are done."""
        return sum(row.state == "finished" for row in self.rows)

    @property
    def seconds_left(self) -> float | None:
        """Time left at the pace of this invocation; None while there is no pace yet."""
        done = sum(row.share_done for row in self.rows)
        left = sum(1.0 - row.share_done for row in self.rows if row.state != "failed")
        made = done - self.done_before
        return self.elapsed * left / made if made > 0.01 else None


class Schedule:
    """Runs the rows of a grid on a backend."""

    def __init__(
        self,
        ledger: Ledger,
        rows: Sequence[RowSpec],
        backend: Backend,
        *,
        retries: int = RETRIES,
        on_event: Callable[[Event], None] = lambda event: None,
        on_view: Callable[[Overview], None] = lambda overview: None,
    ) -> None:
        self.ledger, self.rows, self.backend, self.retries = ledger, list(rows), backend, retries
        self.on_event, self.on_view = on_event, on_view
        self._waiting = list(rows)
        self._running: dict[str, tuple[RowSpec, Handle]] = {}
        self._failures: dict[str, int] = {}
        self._elsewhere: dict[str, float] = {}
        """When a row that another invocation runs is to be looked at again."""
        self._started, self._done_before = time.monotonic(), 0.0

    def run(self) -> list[RowStatus]:
        """Until every row is finished or given up. Ctrl-C stops the running ones, which save, and goes on upwards."""
        for spec in self.rows:
            self.ledger.check(spec)
        self._started = time.monotonic()
        self._done_before = sum(status.share_done for status in self.statuses())
        next_view = 0.0
        try:
            while self._waiting or self._running:
                self._collect()
                self._start()
                if time.monotonic() >= next_view:
                    self.on_view(self.overview())
                    next_view = time.monotonic() + LOOK_SECONDS
                time.sleep(POLL_SECONDS)
        finally:
            self._stop()
        return self.statuses()

    def statuses(self) -> list[RowStatus]:
        """Where every row is."""
        return [self.ledger.status(spec) for spec in self.rows]

    def overview(self) -> Overview:
        """All rows now."""
        return Overview(self.statuses(), time.monotonic() - self._started, self._done_before)

    def _start(self) -> None:
        for spec in list(self._waiting):
            if len(self._running) >= self.backend.slots:
                return
            if time.monotonic() < self._elsewhere.get(spec.name, 0.0):
                continue
            status = self.ledger.status(spec)
            if status.state == "finished":
                self._waiting.remove(spec)
                other = "by another invocation" if spec.name in self._elsewhere else "already"
                self._tell("skipped", spec, f"finished {other}")
            elif status.state == "running":
                self._leave_to_others(spec)
            else:
                self._waiting.remove(spec)
                self._elsewhere.pop(spec.name, None)
                self._running[spec.name] = (spec, self.backend.start(spec, self.ledger.run(spec).path))
                self._tell("started", spec, f"from step {status.step}" if status.step else "from the beginning")

    def _leave_to_others(self, spec: RowSpec) -> None:
        if spec.name not in self._elsewhere:
            self._tell("elsewhere", spec, "another invocation runs it")
        self._elsewhere[spec.name] = time.monotonic() + LOOK_SECONDS

    def _collect(self) -> None:
        for name, (spec, handle) in list(self._running.items()):
            if (code := handle.poll()) is not None:
                del self._running[name]
                self._judge(spec, code)

    def _judge(self, spec: RowSpec, code: int) -> None:
        """What an exit code means: done, somebody else's, worth another attempt, or given up."""
        status = self.ledger.status(spec)
        if code == EXIT_OK and status.state == "finished":
            self.on_view(self.overview())
            self._tell("finished", spec, f"in {status.seconds:.0f} s")
        elif code == EXIT_TAKEN:
            self._waiting.append(spec)
            self._leave_to_others(spec)
        elif code != EXIT_GIVEN_UP and self._failures.get(spec.name, 0) < self.retries:
            self._failures[spec.name] = self._failures.get(spec.name, 0) + 1
            self._waiting.append(spec)
            ended = "was interrupted" if code == EXIT_INTERRUPTED else f"ended with exit code {code}"
            self._tell("retried", spec, f"its process {ended}; attempt {self._failures[spec.name] + 1}")
        else:
            last_word = ": ".join([f"exit code {code}", *self.ledger.last_words(spec, lines=1)])
            error = status.error if code == EXIT_GIVEN_UP and status.error else last_word
            self.ledger.fail(spec, error)
            self._tell("failed", spec, error)

    def _stop(self) -> None:
        """Let running rows save and leave; a second Ctrl-C ends them at once."""
        handles = [handle for _, handle in self._running.values()]
        try:
            for handle in handles:
                handle.stop()
            while any(handle.poll() is None for handle in handles):
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            for handle in handles:
                handle.kill()
            raise

    def _tell(self, what: What, spec: RowSpec, message: str) -> None:
        self.on_event(Event(what, spec, message))
