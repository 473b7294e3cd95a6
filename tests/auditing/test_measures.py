"""Visibility, activity and interventions measure what the lemmas say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.auditing.activity import FAR, destination, lemma_2, loop_activity
from loopscope.auditing.interventions import clamped as clamp
from loopscope.auditing.interventions import (
    frozen_at_loop_1,
    growth_removed,
    intervened_cross_entropy,
    mean_clamped,
    rewritten_states,
    scale_swapped,
)
from loopscope.auditing.visibility import (
    alpha_sweep,
    field_shares,
    mean_field,
    raw_readout_control,
    scale_curvatures,
    scale_field,
    token_cross_entropy,
)
from loopscope.errors import ProtocolError
from loopscope.protocol import LoopState


def traced(tiny, ids_BT, **changes):
    model = ls.build(replace(tiny, **changes), seed=0).double().eval()
    return model, ls.run_loops(model, ids_BT)


@pytest.mark.parametrize(("readout", "scale", "mean"), [("rmsnorm", 0, 1), ("layernorm", 0, 0), ("raw", 1, 1)])
def test_a_share_is_zero_exactly_where_the_readout_hides_the_field(tiny, ids_BT, readout, scale, mean):
    model, trace = traced(tiny, ids_BT, readout=readout)
    for field, seen in ((scale_field, scale), (mean_field, mean)):
        shares = field_shares(model, trace.states[2], 2, ids_BT, field).abs()
        assert (shares.median() > 1e-2) if seen else (shares.max() < 1e-5)


def test_a_share_counts_no_ignored_target(tiny, ids_BT):
    model, trace = traced(tiny, ids_BT, readout="raw")
    targets_BT = ids_BT.clone()
    targets_BT[:, 3:] = -100
    assert field_shares(model, trace.states[1], 1, targets_BT).shape == (2 * 3,)
    assert token_cross_entropy(torch.randn(2, 12, 37), targets_BT)[:, 3:].abs().sum() == 0


def test_a_share_is_the_cosine_with_the_gradient_of_this_exit_alone(tiny, ids_BT):
    model, trace = traced(tiny, ids_BT, readout="raw")
    h_BTD = trace.states[2].h_BTD.detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy((h_BTD @ model.head.T).flatten(0, 1), ids_BT.flatten())
    (gradient,) = torch.autograd.grad(loss, h_BTD)
    expected = torch.cosine_similarity(gradient, h_BTD, dim=-1, eps=0.0).flatten()
    torch.testing.assert_close(field_shares(model, trace.states[2], 2, ids_BT), expected)


def test_the_control_is_about_chance_for_a_raw_readout(tiny, ids_BT):
    _, trace = traced(tiny, ids_BT)
    assert 0.2 / math.sqrt(32) < raw_readout_control(trace.states[3].h_BTD, ids_BT) < 0.9


def test_a_readout_that_detaches_is_named(ids_BT):
    model = ls.adapt(
        embed=lambda ids: torch.randn(*ids.shape, 8), loop=lambda h, k: h, readout=lambda h, k: h.detach(), num_loops=1
    )
    with pytest.raises(ProtocolError, match="readout at loop 1 passes no gradient"):
        field_shares(model, model.embed(ids_BT % 8), 1, ids_BT % 8)


def test_the_sweep_is_flat_through_rmsnorm_and_sharp_through_raw(tiny, ids_BT):
    for readout, flat in (("rmsnorm", True), ("raw", False)):
        model, trace = traced(tiny, ids_BT, readout=readout)
        ce = alpha_sweep(model, trace.states[3], 3, ids_BT, (0.1, 1.0, 10.0))
        assert (max(ce) - min(ce) < 1e-3) == flat
        own = token_cross_entropy(model.readout(trace.states[3], 3), ids_BT).mean().detach()
        assert ce[1] == pytest.approx(float(own))


def test_the_response_of_a_raw_head_is_the_variance_of_its_logits_and_what_they_are_above_the_target():
    """CE(α) = ln Σ exp(αz) − αz_y, so d²CE/d(ln α)² = Var_p z + E_p z − z_y at α = 1; of two even logits ±z, z²."""
    head_VD = 3 * torch.randn(11, 8, dtype=torch.float64)
    ids_BT, h_BTD = torch.randint(11, (2, 5)), torch.randn(2, 5, 8, dtype=torch.float64)
    model = ls.adapt(embed=lambda ids: h_BTD, loop=lambda h, k: h, readout=lambda h, k: h @ head_VD.T, num_loops=1)
    z_BTV = h_BTD @ head_VD.T
    p_BTV = z_BTV.softmax(-1)
    mean_BT = (p_BTV * z_BTV).sum(-1)
    variance_BT = (p_BTV * z_BTV.square()).sum(-1) - mean_BT.square()
    expected_BT = variance_BT + mean_BT - z_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
    targets_BT = ids_BT.clone()
    targets_BT[0, :2] = -100
    found = scale_curvatures(model, LoopState(h_BTD, context=model.embed(ids_BT).context), 1, targets_BT)
    torch.testing.assert_close(found, expected_BT.flatten()[2:], rtol=1e-6, atol=1e-6)


def test_the_response_of_a_raw_head_at_its_best_scale_is_there_although_its_gradient_is_not():
    """Two tokens, z = ±a with the likelier one right in a share p of cases: at a = ½ logit p the mean slope is zero."""
    share = 0.75
    a = math.log(share / (1 - share)) / 2
    h_BTD = torch.full((1, 4, 1), a, dtype=torch.float64)
    head_VD = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    model = ls.adapt(embed=lambda ids: h_BTD, loop=lambda h, k: h, readout=lambda h, k: h @ head_VD.T, num_loops=1)
    state, targets_BT = model.embed(torch.zeros(1, 4, dtype=torch.int64)), torch.tensor([[0, 0, 0, 1]])
    ce = alpha_sweep(model, state, 1, targets_BT, (0.999, 1.0, 1.001))
    assert abs(ce[2] - ce[0]) < 1e-9, "the best scale"
    found = scale_curvatures(model, state, 1, targets_BT)
    assert float(found.mean()) == pytest.approx(4 * share * (1 - share) * a**2, rel=1e-6), "Var_p z alone is left"


def test_the_response_through_rmsnorm_is_what_eps_leaks(tiny, ids_BT):
    """−2·eps/s²·(E_p z − z_y) to leading order."""
    model, trace = traced(tiny, ids_BT, readout="rmsnorm", norm_eps=1e-4)
    h_BTD = trace.states[2].h_BTD
    z_BTV = model.readout(trace.states[2], 2)
    above_BT = (z_BTV.softmax(-1) * z_BTV).sum(-1) - z_BTV.gather(-1, ids_BT[..., None]).squeeze(-1)
    expected_BT = -2 * 1e-4 / h_BTD.square().mean(-1) * above_BT
    found = scale_curvatures(model, trace.states[2], 2, ids_BT)
    torch.testing.assert_close(found, expected_BT.flatten(), rtol=0.01, atol=1e-5)
    assert scale_curvatures(model.float(), trace.states[2].with_h(h_BTD.float()), 2, ids_BT) is None, "needs float64"


def test_activity_splits_an_update_into_its_radial_and_tangential_part():
    """h = 3·√d·e along one axis, update 0.5 along and 2 across it (RMS): s' = √(3.5² + 2²), ã/d = 0.5."""
    width = 16
    along, across = torch.zeros(2, 1, 1, width, dtype=torch.float64)
    along[..., 0], across[..., 1] = math.sqrt(width), math.sqrt(width)
    h_BTD = 3 * along
    at = loop_activity(1, h_BTD, h_BTD + 0.5 * along + 2 * across)
    assert at.scale == pytest.approx(3) and at.norm == pytest.approx(3 * math.sqrt(width))
    assert at.predicted_increment == pytest.approx(0.5) and at.radial_update == pytest.approx(0.5)
    assert at.tangential_update == pytest.approx(2)
    assert at.radial_increment == pytest.approx(math.hypot(3.5, 2) - 3)
    turned = math.atan2(2, 3.5)
    assert at.angular_step == pytest.approx(2 * math.sin(turned / 2))
    assert at.angular_step_times_scale == pytest.approx(3 * at.angular_step)


