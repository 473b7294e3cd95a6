"""One word for a model: whatever names one, opened, with what is known of it.

    runs/NAME                     a run folder: its newest checkpoint        runs/NAME/checkpoints/step-00000250
    downloads/Ouro-1.4B           a local Hugging Face folder: config.json and safetensors
    hf:ORG/NAME[@REVISION]        the same from the hub, through huggingface_hub's cache
    downloads/llama,loop-layers=4..12,num-loops=4       an ordinary model, some layers of which become a loop
    preset:nano, my-config.yaml   a configuration, freshly initialised
    design:huginn                 a published design at the size of the preset demo, likewise
    package.module:factory        a function that returns a LoopedModel

The word means the same in every verb and in `loopscope.open`. Code that comes with a checkpoint is never run; a factory
is code that the user names.

Shape legend: B batch, T tokens.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.adapters.foreign import DTYPES, OWN_DTYPE
from loopscope.adapters.hf import download, is_hf_folder, open_folder
from loopscope.config import Config, DataConfig, ObjectiveConfig, TargetConfig, load_config
from loopscope.data.corpora import Corpus, Split, open_corpus
from loopscope.data.packing import SplitTokens
from loopscope.data.preparation import evaluation_corpus, pack_split
from loopscope.data.tokenizers import TOKENIZER_FILE, Tokenizer, fit_tokenizer, load_tokenizer, read_tokenizer
from loopscope.designs import DESIGN_SIZE, design
from loopscope.errors import ConfigError, DataError, LoopscopeError, ProtocolError, in_a_line
from loopscope.model.looped_lm import build
from loopscope.presets import preset
from loopscope.protocol import LoopedModel, missing_methods
from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from loopscope.training.session import checkpoint_path, read_data_record, run_of
from loopscope.words import WORDS, Retrofit, check_word, split_word

Batch = Tensor | tuple[Tensor, Tensor]
"""Ids (B, T), or ids with their targets."""
Say = Callable[[str], None]

UNTRAINED = "untrained"
USUAL_LENGTH = 256
"""Tokens of a sequence for a model that takes longer ones, or does not say what it takes."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model, and what the word that named it says of it. A factory may return one."""

    name: str
    model: LoopedModel
    tokenizer: Tokenizer | None = None
    objective: ObjectiveConfig | None = None
    """How it was, or would be, trained; None where nobody says."""
    max_length: int | None = None
    """Longest sequence it takes; None where it does not say."""
    notes: tuple[str, ...] = ()
    """What a reader of any result about it should know."""
    vocab_size: int
    config: Config | None = None
    """The whole configuration, where loopscope has one."""
    run: RunFolder | None = None
    """The run folder it comes from."""
    step: int | None = None
    """Training steps behind its weights; None where they are not known."""
    is_newest: bool = False
    """Whether it is what its run folder stands at: results about it may be left there."""
    stage: str = UNTRAINED
    """What is said of the weights where no step is known."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text, where the target says which."""
    batches: Iterable[Batch] | None = None
    """Text of its own, as ids, from a factory that returns a pair."""

    @property
    def is_trained(self) -> bool:
        """Whether its weights are more than an initialisation."""
        return self.step is not None or self.stage != UNTRAINED

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence when it is given text: those of its training, else the usual number."""
        if self.config is not None:
            return self.config.sequence_length
        return min(self.max_length or USUAL_LENGTH, USUAL_LENGTH)

    @property
    def data(self) -> DataConfig:
        """The text of its training, else the built-in one."""
        return DataConfig() if self.config is None else self.config.data


def open_target(word: str | Path | Opened, *, seed: int = 0, dtype: str | None = None) -> Opened:
    """The model that a word means, with everything that is known of it; `seed` is for freshly initialised weights.

    `dtype` is float32, bfloat16, float16, or own: as the folder stores them. By default other people's weights become
    float32, and everything else stays as it is.
    """
    check_dtype(dtype)
    opened = word if isinstance(word, Opened) else _opened(word, seed, dtype)
    if dtype in DTYPES and isinstance(opened.model, nn.Module):
        opened.model.to(DTYPES[dtype])
    return opened


def check_dtype(dtype: str | None) -> None:
    """Refuse what is no dtype that a target can be opened in."""
    if dtype is not None and dtype not in (*DTYPES, OWN_DTYPE):
        raise ConfigError.of("dtype", dtype, f"expected one of {', '.join((*DTYPES, OWN_DTYPE))}")


def _opened(word: str | Path, seed: int, dtype: str | None) -> Opened:
    text = str(word)
    check_word(text)
    base, how = split_word(text)
    path = Path(base)
    if text.startswith("preset:"):
        return of_config(text, preset(text.removeprefix("preset:")), seed)
    if text.startswith("design:"):
        return of_config(text, design(text.removeprefix("design:")).apply(preset(DESIGN_SIZE)), seed)
    if text.startswith("hf:"):
        return replace(of_folder(download(base), how, dtype), name=text)
    if path.is_dir():
        return replace(of_folder(path, how, dtype), name=text) if is_hf_folder(path) else of_run(path)
    if path.suffix in (".yaml", ".yml"):
        return of_config(text, load_config(path), seed)
    return of_made(text, made_by_factory(text, seed))


def is_factory(word: str) -> bool:
    """Whether a word is package.module:factory, as `open_target` reads it."""
    path = Path(split_word(word)[0])
    others = word.startswith(("preset:", "design:", "hf:")) or path.is_dir() or path.suffix in (".yaml", ".yml")
    return ":" in word and not others


def of_config(name: str, config: Config, seed: int) -> Opened:
    """A freshly initialised model: what a design does before anybody pays for its training."""
    if isinstance(config.model, TargetConfig):
        opened = open_target(config.model.target, seed=seed)
        return replace(opened, name=name, config=config, objective=config.objective, max_length=config.model.max_length)
    return Opened(
        name=name,
        model=build(config.model, seed=seed).eval(),
        vocab_size=config.model.vocab_size,
        max_length=config.model.max_length,
        objective=config.objective,
        config=config,
    )


def of_run(path: Path) -> Opened:
    """A run's newest checkpoint, or one checkpoint, with the run's tokenizer and objective."""
    folder, run = checkpoint_path(path), run_of(path)
    config = run.config()
    fresh = of_config(str(path), config, seed=config.training.seed)
    checkpoint.load_model_tensors(_module(fresh), checkpoint.load(folder).model_tensors(), folder)
    tokenizer = load_tokenizer(run.path / "tokenizer") if (run.path / "tokenizer").is_dir() else None
    return replace(
        fresh,
        tokenizer=tokenizer or fresh.tokenizer,
        objective=config.objective,
        max_length=config.model.max_length,
        end_ids=fresh.end_ids if tokenizer is None else tokenizer.end_ids,
        run=run,
        step=int(folder.name.removeprefix("step-")),
        is_newest=folder != path,
    )


def of_folder(path: Path, how: Retrofit | None = None, dtype: str | None = None) -> Opened:
    """Somebody else's checkpoint under the objective of its kind, with the tokenizer.json beside it."""
    kind = None if dtype == OWN_DTYPE else DTYPES[dtype or "float32"]
    foreign = open_folder(path, how, dtype=kind)
    file = path / TOKENIZER_FILE
    tokenizer = read_tokenizer(file) if file.is_file() else None
    if tokenizer is not None and tokenizer.vocab_size > foreign.vocab_size:
        raise DataError(f"{file} has {tokenizer.vocab_size} tokens, and the model beside it only {foreign.vocab_size}")
    return Opened(
        name=str(path),
        model=foreign.model,
        tokenizer=tokenizer,
        objective=foreign.objective,
        vocab_size=foreign.vocab_size,
        max_length=foreign.max_length,
        step=foreign.step,
        stage="step unknown",
        notes=foreign.notes,
        end_ids=foreign.end_ids,
    )


