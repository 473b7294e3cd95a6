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
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import tyro

from loopscope.checks import check_whole_numbers
from loopscope.cli.atlas import Atlas
from loopscope.cli.audit import Audit
from loopscope.cli.calibrate import Calibrate
from loopscope.cli.check import Check
from loopscope.cli.completion import SHELLS, completion
from loopscope.cli.configured import Configured
from loopscope.cli.convert import Convert
from loopscope.cli.env import Env
from loopscope.cli.eval import Eval
from loopscope.cli.flags import check_known, entry, help_text, sections_of
from loopscope.cli.generate import Generate
from loopscope.cli.ouro import ReproduceOuro, ReproduceOuroTrain
from loopscope.cli.plan import Plan
from loopscope.cli.quickstart import Quickstart
from loopscope.cli.remedy import Remedy
from loopscope.cli.report import Report
from loopscope.cli.reproduce import Reproduce
from loopscope.cli.scaling import Scaling
from loopscope.cli.terminal import print_text, say
from loopscope.cli.train import Train
from loopscope.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, ConfigError, LoopscopeError, suggest
from loopscope.machine import limit_cpu_isa, own_version

TOP_HELP = """Train, audit and run looped (depth-recurrent, weight-shared) language models.

examples:
  loopscope quickstart                   the blind spot in a few minutes, on this machine
  loopscope train --preset nano          train; Ctrl-C saves, the same command resumes
  loopscope audit runs/NAME              which state variables the loop carries and no loss sees
  loopscope eval runs/NAME --depths 1..8 what exiting after each loop costs
  loopscope check runs/NAME              is cached = uncached, padded = alone, every depth?
  loopscope calibrate runs/NAME          leave loops out, with a bound on what that costs
  loopscope generate runs/NAME "The "    text, at any number of loops
  loopscope convert runs/NAME out/       for Hugging Face's libraries, and back
  loopscope reproduce --size nano        the paper's claims, with verdicts, tables and figures
  loopscope reproduce ouro TARGET        its checks of Ouro 1.4B, on any checkpoint of its kind
  loopscope atlas                        every published design, audited: who hides what
  loopscope scaling runs/                what a further loop is worth, in parameters
  loopscope report runs/ -o report.html  one page about runs, to send to a colleague
  loopscope plan --preset paper-44m      parameters, FLOPs, memory and time, before paying for them
  loopscope env                          versions, device, and every automatic choice

loopscope --version; loopscope --completion bash|zsh|fish prints a script that completes commands and flags

exit codes: 0 clean, 1 findings, 2 your mistake, 70 a bug of ours, 130 interrupted"""


class Verb(Protocol):
    """A command: a dataclass whose fields are its flags."""

    help: ClassVar[str]
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
    "check": Check,
    "calibrate": Calibrate,
    "generate": Generate,
    "convert": Convert,
    "plan": Plan,
    "reproduce": Reproduce,
    "atlas": Atlas,
    "scaling": Scaling,
    "report": Report,
    "env": Env,
}
COMMANDS: dict[str, type[Any]] = {
    **VERBS,
    "reproduce ouro": ReproduceOuro,
    "reproduce ouro-train": ReproduceOuroTrain,
}
"""The verbs, and commands of two words."""
START_HERE = {
    "train": (
        *(
            "preset",
            "design",
            "data",
            "readout",
            "placement",
            "num_loops",
            "steps",
            "batch",
            "lr",
            "seed",
            "norm_penalty",
        ),
        *("out", "resume"),
    ),
    "generate": ("prompts_file", "max_tokens", "temperature", "top_p", "stop", "num_loops", "speculate", "json"),
    "plan": (
        *("preset", "design", "readout", "placement", "num_loops", "steps", "batch", "devices", "device_type"),
        "within_hours",
    ),
}
"""Fields that a newcomer needs, where a verb has many: its help shows them first."""


@dataclass(frozen=True)
class Shown:
    """What `--help` and `--version` ask for: a text, and nothing else."""

    text: str
    help: ClassVar[str] = "Print a text."

    def run(self) -> int:
        """Print it."""
        print_text(self.text)
        return EXIT_OK


WRITE_A_FOLDER = (Train, Remedy, Reproduce, ReproduceOuro, ReproduceOuroTrain, Quickstart, Atlas, Scaling)
"""Their --out is a folder; what `convert` writes it decides itself, and the others write a file."""

WITHOUT_TORCH = (Report, Shown)
"""They only read files: nothing of theirs depends on what the processor can do."""

RENAMED = {"reproduce": {"--scale": "--size"}}
"""Flags of earlier versions, by verb, with what they are called now."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; a user's mistake is one sentence, never a traceback."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        verb = parse(argv)
        if not isinstance(verb, WITHOUT_TORCH):
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
    except KeyboardInterrupt:
        say("interrupted")
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
        return Shown(completion(shell, COMMANDS))
    if name not in VERBS:
        kind = "flag" if name.startswith("-") else "command"
        known = ("--help", "--version", "--completion") if kind == "flag" else VERBS
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
    for before, now in RENAMED.get(name, {}).items():
        if before in (argument.partition("=")[0] for argument in arguments):
            raise ConfigError(f"{before} is called {now} now; see {command} --help")
    defaults = verb.default(arguments) if issubclass(verb, Configured) else None  # a preset's values
    sections = sections_of(verb, defaults, START_HERE.get(name, ()))
    if {"-h", "--help"} & {*arguments}:
        return Shown(help_text(command, verb.help, sections))
    check_known(arguments, command, sections)
    given: dict[str, Any] = {} if defaults is None else {"default": defaults}
    settings = (tyro.conf.OmitArgPrefixes,)
    parsed, left = tyro.cli(verb, prog=command, args=arguments, config=settings, return_unknown_args=True, **given)
    if left:
        raise ConfigError(f"{left[0]!r} means nothing to `{command}`; see {command} --help")
    check_whole_numbers(parsed)
    if isinstance(parsed, WRITE_A_FOLDER) and parsed.out is not None and parsed.out.is_file():
        raise ConfigError.of("out", str(parsed.out), "is a file; name a folder")
    return parsed


def _top_help() -> str:
    verbs = (line for name, verb in VERBS.items() for line in entry(name, verb.help.splitlines()[0]))
    about, rest = TOP_HELP.split("\n", 1)
    return "\n".join(["usage: loopscope COMMAND [FLAGS]", "", about, "", "commands:", *verbs, rest])
