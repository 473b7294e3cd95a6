"""`loopscope env`: versions, hardware, and every automatic choice with its reason."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from typing import ClassVar

from loopscope.cli.terminal import print_json, print_tables
from loopscope.cli.verb import Verb
from loopscope.errors import EXIT_OK
from loopscope.options import AsJson
from loopscope.show.table import Table

EXAMPLE_ROWS, EXAMPLE_VOCABULARY = 4096, 20_000
"""The loss's chunk size depends on the model; the paper's (4 loops × 1,024 tokens) stands for it here."""


@dataclass(frozen=True, kw_only=True)
class Env(Verb, command="env", example=("env", "versions, device, and every automatic choice")):
    """Flags of `loopscope env`."""

    json: AsJson = False

    help: ClassVar[str] = """Print versions, hardware, and every automatic choice with its reason.

examples:
  loopscope env
  loopscope env --json"""

    def run(self) -> int:
        """Print what this machine is and what follows from it."""
        from loopscope.machine import automatic_choices, choose_device, versions
        from loopscope.objectives.cross_entropy import choose_chunk_rows

        device = choose_device()
        choices = [
            *automatic_choices(device),
            choose_chunk_rows(EXAMPLE_ROWS, EXAMPLE_VOCABULARY, 4, str(device.value)),
        ]
        system = f"{platform.system()} {platform.release()} {platform.machine()}"
        if self.json:
            print_json(system=system, versions=versions(), choices=[dataclasses.asdict(choice) for choice in choices])
            return EXIT_OK
        packages = [[name, version or "not installed"] for name, version in versions().items()]
        decisions = [[choice.name, str(choice.value), choice.reason] for choice in choices]
        chosen = Table("automatic choices", ["choice", "value", "reason"], decisions)
        print_tables(Table(system, ["package", "version"], packages), chosen)
        return EXIT_OK
