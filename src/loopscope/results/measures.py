"""A run as its files tell it, and every measure that is taken from them: claims, tables, figures and pages share both.

Nothing here raises for what a file says: one that is not right is left out, with a sentence in `Run.problems`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from loopscope.config import Config, read_config
from loopscope.files import Problems, words
from loopscope.results.audit import AuditedLoop, AuditResult
from loopscope.results.evaluation import Depth, Evaluation, Split
from loopscope.results.halting import CalibratedHalting, Calibration
from loopscope.results.record import read_record
from loopscope.results.run import (
    MANIFEST_FILE,
    METRICS_FILE,
    ROW_FILE,
    LoggedEvaluation,
    LoggedEvent,
    LoggedStep,
    Manifest,
    RowRecord,
    read_metrics,
)
from loopscope.results.thresholds import HIDDEN_SHARE, NOTICED

GUARDED = ("skip", "rolled-back")
"""Events by which a guard changes a run."""

State = Literal["finished", "unfinished", "stopped", "failed", "empty"]


# --- the run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder as far as it could be read."""

    name: str
    folder: str
    """The path as the user gave it."""
    config: Config | None
    manifest: Manifest
    train: list[LoggedStep]
    evals: list[LoggedEvaluation]
    events: list[LoggedEvent]
    evaluation: Evaluation | None
    audit: AuditResult | None
    untrained: AuditResult | None
    """The audit of the same design with the weights its training began with: rows of a grid have one."""
    halting: CalibratedHalting | None
    """Of a row of a grid whose exits are trained."""
    row: RowRecord | None
    """Where it is a row of a grid."""
    problems: Problems
    calibrated: Calibration | None = None
    """What `loopscope calibrate` left there."""

    def setting(self, section: str, name: str) -> Any:
        """A value of the configuration; None where it cannot be read, or has none (a model of its own code)."""
        return getattr(getattr(self.config, section, None), name, None)

    @property
    def condition(self) -> str:
        """The condition of a row of a grid; empty for other runs."""
        return self.row.condition if self.row else ""

    @property
    def recipe(self) -> str:
        """The recipe of a row of a grid; empty for other runs."""
        return self.row.recipe if self.row else ""

    @property
    def seed(self) -> int | None:
        """Seed of weights and data order."""
        if self.row and self.row.seed is not None:
            return self.row.seed
        return None if self.config is None else self.config.training.seed

    @property
    def num_loops(self) -> int:
        """The depth it was trained at; 0 where no file says so."""
        told = [None if self.config is None else self.config.model.num_loops]
        told += [
            self.audit.model.num_loops if self.audit else None,
            self.evaluation.num_loops if self.evaluation else None,
        ]
        return next((loops for loops in told if loops), len(self.depths))

    @property
    def width(self) -> int:
        """Width d of the state; 0 where no file says so."""
        return self.setting("model", "width") or (self.audit.model.width if self.audit else 0)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((row.step for rows in (self.train, self.evals) for row in rows), default=0)

    @property
    def steps(self) -> int | None:
        """Steps it was to make."""
        return None if self.config is None else self.config.training.steps

    @property
    def state(self) -> State:
        """How it ended, as far as its files say."""
        if self.row and self.row.state in ("finished", "failed"):
            return self.row.state
        if self.events and self._stopped_by(self.events[-1]):
            return "stopped"
        if self.steps is not None and self.step >= self.steps:
            return "finished"
        return "unfinished" if self.step else "empty"

    @property
    def state_in_words(self) -> str:
        """The same as a sentence of few words."""
        at = f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
        if self.state == "failed":
            return f"failed at {at}" + (f": {words(self.row.error)}" if self.row and self.row.error else "")
        if self.state == "stopped":
            return f"stopped at {at}: {self.events[-1].message}"
        if self.state == "unfinished":
            return f"at {at}, still going or interrupted"
        return f"finished at {at}" if self.state == "finished" else "nothing was logged yet"

    def _stopped_by(self, event: LoggedEvent) -> bool:
        alarm = event.event == "blind-spot" and self.setting("training", "on_blind_spot") == "stop"
        return event.event == "stop" or alarm

    @property
    def guarded(self) -> int:
        """Steps that a guard skipped or rolled back: it was not trained quite like the others."""
        return sum(event.event in GUARDED for event in self.events)

    @property
    def splits(self) -> dict[str, Split]:
        """Scores of eval.json by split, validation text first."""
        return self.evaluation.splits if self.evaluation else {}

    @cached_property
    def depths(self) -> list[Depth]:
        """Scores after each loop: of the first split of eval.json, or of the last evaluation while training."""
        if self.splits:
            return next(iter(self.splits.values())).depths
        if not self.evals:
            return []
        ce, norm = self.evals[-1].ce, self.evals[-1].norm
        return [Depth(k, c, norm[k - 1] if k <= len(norm) else None) for k, c in enumerate(ce, start=1)]

    @property
    def depths_from(self) -> str:
        """Where those scores come from."""
        if self.splits:
            return ", ".join(part for part in ("eval.json", next(iter(self.splits))) if part)
        return f"validation at step {self.evals[-1].step}" if self.evals else ""

    def depth(self, k: int, split: str | None = None) -> Depth | None:
        """The scores after loop k on a split; without one, on the text that there are scores of."""
        if split is None:
            return next((depth for depth in self.depths if depth.k == k), None)
        return self.splits[split].at(k) if split in self.splits else None

    @property
    def tokenizer(self) -> str:
        """Kind and vocabulary of the tokenizer; perplexities compare only under the same."""
        kinds = (
            self.evaluation.tokenizer if self.evaluation else "",
            self.manifest.data.tokenizer if self.manifest.data else "",
            self.config.data.tokenizer if self.config else "",
        )
        kind = next((name for name in kinds if name), "")
        size = None if self.config is None else self.config.model.vocab_size
        return f"{kind}, {size:,} tokens" if kind and size else kind

    @property
    def tokenizer_sha256(self) -> str:
        """Hash of the tokenizer; empty where the manifest does not say."""
        return self.manifest.data.tokenizer_sha256 if self.manifest.data else ""

    @property
    def verdict(self) -> str:
        """The audit's: blind-spot, controlled, undecided, or empty where there is no audit."""
        return self.audit.verdict if self.audit else ""

    @property
    def loops(self) -> list[AuditedLoop]:
        """The audit's loops, in their order."""
        return self.audit.loops if self.audit else []


