"""What can be audited by name: a run folder, a checkpoint, a Hugging Face folder, a preset, a configuration file, or a
Python factory.

Shape legend: B batch, T tokens.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loopscope.adapters.hf import is_hf_folder, open_folder
from loopscope.auditing.objective import observables_of, supervised_of
from loopscope.auditing.run import Batch, Supervised
from loopscope.auditing.search import Observable
from loopscope.config import Config, DataConfig, load_config
from loopscope.errors import ConfigError, DataError, RunError
from loopscope.model.looped_lm import build
from loopscope.presets import preset
from loopscope.protocol import LoopedModel

if TYPE_CHECKING:
    from loopscope.data.tokenizers import Tokenizer

RANDOM_ROWS, RANDOM_LENGTH = 8, 64
"""Random ids that a model without text of its own is audited on."""
TEXT_LENGTH = 64
"""Tokens of a row of text for somebody else's checkpoint, which does not say how long its sequences were."""

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
    stage: str = "untrained"
    """What is said of the weights where no step is known."""
    notes: tuple[str, ...] = ()
    """What a reader of the audit should know of the target."""


def open_target(text: str, *, data: tuple[str, ...] | None, seed: int, num_rows: int, say: Say) -> Target:
    """The target that a word on the command line means."""
    path = Path(text)
    if text.startswith("preset:"):
        return untrained(text, preset(text.removeprefix("preset:")), seed)
    if path.is_dir():
        if is_hf_folder(path):
            return of_hf_folder(path, data=data, seed=seed, num_rows=num_rows, say=say)
        return of_run(path, data=data, num_rows=num_rows, say=say)
    if path.suffix in (".yaml", ".yml"):
        return untrained(text, load_config(path), seed)
    if ":" in text:
        return _from_factory(text, seed)
    raise RunError(
        f"{text} is no run folder, checkpoint, Hugging Face folder, preset:NAME, configuration file or "
        "package.module:factory; "
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
    from loopscope.data.tokenizers import load_tokenizer
    from loopscope.training.session import checkpoint_path, load, run_of

    run, checkpoint = run_of(path), checkpoint_path(path)
    config = run.config()
    tokenizer = load_tokenizer(run.path / "tokenizer")
    batches, text_of = _text(tokenizer, config.data, data, config.sequence_length, num_rows, say)
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


def of_hf_folder(path: Path, *, data: tuple[str, ...] | None, seed: int, num_rows: int, say: Say) -> Target:
    """Somebody else's checkpoint under the objective of its kind, on text where the folder has a tokenizer.json.

    The folder is theirs: no audit.json is left in it.
    """
    foreign = open_folder(path)
    length = min(TEXT_LENGTH, foreign.max_length)
    tokenizer = _tokenizer_beside(path, foreign.vocab_size)
    batches: list[Batch] = [random_ids(foreign.vocab_size, length, seed)]
    on, text_of = "random token ids, since the folder has no tokenizer.json: its cross-entropies mean little", None
    if tokenizer is not None:
        batches, text_of = _text(tokenizer, DataConfig(), data, length, num_rows, say)
        on = "the built-in text (--data names another)" if data is None else ", ".join(data)
    elif data is not None:
        raise ConfigError(f"--data: {path} has no tokenizer.json to read text with; without --data, ids are random")
    return Target(
        name=str(path),
        model=foreign.model,
        batches=batches,
        supervised=supervised_of(foreign.objective, foreign.model.num_loops),
        observables=observables_of(foreign.objective),
        text_of=text_of,
        stage="step unknown",
        notes=(f"audited on {on}", *foreign.notes),
    )


def _tokenizer_beside(folder: Path, vocab_size: int) -> Tokenizer | None:
    from loopscope.data.tokenizers import TOKENIZER_FILE, read_tokenizer

    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None
    tokenizer = read_tokenizer(file)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"{file} has {tokenizer.vocab_size} tokens, and the model beside it only {vocab_size}")
    return tokenizer


def _text(
    tokenizer: Tokenizer, own: DataConfig, data: tuple[str, ...] | None, length: int, num_rows: int, say: Say
) -> tuple[list[Batch], Callable[[int], str]]:
    """Rows of the validation split, or of other text that was asked for; and how to read a token."""
    from loopscope.data.corpora import open_corpus
    from loopscope.data.prepare import evaluation_tokens, pack_split
    from loopscope.data.stream import evaluation_batches

    if data is not None:
        tokens = evaluation_tokens(data, own.text_field, tokenizer, say)
    else:
        tokens = pack_split(open_corpus(own), "valid", tokenizer, say)
    batches: list[Batch] = list(islice(evaluation_batches(tokens, length, 1, None), num_rows))
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
