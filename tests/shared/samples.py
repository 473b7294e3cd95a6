"""Sample runs, written by the code that writes real ones: a schema that drifts fails the tests that read them.

What no class stands for yet (lines of metrics, the manifest, parts of the audit) is written out here, and compared with
a real run in `test_quickstart`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from loopscope.auditing.interventions import INTERVENTIONS
from loopscope.config import Config
from loopscope.files import write_json
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
from loopscope.runs import RunFolder


def write_sample(
    folder: Path,
    config: Config,
    *,
    metrics: Iterable[Logged] = (),
    manifest: Manifest | None = None,
    evaluation: Evaluation | None = None,
    audit: AuditResult | None = None,
    untrained: AuditResult | None = None,
    halting: CalibratedHalting | None = None,
    record: RowRecord | None = None,
    change: Callable[..., None] | None = None,
) -> Path:
    """A run folder; `change(evaluation, audit)` may alter what was measured, as JSON."""
    run = RunFolder(folder)
    run.create(config)
    for row in metrics:
        run.append_metrics(row)
    if manifest is not None:
        write_record(folder / "manifest.json", manifest)
    evaluated = {} if evaluation is None else as_json(evaluation)
    audited = {} if audit is None else json.loads(json.dumps(audit.to_json()))
    if change is not None:
        change(evaluated, audited)
    fresh = {} if untrained is None else untrained.to_json()
    written = {"eval.json": evaluated, "audit.json": audited, "audit-untrained.json": fresh}
    for name, content in written.items():
        if content:
            write_json(folder / name, content)
    if halting is not None:
        write_record(folder / "halting.json", halting)
    if record is not None:
        write_record(folder / "row.json", record)
    return folder


def sample_evaluation(
    ces: Sequence[float],
    norms: Sequence[float],
    *,
    step: int,
    num_loops: int,
    nats_per_bit: float = 2.0,
    unigram_ce: float = 6.0,
) -> Evaluation:
    """The same scores on validation and test text."""
    pairs = enumerate(zip(ces, norms, strict=True), start=1)
    depths = [Depth(k, ce, norm, ce / nats_per_bit) for k, (ce, norm) in pairs]
    return Evaluation(
        step=step,
        tokenizer="bpe",
        num_loops=num_loops,
        splits={name: Split(depths=depths, tokens=1000, bytes=3000) for name in SPLITS},
        throughput=[Throughput(k, 50_000 / k) for k in range(1, num_loops + 1)],
        threads=1,
        device="cpu",
        unigram_ce=dict.fromkeys(SPLITS, unigram_ce),
    )


def sample_halting(loops: float, fixed: float, *, step: int, num_loops: int, spread: float = 0.05) -> CalibratedHalting:
    """A calibrated rule that runs so many loops a token, units being so far apart; and gates that save nothing."""
    gate = Gate(
        reads="h",
        loss=0.9,
        constant_loss=0.6,
        mean_loops=float(num_loops),
        fixed_depth=fixed,
        loops=tuple(GatedLoop(k=k, norm=100.0 * k, logit=3.0 * k, saturated=k / (2 * num_loops)) for k in (1, 2, 4, 8)),
    )
    return CalibratedHalting(
        step=step,
        num_loops=num_loops,
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
        exits=(ExitShare(1, 0.5), ExitShare(num_loops, 0.5)),
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
        num_loops=4,
        max_ppl_increase=0.01,
        confidence=0.95,
        units={"fit": 40, "calibration": 100, "test": 60},
        unit_tokens=512,
        units_needed=18,
        fixed=fixed,
        certificates=rules,
    )


def sample_loop(
    k: int,
    *,
    scale: float,
    width: int,
    ce: float,
    share: float | None,
    increment: float | None,
    predicted: float | None,
    turn: float | None,
    tangential: float | None = None,
    curvature: float | None = None,
    lemma_2: Lemma2 | None = None,
) -> AuditedLoop:
    """A loop of the audit's rollout; `turn` is angular step × scale, share is None beyond the trained depth."""
    return AuditedLoop(
        k=k,
        norm=scale * width**0.5,
        norm_quantiles=[scale * factor for factor in (5, 8, 11, 14, 20, 60)],
        scale=scale,
        mean=0.0,
        radial_increment=increment,
        predicted_increment=predicted,
        angular_step=None if turn is None else turn / scale,
        angular_step_times_scale=turn,
        radial_update=increment,
        tangential_update=tangential,
        lemma_2=lemma_2,
        supervised=share is not None,
        ce=ce,
        radial_gradient_share=share,
        radial_gradient_quantiles=None if share is None else [share] * 5,
        scale_curvature=curvature,
        scale_curvature_size=None if curvature is None else abs(curvature),
    )


def sample_variable(name: str, verdict: VariableVerdict, visibility: float = 0.8, **more: object) -> Variable:
    """A verdict on a field that is held, unless more is told."""
    return Variable(
        **{
            "name": name,
            "verdict": verdict,
            "visibility": visibility,
            "delayed_visibility": visibility,
            "activity": 0.9,
            "kind": "field",
            "loop": 1,
            "free_range": 1.02,
            "free_tokens": 0.0,
        }
        | more
    )


def sample_audit(
    *,
    name: str,
    step: int | None,
    num_loops: int,
    width: int,
    scale: Variable,
    loops: list[AuditedLoop],
    alphas: list[float],
    ces: list[float],
    interventions: dict[str, tuple[float, float]],
) -> AuditResult:
    """An audit whose only finding can be the scale; interventions are CE and ΔCE by name."""
    is_blind = scale.verdict == "blind"
    return AuditResult(
        model=AuditedModel(
            name=name,
            num_loops=num_loops,
            width=width,
            vocab_size=2048,
            parameters=800_000,
            dtype="float32",
            audited_in="float64",
            step=step,
            supervised=list(range(1, num_loops + 1)),
            observables=["h"],
        ),
        verdict="blind-spot" if is_blind else "controlled",
        variables=[scale, sample_variable("mean", "visible")],
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
        loops=loops,
        motion="drift",
        alpha_sweep=AlphaSweep(alphas=alphas, loops=[SweptLoop(k=num_loops, ce=list(ces))]),
        interventions=[
            Intervention(name=name, clamps=INTERVENTIONS[name].clamps, ce=ce, delta_ce=delta)
            for name, (ce, delta) in interventions.items()
        ],
        heaviest_tokens=[HeavyToken(token=17, text="<b>the</b>", position=0, norm=900.0, ratio=1.6)],
        checks=AuditChecks(raw_readout_control=0.4, causal=True, doubts=[], notes=[]),
        cost=AuditCost(seconds=1.0),
    )


FOUND = LoopDirections(
    k=1, hidden=1, weak=0, removed=0, unreachable=0, damped=0, inert=0, shown_later=0, memory=0, blind=1
)
"""What the search found at one loop."""


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
