"""`loopscope calibrate`: a halting threshold with a bound on what it costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from loopscope.cli.terminal import bar, print_record, print_tables, print_text, progress, say
from loopscope.cli.verb import Verb
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK
from loopscope.options import AsJson, CalibrateOptions, OpenedAs, Target
from loopscope.show.table import Column, Table, columns
from loopscope.words import check_tokenizer, check_word

if TYPE_CHECKING:
    from loopscope.results.halting import Calibration, Certificate


@dataclass(frozen=True, kw_only=True)
class Calibrate(
    CalibrateOptions,
    Verb,
    command="calibrate",
    example=("calibrate runs/NAME", "leave loops out, with a bound on what that costs"),
):
    """Flags of `loopscope calibrate`."""

    target: Target
    dtype: OpenedAs = None
    speed: bool = True  # who looks at a table wants to see it; a script would wait for nothing
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the certified rule with the fewest loops to this file, for `generate --halting`."""
    json: AsJson = False

    help: ClassVar[str] = """A halting threshold with a bound: tokens leave early, and perplexity rises by at most 1 %.

Thresholds are proposed on some articles, tested on others, and shown on a third part. The promise holds with the
given confidence for teacher-forced text of the same kind. Beside it stands the smallest fixed depth with the same
promise: what a rule saves beyond that is adaptive. Exit code 1 when nothing can be promised.

examples:
  loopscope calibrate runs/hops --rule all --verify 200 -o policy.json
  loopscope calibrate runs/nano --rule margin --max-ppl-increase 0.02 --data wiki/test.txt
  loopscope calibrate runs/nano --rule probe --fill project -o policy.json
  loopscope generate runs/nano "The river" --halting policy.json --show-loops"""

    def run(self) -> int:
        """Calibrate and print."""
        check_word(self.target)
        check_tokenizer(self.tokenizer)
        check_sources(self.data or ())
        from loopscope.api.calibration import calibrate, keep_calibration, policy_of
        from loopscope.results.record import write_record
        from loopscope.targets import open_target

        with progress(self.target) as advance:
            opened = open_target(self.target, dtype=self.dtype)
            found = calibrate(opened, self, say=say, progress=advance)
        best = found.best
        if best is not None and self.out is not None:
            write_record(Path(self.out), policy_of(found, best))
            say(f"the policy is in {self.out}")
        try:  # what was found is printed whether or not it can be kept
            if (path := keep_calibration(opened, found)) is not None:
                say(f"what was found is in {path}")
        except OSError as error:
            say(f"what was found is not kept in calibration.json: {error.strerror}")
        if self.json:
            print_record(replace(found, probe=None))
        else:
            print_tables(_table(found))
            print_text(_chart(found))
            print_text("\n".join(_sentences(found)))
        return EXIT_OK if best is not None else EXIT_FINDINGS


def _table(found: Calibration) -> Table:
    units = ", ".join(f"{count} {name}" for name, count in found.units.items())
    rows: list[list[object]] = []
    for each in found.every:
        if each.mean_loops is None:
            rows.append([each.rule, "none", *[None] * 8])
            continue
        saved = None if each is found.fixed else found.saved_beyond_fixed(each)
        costs = (each.ppl_increase, each.clipped_ppl_increase, each.p_value, each.hoeffding_bentkus)
        held = f"{each.verified} of {found.verify}{'' if each.passed else ', too few'}"
        rows.append([each.rule, _threshold(each), each.mean_loops, saved, *costs, _speed(found, each), held])
    header = [Column("rule"), Column("threshold", align="right"), Column("loops", ".2f")]
    header += [Column("saved beyond fixed", "+.2f"), *columns("+.2%", "perplexity", "clipped")]
    header += [*columns(".2g", "p", "Hoeffding–Bentkus p"), Column("tokens/s", align="right")]
    header += [Column("held", align="right")]
    is_clipped = any(each.clipped_above or each.test_clipped_above for each in found.every)
    asked = {"clipped": is_clipped, "tokens/s": found.tokens_per_second is not None, "held": bool(found.verify)}
    title = f"{found.target}: units of {found.unit_tokens} tokens, {units}"
    note = "loops and perplexity on the test units, which no threshold was chosen on"
    whole = Table(title, header, rows, note, absent="")
    return whole.without(*(name for name, is_asked in asked.items() if not is_asked))


def _threshold(each: Certificate) -> str:
    return "never" if each.threshold is None else f"{each.threshold:.4g}"


def _speed(found: Calibration, each: Certificate) -> str:
    if each.tokens_per_second is None or found.tokens_per_second is None:
        return ""
    return f"{each.tokens_per_second:,.0f} ({each.tokens_per_second / found.tokens_per_second:.2f}×)"


def _chart(found: Calibration) -> str:
    """Loops a token under each certified rule, and the share of tokens that left at each loop, as bars."""
    wide = max(len(each.rule) for each in found.every)
    lines = [f"{'':<{wide}}  loops a token, of {found.num_loops:<21} tokens that left at loop 1 … {found.num_loops}, %"]
    for each in found.every:
        if each.mean_loops is not None:
            left = " ".join(f"{100 * each.exits.get(k, 0.0):>3.0f}" for k in range(1, found.num_loops + 1))
            drawn = bar(each.mean_loops / found.num_loops, 32)
            lines.append(f"{each.rule:<{wide}}  {drawn:<32} {each.mean_loops:>5.2f}  {left}")
    return "\n".join(lines) if len(lines) > 1 else ""


def _sentences(found: Calibration) -> list[str]:
    """What a user may rely on."""
    promise = f"at most {found.max_ppl_increase:.3g} more perplexity with confidence {found.confidence:g}"
    evidence = "units" if found.evidence == "unit" else f"{found.evidence}s"
    needs = (
        f"{found.units_needed} would do for a rule that changes nothing (by Hoeffding and Bentkus "
        f"{found.units_needed_hoeffding_bentkus})"
    )
    best = found.best
    if best is None:
        count = found.calibration_evidence
        return [
            f"nothing is promised: there are {count} calibration {evidence}, and {needs}; name more text with --data",
            *(f"note: {note}" for note in found.notes),
        ]
    lines = [f"certified: {best.rule} at {_threshold(best)}, {promise}, on teacher-forced text of the same kind"]
    lines.append(f"the promise rests on {found.calibration_evidence} calibration {evidence}; {needs}")
    if best.clipped_above:
        lines.append(
            f"{best.clipped_above} of them were clipped: the promise is about the clipped loss, which is "
            f"{best.clipped_ppl_increase:+.2%} on the test units and {best.ppl_increase:+.2%} unclipped"
        )
    saved = found.saved_beyond_fixed(best)
    if saved is None:
        lines.append("no fixed depth is certified at the same bound")
    elif saved >= 0.05:
        lines.append(f"it saves {saved:.2f} loops a token beyond the smallest certified fixed depth: that is adaptive")
    else:
        lines.append(
            f"it saves nothing beyond the smallest certified fixed depth (loop {found.fixed.threshold:.0f}): the "
            "prediction does not depend on further loops, and no rule is needed to leave them out"
        )
    if found.verify:
        made = [each for each in found.every if each.passed is not None]
        failed = [each.rule for each in made if not each.passed]
        verdict = f"{', '.join(failed)} failed" if failed else "all passed"
        lines.append(f"verification: {verdict}; of {found.verify} calibrations {found.failures_allowed} may fail")
    return [*lines, *(f"note: {note}" for note in found.notes)]
