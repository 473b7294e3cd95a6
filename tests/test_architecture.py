"""The plan of the house, held by the source itself: verbs are called as functions, models are asked by capability.

Which room may import which, import-linter holds (pyproject.toml).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import loopscope
from loopscope.cli import VERBS

SOURCE = Path(loopscope.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
OUTSIDE_CLI = [path for path in FILES if path.relative_to(SOURCE).parts[0] != "cli"]


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


# --- no verb as a process --------------------------------------------------------------------------------------------

STARTERS = {"Popen", "run", "call", "check_call", "check_output", "system", "popen", "execv", "execvp", "spawnv"}
ROW = "loopscope.rows.process"
"""A row of a grid may be a process of its own."""


def command_words(node: ast.AST) -> list[str]:
    """The constant words of a list or tuple (…"-m", "loopscope", "train"…), in order."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return [one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return []


def starts_a_verb(tree: ast.AST) -> list[str]:
    """Commands that a file would start: word lists, and strings that are given to whatever starts processes."""
    verbs = "|".join(VERBS)
    found = []
    for node in ast.walk(tree):
        words = command_words(node)
        for before, word in zip(["", *words], words, strict=False):
            if before == "-m" and word.split(".")[0] == "loopscope" and word != ROW:
                found.append(f"-m {word}")
            if before == "loopscope" and word in VERBS:
                found.append(f"loopscope {word}")
        if isinstance(node, ast.Call) and called(node) in STARTERS:
            texts = [
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            found += [text for text in texts if re.search(rf"-m loopscope(\s|$)|\bloopscope ({verbs})\b", text)]
    return found


def test_nothing_outside_cli_starts_a_verb_as_a_process():
    assert {name_of(path): found for path in OUTSIDE_CLI if (found := starts_a_verb(ast.parse(path.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "command = [sys.executable, '-m', 'loopscope', 'audit', folder]",
        "command = [sys.executable, '-m', 'loopscope.cli', folder]",
        "subprocess.run(('loopscope', 'train', '--json'))",
        "os.system('python -m loopscope train --preset nano')",
        "subprocess.Popen(f'loopscope audit {folder}', shell=True)",
    ],
)
def test_every_way_of_starting_one_would_be_seen(code):
    assert starts_a_verb(ast.parse(code))
    assert not starts_a_verb(ast.parse(f"command = [sys.executable, '-m', '{ROW}', folder]"))


# --- cli parses, calls one function, prints --------------------------------------------------------------------------

FUNCTIONS = ("loopscope.api.", "loopscope.rows.", "loopscope.studies.", "loopscope.show.", "loopscope.training.plan")
"""Where the functions under the verbs live."""


@pytest.mark.parametrize("name", [name for name in VERBS if name != "env"])
def test_every_verb_calls_a_function_that_lives_below_it(name):
    """`env` prints what the machine module says; every other verb imports what it calls from the rooms below."""
    module = importlib.import_module(VERBS[name].__module__)
    tree = ast.parse(inspect.getsource(module))
    calls = {called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    used = [
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(FUNCTIONS)
        for alias in node.names
        if (alias.asname or alias.name) in calls
    ]
    functions = [getattr(importlib.import_module(home), function) for home, function in used]
    called_of = [each for each in functions if inspect.isfunction(each) or each.__module__.startswith("loopscope.api.")]
    assert called_of, f"{name} calls nothing of {FUNCTIONS}"


@pytest.mark.parametrize("name", ["train", "evaluate", "audit", "remedy"])
def test_the_functions_under_the_verbs_are_those_of_the_package(name):
    function = getattr(loopscope, name)
    verb = {"evaluate": "eval"}.get(name, name)
    tree = ast.parse(inspect.getsource(importlib.import_module(VERBS[verb].__module__)))
    homes = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
    }
    assert function.__module__ in homes and function.__module__.startswith("loopscope.api.")


# --- models are asked by capability ----------------------------------------------------------------------------------

MODEL_NAMES = {"model", "looped", "network", "opened_model"}


def guesses(tree: ast.AST) -> list[str]:
    """getattr and hasattr of a model with a constant name: a capability that has no name."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or called(node) not in ("getattr", "hasattr") or len(node.args) < 2:
            continue
        subject, attribute = node.args[:2]
        name = subject.attr if isinstance(subject, ast.Attribute) else getattr(subject, "id", "")
        if name in MODEL_NAMES and isinstance(attribute, ast.Constant):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_no_attribute_of_a_model_is_guessed_at_outside_the_protocol():
    others = [path for path in FILES if name_of(path) != "protocol.py"]
    assert {name_of(path): found for path in others if (found := guesses(ast.parse(path.read_text())))} == {}


def test_a_guess_would_be_seen():
    assert guesses(ast.parse("getattr(model, 'head', None)")) and guesses(ast.parse("hasattr(self.model, 'cache')"))
    assert not guesses(ast.parse("getattr(config.model, name)"))
