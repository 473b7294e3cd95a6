"""Sample folders for the page: runs and a reproduction, written the way `train`, `audit` and `reproduce` write them."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopscope.config import config_to_yaml
from loopscope.experiments.conditions import CONDITIONS, apply_recipe
from loopscope.presets import preset

K, WIDTH, ROLLOUT = 4, 64, 30
ALPHAS = [0.1, 0.18, 0.32, 0.56, 1.0, 1.8, 3.2, 5.6, 10.0]


@dataclass(frozen=True)
class Shape:
    """What a condition's numbers look like: final norm, CE at loop 1 and K, radial share, growth per loop."""

    norm: float
    ce: tuple[float, float]
    share: float
    growth: float


SHAPES = {
    "terminal+rmsnorm": Shape(312.0, (6.22, 5.26), 4e-9, 10.2),
    "terminal+raw": Shape(1.9, (20.56, 5.49), 0.21, -0.01),
    "per-loop+rmsnorm": Shape(565.0, (5.25, 5.31), 2e-9, 17.9),
    "per-loop+raw": Shape(2.5, (6.09, 5.59), 0.3, -0.02),
    "per-loop+final-only": Shape(8.4, (5.9, 5.4), 0.12, 0.02),
    "terminal+penalty": Shape(24.0, (6.6, 5.29), 6e-7, 0.3),
    "per-loop+penalty": Shape(28.0, (5.3, 5.24), 5e-7, 0.35),
    "per-loop+inter-loop-norm": Shape(33.0, (5.35, 5.22), 2e-7, 0.0),
    "per-loop+layernorm": Shape(480.0, (5.26, 5.3), 3e-9, 15.0),
}
HIDING = ("rmsnorm", "layernorm")


