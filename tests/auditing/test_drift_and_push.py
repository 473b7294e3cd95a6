"""What training does to a variable: the drift that it asks for, and how far a reward takes it."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import typing
from dataclasses import Field, fields

import numpy as np
import pytest
import torch
from torch import nn

import loopscope as ls
from loopscope.auditing import audit as auditing
from loopscope.auditing.drift import (
    FLOOR,
    Recipe,
    Trial,
    TrialObjective,
    affordable,
    drift,
    log_size,
    push,
    size_along,
    size_within,
)
from loopscope.auditing.visibility import FIELDS, mean_field, scale_field
from loopscope.config import ModelConfig, ObjectiveConfig, Placement
from loopscope.errors import ConfigError, DataError, UnsupportedError
from loopscope.model.looped_lm import GatedChargingLoopedLM
from loopscope.objectives.terms import JacobianPenalty, terms_of
from loopscope.options import PushOptions
from loopscope.protocol import LoopState, LoopTrace, run_loops
from loopscope.results.thresholds import DRIVEN_FROM
from loopscope.show.numbers import percent

VOCAB, LENGTH = 64, 24
SCALE = {"scale": size_along(scale_field)}
QUICK = PushOptions(warm_up=10, steps=30)
FAST = Recipe(lr=1e-2)


def design(**changes) -> ls.LoopedLM:
    usual = {"vocab_size": VOCAB, "width": 16, "num_layers": 1, "num_heads": 2, "num_loops": 3, "max_length": 32}
    return ls.build(ModelConfig(**{**usual, **changes}), seed=1)


def text(count: int, rows: int = 4) -> list[torch.Tensor]:
    """Something that can be learned: each token is the one before plus 1, 2 or 3."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (count, rows, LENGTH), generator=generator)
    return list(steps.cumsum(-1) % VOCAB)


def objective(penalty: float = 0.0, num_loops: int = 3) -> TrialObjective:
    config = ObjectiveConfig(norm_penalty=penalty)
    return TrialObjective(config, terms_of(config), num_loops)


def trace_of(*states: torch.Tensor) -> LoopTrace:
    return LoopTrace([LoopState(h) for h in states])


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_the_size_along_scale_is_the_norm_with_the_norms_gradient():
    h = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    (ours,) = torch.autograd.grad(size_along(scale_field)(h).sum(), h)
    (norms,) = torch.autograd.grad(h.norm(dim=-1).sum(), h)
    torch.testing.assert_close(size_along(scale_field)(h), h.norm(dim=-1))
    torch.testing.assert_close(ours, norms)


def test_the_size_along_the_mean_is_its_part_of_the_length():
    h = torch.randn(2, 3, 16)
    torch.testing.assert_close(size_along(mean_field)(h), 4 * h.mean(-1).abs())


def test_the_size_within_a_subspace_is_the_norm_of_the_projection():
    h, basis = torch.randn(2, 3, 8), torch.eye(8)[:, 5:]
    torch.testing.assert_close(size_within(basis)(h), h[..., 5:].norm(dim=-1))


def test_the_log_size_moves_with_the_logarithm_of_a_factor_and_reads_the_last_carried_loop():
    h = torch.randn(2, 5, 8)
    before, after = (log_size(trace_of(h, h, factor * h, 9 * h), SCALE["scale"]) for factor in (1, 100))
    assert float(after - before) == pytest.approx(math.log(100), rel=1e-4)


def test_a_token_at_which_a_variable_crosses_zero_does_not_decide():
    h = torch.ones(1, 4, 8)
    h[0, 0] = 0
    found = float(log_size(trace_of(h, h), size_along(mean_field)))
    assert found > math.log(8**0.5) + math.log(FLOOR) / 4 - 0.1


def test_lifted_sizes_do_not_see_growth_below_scale_one():
    h = torch.randn(1, 6, 8)
    h = 0.1 * h / h.norm(dim=-1, keepdim=True)
    small, grown = (log_size(trace_of(h, factor * h), SCALE["scale"], lifted=True) for factor in (1, 2))
    assert float(small) == pytest.approx(float(grown)) == pytest.approx(0.5 * math.log(8), abs=0.01)


# --- drift -----------------------------------------------------------------------------------------------------------


def test_the_papers_initialisation_drives_the_scale_behind_a_norm_up():
    found = drift(design(dropout=0.0), text(8), objective(), SCALE, recipe=FAST)["scale"]
    assert found.driven and found.rate > 0.03


