"""`loopscope.train`: from a configuration to a run folder, fresh, resumed, or from other weights.

Text → tokens (`data.preparation`) → batches by step (`data.stream`) → loss (`objectives`) → run folder (`training`).
Under torchrun every rank calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.config import Config, ModelConfig, TargetConfig
from loopscope.data import tokenizers
from loopscope.data.preparation import Prepared, prepare
from loopscope.data.stream import evaluation_batches, training_stream
from loopscope.errors import ConfigError, ProtocolError, RunError
from loopscope.model.looped_lm import GatedLoopedLM, LoopedLM, build
from loopscope.objectives.placement import Objective
from loopscope.protocol import SharedCore
from loopscope.results.record import as_json, write_record
from loopscope.results.run import MANIFEST_FILE, LoggedEvaluation, LoggedEvent
from loopscope.runs import RunFolder
from loopscope.targets import Opened, Say, open_target
from loopscope.training import checkpoint
from loopscope.training.distributed import Ranks, join
from loopscope.training.plan import check_logits, check_memory
from loopscope.training.session import Setup, check_resume, continue_data, find_checkpoint, manifest, set_up
from loopscope.training.trackers import make_trackers
from loopscope.training.trainer import Outcome, Trainer

Watching = Callable[[Trainer], AbstractContextManager[None]]


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    run: RunFolder
    outcome: Outcome
    step: int
    evaluation: LoggedEvaluation | None
    """The last row of validation scores in metrics.jsonl."""
    event: str | None
    """The last thing that a guard or the monitor said."""
    num_loops: int
    """Loops it was trained at."""
    was_signalled: bool = False
    """Whether somebody asked it to stop, be it during its last step."""

    def to_json(self) -> dict[str, Any]:
        """What `loopscope train --json` prints."""
        return {
            "run": str(self.run.path),
            "outcome": self.outcome,
            "step": self.step,
            "eval": as_json(self.evaluation),
            "event": self.event,
        }


def train(
    config: Config,
    out: Path | str,
    *,
    resume: str = "auto",
    init_from: str | Path | Opened | None = None,
    allow_new_data: bool = False,
    say: Say = lambda text: None,
    watching: Watching = lambda trainer: nullcontext(),
) -> TrainingResult:
    """Train `config` in the run folder `out`, which no other process may be using.

    `resume` is auto, must, never, or a checkpoint's path. `init_from` is any target whose weights to start from. Ctrl-C
    and SIGTERM save and return; the same call resumes, on the same text unless `allow_new_data`. `watching` is entered
    around the training.
    """
    if not str(out):
        raise ConfigError.of("out", str(out), "a run needs a folder of its own")
    setup, run = set_up(config.training), RunFolder(Path(out))
    options: dict[str, Any] = {"resume": resume, "init_from": init_from, "allow_new_data": allow_new_data}
    with join(setup.device) as ranks:
        if ranks.is_first:
            with run.locked():
                if not run.config_path.exists():  # its tokenizer is of an attempt that came to nothing
                    (run.path / "tokenizer" / tokenizers.MANIFEST_FILE).unlink(missing_ok=True)
                return train_in(run, config, setup, ranks, say=say, watching=watching, **options)
        return train_in(run, config, setup, ranks, **options)


def train_in(
    run: RunFolder,
    config: Config,
    setup: Setup,
    ranks: Ranks,
    *,
    resume: str = "auto",
    init_from: str | Path | Opened | None = None,
    allow_new_data: bool = False,
    say: Say = lambda text: None,
    watching: Watching = lambda trainer: nullcontext(),
) -> TrainingResult:
    """`train` for whoever holds the run folder's lock and has joined the ranks."""
    if isinstance(config.model, ModelConfig):
        check_memory(config, devices=ranks.world_size, device_type=setup.device)
    else:
        tokens = config.training.batch // config.training.accumulate // ranks.world_size * config.sequence_length
        check_logits(tokens, config.model.vocab_size, batch=config.training.batch, device_type=setup.device)
    if ranks.is_first and run.config_path.exists():
        check_resume(run, config)
    found = find_checkpoint(run, resume, say)
    source = None if init_from is None or found is not None else open_target(init_from)
    model = model_of(config)
    if config.training.compile == "on":
        SharedCore.needed(model, "--compile on")
    if SharedCore.of(model) is None:
        setup = setup.without("compile", f"the model has not {SharedCore.what}")
    if isinstance(config.model, TargetConfig):
        _try_out(model, config)
    data = _prepare(config, run, ranks, source, say)
    record = data.record()
    if found is not None:
        record = continue_data(found, record, say, allow_new=allow_new_data)
    trainer = _make_trainer(model, config, run, setup, ranks, data)
    _start(trainer, run, found, source, say)
    if ranks.is_first:
        run.create(config)
        write_record(run.path / MANIFEST_FILE, manifest(config, setup, record, trainer))
        trainer.listeners = make_trackers(config, run.path)
    with watching(trainer):
        outcome = trainer.train()
    return _result(run, trainer, outcome)


