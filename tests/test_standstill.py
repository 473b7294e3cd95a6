"""A test that stands still fails with a traceback of every thread, and the tests after it run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIGURATION = Path(__file__).parent.parent / "pyproject.toml"
STANDS_STILL = """
import threading

def waits_elsewhere(forever):
    forever.wait()

def test_stands_still():
    forever = threading.Event()
    threading.Thread(target=waits_elsewhere, args=(forever,), daemon=True).start()
    forever.wait()

def test_the_next():
    pass
"""
CANNOT_BE_INTERRUPTED = """
import signal, time

def test_is_deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    time.sleep(100)
"""


def run(content: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest under this project's configuration, with less patience."""
    path = folder / "test_made_up.py"
    path.write_text(content)
    settings = ["-c", str(CONFIGURATION), "--rootdir", str(folder), "-o", "timeout=0.5", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *settings, *arguments, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)


def test_a_test_that_stands_still_fails_with_its_threads_and_the_next_one_runs(tmp_path):
    ran = run(STANDS_STILL, tmp_path, "--numprocesses", "1")
    assert ran.returncode == 1 and "1 failed, 1 passed" in ran.stdout
    assert "Timeout (>0.5s)" in ran.stdout
    assert "def test_stands_still" in ran.stdout and "in waits_elsewhere" in ran.stdout


def test_a_test_that_cannot_be_interrupted_ends_its_process_with_a_traceback(tmp_path):
    ran = run(CANNOT_BE_INTERRUPTED, tmp_path, "-o", "faulthandler_timeout=1")
    assert ran.returncode == 1
    assert "Timeout" in ran.stderr and "in test_is_deaf" in ran.stderr
