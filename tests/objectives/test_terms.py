"""Loss terms that see scale: the paper's normalisation, and gradients through any readout."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from synthetic import CONFIG, RandomTokens, change, valid
from test_plan import RealStep, configure
from torch import nn

import loopscope as ls
from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError
from loopscope.objectives import terms as module
from loopscope.objectives.terms import (
    ExitEntropy,
    ExitPrior,
    JacobianPenalty,
    NormPenalty,
    Pass,
    ScaleAnchor,
    Term,
    ZLoss,
    terms_of,
)
from loopscope.options import AuditOptions
from loopscope.results.run import LoggedStep
from loopscope.runs import RunFolder
from loopscope.training.plan import plan_memory
from loopscope.training.trainer import Trainer


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


# --- one object, four readers ----------------------------------------------------------------------------------------

QUICK = AuditOptions(states=2, prefix=6, tokens=24, rollout=5)
SAMPLES: dict[type[Term], dict] = {
    NormPenalty: {"norm_penalty": 0.3},
    ScaleAnchor: {"scale_anchor": 0.3, "anchor_scale": 2.0},
    ZLoss: {"z_loss": 0.3},
    ExitEntropy: {"placement": "gated", "exit_entropy": 0.3},
    ExitPrior: {"placement": "gated", "exit_kl": 0.3, "exit_rate": 0.4},
    JacobianPenalty: {"jacobian_penalty": 0.3},
}
"""How a configuration turns each of them on."""
BASES: dict[type[Term], dict] = {kind: {"placement": "gated"} for kind in (ExitEntropy, ExitPrior)}
"""What must be on besides."""


def sample(kind: type[Term]) -> Term:
    (term,) = (term for term in terms_of(ObjectiveConfig(**SAMPLES[kind])) if isinstance(term, kind))
    return term


@pytest.fixture
def gated(tiny):
    return ls.build(replace(tiny, exit_gate=True), seed=0).double().eval()


def test_every_term_of_the_module_is_turned_on_by_a_configuration_and_tested_here():
    found = {one for _, one in inspect.getmembers(module, inspect.isclass) if issubclass(one, Term) and one is not Term}
    assert found == SAMPLES.keys()
    for kind in found:
        assert sample(kind).weight == 0.3
        assert not [term for term in terms_of(ObjectiveConfig(**BASES.get(kind, {}))) if term.weight]
    names = [sample(kind).name for kind in found]
    assert len(set(names)) == len(names)


def log_sum_exp_squared(model, result) -> torch.Tensor:
    logits = [model.readout(result.trace.states[k], k) for k in (1, 2, 3)]
    return torch.stack([one.logsumexp(-1).square().mean() for one in logits]).mean()


def exit_probabilities(model, result) -> torch.Tensor:
    leave = torch.stack([model.exit_logits(model.features(result.trace.states[k], k)).sigmoid() for k in (1, 2, 3)])
    return torch.stack([leave[0], (1 - leave[0]) * leave[1], (1 - leave[0]) * (1 - leave[1])])


def exit_entropy(model, result) -> torch.Tensor:
    p = exit_probabilities(model, result)
    return -(p * p.log()).sum(0).mean()


def exit_divergence(model, result) -> torch.Tensor:
    """KL(p ‖ q) and not KL(q ‖ p); q = (0.4, 0.6·0.4, 0.6²): what remains is on the last loop."""
    p = exit_probabilities(model, result)
    q = torch.tensor([0.4, 0.24, 0.36]).double()[:, None, None]
    return (p * (p / q).log()).sum(0).mean()


BY_HAND = {
    NormPenalty: lambda model, result: result.trace.h_KBTD.square().mean(),
    ScaleAnchor: lambda model, result: (result.trace.h_KBTD.square().mean(-1).sqrt() - 2.0).square().mean(),
    ZLoss: log_sum_exp_squared,
    ExitEntropy: lambda model, result: -exit_entropy(model, result),
    ExitPrior: exit_divergence,
}


@pytest.mark.parametrize("kind", BY_HAND, ids=lambda kind: kind.__name__)
def test_the_objective_adds_the_terms_value_and_nothing_else(kind, gated, ids_BT):
    targets_BT = ids_BT.roll(1, dims=1)
    off = ls.Objective(ObjectiveConfig(**BASES.get(kind, {})))(gated, ids_BT, targets_BT)
    on = ls.Objective(ObjectiveConfig(**SAMPLES[kind]))(gated, ids_BT, targets_BT)
    torch.testing.assert_close(on.loss - off.loss, 0.3 * BY_HAND[kind](gated, off))
    torch.testing.assert_close(on.ce_K, off.ce_K)
    if not kind.inside_cross_entropy:
        torch.testing.assert_close(on.terms[sample(kind).name], 0.3 * BY_HAND[kind](gated, off).detach())


def test_the_jacobian_penalty_shares_the_loss_with_cross_entropy(gated, ids_BT):
    """(1 − λ)·CE + λ·‖J v‖², v of unit length in every sequence: J v by forward mode at the last state."""
    targets_BT = ids_BT.roll(1, dims=1)
    off = ls.Objective(ObjectiveConfig())(gated, ids_BT, targets_BT)
    torch.manual_seed(3)
    on = ls.Objective(ObjectiveConfig(jacobian_penalty=0.3))(gated, ids_BT, targets_BT)
    state = off.trace.states[-1]
    torch.manual_seed(3)
    v_BTD = torch.randn_like(state.h_BTD)
    v_BTD = v_BTD / v_BTD.flatten(1).norm(dim=1)[:, None, None]
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, image_BTD = torch.func.jvp(lambda h: gated.loop(state.with_h(h), 3).h_BTD, (state.h_BTD,), (v_BTD,))
    expected = image_BTD.square().sum((1, 2)).mean()
    torch.testing.assert_close(on.terms["jacobian_penalty"], 0.3 * expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(on.loss, 0.7 * off.loss + on.terms["jacobian_penalty"])


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_term_that_says_it_sees_the_scale_shows_it_and_no_other_does(kind):
    """Behind a readout that hides the scale: what the term itself shows of h and of 2h."""
    term, h_BTD, head_VD = sample(kind), torch.randn(1, 2, 8).double(), torch.randn(5, 8).double()

    def shown(h):
        return term.shows(h, lambda: nn.functional.rms_norm(h, (8,)) @ head_VD.T)

    one, two = shown(h_BTD), shown(2 * h_BTD)
    differs = one is not None and not torch.allclose(one, two)
    assert differs == (kind in HOLD_SCALE)


HOLD_SCALE = (ls.NormPenalty, ls.ScaleAnchor)
"""At the weights of these tests."""
VERDICTS = {
    NormPenalty: "visible",
    ScaleAnchor: "visible",
    **dict.fromkeys((ZLoss, ExitEntropy, ExitPrior, JacobianPenalty), "blind"),
}


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_the_audit_sees_the_scale_through_the_term_or_not_at_all(kind, gated, ids_BT):
    """An RMSNorm readout hides the scale; what the audit says of it then is what the term shows."""
    result = ls.audit(gated, [ids_BT], terms=[sample(kind)], options=QUICK)
    assert result.variable("scale").verdict == VERDICTS[kind]
    assert (VERDICTS[kind] == "visible") == (kind in HOLD_SCALE)


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_only_terms_that_show_something_are_listed_as_observables(kind, gated, ids_BT):
    result = ls.audit(gated, [ids_BT], terms=[sample(kind)], options=QUICK)
    assert result.model.observables == ([sample(kind).name] if kind in (*HOLD_SCALE, ZLoss) else [])


def test_the_z_loss_shows_a_shift_of_all_logits_that_softmax_hides(tiny, ids_BT):
    """A direction of the state that adds the same number to every logit is blind without it and visible with it."""
    model = ls.build(replace(tiny, readout="raw", tie_head=False), seed=0)
    with torch.no_grad():
        model.unembedding.weight[:, 0] = 1.0
    without, through = (ls.audit(model, [ids_BT], terms=terms, options=QUICK) for terms in ([], [ZLoss(1.0)]))
    assert (without.verdict, without.blind_directions.dimension) == ("blind-spot", 1)
    assert (through.verdict, through.blind_directions.dimension) == ("controlled", 0)


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_the_plan_counts_what_a_real_step_saves_for_the_term(kind):
    """With a raw readout of one loop, the last state is kept for no other reason."""
    model = {"readout": "raw", "exit_gate": True}
    usual = {} if "placement" in SAMPLES[kind] else {"placement": "terminal"}
    planned, saved = [], []
    for objective in (BASES.get(kind, {}), SAMPLES[kind]):
        config = configure(model, {**usual, **objective})
        step = RealStep(config)
        step.forward()
        memory = plan_memory(config)
        planned.append(memory.activations + memory.loss_gradients)
        saved.append(step.saved)
    state = 4 * 2 * 32 * 64  # bytes of one state
    assert planned == pytest.approx(saved, rel=0.01)
    assert planned[1] - planned[0] == pytest.approx(saved[1] - saved[0], abs=0.1 * state)
    assert (planned[1] - planned[0] >= state) == (kind in (NormPenalty, ScaleAnchor, JacobianPenalty))


# --- terms of the model itself ---------------------------------------------------------------------------------------


class Shrinking(ls.LoopedLM, ls.OwnLosses):
    """A model with a penalty of its own on the last state."""

    def losses(self):
        return [LastNorm()]


class LastNorm(Term):
    name, weight = "last_norm", 0.5

    def value(self, seen: Pass):
        return self.weight * seen.states[-1].square().mean()

    def shows(self, h_BTD, logits):
        return (self.weight / h_BTD.shape[-1]) ** 0.5 * h_BTD


def test_the_models_own_term_is_in_the_loss(tiny, ids_BT):
    torch.manual_seed(0)
    model = Shrinking(tiny).eval()
    result = ls.Objective(ObjectiveConfig(z_loss=0.1))(model, ids_BT, ids_BT)
    value = 0.5 * result.trace.states[-1].h_BTD.square().mean()
    torch.testing.assert_close(result.terms["last_norm"], value.detach())
    torch.manual_seed(0)
    plain = ls.Objective(ObjectiveConfig(z_loss=0.1))(ls.LoopedLM(tiny).eval(), ids_BT, ids_BT)
    torch.testing.assert_close(result.loss, plain.loss + value)


def test_two_terms_of_one_name_are_both_in_what_is_reported(tiny, ids_BT):
    class Twice(ls.LoopedLM, ls.OwnLosses):
        def losses(self):
            return [NormPenalty(0.2)]

    result = ls.Objective(ObjectiveConfig(norm_penalty=0.1))(Twice(tiny).eval(), ids_BT, ids_BT)
    torch.testing.assert_close(result.loss.detach(), result.ce_K.mean() + sum(result.terms.values()))
    torch.testing.assert_close(result.terms["norm_penalty"], 0.3 * result.trace.h_KBTD.square().mean().detach())


def test_the_models_own_term_makes_the_scale_visible_to_the_audit_also_when_clamped(tiny, ids_BT):
    model = Shrinking(tiny)
    result = ls.audit(model, [ids_BT], options=QUICK)
    assert result.variable("scale").verdict == "visible" and result.model.observables == ["last_norm"]
    assert ls.audit(ls.clamped(model), [ids_BT], options=QUICK).model.observables == ["last_norm"]
    assert ls.audit(ls.build(tiny), [ids_BT], options=QUICK).variable("scale").verdict == "blind"


def blind_run(folder, kind) -> tuple[list[LoggedStep], list[str]]:
    """The paper's blind spot, small; rows of metrics and names of events."""
    config = change(CONFIG, training={"steps": 40, "lr": 0.05, "schedule": "constant"})
    config = replace(config, objective=ObjectiveConfig())
    torch.manual_seed(config.training.seed)
    run, rows = RunFolder(folder), []
    run.create(config)
    Trainer(kind(config.model), config, run, RandomTokens(), valid, listeners=(rows.append,)).train()
    return [row for row in rows if row.kind == "train"], [row.event for row in rows if row.kind == "event"]


