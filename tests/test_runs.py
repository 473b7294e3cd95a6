"""The run folder: writes that are whole or absent, metrics that survive a kill, a lock that dies with its holder."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading

import pytest

from loopscope.config import Config
from loopscope.errors import RunError
from loopscope.files import folder_written_whole, write_atomically
from loopscope.machine import git_state
from loopscope.presets import preset
from loopscope.results.run import LoggedEvaluation, LoggedEvent, LoggedStep
from loopscope.runs import RunFolder


def test_a_run_remembers_its_configuration(tmp_path):
    run = RunFolder(tmp_path / "a" / "run")
    run.create(preset("micro"))
    assert run.config() == preset("micro") != Config()


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"is not a run folder: it has no config\.yaml"):
        RunFolder(tmp_path).config()


def test_metrics_survive_a_torn_last_line_and_forget_steps_that_will_be_repeated(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.append_metrics(LoggedStep(step=step))
    with run.metrics_path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert [row.step for row in run.read_metrics()] == [1, 2, 3]
    run.forget_metrics_after(2)
    run.append_metrics(LoggedStep(step=3))
    assert [row.step for row in run.read_metrics()] == [1, 2, 3]


def test_a_full_disk_is_told_with_the_file_that_did_not_fit(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as full:
        run.append_metrics(LoggedStep(step=1))
    assert full.value.filename == str(run.metrics_path)


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path], "and nothing half-written"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "step-1"
    with pytest.raises(ZeroDivisionError), folder_written_whole(target) as beside:
        (beside / "half").write_text("x")
        assert not target.exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with folder_written_whole(target) as beside:
        (beside / "whole").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


HOLD = """
import sys, time
from pathlib import Path
from loopscope.runs import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_and_a_dead_one_holds_nothing(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"in use by process {holder.pid}"), RunFolder(tmp_path).locked():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunFolder(tmp_path).locked():
        pass


def test_what_a_killed_process_left_half_written_is_gone_once_the_run_is_locked(tmp_path):
    left = [tmp_path / f".{name}.4242" for name in ("metrics.jsonl", "manifest.json", "config.yaml")]
    others = tmp_path / ".audit.json.4242"  # written without the lock: its process may be alive
    for path in (*left, others):
        path.write_text("half")
    with RunFolder(tmp_path).locked():
        assert not any(path.exists() for path in left) and others.exists()


def test_metrics_are_strict_json(tmp_path):
    run = RunFolder(tmp_path)
    run.append_metrics(LoggedEvaluation(step=1, ce=[math.nan, 1.0], norm=[math.inf, 2.0]))
    assert run.read_metrics() == [LoggedEvaluation(step=1, ce=[None, 1.0], norm=[None, 2.0])]
    assert "NaN" not in run.metrics_path.read_text() and "Infinity" not in run.metrics_path.read_text()


def test_looking_whether_a_run_is_locked_keeps_nobody_from_locking_it(tmp_path):
    looks = threading.Thread(target=lambda: [RunFolder(tmp_path).is_held() for _ in range(3000)])
    looks.start()
    while looks.is_alive():
        with RunFolder(tmp_path).locked():
            assert RunFolder(tmp_path).is_held()
    assert not RunFolder(tmp_path).is_held()


def test_git_state_is_none_outside_a_repository(tmp_path):
    assert git_state(tmp_path) is None


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
def test_only_a_regular_file_is_ever_replaced(kind, tmp_path):
    """Somebody who may write to /dev would lose /dev/null to --out /dev/null."""
    path = tmp_path / "there"
    os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        write_atomically(path, "text")
    assert [left.name for left in tmp_path.iterdir()] == ["there"] and not path.is_file()


def test_the_file_that_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_half_a_surrogate_pair_in_metrics_does_not_keep_a_run_from_going_on(tmp_path):
    run = RunFolder(tmp_path)
    for step in (1, 2):
        run.append_metrics(LoggedEvent(step=step, event="skip", message="\ud800 x"))
    run.forget_metrics_after(1)
    assert run.read_metrics() == [LoggedEvent(step=1, event="skip", message="? x")]
