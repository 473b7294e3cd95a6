"""Placement: which loops a loss supervises, how deep a step goes, and what the parts of the loss are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loopscope as ls
from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, DataError, UnsupportedError
from loopscope.objectives.placement import Objective, exit_distribution, supervised_loops


def batch(ids_BT):
    return ids_BT[:, :-1], ids_BT[:, 1:].contiguous()


def plain_ce(model, ids_BT):
    """CE at every loop, by hand."""
    inputs, targets = batch(ids_BT)
    trace = ls.run_loops(model, inputs)
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(model.readout(trace.states[k], k).flatten(0, 1), targets.flatten())
            for k in range(1, model.num_loops + 1)
        ]
    )


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({"placement": "terminal"}, [0, 0, 1]),
        ({"placement": "per-loop"}, [1 / 3, 1 / 3, 1 / 3]),
        ({"placement": "weighted", "loop_weights": (1.0, 0.0, 3.0)}, [0.25, 0, 0.75]),
        ({"placement": "last-n", "last_n": 2}, [0, 0.5, 0.5]),
    ],
)
def test_the_loss_is_the_weighted_sum_of_the_supervised_loops(tiny, ids_BT, fields, weights):
    model = ls.build(tiny, seed=0).double()
    ce_K = plain_ce(model, ids_BT)
    result = model(*batch(ids_BT), Objective(ObjectiveConfig(**fields)))
    torch.testing.assert_close(result.loss, (ce_K * torch.tensor(weights)).sum())
    assert result.supervised == [k for k, weight in enumerate(weights, start=1) if weight]
    torch.testing.assert_close(result.ce_K, ce_K[[k - 1 for k in result.supervised]].detach())
    assert len(result.norms_K) == 3


@pytest.mark.parametrize("placement", ["terminal", "per-loop", "gated"])
def test_fused_and_reference_objectives_give_the_same_training_step(tiny, ids_BT, placement):
    entropy = 0.1 if placement == "gated" else 0.0
    config = ObjectiveConfig(
        placement=placement, exit_entropy=entropy, z_loss=1e-3, norm_penalty=0.01, scale_anchor=0.1
    )
    model = ls.build(replace(tiny, exit_gate=placement == "gated"), seed=0)
    gradients = []
    for fused in (True, False):
        model.zero_grad()
        model(*batch(ids_BT), Objective(config, fused=fused)).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item() < 1e-5


def test_the_parts_add_up_to_the_loss(tiny, ids_BT):
    config = ObjectiveConfig(norm_penalty=0.3, scale_anchor=0.2, anchor_scale=2.0)
    model = ls.build(tiny, seed=0).double()
    result = model(*batch(ids_BT), Objective(config))
    states = [state.h_BTD for state in ls.run_loops(model, batch(ids_BT)[0]).states[1:]]
    torch.testing.assert_close(result.terms["norm_penalty"], ls.norm_penalty(states, 0.3).detach())
    torch.testing.assert_close(result.terms["scale_anchor"], ls.scale_anchor(states, 0.2, 2.0).detach())
    torch.testing.assert_close(result.loss.detach(), result.ce_K.mean() + sum(result.terms.values()))


def test_the_penalty_makes_scale_visible_through_a_norm_readout(tiny, ids_BT):
    """Radial gradient of the loss at the last state: nothing without the penalty, something with it."""
    model = ls.build(tiny, seed=0).double()
    shares = []
    for penalty in (0.0, 1.0):
        states = []
        hook = model.recurrence.register_forward_hook(lambda module, args, state, out=states: out.append(state.h_BTD))
        result = model(
            *batch(ids_BT), Objective(ObjectiveConfig(placement="terminal", norm_penalty=penalty), fused=False)
        )
        hook.remove()
        (gradient,) = torch.autograd.grad(result.loss, states[-1])
        radial = (gradient * states[-1]).sum(-1).abs()
        shares.append((radial / (gradient.norm(dim=-1) * states[-1].norm(dim=-1))).median().item())
    assert shares[0] < 1e-4 < 1e-2 < shares[1]


def test_gated_exits_weight_each_loop_by_its_exit_probability(tiny, ids_BT):
    """Σ p_k·CE_k − w·H(p), with p by hand: λ_1, λ_2(1 − λ_1), and the remainder."""
    model = ls.build(replace(tiny, exit_gate=True), seed=0).double()
    inputs, targets = batch(ids_BT)
    trace = ls.run_loops(model, inputs)
    features = [model.features(trace.states[k], k).flatten(0, 1) for k in (1, 2, 3)]
    leave_1, leave_2 = (torch.sigmoid(model.exit_gate(f)).squeeze(-1) for f in features[:2])
    p = torch.stack([leave_1, (1 - leave_1) * leave_2, (1 - leave_1) * (1 - leave_2)])
    ce = torch.stack(
        [torch.nn.functional.cross_entropy(f @ model.head.T, targets.flatten(), reduction="none") for f in features]
    )
    expected = (p * ce).sum(0).mean() - 0.05 * -(p * p.log()).sum(0).mean()
    result = model(inputs, targets, Objective(ObjectiveConfig(placement="gated", exit_entropy=0.05)))
    torch.testing.assert_close(result.loss, expected)
    ours, theirs = (torch.autograd.grad(loss, model.exit_gate.weight)[0] for loss in (result.loss, expected))
    torch.testing.assert_close(ours, theirs)
    assert ours.norm() > 0


@given(logits=st.lists(st.floats(-200, 200), min_size=1, max_size=6))
def test_exit_probabilities_sum_to_one_even_when_gates_saturate(logits):
    log_p = exit_distribution(torch.tensor(logits, dtype=torch.float64)[:, None])
    assert log_p.exp().sum().item() == pytest.approx(1.0)
    assert not log_p.isnan().any()


def test_a_saturated_gate_has_finite_gradients():
    logits = torch.tensor([[200.0], [-200.0], [0.0]], requires_grad=True)
    log_p = exit_distribution(logits)
    entropy = -(log_p.exp() * log_p).sum()
    (gradient,) = torch.autograd.grad(entropy, logits)
    assert entropy.isfinite() and gradient.isfinite().all()


def test_the_entropy_of_exits_counts_only_tokens_that_have_a_target(tiny, ids_BT):
    model = ls.build(replace(tiny, exit_gate=True), seed=0).double()
    objective = Objective(ObjectiveConfig(placement="gated", exit_entropy=1.0))
    inputs, targets = batch(ids_BT)
    padded = torch.cat([targets[:, :5], torch.full_like(targets[:, 5:], -100)], dim=1)
    short = model(inputs[:, :5], targets[:, :5].contiguous(), objective)
    torch.testing.assert_close(model(inputs, padded, objective).terms, short.terms)


def test_a_model_with_its_own_readout_is_trained_through_it(tiny, ids_BT):
    """A soft cap on the logits must be in the loss that is minimised."""

    class Capped(ls.LoopedLM):
        def readout(self, state, k):
            return 3 * torch.tanh(self.features(state, k) @ self.head.T / 3)

    model = Capped(tiny).double()
    expected = plain_ce(model, ids_BT)
    result = model(*batch(ids_BT), Objective(ObjectiveConfig()))
    torch.testing.assert_close(result.ce_K, expected.detach())
    torch.testing.assert_close(result.loss, expected.mean())


def test_an_adapted_model_can_be_trained(ids_BT):
    table = torch.nn.Embedding(37, 8)
    model = ls.adapt(embed=table, loop=lambda h, k: h + h.tanh(), readout=lambda h, k: h @ table.weight.T, num_loops=2)
    Objective(ObjectiveConfig(norm_penalty=0.1))(model, *batch(ids_BT)).loss.backward()
    assert table.weight.grad.norm() > 0


def test_thinned_exits_estimate_the_same_loss_and_gradient(tiny, ids_BT):
    """Mean over many draws of positions, against all positions."""
    model = ls.build(tiny, seed=0).double()
    weight = model.recurrence.core.layers[0].feed_forward.out.weight
    full = model(*batch(ids_BT), Objective(ObjectiveConfig()))
    (expected,) = torch.autograd.grad(full.loss, weight)
    losses, gradients = [], []
    for _ in range(200):
        loss = model(*batch(ids_BT), Objective(ObjectiveConfig(exit_fraction=0.5))).loss
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, weight)[0])
    assert len(set(losses)) > 100
    assert sum(losses) / 200 == pytest.approx(full.loss.item(), rel=0.01)
    assert ((torch.stack(gradients).mean(0) - expected).norm() / expected.norm()).item() < 0.1


def test_a_model_without_a_gate_is_refused_by_the_gated_objective(tiny, ids_BT):
    with pytest.raises(UnsupportedError, match=r"placement = 'gated' needs an exit gate \(loopscope\.ExitGate\)"):
        Objective(ObjectiveConfig(placement="gated"))(ls.build(tiny), *batch(ids_BT))


def test_sampled_depth_is_a_function_of_seed_and_step():
    config = ObjectiveConfig(depth="poisson-lognormal")
    depths = [[ls.sample_depth(config, 6, seed=seed, step=step) for step in range(50)] for seed in (1, 1, 2)]
    assert depths[0] == depths[1] != depths[2]


def test_fixed_depth_is_the_trained_one_and_uniform_covers_all_equally():
    assert {ls.sample_depth(ObjectiveConfig(), 4, seed=0, step=step) for step in range(20)} == {4}
    counts = Counter(ls.sample_depth(ObjectiveConfig(depth="uniform"), 4, seed=0, step=step) for step in range(4000))
    assert set(counts) == {1, 2, 3, 4}
    assert max(counts.values()) < 1.2 * min(counts.values())


def test_poisson_lognormal_depth_has_the_trained_depth_as_its_mean_and_a_long_tail():
    config = ObjectiveConfig(depth="poisson-lognormal")
    depths = torch.tensor([ls.sample_depth(config, 8, seed=3, step=step) for step in range(4000)]).float()
    assert depths.mean().item() == pytest.approx(8, rel=0.05)
    assert depths.min() >= 1 and depths.max() > 20


def test_a_deeper_or_shallower_step_supervises_the_loops_it_runs(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    for num_loops in (1, 2, 5):
        result = model(*batch(ids_BT), Objective(ObjectiveConfig()), num_loops=num_loops)
        assert result.supervised == list(range(1, num_loops + 1))
    terminal = model(*batch(ids_BT), Objective(ObjectiveConfig(placement="terminal")), num_loops=5)
    assert terminal.supervised == [5]
    assert supervised_loops(ObjectiveConfig(placement="last-n", last_n=3), 2) == [1, 2]


def test_which_loops_are_supervised_is_checked():
    assert supervised_loops(None, 3) == supervised_loops("every-loop", 3) == [1, 2, 3]
    assert supervised_loops("terminal", 3) == [3]
    assert supervised_loops([3, 1, 3], 3) == [1, 3]
    for wrong in ("everywhere", [], [0], [4]):
        with pytest.raises(ConfigError, match="supervised"):
            supervised_loops(wrong, 3)


def test_loop_weights_refuse_another_depth(tiny, ids_BT):
    objective = Objective(ObjectiveConfig(placement="weighted", loop_weights=(1.0, 1.0, 1.0)))
    with pytest.raises(ConfigError, match="cannot be matched to 2 loops"):
        ls.build(tiny)(*batch(ids_BT), objective, num_loops=2)


def test_truncated_backpropagation_cuts_the_gradient_and_not_the_value(tiny, ids_BT):
    model = ls.build(tiny, seed=0).double()
    results = {}
    for backprop_loops in (None, 1):
        objective = Objective(ObjectiveConfig(placement="terminal", backprop_loops=backprop_loops))
        loss = model(*batch(ids_BT), objective).loss
        results[backprop_loops] = (
            loss,
            torch.autograd.grad(loss, model.recurrence.core.layers[0].attention.qkv.weight)[0],
        )
    torch.testing.assert_close(results[None][0], results[1][0])
    assert results[1][1].norm() > 0 and not torch.allclose(results[None][1], results[1][1])


def test_ids_and_targets_of_different_shapes_are_refused(tiny, ids_BT):
    with pytest.raises(DataError, match="differ in shape"):
        ls.build(tiny)(ids_BT, ids_BT[:, 1:], Objective(ObjectiveConfig()))


# field: (other value, what must already be set for it to mean something)
FIELD_CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "placement": ("terminal", {}),
    "loop_weights": ((1.0, 2.0, 3.0), {"placement": "weighted", "loop_weights": (1.0, 1.0, 1.0)}),
    "last_n": (1, {"placement": "last-n", "last_n": 2}),
    "exit_entropy": (0.5, {"placement": "gated"}),
    "backprop_loops": (1, {}),
    "exit_fraction": (0.5, {}),
    "norm_penalty": (0.1, {}),
    "scale_anchor": (0.1, {}),
    "anchor_scale": (3.0, {"scale_anchor": 0.1}),
    "z_loss": (0.1, {}),
    "exit_kl": (0.5, {"placement": "gated"}),
    "exit_rate": (0.5, {"placement": "gated", "exit_kl": 0.5}),
    "jacobian_penalty": (0.5, {}),
}
# test_fixed_depth_is_the_trained_one_and_uniform_covers_all_equally, and test_elt_draws_its_exit_from_where_it_is_told
ELSEWHERE = {"depth", "distil_from"}


@pytest.mark.parametrize("field", FIELD_CHANGES)
def test_changing_a_field_changes_the_gradient(tiny, ids_BT, field):
    value, needed = FIELD_CHANGES[field]
    base = ObjectiveConfig(**needed)
    assert getattr(base, field) != value
    model = ls.build(replace(tiny, exit_gate=needed.get("placement") == "gated"), seed=0).double()
    gradients = []
    for config in (base, replace(base, **{field: value})):
        model.zero_grad()
        model(*batch(ids_BT), Objective(config)).loss.backward()
        gradients.append(
            torch.cat(
                [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
            )
        )
    assert not torch.allclose(*gradients)


def test_every_field_is_covered():
    assert {field.name for field in dataclasses.fields(ObjectiveConfig)} == FIELD_CHANGES.keys() | ELSEWHERE
