"""`loopscope convert`: what is written is whole, reads back bit for bit, and brings what goes with a model."""

from __future__ import annotations

import errno
import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import OURO, VOCABULARY, ouro_tensors, save_folder, save_hrm
from safetensors.torch import load_file

import loopscope as ls
from loopscope.api import conversion
from loopscope.cli import main
from loopscope.config import Config, DataConfig, ModelConfig, ObjectiveConfig, TrainingConfig
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import ConfigError, LoopscopeError, RunError, UnsupportedError
from loopscope.options import AuditOptions
from loopscope.results.record import write_record
from loopscope.show.sentences import summary

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"


def configure(text: Path, steps: int = 3, **model) -> Config:
    design = {
        "vocab_size": 256,
        "width": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_loops": 3,
        "max_length": 16,
        **model,
    }
    return Config(
        model=ModelConfig(**design),
        objective=ObjectiveConfig(norm_penalty=0.02),
        data=DataConfig(data=(str(text),), tokenizer="bytes"),
        training=TrainingConfig(steps=steps, batch=4, eval_tokens=64, threads=1),
    )


@pytest.fixture
def run(text, tmp_path) -> Path:
    ls.train(configure(text), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def ouro(tmp_path) -> Path:
    """An Ouro folder whose tokenizer has special tokens and a chat template."""
    folder = save_folder(tmp_path / "ouro", {**OURO, "eos_token_id": 257}, ouro_tensors(OURO))
    backend = bytes_tokenizer().backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (folder / "tokenizer.json").write_text(backend.to_str())
    settings = {
        "tokenizer_class": "OuroTokenizer",
        "auto_map": {"AutoTokenizer": ["ouro--tokenization.OuroTokenizer", None]},
        "bos_token": {"content": "<|im_start|>", "special": True, "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(max(run.glob("checkpoints/*/model.safetensors")))


def logits(target: object, num_loops: int = 2) -> torch.Tensor:
    model = ls.open(target).model
    ids = torch.arange(10, 20)[None]
    with torch.no_grad():
        return model.readout(ls.run_loops(model, ids, num_loops=num_loops).states[-1], num_loops)


# --- there and back --------------------------------------------------------------------------------------------------


def test_a_run_comes_back_from_a_hugging_face_folder_bit_for_bit(run, tmp_path):
    audited = ls.audit(run, options=AuditOptions(states=2, prefix=6, tokens=48, rollout=5))
    write_record(run / "audit.json", audited)
    ls.convert(run, tmp_path / "out")
    ls.convert(tmp_path / "out", tmp_path / "back", to="loopscope")
    before, after = tensors_of(run), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for name in ("config.yaml", "audit.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer-manifest.json"):
        assert (tmp_path / "back" / name).read_text() == (run / name).read_text(), name
    first, second = ls.open(run), ls.open(tmp_path / "back")
    assert (first.step, first.config, first.objective) == (second.step, second.config, second.objective)
    record, again = (json.loads((at / "manifest.json").read_text())["data"] for at in (run, tmp_path / "back"))
    assert record["corpus_sha256"] == again["corpus_sha256"]


def test_all_that_names_an_exported_model_gives_the_same_scores(run, tmp_path, text):
    ls.convert(run, tmp_path / "out")
    scores = [ls.evaluate(word, data=[str(text)], max_tokens=128).scores for word in (run, tmp_path / "out")]
    assert scores[0].depths == scores[1].depths
    opened = ls.open(tmp_path / "out")
    assert opened.step == 3 and opened.objective == ObjectiveConfig(norm_penalty=0.02)


def test_transformers_and_we_read_the_same_logits_from_what_was_written(run, ouro, tmp_path):
    transformers = pytest.importorskip("transformers")
    import loopscope.hf

    for number, word in enumerate((run, ouro, "preset:demo", "design:huginn")):
        opened = ls.open(word)
        ls.convert(opened, tmp_path / f"out-{number}")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{number}")
        assert isinstance(theirs, loopscope.hf.LoopscopeForCausalLM)
        with torch.no_grad():
            assert torch.equal(theirs(torch.arange(10, 20)[None], num_loops=2).logits, logits(opened))
        assert torch.equal(logits(tmp_path / f"out-{number}"), logits(opened))


def test_large_models_are_several_files_with_an_index_that_both_sides_read(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    import loopscope.hf  # noqa: F401

    made = ls.convert(run, tmp_path / "out", shard_bytes=8_000)
    shards = [name for name in made.files if name.endswith(".safetensors")]
    assert len(shards) > 2 and "model.safetensors.index.json" in made.files
    assert all((tmp_path / "out" / name).stat().st_size < 20_000 for name in shards)
    assert torch.equal(logits(tmp_path / "out"), logits(run))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(theirs(torch.arange(10, 20)[None], num_loops=2).logits, logits(run))


def test_weights_can_be_written_in_half_the_bytes(run, tmp_path):
    ls.convert(run, tmp_path / "out", dtype="bfloat16")
    found = load_file(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    exact = ls.open(run).model.embedding.weight
    assert torch.equal(found["model.embedding.weight"], exact.detach().to(torch.bfloat16))


def test_a_converted_run_can_be_started_from_and_not_resumed(run, tmp_path, text):
    ls.convert(run, tmp_path / "out")
    ls.convert(tmp_path / "out", tmp_path / "back", to="loopscope")
    config = configure(text, steps=5)
    with pytest.raises(RunError, match="weights alone, and cannot be resumed; start from it by --init-from"):
        ls.train(config, tmp_path / "back")
    said: list[str] = []
    ls.train(
        replace(config, training=replace(config.training, steps=1)),
        tmp_path / "new",
        init_from=tmp_path / "back",
        say=said.append,
    )
    assert any("weights from" in line and "fresh" not in line for line in said)


def test_only_models_on_our_own_layers_are_converted(tmp_path):
    folder, _ = save_hrm(tmp_path / "hrm")
    with pytest.raises(UnsupportedError, match="only models on loopscope's own layers"):
        ls.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_special_tokens_and_chat_template_travel_through_conversion_and_fine_tuning(ouro, tmp_path, text):
    transformers = pytest.importorskip("transformers")
    tuned = replace(ls.open(ouro).model.config, dropout=0.0)
    config = replace(configure(text, steps=1), model=tuned, data=DataConfig(data=(str(text),), sequence_length=16))
    ls.train(config, tmp_path / "tuned", init_from=ouro)
    assert ls.open(tmp_path / "tuned").end_ids == (257,)
    for number, word in enumerate((ouro, tmp_path / "tuned")):
        out = tmp_path / f"out-{number}"
        ls.convert(word, out)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
        assert tokenizer.apply_chat_template([{"content": "Hello"}], tokenize=False) == "<|im_start|>Hello"
        assert tokenizer.encode("river", add_special_tokens=False) == list(b"river")
        assert "auto_map" not in json.loads((out / "tokenizer_config.json").read_text())
        generation = transformers.GenerationConfig.from_pretrained(out)
        assert (generation.bos_token_id, generation.eos_token_id) == (256, 257)
        assert ls.open(out).end_ids == (257,)
    assert VOCABULARY > 257


def test_a_template_in_a_file_of_its_own_travels_too(ouro, tmp_path):
    (ouro / "chat_template.jinja").write_text(TEMPLATE)
    ls.convert(ouro, tmp_path / "out")
    ls.convert(tmp_path / "out", tmp_path / "back", to="loopscope")
    assert (tmp_path / "back/tokenizer/chat_template.jinja").read_text() == TEMPLATE


# --- places ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_holds_anything_is_left_alone(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not empty; name another folder, or replace it by --overwrite"):
        ls.convert(run, tmp_path / "mine")
    with pytest.raises(ConfigError, match="was not written by loopscope convert"):
        ls.convert(run, tmp_path / "mine", overwrite=True)
    with pytest.raises(ConfigError, match="was not written by loopscope convert"):
        ls.convert(run, run, overwrite=True, to="loopscope")
    assert (tmp_path / "mine/thesis.txt").read_text() == "years of work"
    ls.convert("preset:demo", tmp_path / "out")
    ls.convert(run, tmp_path / "out", overwrite=True)
    assert ls.open(tmp_path / "out").vocab_size == 256


@pytest.mark.parametrize("to", ["hf", "loopscope"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing(run, tmp_path, monkeypatch, capsys, to):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(conversion, "save_file", full)
    monkeypatch.setattr("loopscope.training.checkpoint.save_file", full)
    assert main(["convert", str(run), str(tmp_path / "out"), "--to", to]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_an_interrupted_conversion_leaves_the_folder_before_it(run, tmp_path, monkeypatch):
    ls.convert("preset:demo", tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(conversion.Card, "to_markdown", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ls.convert(run, tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_what_a_killed_conversion_left_is_cleared_away_by_the_next(run, tmp_path):
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    (tmp_path / f".out.{gone}").mkdir()
    (tmp_path / f".out.{os.getppid()}").mkdir()  # of a conversion that is still running
    ls.convert(run, tmp_path / "out")
    assert not (tmp_path / f".out.{gone}").exists() and (tmp_path / f".out.{os.getppid()}").exists()


# --- the card --------------------------------------------------------------------------------------------------------


def test_the_card_tells_what_was_measured_and_the_hub_reads_it(run, tmp_path, text):
    hub = pytest.importorskip("huggingface_hub")
    audited = ls.audit(run, options=AuditOptions(states=2, prefix=6, tokens=48, rollout=5))
    write_record(run / "audit.json", audited)
    ls.evaluate(run, max_tokens=128).keep()
    policy = {
        "schema_version": 1,
        "rule": "margin",
        "threshold": 2.5,
        "num_loops": 3,
        "promise": {"max_ppl_increase": 0.01, "confidence": 0.95, "units": 40},
        "test": {"mean_loops": 1.75, "ppl_increase": 0.004},
    }
    (run / "policy.json").write_text(json.dumps(policy))
    ls.convert(run, tmp_path / "out")
    card = hub.ModelCard.load(tmp_path / "out/README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert "loopscope" in card.data.tags
    page = card.text
    assert f"**{audited.verdict}**" in page and summary(audited) in page
    for variable in audited.variables:
        assert f"| {variable.name} | {variable.verdict} |" in page
    ce = json.loads((run / "eval.json").read_text())["splits"]["valid"]["depths"][0]["ce"]
    assert f"| 1 | {ce:.4g} |" in page
    assert "reaches 2.5" in page and "1.75 of 3" in page and "confidence 0.95" in page
    assert json.loads((run / "manifest.json").read_text())["data"]["corpus_sha256"] in page
    assert "norm penalty 0.02" in page and "| `width` | 16 |" in page
    assert {"audit.json", "eval.json", "policy.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_results_of_other_weights_do_not_go_with_these(run, tmp_path):
    audited = ls.audit(run, options=AuditOptions(states=2, prefix=6, tokens=48, rollout=5))
    write_record(run / "audit.json", replace(audited, model=replace(audited.model, step=2)))
    ls.convert(run, tmp_path / "out")
    assert not (tmp_path / "out/audit.json").exists()
    assert "## Audit" not in (tmp_path / "out/README.md").read_text()


def test_what_a_file_says_cannot_break_out_of_its_cell(run, tmp_path):
    audited = ls.audit(run, options=AuditOptions(states=2, prefix=6, tokens=48, rollout=5))
    hostile = replace(audited.variables[0], name="a | b\n# Owned <script>")
    write_record(run / "audit.json", replace(audited, variables=[hostile]))
    ls.convert(run, tmp_path / "out")
    page = (tmp_path / "out/README.md").read_text()
    assert "\n# Owned" not in page and "<script>" not in page and r"a \| b # Owned &lt;script>" in page


# --- the hub ---------------------------------------------------------------------------------------------------------


class FakeApi:
    """What is asked of the hub, kept on this machine."""

    def __init__(self, place: Path) -> None:
        self.place, self.private = place, {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        self.private[repo_id] = private
        return f"https://hub.example/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        for path in Path(folder_path).rglob("*"):
            (self.place / repo_id).mkdir(parents=True, exist_ok=True)
            (self.place / repo_id / path.name).write_bytes(path.read_bytes())


@pytest.fixture
def hub(tmp_path, monkeypatch) -> FakeApi:
    real = pytest.importorskip("huggingface_hub")
    api = FakeApi(tmp_path / "hub")
    fake = types.ModuleType("huggingface_hub")
    fake.HfApi, fake.utils = lambda: api, real.utils
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return api


def test_a_push_uploads_the_whole_folder_privately_unless_told_otherwise(run, tmp_path, hub, capsys):
    assert main(["convert", str(run), str(tmp_path / "out"), "--push", "org/nano", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["pushed"] == "https://hub.example/org/nano" and hub.private == {"org/nano": True}
    assert {path.name for path in (hub.place / "org/nano").iterdir()} == set(printed["files"])
    assert torch.equal(logits(hub.place / "org/nano"), logits(run))
    ls.convert(run, tmp_path / "other", push="org/open", public=True)
    assert hub.private["org/open"] is False


@pytest.mark.parametrize("name", ["nano", "org/", "a/b/c", "org/--x..y"])
def test_a_name_that_the_hub_does_not_take_is_told_before_anything_is_written(run, tmp_path, hub, name):
    with pytest.raises(ConfigError, match="push"):
        ls.convert(run, tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists() and not hub.private


def test_a_push_that_fails_says_where_the_folder_is(run, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(hub, "upload_folder", lambda **_: (_ for _ in ()).throw(RuntimeError("403 Forbidden")))
    with pytest.raises(RunError, match="is written, and could not be pushed to org/nano: 403 Forbidden"):
        ls.convert(run, tmp_path / "out", push="org/nano")
    assert ls.open(tmp_path / "out").step == 3


# --- damaged folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"design": None}, "the field design is missing"),
        ({"hidden_size": None}, "the field hidden_size is missing"),
        ({"hidden_size": 24}, "does not hold the tensors that its config.json describes"),
        ({"num_loops": 0}, "not a number of loops"),
        ({"design": {"num_layer": 1}}, "unknown key 'num_layer'"),
        ({"design": {"target": "os:system"}}, "model"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(run, tmp_path, change, sentence):
    ls.convert(run, tmp_path / "out")
    fields = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(LoopscopeError, match=sentence):
        ls.open(tmp_path / "out")
