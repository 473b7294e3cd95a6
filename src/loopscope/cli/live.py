"""Watching a training run: a live table on a terminal, a line per logged step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from loopscope.cli.terminal import duration, say

if TYPE_CHECKING:
    from rich.table import Table

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

    def line(self, row: dict[str, Any]) -> str:
        """One line of text."""
        if row["kind"] == "event":
            return str(row["message"])
        loops = f"CE {_each(row['ce'], '.3f')}, ‖h‖ {_each(row['norm'], '.3g')}"
        if row["kind"] == "eval":
            return f"step {row['step']}: validation {loops}"
        shares = _each(row["radial_gradient_share"], ".1g")
        return (
            f"step {row['step']}/{self.steps}: loss {row['loss']:.4f}, {loops}, radial share {shares}, "
            f"{self.rates(row['step'])}"
        )

    def table(self, train: dict[str, Any], evaluation: dict[str, Any] | None, events: list[str]) -> Table:
        """The live view."""
        from rich.table import Table

        step = max(self.now(), train["step"])  # the row is as old as the last logged step, the run goes on
        title = f"step {step}/{self.steps}   loss {train['loss']:.4f}   lr {train['lr']:.2g}   {self.rates(step)}"
        caption = "\n".join(events[-3:]) or None
        table = Table("loop", title=title, caption=caption, title_justify="left", caption_justify="left")
        for name in ("CE", "radial gradient share", "‖h‖", "validation CE"):
            table.add_column(name, justify="right")
        supervised = dict(
            zip(train["loops"], zip(train["ce"], train["radial_gradient_share"], strict=True), strict=True)
        )
        for k, norm in enumerate(train["norm"], start=1):
            ce, share = (f"{supervised[k][0]:.4f}", f"{supervised[k][1]:.1e}") if k in supervised else ("", "")
            scored = [] if evaluation is None else evaluation["ce"]
            table.add_row(str(k), ce, share, f"{norm:.4g}", f"{scored[k - 1]:.4f}" if k <= len(scored) else "")
        return table


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

    rows: dict[str, dict[str, Any]] = {}
    events: list[str] = []

    def view() -> Table | str:
        if "train" not in rows:
            return f"step {watch.now() + 1}/{watch.steps}"
        return watch.table(rows["train"], rows.get("eval"), events)

    def remember(row: dict[str, Any]) -> None:
        if row["kind"] == "event":
            events.append(row["message"])
        rows[row["kind"]] = row

    trainer.listeners = (*trainer.listeners, remember)
    with Live(get_renderable=view, console=Console(stderr=True), refresh_per_second=4):  # made anew at every refresh
        yield


def _each(values: list[float], form: str) -> str:
    return " ".join(format(value, form) for value in values)
