"""Does training do what the audit of an untrained model says?

    python benchmarks/predict.py train push drift audit report [--out runs/predict]

The rows of predict_rows.yaml, fixed before the first was trained, are demo-sized designs. Each phase writes one line of
JSON per row and goes on where it was stopped:

    train   ordinary training, and the same row's twin with a norm penalty of 0.01
    push    the push test, after its own warm-up
    drift   whether training drives the row's variable, from the untrained model
    audit   the audit of the untrained model: verdict and free range of the row's variable
    report  whether the one predicts the others

(i) Against the push test: the rank correlation of free range and pushed growth is at least 0.8 (∞ tied at the top), and
blind predicts "pushed at least fivefold" with precision and recall of at least 0.9. (ii) Against ordinary training:
a row runs away when its variable ends or peaks at five times its twin's or more. Every runaway was called free (recall
1.00), and free and driven up predicts runaways with precision of at least 0.9. Beside it, two comparators: a norm
monitor that looks at step 10, and "has it a norm readout". Exit code 1 when one of the four is missed.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
import yaml
from torch import Tensor

import loopscope as ls
from loopscope.auditing.drift import Size, TrialObjective, drift, log_size, push, size_along
from loopscope.auditing.visibility import FIELDS, Field
from loopscope.config import PAPER_PENALTY, Config, ModelConfig, config_to_dict
from loopscope.data.preparation import prepare
from loopscope.data.stream import TaskStream, TrainingStream, evaluation_batches, training_stream
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.placement import Objective
from loopscope.objectives.terms import terms_of
from loopscope.options import PushOptions
from loopscope.protocol import Cache, LoopState
from loopscope.results.audit import Recipe
from loopscope.results.thresholds import RAN
from loopscope.rows.conditions import apply_recipe
from loopscope.training.optimizers import Optimizers, clip_gradients, learning_rate
from side_by_side import machine

ROWS = Path(__file__).with_name("predict_rows.yaml")
STEPS, BATCH, LENGTH = 120, 8, 64
"""Of a training: enough for a runaway of the paper's recipe to peak, which takes 40 steps."""
PUSH = PushOptions()
SEED = 42
MONITOR_STEP, MONITOR_GROWTH = 10, 2.0
"""The comparator raises an alarm when the variable has doubled by then."""
LAST = 10
"""Steps that "final" is averaged over."""
BLIND_FROM = 10.0
"""Free range from which a variable is called free."""
AUDIT_ROWS, DRIFT_BATCHES = 8, 8

Phase = Literal["train", "push", "drift", "audit", "report"]
Json = dict[str, Any]


# --- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One design, and the variable that is followed in it."""

    name: str
    recipe: Literal["paper", "modern"] = "paper"
    variable: str = "scale"
    masked: int = 0
    """Channels that the readout leaves out."""
    model: Json = field(default_factory=dict)
    objective: Json = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The demo preset with the row's changes, under its recipe, on short sequences."""
        base = ls.preset("demo")
        training = replace(base.training, steps=STEPS, batch=BATCH, seed=SEED)
        base = replace(base, data=replace(base.data, sequence_length=LENGTH), training=training)
        config = apply_recipe(base, self.recipe)
        objective: Json = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.objective.items()
        }
        model = replace(config.design("a row"), **self.model)
        return replace(config, model=model, objective=replace(config.objective, **objective))

    @property
    def twin(self) -> Row:
        """The same row with the paper's penalty."""
        return replace(self, name=f"{self.name}-twin", objective={**self.objective, "norm_penalty": PAPER_PENALTY})

    @property
    def course(self) -> str:
        """What decides its training: rows that differ in the variable only share one."""
        config = config_to_dict(self.config)
        return json.dumps([config["model"], config["objective"], config["training"], self.masked], sort_keys=True)

    def build(self) -> LoopedLM:
        """The untrained model."""
        design = self.config.design("a row")
        if not self.masked:
            return build(design, seed=SEED)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return MaskedLM(design, self.masked)

    @property
    def fields(self) -> dict[str, Field]:
        """Scale and mean, and the part of the state in the masked channels."""
        if not self.masked:
            return FIELDS
        return {**FIELDS, "masked": lambda h: h * (torch.arange(h.shape[-1]) >= h.shape[-1] - self.masked)}

    @property
    def sizes(self) -> dict[str, Size]:
        """How large each is."""
        return {name: size_along(of) for name, of in self.fields.items()}

    def objective_of(self) -> TrialObjective:
        """The row's loss."""
        config = self.config
        return TrialObjective(config.objective, terms_of(config.objective), config.model.num_loops)

    @property
    def has_norm_readout(self) -> bool:
        """The rule of thumb: is every exit read through a norm?"""
        return self.config.design("a row").readout in ("rmsnorm", "layernorm")


