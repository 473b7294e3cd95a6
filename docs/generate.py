"""Write what comes from the code and from records: docs/cli.md from the command line's own help, the table of
docs/designs.md from the registry, and the claims table of the README from the record that its mark names.

python docs/generate.py          (or: make docs)
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from loopscope.cli import COMMANDS, Shown, parse
from loopscope.designs import DESIGNS
from loopscope.results.reproduction import read_reproduction
from loopscope.studies.tables import brief_claims_table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cli.md"
DESIGNS_PAGE = ROOT / "docs" / "designs.md"
README = ROOT / "README.md"
WIDTH = "110"
MARKED = re.compile(r"(<!-- claims of (\S+): written by make docs -->\n).*?(<!-- end of claims -->)", flags=re.DOTALL)

TABLE = re.compile(r"(<!-- designs: written by make docs -->\n).*?(<!-- end of designs -->)", flags=re.DOTALL)


def cli_reference() -> str:
    """The help of `loopscope` and of every verb, as Markdown."""
    os.environ["COLUMNS"] = WIDTH
    sections = ["# Command line\n\nGenerated from `--help` by `make docs`; do not edit.\n", _section([])]
    return "\n".join([*sections, *(_section(command.split()) for command in COMMANDS)])


def _section(arguments: list[str]) -> str:
    title = " ".join(["loopscope", *arguments])
    shown = parse([*arguments, "--help"])
    assert isinstance(shown, Shown)
    lines = "\n".join(line.rstrip() for line in shown.text.strip().splitlines())
    return f"## {title}\n\n```\n{lines}\n```\n"


def with_claims(readme: str) -> str:
    """The README with the claims of a record between its marks."""
    return MARKED.sub(lambda marks: f"{marks[1]}{_claims_of(ROOT / marks[2])}\n{marks[3]}", readme)


def _claims_of(record: Path) -> str:
    """The claims under the paper's recipe on validation text in three columns, as Markdown."""
    claims = read_reproduction(record).claims
    assert claims is not None, f"{record} has no claims.json that can be read"
    return brief_claims_table(claims.of("paper", "valid")).markdown(heading=False).rstrip()


def with_designs(page: str) -> str:
    """The page of designs with the registry between its marks."""
    rows = [f"| `{name}` | {design.summary} | {design.source} |" for name, design in DESIGNS.items()]
    table = "\n".join(["| design | what it is | source |", "|---|---|---|", *rows])
    return TABLE.sub(lambda marks: f"{marks[1]}{table}\n{marks[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(cli_reference(), encoding="utf-8")
    README.write_text(with_claims(README.read_text("utf-8")), encoding="utf-8")
    DESIGNS_PAGE.write_text(with_designs(DESIGNS_PAGE.read_text("utf-8")), encoding="utf-8")
