"""Checkpoints: safetensors and JSON, complete or absent, checked before they are trusted.

    step-00000250/
      model.safetensors       parameters and buffers                     (or, of a sharded run, shard-*.safetensors
      optimizer.safetensors   optimiser state, by parameter name          with both, written by all ranks)
      state.json              step, guards, monitor; everything that is not a tensor
      checksums.json          SHA-256 of the files above

Data order, dropout and sampled depth are functions of (seed, step), so they need no state.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, distribute_tensor

from loopscope.errors import RunError
from loopscope.files import MOST_JSON_BYTES, folder_written_whole, read_bytes, sha256_of
from loopscope.results.checkpoint import SavedRun, SavedWeights
from loopscope.results.record import MisfitError, decode, text_of
from loopscope.training.distributed import Ranks
from loopscope.training.optimizers import Optimizers

T = TypeVar("T")

STATE_FILE, SUMS_FILE = "state.json", "checksums.json"
SLOTS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Muon: {"momentum_buffer"},
}
"""What an optimiser keeps of every parameter: as many numbers as the parameter has, and the count of its steps."""
MODEL, OPTIMIZER = "model/", "optimizer/"
"""Prefixes of the two kinds of tensors in a sharded checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose checksums were right."""

    path: Path
    state: SavedWeights

    @property
    def step(self) -> int:
        """Steps that had been made."""
        return self.state.step

    def resumable(self) -> SavedRun:
        """The state that a run goes on from; one that it cannot go on from is refused before anything is taken."""
        data = _read(self.path / STATE_FILE)
        if decode(data, dict[str, Any]).keys() <= set(SavedWeights.__slots__):
            raise RunError(
                f"checkpoint {self.path} holds weights alone, and cannot be resumed; start from it by --init-from"
            )
        return _decoded(self.path / STATE_FILE, data, SavedRun)

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, whole, whatever the number of ranks that wrote them."""
        with _told(self.path):
            if not self.state.sharded:
                return load_file(self.path / "model.safetensors")
            _check_headers(self.path)
            reader = HuggingFaceStorageReader(str(self.path))
            sizes = reader.read_metadata().state_dict_metadata
            whole = {name: _empty(meta) for name, meta in sizes.items() if name.startswith(MODEL)}
            load_shards(whole, storage_reader=reader, no_dist=True)
            return {name.removeprefix(MODEL): tensor for name, tensor in whole.items()}

    def restore_tensors(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Put parameters, buffers and optimiser state into a model that may be sharded over any number of ranks."""
        with _told(self.path):
            if not self.state.sharded:
                load_model_tensors(model, self.model_tensors(), self.path)
                load_optimizer_tensors(model, optimizers, load_file(self.path / "optimizer.safetensors"))
                return
            _check_headers(self.path)
            reader = HuggingFaceStorageReader(str(self.path))
            parameters = dict(model.named_parameters())
            slots = {
                name: _like_its_parameter(parameters, name, meta)
                for name, meta in reader.read_metadata().state_dict_metadata.items()
                if name.startswith(OPTIMIZER)
            }
            own = {MODEL + name: tensor for name, tensor in model_tensors(model).items()}
            load_shards({**own, **slots}, storage_reader=reader, no_dist=not dist.is_initialized())
            load_optimizer_tensors(model, optimizers, {n.removeprefix(OPTIMIZER): t for n, t in slots.items()})


def save(folder: Path, model: nn.Module, optimizers: Optimizers, state: SavedWeights) -> Path:
    """Write step-N beside its place and rename it there."""
    path = folder / f"step-{state.step:08d}"
    with failures_of_the_disk(path), folder_written_whole(path) as beside:
        save_file(model_tensors(model), beside / "model.safetensors")
        save_file(optimizer_tensors(model, optimizers), beside / "optimizer.safetensors")
        _write_state(beside, state)
    return path


def save_weights(folder: Path, tensors: dict[str, Tensor], step: int) -> None:
    """Write step-N with weights alone: it can be opened and started from, and not resumed.

    `folder` is one that is not in use yet; whoever writes it makes it whole or absent.
    """
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    _write_state(path, SavedWeights(step=step))


def save_sharded(folder: Path, model: nn.Module, optimizers: Optimizers, state: SavedRun, ranks: Ranks) -> None:
    """Every rank writes its own shards into one folder beside; the first rank completes and renames it."""
    path = folder / f"step-{state.step:08d}"
    tensors = {
        **{MODEL + name: tensor for name, tensor in model_tensors(model).items()},
        **{OPTIMIZER + name: tensor for name, tensor in optimizer_tensors(model, optimizers).items()},
    }

    def write(beside: Path) -> None:
        ranks.barrier()
        writer = HuggingFaceStorageWriter(str(beside), save_distributed=True)
        save_shards(tensors, storage_writer=writer)
        ranks.barrier()

    with failures_of_the_disk(path):
        if not ranks.is_first:
            write(path.with_name(f".{path.name}.shared"))
            return
        with folder_written_whole(path, tag="shared") as beside:
            write(beside)
            _write_state(beside, replace(state, sharded=True))


@contextmanager
def failures_of_the_disk(path: Path) -> Iterator[None]:
    """A disk that is full, failing, read-only or forbidden is an OSError that names the checkpoint.

    safetensors tells of it in words that end with "(os error 28)", and torch keeps one failure for every rank.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise OSError(failure.errno, failure.strerror, str(path)) from error
        raise


def load(path: Path) -> Checkpoint:
    """Open a checkpoint after checking it; anything wrong is a RunError that names the file."""
    sums = _decoded(path / SUMS_FILE, _read(path / SUMS_FILE), dict[str, str])
    for name, expected in sums.items():
        if Path(name).name != name:
            raise RunError(f"checkpoint {path} is damaged: {SUMS_FILE} names {name!r}, which is not a file of it")
        with _told(path):
            if sha256_of(path / name) != expected:
                raise RunError(f"checkpoint {path} is damaged: {name} does not match its checksum")
    state = _decoded(path / STATE_FILE, _read(path / STATE_FILE), SavedWeights)
    if re.fullmatch(r"step-\d+", path.name) and int(path.name.removeprefix("step-")) != state.step:
        raise RunError(f"checkpoint {path} is damaged: its {STATE_FILE} is one of step {state.step}")
    return Checkpoint(path, state)


def _read(path: Path) -> bytes:
    """A JSON file that a checkpoint cannot do without."""
    try:
        return read_bytes(path, MOST_JSON_BYTES)
    except FileNotFoundError:
        raise RunError(f"checkpoint {path.parent} cannot be read: {path.name} is missing") from None
    except OSError as error:
        raise RunError(f"checkpoint {path.parent} cannot be read: {path.name}: {error.strerror}") from None


def _decoded(path: Path, data: bytes, kind: type[T]) -> T:
    try:
        return decode(data, kind)
    except MisfitError as error:
        raise RunError(f"checkpoint {path.parent} is damaged: {path.name} {error}") from None


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What can go wrong with the tensors of a checkpoint, as one sentence; a right checksum may be forged."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        told = error.strerror if isinstance(error, OSError) else None  # without "[Errno 22]"
        reason = told or (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise RunError(f"checkpoint {path} is damaged or incomplete: {reason}") from error


def _check_headers(path: Path) -> None:
    """Refuse shards whose headers are not what safetensors allows: torch's reader takes any length on trust."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt"):
            pass


def newest(folder: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are named and passed over."""
    for path in reversed(list_steps(folder)):
        try:
            return load(path)
        except RunError as error:
            say(f"{error}; trying the one before")
    return None


def list_steps(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def prune(folder: Path, keep_last: int, best_step: int | None) -> None:
    """Remove all but the last few checkpoints and the best one, and what killed processes left half-written."""
    for path in list_steps(folder)[:-keep_last]:
        if path.name != f"step-{best_step or 0:08d}":
            shutil.rmtree(path)
    for half in folder.glob(".step-*"):
        shutil.rmtree(half, ignore_errors=True)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tensor shared by two modules appears once."""
    kept = set(model.state_dict(keep_vars=True))
    tensors = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def load_model_tensors(model: nn.Module, tensors: dict[str, Tensor], source: object) -> None:
    """Copy tensors into a model of exactly the same names and shapes."""
    own = model_tensors(model)
    wrong = [name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape]
    if own.keys() != tensors.keys() or wrong:
        differing = sorted([*(own.keys() ^ tensors.keys()), *wrong])
        raise RunError(f"{source} does not fit this model; first differing tensor: {differing[0]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_spread_like(tensor, tensors[name]))


def optimizer_tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, Tensor]:
    """Optimiser state as {parameter name/slot: tensor}."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{slot}": value.detach().clone().contiguous()
        for part in optimizers.parts
        for parameter, slots in part.state.items()
        for slot, value in slots.items()
    }


def load_optimizer_tensors(model: nn.Module, optimizers: Optimizers, tensors: dict[str, Tensor]) -> None:
    """Put the state back where `optimizer_tensors` took it from; a ValueError names what does not fit there."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, slot = key.rsplit("/", 1)
        by_parameter.setdefault(name, {})[slot] = tensor
    parameters = dict(model.named_parameters())
    for part in optimizers.parts:
        owned = {id(parameter) for group in part.param_groups for parameter in group["params"]}
        for name, slots in by_parameter.items():
            if name not in parameters:
                raise ValueError(f"the optimiser's state is about {name!r}, which the model does not have")
            if id(parameters[name]) in owned:
                shapes = {value.shape for slot, value in slots.items() if slot != "step"}
                if slots.keys() != SLOTS[type(part)] or shapes != {parameters[name].shape}:
                    raise ValueError(f"the optimiser's state of {name} is incomplete or of another shape")
                part.state[parameters[name]] = {
                    slot: value if slot == "step" else _spread_like(parameters[name], value)
                    for slot, value in slots.items()
                }


def _write_state(beside: Path, state: SavedWeights) -> None:
    """state.json, then the checksums of everything that is there."""
    (beside / STATE_FILE).write_text(text_of(state), encoding="utf-8")
    sums = {file.name: sha256_of(file) for file in sorted(beside.iterdir())}
    (beside / SUMS_FILE).write_text(text_of(sums), encoding="utf-8")


def _spread_like(model_tensor: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor on the model tensor's device, and sharded as that one is."""
    if isinstance(model_tensor, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor, model_tensor.device_mesh, model_tensor.placements)
    return tensor.to(model_tensor.device)


def _empty(meta: Any) -> Tensor:
    return torch.empty(meta.size, dtype=meta.properties.dtype)


def _like_its_parameter(parameters: dict[str, nn.Parameter], name: str, meta: Any) -> Tensor:
    """Room for an optimiser slot: spread like its parameter when of the same shape, else whole."""
    parameter = parameters[name.removeprefix(OPTIMIZER).rsplit("/", 1)[0]]
    if tuple(meta.size) == tuple(parameter.shape):
        return torch.zeros_like(parameter, requires_grad=False)
    return _empty(meta)