class MaskedLM(LoopedLM):
    """A looped language model whose readout leaves out the last channels of the state."""

    def __init__(self, config: ModelConfig, masked: int) -> None:
        super().__init__(config)
        self.masked = masked

    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """As ever, of a state without the masked channels."""
        shown_BTD = torch.nn.functional.pad(state.h_BTD[..., : -self.masked], (0, self.masked))
        return super().features(state.with_h(shown_BTD), k, cache)


def read_rows() -> list[Row]:
    """All rows, in the order of the file."""
    rows = [Row(**line) for line in yaml.safe_load(ROWS.read_text("utf-8"))]
    assert len({row.name for row in rows}) == len(rows), "two rows have one name"
    return rows


@cache
def text(out: Path) -> tuple[TrainingStream | TaskStream, Any]:
    """The built-in text in 512 tokens: the order of training, and the validation split."""
    config = read_rows()[0].config
    prepared = prepare(config, out / "tokenizer", lambda line: None)
    return training_stream(prepared.train, LENGTH, BATCH, SEED, config.data), prepared.valid


# --- phases ----------------------------------------------------------------------------------------------------------


def lines_of(file: Path) -> dict[str, Json]:
    """What a phase has written so far, by key."""
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return {line["key"]: line for line in lines}


def run_phase(out: Path, phase: str, work: Sequence[tuple[str, Callable[[], Json]]]) -> None:
    """Do what is not there yet, a line at a time."""
    file = out / f"{phase}.jsonl"
    for index, (key, measure) in enumerate(work, start=1):
        if key in lines_of(file):  # read anew each time: another process may share the work
            continue
        started = time.perf_counter()
        measured = measure()
        seconds = time.perf_counter() - started
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": key, **measured, "seconds": round(seconds, 2)}) + "\n")
        print(f"{phase} {index}/{len(work)} {measured.get('name', key)} {seconds:.1f} s", file=sys.stderr, flush=True)


def train_row(row: Row, out: Path) -> Json:
    """Ordinary training with dropout and the recipe's schedule; the logarithm of every size before each step."""
    config, model = row.config, row.build().train()
    stream, _ = text(out)
    objective, optimizers = Objective(config.objective), Optimizers(model, config.training)
    sizes = row.sizes
    log_sizes: dict[str, list[float]] = {name: [] for name in sizes}
    losses = []
    for step in range(STEPS):
        torch.manual_seed(SEED * 100_003 + step)
        result = objective(model, *stream.batch(step))
        with torch.no_grad():
            for name, size in sizes.items():
                log_sizes[name].append(round(float(log_size(result.trace, size)), 4))
        losses.append(round(float(result.loss.detach()), 4))
        result.loss.backward()
        clip_gradients(model.parameters(), config.training.clip)
        optimizers.step(learning_rate(config.training, step))
        optimizers.zero_grad()
    return {"name": row.name, "log_sizes": log_sizes, "loss": losses}


def push_row(row: Row, out: Path) -> Json:
    """The push test of the row's variable."""
    stream, _ = text(out)
    batches = (stream.batch(step) for step in count())
    size = {row.variable: row.sizes[row.variable]}
    result = push(
        row.build(),
        batches,
        row.objective_of(),
        size,
        recipe=Recipe.of(row.config.training),
        options=PUSH,
        name=row.name,
    )
    pushed = asdict(result.pushes[0])
    rounded = {name: [round(value, 4) for value in pushed[name]] for name in ("growth_by_step", "paid_by_step")}
    return {**pushed, **rounded, "name": row.name, "variable": row.variable, "twin_loss": result.twin_loss}


def drift_row(row: Row, out: Path) -> Json:
    """The drift of the row's variable in the untrained model."""
    stream, _ = text(out)
    batches = [stream.batch(step) for step in range(DRIFT_BATCHES)]
    size = {row.variable: row.sizes[row.variable]}
    found = drift(row.build(), batches, row.objective_of(), size, recipe=Recipe.of(row.config.training))[row.variable]
    return {"name": row.name, "rate": found.rate, "spread": found.spread, "driven": found.driven}


