"""What a session of training or evaluation starts from: the machine's choices, and a checkpoint to resume.

Decides what a resume may change, and what the manifest says.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from loopscope.config import Config, TrainingConfig, changes_learning, config_to_dict
from loopscope.errors import RunError, UnsupportedError
from loopscope.machine import automatic_choices, choose_device, git_state, resolve_compile, versions
from loopscope.results.record import Choice, read_record
from loopscope.results.run import MANIFEST_FILE, DataRecord, EarlierText, Manifest
from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from loopscope.training.trackers import check_installed
from loopscope.training.trainer import Trainer

Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """Where a session runs and every choice that was made for it."""

    device: str
    autocast: torch.dtype | None
    choices: list[Choice]

    def value(self, name: str) -> Any:
        """What was chosen under that name."""
        return next(choice.value for choice in self.choices if choice.name == name)

    def without(self, name: str, reason: str) -> Setup:
        """The same with something switched off that the machine could do."""
        choices = [Choice(name, False, reason) if choice.name == name else choice for choice in self.choices]
        return replace(self, choices=choices)


def set_up(training: TrainingConfig | None = None) -> Setup:
    """Apply threads and denormals, and resolve every automatic choice; what cannot be had here is refused at once."""
    training, device = training or TrainingConfig(), choose_device()
    check_installed(training.track)
    if training.shard == "full" and "RANK" not in os.environ:
        raise UnsupportedError(
            "--shard full spreads a model over processes that torchrun starts: "
            "torchrun --nproc-per-node 2 -m loopscope train …; without it leave --shard none"
        )
    if training.threads is not None:
        torch.set_num_threads(training.threads)
    choices = [choice for choice in automatic_choices(device) if choice.name != "compile"]
    choices.append(resolve_compile(training.compile, str(device.value)))
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
    if before["model"].keys() != now["model"].keys():
        theirs, ours = (part["model"].get("target", "a model of its own configuration") for part in (before, now))
        raise RunError(f"{run.path} was trained with {theirs}, not {ours}; choose another --out")
    for section, fields in now.items():
        for name, value in fields.items():
            if value != before[section][name] and changes_learning(name) and name != "steps":
                raise RunError(
                    f"{run.path} was trained with {name} = {before[section][name]!r}, not {value!r} "
                    f"(flag --{name.replace('_', '-')}); use the same value, another --out, or --init-from {run.path}"
                )


def read_data_record(run: Path) -> DataRecord | None:
    """What a run's manifest.json says of its text; None where it cannot be read."""
    manifest = read_record(run / MANIFEST_FILE, Manifest, {})
    return None if manifest is None else manifest.data


def continue_data(found: checkpoint.Checkpoint, data: DataRecord, say: Say, *, allow_new: bool = False) -> DataRecord:
    """The manifest's data of a resumed run: refused when the text is not that of the steps before.

    `allow_new` goes on with other text and keeps on record what the steps before were trained on. Another tokenizer is
    always refused: the embeddings would mean nothing.
    """
    run = found.path.parent.parent
    before = read_data_record(run)
    if before is None or not before.corpus_sha256:
        if not allow_new:
            raise RunError(
                f"{run / 'manifest.json'} keeps no hash of the text before: nobody can tell whether this is the same; "
                "restore the file, choose another --out, or go on with this text by --allow-new-data"
            )
        say(f"what {run} was trained on up to step {found.step} is not known")
        return replace(data, earlier=[EarlierText(corpus="", corpus_sha256="", until_step=found.step)])
    if before.tokenizer_sha256 and before.tokenizer_sha256 != data.tokenizer_sha256:
        raise RunError(
            f"{run} was trained with a tokenizer of SHA-256 {before.tokenizer_sha256}, and this one has "
            f"{data.tokenizer_sha256}; choose another --out"
        )
    earlier = before.earlier
    if before.corpus_sha256 != data.corpus_sha256:
        hashes = f"{before.corpus_sha256}, and its sources (training and validation) now have {data.corpus_sha256}"
        if not allow_new:
            raise RunError(
                f"{run} was trained on text of SHA-256 {hashes}; restore the text, choose another --out, or go on "
                "with the new text by --allow-new-data"
            )
        say(f"new text from step {found.step + 1} on: the text before had SHA-256 {hashes}")
        left = EarlierText(corpus=before.corpus, corpus_sha256=before.corpus_sha256, until_step=found.step)
        earlier = [*earlier, left]
    return replace(data, earlier=earlier)


def find_checkpoint(run: RunFolder, resume: str, say: Say) -> checkpoint.Checkpoint | None:
    """What --resume auto|must|never|PATH asks for: a checkpoint to resume, or none."""
    if resume not in ("auto", "must", "never"):
        return checkpoint.load(checkpoint_path(Path(resume)))
    there = checkpoint.list_steps(run.checkpoints)
    if resume == "never" and there:
        raise RunError(f"{run.path} already has checkpoints; --resume auto resumes them, another --out starts anew")
    found = checkpoint.newest(run.checkpoints, say)
    if found is None and there:
        raise RunError(f"no checkpoint in {run.checkpoints} is whole; choose another --out to start anew")
    if found is None and (last := run.last_step()):
        raise RunError(
            f"{run.path} has metrics up to step {last} and no checkpoint: restore {run.checkpoints}, or choose another "
            "--out to start anew"
        )
    if found is None and resume == "must":
        raise RunError(f"{run.path} has no checkpoint to resume from")
    return found


def checkpoint_path(path: Path) -> Path:
    """The checkpoint folder that a run folder or a checkpoint folder means."""
    if (path / checkpoint.STATE_FILE).is_file():
        return path
    steps = checkpoint.list_steps(path / "checkpoints")
    if not steps:
        raise RunError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
    return steps[-1]


def run_of(path: Path) -> RunFolder:
    """The run folder that a run folder or one of its checkpoints means."""
    return RunFolder(checkpoint_path(path).parent.parent)


def manifest(config: Config, setup: Setup, data: DataRecord, trainer: Trainer) -> Manifest:
    """What a reader of the run folder needs to know besides the configuration."""
    return Manifest(
        command=sys.argv,
        versions=versions(),
        git=git_state(Path.cwd()),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        threads=torch.get_num_threads(),
        world_size=trainer.ranks.world_size,
        seed=config.training.seed,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        choices=setup.choices,
        data=data,
    )
