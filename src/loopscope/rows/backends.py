"""Where rows run: processes on this machine, or tasks on a Ray cluster. A row is the same command on both.

A backend starts a row and gives a handle to poll, to stop (the row saves and leaves) and to kill. No torch here.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from loopscope.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, RunError, UnsupportedError
from loopscope.rows.ledger import EXIT_GIVEN_UP, row_record
from loopscope.rows.process import die_with_parent
from loopscope.rows.spec import RowSpec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
WAIT_ON_RAY = 60.0
"""Seconds a retried task waits for the row that its dead worker left behind to save and leave."""
LOST = -1
"""Exit code of a row whose worker is gone for good."""


class Handle(Protocol):
    """A row that was started."""

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def stop(self) -> None:
        """Ask it to save and leave."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Backend(Protocol):
    """A place where rows run."""

    slots: int
    """Rows that are started at a time."""

    def start(self, spec: RowSpec, folder: Path) -> Handle:
        """Start a row in its folder."""
        ...

    def close(self) -> None:
        """Leave the place."""
        ...


def make_backend(
    on: str, *, rows_at_once: int | None, threads: int, gpus: int, retries: int, processes: int = 1
) -> Backend:
    """The backend that --on names: here, ray, or ray:ADDRESS; rows of several processes run here, one at a time."""
    if processes > 1:
        if on != "here" or (rows_at_once or 1) > 1:
            raise ConfigError.of("processes_per_row", processes, "such rows run one at a time, and --on here only")
        return Here(1, threads, processes=processes)
    place, _, address = on.partition(":")
    if place == "ray":
        return Ray(address or None, rows_at_once=rows_at_once, threads=threads, gpus=gpus, retries=retries)
    if on != "here":
        raise ConfigError.of("on", on, "expected here, ray, or ray:ADDRESS")
    slots = rows_at_once or max(1, usable_cores() // threads)
    if gpus == 0:
        return Here(slots, threads)
    devices = visible_gpus()
    if gpus > 1 or not devices:
        raise ConfigError.of("gpus_per_row", gpus, f"a row uses at most one GPU, and this machine shows {len(devices)}")
    return Here(min(slots, len(devices)), threads, devices)


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device.strip() for device in named.split(",") if device.strip()]
    return [str(number) for number in range(importlib.import_module("torch").cuda.device_count())]


# --- this machine ----------------------------------------------------------------------------------------------------


@dataclass
class Here:
    """Processes on this machine, each with its own threads and, where asked for, its own GPUs."""

    slots: int
    threads: int = 1
    gpus: Sequence[str] = ()
    """One for every slot, or none."""
    processes: int = 1
    """Of a row, under torchrun; such a row sees every GPU there is."""

    def __post_init__(self) -> None:
        self._running: dict[int, _Process] = {}

    def start(self, spec: RowSpec, folder: Path) -> Handle:
        """Start the row's process in the first free slot."""
        self._running = {slot: process for slot, process in self._running.items() if process.poll() is None}
        slot = next(number for number in range(self.slots) if number not in self._running)
        extra = {"CUDA_VISIBLE_DEVICES": self.gpus[slot]} if self.gpus else {}
        started = launch(spec.to_json(), folder, self.threads, wait=0.0, extra=extra, processes=self.processes)
        self._running[slot] = _Process(started) if self.processes == 1 else _Torchrun(started, folder)
        return self._running[slot]

    def close(self) -> None:
        """Nothing stays behind."""


@dataclass(frozen=True)
class _Process:
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its audit, too: a row leads a session of its own


@dataclass(frozen=True)
class _Torchrun(_Process):
    """A row of several processes. torchrun says 1 whatever they said; what became of the row is in row.json."""

    folder: Path

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is None or code == EXIT_OK:
            return code
        ended = {"failed": EXIT_GIVEN_UP, "open": EXIT_INTERRUPTED}
        return ended.get(str(row_record(self.folder).state), code)


def launch(
    spec_json: str,
    folder: Path,
    threads: int,
    *,
    wait: float,
    extra: Mapping[str, str] | None = None,
    processes: int = 1,
) -> subprocess.Popen[bytes]:
    """The process of a row: threads pinned before torch is imported, words to log.txt, out of Ctrl-C's reach.

    To be called by a thread that lives as long as the row: the row stops when that thread does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    row = ["-m", "loopscope.rows.process", str(folder), spec_json, str(wait)]
    command = [sys.executable, *(torchrun if processes > 1 else ()), *row]
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), **(extra or {})}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent if processes > 1 else None,  # a row does so itself; torchrun does not
        )


# --- Ray -------------------------------------------------------------------------------------------------------------


class Ray:
    """Tasks on a Ray cluster whose machines see the output folder and have loopscope installed.

    Without an address a cluster of this machine alone is started, and ended with the grid.
    """

    def __init__(
        self, address: str | None, *, rows_at_once: int | None, threads: int, gpus: int = 0, retries: int = 2
    ) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray starts: nothing is sent anywhere
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # rows without GPUs see the devices there are
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise UnsupportedError("--on ray needs Ray; run: pip install 'loopscope[ray]'") from None
        local = {} if address else {"include_dashboard": False, "num_cpus": max(usable_cores(), threads)}
        try:
            _knock(address)
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RunError(f"cannot reach the Ray cluster {address or 'of this machine'}: {reason}") from error
        self.slots = rows_at_once or 1_000_000
        self.threads = threads
        options = {"num_cpus": threads, "num_gpus": gpus, "max_retries": retries}
        self._task = self._ray.remote(**options)(run_row_task)

    def start(self, spec: RowSpec, folder: Path) -> Handle:
        """Hand the row to the cluster, which starts it when it has room."""
        task = self._task.options(name=spec.name)
        return _Task(self._ray, task.remote(spec.to_json(), str(folder.resolve()), self.threads, str(Path.cwd())))

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends."""
        self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_row_task(spec_json: str, folder: str, threads: int, working_folder: str) -> int:
    """What a Ray worker does: the row's own process, waited for. When the worker dies Ray runs this again."""
    with suppress(OSError):  # relative paths of the text mean the same as for the user, where the folder is there
        os.chdir(working_folder)
    process = launch(spec_json, Path(folder), threads, wait=WAIT_ON_RAY)
    try:
        while (code := process.poll()) is None:  # a cancelled task is interrupted between two looks, not within wait()
            time.sleep(0.2)
        return code
    except BaseException:  # the row saves and leaves
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise


def _knock(address: str | None) -> None:
    """Raise at once where nobody listens; Ray itself would try for minutes, out of Ctrl-C's reach."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


@dataclass(frozen=True)
class _Task:
    ray: Any
    reference: Any

    def poll(self) -> int | None:
        done, _ = self.ray.wait([self.reference], timeout=0)
        if not done:
            return None
        try:
            return int(self.ray.get(self.reference))
        except self.ray.exceptions.TaskCancelledError:
            return 128 + signal.SIGINT
        except self.ray.exceptions.RayError:
            return LOST

    def stop(self) -> None:
        self.ray.cancel(self.reference)

    def kill(self) -> None:
        self.ray.cancel(self.reference, force=True)
