"""A made-up grid on disk, with the numbers of a small trial, for tests of what is made from files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopscope.config import Config, config_to_dict
from loopscope.experiments.conditions import CONDITIONS, apply_recipe
from loopscope.presets import preset
from loopscope.runs import RunFolder

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
WIDTH, LOOPS = 128, 4


def made_up_eval(ce: list[float], norm: float, shift: float) -> dict[str, Any]:
    deeper = [*ce, *(ce[-1] + 0.01 * n for n in range(1, 5))]
    depths = [
        {
            "k": k,
            "ce": value + shift,
            "perplexity": math.exp(value + shift),
            "bits_per_byte": (value + shift) / 2,
            "norm": norm * (1 + 0.02 * (k - LOOPS)),
        }
        for k, value in enumerate(deeper, start=1)
    ]
    split = {"tokens": 1000, "bytes": 3000, "depths": depths}
    speeds = [{"k": k, "tokens_per_second": 50_000 / k} for k in range(1, LOOPS + 1)]
    return {
        "schema_version": 1,
        "step": 1000,
        "tokenizer": "bpe",
        "num_loops": LOOPS,
        "splits": {"valid": split, "test": split},
        "throughput": speeds,
        "threads": 1,
        "device": "cpu",
    }


def made_up_audit(name: str, norm: float) -> dict[str, Any]:
    condition = CONDITIONS[name]
    hidden = condition.readout in ("rmsnorm", "layernorm")
    tangential, increment = 0.5, 0.0 if condition.inter_loop_norm != "none" else norm / math.sqrt(WIDTH) / 40
    loops, scale = [], norm / math.sqrt(WIDTH)
    for k in range(1, 31):
        last = k == 30
        raw = condition.readout == "raw" or (condition.readout == "final-only" and k < LOOPS)
        share = (0.07 if raw else 2e-7) if k <= LOOPS else None
        loops.append(
            {
                "k": k,
                "supervised": k <= LOOPS,
                "norm": scale * math.sqrt(WIDTH),
                "norm_quantiles": [scale * factor for factor in (5, 8, 11, 14, 20, 60)],
                "scale": scale,
                "ce": 4.4,
                "radial_gradient_share": share,
                "radial_increment": None if last else increment,
                "predicted_increment": None if last else increment * 1.01,
                "angular_step": None if last else tangential / scale,
                "angular_step_times_scale": None if last else tangential * (1 + 0.01 * k),
                "radial_update": None if last else increment,
                "tangential_update": None if last else tangential,
                "mean": 0.0,
            }
        )
        scale += increment
    alphas = [0.1, 0.3, 1.0, 3.0, 10.0]
    sweep = [4.4 + (0.0 if hidden or condition.readout == "final-only" else abs(math.log(a))) for a in alphas]
    blind = hidden and condition.norm_penalty == 0 and condition.inter_loop_norm == "none"
    return {
        "schema_version": 1,
        "model": {"name": name, "step": 1000},
        "verdict": "blind-spot" if blind else "controlled",
        "variables": [{"name": "scale", "verdict": "blind", "visibility": 1e-6 if hidden else 0.9, "activity": 0.99}],
        "loops": loops,
        "alpha_sweep": {"alphas": alphas, "loops": [{"k": LOOPS, "ce": sweep}]},
        "interventions": [
            {"name": "radial clamp: growth removed", "ce": 4.4, "delta_ce": -0.004},
            {"name": "radial clamp: frozen at loop 1", "ce": 4.4, "delta_ce": 0.001},
            {"name": "mean clamp", "ce": 4.9, "delta_ce": 0.5},
        ],
    }


def write_row(
    out: Path, name: str, seed: int, *, recipe: str = "paper", change: Callable[..., None] | None = None
) -> Path:
    """A finished row; `change(evaluation, audit)` may alter what it measured."""
    ce, norm = NUMBERS[name]
    wobble = {42: 0.0, 101: 0.01, 202: -0.01}[seed]
    evaluation, audit = made_up_eval(ce, norm * (1 + wobble), wobble / 10), made_up_audit(name, norm * (1 + wobble))
    if change is not None:
        change(evaluation, audit)
    config = row_config(name, seed, recipe)
    folder = out / "rows" / (f"{name}-s{seed}" if recipe == "paper" else f"{name}-{recipe}-s{seed}")
    RunFolder(folder).create(config)
    record = {"schema_version": 1, "condition": name, "recipe": recipe, "seed": seed, "state": "finished"}
    files = {
        "eval": evaluation,
        "audit": audit,
        "manifest": {"choices": []},
        "row": {**record, "seconds": {"training": 9.0}},
    }
    for stem, content in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def row_config(name: str, seed: int, recipe: str = "paper") -> Config:
    config = CONDITIONS[name].apply(apply_recipe(preset("nano"), recipe))
    return replace(config, training=replace(config.training, seed=seed))


def write_grid(out: Path) -> None:
    common = apply_recipe(preset("nano"), "paper")
    part = {"config": config_to_dict(common), "epochs": 0.5, "seeds": {}, "differences": []}
    modern = {**part, "config": config_to_dict(apply_recipe(preset("nano"), "modern"))}
    out.mkdir(parents=True, exist_ok=True)
    grid = {"schema_version": 1, "scale": "nano", "recipes": {"paper": part, "modern": modern}}
    grid |= {"data": {}, "test_data": None, "eval_tokens": None}
    (out / "grid.json").write_text(json.dumps(grid))


def write_made_up_grid(out: Path) -> Path:
    """The 2×2 and the penalty with three seeds, everything else with one."""
    write_grid(out)
    for name in CONDITIONS:
        three = name in ("terminal+rmsnorm", "terminal+raw", "per-loop+rmsnorm", "per-loop+raw", "per-loop+penalty")
        for seed in (42, 101, 202) if three else (42,):
            write_row(out, name, seed)
    return out
