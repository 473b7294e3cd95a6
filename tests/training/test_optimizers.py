"""Schedules as functions of the step, and which parameters each optimiser gets."""

from __future__ import annotations

import pytest
import torch

import loopscope as ls
from loopscope.config import TrainingConfig
from loopscope.training.optimizers import Optimizers, clip_gradients, learning_rate, split_parameters


def rates(**fields) -> list[float]:
    config = TrainingConfig(steps=100, lr=1.0, **fields)
    return [learning_rate(config, step) for step in range(100)]


def test_warm_up_rises_linearly_to_the_peak():
    assert rates(warmup=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_constant_stays_cosine_falls_to_a_tenth_and_wsd_to_zero():
    assert set(rates()) == {1.0}
    cosine = rates(schedule="cosine", warmup=10)
    assert cosine[10] == 1.0 and cosine[55] == pytest.approx(0.55) and cosine[-1] == pytest.approx(0.1, abs=0.01)
    assert cosine[10:] == sorted(cosine[10:], reverse=True)
    stable = rates(schedule="wsd", decay=0.2)
    assert stable[:81] == [1.0] * 81 and stable[90] == pytest.approx(0.5) and stable[-1] == pytest.approx(0.05)


def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest(tiny):
    model = ls.build(tiny)
    matrices, others = split_parameters(model)
    assert {id(p) for p in [*matrices, *others]} == {id(p) for p in model.parameters()}
    assert len(matrices) == 4 * tiny.num_layers and all(p.dim() == 2 for p in matrices)
    assert any(p is model.embedding.weight for p in others)
    adamw, muon = Optimizers(model, TrainingConfig(optimizer="muon")).parts
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, torch.optim.Muon)
    assert sum(len(g["params"]) for g in muon.param_groups) == len(matrices)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_moves_every_parameter_by_about_the_learning_rate(tiny, ids_BT, optimizer):
    model = ls.build(tiny, seed=0)
    optimizers = Optimizers(model, TrainingConfig(optimizer=optimizer, weight_decay=0.0))
    before = [p.detach().clone() for p in model.parameters()]
    model(ids_BT, ids_BT, ls.Objective(ls.ObjectiveConfig())).loss.backward()
    optimizers.step(1e-3)
    moved = [(p - q).square().mean().sqrt().item() for p, q in zip(model.parameters(), before, strict=True)]
    assert all(0 < distance < 2e-3 for distance in moved)


def test_clipping_scales_all_gradients_together():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients(parameters, 1.0).item() == pytest.approx(5.0)
    assert parameters[0].grad[0].item() == pytest.approx(0.6)
