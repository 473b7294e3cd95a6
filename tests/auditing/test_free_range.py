"""Free ranges: how far a variable runs before the objective notices 0.01 nats, against what is derived by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import loopscope as ls
from loopscope.auditing.free_range import Objections
from loopscope.auditing.visibility import mean_field, scale_field
from loopscope.config import ObjectiveConfig
from loopscope.errors import UnsupportedError
from loopscope.show.numbers import fold

EVEN = dict.fromkeys((1, 2, 3), 1 / 3)
QUICK = ls.AuditOptions(states=2, prefix=6, rollout=4)


def objections(config, ids_BT, terms=(), weights=EVEN, factor=1.0, **options):
    model = ls.build(config, seed=0).eval().double()
    states = [state.with_h(factor * state.h_BTD) for state in ls.run_loops(model, ids_BT).states]
    return model, states, Objections(model, states, weights, terms, **options)


def test_a_norm_readout_leaves_its_scale_free_without_limit_and_layernorm_the_mean_too(tiny, ids_BT):
    _, _, through_rms = objections(tiny, ids_BT)
    assert set(through_rms.free_range(scale_field, [1, 2]).median.values()) == {math.inf}
    assert max(through_rms.free_range(mean_field, [1, 2]).median.values()) < 1.1
    _, _, through_layernorm = objections(replace(tiny, readout="layernorm"), ids_BT)
    assert set(through_layernorm.free_range(mean_field, [1]).median.values()) == {math.inf}


def test_a_raw_readout_notices_the_scale_by_the_response_of_its_logits(tiny, ids_BT):
    """Δz = (α − 1)·z, and ½·(α − 1)²·(g·rms z)² = 0.01 at α = 1 + √0.02/max(1, rms z); all exits alike up to rms z."""
    raw = replace(tiny, readout="raw", init="scaled")  # tiny logits: g lifts every one of them to rms 1
    _, _, objecting = objections(raw, ids_BT)
    found = objecting.free_range(scale_field, [1, 2])
    assert list(found.median.values()) == pytest.approx([1 + math.sqrt(0.02)] * 2, rel=5e-3)
    assert found.tenfold == {1: 0.0, 2: 0.0}


@pytest.mark.parametrize("factor", [1.0, 51.0])
@pytest.mark.parametrize("weight", [1e-2, 1e-4, 1e-6, 1e-8])
def test_a_penalty_holds_the_scale_within_a_range_that_its_weight_decides_wherever_the_state_is(
    tiny, ids_BT, weight, factor
):
    """λ·(α² − 1)·s² from scale 1, for every k alike: α = √(1 + 0.01/λ). A runaway does not look held by having run."""
    _, _, objecting = objections(tiny, ids_BT, [ls.NormPenalty(weight)], factor=factor)
    expected = math.sqrt(1 + 0.01 / weight)
    assert list(objecting.free_range(scale_field, [1, 2]).median.values()) == pytest.approx([expected] * 2, rel=0.03)


def test_an_anchor_is_counted_from_its_target(tiny, ids_BT):
    """w·(s − 100)² = 0.01 at s = 100.32 for w = 0.1: 1.003 times the target, and not 100 times scale 1."""
    _, _, objecting = objections(tiny, ids_BT, [ls.ScaleAnchor(0.1, 100.0)])
    assert max(objecting.free_range(scale_field, [1, 2]).median.values()) < 1.05


def test_a_weight_of_next_to_nothing_holds_next_to_nothing(tiny, ids_BT):
    """Raw exits of weight w below an RMSNorm one: ½·w·(α − 1)²·(g·rms z)² ≥ 0.01, a thousand times further at 1e-6."""
    final_only = replace(tiny, readout="final-only", init="scaled")
    _, _, even = objections(final_only, ids_BT)
    _, _, feeble = objections(final_only, ids_BT, weights={1: 5e-7, 2: 5e-7, 3: 1 - 1e-6})
    held, free = (one.free_range(scale_field, [1]).median[1] - 1 for one in (even, feeble))
    assert free / held == pytest.approx(math.sqrt((2 / 3) / 1e-6), rel=0.03)


def test_gated_exits_are_weighed_by_the_gate_of_each_token(tiny, ids_BT):
    """A gate that always leaves at the last loop, through RMSNorm, gives the raw exits before it no say."""
    gated = replace(tiny, readout="final-only", exit_gate=True, init="scaled")
    model, states, _ = objections(gated, ids_BT)
    for bias, is_free in ((-40.0, True), (0.0, False)):
        with torch.no_grad():
            model.exit_gate.weight.zero_()
            model.exit_gate.bias.fill_(bias)
        assert Objections(model, states, EVEN, [], gated=True).free_range(scale_field, [1]).is_free(1) == is_free
    with pytest.raises(UnsupportedError, match="exit gate"):
        Objections(ls.build(tiny).double(), states, EVEN, [], gated=True)


def test_a_population_of_tokens_that_no_loss_sees_is_a_finding_and_the_tail_of_a_distribution_is_not(tiny, ids_BT):
    """Scale hidden for some tokens only: those whose first channel is positive are read through a norm."""
    net = ls.build(replace(tiny, readout="raw"), seed=0)

    def readout(share):
        def logits(state, k):
            h_BTD = state.h_BTD
            hidden_BT1 = torch.arange(h_BTD.shape[1])[None, :, None] % 20 < round(20 * share)
            normed_BTD = torch.nn.functional.rms_norm(h_BTD, (h_BTD.shape[-1],))
            return torch.where(hidden_BT1, normed_BTD, h_BTD) @ net.head.T

        return logits

    ids = torch.randint(37, (2, 20), generator=torch.Generator().manual_seed(0))
    for share, is_free in ((0.4, True), (0.1, True), (0.0, False)):
        model = ls.adapt(
            embed=net.embed, loop=lambda s, k: net.loop(s, k), readout=readout(share), num_loops=3, module=net
        )
        found = Objections(model, ls.run_loops(model, ids).states, EVEN, []).free_range(scale_field, [1])
        assert found.is_free(1) == is_free and found.tenfold[1] == pytest.approx(share)


# --- what used to silence the audit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight", "verdict"), [(1e-2, "controlled"), (1e-6, "blind-spot"), (1e-8, "blind-spot")])
def test_a_penalty_controls_only_where_it_costs_something(tiny, ids_BT, weight, verdict):
    model = ls.build(replace(tiny, vocab_size=80), seed=0)
    result = ls.audit(model, [ids_BT], terms=[ls.NormPenalty(weight)], options=QUICK)
    scale = result.variable("scale")
    assert (result.verdict, scale.verdict) == (verdict, "visible" if verdict == "controlled" else "blind")
    assert scale.free_range == pytest.approx(math.sqrt(1 + 0.01 / weight), rel=0.03)
    assert f"free to grow {fold(scale.free_range)} before it costs 1 % of perplexity" in scale.evidence


def test_loop_weights_enter_the_verdict(tiny, ids_BT):
    model = ls.build(replace(tiny, vocab_size=80, readout="final-only"), seed=0)
    for first, verdict in ((1.0, "controlled"), (1e-9, "blind-spot")):
        objective = ObjectiveConfig(placement="weighted", loop_weights=(first, first, 1.0))
        assert ls.audit(model, [ids_BT], supervised=objective, options=QUICK).verdict == verdict


class _GateThatCloses(nn.Module, ls.LinearReadout, ls.ExitGate):
    """Exit 1 is raw, exit 2 normed. Channel 0 of the state is 1 at scale 1; the gate's logit is −`slope` times it."""

    num_loops = 2

    def __init__(self, slope: float, bias: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.slope, self.bias = slope, bias
        self.table = nn.Parameter(torch.randn(64, 16, generator=generator))
        self.matrix = nn.Parameter(torch.randn(16, 16, generator=generator) / 4)
        self.weight = nn.Parameter(torch.randn(64, 16, generator=generator) / 4)

    @property
    def head(self):
        return self.weight

    def embed(self, ids_BT):
        h_BTD = self.table[ids_BT]
        return ls.LoopState(torch.cat([torch.ones_like(h_BTD[..., :1]), h_BTD[..., 1:]], dim=-1))

    def loop(self, state, k):
        h_BTD = state.h_BTD
        step = 0.03 * torch.tanh(nn.functional.rms_norm(h_BTD, (16,)) @ self.matrix)
        return state.with_h(h_BTD + torch.cat([torch.zeros_like(step[..., :1]), step[..., 1:]], dim=-1))

    def features(self, state, k, cache=None):
        return state.h_BTD if k < 2 else nn.functional.rms_norm(state.h_BTD, (16,))

    def exit_logits(self, features_BTD):
        return -self.slope * features_BTD[..., 0] - self.bias


@pytest.mark.parametrize(("slope", "bias", "verdict"), [(2.5, 0.0, "blind"), (0.0, 2.5, "visible")])
def test_a_gate_that_leaves_the_exit_as_the_state_grows_lets_the_scale_run(slope, bias, verdict):
    """Exit 1 charges ½·σ(−2.5·α)·(α − 1)², 0.005 at most. With the same weight at every scale, ½·0.076·(α − 1)²."""
    ids_BT = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))
    options = ls.AuditOptions(states=2, prefix=6, rollout=4)
    objective = ls.ObjectiveConfig(placement="gated")
    result = ls.audit(_GateThatCloses(slope, bias), [ids_BT], supervised=objective, options=options)
    assert result.variable("scale").verdict == verdict
