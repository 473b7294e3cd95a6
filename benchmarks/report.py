"""What a page costs: seconds and megabytes of `loopscope report` on a folder of runs.

    python benchmarks/report.py [--runs 25] [--steps 1000] [--rounds 3]

Writes made-up runs, all of the paper's conditions in turn, each with a configuration, a manifest, a line of metrics for
every step, an evaluation and an audit of 30 loops, into a temporary folder; then builds the page in a fresh process,
start-up included. The time is the median over rounds. Exit code 1 when a target is missed: 10 s and 8 MB.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import tyro

from loopscope.config import Config, config_to_yaml
from loopscope.presets import preset
from loopscope.rows.conditions import CONDITIONS, Condition
from side_by_side import machine

SECONDS, MEGABYTES = 10.0, 8.0
ROLLOUT, EVAL_EVERY = 30, 100
ALPHAS = [0.1, 0.18, 0.32, 0.56, 1.0, 1.8, 3.2, 5.6, 10.0]


def write_run(folder: Path, condition: Condition, seed: int, steps: int) -> None:
    """A finished run whose norm grows where the readout hides it and shrinks where it does not."""
    base = preset("nano")
    config = condition.apply(replace(base, training=replace(base.training, seed=seed, steps=steps, log_every=1)))
    noise, hides = random.Random(f"{condition.name} {seed}"), condition.readout in ("rmsnorm", "layernorm")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_to_yaml(config))
    lines = (json.dumps(row) + "\n" for row in metrics(config, noise, hides))
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name, content in (
        ("manifest.json", manifest(config, folder)),
        ("eval.json", evaluation(config, noise, hides)),
        ("audit.json", audit(config, noise, hides)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2))


def metrics(config: Config, noise: random.Random, hides: bool) -> Iterator[dict[str, Any]]:
    """A line for every step, and evaluations between them."""
    for step in range(1, config.training.steps + 1):
        norms, ces = states(config, step, noise, hides), scores(config, step, noise)
        shares = [abs(noise.gauss(0, 1e-8 if hides else 0.2)) for _ in norms]
        row = {"kind": "train", "step": step, "loss": statistics.mean(ces), "ce": ces, "norm": norms, "terms": {}}
        row |= {"loops": list(range(1, len(norms) + 1)), "radial_gradient_share": shares, "depth": len(norms)}
        yield row | {"gradient_norm": 1 + noise.random(), "lr": config.training.lr, "tokens_per_second": 9e3}
        if step % EVAL_EVERY == 0:
            yield {"kind": "eval", "step": step, "ce": ces, "norm": norms}


def states(config: Config, step: int, noise: random.Random, hides: bool) -> list[float]:
    """Norms after each loop."""
    end = 18.0 * (1 + 3 * math.log(step)) if hides else 18.0 / (1 + math.log(step))
    return [
        end * (0.5 + 0.5 * k / config.model.num_loops) + noise.random() for k in range(1, config.model.num_loops + 1)
    ]


def scores(config: Config, step: int, noise: random.Random) -> list[float]:
    """Cross-entropies after each loop."""
    return [
        5 + 70 * math.exp(-step / 50) + 0.3 / k + 0.1 * noise.random() for k in range(1, config.model.num_loops + 1)
    ]


def evaluation(config: Config, noise: random.Random, hides: bool) -> dict[str, Any]:
    """Two splits at every depth, and speeds."""
    norms, ces = states(config, config.training.steps, noise, hides), scores(config, config.training.steps, noise)
    depths = [
        {"k": k, "ce": ce, "perplexity": math.exp(ce), "bits_per_byte": ce / 2, "norm": norm}
        for k, (ce, norm) in enumerate(zip(ces, norms, strict=True), start=1)
    ]
    speeds = [{"k": row["k"], "tokens_per_second": 6e4 / (row["k"] + 0.3)} for row in depths]
    splits = {name: {"tokens": 131_072, "bytes": 400_000, "depths": depths} for name in ("valid", "test")}
    return {"schema_version": 1, "step": config.training.steps, "splits": splits, "throughput": speeds}


def audit(config: Config, noise: random.Random, hides: bool) -> dict[str, Any]:
    """An audit of 30 loops, with as many variables, interventions and tokens as a real one prints."""
    growth = 13.0 if hides else 0.1
    loops = [
        {
            "k": k,
            "norm": 18 * (1 + growth * k),
            "norm_quantiles": [18 * growth * k * noise.random() for _ in range(6)],
            "scale": 1 + growth * k,
            "radial_increment": growth * (1 + 0.01 * noise.random()),
            "predicted_increment": growth,
            "angular_step_times_scale": 0.5 + noise.random() / k,
            "radial_gradient_share": abs(noise.gauss(0, 1e-10 if hides else 0.2))
            if k <= config.model.num_loops
            else None,
        }
        for k in range(1, ROLLOUT + 1)
    ]
    variable = {"verdict": "visible", "visibility": 0.8, "delayed_visibility": 0.5, "activity": 0.9}
    variable |= {"evidence": "loop 1: its exit shows 0.8 of an average direction", "remedy": None, "flag": None}
    scale = {"verdict": "blind", "remedy": "let a loss see the scale", "flag": "--norm-penalty 0.01"} if hides else {}
    ces = [5.4 if hides else 5.4 + math.log(alpha) ** 2 for alpha in ALPHAS]
    return {
        "model": {"num_loops": config.model.num_loops, "width": config.design("a benchmark").width},
        "verdict": "blind-spot" if hides else "controlled",
        "summary": "The loop carries the scale on and no loss sees it." if hides else "A loss sees the scale.",
        "variables": [{"name": "scale", **variable, **scale}, {"name": "mean", **variable}],
        "blind_directions": {"dimension": int(hides), "named": [], "spectrum": [noise.random() for _ in range(128)]},
        "loops": loops,
        "alpha_sweep": {"alphas": ALPHAS, "loops": [{"k": config.model.num_loops, "ce": ces}]},
        "interventions": [{"name": f"clamp {n}", "ce": 5.4, "delta_ce": 0.01 * n} for n in range(5)],
        "heaviest_tokens": [{"token": n, "text": f" word{n}", "norm": 640.0, "ratio": 1.1} for n in range(8)],
        "checks": {"notes": []},
    }


def manifest(config: Config, folder: Path) -> dict[str, Any]:
    """Command, versions and choices."""
    return {
        "command": ["loopscope", "train", "--preset", "nano", "--out", f"runs/{folder.name}"],
        "versions": dict.fromkeys(("python", "loopscope", "torch", "numpy", "safetensors", "tokenizers"), "1.0"),
        "system": "made up",
        "threads": 2,
        "world_size": 1,
        "seed": config.training.seed,
        "parameters": 803_456,
        "choices": [{"name": name, "value": "x", "reason": "made up"} for name in ("device", "dtype", "attention")],
        "data": {"corpus": "made up", "corpus_sha256": "5" * 64, "tokenizer": "bpe", "tokenizer_sha256": "7" * 64},
    }


def build(runs: Path, out: Path) -> float:
    """Seconds of one `loopscope report` in a process of its own."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "loopscope", "report", str(runs), "--out", str(out), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main(runs: int = 25, steps: int = 1000, rounds: int = 3) -> int:
    """Build the page of made-up runs.

    Args:
        runs: How many.
        steps: Steps of each, all of them logged.
        rounds: How often the page is built.
    """
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "runs", Path(name) / "report.html"
        for n, condition in enumerate(islice(cycle(CONDITIONS.values()), runs)):
            write_run(folder / f"{condition.name}-s{n}", condition, n, steps)
        read = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        seconds = [build(folder, out) for _ in range(rounds)]
        megabytes = out.stat().st_size / 1e6
    met = statistics.median(seconds) <= SECONDS, megabytes <= MEGABYTES
    print(f"\n{runs} runs of {steps:,} logged steps, {read:.1f} MB of files, n {rounds} pages, each in a fresh process")
    spread = f"[{min(seconds):.2f}, {max(seconds):.2f}]"
    print(
        f"  time {statistics.median(seconds):.2f} s {spread}  target ≤ {SECONDS:g} s: {'met' if met[0] else 'MISSED'}"
    )
    print(f"  page {megabytes:.2f} MB  target ≤ {MEGABYTES:g} MB: {'met' if met[1] else 'MISSED'}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
