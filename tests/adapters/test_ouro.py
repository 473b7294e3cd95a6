"""Ouro checkpoints: the same numbers as the published design, and a sentence for everything that does not fit."""

from __future__ import annotations

import pytest
import torch
from checkpoints import OURO, VOCABULARY, ouro_tensors, save_folder, save_sharded
from torch import Tensor

from loopscope.adapters.foreign import Fields
from loopscope.adapters.hf import open_folder
from loopscope.adapters.ouro import config_of, layout
from loopscope.errors import LoopscopeError
from loopscope.model.looped_lm import count_parameters
from loopscope.objectives.placement import gated_weights
from loopscope.presets import preset
from loopscope.protocol import run_loops

PUBLISHED = {
    **OURO,
    "vocab_size": 49_152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
}


class Published:
    """The published forward pass, one sequence at a time, straight from the tensors; nothing of loopscope in it."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def __call__(self, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Logits and exit probabilities of every loop."""
        x, logits, gates = self.tensors["model.embed_tokens.weight"][ids], [], []
        for _ in range(self.config["total_ut_steps"]):
            for index in range(self.config["num_hidden_layers"]):
                x = self.layer(x, f"model.layers.{index}")
            x = self.norm(x, "model.norm")
            logits.append(x @ self.tensors["lm_head.weight"].T)
            gate = x @ self.tensors["model.early_exit_gate.weight"][0] + self.tensors["model.early_exit_gate.bias"]
            gates.append(1 / (1 + torch.exp(-gate)))
        stay, exits = torch.ones(len(ids)), []
        for gate in gates[:-1]:
            exits.append(stay * gate)
            stay = stay * (1 - gate)
        return logits, [*exits, stay]

    def layer(self, x: Tensor, at: str) -> Tensor:
        attended = self.attention(self.norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
        x = x + self.norm(attended, f"{at}.input_layernorm_2")
        inner = self.norm(x, f"{at}.post_attention_layernorm")
        gate, up = self.times(inner, f"{at}.mlp.gate_proj"), self.times(inner, f"{at}.mlp.up_proj")
        fed = self.times(gate / (1 + torch.exp(-gate)) * up, f"{at}.mlp.down_proj")
        return x + self.norm(fed, f"{at}.post_attention_layernorm_2")

    def attention(self, x: Tensor, at: str) -> Tensor:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width = self.config["hidden_size"] // heads
        queries, keys, values = (self.times(x, f"{at}.{name}_proj") for name in "qkv")
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            q = self.rotated(queries[:, head * width : (head + 1) * width])
            k = self.rotated(keys[:, group * width : (group + 1) * width])
            scores = (q @ k.T / width**0.5).masked_fill(future, float("-inf"))
            outputs.append(scores.softmax(-1) @ values[:, group * width : (group + 1) * width])
        return self.times(torch.cat(outputs, dim=-1), f"{at}.o_proj")

    def rotated(self, x: Tensor) -> Tensor:
        """Rotary positions that pair the first half of a head with the second."""
        half = x.shape[-1] // 2
        rates = torch.tensor([self.config["rope_theta"] ** (-pair / half) for pair in range(half)])
        angle = torch.arange(len(x))[:, None] * rates
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return self.tensors[f"{name}.weight"] * (x / scale)

    def times(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T


def fields(tmp_path, **changes) -> Fields:
    """config.json with some fields changed; None takes a field away."""
    values = {name: value for name, value in {**OURO, **changes}.items() if value is not None}
    return Fields(tmp_path / "config.json", values)


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 4, "head_dim": 4}, {"total_ut_steps": 3}])
@pytest.mark.parametrize("save", [save_folder, save_sharded])
def test_every_loop_has_the_logits_and_exit_probabilities_of_the_published_design(tmp_path, save, changes):
    config = {**OURO, **changes}
    tensors = ouro_tensors(config)
    model = open_folder(save(tmp_path, config, tensors)).model.double()
    wide = {
        name: tensor.double() for name, tensor in tensors.items()
    }  # in float32, rounding grows to 2e-5 over the loops
    ids_BT = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        trace = run_loops(model, ids_BT)
        features_KND = torch.stack([model.features(state, k).flatten(0, 1) for k, state in enumerate(trace.states)][1:])
        exits_KN, _ = gated_weights(model, features_KND, torch.ones(18, dtype=torch.bool))
    published = [Published(config, wide)(ids) for ids in ids_BT]
    assert trace.num_loops == config["total_ut_steps"]
    for k in range(1, trace.num_loops + 1):
        expected_BTV = torch.stack([logits[k - 1] for logits, _ in published])
        torch.testing.assert_close(model.readout(trace.states[k], k), expected_BTV, atol=1e-5, rtol=1e-5)
        expected_N = torch.cat([exits[k - 1] for _, exits in published])
        torch.testing.assert_close(exits_KN[k - 1], expected_N, atol=1e-5, rtol=1e-5)
    assert expected_BTV.std() > 0.1, "weights so small that any two models agree prove nothing"


