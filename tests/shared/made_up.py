"""A made-up grid on disk, with the numbers of a small trial, for tests of what is made from files."""

from __future__ import annotations

import atexit
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from samples import (
    sample_audit,
    sample_evaluation,
    sample_halting,
    sample_loop,
    sample_manifest,
    sample_variable,
    write_sample,
)

from loopscope.config import Config, config_to_dict
from loopscope.machine import provenance
from loopscope.presets import preset
from loopscope.results.audit import AuditedLoop, AuditResult, Lemma2
from loopscope.results.evaluation import Evaluation
from loopscope.results.halting import CalibratedHalting
from loopscope.results.record import write_record
from loopscope.results.reproduction import GridRecord, RecipeRecord
from loopscope.results.run import RowRecord
from loopscope.rows.conditions import CONDITIONS, apply_recipe

# CE after loops 1..4 and the norm after loop 4 of each condition.
NUMBERS: dict[str, tuple[list[float], float]] = {
    "terminal+rmsnorm": ([9.2, 6.4, 4.9, 4.40], 300.0),
    "terminal+raw": ([9.9, 7.0, 5.0, 4.42], 4.0),
    "per-loop+rmsnorm": ([4.486, 4.481, 4.485, 4.496], 348.0),
    "per-loop+raw": ([4.570, 4.417, 4.440, 4.475], 3.4),
    "per-loop+final-only": ([4.560, 4.430, 4.440, 4.450], 8.0),
    "terminal+penalty": ([9.0, 6.2, 4.8, 4.41], 25.0),
    "per-loop+penalty": ([4.500, 4.440, 4.430, 4.425], 29.0),
    "per-loop+inter-loop-norm": ([4.500, 4.470, 4.460, 4.460], 20.0),
    "per-loop+layernorm": ([4.490, 4.485, 4.487, 4.490], 310.0),
}
WIDTH, LOOPS, STEPS, ROLLOUT = 128, 4, 1000, 30
HALTING = {
    "per-loop+rmsnorm": (1.04, 1.0),
    "per-loop+raw": (2.2, 3.0),
    "per-loop+final-only": (3.92, 4.0),
    "per-loop+penalty": (2.6, 3.0),
    "per-loop+inter-loop-norm": (1.5, 2.0),
    "per-loop+layernorm": (1.05, 1.0),
}
"""Mean loops of a calibrated rule, and the smallest fixed depth that is certified."""


def made_up_eval(ce: list[float], norm: float, shift: float) -> Evaluation:
    deeper = [value + shift for value in (*ce, *(ce[-1] + 0.01 * n for n in range(1, 5)))]
    norms = [norm * (1 + 0.02 * (k - LOOPS)) for k in range(1, len(deeper) + 1)]
    return sample_evaluation(deeper, norms, step=STEPS, num_loops=LOOPS)


def made_up_audit(name: str, norm: float, step: int | None = STEPS) -> AuditResult:
    condition = CONDITIONS[name]
    hidden = condition.readout in ("rmsnorm", "layernorm")
    blind = hidden and condition.norm_penalty == 0 and condition.inter_loop_norm == "none"
    alphas = [0.1, 0.3, 1.0, 3.0, 10.0]
    sweep = [4.4 + (0.0 if hidden or condition.readout == "final-only" else abs(math.log(a))) for a in alphas]
    return sample_audit(
        name=name,
        step=step,
        num_loops=LOOPS,
        width=WIDTH,
        scale=sample_variable("scale", "blind" if blind else "visible", 1e-6 if hidden else 0.9, activity=0.99),
        loops=made_up_loops(name, norm),
        alphas=alphas,
        ces=sweep,
        interventions={
            "radial clamp: growth removed": (4.4, -0.004),
            "radial clamp: frozen at loop 1": (4.4, 0.001),
            "mean clamp": (4.9, 0.5),
        },
    )


