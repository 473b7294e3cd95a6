"""Words that name a model or a text, looked at before anything heavy is imported: a wrong one costs no time.

No torch here. What a word means is opened by `loopscope.targets` and `loopscope.data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loopscope.config import MOST_LOOPS, load_config
from loopscope.designs import design
from loopscope.errors import ConfigError, RunError, suggest
from loopscope.presets import preset

WORDS = "a run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, design:NAME, configuration file or "
WORDS += "package.module:factory"
HF_CONFIG_FILE = "config.json"
TOKENIZERS = ("bytes", "bpe", "word")
"""Kinds of our own, by their names."""
PICKLED = (".pt", ".pth", ".bin", ".ckpt")
"""Endings of checkpoints that are pickles."""
LOOPED = "FOLDER,loop-layers=4..12,num-loops=4"
"""How an ordinary model is named to be opened as a looped one."""


@dataclass(frozen=True, kw_only=True)
class Retrofit:
    """How an ordinary model becomes a looped one: `FOLDER,loop-layers=4..12,num-loops=4[,drop-layers=2..3][,adapter]`.

    Layers are numbered as in the checkpoint, from 0, and ranges include both ends. Those before the looped ones become
    the prelude, those after them the coda.
    """

    loop_layers: range
    num_loops: int
    drop_layers: range = range(0)
    adapter: bool = False
    """Whether every loop reads W·[h; e]."""


_OPTIONS = ("loop-layers", "num-loops", "drop-layers", "adapter")


def split_word(word: str) -> tuple[str, Retrofit | None]:
    """A word without what turns an ordinary model into a looped one, and that.

    It is part of the word, and not flags of a verb, since a word is what run folders, policies and Python remember; and
    its parts are joined by commas, which no shell takes for its own.
    """
    parts = [part.partition("=") for part in word.split(",")]
    start = next((place for place, (name, _, _) in enumerate(parts) if place and name in _OPTIONS), None)
    if start is None:
        return word, None
    base = ",".join("".join(part) for part in parts[:start])
    given: dict[str, str] = {}
    for name, _, value in parts[start:]:
        if name not in _OPTIONS:
            raise ConfigError(f"{word}: unknown option {name!r}; {suggest(name, _OPTIONS)}")
        if name in given:
            raise ConfigError(f"{word}: {name} is given twice")
        given[name] = value
    for name in ("loop-layers", "num-loops"):
        if name not in given:
            raise ConfigError(f"{word}: {name} is missing; an ordinary model is looped by {LOOPED}")
    if given.get("adapter"):
        raise ConfigError(f"{word}: adapter takes no value")
    retrofit = Retrofit(
        loop_layers=_layers(word, "loop-layers", given["loop-layers"]),
        num_loops=_number(word, "num-loops", given["num-loops"], least=1),
        drop_layers=_layers(word, "drop-layers", given["drop-layers"]) if "drop-layers" in given else range(0),
        adapter="adapter" in given,
    )
    if set(retrofit.loop_layers) & set(retrofit.drop_layers):
        raise ConfigError(f"{word}: a layer cannot be both looped and dropped")
    return base, retrofit


def _layers(word: str, name: str, value: str) -> range:
    """`4..12`, or one layer."""
    first, _, last = value.partition("..")
    numbers = [_number(word, name, each, least=0) for each in (first, last or first)]
    if numbers[0] > numbers[1]:
        raise ConfigError(f"{word}: {name}={value} ends before it begins")
    return range(numbers[0], numbers[1] + 1)


def _number(word: str, name: str, value: str, least: int) -> int:
    if not (value.isascii() and value.isdigit()) or not least <= int(value[:9]) <= MOST_LOOPS or len(value) > 9:
        raise ConfigError(f"{word}: {name}={value!r} is not a whole number from {least} to {MOST_LOOPS:,}")
    return int(value)


def check_word(word: str) -> None:
    """Refuse a word that names no model, as far as a glance at the disk can tell."""
    base, retrofit = split_word(word)
    path = Path(base)
    if retrofit is not None and not base.startswith("hf:") and not (path / HF_CONFIG_FILE).is_file():
        raise RunError(f"{word}: only a Hugging Face folder, or hf:ORG/NAME, is looped so, and {base} is none")
    if word.startswith("preset:"):
        preset(word.removeprefix("preset:"))
    elif word.startswith("design:"):
        design(word.removeprefix("design:"))
    elif word.startswith("hf:"):
        return
    elif path.is_dir():
        _check_folder(path)
    elif path.suffix in (".yaml", ".yml"):
        load_config(path)
    elif path.suffix in PICKLED and path.is_file():
        raise RunError(f"{word} is a pickle, which is never opened; loopscope convert {word} out/ --from-pickle")
    elif ":" not in word:
        raise RunError(
            f"{word} is not {WORDS}; loopscope train makes a run, loopscope audit preset:nano audits a design"
        )


def check_policy(word: str, flag: str) -> None:
    """Refuse a halting policy whose file is not there; RULE:THRESHOLD is looked at later."""
    if word.endswith(".json") and not Path(word).exists():
        raise no_policy(Path(word), "no such file", flag)


def no_policy(path: Path, why: str, flag: str) -> ConfigError:
    """What is said of a file that is no halting policy."""
    return ConfigError.of(flag, str(path), f"{why}; `loopscope calibrate TARGET -o {path.name}` writes a policy")


def check_tokenizer(name: str | None) -> None:
    """Refuse a tokenizer that is neither of a kind we have nor a file or folder."""
    if name is None or name in TOKENIZERS or Path(name).expanduser().exists():
        return
    close = suggest(name, TOKENIZERS)
    why = f"no such file; name a tokenizer.json or one of {', '.join(TOKENIZERS)}"
    raise ConfigError.of("tokenizer", name, close if close.startswith("did") else why)


def _check_folder(path: Path) -> None:
    is_checkpoint = (path / HF_CONFIG_FILE).is_file() or (path / "state.json").is_file()
    if not is_checkpoint and not any((path / "checkpoints").glob("step-*")):
        raise RunError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
