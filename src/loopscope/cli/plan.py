"""`loopscope plan`: what a run is made of and what it costs, before paying for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from loopscope.cli.terminal import duration, print_json, print_tables, print_text, print_words
from loopscope.cli.verb import Configured
from loopscope.config import Config, config_to_dict, config_to_yaml
from loopscope.designs import DESIGNS
from loopscope.errors import EXIT_OK
from loopscope.options import AsJson, PlanOptions
from loopscope.presets import PRESETS
from loopscope.show.table import Column, Table

if TYPE_CHECKING:
    from loopscope.results.plan import TrainingPlan


@dataclass(frozen=True, kw_only=True)
class Plan(
    PlanOptions,
    Configured,
    command="plan",
    example=("plan --preset paper-44m", "parameters, FLOPs, memory and time, before paying for them"),
    start_here="preset design readout placement num_loops steps batch devices device_type within_hours",
):
    """Flags of `loopscope plan`."""

    json: AsJson = False
    yaml: bool = False
    """Print the resolved configuration as YAML, ready for --config."""

    help: ClassVar[str] = f"""Parameters, FLOPs, memory and time of a run, and what its loss will see, before paying.

The flags below change the preset or design (their defaults shown here are its own).

presets: {", ".join(PRESETS)}
designs: {", ".join(DESIGNS)}

examples:
  loopscope plan --preset paper-44m
  loopscope plan --preset paper-129m --devices 8 --device-type cuda --flops-per-second 3e14 --tokens 400000000
  loopscope plan --preset paper-44m --design huginn
  loopscope plan --preset nano --readout raw --num-loops 8
  loopscope plan --preset nano --readout final-only --yaml > my.yaml
  loopscope plan --config my.yaml --json"""

    def run(self) -> int:
        """Print the cost, and per loop whether it is supervised and what its readout hides."""
        config = self.resolved()
        if self.yaml:
            print_text(config_to_yaml(config))
            return EXIT_OK
        from loopscope.training.plan import plan_training

        plan = plan_training(config, self)
        devices_needed = None if self.within_hours is None else plan.devices_for(3600 * self.within_hours)
        loops = _loops(config)
        if self.json:
            cost = {**msgspec.to_builtins(plan), "devices_needed": devices_needed}
            print_json(preset=self.preset, design=self.design, config=config_to_dict(config), loops=loops, **cost)
            return EXIT_OK
        print_tables(_parameter_table(plan.parameters, plan.active_parameters), _loop_table(loops), _memory_table(plan))
        print_words(_in_words(plan))
        if devices_needed is not None:
            count = f"{devices_needed:,}" if devices_needed < 10**12 else f"{devices_needed:.3g}"
            print_text(f"{count} devices finish it within {self.within_hours:g} hours.")
        return EXIT_OK


def _loops(config: Config) -> list[dict[str, Any]]:
    """Whether each loop is supervised, and what its readout hides: unknown behind a coda, and of a mean over loops."""
    from loopscope.model.readouts import make_readout
    from loopscope.objectives.placement import supervised_loops

    model = config.design("a plan")
    is_unknown = model.coda_layers or model.recurrence == "pondering"
    readout = None if is_unknown else make_readout(model)  # small enough to be real
    supervised = supervised_loops(config.objective, model.num_loops)
    return [
        {"k": k, "supervised": k in supervised, "hides": None if readout is None else sorted(readout.hides(k))}
        for k in range(1, model.num_loops + 1)
    ]


def _parameter_table(parameters: dict[str, int], active: int) -> Table:
    total = sum(parameters.values())
    title = f"{total / 1e6:,.1f}M parameters" + (f", {active / 1e6:,.1f}M per token" if active < total else "")
    rows = [[part, count, count / total] for part, count in parameters.items() if count]
    return Table(title, ["part", Column("parameters", ","), Column("share", ".1%")], rows)


def _loop_table(loops: list[dict[str, Any]]) -> Table:
    rows = []
    for loop in loops:
        hides = "unknown: not a readout alone" if loop["hides"] is None else ", ".join(loop["hides"]) or "nothing"
        rows.append([str(loop["k"]), "yes" if loop["supervised"] else "no", hides])
    return Table("what the loss will see", ["loop", "supervised", "readout hides"], rows)


def _memory_table(plan: TrainingPlan) -> Table:
    title = f"{plan.memory.total / 2**20:,.0f} MiB per device, {plan.micro_batch.tokens:,} tokens at a time"
    parts = {name: count for name, count in dataclasses.asdict(plan.memory).items() if name != "total"}
    rows = [[name.replace("_", " "), count / 2**20] for name, count in parts.items()]
    return Table(title, ["memory", Column("MiB", ",.1f")], rows)


def _in_words(plan: TrainingPlan) -> str:
    speed, utilisation = plan.choices[:2]
    time = duration(plan.seconds)
    return (
        f"{plan.flops_per_token.total / 1e6:,.1f} MFLOP per trained token, {plan.tokens:,} tokens, "
        f"{plan.flops:.3g} FLOP in all.\n"
        f"{plan.tokens_per_second:,.0f} tokens/s on {plan.devices} device(s) at {plan.flops_per_second:.3g} FLOP/s "
        f"({speed.reason}) and a utilisation of {plan.utilisation:g} ({utilisation.reason}): {time} of training."
    )
