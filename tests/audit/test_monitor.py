"""The online monitor: shares that follow Lemma 1, and alarms that are raised once, when and only when they should."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.audit.monitor import Observation, ScaleMonitor, radial_gradient_shares

FLOAT32 = torch.finfo(torch.float32).max


def shares(config, ids_BT):
    model = ls.build(config, seed=0).double()
    return radial_gradient_shares(model, ls.run_loops(model, ids_BT), ids_BT, [1, 2, 3])


def test_the_share_is_nothing_through_a_norm_and_something_through_raw(tiny, ids_BT):
    hidden = shares(tiny, ids_BT)
    visible = shares(replace(tiny, readout="raw"), ids_BT)
    assert max(hidden) < 1e-5
    assert min(visible) > 0.3 / math.sqrt(tiny.width)


def test_final_only_is_visible_at_its_raw_loops_alone(tiny, ids_BT):
    first, second, last = shares(replace(tiny, readout="final-only"), ids_BT)
    assert min(first, second) > 0.01 and last < 1e-5


def test_watching_changes_no_gradient_and_leaves_none_behind(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    result = model(ids_BT, ids_BT, ls.Objective(ls.ObjectiveConfig()))
    radial_gradient_shares(model, result.trace, ids_BT, result.supervised)
    assert all(parameter.grad is None for parameter in model.parameters())
    result.loss.backward()


def seen(step, norm, share=1e-7, controlled=False, largest=1.0) -> Observation:
    return Observation(step, norm, [share, share], controlled, largest)


def test_a_hidden_runaway_scale_raises_one_alarm_that_says_what_since_when_how_fast_and_what_to_do():
    monitor = ScaleMonitor(FLOAT32)
    alarms = [monitor.observe(seen(step, 10 * 1.05**step)) for step in range(0, 100, 5)]
    (alarm,) = (a for a in alarms if a is not None)
    assert alarm.kind == "blind-spot"
    assert "step 50: ‖h_K‖ is 115, 11 times its start" in alarm.message
    assert "changing by +5 % per step" in alarm.message and "--norm-penalty 0.01" in alarm.message


@pytest.mark.parametrize("harmless", [{"share": 0.05}, {"controlled": True}])
def test_growth_that_a_loss_sees_raises_no_alarm(harmless):
    monitor = ScaleMonitor(FLOAT32)
    assert all(monitor.observe(seen(step, 10 * 1.1**step, **harmless)) is None for step in range(100))


def test_a_hidden_scale_that_stays_put_raises_no_alarm():
    monitor = ScaleMonitor(FLOAT32)
    assert all(monitor.observe(seen(step, 10 + step % 3)) is None for step in range(100))


def test_little_headroom_is_an_alarm_of_its_own_even_when_scale_is_visible():
    monitor = ScaleMonitor(torch.finfo(torch.float16).max)
    assert monitor.observe(seen(1, 10.0, share=0.1, largest=100.0)) is None
    alarm = monitor.observe(seen(2, 10.0, share=0.1, largest=5000.0))
    assert alarm is not None and alarm.kind == "headroom" and "1.1 decades of overflow" in alarm.message


def test_the_slope_is_that_of_the_logarithm():
    monitor = ScaleMonitor(FLOAT32)
    for step in range(10):
        monitor.observe(seen(step, math.exp(0.2 * step)))
    assert monitor.slope() == pytest.approx(0.2)


def test_a_non_finite_norm_is_left_to_the_guards():
    monitor = ScaleMonitor(FLOAT32)
    assert monitor.observe(seen(1, math.nan)) is None
    assert monitor.start is None


def test_the_state_survives_a_checkpoint():
    monitor, copy = ScaleMonitor(FLOAT32), ScaleMonitor(FLOAT32)
    for step in range(60):
        monitor.observe(seen(step, 10 * 1.05**step))
    copy.restore(monitor.state())
    assert copy.state() == monitor.state()
    assert copy.observe(seen(70, 1e4)) is None, "an alarm raised before is not raised again"
