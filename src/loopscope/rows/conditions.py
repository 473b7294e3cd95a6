"""The conditions of arXiv 2606.24898, its recipe and a modern one, and what a grid does differently from the paper.

A condition names the factors it sets; everything else is the common configuration. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from loopscope.checks import check_at_least
from loopscope.config import PAPER_PENALTY, Config, changes_learning, config_to_dict
from loopscope.errors import ConfigError, suggest
from loopscope.options import written
from loopscope.presets import preset
from loopscope.results.reproduction import Difference

PAPER_SEEDS = (42, 101, 202)
PAPER_EPOCHS = 4
MOST_SEEDS = 1000

Recipe = Literal["paper", "modern"]
RECIPES: tuple[Recipe, ...] = ("paper", "modern")
Size = Literal["demo", "nano", "micro", "paper-44m", "paper-129m"]
PAPER_SIZES: tuple[Size, ...] = ("paper-44m", "paper-129m")
OuroSize = Literal["demo", "nano", "micro", "ouro-1.4b"]


@dataclass(frozen=True)
class Condition:
    """What one row of the paper's tables sets; its name is a folder's and a flag's."""

    name: str
    placement: Literal["terminal", "per-loop"]
    kind: str
    """What sees or removes the scale, in words."""
    readout: Literal["rmsnorm", "layernorm", "raw", "final-only"]
    norm_penalty: float = 0.0
    inter_loop_norm: Literal["none", "rmsnorm"] = "none"

    @property
    def title(self) -> str:
        """Its name in tables."""
        return f"{self.placement} + {self.kind}"

    def apply(self, base: Config) -> Config:
        """The common configuration under this condition."""
        model = replace(base.design("a condition"), readout=self.readout, inter_loop_norm=self.inter_loop_norm)
        objective = replace(base.objective, placement=self.placement, norm_penalty=self.norm_penalty)
        return replace(base, model=model, objective=objective)


CORE = (
    Condition("terminal+rmsnorm", "terminal", "RMSNorm", "rmsnorm"),
    Condition("terminal+raw", "terminal", "raw", "raw"),
    Condition("per-loop+rmsnorm", "per-loop", "RMSNorm", "rmsnorm"),
    Condition("per-loop+raw", "per-loop", "raw", "raw"),
)
EXTENSIONS = (
    Condition("per-loop+final-only", "per-loop", "final-only norm", "final-only"),
    Condition("terminal+penalty", "terminal", "penalty", "rmsnorm", norm_penalty=PAPER_PENALTY),
    Condition("per-loop+penalty", "per-loop", "penalty", "rmsnorm", norm_penalty=PAPER_PENALTY),
    Condition("per-loop+inter-loop-norm", "per-loop", "inter-loop norm", "rmsnorm", inter_loop_norm="rmsnorm"),
    Condition("per-loop+layernorm", "per-loop", "LayerNorm", "layernorm"),
)
CONDITIONS = {condition.name: condition for condition in (*CORE, *EXTENSIONS)}
GROUPS = {"2x2": tuple(condition.name for condition in CORE), "all": tuple(CONDITIONS)}
OURO_CONDITIONS = GROUPS["2x2"]
"""Of Ouro's design: loss placement, and what stands before the head; the inter-loop norm is in all of them."""
OURO_TRAIN = "ouro-train"
"""The first word of the size that grid.json of those rows names."""
FACTORS = ("placement", "readout", "norm_penalty", "inter_loop_norm")
"""The fields a condition may set."""


def parse_conditions(text: str, seeds: int) -> dict[str, int]:
    """`2x2,per-loop+penalty,all:1` as seeds per condition, in the order of the paper; the larger number counts."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, colon, number = part.strip().partition(":")
        names = GROUPS.get(name) or ((name,) if name in CONDITIONS else None)
        if names is None:
            raise ConfigError.of("conditions", name, suggest(name, [*GROUPS, *CONDITIONS]))
        if colon and not (number.isdecimal() and int(number) > 0):
            raise ConfigError.of("conditions", part, "after the colon comes a number of seeds, at least 1")
        count = int(number) if colon else seeds
        if count > MOST_SEEDS:
            raise ConfigError.of("conditions" if colon else "seeds", count, f"must be at most {MOST_SEEDS}")
        counts.update({each: max(count, counts.get(each, 0)) for each in names})
    return {name: counts[name] for name in CONDITIONS if name in counts}


def choose_seeds(count: int) -> tuple[int, ...]:
    """The paper's seeds first, then 303, 404, …"""
    return tuple(PAPER_SEEDS[n] if n < len(PAPER_SEEDS) else 101 * n for n in range(count))


