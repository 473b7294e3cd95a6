"""The flags that verbs about a model share: a preset, a file with changes to it, and every field on top."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig, load_config
from loopscope.presets import preset

DEFAULT_PRESET = "nano"


@dataclass(frozen=True, kw_only=True)
class Configured:
    """A configuration from --preset, changed by --config, changed by single flags."""

    preset: str = DEFAULT_PRESET
    """Named configuration to start from."""
    config: Path | None = None
    """YAML file with changes to the preset."""
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    @classmethod
    def default(cls, argv: Sequence[str]) -> Self:
        """Defaults from --preset, then from --config: the flags change what those two say."""
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        early.add_argument("--preset", default=DEFAULT_PRESET)
        early.add_argument("--config")
        try:
            chosen, _ = early.parse_known_args(argv)
        except argparse.ArgumentError:  # a flag without its value: tyro says so better
            return cls()
        base = preset(chosen.preset)
        if chosen.config is not None and str(chosen.config) not in ("None", ""):  # an empty one is refused by name
            base = load_config(Path(chosen.config), base)
        return cls(
            preset=chosen.preset,
            config=None if chosen.config is None else Path(chosen.config),
            model=base.design("a preset or configuration file of flags"),
            objective=base.objective,
            data=base.data,
            training=base.training,
        )

    def resolved(self) -> Config:
        """The whole configuration; a contradiction between its parts is refused here."""
        return Config(model=self.model, objective=self.objective, data=self.data, training=self.training)
