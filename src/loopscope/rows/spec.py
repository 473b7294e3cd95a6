"""Rows: what the process of one has to know, and what every folder of rows needs. No torch here.

A grid (`grid`) and an atlas (`atlas`) lay out rows; ledger, schedule and backends run them without knowing which.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from loopscope.config import Config, TrainingConfig, changes_learning, config_from_dict, config_to_dict
from loopscope.rows.conditions import Recipe

EXTRA_LOOPS = 4
"""Loops beyond the trained depth at which a row is evaluated too."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RowSpec:
    """Everything the process of one row has to know."""

    condition: str
    """What sets it apart: a condition of a grid, or a design of an atlas."""
    recipe: Recipe
    text: str = ""
    """What it is trained on, where that is not the text that the rows of its folder share."""
    seed: int
    config: Config
    test_data: tuple[str, ...] | None = None
    """Test text; None takes the corpus's own test split where it has one."""
    eval_tokens: int | None = None
    """Most tokens of each split that are evaluated; None means all."""
    audit: bool = True
    audit_untrained: bool = True
    """Whether the weights that training begins with are audited too, where anything is."""
    halting: bool = False
    """Whether a halting rule is calibrated on it."""
    probe: bool = False
    """Whether its motion, its first exit, cache policies and cost are measured too, as an atlas asks."""

    @property
    def name(self) -> str:
        """Its folder: condition, recipe where it is not the paper's, text where it has its own, seed."""
        recipe = "" if self.recipe == "paper" else self.recipe
        return "-".join(filter(None, (self.condition, recipe, self.text, f"s{self.seed}")))

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({**values, "config": config_to_dict(self.config)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The row that `to_json` wrote."""
        values = json.loads(text)
        test_data = None if values["test_data"] is None else tuple(values["test_data"])
        return cls(**{**values, "config": config_from_dict(values["config"]), "test_data": test_data})


@dataclass(frozen=True)
class Layout:
    """Rows that are ready to be run: text opened, tokenizer fitted, configurations settled."""

    out: Path
    rows: list[RowSpec]
    each: str
    """What a row is, in words: 120 steps (0.4 epochs)."""


def first_difference(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, Any, Any] | None:
    """Name and both values of the first field in which two configurations would learn something else."""
    known = config_to_dict(config_from_dict(before))  # fields that are newer than the file get their defaults
    for section, fields in now.items():
        for name, value in fields.items():
            if changes_learning(name) and value != known[section][name]:
                return name, known[section][name], value
    return None


def in_steps(training: TrainingConfig, steps: int) -> TrainingConfig:
    """Training of so many steps, logged, evaluated and saved often enough to be seen and to be resumed."""
    return replace(
        training,
        steps=steps,
        log_every=max(1, min(10, steps // 20)),
        eval_every=max(1, min(250, steps // 4)),
        save_every=max(1, min(250, steps // 4)),
    )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Wait until no other invocation writes at the top of the folder."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