def apply_recipe(base: Config, recipe: Recipe) -> Config:
    """The paper's recipe at the size of `base`; modern adds scaled initialisation, warm-up and rotary positions."""
    data = replace(base.data, stride=base.data.stride or max(1, base.sequence_length // 2))
    config = replace(base, data=data)
    if recipe == "paper":
        return config
    model = replace(base.design("a recipe"), init="scaled", positions="rope")
    return replace(config, model=model, training=replace(base.training, warmup=max(1, base.training.steps // 20)))


# --- what differs from the paper -------------------------------------------------------------------------------------


def differences(common: Config, size: str, *, epochs: float | None, bf16: bool | None = None) -> list[Difference]:
    """Everything in which a grid's common configuration is not the paper's; bf16 is None before a row has run."""
    paper = preset(size if size in PAPER_SIZES else "paper-44m")
    theirs, ours = config_to_dict(apply_recipe(paper, "paper")), config_to_dict(common)
    found = [Difference(name, _shown(theirs, name), _shown(ours, name)) for name in _compared(paper)]
    found = [difference for difference in found if difference.paper != difference.here]
    trained = f"{epochs:.3g} epochs" if epochs is not None else "not known"
    if epochs is None or abs(epochs - PAPER_EPOCHS) > 0.01:
        found.append(Difference("length", f"{PAPER_EPOCHS} epochs", f"{trained} ({common.training.steps} steps)"))
    if bf16 is False:
        found.append(Difference("precision", "bfloat16 autocast", "float32"))
    found.append(Difference("bad steps", "taken", "skipped or rolled back by a guard"))
    found.append(Difference("tokenizer is fitted on", "training and validation text", "training text alone"))
    return found


def _compared(paper: Config) -> Iterator[str]:
    """Names of all fields in which a common configuration can differ from the paper's; steps are told as epochs."""
    for section, fields in config_to_dict(paper).items():
        for name in fields:
            if changes_learning(name) and name not in (*FACTORS, "seed", "valid", "steps"):
                yield f"{section}.{name}"


def _shown(config: dict[str, dict[str, Any]], path: str) -> str:
    section, name = path.split(".")
    value = config[section][name]
    if name != "data":
        return str(value)
    is_papers = tuple(value) == preset("paper-44m").data.data
    return "WikiText-103-raw" if is_papers else ", ".join(file_name(source) for source in value)


def file_name(source: str) -> str:
    """A file without its folders: where a text lies on somebody's disk is no part of a result."""
    return source if ":" in source else source.rsplit("/", 1)[-1]


def parse_ouro_conditions(text: str) -> tuple[str, ...]:
    """Names with commas between, or all; a wrong one gets a suggestion."""
    names = OURO_CONDITIONS if text == "all" else tuple(each.strip() for each in text.split(","))
    for name in names:
        if name not in OURO_CONDITIONS:
            raise ConfigError.of("conditions", name, suggest(name, ["all", *OURO_CONDITIONS]))
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class OuroTrainingOptions:
    """What rows of Ouro's design are asked for."""

    size: OuroSize = "nano"
    """Size of the models, all of Ouro's design; demo, nano and micro are for CPUs."""
    conditions: Annotated[Sequence[str], written(parse_ouro_conditions, lambda names: "all")] = OURO_CONDITIONS
    """Of terminal+rmsnorm, terminal+raw, per-loop+rmsnorm and per-loop+raw, with commas between."""
    seeds: int = 1
    """Seeds per condition: 42, 101, 202, …"""
    steps: int | None = None
    """Optimiser steps of a row; by default the preset's, and 10,000 at 1.4B."""
    batch: int | None = None
    """Sequences per step, over all processes of a row."""
    accumulate: int = 1
    """Micro-batches a step is split into."""
    length: int | None = None
    """Tokens of a sequence; by default the preset's, and 2,048 at 1.4B."""
    lr: float | None = None
    """Peak learning rate; by default the preset's, and 3e-4 at 1.4B."""

    data: tuple[str, ...] | None = None
    """Training text, as in `loopscope train`; by default FineWeb, streamed, as much as the steps take."""
    valid: tuple[str, ...] | None = None
    """Validation text; by default documents held out of the training text."""
    tokenizer: str | None = None
    """bytes, or a tokenizer.json (Ouro's own, say); by default byte pairs, trained on the training text."""
    eval_tokens: int | None = 65_536
    """Most tokens a row is evaluated on."""
    sweep_tokens: int = 2048
    """Tokens of the α-sweep."""

    shard: Literal["none", "full"] = "none"
    """Processes of a row replicate the model (DDP) or shard it (FSDP2)."""
    checkpoint_loops: bool = False
    """Recompute each loop in the backward pass; see loopscope plan."""
    threads: int = 1
    """CPU threads of a process."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "batch", "accumulate", "length", "eval_tokens", "sweep_tokens")
        check_at_least(self, 1, "threads", "seeds")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError.of("lr", self.lr, "must be above 0")
        if self.seeds > MOST_SEEDS:
            raise ConfigError.of("seeds", self.seeds, f"must be at most {MOST_SEEDS}")
