"""`loopscope reproduce ouro`: the paper's checks of Ouro 1.4B; `ouro-train`: training with and without its norm."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.checks import check_at_least, check_not_negative
from loopscope.cli.live import rows_saved, run_rows
from loopscope.cli.terminal import interruptible, print_json, print_tables, print_words, progress, say
from loopscope.cli.verb import Verb
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError
from loopscope.options import AsJson, Depths, Length, Questions, Retries, TaskFolder, Tokenizer
from loopscope.results.record import as_json
from loopscope.rows.conditions import OuroTrainingOptions
from loopscope.words import check_word

if TYPE_CHECKING:
    from loopscope.rows.spec import Layout, RowSpec
    from loopscope.show.table import Table


@dataclass(frozen=True, kw_only=True)
class ReproduceOuro(
    Verb,
    command="reproduce ouro",
    example=("reproduce ouro TARGET", "its checks of Ouro 1.4B, on any checkpoint of its kind"),
    out_is_folder=True,
):
    """Flags of `loopscope reproduce ouro`."""

    target: Positional[str]
    """A folder in Ouro's format, hf:ORG/NAME, or any other target that is read out by a norm before its head."""
    depths: Depths = range(1, 9)
    """Numbers of loops K to run and read out, as 1..8 or 1,2,4."""
    data: tuple[str, ...] | None = None
    """Text to measure on; by default the target's own, or the built-in one."""
    tokenizer: Tokenizer = None
    length: Length = None
    max_tokens: int | None = 65_536
    """Tokens that perplexity is measured on."""
    sweep_tokens: int = 2048
    """Tokens that the α-sweep, gradients, norms and the exit gate are measured on."""
    tasks: str | None = None
    """Downstream tasks of lm-evaluation-harness to score at every depth, as lambada_openai,piqa (the eval extra)."""
    task_folder: TaskFolder = None
    limit: Questions = None
    batch: int = 8
    """Sequences at a time."""
    out: Path | None = None
    """Output folder; by default runs/ouro-NAME."""
    json: AsJson = False

    help: ClassVar[str] = """The paper's checks of Ouro 1.4B on one model: Figures 5 and 7 and their tables.

Scales the state by α from 0.1 to 10 before the readout, at every depth, with the norm before the head and without it
(the norm inside the loop stays); radial gradient share; perplexity and throughput at every depth; norms of tokens; what
the exit gate does; downstream tasks, if asked for. Writes ouro.json, tables and figures. What has been measured is
kept: the same command goes on after an interruption. Exit code 1 when the loss is not flat with the norm, or not sharp
without.

examples:
  loopscope reproduce ouro downloads/Ouro-1.4B --data wiki/test.txt
  loopscope reproduce ouro hf:ByteDance/Ouro-1.4B --data wiki/test.txt --depths 1..8
  loopscope reproduce ouro downloads/Ouro-1.4B --data wiki/test.txt --tasks lambada_openai,piqa --limit 200
  loopscope reproduce ouro runs/nano --depths 1,2,4 --sweep-tokens 512 --json"""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "length", "max_tokens", "sweep_tokens", "limit", "batch")
        for name in ("task_folder", "limit"):
            if self.tasks is None and getattr(self, name) is not None:
                raise ConfigError.of(name, getattr(self, name), "is for --tasks")

    def run(self) -> int:
        """Measure what is not measured yet, and print."""
        check_word(self.target)
        check_sources(self.data or ())
        from loopscope.results.ouro import OuroRequest
        from loopscope.studies.ouro import check_ouro
        from loopscope.studies.ouro_tables import conclusion, publish_ouro

        name = Path(self.target.removeprefix("hf:").replace(":", "-")).name
        out = self.out or Path("runs") / f"ouro-{name}"
        asked = OuroRequest(
            depths=list(self.depths),
            data=list(self.data or ()),
            tokenizer=self.tokenizer or "",
            length=self.length,
            max_tokens=self.max_tokens,
            sweep_tokens=self.sweep_tokens,
            tasks=[] if self.tasks is None else self.tasks.split(","),
            task_folder=self.task_folder or "",
            limit=self.limit,
        )
        kept = f"what was measured is in {out}/ouro.json, and the same command goes on"
        with interruptible(kept), progress(self.target) as advance:
            record = check_ouro(self.target, asked, out, batch=self.batch, say=say, progress=advance)
        tables = publish_ouro(record, out, say)
        if self.json:
            print_json(**as_json(record), out=str(out))
        else:
            print_tables(*map(_brief, tables))
            print_words(f"{conclusion(record)}\nouro.json, tables and figures in {out}")
        return EXIT_FINDINGS if record.verdict == "does not hold here" else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class ReproduceOuroTrain(OuroTrainingOptions, Verb, command="reproduce ouro-train", out_is_folder=True):
    """Flags of `loopscope reproduce ouro-train`."""

    out: Path | None = None
    """Output folder; by default runs/ouro-train-SIZE."""
    processes_per_row: int = 1
    """Processes of a row, under torchrun: one for each GPU."""
    rows_at_once: int | None = None
    """Rows that run side by side; by default as many as there are cores for."""
    gpus_per_row: int = 0
    """GPUs of a row of one process: 0 or 1."""
    retries: Retries = 2
    json: AsJson = False

    help: ClassVar[
        str
    ] = """Train Ouro's design with the norm before its head and without, then sweep α on both: Figure 6.

Only the norm before the head goes; the one inside the loop stays. Cross-entropy at the last loop or at every loop, the
same batches in every row. Rows are those of `loopscope reproduce`: the same command resumes, and several invocations
share the work. Exit code 1 when CE is not flat over α with the norm or not sharp without, or a row failed. What it
needs at 1.4B: loopscope plan --preset ouro-1.4b --sequence-length 2048, and docs/ouro.md.

examples:
  loopscope reproduce ouro-train --size nano --data wiki/*.txt
  loopscope reproduce ouro-train --size demo --steps 50 --conditions per-loop+rmsnorm,per-loop+raw --data builtin
  loopscope reproduce ouro-train --size ouro-1.4b --processes-per-row 8 --shard full \\
      --checkpoint-loops --accumulate 8"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "rows_at_once", "processes_per_row")
        check_not_negative(self, "gpus_per_row", "retries")

    def run(self) -> int:
        """Train what is not trained, check what is not checked, and print."""
        check_sources(self.data or ())
        from loopscope.studies.ouro_training import checks_asked, laid_out, publish_training

        out = self.out or Path("runs") / f"ouro-train-{self.size}"
        specs: dict[str, RowSpec] = {}

        def lay_out() -> Layout:
            layout = laid_out(self, out, ["loopscope", *sys.argv[1:]], say)
            specs.update({row.name: row for row in layout.rows})
            return layout

        rows = run_rows(
            lay_out,
            retries=self.retries,
            rows_at_once=self.rows_at_once,
            threads=self.threads,
            gpus=self.gpus_per_row,
            processes=self.processes_per_row,
        )
        finished = [row.spec for row in rows if row.state == "finished"]
        from loopscope.studies.ouro import check_ouro

        with interruptible(rows_saved()):
            for spec in finished:
                folder = out / "rows" / spec.name
                with progress(spec.name) as advance:
                    check_ouro(folder, checks_asked(spec, self.sweep_tokens), folder, say=say, progress=advance)
        trained, table = publish_training(self.size, specs, out, say)
        failed = [row for row in rows if row.state != "finished"]
        for row in failed:
            say(f"{row.spec.name} {row.state}: {row.error} (log in {out}/rows)")
        if self.json:
            failures = [{"name": row.spec.name, "error": row.error} for row in failed]
            print_json(size=self.size, rows=as_json(trained), failures=failures, out=str(out))
        else:
            print_tables(table)
            print_words(f"ouro-train.json, tables and Figure 6 in {out}; every row has an ouro.json")
        return EXIT_OK if not failed and all(each.verdict == "holds" for each in trained) else EXIT_FINDINGS


def _brief(table: Table) -> Table:
    """The sweep of every depth is in its file; on the terminal the trained one says enough."""
    trained = [row for row in table.rows if str(row[0]).endswith("*")]
    return replace(table, rows=trained) if table.name == "alpha_sweep" and trained else table
