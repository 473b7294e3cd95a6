"""Local Hugging Face folders: opened without running, unpickling or downloading anything, and audited like a run."""

from __future__ import annotations

import json
import pickle
import socket
import sys

import pytest
import torch
from checkpoints import OURO, ouro_tensors, save_folder, save_hrm, save_sharded
from safetensors.torch import load_file, save_file

from loopscope.adapters.foreign import Weights
from loopscope.adapters.hf import open_folder
from loopscope.api.audits import text_for
from loopscope.cli import main
from loopscope.data import corpora
from loopscope.data.corpora import Source
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import LoopscopeError, RunError
from loopscope.protocol import run_loops
from loopscope.targets import open_target

QUICK = ["--states", "1", "--prefix", "4", "--tokens", "32", "--loops", "4"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def audit(capsys):
    def run(*flags: object) -> tuple[int, str, str]:
        code = main(["audit", *QUICK, *map(str, flags)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def ouro(tmp_path):
    return save_folder(tmp_path / "their-ouro", OURO, ouro_tensors(OURO))


@pytest.fixture
def hrm(tmp_path):
    return save_hrm(tmp_path / "their-hrm")[0]


# --- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "config.json is empty"),
        ("{model_type: ouro", "config.json is not JSON"),
        ("[" * 100_000, "config.json is not JSON"),
        ("[1, 2]", "config.json holds not a JSON object but a list"),
        ("{}", "config.json has no model_type; known: hrm_text, huginn_raven"),
        ('{"model_type": "gpt2"}', "model type 'gpt2' has no adapter (known: hrm_text, huginn_raven"),
        ('{"model_type": "llama"}', "holds an ordinary model of type 'llama', without loops; open it as FOLDER,loop-"),
        ('{"model_type": ["ouro"]}', "model type ['ouro'] has no adapter"),
        ('{"model_type": "ouro"}', "hidden_act = None is not supported"),
        (json.dumps(OURO), "has no .safetensors file"),
    ],
)
def test_a_folder_that_cannot_be_opened_is_one_sentence_and_exit_code_2(audit, tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text)
    code, out, err = audit(tmp_path)
    assert (code, out) == (2, "") and sentence in err and "Traceback" not in err


def test_bytes_that_are_no_text_are_refused(audit, tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    code, _, err = audit(tmp_path)
    assert code == 2 and "config.json cannot be read" in err


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"has no config\.json"):
        open_folder(tmp_path)


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_pickled_weights_are_never_opened(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OURO))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(OURO))
    with pytest.raises(RunError, match="pickled weights are never opened, loopscope convert --from-pickle"):
        open_folder(tmp_path)


def test_a_damaged_file_is_named(ouro):
    whole = (ouro / "model.safetensors").read_bytes()
    (ouro / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=r"model\.safetensors is not a readable"):
        open_folder(ouro)


def test_several_files_need_an_index(tmp_path):
    folder = save_sharded(tmp_path, OURO, ouro_tensors(OURO))
    (folder / INDEX).unlink()
    with pytest.raises(RunError, match=r"2 \.safetensors files and no"):
        open_folder(folder)


def test_a_shard_that_is_missing_is_named(tmp_path):
    folder = save_sharded(tmp_path, OURO, ouro_tensors(OURO))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(RunError, match=r"lacks model-00002-of-00002\.safetensors"):
        open_folder(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    folder = save_sharded(tmp_path, OURO, ouro_tensors(OURO))
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(shard), **load_file(folder / "model-00001-of-00002.safetensors")}, shard)
    with pytest.raises(RunError, match="another file of the folder holds too"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("", "is empty"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "names 3"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "not a .safetensors file of its own folder"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "not a .safetensors file of its own folder"),
    ],
)
def test_an_index_cannot_lead_elsewhere(ouro, index, sentence):
    (ouro / INDEX).write_text(index)
    with pytest.raises(LoopscopeError, match=sentence):
        open_folder(ouro)


def test_shapes_are_refused_before_any_tensor_is_read(ouro, monkeypatch):
    monkeypatch.setattr(Weights, "stacked", lambda *_: pytest.fail("a tensor was read"))
    (ouro / "config.json").write_text(json.dumps({**OURO, "hidden_size": 99_999_996, "head_dim": None}))
    with pytest.raises(RunError, match="wrong shape"):
        open_folder(ouro)


# --- the audit -------------------------------------------------------------------------------------------------------


def test_an_ouro_folder_is_controlled_because_its_norm_takes_scale_out_of_the_loop(audit, ouro):
    code, out, err = audit(ouro)
    assert code == 0
    assert "verdict: CONTROLLED" in out and "CE at loops 1,2,3,4" in out and "untrained" not in out
    assert any("scale" in line and "removed" in line for line in out.splitlines())
    assert "note: audited on random token ids" in out
    assert "Traceback" not in err


def test_its_audit_is_left_nowhere_unless_asked_for_and_reads_text_with_its_tokenizer(
    audit, ouro, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    (ouro / "tokenizer.json").write_text(bytes_tokenizer().definition)
    text, before = tmp_path / "text.txt", sorted(ouro.iterdir())
    text.write_text("xyz " * 32 + "x")
    out_file = tmp_path / "audit.json"
    code, out, _ = audit(ouro, "--data", text, "--supervised", "terminal", "--json", "--out", out_file)
    result = json.loads(out)
    assert (code, sorted(ouro.iterdir())) == (0, before)
    assert result == json.loads(out_file.read_text())
    assert result["model"]["supervised"] == [4] and result["model"]["step"] is None
    assert result["checks"]["notes"] == [f"audited on {text}"]
    assert {token["text"] for token in result["heaviest_tokens"]} == {"x", "y", "z", " "}
    assert next(one for one in result["variables"] if one["name"] == "scale")["verdict"] == "removed"


def test_without_other_text_the_built_in_one_is_read(ouro, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    built_in = Source("builtin", {"train": ["nothing"], "valid": ["a built-in text " * 20]}, "0" * 64)
    monkeypatch.setattr(corpora, "builtin_corpus", lambda: built_in)
    (ouro / "tokenizer.json").write_text(bytes_tokenizer().definition)
    opened = open_target(ouro)
    note, batches = text_for(opened, None, seed=0, say=lambda _: None)
    rows = [opened.tokenizer.decode(ids_BT[0].tolist()) for ids_BT, _ in batches]
    assert rows[:2] == ["a built-in text " * 4] * 2
    assert note == "audited on the built-in text (--data names another)"
    assert opened.run is None


def test_text_without_a_tokenizer_is_refused(audit, ouro, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words")
    code, _, err = audit(ouro, "--data", str(text))
    assert code == 2 and "--data" in err and "no tokenizer.json" in err


def test_a_tokenizer_of_another_model_is_refused(audit, tmp_path):
    config = {**OURO, "vocab_size": 100}
    folder = save_folder(tmp_path, config, ouro_tensors(config))
    (folder / "tokenizer.json").write_text(bytes_tokenizer().definition)
    code, _, err = audit(folder)
    assert code == 2 and "has 256 tokens, and the model beside it only 100" in err


def test_code_in_the_folder_is_not_run_and_nothing_is_fetched(ouro, hrm, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    for folder in (ouro, hrm):
        (folder / "modeling_ouro.py").write_text("raise SystemExit('their code was run')")
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_ouro.OuroForCausalLM")
        (folder / "config.json").write_text(json.dumps(config))
        assert run_loops(open_folder(folder).model, torch.arange(4)[None]).num_loops > 1
    assert not any("modeling_ouro" in name for name in sys.modules)