def made_by_factory(word: str, seed: int) -> Any:
    """Whatever the function that package.module:factory names returns."""
    factory = _imported(word)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _told_as_theirs(f"{word} failed", lambda: _called(factory, word))


def of_made(word: str, made: Any) -> Opened:
    """What a factory returned: a LoopedModel, a pair of it and batches, or an `Opened`."""
    opened = made if isinstance(made, Opened) else None
    model, batches = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    model = model if opened is None else opened.model
    if missing := _told_as_theirs(f"the model of {word} failed", lambda: missing_methods(model)):
        raise ConfigError(
            f"{word} returned {type(model).__name__}, which has no {', '.join(missing)}; see loopscope.adapt"
        )
    if isinstance(model, nn.Module):
        model.eval()
    if opened is not None:
        return replace(opened, name=word)
    if batches is not None and not isinstance(batches, Iterable):
        raise ConfigError(
            f"{word} returned a {type(batches).__name__} beside the model; batches are a list of ids (B, T)"
        )
    if isinstance(batches, Iterator):  # it can be read only once, and more than one measurement will
        batches = _told_as_theirs(f"the batches of {word} failed", partial(list, batches))
    vocab_size = _told_as_theirs(f"the model of {word} failed on two tokens", lambda: _count_logits(model))
    return Opened(name=word, model=model, vocab_size=vocab_size, batches=batches)