def write_run(
    folder: Path,
    condition: str = "per-loop+rmsnorm",
    *,
    seed: int = 42,
    recipe: str = "paper",
    steps: int = 200,
    done: int | None = None,
    files: tuple[str, ...] = ("manifest.json", "eval.json", "audit.json"),
) -> Path:
    """A run folder as training leaves it; `done` steps of it, and only some of the files that come later."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, noise = SHAPES[condition], random.Random(f"{condition}{seed}")
    base = apply_recipe(preset("demo"), recipe)
    config = CONDITIONS[condition].apply(replace(base, training=replace(base.training, seed=seed, steps=steps)))
    (folder / "config.yaml").write_text(config_to_yaml(config))
    factor = math.exp(noise.gauss(0, 0.08))
    rows = metric_rows(shape, factor, steps if done is None else done, steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    contents = {
        "manifest.json": manifest(folder, condition, seed),
        "eval.json": evaluation(shape, factor, steps),
        "audit.json": audit(condition, shape, factor, steps),
    }
    for name in files:
        (folder / name).write_text(json.dumps(contents[name]))
    return folder


def metric_rows(shape: Shape, factor: float, done: int, steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in sorted({1, *range(10, done + 1, 10)}) if done else []:
        norm = 12.0 * (shape.norm * factor / 12.0) ** (step / steps)
        ce = [60 * math.exp(-step / 40) + value for value in along(*shape.ce)]
        row = {"kind": "train", "step": step, "loss": sum(ce) / K, "ce": ce, "loops": [1, 2, 3, 4]}
        row |= {"norm": [norm * (0.4 + 0.2 * k) / 1.2 for k in range(1, K + 1)], "terms": {}, "depth": K}
        row |= {"radial_gradient_share": [shape.share * factor * (1 + k / 9) for k in range(K)], "lr": 2e-3}
        rows.append(row)
        if step % 50 == 0:
            evaluated = {"kind": "eval", "step": step, "ce": along(*shape.ce), "norm": norms(shape, factor)}
            rows.append(evaluated)
    return rows


def along(first: float, last: float) -> list[float]:
    return [last + (first - last) * math.exp(-1.6 * k) for k in range(K)]


def norms(shape: Shape, factor: float, count: int = K) -> list[float]:
    grown = shape.growth * math.sqrt(WIDTH)
    return [max(shape.norm * factor + grown * (k - K), 0.3 * shape.norm) for k in range(1, count + 1)]


def evaluation(shape: Shape, factor: float, steps: int) -> dict[str, Any]:
    ce = [*along(*shape.ce), *(shape.ce[1] + 0.02 * n for n in range(1, 5))]
    depths = [
        {"k": k, "ce": c, "perplexity": math.exp(c), "bits_per_byte": c / 1.35, "norm": n}
        for k, (c, n) in enumerate(zip(ce, norms(shape, factor, 8), strict=True), start=1)
    ]
    splits = {name: {"tokens": 8192, "bytes": 16000, "depths": depths} for name in ("valid", "test")}
    return {"schema_version": 1, "step": steps, "tokenizer": "bpe", "splits": splits}


def audit(condition: str, shape: Shape, factor: float, steps: int) -> dict[str, Any]:
    blind = condition in ("terminal+rmsnorm", "per-loop+rmsnorm", "per-loop+layernorm")
    hides = CONDITIONS[condition].readout in HIDING
    loops = [audit_loop(k, shape, factor) for k in range(1, ROLLOUT + 1)]
    ce = [shape.ce[1] + (0 if hides else 2.5 * math.log(alpha) ** 2) for alpha in ALPHAS]
    scale = {
        "name": "scale",
        "verdict": "blind" if blind else "visible" if not hides else "removed" if "norm" in condition else "weak",
        "visibility": shape.share,
        "delayed_visibility": shape.share * 2,
        "activity": 0.99,
        "evidence": "the readout's Jacobian along h is 4e-9 of its median singular value",
        "remedy": "make the scale visible to the loss, or remove it from the loop" if blind else None,
        "flag": "--norm-penalty 0.01" if blind else None,
    }
    mean = {**scale, "name": "mean", "verdict": "visible", "visibility": 0.8, "remedy": None, "flag": None}
    return {
        "schema_version": 1,
        "model": {"name": condition, "num_loops": K, "width": WIDTH, "step": steps, "supervised": [1, 2, 3, 4]},
        "verdict": "blind-spot" if blind else "controlled",
        "summary": "The loop carries the scale of the state and no loss sees it."
        if blind
        else "A loss sees the scale.",
        "variables": [scale, mean],
        "blind_directions": {"dimension": int(blind), "named": [{"name": "scale", "share": 1.0}] if blind else []},
        "loops": loops,
        "motion": "drift",
        "alpha_sweep": {"alphas": ALPHAS, "loops": [{"k": K, "ce": ce}]},
        "interventions": [{"name": "radial clamp: growth removed", "ce": shape.ce[1], "delta_ce": 0.0012}],
        "heaviest_tokens": [{"token": 17, "text": "<b>the</b>", "position": 0, "norm": 900.0, "ratio": 1.6}],
        "checks": {"raw_readout_control": 0.4, "causal": True, "notes": []},
    }


def audit_loop(k: int, shape: Shape, factor: float) -> dict[str, Any]:
    scale = max(shape.norm * factor / math.sqrt(WIDTH) + shape.growth * (k - K), 0.3 * shape.norm / math.sqrt(WIDTH))
    last = k == ROLLOUT
    return {
        "k": k,
        "supervised": k <= K,
        "norm": scale * math.sqrt(WIDTH),
        "scale": scale,
        "ce": shape.ce[1],
        "radial_gradient_share": shape.share * factor if k <= K else None,
        "radial_increment": None if last else shape.growth * (1 + 0.02 * math.sin(k)),
        "predicted_increment": None if last else shape.growth,
        "angular_step_times_scale": None if last else (3.0 + 2 / k) * math.sqrt(shape.norm) / 10,
    }


def manifest(folder: Path, condition: str, seed: int) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "command": ["/somewhere/bin/loopscope", "train", "--preset", "demo", "--out", f"runs/{folder.name}"],
        "versions": {"python": "3.11.7", "loopscope": "0.1.0", "torch": "2.13.0", "wandb": None},
        "git": {"commit": "0123456789abcdef", "changed": False},
        "system": "Linux 6.1 x86_64",
        "threads": 1,
        "world_size": 1,
        "seed": seed,
        "parameters": 172_288,
        "choices": [{"name": "device", "value": "cpu", "reason": "no CUDA and no Apple GPU found"}],
        "data": {
            "corpus": "builtin",
            "corpus_sha256": "54ddbc9e" * 8,
            "tokenizer": "bpe",
            "tokenizer_sha256": "7b" * 32,
        },
    }


def write_reproduction(folder: Path, conditions: dict[str, int], *, modern: tuple[str, ...] = ()) -> Path:
    """A reproduction folder with finished rows: so many seeds of each condition, some also under the modern recipe."""
    seeds = (42, 101, 202)
    rows = [(name, "paper", seed) for name, count in conditions.items() for seed in seeds[:count]]
    for name, recipe, seed in [*rows, *((name, "modern", 42) for name in modern)]:
        row = folder / "rows" / f"{name}{'' if recipe == 'paper' else '-modern'}-s{seed}"
        write_run(row, name, seed=seed, recipe=recipe)
        record = {"schema_version": 1, "condition": name, "recipe": recipe, "seed": seed, "state": "finished"}
        (row / "row.json").write_text(json.dumps({**record, "attempts": 1, "seconds": {"training": 61.2}}))
    different = [{"field": "model.width", "paper": "512", "here": "64"}]
    recipes = {"paper": {"seeds": {n: list(seeds[:c]) for n, c in conditions.items()}, "differences": different}}
    command = ["/somewhere/bin/loopscope", "reproduce", "--scale", "demo", "--out", "grid"]
    grid = {"schema_version": 1, "scale": "demo", "commands": [command], "recipes": recipes}
    (folder / "grid.json").write_text(json.dumps(grid))
    (folder / "claims.json").write_text(json.dumps(claims()))
    return folder


def claims() -> dict[str, Any]:
    def claim(name: str, title: str, verdict: str, mean: float | None) -> dict[str, Any]:
        seeds = [{"seed": 42, "value": mean}, {"seed": 101, "value": mean * 1.1}] if mean is not None else []
        quantity = {"name": "norm ratio", "unit": "×", "seeds": seeds, "n": len(seeds), "mean": mean}
        quantity |= {"low": mean, "high": mean and mean * 1.1, "rule": "at least 10", "obeyed": verdict == "holds"}
        paper = [{"value": "39,207 (44M) against tens", "source": "P"}]
        texts = {"measured": "‖H_K‖ of per-loop + RMSNorm over raw", "rule": "ratio at least 10", "reason": "no rows"}
        judged = {"verdict": verdict, "quantities": [quantity] if mean is not None else []}
        return {"recipe": "paper", "split": "valid", "id": name, "title": title, "paper": paper, **texts, **judged}

    listed = [
        claim("C1", "Per-loop supervision through RMSNorm lets the norm run away", "holds", 226.0),
        claim("C9", "Scale-controlled models gain from loops", "does not hold at this scale", 3.0),
        claim("C10", "Halting is adaptive or K-invariant", "not measured", None),
    ]
    sources = {"P": "abstract and project page of arXiv 2606.24898"}
    return {"schema_version": 1, "scale": "demo", "sources": sources, "interval": "95 % bootstrap", "claims": listed}
