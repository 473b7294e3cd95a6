"""Norm placements: everything one decides is in its class, which is checked against its own equations."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest
import torch
from test_plan import RealStep, configure

import loopscope as ls
from loopscope.config import ModelConfig
from loopscope.model.layers import NORM_PLACEMENTS, Layer, PreNorm, make_norm
from loopscope.training.plan import plan_memory

SLOT = ("core", 0, 0)


def test_every_placement_of_the_configuration_has_its_class():
    words = typing.get_args(typing.get_type_hints(ModelConfig)["norm_placement"])
    assert sorted(words) == sorted(NORM_PLACEMENTS)


class MadeUp(PreNorm):
    """x/2 + norm''(f(norm x)) with norm' inside f, and last matrices a tenth of their size: all of it in one class."""

    def __init__(self, config, branch):
        super().__init__(config, branch)
        self.inner = make_norm(config.norm, config.width if branch == "attention" else config.mlp_hidden, 1e-6)
        self.closing = make_norm(config.norm, config.width, 1e-6)

    def after(self, x_BTD, branch_BTD):
        return x_BTD / 2 + self.closing(branch_BTD)

    def initialise(self, branch, config):
        with torch.no_grad():
            branch.out.weight.mul_(0.1)

    def saves(self, ledger, name, x):
        ledger.norm(f"{name}.closing", f"{name}.branch")


@pytest.fixture
def made_up(monkeypatch):
    """One class and one entry of the registry, under a name that the configuration knows already."""
    monkeypatch.setitem(NORM_PLACEMENTS, "pre", MadeUp)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu", "relu2"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_made_up_placement_is_planned_from_its_class_alone(made_up, mlp, norm):
    config = configure({"mlp": mlp, "norm": norm, "positions": "rope", "qk_norm": True})
    step = RealStep(config)
    step.forward()
    memory = plan_memory(config)
    assert memory.activations + memory.loss_gradients == pytest.approx(step.saved, rel=0.01)


def test_a_made_up_placement_decides_how_its_branches_are_initialised(tiny, made_up, monkeypatch):
    smaller = ls.build(tiny, seed=0).state_dict()
    monkeypatch.undo()
    for name, weight in ls.build(tiny, seed=0).state_dict().items():
        last = name.endswith(("attention.out.weight", "feed_forward.out.weight"))
        torch.testing.assert_close(smaller[name], 0.1 * weight if last else weight)


@pytest.mark.parametrize("training", [True, False])
def test_a_made_up_placement_computes_what_it_says(tiny, made_up, training):
    """The attention branch is silenced by its closing norm: what is left of it is the halved stream."""
    layer = Layer(replace(tiny, mlp="relu2")).double().train(training)
    norms, feed_forward = layer.feed_forward_norms, layer.feed_forward
    with torch.no_grad():
        layer.attention_norms.closing.weight.zero_()
        norms.inner.weight.uniform_(0.5, 1.5)
    x_BTD = torch.randn(2, 5, tiny.width, dtype=torch.float64)
    activated = (norms.norm(x_BTD / 2) @ feed_forward.up.weight.T).clamp(min=0) ** 2
    written_BTD = norms.inner(activated) @ feed_forward.out.weight.T
    torch.testing.assert_close(layer(x_BTD, None, None, SLOT), x_BTD / 4 + norms.closing(written_BTD))
