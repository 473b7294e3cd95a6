"""One loop: Lemma 2, shared weights, and what each part of the recurrence does to the state."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import loopscope as ls
from loopscope.model.recurrence import INJECTIONS
from loopscope.protocol import LoopState, run_loops


def unit_rms(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


def one_loop_from(model, ids_BT, u_BTD, scale):
    """(scale increment, predicted increment ã/d, angular step × scale, ‖b_⊥‖_rms) of one loop from h = s·u."""
    state = model.embed(ids_BT).with_h(scale * u_BTD)
    new_BTD = model.loop(state, 2).h_BTD
    step_BTD = new_BTD - scale * u_BTD
    new_scale = new_BTD.square().mean(-1).sqrt()
    predicted = (u_BTD * step_BTD).mean(-1)  # ã/d: the factor d is in the mean
    angular = (unit_rms(new_BTD) - u_BTD).square().mean(-1).sqrt() * scale
    tangential = (step_BTD - predicted[..., None] * u_BTD).square().mean(-1).sqrt()
    return new_scale - scale, predicted, angular, tangential


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_lemma_2_scale_is_carried_and_the_error_of_its_prediction_falls_as_one_over_s(tiny, ids_BT, norm):
    model = ls.build(replace(tiny, norm=norm), seed=0).double().eval()
    u_BTD = unit_rms(torch.randn(*ids_BT.shape, tiny.width, dtype=torch.float64))
    scale_errors, angle_errors = [], []
    for scale in (1e2, 1e3, 1e4):
        increment, predicted, angular, tangential = one_loop_from(model, ids_BT, u_BTD, scale)
        assert predicted.abs().median() > 1e-3, "a loop that writes nothing radially would prove nothing"
        scale_errors.append((increment - predicted).abs().mean().item())
        angle_errors.append((angular - tangential).abs().mean().item())
    for errors in (scale_errors, angle_errors):
        assert 8 < errors[0] / errors[1] < 12.5
        assert 8 < errors[1] / errors[2] < 12.5


def test_lemma_2_angular_motion_slows_down_as_scale_grows(tiny, ids_BT):
    """The step itself is about the same at every scale, so direction moves by 1/s."""
    model = ls.build(tiny, seed=0).double().eval()
    u_BTD = unit_rms(torch.randn(*ids_BT.shape, tiny.width, dtype=torch.float64))
    _, _, at_100, _ = one_loop_from(model, ids_BT, u_BTD, 1e2)
    _, _, at_10000, _ = one_loop_from(model, ids_BT, u_BTD, 1e4)
    torch.testing.assert_close(at_100, at_10000, rtol=0.1, atol=0)


def test_the_exact_increment_of_one_sublayer_follows_pythagoras(tiny, ids_BT):
    """s' = √((s + a)² + ‖b_⊥‖²): exact, at any scale, because a pre-norm branch sees only the direction."""
    model = ls.build(tiny, seed=0).double().eval()
    layer = model.recurrence.core.layers[0]
    u_BTD = unit_rms(torch.randn(*ids_BT.shape, tiny.width, dtype=torch.float64))
    branch_BTD = layer.feed_forward(1e6 * u_BTD, layer.feed_forward_norms.norm)
    radial = (branch_BTD * u_BTD).mean(-1)
    tangential = (branch_BTD - radial[..., None] * u_BTD).square().mean(-1)
    for scale in (0.5, 3.0, 50.0):
        stream_BTD = scale * u_BTD
        new_BTD = layer.feed_forward_norms.after(
            stream_BTD, layer.feed_forward(stream_BTD, layer.feed_forward_norms.norm)
        )
        expected = ((scale + radial) ** 2 + tangential).sqrt()
        torch.testing.assert_close(new_BTD.square().mean(-1).sqrt(), expected, rtol=1e-5, atol=1e-5)


