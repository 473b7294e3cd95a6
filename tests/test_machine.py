"""Where AMX is announced and forbidden, a bf16 product ends the process: found out by a child, avoided, and told.

The fault is made here: a cpuinfo that announces AMX, and a trial that really dies by SIGILL.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import loopscope as ls
from loopscope import machine
from loopscope.config import TrainingConfig
from loopscope.errors import UnsupportedError
from loopscope.rows.spec import RowSpec
from loopscope.training.optimizers import Optimizers

ANNOUNCED = "processor : 0\nmodel name : Xeon (made up)\nflags : fpu avx512_bf16 amx_bf16 amx_tile\n\nprocessor : 1\n"
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
VARIABLE = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """An own cache, no variable set, and nothing remembered in this process."""
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    for name in (*machine.ISA_VARIABLES, machine.REASON_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is put back even where the code under test sets it
        monkeypatch.delenv(name)
    machine.bf16_products.cache_clear()
    yield
    machine.bf16_products.cache_clear()


@pytest.fixture
def announced(monkeypatch, tmp_path) -> Path:
    """A processor that announces AMX; how its trial ends is up to the test."""
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.CPUINFO.write_text(ANNOUNCED)
    return machine.CPUINFO


@pytest.fixture
def forbidden(announced, monkeypatch, tmp_path) -> Path:
    """AMX announced and forbidden; the file gets a letter from every child that was started."""
    started = tmp_path / "started"
    started.touch()
    monkeypatch.setattr(machine, "TRIAL", noted_death(started))
    return started


def noted_death(started: Path) -> str:
    return f"open({str(started)!r}, 'a').write('x'); {DIES}"


def ask_again() -> machine.Bf16Products:
    """As another process of this machine would."""
    machine.bf16_products.cache_clear()
    return machine.bf16_products()


def memory(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "machine").iterdir()
    return path


def test_the_first_processor_is_read_and_a_machine_without_such_a_file_announces_nothing(announced, tmp_path):
    read = machine.read_processor(announced)
    assert read == machine.Processor("Xeon (made up)", frozenset({"fpu", "avx512_bf16", "amx_bf16", "amx_tile"}))
    assert read.announces_amx
    assert not machine.read_processor(tmp_path / "nowhere").announces_amx


def test_no_child_is_started_where_amx_is_not_announced(forbidden, announced):
    announced.write_text(ANNOUNCED.replace("amx_", "xma_"))
    assert machine.bf16_products() == "work"
    machine.limit_cpu_isa()
    machine.check_bf16_products()
    assert forbidden.read_text() == "" and VARIABLE not in os.environ
    assert "announces no AMX" in machine.choose_cpu_isa().reason


def test_the_trial_itself_multiplies_on_this_machine(announced, monkeypatch):
    """Announced or not, and forbidden or not: with AMX out of the way the child lives."""
    safe = f"import os; os.environ[{VARIABLE!r}] = {machine.SAFE_ISA!r}\n"
    monkeypatch.setattr(machine, "TRIAL", safe + machine.TRIAL)
    assert machine.bf16_products() == "work"
    machine.limit_cpu_isa()
    assert VARIABLE not in os.environ
    choice = machine.choose_cpu_isa()
    assert choice.value == "not limited" and "a trial process multiplied" in choice.reason


def test_a_child_that_dies_by_sigill_is_a_fault_that_is_remembered_and_avoided(forbidden, tmp_path):
    assert machine.bf16_products() == "die"
    assert ask_again() == "die" and forbidden.read_text() == "x", "the second process starts no child"
    assert json.loads(memory(tmp_path).read_text())["bf16_products"] == "die"
    machine.limit_cpu_isa()
    assert os.environ[VARIABLE] == "AVX512_CORE_BF16"
    choice = machine.choose_cpu_isa()
    assert choice.value == "AVX512_CORE_BF16" and "SIGILL" in choice.reason
    machine.check_bf16_products()


def test_a_fault_seen_through_a_shell_is_the_same_fault(announced, monkeypatch, tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr(machine, "TRIAL", DIES)
    assert machine.bf16_products() == "die"


def test_another_kernel_or_torch_or_processor_is_another_machine(forbidden, announced, monkeypatch):
    machine.bf16_products()
    monkeypatch.setattr(machine.platform, "release", lambda: "99.0")
    ask_again()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "99.0")
    ask_again()
    announced.write_text(ANNOUNCED.replace("fpu", "fpu amx_int8"))
    ask_again()
    assert forbidden.read_text() == "xxxx"
    ask_again()
    assert forbidden.read_text() == "xxxx"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"null", b'{"bf16_products": "maybe"}', b"{"])
def test_a_damaged_memory_is_asked_for_again_and_mended(forbidden, tmp_path, content):
    machine.bf16_products()
    memory(tmp_path).write_bytes(content)
    assert ask_again() == "die" and forbidden.read_text() == "xx"
    assert ask_again() == "die" and forbidden.read_text() == "xx"


def test_a_cache_that_cannot_be_written_costs_a_child_and_nothing_else(forbidden, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "file"))
    assert machine.bf16_products() == "die"
    monkeypatch.delenv("LOOPSCOPE_CACHE")
    monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    assert ask_again() == "die" and forbidden.read_text() == "xx"


@pytest.mark.parametrize("trial", ["import time; time.sleep(60)", "raise SystemExit(3)", "import not_there"])
def test_a_child_without_an_answer_is_avoided_too_but_neither_remembered_nor_refused(announced, monkeypatch, trial):
    monkeypatch.setattr(machine, "TRIAL", trial)
    monkeypatch.setattr(machine, "TRIAL_SECONDS", 0.3 if "sleep" in trial else 60.0)
    started = time.monotonic()
    assert machine.bf16_products() == "unknown"
    assert time.monotonic() - started < 30, "a child that hangs is not waited for"
    machine.check_bf16_products()
    assert "gave no answer" in machine.choose_cpu_isa().reason
    machine.limit_cpu_isa()
    assert os.environ[VARIABLE] == machine.SAFE_ISA and "gave no answer" in machine.choose_cpu_isa().reason
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(machine, "TRIAL", DIES)
    assert ask_again() == "die"


@pytest.mark.parametrize("name", machine.ISA_VARIABLES)
def test_what_the_user_has_set_is_respected(forbidden, monkeypatch, name):
    monkeypatch.setenv(name, "AVX2")
    machine.limit_cpu_isa()
    machine.check_bf16_products()
    set_now = {variable: os.environ[variable] for variable in machine.ISA_VARIABLES if variable in os.environ}
    assert set_now == {name: "AVX2"}
    choice = machine.choose_cpu_isa()
    assert choice.value == "AVX2" and f"set by you in {name}" in choice.reason
    assert forbidden.read_text() == "", "and no child is started"


def test_a_python_caller_gets_a_sentence_with_the_remedy_instead_of_a_dead_interpreter(forbidden, tiny):
    with pytest.raises(UnsupportedError, match=f"set {VARIABLE}=AVX512_CORE_BF16 in the environment") as caught:
        Optimizers(ls.build(tiny), TrainingConfig(optimizer="muon"))
    assert "\n" not in str(caught.value)
    assert VARIABLE in machine.choose_cpu_isa().reason, "the manifest tells it too"
    assert len(Optimizers(ls.build(tiny), TrainingConfig(optimizer="adamw")).parts) == 1
    assert forbidden.read_text() == "x"


# --- whole processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(announced, tmp_path) -> dict[str, str]:
    """The environment of processes on a machine that forbids AMX; their modules are patched as they start."""
    started = tmp_path / "started"
    started.touch()
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(
        "from pathlib import Path\n"
        "from loopscope import machine\n"
        f"machine.CPUINFO = Path({str(announced)!r})\n"
        f"machine.TRIAL = {noted_death(started)!r}\n"
    )
    path = os.pathsep.join([str(tmp_path / "path"), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def loopscope(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loopscope", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_the_command_line_sets_the_limit_once_found_out_and_says_why(elsewhere, tmp_path):
    ran = loopscope(elsewhere, "env", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    (choice,) = (choice for choice in json.loads(ran.stdout)["choices"] if choice["name"] == "cpu_isa")
    assert choice["value"] == "AVX512_CORE_BF16" and "SIGILL" in choice["reason"]
    assert loopscope(elsewhere, "plan", "--yaml").returncode == 0
    assert (tmp_path / "started").read_text() == "x", "the second command remembers"


def test_two_commands_at_once_find_out_and_remember_the_same(elsewhere, tmp_path):
    command = [sys.executable, "-m", "loopscope", "plan", "--yaml"]
    processes = [subprocess.Popen(command, env=elsewhere, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    assert json.loads(memory(tmp_path).read_text())["bf16_products"] == "die"


def test_help_version_and_mistakes_start_no_child(elsewhere, tmp_path):
    for arguments in (["--help"], ["--version"], ["train", "--help"], ["train", "--stepz", "1"], ["env", "--jsn"]):
        assert loopscope(elsewhere, *arguments).returncode in (0, 2)
    assert (tmp_path / "started").read_text() == ""


def test_a_row_of_a_grid_limits_itself_before_torch_is_there(elsewhere, tmp_path):
    """A row on a Ray worker runs on another machine than the command line did."""
    script = (
        "import os, sys; from loopscope.rows import process as row\n"
        "row.is_complete = lambda *_: print(os.environ['ONEDNN_MAX_CPU_ISA'], 'torch' in sys.modules) or True\n"
        "sys.exit(row.main(*sys.argv[1:]))"
    )
    spec = RowSpec(condition="terminal+raw", recipe="paper", seed=0, config=ls.Config()).to_json()
    command = [sys.executable, "-c", script, str(tmp_path / "row"), spec, "0"]
    ran = subprocess.run(command, capture_output=True, text=True, env=elsewhere, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "AVX512_CORE_BF16 False\n"), ran.stderr
