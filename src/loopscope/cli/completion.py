"""`loopscope --completion SHELL`: a script with every command, flag and choice in it. No Python runs at a TAB.

zsh reads bash's script through its own bashcompinit. Where nothing of ours fits, the shell completes names of files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping

from loopscope.cli.flags import Flag, sections_of
from loopscope.cli.verb import Verb
from loopscope.designs import DESIGNS
from loopscope.presets import PRESETS

NAMED = {"preset": tuple(PRESETS), "design": tuple(DESIGNS)}
"""Flags whose values are names that we know."""
TOP = ("--help", "--version", "--completion")


def completion(shell: str, commands: Mapping[str, type[Verb]]) -> str:
    """The script for a shell of `SHELLS`."""
    flags = {
        name: [flag for section in sections_of(command) for flag in section.flags if flag.names]
        for name, command in commands.items()
    }
    return SHELLS[shell](flags)


def _choices(flag: Flag) -> tuple[str, ...]:
    """What may stand behind a flag, where that is known."""
    if flag.values.startswith("{") and flag.values.endswith("}"):
        return tuple(flag.values[1:-1].split(","))
    return NAMED.get(flag.field, ())


def _seconds(commands: Iterable[str]) -> dict[str, list[str]]:
    """First word → second words, of commands that have two."""
    found: dict[str, list[str]] = {}
    for first, second in (command.split() for command in commands if " " in command):
        found.setdefault(first, []).append(second)
    return found


def _bash(flags: Mapping[str, list[Flag]]) -> str:
    first = [name for name in flags if " " not in name]
    pairs = " | ".join(f'"{name}"' for name in flags if " " in name)
    lines = [
        "_loopscope() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        '    local command="${COMP_WORDS[1]}" words=""',
        '    if [ "$COMP_CWORD" -gt 2 ]; then',
        f'        case "$command ${{COMP_WORDS[2]}}" in {pairs}) command="$command ${{COMP_WORDS[2]}}" ;; esac',
        "    fi",
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        words="{" ".join([*first, *TOP])}"',
        "    else",
        '        case "$command $previous" in',
        f'            "--completion --completion") words="{" ".join(SHELLS)}" ;;',
    ]
    for name, own in flags.items():
        for flag in own:
            if choices := _choices(flag):
                given = " | ".join(f'"{name} {spelling}"' for spelling in flag.names)
                lines.append(f'            {given}) words="{" ".join(choices)}" ;;')
    lines += ["        esac", '        if [ -z "$words" ]; then', '            case "$command:$current" in']
    for name, own in flags.items():
        spellings = [spelling for flag in own for spelling in flag.names]
        lines.append(f'                "{name}:-"*) words="{" ".join([*spellings, "--help"])}" ;;')
    for name, seconds in _seconds(flags).items():
        lines.append(f'                "{name}:"*) [ "$COMP_CWORD" -eq 2 ] && words="{" ".join(seconds)}" ;;')
    lines += [
        "            esac",
        "        fi",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _loopscope loopscope",
    ]
    return "\n".join(["# bash completion of loopscope", *lines, ""])


def _zsh(flags: Mapping[str, list[Flag]]) -> str:
    head = ["# zsh completion of loopscope", "autoload -U +X compinit && compinit"]
    return "\n".join([*head, "autoload -U +X bashcompinit && bashcompinit", _bash(flags)])


def _fish(flags: Mapping[str, list[Flag]]) -> str:
    lines, seconds = ["# fish completion of loopscope"], _seconds(flags)
    first = [name for name in flags if " " not in name]
    top = "__fish_use_subcommand"
    lines.append(f"complete -c loopscope -n {top} -f -a {shlex.quote(' '.join(first))}")
    lines += [f"complete -c loopscope -n {top} -l {name.removeprefix('--')}" for name in TOP[:2]]
    lines.append(f"complete -c loopscope -n {top} -l completion -x -a {shlex.quote(' '.join(SHELLS))}")
    for name, others in seconds.items():
        unless = f"__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {' '.join(others)}"
        lines.append(f"complete -c loopscope -n {shlex.quote(unless)} -a {shlex.quote(' '.join(others))}")
    for name, own in flags.items():
        parts = [f"__fish_seen_subcommand_from {word}" for word in name.split()]
        if name in seconds:
            parts.append(f"not __fish_seen_subcommand_from {' '.join(seconds[name])}")
        where = shlex.quote("; and ".join(parts))
        for flag in own:
            choices = _choices(flag)
            values = f" -x -a {shlex.quote(' '.join(choices))}" if choices else " -r" if flag.values else ""
            told = shlex.quote(flag.doc.split(". ")[0].rstrip("."))
            for spelling in flag.names:
                kind = "-l" if spelling.startswith("--") else "-s"
                lines.append(f"complete -c loopscope -n {where} {kind} {spelling.lstrip('-')}{values} -d {told}")
    return "\n".join([*lines, ""])


SHELLS: dict[str, Callable[[Mapping[str, list[Flag]]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