def test_the_prediction_becomes_exact_as_scale_grows(tiny, ids_BT):
    """Lemma 2: the error of ã/d falls like 1/s."""
    model, trace = traced(tiny, ids_BT)
    errors = []
    for factor in (10.0, 100.0):
        state = trace.states[1].with_h(factor * trace.states[1].h_BTD)
        at = loop_activity(1, state.h_BTD, model.loop(state, 2).h_BTD)
        errors.append(abs(at.radial_increment - at.predicted_increment))
    assert errors[1] < 0.2 * errors[0]


def test_lemma_2_foretells_exactly_a_loop_that_only_turns_or_only_grows():
    """F(h) = h + a·u: s' = s + a. F(h) = h + b_⊥(u) in the limit of large s: ‖u' − u‖·s' = ‖b_⊥‖."""
    h_BTD = 50 * torch.randn(2, 3, 16, dtype=torch.float64)

    def unit(h):
        return h / h.square().mean(-1, keepdim=True).sqrt()

    def grow(h):
        return h + 0.7 * unit(h)

    tested = lemma_2(h_BTD, grow(h_BTD), grow(FAR * h_BTD))
    assert tested.tokens == 6
    assert tested.scale_moved == pytest.approx(6 * 0.7) and tested.scale_missed < 1e-9
    assert tested.direction_moved < 1e-9

    def turn(h):
        u = unit(h)
        across = u.roll(1, -1) - (u * u.roll(1, -1)).mean(-1, keepdim=True) * u
        return h + 2.0 * unit(across)

    tested = lemma_2(h_BTD, turn(h_BTD), turn(FAR * h_BTD))
    assert tested.direction_moved == pytest.approx(6 * 2.0, rel=0.01)
    assert tested.direction_missed < 0.01 * tested.direction_moved, "what it misses is of second order in ‖b⊥‖/s"


