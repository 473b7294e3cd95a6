"""Pickled checkpoints: read by name in `convert` alone, in a process with limits, and nothing of them is ever run."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from checkpoints import OURO, PAPER, PARCAE, VOCABULARY, ouro_tensors, paper_tensors, parcae_tensors, save_llama
from safetensors.torch import load_file

import loopscope as ls
from loopscope.adapters import pickled, unpickling
from loopscope.adapters.pickled import convert_pickle
from loopscope.cli import main
from loopscope.errors import LoopscopeError

SETTINGS = {"num_heads": "2", "num_loops": "4"}


def paper_file(path, **more):
    """As a training script leaves it: optimiser, tokenizer and all."""
    torch.save(
        {
            "model_state": paper_tensors(PAPER),
            "optimizer_state": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]},
            "config": {"n_heads": 2, "num_loops": 4, "d_model": 16},
            "tokenizer": {"vocab": {"a": 0}},
            "step": 12,
            **more,
        },
        path,
    )
    return path


@pytest.fixture
def forked(monkeypatch) -> None:
    """The reader comes out of this process, with the torch that is here: importing it costs more than all that is read.

    For what a file holds; what it may not do is tested on the process that users start.
    """

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            code = 1
            try:
                sys.argv, sys.stdout = command[2:], os.fdopen(writing, "w")
                unpickling.main()
                code = 0
            except SystemExit as ended:
                code = ended.code
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said, "")

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    monkeypatch.setattr(pickled, "subprocess", SimpleNamespace(run=run, **names))


def test_a_checkpoint_of_the_paper_becomes_a_folder_that_opens(tmp_path, capsys):
    file = paper_file(tmp_path / "paper.pt")
    assert main(["convert", str(file), str(tmp_path / "out"), "--from-pickle"]) == 0
    out = capsys.readouterr().out
    assert "config.json" in out and "model.safetensors" in out and "num_heads = 2, num_loops = 4" in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    stored, original = load_file(tmp_path / "out/model.safetensors"), paper_tensors(PAPER)
    assert stored.keys() == original.keys() and all(torch.equal(stored[name], original[name]) for name in original)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**PAPER, "exit_gate": False}
    opened = ls.open(tmp_path / "out")
    assert opened.model.num_loops == 4 and opened.vocab_size == VOCABULARY


def test_published_parcae_files_are_converted_with_the_configuration_beside_them(tmp_path):
    """A tied head that shares its embedding's memory, and a table of angles."""
    tensors = parcae_tensors(PARCAE)
    tensors |= {"lm_head.weight": tensors["transformer.wte.weight"], "freqs_cis": torch.ones(1, 96, 1, 6, 2)}
    (tmp_path / "config.json").write_text(json.dumps(PARCAE))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    convert_pickle(tmp_path / "pytorch_model.bin", tmp_path / "out")
    assert (tmp_path / "out/tokenizer_config.json").read_text() == "{}"
    assert torch.equal(ls.open(tmp_path / "out").model.head, tensors["transformer.wte.weight"])


