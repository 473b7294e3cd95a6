"""What `pip install loopscope` gives: the files, the metadata, and commands that run where nothing else is installed.

What is said of a wheel and an sdist is tested by `make package`, which builds them first: building and installing need
a package index, and `make test` does without a network.
"""

from __future__ import annotations

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
    assert {"loopscope/py.typed", "loopscope/report/template.html", "loopscope/report/page.css"} < names


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
