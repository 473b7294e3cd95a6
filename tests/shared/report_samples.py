"""Sample folders for the page: runs and a reproduction, written the way `train`, `audit` and `reproduce` write them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from samples import (
    eval_row,
    sample_audit,
    sample_evaluation,
    sample_halting,
    sample_loop,
    sample_manifest,
    train_row,
    write_sample,
)

from loopscope.config import config_to_dict
from loopscope.presets import preset
from loopscope.results.audit import AuditedLoop, AuditResult, Variable
from loopscope.results.evaluation import Evaluation
from loopscope.results.record import text_of, write_record
from loopscope.results.reproduction import (
    FAILS,
    HOLDS,
    NOT_MEASURED,
    ClaimsRecord,
    Difference,
    GridRecord,
    Judgement,
    Measured,
    OfSeed,
    PaperValue,
    RecipeRecord,
)
from loopscope.results.run import Logged, RowRecord
from loopscope.rows.conditions import CONDITIONS, apply_recipe

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
    files: tuple[str, ...] = ("manifest.json", "eval.json", "audit.json", "halting.json"),
) -> Path:
    """A run folder as training leaves it; `done` steps of it, and only some of the files that come later."""
    shape, noise = SHAPES[condition], random.Random(f"{condition}{seed}")
    base = apply_recipe(preset("demo"), recipe)
    config = CONDITIONS[condition].apply(replace(base, training=replace(base.training, seed=seed, steps=steps)))
    factor = math.exp(noise.gauss(0, 0.08))
    command = ["/somewhere/bin/loopscope", "train", "--preset", "demo", "--out", f"runs/{folder.name}"]
    return write_sample(
        folder,
        config,
        metrics=metric_rows(shape, factor, steps if done is None else done, steps),
        manifest=sample_manifest(command, seed) if "manifest.json" in files else None,
        evaluation=evaluation(shape, factor, steps) if "eval.json" in files else None,
        audit=audit(condition, shape, factor, steps) if "audit.json" in files else None,
        halting=sample_halting(2.4, 3.0, step=steps, num_loops=K)
        if "halting.json" in files and condition.startswith("per-loop")
        else None,
    )


def metric_rows(shape: Shape, factor: float, done: int, steps: int) -> list[Logged]:
    rows: list[Logged] = []
    for step in sorted({1, *range(10, done + 1, 10)}) if done else []:
        norm = 12.0 * (shape.norm * factor / 12.0) ** (step / steps)
        ce = [60 * math.exp(-step / 40) + value for value in along(*shape.ce)]
        norms_K = [norm * (0.4 + 0.2 * k) / 1.2 for k in range(1, K + 1)]
        rows.append(train_row(step, ce, norms_K, [shape.share * factor * (1 + k / 9) for k in range(K)]))
        if step % 50 == 0:
            rows.append(eval_row(step, along(*shape.ce), norms(shape, factor)))
    return rows


def along(first: float, last: float) -> list[float]:
    return [last + (first - last) * math.exp(-1.6 * k) for k in range(K)]


def norms(shape: Shape, factor: float, count: int = K) -> list[float]:
    grown = shape.growth * math.sqrt(WIDTH)
    return [max(shape.norm * factor + grown * (k - K), 0.3 * shape.norm) for k in range(1, count + 1)]


def evaluation(shape: Shape, factor: float, steps: int) -> Evaluation:
    ces = [*along(*shape.ce), *(shape.ce[1] + 0.02 * n for n in range(1, 5))]
    return sample_evaluation(ces, norms(shape, factor, 8), step=steps, num_loops=K, nats_per_bit=1.35)


def audit(condition: str, shape: Shape, factor: float, steps: int) -> AuditResult:
    blind = condition in ("terminal+rmsnorm", "per-loop+rmsnorm", "per-loop+layernorm")
    hides = CONDITIONS[condition].readout in HIDING
    removed = CONDITIONS[condition].inter_loop_norm != "none"
    return sample_audit(
        name=condition,
        step=steps,
        num_loops=K,
        width=WIDTH,
        scale=Variable(
            name="scale",
            verdict="blind" if blind else "visible" if not hides else "removed" if removed else "weak",
            visibility=shape.share,
            delayed_visibility=shape.share * 2,
            activity=0.99,
            kind="field",
            loop=3,
            free_range=1e6 if blind else 1.1,
            free_tokens=float(blind),
            drift=0.041 if blind else None,
            driven=True if blind else None,
        ),
        loops=[audit_loop(k, shape, factor) for k in range(1, ROLLOUT + 1)],
        alphas=ALPHAS,
        ces=[shape.ce[1] + (0 if hides else 2.5 * math.log(alpha) ** 2) for alpha in ALPHAS],
        interventions={"radial clamp: growth removed": (shape.ce[1], 0.0012)},
    )


def audit_loop(k: int, shape: Shape, factor: float) -> AuditedLoop:
    scale = max(shape.norm * factor / math.sqrt(WIDTH) + shape.growth * (k - K), 0.3 * shape.norm / math.sqrt(WIDTH))
    last = k == ROLLOUT
    return sample_loop(
        k,
        scale=scale,
        width=WIDTH,
        ce=shape.ce[1],
        share=shape.share * factor if k <= K else None,
        increment=None if last else shape.growth * (1 + 0.02 * math.sin(k)),
        predicted=None if last else shape.growth,
        turn=None if last else (3.0 + 2 / k) * math.sqrt(shape.norm) / 10,
    )


def write_reproduction(folder: Path, conditions: dict[str, int], *, modern: tuple[str, ...] = ()) -> Path:
    """A reproduction folder with finished rows: so many seeds of each condition, some also under the modern recipe."""
    seeds = (42, 101, 202)
    rows = [(name, "paper", seed) for name, count in conditions.items() for seed in seeds[:count]]
    for name, recipe, seed in [*rows, *((name, "modern", 42) for name in modern)]:
        row = f"{name}{'' if recipe == 'paper' else '-modern'}-s{seed}"
        write_run(folder / "rows" / row, name, seed=seed, recipe=recipe)
        record = RowRecord(name=row, condition=name, recipe=recipe, seed=seed, state="finished", attempts=1)
        write_record(folder / "rows" / row / "row.json", replace(record, seconds={"training": 61.2}))
    paper = RecipeRecord(
        config=config_to_dict(apply_recipe(preset("demo"), "paper")),
        epochs=0.5,
        seeds={name: list(seeds[:count]) for name, count in conditions.items()},
        differences=[Difference("model.width", "512", "64")],
    )
    command = ["/somewhere/bin/loopscope", "reproduce", "--size", "demo", "--out", "grid"]
    grid = GridRecord(
        size="demo",
        commands=[command],
        recipes={"paper": paper},
        data={},
        test_data=None,
        eval_tokens=None,
        versions={},
        git=None,
        system="",
        started="",
    )
    (folder / "grid.json").write_text(text_of(grid))
    (folder / "claims.json").write_text(text_of(claims()))
    return folder


def claims() -> ClaimsRecord:
    return ClaimsRecord(
        size="demo",
        sources={"P": "abstract and project page of arXiv 2606.24898"},
        interval="95 % bootstrap",
        claims=[
            claim("C1", "Per-loop supervision through RMSNorm lets the norm run away", HOLDS, 226.0),
            claim("C9", "Scale-controlled models gain from loops", FAILS, 3.0),
            claim("C10", "Halting is adaptive or K-invariant", NOT_MEASURED, None),
        ],
    )


def claim(name: str, title: str, verdict: str, mean: float | None) -> Judgement:
    return Judgement(
        recipe="paper",
        split="valid",
        id=name,
        title=title,
        measured="‖H_K‖ of per-loop + RMSNorm over raw",
        rule="ratio at least 10",
        paper=[PaperValue("39,207 (44M) against tens", "P")],
        quantities=[] if mean is None else [quantity("norm ratio", "×", mean, obeyed=verdict == HOLDS)],
        verdict=verdict,
        reason="no rows",
    )


def quantity(name: str, unit: str, mean: float, *, obeyed: bool | None = None, signed: bool = False) -> Measured:
    """Two seeds."""
    return Measured(
        name=name,
        unit=unit,
        seeds=[OfSeed(42, mean), OfSeed(101, mean * 1.1)],
        n=2,
        mean=mean,
        low=mean,
        high=mean * 1.1,
        rule=None if obeyed is None else "at least 10",
        obeyed=obeyed,
        headline=True,
        signed=signed,
    )
