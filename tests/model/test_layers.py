"""Layers against their equations: where the norms sit, what a feed-forward computes, dropout on both branches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from loopscope.model.attention import Attention, rotate, rotation
from loopscope.model.feed_forward import FeedForward
from loopscope.model.layers import Layer

SLOT = ("core", 0, 0)


def build_layer(config) -> Layer:
    """In float64 and evaluation mode, with random gains: two norms of one layer must not be interchangeable."""
    layer = Layer(config).double().eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return layer


def normed(norm, x, eps):
    """The norm's equation, with the parameters of the norm."""
    if hasattr(norm, "bias"):
        x = x - x.mean(-1, keepdim=True)
    unit = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return unit * norm.weight + getattr(norm, "bias", 0.0)


def residual(placement, norms, branch, x, eps):
    """One residual branch under a norm placement, as the docstrings of the placements write it."""
    written = branch(normed(norms.norm, x, eps))
    return {
        "pre": lambda: x + written,
        "sum": lambda: normed(norms.sum_norm, x + written, eps),
        "sandwich": lambda: x + normed(norms.branch_norm, written, eps),
    }[placement]()


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("placement", ["pre", "sum", "sandwich"])
def test_a_layer_is_attention_then_feed_forward_under_its_norm_placement(tiny, placement, norm):
    layer = build_layer(replace(tiny, norm_placement=placement, norm=norm))
    x_BTD = 3 * torch.randn(2, 5, tiny.width, dtype=torch.float64)

    def attention(x):
        return layer.attention(x, nn.Identity(), None, None, SLOT)

    def feed_forward(x):
        return layer.feed_forward(x, nn.Identity())

    middle_BTD = residual(placement, layer.attention_norms, attention, x_BTD, tiny.norm_eps)
    expected_BTD = residual(placement, layer.feed_forward_norms, feed_forward, middle_BTD, tiny.norm_eps)
    torch.testing.assert_close(layer(x_BTD, None, None, SLOT), expected_BTD)


def swiglu(hidden):
    gate, value = hidden.chunk(2, -1)
    return gate * torch.sigmoid(gate) * value