def made_up_halting(name: str, wobble: float = 0.0) -> CalibratedHalting | None:
    """Of a per-loop condition."""
    if name not in HALTING:
        return None
    loops, fixed = HALTING[name]
    return sample_halting(loops + wobble, fixed, step=STEPS, num_loops=LOOPS)


def made_up_loops(name: str, norm: float) -> list[AuditedLoop]:
    condition = CONDITIONS[name]
    start, tangential = norm / math.sqrt(WIDTH), 0.5
    increment = 0.0 if condition.inter_loop_norm != "none" else start / 40
    loops = []
    for k in range(1, ROLLOUT + 1):
        raw = condition.readout == "raw" or (condition.readout == "final-only" and k < LOOPS)
        moves = [increment, increment * 1.01, tangential * (1 + 0.01 * k), tangential] if k < ROLLOUT else [None] * 4
        loops.append(
            sample_loop(
                k,
                scale=start + (k - 1) * increment,
                width=WIDTH,
                ce=4.4,
                share=(0.07 if raw else 2e-7) if k <= LOOPS else None,
                curvature=(0.8 if raw else -3e-6) if k <= LOOPS else None,
                lemma_2=Lemma2(
                    tokens=60,
                    scale_moved=60 * increment,
                    scale_missed=0.6 * increment,
                    direction_moved=30.0,
                    direction_missed=0.9,
                )
                if k < ROLLOUT
                else None,
                increment=moves[0],
                predicted=moves[1],
                turn=moves[2],
                tangential=moves[3],
            )
        )
    return loops


def write_row(
    out: Path, name: str, seed: int, *, recipe: str = "paper", change: Callable[..., None] | None = None
) -> Path:
    """A finished row; `change(evaluation, audit)` may alter what it measured."""
    ce, norm = NUMBERS[name]
    wobble = {42: 0.0, 101: 0.01, 202: -0.01}[seed]
    row = f"{name}-s{seed}" if recipe == "paper" else f"{name}-{recipe}-s{seed}"
    return write_sample(
        out / "rows" / row,
        row_config(name, seed, recipe),
        manifest=sample_manifest(["loopscope", "reproduce"], seed),
        evaluation=made_up_eval(ce, norm * (1 + wobble), wobble / 10),
        audit=made_up_audit(name, norm * (1 + wobble)),
        untrained=made_up_audit(name, 20.0, step=None),
        halting=made_up_halting(name, wobble),
        record=RowRecord(
            name=row, condition=name, recipe=recipe, seed=seed, state="finished", attempts=1, seconds={"training": 9.0}
        ),
        change=change,
    )


def row_config(name: str, seed: int, recipe: str = "paper") -> Config:
    config = CONDITIONS[name].apply(apply_recipe(preset("nano"), recipe))
    return replace(config, training=replace(config.training, seed=seed))


def write_grid(out: Path) -> None:
    recipes = {
        recipe: RecipeRecord(
            config=config_to_dict(apply_recipe(preset("nano"), recipe)), epochs=0.5, seeds={}, differences=[]
        )
        for recipe in ("paper", "modern")
    }
    out.mkdir(parents=True, exist_ok=True)
    grid = GridRecord(
        size="nano", commands=[], recipes=recipes, data={}, test_data=None, eval_tokens=None, **provenance()
    )
    write_record(out / "grid.json", grid)


def write_made_up_grid(out: Path) -> Path:
    """The 2×2 and the penalty with three seeds, everything else with one."""
    return shutil.copytree(_made_up_grid(), out, dirs_exist_ok=True)


@cache
def _made_up_grid() -> Path:
    """Written once per process: what writes real files waits for the disk."""
    folder = tempfile.mkdtemp(prefix="loopscope-made-up-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = Path(folder)
    write_grid(out)
    for name in CONDITIONS:
        three = name in ("terminal+rmsnorm", "terminal+raw", "per-loop+rmsnorm", "per-loop+raw", "per-loop+penalty")
        for seed in (42, 101, 202) if three else (42,):
            write_row(out, name, seed)
    return out
