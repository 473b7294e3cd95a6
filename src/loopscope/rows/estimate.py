"""How long rows will take on this machine: a training step of each design is timed before any is paid for."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from loopscope.model.looped_lm import build
from loopscope.objectives.placement import Objective
from loopscope.rows.spec import RowSpec

MEASURED_STEPS = 130
"""Scores, two audits, motion, first exit and cache policies take about as long as so many training steps of the same
row, the start of its process included: the mean over nine rows of three designs, on text and on pointer chasing."""


def row_seconds(spec: RowSpec) -> float | None:
    """Seconds of a row with one process to a core; None where a step of it fails, which the row will tell."""
    try:
        return step_seconds(spec) * (spec.config.training.steps + MEASURED_STEPS)
    except Exception:  # whatever a design does wrong is the row's to tell, not the estimate's
        return None


def step_seconds(spec: RowSpec) -> float:
    """Of one forward and backward pass, after one that warms up."""
    config = spec.config
    threads, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    shape = (config.training.batch, config.sequence_length)
    ids_BT = torch.randint(config.model.vocab_size, shape, generator=generator)
    torch.set_num_threads(config.training.threads or threads)
    try:
        with torch.random.fork_rng(devices=[]):
            model, objective = build(config.design("an estimate"), seed=spec.seed), Objective(config.objective)
            for _ in range(2):
                started = time.perf_counter()
                objective(model, ids_BT, ids_BT).loss.backward()
            return time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)


def total_seconds(rows: Sequence[RowSpec], slots: int) -> float:
    """Of all rows, so many side by side; designs are timed once for all their recipes, which cost the same."""
    known: dict[tuple[str, str], float | None] = {}
    for spec in rows:
        if (key := (spec.condition, spec.text)) not in known:
            known[key] = row_seconds(spec)
    found = [seconds for spec in rows if (seconds := known[spec.condition, spec.text]) is not None]
    mean = sum(found) / len(found) if found else 0.0
    return (sum(found) + mean * (len(rows) - len(found))) / min(slots, max(1, len(rows)))
