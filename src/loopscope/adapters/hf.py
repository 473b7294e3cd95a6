"""A Hugging Face folder (config.json and safetensors), local or of the hub, as a model on the protocol.

Each model type has an adapter that is part of loopscope. Code that comes with a checkpoint is never fetched or run, and
nothing is unpickled.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from loopscope.adapters import hrm_text, huginn, native, ouro, paper, parcae, retrofit
from loopscope.adapters.foreign import CONFIG_FILE, INDEX_FILE, Fields, Foreign, Weights, fill, read_json, tensors_of
from loopscope.data.files import needed
from loopscope.data.tokenizers import COMPANIONS, TOKENIZER_FILE
from loopscope.errors import ConfigError, RunError, UnsupportedError, words_of
from loopscope.words import LOOPED, Retrofit, split_word

# A further model type is one module with `described` and one line here.
ADAPTERS: dict[str, Callable[[Fields], Foreign]] = {
    "ouro": ouro.described,
    "hrm_text": hrm_text.described,
    "huginn_raven": huginn.described,
    "parcae": parcae.described,
    paper.MODEL_TYPE: paper.described,
    native.MODEL_TYPE: native.described,
}

FETCHED = (CONFIG_FILE, "*.safetensors", INDEX_FILE, TOKENIZER_FILE, *COMPANIONS)
"""Files of a hub's repository that are of any use here."""


def is_hf_folder(path: Path) -> bool:
    """Whether a folder says that it is one."""
    return (path / CONFIG_FILE).is_file()


def open_folder(folder: Path, how: Retrofit | None = None, *, dtype: torch.dtype | None = torch.float32) -> Foreign:
    """The model in a folder, through the adapter of its model type; `how` loops an ordinary one.

    `dtype` None keeps the weights as they are stored.
    """
    foreign = describe_folder(folder, how)
    fill(foreign, Weights(folder), dtype)
    return foreign


def describe_folder(folder: Path, how: Retrofit | None = None) -> Foreign:
    """The model that a folder's config.json describes, without weights; what no adapter reads is refused."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise RunError(f"{folder} has no {CONFIG_FILE}: it is not a Hugging Face folder")
    values = read_json(path)
    fields, kind = Fields(path, values), values.get("model_type")
    if kind is None and values.get("_class_name") == parcae.CLASS_NAME:
        kind = "parcae"  # published files say no more
    known = ", ".join(sorted(ADAPTERS))
    if kind is None:
        raise RunError(f"{path} has no model_type; known: {known}")
    if kind in retrofit.ORDINARY and how is None:
        raise ConfigError(f"{folder} holds an ordinary model of type {kind!r}, without loops; open it as {LOOPED}")
    if kind in retrofit.ORDINARY and how is not None:
        foreign = retrofit.described(fields, how)
    elif not isinstance(kind, str) or kind not in ADAPTERS:
        raise UnsupportedError(
            f"{path}: model type {kind!r} has no adapter (known: {known}; looped by {LOOPED}: "
            f"{', '.join(retrofit.ORDINARY)}); write a function that returns loopscope.adapt(embed=…, loop=…, "
            "readout=…, num_loops=…) and pass it as package.module:factory"
        )
    elif how is not None:
        raise ConfigError(f"{folder} holds a looped model of type {kind!r}: it has loops of its own")
    else:
        foreign = ADAPTERS[kind](fields)
    return replace(foreign, end_ids=fields.ids("eos_token_id"))


def save_folder(network: nn.Module, like: str | Path, out: Path) -> None:
    """Write a model in the format of the folder `like`, which it was opened from: the inverse of `open_folder`.

    Configuration and tokenizer are copied from there. `like` is the word that opened it, options included.
    """
    word, how = split_word(str(like))
    folder = Path(word)
    foreign = describe_folder(folder, how)
    if how is not None and how.drop_layers:
        raise UnsupportedError(f"{like}: a model that has dropped layers has no place in the format of {folder}")
    own = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if own != {name: tuple(parameter.shape) for name, parameter in foreign.network.named_parameters()}:
        raise RunError(f"the model is not of the design that {like} describes, so it has no place in that format")
    for name, start in foreign.given.items():
        if not torch.equal(network.get_parameter(name).detach().cpu().float(), start):
            raise UnsupportedError(f"{like}: {name} has been trained, and the format of {folder} has no place for it")
    out.mkdir(parents=True, exist_ok=True)
    for pattern in FETCHED:
        for file in folder.glob(pattern):
            if file.suffix != ".safetensors" and file.name != INDEX_FILE and file.parent != out:
                shutil.copyfile(file, out / file.name)
    # Beside its place first: the model may be a view of the very file that is written anew.
    written = out / "model.safetensors.part"
    save_file(tensors_of(network, foreign.layout), written, metadata={"format": "pt"})
    written.replace(out / "model.safetensors")


def download(word: str) -> Path:
    """The folder of `hf:ORG/NAME[@REVISION]`, fetched through huggingface_hub's cache (offline mode, token respected).

    Only the configuration, safetensors and tokenizer files are fetched: nothing that could be run.
    """
    name, _, revision = word.removeprefix("hf:").partition("@")
    hub = needed("huggingface_hub", f"opening {word}")
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=list(FETCHED)))
    except Exception as error:  # not found, gated, no network, a malformed name: the library's own words say which
        raise RunError(f"{word} cannot be fetched: {words_of(error)}") from error
