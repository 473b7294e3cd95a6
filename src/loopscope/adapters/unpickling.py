"""The one place where a pickle is read: a process of its own, with limits, for `loopscope convert --from-pickle`.

    python unpickling.py FILE FOLDER BYTES SECONDS

torch's restricted reader (`weights_only=True`) knows tensors, numbers, texts and plain containers, and refuses whatever
else a pickle asks for. A file may still ask for more memory or time than there is; then this process ends, and nobody
else. It writes FOLDER/model.safetensors and FOLDER/found.json (what else was in the file), or says why not on stdout.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOUND_FILE = "found.json"
REFUSED = 3
"""Exit code with a sentence on stdout."""
WRAPPERS = ("model_state", "model_state_dict", "state_dict", "model")
"""Names under which training scripts keep the tensors, beside everything else."""
FORBIDDEN = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.bind")
"""Audit events that reading weights never raises."""


class RefusedError(Exception):
    """Why a file is not taken."""


def main() -> None:
    """Read the file under limits, and write what it holds."""
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    most_bytes, seconds = int(sys.argv[3]), int(sys.argv[4])
    import torch  # before the limit: what torch itself maps is not the file's

    _limit(most_bytes, seconds)
    sys.addaudithook(_refuse_event)
    try:
        mapped = zipfile.is_zipfile(path)  # the older format has no tensors to map
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)  # noqa: TID251
        _write(found, folder)
    except RefusedError as refused:
        print(refused)  # noqa: T201 (the parent reads it)
        sys.exit(REFUSED)
    except Exception as error:
        print(_why(error))  # noqa: T201
        sys.exit(REFUSED)


def _why(error: Exception) -> str:
    """What went wrong, in our words where torch's would advise to read the file unrestrictedly."""
    words = " ".join(str(error).split()) or type(error).__name__
    if "Weights only load failed" in words:
        asked = re.search(r"GLOBAL ([\w.]+)", words)
        return "it holds more than tensors, numbers and texts, or is damaged" + (
            f": it asks for {asked[1]}" if asked else ""
        )
    if isinstance(error, MemoryError) or "memory" in words.lower():
        return "it asks for more memory than a file of its size needs"
    return f"it is damaged, or no checkpoint that torch saved (torch says: {words.split('. ')[0][:200]})"


def _limit(most_bytes: int, seconds: int) -> None:
    """Bound this process: address space above what is mapped already, processor time, files, core dumps."""
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: most_bytes, resource.RLIMIT_CORE: 0}
    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere nobody tells what is mapped, and the limit on files and time must do
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = mapped + most_bytes
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _refuse_event(event: str, _: tuple[Any, ...]) -> None:
    if event in FORBIDDEN:
        raise RefusedError(f"reading it raised {event}, which no weights need")


def _write(found: Any, folder: Path) -> None:
    """Tensors as safetensors, and the rest as JSON."""
    from safetensors.torch import save_file

    if not isinstance(found, Mapping):
        raise RefusedError(f"it holds a {type(found).__name__}, not a mapping of names to tensors")
    wrapper = next((name for name in WRAPPERS if isinstance(found.get(name), Mapping)), None)
    tensors = found if wrapper is None else found[wrapper]
    rest = {} if wrapper is None else {name: value for name, value in found.items() if name == "config"}
    save_file(_separate(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({"wrapper": wrapper, "rest": rest}, default=lambda value: f"<{type(value).__name__}>")
    (folder / FOUND_FILE).write_text(text)


def _separate(tensors: Mapping[Any, Any]) -> dict[str, Any]:
    """Tensors by name, each with memory of its own: a tied head shares its embedding's."""
    import torch

    separate: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise RefusedError(f"it holds {str(name)[:80]!r}, a {type(tensor).__name__}, where a tensor should be")
        if tensor.layout != torch.strided or tensor.is_complex():
            raise RefusedError(f"its tensor {name} is sparse or complex")
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.detach().clone() if place in seen else tensor.detach().contiguous()
        seen.add(place)
    if not separate:
        raise RefusedError("it holds no tensor")
    return separate


if __name__ == "__main__":
    main()