def model_of(config: Config) -> nn.Module:
    """The model that a configuration describes or names, with the weights it starts from."""
    if isinstance(config.model, ModelConfig):
        return build(config.model, seed=config.training.seed)
    model = open_target(config.model.target, seed=config.training.seed).model
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise ProtocolError(
            f"{config.model.target} has no parameters to train; loopscope.adapt takes the network as module="
        )
    return model


def target_config(opened: Opened, max_length: int | None = None) -> ModelConfig | TargetConfig:
    """An opened model as the model of a configuration: our own by its design, any other by its name.

    What a factory returns goes by its name even where it is our class: weights and methods may be its own.
    """
    if opened.config is not None:
        return opened.config.model
    model = opened.model
    if isinstance(model, LoopedLM) and type(model) in (LoopedLM, GatedLoopedLM) and opened.is_trained:
        return model.config
    longest = opened.max_length or max_length or opened.sequence_length
    return TargetConfig(target=opened.name, num_loops=model.num_loops, vocab_size=opened.vocab_size, max_length=longest)


def copy_weights(model: nn.Module, source: Opened) -> list[str]:
    """Copy every tensor whose name and shape fit, and list what could not be carried over, both ways."""
    if not isinstance(source.model, nn.Module):
        raise ProtocolError(f"{source.name} is not a torch module: it has no weights to start from")
    theirs, own = checkpoint.model_tensors(source.model), checkpoint.model_tensors(model)
    fitting = {name for name in own.keys() & theirs.keys() if own[name].shape == theirs[name].shape}
    if not fitting:
        raise RunError(f"no tensor of {source.name} fits this model")
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(theirs[name])
    fresh = [f"{name} starts fresh" for name in sorted(own.keys() - fitting)]
    return [*fresh, *(f"{name} of the checkpoint is not used" for name in sorted(theirs.keys() - fitting))]


def _prepare(config: Config, run: RunFolder, ranks: Ranks, source: Opened | None, say: Say) -> Prepared:
    """Rank 0 first: the others then find tokenizer and packed tokens ready."""
    if not ranks.is_first:
        ranks.barrier()
        return prepare(config, run.path / "tokenizer", say)
    if source is not None:
        _inherit_tokenizer(config, run.path / "tokenizer", source, say)
    prepared = prepare(config, run.path / "tokenizer", say)
    ranks.barrier()
    return prepared


def _inherit_tokenizer(config: Config, folder: Path, source: Opened, say: Say) -> None:
    """Give a new run the tokenizer of the weights it starts from: another one would make their embeddings meaningless.

    Not where the configuration asks for another kind than a run of ours has; a tokenizer.json named by path is read
    from there anyway.
    """
    tokenizer = source.tokenizer
    if tokenizer is None or (folder / tokenizers.MANIFEST_FILE).exists():
        return
    if source.run is None or tokenizer.kind == config.data.tokenizer:
        tokenizer.save(folder)
        say(f"tokenizer from {source.name if source.run is None else source.run.path}")


def _try_out(model: nn.Module, config: Config) -> None:
    """One pass of two tokens through the objective: what a stranger's model lacks is told before text is packed."""
    ids_BT = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        Objective(config.objective)(model, ids_BT, ids_BT)  # type: ignore[arg-type]


def _make_trainer(
    model: nn.Module, config: Config, run: RunFolder, setup: Setup, ranks: Ranks, data: Prepared
) -> Trainer:
    length, training = config.sequence_length, config.training
    stream = training_stream(data.train, length, training.batch, training.seed, config.data)
    micro = max(1, training.batch // training.accumulate // ranks.world_size)

    def valid() -> Iterator[tuple[Tensor, Tensor]]:
        return evaluation_batches(data.valid, length, micro, training.eval_tokens)

    trainer = Trainer(model, config, run, stream, valid, ranks=ranks, autocast=setup.autocast)
    if setup.value("compile"):
        SharedCore.needed(model, "compiling one loop").core.compile()
    return trainer


def _start(
    trainer: Trainer, run: RunFolder, found: checkpoint.Checkpoint | None, source: Opened | None, say: Say
) -> None:
    """Resume a checkpoint, start from other weights, or start fresh; say which."""
    if found is not None:
        trainer.restore(found)
        if trainer.ranks.is_first:
            run.forget_metrics_after(found.step)
        say(f"resumed at step {found.step}: {run.path}")
        events = [row for row in run.read_metrics() if isinstance(row, LoggedEvent) and row.event != "skip"]
        for message in {row.event: row.message for row in events}.values():  # the last of every kind
            say(f"earlier: {message}")
    elif source is not None:
        left = copy_weights(trainer.model, source)
        say(f"weights from {source.name}" + "".join(f"\n  {line}" for line in left))
    else:
        if trainer.ranks.is_first and run.metrics_path.exists():
            run.forget_metrics_after(-1)  # of an attempt that never made a step
        say(f"training in {run.path}")


def _result(run: RunFolder, trainer: Trainer, outcome: Outcome) -> TrainingResult:
    rows = run.read_metrics()[::-1]
    scores = next((row for row in rows if isinstance(row, LoggedEvaluation)), None)
    event = next((row.message for row in rows if isinstance(row, LoggedEvent)), None)
    num_loops = trainer.config.model.num_loops
    return TrainingResult(run, outcome, trainer.progress.step, scores, event, num_loops, trainer.was_signalled)
