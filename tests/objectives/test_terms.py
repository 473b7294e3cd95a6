"""Loss terms that see scale: the paper's normalisation, and gradients through any readout."""

from __future__ import annotations

import pytest
import torch

import loopscope as ls
from loopscope.errors import ConfigError
from loopscope.objectives.terms import ExitEntropy


def test_the_penalty_is_lambda_times_mean_squared_scale_over_loops_tokens_and_width():
    states_KBTD = torch.stack([torch.full((2, 3, 5), 2.0), torch.full((2, 3, 5), 4.0)])
    assert ls.norm_penalty(states_KBTD, weight=0.01).item() == pytest.approx(0.01 * (4 + 16) / 2)
    assert ls.norm_penalty(list(states_KBTD), weight=0.01).item() == pytest.approx(0.01 * (4 + 16) / 2)


def test_the_penalty_does_not_grow_with_width_batch_or_loops():
    narrow, wide = torch.ones(2, 1, 3, 8), torch.ones(7, 4, 5, 64)
    assert ls.norm_penalty(narrow, 0.1).item() == pytest.approx(ls.norm_penalty(wide, 0.1).item())


def test_the_penalty_has_a_purely_radial_gradient():
    h_KBTD = torch.randn(2, 1, 3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(ls.norm_penalty(h_KBTD, 0.5), h_KBTD)
    torch.testing.assert_close(gradient, 2 * 0.5 * h_KBTD.detach() / h_KBTD.numel())


def test_the_anchor_pulls_scale_to_its_target_from_both_sides():
    direction = torch.randn(1, 1, 1, 16)
    direction = direction / direction.square().mean().sqrt()
    for scale, sign in ((0.5, -1), (1.5, 0), (4.0, 1)):
        h_KBTD = (scale * direction).requires_grad_()
        loss = ls.scale_anchor(h_KBTD, weight=2.0, target=1.5)
        assert loss.item() == pytest.approx(2.0 * (scale - 1.5) ** 2, rel=1e-5, abs=1e-9)
        (gradient,) = torch.autograd.grad(loss, h_KBTD)
        radial = (gradient * direction).sum().item()
        assert (radial > 1e-3) - (radial < -1e-3) == sign


def test_the_anchor_has_a_finite_gradient_at_the_zero_state():
    h_KBTD = torch.zeros(1, 1, 1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(ls.scale_anchor(h_KBTD, 1.0, 1.0), h_KBTD)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), float("-inf"), -1.0, "much"])
@pytest.mark.parametrize("term", [ls.NormPenalty, ls.ScaleAnchor, ls.ZLoss, ExitEntropy])
def test_a_weight_that_is_no_finite_number_or_negative_is_refused_when_the_term_is_made(term, weight):
    with pytest.raises(ConfigError, match=rf"{term.__name__}: weight = .*(finite|negative)"):
        term(weight)


@pytest.mark.parametrize("target", [float("nan"), float("inf"), 0.0, -1.0])
def test_an_anchor_needs_a_scale_to_pull_to(target):
    with pytest.raises(ConfigError, match="ScaleAnchor: target"):
        ls.ScaleAnchor(0.1, target)


def test_a_term_of_ones_own_may_reward_if_it_says_so_and_is_checked_by_the_audit(tiny, ids_BT):
    class Own(ls.Term):
        name = "own"

        def __init__(self, weight):
            self.weight = weight

        def value(self, seen):
            return self.weight * seen.states[-1].mean()

    class Reward(Own):
        may_reward = True

    model, options = ls.build(tiny, seed=0), ls.AuditOptions(states=1, prefix=4, rollout=4)
    for term, sentence in ((Own(-1.0), "negative"), (Own(float("nan")), "finite"), (Reward(float("inf")), "finite")):
        with pytest.raises(ConfigError, match=sentence):
            ls.audit(model, [ids_BT], terms=[term], options=options)
    assert ls.audit(model, [ids_BT], terms=[Reward(-1.0)], options=options).variable("scale").verdict == "blind"
