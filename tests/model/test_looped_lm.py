"""The whole model: causality, equality with an ordinary transformer, caches, initialisation, and every config field."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loopscope as ls
from loopscope.config import ModelConfig
from loopscope.errors import DataError
from loopscope.model.layers import Layer
from loopscope.objectives.placement import Objective
from loopscope.protocol import run_loops

DESIGNS = {
    "paper": {},
    "rope, grouped heads, qk-norm": {"positions": "rope", "num_kv_heads": 2, "qk_norm": True},
    "gated attention": {"attention_gate": True, "positions": "rope", "num_kv_heads": 2},
    "huginn-like": {
        "norm_placement": "sum",
        "injection": "concat",
        "state_init": "noise",
        "prelude_layers": 1,
        "coda_layers": 1,
        "positions": "rope",
    },
    "ouro-like": {
        "norm_placement": "sandwich",
        "inter_loop_norm": "rmsnorm",
        "share_readout_norm": True,
        "exit_gate": True,
    },
    "parcae-like": {
        "injection": "diagonal",
        "state_init": "zeros",
        "mlp": "relu2",
        "prelude_layers": 1,
        "readout": "raw",
    },
    "parcae": {
        "injection": "diagonal",
        "state_init": "noise",
        "noise_std": 0.1,
        "mlp": "half-relu2",
        "positions": "rope",
        "rope_pairs": "interleaved",
        "qk_norm": True,
        "qk_norm_gain": False,
        "value_embeddings": True,
        "prelude_layers": 1,
        "prelude_norm": "rmsnorm",
        "coda_layers": 2,
        "coda_map": True,
        "init": "parcae",
    },
    "huginn": {
        "injection": "concat",
        "state_init": "noise",
        "norm_placement": "sum",
        "positions": "rope",
        "rope_pairs": "interleaved",
        "qk_bias": True,
        "embedding_scale": 5.5,
        "prelude_layers": 1,
        "coda_layers": 1,
        "coda_norm": "rmsnorm",
        "share_readout_norm": True,
        "init": "huginn",
    },
    "heads of their own width": {"head_width": 10, "num_kv_heads": 2, "positions": "rope", "qk_norm": True},
    "layernorm, gelu": {"norm": "layernorm", "readout": "layernorm", "mlp": "gelu", "inter_loop_norm": "layernorm"},
    "damped, loop embedding": {
        "spectral_damping": True,
        "loop_embedding": True,
        "injection": "gated",
        "readout": "final-only",
    },
}


def all_logits(model, ids_BT, num_loops=4):
    trace = run_loops(model, ids_BT, num_loops=num_loops)
    return torch.stack([model.readout(trace.states[k], k) for k in range(1, num_loops + 1)])


@pytest.mark.parametrize("design", DESIGNS)
def test_a_later_token_never_changes_an_earlier_logit(tiny, ids_BT, design):
    model = ls.build(replace(tiny, **DESIGNS[design]), seed=0).double().eval()
    changed_BT = ids_BT.clone()
    changed_BT[:, 7] = (changed_BT[:, 7] + 1) % 37
    before, after = all_logits(model, ids_BT), all_logits(model, changed_BT)
    torch.testing.assert_close(before[:, :, :7], after[:, :, :7])
    assert not torch.allclose(before[:, :, 7:], after[:, :, 7:])


@pytest.mark.parametrize("design", DESIGNS)
def test_decoding_through_a_cache_equals_the_whole_sequence(tiny, ids_BT, design):
    """Prefill of five tokens, then chunks of three, one, and the rest, at every loop."""
    model = ls.build(replace(tiny, **DESIGNS[design]), seed=0).double().eval()
    whole = all_logits(model, ids_BT)
    cache, parts = ls.KVCache(len(ids_BT)), []
    for start, end in ((0, 5), (5, 8), (8, 9), (9, 12)):
        view = cache.append(end - start)
        trace = run_loops(model, ids_BT[:, start:end], num_loops=4, cache=view)
        logits = [model.features(trace.states[k], k, view) @ model.head.T for k in range(1, 5)]
        parts.append(torch.stack(logits))
    assert cache.lengths == [12] * len(ids_BT)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole)


def rms(x, weight, eps):
    return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def ordinary_transformer(weights, config: ModelConfig, ids_BT):
    """A plain pre-norm decoder, written without any of loopscope's layers."""
    batch, tokens = ids_BT.shape
    heads, head_width = config.num_heads, config.width // config.num_heads
    x = weights["embedding.weight"][ids_BT] + weights["positions.weight"][:tokens]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    for index in range(config.num_layers):
        layer = {k.split(f"layers.{index}.")[1]: v for k, v in weights.items() if f"core.layers.{index}." in k}
        normed = rms(x, layer["attention_norms.norm.weight"], config.norm_eps)
        q, k, v = (
            part.reshape(batch, tokens, heads, head_width).transpose(1, 2)
            for part in (normed @ layer["attention.qkv.weight"].T).split(config.width, -1)
        )
        scores = (q @ k.transpose(-1, -2) / math.sqrt(head_width)).masked_fill(future, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, config.width)
        x = x + mixed @ layer["attention.out.weight"].T
        normed = rms(x, layer["feed_forward_norms.norm.weight"], config.norm_eps)
        gate, up = (normed @ layer["feed_forward.up.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ layer["feed_forward.out.weight"].T
    return rms(x, weights["readout_map.norm.weight"], config.norm_eps) @ weights["embedding.weight"].T


def test_with_one_loop_the_model_is_an_ordinary_transformer(tiny, ids_BT):
    config = replace(tiny, num_loops=1)
    model = ls.build(config, seed=0).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    expected = ordinary_transformer(model.state_dict(), config, ids_BT)
    torch.testing.assert_close(all_logits(model, ids_BT, num_loops=1)[0], expected)


class FromPositionNine:
    """A cache without earlier tokens, whose new ones stand at position 9 and after."""

    def positions(self, tokens):
        return torch.arange(9, 9 + tokens)[None]

    def extend(self, slot, k_BHTC, v_BHTC):
        return k_BHTC, v_BHTC

    def mask(self, tokens):
        return None


def test_rotary_scores_depend_on_distance_only(tiny):
    """Shifting a repeated sequence changes nothing for rotary positions, and everything for learned ones."""
    ids_BT = torch.randint(37, (1, 4)).repeat(1, 3)
    for positions, same in (("rope", True), ("learned", False)):
        model = ls.build(replace(tiny, positions=positions), seed=0).double().eval()
        at_0 = run_loops(model, ids_BT).states[-1].h_BTD
        at_9 = run_loops(model, ids_BT, cache=FromPositionNine()).states[-1].h_BTD
        assert torch.allclose(at_0, at_9, rtol=1e-4, atol=1e-5) is same  # angles are float32


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(tiny, ids_BT):
    grouped = ls.build(replace(tiny, num_kv_heads=2), seed=0).double().eval()
    full = ls.build(tiny, seed=0).double().eval()
    head_width = tiny.width // tiny.num_heads
    state = grouped.state_dict()
    for name, weight in state.items():
        if name.endswith("qkv.weight"):
            q, k, v = weight.split([tiny.width, 2 * head_width, 2 * head_width])
            k, v = (part.view(2, head_width, -1).repeat_interleave(2, 0).flatten(0, 1) for part in (k, v))
            state[name] = torch.cat([q, k, v])
    full.load_state_dict(state)
    torch.testing.assert_close(all_logits(grouped, ids_BT), all_logits(full, ids_BT))


def test_qk_norm_makes_attention_blind_to_the_size_of_its_queries(tiny, ids_BT):
    for qk_norm in (True, False):
        model = ls.build(replace(tiny, qk_norm=qk_norm), seed=0).double().eval()
        before = all_logits(model, ids_BT)
        with torch.no_grad():
            model.recurrence.core.layers[0].attention.qkv.weight[: 2 * tiny.width] *= 5
        assert torch.allclose(before, all_logits(model, ids_BT), rtol=1e-3, atol=1e-4) is qk_norm


def test_pytorch_default_has_a_unit_normal_embedding_and_scaled_a_small_one(tiny):
    config = replace(tiny, vocab_size=2000)
    default, scaled = (ls.build(replace(config, init=init), seed=0) for init in ("pytorch-default", "scaled"))
    assert default.embedding.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert scaled.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)


WRITES_INTO_THE_STREAM = {
    "attention.qkv": False,
    "attention.out": True,
    "feed_forward.up": False,
    "feed_forward.out": True,
}


@pytest.mark.parametrize("name", WRITES_INTO_THE_STREAM)
def test_scaled_init_shrinks_by_depth_whatever_writes_into_the_stream(tiny, name):
    model = ls.build(replace(tiny, prelude_layers=1, coda_layers=1, num_loops=5, init="scaled"), seed=0)
    depth = 1 + 2 * 5 + 1
    expected = 0.02 / math.sqrt(2 * depth) if WRITES_INTO_THE_STREAM[name] else 0.02
    stds = [m.get_submodule(name).weight.std().item() for m in model.modules() if isinstance(m, Layer)]
    assert stds == pytest.approx([expected] * 4, rel=0.1)


@pytest.mark.parametrize(("init", "share"), [("huginn", 1 / math.sqrt(2 * 12)), ("parcae", 0.0)])
def test_the_families_draw_every_matrix_with_the_root_of_two_over_five_widths(tiny, init, share):
    """Huginn's outputs are smaller by √(2·depth), Parcae's zero; both are cut at three standard deviations."""
    config = replace(tiny, width=64, prelude_layers=1, coda_layers=1, num_loops=5, injection="diagonal", init=init)
    model, std = ls.build(config, seed=0), math.sqrt(2 / (5 * 64))
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        assert layer.attention.qkv.weight.std().item() == pytest.approx(std, rel=0.05)
        for branch in (layer.attention, layer.feed_forward):
            assert branch.out.weight.std().item() == pytest.approx(share * std, rel=0.05)
    assert model.embedding.weight.abs().max() <= 3 * std
    assert torch.equal(model.recurrence.injection.project.weight, torch.eye(64)) == (init == "parcae")


def test_a_coda_hides_what_the_norm_before_it_does(tiny):
    model = ls.build(replace(tiny, coda_layers=1, coda_norm="rmsnorm", norm_eps=1e-12), seed=0).eval().double()
    assert model.hides(1) == frozenset({"scale"})
    state = ls.run_loops(model, torch.arange(5)[None]).states[1]
    torch.testing.assert_close(model.features(state.with_h(7 * state.h_BTD), 1), model.features(state, 1))
    assert ls.build(replace(tiny, coda_layers=1)).hides(1) is None


def test_the_paper_initialisation_starts_far_above_the_uniform_loss(ids_BT):
    config = ls.preset("nano").model
    ids = torch.randint(config.vocab_size, (2, 64))
    losses = {}
    for init in ("pytorch-default", "scaled"):
        model = ls.build(replace(config, init=init), seed=0).eval()
        objective = Objective(ls.ObjectiveConfig(), fused=False)
        losses[init] = objective(model, ids[:, :-1], ids[:, 1:]).ce_K.mean().item()
    uniform = math.log(config.vocab_size)
    assert losses["pytorch-default"] > 5 * uniform
    assert losses["scaled"] == pytest.approx(uniform, rel=0.05)


def test_the_same_seed_builds_the_same_model_and_leaves_the_global_rng_alone(tiny):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first, second, other = (ls.build(tiny, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_noise_states_are_fresh_in_training_and_fixed_in_evaluation(tiny, ids_BT):
    model = ls.build(replace(tiny, injection="add", state_init="noise"), seed=0)
    assert not torch.equal(model.embed(ids_BT).h_BTD, model.embed(ids_BT).h_BTD)
    model.eval()
    assert torch.equal(model.embed(ids_BT).h_BTD, model.embed(ids_BT).h_BTD)


@pytest.mark.parametrize("training", [True, False])
def test_noise_states_are_normal_and_end_at_three_standard_deviations(tiny, training):
    """Of 32768 draws of an unbounded normal, 88 would be further out."""
    config = replace(tiny, injection="add", state_init="noise", max_length=1024)
    model = ls.build(config, seed=0).train(training)
    noise_BTD = model.embed(torch.zeros(1, 1024, dtype=torch.long)).h_BTD / math.sqrt(2 / 5)
    assert 2.9 < noise_BTD.abs().max().item() <= 3.0 + 1e-5
    assert noise_BTD.mean().item() == pytest.approx(0.0, abs=0.02)
    assert noise_BTD.std().item() == pytest.approx(0.9866, rel=0.01)  # of a unit normal cut at ±3
    assert (noise_BTD.abs() < 1).double().mean().item() == pytest.approx(0.6845, abs=0.01)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        (torch.zeros(2, 99, dtype=torch.long), "longer than max_length = 24"),
        (torch.zeros(5, dtype=torch.long), "non-empty"),
        (torch.zeros(2, 0, dtype=torch.long), "non-empty"),
        (torch.zeros(2, 3), "torch.float32"),
        (torch.full((1, 3), 37), "id 37 is outside the vocabulary of 37"),
        (torch.full((1, 3), -1), "id -1 is outside the vocabulary"),
    ],
)
def test_wrong_ids_are_refused_in_a_sentence(tiny, ids, sentence):
    with pytest.raises(DataError, match=sentence):
        ls.build(tiny)(ids)


def test_an_objective_without_targets_is_refused(tiny, ids_BT):
    with pytest.raises(DataError, match="needs targets"):
        ls.build(tiny)(ids_BT, objective=Objective(ls.ObjectiveConfig()))


# --- every field changes what it says --------------------------------------------------------------------------------

ALPHA = {"readout": "alpha", "alpha": 0.5}
INJECTED = {"injection": "add"}
# field: (other value, what must already be set for it to mean something)
FIELD_CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "num_layers": (3, {}),
    "num_loops": (2, {"readout": "final-only"}),
    "prelude_layers": (1, {}),
    "coda_layers": (1, {}),
    "num_heads": (8, {}),
    "qk_norm": (True, {}),
    "attention_gate": (True, {}),
    "value_embeddings": (True, {}),
    "embedding_scale": (2.0, {}),
    "mlp": ("gelu", {"mlp": "relu2"}),
    "positions": ("rope", {}),
    "rope_base": (100.0, {"positions": "rope"}),
    "rope_pairs": ("interleaved", {"positions": "rope"}),
    "norm": ("layernorm", {}),
    "norm_eps": (0.01, {}),
    "norm_placement": ("sum", {}),
    "recurrence": ("hyper", {}),
    "num_experts": (4, {}),
    "experts_per_token": (1, {"num_experts": 4}),
    "inter_loop_norm": ("rmsnorm", {}),
    "prelude_norm": ("rmsnorm", {}),
    "coda_norm": ("layernorm", {"coda_layers": 1}),
    "coda_map": (True, {"coda_layers": 1}),
    "spectral_damping": (True, {}),
    "injection": ("add", {}),
    "state_init": ("zeros", INJECTED),
    "noise_std": (2.0, {**INJECTED, "state_init": "noise"}),
    "loop_embedding": (True, {}),
    "readout": ("raw", {}),
    "alpha": (0.1, ALPHA),
    "reference_scale": (2.0, ALPHA),
    "taper_gate": (0.3, {"readout": "taper"}),
    "tie_head": (False, {}),
}
QKV, UP = (f"recurrence.core.layers.0.{name}.weight" for name in ("attention.qkv", "feed_forward.up"))
# field: (other value, a weight that takes its shape from the field, that shape)
SHAPE_CHANGES: dict[str, tuple[int, str, tuple[int, int]]] = {
    "vocab_size": (50, "embedding.weight", (50, 32)),
    "width": (64, "embedding.weight", (37, 64)),
    "num_kv_heads": (2, QKV, ((4 + 2 + 2) * 8, 32)),
    "head_width": (16, QKV, ((4 + 4 + 4) * 16, 32)),
    "mlp_width": (48, UP, (2 * 48, 32)),
    "max_length": (30, "positions.weight", (30, 32)),
}
# These do not change a fresh model's logits; each has its own test.
ELSEWHERE = {
    "qk_bias": "test_a_bias_of_queries_and_keys_is_added_before_they_are_rotated",
    "qk_norm_gain": "test_query_and_key_norms_without_gains_have_no_parameters_and_the_same_direction",
    "dropout": "test_dropout_zeroes_its_share_of_the_embedding_in_training_only",
    "share_readout_norm": "test_a_shared_readout_norm_is_one_module",
    "alpha_mode": "test_alpha_mode_decides_which_exponents_are_learned",
    "reference_mode": "test_alpha_readout_uses_the_reference_scale_as_it_is_kept",
    "exit_gate": "test_gated_exits_weight_each_loop_by_its_exit_probability",
    "balance_loss": "test_the_losses_of_a_mixture_weigh_balance_and_logits_of_its_router",
    "router_z_loss": "test_the_losses_of_a_mixture_weigh_balance_and_logits_of_its_router",
    "ponder_cost": "test_act_charges_for_loops_and_remainders",
    "init": "test_scaled_init_shrinks_by_depth_whatever_writes_into_the_stream",
}  # fmt: skip


