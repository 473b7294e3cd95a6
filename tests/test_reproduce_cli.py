"""`loopscope reproduce` as a user runs it: judge, resume, share, refuse, stop, and say how to resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_up import write_made_up_grid, write_row

from loopscope.cli import main

PATIENCE = 240.0


@pytest.fixture
def texts(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    lines = [f"line {n} of a text about {n % 7} rivers, {n * n} stones and {n * 31 % 97} fish\n" for n in range(2000)]
    names = {"train": lines[:1600], "valid": lines[1600:1800], "test": lines[1800:]}
    for name, part in names.items():
        (tmp_path / f"{name}.txt").write_text("".join(part))
    train, valid, test = (str(tmp_path / f"{name}.txt") for name in names)
    return ["--data", train, "--valid", valid, "--test-data", test]


def command(texts: list[str], out: Path, *flags: str) -> list[str]:
    fixed = ["reproduce", "--size", "demo", "--no-audit", "--eval-tokens", "2000", "--out", str(out)]
    return [*fixed, *texts, *flags]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "loopscope", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(true, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def test_a_small_grid_is_run_judged_and_not_run_again(texts, tmp_path, capsys):
    arguments = command(texts, tmp_path / "out", "--conditions", "per-loop+raw,per-loop+rmsnorm", "--seeds", "1")
    code = main([*arguments, "--steps", "6"])
    output = capsys.readouterr()
    assert code in (0, 1) and "Traceback" not in output.err
    assert "C1" in output.out and "39,207" in output.out and "2 rows; claims.json" in output.out
    assert "per-loop+raw-s42 finished" in output.err and "of 2 rows" in output.err
    claims = json.loads((tmp_path / "out" / "claims.json").read_text())["claims"]
    ratio = next(claim for claim in claims if claim["id"] == "C1" and claim["split"] == "test")["quantities"][0]
    assert ratio["n"] == 1 and ratio["mean"] > 0
    differences = (tmp_path / "out" / "tables" / "differences.md").read_text()
    assert "| model.width | 512 | 64 |" in differences and str(tmp_path) not in differences
    rows = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "rows").glob("*/row.json")}
    main([*arguments, "--steps", "6", "--json"])
    output = capsys.readouterr()
    assert "skipped: finished already" in output.err and "started" not in output.err
    assert {path: path.stat().st_mtime_ns for path in rows} == rows
    result = json.loads(output.out)
    assert [row["state"] for row in result["rows"]] == ["finished", "finished"] and result["claims"] == claims
    assert main([*arguments, "--steps", "7"]) == 2
    assert "steps = 6, not 7 (flag --steps)" in capsys.readouterr().err


def test_ctrl_c_saves_says_how_to_resume_and_the_same_command_does(texts, tmp_path):
    arguments = command(texts, tmp_path / "out", "--conditions", "per-loop+raw", "--seeds", "1", "--steps", "60")
    process = start(arguments)
    metrics = tmp_path / "out" / "rows" / "per-loop+raw-s42" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and "\n" in metrics.read_text(), "it trains")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in err
    assert f"Resume with: loopscope {' '.join(arguments)}" in err
    record = json.loads(metrics.with_name("row.json").read_text())
    assert record["state"] == "open" and list(metrics.parent.glob("checkpoints/step-*"))
    again = start(arguments)
    _, err = again.communicate(timeout=PATIENCE)
    assert again.returncode in (0, 1) and "per-loop+raw-s42 started: from step" in err
    assert json.loads(metrics.with_name("row.json").read_text())["attempts"] == 2


def test_two_invocations_share_the_rows(texts, tmp_path):
    names = "per-loop+raw,per-loop+rmsnorm"
    flags = ["--conditions", names, "--seeds", "1", "--steps", "10", "--rows-at-once", "1"]
    both = [start(command(texts, tmp_path / "out", *flags)) for _ in range(2)]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in both]
    assert all(process.returncode in (0, 1) for process in both), errors
    started = [error.count(" started: ") - error.count("retried") for error in errors]
    records = [json.loads(path.read_text()) for path in (tmp_path / "out" / "rows").glob("*/row.json")]
    assert [(record["state"], record["attempts"]) for record in records] == [("finished", 1)] * 2, "none twice"
    assert min(started) >= 1, "both worked"


def test_a_row_that_cannot_be_done_is_reported_with_its_reason(texts, tmp_path, capsys):
    flags = ["--conditions", "per-loop+raw", "--seeds", "1", "--steps", "2", "--retries", "0"]
    row = tmp_path / "out" / "rows" / "per-loop+raw-s42"
    row.mkdir(parents=True)
    (row / "checkpoints").write_text("a file where a folder should be")
    assert main(command(texts, tmp_path / "out", *flags)) == 1
    output = capsys.readouterr()
    assert "per-loop+raw-s42 failed: exit code 1: FileExistsError" in output.out
    assert "  | " in output.err, "the end of its log"
    (row / "checkpoints").unlink()
    assert main(command(texts, tmp_path / "out", *flags)) in (0, 1)
    assert "failed" not in capsys.readouterr().out


def test_a_damaged_result_is_measured_again_by_the_same_command(texts, tmp_path, capsys):
    flags = ["--conditions", "per-loop+raw", "--seeds", "1", "--steps", "2", "--no-audit"]
    main(command(texts, tmp_path / "out", *flags))
    path = tmp_path / "out" / "rows" / "per-loop+raw-s42" / "eval.json"
    before = json.loads(path.read_text())["splits"]
    path.write_text(path.read_text()[:100])
    (path.parent / "manifest.json").unlink()
    capsys.readouterr()
    assert main([*command(texts, tmp_path / "out", *flags), "--rebuild"]) == 2
    assert "delete it and run the command of this grid again, without --rebuild" in capsys.readouterr().err
    main(command(texts, tmp_path / "out", *flags))
    assert json.loads(path.read_text())["splits"] == before
    assert json.loads((path.parent / "manifest.json").read_text())["seed"] == 42


def test_rebuilding_needs_no_rows_to_run_and_exits_by_the_verdicts(tmp_path, capsys):
    out = write_made_up_grid(tmp_path / "grid")
    assert main(["reproduce", "--rebuild", "--out", str(out)]) == 0
    assert "does not hold" not in capsys.readouterr().out

    def shrink(evaluation, audit):
        for depth in evaluation["splits"]["valid"]["depths"]:
            depth["norm"] /= 50

    for seed in (42, 101, 202):
        write_row(out, "per-loop+rmsnorm", seed, change=shrink)
    assert main(["reproduce", "--rebuild", "--out", str(out)]) == 1
    assert (
        "C1 does not hold at this size: norm ratio 2.047 (must be at least 10; 0 of 3 seeds)" in capsys.readouterr().out
    )


def test_rows_of_ouros_design_are_not_judged_by_the_claims_about_the_plain_loop(tmp_path, capsys):
    out = write_made_up_grid(tmp_path / "grid")
    grid = json.loads((out / "grid.json").read_text())
    (out / "grid.json").write_text(json.dumps({**grid, "size": "ouro-train demo"}))
    assert main(["reproduce", "--rebuild", "--out", str(out)]) == 2
    assert "has rows of `loopscope reproduce ouro-train`, of which no claim speaks" in capsys.readouterr().err
    assert not (out / "claims.json").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--conditions", "per-lop+raw"], "did you mean 'per-loop+raw'?"),
        (["--seeds", "0"], "seeds = 0: must be at least 1"),
        (["--retries", "-1"], "retries = -1"),
        (["--on", "moon"], "on = 'moon': expected here, ray, or ray:ADDRESS"),
        (["--data", "nowhere.txt"], "no such file: nowhere.txt"),
        (["--test-data", "nowhere.txt"], "no such file: nowhere.txt"),
        (["--conditions", "2x2:1000000000000"], "must be at most 1000"),
        (["--rebuild"], "has no grid.json"),
        (["--scale", "nano"], "--scale is called --size now"),
        (["--scale=nano"], "--scale is called --size now"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(texts, tmp_path, capsys, flags, sentence):
    assert main([*command(texts, tmp_path / "out", "--steps", "2"), *flags]) == 2
    output = capsys.readouterr()
    assert sentence in output.err.splitlines()[-1] and output.out == "" and "Traceback" not in output.err


def test_help_lists_the_conditions_without_loading_torch():
    code = "import sys; from loopscope.cli import main; main(['reproduce', '--help']); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "COLUMNS": "110"}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "per-loop+inter-loop-norm" in shown.stdout and "--rows-at-once" in shown.stdout