ACTIVATIONS = {
    "swiglu": swiglu,
    "gelu": lambda hidden: hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2,
    "relu2": lambda hidden: hidden.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_feed_forward_computes_its_equation(tiny, kind):
    feed_forward = FeedForward(replace(tiny, mlp=kind)).double()
    x_BTD = 3 * torch.randn(2, 5, tiny.width, dtype=torch.float64)
    hidden = x_BTD @ feed_forward.up.weight.T
    expected_BTD = ACTIVATIONS[kind](hidden) @ feed_forward.out.weight.T
    torch.testing.assert_close(feed_forward(x_BTD, nn.Identity()), expected_BTD)


@pytest.mark.parametrize(("branch", "other"), [("attention", "feed_forward"), ("feed_forward", "attention")])
def test_dropout_zeroes_its_share_of_each_residual_branch_and_scales_up_the_rest(tiny, branch, other):
    """With the other branch silent, what a layer writes is its branch under dropout."""
    layer = build_layer(replace(tiny, dropout=0.25))
    with torch.no_grad():
        getattr(layer, other).out.weight.zero_()
    x_BTD = torch.randn(4, 16, tiny.width, dtype=torch.float64)
    whole_BTD = layer(x_BTD, None, None, SLOT) - x_BTD
    dropped_BTD = layer.train()(x_BTD, None, None, SLOT) - x_BTD
    zeroed_BTD = dropped_BTD == 0
    assert zeroed_BTD.double().mean().item() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(dropped_BTD[~zeroed_BTD], whole_BTD[~zeroed_BTD] / 0.75)


def test_the_gate_multiplies_every_channel_of_the_heads_by_a_sigmoid_of_the_input(tiny):
    """Its rows come first in the fused projection; with all of them 0 every head is halved."""
    gated = Attention(replace(tiny, attention_gate=True, positions="rope", num_kv_heads=2)).double().eval()
    plain = Attention(replace(tiny, positions="rope", num_kv_heads=2)).double().eval()
    gate_DD, rest = gated.qkv.weight.data.split([tiny.width, plain.qkv.out_features])
    plain.qkv.weight.data.copy_(rest)
    plain.out.weight.data.copy_(torch.eye(tiny.width))
    x_BTD = torch.randn(2, 5, tiny.width, dtype=torch.float64)
    rotary = rotation(torch.arange(5).expand(2, 5), tiny.width // tiny.num_heads, 1e4)
    heads_BTD = plain(x_BTD, None, rotary, None, SLOT)
    expected_BTD = (heads_BTD / (1 + torch.exp(-x_BTD @ gate_DD.T))) @ gated.out.weight.T
    torch.testing.assert_close(gated(x_BTD, None, rotary, None, SLOT), expected_BTD)
    gate_DD.zero_()
    torch.testing.assert_close(gated(x_BTD, None, rotary, None, SLOT), (heads_BTD / 2) @ gated.out.weight.T)


def test_interleaved_positions_turn_neighbouring_channels(tiny):
    """As complex numbers: x_2c + i·x_{2c+1} times exp(i·position·base^(−2c/C))."""
    x_BHTC = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    angle_TC = torch.arange(5)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    turned = torch.view_as_complex(x_BHTC.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(5, 4), angle_TC)
    expected_BHTC = torch.view_as_real(turned).flatten(-2)
    rotary = rotation(torch.arange(5)[None], 8, 100.0, interleaved=True)
    torch.testing.assert_close(rotate(x_BHTC, rotary, interleaved=True), expected_BHTC, atol=1e-6, rtol=1e-6)


def test_a_bias_of_queries_and_keys_is_added_before_they_are_rotated(tiny):
    """With matrices of zeros, scores are those of the rotated biases, and values decide what is attended to."""
    attention = Attention(replace(tiny, qk_bias=True, positions="rope", num_heads=1)).double().eval()
    queries_and_keys, values = attention.qkv.weight.data.split([2 * tiny.width, tiny.width])
    queries_and_keys.zero_()
    attention.out.weight.data.copy_(torch.eye(tiny.width))
    attention.qk_bias.data.normal_()
    rotary = rotation(torch.arange(5)[None], tiny.width, 1e4)
    x_BTD = torch.randn(1, 5, tiny.width, dtype=torch.float64)
    q_TD, k_TD = (rotate(bias.expand(1, 1, 5, -1), rotary)[0, 0] for bias in attention.qk_bias)
    scores = (q_TD @ k_TD.T / tiny.width**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(
        attention(x_BTD, None, rotary, None, SLOT)[0], scores.softmax(-1) @ (x_BTD[0] @ values.T)
    )


def test_query_and_key_norms_without_gains_have_no_parameters_and_the_same_direction(tiny):
    config = replace(tiny, qk_norm=True, qk_norm_gain=False, positions="rope")
    bare, gained = Attention(config).double().eval(), Attention(replace(config, qk_norm_gain=True)).double().eval()
    assert not [name for name, _ in bare.named_parameters() if "norm" in name]
    gained.load_state_dict(bare.state_dict(), strict=False)
    x_BTD, rotary = 3 * torch.randn(1, 5, tiny.width).double(), rotation(torch.arange(5)[None], 8, 1e4)
    # They differ in epsilon alone: 1e-6 of the configuration against that of float64.
    torch.testing.assert_close(
        *(each(x_BTD, None, rotary, None, SLOT) for each in (bare, gained)), atol=1e-4, rtol=1e-4
    )


def test_a_value_embedding_adds_the_gated_row_of_its_token(tiny):
    layer = Layer(replace(tiny, num_kv_heads=2, width=64), with_value_embedding=True).double().eval()
    x_BTD, ids_BT = torch.randn(1, 4, 64, dtype=torch.float64), torch.tensor([[3, 1, 3, 0]])
    normed_BTD = normed(layer.attention_norms.norm, x_BTD, tiny.norm_eps)
    gate_BTG = 2 / (1 + torch.exp(-normed_BTD[..., :32] @ layer.value_embedding.gate.weight.T))
    rows_BTGC = layer.value_embedding.table.weight[ids_BT].view(1, 4, 2, 16)
    found = layer.value_embedding(normed_BTD, ids_BT)
    torch.testing.assert_close(found, gate_BTG[..., None] * rows_BTGC)
    # At the first token attention returns its value, so what is added can be read off.
    attended = layer.attention(normed_BTD, None, None, None, SLOT, None, found) - layer.attention(
        normed_BTD, None, None, None, SLOT
    )
    by_head = found[0, 0].repeat_interleave(2, dim=0).flatten()  # two heads share a value
    torch.testing.assert_close(attended[0, 0], layer.attention.out.weight @ by_head)


def test_half_relu2_is_half_of_relu2(tiny):
    whole, half = (FeedForward(replace(tiny, mlp=kind)).double() for kind in ("relu2", "half-relu2"))
    half.load_state_dict(whole.state_dict())
    x_BTD = torch.randn(2, 3, tiny.width, dtype=torch.float64)
    torch.testing.assert_close(half(x_BTD, None), whole(x_BTD, None) / 2)
