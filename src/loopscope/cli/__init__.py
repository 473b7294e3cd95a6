"""The command line: verbs register themselves. Verbs parse, call, and print; torch is imported late.

Results go to stdout, progress to stderr. Exit codes: 0 clean, 1 findings, 2 the user's mistake, 70 a bug,
130 interrupted.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tyro

from loopscope.checks import check_whole_numbers
from loopscope.cli.flags import SHELLS, TOP_FLAGS, check_known, entry, help_text, sections_of
from loopscope.cli.terminal import print_text, say
from loopscope.cli.verb import COMMANDS, Verb
from loopscope.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigError, LoopscopeError, suggest
from loopscope.machine import limit_cpu_isa, own_version

for _module in (
    *("quickstart", "train", "audit", "eval", "check", "calibrate", "generate", "convert", "plan"),
    *("reproduce", "ouro", "atlas", "scaling", "report", "env"),
):  # in the order of the overview
    importlib.import_module(f"loopscope.cli.{_module}")

VERBS = {name: verb for name, verb in COMMANDS.items() if " " not in name}


@dataclass(frozen=True)
class Shown(Verb, needs_torch=False):
    """What `--help` and `--version` ask for: a text, and nothing else."""

    text: str

    def run(self) -> int:
        """Print it."""
        print_text(self.text)
        return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a user's mistake is one sentence, never a traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        verb = parse(argv)
        if verb.needs_torch:
            limit_cpu_isa()
        exit_code = verb.run()
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
    except KeyboardInterrupt as error:
        say("; ".join(["interrupted", *map(str, error.args)]))
        return EXIT_INTERRUPTED
    except (Exception, SystemExit) as error:
        opened = sys.modules.get("loopscope.targets")  # where it was not imported, no code of theirs has run
        if opened is not None and (theirs := opened.their_failure(error)) is not None:
            say(f"error: {theirs}")
            return EXIT_USAGE
        if isinstance(error, SystemExit):  # tyro's, after it has said what is wrong
            raise
        traceback.print_exc()
        say("this is a bug in loopscope; please report it with the lines above")
        return EXIT_BUG


def parse(argv: Sequence[str]) -> Verb:
    """The verb the arguments ask for; a flag it does not have is refused with the one of its own that looks like it."""
    name, *arguments = argv or ["--help"]
    if name in ("-h", "--help"):
        return Shown(_top_help())
    if name == "--version":
        return Shown(f"loopscope {own_version()}")
    if name == "--completion":
        shell = arguments[0] if len(arguments) == 1 else ""
        if shell not in SHELLS:
            raise ConfigError.of("completion", " ".join(arguments), f"expected one of {', '.join(SHELLS)}")
        return Shown(SHELLS[shell]())
    if name not in VERBS:
        kind = "flag" if name.startswith("-") else "command"
        known = TOP_FLAGS if kind == "flag" else VERBS
        raise ConfigError(f"unknown {kind} {name!r}; {suggest(name, known)}; see loopscope --help")
    seconds = [command.split()[1] for command in COMMANDS if command.startswith(f"{name} ")]
    if seconds and arguments and not arguments[0].startswith("-"):
        second, *arguments = arguments
        if second not in seconds:
            raise ConfigError(f"unknown command 'loopscope {name} {second}'; {suggest(second, seconds)}")
        name = f"{name} {second}"
    return _parse_verb(name, arguments)


def _parse_verb(name: str, arguments: list[str]) -> Verb:
    verb, command = COMMANDS[name], f"loopscope {name}"
    for before, now in verb.renamed.items():
        if before in (argument.partition("=")[0] for argument in arguments):
            raise ConfigError(f"{before} is called {now} now; see {command} --help")
    defaults = verb.defaults(arguments)
    sections = sections_of(verb, defaults)
    if {"-h", "--help"} & {*arguments}:
        return Shown(help_text(command, verb.help, sections))
    check_known(arguments, command, sections)
    given: dict[str, Any] = {} if defaults is None else {"default": defaults}
    settings = (tyro.conf.OmitArgPrefixes,)
    parsed, left = tyro.cli(verb, prog=command, args=arguments, config=settings, return_unknown_args=True, **given)
    if left:
        raise ConfigError(f"{left[0]!r} means nothing to `{command}`; see {command} --help")
    check_whole_numbers(parsed)
    if verb.out_is_folder and parsed.out is not None and parsed.out.is_file():
        raise ConfigError.of("out", str(parsed.out), "is a file; name a folder")
    return parsed


def _top_help() -> str:
    verbs = (line for name, verb in VERBS.items() for line in entry(name, verb.help.splitlines()[0]))
    begin = (verb.example for verb in COMMANDS.values() if verb.example is not None)
    examples = (f"  loopscope {arguments:<28} {about}" for arguments, about in begin)
    return "\n".join([TOP_HELP, "", "commands:", *verbs, "", "examples:", *examples, "", MORE_HELP])


TOP_HELP = """usage: loopscope COMMAND [FLAGS]

Train, audit and run looped (depth-recurrent, weight-shared) language models."""
MORE_HELP = """\
loopscope --version; loopscope --completion bash|zsh|fish prints a script that completes commands and flags

exit codes: 0 clean, 1 findings, 2 your mistake, 70 a bug of ours, 130 interrupted"""
