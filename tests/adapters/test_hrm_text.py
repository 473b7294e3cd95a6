"""HRM-Text on our own layers: the numbers and the tokens of transformers' class, which nothing here needs to run it."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from checkpoints import VOCABULARY, save_folder, save_hrm
from safetensors.torch import load_file

from loopscope.adapters.foreign import Fields
from loopscope.adapters.hf import open_folder
from loopscope.adapters.hrm_text import design_of, layout
from loopscope.cli import main
from loopscope.errors import DataError, LoopscopeError
from loopscope.inference.cache import KVCache
from loopscope.inference.decoding import Limits, decode, runner_for
from loopscope.inference.speculation import Speculator, parse_plan
from loopscope.protocol import LoopState, run_loops

FORMS = {"published": {}, "two layers": {"num_hidden_layers": 2}, "tied": {"tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def hrm(tmp_path_factory):
    """A folder that transformers wrote, and its network."""
    return save_hrm(tmp_path_factory.mktemp("hrm") / "their-hrm")


@pytest.fixture
def ids_BT():
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def config_json(folder):
    return json.loads((folder / "config.json").read_text())


# --- the same model as transformers' class ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_it_has_the_logits_of_transformers(tmp_path, ids_BT, form):
    folder, network = save_hrm(tmp_path, **FORMS[form])
    model = open_folder(folder).model
    with torch.no_grad():
        logits_BTV = model.readout(run_loops(model, ids_BT).states[-1], 3)
        expected_BTV = network(ids_BT).logits
    torch.testing.assert_close(logits_BTV, expected_BTV, atol=1e-5, rtol=1e-5)
    assert expected_BTV.std() > 0.1, "weights so small that any two models agree prove nothing"


def test_every_loop_has_them_in_float64_also_beyond_the_trained_depth(hrm, ids_BT, monkeypatch):
    model, network = open_folder(hrm[0]).model.double(), copy.deepcopy(hrm[1]).double()
    # Their norms compute in float32 whatever the weights are in; the equation is the same in float64.
    monkeypatch.setattr(type(network.model.L_module.final_norm), "forward", lambda self, x: self._norm(x))
    with torch.no_grad():
        trace = run_loops(model, ids_BT, num_loops=5)
        for k in range(1, 6):
            network.config.H_cycles = k
            expected_BTV = network(ids_BT, use_cache=False).logits
            torch.testing.assert_close(model.readout(trace.states[k], k), expected_BTV, atol=1e-10, rtol=1e-10)


def test_the_state_is_the_one_before_the_norm_that_closes_the_high_level_stack(hrm, ids_BT):
    model, network = open_folder(hrm[0]).model, hrm[1]
    seen = []
    hook = network.model.H_module.final_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network(ids_BT)
        trace = run_loops(model, ids_BT)
    hook.remove()
    for k, expected_BTD in enumerate(seen, start=1):
        torch.testing.assert_close(trace.states[k].h_BTD, expected_BTD, atol=1e-4, rtol=1e-4)
    assert len(seen) == 3


def test_greedy_tokens_are_those_of_transformers_generate(hrm):
    model, network = open_folder(hrm[0]).model, hrm[1]
    prompts_BT = torch.randint(VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(1))
    theirs = network.generate(
        prompts_BT, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(prompts_BT), pad_token_id=0
    )
    found = list(decode(runner_for(model, 3), prompts_BT.tolist(), limits=Limits(max_tokens=20)))
    ours = {token.number: continuation.ids for continuation, token in found}
    assert [ours[number] for number in range(3)] == theirs.tolist()


def test_it_passes_on_the_derivative_that_its_training_leaves_out(hrm):
    model, network = open_folder(hrm[0]).model, copy.deepcopy(hrm[1])
    state = model.embed(torch.arange(4)[None])
    low = state.carried["z_L"] = state.carried["z_L"].clone().requires_grad_()
    model.loop(state, 1).h_BTD.sum().backward()
    assert low.grad is not None and low.grad.abs().sum() > 0
    network.model.z_L_init.requires_grad_()
    network(torch.arange(4)[None]).logits.sum().backward()
    assert network.model.z_L_init.grad is None, "transformers runs the first cycle under no_grad, also in evaluation"


def test_gradients_are_those_of_transformers_where_its_training_takes_all(tmp_path, ids_BT):
    """With one low-level cycle nothing of a cycle runs under no_grad there; ours run through the training kernels."""
    folder, network = save_hrm(tmp_path, L_cycles=1, L_bp_cycles=[1])
    model = open_folder(folder).model.train()
    model.readout(run_loops(model, ids_BT).states[-1], 3).square().mean().backward()
    network(ids_BT).logits.square().mean().backward()
    for name, stack in (("core.low", network.model.L_module), ("core.high", network.model.H_module)):
        ours, theirs = model.get_submodule(name).layers[0], stack.layers[0]
        parts = [theirs.self_attn.get_submodule(f"{part}_proj") for part in ("gate", "q", "k", "v")]
        expected = torch.cat([part.weight.grad for part in parts])
        torch.testing.assert_close(ours.attention.qkv.weight.grad, expected, atol=1e-5, rtol=1e-3)
        expected = theirs.mlp.down_proj.weight.grad
        torch.testing.assert_close(ours.feed_forward.out.weight.grad, expected, atol=1e-5, rtol=1e-3)


# --- the cache, and rows at different loops --------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[8, 1], [3, 4, 2]])
def test_with_a_cache_it_is_the_same_model(hrm, ids_BT, pieces):
    model = open_folder(hrm[0]).model
    cache = KVCache(2)
    with torch.no_grad():
        whole = run_loops(model, ids_BT)
        split = ids_BT.split(pieces, dim=1)
        parts = [run_loops(model, piece_BT, cache=cache.append(piece_BT.shape[1])) for piece_BT in split]
    for k in (1, 3):
        h_BTD = torch.cat([part.states[k].h_BTD for part in parts], dim=1)
        torch.testing.assert_close(h_BTD, whole.states[k].h_BTD, atol=1e-5, rtol=1e-5)


def test_every_run_of_a_layer_has_a_slot_of_its_own(tmp_path, ids_BT):
    model = open_folder(save_hrm(tmp_path, num_hidden_layers=2)[0]).model
    cache = KVCache(2, num_loops=3)
    with torch.no_grad():
        run_loops(model, ids_BT, cache=cache.append(9))
    keys = [cache.slot("core", k, layer)[0] for k in (1, 2, 3) for layer in range(2 * (2 + 1))]
    assert len({tensor.data_ptr() for tensor in keys}) == len(keys) == 18
    assert cache.bytes_per_token == 18 * 2 * 16 * 4


def test_rows_at_different_loops_share_a_call(hrm):
    """The first loop has no opening norm; a row at it may lie beside one that is further on."""
    model = open_folder(hrm[0]).model.double()
    ids = torch.tensor([[5], [9]])
    with torch.no_grad():
        ahead, behind = (model.embed(row[None], KVCache().append(1)) for row in ids)
        ahead = model.loop(ahead, 1)
        caches = [KVCache(1, num_loops=3) for _ in range(2)]
        alone = [
            model.loop(state, k, cache.append(1))
            for state, k, cache in zip((ahead, behind), (2, 1), caches, strict=True)
        ]
        together = model.loop(LoopState.joined([ahead, behind], 0), (2, 1), KVCache(2, num_loops=3).append(1))
    for row, state in enumerate(alone):
        torch.testing.assert_close(together.h_BTD[row], state.h_BTD[0])
        torch.testing.assert_close(together.carried["z_L"][row], state.carried["z_L"][0])


@pytest.mark.parametrize("plan", ["block:1,4", "block:2,3", "wave:1", "wave:2", "auto"])
def test_speculation_gives_the_tokens_of_plain_decoding(hrm, plan):
    model, limits, prompt = open_folder(hrm[0]).model.double(), Limits(max_tokens=30), [3, 1, 4, 1, 5]
    speculator = Speculator(model, 3, limits=limits, plan=parse_plan(plan))
    found = [token.id for _, token in speculator.decode(prompt)]
    assert found == [token.id for _, token in decode(runner_for(model, 3), [prompt], limits=limits)]
    if plan != "auto":
        assert speculator.tally.drafted > 0


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (torch.zeros(1, 97, dtype=torch.long), "97 tokens is longer than max_length = 96"),
        (torch.full((1, 3), VOCABULARY), f"id {VOCABULARY} is outside the vocabulary"),
    ],
)
def test_ids_that_do_not_fit_are_refused(hrm, ids, sentence):
    with pytest.raises(DataError, match=sentence):
        open_folder(hrm[0]).model.embed(ids)


# --- the audit -------------------------------------------------------------------------------------------------------


def test_it_is_controlled_and_says_what_training_did_not_see(hrm, capsys):
    quick = ["--states", "1", "--prefix", "4", "--tokens", "32", "--loops", "4"]
    code = main(["audit", *quick, str(hrm[0]), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (code, result["verdict"], result["model"]["supervised"]) == (0, "controlled", [3])
    assert next(one for one in result["variables"] if one["name"] == "scale")["verdict"] == "removed"
    assert any("back-propagates through the last 1, 1, 2" in note for note in result["checks"]["notes"])


# --- tensors and fields ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_loaded_saved_and_loaded_again_every_tensor_is_the_same(tmp_path, form):
    folder, _ = save_hrm(tmp_path / "theirs", **FORMS[form])
    stored = load_file(folder / "model.safetensors")
    model = open_folder(folder).model
    table = layout(model.design.model)
    saved = {name: model.state_dict()[ours] for ours, (name,) in table.items()}
    assert stored.keys() == saved.keys() and all(torch.equal(stored[name], saved[name]) for name in stored)
    again = open_folder(save_folder(tmp_path / "ours", config_json(folder), saved)).model
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_what_can_be_trained_is_what_the_file_holds_but_for_the_fixed_start(hrm):
    """Published norms have no gain: ours stay at 1."""
    model = open_folder(hrm[0]).model
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == layout(model.design.model).keys() - {"low_start"}
    fixed = {name: tensor for name, tensor in model.state_dict().items() if "norm" in name}
    assert len(fixed) == 2 * 2 and all(torch.equal(gain, torch.ones(16)) for gain in fixed.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_are_held_in_the_dtype_that_is_asked_for(hrm, dtype):
    model = open_folder(hrm[0], dtype=dtype).model
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}


def test_it_is_opened_where_transformers_is_not_installed(hrm, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert open_folder(hrm[0]).model.num_loops == 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"L_cycles": None}, "the field L_cycles is missing"),
        ({"H_cycles": 0}, "H_cycles = 0 is not a whole number"),
        ({"rms_norm_eps": None}, "the field rms_norm_eps is missing"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported: only silu is"),
        ({"attention_bias": True}, "attention_bias = True is not supported: only false is"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported: only false is"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported: only 0 is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "only rope_type default is"),
        ({"rope_parameters": {"rope_type": "default"}}, "the field rope_theta is missing"),
        ({"head_dim": 16}, "head_dim = 16 is not supported: only hidden_size / num_attention_heads = 8 is"),
        ({"num_attention_heads": 3}, "num_attention_heads = 3 .* does not divide hidden_size = 16"),
        ({"embedding_scale": -1}, "embedding_scale = -1 is not a number above 0"),
        ({"embedding_scale": None, "initializer_range": None}, "the field initializer_range is missing"),
        ({"L_bp_cycles": [1, "2"]}, "L_bp_cycles = .* is not a list of whole numbers"),
        ({"hidden_size": 10**12, "head_dim": None}, "describes no model that can be built: width = "),
        ({"intermediate_size": 32}, r"wrong shape \(4\): .*gate_up_proj.weight is \(48, 16\), not \(64, 16\)"),
        ({"num_layers_per_stack": 2}, r"missing \(8\): model.H_module.layers.1"),
        ({"tie_word_embeddings": True}, "lm_head.weight should be a copy of model.embed_tokens.weight"),
    ],
)
def test_a_configuration_that_does_not_fit_is_named(hrm, tmp_path, changes, sentence):
    folder = save_folder(tmp_path, {**config_json(hrm[0]), **changes}, load_file(hrm[0] / "model.safetensors"))
    with pytest.raises(LoopscopeError, match=sentence):
        open_folder(folder)


def test_fields_that_may_be_absent_mean_what_they_mean_to_transformers(hrm):
    """The layers of a stack where only `num_hidden_layers` is there, the embedding's scale, the cycles of training."""
    values = config_json(hrm[0])
    whole = design_of(Fields(hrm[0] / "config.json", values))
    for name in ("num_layers_per_stack", "embedding_scale", "L_bp_cycles", "head_dim"):
        del values[name]
    values["num_hidden_layers"] = 1
    assert design_of(Fields(hrm[0] / "config.json", values)) == whole
    assert (whole.embedding_scale, whole.backprop_cycles, whole.model.num_layers) == (4.0, (1, 1, 2), 1)
