"""`loopscope remedy`: take a checkpoint with a blind spot, apply a fix, and show before and after side by side."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tyro.conf import Positional

from loopscope.cli.audit import Audit, print_audit, write_audit
from loopscope.cli.terminal import SCHEMA_VERSION, print_json, print_tables, print_text, say
from loopscope.cli.train import Train
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, RunError

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.auditing.result import AuditResult
    from loopscope.config import Config
    from loopscope.protocol import LoopedModel
    from loopscope.training.evaluate import DepthScore
    from loopscope.training.targets import Target

How = Literal["penalty", "raw", "final-only", "inter-loop-norm", "clamp"]
PENALTY = 0.01
EVALUATED = 64
"""Sequences that the exits are measured on."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Flags of `loopscope remedy`."""

    target: Positional[Path]
    """Run folder or checkpoint to start from; it is not changed."""
    how: How = "penalty"
    """The fix; clamp needs no training: it freezes every token's norm at loop 1 when the model runs."""
    steps: int = 300
    """Fine-tuning steps."""
    lr: float | None = None
    """Learning rate; by default the run's own."""
    out: Path | None = None
    """Run folder of the fixed model; by default the run's, followed by the fix."""
    json: bool = False
    """Print the comparison as JSON."""

    help: ClassVar[str] = """Fix a blind spot: fine-tune with the remedy (or clamp), and compare before and after.

examples:
  loopscope remedy runs/nano-per-loop-rmsnorm-s42 --steps 300
  loopscope remedy runs/mine --how final-only --steps 500 --out runs/fixed
  loopscope remedy runs/mine --how clamp"""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError.of("steps", self.steps, "must be at least 1")

    def run(self) -> int:
        """Audit and measure, fix, audit and measure again; exit code 1 when a blind spot is left."""
        from loopscope.training.session import run_of
        from loopscope.training.targets import of_run

        source = run_of(self.target).path
        out = self.out or source.with_name(f"{source.name}-{self.how}")
        if out.resolve() == source.resolve():
            raise RunError(f"{out} is the run itself; choose another --out")
        before = of_run(self.target, data=None, num_rows=EVALUATED, say=say)
        say(f"auditing {self.target}")
        was = _measured(before)
        after = self._fixed(before, source, out)
        say("auditing the fixed model")
        now = _measured(after)
        out.mkdir(parents=True, exist_ok=True)
        write_audit(now.audit, out / "audit.json")
        self._report(was, now, out)
        return EXIT_FINDINGS if now.audit.verdict == "blind-spot" else EXIT_OK

    def _fixed(self, before: Target, source: Path, out: Path) -> Target:
        """The model after the fix, under the objective it was fixed with."""
        from loopscope.auditing.clamp import ClampedModel
        from loopscope.runs import RunFolder
        from loopscope.training.targets import of_run

        if self.how == "clamp":
            return replace(before, model=ClampedModel(before.model), name=f"{before.name}, clamped")
        config = remedied(RunFolder(source).config(), self.how, self.steps, self.lr)
        train = Train(
            model=config.model,
            objective=config.objective,
            data=config.data,
            training=config.training,
            out=out,
            init_from=self.target,
        )
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exit_code = train.run()
        if exit_code != EXIT_OK:
            raise RunError(f"fine-tuning did not finish: {said.getvalue().strip()}; the same command goes on")
        return of_run(out, data=None, num_rows=EVALUATED, say=say)

    def _report(self, was: Measured, now: Measured, out: Path) -> None:
        comparison = {"how": self.how, "before": was.to_json(), "after": now.to_json(), "run": str(out)}
        text = json.dumps({"schema_version": SCHEMA_VERSION, **comparison}, indent=2, ensure_ascii=False)
        from loopscope.runs import write_atomically

        write_atomically(out / "remedy.json", text + "\n")
        if self.json:
            print_json(**comparison)
            return
        print_tables(_comparison(was, now, self.how))
        print_text(f"before: {was.audit.summary}\nafter:  {now.audit.summary}")
        if now.audit.verdict == "blind-spot":
            print_audit(now.audit)
        print_text(f"fixed model: {out}" if self.how != "clamp" else f"comparison: {out}/remedy.json")


@dataclass(frozen=True)
class Measured:
    """A model's audit and exits."""

    audit: AuditResult
    depths: list[DepthScore]

    def to_json(self) -> dict[str, Any]:
        """The frontier and the verdict; the whole audit has a file of its own."""
        scale = self.audit.variable("scale")
        return {
            "verdict": self.audit.verdict,
            "scale": scale.verdict,
            "depths": [
                {"k": one.k, "ce": one.ce, "perplexity": one.perplexity, "norm": one.norm} for one in self.depths
            ],
        }


def remedied(config: Config, how: How, steps: int, lr: float | None) -> Config:
    """The run's configuration with the fix, constant learning rate, and nothing else changed."""
    model, objective = config.model, config.objective
    if how == "penalty":
        objective = replace(objective, norm_penalty=PENALTY)
    elif how == "inter-loop-norm":
        model = replace(model, inter_loop_norm="rmsnorm")
    elif how in ("raw", "final-only"):
        model = replace(model, readout=how)
    training = replace(config.training, steps=steps, lr=lr or config.training.lr)
    return replace(config, model=model, objective=objective, training=training)


def _measured(target: Target) -> Measured:
    return Measured(Audit(target=target.name).audit(target), _scores(target.model, target))


def _scores(model: LoopedModel, target: Target) -> list[DepthScore]:
    import torch

    from loopscope.training.evaluate import evaluate_depths, score_batch

    batches = islice(iter(target.batches), EVALUATED)
    with torch.no_grad():
        return evaluate_depths(lambda *batch: score_batch(model, *batch), batches, model.num_loops)  # type: ignore[arg-type]


def _comparison(was: Measured, now: Measured, how: str) -> Table:
    from rich.table import Table

    table = Table(title=f"before and after: {how}", title_justify="left")
    for name in ("", "before", "after"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("verdict", was.audit.verdict, now.audit.verdict)
    for variable in ("scale", "mean"):
        table.add_row(variable, was.audit.variable(variable).verdict, now.audit.variable(variable).verdict)
    for old, new in zip(was.depths, now.depths, strict=True):
        table.add_row(f"perplexity at loop {old.k}", f"{old.perplexity:.2f}", f"{new.perplexity:.2f}")
    for old, new in zip(was.depths, now.depths, strict=True):
        table.add_row(f"‖h_{old.k}‖", f"{old.norm:.4g}", f"{new.norm:.4g}")
    return table