def test_an_audit_says_how_far_the_scale_is_free_what_holds_it_and_how_training_drives_it():
    """λ·(α² − 1) = 0.01 at λ = 1e-6: a hundredfold, ‖h‖ = 100·√d; the numbers behind it come after the claim."""
    model = design(dropout=0.0)
    options = ls.AuditOptions(states=2, prefix=6, tokens=64, rollout=5)
    found = ls.audit(model, text(8), terms=[ls.NormPenalty(1e-6)], options=options, recipe=FAST).variable("scale")
    assert found.driven and found.drift > 0.03
    norm = f"{100 * model.config.width**0.5:,.0f}"
    assert found.evidence.startswith(
        f"free to grow 100-fold before it costs 1 % of perplexity (the penalty begins to cost from ‖h‖ ≈ {norm}); "
        f"training drives it up by {percent(found.drift)} a step. At loop "
    )


def test_a_scaled_initialisation_below_scale_one_is_not_driven():
    model = design(init="scaled", positions="rope")
    found = drift(model, text(8), objective(), SCALE, recipe=Recipe(lr=1e-3))["scale"]
    assert not found.driven and abs(found.rate) < 1e-6


def test_a_raw_readout_drives_the_papers_scale_down():
    found = drift(design(readout="raw"), text(8), objective(), SCALE, recipe=FAST)["scale"]
    assert found.driven and found.rate < -DRIVEN_FROM


def test_a_rate_that_the_batches_do_not_agree_on_is_not_driven():
    """Two of four trials have tokens whose embedding is pulled up, two such that are pulled down."""

    class Pulled(nn.Module):
        num_loops = 2

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(5 * torch.ones(2, 8))

        def embed(self, ids):
            return LoopState(self.table.mean(0).expand(*ids.shape, 8), context=ids)

        def loop(self, state, k):
            return state

        def readout(self, state, k):
            """Token 1 is likelier the larger the mean of h; even targets ask for more, odd ones for less."""
            size = state.h_BTD.mean(-1, keepdim=True)
            return torch.cat([torch.zeros_like(size), size - 5], -1)

    ids = torch.zeros(1, 6, dtype=torch.long)
    pairs = [(ids, ids + number % 2) for number in range(4)]
    told = TrialObjective(None, (), 2)
    agreed = drift(Pulled(), [(ids, ids + 1)] * 4, told, SCALE, recipe=Recipe(lr=0.1))["scale"]
    split = drift(Pulled(), pairs, told, SCALE, recipe=Recipe(lr=0.1))["scale"]
    assert agreed.driven and agreed.rate > 0
    assert not split.driven and split.spread > DRIVEN_FROM


def test_a_drift_is_affordable_where_there_are_weights_and_not_too_many():
    assert affordable(design())
    assert not affordable(ls.adapt(embed=lambda ids: ids, loop=lambda h, k: h, readout=lambda h, k: h, num_loops=2))
    with torch.device("meta"):
        large = nn.Linear(1 << 14, 1 << 15)
    assert not affordable(ls.adapt(embed=large, loop=lambda h, k: h, readout=lambda h, k: h, num_loops=2, module=large))


def test_a_drift_of_one_trial_is_refused():
    with pytest.raises(ConfigError, match="at least 2 trials"):
        drift(design(), text(1), objective(), SCALE, trials=1)


# --- push ------------------------------------------------------------------------------------------------------------


def pushed(model, penalty=0.0, sizes=SCALE, options=QUICK, **arguments):
    told = objective(penalty, model.num_loops)
    return push(model, text(60), told, sizes, recipe=FAST, options=options, **arguments)


def test_a_norm_readout_lets_the_scale_run_where_a_penalty_or_a_raw_readout_holds_it():
    free = pushed(design()).push("scale")
    held = pushed(design(), penalty=0.1).push("scale")
    raw = pushed(design(readout="raw")).push("scale")
    assert free.far
    assert not held.far and not raw.far
    assert free.growth > 2 * max(held.growth, raw.growth)


def test_a_push_holds_the_reward_against_the_same_steps_without_it():
    options = PushOptions(warm_up=3, steps=4, weight=1e-12)
    result = pushed(design(), options=options).push("scale")
    assert result.growth == pytest.approx(1.0, abs=1e-3)
    assert result.paid == pytest.approx(0.0, abs=1e-3)
    assert len(result.growth_by_step) == len(result.paid_by_step) == 4
    assert result.growth_by_step[0] == 1.0, "both ways start from the same weights"


def test_every_variable_is_pushed_from_the_same_start():
    options = PushOptions(warm_up=3, steps=5)
    alone = pushed(design(), options=options).push("scale")
    both = pushed(design(), options=options, sizes={name: size_along(of) for name, of in reversed(FIELDS.items())})
    assert [each.name for each in both.pushes] == ["mean", "scale"]
    assert both.push("scale") == alone


