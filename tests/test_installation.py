"""What `pip install loopscope` gives: the files, the metadata, and commands that run where nothing else is installed.

What is said of a wheel and an sdist is tested by `make package`, which builds them first: building and installing need
a package index, and `make test` does without a network.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import loopscope
from loopscope.cli import COMMANDS, main
from loopscope.cli.flags import sections_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


# --- the wheel and the sdist -----------------------------------------------------------------------------------------


def built(suffix: str) -> Path:
    if "LOOPSCOPE_DIST" not in os.environ:
        pytest.skip("built and tested by `make package`")
    (found,) = Path(os.environ["LOOPSCOPE_DIST"]).absolute().glob(f"*{suffix}")
    return found


@pytest.fixture
def wheel() -> Path:
    return built(".whl")


@pytest.fixture
def sdist() -> Path:
    return built(".tar.gz")


def tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("what belongs into a distribution is what git knows")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_a_package_index_would_take_both(wheel, sdist):
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_wheel_holds_the_package_with_its_page_and_nothing_else(wheel):
    ours = {name.removeprefix("src/") for name in tracked() if name.startswith("src/loopscope/")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == ours
    assert {"loopscope/py.typed", "loopscope/show/report.html", "loopscope/show/page.css"} < names


def test_the_sdist_is_the_repository(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"PKG-INFO"} == tracked()


def test_the_wheel_says_what_it_is(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Version"] == loopscope.__version__
    assert metadata["Requires-Python"] == ">=3.11" and metadata["License-Expression"] == "Apache-2.0"
    pythons = {
        line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if re.search(r":: Python :: \d\.", line)
    }
    assert pythons == {"3.11", "3.12", "3.13"}
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata.get_payload().startswith("# loopscope")


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory) -> Path:
    """A virtual environment with the wheel and what it asks for, and nothing else."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    wheel = built(".whl")
    venv.create(folder, with_pip=True)
    command = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    return folder


@pytest.fixture
def run(empty_environment, tmp_path):
    """Run the installed command in an empty folder, with nothing of this checkout in sight."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LOOPSCOPE"))}
        environment = {**kept, "LOOPSCOPE_CACHE": str(tmp_path / "cache")}
        command = [empty_environment / "bin" / "loopscope", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_an_installed_loopscope_tells_its_version(run):
    assert run("--version").stdout == f"loopscope {loopscope.__version__}\n"


def test_quickstart_runs_where_nothing_else_is_installed(run):
    ran = run("quickstart", "--steps", "4")
    assert ran.returncode == 0, ran.stderr
    assert "Blind spot in 2 of 4 audited runs" in ran.stdout
    assert "pip install 'loopscope[report]'" in ran.stderr, "the page is an extra, and that is told"


def test_an_audit_runs_where_nothing_else_is_installed(run):
    ran = run("audit", "preset:demo", "--states", "1", "--prefix", "4", "--tokens", "32")
    assert ran.returncode == 1, ran.stderr
    assert "verdict: BLIND-SPOT" in ran.stdout


# --- what it asks for ------------------------------------------------------------------------------------------------

SOURCE = Path(loopscope.__file__).parent
PROVIDES = {"pyyaml": "yaml", "lm-eval": "lm_eval", "huggingface-hub": "huggingface_hub"}
"""Packages that are imported under another name than they are installed by."""


def names_of(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}


def modules_named() -> set[str]:
    """First parts of everything that our source imports, or names as a module to be imported when it is needed."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {part for name in found for part in (name.partition(".")[0], name.rpartition(".")[2])}


EXTRAS = {name: names_of(found) for name, found in PROJECT["optional-dependencies"].items() if name != "dev"}


@pytest.mark.parametrize(
    ("extra", "requirement"),
    [
        *(("", name) for name in sorted(names_of(PROJECT["dependencies"]))),
        *((extra, name) for extra, names in EXTRAS.items() for name in sorted(names)),
    ],
)
def test_everything_that_is_asked_for_is_used(extra, requirement):
    assert PROVIDES.get(requirement, requirement) in modules_named(), f"nothing in loopscope imports {requirement}"


def test_everything_that_is_imported_is_asked_for():
    asked = names_of(PROJECT["dependencies"]).union(*EXTRAS.values())
    known = {PROVIDES.get(name, name) for name in asked}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"loopscope"}:
                assert name in known, f"{path.name} imports {name}, which nobody is told to install"


def test_every_extra_that_a_sentence_names_is_there():
    told = {
        extra
        for path in (*SOURCE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md")
        for found in re.findall(r"loopscope\[([\w,-]+)\]", path.read_text("utf-8"))
        for extra in found.split(",")
    }
    assert told <= set(PROJECT["optional-dependencies"]) and {"hf", "report"} <= told


def test_every_requirement_is_in_the_known_good_set():
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = {line.partition("==")[0].replace("_", "-") for line in lines}
    for requirements in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        assert names_of(requirements) - {"loopscope"} <= pinned


# --- completion ------------------------------------------------------------------------------------------------------

ASK = """
source "$1"
shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_loopscope loopscope "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory) -> Path:
    """What a user sources; written by a process, which may not import torch for it."""
    program = "import sys; from loopscope.cli import main; main(['--completion', 'bash']); "
    program += "assert 'torch' not in sys.modules, 'a shell that starts is no time to import torch'"
    path = tmp_path_factory.mktemp("completion") / "loopscope.bash"
    path.write_bytes(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    return path


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["pl"], {"plan"}),
        (["--v"], {"--version"}),
        (["--completion", ""], {"bash", "zsh", "fish"}),
        (["plan", "--num-lo"], {"--num-loops"}),
        (["plan", "--readout", "r"], {"raw", "rmsnorm"}),
        (["train", "--preset", "paper-4"], {"paper-44m"}),
        (["train", "--design", "normf"], {"normformer"}),
        (["reproduce", "ou"], {"ouro", "ouro-train"}),
        (["reproduce", "ouro", "--dep"], {"--depths"}),
        (["reproduce", "--rec"], {"--recipe"}),
        (["report", "runs/"], {""}),
    ],
)
def test_bash_offers_commands_flags_and_choices_and_leaves_files_to_itself(bash_script, typed, offered):
    command = ["bash", "-c", ASK, "ask", str(bash_script), "loopscope", *typed]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(said.stdout.splitlines()) == offered and not said.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told_of_every_command_and_flag(shell, capsys):
    assert main(["--completion", shell]) == 0
    script = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name.split()[-1] in script
        for flag in (flag for section in sections_of(command) for flag in section.flags):
            assert all(spelling.lstrip("-") in script for spelling in flag.names)


def test_an_unknown_shell_is_one_sentence(capsys):
    assert main(["--completion", "tcsh"]) == 2
    assert "expected one of bash, zsh, fish" in capsys.readouterr().err
