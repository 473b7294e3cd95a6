"""The command line: one file per verb. Verbs parse, call, and print; torch is imported late.

Results go to stdout, progress to stderr. Exit codes: 0 clean, 1 findings, 2 the user's mistake, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, Union

import tyro

from loopscope.cli.env import Env
from loopscope.cli.plan import Plan
from loopscope.cli.quickstart import Quickstart
from loopscope.cli.terminal import say
from loopscope.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, LoopscopeError, suggest

TOP_HELP = """Train, audit and run looped (depth-recurrent, weight-shared) language models.

examples:
  loopscope quickstart                   the blind spot in a few minutes, on this machine
  loopscope plan --preset paper-44m      what a model is made of, before paying for it
  loopscope env                          versions, device, and every automatic choice

exit codes: 0 clean, 1 findings, 2 your mistake, 130 interrupted"""


class Verb(Protocol):
    """A command: a dataclass whose fields are its flags."""

    help: str
    """What it does in one line, then examples."""

    @classmethod
    def default(cls, argv: Sequence[str]) -> Any:
        """An instance with the defaults that the arguments imply (a preset's values)."""
        ...

    def run(self) -> int:
        """Do it, print the result, and return the exit code."""
        ...


VERBS: dict[str, type[Any]] = {"quickstart": Quickstart, "plan": Plan, "env": Env}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a user's mistake is one sentence, never a traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        return parse(argv).run()
    except LoopscopeError as error:
        say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `loopscope … | head` closed the pipe: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def parse(argv: Sequence[str]) -> Verb:
    """The verb the arguments ask for; tyro prints help and exits where that is what they ask for."""
    chosen = argv[0] if argv else ""
    if chosen and not chosen.startswith("-") and chosen not in VERBS:
        raise ConfigError(f"unknown command {chosen!r}; {suggest(chosen, VERBS)}; see loopscope --help")
    verbs = tuple(_subcommand(name, verb, argv if name == chosen else ()) for name, verb in VERBS.items())
    one_of: Any = Union[verbs]  # noqa: UP007
    return tyro.cli(
        one_of,
        prog="loopscope",
        description=TOP_HELP,
        args=list(argv) or ["--help"],
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def _subcommand(name: str, verb: type[Any], argv: Sequence[str]) -> Any:
    description = verb.help if argv else verb.help.splitlines()[0]
    return Annotated[verb, tyro.conf.subcommand(name, default=verb.default(argv), description=description)]
