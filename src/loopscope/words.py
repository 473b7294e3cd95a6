"""Words that name a model or a text, looked at before anything heavy is imported: a wrong one costs no time.

No torch here. What a word means is opened by `loopscope.targets` and `loopscope.data`.
"""

from __future__ import annotations

from pathlib import Path

from loopscope.config import load_config
from loopscope.designs import design
from loopscope.errors import RunError
from loopscope.presets import preset

WORDS = "a run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, design:NAME, configuration file or "
WORDS += "package.module:factory"
HF_CONFIG_FILE = "config.json"


def check_word(word: str) -> None:
    """Refuse a word that names no model, as far as a glance at the disk can tell."""
    path = Path(word)
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
    elif ":" not in word:
        raise RunError(
            f"{word} is not {WORDS}; loopscope train makes a run, loopscope audit preset:nano audits a design"
        )


def _check_folder(path: Path) -> None:
    is_checkpoint = (path / HF_CONFIG_FILE).is_file() or (path / "state.json").is_file()
    if not is_checkpoint and not any((path / "checkpoints").glob("step-*")):
        raise RunError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
