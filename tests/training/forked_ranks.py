"""Ranks of a distributed run out of one interpreter: `forked_ranks.py FOLDER none|full STEPS DROPOUT`.

torchrun imports torch once for itself and once for every rank, and that is nearly all the time such a test takes. Here
torch is imported once, and the interpreter forks before anything is computed. The environment is what torchrun sets.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback

import synthetic

RANKS = 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork(rank: int, port: int, arguments: list[str]) -> int:
    """Start a rank; gives its process id."""
    if pid := os.fork():
        return pid
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        synthetic.main(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(arguments: list[str]) -> int:
    port = free_port()
    pids = [fork(rank, port, arguments) for rank in range(RANKS)]
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
