"""What all tests share: a small model configuration and a fixed seed."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from loopscope.cli import main
from loopscope.config import ModelConfig
from loopscope.machine import limit_cpu_isa

limit_cpu_isa()  # before torch's first product; processes that tests start inherit it

LONGEST_FIRST = (
    *("fuzz/test_fuzz_files.py", "studies/test_quickstart.py", "training/test_distributed.py", "rows/test_backends.py"),
    *("test_examples.py", "fuzz/test_fuzz_flags.py", "api/test_calibrate.py", "test_reproduce_cli.py"),
    *(
        "test_docs.py",
        "auditing/test_planted.py",
        "test_audit_cli.py",
        "test_training_cli.py",
        "studies/test_claims.py",
    ),
    *("auditing/test_search.py", "studies/test_tables.py", "training/test_trainer.py", "api/test_downstream.py"),
    *("api/test_published.py", "show/test_browser.py", "show/test_page.py"),
)
"""Files that take more than about 20 seconds. A worker takes one file at a time (`make test`), so that a long one which
is started last leaves the other workers idle; xdist's own order, most tests first, does just that."""

# A shell that starts us in the background has Ctrl-C ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("loopscope", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("loopscope")


GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "write tests/golden/ anew instead of comparing with it; read its diff before you commit it"
    parser.addoption("--renew-goldens", action="store_true", help=told)


@pytest.fixture
def golden(pytestconfig) -> Callable[[str, str], None]:
    """Compare a text with the file of that name in tests/golden/."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if pytestconfig.getoption("renew_goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        assert text == path.read_text("utf-8"), f"not as in {path}; is it meant? pytest --renew-goldens"

    return compare


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))  # stable: all else stays in its order


def pytest_terminal_summary(terminalreporter) -> None:
    """How much was fuzzed: it is promised, and what a worker prints is lost."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    ends = [report for report in reports if getattr(report, "when", "") == "teardown"]
    told = [value for report in ends for name, value in report.user_properties if name == "fuzz"]
    if told:
        cases, slowest, most = (
            sum(one[0] for one in told),
            max(told, key=lambda one: one[1]),
            max(one[3] for one in told),
        )
        terminalreporter.write_line(
            f"fuzzing: {cases:,} cases; the slowest took {slowest[1]:.2f} s of a processor ({slowest[2]:.60}); "
            f"memory rose by {most:.0f} MiB at most"
        )


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    torch.set_flush_denormal(False)  # training in this process turns it on, and hypothesis refuses to draw floats then


@pytest.fixture(scope="module")
def flushed_denormals():
    """As the command line sets it; training slows down on denormal numbers otherwise."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


TEXT = "".join(f"line {n} of a text about rivers and {n * n} stones\n" for n in range(400))
TINY_RUN = [
    "--preset", "demo", "--vocab-size", "256", "--tokenizer", "bytes", "--width", "16", "--num-layers", "1",
    "--num-heads", "2", "--num-loops", "3", "--max-length", "16", "--batch", "4", "--steps", "8", "--log-every", "2",
    "--eval-every", "4", "--save-every", "4", "--eval-tokens", "200", "--lr", "0.01",
]  # fmt: skip
Told = tuple[int, str, str]
"""Exit code, stdout, stderr."""


@pytest.fixture(scope="session")
def kept(tmp_path_factory) -> tuple[Path, dict[tuple[str, ...], Told]]:
    """A folder with the path of `place` and what stands in it after each command that a test began with."""
    return tmp_path_factory.mktemp("kept"), {}


@pytest.fixture
def place(kept, monkeypatch) -> Path:
    """A folder with a text and a cache of its own: the same path for every test, and nobody has been there."""
    folder = kept[0] / "place"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(folder / "cache"))
    return folder


@pytest.fixture
def text(place) -> Path:
    return place / "text.txt"


@pytest.fixture
def train_command(place, text) -> Callable[..., list[str]]:
    """A command that trains a tiny model on the text of the place for eight steps, unless flags say otherwise."""
    return lambda *flags, out="run": ["train", *TINY_RUN, "--data", str(text), "--out", str(place / out), *flags]


@pytest.fixture
def train(place, text, train_command, kept, capsys) -> Callable[..., Told]:
    """Run that command; gives exit code, stdout, stderr.

    A command that several tests begin with is run once: the others find what it left and what it said.
    """

    def run(*flags: str, out: str = "run") -> Told:
        command = tuple(train_command(*flags, out=out))
        is_first = [*place.iterdir()] == [text] and text.read_text() == TEXT
        copies, told = kept
        if is_first and command in told:
            shutil.copytree(copies / str([*told].index(command)), place, dirs_exist_ok=True)
            return told[command]
        code = main(list(command))
        output = capsys.readouterr()
        if is_first:
            shutil.copytree(place, copies / str(len(told)), symlinks=True)
            told[command] = code, output.out, output.err
        return code, output.out, output.err

    return run


@pytest.fixture
def tiny() -> ModelConfig:
    """A model small enough for float64 derivatives."""
    return ModelConfig(vocab_size=37, width=32, num_layers=2, num_loops=3, num_heads=4, max_length=24, dropout=0.0)


@pytest.fixture
def ids_BT() -> torch.Tensor:
    return torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(7))