class Feather(ls.LoopedLM, ls.OwnLosses):
    """A term that sees the scale and is too light to hold it."""

    def losses(self):
        return [NormPenalty(1e-8, name="feather")]


def test_the_monitor_follows_what_the_models_own_term_charges_and_not_that_it_is_there(tmp_path):
    rows, events = blind_run(tmp_path / "plain", ls.LoopedLM)
    assert "blind-spot" in events and all(row.tenfold_charge < 0.01 for row in rows)
    rows, events = blind_run(tmp_path / "feather", Feather)
    assert "blind-spot" in events and all(row.tenfold_charge < 0.01 for row in rows)
    assert all(row.terms.keys() == {"feather"} for row in rows) and rows[-1].terms["feather"] > 0
    rows, events = blind_run(tmp_path / "own", Shrinking)
    assert "blind-spot" not in events and all(row.tenfold_charge >= 0.01 for row in rows)


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_the_rows_of_a_run_say_whether_the_term_sees_the_scale(kind, tmp_path):
    config = change(CONFIG, training={"steps": 1}, model={"exit_gate": True})
    config = replace(config, objective=ObjectiveConfig(**SAMPLES[kind]))
    run, rows = RunFolder(tmp_path), []
    run.create(config)
    Trainer(ls.build(config.model), config, run, RandomTokens(), None, listeners=(rows.append,)).train()
    assert (rows[0].tenfold_charge >= 0.01) == (kind in HOLD_SCALE)


def test_a_watcher_in_somebodys_own_loop_knows_the_models_own_term(tiny):
    assert [term.name for term in ls.watch(Shrinking(tiny)).terms] == ["last_norm"]
    penalty = NormPenalty(0.01)
    assert ls.watch(ls.build(tiny), terms=[penalty]).terms == [penalty] and ls.watch(ls.build(tiny)).terms == []


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
