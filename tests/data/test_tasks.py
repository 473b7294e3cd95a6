"""Tasks: right answers, honest steps, splits that share nothing, and a row of instances that is always the same."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopscope.config import Config, DataConfig, ModelConfig
from loopscope.data import task as framework
from loopscope.data.corpora import Corpus, open_corpus
from loopscope.data.files import check_sources
from loopscope.data.preparation import pack_split, prepare
from loopscope.data.stream import (
    TaskStream,
    answer_batches,
    covered_bytes,
    evaluation_batches,
    training_stream,
    unigram_cross_entropy,
)
from loopscope.data.task import BUCKETS, HELD_OUT_INSTANCES, TASKS, Instance, Task, TaskText
from loopscope.data.tasks import Hops, open_task
from loopscope.data.tokenizers import Tokenizer, bytes_tokenizer, train_bpe, train_word
from loopscope.errors import ConfigError, DataError
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.results.run import SplitSizes

CELLS = "abcdefghijklmnopqrstuvwxyzABCDEF"


def text_of(split: str = "valid", word: str = "task:hops", tokenizer: Tokenizer | None = None) -> TaskText:
    found = pack_split(open_corpus(DataConfig(data=(word,))), split, tokenizer or bytes_tokenizer(), lambda line: None)
    assert isinstance(found, TaskText)
    return found


def path_from(start: str, text: str) -> list[str]:
    """The cells from a start to the one that points to itself, found by reading an instance of hops alone."""
    path = [start]
    while (after := text[CELLS.index(path[-1])]) != path[-1]:
        assert after not in path, "the pointers go round in a circle"
        path.append(after)
    return path


def solved(text: str) -> list[tuple[str, str, int]]:
    """Every question of an instance of hops: where one ends, the answer in the text, and the pointers followed."""
    paths = [(path_from(start, text), answer) for start, answer in text[32:].split()]
    return [(path[-1], answer, len(path) - 1) for path, answer in paths]


def steps_of(instance: Instance) -> list[int]:
    return [steps for steps in instance.steps if steps]


# --- hops ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.integers(1, 16))
def test_every_answer_is_right_and_takes_as_many_steps_as_it_says(seed, most):
    instance = Hops().draw(random.Random(seed), most)
    questions = solved(instance.text)
    assert len(questions) == 4 and all(end == answer for end, answer, _ in questions)
    assert [hops for *_, hops in questions] == steps_of(instance)
    assert max(steps_of(instance)) <= most


@given(st.integers(0, 2**40))
def test_steps_stand_at_the_answers_and_nowhere_else(seed):
    instance = Hops().draw(random.Random(seed), 16)
    assert len(instance.text) == len(instance.steps) == Hops.length
    places = [place for place, steps in enumerate(instance.steps) if steps]
    assert places == [34, 37, 40, 43] and [instance.text[place - 2] for place in places] == [" "] * 4


@given(st.integers(0, 2**40))
def test_no_two_questions_pass_through_the_same_cell(seed):
    text = Hops().draw(random.Random(seed), 16).text
    passed = [cell for start, _ in text[32:].split() for cell in path_from(start, text)]
    assert len(passed) == len(set(passed))


@given(st.integers(0, 2**40), st.integers(1, 16))
def test_there_are_three_times_as_many_ends_as_questions(seed, most):
    array = Hops().draw(random.Random(seed), most).text[:32]
    assert sum(cell == points_to for cell, points_to in zip(CELLS, array, strict=True)) >= 12


def test_every_number_of_steps_is_asked_for_often():
    counts = Counter(steps for index in range(1000) for steps in steps_of(Hops().instance("train", 1, index)))
    assert sorted(counts) == list(range(1, 17)) and min(counts.values()) >= 50


def test_every_cell_is_the_answer_alike():
    texts = [Hops().instance("train", 2, index).text for index in range(800)]
    answers = Counter(answer for text in texts for _, answer, _ in solved(text))
    assert len(answers) == 32 and max(answers.values()) < 150 and min(answers.values()) > 60


# --- every task ------------------------------------------------------------------------------------------------------


OURS = dict(TASKS)  # before the one below registers itself


@pytest.mark.parametrize("task", [make() for make in OURS.values()], ids=OURS)
def test_instances_are_written_in_the_symbols_and_the_length_that_a_task_declares(task):
    for index in range(50):
        instance = task.instance("test", 5, index)
        assert len(instance.text) == len(instance.steps) == task.length
        assert set(instance.text) <= set(task.symbols) and len(set(task.symbols)) == len(task.symbols)
        assert set(steps_of(instance)) <= set(range(1, task.limit + 1)) and steps_of(instance)


@pytest.mark.parametrize("task", [make() for make in OURS.values()], ids=OURS)
def test_no_two_splits_share_an_instance_whatever_the_seed(task):
    drawn = {
        split: {task.instance(split, seed, index).asked for seed in range(3) for index in range(300)}
        for split in BUCKETS
    }
    assert not drawn["train"] & drawn["valid"] and not drawn["train"] & drawn["test"]
    assert not drawn["valid"] & drawn["test"]


class Coin(Task):
    """A dozen instances in all, so that only the hash can keep the splits apart."""

    name, symbols, length, limit = "coin", "01abcdef=", 4, 1

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        tag, side = rng.choice("abcdef"), rng.choice("01")
        return Instance(f"{tag}{side}={side}", (0, 0, 0, 1), tag + side)


def test_a_split_is_a_matter_of_what_is_asked_and_not_of_who_asks():
    everything = {(drawn := Coin().draw(random.Random(seed), 1)).text: drawn.split for seed in range(300)}
    assert len(everything) == 12 and {"train", "valid"} <= set(everything.values())
    for split in ("train", "valid"):
        found = {Coin().instance(split, seed, index).text for seed in range(5) for index in range(30)}
        assert found == {text for text, belongs_to in everything.items() if belongs_to == split}


def test_a_task_without_instances_for_a_split_says_so(monkeypatch):
    monkeypatch.setattr(Coin, "draw", lambda self, rng, most: Instance("a0=0", (0, 0, 0, 1), "a0"))
    elsewhere = next(split for split in BUCKETS if split != Instance("a0=0", (0, 0, 0, 1), "a0").split)
    with pytest.raises(DataError, match="task:coin has too few instances"):
        Coin().instance(elsewhere, 0, 0)


def test_a_further_task_is_one_class(monkeypatch):
    monkeypatch.setattr(framework, "HASHED_INSTANCES", 0)
    ids, targets = training_stream(text_of("train", "task:coin"), 8, 5, 0).batch(0)
    assert ids.shape == (5, 3) and torch.equal(targets[:, 2], ids[:, 1]) and (targets[:, :2] == IGNORE_INDEX).all()


def test_the_instances_of_a_seed_never_change():
    assert Hops().instance("train", 42, 0).text == "abFpefgxijkwElBpvrstuuwxhdyACDzn mp ox qu cw"
    assert (
        open_corpus(DataConfig(data=("task:hops",))).sha256
        == "31adb8568d2a962bd9f8b9348ae9500ce6e1ebed8a90834553029b642f8716d8"
    )


def test_the_hash_tells_tasks_and_their_steps_apart_and_nothing_else():
    hashes = [open_corpus(DataConfig(data=(word,))).sha256 for word in ("task:hops", "task:hops:8", "task:hops:16")]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_generator_that_draws_otherwise_is_another_corpus(monkeypatch):
    before = Hops().sha256
    monkeypatch.setattr(Hops, "spare", 9)
    assert Hops().sha256 != before


# --- batches ---------------------------------------------------------------------------------------------------------


def test_only_answers_are_targets_and_every_answer_is_one():
    ids, targets, steps = next(answer_batches(text_of(), 64, 100))
    assert ids.shape == targets.shape == steps.shape == (100, 43)
    assert ((targets != IGNORE_INDEX) == (steps > 0)).all() and (steps > 0).sum() == 400
    tokenizer = bytes_tokenizer()
    for ids_T, targets_T, steps_T in zip(ids, targets, steps, strict=True):
        text = tokenizer.decode([*ids_T.tolist(), int(targets_T[-1])])
        right = [(end, hops) for end, _, hops in solved(text)]
        at = steps_T > 0
        assert right == [(chr(answer), int(needed)) for answer, needed in zip(targets_T[at], steps_T[at], strict=True)]


def test_evaluation_and_answers_are_the_same_rows():
    pairs = list(evaluation_batches(text_of(), 43, 300))
    triples = list(answer_batches(text_of(), 43, 300))
    assert [len(ids) for ids, _ in pairs] == [300, 300, 300, 124]
    assert sum(len(ids) for ids, _ in pairs) == HELD_OUT_INSTANCES
    for (ids, targets), (same_ids, same_targets, _) in zip(pairs, triples, strict=True):
        assert torch.equal(ids, same_ids) and torch.equal(targets, same_targets)


def test_max_tokens_counts_text_and_leaves_a_row_at_least():
    assert sum(len(ids) for ids, _ in evaluation_batches(text_of(), 43, 7, max_tokens=440)) == 10
    assert sum(len(ids) for ids, _ in evaluation_batches(text_of(), 43, 7, max_tokens=3)) == 1
    assert covered_bytes(text_of(), max_tokens=440) == 40, "an answer is one byte"


def test_a_batch_is_a_function_of_seed_and_step():
    def batch(seed: int, step: int) -> torch.Tensor:
        return TaskStream(text_of("train"), 8, seed).batch(step)[0]

    assert torch.equal(batch(3, 5), batch(3, 5))
    different = [batch(3, 5), batch(3, 6), batch(4, 5)]
    assert len({tuple(ids.flatten().tolist()) for ids in different}) == 3


def test_a_curriculum_asks_for_one_step_more_at_a_time():
    def most(step: int, word: str = "task:hops") -> int:
        data = DataConfig(data=(word,), curriculum=10)
        stream = training_stream(text_of("train", word), 43, 64, 0, data)
        ids, targets = stream.batch(step)
        rows = zip(ids.tolist(), targets[:, -1].tolist(), strict=True)
        texts = [bytes_tokenizer().decode([*row, last]) for row, last in rows]
        return max(hops for text in texts for *_, hops in solved(text))

    assert [most(step) for step in (0, 9, 10, 29, 30)] == [1, 1, 2, 3, 4]
    assert most(10_000, "task:hops:3") == 3


def test_ranks_and_micro_batches_share_one_batch():
    stream = training_stream(text_of("train"), 64, 8, 1)
    whole = stream.batch(3)
    parts = [stream.batch(3, rank, 2, micro, 2) for rank in range(2) for micro in range(2)]
    for number in range(2):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])
    with pytest.raises(ConfigError, match="multiple of 3 processes"):
        stream.batch(0, 0, 3)


def test_a_unigram_model_of_a_task_knows_its_answers_alone():
    found = unigram_cross_entropy(text_of("train"), text_of(), 256)
    assert math.log(32) < found < math.log(32) + 0.1, "every cell is the answer alike, and nothing else ever is"


def test_any_tokenizer_that_has_the_symbols_hops_the_same_instances():
    bpe = Tokenizer("bpe", train_bpe(["the three cells aa bb"] * 50, 300).to_str())
    in_bytes, in_pairs = (next(answer_batches(text_of(tokenizer=each), 43, 20)) for each in (bytes_tokenizer(), bpe))
    assert [bpe.decode(ids.tolist()) for ids in in_pairs[0]] == [
        bytes_tokenizer().decode(ids.tolist()) for ids in in_bytes[0]
    ]
    assert torch.equal(in_bytes[2], in_pairs[2])


def test_a_tokenizer_without_the_symbols_is_refused():
    with pytest.raises(DataError, match="task:hops needs a token of its own for each of its symbols"):
        text_of(tokenizer=train_word(["one two one two"], 10))


def test_a_sequence_too_short_for_an_instance_is_refused():
    with pytest.raises(ConfigError, match="sequence_length = 42: is too short for an instance of task:hops"):
        training_stream(text_of("train"), 42, 8, 1)
    with pytest.raises(ConfigError, match="too short"):
        next(evaluation_batches(text_of(), 42, 8))


# --- as a corpus -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bpe", "word", "bytes"])
def test_a_task_is_prepared_in_bytes_and_never_packed(name, tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    config = Config(model=ModelConfig(vocab_size=256), data=DataConfig(data=("task:hops",), tokenizer=name))
    prepared = prepare(config, tmp_path / "tokenizer", lambda line: None)
    record = prepared.record()
    assert record.corpus == "task:hops" and record.tokenizer == "bytes"
    assert record.tokens == SplitSizes(train=None, valid=HELD_OUT_INSTANCES * Hops.length)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("data", "valid"),
    [
        (("task:hops", "builtin"), None),
        (("task:hops", "task:hops"), None),
        (("task:hops",), ("builtin",)),
        (("builtin",), ("task:hops",)),
    ],
)
def test_a_task_stands_alone(data, valid):
    with pytest.raises(ConfigError, match="stands alone"):
        open_corpus(DataConfig(data=data, valid=valid))


def test_text_named_for_evaluation_is_the_validation_split():
    corpus = open_corpus(DataConfig(data=("task:hops",), valid=("task:hops",)))
    assert isinstance(corpus, Corpus) and corpus.task is not None and corpus.sha256 == Hops().sha256


@pytest.mark.parametrize("word", ["task:hop", "task:", "task:hops:0", "task:hops:17", "task:hops:two", "task:hops:²"])
def test_a_task_that_there_is_not_is_told_before_anything_is_read(word):
    with pytest.raises(ConfigError, match="flag --data"):
        check_sources([word])
    with pytest.raises(ConfigError):
        open_task(word)


def test_fewer_steps_can_be_asked_for():
    counts = Counter(steps for rows in text_of(word="task:hops:3").batches(64) for steps in rows.steps_RT.flat)
    assert set(counts) == {0, 1, 2, 3}
