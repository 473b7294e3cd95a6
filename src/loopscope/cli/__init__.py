"""The command line: one file per verb. Verbs parse, call, and print; torch is imported late.

Results go to stdout, progress to stderr. Exit codes: 0 clean, 1 findings, 2 the user's mistake, 70 a bug,
130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, Union

import tyro

from loopscope.cli.audit import Audit
from loopscope.cli.env import Env
from loopscope.cli.eval import Eval
from loopscope.cli.plan import Plan
from loopscope.cli.quickstart import Quickstart
from loopscope.cli.remedy import Remedy
from loopscope.cli.report import Report
from loopscope.cli.reproduce import Reproduce
from loopscope.cli.terminal import say
from loopscope.cli.train import Train
from loopscope.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigError, LoopscopeError, suggest

TOP_HELP = """Train, audit and run looped (depth-recurrent, weight-shared) language models.

examples:
  loopscope quickstart                   the blind spot in a few minutes, on this machine
  loopscope train --preset nano          train; Ctrl-C saves, the same command goes on
  loopscope audit runs/NAME              which state variables the loop carries and no loss sees
  loopscope eval runs/NAME --depths 1..8 what exiting after each loop costs
  loopscope reproduce --size nano        the paper's claims, with verdicts, tables and figures
  loopscope report runs/ -o report.html  one page about runs, to send to a colleague
  loopscope plan --preset paper-44m      parameters, FLOPs, memory and time, before paying for them
  loopscope env                          versions, device, and every automatic choice

exit codes: 0 clean, 1 findings, 2 your mistake, 70 a bug of ours, 130 interrupted"""


class Verb(Protocol):
    """A command: a dataclass whose fields are its flags."""

    help: str
    """What it does in one line, then examples."""

    def run(self) -> int:
        """Do it, print the result, and return the exit code."""
        ...


VERBS: dict[str, type[Any]] = {
    "quickstart": Quickstart,
    "train": Train,
    "audit": Audit,
    "remedy": Remedy,
    "eval": Eval,
    "plan": Plan,
    "reproduce": Reproduce,
    "report": Report,
    "env": Env,
}

RENAMED = {"reproduce": {"--scale": "--size"}}
"""Flags of earlier versions, by verb, with what they are called now."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a user's mistake is one sentence, never a traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        exit_code = parse(argv).run()
        sys.stdout.flush()
        return exit_code
    except LoopscopeError as error:
        say(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:  # `loopscope … | head` closed the pipe: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:  # a full disk, an unwritable folder, a file that vanished
        say(f"error: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return EXIT_USAGE
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        say("this is a bug in loopscope; please report it with the lines above")
        return EXIT_BUG


def parse(argv: Sequence[str]) -> Verb:
    """The verb the arguments ask for; tyro prints help and exits where that is what they ask for."""
    chosen = argv[0] if argv else ""
    if chosen and not chosen.startswith("-") and chosen not in VERBS:
        raise ConfigError(f"unknown command {chosen!r}; {suggest(chosen, VERBS)}; see loopscope --help")
    flags = [argument.partition("=")[0] for argument in argv]
    for before, now in RENAMED.get(chosen, {}).items():
        if before in flags:
            raise ConfigError(f"{before} is called {now} now; see loopscope {chosen} --help")
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
    """A verb for tyro; where the arguments imply defaults (a preset's values), with those."""
    description = verb.help if argv else verb.help.splitlines()[0]
    if not hasattr(verb, "default"):
        return Annotated[verb, tyro.conf.subcommand(name, description=description)]
    return Annotated[verb, tyro.conf.subcommand(name, default=verb.default(argv), description=description)]
