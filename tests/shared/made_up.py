"""Made-up runs and grids, in the types that real ones are written in: the paper's pattern in a few numbers."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from loopscope.auditing.interventions import INTERVENTIONS
from loopscope.config import Config, config_to_dict
from loopscope.files import write_json
from loopscope.machine import provenance
from loopscope.presets import preset
from loopscope.results.audit import (
    AlphaSweep,
    AuditChecks,
    AuditCost,
    AuditedLoop,
    AuditedModel,
    AuditResult,
    BlindDirections,
    HeavyToken,
    Intervention,
    Lemma2,
    LoopDirections,
    NamedDirection,
    SweptLoop,
    Variable,
    VariableVerdict,
)
from loopscope.results.evaluation import SPLITS, Depth, Evaluation, Split, Throughput
from loopscope.results.halting import CalibratedHalting, Calibration, Certificate, ExitShare, Gate, GatedLoop
from loopscope.results.record import as_json, write_record
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
from loopscope.results.run import (
    Choice,
    DataRecord,
    GitState,
    Logged,
    LoggedEvaluation,
    LoggedEvent,
    LoggedStep,
    Manifest,
    RowRecord,
    SplitSizes,
)
from loopscope.rows.conditions import CONDITIONS, apply_recipe
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
LOOPS, STEPS, ROLLOUT = 4, 1000, 30
HALTING = {
    "per-loop+rmsnorm": (1.04, 1.0),
    "per-loop+raw": (2.2, 3.0),
    "per-loop+final-only": (3.92, 4.0),
    "per-loop+penalty": (2.6, 3.0),
    "per-loop+inter-loop-norm": (1.5, 2.0),
    "per-loop+layernorm": (1.05, 1.0),
}
"""Mean loops of a calibrated rule, and the smallest fixed depth that is certified."""
SEEDS = (42, 101, 202)
FILES = ("manifest.json", "eval.json", "audit.json", "halting.json")
"""What a run has besides its configuration and its metrics."""


def wobble(seed: int) -> float:
    """By which share the norm of a seed is off, and by ten times as many nats its CE."""
    return {101: 0.01, 202: -0.01}.get(seed, 0.0)


def is_raw_at(condition: str, k: int) -> bool:
    """Whether the readout after loop k shows the scale."""
    return CONDITIONS[condition].readout == "raw" or (CONDITIONS[condition].readout == "final-only" and k < LOOPS)


# --- parts of a run --------------------------------------------------------------------------------------------------


def train_row(step: int, ce: list[float], norm: list[float], shares: list[float]) -> LoggedStep:
    """A line of metrics about a training step."""
    return LoggedStep(
        step=step,
        loss=sum(ce) / len(ce),
        ce=ce,
        loops=list(range(1, len(ce) + 1)),
        norm=norm,
        radial_gradient_share=shares,
        terms={},
        tenfold_charge=0.0 if max(shares, default=1.0) < 1e-3 else 1.0,
        depth=len(ce),
        gradient_norm=1.0,
        lr=2e-3,
        tokens_per_second=9e3,
    )


def eval_row(step: int, ce: list[float], norm: list[float]) -> LoggedEvaluation:
    """A line of metrics about an evaluation."""
    return LoggedEvaluation(step=step, ce=ce, norm=norm)


def event_row(step: int, event: str, message: str) -> LoggedEvent:
    """A line of metrics about what a guard or a monitor did."""
    return LoggedEvent(step=step, event=event, message=message)


def metric_rows(condition: str, seed: int, done: int, steps: int) -> Iterator[Logged]:
    """Norms that grow from 12 to where they end, in equal factors."""
    ce, norm = NUMBERS[condition]
    end = norm * (1 + wobble(seed))
    for step in sorted({1, *range(10, done + 1, 10)}) if done else ():
        now = 12.0 * (end / 12.0) ** (step / steps)
        shares = [0.07 if is_raw_at(condition, k) else 2e-7 for k in range(1, LOOPS + 1)]
        falling = [60 * math.exp(-step / 40) + value for value in ce]
        yield train_row(step, falling, [now * (0.4 + 0.2 * k) / 1.2 for k in range(1, LOOPS + 1)], shares)
        if step % 50 == 0:
            yield eval_row(step, ce, [end * (1 + 0.02 * (k - LOOPS)) for k in range(1, LOOPS + 1)])


def sample_manifest(command: list[str], seed: int) -> Manifest:
    """What a run folder says besides its configuration."""
    return Manifest(
        command=command,
        versions={"python": "3.11.7", "loopscope": "0.1.0", "torch": "2.13.0", "wandb": None},
        git=GitState(commit="0123456789abcdef", changed=False),
        system="Linux 6.1 x86_64",
        threads=1,
        world_size=1,
        seed=seed,
        parameters=172_288,
        choices=[Choice("device", "cpu", "no CUDA and no Apple GPU found")],
        data=DataRecord(
            corpus="builtin",
            corpus_sha256="54ddbc9e" * 8,
            tokenizer="bpe",
            tokenizer_sha256="7b" * 32,
            tokens=SplitSizes(train=90_000, valid=9_000),
            bytes=SplitSizes(train=200_000, valid=20_000),
        ),
    )


def made_up_eval(ce: list[float], norm: float, shift: float = 0.0, *, step: int = STEPS) -> Evaluation:
    """Twice as deep as trained, the same on validation and test text."""
    deeper = [value + shift for value in (*ce, *(ce[-1] + 0.01 * n for n in range(1, LOOPS + 1)))]
    depths = [Depth(k, each, norm * (1 + 0.02 * (k - LOOPS)), each / 2.0) for k, each in enumerate(deeper, start=1)]
    return Evaluation(
        step=step,
        tokenizer="bpe",
        num_loops=LOOPS,
        splits={name: Split(depths=depths, tokens=1000, bytes=3000) for name in SPLITS},
        throughput=[Throughput(k, 50_000 / k) for k in range(1, LOOPS + 1)],
        threads=1,
        device="cpu",
        unigram_ce=dict.fromkeys(SPLITS, 6.0),
    )


def sample_variable(name: str, verdict: VariableVerdict, visibility: float = 0.8, **more: object) -> Variable:
    """A verdict on a field that is held, unless more is told."""
    held = {"activity": 0.9, "kind": "field", "loop": 1, "free_range": 1.02, "free_tokens": 0.0}
    told = {"name": name, "verdict": verdict, "visibility": visibility, "delayed_visibility": visibility}
    return Variable(**held | told | more)


def made_up_audit(condition: str, norm: float, step: int | None = STEPS, *, width: int = 128) -> AuditResult:
    """An audit whose only finding can be the scale."""
    hides, is_normed = CONDITIONS[condition].readout in ("rmsnorm", "layernorm"), not is_raw_at(condition, LOOPS)
    removed = CONDITIONS[condition].inter_loop_norm != "none"
    is_blind = hides and CONDITIONS[condition].norm_penalty == 0 and not removed
    free = {"free_range": 1e6, "free_tokens": 1.0, "drift": 0.041, "driven": True} if is_blind else {"free_range": 1.1}
    verdict: VariableVerdict = "blind" if is_blind else "visible" if not hides else "removed" if removed else "weak"
    alphas = [0.1, 0.3, 1.0, 3.0, 10.0]
    clamps = {"growth removed": (4.4, -0.004), "frozen at loop 1": (4.4, 0.001)}
    clamped = {f"radial clamp: {name}": measured for name, measured in clamps.items()} | {"mean clamp": (4.9, 0.5)}
    return AuditResult(
        model=AuditedModel(
            name=condition,
            num_loops=LOOPS,
            width=width,
            vocab_size=2048,
            parameters=800_000,
            dtype="float32",
            audited_in="float64",
            step=step,
            supervised=list(range(1, LOOPS + 1)),
            observables=["h"],
        ),
        verdict="blind-spot" if is_blind else "controlled",
        variables=[
            sample_variable("scale", verdict, 1e-6 if hides else 0.9, activity=0.99, loop=3, **free),
            sample_variable("mean", "visible"),
        ],
        blind_directions=BlindDirections(
            dimension=int(is_blind),
            agreement=1.0,
            states=4,
            spectrum=[1.0, 1e-9],
            gap=None,
            named=[NamedDirection(name="scale", share=1.0)] if is_blind else [],
            unnamed=0,
            loops=[FOUND],
        ),
        loops=[made_up_loop(k, condition, norm, width) for k in range(1, ROLLOUT + 1)],
        motion="drift",
        alpha_sweep=AlphaSweep(
            alphas=alphas,
            loops=[SweptLoop(k=LOOPS, ce=[4.4 + (0.0 if is_normed else abs(math.log(a))) for a in alphas])],
        ),
        interventions=[
            Intervention(name=name, clamps=INTERVENTIONS[name].clamps, ce=ce, delta_ce=delta)
            for name, (ce, delta) in clamped.items()
        ],
        heaviest_tokens=[HeavyToken(token=17, text="<b>the</b>", position=0, norm=900.0, ratio=1.6)],
        checks=AuditChecks(raw_readout_control=0.4, causal=True, doubts=[], notes=[]),
        cost=AuditCost(seconds=1.0),
    )


FOUND = LoopDirections(
    k=1, hidden=1, weak=0, removed=0, unreachable=0, damped=0, inert=0, shown_later=0, memory=0, blind=1
)
"""What the search found at one loop."""


def made_up_loop(k: int, condition: str, norm: float, width: int) -> AuditedLoop:
    """A loop that adds a fortieth of the first scale, or nothing where a norm opens it, as Lemma 2 predicts."""
    start = norm / math.sqrt(width)
    increment = 0.0 if CONDITIONS[condition].inter_loop_norm != "none" else start / 40
    scale = start + (k - 1) * increment
    moved = {"scale_moved": 60 * increment, "scale_missed": 0.6 * increment}
    share, curvature = (0.07, 0.8) if is_raw_at(condition, k) else (2e-7, -3e-6)
    goes_on, is_trained = k < ROLLOUT, k <= LOOPS
    turn = 0.5 * (1 + 0.01 * k) if goes_on else None
    return AuditedLoop(
        k=k,
        norm=scale * width**0.5,
        norm_quantiles=[scale * factor for factor in (5, 8, 11, 14, 20, 60)],
        scale=scale,
        mean=0.0,
        radial_increment=increment if goes_on else None,
        predicted_increment=increment * 1.01 if goes_on else None,
        angular_step=turn / scale if turn is not None else None,
        angular_step_times_scale=turn,
        radial_update=increment if goes_on else None,
        tangential_update=0.5 if goes_on else None,
        lemma_2=Lemma2(tokens=60, direction_moved=30.0, direction_missed=0.9, **moved) if goes_on else None,
        supervised=is_trained,
        ce=4.4,
        radial_gradient_share=share if is_trained else None,
        radial_gradient_quantiles=[share] * 5 if is_trained else None,
        scale_curvature=curvature if is_trained else None,
        scale_curvature_size=abs(curvature) if is_trained else None,
    )


def sample_halting(loops: float, fixed: float, *, step: int = STEPS, spread: float = 0.05) -> CalibratedHalting:
    """A calibrated rule that runs so many loops a token, units being so far apart; and gates that save nothing."""
    gate = Gate(
        reads="h",
        loss=0.9,
        constant_loss=0.6,
        mean_loops=float(LOOPS),
        fixed_depth=fixed,
        loops=tuple(GatedLoop(k=k, norm=100.0 * k, logit=3.0 * k, saturated=k / (2 * LOOPS)) for k in (1, 2, 4, 8)),
    )
    return CalibratedHalting(
        step=step,
        num_loops=LOOPS,
        split="valid",
        rule="margin",
        max_ppl_increase=0.01,
        confidence=0.95,
        units={"fit": 40, "calibration": 100, "test": 60},
        units_needed=18,
        threshold=2.5,
        p_value=0.01,
        ppl_increase=0.004,
        mean_loops=loops,
        fixed_depth=fixed,
        unit_loops=tuple(loops + spread * (-1) ** n for n in range(60)),
        exits=(ExitShare(1, 0.5), ExitShare(LOOPS, 0.5)),
        gates=(gate, replace(gate, reads="norm(h)", loss=0.4, mean_loops=fixed - 0.2)),
        notes=("blocks stand in for articles",),
    )


def sample_certificate(
    rule: str, threshold: float | None, loops: float | None, increase: float | None = 0.002
) -> Certificate:
    """Of a rule that leaves after so many loops a token; None of them: nothing is certified."""
    return Certificate(
        rule=rule,
        threshold=threshold,
        p_value=0.01,
        hoeffding_bentkus=0.04,
        mean_loops=loops,
        ppl_increase=increase,
        clipped_above=0,
    )


def sample_calibration(fixed: Certificate, *rules: Certificate) -> Calibration:
    """Rules that were certified at 1 %, beside the fixed depth."""
    return Calibration(
        target="run",
        num_loops=LOOPS,
        max_ppl_increase=0.01,
        confidence=0.95,
        units={"fit": 40, "calibration": 100, "test": 60},
        unit_tokens=512,
        units_needed=18,
        fixed=fixed,
        certificates=rules,
    )


def made_up_halting(condition: str, off: float = 0.0, *, step: int = STEPS) -> CalibratedHalting | None:
    """Of a per-loop condition."""
    if condition not in HALTING:
        return None
    loops, fixed = HALTING[condition]
    return sample_halting(loops + off, fixed, step=step)


# --- runs ------------------------------------------------------------------------------------------------------------


def write_sample(folder: Path, config: Config, metrics: Iterable[Logged] = (), **records: Any) -> Path:
    """A run folder with these records: `audit_untrained` is audit-untrained.json, what is None is not there."""
    run = RunFolder(folder)
    run.create(config)
    for row in metrics:
        run.append_metrics(row)
    for name, record in records.items():
        if record is not None:
            content = record if isinstance(record, dict) else record.to_json()
            write_json(folder / f"{name.replace('_', '-')}.json", content)
    return folder


def row_config(condition: str, seed: int, recipe: str = "paper", *, size: str = "nano", steps: int = STEPS) -> Config:
    """The configuration of a run."""
    config = CONDITIONS[condition].apply(apply_recipe(preset(size), recipe))
    return replace(config, training=replace(config.training, seed=seed, steps=steps))


def write_run(
    folder: Path,
    condition: str = "per-loop+rmsnorm",
    *,
    seed: int = 42,
    recipe: str = "paper",
    size: str = "demo",
    steps: int = 200,
    done: int | None = None,
    files: Iterable[str] = FILES,
    change: Callable[..., None] | None = None,
    row: RowRecord | None = None,
) -> Path:
    """A run folder as training leaves it; `done` steps of it, and only some of the files that come later.

    `change(evaluation, audit)` may alter what was measured, as JSON.
    """
    config = row_config(condition, seed, recipe, size=size, steps=steps)
    ce, norm = NUMBERS[condition]
    norm, off, width = norm * (1 + wobble(seed)), wobble(seed), config.model.width
    evaluated = as_json(made_up_eval(ce, norm, off / 10, step=steps))
    audited = json.loads(json.dumps(made_up_audit(condition, norm, steps, width=width).to_json()))
    if change is not None:
        change(evaluated, audited)
    command = ["/somewhere/bin/loopscope", "train", "--preset", size, "--out", f"runs/{folder.name}"]
    records = {
        "manifest": sample_manifest(command, seed),
        "eval": evaluated,
        "audit": audited,
        "audit_untrained": made_up_audit(condition, 20.0, None, width=width),
        "halting": made_up_halting(condition, off, step=steps),
    }
    wanted = {name: record for name, record in records.items() if f"{name.replace('_', '-')}.json" in files}
    metrics = metric_rows(condition, seed, steps if done is None else done, steps)
    return write_sample(folder, config, metrics, row=row, **wanted)


# --- grids -----------------------------------------------------------------------------------------------------------


def write_row(out: Path, condition: str, seed: int, *, recipe: str = "paper", **how: Any) -> Path:
    """A finished row, of nano size and without its metrics unless told otherwise."""
    name = f"{condition}{'' if recipe == 'paper' else f'-{recipe}'}-s{seed}"
    done = {"state": "finished", "attempts": 1, "seconds": {"training": 61.2}}
    row = RowRecord(name=name, condition=condition, recipe=recipe, seed=seed, **done)
    how = {"size": "nano", "steps": STEPS, "done": 0, "files": (*FILES, "audit-untrained.json"), **how}
    return write_run(out / "rows" / name, condition, seed=seed, recipe=recipe, row=row, **how)


def write_grid(out: Path, conditions: dict[str, int], size: str) -> None:
    """grid.json: so many seeds of each condition."""
    recipes = {
        recipe: RecipeRecord(
            config=config_to_dict(apply_recipe(preset(size), recipe)),
            epochs=0.5,
            seeds={name: list(SEEDS[:count]) for name, count in conditions.items()} if recipe == "paper" else {},
            differences=[Difference("model.width", "512", "64")] if size == "demo" else [],
        )
        for recipe in ("paper", "modern")
    }
    commands = [["/somewhere/bin/loopscope", "reproduce", "--size", size, "--out", "grid"]]
    asked = {"size": size, "commands": commands, "recipes": recipes, "data": {}, "test_data": None, "eval_tokens": None}
    out.mkdir(parents=True, exist_ok=True)
    write_record(out / "grid.json", GridRecord(**asked, **provenance()))


def write_made_up_grid(out: Path) -> Path:
    """The 2×2 and the penalty with three seeds, everything else with one."""
    return shutil.copytree(_made_up_grid(), out, dirs_exist_ok=True)


@cache
def _made_up_grid() -> Path:
    """Written once per process: what writes real files waits for the disk."""
    folder = tempfile.mkdtemp(prefix="loopscope-made-up-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = Path(folder)
    core = ("terminal+rmsnorm", "terminal+raw", "per-loop+rmsnorm", "per-loop+raw", "per-loop+penalty")
    conditions = {name: 3 if name in core else 1 for name in CONDITIONS}
    write_grid(out, {}, "nano")
    for name, count in conditions.items():
        for seed in SEEDS[:count]:
            write_row(out, name, seed)
    return out


def write_reproduction(folder: Path, conditions: dict[str, int], *, modern: tuple[str, ...] = ()) -> Path:
    """A grid at demo size with metrics and claims: so many seeds of each condition, some also under modern."""
    how: dict[str, Any] = {"size": "demo", "steps": 200, "done": None, "files": FILES}
    write_grid(folder, conditions, "demo")
    for name, count in conditions.items():
        for seed in SEEDS[:count]:
            write_row(folder, name, seed, **how)
    for name in modern:
        write_row(folder, name, 42, recipe="modern", **how)
    write_record(folder / "claims.json", claims())
    return folder


def claims() -> ClaimsRecord:
    """One that holds, one that does not, one that was not measured."""
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
    """A claim about one number."""
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
