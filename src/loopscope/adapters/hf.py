"""A Hugging Face folder (config.json and safetensors), local or of the hub, as a model on the protocol.

Each model type has an adapter that is part of loopscope. Code that comes with a checkpoint is never fetched or run, and
nothing is unpickled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from loopscope.adapters import hrm_text, native, ouro
from loopscope.adapters.foreign import CONFIG_FILE, INDEX_FILE, Fields, Foreign, Weights, read_json
from loopscope.data.tokenizers import COMPANIONS, TOKENIZER_FILE
from loopscope.errors import RunError, UnsupportedError

# A further model type is one module with `load` and one line here.
ADAPTERS: dict[str, Callable[[Fields, Weights], Foreign]] = {
    "ouro": ouro.load,
    "hrm_text": hrm_text.load,
    native.MODEL_TYPE: native.load,
}

FETCHED = (CONFIG_FILE, "*.safetensors", INDEX_FILE, TOKENIZER_FILE, *COMPANIONS)
"""Files of a hub's repository that are of any use here."""


def is_hf_folder(path: Path) -> bool:
    """Whether a folder says that it is one."""
    return (path / CONFIG_FILE).is_file()


def open_folder(folder: Path) -> Foreign:
    """The model in a folder, through the adapter of its model type; weights as float32."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RunError(f"{folder} has no {CONFIG_FILE}: it is not a Hugging Face folder")
    values = read_json(path)
    kind, known = values.get("model_type"), ", ".join(sorted(ADAPTERS))
    if kind is None:
        raise RunError(f"{path} has no model_type; known: {known}")
    if not isinstance(kind, str) or kind not in ADAPTERS:
        raise UnsupportedError(
            f"{path}: model type {kind!r} has no adapter (known: {known}); write a function that returns "
            "loopscope.adapt(embed=…, loop=…, readout=…, num_loops=…) and pass it as package.module:factory"
        )
    fields = Fields(path, values)
    return replace(ADAPTERS[kind](fields, Weights(folder)), end_ids=fields.ids("eos_token_id"))


def download(word: str) -> Path:
    """The folder of `hf:ORG/NAME[@REVISION]`, fetched through huggingface_hub's cache (offline mode, token respected).

    Only the configuration, safetensors and tokenizer files are fetched: nothing that could be run.
    """
    name, _, revision = word.removeprefix("hf:").partition("@")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UnsupportedError(f"opening {word} needs huggingface_hub; run: pip install 'loopscope[hf]'") from None
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=list(FETCHED)))
    except Exception as error:  # not found, gated, no network, a malformed name: the library's own words say which
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(f"{word} cannot be fetched: {reason}") from error