def test_an_ordinary_file_of_the_older_format_is_converted_too(tmp_path):
    network = save_llama(tmp_path / "llama")
    (tmp_path / "llama/model.safetensors").unlink()
    torch.save(network.state_dict(), tmp_path / "llama/pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert_pickle(tmp_path / "llama/pytorch_model.bin", tmp_path / "out")
    assert ls.open(f"{tmp_path / 'out'},loop-layers=1..2,num-loops=2").model.num_loops == 2


class Hostile:
    """Unpickled the ordinary way, it writes a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Greedy:
    """Asks for ten terabytes in a few bytes, with what the restricted reader allows."""

    def __reduce__(self):
        return bytearray, (10**13,)


def hostile_files(folder, mark):
    torch.save({"model_state": paper_tensors(PAPER), "config": Hostile(mark)}, folder / "zip.pt")
    (folder / "plain.pt").write_bytes(pickle.dumps(Hostile(mark)))
    torch.save(Hostile(mark), folder / "legacy.pt", _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("name", ["zip.pt", "plain.pt", "legacy.pt"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, capsys, name):
    mark = tmp_path / "was-run"
    hostile_files(tmp_path, mark)
    assert main(["convert", str(tmp_path / name), str(tmp_path / "out"), "--from-pickle"]) == 2
    said = capsys.readouterr()
    assert "is not taken" in said.err and "Traceback" not in said.err and said.out == ""
    assert not mark.exists() and not (tmp_path / "out").exists()
    os.system(f"python3 -c 'import pickle,sys; pickle.load(open(sys.argv[1], \"rb\"))' {tmp_path / 'plain.pt'}")
    assert mark.exists(), "a file that harms nobody proves nothing"


def test_a_file_that_asks_for_more_memory_than_it_can_need_ends_its_own_process_only(tmp_path):
    torch.save({"model_state": {"a": torch.ones(2)}, "config": Greedy()}, tmp_path / "greedy.pt")
    with pytest.raises(LoopscopeError, match="asks for more memory than a file of its size needs"):
        convert_pickle(tmp_path / "greedy.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_inflates_is_refused(tmp_path, monkeypatch):
    """A compressed entry of a hundred times its size: torch writes none."""
    monkeypatch.setattr(pickled, "ROOM", 64 << 20)
    whole = io.BytesIO()
    torch.save({"weight": torch.zeros(64 << 20)}, whole)
    with zipfile.ZipFile(whole) as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "bomb.pt").stat().st_size < 1 << 20
    with pytest.raises(LoopscopeError, match="is not taken"):
        convert_pickle(tmp_path / "bomb.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(tmp_path, share, forked):
    whole = paper_file(tmp_path / "paper.pt").read_bytes()
    (tmp_path / "paper.pt").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(LoopscopeError, match="is not taken"):
        convert_pickle(tmp_path / "paper.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_reader_that_does_not_come_back_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(pickled, "SECONDS", 0)
    with pytest.raises(LoopscopeError, match="took more than 0 seconds"):
        convert_pickle(paper_file(tmp_path / "paper.pt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([1, 2], "it holds a list, not a mapping"),
        ({"model_state": {"a": 3}}, "it holds 'a', a int, where a tensor should be"),
        ({"model_state": {}}, "it holds no tensor"),
        ({"model_state": {"a": torch.ones(2)}}, "holds no model of the paper"),
        ({"model_state": {**paper_tensors(PAPER), "raw_alpha": torch.ones(1)}}, "has an alpha readout"),
        ({"model_state": paper_tensors(PAPER)}, "does not say num_heads and num_loops; add --setting num_heads="),
        ({"model_state": paper_tensors(PAPER), "config": {"n_heads": 3, "num_loops": 4}}, "must divide width = 16"),
        (
            {"model_state": {**paper_tensors(PAPER), "more": torch.ones(1)}, "config": {"n_heads": 2, "num_loops": 4}},
            r"unexpected \(1\): more",
        ),
    ],
)
def test_what_is_no_checkpoint_that_we_know_is_told(tmp_path, content, sentence, forked):
    torch.save(content, tmp_path / "file.pt")
    with pytest.raises(LoopscopeError, match=sentence):
        convert_pickle(tmp_path / "file.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_say_what_the_file_does_not(tmp_path, forked):
    config = {**PAPER, "readout": "final-only", "inter_loop_norm": True}
    torch.save({"model_state": paper_tensors(config)}, tmp_path / "file.pt")
    more = {"readout": "final-only", "inter_loop_norm": "true", "placement": "terminal"}
    convert_pickle(tmp_path / "file.pt", tmp_path / "out", {**SETTINGS, **more})
    opened = ls.open(tmp_path / "out")
    assert opened.model.config.readout == "final-only" and opened.model.config.inter_loop_norm == "rmsnorm"
    assert opened.objective.placement == "terminal"
    with pytest.raises(LoopscopeError, match="known: num_heads"):
        convert_pickle(tmp_path / "file.pt", tmp_path / "other", {"heads": "2"})


def test_no_other_command_opens_a_pickle(tmp_path, capsys, monkeypatch):
    file = paper_file(tmp_path / "paper.pt")
    (tmp_path / "config.json").write_text(json.dumps(OURO))
    torch.save(ouro_tensors(OURO), tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    for word in (str(file), str(tmp_path)):
        for verb in ("audit", "eval", "check"):
            assert main([verb, word]) == 2
            assert "--from-pickle" in capsys.readouterr().err
    assert main(["convert", str(file), str(tmp_path / "out")]) == 2
    assert "loopscope convert" in capsys.readouterr().err


def test_flags_that_do_not_go_together_are_told(tmp_path, capsys):
    file = paper_file(tmp_path / "paper.pt")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("kept")
    for flags, sentence in (
        ([str(tmp_path / "out"), "--from-pickle", "--to", "loopscope"], "does not go with --from-pickle"),
        ([str(tmp_path / "out"), "--setting", "num_heads=2"], "add --from-pickle"),
        ([str(tmp_path / "out"), "--from-pickle", "--setting", "num_heads"], "NAME=VALUE"),
        ([str(tmp_path / "full"), "--from-pickle"], "not empty; name another folder"),
    ):
        assert main(["convert", str(file), *flags]) == 2
        assert sentence in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "none.pt"), str(tmp_path / "out"), "--from-pickle"]) == 2
    assert (tmp_path / "full/file").read_text() == "kept"
