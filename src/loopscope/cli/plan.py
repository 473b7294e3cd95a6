"""`loopscope plan`: a resolved configuration and what the model is made of, before paying for it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.cli.terminal import print_json, print_tables, print_text
from loopscope.config import Config, ModelConfig, ObjectiveConfig, config_to_dict, config_to_yaml, load_config
from loopscope.errors import EXIT_OK
from loopscope.presets import PRESETS, preset

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_PRESET = "nano"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Flags of `loopscope plan`."""

    preset: str = DEFAULT_PRESET
    """Named configuration to start from."""
    config: Path | None = None
    """YAML file with changes to the preset."""
    json: bool = False
    """Print the result as JSON."""
    yaml: bool = False
    """Print the resolved configuration as YAML, ready for --config."""
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    help: ClassVar[str] = f"""Count a model's parameters and show what its loss will see, without building it.

The flags below change the preset (their defaults shown here are the preset's).

presets: {", ".join(PRESETS)}

examples:
  loopscope plan --preset paper-44m
  loopscope plan --preset nano --readout raw --num-loops 8
  loopscope plan --preset nano --readout final-only --yaml > my.yaml
  loopscope plan --config my.yaml --json"""

    @classmethod
    def default(cls, argv: Sequence[str]) -> Plan:
        """Defaults from --preset, then from --config: the flags change what those two say."""
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        early.add_argument("--preset", default=DEFAULT_PRESET)
        early.add_argument("--config", type=Path)
        try:
            chosen, _ = early.parse_known_args(argv)
        except argparse.ArgumentError:  # a flag without its value: tyro says so better
            return cls()
        base = preset(chosen.preset)
        if chosen.config is not None:
            base = load_config(chosen.config, base)
        return cls(preset=chosen.preset, config=chosen.config, model=base.model, objective=base.objective)

    def run(self) -> int:
        """Print parameters by part, and per loop whether it is supervised and what its readout hides."""
        config = Config(model=self.model, objective=self.objective)
        if self.yaml:
            print_text(config_to_yaml(config))
            return EXIT_OK
        from loopscope.model.looped_lm import build, count_parameters
        from loopscope.objectives.placement import supervised_loops

        model = build(config.model, device="meta")
        parameters = count_parameters(model)
        supervised = supervised_loops(config.objective, config.model.num_loops)
        loops = [
            {"k": k, "supervised": k in supervised, "hides": sorted(hides)}
            for k, hides in enumerate(_hides_per_loop(config.model), start=1)
        ]
        total = sum(parameters.values())
        if self.json:
            print_json(
                preset=self.preset, config=config_to_dict(config), parameters=parameters, total=total, loops=loops
            )
        else:
            print_tables(_parameter_table(parameters, total), _loop_table(loops))
        return EXIT_OK


def _hides_per_loop(config: ModelConfig) -> list[frozenset[str]]:
    """What the readout of each loop hides in a fresh model; the readout alone is small enough to be real."""
    from loopscope.model.readouts import make_readout

    readout = make_readout(config)
    return [readout.hides(k) for k in range(1, config.num_loops + 1)]


def _parameter_table(parameters: dict[str, int], total: int) -> Table:
    from rich.table import Table

    table = Table("part", title=f"{total / 1e6:,.1f}M parameters", title_justify="left")
    table.add_column("parameters", justify="right")
    table.add_column("share", justify="right")
    for part, count in parameters.items():
        table.add_row(part, f"{count:,}", f"{count / total:.1%}")
    return table


def _loop_table(loops: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("loop", "supervised", "readout hides", title="what the loss will see", title_justify="left")
    for loop in loops:
        supervised = "yes" if loop["supervised"] else "no"
        table.add_row(str(loop["k"]), supervised, ", ".join(loop["hides"]) or "nothing")
    return table
