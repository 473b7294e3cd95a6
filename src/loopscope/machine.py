"""What this machine offers and every choice made because of it, each with its reason."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("loopscope", "torch", "numpy", "safetensors", "tokenizers", "pyyaml", "tyro", "rich", "jinja2")
OPTIONAL_PACKAGES = ("transformers", "datasets", "ray", "lm-eval", "fastapi", "tensorboard", "wandb", "trackio")


@dataclass(frozen=True)
class Choice:
    """An automatic choice: what was chosen, its value, and why."""

    name: str
    value: str | int | float | bool
    reason: str


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for extras that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if (commit := _own_commit()) is not None:
        found["loopscope"] = f"{found['loopscope']} ({commit})"
    return found


def _own_commit() -> str | None:
    """The commit of loopscope itself where it runs from a checkout, "changed" added where files differ from it."""
    root = Path(__file__).parents[2]
    state = git_state(root) if (root / ".git").exists() else None
    return None if state is None else state["commit"][:12] + (", changed" if state["changed"] else "")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether there are changes, or None where there is no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def choose_device() -> Choice:
    """The first of CUDA, MPS, CPU that works here."""
    import torch

    if torch.cuda.is_available():
        return Choice("device", "cuda", f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}")
    if torch.backends.mps.is_available():
        return Choice("device", "mps", "Apple GPU found, no CUDA")
    return Choice("device", "cpu", "no CUDA and no Apple GPU found")


def choose_dtype(device: str) -> Choice:
    """bf16 autocast where the hardware multiplies it natively, fp32 elsewhere."""
    import torch

    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return Choice("autocast", "bfloat16", "this GPU multiplies bf16 natively")
    return Choice("autocast", "off", "float32: bf16 autocast is for GPUs that multiply it natively")


def choose_threads() -> Choice:
    """Threads of one process: what torch was told, else the cores this process may use."""
    import torch

    if "OMP_NUM_THREADS" in os.environ:
        return Choice("threads", torch.get_num_threads(), "set by OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Choice("threads", torch.get_num_threads(), f"torch's default on {cores} usable cores")


def choose_denormals(device: str) -> Choice:
    """Denormals slow the paper's recipe on CPUs up to four times, so they are flushed to zero there."""
    if device != "cpu":
        return Choice("flush_denormals", False, "only CPUs slow down on denormal numbers")
    return Choice("flush_denormals", True, "denormal numbers in attention and AdamW slow CPU training down")


def choose_compile(device: str) -> Choice:
    """torch.compile of one loop needs a C++ compiler on CPUs."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if device == "cpu" and compiler is None:
        return Choice("compile", False, "no C++ compiler found (set CXX)")
    if device == "cpu":
        return Choice("compile", False, f"possible with {compiler}, off: nothing measured yet that pays for it")
    return Choice("compile", True, "one loop is compiled on GPUs")


def resolve_compile(setting: str, device: str) -> Choice:
    """--compile on|off|auto against what this machine can do; a missing compiler is a note, not a failure."""
    automatic = choose_compile(device)
    if setting == "auto" or "no C++ compiler" in automatic.reason:
        return automatic
    return Choice("compile", setting == "on", f"--compile {setting}")


def choose_attention(device: str) -> Choice:
    """SDPA picks its kernel per call; derivative audits need the MATH backend."""
    return Choice("attention", "sdpa", f"PyTorch's fused kernel for {device}; audits switch to the MATH backend")


def automatic_choices(device: Choice) -> list[Choice]:
    """Every choice that follows from the machine and the device chosen on it."""
    per_device = (choose_dtype, choose_denormals, choose_compile, choose_attention)
    return [device, choose_threads(), *(choose(str(device.value)) for choose in per_device)]
