"""Ordinary llama- and qwen3-type folders, opened as looped models by a word."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import save_llama
from safetensors.torch import load_file

from loopscope.adapters.hf import open_folder, save_folder
from loopscope.errors import LoopscopeError
from loopscope.inference.conformance import check_all
from loopscope.inference.subjects import LoopedSubject
from loopscope.protocol import run_loops
from loopscope.targets import open_target
from loopscope.words import Retrofit, check_word, split_word

transformers = pytest.importorskip("transformers")

KINDS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 5e5}),
    "llama, heads of their own width": ("Llama", {"head_dim": 6}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3, tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


@pytest.fixture
def llama(tmp_path):
    save_llama(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("adapter", ["", ",adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_one_loop_it_is_the_ordinary_model(tmp_path, kind, adapter):
    network = save_llama(tmp_path, KINDS[kind][0], **KINDS[kind][1])
    opened = open_target(f"{tmp_path},loop-layers=1..3,num-loops=1{adapter}")
    ids_BT = torch.randint(300, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        trace = run_loops(opened.model, ids_BT)
        got_BTV, expected_BTV = opened.model.readout(trace.states[1], 1), network(ids_BT).logits
    assert expected_BTV.std() > 0.1
    torch.testing.assert_close(got_BTV, expected_BTV, atol=1e-5, rtol=1e-5)
    assert opened.end_ids == (7,) and opened.vocab_size == 300 and opened.max_length == 96


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_n_loops_are_the_ordinary_model_with_its_middle_layers_repeated(tmp_path, kind):
    """layers 0, 1–2 four times over, 4–5; layer 3 is dropped."""
    network = save_llama(tmp_path, KINDS[kind][0], **KINDS[kind][1])
    layers = network.model.layers
    ids_BT = torch.arange(12)[None]
    model = open_target(f"{tmp_path},loop-layers=1..2,num-loops=4,drop-layers=3").model
    with torch.no_grad():
        got_BTV = model.readout(run_loops(model, ids_BT).states[4], 4)
        network.model.layers = torch.nn.ModuleList([layers[0], *list(layers[1:3]) * 4, layers[4], layers[5]])
        network.config.num_hidden_layers = network.model.config.num_hidden_layers = 11
        if getattr(network.config, "layer_types", None) is not None:
            network.config.layer_types = network.model.config.layer_types = ["full_attention"] * 11
        expected_BTV = network(ids_BT, use_cache=False).logits
    torch.testing.assert_close(got_BTV, expected_BTV, atol=2e-5, rtol=1e-5)


def test_the_adapter_reads_state_and_input_from_the_start(llama):
    model = open_target(f"{llama},loop-layers=2..3,num-loops=3,adapter").model
    assert model.config.injection == "concat" and model.recurrence.injection.project.weight.requires_grad
    state = model.embed(torch.arange(5)[None])
    e_BTD = state.context.input_BTD
    other_BTD = torch.randn(e_BTD.shape, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model.recurrence.injection(other_BTD, e_BTD), (other_BTD + e_BTD) / 2)


@pytest.mark.parametrize("word", ["loop-layers=1..3,num-loops=3", "loop-layers=0..5,num-loops=2,adapter"])
def test_it_decodes_as_it_is_run_at_once(llama, word):
    opened = open_target(f"{llama},{word}")
    assert not check_all(LoopedSubject(opened.model, opened.vocab_size, opened.max_length)).findings


def test_without_adapter_it_is_written_back_as_the_ordinary_model_with_the_same_bits(llama, tmp_path):
    word = f"{llama},loop-layers=1..3,num-loops=3"
    save_folder(open_target(word).model, word, tmp_path / "out")
    stored, saved = load_file(llama / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert stored.keys() == saved.keys() and all(torch.equal(stored[name], saved[name]) for name in stored)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.num_hidden_layers == 6


def test_a_trained_adapter_has_no_place_in_an_ordinary_format(llama, tmp_path):
    word = f"{llama},loop-layers=1..3,num-loops=3,adapter"
    model = open_target(word).model
    with torch.no_grad():
        model.recurrence.injection.project.weight.mul_(1.1)
    with pytest.raises(LoopscopeError, match=r"project\.weight has been trained"):
        save_folder(model, word, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("loop-layers=1..3", "num-loops is missing; an ordinary model is looped by FOLDER,loop-layers=4..12,num-loops"),
        ("num-loops=3", "loop-layers is missing"),
        ("loop-layers=3..1,num-loops=3", "loop-layers=3..1 ends before it begins"),
        ("loop-layers=a..3,num-loops=3", "loop-layers='a' is not a whole number from 0"),
        ("loop-layers=1..3,num-loops=0", "num-loops='0' is not a whole number from 1"),
        ("loop-layers=1..3,num-loops=²", "num-loops='²' is not a whole number from 1"),
        ("loop-layers=1..3,num-loops=99999999999999999999", "is not a whole number from 1 to 10,000"),
        ("loop-layers=1..3,num-loops=3,num-loops=4", "num-loops is given twice"),
        ("loop-layers=1..3,num-loops=3,adaptor", "unknown option 'adaptor'; did you mean 'adapter'?"),
        ("loop-layers=1..3,num-loops=3,adapter=yes", "adapter takes no value"),
        ("loop-layers=1..3,num-loops=3,drop-layers=3..4", "a layer cannot be both looped and dropped"),
        ("loop-layers=1..6,num-loops=3", "loop-layers=1..6: .*config.json has 6 layers, numbered from 0 to 5"),
        ("loop-layers=1..2,num-loops=3,drop-layers=5..6", "drop-layers=5..6: .*has 6 layers"),
    ],
)
def test_a_word_that_does_not_fit_is_told_in_a_sentence(llama, options, sentence):
    with pytest.raises(LoopscopeError, match=sentence.replace("?", r"\?")):
        open_target(f"{llama},{options}")


def test_a_comma_in_a_path_is_a_comma_in_a_path(tmp_path):
    folder = tmp_path / "a,b"
    save_llama(folder)
    assert split_word(str(folder)) == (str(folder), None)
    assert split_word(f"{folder},num-loops=2,loop-layers=1") == (
        str(folder),
        Retrofit(loop_layers=range(1, 2), num_loops=2),
    )
    assert open_target(f"{folder},num-loops=2,loop-layers=1").model.num_loops == 2


def test_only_folders_are_looped_so(tmp_path):
    with pytest.raises(LoopscopeError, match="only a Hugging Face folder, or hf:ORG/NAME, is looped so"):
        check_word("preset:nano,loop-layers=1..2,num-loops=3")
    check_word("hf:ORG/NAME,loop-layers=1..2,num-loops=3")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, "only rope_type default is"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling = .* is not supported"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"sliding_window": 32}, "sliding_window = 32 is not supported: only full attention is"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types"),
        ({"head_dim": 7}, "head_dim = 7 is not supported: rotary positions turn pairs"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3: must divide num_heads = 4"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 7}, r"missing \(9\): model.layers.6.input_layernorm.weight"),
    ],
)
def test_what_our_layers_do_not_have_is_refused(llama, changes, sentence):
    values = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(LoopscopeError, match=sentence):
        open_folder(llama, Retrofit(loop_layers=range(1, 3), num_loops=2))


def test_a_looped_model_is_not_looped_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ouro"}))
    with pytest.raises(LoopscopeError, match="it has loops of its own"):
        open_folder(tmp_path, Retrofit(loop_layers=range(1, 3), num_loops=2))
