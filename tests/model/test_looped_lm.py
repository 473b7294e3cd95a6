"""The whole model: causality, equality with an ordinary transformer, caches, initialisation, and every config field."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.config import ModelConfig
from loopscope.errors import DataError
from loopscope.objectives.placement import Objective
from loopscope.protocol import run_loops

DESIGNS = {
    "paper": {},
    "rope, grouped heads, qk-norm": {"positions": "rope", "num_kv_heads": 2, "qk_norm": True},
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
    return torch.stack([ls.readout(model, trace.states[k], k) for k in range(1, num_loops + 1)])


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
    cache, parts = ls.KVCache(), []
    for start, end in ((0, 5), (5, 8), (8, 9), (9, 12)):
        trace = run_loops(model, ids_BT[:, start:end], num_loops=4, cache=cache)
        logits = [model.features(trace.states[k], k, cache) @ model.head.T for k in range(1, 5)]
        parts.append(torch.stack(logits))
    assert cache.length == 12
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


def test_rotary_scores_depend_on_distance_only(tiny):
    """Shifting a repeated sequence changes nothing for rotary positions, and everything for learned ones."""
    ids_BT = torch.randint(37, (1, 4)).repeat(1, 3)
    for positions, same in (("rope", True), ("learned", False)):
        model = ls.build(replace(tiny, positions=positions), seed=0).double().eval()
        shifted = ls.KVCache()
        shifted.length = 9
        at_0 = run_loops(model, ids_BT).states[-1].h_BTD
        at_9 = run_loops(model, ids_BT, cache=shifted).states[-1].h_BTD
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
    config = replace(tiny, vocab_size=2000, num_layers=4)
    default, scaled = (ls.build(replace(config, init=init), seed=0) for init in ("pytorch-default", "scaled"))
    assert default.embedding.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert scaled.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    out = torch.stack([layer.feed_forward.out.weight for layer in scaled.recurrence.core.layers])
    assert out.std().item() == pytest.approx(0.02 / math.sqrt(2 * config.depth), rel=0.05)


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
    assert model.embed(ids_BT).h_BTD.std().item() == pytest.approx(math.sqrt(2 / 5), rel=0.1)


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
    "vocab_size": (50, {}),
    "width": (64, {}),
    "num_layers": (3, {}),
    "num_loops": (2, {"readout": "final-only"}),
    "prelude_layers": (1, {}),
    "coda_layers": (1, {}),
    "num_heads": (8, {}),
    "num_kv_heads": (2, {}),
    "qk_norm": (True, {}),
    "mlp": ("gelu", {}),
    "mlp_width": (48, {}),
    "positions": ("rope", {}),
    "rope_base": (100.0, {"positions": "rope"}),
    "norm": ("layernorm", {}),
    "norm_eps": (0.1, {}),
    "norm_placement": ("sum", {}),
    "inter_loop_norm": ("rmsnorm", {}),
    "spectral_damping": (True, {}),
    "injection": ("add", {}),
    "state_init": ("zeros", INJECTED),
    "loop_embedding": (True, {}),
    "readout": ("raw", {}),
    "alpha": (0.1, ALPHA),
    "reference_scale": (2.0, ALPHA),
    "taper_gate": (0.3, {"readout": "taper"}),
    "tie_head": (False, {}),
    "init": ("scaled", {}),
}
# These do not change a fresh model's logits; each has its own test.
ELSEWHERE = {
    "dropout": "test_dropout_acts_in_training_only",
    "max_length": "test_wrong_ids_are_refused_in_a_sentence",
    "share_readout_norm": "test_a_shared_readout_norm_is_one_module",
    "alpha_mode": "test_per_loop_alpha_hides_scale_only_where_its_own_exponent_is_zero",
    "reference_mode": "test_learned_reference_is_learned_and_fixed_is_not",
    "exit_gate": "test_gated_exits_weight_each_loop_by_its_exit_probability",
}  # fmt: skip


@pytest.mark.parametrize("field", FIELD_CHANGES)
def test_changing_a_field_changes_what_the_model_computes(tiny, ids_BT, field):
    value, needed = FIELD_CHANGES[field]
    base = replace(tiny, **needed)
    assert getattr(base, field) != value
    before, after = (all_logits(ls.build(c, seed=0).eval(), ids_BT) for c in (base, replace(base, **{field: value})))
    assert before.shape != after.shape or not torch.allclose(before, after, rtol=1e-3)


def test_every_field_is_covered():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields == FIELD_CHANGES.keys() | ELSEWHERE.keys()


def test_dropout_acts_in_training_only(tiny, ids_BT):
    model = ls.build(replace(tiny, dropout=0.5), seed=0)
    plain = ls.build(tiny, seed=0).eval()
    assert not torch.allclose(all_logits(model, ids_BT), all_logits(model, ids_BT))
    torch.testing.assert_close(all_logits(model.eval(), ids_BT), all_logits(plain, ids_BT))
