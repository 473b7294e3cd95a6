"""The flags of a verb, read from its dataclass: what `--help` shows, shells complete, a mistyped one may have meant.

A field's docstring, or the help of its type, is its help and its name its flag, so neither can drift from the code.
tyro only parses.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shlex
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional
from tyro.constructors import PrimitiveConstructorSpec

from loopscope.cli.verb import COMMANDS, Verb
from loopscope.designs import DESIGNS
from loopscope.errors import ConfigError
from loopscope.presets import PRESETS

POSITIONAL = typing.get_args(Positional[str])[1]
NAMES_OF_TYPES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
LEFT, WIDEST = 26, 110
"""Columns of the flags, and of the whole help where the terminal is wider."""


@dataclass(frozen=True)
class Flag:
    """One field of a verb, as a user types it."""

    field: str
    names: tuple[str, ...]
    """--placement and its aliases; none for a positional argument."""
    values: str
    """What follows it: N, {raw,rmsnorm}, PATH …; nothing for a switch."""
    doc: str
    default: object
    """dataclasses.MISSING where it has to be given."""

    @property
    def choices(self) -> Sequence[str]:
        """What may stand behind it, where that is known."""
        if self.values.startswith("{") and self.values.endswith("}"):
            return self.values[1:-1].split(",")
        named: dict[str, Sequence[str]] = {"preset": [*PRESETS], "design": [*DESIGNS]}
        return named.get(self.field, ())


@dataclass(frozen=True)
class Section:
    """Flags that are shown together."""

    title: str
    doc: str
    flags: Sequence[Flag]


def sections_of(verb: type[Verb], defaults: object = None) -> list[Section]:
    """All flags of a verb: its own fields, then a section for each part of a configuration.

    `defaults` is an instance whose values are the defaults (a preset's). Fields, of the verb or of its parts, that it
    says a newcomer should start with come first, in a section of their own. Positional arguments precede everything.
    """
    start_here = verb.start_here.split()
    own = Section("flags" if not start_here else "more", "", list(_flags(verb, defaults)))
    hints = typing.get_type_hints(verb)
    parts = [
        Section(name, part.__doc__ or "", list(_flags(part, getattr(defaults, name, None))))
        for name, part in ((field.name, hints[field.name]) for field in dataclasses.fields(verb))  # type: ignore[arg-type]
        if _is_part(part)
    ]
    by_name = {flag.field: flag for section in (own, *parts) for flag in section.flags}
    first = [flag for flag in own.flags if not flag.names] + [by_name[name] for name in start_here]
    rest = [
        dataclasses.replace(section, flags=[flag for flag in section.flags if flag not in first])
        for section in (own, *parts)
    ]
    title = "start here" if start_here else "arguments"
    return [section for section in (Section(title, "", first), *rest) if section.flags]


def help_text(command: str, description: str, sections: Sequence[Section]) -> str:
    """What `--help` prints."""
    positional = [flag for section in sections for flag in section.flags if not flag.names]
    arguments = [flag.values if flag.default is dataclasses.MISSING else f"[{flag.values}]" for flag in positional]
    lines = [f"usage: {' '.join([command, *arguments, '[FLAGS]'])}", "", *description.splitlines()]
    for section in sections:
        title = f"{section.title}: {section.doc}" if section.doc else f"{section.title}:"
        lines += ["", title]
        for flag in section.flags:
            lines += entry(" ".join(filter(None, (", ".join(flag.names), flag.values))), _right(flag))
    return "\n".join(lines)


def entry(left: str, right: str) -> Iterator[str]:
    """Two columns; a left side that is too long has a line of its own."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    wrapped = textwrap.wrap(right, max(width - LEFT - 2, 20))
    if len(left) > LEFT - 2:
        yield f"  {left}"
        left = ""
    for number, line in enumerate(wrapped):
        yield f"  {left if number == 0 else '':{LEFT}}{line}"


def check_known(arguments: Sequence[str], command: str, sections: Sequence[Section]) -> None:
    """Refuse an empty value, and a flag that the verb does not have, with the one of its own that it looks like."""
    known = [name for section in sections for flag in section.flags for name in flag.names]
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if not argument or re.fullmatch("--?[a-zA-Z][^=]*=", argument):  # as a path it would be the working folder
            where = argument.rstrip("=") or (before if before.startswith("-") else "")
            raise ConfigError(f"{where or 'an argument'} is empty for `{command}`; give a value or leave it out")
        given = argument.split("=")[0]
        name = given.replace("_", "-")  # tyro takes both
        if not re.match("--?[a-zA-Z]", name) or name in known:  # -1 is a number
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {command} --help"
        raise ConfigError(f"unknown flag {given} for `{command}`; {hint}")


# --- from dataclasses ------------------------------------------------------------------------------------------------


def _is_part(hint: object) -> bool:
    """Whether a field is a dataclass itself, a part of a configuration."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _flags(owner: type[Any], defaults: object) -> Iterator[Flag]:
    hints, docs = typing.get_type_hints(owner, include_extras=True), _docs(owner)  # type: ignore[arg-type]
    for field in dataclasses.fields(owner):
        hint, written, told = _taken_apart(hints[field.name])
        if _is_part(hint):
            continue
        usual = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        default = usual if defaults is None else getattr(defaults, field.name)
        values = _values(hints[field.name])
        if POSITIONAL in told:
            names: tuple[str, ...] = ()
            values = field.name.upper() + (" …" if typing.get_origin(hint) is tuple else "")
        else:
            if written is not None:
                (default,) = written.str_from_instance(default)
            flag = next((extra.name for extra in told if extra.name is not None), field.name).replace("_", "-")
            aliases = [alias for extra in told for alias in extra.aliases or ()]
            names = (*aliases, f"--{flag}", *((f"--no-{flag}",) if hint is bool else ()))
        shared = next((extra.help for extra in told if getattr(extra, "help", None)), "")
        yield Flag(field.name, names, values, docs.get(field.name, shared), default)


def _taken_apart(hint: Any) -> tuple[Any, PrimitiveConstructorSpec[Any] | None, list[Any]]:
    """The type, how one word stands for several values of it (`options.written`), and what else Annotated says."""
    plain, *extras = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    written = next((extra for extra in extras if isinstance(extra, PrimitiveConstructorSpec)), None)
    return plain, written, [extra for extra in extras if extra is not written]


def _values(hint: Any) -> str:
    """How a value of the type is written."""
    hint, written, _ = _taken_apart(hint)
    if written is not None:
        return written.metavar
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return ""
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is tuple:
        return f"{_values(arguments[0])} …"
    if origin in (typing.Union, types.UnionType):
        return "|".join("None" if part is types.NoneType else _values(part) for part in arguments)
    return NAMES_OF_TYPES[hint]


@functools.cache
def _docs(owner: type[Any]) -> Mapping[str, str]:
    """The docstring under each field, of the class and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in itertools.pairwise(definition.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


# --- as text ---------------------------------------------------------------------------------------------------------


def _right(flag: Flag) -> str:
    if flag.default is dataclasses.MISSING:
        return f"{flag.doc} (required)"
    if flag.default is None:  # the docstring says what that means
        return flag.doc
    return f"{flag.doc} (default: {_shown(flag.default)})"


def _shown(value: object) -> str:
    """A default as it would be typed."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)


# --- as a completion script ------------------------------------------------------------------------------------------
#
# A script has every command, flag and choice in it: no Python runs at a TAB. Where nothing of ours fits, the shell
# completes names of files.

TOP_FLAGS = ("--help", "--version", "--completion")


def _named_flags() -> list[tuple[str, list[Flag]]]:
    """Every command with its flags, without the positional arguments."""
    return [
        (name, [flag for section in sections_of(verb) for flag in section.flags if flag.names])
        for name, verb in COMMANDS.items()
    ]


def _words() -> tuple[list[str], dict[str, list[str]]]:
    """First words of commands, and of those with two words: first word → second words."""
    seconds: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, *second = name.split()
        if second:
            seconds.setdefault(first, []).extend(second)
    return [name for name in COMMANDS if " " not in name], seconds


def _bash() -> str:
    first, seconds = _words()
    pairs = " | ".join(f'"{name}"' for name in COMMANDS if " " in name)
    choices, spelt = [], []
    for name, flags in _named_flags():
        for flag in flags:
            if flag.choices:
                given = " | ".join(f'"{name} {spelling}"' for spelling in flag.names)
                choices.append(f'            {given}) words="{" ".join(flag.choices)}" ;;')
        spellings = [spelling for flag in flags for spelling in flag.names]
        spelt.append(f'                "{name}:-"*) words="{" ".join([*spellings, "--help"])}" ;;')
    for name, others in seconds.items():
        spelt.append(f'                "{name}:"*) [ "$COMP_CWORD" -eq 2 ] && words="{" ".join(others)}" ;;')
    newline = "\n"
    return f"""# bash completion of loopscope
_loopscope() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "$command ${{COMP_WORDS[2]}}" in {pairs}) command="$command ${{COMP_WORDS[2]}}" ;; esac
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{" ".join([*first, *TOP_FLAGS])}"
    else
        case "$command $previous" in
            "--completion --completion") words="{" ".join(SHELLS)}" ;;
{newline.join(choices)}
        esac
        if [ -z "$words" ]; then
            case "$command:$current" in
{newline.join(spelt)}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _loopscope loopscope
"""


def _zsh() -> str:
    """zsh reads bash's script through its own bashcompinit."""
    head = ["# zsh completion of loopscope", "autoload -U +X compinit && compinit"]
    return "\n".join([*head, "autoload -U +X bashcompinit && bashcompinit", _bash()])


