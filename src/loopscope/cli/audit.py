"""`loopscope audit`: which parts of the state the loop carries and no loss sees; `loopscope remedy`: the fix of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro
from tyro.conf import Positional

from loopscope.checks import check_at_least
from loopscope.cli.live import watching
from loopscope.cli.terminal import bar, print_json, print_tables, print_text, print_words, progress, say
from loopscope.cli.verb import Verb
from loopscope.config import ObjectiveConfig
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, LoopscopeError, NotFiniteError
from loopscope.files import write_atomically
from loopscope.options import AuditOptions, PushOptions, RemedyOptions, Tokenizer, written
from loopscope.results.audit import NotAudited, SeveralAudits
from loopscope.results.record import text_of, write_record
from loopscope.show import sentences
from loopscope.show.formats import AuditedTarget, exit_code, junit, lines, sarif
from loopscope.show.numbers import sparkline
from loopscope.show.table import Column, Table, columns
from loopscope.words import check_word

if TYPE_CHECKING:
    from loopscope.api.remedies import Remedied
    from loopscope.objectives.terms import Term
    from loopscope.results.audit import AuditResult, Motion, PushResult
    from loopscope.targets import Opened


def parse_supervised(text: str) -> str | list[int]:
    """every-loop, terminal, or 1,3."""
    if text in ("every-loop", "terminal"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.of("supervised", text, "allowed: every-loop, terminal, or loops like 1,3") from None


@dataclass(frozen=True, kw_only=True)
class Audit(
    AuditOptions,
    Verb,
    command="audit",
    example=("audit runs/NAME", "which state variables the loop carries and no loss sees"),
):
    """Flags of `loopscope audit`."""

    targets: Positional[tuple[str, ...]]
    """Run folders, checkpoints, Hugging Face folders, hf:ORG/NAME, preset:NAME, design:NAME, configuration
    files, or package.module:factory: one in full, of several a line for every finding."""
    supervised: Annotated[str | Sequence[int], written(parse_supervised)] | None = None
    """Loops that get cross-entropy: every-loop, terminal, or 1,3; by default what the target says."""
    norm_penalty: float | None = None
    """Weight of a norm penalty that is part of the loss; by default what the target says."""
    data: tuple[str, ...] | None = None
    """Text to audit on instead of the run's validation split."""
    tokenizer: Tokenizer = None
    push: bool = False
    """Test the verdicts on a copy of the weights: reward scale and every blind field for growing, for a few dozen
    training steps, and say how far they went and what the objective paid."""
    push_steps: int = 80
    """Steps with the reward, and as many without, after three quarters as many of warm-up."""
    format: Literal["table", "json", "sarif", "junit"] = "table"
    """What is printed: tables, audit.json, SARIF 2.1.0 for code scanning, or JUnit XML for test reports."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """Where to write audit.json; by default into the run folder, and nowhere for other targets. With --format sarif or
    junit: where to write that document, so that tables are printed."""
    json: bool = False
    """Short for --format json."""

    help: ClassVar[str] = """Find the state variables that a loop carries and no loss sees. Exit code 1 on a blind spot,
and where none can be ruled out.

Works on trained and on untrained models; put `loopscope audit my-config.yaml` into your CI (docs/pipeline.md).

