"""`loopscope calibrate`: a halting threshold with a bound on what it costs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro
from tyro.conf import Positional

from loopscope.cli.terminal import print_json, print_tables, print_text, progress, say
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from loopscope.words import check_word

if TYPE_CHECKING:
    from rich.table import Table

    from loopscope.verbs.calibration import Calibration


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Flags of `loopscope calibrate`."""

    target: Positional[str]
    """Run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, design:NAME, configuration
    file, or package.module:factory."""
    rule: tuple[str, ...] = ("margin",)
    """Halting rules, or all: margin, max-probability, entropy, kl, state-difference, cosine, gate, certain. Several
    share what may go wrong between them."""
    max_ppl_increase: float = 0.01
    """What leaving early may cost: 0.01 is 1 % of perplexity."""
    confidence: float = 0.95
    """How sure the promise is."""
    data: tuple[str, ...] | None = None
    """Text to calibrate on instead of the target's validation split."""
    tokenizer: str | None = None
    """bytes or a tokenizer.json, for a target that brings no tokenizer."""
    dtype: str | None = None
    """float32, bfloat16, float16, or own: as a folder of other people's stores its weights. By default other people's
    weights are opened in float32, and everything else as it is."""
    max_units: int = 400
    """At most so many units of text (512 tokens each; of a task 8 instances)."""
    verify: int = 0
    """Calibrate so often again, on blocks drawn anew, and count how often the promise held."""
    seed: int = 0
    """Of how blocks of text are dealt to fit, calibration and test."""
    out: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """Write the certified rule with the fewest loops to this file, for `generate --halting`."""
    json: bool = False
    """Print the result as JSON."""

    help: ClassVar[str] = """A halting threshold with a bound: tokens leave early, and perplexity rises by at most 1 %.

Thresholds are proposed on one part of the text, tested on another, and shown on a third. The promise holds with the
given confidence for teacher-forced text of the same kind. Beside it stands the smallest fixed depth with the same
promise: what a rule saves beyond that is adaptive. Exit code 1 when nothing can be promised.

examples:
  loopscope calibrate runs/hops --rule all --verify 200 -o policy.json
  loopscope calibrate runs/nano --rule margin --max-ppl-increase 0.02 --data wiki/test.txt
  loopscope generate runs/nano "The river" --halting policy.json --show-loops"""

    def run(self) -> int:
        """Calibrate and print."""
        check_word(self.target)
        check_sources(self.data or ())
        if self.max_units < 1 or self.verify < 0:
            raise ConfigError.of("max_units", self.max_units, "must be at least 1, and --verify not negative")
        from loopscope.runs import write_json
        from loopscope.targets import open_target
        from loopscope.verbs.calibration import calibrate, to_policy

        with progress(self.target) as advance:
            found = calibrate(
                open_target(self.target, dtype=self.dtype),
                rules=self.rule,
                max_ppl_increase=self.max_ppl_increase,
                confidence=self.confidence,
                data=self.data,
                tokenizer=self.tokenizer,
                max_units=self.max_units,
                verify=self.verify,
                seed=self.seed,
                say=say,
                progress=advance,
            )
        best = found.best
        if best is not None and self.out is not None:
            write_json(Path(self.out), to_policy(found, best))
            say(f"the policy is in {self.out}")
        if self.json:
            print_json(**asdict(found), saved=[found.saved_beyond_fixed(each) for each in found.certificates])
        else:
            print_tables(_table(found, self.verify))
            print_text("\n".join(_sentences(found)))
        return EXIT_OK if best is not None else EXIT_FINDINGS


def _table(found: Calibration, verify: int) -> Table:
    from rich.table import Table

    units = ", ".join(f"{count} {name}" for name, count in found.units.items())
    table = Table(title=f"{found.target}: units of {found.unit_tokens} tokens, {units}", title_justify="left")
    names = ("rule", "threshold", "loops", "saved beyond fixed", "perplexity", "p", "Hoeffding–Bentkus p")
    for name in (*names, *(("held",) if verify else ())):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for each in (found.fixed, *found.certificates):
        if each.threshold is None or each.mean_loops is None or each.ppl_increase is None:
            table.add_row(each.rule, "none")
            continue
        saved = found.saved_beyond_fixed(each)
        cells = [
            each.rule,
            "never" if math.isinf(each.threshold) else f"{each.threshold:.4g}",
            f"{each.mean_loops:.2f}",
            "" if each is found.fixed or saved is None else f"{saved:+.2f}",
            f"{each.ppl_increase:+.2%}",
            f"{each.p_value:.2g}",
            f"{each.hoeffding_bentkus:.2g}",
        ]
        table.add_row(*cells, *((f"{each.verified} of {verify}",) if verify else ()))
    table.caption = "loops and perplexity on the test units, which no threshold was chosen on"
    return table


def _sentences(found: Calibration) -> list[str]:
    """What a user may rely on."""
    promise = f"at most {found.max_ppl_increase:.3g} more perplexity with confidence {found.confidence:g}"
    best = found.best
    if best is None:
        return [
            f"nothing is promised: there are {found.units['calibration']} calibration units, and {found.units_needed} "
            "would do for a rule that changes nothing; name more text with --data"
        ]
    assert best.threshold is not None and best.mean_loops is not None
    lines = [f"certified: {best.rule} at {best.threshold:.4g}, {promise}, on teacher-forced text of the same kind"]
    if best.clipped_above:
        lines.append(f"{best.clipped_above} calibration units were clipped: the promise is about the clipped loss")
    saved = found.saved_beyond_fixed(best)
    if saved is None:
        lines.append("no fixed depth is certified at the same bound")
    elif saved >= 0.05:
        lines.append(f"it saves {saved:.2f} loops a token beyond the smallest certified fixed depth: that is adaptive")
    else:
        lines.append(
            f"it saves nothing beyond the smallest certified fixed depth ({found.fixed.threshold:.0f} loops): the "
            "prediction does not depend on further loops, and no rule is needed to leave them out"
        )
    return [*lines, *(f"note: {note}" for note in found.notes)]
