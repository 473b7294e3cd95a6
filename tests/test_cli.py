"""The command line as a user meets it: real processes, real exit codes, sentences instead of tracebacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tyro
import yaml

from loopscope.cli import VERBS, main
from loopscope.cli.flags import sections_of
from loopscope.config import ModelConfig
from loopscope.machine import versions
from loopscope.presets import preset

COMMAND = [sys.executable, "-m", "loopscope"]


def loopscope(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_help_lists_every_verb_with_examples_and_does_not_import_torch():
    script = "import sys; from loopscope.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False"
    assert "examples:" in result.stdout and "exit codes:" in result.stdout
    assert all(verb in result.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_teaches_with_examples(verb, capsys):
    assert main([verb, "--help"]) == 0
    output = capsys.readouterr().out
    assert f"  loopscope {verb}" in output
    assert "--json" in output


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 0
    assert "examples:" in capsys.readouterr().out


def test_the_version_is_printed_with_its_commit_and_without_torch():
    script = "import sys; from loopscope.cli import main; main(['--version']); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    version, loaded = result.stdout.splitlines()
    assert version == f"loopscope {versions()['loopscope']}" and re.match(r"loopscope \d+\.\d+\.\d+", version)
    assert loaded == "False"


WRONG_NAMES = [
    ("eval nowhere", "nowhere is not a run folder"),
    ("eval preset:nano --data nowhere.txt", "no such file: nowhere.txt"),
    ("audit nowhere.yaml", "cannot read the configuration nowhere.yaml"),
    ("audit preset:nan", "did you mean 'nano'?"),
    ("remedy .", ". is neither a checkpoint nor a run folder with checkpoints"),
    ("train --data nowhere/*.txt", "no file matches nowhere/*.txt"),
    ("train --init-from nowhere", "nowhere is not a run folder"),
    ("train --tokenizer nowhere.json", "tokenizer = 'nowhere.json': no such file; name a tokenizer.json"),
    (
        "eval preset:nano --policies margin:1,nowhere.json",
        "policies = 'nowhere.json': no such file; `loopscope cal",
    ),
    (
        "generate preset:nano A --halting nowhere.json",
        "halting = 'nowhere.json': no such file; `loopscope calibrate",
    ),
    ("calibrate preset:nano --tokenizer bytez", "tokenizer = 'bytez': did you mean 'bytes'?"),
    ("atlas --data nowhere.txt", "no such file: nowhere.txt"),
    ("scaling nowhere", "nowhere"),
]


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory) -> dict[str, tuple[int, str, bool]]:
    """What each of these commands ends with, says, and whether torch is there then: all in one process."""
    script = """
import contextlib, io, json, sys
from loopscope.cli import main
told = {}
for command in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(command.split())
    told[command] = code, said.getvalue(), "torch" in sys.modules