def read_run(folder: Path, name: str) -> Run:
    """Everything that can be read of a run folder; what cannot is a sentence in `problems`."""
    problems: Problems = {}
    rows = read_metrics(folder / METRICS_FILE, problems)
    return Run(
        name=name,
        folder=str(folder),
        config=read_config(folder / "config.yaml", problems),
        manifest=read_record(folder / MANIFEST_FILE, Manifest, problems) or Manifest(),
        train=[row for row in rows if isinstance(row, LoggedStep)],
        evals=[row for row in rows if isinstance(row, LoggedEvaluation)],
        events=[row for row in rows if isinstance(row, LoggedEvent)],
        evaluation=read_record(folder / "eval.json", Evaluation, problems),
        audit=read_record(folder / "audit.json", AuditResult, problems),
        untrained=read_record(folder / "audit-untrained.json", AuditResult, problems),
        halting=read_record(folder / "halting.json", CalibratedHalting, problems),
        row=read_record(folder / ROW_FILE, RowRecord, problems),
        problems=problems,
        calibrated=read_record(folder / "calibration.json", Calibration, problems),
    )


# --- measures --------------------------------------------------------------------------------------------------------

Measure = Callable[[Run, str], float | None]
"""A number about a run on a split, or None where it was not measured."""


def final_norm(run: Run, split: str | None = None) -> float | None:
    """Mean ‖h_K‖ on a split; without one, on the text there is, or the last that training logged."""
    full = run.depth(run.num_loops, split)
    if full is not None and full.norm is not None:
        return full.norm
    logged = (row.final_norm for row in reversed(run.train)) if split is None else iter(())
    return next((norm for norm in logged if norm is not None), None)


