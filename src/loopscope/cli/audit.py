"""`loopscope audit`: which parts of the state the loop carries and no loss sees."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from tyro.conf import Positional

from loopscope.cli.terminal import print_tables, print_text, progress, say, sparkline
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.auditing.result import AuditResult
    from loopscope.auditing.run import Supervised
    from loopscope.training.targets import Target

VALIDATION_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Flags of `loopscope audit`."""

    target: Positional[str]
    """Run folder, checkpoint, Hugging Face folder, preset:NAME, configuration file, or package.module:factory."""
    supervised: str | None = None
    """Loops that get cross-entropy: every-loop, terminal, or 1,3; by default what the target says."""
    norm_penalty: float | None = None
    """Weight of a norm penalty that is part of the loss; by default what the target says."""
    data: tuple[str, ...] | None = None
    """Text to audit on instead of the run's validation split."""
    states: int = 8
    """Token states that are searched for blind directions."""
    prefix: int = 16
    """Tokens up to such a state."""
    tokens: int = 512
    """Tokens that norms, shares, sweeps and interventions are measured on."""
    loops: int = 30
    """Loops that the activity is followed through."""
    method: Literal["auto", "dense", "matrix-free"] = "auto"
    """How reachability is decided: whole Jacobians of a loop, or products with them."""
    seed: int = 0
    """Which states are drawn; for an untrained model, also its weights."""
    out: Path | None = None
    """Where to write audit.json; by default into the run folder, and nowhere for other targets."""
    json: bool = False
    """Print audit.json instead of tables."""

    help: ClassVar[str] = """Find the state variables that a loop carries and no loss sees. Exit code 1 on a blind spot.

Works on trained and on untrained models; put `loopscope audit my-config.yaml` into your CI.

examples:
  loopscope audit preset:nano                      a design, before anybody trains it
  loopscope audit runs/nano-per-loop-rmsnorm-s42   a run, on its validation text, under its own objective
  loopscope audit downloads/Ouro-1.4B              somebody's checkpoint: config.json and safetensors
  loopscope audit my_package.my_model:build --supervised terminal
  loopscope audit runs/mine --json > audit.json"""

    def __post_init__(self) -> None:
        for name in ("states", "tokens", "loops"):
            if getattr(self, name) < 1:
                raise ConfigError.of(name, getattr(self, name), "must be at least 1")
        if self.prefix < 2:
            raise ConfigError.of("prefix", self.prefix, "must be at least 2")
        parse_supervised(self.supervised)

    def run(self) -> int:
        """Audit, write audit.json, print."""
        from loopscope.training.targets import open_target

        target = open_target(self.target, data=self.data, seed=self.seed, num_rows=VALIDATION_ROWS, say=say)
        result = self.audit(target)
        out = self.out or (target.folder / "audit.json" if target.folder is not None else None)
        if out is not None:
            write_audit(result, out)
        if self.json:
            print_text(_dumped(result))
        else:
            print_audit(result, target.stage)
        return EXIT_FINDINGS if result.verdict == "blind-spot" else EXIT_OK

    def audit(self, target: Target) -> AuditResult:
        """The audit of one target under these flags."""
        from loopscope.auditing.objective import norm_penalty_observable
        from loopscope.auditing.run import AuditOptions, audit

        observables = list(target.observables)
        if self.norm_penalty is not None:
            observables = [one for one in observables if one.name != "norm_penalty"]
            observables += [norm_penalty_observable(self.norm_penalty)] if self.norm_penalty else []
        options = AuditOptions(
            states=self.states,
            prefix=self.prefix,
            tokens=self.tokens,
            rollout=self.loops,
            method=self.method,
            seed=self.seed,
        )
        with progress(total=3 + self.states, every=4) as advance:
            result = audit(
                target.model,
                target.batches,
                supervised=parse_supervised(self.supervised) or target.supervised,
                observables=observables,
                options=options,
                name=target.name,
                step=target.step,
                progress=lambda what, _: advance(what),
            )
        return with_notes(with_texts(result, target), target)


