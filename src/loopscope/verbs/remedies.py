"""`loopscope.remedy`: take a model with a blind spot, apply a fix, and measure before and after on the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from loopscope.auditing.audit import AuditOptions
from loopscope.auditing.clamp import clamped
from loopscope.auditing.result import AuditResult
from loopscope.config import PAPER_PENALTY, Config, DataConfig, ObjectiveConfig, TrainingConfig
from loopscope.errors import ConfigError, RunError
from loopscope.runs import write_json
from loopscope.scores import Split
from loopscope.targets import Opened, open_target
from loopscope.verbs.audits import audit
from loopscope.verbs.evaluation import evaluate
from loopscope.verbs.text import Say, with_tokenizer
from loopscope.verbs.training import Watching, target_config, train

How = Literal["penalty", "raw", "final-only", "inter-loop-norm", "clamp"]
EVALUATED_ROWS = 64
"""Sequences that the exits are measured on."""


@dataclass(frozen=True)
class Measured:
    """A model's audit and exits."""

    audit: AuditResult
    scores: Split

    def to_json(self) -> dict[str, Any]:
        """The frontier and the verdict; the whole audit has a file of its own."""
        return {
            "verdict": self.audit.verdict,
            "scale": self.audit.variable("scale").verdict,
            **self.scores.to_json(),
        }


@dataclass(frozen=True)
class Remedied:
    """Before and after a fix."""

    how: How
    before: Measured
    after: Measured
    out: Path
    """Where the fixed model (or, of a clamp, the comparison) is."""

    def to_json(self) -> dict[str, Any]:
        """remedy.json."""
        return {"how": self.how, "before": self.before.to_json(), "after": self.after.to_json(), "run": str(self.out)}


def remedy(
    target: str | Path | Opened,
    *,
    how: How = "penalty",
    steps: int = 300,
    lr: float | None = None,
    data: Sequence[str] | None = None,
    tokenizer: str | None = None,
    out: Path | str | None = None,
    options: AuditOptions | None = None,
    say: Say = lambda text: None,
    progress: Callable[[str, float], None] = lambda *_: None,
    watching: Watching = lambda trainer: nullcontext(),
) -> Remedied:
    """Fine-tune any target with the fix (or clamp it) into the folder `out`, and measure before and after.

    The target is not changed. `data` is the text to train and measure on; by default the target's own.
    """
    opened = with_tokenizer(open_target(target), tokenizer)
    place = Path(out) if out is not None else _default_out(opened, how)
    if opened.run is not None and place.resolve() == opened.run.path.resolve():
        raise RunError(f"{place} is the run itself; choose another --out")
    config = _config(opened, data)
    opened, fixed = replace(opened, config=config), None if how == "clamp" else remedied(config, how, steps, lr)
    if fixed is not None and opened.tokenizer is None:
        raise ConfigError(f"{opened.name} has no tokenizer to fine-tune it on text with; name one with --tokenizer")

    def measured(what: Opened) -> Measured:
        found = audit(what, options=options, progress=progress, say=say)
        scores = evaluate(what, batch=1, max_tokens=EVALUATED_ROWS * what.sequence_length, say=say).scores
        return Measured(found, scores)

    say(f"auditing {opened.name}")
    before = measured(opened)
    if fixed is None:
        after_opened = replace(opened, model=clamped(opened.model), name=f"{opened.name}, clamped")
    else:
        result = train(fixed, place, init_from=opened, say=say, watching=watching)
        if result.outcome != "finished":
            raise RunError(f"fine-tuning was {result.outcome} at step {result.step}; run the same command to resume it")
        after_opened = open_target(place)
    say("auditing the fixed model")
    after = measured(after_opened)
    result_ = Remedied(how, before, after, place)
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / "audit.json", after.audit.to_json())
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
        return config if data is None else replace(config, data=replace(config.data, data=tuple(data), valid=None))
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
    if how == "penalty":
        objective = replace(config.objective, norm_penalty=PAPER_PENALTY)
        return replace(config, objective=objective, training=training)
    design = config.design(f"--how {how} changes the design, which")
    if how == "inter-loop-norm":
        return replace(config, model=replace(design, inter_loop_norm="rmsnorm"), training=training)
    if how in ("raw", "final-only"):
        return replace(config, model=replace(design, readout=how), training=training)
    raise ConfigError.of("how", how, "is not a fix that is trained")