def test_loops_share_weights_gradients_of_unrolled_copies_add_up(tiny, ids_BT):
    model = ls.build(tiny, seed=0).double()
    shared = model.recurrence.core.layers[1].feed_forward.out.weight
    (expected,) = torch.autograd.grad(run_loops(model, ids_BT).states[-1].h_BTD.square().sum(), shared)
    state = model.embed(ids_BT)
    copies = [copy.deepcopy(model.recurrence) for _ in range(tiny.num_loops)]
    for k, recurrence in enumerate(copies, start=1):
        state = recurrence(state, k)
    weights = [recurrence.core.layers[1].feed_forward.out.weight for recurrence in copies]
    gradients = torch.autograd.grad(state.h_BTD.square().sum(), weights)
    torch.testing.assert_close(sum(gradients), expected)
    assert all(gradient.norm() > 0 for gradient in gradients)


def test_more_loops_need_no_more_parameters(tiny):
    count = [sum(p.numel() for p in ls.build(replace(tiny, num_loops=n)).parameters()) for n in (2, 9)]
    assert count[0] == count[1]


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_an_inter_loop_norm_removes_scale_from_every_loop_but_the_first(tiny, ids_BT, kind):
    model = ls.build(replace(tiny, inter_loop_norm=kind), seed=0).double().eval()
    state = run_loops(model, ids_BT).states[1]
    bigger = state.with_h(1000 * state.h_BTD)
    torch.testing.assert_close(model.loop(bigger, 2).h_BTD, model.loop(state, 2).h_BTD, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model.loop(bigger, 1).h_BTD, model.loop(state, 1).h_BTD, rtol=0.1)


def test_the_state_is_cut_before_the_inter_loop_norm(tiny, ids_BT):
    """Reported norms are those of what the core left, not of what the norm made of it."""
    config = replace(tiny, inter_loop_norm="rmsnorm")
    normed, plain = ls.build(config, seed=0).eval(), ls.build(tiny, seed=0).eval()
    plain.load_state_dict(normed.state_dict(), strict=False)
    torch.testing.assert_close(run_loops(normed, ids_BT).states[1].h_BTD, run_loops(plain, ids_BT).states[1].h_BTD)


def test_a_shared_readout_norm_is_one_module(tiny):
    config = replace(tiny, inter_loop_norm="rmsnorm", share_readout_norm=True)
    model = ls.build(config)
    assert model.recurrence.inter_loop_norm is model.readout_map.norm
    separate = ls.build(replace(config, share_readout_norm=False))
    assert len(list(separate.parameters())) == len(list(model.parameters())) + 1


def test_sum_norm_placement_lets_no_scale_through_a_layer(tiny, ids_BT):
    scales = {}
    for placement in ("pre", "sum", "sandwich"):
        model = ls.build(replace(tiny, norm_placement=placement), seed=0).double().eval()
        state = model.embed(ids_BT)
        state = state.with_h(1e4 * state.h_BTD)
        scales[placement] = model.loop(state, 1).h_BTD.square().mean(-1).sqrt().mean().item()
    assert scales["sum"] == pytest.approx(1.0, rel=1e-3)
    assert scales["pre"] > 1e3 and scales["sandwich"] > 1e3


def test_a_sandwich_branch_writes_a_bounded_amount(tiny, ids_BT):
    """Two sublayers a layer, two layers: at most four unit-RMS writes a loop, however large the weights."""
    model = ls.build(replace(tiny, norm_placement="sandwich"), seed=0).double().eval()
    with torch.no_grad():
        for layer in model.recurrence.core.layers:
            layer.feed_forward.out.weight *= 1e4
    state = model.embed(ids_BT)
    written = (model.loop(state, 1).h_BTD - state.h_BTD).square().mean(-1).sqrt()
    assert written.max() <= 4.0 + 1e-6


LOOPS_AND_BEYOND = (1, 2, 3, 5)  # the tiny model is trained at three loops


@pytest.mark.parametrize("k", LOOPS_AND_BEYOND)
def test_every_loop_norms_then_damps_then_injects_then_adds_its_embedding(tiny, ids_BT, k):
    """All parts at once, in the order of the module's docstring; norm and damping spare the first loop."""
    parts = {"inter_loop_norm": "rmsnorm", "spectral_damping": True, "injection": "concat", "loop_embedding": True}
    model = ls.build(replace(tiny, **parts), seed=0).double().eval()
    recurrence, state = model.recurrence, model.embed(ids_BT)
    e_BTD, h_BTD = state.context.input_BTD, 3 * torch.randn_like(state.h_BTD)
    expected = h_BTD if k == 1 else recurrence.inter_loop_norm(h_BTD) * recurrence.damping.sigmoid()
    expected = recurrence.injection(expected, e_BTD)
    expected = expected + recurrence.loop_embedding.weight[min(k, 3) - 1]
    torch.testing.assert_close(recurrence(state.with_h(h_BTD), k).h_BTD, recurrence.core(expected, None))