def parse_supervised(text: str | None) -> Supervised:
    """every-loop, terminal, or 1,3."""
    if text in (None, "every-loop", "terminal"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.of("supervised", text, "allowed: every-loop, terminal, or loops like 1,3") from None


def with_texts(result: AuditResult, target: Target) -> AuditResult:
    """The heaviest tokens as text, where the target has a tokenizer."""
    if target.text_of is None:
        return result
    named = [{**token, "text": target.text_of(token["token"])} for token in result.heaviest_tokens]
    return replace(result, heaviest_tokens=named)


def with_notes(result: AuditResult, target: Target) -> AuditResult:
    """What the target says of itself, before what the audit noticed."""
    return replace(result, checks={**result.checks, "notes": [*target.notes, *result.checks["notes"]]})


def write_audit(result: AuditResult, path: Path) -> None:
    """audit.json, whole or not at all."""
    from loopscope.runs import write_atomically

    write_atomically(path, _dumped(result) + "\n")


def _dumped(result: AuditResult) -> str:
    return json.dumps(result.to_json(), indent=2, ensure_ascii=False, allow_nan=False)


def print_audit(result: AuditResult, stage: str = "untrained") -> None:
    """The verdict, the variables, the loops, and small plots."""
    subject = result.model
    step = stage if subject.step is None else f"step {subject.step}"
    loops = ",".join(map(str, subject.supervised))
    seen = "".join(f" + {name}" for name in subject.observables)
    print_text(f"{subject.name}, {step}: {subject.num_loops} loops, width {subject.width}; CE at loops {loops}{seen}")
    print_text(f"verdict: {result.verdict.upper()}. {result.summary}\n")
    print_tables(_variables(result), _loops(result))
    print_text(_plots(result))
    for variable in result.variables:
        if variable.remedy is not None:
            flag = f" ({variable.flag})" if variable.flag else ""
            print_text(f"remedy for {variable.name}: {variable.remedy}{flag}")
    for note in result.checks["notes"]:
        print_text(f"note: {note}")


def _variables(result: AuditResult) -> Table:
    from rich.table import Table

    table = Table(title="variables of the state", title_justify="left")
    for name in ("variable", "verdict", "evidence"):
        table.add_column(name, overflow="fold")
    for variable in result.variables:
        table.add_row(variable.name, variable.verdict, variable.evidence)
    return table


def _loops(result: AuditResult) -> Table:
    from rich.table import Table

    table = Table(title="loops", title_justify="left")
    for name in ("loop", "CE", "‖h‖", "scale s", "radial gradient share", "next s − s", "predicted ã/d", "angular × s"):
        table.add_column(name, justify="right")
    for loop in result.loops[: result.model.num_loops]:
        at = loop.activity
        numbers = (loop.ce, at.norm, at.scale, loop.radial_gradient_share, at.radial_increment, at.predicted_increment)
        cells = [_cell(value) for value in (*numbers, at.angular_step_times_scale)]
        table.add_row(f"{at.k}{'*' if loop.supervised else ''}", *cells)
    table.caption = "* supervised"
    return table


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _plots(result: AuditResult) -> str:
    norms = [loop.activity.norm for loop in result.loops]
    lines = [f"‖h_k‖ over {len(norms)} loops  {sparkline(norms)}  {norms[0]:.3g} → {norms[-1]:.3g} ({result.motion})"]
    alphas = result.alpha_sweep["alphas"]
    for sweep in result.alpha_sweep["loops"]:
        span = f"{min(sweep['ce']):.3g} … {max(sweep['ce']):.3g}"
        lines.append(
            f"CE at loop {sweep['k']}, α·h    {sparkline(sweep['ce'])}  {span} for α {alphas[0]:g} … {alphas[-1]:g}"
        )
    for change in result.interventions:
        lines.append(f"{change['name']:32} ΔCE {change['delta_ce']:+.4f}")
    if result.blind_directions.gap is not None:
        lines.append(f"spectrum of what is shown: gap {result.blind_directions.gap:.1g} above the hidden directions")
    return "\n".join(lines)
