"""What code under test does to the machine: processes, sockets, code, files, seconds and memory, watched case by case.

One audit hook sees what Python itself does, and keeps it from being done: these tests may run as root. A case may write
into its folder and nowhere else; it may start no process, open no connection, unpickle nothing, and neither compile nor
run anything that comes from a file. It has so many seconds of a processor, and so much address space above what is in
use when it begins: more is a MemoryError, which is no clear error.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from damage import CANARY

MOST_SECONDS = 10
"""Of a processor, in one case; the slowest takes about one. Whoever only waits is ended by the limit of all tests."""
MOST_BYTES = 1 << 30
"""Of address space that a case may take beyond what is in use."""

STARTED = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
CONNECTED = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto")
UNPICKLED = ("pickle.find_class",)
FORBIDDEN = (*STARTED, *CONNECTED, *UNPICKLED)
WRITES = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
}
"""Events that change the disk, and which of their arguments are paths; open folders that those are below come last."""


@dataclass
class Watch:
    """Everything that was seen."""

    folder: Path
    """Where writing is allowed."""
    cases: int = 0
    slowest: float = 0.0
    slowest_case: str = ""
    faults: list[str] = field(default_factory=list)
    """What no case may do, with the case that did it."""
    case: str = ""

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """One audit event."""
        if event in FORBIDDEN:
            self.forbid(f"{event} {arguments!r:.200}")
        elif event == "open":
            path, mode, flags = arguments
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(flags, int) else False
            if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
                self._check_inside(event, path)
        elif event in WRITES:
            for place in WRITES[event]:
                self._check_inside(event, arguments[place], arguments[-1 if len(WRITES[event]) == 1 else place + 2])
        elif event in ("compile", "exec") and _names_canary(arguments[0]):
            self.forbid(f"{event} of what a file says")

    def _check_inside(self, event: str, path: object, beside: object = -1) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open handle
        folder = f"/proc/self/fd/{beside}" if isinstance(beside, int) and beside >= 0 else ""
        where = os.path.realpath(Path(folder, os.fsdecode(path)))
        if where != os.devnull and not where.startswith(f"{self.folder}{os.sep}"):
            self.forbid(f"{event} {where}")

    def forbid(self, what: str) -> None:
        """Note it, and keep it from being done."""
        self.faults.append(f"{self.case}: {what}")
        raise PermissionError(errno.EPERM, f"no case may do this: {what}")

    @contextmanager
    def one(self, case: str) -> Iterator[None]:
        """One case, within its limits."""
        global _active
        self.case = case
        self.cases += 1
        started = time.process_time()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MOST_BYTES, before[1]))
        handler = signal.signal(signal.SIGPROF, _too_long)
        timer = signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        _active = self
        try:
            yield
        finally:
            _active = None
            signal.setitimer(signal.ITIMER_PROF, *timer)
            signal.signal(signal.SIGPROF, handler)
            resource.setrlimit(resource.RLIMIT_AS, before)
            if (seconds := time.process_time() - started) > self.slowest:
                # Half a surrogate pair could not be sent from one process of the tests to another.
                self.slowest, self.slowest_case = seconds, case.encode("utf-8", "backslashreplace").decode()


class TooLongError(Exception):
    """A case took longer than any may."""


def _too_long(*_: object) -> None:
    raise TooLongError(f"more than {MOST_SECONDS} s")


def _names_canary(source: object) -> bool:
    if isinstance(source, CodeType):
        return CANARY in source.co_names or CANARY in repr(source.co_consts)
    return CANARY in (source.decode("latin-1") if isinstance(source, bytes) else str(source))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """A list that in the end holds by how many MiB the resident memory rose, at most, above what it was."""
    before, found = _status("VmRSS"), []
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    yield found
    found.append((_status("VmHWM") - before) / 1024)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))


_active: Watch | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None:
        _active.see(event, arguments)


sys.addaudithook(_hook)  # there is no way to take it out again; it looks only while a case runs