print(json.dumps(told))
"""
    command = [sys.executable, "-c", script, *(command for command, _ in WRONG_NAMES)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("nowhere"), check=True)
    return json.loads(ran.stdout)


@pytest.mark.parametrize(("command", "sentence"), WRONG_NAMES)
def test_a_wrong_name_is_told_without_importing_torch(command, sentence, without_torch):
    code, said, has_torch = without_torch[command]
    assert code == 2 and sentence in said and not has_torch


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_shows_exactly_the_flags_that_are_parsed_each_once_with_its_docstring(verb, capsys, monkeypatch):
    """The help is ours and the parser is tyro's: tyro's own help is the second opinion."""
    monkeypatch.setenv("COLUMNS", "300")
    sections = sections_of(VERBS[verb])
    flags = [flag for section in sections for flag in section.flags]
    with pytest.raises(SystemExit):
        tyro.cli(VERBS[verb], prog="loopscope", args=["--help"], config=(tyro.conf.OmitArgPrefixes,))
    parsed = {*re.findall(r"(?<=[ |])(?:--[a-z][a-z-]+|-[a-z])(?=[ ,])", capsys.readouterr().out)}
    assert sorted(name for flag in flags for name in flag.names) == sorted(parsed - {"-h", "--help"})
    assert all(flag.doc for flag in flags), "every field says what it is"


def test_the_help_of_train_starts_with_what_a_newcomer_needs_and_shows_the_values_of_the_preset(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    assert main(["train", "--preset", "paper-44m", "--help"]) == 0
    start, rest = capsys.readouterr().out.split("\nstart here:\n")[1].split("\n\n", 1)
    first = re.findall(r"^  (--[a-z-]+)", start, flags=re.MULTILINE)
    assert first[:5] == ["--preset", "--design", "--data", "--readout", "--objective"]
    assert {"--num-loops", "--steps", "--batch", "--lr", "--seed", "--norm-penalty", "--out", "--resume"} < {*first}
    assert not {*first} & {*re.findall(r"^  (--[a-z-]+)", rest, flags=re.MULTILINE)}, "nothing is shown twice"
    assert "(default: paper-44m)" in start
    width = preset("paper-44m").model.width
    assert width != ModelConfig().width and f"Width d of the state. (default: {width})" in rest


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plna"], "unknown command 'plna'; did you mean 'plan'"),
        (["plan", "--preset", "nanoo"], "preset = 'nanoo': did you mean 'nano'"),
        (["plan", "--num-heads", "5"], "num_heads = 5: must divide width = 128 (flag --num-heads)"),
        (["plan", "--num-loops", "0"], "num_loops = 0"),
        (["plan", "--readout", "final-only", "--num-loops", "1"], "readout = 'final-only': needs num_loops ≥ 2"),
        (["plan", "--objective", "gated"], "add --exit-gate"),
        (["plan", "--config", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
        (["quickstart", "--steps", "0"], "steps = 0: must be at least 1 (flag --steps)"),
        (["quickstart", "--seed", "-1"], "seed = -1"),
        (["calibrate", "nowhere", "--seed", "-1"], "seed = -1: must not be negative (flag --seed)"),
        (["audit", "nowhere", "--loops", "10001"], "loops = 10001: must be at most 10,000 (flag --loops)"),
        (["--vresion"], "unknown flag '--vresion'; did you mean '--version'"),
        (["train", "--stepz", "10"], "unknown flag --stepz for `loopscope train`; did you mean --steps?"),
        (["plan", "--redout=raw"], "unknown flag --redout for `loopscope plan`; did you mean --readout?"),
        (["plan", "--widht", "64"], "unknown flag --widht for `loopscope plan`; did you mean --width?"),
        (["audit", "--stepz"], "unknown flag --stepz for `loopscope audit`; did you mean --states?"),
        (["report", "-x", "runs"], "unknown flag -x for `loopscope report`; see loopscope report --help"),
        (["train", "--qqq"], "unknown flag --qqq for `loopscope train`; see loopscope train --help"),
        (["train", "--out", ""], "--out is empty for `loopscope train`"),
        (["train", "--out="], "--out is empty for `loopscope train`"),
        (["audit", ""], "an argument is empty for `loopscope audit`"),
        (
            ["plan", "--within-hours", "nan"],
            "within_hours = nan: must be a finite number above 0 (flag --within-hours)",
        ),
        (["plan", "--within-hours", "1e-320", "--flops-per-second", "1"], "no number of devices finishes this run"),
        (["plan", "--threads", "100000"], "threads = 100000: must be at most 1,024 (flag --threads)"),
        (["plan", "--seed", "9" * 25], f"seed = {'9' * 25}: must be at most 9,223,372,036,854,775,807"),
        (["plan", "--steps", "9" * 25], "(flag --steps)"),
        (["plan", "--tokens", "9" * 25], "(flag --tokens)"),
        (["eval", "nowhere", "--batch", "9" * 25], "(flag --batch)"),
        (["eval", "nowhere", "--depths", "1.." + "9" * 25], "must be at most 10,000 loops (flag --depths)"),
        (["reproduce", "--seeds", "9" * 25], "(flag --seeds)"),
        (["env", "more"], "'more' means nothing to `loopscope env`; see loopscope env --help"),
    ],
)
def test_a_mistake_is_one_sentence_on_stderr_and_exit_code_2(arguments, sentence, capsys):
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert sentence in output.err
    assert output.out == ""
    assert len(output.err.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    ["train", "remedy x", "reproduce", "reproduce ouro x", "reproduce ouro-train", "quickstart", "atlas", "scaling x"],
)
def test_a_file_is_no_folder_to_write_into_and_that_is_told_before_any_work(command, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main([*command.split(), "--out", str(tmp_path / "notes.txt")]) == 2
    assert "is a file; name a folder (flag --out)" in capsys.readouterr().err
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--readout", "rmsnrm"], "rmsnorm"),
        (["plan", "--width", "wide"], "--width"),
        (["plan", "--preset"], "--preset"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed_and_exits_with_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_an_unknown_key_in_a_file_exits_with_2_and_suggests(tmp_path):
    path = tmp_path / "typo.yaml"
    path.write_text("model: {redout: raw}\n")
    result = loopscope("plan", "--config", str(path))
    assert result.returncode == 2
    assert "unknown key 'redout'; did you mean 'readout'" in result.stderr
    assert "Traceback" not in result.stderr


def test_plan_prints_a_configuration_that_plan_reads_back(tmp_path, capsys):
    assert main(["plan", "--preset", "nano", "--readout", "final-only", "--norm-penalty", "0.01", "--yaml"]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    assert yaml.safe_load(path.read_text())["model"]["readout"] == "final-only"
    assert main(["plan", "--preset", "micro", "--config", str(path), "--num-loops", "6", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["config"]["model"]["width"] == 128, "the file speaks after the preset"
    assert plan["config"]["model"]["num_loops"] == 6, "a flag speaks last"
    assert plan["config"]["objective"]["norm_penalty"] == 0.01
    assert [loop["hides"] for loop in plan["loops"]] == [[]] * 5 + [["scale"]]
    assert plan["total_parameters"] == sum(plan["parameters"].values())


def test_plan_answers_how_many_devices_a_deadline_needs(capsys):
    flags = ["--preset", "paper-129m", "--batch", "64", "--flops-per-second", "1e14", "--tokens", "1000000000"]
    assert main(["plan", *flags, "--devices", "8", "--device-type", "cuda", "--within-hours", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == 8 and plan["tokens"] == 10**9
    per_device = plan["flops_per_second"] * plan["utilisation"] * 3600
    assert plan["devices_needed"] == -(-plan["flops"] // per_device)
    assert plan["seconds"] == pytest.approx(plan["flops"] / (8 * per_device) * 3600)


def test_plan_in_words_names_time_memory_and_reasons(capsys):
    assert main(["plan", "--preset", "nano", "--flops-per-second", "1e11"]) == 0
    output = capsys.readouterr().out
    for words in ("MFLOP per trained token", "MiB per device", "tokens/s on 1 device(s)", "(given)"):
        assert words in output


def test_plan_shows_which_loops_a_terminal_objective_supervises(capsys):
    assert main(["plan", "--objective", "terminal", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [loop["supervised"] for loop in plan["loops"]] == [False, False, False, True]


def test_env_gives_every_choice_a_reason(capsys):
    assert main(["env", "--json"]) == 0
    env = json.loads(capsys.readouterr().out)
    assert env["schema_version"] == 1
    assert env["versions"]["torch"]
    names = {choice["name"] for choice in env["choices"]}
    general, per_device = {"device", "threads", "cpu_isa"}, {"autocast", "flush_denormals", "compile", "attention"}
    assert names == general | per_device | {"loss_chunk_rows"}
    assert all(len(choice["reason"]) > 10 for choice in env["choices"])


def test_env_says_so_when_there_is_no_compiler(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert main(["env", "--json"]) == 0
    (choice,) = (c for c in json.loads(capsys.readouterr().out)["choices"] if c["name"] == "compile")
    assert choice["value"] is False and "no C++ compiler" in choice["reason"]


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    with contextlib.suppress(OSError):
        os.close(writer)


def test_a_closed_pipe_is_not_an_error(closed_pipe):
    command = [*COMMAND, "plan", "--yaml"]
    result = subprocess.run(command, stdout=closed_pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_tables_on_a_closed_pipe_are_not_an_error_either(closed_pipe, monkeypatch, capsys):
    """rich would turn it into an exit code of its own."""
    monkeypatch.setattr(sys, "stdout", open(closed_pipe, "w"))  # noqa: PTH123, SIM115
    assert main(["plan"]) == 0
    assert capsys.readouterr().err == ""


def test_a_bug_of_ours_is_no_finding(monkeypatch, capsys):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(VERBS["env"], "run", broken)
    assert main(["env"]) == 70
    output = capsys.readouterr()
    assert "Traceback" in output.err and "this is a bug in loopscope" in output.err and output.out == ""


def test_a_terminal_without_unicode_still_gets_its_help():
    result = loopscope("--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and "examples:" in result.stdout