def _imported(word: str) -> Any:
    """What package.module:factory names, also in the working folder."""
    module_name, _, attribute = word.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{word} is not {WORDS}: {module_name!r} cannot be the name of a module")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"cannot import {module_name!r} ({error}); run from its folder or install it") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever their module does when it is imported, also to end the process
        raise ConfigError(f"cannot import {module_name!r}: {in_a_line(error)}") from error
    finally:
        sys.path.pop(0)
    if (package := module_name.partition(".")[0]) != "loopscope":  # our own faults stay ours
        _NAMED_PACKAGES.add(package)
    if not hasattr(module, attribute):
        raise ConfigError(f"module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


def their_failure(error: BaseException) -> str | None:
    """The sentence about an error that somebody's own code ran into, wherever we called it; None for one of ours.

    Theirs is the package that a factory was named in: the innermost line of it in the traceback is where to look.
    """
    where = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _NAMED_PACKAGES:
            where = f"{frame.f_code.co_filename}:{line}"
    return None if where is None else f"the model failed at {where}: {in_a_line(error)}"


_NAMED_PACKAGES: set[str] = set()
"""Packages of factories that were opened: as much a property of the process as what it has imported."""


def _called(factory: Any, word: str) -> Any:
    if not callable(factory):
        raise ConfigError(f"{word} is a {type(factory).__name__}, not a function that returns a looped model")
    return factory()


def _told_as_theirs(what: str, action: Callable[[], Any]) -> Any:
    """Run somebody else's code; whatever goes wrong in it is told as their own mistake, with where."""
    try:
        return action()
    except (LoopscopeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also SystemExit, which would end the command as a success
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        is_theirs = frame is not None and frame.tb_frame.f_code.co_filename != __file__
        where = f" at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}" if frame is not None and is_theirs else ""
        raise ConfigError(f"{what}{where}: {in_a_line(error)}") from error


def _count_logits(model: LoopedModel) -> int:
    """The vocabulary size, which a readout of two zeros tells."""
    with torch.no_grad():
        state = model.loop(model.embed(torch.zeros(1, 2, dtype=torch.long)), 1)
        vocab_size = model.readout(state, 1).shape[-1]
    if vocab_size < 2:
        raise ProtocolError("the model's readout has fewer than two logits")
    return int(vocab_size)


def _module(opened: Opened) -> nn.Module:
    if not isinstance(opened.model, nn.Module):
        raise ProtocolError(f"{opened.name} is not a torch module, so no weights can be loaded into it")
    return opened.model


def load(path: Path | str) -> LoopedModel:
    """The model of a run folder (its newest checkpoint) or of one checkpoint folder, in evaluation mode."""
    return of_run(Path(path)).model


def bring(model: object, device: str | None) -> None:
    """Move a model's weights to the device that is asked for."""
    if not isinstance(model, nn.Module) or device is None:
        return
    try:
        model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's own words: no such device, or no build for it
        raise ConfigError.of("device", device, str(error).splitlines()[0]) from None


# --- its text --------------------------------------------------------------------------------------------------------


def with_tokenizer(opened: Opened, tokenizer: str | None) -> Opened:
    """The target with a tokenizer of the user's choice, for one that brings none; `bytes`, or a tokenizer.json."""
    if tokenizer is None:
        return opened
    if opened.tokenizer is not None:
        raise ConfigError.of("tokenizer", tokenizer, f"{opened.name} has a tokenizer of its own")
    if tokenizer in ("bpe", "word"):
        raise ConfigError.of("tokenizer", tokenizer, "would have to be trained; name bytes, or a tokenizer.json")
    return replace(opened, tokenizer=fit_tokenizer(tokenizer, (), opened.vocab_size))


def tokens_for(opened: Opened, data: Sequence[str] | None, say: Say, split: Split = "valid") -> SplitTokens:
    """The text of `data`, all of it, or a split of the target's own text, in the target's tokens."""
    if opened.tokenizer is None:
        raise ConfigError(
            f"{opened.name} has no tokenizer.json or other tokenizer to read text (--data) with; name one with "
            "--tokenizer, or return loopscope.Opened with one from the factory"
        )
    tokens = pack_split(corpus_for(opened, data), "valid" if data is not None else split, opened.tokenizer, say)
    if data is None and (before := other_text_of(opened, tokens)) is not None:
        say(
            f"{opened.name} was trained on text of SHA-256 {before}, and its sources (training and validation) now "
            f"have {tokens.corpus_sha256}: what follows is about what they hold now"
        )
    return tokens


def corpus_for(opened: Opened, data: Sequence[str] | None) -> Corpus:
    """The corpus behind `tokens_for`; its validation split is the text."""
    if data is not None:
        return evaluation_corpus(tuple(data), opened.data.text_field)
    try:
        return open_corpus(opened.data)
    except DataError as error:
        raise DataError(
            f"{opened.name} has a text of its own, which cannot be opened (--data names another): {error}"
        ) from error


def other_text_of(opened: Opened, tokens: SplitTokens) -> str | None:
    """The hash of the text a run was trained on, where its sources now hold another; None where they do not."""
    if opened.run is None or opened.config is None or opened.data != opened.run.config().data:
        return None
    record = read_data_record(opened.run.path)
    before = "" if record is None else record.corpus_sha256
    return before if before and before != tokens.corpus_sha256 else None


open = open_target
"""Its public name; nothing in this module opens a file by Python's own."""
