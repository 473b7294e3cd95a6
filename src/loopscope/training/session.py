"""One training session: from a configuration and a run folder to a trainer that is ready to go on.

Decides what a resume may change, loads weights to start from, and writes the manifest.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loopscope.config import Config, changes_learning, config_to_dict
from loopscope.data.tokenizers import load_tokenizer
from loopscope.errors import RunError
from loopscope.machine import Choice, automatic_choices, choose_device, git_state, resolve_compile, versions
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from loopscope.training.trainer import Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """Where a session runs and every choice that was made for it."""

    device: str
    autocast: torch.dtype | None
    choices: list[Choice]


def set_up(config: Config) -> Setup:
    """Apply threads and denormals, and resolve every automatic choice."""
    device = choose_device()
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    choices = [choice for choice in automatic_choices(device) if choice.name != "compile"]
    choices.append(resolve_compile(config.training.compile, str(device.value)))
    by_name = {choice.name: choice.value for choice in choices}
    if by_name["flush_denormals"]:
        torch.set_flush_denormal(True)
    autocast = torch.bfloat16 if by_name["autocast"] == "bfloat16" else None
    return Setup(str(device.value), autocast, choices)


def check_resume(run: RunFolder, config: Config) -> None:
    """Refuse to resume with a configuration that would learn something else, naming the first difference.

    `steps` may change although it changes what is learned: a finished run is made longer that way.
    """
    before, now = config_to_dict(run.config()), config_to_dict(config)
    for section, fields in now.items():
        for name, value in fields.items():
            if value != before[section][name] and changes_learning(name) and name != "steps":
                raise RunError(
                    f"{run.path} was trained with {name} = {before[section][name]!r}, not {value!r} "
                    f"(flag --{name.replace('_', '-')}); use the same value, another --out, or --init-from {run.path}"
                )


def find_checkpoint(run: RunFolder, resume: str, say: Say) -> checkpoint.Checkpoint | None:
    """What --resume auto|must|never|PATH asks for: a checkpoint to go on from, or none."""
    if resume not in ("auto", "must", "never"):
        return checkpoint.load(checkpoint_path(Path(resume)))
    there = checkpoint.list_steps(run.checkpoints)
    if resume == "never":
        if there:
            raise RunError(f"{run.path} already has checkpoints; --resume auto goes on, another --out starts anew")
        return None
    found = checkpoint.newest(run.checkpoints, say)
    if found is None and there:
        raise RunError(f"no checkpoint in {run.checkpoints} is whole; choose another --out to start anew")
    if found is None and resume == "must":
        raise RunError(f"{run.path} has no checkpoint to resume from")
    return found


def checkpoint_path(path: Path) -> Path:
    """The checkpoint folder that a run folder or a checkpoint folder means."""
    if (path / "state.json").is_file():
        return path
    steps = checkpoint.list_steps(path / "checkpoints")
    if not steps:
        raise RunError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
    return steps[-1]


def run_of(path: Path) -> RunFolder:
    """The run folder that a run folder or one of its checkpoints means."""
    return RunFolder(checkpoint_path(path).parent.parent)


def load(path: Path | str) -> LoopedLM:
    """The model of a run folder (its newest checkpoint) or of one checkpoint folder, in evaluation mode."""
    path = Path(path)
    folder = checkpoint_path(path)
    model = build(run_of(path).config().model)
    checkpoint.load_model_tensors(model, checkpoint.load(folder).model_tensors(), folder)
    return model.eval()


def init_from(model: LoopedLM, path: Path) -> list[str]:
    """Copy every tensor whose name and shape fit, and list what could not be carried over, both ways."""
    theirs = checkpoint.load(checkpoint_path(path)).model_tensors()
    own = checkpoint.model_tensors(model)
    fitting = {name for name in own.keys() & theirs.keys() if own[name].shape == theirs[name].shape}
    if not fitting:
        raise RunError(f"no tensor of {path} fits this model")
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(theirs[name])
    fresh = [f"{name} starts fresh" for name in sorted(own.keys() - fitting)]
    return [*fresh, *(f"{name} of the checkpoint is not used" for name in sorted(theirs.keys() - fitting))]


def inherit_tokenizer(config: Config, folder: Path, source: Path, say: Say) -> None:
    """Give a new run the tokenizer of the weights it starts from: another one would make their embeddings meaningless.

    Not where the configuration asks for another kind; a tokenizer.json named by path is read from there anyway.
    """
    theirs = run_of(source).path / "tokenizer"
    if folder.exists() or not theirs.is_dir():
        return
    tokenizer = load_tokenizer(theirs)
    if tokenizer.kind == config.data.tokenizer:
        tokenizer.save(folder)
        say(f"tokenizer from {theirs.parent}")


def manifest(config: Config, setup: Setup, data: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """What a reader of the run folder needs to know besides the configuration."""
    return {
        "command": sys.argv,
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "world_size": trainer.ranks.world_size,
        "seed": config.training.seed,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "choices": [dataclasses.asdict(choice) for choice in setup.choices],
        "data": data,
    }
