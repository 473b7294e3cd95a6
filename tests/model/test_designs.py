"""What every published design must do, whatever it is made of: train, conform, come back from disk, be audited."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_plan import RealStep, counted_flops

import loopscope as ls
from loopscope.cli import parse
from loopscope.cli.train import Train
from loopscope.config import Config, ModelConfig, ObjectiveConfig, TrainingConfig, config_from_dict, config_to_dict
from loopscope.designs import DESIGNS, design
from loopscope.errors import ConfigError
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.placement import Objective
from loopscope.objectives.terms import terms_of
from loopscope.options import AuditOptions
from loopscope.protocol import Scheduled, run_loops
from loopscope.targets import of_config
from loopscope.training.checkpoint import load_model_tensors, model_tensors
from loopscope.training.counting import CountedSteps
from loopscope.training.optimizers import Optimizers
from loopscope.training.plan import plan_memory

pytestmark = pytest.mark.usefixtures("flushed_denormals")
VOCABULARY, LENGTH, STEPS = 16, 16, 16
BASE = Config(
    model=ModelConfig(
        vocab_size=VOCABULARY, width=16, num_layers=1, num_loops=3, num_heads=2, mlp_width=32, max_length=LENGTH,
        dropout=0.0, init="scaled",
    ),
    training=TrainingConfig(lr=2e-2, steps=STEPS),
)  # fmt: skip


def made(name: str) -> Config:
    return DESIGNS[name].apply(BASE)


@cache
def trained(name: str) -> tuple[LoopedLM, list[float]]:
    """The design after a few steps on a text that repeats itself, and the cross-entropy of its last loop on the way."""
    torch.manual_seed(0)
    config = made(name)
    model = build(config.model, seed=0).train()
    objective, optimizers = Objective(config.objective), Optimizers(model, config.training)
    ids_BT = torch.arange(4 * LENGTH).view(4, LENGTH) % VOCABULARY
    losses = []
    for step in range(STEPS):
        if (scheduled := Scheduled.of(model)) is not None:
            scheduled.at_progress(step / STEPS)
        result = objective(model, ids_BT, (ids_BT + 1) % VOCABULARY)
        result.loss.backward()
        optimizers.step(config.training.lr)
        optimizers.zero_grad()
        losses.append(float(result.ce_K[-1]))
    return model.eval(), losses


@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_learns_what_follows_what(name):
    _, losses = trained(name)
    assert losses[0] > 0.8 * math.log(VOCABULARY)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_conforms(name):
    """Cached is uncached, ragged is alone, depth n of a deeper run is a run of n: what `loopscope check` checks."""
    opened = replace(of_config(name, made(name), seed=0), model=trained(name)[0])
    result = ls.check(opened)
    assert [finding.text for finding in result.findings] == []
    assert result.check("cached").status == "passed"


@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_comes_back_from_disk_bit_for_bit(name, tmp_path):
    model, _ = trained(name)
    save_file(model_tensors(model), tmp_path / "model.safetensors")
    again = build(config_from_dict(config_to_dict(made(name))).model, seed=1).eval()
    load_model_tensors(again, load_file(tmp_path / "model.safetensors"), name)
    ids_BT = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    with torch.no_grad():
        ours, theirs = (run_loops(each, ids_BT, num_loops=5) for each in (model, again))
        for k in range(1, 6):
            assert torch.equal(model.readout(ours.states[k], k), again.readout(theirs.states[k], k))


@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_can_be_audited(name):
    model, objective = trained(name)[0], made(name).objective
    ids_BT = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY
    options = AuditOptions(states=1, prefix=5, tokens=10, rollout=4)
    result = ls.audit(model, [ids_BT], supervised=objective, terms=terms_of(objective), options=options)
    assert result.verdict in ("blind-spot", "controlled"), result.summary
    assert result.model.supervised == sorted(result.model.supervised)


@pytest.mark.parametrize("name", DESIGNS)
def test_every_design_is_planned_as_a_real_step_is(name):
    """Bytes that autograd saves, and products, against hooks and torch's counter on a step that is really run."""
    model, training = replace(BASE.model, num_layers=2, vocab_size=40), replace(BASE.training, batch=2)
    config = DESIGNS[name].apply(replace(BASE, model=model, training=training))
    config = replace(config, objective=replace(config.objective, depth="fixed"))
    step = RealStep(config)
    step.forward()
    memory, flops = plan_memory(config), CountedSteps(config).flops_per_token()
    assert memory.activations + memory.loss_gradients == pytest.approx(step.saved, rel=0.01)
    products, attention = counted_flops(config)
    assert flops.total - flops.attention == pytest.approx(products, rel=0.01)
    assert flops.attention == pytest.approx(attention * (LENGTH + 1) / (2 * LENGTH), rel=0.01)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_is_itself_whatever_it_is_applied_to(name):
    """Applied to a base that is another design, nothing of that design is left."""
    other = DESIGNS["ouro"].apply(BASE)
    assert DESIGNS[name].apply(other) == replace(made(name), training=other.training)
    assert made(name).model.width == BASE.model.width


def test_designs_differ_from_one_another():
    configs = [replace(made(name), training=BASE.training) for name in DESIGNS]
    assert all(one != other for one, other in pairwise(sorted(configs, key=repr)))


def test_every_design_says_what_it_is():
    for name, each in DESIGNS.items():
        assert each.name == name and each.title and each.source
        assert each.summary.endswith(".") and len(each.summary) < 120, name


def test_a_wrong_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'huginn'"):
        design("hugin")
    with pytest.raises(ConfigError, match="did you mean 'ouro'"):
        ls.open("design:ouroo")


def test_flags_start_from_the_design_at_the_size_of_the_preset():
    verb = parse(["train", "--preset", "demo", "--design", "huginn", "--num-loops", "6"])
    assert isinstance(verb, Train)
    config = verb.resolved()
    expected = DESIGNS["huginn"].apply(ls.preset("demo"))
    assert config == replace(expected, model=replace(expected.model, num_loops=6))


def test_a_design_opens_by_its_word_at_demo_size():
    opened = ls.open("design:ouro", seed=3)
    assert opened.config == DESIGNS["ouro"].apply(ls.preset("demo"))
    assert opened.objective == ObjectiveConfig(placement="gated", exit_entropy=0.05)
    assert not opened.is_trained and opened.name == "design:ouro"
