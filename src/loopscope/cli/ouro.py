"""`loopscope reproduce ouro`: the paper's checks of Ouro 1.4B; `ouro-train`: training with and without its norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.cli.eval import parse_depths
from loopscope.cli.terminal import print_json, print_tables, print_words, progress, say
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, ConfigError
from loopscope.words import check_word

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from loopscope.experiments.tables import Table


@dataclass(frozen=True, kw_only=True)
class ReproduceOuro:
    """Flags of `loopscope reproduce ouro`."""

    target: Positional[str]
    """A folder in Ouro's format, hf:ORG/NAME, or any other target that is read out by a norm before its head."""
    depths: str = "1..8"
    """Numbers of loops K to run and read out, as 1..8 or 1,2,4."""
    data: tuple[str, ...] | None = None
    """Text to measure on; by default the target's own, or the built-in one."""
    tokenizer: str | None = None
    """bytes or a tokenizer.json, for a target that brings no tokenizer."""
    length: int | None = None
    """Tokens of a sequence; by default as in training, and 256 for models that do not say."""
    max_tokens: int | None = 65_536
    """Tokens that perplexity is measured on."""
    sweep_tokens: int = 2048
    """Tokens that the α-sweep, gradients, norms and the exit gate are measured on."""
    batch: int = 8
    """Sequences at a time."""
    out: Path | None = None
    """Output folder; by default runs/ouro-NAME."""
    json: bool = False
    """Print the result as JSON."""

    help: ClassVar[str] = """The paper's checks of Ouro 1.4B on one model: Figures 5 and 7 and their tables.

Scales the state by α from 0.1 to 10 before the readout, at every depth, with the norm before the head and without it
(the norm inside the loop stays); radial gradient share; perplexity and throughput at every depth; norms of tokens; what
the exit gate does. Writes ouro.json, tables and figures. What has been measured is kept: the same command goes on after
an interruption. Exit code 1 when the loss is not flat with the norm, or not sharp without.

examples:
  loopscope reproduce ouro downloads/Ouro-1.4B --data wiki/test.txt
  loopscope reproduce ouro hf:ByteDance/Ouro-1.4B --data wiki/test.txt --depths 1..8
  loopscope reproduce ouro runs/nano --depths 1,2,4 --sweep-tokens 512 --json"""

    def __post_init__(self) -> None:
        parse_depths(self.depths)
        for name in ("length", "max_tokens", "sweep_tokens", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError.of(name, value, "must be at least 1")

    def run(self) -> int:
        """Measure what is not measured yet, and print."""
        check_word(self.target)
        check_sources(self.data or ())
        from loopscope.experiments.ouro import check_ouro
        from loopscope.experiments.ouro_record import Asked
        from loopscope.experiments.ouro_tables import conclusion, publish_ouro

        name = Path(self.target.removeprefix("hf:").replace(":", "-")).name
        out = self.out or Path("runs") / f"ouro-{name}"
        asked = Asked(
            depths=parse_depths(self.depths),
            data=list(self.data or ()),
            tokenizer=self.tokenizer or "",
            length=self.length,
            max_tokens=self.max_tokens,
            sweep_tokens=self.sweep_tokens,
        )
        try:
            with progress(self.target) as advance:
                record = check_ouro(self.target, asked, out, batch=self.batch, say=say, progress=advance)
        except KeyboardInterrupt:
            say(f"interrupted; what was measured is in {out}/ouro.json, and the same command goes on")
            return EXIT_INTERRUPTED
        tables = publish_ouro(record, out, say)
        if self.json:
            print_json(**record.to_json(), out=str(out))
        else:
            print_tables(*(_rich(_brief(table)) for table in tables))
            print_words(f"{conclusion(record)}\nouro.json, tables and figures in {out}")
        return EXIT_OK if record.verdict == "holds" else EXIT_FINDINGS


def _brief(table: Table) -> Table:
    """The sweep of every depth is in its file; on the terminal the trained one says enough."""
    trained = [row for row in table.rows if row[0].endswith("*")]
    return replace(table, rows=trained) if table.name == "alpha_sweep" and trained else table


def _rich(made: Table) -> RichTable:
    from rich.table import Table

    table = Table(title=made.title, title_justify="left", caption=made.note, caption_justify="left")
    for number, name in enumerate(made.header):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in made.rows:
        table.add_row(*row)
    return table
