"""Somebody else's checkpoint on this machine: the fields of its config.json and its tensors, read with suspicion.

Nothing is executed, unpickled or downloaded. A field that is missing is not guessed, since the defaults of the class
that wrote it may differ; a tensor too many is as wrong as one too few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, RunError, UnsupportedError
from loopscope.files import open_file, read_text
from loopscope.protocol import LoopedModel

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
MOST_CONFIG_BYTES = 64 << 20
"""Largest config.json or index that is read; the index of a model of 600 billion parameters has 9 MB."""
Shape = tuple[int, ...]
Layout = dict[str, dict[str, Shape]]
"""Our tensor → their tensors, with shapes, whose rows stacked in this order make it."""


class FieldError(ConfigError):
    """A field of a config.json is missing or of the wrong kind; the message names file and field."""


@dataclass(frozen=True)
class Foreign:
    """A model of somebody else on the protocol, with what an audit wants to know of it."""

    model: LoopedModel
    vocab_size: int
    max_length: int
    objective: ObjectiveConfig
    """How this kind of model is trained; no checkpoint says so itself."""
    notes: tuple[str, ...] = ()
    """What a reader of its audit should know."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    step: int | None = None
    """Training steps behind the weights, where the folder says so."""


@dataclass(frozen=True)
class Fields:
    """The fields of a config.json; every error names the file and the field."""

    path: Path
    values: Mapping[str, Any]

    def get(self, name: str) -> Any:
        """A field that may be absent or null."""
        return self.values.get(name)

    def whole(self, name: str) -> int:
        """A whole number of at least 1."""
        value = self._present(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise FieldError(f"{self.path}: {name} = {value!r} is not a whole number of at least 1")
        return value

    def number(self, name: str) -> float:
        """A number above 0."""
        value = self._present(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise FieldError(f"{self.path}: {name} = {value!r} is not a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; absent and null are false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise FieldError(f"{self.path}: {name} = {value!r} is neither true nor false")
        return bool(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """A token's id, or a list of them; none where the field is absent or null."""
        value = self.values.get(name)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
            raise FieldError(f"{self.path}: {name} = {value!r} is not a token's id, nor a list of them")
        return tuple(found)

    def rope_base(self) -> float:
        """rope_theta, which newer configurations keep among the rope_parameters."""
        parameters = self.get("rope_parameters")
        if parameters is None:
            return self.number("rope_theta")
        if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
            raise self.unsupported("rope_parameters", "only rope_type default is")
        return Fields(self.path, parameters).number("rope_theta")

    def check_plain_transformer(self) -> None:
        """Refuse what would change the layers into ones that we do not have, by the names that most families share."""
        if self.get("hidden_act") != "silu":
            raise self.unsupported("hidden_act", "only silu is")
        for name in ("attention_bias", "mlp_bias"):
            if self.flag(name):
                raise self.unsupported(name, "only false is")
        for name in ("rope_scaling", "quantization_config"):
            if self.get(name) is not None:
                raise self.unsupported(name, "only null is")
        width, num_heads = self.whole("hidden_size"), self.whole("num_attention_heads")
        if width % num_heads:
            raise self.unsupported("num_attention_heads", f"it does not divide hidden_size = {width}")
        if width // num_heads % 2:
            raise self.unsupported("num_attention_heads", f"it cuts hidden_size = {width} into odd heads")
        if self.get("head_dim") is not None and self.whole("head_dim") != width // num_heads:
            raise self.unsupported("head_dim", f"only hidden_size / num_attention_heads = {width // num_heads} is")

    def unsupported(self, name: str, why: str) -> UnsupportedError:
        """The error for a value that may well be right, but that the adapter cannot express."""
        return UnsupportedError(f"{self.path}: {name} = {self.get(name)!r} is not supported: {why}")

    def _present(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise FieldError(f"{self.path}: the field {name} is missing")
        return self.values[name]


class Weights:
    """The tensors of a folder, in one .safetensors file or in those that its index names; each read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home: dict[str, Any] = {}
        for path in _files(folder):
            opened = _open(path)
            for name in opened.keys():  # noqa: SIM118 (an opened file is no mapping)
                if name in self._home:
                    raise RunError(f"{path} holds the tensor {name}, which another file of the folder holds too")
                self._home[name] = opened

    def check(self, expected: Mapping[str, Shape]) -> None:
        """Refuse a folder whose names and shapes are not exactly these; nothing but headers is read."""
        self._refuse(expected.keys() - self._home.keys(), "lacks")
        self._refuse(self._home.keys() - expected.keys(), "has, beyond what its config.json describes,")
        for name, shape in expected.items():
            found = tuple(self._home[name].get_slice(name).get_shape())
            if found != shape:
                raise RunError(f"{self.folder}: {name} has the shape {found}; config.json asks for {shape}")

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor."""
        try:
            tensor = self._home[name].get_tensor(name)
        except SafetensorError as error:
            raise RunError(f"{self.folder}: {name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise UnsupportedError(f"{self.folder}: {name} is of {tensor.dtype}; quantised weights are not read")
        return tensor.to(dtype)

    def _refuse(self, names: Set[str], what: str) -> None:
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(f"{self.folder} {what} the tensor {min(names)}{others}")


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        text = read_text(path, MOST_CONFIG_BYTES)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise RunError(f"{path} is empty")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise RunError(f"{path} holds not a JSON object but a {type(data).__name__}")
    return data


def _files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those the index names, or the only one there is."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed(index)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = any(path.suffix in (".bin", ".pt", ".pth", ".ckpt") for path in folder.iterdir())
        why = "; pickled weights are never opened, save them as safetensors" if pickles else ""
        raise RunError(f"{folder} has no .safetensors file{why}")
    if len(files) > 1:
        raise RunError(f"{folder} has {len(files)} .safetensors files and no {INDEX_FILE} to say which belong together")
    return files


def _indexed(index: Path) -> list[Path]:
    """The files that the index of a sharded checkpoint names; only those of its own folder."""
    home = read_json(index).get("weight_map")
    if not isinstance(home, dict) or not home:
        raise RunError(f"{index} has no weight_map")
    for name in home.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise RunError(f"{index} names {name!r}, which is not a .safetensors file of its own folder")
    files = [index.parent / name for name in sorted(set(home.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise RunError(f"{index.parent} lacks {missing[0]}, which its index names; the download may be incomplete")
    return files


def _open(path: Path) -> Any:
    try:
        open_file(path).close()  # safetensors maps whatever it is given
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{path} is not a readable .safetensors file: {why}") from error
