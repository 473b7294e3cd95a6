"""`loopscope train` and `loopscope eval` as a user runs them: finish, stop, resume, refuse, and say why."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from loopscope.cli import main
from loopscope.results.measures import read_run
from loopscope.results.record import as_json
from loopscope.results.run import LoggedEvent
from loopscope.runs import RunFolder


@pytest.fixture
def start(train_command) -> Callable[..., subprocess.Popen[str]]:
    """The same command as a process."""

    def started(*flags: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "loopscope", *train_command(*flags)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    return started


def test_a_run_that_starts_from_weights_keeps_their_tokenizer(train, place, text):
    """Fine-tuned on other text, a tokenizer trained anew would give the old embeddings other meanings."""
    flags = ("--tokenizer", "bpe", "--vocab-size", "300")
    train(*flags)
    text.write_text("".join(f"quite another text, in other words: {n} boats\n" for n in range(400)))
    code, _, err = train(*flags, "--init-from", str(place / "run"), out="tuned")
    assert code == 0, err
    assert f"tokenizer from {place / 'run'}" in err
    files = [place / run / "tokenizer" / "tokenizer.json" for run in ("run", "tuned")]
    assert files[0].read_text() == files[1].read_text()


def test_a_run_trains_says_how_it_ended_and_fills_its_folder(train, place):
    code, out, err = train()
    assert code == 0
    assert f"finished at step 8: {place / 'run'}" in out
    assert "validation ce after each loop" in out
    assert "step 2/8: loss" in err and "radial share" in err and "MFU" in err and "left" in err
    run = RunFolder(place / "run")
    assert {row.kind for row in run.read_metrics()} >= {"train", "eval"}
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["schema_version"] == 1 and manifest["data"]["tokenizer"] == "bytes"
    assert manifest["data"]["corpus_sha256"] and manifest["versions"]["torch"]
    assert all(choice["reason"] for choice in manifest["choices"])
    assert {choice["name"]: choice["value"] for choice in manifest["choices"]}["flush_denormals"] is True


def test_metrics_of_the_wrong_kind_do_not_stop_a_finished_run_from_saying_so(train, place):
    train()
    run = RunFolder(place / "run")
    rows = [{**row, "ce": "x", "norm": {"a": 1}} for row in as_json(run.read_metrics())]
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\0garbage\n")
    code, out, err = train()
    assert code == 0, err
    assert "finished at step 8" in out and "validation ce" not in out


def test_the_same_command_with_more_steps_goes_on(train, place):
    train()
    code, out, err = train("--steps", "12", "--json")
    assert code == 0 and "resumed" in err and "at step 8" in err
    assert json.loads(out)["step"] == 12
    steps = [row.step for row in RunFolder(place / "run").read_metrics() if row.kind == "train"]
    assert steps == sorted(set(steps)), "no step is logged twice"


def test_a_different_configuration_is_refused_by_name_and_nothing_is_lost(train, place):
    train()
    before = {path: path.read_bytes() for path in (place / "run").rglob("*") if path.is_file()}
    code, _, err = train("--readout", "raw")
    assert code == 2
    assert "was trained with readout = 'rmsnorm', not 'raw' (flag --readout)" in err
    assert {path: path.read_bytes() for path in before if path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }


def other_text(text: Path) -> None:
    text.write_text("".join(f"quite another text, in other words: {n} boats\n" for n in range(400)))


def data_record(run: Path) -> dict[str, Any]:
    return json.loads((run / "manifest.json").read_text())["data"]


def test_other_text_under_the_same_name_is_refused_with_both_hashes(train, place, text):
    train()
    before = data_record(place / "run")
    other_text(text)
    code, out, err = train("--steps", "12")
    assert code == 2 and out == ""
    assert f"trained on text of SHA-256 {before['corpus_sha256']}, and its sources" in err.splitlines()[-1]
    assert "--allow-new-data" in err and data_record(place / "run") == before


def test_new_data_that_is_allowed_leaves_the_hash_of_the_old_on_record_for_good(train, place, text):
    train()
    before = data_record(place / "run")
    other_text(text)
    assert train("--steps", "12", "--allow-new-data")[0] == 0
    now = data_record(place / "run")
    left = {"corpus": str(text), "corpus_sha256": before["corpus_sha256"], "until_step": 8}
    assert now["corpus_sha256"] != before["corpus_sha256"] and now["earlier"] == [left]
    assert train("--steps", "16")[0] == 0, "the new text is the run's own now"
    assert data_record(place / "run")["earlier"] == [left]


@pytest.mark.parametrize("manifest", ["{}", "[1", None])
def test_a_manifest_that_lost_its_hash_lets_no_other_text_in_unasked(train, place, text, manifest):
    train()
    path = place / "run" / "manifest.json"
    path.unlink() if manifest is None else path.write_text(manifest)
    other_text(text)
    code, _, err = train("--steps", "12")
    assert code == 2 and "manifest.json keeps no hash of the text before" in err and "--allow-new-data" in err
    assert train("--steps", "12", "--allow-new-data")[0] == 0
    assert data_record(place / "run")["earlier"] == [{"corpus": "", "corpus_sha256": "", "until_step": 8}]


def test_a_runs_own_text_that_is_gone_is_told_as_such(train, place, text, capsys):
    train()
    text.unlink()
    assert main(["eval", str(place / "run")]) == 2
    said = capsys.readouterr().err
    assert "has a text of its own, which cannot be opened (--data names another): no such file" in said


def test_another_tokenizer_is_refused_even_with_new_data_allowed(train, place, text):
    flags = ("--tokenizer", "bpe", "--vocab-size", "300")
    train(*flags)
    shutil.rmtree(place / "run" / "tokenizer")
    other_text(text)
    code, _, err = train(*flags, "--steps", "12", "--allow-new-data")
    assert code == 2 and "was trained with a tokenizer of SHA-256" in err.splitlines()[-1]


@pytest.mark.parametrize("resume", ["auto", "never", "must"])
def test_a_run_without_its_checkpoints_is_not_restarted_over_its_metrics(train, place, resume):
    train()
    metrics = (place / "run" / "metrics.jsonl").read_bytes()
    shutil.rmtree(place / "run" / "checkpoints")
    code, _, err = train("--resume", resume)
    assert code == 2 and "has metrics up to step 8 and no checkpoint" in err.splitlines()[-1]
    assert (place / "run" / "metrics.jsonl").read_bytes() == metrics


def test_a_resumed_run_tells_the_alarms_of_before_again(train, place):
    train()
    message = "the scale grows and no loss sees it"
    RunFolder(place / "run").append_metrics(LoggedEvent(step=6, event="blind-spot", message=message))
    _, _, err = train("--steps", "12")
    assert f"earlier: {message}" in err


def test_sharding_without_torchrun_is_refused_with_the_command_before_a_folder_is_made(train, place, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, _, err = train("--shard", "full")
    assert code == 2 and "torchrun --nproc-per-node 2 -m loopscope train" in err.splitlines()[-1]
    assert not (place / "run").exists()


def test_fine_tuning_starts_from_other_weights_and_lists_what_is_left_behind(train, place):
    train()
    code, _, err = train("--readout", "raw", "--init-from", str(place / "run"), out="raw")
    assert code == 0
    assert "readout_map.norm.weight of the checkpoint is not used" in err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--resume", "must"], "has no checkpoint to resume from"),
        (["--resume", "nowhere"], "neither a checkpoint nor a run folder"),
        (["--init-from", "nowhere"], "nowhere is not a run folder"),
        (["--data", "missing/*.txt"], "missing"),
        (["--vocab-size", "100"], "vocab_size = 100"),
        (["--sequence-length", "99"], "is longer than max_length = 16"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(train, flags, sentence):
    code, out, err = train(*flags)
    assert code == 2 and out == ""
    assert sentence in err.splitlines()[-1]
    assert "Traceback" not in err


def test_an_unwritable_place_is_one_sentence(train, place):
    blocked = place / "blocked"
    blocked.write_text("a file, not a folder")
    code, _, err = train(out="blocked/run")
    assert code == 2 and "Not a directory" in err


def test_a_full_disk_stops_with_a_sentence_and_keeps_what_was_saved(train, place, monkeypatch):
    train()
    from loopscope.training import checkpoint

    def full(*_):
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(checkpoint, "save_file", full)
    code, _, err = train("--steps", "12")
    assert code == 2 and "No space left on device: " in err.splitlines()[-1]
    assert checkpoint.newest(place / "run" / "checkpoints", print).step == 8


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
def test_what_safetensors_says_of_the_disk_is_told_as_any_failure_of_the_disk(train, place, monkeypatch, number):
    """It raises an error of its own, whose text ends with the number of the system's."""
    train()
    from loopscope.training import checkpoint

    def failing(*_):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    monkeypatch.setattr(checkpoint, "save_file", failing)
    code, _, err = train("--steps", "12")
    path = place / "run" / "checkpoints" / "step-00000012"
    assert code == 2 and err.splitlines()[-1] == f"loopscope: error: {os.strerror(number)}: {path}"
    assert "Traceback" not in err and checkpoint.newest(path.parent, print).step == 8


