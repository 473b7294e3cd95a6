"""What can be audited by name: a run folder, a checkpoint, a preset, a configuration file, or a Python factory.

Shape legend: B batch, T tokens.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopscope.auditing.objective import observables_of, supervised_of
from loopscope.auditing.run import Batch, Supervised
from loopscope.auditing.search import Observable
from loopscope.config import Config, load_config
from loopscope.errors import ConfigError, DataError, RunError, UnsupportedError
from loopscope.model.looped_lm import build
from loopscope.presets import preset
from loopscope.protocol import LoopedModel

RANDOM_ROWS, RANDOM_LENGTH = 8, 64
"""Random ids that an untrained model is audited on."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """A model with everything an audit wants to know of it."""

    name: str
    model: LoopedModel
    batches: Iterable[Batch]
    supervised: Supervised = None
    observables: Sequence[Observable] = ()
    step: int | None = None
    folder: Path | None = None
    """Run folder to leave audit.json in."""
    text_of: Callable[[int], str] | None = field(default=None, compare=False)
    """Token id → text."""


def open_target(text: str, *, data: tuple[str, ...] | None, seed: int, num_rows: int, say: Say) -> Target:
    """The target that a word on the command line means."""
    path = Path(text)
    if text.startswith("preset:"):
        return untrained(text, preset(text.removeprefix("preset:")), seed)
    if path.is_dir():
        return _folder(path, data, num_rows, say)
    if path.suffix in (".yaml", ".yml"):
        return untrained(text, load_config(path), seed)
    if ":" in text:
        return _from_factory(text, seed)
    raise RunError(
        f"{text} is no run folder, checkpoint, preset:NAME, configuration file or package.module:factory; "
        "loopscope train makes a run, loopscope audit preset:nano audits a design"
    )


def untrained(name: str, config: Config, seed: int) -> Target:
    """A freshly initialised model on random ids: what a design hides before anybody pays for its training."""
    model = build(config.model, seed=seed)
    ids_BT = random_ids(config.model.vocab_size, min(RANDOM_LENGTH, config.model.max_length), seed)
    supervised = supervised_of(config.objective, config.model.num_loops)
    return Target(name, model, [ids_BT], supervised, observables_of(config.objective))


def random_ids(vocab_size: int, length: int, seed: int) -> Tensor:
    """Uniform ids from a generator of their own."""
    return torch.randint(vocab_size, (RANDOM_ROWS, length), generator=torch.Generator().manual_seed(seed))


def of_run(path: Path, *, data: tuple[str, ...] | None, num_rows: int, say: Say) -> Target:
    """A run's newest checkpoint, or one checkpoint, on its validation text under its own objective."""
    from loopscope.training.session import checkpoint_path, load, run_of

    run, checkpoint = run_of(path), checkpoint_path(path)
    config = run.config()
    batches, text_of = _validation_batches(run.path, config, data, num_rows, say)
    return Target(
        name=str(path),
        model=load(path),
        batches=batches,
        supervised=supervised_of(config.objective, config.model.num_loops),
        observables=observables_of(config.objective),
        step=int(checkpoint.name.removeprefix("step-")),
        folder=run.path if checkpoint != path else None,
        text_of=text_of,
    )


def _folder(path: Path, data: tuple[str, ...] | None, num_rows: int, say: Say) -> Target:
    hub_config = path / "config.json"
    if not hub_config.is_file():
        return of_run(path, data=data, num_rows=num_rows, say=say)
    try:
        kind = json.loads(hub_config.read_text("utf-8")).get("model_type", "unknown")
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{hub_config} is not readable JSON: {error}") from error
    raise UnsupportedError(
        f"{path} is a Hugging Face folder of model type {kind!r}, for which there is no adapter; write a function that "
        "returns loopscope.adapt(embed=…, loop=…, readout=…, num_loops=…) and pass it as package.module:factory"
    )


def _validation_batches(
    folder: Path, config: Config, data: tuple[str, ...] | None, num_rows: int, say: Say
) -> tuple[list[Batch], Callable[[int], str]]:
    from loopscope.data.corpora import open_corpus
    from loopscope.data.prepare import evaluation_tokens, pack_split
    from loopscope.data.stream import evaluation_batches
    from loopscope.data.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(folder / "tokenizer")
    if data is not None:
        tokens = evaluation_tokens(data, config.data.text_field, tokenizer, say)
    else:
        tokens = pack_split(open_corpus(config.data), "valid", tokenizer, say)
    batches: list[Batch] = list(islice(evaluation_batches(tokens, config.sequence_length, 1, None), num_rows))
    return batches, lambda token: tokenizer.decode([token])


def _from_factory(text: str, seed: int) -> Target:
    """package.module:factory → a LoopedModel, or a pair of it and batches."""
    module_name, _, attribute = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Any = getattr(importlib.import_module(module_name), attribute)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name!r} ({error}); run from its folder or install it") from error
    except AttributeError:
        raise ConfigError(f"module {module_name!r} has no {attribute!r}") from None
    finally:
        sys.path.pop(0)
    made = factory()
    model, batches = made if isinstance(made, tuple) else (made, None)
    missing = [name for name in ("num_loops", "embed", "loop") if not hasattr(model, name)]
    if missing:
        raise ConfigError(
            f"{text} returned {type(model).__name__}, which has no {', '.join(missing)}; see loopscope.adapt"
        )
    return Target(text, model, batches if batches is not None else [_ids_that_fit(model, seed)])


def _ids_that_fit(model: Any, seed: int) -> Tensor:
    """Random ids below the vocabulary, which a readout of two zeros tells."""
    from loopscope.protocol import readout

    with torch.no_grad():
        zeros_BT = torch.zeros(1, 2, dtype=torch.long)
        vocab_size = readout(model, model.loop(model.embed(zeros_BT), 1), 1).shape[-1]
    if vocab_size < 2:
        raise DataError("the model's readout has fewer than two logits")
    return random_ids(vocab_size, RANDOM_LENGTH, seed)
