"""Write the pages that come from the code: docs/cli.md from the command line's own help.

python docs/generate.py          (or: make docs)
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loopscope.cli import VERBS

PAGE = Path(__file__).parent / "cli.md"
WIDTH = "110"


def cli_reference() -> str:
    """The help of `loopscope` and of every verb, as Markdown."""
    sections = ["# Command line\n\nGenerated from `--help` by `make docs`; do not edit.\n", _section([])]
    return "\n".join([*sections, *(_section([verb]) for verb in VERBS)])


def _section(arguments: list[str]) -> str:
    title = " ".join(["loopscope", *arguments])
    command = [sys.executable, "-m", "loopscope", *arguments, "--help"]
    environment = {**os.environ, "COLUMNS": WIDTH, "NO_COLOR": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = "\n".join(line.rstrip() for line in shown.strip().splitlines())
    return f"## {title}\n\n```\n{lines}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(cli_reference(), encoding="utf-8")
