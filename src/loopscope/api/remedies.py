"""`loopscope.remedy`: take a model with a blind spot, apply a fix, and measure before and after on the same text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loopscope.api.audits import audit
from loopscope.api.evaluation import evaluate
from loopscope.api.training import Watching, target_config, train
from loopscope.auditing.interventions import clamped
from loopscope.config import PAPER_PENALTY, Config, DataConfig, ObjectiveConfig, TrainingConfig
from loopscope.errors import ConfigError, NotFiniteError, RunError
from loopscope.files import without_nan, write_json
from loopscope.options import AuditOptions, How, RemedyOptions, chosen
from loopscope.results.audit import AuditResult
from loopscope.results.evaluation import Split
from loopscope.results.record import as_json, write_record
from loopscope.show import sentences
from loopscope.targets import Opened, Say, open_target, with_tokenizer

Outcome = Literal["fixed", "controlled", "unfinished", "worse", "undecided"]
EVALUATED_ROWS = 64
"""Sequences that the exits are measured on."""
WORSE_PERPLEXITY = 0.01
"""Share of perplexity that a fix may cost: what the audit calls noticed."""
HELD_SCALE = 5.0
"""A state within fivefold of scale 1 has not run. The paper's penalty holds it at 3 to 4; alarms begin at tenfold."""
CAME_DOWN = 2.0
"""A norm that has changed by less than this factor has not moved for good: where the monitor's alarm begins, too."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model's audit and exits."""

    audit: AuditResult
    scores: Split

    @property
    def last_norm(self) -> float:
        """‖h_K‖ on the held-out text."""
        norm = self.scores.depths[-1].norm
        assert norm is not None
        return norm

    def to_json(self) -> dict[str, Any]:
        """The frontier and the verdict; the whole audit has a file of its own."""
        return {
            "verdict": self.audit.verdict,
            "scale": self.audit.variable("scale").verdict,
            **as_json(self.scores),
        }


@dataclass(frozen=True)
class Remedied:
    """Before and after a fix, and what came of it."""

    how: How
    before: MeasuredModel
    after: MeasuredModel
    out: Path
    """Where the fine-tuned model (or, of a clamp, the comparison) is."""
    outcome: Outcome
    """See `judge`."""
    reasons: tuple[str, ...]
    """Why, a sentence each."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left to do: the blind spot is fixed, or there was none and nothing got worse."""
        return self.outcome in ("fixed", "controlled")

    def to_json(self) -> dict[str, Any]:
        """remedy.json; numbers that are not finite become null."""
        measured = {"before": self.before.to_json(), "after": self.after.to_json()}
        said = {"outcome": self.outcome, "reasons": list(self.reasons)}
        return without_nan({"how": self.how, **said, **measured, "run": str(self.out)})


def judge(before: MeasuredModel, after: MeasuredModel) -> tuple[Outcome, tuple[str, ...]]:
    """What came of a fix, with its reasons: verdict, norm and perplexity have to agree.

    fixed        the audit found a blind spot before and none after; where scale was blind, ‖h_K‖ has halved or is at
                 most 5·√d; and CE at every supervised loop rose by at most ln 1.01, on the same held-out text
    controlled   the same, but no blind spot had been found before
    worse        ‖h_K‖ grew (twofold, where scale was not blind) and is above 5·√d, or perplexity is more than 1 % worse
    undecided    nothing is worse, and the audit after the fix could not decide
    unfinished   nothing is worse, but something is still blind, or ‖h_K‖ has come down by less than half

    A penalty makes the scale visible at its first step; only the norm tells whether training has acted on it.
    """
    norm, norm_is_worse = _judge_norm(before, after)
    worse = [*([norm] if norm and norm_is_worse else []), *_dearer_exits(before, after)]
    now = after.audit
    left = [norm] if norm and not norm_is_worse else []
    if now.verdict == "blind-spot":
        names = ", ".join(variable.name for variable in now.variables if variable.verdict == "blind")
        left.insert(0, f"still blind: {names}; it needs more --steps, or another fix (--how)")
    doubts = [f"the audit after the fix is undecided: {sentences.summary(now)}"] if now.verdict == "undecided" else []
    if worse or doubts or left:
        outcome: Outcome = "worse" if worse else "undecided" if doubts else "unfinished"
        return outcome, (*worse, *doubts, *left)
    held = f"the audit finds no blind spot now, {_norms(before, after)}, and no exit is more than 1 % worse"
    if before.audit.verdict == "blind-spot":
        return "fixed", (held,)
    why = "there was none before" if before.audit.verdict == "controlled" else "the audit before the fix was undecided"
    return "controlled", (f"no blind spot has been fixed, since {why}; {held}",)


