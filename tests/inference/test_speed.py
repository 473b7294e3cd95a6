"""Timing of depths: interleaved rounds, by a clock of the test's own. How fast anything is decides no test."""

from __future__ import annotations

from dataclasses import replace

import pytest

import loopscope as ls
from loopscope.inference.costs import time_depths

PROMPT = [1, 2, 3, 4, 5, 6]


class Clocked:
    """A model whose loops, and nothing else, take time: one second each, by its own clock."""

    def __init__(self, config):
        self.now, self.calls = 0.0, []
        outer = self

        class Model(ls.LoopedLM):
            def loop(self, state, k, cache=None):
                outer.now += 1.0
                outer.calls.append(k)
                return super().loop(state, k, cache)

        self.model = Model(config).eval()


@pytest.fixture
def clocked(tiny) -> Clocked:
    return Clocked(replace(tiny, width=16, num_layers=1))


def test_a_rate_is_tokens_over_the_time_of_their_loops(clocked):
    timings = time_depths(clocked.model, PROMPT, [1, 4], tokens=5, rounds=3, clock=lambda: clocked.now)
    found = {(each.k, each.what): each.tokens_per_second for each in timings}
    assert found == {(1, "prefill"): 6, (1, "decode"): 1, (4, "prefill"): 1.5, (4, "decode"): 0.25}
    assert all(each.low == each.tokens_per_second == each.high for each in timings)
    bytes_of_a_loop = 1 * 2 * 16 * 4
    assert {each.k: each.bytes_per_token for each in timings} == {1: bytes_of_a_loop, 4: 4 * bytes_of_a_loop}


def test_depths_take_turns_and_the_first_round_does_not_count(clocked):
    rounds = []

    def clock():
        rounds.append(clocked.now)
        return clocked.now if len(rounds) > 8 else clocked.now * 1000  # the warm-up is slow

    timings = time_depths(clocked.model, PROMPT, [1, 2], tokens=3, rounds=2, clock=clock)
    assert clocked.calls == [1, 1, 1, 1, 2, 1, 2, 1, 2] * 3
    assert [each.tokens_per_second for each in timings] == [6, 1, 3, 0.5]


def test_another_way_to_decode_is_timed_beside_the_plain_one(clocked):
    def twice_as_fast(model, prompt, num_loops, tokens):
        assert (list(prompt), tokens) == (PROMPT, 5)
        for _ in range(tokens):
            clocked.now += num_loops / 2
            yield None

    timings = time_depths(
        clocked.model, PROMPT, [2], tokens=5, rounds=2, ways={"speculation": twice_as_fast}, clock=lambda: clocked.now
    )
    assert {each.what: each.tokens_per_second for each in timings} == {
        "prefill": 3, "decode": 0.5, "decode, speculation": 1.0,
    }  # fmt: skip


def test_a_model_without_a_cache_is_timed_too_and_keeps_no_bytes(clocked):
    theirs = ls.adapt(
        embed=lambda ids: clocked.model.embed(ids).h_BTD,
        loop=lambda h, k: setattr(clocked, "now", clocked.now + h.shape[1]) or h,
        readout=lambda h, k: h @ clocked.model.head.T,
        num_loops=2,
    )
    timings = time_depths(theirs, PROMPT, [1], tokens=3, rounds=2, clock=lambda: clocked.now)
    assert {each.what: each.tokens_per_second for each in timings} == {"prefill": 1, "decode": pytest.approx(2 / 15)}
    assert all(each.bytes_per_token is None for each in timings)
