"""What a verb is: a dataclass whose fields are its flags, which registers itself; and flags that two verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Self

from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig, load_config
from loopscope.designs import design
from loopscope.presets import preset

DEFAULT_PRESET = "nano"
COMMANDS: dict[str, type[Verb]] = {}
"""The verbs, and commands of two words, in the order of the overview."""


class Verb:
    """A command: whatever the command line has to know of it is said where its class is defined."""

    help: ClassVar[str]
    """What it does in one line, then examples."""
    example: ClassVar[tuple[str, str] | None]
    """Arguments to begin with and what they are for, in the overview."""
    start_here: ClassVar[str]
    """Fields that a newcomer needs, where a verb has many: its help shows them first."""
    renamed: ClassVar[Mapping[str, str]]
    """Flags of earlier versions, with what they are called now."""
    out_is_folder: ClassVar[bool]
    """Whether --out names a folder; else it names a file, or the verb decides itself."""
    needs_torch: ClassVar[bool]
    """Whether anything of it depends on what the processor can do; not where it only reads files."""

    def __init_subclass__(
        cls,
        command: str | None = None,
        *,
        example: tuple[str, str] | None = None,
        start_here: str = "",
        renamed: Mapping[str, str] = MappingProxyType({}),
        out_is_folder: bool = False,
        needs_torch: bool = True,
    ) -> None:
        cls.example, cls.start_here, cls.renamed = example, start_here, renamed
        cls.out_is_folder, cls.needs_torch = out_is_folder, needs_torch
        if command is not None:
            COMMANDS[command] = cls

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Self | None:
        """What the arguments say of the defaults of the others; None where they say nothing of them."""
        return None

    def run(self) -> int:
        """Do it, print the result, and return the exit code."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Configured(Verb):
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
    def defaults(cls, arguments: Sequence[str]) -> Self:
        """Defaults from --preset, --design and --config, in this order: the flags change what those say."""
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        early.add_argument("--preset", default=DEFAULT_PRESET)
        early.add_argument("--design")
        early.add_argument("--config")
        try:
            chosen, _ = early.parse_known_args(arguments)
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