@pytest.mark.parametrize("k", LOOPS_AND_BEYOND)
def test_spectral_damping_scales_the_carried_state_by_its_sigmoid_between_loops_only(tiny, k):
    """The paper's acts between loops: K − 1 factors over K loops, and loop 1 reads its input as it is."""
    recurrence = ls.build(replace(tiny, spectral_damping=True)).recurrence
    h_BTD = torch.randn(1, 2, tiny.width)
    with torch.no_grad():
        recurrence.damping.fill_(-1.0)
    factor = 1.0 if k == 1 else torch.tensor(-1.0).sigmoid()
    torch.testing.assert_close(recurrence.open(h_BTD, h_BTD, k), factor * h_BTD)


def test_the_diagonal_injection_contracts_every_channel_for_any_parameters():
    injection = INJECTIONS["diagonal"](8)
    with torch.no_grad():
        for parameter in (injection.log_rate, injection.step_bias):
            parameter.copy_(torch.linspace(-4, 4, 8))
    difference = injection(torch.ones(8), torch.zeros(8)) - injection(torch.zeros(8), torch.zeros(8))
    assert ((difference >= 0) & (difference < 1)).all()
    assert difference[0] > 0.99 and difference[-1] < 0.01


@pytest.mark.parametrize("k", LOOPS_AND_BEYOND)
@pytest.mark.parametrize("kind", list(INJECTIONS))
def test_every_injection_lets_each_loop_read_the_input_again(tiny, ids_BT, kind, k):
    """From a zero state, only an injection can tell two inputs apart."""
    model = ls.build(replace(tiny, injection=kind, state_init="zeros"), seed=0).eval()
    first, second = model.embed(ids_BT), model.embed((ids_BT + 1) % 37)
    assert not first.h_BTD.any() and not second.h_BTD.any()
    assert not torch.allclose(model.loop(first, k).h_BTD, model.loop(second, k).h_BTD)


def test_injections_compute_their_equations():
    h, e = torch.randn(3, 4), torch.randn(3, 4)
    concat, gated, diagonal = (INJECTIONS[kind](4) for kind in ("concat", "gated", "diagonal"))
    both = torch.cat([h, e], -1)
    torch.testing.assert_close(INJECTIONS["add"](4)(h, e), h + e)
    torch.testing.assert_close(concat(h, e), both @ concat.project.weight.T)
    gate = torch.sigmoid(both @ gated.gate.weight.T)
    torch.testing.assert_close(gated(h, e), gate * h + (1 - gate) * e)
    step = nn.functional.softplus(diagonal.step_bias)
    expected = h * torch.exp(-step * torch.exp(diagonal.log_rate)) + step * (e @ diagonal.project.weight.T)
    torch.testing.assert_close(diagonal(h, e), expected)


@pytest.mark.parametrize("k", LOOPS_AND_BEYOND)
def test_each_loop_adds_its_own_embedding_and_the_last_serves_beyond(tiny, k):
    recurrence = ls.build(replace(tiny, loop_embedding=True), seed=0).recurrence
    zeros_BTD = torch.zeros(1, 2, tiny.width)
    own_D = recurrence.loop_embedding.weight[min(k, 3) - 1]
    assert torch.equal(recurrence.open(zeros_BTD, zeros_BTD, k), own_D.expand(1, 2, -1))


def test_a_loop_changes_neither_its_input_nor_the_context(tiny, ids_BT):
    model = ls.build(replace(tiny, injection="add"), seed=0).eval()
    state = model.embed(ids_BT)
    before = LoopState(state.h_BTD.clone(), context=state.context.input_BTD.clone())
    model.loop(state, 1)
    assert torch.equal(state.h_BTD, before.h_BTD)
    assert torch.equal(state.context.input_BTD, before.context)
