"""Layers against their equations: where the norms sit, what a feed-forward computes, dropout on both branches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from loopscope.model.layers import Attention, FeedForward, Layer, rotation

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
