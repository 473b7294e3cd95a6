"""The online monitor: shares that follow Lemma 1, and alarms that are raised once, when and only when they should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.auditing.monitor import (
    Reading,
    ScaleMonitor,
    carried_scale,
    radial_gradient_shares,
    read,
    tenfold_charge,
)

FLOAT32 = torch.finfo(torch.float32).max
FLOAT16 = torch.finfo(torch.float16).max


def traced(config, ids_BT, dtype=torch.float64):
    model = ls.build(config, seed=0).eval().to(dtype)
    return model, ls.run_loops(model, ids_BT)


def shares(config, ids_BT, targets_BT=None, dtype=torch.float64):
    model, trace = traced(config, ids_BT, dtype)
    return radial_gradient_shares(model, trace, ids_BT if targets_BT is None else targets_BT, [1, 2, 3])


def test_the_share_is_nothing_through_a_norm_and_something_through_raw(tiny, ids_BT):
    hidden = shares(tiny, ids_BT)
    visible = shares(replace(tiny, readout="raw"), ids_BT)
    assert max(hidden) < 1e-5
    assert min(visible) > 0.3 / math.sqrt(tiny.width)


def test_the_two_are_told_apart_in_bfloat16(tiny, ids_BT):
    assert max(shares(tiny, ids_BT, dtype=torch.bfloat16)) < 1e-3
    assert min(shares(replace(tiny, readout="raw"), ids_BT, dtype=torch.bfloat16)) > 1e-2


def test_final_only_is_visible_at_its_raw_loops_alone(tiny, ids_BT):
    first, second, last = shares(replace(tiny, readout="final-only"), ids_BT)
    assert min(first, second) > 0.01 and last < 1e-5


def test_tokens_without_a_target_do_not_hide_what_the_others_show(tiny, ids_BT):
    """Padding has no gradient; a median over it would be zero, a false blind spot."""
    padded_BT = ids_BT.clone()
    padded_BT[:, 3:] = -100
    raw = replace(tiny, readout="raw")
    assert shares(raw, ids_BT, padded_BT) == pytest.approx(shares(raw, ids_BT[:, :3]))


def test_without_any_gradient_the_share_is_unknown(tiny, ids_BT):
    nothing = shares(replace(tiny, readout="raw"), ids_BT, torch.full_like(ids_BT, -100))
    assert all(math.isnan(share) for share in nothing)


def test_watching_changes_no_gradient_and_leaves_none_behind(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    result = model(ids_BT, ids_BT, ls.Objective(ls.ObjectiveConfig()))
    read(model, result.trace, ids_BT, dict.fromkeys(result.supervised, 1 / 3))
    assert all(parameter.grad is None for parameter in model.parameters())
    result.loss.backward()


def test_a_residual_loop_carries_scale_and_a_norm_between_loops_removes_it(tiny, ids_BT):
    assert carried_scale(*traced(tiny, ids_BT)) == pytest.approx(1, abs=0.2)
    assert carried_scale(*traced(replace(tiny, inter_loop_norm="rmsnorm"), ids_BT)) < 1e-5


def test_a_damping_loop_carries_its_factor(ids_BT):
    table = torch.randn(37, 8)
    model = ls.adapt(
        embed=lambda ids: table[ids], loop=lambda h, k: 0.3 * h + 1, readout=lambda h, k: h @ table.T, num_loops=2
    )
    assert carried_scale(model, ls.run_loops(model, ids_BT)) == pytest.approx(0.3, rel=1e-5)


def test_a_reading_is_of_the_whole_trace(tiny, ids_BT):
    model, trace = traced(tiny, ids_BT, torch.float32)
    reading = read(model, trace, ids_BT, {1: 0.5, 3: 0.5})
    assert reading.norms == pytest.approx([state.h_BTD.norm(dim=-1).mean().item() for state in trace.states[1:]])
    assert reading.largest == pytest.approx([state.h_BTD.abs().max().item() for state in trace.states])
    assert list(reading.shares) == [1, 3] and reading.limit == FLOAT32
    with torch.autocast("cpu", dtype=torch.float16):
        assert read(model, trace, ids_BT, {1: 0.5, 3: 0.5}).limit == FLOAT16


# --- alarms ----------------------------------------------------------------------------------------------------------


def reading(norm, share=1e-7, charge=1e-9, carried=1.0, largest=1.0, limit=FLOAT32) -> Reading:
    return Reading((norm / 2, norm), {1: share, 2: share}, charge, carried, (0.5, largest / 2, largest), limit)


def observe(norms, **fields):
    """The alarms raised by a course of norms, five steps apart, and the monitor that raised them."""
    controlled = fields.pop("controlled", False)
    monitor = ScaleMonitor()
    seen = [monitor.observe(5 * i, reading(norm, **fields), controlled=controlled) for i, norm in enumerate(norms)]
    return [alarm for observation in seen for alarm in observation.alarms], monitor


def test_a_hidden_runaway_scale_raises_one_alarm_that_says_what_since_when_how_fast_and_what_to_do():
    (alarm,), _ = observe([10 * 1.05**step for step in range(0, 100, 5)])
    assert (alarm.kind, alarm.step, alarm.since) == ("blind-spot", 50, 15)
    assert "step 50: ‖h_K‖ is 115, 11 times its start, beyond twice since step 15" in alarm.message
    assert "tenfold growth is charged 1e-09 nats a token, and 0.01 would be noticed" in alarm.message
    assert "training drives it up by 5 % a step" in alarm.message
    assert "radial gradient share is at most 1e-07" in alarm.message
    assert "--norm-penalty 0.01" in alarm.message and "ls.norm_penalty(states, 0.01)" in alarm.message
    assert str(alarm).startswith("blind-spot: step 50")


def test_an_alarm_about_a_scale_that_is_on_its_way_back_says_so():
    """Held by a loss while it was large, and let go."""
    monitor = ScaleMonitor()
    monitor.observe(0, reading(10.0))
    for step in range(1, 9):
        monitor.observe(step, reading(1000 * 0.9**step, charge=1.0))
    (alarm,) = monitor.observe(9, reading(1000 * 0.9**9)).alarms
    assert "training drives it down by 10 % a step" in alarm.message


def test_a_scale_that_came_back_in_between_is_growing_only_since_then():
    (alarm,), _ = observe([10, 30, 12, 30, 50, 200])
    assert alarm.since == 15


@pytest.mark.parametrize(
    "harmless", [{"charge": 0.05}, {"controlled": True}, {"carried": 0.0}, {"carried": math.nan}, {"charge": math.nan}]
)
def test_growth_that_a_loss_sees_or_a_loop_forgets_raises_no_alarm(harmless):
    alarms, _ = observe([10 * 1.1**step for step in range(100)], **harmless)
    assert alarms == []


def test_one_visible_loop_is_enough_unless_its_weight_is_next_to_nothing(tiny, ids_BT):
    """Raw exits below an RMSNorm one charge for tenfold scale by their weight: ½·w·(g·rms z)²·9² ≥ 40·w nats."""
    model, trace = traced(replace(tiny, readout="final-only"), ids_BT)
    even, feeble = dict.fromkeys((1, 2, 3), 1 / 3), {1: 1e-9, 2: 1e-9, 3: 1.0}
    assert tenfold_charge(model, trace, even, []) > 0.01 > tenfold_charge(model, trace, feeble, [])


@pytest.mark.parametrize(("weight", "holds"), [(1e-2, True), (2e-4, True), (5e-5, False), (1e-8, False)])
def test_a_penalty_holds_the_scale_by_its_weight_and_not_by_being_there(tiny, ids_BT, weight, holds):
    """λ·(10² − 1)·s² from scale 1: 0.01 nats at λ = 1.01e-4, however far the state has run already."""
    model, trace = traced(tiny, ids_BT)
    for state in trace.states:
        state.h_BTD = 500 * state.h_BTD
    charge = tenfold_charge(model, trace, dict.fromkeys((1, 2, 3), 1 / 3), [ls.NormPenalty(weight)])
    assert charge == pytest.approx(99 * weight, rel=0.01) and (charge >= 0.01) == holds


def test_a_hidden_scale_that_stays_put_raises_no_alarm():
    alarms, _ = observe([10 + step % 3 for step in range(100)])
    assert alarms == []


def test_little_headroom_is_an_alarm_of_its_own_even_when_scale_is_visible():
    monitor = ScaleMonitor()
    far = monitor.observe(1, reading(10.0, share=0.1, largest=100.0, limit=FLOAT16))
    assert far.alarms == () and far.headroom == pytest.approx(math.log10(65504 / 100))
    (alarm,) = monitor.observe(11, reading(20.0, share=0.1, largest=5000.0, limit=FLOAT16)).alarms
    assert alarm.kind == "headroom" and "1.1 decades from the largest number" in alarm.message
    assert "at +7.2 % per step it is reached in about 37 steps" in alarm.message and "Remedy" in alarm.message


def test_two_kinds_of_alarm_may_come_in_one_step():
    alarms, _ = observe([1.0, 100.0], largest=5000.0, limit=FLOAT16)
    assert [alarm.kind for alarm in alarms] == ["headroom", "blind-spot"]


def test_the_largest_state_of_any_loop_counts():
    wide = replace(reading(1.0), largest=(1e37, 1.0, 1.0))
    assert ScaleMonitor().observe(1, wide).headroom == pytest.approx(1.53, abs=0.01)


def test_the_slope_is_that_of_the_logarithm():
    monitor = ScaleMonitor()
    slopes = [monitor.observe(step, reading(math.exp(0.2 * step))).slope for step in range(10)]
    assert slopes[0] == 0 and slopes[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("largest", "where"), [((1.0, 2.0, math.nan), "from loop 2 on"), ((math.inf, math.nan, math.nan), "before loop 1")]
)
def test_a_state_that_is_not_finite_is_an_alarm_that_names_the_loop(largest, where):
    monitor = ScaleMonitor()
    monitor.observe(4, reading(10.0))
    broken = replace(reading(math.nan), norms=largest[1:], largest=largest)
    (alarm,) = monitor.observe(8, broken).alarms
    assert alarm.kind == "non-finite" and alarm.since == 4
    assert f"step 8: the state is not finite {where}; at step 4 it still was, with ‖h_K‖ 10" in alarm.message
    assert "go back to a checkpoint of step 4" in alarm.message
    assert monitor.observe(12, broken).alarms == (), "once"
    assert monitor.start == 10 and monitor.recent[-1][0] == 4, "what is not finite is no scale to follow"


def test_a_norm_that_overflows_names_its_loop_too():
    broken = replace(reading(math.inf), norms=(math.inf, math.inf), largest=(1.0, 1e30, 1e30))
    (alarm,) = ScaleMonitor().observe(1, broken).alarms
    assert "from loop 1 on, and never was" in alarm.message


def test_scalars_are_the_last_norm_and_the_largest_known_share():
    monitor = ScaleMonitor()
    monitor.observe(1, reading(1.0))
    seen = monitor.observe(2, replace(reading(math.e), shares={1: 0.2, 2: math.nan}))
    assert seen.scalars() == {
        "loopscope/norm_K": math.e,
        "loopscope/radial_gradient_share": 0.2,
        "loopscope/slope": pytest.approx(1.0),
        "loopscope/headroom": pytest.approx(math.log10(FLOAT32)),
    }
    unknown = monitor.observe(3, replace(reading(1.0), shares={1: math.nan}))
    assert "loopscope/radial_gradient_share" not in unknown.scalars()


def test_the_state_survives_a_checkpoint():
    alarms, monitor = observe([10 * 1.05**step for step in range(60)])
    copy = ScaleMonitor()
    copy.restore(monitor.state())
    assert alarms and copy.state() == monitor.state()
    assert copy.since == monitor.since == 75
    assert copy.observe(700, reading(1e4)).alarms == (), "an alarm raised before is not raised again"
