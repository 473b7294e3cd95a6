"""What this machine offers and every choice made because of it, each with its reason.

No torch at import: one choice (`limit_cpu_isa`) must be made before torch's first product.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loopscope.errors import UnsupportedError
from loopscope.files import read_text
from loopscope.results.record import Choice
from loopscope.results.run import GitState

PACKAGES = ("loopscope", "torch", "numpy", "safetensors", "tokenizers", "pyyaml", "tyro", "rich", "jinja2")
OPTIONAL_PACKAGES = ("transformers", "datasets", "ray", "lm-eval", "tensorboard", "wandb", "trackio")
MOST_REMEMBERED_BYTES = 256 << 20
"""Of a file in the cache folder; the largest we write, the built-in corpus, has 5 MB."""


def cache_folder(cache: Path | None = None) -> Path:
    """The folder given, else LOOPSCOPE_CACHE, else ~/.cache/loopscope."""
    chosen = cache or os.environ.get("LOOPSCOPE_CACHE") or "~/.cache/loopscope"
    return Path(chosen).expanduser()


def recall(path: Path | None) -> Any:
    """What `remember` wrote: None where nothing is there, or something that is not JSON."""
    try:
        return None if path is None else json.loads(read_text(path, MOST_REMEMBERED_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def remember(path: Path | None, value: object) -> None:
    """Keep a JSON value in a file, whole or not at all, also of several processes at once.

    It is for what can be found out again: a cache that cannot be written costs the next process time, no more.
    """
    if path is None:
        return
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(value) + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def memory_of(name: str, *depends_on: object) -> Path | None:
    """The file of the cache folder for something that is found out once, named by all that could change it.

    A file for each state of the machine, so that machines which share a home folder do not overwrite each other's.
    None where there is no home folder.
    """
    try:
        folder = cache_folder() / "machine"
    except RuntimeError:
        return None
    return folder / f"{name}-{hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:16]}.json"


# --- versions --------------------------------------------------------------------------------------------------------


def own_version() -> str:
    """Version of loopscope, with the commit where it runs from a checkout: `0.1.0 (54a1c8f0b2d3, changed)`."""
    commit = _own_commit()
    return (_version_of("loopscope") or "not installed") + (f" ({commit})" if commit is not None else "")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; None for extras that are not installed."""
    found = {name: _version_of(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)}
    return {"python": platform.python_version(), **found, "loopscope": own_version()}


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_commit() -> str | None:
    """The commit of loopscope itself where it runs from a checkout, "changed" added where files differ from it."""
    root = Path(__file__).parents[2]
    state = git_state(root) if (root / ".git").exists() else None
    return None if state is None else state.commit[:12] + (", changed" if state.changed else "")


def git_state(folder: Path) -> GitState | None:
    """Commit and whether there are changes, or None where there is no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return GitState(
            commit=git("rev-parse", "HEAD"), changed=bool(git("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None


# --- memory ----------------------------------------------------------------------------------------------------------


def provenance() -> dict[str, Any]:
    """Where and when something is asked for, as the last fields of its record."""
    return {
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def memory_bytes(device_type: str) -> int | None:
    """Memory of one device, or None where the system does not say."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