examples:
  loopscope audit preset:nano                      a design, before anybody trains it
  loopscope audit design:huginn                    a published one, small
  loopscope audit runs/nano-per-loop-rmsnorm-s42   a run, on its validation text, under its own objective
  loopscope audit downloads/Ouro-1.4B              somebody's checkpoint: config.json and safetensors
  loopscope audit my_package.my_model:build --supervised terminal
  loopscope audit runs/mine --push                 does a blind variable run when it is rewarded?
  loopscope audit runs/mine --motion               do its tokens settle, circle or slide on?
  loopscope audit runs/mine --json > audit.json
  loopscope audit configs/*.yaml --format sarif -o loopscope.sarif"""

    def __post_init__(self) -> None:
        if not self.targets:
            raise ConfigError("name at least one target: loopscope audit preset:nano")
        if self.json and self.format not in ("table", "json"):
            raise ConfigError(f"--json and --format {self.format} ask for two formats; choose one")
        super().__post_init__()
        check_at_least(self, 1, "push_steps")
        if self.norm_penalty is not None:
            ObjectiveConfig(norm_penalty=self.norm_penalty)  # refuses what is no weight, before anything is opened

    def run(self) -> int:
        """Audit every target, write what is to be written, print."""
        audits, stages = [], []
        for target in self.targets:
            try:
                audited, stage = self._audit(target)
            except LoopscopeError as error:  # what can be said of the other targets is said
                said = str(error) if target in str(error) or len(self.targets) == 1 else f"{target}: {error}"
                say(f"error: {said}")
                is_finite = not isinstance(error, NotFiniteError)
                audited, stage = AuditedTarget(target, None, error=str(error), is_finite=is_finite), ""
            audits.append(audited)
            stages.append(stage)
        chosen = "json" if self.json else self.format
        document = {"sarif": _sarif, "junit": junit}.get(chosen, _json)(audits)
        if self.out is not None and document is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.out, document)
        result = audits[0].result
        if chosen != "table" and (self.out is None or chosen == "json"):
            if document is not None:
                print_text(document)
        elif len(audits) > 1:
            print_text("\n".join(lines(audits)))
        elif result is not None:
            print_audit(result, stages[0])
        return exit_code(audits)

    def _audit(self, target: str) -> tuple[AuditedTarget, str]:
        """The audit of one target, left beside its run unless --out takes audit.json elsewhere; with its stage."""
        check_word(target)
        check_sources(self.data or ())
        from loopscope.api.audits import audit
        from loopscope.targets import open_target

        opened = open_target(target, seed=self.seed)
        if self.push:
            from loopscope.auditing.drift import trainable

            trainable(opened.model, "--push")
        with progress(opened.name) as advance:
            result = audit(
                opened,
                supervised=self.supervised,
                terms=self._terms(opened),
                data=self.data,
                tokenizer=self.tokenizer,
                options=self,
                progress=advance,
                say=say,
            )
        out = self._own_file(opened)
        if out is not None:
            write_record(out, result)  # an interrupted push leaves the audit behind
        if self.push:
            result = self._pushed(opened, result)
            if out is not None:
                write_record(out, result)
        file = Path(target) if Path(target).is_file() else None if opened.run is None else opened.run.config_path
        return AuditedTarget(target, result, file), opened.stage

    def _own_file(self, opened: Opened) -> Path | None:
        """The run folder's audit.json, unless --out says where else it goes."""
        goes_elsewhere = self.out is not None and self.format in ("table", "json")
        if opened.run is None or not opened.is_newest or goes_elsewhere:
            return None
        return opened.run.path / "audit.json"

    def _pushed(self, opened: Opened, result: AuditResult) -> AuditResult:
        """The audit with a push of scale and of every field that it calls blind."""
        from loopscope.api.audits import push, with_push
        from loopscope.auditing.visibility import FIELDS

        blind = [each.name for each in result.variables if each.verdict == "blind"]
        variables = [name for name in FIELDS if name == "scale" or name in blind]
        options = PushOptions(steps=self.push_steps, warm_up=3 * self.push_steps // 4)
        with progress(f"{opened.name}: push") as advance:
            pushed = push(
                opened,
                variables=variables,
                supervised=self.supervised,
                terms=self._terms(opened),
                data=self.data,
                tokenizer=self.tokenizer,
                options=options,
                seed=self.seed,
                progress=advance,
                say=say,
            )
        return with_push(result, pushed)

    def _terms(self, opened: Opened) -> list[Term] | None:
        """The target's own terms, with the penalty of --norm-penalty instead of its own."""
        from loopscope.objectives.terms import terms_of

        if self.norm_penalty is None:
            return None
        return terms_of(replace(opened.objective or ObjectiveConfig(), norm_penalty=self.norm_penalty))


def _json(audits: Sequence[AuditedTarget]) -> str | None:
    """audit.json of one target, nothing where it has none; of several, a list of them and of what went wrong."""
    results = [one.result for one in audits if one.result is not None]
    if len(audits) == 1:
        return text_of(results[0]) if results else None
    mistakes = [NotAudited(target=one.target, message=one.error) for one in audits if one.result is None]
    return text_of(SeveralAudits(audits=results, errors=mistakes))


def _sarif(audits: Sequence[AuditedTarget]) -> str:
    return json.dumps(sarif(audits), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_audit(result: AuditResult, stage: str = "untrained") -> None:
    """The verdict, the variables, the loops, and small plots."""
    subject = result.model
    step = stage if subject.step is None else f"step {subject.step}"
    loops = ",".join(map(str, subject.supervised))
    seen = "".join(f" + {name}" for name in subject.observables)
    print_words(f"{subject.name}, {step}: {subject.num_loops} loops, width {subject.width}; CE at loops {loops}{seen}")
    print_words(f"verdict: {result.verdict.upper()}. {sentences.summary(result)}\n")
    print_tables(_variables(result), _loops(result))
    print_text(_plots(result))
    if result.token_motion is not None:
        print_text(_motion(result.token_motion))
        print_words(sentences.motion(result.token_motion))
    if result.push is not None:
        print_tables(_pushes(result.push))
    for variable in result.variables:
        if (remedy := sentences.remedy(variable)) is not None:
            flag = f" ({remedy.flag})" if remedy.flag else ""
            print_words(f"remedy for {variable.name}: {remedy.text}{flag}")
    notes = [*result.checks.notes, *(() if result.push is None else result.push.notes)]
    notes += () if result.token_motion is None else result.token_motion.notes
    for note in dict.fromkeys(notes):
        print_words(f"note: {note}")


def _variables(result: AuditResult) -> Table:
    rows = [[one.name, one.verdict, sentences.evidence(one)] for one in result.variables]
    return Table("variables of the state", ["variable", "verdict", "evidence"], rows)


def _loops(result: AuditResult) -> Table:
    rows: list[list[object]] = []
    for loop in result.loops[: result.model.num_loops]:
        moves = (loop.radial_increment, loop.predicted_increment, loop.angular_step_times_scale)
        name = f"{loop.k}{'*' if loop.supervised else ''}"
        rows.append([name, loop.ce, loop.norm, loop.scale, loop.radial_gradient_share, *moves])
    names = ("CE", "‖h‖", "scale s", "radial gradient share", "next s − s", "predicted ã/d", "angular × s")
    return Table("loops", [Column("loop", align="right"), *columns(".3g", *names)], rows, "* supervised", absent="")


def _pushes(pushed: PushResult) -> Table:
    options = pushed.options
    rows = []
    for push in pushed.pushes:
        growth = f"{push.growth:.3g}-fold{' (ran)' if push.far else ''}"
        rows.append([push.name, growth, f"{push.paid:+.3f} nats", push.size, push.twin_size])
    header = [Column("variable"), Column("growth", align="right"), Column("the objective paid", align="right")]
    header += columns(".3g", "size", "without the reward")
    note = f"reward {options.weight:g}·log size, {options.steps} steps after {options.warm_up}"
    return Table("push test", header, rows, note, absent="")


def _motion(motion: Motion) -> str:
    """The shares of tokens as bars, and how close each loop's states stand to the last one's."""
    lines = [f"{kind:<8}{share:>5.0%}  {bar(share, 40)}" for kind, share in motion.shares.items()]
    cosines = motion.median_cosine
    lines.append(f"cos(h_t, h_{motion.loops}), median  {sparkline(cosines)}  {min(cosines):.3g} … {max(cosines):.3g}")
    return "\n".join(["tokens, by how they move", *lines])


def _plots(result: AuditResult) -> str:
    norms = [loop.norm for loop in result.loops]
    lines = [f"‖h_k‖ over {len(norms)} loops  {sparkline(norms)}  {norms[0]:.3g} → {norms[-1]:.3g} ({result.motion})"]
    alphas = result.alpha_sweep.alphas
    for sweep in result.alpha_sweep.loops:
        if ces := [ce for ce in sweep.ce if ce is not None]:
            span = f"{min(ces):.3g} … {max(ces):.3g}"
            lines.append(f"CE at loop {sweep.k}, α·h    {sparkline(ces)}  {span} for α {alphas[0]:g} … {alphas[-1]:g}")
    for change in result.interventions:
        delta = "not finite" if change.delta_ce is None else f"{change.delta_ce:+.4f}"
        lines.append(f"{change.name:32} ΔCE {delta}")
    if result.blind_directions.gap is not None:
        lines.append(f"spectrum of what is shown: gap {result.blind_directions.gap:.1g} above the hidden directions")
    return "\n".join(lines)


# --- remedy ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Remedy(RemedyOptions, Verb, command="remedy", out_is_folder=True):
    """Flags of `loopscope remedy`."""

    target: Positional[str]
    """What to start from: a run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, or package.module:factory. It is
    not changed."""
    json: bool = False
    """Print the comparison as JSON."""

    help: ClassVar[str] = """Fix a blind spot: fine-tune with the remedy (or clamp), and compare before and after.

Exit code 1 unless the audit finds no blind spot any more, the norm has come down where scale was blind, and perplexity
is at most 1 % worse at every supervised loop.

examples:
  loopscope remedy runs/nano-per-loop-rmsnorm-s42 --steps 300
  loopscope remedy runs/mine --how final-only --steps 500 --out runs/fixed
  loopscope remedy downloads/Ouro-1.4B --data wiki/*.txt --steps 100
  loopscope remedy runs/mine --how clamp"""

    def run(self) -> int:
        """Audit and measure, fix, audit and measure again; exit code 1 unless it is fixed and nothing got worse."""
        check_word(self.target)
        check_sources(self.data or ())
        from loopscope.api.remedies import remedy

        result = remedy(self.target, self, say=say, watching=watching)
        exit_code = EXIT_OK if result.is_clean else EXIT_FINDINGS
        if self.json:
            print_json(**result.to_json())
            return exit_code
        was, now = result.before.audit, result.after.audit
        print_tables(_comparison(result))
        print_words(f"before: {sentences.summary(was)}\nafter:  {sentences.summary(now)}")
        if now.verdict == "blind-spot":
            print_audit(now)
        print_words("\n".join([f"outcome: {result.outcome.upper()}", *(f"  {reason}" for reason in result.reasons)]))
        fixed = f"model with the fix: {result.out}" if self.how != "clamp" else f"comparison: {result.out}/remedy.json"
        print_text(fixed)
        return exit_code


def _comparison(result: Remedied) -> Table:
    was, now = result.before, result.after
    names = ("scale", "mean")
    rows: list[list[object]] = [["verdict", was.audit.verdict, now.audit.verdict]]
    rows += [[name, was.audit.variable(name).verdict, now.audit.variable(name).verdict] for name in names]
    pairs = list(zip(was.scores.depths, now.scores.depths, strict=True))
    measured = [(f"perplexity at loop {old.k}", old.perplexity, new.perplexity, ".2f") for old, new in pairs]
    measured += [(f"‖h_{old.k}‖", old.norm, new.norm, ".4g") for old, new in pairs]
    for name, old, new, form in measured:
        rows.append([name, *(None if value is None else format(value, form) for value in (old, new))])
    header = [Column(""), Column("before", align="right"), Column("after", align="right")]
    return Table(f"before and after: {result.how}", header, rows)
