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
from loopscope.designs import DESIGNS

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
        if "ls.watch" not in block or page != "README.md":  # what that prints is tested below
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


def test_the_table_of_designs_is_that_of_the_registry(generate):
    assert generate.with_designs(PAGES["designs.md"]) == PAGES["designs.md"], "run `make docs`"


def test_the_claims_of_the_readme_are_those_of_its_record(generate):
    assert generate.with_claims(README) == README, "run `make docs`"
    assert "| C11 " in README


def test_every_file_that_a_page_links_to_is_there():
    for name, text in TEXTS.items():
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_the_readme_names_every_room_with_a_comment():
    tree = next(block for block in blocks(README, "") if block.startswith("src/loopscope"))
    described = dict(re.findall(r"^  (\S+?)/? +(\S.*)$", tree, flags=re.MULTILINE))
    package = ROOT / "src" / "loopscope"
    rooms = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    assert rooms <= described.keys()
    assert all((package / name).exists() for name in described)


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")


def test_the_training_loop_of_the_readme_prints_what_is_shown(capsys):
    """Word for word; its numbers up to what another processor rounds differently."""
    block, shown = re.search(
        r"```python\n([^`]*?ls\.watch.*?)```\n\nprints\n\n```\n(.*?)```", README, re.DOTALL
    ).groups()
    exec(compile(block, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", " ".join(printed.split())) == NUMBER.sub("#", " ".join(shown.split()))
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    assert all(float(ours) == pytest.approx(float(theirs), rel=0.5, abs=1e-6) for ours, theirs in pairs)


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


def keys(value: object) -> set[str]:
    """Every key of a JSON value, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_every_field_of_a_check_is_documented(capsys):
    assert main(["check", "preset:demo", "--context", "256", "--json"]) == 1  # it takes 128: that is a finding
    section = PAGES["check.md"].split("`loopscope check --json`")[1]
    for key in keys(json.loads(capsys.readouterr().out)):
        assert f"`{key}`" in section, f"{key} of loopscope check --json is not in docs/check.md"


def test_every_field_of_an_audit_is_documented(capsys):
    quick = ["--states", "1", "--prefix", "4", "--tokens", "32", "--loops", "5"]
    asked = ["--push", "--push-steps", "1", "--motion"]
    assert main(["audit", "preset:demo", "--json", *quick, *asked]) == 1

    for key in keys(json.loads(capsys.readouterr().out)):
        assert f"`{key}`" in PAGES["audit.md"] + PAGES["motion.md"], f"{key} of audit.json is not in docs/audit.md"


@pytest.mark.parametrize(
    ("page", "record"), [("atlas.md", "2026-11-18-atlas-demo/atlas"), ("scaling.md", "2026-11-18-scaling-demo/scaling")]
)
def test_every_field_of_an_atlas_and_of_a_law_is_documented(page, record):
    told = json.loads((ROOT / "records" / f"{record}.json").read_text())
    names = [part for point in told.get("points", ()) for part in point["name"].split()]
    for key in keys(told) - {"versions", "git", *DESIGNS, *names, *(told.get("versions") or ())}:
        assert f"`{key}`" in PAGES[page], f"{key} is not in docs/{page}"


def test_the_makefile_targets_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+) ", README):
        assert f"\n{target}:" in makefile
