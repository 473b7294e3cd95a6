"""`loopscope remedy`: take a model with a blind spot, apply a fix, and show before and after side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.cli.audit import print_audit
from loopscope.cli.live import watching
from loopscope.cli.terminal import print_json, print_tables, print_text, print_words, say
from loopscope.cli.verb import Verb
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK
from loopscope.options import RemedyOptions
from loopscope.show import sentences
from loopscope.show.table import Column, Table
from loopscope.words import check_word

if TYPE_CHECKING:
    from loopscope.api.remedies import Remedied


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
        self._print(result)
        return EXIT_OK if result.is_clean else EXIT_FINDINGS

    def _print(self, result: Remedied) -> None:
        if self.json:
            print_json(**result.to_json())
            return
        was, now = result.before.audit, result.after.audit
        print_tables(_comparison(result))
        print_words(f"before: {sentences.summary(was)}\nafter:  {sentences.summary(now)}")
        if now.verdict == "blind-spot":
            print_audit(now)
        print_words("\n".join([f"outcome: {result.outcome.upper()}", *(f"  {reason}" for reason in result.reasons)]))
        fixed = f"model with the fix: {result.out}" if self.how != "clamp" else f"comparison: {result.out}/remedy.json"
        print_text(fixed)


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
