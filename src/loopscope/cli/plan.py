"""`loopscope plan`: a resolved configuration and what the model is made of, before paying for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.cli.configured import Configured
from loopscope.cli.terminal import print_json, print_tables, print_text
from loopscope.config import ModelConfig, config_to_dict, config_to_yaml
from loopscope.errors import EXIT_OK
from loopscope.presets import PRESETS

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Plan(Configured):
    """Flags of `loopscope plan`."""

    json: bool = False
    """Print the result as JSON."""
    yaml: bool = False
    """Print the resolved configuration as YAML, ready for --config."""

    help: ClassVar[str] = f"""Count a model's parameters and show what its loss will see, without building it.

The flags below change the preset (their defaults shown here are the preset's).

presets: {", ".join(PRESETS)}

examples:
  loopscope plan --preset paper-44m
  loopscope plan --preset nano --readout raw --num-loops 8
  loopscope plan --preset nano --readout final-only --yaml > my.yaml
  loopscope plan --config my.yaml --json"""

    def run(self) -> int:
        """Print parameters by part, and per loop whether it is supervised and what its readout hides."""
        config = self.resolved()
        if self.yaml:
            print_text(config_to_yaml(config))
            return EXIT_OK
        from loopscope.model.looped_lm import build, count_parameters
        from loopscope.objectives.placement import supervised_loops

        model = build(config.model, device="meta")
        parameters = count_parameters(model)
        supervised = supervised_loops(config.objective, config.model.num_loops)
        loops = [
            {"k": k, "supervised": k in supervised, "hides": None if hides is None else sorted(hides)}
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


def _hides_per_loop(config: ModelConfig) -> list[frozenset[str] | None]:
    """What the readout of each loop hides in a fresh model (unknown behind a coda); it is small enough to be real."""
    if config.coda_layers:
        return [None] * config.num_loops
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
        hides = "unknown: a coda lies between" if loop["hides"] is None else ", ".join(loop["hides"]) or "nothing"
        table.add_row(str(loop["k"]), supervised, hides)
    return table
