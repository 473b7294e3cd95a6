"""What came of a fix: verdict, norm and perplexity have to agree before it is called fixed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.api.remedies import HELD_SCALE, MeasuredModel, judge
from loopscope.options import AuditOptions
from loopscope.results.evaluation import Depth, Split

WIDTH, LOOPS = 16, 3
HELD = HELD_SCALE * math.sqrt(WIDTH)


@pytest.fixture(scope="module")
def audited():
    """An audit of a small design, whose verdicts a test may replace."""
    config = ls.ModelConfig(vocab_size=32, width=WIDTH, num_layers=1, num_heads=2, num_loops=LOOPS, max_length=16)
    options = AuditOptions(states=1, prefix=4, tokens=16, rollout=3)
    ids_BT = torch.randint(32, (2, 12), generator=torch.Generator().manual_seed(0))
    return ls.audit(ls.build(config, seed=0), [ids_BT], supervised="every-loop", options=options)


@pytest.fixture
def measured(audited):
    def make(verdict: str, norm: float, ce=2.0, scale: str | None = None, supervised=(1, 2, 3)) -> MeasuredModel:
        fate = scale or ("blind" if verdict == "blind-spot" else "visible")
        variables = [replace(one, verdict=fate if one.name == "scale" else "visible") for one in audited.variables]
        subject = replace(audited.model, supervised=list(supervised))
        checks = replace(audited.checks, doubts=["the arithmetic is too coarse"])
        audit = replace(audited, verdict=verdict, variables=variables, model=subject, checks=checks)
        each = [ce] * LOOPS if isinstance(ce, float) else ce
        depths = [Depth(k, each[k - 1], norm * k / LOOPS) for k in range(1, LOOPS + 1)]
        return MeasuredModel(audit, Split(depths=depths, tokens=10))

    return make


def test_a_norm_that_came_down_under_a_verdict_that_agrees_is_fixed(measured):
    outcome, (reason,) = judge(measured("blind-spot", 400.0), measured("controlled", 30.0))
    assert outcome == "fixed" and "‖h_3‖ 400 → 30 (scale 7.5)" in reason


def test_a_norm_that_went_up_is_worse_whatever_the_verdict(measured):
    outcome, (reason,) = judge(measured("blind-spot", 76.0), measured("controlled", 100.0))
    assert outcome == "worse" and "the norm went up: ‖h_3‖ 76 → 100" in reason


def test_a_norm_that_hardly_came_down_needs_more_steps(measured):
    outcome, (reason,) = judge(measured("blind-spot", 400.0), measured("controlled", 390.0))
    assert outcome == "unfinished" and "400 → 390" in reason and "more --steps" in reason
    assert judge(measured("blind-spot", 400.0), measured("controlled", 199.0))[0] == "fixed"


def test_a_state_that_never_ran_away_may_grow_a_little(measured):
    assert judge(measured("blind-spot", 0.8 * HELD), measured("controlled", 0.99 * HELD))[0] == "fixed"
    assert judge(measured("blind-spot", 0.8 * HELD), measured("controlled", 1.01 * HELD))[0] == "worse"


@pytest.mark.parametrize(("factor", "outcome"), [(0.5, "fixed"), (1.0099, "fixed"), (1.0101, "worse"), (1.03, "worse")])
def test_perplexity_may_be_one_percent_worse(measured, factor, outcome):
    after = measured("controlled", 30.0, ce=[2.0, 2.0, 2.0 + math.log(factor)])
    assert judge(measured("blind-spot", 400.0), after)[0] == outcome


def test_the_exit_that_suffered_most_is_named_with_its_perplexity(measured):
    after = measured("controlled", 30.0, ce=[2.0 + math.log(1.02), 2.0 + math.log(1.03), 1.0])
    (reason,) = judge(measured("blind-spot", 400.0), after)[1]
    assert reason.startswith("perplexity at loop 2 got worse (+3.0 %, 7.389 → 7.611)")
    assert "2 of 3 supervised loops" in reason


def test_exits_that_nobody_trains_may_get_worse(measured):
    before = measured("blind-spot", 400.0, supervised=[3])
    assert judge(before, measured("controlled", 30.0, ce=[9.0, 9.0, 2.0], supervised=[3]))[0] == "fixed"
    assert judge(before, measured("controlled", 30.0, ce=[2.0, 2.0, 9.0], supervised=[3]))[0] == "worse"


def test_a_perplexity_that_is_no_number_is_told_as_cross_entropy(measured):
    (reason,) = judge(measured("blind-spot", 400.0), measured("controlled", 30.0, ce=800.0))[1]
    assert "CE 2 → 800" in reason


def test_what_is_still_blind_is_named_and_not_fixed(measured):
    outcome, (reason,) = judge(measured("blind-spot", 400.0), measured("blind-spot", 30.0))
    assert outcome == "unfinished" and "still blind: scale" in reason and "more --steps" in reason


def test_everything_that_is_wrong_is_told_and_the_worst_decides(measured):
    outcome, reasons = judge(measured("blind-spot", 76.0), measured("blind-spot", 100.0, ce=3.0))
    assert outcome == "worse" and len(reasons) == 3
    assert [word in reason for word, reason in zip(("norm", "perplexity", "blind"), reasons, strict=True)] == [True] * 3


def test_an_undecided_audit_afterwards_is_told_with_its_reason(measured):
    outcome, (reason,) = judge(measured("blind-spot", 400.0), measured("undecided", 30.0))
    assert outcome == "undecided" and "Undecided: the arithmetic is too coarse." in reason


@pytest.mark.parametrize(("verdict", "why"), [("controlled", "there was none before"), ("undecided", "was undecided")])
def test_without_a_blind_spot_before_none_has_been_fixed(measured, verdict, why):
    outcome, (reason,) = judge(measured(verdict, 30.0), measured("controlled", 31.0))
    assert outcome == "controlled" and "no blind spot has been fixed" in reason and why in reason
    assert judge(measured(verdict, 30.0), measured("controlled", 30.0, ce=3.0))[0] == "worse"


def test_the_norm_of_a_model_whose_scale_was_seen_may_move_but_not_double(measured):
    before = measured("blind-spot", 100.0, scale="visible")
    assert judge(before, measured("controlled", 150.0))[0] == "fixed"
    outcome, (reason,) = judge(before, measured("controlled", 201.0))
    assert outcome == "worse" and "the state has grown: ‖h_3‖ 100 → 201" in reason