def test_reach_is_in_lengths_of_the_state():
    found = pushed(design(), sizes={**SCALE, "mean": size_along(mean_field)}, options=PushOptions(warm_up=3, steps=20))
    scale, mean = found.push("scale"), found.push("mean")
    assert scale.reach == pytest.approx(scale.growth)
    assert mean.reach == pytest.approx(1 + (mean.size - mean.twin_size) / scale.twin_size)
    assert 1 < mean.reach < mean.growth


def test_random_numbers_are_the_same_with_and_without_the_reward():
    """A share of the exits' positions, drawn anew in every step."""
    config = ObjectiveConfig(exit_fraction=0.3)
    told, options = TrialObjective(config, (), 3), PushOptions(warm_up=2, steps=6, weight=1e-12)
    result = push(design(), text(8), told, SCALE, recipe=FAST, options=options).push("scale")
    assert max(map(abs, result.paid_by_step)) < 1e-3


def test_fewer_batches_than_steps_come_round_again_and_a_note_says_so():
    options = PushOptions(warm_up=2, steps=4)
    result = push(design(), text(3), objective(), SCALE, options=options)
    assert result.notes == ["3 batches came round 2 times"]
    assert push(design(), text(6), objective(), SCALE, options=options).notes == []


def test_progress_is_told_of_every_step():
    heard: list[str] = []
    options = PushOptions(warm_up=2, steps=3)
    pushed(design(), options=options, progress=lambda what, share: heard.append(what))
    assert heard == ["warm-up"] * 2 + ["twin"] * 3 + ["scale"] * 3
    assert len(heard) == options.total_steps(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"weight": 0.0}, "above 0"), ({"weight": math.nan}, "above 0"), ({"steps": 0}, "at least 1")],
)
def test_a_push_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        PushOptions(**changes)


def test_a_model_that_shows_no_weights_is_refused_with_the_way_out():
    net = design()
    model = ls.adapt(
        embed=lambda ids: net.embedding(ids), loop=lambda h, k: h, readout=lambda h, k: h @ net.head.T, num_loops=2
    )
    for ask in (push, drift):
        with pytest.raises(UnsupportedError, match="module="):
            ask(model, text(2), objective(num_loops=2), SCALE)


def test_a_loss_that_is_not_finite_is_told_and_the_model_is_as_before():
    model = design()
    before = [weight.clone() for weight in model.parameters()]
    broken = ls.NormPenalty(1.0)
    object.__setattr__(broken, "weight", math.nan)
    with torch.no_grad(), pytest.raises(DataError, match="nan"):
        push(model, text(4), TrialObjective(None, [broken], 3), SCALE)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_no_batches_or_batches_of_no_ids_are_refused():
    for batches, message in (([], "at least one batch"), ([torch.randn(2, 8)], "tensor of ids")):
        with pytest.raises(DataError, match=message):
            push(design(), batches, objective(), SCALE)


def test_an_interrupted_push_leaves_the_weights_as_they_were():
    model = design()
    before = [(weight, weight.data_ptr(), weight.clone()) for weight in model.parameters()]

    def interrupt(what: str, share: float) -> None:
        if what == "scale":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pushed(model, progress=interrupt)
    for weight, place, value in before:
        assert weight.data_ptr() == place and torch.equal(weight, value)


# --- the model comes back as it was ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["drift", "push"])
def test_weights_buffers_gradients_modes_optimisers_and_generators_come_back(ask):
    model = design(readout="alpha", reference_mode="ema", alpha=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters())
    told = objective()
    told(model, text(1)[0][:, :-1], text(1)[0][:, 1:]).loss.backward()
    optimizer.step()
    kept = {
        name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    gradients = {name: (weight.grad, weight.grad.clone()) for name, weight in model.named_parameters()}
    state = {id(weight): each["exp_avg"].clone() for weight, each in optimizer.state.items()}
    generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    if ask == "drift":
        drift(model, text(4), told, SCALE)
    else:
        push(model, text(4), told, SCALE, options=PushOptions(warm_up=2, steps=2))
    for name, tensor in model.state_dict(keep_vars=True).items():
        same, place, value = kept[name]
        assert tensor is same and tensor.data_ptr() == place and torch.equal(tensor, value), name
    for name, weight in model.named_parameters():
        assert weight.grad is gradients[name][0] and torch.equal(weight.grad, gradients[name][1])
    assert model.training
    for weight, each in optimizer.state.items():
        assert torch.equal(each["exp_avg"], state[id(weight)])
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (np.random.get_state()[1] == generators[1]).all() and random.getstate() == generators[2]


def test_bf16_weights_are_pushed_in_float32_and_come_back_in_bf16():
    model = design().bfloat16()
    before = [weight.clone() for weight in model.parameters()]
    options = PushOptions(warm_up=2, steps=6)
    found = pushed(model, options=options).push("scale")
    for weight, value in zip(model.parameters(), before, strict=True):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, value)
    assert found == pushed(model.float(), options=options).push("scale"), "steps of bf16 would be rounded away"