def test_lemma_2_is_foretold_from_elsewhere_and_misses_a_loop_that_reads_the_scale():
    """F(h) = 1.1·h reads the scale: at a hundred times of it the update is a hundred times as large."""
    h_BTD = torch.randn(2, 3, 16, dtype=torch.float64)
    tested = lemma_2(h_BTD, 1.1 * h_BTD, 1.1 * FAR * h_BTD)
    assert tested.tokens == 6 and tested.scale_missed == pytest.approx(99 * tested.scale_moved)


def test_lemma_2_counts_tokens_whose_scale_is_ten_times_the_turn_and_scales_by_the_next_state():
    """Width 2, h = s·√2·(1, 0), update a along and b across: at s = 9.9 b nothing is counted, at 10.1 b it is."""
    along, across = (math.sqrt(2) * torch.eye(2, dtype=torch.float64)[n] for n in (0, 1))
    b, a = 1.0, 30.0
    h_BTD = torch.stack([9.9 * along, 10.1 * along]).view(1, 2, 2)
    update = a * along + b * across
    tested = lemma_2(h_BTD, h_BTD + update, FAR * h_BTD + update)
    assert tested.tokens == 1
    turned = 2 * math.sin(math.atan2(b, 10.1 + a) / 2) * math.hypot(10.1 + a, b)
    assert tested.direction_moved == pytest.approx(turned)
    assert tested.direction_missed < 1e-3, "with s_k for s_{k+1} three quarters would be missed"


def test_an_audit_follows_lemma_2_over_its_rollout(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    result = ls.audit(model, [ids_BT], options=ls.AuditOptions(states=1, prefix=6, rollout=16))
    tested = [loop.lemma_2 for loop in result.loops]
    assert tested[-1] is None, "there is no loop after the last"
    assert sum(one.tokens for one in tested[:-1]) > 100
    assert sum(one.scale_missed for one in tested[:-1]) < 0.1 * sum(one.scale_moved for one in tested[:-1])
    assert sum(one.direction_missed for one in tested[:-1]) < 0.1 * sum(one.direction_moved for one in tested[:-1])
    assert [loop.scale_curvature is not None for loop in result.loops] == [True] * 3 + [False] * 13


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda h: 0.5 * h + 1, "fixed point"),
        (lambda h: -h, "cycle"),
        (lambda h: 1.1 * h + 1, "drift"),
        (lambda h: h + 1, "drift"),
    ],
)
def test_motion_tells_a_fixed_point_a_cycle_and_a_drift_apart(step, kind):
    h_BTD = 1 + torch.rand(2, 3, 4)
    states = [LoopState(h_BTD)]
    for _ in range(30):
        states.append(LoopState(step(states[-1].h_BTD)))
    assert destination(states) == kind


def test_clamps_do_what_they_say(tiny, ids_BT):
    model, _ = traced(tiny, ids_BT)
    frozen = rewritten_states(model, ids_BT, 3, frozen_at_loop_1)
    norms = [state.h_BTD.norm(dim=-1) for state in frozen]
    torch.testing.assert_close(norms[3], norms[1])
    means = [state.h_BTD.mean(-1) for state in rewritten_states(model, ids_BT, 3, mean_clamped)]
    torch.testing.assert_close(means[3], means[1])
    without = rewritten_states(model, ids_BT, 3, growth_removed)
    update, unit = without[2].h_BTD - without[1].h_BTD, without[1].h_BTD
    assert (update * unit).sum(-1).abs().max() < 1e-9 and update.norm() > 0.1
    swapped = scale_swapped([], torch.tensor([[[3.0, 0.0], [0.0, 5.0], [1.0, 0.0]]]))
    torch.testing.assert_close(swapped, torch.tensor([[[3.0, 0.0], [0.0, 3.0], [5.0, 0.0]]]))


def test_an_intervention_that_changes_nothing_costs_nothing(tiny, ids_BT):
    model, _ = traced(tiny, ids_BT)
    untouched = intervened_cross_entropy(model, ids_BT, ids_BT, 3)
    assert intervened_cross_entropy(model, ids_BT, ids_BT, 3, lambda _, h: h) == untouched
    assert intervened_cross_entropy(model, ids_BT, ids_BT, 3, lambda _, h: -h) != untouched


def test_the_clamped_model_is_the_frozen_run_and_its_scale_is_out_of_the_loop(tiny, ids_BT):
    model, _ = traced(tiny, ids_BT, vocab_size=80)
    clamped = clamp(model)
    torch.testing.assert_close(
        ls.run_loops(clamped, ids_BT).states[3].h_BTD, rewritten_states(model, ids_BT, 3, frozen_at_loop_1)[3].h_BTD
    )
    result = ls.audit(clamped, [ids_BT], options=ls.AuditOptions(states=2, prefix=6, rollout=4))
    assert result.verdict == "controlled"
    assert [row.unreachable for row in result.blind_directions.loops[1:]] == [1], "no loop can write a clamped norm"