def _judge_norm(before: MeasuredModel, after: MeasuredModel) -> tuple[str | None, bool]:
    """What is wrong with ‖h_K‖ after a fix, if anything, and whether it got worse."""
    was, now = before.last_norm, after.last_norm
    held = HELD_SCALE * math.sqrt(after.audit.model.width)
    if now <= held:
        return None, False
    if before.audit.variable("scale").verdict != "blind":
        return (f"the state has grown: {_norms(before, after)}", True) if now > CAME_DOWN * was else (None, False)
    if now > was:
        return f"the norm went up: {_norms(before, after)}; it needs more --steps, or another fix (--how)", True
    if now > was / CAME_DOWN:
        return (
            f"{_norms(before, after)}, not down to half of it or to {held:.3g} (scale {HELD_SCALE:g}): more --steps",
            False,
        )
    return None, False


def _dearer_exits(before: MeasuredModel, after: MeasuredModel) -> list[str]:
    """A sentence about the supervised loop whose perplexity suffered most, if one is more than 1 % worse."""
    exits = [
        (new.ce - old.ce, old, new)
        for old, new in zip(before.scores.depths, after.scores.depths, strict=True)
        if old.k in before.audit.model.supervised and old.ce is not None and new.ce is not None
    ]
    dearer = [one for one in exits if one[0] > math.log1p(WORSE_PERPLEXITY)]
    if not dearer:
        return []
    rise, old, new = max(dearer, key=lambda one: one[0])
    if old.perplexity is None or new.perplexity is None:
        change = f"CE {old.ce:.4g} → {new.ce:.4g}"
    else:
        by = f"+{100 * math.expm1(rise):.1f} %" if rise < math.log(2) else f"{math.exp(rise):.3g}-fold"
        change = f"{by}, {old.perplexity:.4g} → {new.perplexity:.4g}"
    others = f"; {len(dearer)} of {len(exits)} supervised loops are more than 1 % worse" if len(exits) > 1 else ""
    return [f"perplexity at loop {old.k} got worse ({change}){others}"]


def _norms(before: MeasuredModel, after: MeasuredModel) -> str:
    scale = after.last_norm / math.sqrt(after.audit.model.width)
    return f"‖h_{after.scores.depths[-1].k}‖ {before.last_norm:.4g} → {after.last_norm:.4g} (scale {scale:.2g})"


