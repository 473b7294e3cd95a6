"""Other people's checkpoints through every verb: most as designs of ours, hrm_text as a target; and a retrofit."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import (
    HUGINN,
    OURO,
    PAPER,
    PARCAE,
    huginn_tensors,
    ouro_tensors,
    paper_tensors,
    parcae_tensors,
    save_folder,
    save_hrm,
    save_llama,
)
from safetensors.torch import load_file

import loopscope as ls
from loopscope.cli import main
from loopscope.config import ModelConfig, TargetConfig, load_config
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.options import AuditOptions

QUICK = AuditOptions(states=1, prefix=6, tokens=48, rollout=5)
FLAGS = [
    "--preset", "demo", "--sequence-length", "16", "--batch", "4", "--steps", "4", "--log-every", "2", "--eval-every",
    "4", "--save-every", "4", "--eval-tokens", "200", "--schedule", "constant", "--warmup", "0",
]  # fmt: skip


@pytest.fixture
def ouro(tmp_path) -> Path:
    folder = save_folder(tmp_path / "their-ouro", OURO, ouro_tensors(OURO))
    (folder / "tokenizer.json").write_text(bytes_tokenizer().definition)
    return folder


@pytest.fixture
def hrm(tmp_path) -> Path:
    folder, _ = save_hrm(tmp_path / "their-hrm")
    (folder / "tokenizer.json").write_text(bytes_tokenizer().definition)
    return folder


FAMILIES = {
    "huginn": (HUGINN, huginn_tensors),
    "parcae": (PARCAE, parcae_tensors),
    "paper": (PAPER, paper_tensors),
    "ouro": (OURO, ouro_tensors),
}
LOOPED = ",loop-layers=1..2,num-loops=3,adapter"


@pytest.fixture(params=[*FAMILIES, "hrm", "retrofit"])
def folder(request, tmp_path) -> Path:
    """A word for a small random model of every family, with a tokenizer."""
    if request.param == "hrm":
        return request.getfixturevalue("hrm")
    place = tmp_path / f"their-{request.param}"
    if request.param == "retrofit":
        save_llama(place)
    else:
        config, tensors = FAMILIES[request.param]
        save_folder(place, config, tensors(config))
    (place / "tokenizer.json").write_text(bytes_tokenizer().definition)
    return Path(f"{place}{LOOPED}") if request.param == "retrofit" else place


def files_of(word: Path) -> dict[str, bytes]:
    place = Path(str(word).removesuffix(LOOPED))
    return {file.name: file.read_bytes() for file in place.iterdir()}


def test_every_family_decodes_as_it_is_run_at_once(folder, capsys):
    assert main(["check", str(folder), "--json"]) == 0
    checks = {each["name"]: each["status"] for each in json.loads(capsys.readouterr().out)["checks"]}
    assert "found" not in checks.values() and list(checks.values()).count("passed") >= 6, checks


def test_every_family_writes_text_and_halts(folder, capsys):
    word = str(folder)
    assert main(["generate", word, "a river", "--max-tokens", "6", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["results"][0]
    assert main(["generate", word, "a river", "--max-tokens", "6", "--json", "--halting", "margin:0"]) == 0
    halted = json.loads(capsys.readouterr().out)["results"][0]
    assert [token["loops"] for token in plain["tokens"]] == [ls.open(folder).model.num_loops] * len(plain["tokens"])
    assert {token["loops"] for token in halted["tokens"][1:]} == {1}  # the prompt runs at full depth


def test_every_family_is_audited(folder, capsys):
    """Random weights may well be undecided; what is audited is the objective that the family is trained with."""
    quick = ["--states", "1", "--prefix", "6", "--tokens", "48", "--loops", "5", "--json"]
    assert main(["audit", str(folder), *quick]) in (0, 1)
    result = json.loads(capsys.readouterr().out)
    opened = ls.open(folder)
    loops = opened.model.num_loops
    expected = [loops] if opened.objective.placement == "terminal" else list(range(1, loops + 1))
    assert result["model"]["supervised"] == expected and result["model"]["num_loops"] == loops
    assert set(opened.notes) <= set(result["checks"]["notes"])


def test_the_gate_of_ouro_halts_where_its_probabilities_add_up(ouro, capsys):
    """λ_k = σ(gate(h_k)); a token leaves at the first loop whose cumulative probability reaches the threshold."""
    assert main(["generate", str(ouro), "a river", "--max-tokens", "6", "--json", "--halting", "gate:0.5"]) == 0
    tokens = json.loads(capsys.readouterr().out)["results"][0]["tokens"]
    opened = ls.open(ouro)
    ids = [*opened.tokenizer.encode("a river"), tokens[0]["id"]]  # the prompt itself runs at full depth
    model = opened.model
    with torch.no_grad():
        trace = ls.run_loops(model, torch.tensor([ids]))
        stay, left = 1.0, model.num_loops
        for k in range(1, model.num_loops + 1):
            logit = model.exit_logits(model.features(trace.states[k], k))[0, -1]
            stay *= 1 - float(logit.sigmoid())
            if 1 - stay >= 0.5:
                left = k
                break
    assert tokens[1]["loops"] == left < model.num_loops


@pytest.mark.parametrize("rule", ["margin", "gate"])
def test_a_policy_is_calibrated_on_a_folder(ouro, text, tmp_path, capsys, rule):
    text.write_text("a text about rivers and stones and what lies between them. " * 400)
    flags = ["--rule", rule, "--max-ppl-increase", "5", "--data", str(text), "--max-units", "24", "--json"]
    assert main(["calibrate", str(ouro), *flags, "-o", str(tmp_path / "policy.json")]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert [each["rule"] for each in found["certificates"]] == [rule]


def test_weights_are_evaluated_in_the_dtype_they_are_stored_in(folder, text, capsys):
    flags = ["eval", str(folder), "--data", str(text), "--max-tokens", "200", "--json"]
    scores = {}
    for dtype in ("float32", "bfloat16", "own"):
        assert main([*flags, "--dtype", dtype]) == 0
        scores[dtype] = [row["ce"] for row in json.loads(capsys.readouterr().out)["depths"]]
    assert scores["own"] == scores["float32"] != scores["bfloat16"]
    assert scores["bfloat16"] == pytest.approx(scores["float32"], rel=0.1)


def test_a_run_of_the_same_design_starts_from_a_folder(text, tmp_path, capsys):
    """`--init-from` into a configuration that is written out: every tensor is carried over."""
    for name, (config, tensors) in FAMILIES.items():
        folder = save_folder(tmp_path / name, config, tensors(config))
        (folder / "tokenizer.json").write_text(bytes_tokenizer().definition)
        opened = ls.open(folder)
        settings = replace(ls.preset("demo").training, steps=1, batch=4, eval_tokens=200, eval_every=1, save_every=1)
        data = replace(ls.preset("demo").data, data=(str(text),), sequence_length=16)
        made = ls.Config(model=opened.model.config, objective=opened.objective, data=data, training=settings)
        said: list[str] = []
        ls.train(made, tmp_path / f"run-{name}", init_from=folder, say=said.append)
        assert f"weights from {folder}" in said, said  # and no line about a tensor that is left over


def test_eval_scores_the_text_at_every_depth_with_the_folders_own_tokenizer(folder, text, capsys):
    text.write_text(("a text about rivers and stones, " * 3)[:65])  # one document, one row of 64 targets
    assert main(["eval", str(folder), "--data", str(text), "--depths", "1..8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["k"] for row in result["depths"]] == list(range(1, 9))
    assert (result["target"], result["step"], result["tokenizer"]) == (str(folder), None, "file")
    assert result["bytes"] == result["tokens"] == 64
    opened = ls.open(folder)
    ids_T = torch.tensor(opened.tokenizer.encode(text.read_text()))
    trace = ls.run_loops(opened.model, ids_T[None, :-1], num_loops=8)
    for k, row in enumerate(result["depths"], start=1):
        logits_TV = opened.model.readout(trace.states[k], k)[0]
        ce = torch.nn.functional.cross_entropy(logits_TV, ids_T[1:]).item()
        assert (row["ce"], row["bits_per_byte"]) == pytest.approx((ce, ce / math.log(2)), rel=1e-5)
        assert row["norm"] == pytest.approx(trace.norms_K()[k - 1].item(), rel=1e-5)


def first_evaluation(found: list):
    """Scores before any step."""

    @contextmanager
    def watching(trainer):
        found.append(trainer.evaluate())
        yield

    return watching


def test_fine_tuning_starts_where_the_folder_stands(folder, text, tmp_path, capsys, monkeypatch):
    found: list = []
    monkeypatch.setattr("loopscope.cli.train.watching", first_evaluation(found))
    assert main(["train", str(folder), *FLAGS, "--data", str(text), "--out", str(tmp_path / "run")]) == 0
    err = capsys.readouterr().err
    assert f"weights from {folder}" in err and f"tokenizer from {folder}" in err
    config = load_config(tmp_path / "run/config.yaml")
    opened = ls.open(folder)
    as_trained = replace(opened, config=config)
    scores = ls.evaluate(as_trained, batch=4, max_tokens=200).scores.depths
    assert [s.ce for s in found[0]] == pytest.approx([s.ce for s in scores], rel=1e-6)
    assert [s.norm for s in found[0]] == pytest.approx([s.norm for s in scores], rel=1e-6)
    trained = ls.open(tmp_path / "run")
    assert trained.step == 4 and trained.tokenizer.definition == opened.tokenizer.definition
    moved = ls.evaluate(trained, batch=4, max_tokens=200).scores.depths
    assert moved[-1].ce < scores[-1].ce


def test_the_run_of_an_ouro_folder_is_a_design_of_ours_and_that_of_hrm_text_names_the_folder(ouro, hrm, text, tmp_path):
    for folder, kind in ((ouro, ModelConfig), (hrm, TargetConfig)):
        out = tmp_path / f"run-{folder.name}"
        assert main(["train", str(folder), *FLAGS, "--steps", "1", "--data", str(text), "--out", str(out)]) == 0
        model = load_config(out / "config.yaml").model
        assert isinstance(model, kind) and model.num_loops == ls.open(folder).model.num_loops
    assert model.target == str(hrm)


def test_a_run_from_a_folder_is_resumed_without_reading_its_weights_again(hrm, text, tmp_path, one_thread):
    flags = ["train", str(hrm), *FLAGS, "--threads", "1", "--data", str(text), "--save-every", "2"]
    assert main([*flags, "--out", str(tmp_path / "whole")]) == 0
    assert main([*flags, "--steps", "2", "--out", str(tmp_path / "parts")]) == 0
    assert main([*flags, "--out", str(tmp_path / "parts"), "--resume", "must"]) == 0
    whole, parts = (dict(ls.open(tmp_path / name).model.named_parameters()) for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_penalty_fine_tunes_a_folder_and_leaves_it_as_it_was(folder, text, tmp_path):
    before = files_of(folder)
    result = ls.remedy(folder, steps=2, data=[str(text)], options=QUICK, out=tmp_path / "fixed")
    assert files_of(folder) == before
    assert result.before.scores.tokens == result.after.scores.tokens
    assert result.after.scores.depths[-1].ce < result.before.scores.depths[-1].ce + 0.1
    fixed = ls.open(tmp_path / "fixed")
    assert (fixed.step, fixed.objective.norm_penalty) == (2, 0.01)
    assert fixed.objective.placement == ls.open(folder).objective.placement
    assert "norm_penalty" in result.after.audit.model.observables
    assert "norm_penalty" not in result.before.audit.model.observables


def test_the_clamp_holds_the_norm_of_hrm_text_and_the_second_tensor_goes_on(hrm, text, tmp_path):
    result = ls.remedy(hrm, how="clamp", data=[str(text)], options=QUICK, out=tmp_path / "clamped")
    norms = [score.norm for score in result.after.scores.depths]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    opened, ids = ls.open(hrm), torch.arange(10)[None]
    free, held = ls.run_loops(opened.model, ids), ls.run_loops(ls.clamped(opened.model), ids)
    # The norm that opens a cycle takes the scale out: held at another norm, h points where it did and z_L is the same.
    torch.testing.assert_close(held.states[2].carried["z_L"], free.states[2].carried["z_L"], rtol=1e-4, atol=1e-5)
    cosine = torch.cosine_similarity(held.states[3].h_BTD, free.states[3].h_BTD, dim=-1)
    assert cosine.min() > 0.9999


@pytest.mark.parametrize(("name", "sentence"), [("ouro", "share_readout_norm"), ("hrm", "changes the design")])
def test_a_change_of_design_that_does_not_fit_is_one_sentence(request, text, tmp_path, capsys, name, sentence):
    folder = request.getfixturevalue(name)
    assert main(["remedy", str(folder), "--how", "raw", "--data", str(text), "--out", str(tmp_path / "fixed")]) == 2
    said = capsys.readouterr()
    assert sentence in said.err and "Traceback" not in said.err and said.out == ""
    assert not (tmp_path / "fixed").exists()


def test_gated_exits_fine_tune_the_gate_of_ouro_and_are_refused_for_hrm_text(ouro, hrm, text, tmp_path, capsys):
    flags = [*FLAGS, "--objective", "gated", "--exit-entropy", "0.1", "--data", str(text)]
    assert main(["train", str(ouro), *flags, "--out", str(tmp_path / "gated")]) == 0
    before = load_file(ouro / "model.safetensors")["model.early_exit_gate.weight"]
    assert not torch.equal(ls.open(tmp_path / "gated").model.exit_gate.weight, before)
    capsys.readouterr()
    assert main(["train", str(hrm), *flags, "--out", str(tmp_path / "refused")]) == 2
    assert "an exit gate (loopscope.ExitGate), which this model (HrmText) lacks" in capsys.readouterr().err
