"""What SECURITY.md promises: our source unpickles nothing and runs no text, and no verb talks to anybody."""

from __future__ import annotations

import ast
import ipaddress
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loopscope
from loopscope.cli import main

SOURCE = Path(loopscope.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = sorted(SOURCE.rglob("*.py"))

PICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
RUNNERS = {"eval", "exec", "compile", "execfile", "__import__"}
"""Built-in functions that make code of text."""
UNSAFE_CALLS = {"os.system", "os.popen", "torch.load", "np.load", "numpy.load", "pd.read_pickle", "runpy.run_path"}
UNSAFE_LOADERS = {"Loader", "UnsafeLoader", "FullLoader", "CLoader", "CUnsafeLoader", "CFullLoader"}


def dangers(tree: ast.AST) -> Iterator[str]:
    """Every way in which a source file could unpickle something, or run a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name.split(".")[0] in PICKLERS)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLERS:
            yield f"imports from {node.module}"
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_LOADERS and ast.unparse(node.value) == "yaml":
            yield f"uses {ast.unparse(node)}"
        if isinstance(node, ast.Call):
            yield from _dangerous_call(node)


def _dangerous_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    if called in RUNNERS | UNSAFE_CALLS or called in {f"builtins.{name}" for name in RUNNERS}:
        yield f"calls {called}"
    if called in ("yaml.unsafe_load", "yaml.full_load"):
        yield f"calls {called}"
    words = [one.value for one in node.args if isinstance(one, ast.Constant)]
    if called.endswith("import_module") and words and str(words[0]).split(".")[0] in PICKLERS:
        yield f"imports {words[0]}"
    for keyword in node.keywords:
        if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not _is_false(keyword.value):
            yield f"{called} with {keyword.arg}"


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


UNPICKLING = SOURCE / "adapters/unpickling.py"
"""What `convert --from-pickle` starts as a process of its own: the only file that may call torch.load."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_our_source_unpickles_nothing_and_runs_no_text(path):
    allowed = ["calls torch.load"] if path == UNPICKLING else []
    assert list(dangers(ast.parse(path.read_text("utf-8")))) == allowed


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
        "exec(compile(text, 'x', 'exec'))",
        "import builtins\nbuiltins.eval(text)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, yaml.UnsafeLoader)",
        "yaml.full_load(text)",
        "np.load(path)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "subprocess.run(command, shell=True)",
        "os.system(command)",
    ],
)
def test_every_such_way_would_be_seen(code):
    assert list(dangers(ast.parse(code)))


def test_what_only_looks_like_it_is_left_alone():
    assert not list(dangers(ast.parse("model.eval(); re.compile('x'); core.compile(); json.load(file)")))
    assert not list(dangers(ast.parse("load(name, trust_remote_code=False); subprocess.run(command)")))


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
    sys.path.insert(0, str(Path(__file__).parent / "report"))
    from report_samples import write_run

    from loopscope.show.page import build_report

    html = build_report([write_run(tmp_path / "run")]).html
    ours = re.sub(r"<script[^>]*>.*?</script>", "", html, flags=re.DOTALL)  # plotly itself names addresses
    assert not re.findall(r"""(?:src|srcset|action|poster)\s*=\s*["']?(?:https?:)?//""", ours)
    assert not re.findall(r"<link[^>]+href=.(?!data:)|@import|url\(\s*[\"']?(?:https?:)?//", ours)


def test_the_promises_are_linked_from_the_readme_and_the_documentation():
    assert "SECURITY.md" in (ROOT / "README.md").read_text("utf-8")
    assert "SECURITY.md" in (ROOT / "docs/README.md").read_text("utf-8")
    for name in re.findall(r"`((?:tests|benchmarks)/[\w./]+)`", (ROOT / "SECURITY.md").read_text("utf-8")):
        assert (ROOT / name).exists(), f"SECURITY.md names {name}"