# --- the objective of a trial ----------------------------------------------------------------------------------------


PLACEMENTS = {
    **{name: {} for name in typing.get_args(Placement)},
    "weighted": {"loop_weights": (1.0, 0.0, 3.0)},
    "last-n": {"last_n": 2},
}
"""Every placement, with the field that it cannot do without."""
NEEDED = {"anchor_scale": {"scale_anchor": 0.3}, "exit_rate": {"exit_kl": 0.3}}
"""What must be on for a field to have an effect."""
VALUES = [0.3, 2, *typing.get_args(typing.get_type_hints(ObjectiveConfig)["depth"])]


def objectives() -> dict[str, ObjectiveConfig]:
    """Every field of the configuration away from its default, under every placement that allows it."""
    found: dict[str, ObjectiveConfig] = {}
    for placement, given in PLACEMENTS.items():
        found[f"placement={placement}"] = ObjectiveConfig(placement=placement, **given)
        for field, value in itertools.product(fields(ObjectiveConfig), VALUES):
            changed = {"placement": placement, **given, **NEEDED.get(field.name, {}), field.name: value}
            if field.name not in ("placement", *given) and value != field.default:
                with contextlib.suppress(ConfigError):
                    found[f"{field.name}={value} {placement}"] = ObjectiveConfig(**changed)
    return found


@pytest.mark.parametrize("changed", [pytest.param(config, id=name) for name, config in objectives().items()])
def test_the_objective_of_a_trial_is_the_one_that_training_uses(changed):
    model, ids = design(dropout=0.0, exit_gate=True, num_experts=2), text(1)[0]

    def loss_of(objective: ls.Objective) -> ls.ObjectiveResult:
        torch.manual_seed(0)
        return objective(model, ids[:, :-1], ids[:, 1:])

    training = loss_of(ls.Objective(changed))
    for told in (terms_of(changed), None):
        trial = loss_of(TrialObjective(changed, told, 3))
        assert trial.terms == training.terms and trial.supervised == training.supervised
        assert torch.equal(trial.loss, training.loss)


def test_every_field_of_an_objective_is_among_those_that_a_trial_is_held_against():
    seen = {field.name for config in objectives().values() for field in fields(config) if differs(config, field)}
    assert seen == {field.name for field in fields(ObjectiveConfig)}


def differs(config: ObjectiveConfig, field: Field) -> bool:
    return getattr(config, field.name) != field.default


class OwnPenalty(GatedChargingLoopedLM):
    """A model with a term of its own that equals one of the objective's."""

    def losses(self):
        return [JacobianPenalty(0.2)]


@pytest.mark.parametrize("are_told", [False, True])
def test_an_audit_tries_drift_on_the_loss_that_training_uses(monkeypatch, are_told):
    tried = []
    monkeypatch.setattr(auditing, "drift", lambda model, pairs, objective, *_, **__: tried.append(objective) or {})
    config = ObjectiveConfig(placement="gated", exit_entropy=0.1, jacobian_penalty=0.2)
    model, terms = OwnPenalty(design(dropout=0.0, exit_gate=True).config), terms_of(config) if are_told else None
    auditing.audit(model, text(1), supervised=config, terms=terms, recipe=FAST)
    (objective,) = tried
    assert objective.terms(model) == ls.Objective(config).terms(model)
    assert len(objective.terms(model)) == 3


def test_the_terms_that_are_told_take_the_place_of_the_configurations():
    config = ObjectiveConfig(norm_penalty=5.0)
    model, ids = design(dropout=0.0), text(1)[0]
    told = TrialObjective(config, [ls.NormPenalty(0.5)], 3)(model, ids[:, :-1], ids[:, 1:])
    states = run_loops(model, ids[:, :-1]).h_KBTD.detach()
    assert float(told.terms["norm_penalty"]) == pytest.approx(float(ls.norm_penalty(states, 0.5)), rel=1e-4)


def test_loops_as_a_list_get_equal_weights():
    model, ids = design(dropout=0.0), text(1)[0]
    result = TrialObjective([1, 3], (), 3)(model, ids[:, :-1], ids[:, 1:])
    assert result.supervised == [1, 3]
    assert result.loss.item() == pytest.approx(float(result.ce_K.mean()), rel=1e-5)


def test_a_step_is_adamws_on_the_clipped_gradient():
    one, other = design(dropout=0.0), design(dropout=0.0)
    (ids,) = text(1)
    pair = ids[:, :-1], ids[:, 1:]
    Trial(one, objective(), FAST).step(pair)
    optimizer = torch.optim.AdamW(other.parameters(), lr=FAST.lr, weight_decay=FAST.weight_decay)
    objective()(other, *pair).loss.backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), FAST.clip)
    optimizer.step()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