def test_grouped_heads_and_a_tied_head_are_read(tmp_path):
    config = {**OURO, "num_key_value_heads": 1, "tie_word_embeddings": True}
    tensors = ouro_tensors(config)
    model = open_folder(save_folder(tmp_path, config, tensors)).model
    ids_BT = torch.arange(7)[None]
    with torch.no_grad():
        trace = run_loops(model, ids_BT)
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    logits, _ = Published(config, tied)(ids_BT[0])
    torch.testing.assert_close(model.readout(trace.states[4], 4)[0], logits[3], atol=1e-5, rtol=1e-5)


def test_the_state_is_the_one_before_the_norm_that_closes_a_loop(tmp_path):
    tensors = ouro_tensors(OURO)
    model = open_folder(save_folder(tmp_path, OURO, tensors)).model
    published = Published(OURO, tensors)
    ids = torch.arange(5)
    x = published.layer(published.layer(tensors["model.embed_tokens.weight"][ids], "model.layers.0"), "model.layers.1")
    h_BTD = run_loops(model, ids[None]).states[1].h_BTD
    torch.testing.assert_close(h_BTD[0], x, atol=1e-5, rtol=1e-5)


def test_weights_of_half_precision_are_held_in_float32(tmp_path):
    tensors = {name: tensor.bfloat16() for name, tensor in ouro_tensors(OURO).items()}
    model = open_folder(save_folder(tmp_path, OURO, tensors)).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.head, tensors["lm_head.weight"].float())


def test_the_published_configuration_is_our_preset_with_all_its_tensors(tmp_path):
    config = config_of(Fields(tmp_path / "config.json", PUBLISHED))
    design = preset("ouro-1.4b")
    assert config.objective == design.objective
    assert {**vars(config.model), "num_kv_heads": None} == vars(design.model)
    shapes = [shape for theirs in layout(config.model).values() for shape in theirs.values()]
    assert len(shapes) == 269
    assert round(sum(torch.Size(shape).numel() for shape in shapes) / 1e9, 2) == 1.43


def test_no_parameter_is_lost_or_counted_twice(tmp_path):
    tensors = ouro_tensors(OURO)
    model = open_folder(save_folder(tmp_path, OURO, tensors)).model
    assert sum(count_parameters(model).values()) == sum(tensor.numel() for tensor in tensors.values())
    assert model.recurrence.inter_loop_norm is model.readout_map.norm


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
     "num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "total_ut_steps"],
)  # fmt: skip
@pytest.mark.parametrize("value", [None, "many", 0, -1, float("nan"), True])
def test_a_field_that_is_missing_or_wrong_is_named_and_never_guessed(tmp_path, name, value):
    with pytest.raises(LoopscopeError, match=rf"config.json: .*{name}"):
        config_of(fields(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_act", "gelu"),
        ("hidden_act", None),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("rope_scaling", {"type": "yarn", "factor": 4}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("quantization_config", {"bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("head_dim", 32),
        ("num_attention_heads", 3),
        ("num_attention_heads", 16),
        ("num_key_value_heads", 3),
        ("tie_word_embeddings", "no"),
        ("total_ut_steps", 1),
        ("hidden_size", 10**12),
    ],
)
def test_a_value_that_the_model_cannot_express_is_named(tmp_path, name, value):
    named = "width" if value == 10**12 else name
    changes = {"head_dim": None, "num_attention_heads": 2} | {name: value}
    with pytest.raises(LoopscopeError, match=rf"config.json.* {named} = "):
        config_of(fields(tmp_path, **changes))


def test_the_rotary_base_of_newer_configurations_is_found(tmp_path):
    newer = fields(tmp_path, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert config_of(newer).model.rope_base == 5e5


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"missing \(1\): model.norm.weight \(16,\)"),
        (
            lambda tensors: tensors.update({"model.extra.weight": torch.ones(2)}),
            r"unexpected \(1\): model.extra.weight",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(VOCABULARY + 1, 16)}),
            r"wrong shape \(1\): lm_head.weight is \(301, 16\), not \(300, 16\)",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
            "model.norm.weight is of I8; quantised",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, change, sentence):
    tensors = ouro_tensors(OURO)
    change(tensors)
    with pytest.raises(LoopscopeError, match=sentence):
        open_folder(save_folder(tmp_path, OURO, tensors))


def test_a_layer_too_few_in_the_configuration_leaves_tensors_over(tmp_path):
    folder = save_folder(tmp_path, {**OURO, "num_hidden_layers": 1}, ouro_tensors(OURO))
    with pytest.raises(LoopscopeError, match=r"unexpected \(11\): model.layers.1.input.* and 3 more"):
        open_folder(folder)
