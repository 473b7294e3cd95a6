"""Documentation is tested: its commands parse, its code runs, and nothing public is missing from it."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from loopscope.cli import VERBS, main, parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = {"README.md": README, **{f"docs/{name}": text for name, text in PAGES.items()}}


def blocks(text: str, language: str) -> list[str]:
    """Fenced code blocks of that language ("" for those without one)."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for found, block in fenced if found == language]


def commands() -> list[tuple[str, str]]:
    lines = [
        (name, line) for name, text in TEXTS.items() for block in blocks(text, "bash") for line in block.splitlines()
    ]
    return [(name, line.split("#")[0].strip()) for name, line in lines if line.startswith("loopscope ")]


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_documented_command_is_accepted(page, command):
    parse(shlex.split(command)[1:])


def test_the_readme_shows_commands_of_every_verb():
    shown = {shlex.split(command)[1] for page, command in commands() if page == "README.md"}
    assert shown == set(VERBS)


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if blocks(text, "python")])
def test_documented_python_runs(page, capsys):
    for block in blocks(TEXTS[page], "python"):
        exec(compile(block, page, "exec"), {})


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_reference_is_what_help_prints(generate, monkeypatch):
    monkeypatch.setenv("COLUMNS", "")  # it sets its own
    assert PAGES["cli.md"] == generate.cli_reference(), "run `make docs`"


def test_the_claims_of_the_readme_are_those_of_its_record(generate):
    assert generate.with_claims(README) == README, "run `make docs`"
    assert "| C11 |" in README


def test_every_file_that_a_page_links_to_is_there():
    for name, text in TEXTS.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_the_readme_tree_names_every_source_file_with_a_comment():
    tree = next(block for block in blocks(README, "") if block.startswith("src/loopscope"))
    described, folders = set(), []
    for indent, name, comment in re.findall(r"^( *)(\S+)(?: +(\S.*))?$", tree, flags=re.MULTILINE):
        folders = folders[: len(indent) // 2]
        if name.endswith("/"):
            folders.append(name)
        elif name.endswith(".py") and comment:
            described.add("".join([*folders, name]))
    files = {path.relative_to(ROOT) for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    packages = ("loopscope", "cli")  # the others say what they are in their own docstring
    files = {str(path) for path in files if path.name != "__init__.py" or path.parent.name in packages}
    assert described == files


def test_every_page_is_in_the_index():
    assert all(f"({name})" in PAGES["README.md"] for name in PAGES if name != "README.md")


@pytest.mark.parametrize("arguments", [["env"], ["plan"]])
def test_every_json_field_is_documented(arguments, capsys):
    assert main([*arguments, "--json"]) == 0
    section = PAGES["json.md"].split(f"`loopscope {arguments[0]} --json`")[1].split("## ")[0]
    if "(plan.md)" in section:
        section += PAGES["plan.md"]
    result = json.loads(capsys.readouterr().out)
    nested = [key for value in result.values() if isinstance(value, list) for item in value for key in item]
    for key in {*result, *nested}:
        assert f"`{key}`" in section, f"{key} of loopscope {arguments[0]} --json is not in docs/json.md"


def test_every_field_of_an_audit_is_documented(capsys):
    quick = ["--states", "1", "--prefix", "4", "--tokens", "32", "--loops", "5"]
    assert main(["audit", "preset:demo", "--json", *quick]) == 1

    def keys(value):
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    for key in keys(json.loads(capsys.readouterr().out)):
        assert f"`{key}`" in PAGES["audit.md"], f"{key} of audit.json is not in docs/audit.md"


def test_the_makefile_targets_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+) ", README):
        assert f"\n{target}:" in makefile
