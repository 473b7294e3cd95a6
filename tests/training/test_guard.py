"""The guard: skip, then roll back, then stop, each with a sentence that says what was seen."""

from __future__ import annotations

import math

from loopscope.config import TrainingConfig
from loopscope.training.guard import RECENT, StepGuard

NAN, INF = math.nan, math.inf


def guard(**fields) -> StepGuard:
    return StepGuard(TrainingConfig(max_skips=2, max_rollbacks=1, **fields))


def test_a_finite_step_is_applied_and_a_non_finite_one_skipped():
    watch = guard()
    assert watch.judge(1, 2.0, 1.0).action == "apply"
    assert watch.judge(2, NAN, 1.0).reason == "step 2: the loss is nan; skipped (1 in a row)"
    assert "gradient norm is inf at a loss of 2" in watch.judge(3, 2.0, INF).reason
    assert watch.judge(4, 2.0, 1.0).action == "apply"


def test_bad_steps_in_a_row_roll_back_then_stop():
    watch = guard()
    assert [watch.judge(step, NAN, 1.0).action for step in (1, 2, 3)] == ["skip", "skip", "rollback"]
    watch.rolled_back()
    assert watch.lr_factor == 0.5
    last = [watch.judge(step, INF, 1.0) for step in (1, 2, 3)][-1]
    assert last.action == "stop" and "the loss is inf, after 1 rollbacks" in last.reason


def test_a_spike_is_measured_against_the_recent_median_and_never_enters_it():
    watch = guard(spike_factor=3.0)
    for step in range(RECENT):
        assert watch.judge(step, 2.0 + 0.01 * (step % 5), 1.0).action == "apply"
    verdict = watch.judge(99, 50.0, 1.0)
    assert verdict.action == "skip" and "spiked to 50, 24.8 times its recent median" in verdict.reason
    assert 50.0 not in watch.recent
    assert watch.judge(100, 5.9, 1.0).action == "apply"


def test_no_spike_is_called_before_there_is_a_history():
    """The paper's initialisation starts at a hundred nats; early losses are wild."""
    watch = guard()
    assert all(watch.judge(step, loss, 1.0).action == "apply" for step, loss in enumerate([5.0, 100.0, 3.0, 300.0]))


def test_a_model_that_is_not_finite_is_rolled_back_and_in_the_end_stopped():
    guard = StepGuard(TrainingConfig(max_rollbacks=1))
    assert guard.judge_model(5, "the weights are not finite").action == "rollback"
    guard.rolled_back()
    verdict = guard.judge_model(5, "the weights are not finite")
    assert verdict.action == "stop" and verdict.reason.startswith("step 5: the weights are not finite, after 1")


def test_the_state_survives_a_checkpoint():
    watch, copy = guard(), guard()
    for step, loss in enumerate([2.0, 3.0, NAN]):
        watch.judge(step, loss, 1.0)
    copy.restore(watch.state())
    assert copy.state() == watch.state()
    assert copy.judge(4, NAN, 1.0) == watch.judge(4, NAN, 1.0)