def remedy(
    target: str | Path | Opened,
    fix: RemedyOptions | None = None,
    *,
    options: AuditOptions | None = None,
    say: Say = lambda text: None,
    progress: Callable[[str, float], None] = lambda *_: None,
    watching: Watching = lambda trainer: nullcontext(),
    **fields: Any,
) -> Remedied:
    """Fine-tune any target with a fix (or clamp it) into a folder of its own, and measure before and after.

    The target is not changed. `fields` are those of RemedyOptions; `options` say how much the two audits look at.
    """
    fix = chosen(RemedyOptions(), fix, fields)
    how, data = fix.how, fix.data
    opened = with_tokenizer(open_target(target), fix.tokenizer)
    place = Path(fix.out) if fix.out is not None else _default_out(opened, how)
    if opened.run is not None and place.resolve() == opened.run.path.resolve():
        raise RunError(f"{place} is the run itself; choose another --out")
    config = _config(opened, data)
    opened, fixed = replace(opened, config=config), None if how == "clamp" else remedied(config, how, fix.steps, fix.lr)
    if fixed is not None and opened.tokenizer is None:
        raise ConfigError(f"{opened.name} has no tokenizer to fine-tune it on text with; name one with --tokenizer")

    def measured(what: Opened, if_not_finite: str) -> MeasuredModel:
        scores = evaluate(what, batch=1, max_tokens=EVALUATED_ROWS * what.sequence_length, say=say).scores
        for score in scores.depths:  # an audit of such a model would look for the fault in its derivatives
            if not all(number is not None and math.isfinite(number) for number in (score.ce, score.norm)):
                seen = f"cross-entropy {score.ce} and norm {score.norm} at loop {score.k}"
                raise NotFiniteError(f"{what.name} has {seen}, so there is nothing to compare: {if_not_finite}")
        return MeasuredModel(audit(what, options=options, progress=progress, say=say), scores)

    say(f"auditing {opened.name}")
    before = measured(opened, "no fix mends that")
    if before.audit.verdict != "blind-spot":
        say(
            f"{opened.name} is {before.audit.verdict}: there is no blind spot to fix. {sentences.summary(before.audit)}"
        )
    if fixed is None:
        after_opened = replace(opened, model=clamped(opened.model), name=f"{opened.name}, clamped")
    else:
        result = train(fixed, place, init_from=opened, say=say, watching=watching)
        if result.outcome == "interrupted":
            say(f"fine-tuning was interrupted at step {result.step}; the same command goes on from there")
            raise KeyboardInterrupt  # as of any verb: exit code 130
        if result.outcome == "stopped":
            raise RunError(
                f"fine-tuning was stopped at step {result.step} ({result.event}); try a smaller --lr than "
                f"{fixed.training.lr:g}, into another --out"
            )
        after_opened = open_target(place)
    say("auditing the model with the fix")
    smaller = "" if fixed is None else f"; try a smaller --lr than {fixed.training.lr:g}, into another --out"
    after = measured(after_opened, f"the fix broke it{smaller}")
    outcome, reasons = judge(before, after)
    result_ = Remedied(how, before, after, place, outcome, reasons)
    place.mkdir(parents=True, exist_ok=True)
    write_record(place / "audit.json", after.audit)
    write_json(place / "remedy.json", {"schema_version": 1, **result_.to_json()})
    return result_


def _default_out(opened: Opened, how: How) -> Path:
    if opened.run is not None:
        return opened.run.path.with_name(f"{opened.run.path.name}-{how}")
    plain = opened.name.replace("/", "-").replace(":", "-").strip("-.")
    return Path("runs") / f"{plain}-{how}"


def _config(opened: Opened, data: Sequence[str] | None) -> Config:
    """The configuration that a target was trained with, or a usual one around somebody else's model."""
    if opened.config is not None:
        config = opened.config
        if data is None:
            return config
        return replace(config, data=replace(config.data, data=tuple(data), valid=None, curriculum=None))
    return Config(
        model=target_config(opened),
        objective=opened.objective or ObjectiveConfig(),
        data=DataConfig(data=tuple(data or ("builtin",)), sequence_length=opened.sequence_length),
        training=TrainingConfig(lr=FINE_TUNING_LR, batch=FINE_TUNING_BATCH),
    )


FINE_TUNING_LR, FINE_TUNING_BATCH = 1e-4, 8
"""For a model whose own recipe nobody says."""


def remedied(config: Config, how: How, steps: int, lr: float | None) -> Config:
    """The configuration with the fix, so many steps, perhaps another learning rate, and nothing else changed."""
    training = replace(config.training, steps=steps, lr=lr or config.training.lr)
    training = replace(training, warmup=min(training.warmup, steps))
    config = replace(config, data=replace(config.data, curriculum=None))  # the model has been through that
    if how == "penalty":
        objective = replace(config.objective, norm_penalty=PAPER_PENALTY)
        return replace(config, objective=objective, training=training)
    design = config.design(f"--how {how} changes the design, which")
    if how == "inter-loop-norm":
        return replace(config, model=replace(design, inter_loop_norm="rmsnorm"), training=training)
    if how in ("raw", "final-only"):
        return replace(config, model=replace(design, readout=how), training=training)
    raise ConfigError.of("how", how, "is not a fix that is trained")
