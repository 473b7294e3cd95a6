"""The flags that verbs about a model share: a preset, a design, a file with changes, and every field on top."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig, load_config
from loopscope.designs import design
from loopscope.presets import preset

DEFAULT_PRESET = "nano"


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A configuration from --preset, under --design, changed by --config, changed by single flags."""

    preset: str = DEFAULT_PRESET
    """Named configuration to start from."""
    design: str | None = None
    """Published design to give that size to; see docs/designs.md."""
    config: Path | None = None
    """YAML file with changes to them."""
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    @classmethod
    def default(cls, argv: Sequence[str]) -> Self:
        """Defaults from --preset, --design and --config, in this order: the flags change what those say."""
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        early.add_argument("--preset", default=DEFAULT_PRESET)
        early.add_argument("--design")
        early.add_argument("--config")
        try:
            chosen, _ = early.parse_known_args(argv)
        except argparse.ArgumentError:  # a flag without its value: tyro says so better
            return cls()
        base = preset(chosen.preset)
        if chosen.design not in (None, "None", ""):
            base = design(chosen.design).apply(base)
        if chosen.config is not None and str(chosen.config) not in ("None", ""):  # an empty one is refused by name
            base = load_config(Path(chosen.config), base)
        return cls(
            preset=chosen.preset,
            design=chosen.design,
            config=None if chosen.config is None else Path(chosen.config),
            model=base.design("a preset or configuration file of flags"),
            objective=base.objective,
            data=base.data,
            training=base.training,
        )

    def resolved(self) -> Config:
        """The whole configuration; a contradiction between its parts is refused here."""
        return Config(model=self.model, objective=self.objective, data=self.data, training=self.training)