# --- bf16 products on CPUs -------------------------------------------------------------------------------------------

ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""What tells oneDNN, torch's CPU kernels, the newest instructions it may use; the second is its older name."""
SAFE_ISA = "AVX512_CORE_BF16"
"""The newest instructions below AMX: bf16 products stay native, and stay allowed."""
REASON_VARIABLE = "LOOPSCOPE_CPU_ISA_REASON"
"""Why we set the variable: processes that we start inherit both, and do not take our setting for the user's."""
CPUINFO = Path("/proc/cpuinfo")
TRIAL_SECONDS = 60.0
"""Long enough to import torch from a cold network disk; a product itself takes a millisecond."""
TRIAL = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
square = torch.ones(256, 256, dtype=torch.bfloat16)
square @ square
torch.addmm(square, square, square)
torch.nn.functional.linear(square, square)
"""
"""A child that does this either lives or dies by SIGILL. It leaves no core file."""

Bf16Products = Literal["work", "die", "unknown"]


@dataclass(frozen=True)
class Processor:
    """What the first processor says of itself."""

    model: str
    flags: frozenset[str]

    @property
    def announces_amx(self) -> bool:
        """Whether it claims the matrix instructions that some virtual machines forbid."""
        return any(flag.startswith("amx_") for flag in self.flags)


def read_processor(cpuinfo: Path) -> Processor:
    """The first block of /proc/cpuinfo; a processor without flags where there is no such file."""
    fields: dict[str, str] = {}
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip() and fields:  # the blocks of the other processors say the same
                break
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    return Processor(fields.get("model name", ""), frozenset(fields.get("flags", "").split()))


@functools.cache
def bf16_products() -> Bf16Products:
    """Whether bf16 matrix products work on this CPU, or end the process that starts one.

    Some virtual machines announce AMX and forbid it; oneDNN believes the announcement, and the first bf16 product of
    64×64 or more dies by SIGILL. Only a child process can find out. One is started where AMX is announced, and its
    answer is remembered in the cache folder for this processor, kernel and torch. "unknown" is a child that hung or
    failed in another way; it is not remembered.
    """
    processor = read_processor(CPUINFO)
    if not processor.announces_amx:
        return "work"
    flags = sorted(processor.flags)
    memory = memory_of("bf16", processor.model, flags, platform.release(), _version_of("torch"), TRIAL)
    match recall(memory):
        case {"bf16_products": "work" | "die" as remembered}:
            return remembered
    answer = _try_products()
    if answer != "unknown":
        remember(memory, {"schema_version": 1, "bf16_products": answer})
    return answer


def _try_products() -> Bf16Products:
    """Let a child multiply. It gets no variable of ours: this is about what happens without one."""
    command = [sys.executable or "", "-P", "-c", TRIAL]
    environment = {name: value for name, value in os.environ.items() if name not in ISA_VARIABLES}
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        code = subprocess.run(command, env=environment, timeout=TRIAL_SECONDS, **quiet).returncode
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if code in (-signal.SIGILL, 128 + signal.SIGILL):  # the second where the interpreter is a shell script
        return "die"
    return "work" if code == 0 else "unknown"


def limit_cpu_isa() -> None:
    """Keep oneDNN off AMX where that kills, unless the user has set its limit. Call it before torch's first product.

    A child that gave no answer counts as a fault here: the limit costs bf16 products some speed, its lack the process.
    """
    if _isa_of_environment() is not None:
        return
    if (products := bf16_products()) != "work":
        os.environ[ISA_VARIABLES[0]] = SAFE_ISA
        os.environ[REASON_VARIABLE] = {
            "die": "AMX is announced here and forbidden: a trial process died of a bf16 product (SIGILL)",
            "unknown": "AMX is announced here, and a trial of bf16 products gave no answer",
        }[products]


def _isa_of_environment() -> str | None:
    return next((os.environ[name] for name in ISA_VARIABLES if os.environ.get(name)), None)


def check_bf16_products() -> None:
    """Refuse, in one sentence, to start a bf16 product on a CPU where it would end the process.

    The command line has seen to it (`limit_cpu_isa`); this is for callers from Python. Cheap after the first call.
    """
    if _isa_of_environment() is None and bf16_products() == "die":
        raise UnsupportedError(
            "a bf16 matrix product would end this process: the machine announces AMX and forbids it; "
            f"set {ISA_VARIABLES[0]}={SAFE_ISA} in the environment before Python starts, or use float32"
        )


def choose_cpu_isa() -> Choice:
    """The newest instructions that oneDNN may use: its own choice, except where AMX is announced and forbidden."""
    name, limit = "cpu_isa", _isa_of_environment()
    if limit == SAFE_ISA and REASON_VARIABLE in os.environ:
        return Choice(name, limit, os.environ[REASON_VARIABLE])
    if limit is not None:
        return Choice(name, limit, f"set by you in {next(v for v in ISA_VARIABLES if os.environ.get(v))}")
    if not read_processor(CPUINFO).announces_amx:
        return Choice(name, "not limited", "not needed: this processor announces no AMX")
    return {
        "work": Choice(name, "not limited", "not needed: a trial process multiplied bf16 matrices with AMX"),
        "die": Choice(name, "not limited", f"but bf16 products die here: set {ISA_VARIABLES[0]}={SAFE_ISA}"),
        "unknown": Choice(name, "not limited", "AMX is announced, and a trial of bf16 products gave no answer"),
    }[bf16_products()]


# --- choices ---------------------------------------------------------------------------------------------------------


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


def find_compiler() -> str | None:
    """The C++ compiler that torch.compile would use on this CPU."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def choose_compile(device: str) -> Choice:
    """torch.compile of one loop needs a C++ compiler on CPUs."""
    if device != "cpu":
        return Choice("compile", True, "one loop is compiled on GPUs")
    if (compiler := find_compiler()) is None:
        return Choice("compile", False, "no C++ compiler found (set CXX)")
    return Choice("compile", False, f"possible with {compiler}, off: nothing measured yet that pays for it")


def resolve_compile(setting: str, device: str) -> Choice:
    """--compile on|off|auto against what this machine can do; a missing compiler is a note, not a failure."""
    if setting == "auto" or (device == "cpu" and find_compiler() is None):
        return choose_compile(device)
    return Choice("compile", setting == "on", f"--compile {setting}")


def choose_attention(device: str) -> Choice:
    """SDPA picks its kernel per call; derivative audits need the MATH backend."""
    return Choice("attention", "sdpa", f"PyTorch's fused kernel for {device}; audits switch to the MATH backend")


def automatic_choices(device: Choice) -> list[Choice]:
    """Every choice that follows from the machine and the device chosen on it."""
    per_device = (choose_dtype, choose_denormals, choose_compile, choose_attention)
    return [device, choose_threads(), choose_cpu_isa(), *(choose(str(device.value)) for choose in per_device)]