def with_the_weights_of(other, model):
    """`model` with all parameters it has in common with `other`, so that what is left to differ is the field."""
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in theirs and theirs[name].shape == parameter.shape:
                parameter.copy_(theirs[name])
    return model


@pytest.mark.parametrize("field", FIELD_CHANGES)
def test_changing_a_field_changes_what_the_model_computes(tiny, ids_BT, field):
    value, needed = FIELD_CHANGES[field]
    config = replace(tiny, **needed)
    assert getattr(config, field) != value
    base, changed = ls.build(config, seed=0), ls.build(replace(config, **{field: value}), seed=0)
    before, after = (all_logits(m.eval(), ids_BT) for m in (base, with_the_weights_of(base, changed)))
    assert not torch.allclose(before, after, rtol=1e-3)


@pytest.mark.parametrize("field", SHAPE_CHANGES)
def test_a_size_is_the_size_of_its_weights(tiny, field):
    value, weight, shape = SHAPE_CHANGES[field]
    assert ls.build(tiny).get_parameter(weight).shape != shape
    assert ls.build(replace(tiny, **{field: value})).get_parameter(weight).shape == shape


def test_every_field_is_covered_by_a_table_or_a_test_that_exists():
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    assert sorted(fields) == sorted([*FIELD_CHANGES, *SHAPE_CHANGES, *ELSEWHERE])
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name in ELSEWHERE.values() if f"def {name}(" not in tests] == []


def test_dropout_zeroes_its_share_of_the_embedding_in_training_only(tiny, ids_BT):
    """The residual branches have their own test in test_layers.py."""
    plain, model = ls.build(tiny, seed=0).eval(), ls.build(replace(tiny, dropout=0.25), seed=0)
    whole_BTD, dropped_BTD = plain.embed(ids_BT).h_BTD, model.embed(ids_BT).h_BTD
    zeroed_BTD = dropped_BTD == 0
    assert zeroed_BTD.double().mean().item() == pytest.approx(0.25, abs=0.05)
    torch.testing.assert_close(dropped_BTD[~zeroed_BTD], whole_BTD[~zeroed_BTD] / 0.75)
    torch.testing.assert_close(all_logits(model.eval(), ids_BT), all_logits(plain, ids_BT))