def test_a_learning_rate_that_ruins_the_model_ends_in_exit_code_1_and_strict_json(train, place):
    code, out, _ = train("--lr", "1e30", "--json")
    result = json.loads(out, parse_constant=pytest.fail)
    assert code == 1 and result["outcome"] == "stopped"
    assert "not finite" in result["event"] or "inf" in result["event"] or "nan" in result["event"]
    for line in (place / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def poison(run: Path) -> None:
    """NaN weights in the newest checkpoint, under a checksum that fits."""
    step = sorted((run / "checkpoints").iterdir())[-1]
    tensors = load_file(step / "model.safetensors")
    tensors["embedding.weight"].fill_(float("nan"))
    save_file(tensors, step / "model.safetensors")
    sums = json.loads((step / "checksums.json").read_text())
    sums["model.safetensors"] = hashlib.sha256((step / "model.safetensors").read_bytes()).hexdigest()
    (step / "checksums.json").write_text(json.dumps(sums))


def test_weights_that_are_not_numbers_are_no_success_for_any_verb(train, place, capsys):
    train()
    poison(place / "run")
    for flags, out in (((), "run"), (("--init-from", str(place / "run")), "tuned")):
        code, stdout, _ = train(*flags, out=out)
        assert code == 1 and "the weights of embedding.weight are not finite" in stdout
    assert main(["eval", str(place / "run"), "--json"]) == 1
    output = capsys.readouterr()
    scores = json.loads(output.out, parse_constant=pytest.fail)
    assert scores["depths"][0]["ce"] is None and "is not finite" in output.err
    assert main(["audit", str(place / "run")]) == 1 and "NaN or infinity" in capsys.readouterr().err
    assert main(["remedy", str(place / "run"), "--out", str(place / "fixed")]) == 1
    assert "no fix mends that" in capsys.readouterr().err and not (place / "fixed").exists()


def test_a_finished_run_names_the_commands_that_come_next(train, place):
    _, out, _ = train()
    assert f"next: loopscope audit {place / 'run'}" in out and "loopscope report" in out


def test_a_blind_spot_stops_the_run_with_exit_code_1_and_says_why(train):
    code, out, _ = train("--steps", "200", "--on-blind-spot", "stop", "--lr", "0.1", "--eval-every", "200")
    assert code == 1
    assert "stopped at step" in out and "No loss sees the scale: " in out and "Remedy: --norm-penalty 0.01" in out


def test_ctrl_c_saves_and_the_same_command_goes_on(start):
    process = start("--steps", "100000", "--eval-every", "100000", "--save-every", "100000")
    assert process.stderr is not None
    for line in process.stderr:
        if "step 10/" in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert "interrupted at step" in out and "the same command goes on from there" in out
    step = int(out.split("interrupted at step ")[1].split(":")[0])
    again = start("--steps", str(step + 2))
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0 and f"at step {step}" in err


def test_sigterm_while_it_starts_ends_like_ctrl_c(start):
    process = start()
    handled = f"/proc/{process.pid}/status"
    while process.poll() is None:  # until Python has been told what SIGTERM means
        caught = next(line for line in Path(handled).read_text().splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "loopscope: interrupted" in err and "Traceback" not in err


def test_a_second_process_in_the_same_folder_is_refused(train, place):
    holding = (
        "import sys, pathlib, loopscope.runs\n"
        "with loopscope.runs.RunFolder(pathlib.Path(sys.argv[1])).locked():\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holding, str(place / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        code, _, err = train()
        first.kill()
    assert code == 2 and f"is in use by process {first.pid}" in err


def test_eval_scores_every_depth_also_beyond_the_trained_one(train, place, capsys):
    train()
    assert main(["eval", str(place / "run"), "--depths", "1..5", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["k"] for row in result["depths"]] == [1, 2, 3, 4, 5]
    row = result["depths"][0]
    assert result["tokenizer"] == "bytes" and result["bytes"] == result["tokens"], "a byte token is a byte"
    assert row["bits_per_byte"] == pytest.approx(row["ce"] / 0.6931471805599453)
    assert main(["eval", str(place / "run"), "--depths", "1,3"]) == 0
    assert "bits per byte" in capsys.readouterr().out


def test_eval_leaves_its_scores_in_the_run_where_the_page_finds_them(train, place, capsys):
    train()
    run = place / "run"
    assert main(["eval", str(run), "--json"]) == 0
    output = capsys.readouterr()
    assert f"scores are in {run / 'eval.json'}" in output.err
    read = read_run(run, "run")
    assert not read.problems and read.depths_from == "eval.json, valid"
    printed = [row["ce"] for row in json.loads(output.out)["depths"]]
    assert [depth.ce for depth in read.depths] == printed and len(printed) == 3


def test_eval_adds_depths_and_texts_and_keeps_what_was_measured_on_more_text(train, place, capsys):
    train()
    run, other = place / "run", place / "other.txt"
    other.write_text("words about other rivers\n" * 10)
    for flags in (["--depths", "1"], ["--data", str(other)]):
        assert main(["eval", str(run), *flags]) == 0
        assert not (run / "eval.json").exists()  # a report would take it for the run's validation scores
    for flags in ([], ["--depths", "5"], ["--data", str(other)], ["--max-tokens", "20"]):
        assert main(["eval", str(run), *flags]) == 0
    splits = read_run(run, "run").splits
    assert list(splits) == ["valid", str(other)]
    assert [depth.k for depth in splits["valid"].depths] == [1, 2, 3, 4, 5]
    assert splits["valid"].tokens > 20


def test_eval_of_a_row_of_a_grid_leaves_its_files_alone(train, place):
    train()
    (place / "run" / "row.json").write_text("{}")
    (place / "run" / "eval.json").write_text('{"theirs": 1}')
    assert main(["eval", str(place / "run")]) == 0
    assert (place / "run" / "eval.json").read_text() == '{"theirs": 1}'


def test_a_long_evaluation_tells_how_far_it_is(train, place, capsys):
    train()
    assert main(["eval", str(place / "run"), "--batch", "1"]) == 0
    assert re.search(r"loopscope: .*run: 5\d%, [\d,]+ of [\d,]+ tokens", capsys.readouterr().err)


def test_a_batch_that_no_machine_holds_is_refused_before_any_memory_is_taken(train, place):
    code, _, err = train("--batch", "1000000000")
    assert code == 2
    assert re.search(r"batch = 1000000000: a step takes about [\d,]+ GB, and this \w+ device has [\d,]+ GB", err)
    assert not (place / "run" / "config.yaml").exists()


def test_eval_on_other_text_counts_all_of_it(train, place, capsys):
    train()
    other = place / "other.txt"
    other.write_text("an entirely different text of rather few words\n" * 20)
    assert main(["eval", str(place / "run"), "--data", str(other), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tokens"] == result["bytes"] > 800


def test_eval_of_a_place_without_a_run_is_one_sentence(place, capsys):
    assert main(["eval", str(place)]) == 2
    assert "neither a checkpoint nor a run folder" in capsys.readouterr().err


def test_tensorboard_gets_the_rows_of_the_metrics(train, place):
    code, _, _ = train("--track", "tensorboard")
    assert code == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "run" / "tensorboard"))
    events.Reload()
    rows = [row for row in RunFolder(place / "run").read_metrics() if row.kind == "train"]
    logged = [(event.step, event.value) for event in events.Scalars("train/norm/3")]
    assert logged == [(row.step, pytest.approx(row.norm[2])) for row in rows]


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(train, place, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = train("--track", "wandb")
    assert code == 2 and "pip install 'loopscope[track]'" in err
    assert not (place / "run").exists()


def test_eval_says_that_a_runs_text_has_changed_and_does_not_keep_its_scores_as_validation(train, text, place, capsys):
    train()
    text.write_text(text.read_text() + "one more line\n" * 50)
    assert main(["eval", str(place / "run")]) == 0
    err = capsys.readouterr().err
    assert len(set(re.findall("[0-9a-f]{64}", err))) == 2 and "scores are not kept in eval.json" in err
    assert not (place / "run" / "eval.json").exists()


def test_the_tokenizer_of_an_attempt_that_came_to_nothing_is_not_taken_for_the_runs(train, place):
    (place / "short.txt").write_text("too short\n")
    fitted = ("--tokenizer", "bpe", "--vocab-size", "300")
    assert train(*fitted, "--data", str(place / "short.txt"))[0] == 2
    assert (place / "run" / "tokenizer").exists() and train(*fitted)[0] == 0
    train(*fitted, out="afresh")
    first, second = ((place / run / "tokenizer" / "tokenizer.json").read_text() for run in ("run", "afresh"))
    assert first == second


def test_an_evaluation_that_no_memory_holds_is_refused_before_it_begins(train, place, capsys, monkeypatch):
    train()
    monkeypatch.setattr("loopscope.training.plan.memory_bytes", lambda device: 1 << 10)
    assert main(["eval", str(place / "run"), "--batch", "1000000000"]) == 2
    assert "batch = 1000000000: the logits of" in capsys.readouterr().err


def test_an_empty_name_of_a_configuration_is_called_empty(capsys):
    assert main(["train", "--config", ""]) == 2
    assert "--config is empty" in capsys.readouterr().err


def test_a_run_folder_whose_name_is_not_utf_8_is_a_run_like_any_other(train, place):
    code, out, _ = train("--json", out=os.fsdecode(b"caf\xe9"))
    assert code == 0 and json.loads(out)["outcome"] == "finished"
    json.loads((place / os.fsdecode(b"caf\xe9") / "manifest.json").read_text())
