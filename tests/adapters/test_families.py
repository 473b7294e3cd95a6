"""Huginn, Parcae and the paper's own checkpoints: the same numbers as their equations, and their files back again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from checkpoints import (
    HUGINN,
    OURO,
    PAPER,
    PARCAE,
    VOCABULARY,
    huginn_tensors,
    ouro_tensors,
    paper_tensors,
    parcae_tensors,
    save_folder,
    save_hrm,
    save_sharded,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from loopscope.adapters.foreign import tensors_of
from loopscope.adapters.hf import describe_folder, open_folder
from loopscope.adapters.hf import save_folder as save_like
from loopscope.errors import LoopscopeError
from loopscope.model.looped_lm import build
from loopscope.protocol import run_loops

Tensors = dict[str, Tensor]


# --- the equations, one sequence at a time; nothing of loopscope in them ---------------------------------------------


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions on neighbouring channels; published tables of angles are of float32 in any model."""
    channels = x.shape[-1]
    rates = base ** -(torch.arange(0, channels, 2).float() / channels)
    turned = torch.empty_like(x)
    for pair in range(channels // 2):
        angle = torch.arange(len(x)).float() * rates[pair]
        even, odd = x[:, 2 * pair], x[:, 2 * pair + 1]
        turned[:, 2 * pair] = even * angle.cos() - odd * angle.sin()
        turned[:, 2 * pair + 1] = odd * angle.cos() + even * angle.sin()
    return turned


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, causally."""
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (q @ k.T / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")).softmax(-1) @ v


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def huginn_logits(config: dict, w: Tensors, ids: Tensor, h: Tensor) -> list[Tensor]:
    """x = norm_2(x + attn(norm_1 x)), x = norm_4(x + mlp(norm_3 x)); ln_f before and after the coda."""
    width, heads, eps = config["n_embd"], config["n_heads"], config["norm_eps"]
    size = width // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, eps) * w[f"transformer.{name}.weight"]

    def block(x: Tensor, at: str) -> Tensor:
        q, k, v = (norm(x, f"{at}.norm_1") @ w[f"transformer.{at}.attn.Wqkv.weight"].T).split(width, -1)
        outputs = []
        for head in range(heads):
            place = slice(head * size, (head + 1) * size)
            bias = w[f"transformer.{at}.attn.qk_bias"][:, 0, head] if config["qk_bias"] else torch.zeros(2, size)
            turned_q, turned_k = (turned(one[:, place] + bias[n], config["rope_base"]) for n, one in enumerate((q, k)))
            outputs.append(attended(turned_q, turned_k, v[:, place]))
        x = norm(x + torch.cat(outputs, -1) @ w[f"transformer.{at}.attn.proj.weight"].T, f"{at}.norm_2")
        gate, up = (norm(x, f"{at}.norm_3") @ w[f"transformer.{at}.mlp.fc.weight"].T).chunk(2, -1)
        return norm(x + (silu(gate) * up) @ w[f"transformer.{at}.mlp.proj.weight"].T, f"{at}.norm_4")

    def stack(x: Tensor, part: str, count: int) -> Tensor:
        for index in range(count):
            x = block(x, f"{part}.{index}")
        return x

    e = stack(w["transformer.wte.weight"][ids] * math.sqrt(width), "prelude", config["n_layers_in_prelude"])
    logits = []
    for _ in range(config["mean_recurrence"]):
        joined = torch.cat([h, e], -1) @ w["transformer.adapter.weight"].T
        h = stack(joined, "core_block", config["n_layers_in_recurrent_block"])
        last = norm(stack(norm(h, "ln_f"), "coda", config["n_layers_in_coda"]), "ln_f")
        logits.append(last @ w.get("lm_head.weight", w["transformer.wte.weight"]).T)
    return logits


def parcae_logits(config: dict, w: Tensors, ids: Tensor, h: Tensor, *, turn_first: bool = False) -> list[Tensor]:
    """s ← s·exp(−softplus(dt)·exp(A)) + softplus(dt)·(B e), pre-norm blocks, C and the coda, ln_f.

    Published code turns queries and keys before it normalises them. A norm without gains does not notice, but for the
    rounding of cos² + sin² in a float32 table.
    """
    heads, eps = config["num_attention_heads"], config["norm_eps"]
    size = config["n_embd"] // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, eps) * w[f"transformer.{name}.weight"]

    def block(x: Tensor, at: str, number: int) -> Tensor:
        inner = norm(x, f"{at}.norm_1")
        q, k, v = (inner @ w[f"transformer.{at}.attn.c_{name}.weight"].T for name in "qkv")
        gates = (
            2 / (1 + torch.exp(-inner[:, :32] @ w[f"transformer.{at}.attn.ve_gate.weight"].T)) if number % 2 else None
        )
        outputs = []
        for head in range(heads):
            place = slice(head * size, (head + 1) * size)
            q_head, k_head = q[:, place], k[:, place]
            for turn in (turn_first, not turn_first):
                if turn:
                    q_head, k_head = (turned(one, config["rope_settings"]["rope_base"]) for one in (q_head, k_head))
                elif config["qk_norm"]:
                    q_head, k_head = (rms(one, torch.finfo(one.dtype).eps) for one in (q_head, k_head))
            values = v[:, place]
            if gates is not None:
                values = values + gates[:, head, None] * w[f"value_embeds.{number}.weight"][ids][:, place]
            outputs.append(attended(q_head, k_head, values))
        x = x + torch.cat(outputs, -1) @ w[f"transformer.{at}.attn.c_proj.weight"].T
        hidden = norm(x, f"{at}.norm_2") @ w[f"transformer.{at}.mlp.fc.weight"].T
        return x + (hidden.clamp(min=0).square() / 2) @ w[f"transformer.{at}.mlp.proj.weight"].T

    e = w["transformer.wte.weight"][ids]
    for index in range(2):
        e = block(e, f"prelude.{index}", index)
    if config["prelude_norm"]:
        e = norm(e, "ln_prelude")
    logits = []
    for _ in range(config["mean_recurrence"]):
        if config["injection_type"] == "diagonal":
            step = torch.log1p(torch.exp(w["transformer.adapter.dt_bias"]))
            decay = torch.exp(-step * torch.exp(w["transformer.adapter.A_log"]))
            h = h * decay + step * (e @ w["transformer.adapter.B"].T)
        elif config["injection_type"] == "linear":
            h = torch.cat([h, e], -1) @ w["transformer.adapter.adapter.weight"].T
        else:
            h = h + e
        for index in range(2):
            h = block(h, f"core_block.{index}", 2 + index)
        x = h @ w["transformer.C.weight"].T
        for index in range(2):
            x = block(x, f"coda.{index}", 4 + index)
        logits.append(norm(x, "ln_f") @ w["transformer.wte.weight"].T)
    return logits


def paper_logits(config: dict, w: Tensors, ids: Tensor, h: Tensor) -> list[Tensor]:
    """x += attn(norm x), x += w2(silu(w1 norm x)·w3 norm x); the readout before any norm between the loops."""
    width, heads, eps = config["width"], config["num_heads"], config["norm_eps"]
    size = width // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, eps) * w[f"{name}.weight"]

    h = w["token_embedding.weight"][ids] + w["position_embedding.weight"][: len(ids)]
    logits = []
    for loop in range(1, config["num_loops"] + 1):
        if config["inter_loop_norm"] and loop > 1:
            h = norm(h, "loop_norm")
        for index in range(config["num_layers"]):
            at = f"layers.{index}"
            q, k, v = (norm(h, f"{at}.attn_norm") @ w[f"{at}.attn.qkv.weight"].T).split(width, -1)
            places = [slice(head * size, (head + 1) * size) for head in range(heads)]
            joined = torch.cat([attended(q[:, place], k[:, place], v[:, place]) for place in places], -1)
            h = h + joined @ w[f"{at}.attn.out_proj.weight"].T
            inner = norm(h, f"{at}.ffn_norm")
            gate, up = (inner @ w[f"{at}.ffn.{name}.weight"].T for name in ("w1", "w3"))
            h = h + (silu(gate) * up) @ w[f"{at}.ffn.w2.weight"].T
        is_normed = config["readout"] == "rmsnorm" or (
            config["readout"] == "final-only" and loop == config["num_loops"]
        )
        logits.append((norm(h, "decode_norm") if is_normed else h) @ w["token_embedding.weight"].T)
    return logits


# --- the families ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    config: dict
    tensors: Callable[[dict], Tensors]
    logits: Callable[[dict, Tensors, Tensor, Tensor], list[Tensor]]


CASES = {
    "huginn": Family(HUGINN, huginn_tensors, huginn_logits),
    "huginn without bias": Family({**HUGINN, "qk_bias": False}, huginn_tensors, huginn_logits),
    "parcae": Family(PARCAE, parcae_tensors, parcae_logits),
    "parcae, linear": Family({**PARCAE, "injection_type": "linear"}, parcae_tensors, parcae_logits),
    "parcae, add": Family({**PARCAE, "injection_type": "add", "prelude_norm": False}, parcae_tensors, parcae_logits),
    "parcae, zeros": Family({**PARCAE, "state_init": "zero", "qk_norm": False}, parcae_tensors, parcae_logits),
    "paper": Family(PAPER, paper_tensors, paper_logits),
    "paper, raw": Family({**PAPER, "readout": "raw"}, paper_tensors, paper_logits),
    "paper, final-only": Family({**PAPER, "readout": "final-only"}, paper_tensors, paper_logits),
    "paper, inter-loop norm": Family({**PAPER, "inter_loop_norm": True}, paper_tensors, paper_logits),
}


def own_initialisation(folder) -> None:
    """Put what the family's own initialisation draws into a folder."""
    foreign = describe_folder(folder)
    fresh = build(foreign.model.config, seed=3)
    kept = load_file(folder / "model.safetensors")
    drawn = {name: tensor.clone() for name, tensor in tensors_of(fresh, foreign.layout).items()}
    copies = {copy: drawn[of].clone() for copy, of in foreign.copies.items() if copy in kept}
    unused = {name: kept[name] for name in foreign.unused if name in kept}
    save_file(drawn | copies | unused, folder / "model.safetensors")


@pytest.mark.parametrize("weights", ["random", "initial"])
@pytest.mark.parametrize("name", CASES)
def test_every_loop_has_the_logits_of_the_equations(tmp_path, name, weights):
    family = CASES[name]
    save_folder(tmp_path, family.config, family.tensors(family.config))
    if weights == "initial":
        own_initialisation(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    ids_BT = torch.randint(VOCABULARY - 10, (2, 9), generator=torch.Generator().manual_seed(1))
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = open_folder(tmp_path, dtype=dtype).model
        with torch.no_grad():
            trace = run_loops(model, ids_BT)
            got_KBTV = [model.readout(state, k) for k, state in enumerate(trace.states)][1:]
        wide = {each: tensor.double() for each, tensor in stored.items()}
        states_BTD = trace.states[0].h_BTD.double()  # noise is the model's own; what follows from it is the equations'
        expected = [family.logits(family.config, wide, ids, h) for ids, h in zip(ids_BT, states_BTD, strict=True)]
        assert trace.num_loops == len(expected[0])
        for k, got_BTV in enumerate(got_KBTV):
            expected_BTV = torch.stack([each[k] for each in expected])
            # float32 is measured in units of the logits: the paper's N(0, 1) embedding makes large ones
            scale = 1 if dtype == torch.float64 else max(1.0, float(expected_BTV.abs().max()))
            assert float((got_BTV - expected_BTV).abs().max()) <= tolerance * scale
    assert expected_BTV.std() > 1e-3, "weights so small that any two models agree prove nothing"
    assert (expected_BTV - torch.stack([each[0] for each in expected])).abs().max() > 1e-5, "loops that do nothing"


def test_turning_queries_before_their_norm_as_parcae_does_changes_nothing_but_rounding():
    wide = {name: tensor.double() for name, tensor in parcae_tensors(PARCAE).items()}
    ids, h = torch.arange(9), torch.zeros(9, 36).double()
    ours, theirs = (parcae_logits(PARCAE, wide, ids, h, turn_first=first)[-1] for first in (False, True))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_the_noise_that_a_text_starts_from_has_the_published_spread(tmp_path):
    """Huginn: std √(2/5) after the embedding's factor; Parcae: √(2/5d); both cut at three of it."""
    for name, std in (("huginn", math.sqrt(2 / 5)), ("parcae", math.sqrt(2 / (5 * 36)))):
        folder = save_folder(tmp_path / name, CASES[name].config, CASES[name].tensors(CASES[name].config))
        h_BTD = open_folder(folder).model.embed(torch.zeros(1, 96, dtype=torch.long)).h_BTD
        assert h_BTD.abs().max() <= 3 * std
        assert abs(float(h_BTD.std()) / std - 0.9866) < 0.05  # of a normal that is cut there


# --- files -----------------------------------------------------------------------------------------------------------

ALL = {
    **{name: CASES[name] for name in ("huginn", "parcae", "paper")},
    "ouro": Family(OURO, ouro_tensors, lambda: None),
}


@pytest.fixture(params=[*ALL, "hrm_text"])
def folder(request, tmp_path):
    """A small random folder of every family."""
    if request.param == "hrm_text":
        return save_hrm(tmp_path / "hrm_text")[0]
    family = ALL[request.param]
    return save_folder(tmp_path / request.param, family.config, family.tensors(family.config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_saving_and_loading_gives_the_same_bits(folder, tmp_path, dtype):
    first = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in first.items()}, folder / "model.safetensors")
    model = open_folder(folder, dtype=None).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    save_like(model, folder, tmp_path / "again")
    foreign, stored = describe_folder(folder), load_file(folder / "model.safetensors")
    saved = load_file(tmp_path / "again/model.safetensors")
    left_out = {*foreign.unused, *foreign.copies}
    assert saved.keys() == stored.keys() - left_out
    assert all(torch.equal(saved[name], stored[name]) and saved[name].dtype == dtype for name in saved)
    again = open_folder(tmp_path / "again", dtype=None).model
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_can_be_written_over_by_the_model_that_is_a_view_of_it(folder):
    model = open_folder(folder, dtype=None).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_like(model, folder, folder)
    again = open_folder(folder).model.state_dict()
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_a_model_of_another_design_is_not_written_into_a_format(tmp_path):
    folder = save_folder(tmp_path, OURO, ouro_tensors(OURO))
    other = save_folder(tmp_path / "paper", PAPER, paper_tensors(PAPER))
    with pytest.raises(LoopscopeError, match="is not of the design"):
        save_like(open_folder(other).model, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_are_read_as_one(tmp_path):
    for name, family in ALL.items():
        tensors = family.tensors(family.config)
        one = open_folder(save_folder(tmp_path / name, family.config, tensors)).model.state_dict()
        two = open_folder(save_sharded(tmp_path / f"{name}-2", family.config, tensors)).model.state_dict()
        assert all(torch.equal(one[each], two[each]) for each in one)


def test_every_misfit_is_in_the_message(tmp_path):
    tensors = huginn_tensors(HUGINN)
    del tensors["transformer.ln_f.weight"], tensors["transformer.coda.0.norm_1.weight"]
    tensors |= {"transformer.surplus": torch.ones(2), "transformer.adapter.weight": torch.ones(24, 24)}
    with pytest.raises(LoopscopeError) as caught:
        open_folder(save_folder(tmp_path, HUGINN, tensors))
    assert str(caught.value).splitlines() == [
        f"{tmp_path} does not hold the tensors that its config.json describes",
        "  missing (2): transformer.coda.0.norm_1.weight (24,), transformer.ln_f.weight (24,)",
        "  unexpected (1): transformer.surplus",
        "  wrong shape (1): transformer.adapter.weight is (24, 24), not (24, 48)",
    ]


def test_a_tied_head_may_be_there_twice_if_it_is_the_same_and_angles_are_left_alone(tmp_path):
    tensors = parcae_tensors(PARCAE)
    tensors |= {"lm_head.weight": tensors["transformer.wte.weight"].clone(), "freqs_cis": torch.ones(1, 96, 1, 6, 2)}
    model = open_folder(save_folder(tmp_path, PARCAE, tensors)).model
    assert model.unembedding is None and torch.equal(model.head, tensors["transformer.wte.weight"])
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(LoopscopeError, match=r"should be a copy of transformer\.wte\.weight"):
        open_folder(save_folder(tmp_path, PARCAE, tensors))


def test_an_untied_head_is_read(tmp_path):
    config = {**HUGINN, "tie_embeddings": False}
    tensors = huginn_tensors(config)
    tensors["lm_head.weight"] = torch.randn(300, 24)
    model = open_folder(save_folder(tmp_path, config, tensors)).model
    assert torch.equal(model.head, tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("config", "changes", "sentence"),
    [
        (HUGINN, {"n_embd": None}, "the field n_embd is missing"),
        (HUGINN, {"rope_base": None}, "the field rope_base is missing"),
        (HUGINN, {"rope_base": 10**400}, "is not a number above 0"),  # whole, and beyond any float
        (HUGINN, {"bias": True}, "bias = True is not supported: only false is"),
        (HUGINN, {"injection_type": "add"}, "injection_type = 'add' is not supported: only \"linear\" is"),
        (HUGINN, {"block_class_name": "TransformerPreNormBlock"}, 'only "SandwichBlock" is'),
        (HUGINN, {"num_key_value_heads": 1}, "num_key_value_heads = 1 is not supported: only 3 is"),
        (HUGINN, {"test_time_noise": 0.1}, "test_time_noise = 0.1 is not supported"),
        (HUGINN, {"n_heads": 5}, "num_heads = 5: must divide width = 24"),
        (HUGINN, {"n_layers_in_coda": 0}, "n_layers_in_coda = 0 is not a whole number of at least 1"),
        (HUGINN, {"init_values": 3}, "init_values = 3 is not a mapping"),
        (PARCAE, {"injection_type": "gated"}, "only diagonal, linear, add are"),
        (PARCAE, {"state_init": "unit"}, "only like-init, zero are"),
        (PARCAE, {"logit_softcap": 15.0}, "logit_softcap = 15.0 is not supported: only null is"),
        (PARCAE, {"init_strategy": "takase"}, 'only "scaled-zero" is'),
        (PARCAE, {"recurrent_embedding_dimension": 72}, "recurrent_embedding_dimension = 72 is not supported"),
        (PARCAE, {"rope_settings": {"use_rope": False}}, "use_rope = False is not supported"),
        (PARCAE, {"rope_settings": []}, "is not a mapping"),
        (PARCAE, {"n_layers_in_recurrent_block": 1}, "gates and value embeddings are in different layers"),
        (PAPER, {"readout": "alpha"}, "only rmsnorm, raw, final-only are"),
        (PAPER, {"placement": "gated"}, "it needs exit_gate"),
        (PAPER, {"num_heads": 3}, "num_heads = 3: must divide width = 16"),
        (PAPER, {"inter_loop_norm": "yes"}, "inter_loop_norm = 'yes' is neither true nor false"),
    ],
)
def test_what_a_family_cannot_be_is_told_with_the_field(tmp_path, config, changes, sentence):
    values = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(LoopscopeError) as caught:
        describe_folder(tmp_path)
    assert sentence in str(caught.value) and str(tmp_path / "config.json") in str(caught.value)
