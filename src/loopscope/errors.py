"""The error tree. Every error a user can cause derives from `LoopscopeError` and carries an exit code.

LoopscopeError                 exit code 2: the user's mistake, told in one sentence
├── ConfigError                a field, flag or file of a configuration is wrong
├── DataError                  a corpus or batch cannot be used
├── ProtocolError              a model breaks the LoopedModel protocol
│   └── NotFiniteError         its states or scores are no numbers: a finding about the model, exit code 1
├── RunError                   a run folder or checkpoint cannot be used
└── UnsupportedError           a combination that this build or machine cannot do

Findings (a blind spot, a claim that fails) are results, not errors: verbs return exit code 1 for them. Only of a model
that is not finite is there no result to return.
Anything else that escapes is our bug: a traceback and exit code 70, so that no pipeline takes it for a finding.
`assert` is reserved for our own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class LoopscopeError(Exception):
    """Base of all errors that are told to the user in one sentence, without a traceback."""

    exit_code = EXIT_USAGE


class ConfigError(LoopscopeError):
    """A configuration is wrong; the message names the field, its flag, its value and what is allowed."""

    @classmethod
    def of(cls, field: str, value: object, why: str) -> ConfigError:
        """`num_heads = 5: … (flag --num-heads)`: the one form all field errors have."""
        return cls(f"{field} = {value!r}: {why} (flag --{field.replace('_', '-')})")


class DataError(LoopscopeError):
    """A corpus, batch or tensor handed in by the user cannot be used."""


class ProtocolError(LoopscopeError):
    """A model does not do what `loopscope.protocol` says; the message names the function and the loop."""


class NotFiniteError(ProtocolError):
    """A model whose states or scores are not finite: found out about it, not a mistake of the command."""

    exit_code = EXIT_FINDINGS


class RunError(LoopscopeError):
    """A run folder or checkpoint is missing, in use, damaged, or does not fit what was asked."""


class UnsupportedError(LoopscopeError):
    """Asked for something this operation, build or machine cannot do; the message names the way that works."""


def suggest(word: str, allowed: Iterable[str]) -> str:
    """`did you mean 'width'?` when something close exists, else the list of what is allowed."""
    names = sorted(allowed)
    whole = [
        name for name in names if word and name.startswith(word)
    ]  # a word cut short is likelier than a wrong letter
    close = whole or difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"


def in_a_line(error: BaseException) -> str:
    """Kind and first line of somebody else's error; even its text may fail."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return ": ".join([type(error).__name__, *lines[:1]])


def words_of(error: BaseException) -> str:
    """All that somebody else's error says, without line breaks; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
