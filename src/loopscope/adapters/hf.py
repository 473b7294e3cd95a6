"""A local Hugging Face folder (config.json and safetensors) as a model on the protocol.

Each model type has an adapter that is part of loopscope, or, for hrm_text, of transformers. Code that comes with a
checkpoint is never run, nothing is unpickled, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loopscope.adapters import hrm_text, ouro
from loopscope.adapters.foreign import CONFIG_FILE, Fields, Foreign, Weights, read_json
from loopscope.errors import RunError, UnsupportedError

# A further model type is one module with `load` and one line here.
ADAPTERS: dict[str, Callable[[Fields, Weights], Foreign]] = {"ouro": ouro.load, "hrm_text": hrm_text.load}


def is_hf_folder(path: Path) -> bool:
    """Whether a folder says that it is one."""
    return (path / CONFIG_FILE).is_file()


def open_folder(folder: Path) -> Foreign:
    """The model in a folder, through the adapter of its model type; weights as float32."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RunError(f"{folder} has no {CONFIG_FILE}: it is no Hugging Face folder")
    values = read_json(path)
    kind, known = values.get("model_type"), ", ".join(sorted(ADAPTERS))
    if kind is None:
        raise RunError(f"{path} has no model_type; known: {known}")
    if not isinstance(kind, str) or kind not in ADAPTERS:
        raise UnsupportedError(
            f"{path}: model type {kind!r} has no adapter (known: {known}); write a function that returns "
            "loopscope.adapt(embed=…, loop=…, readout=…, num_loops=…) and pass it as package.module:factory"
        )
    return ADAPTERS[kind](Fields(path, values), Weights(folder))
