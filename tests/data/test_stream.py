"""The order of training data, and evaluation that covers each token once."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from loopscope.data.corpora import Corpus, Shelf
from loopscope.data.packing import pack
from loopscope.data.stream import (
    TrainingStream,
    covered_bytes,
    evaluation_batches,
    permuted,
    unigram_cross_entropy,
)
from loopscope.data.tokenizers import bytes_tokenizer, fit_tokenizer
from loopscope.errors import ConfigError, DataError


def stream(num_tokens: int = 1000, length: int = 8, stride: int = 4, batch: int = 6, seed: int = 0) -> TrainingStream:
    """Over tokens that are their own positions, so that a row says where it starts."""
    return TrainingStream(np.arange(num_tokens, dtype=np.uint16), length, stride, batch, seed)


def starts(stream: TrainingStream, step: int, **where: int) -> list[int]:
    return stream.batch(step, **where)[0][:, 0].tolist()


def order(size: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return permuted(np.arange(size), size, seed, np.full(size, epoch)).tolist()


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**40))
def test_the_order_is_a_permutation_for_every_size_seed_and_epoch(size, seed, epoch):
    assert sorted(order(size, seed, epoch)) == list(range(size))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 4096, 65_537])
def test_the_order_is_a_permutation_around_powers_of_two(size):
    assert sorted(order(size)) == list(range(size))


@given(st.integers(1, 2**50), st.lists(st.integers(0, 2**50), min_size=1, max_size=20, unique=True))
def test_distinct_places_of_a_huge_epoch_stay_distinct_and_inside(size, places):
    index = np.unique(np.array(places) % size)
    found = permuted(index, size, 1, np.zeros(len(index), dtype=np.int64))
    assert len(set(found.tolist())) == len(index) and found.min() >= 0 and found.max() < size


def test_one_place_is_the_same_alone_and_among_others():
    assert [int(permuted(np.array([i]), 100, 7, np.array([3]))[0]) for i in range(100)] == order(100, 7, 3)


def test_orders_of_different_seeds_and_epochs_are_different_and_not_nearly_sorted():
    orders = {tuple(order(500, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    for found in orders:
        assert abs(np.corrcoef(found, range(500))[0, 1]) < 0.2
        assert sum(after == before + 1 for before, after in pairwise(found)) < 10


def test_a_window_lands_in_every_place_equally_often_over_many_seeds():
    landed = [order(10, seed)[0] for seed in range(2000)]
    counts = np.bincount(landed, minlength=10)
    assert (np.abs(counts - 200) < 5 * math.sqrt(200)).all()


def test_the_order_of_a_seed_never_changes():
    assert order(10, seed=42) == [2, 1, 0, 5, 8, 6, 7, 9, 4, 3]
    assert order(10, seed=42, epoch=1) == [0, 3, 2, 6, 4, 9, 1, 5, 8, 7]


@given(
    num_tokens=st.integers(10, 300),
    length=st.integers(1, 9),
    stride=st.integers(1, 12),
    batch=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_every_window_comes_exactly_once_per_epoch_across_batches(num_tokens, length, stride, batch, seed):
    training = stream(num_tokens, length, stride, batch, seed)
    expected = list(range(0, num_tokens - length, stride))
    assert training.windows == len(expected)
    steps = math.ceil(3 * len(expected) / batch)
    seen = [start for step in range(steps) for start in starts(training, step)]
    for epoch in range(3):
        assert sorted(seen[epoch * len(expected) :][: len(expected)]) == expected


def test_targets_are_one_token_on_and_windows_start_at_multiples_of_the_stride():
    ids_BT, targets_BT = stream(length=8, stride=4).batch(5)
    assert ids_BT.shape == targets_BT.shape == (6, 8) and ids_BT.dtype == targets_BT.dtype == torch.int64
    assert torch.equal(targets_BT, ids_BT + 1)
    assert torch.equal(ids_BT - ids_BT[:, :1], torch.arange(8).expand(6, 8))
    assert not (ids_BT[:, 0] % 4).any()


def test_a_batch_depends_on_the_step_and_on_nothing_asked_before():
    training = stream()
    later = training.batch(17)
    for step in (3, 900, 17):
        again = training.batch(step)
    assert all(torch.equal(one, other) for one, other in zip(later, again, strict=True))
    assert not torch.equal(training.batch(18)[0], later[0])


@given(st.integers(0, 500), st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (4, 3), (12, 1), (1, 12)]))
def test_ranks_and_micro_batches_put_together_are_the_batch_of_one_process(step, parts):
    world_size, accumulate = parts
    training = stream(batch=12)
    pieces = [
        training.batch(step, rank=rank, world_size=world_size, micro=micro, accumulate=accumulate)
        for rank in range(world_size)
        for micro in range(accumulate)
    ]
    for number, whole in enumerate(training.batch(step)):
        assert torch.equal(torch.cat([piece[number] for piece in pieces]), whole)
    assert {len(ids) for ids, _ in pieces} == {12 // (world_size * accumulate)}


def test_a_batch_that_processes_cannot_share_equally_is_refused():
    with pytest.raises(ConfigError, match="batch = 6: must be a multiple of 2 processes × 2 micro-batches"):
        stream(batch=6).batch(0, world_size=2, accumulate=2)


def test_the_epoch_is_that_of_the_first_sequence_of_the_step():
    training = stream(num_tokens=40, length=8, stride=8, batch=3)
    assert training.windows == 4
    assert [training.epoch(step) for step in range(5)] == [0, 0, 1, 2, 3]


def test_the_last_window_needs_its_last_target():
    assert stream(num_tokens=9, length=8).windows == 1
    with pytest.raises(DataError, match="the training text has 8 tokens; one sequence needs 9"):
        stream(num_tokens=8, length=8)


@given(st.integers(2, 200), st.integers(1, 20), st.integers(1, 7), st.one_of(st.none(), st.integers(1, 250)))
def test_evaluation_makes_each_token_a_target_exactly_once(num_tokens, length, batch, max_tokens):
    seen: list[int] = []
    for ids_BT, targets_BT in evaluation_batches(np.arange(num_tokens), length, batch, max_tokens):
        assert ids_BT.shape == targets_BT.shape and ids_BT.shape[0] <= batch and ids_BT.shape[1] == length
        real = targets_BT != -100
        assert torch.equal(ids_BT[real] + 1, targets_BT[real])
        assert not ids_BT[~real].any()
        seen += targets_BT[real].tolist()
    count = num_tokens - 1 if max_tokens is None else min(num_tokens - 1, max_tokens)
    assert seen == list(range(1, count + 1))


def test_evaluation_of_a_single_token_is_refused():
    with pytest.raises(DataError, match="the evaluation text has 1 tokens; it needs at least 2"):
        next(evaluation_batches(np.arange(1), 4, 2))


TEXT = ["The naïve river runs to the sea.", "zebra 漢字 and the river"] * 3


@pytest.mark.parametrize("max_tokens", [None, 1, 13, 10_000])
@pytest.mark.parametrize("kind", ["bytes", "bpe", "word"])
def test_covered_bytes_are_those_of_the_targets(kind, max_tokens, tmp_path):
    tokenizer = fit_tokenizer(kind, TEXT, 300)
    packed = pack(Corpus("text", {"valid": [Shelf(TEXT)]}, kind), "valid", tokenizer, cache=tmp_path)
    ((_, bytes_N),) = tokenizer.encode_counted(["\n\n".join(TEXT)])
    targets = len(bytes_N) - 1 if max_tokens is None else min(len(bytes_N) - 1, max_tokens)
    assert covered_bytes(packed, max_tokens) == bytes_N[1 : 1 + targets].sum()


def test_a_uniform_model_of_bytes_needs_eight_bits_per_byte(tmp_path):
    packed = pack(Corpus("text", {"valid": [Shelf(TEXT)]}, ""), "valid", bytes_tokenizer(), cache=tmp_path)
    nats = 0.0
    for ids_BT, targets_BT in evaluation_batches(packed, 16, 3):
        logits_NV = torch.zeros(ids_BT.numel(), 256)
        nats += functional.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum").item()
    assert nats / math.log(2) / covered_bytes(packed) == pytest.approx(8)


def test_a_unigram_model_counts_training_tokens_and_is_asked_for_the_targets_alone():
    """Of ids 0, 1, 2 with one more of each: p = 4/7, 2/7, 1/7. The first token of a text is no target."""
    train, text = np.array([0, 0, 0, 1], dtype="<u2"), np.array([2, 0, 1, 1, 2], dtype="<u2")
    expected = -(math.log(4 / 7) + 2 * math.log(2 / 7) + math.log(1 / 7)) / 4
    assert unigram_cross_entropy(train, text, 3) == pytest.approx(expected)
    assert unigram_cross_entropy(train, text, 3, max_tokens=1) == pytest.approx(-math.log(4 / 7))


def test_a_unigram_model_of_long_text_is_counted_in_pieces(monkeypatch):
    train, text = np.arange(1000) % 7, np.arange(500) % 5
    whole = unigram_cross_entropy(train, text, 7)
    monkeypatch.setattr("loopscope.data.stream.READ_TOKENS", 13)
    assert unigram_cross_entropy(train, text, 7) == whole
