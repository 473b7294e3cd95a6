"""What SECURITY.md promises: our source unpickles nothing and runs no text, and no verb talks to anybody."""

from __future__ import annotations

import ast
import ipaddress
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import write_run

import loopscope
from loopscope.cli import main
from loopscope.show.page import build_report

SOURCE = Path(loopscope.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
BANNED = set(RULES["flake8-tidy-imports"]["banned-api"])

UNPICKLING = SOURCE / "adapters/unpickling.py"
"""What `convert --from-pickle` starts as a process of its own: the only file that may call torch.load."""


def refused(code: str) -> list[str]:
    """Every way in which a source could unpickle something or run a text: what ruff sees, and what it does not."""
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--select", "S,TID251"]
    command += ["--output-format", "concise", "--quiet", "--stdin-filename", str(SOURCE / "made_up.py"), "-"]
    checked = subprocess.run(command, input=code, capture_output=True, text=True)
    return [*checked.stdout.splitlines(), *overlooked(ast.parse(code))]


def overlooked(tree: ast.AST) -> Iterator[str]:
    """What ruff's rules do not see."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.removeprefix("builtins.") in ("compile", "__import__"):
            yield f"calls {called}"
        words = [str(one.value).split(".")[0] for one in node.args if isinstance(one, ast.Constant)]
        if called.endswith("import_module") and words and words[0] in BANNED:
            yield f"imports {words[0]}"
        for keyword in node.keywords:
            is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_false:
                yield f"{called} with {keyword.arg}"


def test_our_source_unpickles_nothing_and_runs_no_text():
    """`make check` asks ruff; here is what it does not see, and that nobody silences it."""
    found = {path.name: found for path in FILES if (found := [*overlooked(ast.parse(path.read_text("utf-8")))])}
    assert not found
    silenced = [(path.name, *re.findall(r"noqa: ((?:S|TID)\d+)", path.read_text("utf-8"))) for path in FILES]
    allowed = {("unpickling.py", "TID251"), ("files.py", "S506"), ("drawing.py", "S314")}
    assert {found for found in silenced if len(found) > 1} == allowed


def test_the_one_pickle_reader_is_the_restricted_one_and_is_started_not_imported():
    calls = [node for node in ast.walk(ast.parse(UNPICKLING.read_text("utf-8"))) if isinstance(node, ast.Call)]
    (load,) = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}["weights_only"] == "True"
    users = [path for path in FILES if "unpickling" in path.read_text("utf-8") and path != UNPICKLING]
    assert [path.name for path in users] == ["pickled.py"]
    users = [path for path in FILES if "adapters.pickled" in path.read_text("utf-8")]
    assert [str(path.relative_to(SOURCE)) for path in users] == ["cli/convert.py"]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def late():\n    from marshal import loads",
        "import torch.nn, cloudpickle as c",
        "import importlib\nimportlib.import_module('dill')",
        "value = eval(text)",
        "code = compile(text, 'x', 'exec')",
        "exec(text)",
        "import builtins\nbuiltins.eval(text)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import yaml\nyaml.load(text, yaml.UnsafeLoader)",
        "import yaml\nyaml.full_load(text)",
        "import numpy as np\nnp.load(path)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "import subprocess\nsubprocess.run(command, shell=True)",
        "import os\nos.system(command)",
    ],
)
def test_every_such_way_would_be_seen(code):
    assert refused(code)


def test_what_only_looks_like_it_is_left_alone():
    assert not refused("model.eval()\nre.compile('x')\ncore.compile()\njson.load(file)\n")
    assert not refused("load(name, trust_remote_code=False)\nsubprocess.run(command)\n")


# --- the network -----------------------------------------------------------------------------------------------------

ASKS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
asked: list[str] | None = None
"""What was asked of the network, while somebody wants to know."""


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if asked is not None and event in ASKS and not is_local(event, arguments):
        asked.append(f"{event} {arguments!r:.200}")


def is_local(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether it stays on this machine: loopback, a socket with a path, or no address at all."""
    address = arguments[0] if event.startswith("socket.get") else arguments[1]
    host = address[0] if isinstance(address, tuple) else address
    if isinstance(address, str) and not event.startswith("socket.get"):
        return True  # the path of a unix socket
    if host in (None, "", "localhost"):
        return event.startswith("socket.get")  # "" binds to every address
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


sys.addaudithook(_hook)  # it stays for good, and looks only while a test listens


@pytest.fixture
def listening() -> Iterator[list[str]]:
    global asked
    asked = []
    yield asked
    asked = None


def test_a_connection_beyond_loopback_would_be_seen(listening):
    with socket.socket() as probe:
        probe.settimeout(0.01)
        with pytest.raises(OSError):
            probe.connect(("192.0.2.1", 9))  # an address that is reserved for examples
        with pytest.raises(OSError):
            probe.connect(("127.0.0.1", 1))
    assert len(listening) == 1 and "192.0.2.1" in listening[0]


def test_no_verb_talks_to_anybody(listening, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"line {n} about rivers\n" for n in range(200)))
    small = "--preset demo --tokenizer bytes --vocab-size 256 --width 16 --num-layers 1 --max-length 16 --batch 2"
    for command in (
        f"train {small} --data text.txt --steps 2 --eval-tokens 64 --out run --threads 1",
        "eval run --data text.txt --max-tokens 64",
        "audit run --states 1 --tokens 32 --loops 3",
        "remedy run --steps 1 --out remedied",
        "report run --out page.html",
        "convert run exported",
        "convert exported back --to loopscope",
        f"plan {small} --flops-per-second 1e9",
        "env",
    ):
        assert main(command.split()) in (0, 1), capsys.readouterr().err
    assert listening == []


def test_a_page_loads_nothing_from_elsewhere(tmp_path, capsys):
    """A report is sent to colleagues: it must not tell anybody that they opened it."""
    html = build_report([write_run(tmp_path / "run")]).html
    assert not re.findall(r"""(?:src|srcset|action|poster)\s*=\s*["']?(?:https?:)?//""", html)
    assert not re.findall(r"<link[^>]+href=.(?!data:)|@import|url\(\s*[\"']?(?:https?:)?//", html)


def test_the_promises_are_linked_from_the_readme_and_the_documentation():
    assert "SECURITY.md" in (ROOT / "README.md").read_text("utf-8")
    assert "SECURITY.md" in (ROOT / "docs/README.md").read_text("utf-8")
    for name in re.findall(r"`((?:tests|benchmarks)/[\w./]+)`", (ROOT / "SECURITY.md").read_text("utf-8")):
        assert (ROOT / name).exists(), f"SECURITY.md names {name}"