def perplexity_at(run: Run, k: int, split: str) -> float | None:
    """Perplexity after loop k."""
    depth = run.depth(k, split)
    return depth.perplexity if depth else None


def final_perplexity(run: Run, split: str) -> float | None:
    """Perplexity at full depth."""
    return perplexity_at(run, run.num_loops, split)


def unigram_gain(run: Run, split: str) -> float | None:
    """Nats by which CE at full depth is below that of a unigram model of the training text."""
    full = run.depth(run.num_loops, split)
    unigram = run.evaluation.unigram_ce.get(split) if run.evaluation else None
    return difference(unigram, full.ce) if full else None


def exit_failure(run: Run, split: str | None = None) -> float | None:
    """CE(1) − CE(K): how much worse the first exit is than full depth."""
    first, full = run.depth(1, split), run.depth(run.num_loops, split)
    return difference(first.ce, full.ce) if first and full else None


def difference(left: float | None, right: float | None) -> float | None:
    """left − right, where both were measured."""
    return None if left is None or right is None else left - right


def norms_in_training(run: Run) -> dict[int, float]:
    """‖h_K‖ on validation text by step."""
    return {row.step: norm for row in run.evals if (norm := row.final_norm) is not None}


def is_raw_at(run: Run, k: int) -> bool:
    """Whether loop k is read out without a norm."""
    readout = run.setting("model", "readout")
    return readout == "raw" or (readout == "final-only" and k < run.num_loops)


def shares_by_loop(run: Run) -> dict[int, float]:
    """Radial gradient share per loop: the audit's, or the last that training logged."""
    audited = {loop.k: loop.radial_gradient_share for loop in run.loops}
    found = {k: share for k, share in audited.items() if share is not None}
    if found or not run.train:
        return found
    last = run.train[-1]
    pairs = zip(last.loops, last.radial_gradient_share, strict=False)
    return {k: share for k, share in pairs if share is not None}


def hides_scale(run: Run) -> bool:
    """Whether at the last logged step the scale was free to run tenfold, and the loop does not remove it."""
    if not run.train:
        return False
    if run.setting("model", "inter_loop_norm") not in (None, "none"):
        return False
    last = run.train[-1]
    if last.tenfold_charge is not None:
        return last.tenfold_charge < NOTICED
    share = last.largest_share  # of runs from before the charge was logged: any term counted as holding the scale
    return share is not None and share < HIDDEN_SHARE and not last.terms


def radial_clamps(run: Run) -> dict[str, float]:
    """ΔCE of the audit's interventions that hold the scale still, by name; it has others too."""
    found = run.audit.interventions if run.audit else []
    return {each.name: each.delta_ce for each in found if each.clamps == "scale" and each.delta_ce is not None}


def alpha_curve(run: Run) -> dict[float, float]:
    """CE by α when the state at the trained depth (else the deepest that was swept) is stretched by α."""
    if run.audit is None or not run.audit.alpha_sweep.loops:
        return {}
    sweep = run.audit.alpha_sweep
    ces = {loop.k: loop.ce for loop in sweep.loops}
    pairs = zip(sweep.alphas, ces.get(run.num_loops) or ces[max(ces)], strict=False)
    return {alpha: ce for alpha, ce in pairs if ce is not None}


def alpha_changes(run: Run) -> dict[float, float]:
    """The same as change of CE against the α nearest to 1."""
    curve = alpha_curve(run)
    base = curve[min(curve, key=lambda alpha: abs(math.log(alpha)))] if curve else 0.0
    return {alpha: ce - base for alpha, ce in curve.items()}


def alpha_range(run: Run, split: str | None = None) -> float | None:
    """Largest minus smallest CE over α ∈ [0.1, 10] at full depth; None where one of them was not measured."""
    ces = list(alpha_curve(run).values())
    return max(ces) - min(ces) if run.audit and ces and len(ces) == len(run.audit.alpha_sweep.alphas) else None
