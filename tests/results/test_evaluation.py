"""Verdicts on scores: depths beyond the trained one, and what a cache may drop."""

from __future__ import annotations

import json
import math

import pytest

from loopscope.results.evaluation import CacheTable, Depth, Evaluation, PolicyCost, Split, Throughput, Timing, beyond
from loopscope.results.record import decode, encode


def split(*ces: float | None) -> Split:
    return Split(depths=[Depth(k, ce, 1.0) for k, ce in enumerate(ces, start=1)], tokens=100)


@pytest.mark.parametrize(
    ("ces", "words"),
    [
        ((9.0, 5.0, 4.9, 4.8), "better until 4, the deepest measured"),
        ((9.0, 5.0, 4.995, 5.009), "flat until 4, the deepest measured"),
        ((9.0, 5.0, 4.9, 4.995, 5.2), "better until 3, flat until 4, broken from 5"),
        ((9.0, 5.0, 4.995, 4.98, 5.05, 5.2), "better until 4, worse from 5, broken from 6"),
        ((9.0, 5.0, 5.011), "worse from 3"),
        ((9.0, 5.0, 5.3, 4.0), "broken from 3"),
        ((9.0, 5.0, 5.05, 4.0), "worse from 3"),  # what comes back after it got worse is no depth to recommend
        ((9.0, 5.0, 5.0, None), "flat until 3, broken from 4"),
        ((9.0, 5.0, 5.0, math.nan), "flat until 3, broken from 4"),
        ((9.0, 5.0, 5.0, math.inf), "flat until 3, broken from 4"),
    ],
)
def test_depths_beyond_the_trained_one_are_better_flat_worse_or_broken(ces, words):
    verdict = beyond(split(*ces), 2)
    assert verdict.sentence == f"Beyond the trained 2 loops: {words}."
    assert (verdict.trained, verdict.deepest) == (2, len(ces))


@pytest.mark.parametrize("ces", [(9.0,), (9.0, 5.0), (9.0, None, 5.0), ()])
def test_there_is_no_verdict_without_the_trained_depth_and_a_deeper_one(ces):
    assert beyond(split(*ces), 2) is None


def cost(name="last-loop", delta=0.0, error=0.001, share=0.25, applies_to="decode") -> PolicyCost:
    return PolicyCost(name, applies_to, 256, share, None if delta is None else 5 + delta, delta, error)


EXACT = cost("exact", 0.0, 0.0, 1.0, "prefill and decode")


def table(*costs: PolicyCost, **motion: float | None) -> CacheTable:
    ratios = {"update_ratio": 0.3, "turning_ratio": 0.9, "scale_ratio": 1.1, **motion}
    return CacheTable(num_loops=4, windows=8, tokens=512, policies=[EXACT, *costs], **ratios)


@pytest.mark.parametrize(
    ("delta", "error", "verdict"),
    [
        (0.004, 0.003, "safe"), (-0.5, 0.001, "safe"), (0.004, 0.0031, "undecided"), (0.012, 0.002, "undecided"),
        (0.02, 0.004, "unsafe"), (0.009, None, "safe"), (0.011, None, "unsafe"), (None, None, "unsafe"),
    ],
)  # fmt: skip
def test_a_policy_is_safe_or_unsafe_only_two_standard_errors_off_the_limit(delta, error, verdict):
    assert cost(delta=delta, error=error).verdict == verdict


def test_the_summary_names_what_is_safe_and_the_cheapest_of_it():
    found = table(cost("last-loop", 0.5), cost("ring-2", 0.001, share=0.5), cost("ring-1", 0.002, share=0.25))
    assert found.cheapest.policy == "ring-1"
    assert "Safe at 0.01 nats a token: ring-2 (decode only), ring-1 (decode only)." in found.summary
    assert "Cheapest: ring-1 (decode only), 0.25 of the exact bytes." in found.summary


def test_the_summary_says_so_where_nothing_is_safe_or_too_little_was_read():
    found = table(cost("last-loop", 0.5), cost("first-loop", 0.1, applies_to="prefill and decode"))
    assert (
        "No policy is safe at 0.01 nats a token; the least costly is first-loop (prefill too) at +0.1" in found.summary
    )
    assert "Undecided on this much text: last-loop" in table(cost(delta=0.009, error=0.002)).summary
    assert "No policy is safe" in table(cost(delta=None)).summary
    assert table().summary == "One loop has one slot: there is nothing to share."


def test_the_summary_says_how_the_loop_moves():
    assert (
        "The loop contracts (last update 0.3 of the first), goes on turning (0.9) and keeps its scale"
        in table(cost()).summary
    )
    drifting = table(cost(), update_ratio=1.0, turning_ratio=0.2, scale_ratio=4.0).summary
    assert "does not contract (last update 1 of the first), turns less and less (0.2) and drifts in scale" in drifting
    assert "The loop" not in table(cost(), update_ratio=None).summary


def test_an_evaluation_is_read_back_as_it_was_written():
    evaluation = Evaluation(
        step=3,
        tokenizer="bytes",
        num_loops=4,
        splits={"valid": split(5.0, 4.0)},
        throughput=[Throughput(1, 10.0)],
        speed=[Timing(1, "prefill", 10.0, 9.0, 11.0, 64), Timing(1, "decode", 5.0, 4.0, 6.0, None)],
        cache=table(cost("ring-2")),
        threads=1,
        device="cpu",
    )
    assert decode(encode(evaluation), Evaluation) == evaluation
    written = json.loads(encode(evaluation))
    assert written["cache"]["policies"][1]["verdict"] == "safe" and "ring" in written["cache"]["summary"]
    assert written["splits"]["valid"]["depths"][0]["perplexity"] == pytest.approx(math.exp(5))


def test_what_follows_from_a_number_is_not_read_but_computed():
    assert decode(b'{"k": 1, "ce": 0.0, "norm": null, "perplexity": 40.0}', Depth).perplexity == 1.0
    assert Depth(1, 800.0, 1.0).perplexity is None and Depth(1, None, None).perplexity is None
