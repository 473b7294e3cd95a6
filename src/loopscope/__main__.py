"""`python -m loopscope` is the `loopscope` command."""

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> int:
    """The command line, from its first import on: SIGTERM ends it as Ctrl-C does, with a word and exit code 130."""
    try:
        signal.signal(signal.SIGTERM, _interrupt)  # in here, since it may arrive at once
        from loopscope.cli import main as run

        return run()
    except KeyboardInterrupt:  # before the command line itself could say so
        sys.stderr.write("loopscope: interrupted\n")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
