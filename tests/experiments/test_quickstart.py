"""The quickstart: fair, deterministic, and showing the blind spot in its first steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loopscope.cli.quickstart import in_words
from loopscope.data.corpora import builtin_corpus
from loopscope.experiments.quickstart import (
    CONDITIONS,
    Condition,
    ConditionResult,
    TokenSplits,
    random_batches,
    run_condition,
    tokenize,
)

pytestmark = pytest.mark.usefixtures("flushed_denormals")


@pytest.fixture(scope="module")
def tokens() -> TokenSplits:
    return tokenize(builtin_corpus())


def test_conditions_are_the_four_corners_and_differ_in_nothing_else():
    assert len({(condition.placement, condition.readout) for condition in CONDITIONS}) == 4
    bases = {
        repr((replace(c.config().model, readout="raw"), replace(c.config().objective, placement="per-loop")))
        for c in CONDITIONS
    }
    assert len(bases) == 1


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tokens):
    condition = Condition("per-loop", "rmsnorm")
    first, again, other = (run_condition(condition, tokens, steps=3, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.ce_K != other.ce_K


def test_the_blind_spot_shows_within_thirty_steps(tokens):
    norms = {
        readout: run_condition(Condition("per-loop", readout), tokens, steps=30, seed=0).norms_K[-1]
        for readout in ("rmsnorm", "raw")
    }
    assert norms["rmsnorm"] > 10 * norms["raw"]


def test_batches_are_windows_of_the_text_with_targets_one_token_on():
    ids = torch.arange(1000)
    batches = random_batches(ids, seed=0)
    inputs, targets = next(batches)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(next(batches)[0], inputs)
    assert torch.equal(next(random_batches(ids, seed=0))[0], inputs)


def test_the_words_quote_the_measured_numbers():
    results = [
        ConditionResult(condition, [5.0, 4.0], [10.0, norm])
        for condition, norm in zip(CONDITIONS, (50.0, 3.0, 400.0, 4.0), strict=True)
    ]
    words = in_words(results)
    assert "norm 400 through the RMSNorm readout and at 4.0 through the raw one: 100 times less" in words
    assert "+1.00 nats" in words
