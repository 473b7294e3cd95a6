"""A pickled checkpoint (`.pt`, `.pth`, `.bin`) made into a folder of safetensors; only `loopscope convert` does it.

    loopscope convert checkpoint.pt out/ --from-pickle

The file is read in a process of its own under limits (`unpickling`). What it holds decides what is written:

    a state dict, config.json beside the file       the same names as safetensors, with that config.json and tokenizer
    {model_state, config, …} of the paper's models  a folder that `adapters.paper` reads, its config.json made here
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from loopscope.adapters import paper, retrofit, unpickling
from loopscope.adapters.foreign import CONFIG_FILE, Weights, fill, read_json
from loopscope.adapters.hf import FETCHED, describe_folder
from loopscope.errors import ConfigError, RunError, UnsupportedError
from loopscope.files import folder_written_whole, open_file

ROOM = 2 << 30
"""Bytes of memory, and of disk, beyond three times the file: torch and safetensors need some for themselves."""
SECONDS, BYTES_PER_SECOND = 120, 20 << 20
"""Time that a child gets: a start, and what a slow disk needs for the file."""
SPELLINGS = {
    "num_heads": ("num_heads", "n_heads", "n_head", "num_attention_heads"),
    "num_loops": ("num_loops", "n_loops", "num_recurrences"),
    "norm_eps": ("norm_eps", "rms_norm_eps", "eps"),
    "readout": ("readout",),
    "inter_loop_norm": ("inter_loop_norm",),
    "placement": ("placement",),
}
"""What the tensors of the paper's models do not tell → how a pickled configuration may call it."""
USUAL = {"norm_eps": 1e-6, "inter_loop_norm": False, "placement": "per-loop"}
"""The paper's own, where neither the file nor --setting says otherwise."""


def convert_pickle(path: Path, out: Path, settings: Mapping[str, str] | None = None) -> list[str]:
    """Write the folder `out` from a pickled file, whole or not at all; returns what a reader should know.

    `settings` (num_heads, num_loops, …) complete what a checkpoint of the paper does not say about itself.
    """
    given = _checked(settings or {})
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and not empty; name another folder")
    with folder_written_whole(out.absolute()) as beside:
        found = _read_in_a_child(path, size, beside)
        beside.joinpath(unpickling.FOUND_FILE).unlink()
        if (path.parent / CONFIG_FILE).is_file():
            if given:
                raise ConfigError.of(
                    "setting", next(iter(given)), f"{path.parent / CONFIG_FILE} says what the model is"
                )
            _copy_companions(path.parent, beside)
            notes = [f"configuration from {path.parent / CONFIG_FILE}"]
        else:
            values, notes = _paper_config(path, beside, found, given)
            (beside / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
        if (
            read_json(beside / CONFIG_FILE).get("model_type") not in retrofit.ORDINARY
        ):  # a word says how these are looped
            fill(describe_folder(beside), Weights(beside), None)
    return notes


def _read_in_a_child(path: Path, size: int, folder: Path) -> dict[str, Any]:
    """Start the reader, wait for it, and tell what became of it."""
    seconds = SECONDS + size // BYTES_PER_SECOND
    command = [sys.executable, "-P", unpickling.__file__, str(path), str(folder)]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        child = subprocess.run([*command, str(3 * size + ROOM), str(seconds)], timeout=2 * seconds, text=True, **quiet)
    except subprocess.TimeoutExpired:
        raise RunError(f"{path} is not taken: reading it took more than {2 * seconds} seconds") from None
    if child.returncode == unpickling.REFUSED:
        raise RunError(f"{path} is not taken: {child.stdout.strip()}")
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise RunError(f"{path} is not taken: the process that read it ended ({last[:300]})")
    return read_json(folder / unpickling.FOUND_FILE)


def _copy_companions(source: Path, out: Path) -> None:
    for pattern in FETCHED:
        for file in source.glob(pattern):
            if file.suffix == ".json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)


def _checked(settings: Mapping[str, str]) -> dict[str, Any]:
    """Settings by name, as the values that config.json takes."""
    values: dict[str, Any] = {}
    for name, text in settings.items():
        if name not in SPELLINGS:
            raise ConfigError.of("setting", name, f"known: {', '.join(SPELLINGS)}")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def _paper_config(
    path: Path, folder: Path, found: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The config.json of one of the paper's models: sizes from its tensors, the rest from the pickle or `given`."""
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    if paper.EMBEDDING not in shapes or "position_embedding.weight" not in shapes:
        raise UnsupportedError(
            f"{path} holds no model of the paper (it has no {paper.EMBEDDING}), and no {CONFIG_FILE} lies beside it to "
            "say what it is"
        )
    if "raw_alpha" in shapes:
        raise UnsupportedError(f"{path} has an alpha readout (raw_alpha), whose exponent is not known to us")
    rest = found.get("rest")
    pickled = rest.get("config") if isinstance(rest, dict) else None
    said = pickled if isinstance(pickled, dict) else {}
    values: dict[str, Any] = {"readout": "rmsnorm" if "decode_norm.weight" in shapes else "raw", **USUAL}
    for name, spellings in SPELLINGS.items():
        for word in spellings:
            if word in said:
                values[name] = said[word]
    values |= given
    if absent := [name for name in SPELLINGS if name not in values]:
        raise ConfigError(f"{path} does not say {' and '.join(absent)}; add --setting {absent[0]}=…")
    layers = {name.split(".")[1] for name in shapes if name.startswith("layers.")}
    vocab_size, width = shapes[paper.EMBEDDING]
    sizes = {
        "vocab_size": vocab_size,
        "width": width,
        "max_length": shapes["position_embedding.weight"][0],
        "num_layers": len(layers),
        "mlp_width": shapes.get("layers.0.ffn.w1.weight", (0,))[0],
        "exit_gate": "exit_gate.weight" in shapes,
    }
    told = [f"{name} = {values[name]!r}" for name in SPELLINGS]
    return {"model_type": paper.MODEL_TYPE, **sizes, **values}, [f"a model of the paper: {', '.join(told)}"]