def audit_row(row: Row, out: Path) -> Json:
    """The audit of the untrained model on validation text."""
    config = row.config
    _, valid = text(out)
    batches = [next(evaluation_batches(valid, LENGTH, AUDIT_ROWS))]
    terms, model = terms_of(config.objective), row.build().eval()
    with torch.no_grad():
        states_KBTD = ls.run_loops(model, batches[0][0][:1]).h_KBTD
    result = ls.audit(
        model,
        batches,
        supervised=config.objective,
        terms=terms,
        fields=row.fields,
        untrained_scale=float(states_KBTD.square().mean().sqrt()),
        name=row.name,
    )
    found = result.variable(row.variable)
    return {
        "name": row.name,
        "verdict": found.verdict,
        "free_range": found.free_range,
        "free_tokens": found.free_tokens,
        "overall": result.verdict,
        "dimension": result.blind_directions.dimension,
    }


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What was said of a row, and what happened to it."""

    row: Row
    verdict: str
    free_range: float
    rate: float
    driven_up: bool
    pushed: float
    reach: float
    """The same in lengths of the state."""
    reached: float
    """The size that it reached, where a state of scale 1 has length 1. A twin that has run away itself leaves little to
    grow: against what was free from the start, this is what counts."""
    paid: float
    peak: float
    final: float
    at_monitor: float
    """Growth by step 10."""

    @property
    def is_blind(self) -> bool:
        """What the audit says."""
        return self.verdict == "blind"

    @property
    def is_free(self) -> bool:
        """Whether the objective lets it go tenfold, whatever the loop does with it."""
        return self.free_range >= BLIND_FROM

    @property
    def ran(self) -> bool:
        """Whether ordinary training ran away with it."""
        return max(self.peak, self.final) >= RAN


def outcomes(out: Path) -> Iterator[Outcome]:
    """Every row that all phases have measured."""
    audits, trained, pushes, drifts = (
        lines_of(out / f"{phase}.jsonl") for phase in ("audit", "train", "push", "drift")
    )
    for row in read_rows():
        measured = audits.keys() & pushes.keys() & drifts.keys()
        if row.name not in measured or not {row.course, row.twin.course} <= trained.keys():
            continue
        audited, pushed, drifted = audits[row.name], pushes[row.name], drifts[row.name]
        own, twin = (trained[of.course]["log_sizes"][row.variable] for of in (row, row.twin))
        yield Outcome(
            row=row,
            verdict=audited["verdict"],
            free_range=math.inf if audited["free_range"] is None else audited["free_range"],
            rate=drifted["rate"],
            driven_up=drifted["driven"] and drifted["rate"] > 0,
            pushed=pushed["growth"],
            reach=pushed["reach"],
            reached=max(1.0, pushed["size"] / row.config.design("a row").width ** 0.5),
            paid=pushed["paid"],
            peak=math.exp(max(own) - max(twin)),
            final=math.exp(statistics.fmean(own[-LAST:]) - statistics.fmean(twin[-LAST:])),
            at_monitor=math.exp(own[MONITOR_STEP - 1] - own[0]),
        )


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    return [
        statistics.fmean(index for index, other in enumerate(sorted(values), start=1) if other == value)
        for value in values
    ]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, with ties; 0 where one of them does not vary."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return 0.0
    return statistics.correlation(ranks(one), ranks(other))


@dataclass(frozen=True)
class Score:
    """How well a prediction meets what happened."""

    hits: int
    false_alarms: list[str]
    missed: list[str]
    quiet: int

    @property
    def precision(self) -> float:
        """Share of the predicted that happened."""
        predicted = self.hits + len(self.false_alarms)
        return self.hits / predicted if predicted else 1.0

    @property
    def recall(self) -> float:
        """Share of what happened that was predicted."""
        happened = self.hits + len(self.missed)
        return self.hits / happened if happened else 1.0

    def __str__(self) -> str:
        counts = (
            f"{self.hits} hits, {len(self.false_alarms)} false alarms, {len(self.missed)} missed, {self.quiet} quiet"
        )
        return f"precision {self.precision:.2f}, recall {self.recall:.2f}  ({counts})"


def score(rows: Sequence[Outcome], predicted: Callable[[Outcome], bool], happened: Callable[[Outcome], bool]) -> Score:
    """Count."""
    return Score(
        sum(predicted(row) and happened(row) for row in rows),
        [row.row.name for row in rows if predicted(row) and not happened(row)],
        [row.row.name for row in rows if happened(row) and not predicted(row)],
        sum(not predicted(row) and not happened(row) for row in rows),
    )


def report(out: Path) -> int:
    """Print everything, write it to report.json, and say by the exit code whether the four claims hold."""
    rows = list(outcomes(out))
    if not rows:
        print("nothing to report yet: run the phases train, push, drift and audit", file=sys.stderr)
        return 2
    print(machine())
    print(f"{len(rows)} rows of {len(read_rows())}: {STEPS} steps of {BATCH} × {LENGTH} tokens; push {PUSH}\n")
    said = ("row", "variable", "verdict", "free range", "drift a step")
    columns = (*said, "pushed", "in lengths", "reached", "paid", "peak", "final", "ran")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for each in rows:
        cells = (
            *(each.row.name, each.row.variable, each.verdict, _times(each.free_range)),
            f"{each.rate:+.1%}{' ↑' if each.driven_up else ''}",
            *(_times(each.pushed), _times(each.reach), _times(each.reached), f"{each.paid:+.2f}"),
            *(_times(each.peak), _times(each.final)),
            "yes" if each.ran else "",
        )
        print(f"| {' | '.join(cells)} |")
    far, ran = (lambda each: each.pushed >= RAN), (lambda each: each.ran)
    ranges = [min(each.free_range, 1e6) for each in rows]
    pushed = rank_correlation(ranges, [each.pushed for each in rows])
    scores = {
        "blind → pushed fivefold": score(rows, lambda each: each.is_blind, far),
        "free range ≥ 10 → pushed fivefold": score(rows, lambda each: each.is_free, far),
        "norm readout → pushed fivefold": score(rows, lambda each: each.row.has_norm_readout, far),
        "norm monitor at step 10 → pushed fivefold": score(rows, lambda each: each.at_monitor >= MONITOR_GROWTH, far),
        "blind → ran away": score(rows, lambda each: each.is_blind, ran),
        "free range ≥ 10 → ran away": score(rows, lambda each: each.is_free, ran),
        "blind and driven up → ran away": score(rows, lambda each: each.is_blind and each.driven_up, ran),
        "free range ≥ 10 and driven up → ran away": score(rows, lambda each: each.is_free and each.driven_up, ran),
        "norm readout → ran away": score(rows, lambda each: each.row.has_norm_readout, ran),
        "norm monitor at step 10 → ran away": score(rows, lambda each: each.at_monitor >= MONITOR_GROWTH, ran),
    }
    print(f"\nrank correlation of free range and pushed growth: {pushed:.2f} (target ≥ 0.8)")
    reach = rank_correlation(ranges, [each.reach for each in rows])
    print(f"  with pushed growth in lengths of the state: {reach:.2f}")
    reached = rank_correlation(ranges, [each.reached for each in rows])
    print(f"  with the size that was reached: {reached:.2f}")
    monitor = rank_correlation([each.at_monitor for each in rows], [each.pushed for each in rows])
    print(f"  of growth by step {MONITOR_STEP} and pushed growth: {monitor:.2f}")
    for name, counted in scores.items():
        print(f"{name}: {counted}")
        for what, names in (("false alarm", counted.false_alarms), ("missed", counted.missed)):
            if names:
                print(f"    {what}: {', '.join(names)}")
    blind, runaways = scores["blind → pushed fivefold"], scores["free range ≥ 10 and driven up → ran away"]
    claims = {
        "rank correlation of free range and pushed growth ≥ 0.8": pushed >= 0.8,
        "blind against pushed fivefold: precision and recall ≥ 0.9": min(blind.precision, blind.recall) >= 0.9,
        "every runaway was called free": scores["free range ≥ 10 → ran away"].recall == 1.0,
        "free and driven up predicts runaways with precision ≥ 0.9": runaways.precision >= 0.9,
    }
    print()
    for claim, holds in claims.items():
        print(f"{'met   ' if holds else 'MISSED'} {claim}")
    written = {
        "schema_version": 1,
        "rows": len(rows),
        "rank_correlation": pushed,
        "rank_correlation_reach": reach,
        "rank_correlation_reached": reached,
        "rank_correlation_monitor": monitor,
        "scores": {
            name: {"precision": s.precision, "recall": s.recall, "false_alarms": s.false_alarms, "missed": s.missed}
            for name, s in scores.items()
        },
        "claims": claims,
    }
    (out / "report.json").write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if all(claims.values()) else 1


def _times(value: float) -> str:
    return "∞" if value >= 1e6 else f"{value:.3g}"


def main(
    phases: tyro.conf.Positional[tuple[Phase, ...]] = ("train", "push", "drift", "audit", "report"),
    out: Path = Path("runs/predict"),
) -> int:
    """Run some phases, each going on where it was stopped.

    Args:
        phases: What to do, in this order.
        out: Folder of the lines.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the paper's recipe makes denormals, which slow some processors down fourfold
    out.mkdir(parents=True, exist_ok=True)
    rows = read_rows()
    exit_code = 0
    for phase in phases:
        if phase == "train":
            courses = {each.course: each for row in rows for each in (row, row.twin)}
            run_phase(out, phase, [(key, partial(train_row, row, out)) for key, row in courses.items()])
        elif phase == "push":
            run_phase(out, phase, [(row.name, partial(push_row, row, out)) for row in rows])
        elif phase == "drift":
            run_phase(out, phase, [(row.name, partial(drift_row, row, out)) for row in rows])
        elif phase == "audit":
            run_phase(out, phase, [(row.name, partial(audit_row, row, out)) for row in rows])
        else:
            exit_code = report(out)
    return exit_code


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