def _fish() -> str:
    first, seconds = _words()
    found: list[tuple[str, str]] = [("__fish_use_subcommand", f"-f -a {shlex.quote(' '.join(first))}")]
    found += [("__fish_use_subcommand", f"-l {name.removeprefix('--')}") for name in TOP_FLAGS[:2]]
    found.append(("__fish_use_subcommand", f"-l completion -x -a {shlex.quote(' '.join(SHELLS))}"))
    for name, others in seconds.items():
        unless = f"__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {' '.join(others)}"
        found.append((unless, f"-a {shlex.quote(' '.join(others))}"))
    for name, flags in _named_flags():
        where = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        if name in seconds:
            where += f"; and not __fish_seen_subcommand_from {' '.join(seconds[name])}"
        for flag in flags:
            values = f" -x -a {shlex.quote(' '.join(flag.choices))}" if flag.choices else " -r" if flag.values else ""
            about = shlex.quote(flag.doc.split(". ")[0].rstrip("."))
            for spelling in flag.names:
                kind = "-l" if spelling.startswith("--") else "-s"
                found.append((where, f"{kind} {spelling.lstrip('-')}{values} -d {about}"))
    lines = (f"complete -c loopscope -n {shlex.quote(where)} {rest}" for where, rest in found)
    return "\n".join(["# fish completion of loopscope", *lines, ""])


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
