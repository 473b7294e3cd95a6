"""Self-speculation: the same tokens as plain decoding, the same distribution when sampled, and no loop run twice."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.inference.decoding import Limits, Sampling, decode, runner_for
from loopscope.inference.speculation import (
    LOOKED_AT,
    PLAIN,
    Acceptance,
    DraftPlan,
    Speculator,
    Times,
    parse_plan,
)

PLANS = ("block:1,1", "block:1,4", "block:2,3", "block:3,8", "wave:1", "wave:2", "wave:3", "auto")
DESIGNS = {
    "paper": {},
    "raw": {"readout": "raw"},
    "huginn-like": {
        "norm_placement": "sum",
        "injection": "concat",
        "state_init": "noise",
        "prelude_layers": 1,
        "coda_layers": 1,
        "positions": "rope",
    },
    "ouro-like": {"norm_placement": "sandwich", "inter_loop_norm": "rmsnorm", "positions": "rope", "num_kv_heads": 2},
    "damped, loop embedding": {"spectral_damping": True, "loop_embedding": True, "readout": "final-only"},
}
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def four_loops(tiny):
    return replace(tiny, num_loops=4, max_length=40)


def built(config, **changes):
    return ls.build(replace(config, **changes), seed=1).double().eval()


def plainly(model, prompt=PROMPT, limits=None, sampling=None):
    runner = runner_for(model, model.num_loops)
    return [token.id for _, token in decode(runner, [prompt], limits=limits, sampling=sampling)]


def speculatively(model, plan, prompt=PROMPT, limits=None, sampling=None, number=0, kind=Speculator):
    speculator = kind(model, model.num_loops, limits=limits, sampling=sampling, plan=parse_plan(plan))
    return [token.id for _, token in speculator.decode(prompt, number)], speculator


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("design", DESIGNS)
def test_greedy_tokens_are_those_of_plain_decoding(four_loops, design, plan):
    model = built(four_loops, **DESIGNS[design])
    limits = Limits(max_tokens=30, context=40)
    found, speculator = speculatively(model, plan, limits=limits)
    assert found == plainly(model, limits=limits)
    if plan != "auto":  # whether it drafts at all is a matter of measured times
        assert speculator.tally.drafted > 0


def test_some_drafts_are_kept_and_some_are_not(four_loops):
    """Otherwise the equality above would say little."""
    model = built(four_loops)
    tally = speculatively(model, "wave:1", limits=Limits(max_tokens=30, context=40))[1].tally
    assert 0 < tally.accepted < tally.drafted


@pytest.mark.parametrize("plan", ["block:1,4", "wave:1", "wave:2", "block:2,2"])
def test_no_loop_of_an_accepted_token_is_run_twice(four_loops, plan):
    """A model whose loops change nothing drafts without fault: K loops a token and not one more."""
    model = built(four_loops)
    for layer in model.recurrence.core.layers:
        torch.nn.init.zeros_(layer.attention.out.weight)
        torch.nn.init.zeros_(layer.feed_forward.out.weight)
    found, speculator = speculatively(model, plan, limits=Limits(max_tokens=21))
    assert speculator.tally.accepted == speculator.tally.drafted == 20
    assert speculator.tally.loops == 4 * (len(PROMPT) + len(found) - 1)  # the last token is chosen, and not run


@pytest.mark.parametrize("plan", ["block:1,3", "wave:1"])
@pytest.mark.parametrize("limits", [Limits(max_tokens=7), Limits(max_tokens=99, context=16)], ids=["length", "context"])
def test_a_text_ends_where_plain_decoding_ends_it(four_loops, plan, limits):
    model = built(four_loops)
    assert speculatively(model, plan, limits=limits)[0] == plainly(model, limits=limits)


@pytest.mark.parametrize("plan", ["block:1,8", "wave:1"])
def test_the_end_of_text_token_ends_a_block_and_a_wave(four_loops, plan):
    model = built(four_loops)
    whole = plainly(model, limits=Limits(max_tokens=20))
    limits = Limits(max_tokens=20, end_ids=(whole[9],))
    assert speculatively(model, plan, limits=limits)[0] == whole[: whole.index(whole[9]) + 1]


class Bigrams(torch.nn.Module, ls.LinearReadout, ls.MixedDepths):
    """Every loop turns the state of a token by the same matrix; nothing looks at earlier tokens. Quick to run often."""

    num_loops = 3
    head = torch.eye(4, dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.table_VD, self.turn_DD = torch.randn(4, 4).double(), torch.eye(4).double() + 0.5 * torch.randn(4, 4)

    def embed(self, ids_BT, cache=None):
        return ls.LoopState(self.table_VD[ids_BT])

    def loop(self, state, k, cache=None):
        return state.with_h(state.h_BTD @ self.turn_DD)

    def features(self, state, k, cache=None):
        return state.h_BTD


@pytest.mark.parametrize("plan", ["block:1,2", "block:2,4", "wave:1", "wave:2", "auto"])
def test_sampled_texts_have_the_distribution_of_plain_sampling(plan):
    """Three tokens of a vocabulary of 4, 1,500 times: each of the 64 texts as often as its probability says.

    The sum over texts of (count − expected)²/expected is χ² with 63 degrees of freedom, above 103.4 once in a thousand.
    """
    model, n = Bigrams(), 1500
    p_VV = torch.softmax(model.table_VD @ torch.linalg.matrix_power(model.turn_DD, 3) / 3.0, -1)
    texts = itertools.product(range(4), repeat=3)
    chances = {(a, b, c): float(p_VV[2, a] * p_VV[a, b] * p_VV[b, c]) for a, b, c in texts}
    assert n * min(chances.values()) > 1
    sampling, limits = Sampling(temperature=3.0), Limits(max_tokens=3)
    speculator = Speculator(model, 3, sampling=sampling, limits=limits, plan=parse_plan(plan))
    counts = Counter(tuple(token.id for _, token in speculator.decode([1, 2], number)) for number in range(n))
    statistic = sum((counts[text] - n * chance) ** 2 / (n * chance) for text, chance in chances.items())
    assert statistic < 103.4
    if plan != "auto":
        assert 0.3 < speculator.tally.accepted / speculator.tally.drafted < 0.98


def test_a_sampled_text_does_not_depend_on_what_else_was_generated(four_loops):
    model, sampling = built(four_loops), Sampling(temperature=1.0, seed=5)
    speculator = Speculator(model, 4, sampling=sampling, limits=Limits(max_tokens=12), plan=DraftPlan("block", 1, 3))
    first, again = ([token.id for _, token in speculator.decode(PROMPT, 7)] for _ in range(2))
    assert first == again


def test_predicted_times_follow_the_equations():
    times = Times(loop={1: 2.0, 3: 3.0}, lanes={4: 5.0}, readout={1: 0.5, 2: 0.75, 3: 1.0})
    assert times.predicted(PLAIN, 4, 0.0) == 4 * 2.0 + 0.5
    block = 3 * (1 * 2.0 + 0.5) + 3 * 3.0 + 1.0
    assert times.predicted(DraftPlan("block", 1, 3), 4, 0.5) == pytest.approx(block / (1 + 0.5 + 0.25))
    assert times.predicted(DraftPlan("wave", 1), 4, 0.9) == pytest.approx((5.0 + 0.75) * (1 + 0.1 * 3))


def test_acceptance_is_the_mean_of_what_was_seen_and_forgets():
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.learn(1.0)
    assert acceptance.rate > 0.99
    for _ in range(100):
        acceptance.learn(0.0)
    assert acceptance.rate < 0.2


CHEAP = Times(dict.fromkeys(range(1, 9), 1.0), dict.fromkeys((2, 4), 1.0), dict.fromkeys(range(1, 9), 0.0))
"""Eight tokens cost what one costs."""
DEAR = Times({n: n * 1.0 for n in range(1, 9)}, {2: 2.0, 4: 4.0}, {n: n * 1.0 for n in range(1, 9)})
"""They cost eight times that."""


def timed(times, drafting=1.0):
    """A speculator on a machine of these times, where drafted tokens take so many times what is predicted."""

    class Timed(Speculator):
        def measure_times(self, rounds=5):
            return times

        def note_time(self, plan, seconds):
            self.excess.setdefault(plan.kind, 1.0 if plan == PLAIN else drafting)

    return Timed


def test_auto_drafts_where_that_pays_and_decodes_plainly_where_it_does_not(four_loops):
    model, limits = built(four_loops), Limits(max_tokens=30, context=40)
    plans = {}
    for name, times in {"cheap": CHEAP, "dear": DEAR}.items():
        found, speculator = speculatively(model, "auto", limits=limits, kind=timed(times))
        assert found == plainly(model, limits=limits)
        plans[name] = {plan for plan in speculator.tally.plans if plan != "look"}
        assert speculator.tally.plans["look"] == LOOKED_AT - 1  # the first token comes from the prompt
    assert plans["dear"] == {"plain"}
    assert plans["cheap"] > {"plain"}, "a few tokens are plain, to compare with"


def test_auto_goes_back_to_plain_decoding_when_drafting_takes_longer_than_predicted(four_loops, monkeypatch):
    model, limits = built(four_loops, max_length=80), Limits(max_tokens=70, context=80)
    monkeypatch.setattr("loopscope.inference.speculation.PLANNED", 1)
    speculator = speculatively(model, "auto", limits=limits, kind=timed(CHEAP, drafting=9.0))[1]
    assert speculator.tally.plans["plain"] > 10
    assert {plan.split(":")[0] for plan in speculator.tally.plans} == {"look", "plain", "wave", "block"}, "tried once"


def test_a_single_loop_has_nothing_to_draft_with(tiny):
    model = built(tiny, num_loops=1)
    assert speculatively(model, "auto", limits=Limits(max_tokens=5))[0] == plainly(model, limits=Limits(max_tokens=5))


@pytest.mark.parametrize("plan", ["wave", "block:2", "block:1,2,3", "wave:-1", "all", "wave:99999"])
def test_a_plan_that_means_nothing_is_refused(plan):
    with pytest.raises(ConfigError, match="--speculate"):
        parse_plan(plan)


@pytest.mark.parametrize("plan", [DraftPlan("wave", 4), DraftPlan("block", 0, 2), DraftPlan("block", 1, 0)])
def test_a_plan_that_does_not_fit_the_depth_is_refused(four_loops, plan):
    with pytest.raises(ConfigError, match="--speculate"):
        Speculator(built(four_loops), 4, plan=plan)


def test_a_wave_needs_loops_that_take_rows_at_different_depths(four_loops):
    model = built(four_loops)

    class OneDepth(torch.nn.Module, ls.LinearReadout, ls.Cached):
        num_loops, embed, loop, features = 4, model.embed, model.loop, model.features
        head = model.head

    with pytest.raises(UnsupportedError, match="rows at different depths"):
        Speculator(OneDepth(), 4, plan=DraftPlan("wave", 1))
    limits = Limits(max_tokens=12)
    assert speculatively(OneDepth(), "block:1,3", limits=limits)[0] == plainly(model, limits=limits)
