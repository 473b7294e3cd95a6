"""Tasks beside hops: every answer and its steps found again by reading the text alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopscope.data.task import TASKS, Instance
from loopscope.data.tasks import Addition, Brackets, Facts, PHop, Relations, permutations, world
from loopscope.errors import DataError

SEEDS = st.integers(0, 2**40)


def steps_of(instance: Instance) -> list[int]:
    return [steps for steps in instance.steps if steps]


@given(SEEDS, st.integers(1, 8))
def test_p_hop_answers_are_those_of_looking_back_p_times(seed, most):
    instance = PHop().draw(random.Random(seed), most)
    text, questions = instance.text[:64], instance.text[64:].split()
    for question, said in zip(questions, steps_of(instance), strict=True):
        hops, letter, answer = int(question[0]), question[1], question[2]
        place = 64  # of the letter that is looked for, as if it followed the text
        for _ in range(hops):
            place = max(j for j in range(1, place) if text[j - 1] == letter)
            letter = text[place]
        assert answer == letter and hops == said <= most
    assert len(questions) == 4 and [place for place, n in enumerate(instance.steps) if n] == [67, 71, 75, 79]


@given(SEEDS, st.integers(1, 12))
def test_digits_of_a_sum_are_right_and_take_as_many_steps_as_places_tell_of_the_carry(seed, most):
    instance = Addition().draw(random.Random(seed), most)
    first, second = (number[:24] for number in instance.text.split("+"))
    total = str(int(first[::-1]) + int(second[::-1])).zfill(25)[::-1]
    looked_at: set[int] = set()
    for question, said in zip(instance.text[49:].split(), steps_of(instance), strict=True):
        place = "abcdefghijklmnopqrstuvwx".index(question[0])
        below = place - 1
        while below >= 0 and int(first[below]) + int(second[below]) == 9:
            below -= 1
        assert question[1] == total[place] and said == place - below <= most
        assert below >= 0 and not looked_at & set(range(below, place + 1)), "an earlier answer would help"
        looked_at |= set(range(below, place + 1))


@given(SEEDS, st.integers(1, 12))
def test_brackets_balance_and_every_closing_one_takes_the_rounds_until_its_inside_is_gone(seed, most):
    instance = Brackets().draw(random.Random(seed), most)
    rounds, left = [0] * 48, list(range(48))
    number = 0
    while left:
        number += 1
        pairs = [i for i in range(len(left) - 1) if instance.text[left[i]] + instance.text[left[i + 1]] in PAIRS]
        assert pairs, "it is not balanced"
        for i in pairs:
            rounds[left[i + 1]] = number
        gone = {at for i in pairs for at in (left[i], left[i + 1])}
        left = [at for at in left if at not in gone]
    assert tuple(rounds) == instance.steps and max(rounds) <= most


PAIRS = ("()", "[]", "{}", "<>")


def number_of(name: str, letters: str) -> int:
    return letters.index(name[0]) * len(letters) + letters.index(name[1])


@given(SEEDS)
def test_facts_are_those_of_the_world_and_what_is_outside_is_composed_in_the_test_split_alone(seed):
    known, instance = world(2000, 200, 20, 0.05), Facts().draw(random.Random(seed), 2)
    entity, path = number_of(instance.text[:2], Facts.letters), instance.text[2:6].rstrip(".")
    outside = []
    for relation in (number_of(path[at : at + 2], Facts.marks) for at in range(0, len(path), 2)):
        outside.append(known.is_outside[entity][relation])
        entity = known.tails[entity][relation]
    assert number_of(instance.text[6:], Facts.letters) == entity
    assert instance.steps == (0, 0, 0, 0, 0, 0, len(outside), len(outside))
    if len(outside) == 1:
        assert instance.split == "train"
    else:
        assert (instance.split == "test") == all(outside) == any(outside)


def test_a_twentieth_of_the_facts_is_outside():
    outside = [is_out for each in world(2000, 200, 20, 0.05).is_outside for is_out in each.values()]
    assert len(outside) == 40_000 and 0.045 < sum(outside) / len(outside) < 0.055


@given(SEEDS, st.integers(1, 16))
def test_chains_of_relations_end_where_they_lead(seed, most):
    instance = Relations().draw(random.Random(seed), most)
    prompt, answer = instance.text[:18].lstrip("."), instance.text[18:]
    entity = number_of(prompt[:2], Relations.letters)
    for digit in prompt[2:]:
        entity = permutations(10, 200)[int(digit)][entity]
    assert number_of(answer, Relations.letters) == entity
    assert steps_of(instance) == [len(prompt) - 2] * 2 and len(prompt) - 2 <= most


def test_relations_are_permutations_and_single_ones_are_for_training():
    assert all(sorted(each) == list(range(200)) for each in permutations(10, 200))
    assert {min(steps_of(Relations().instance("valid", 0, index))) for index in range(200)} == set(range(2, 17))
    with pytest.raises(DataError, match="task:relations:1 has too few instances: none of 10,000 belongs to the valid"):
        _ = Relations(1).sha256


@pytest.mark.parametrize(("name", "steps"), [("phop", 8), ("add", 12), ("brackets", 12), ("relations", 16)])
def test_every_number_of_steps_is_asked_for(name, steps):
    asked = {each for index in range(500) for each in steps_of(TASKS[name]().instance("train", 1, index))}
    assert asked == set(range(1, steps + 1))


@pytest.mark.parametrize(
    ("name", "starts"),
    [("phop", "316156eeddede1ad"), ("add", "f086e1780de51de4"), ("brackets", "7293b55ac4ea8464"),
     ("facts", "2a7e558b85b163be"), ("relations", "25a2f61a828d176c")],
)  # fmt: skip
def test_the_instances_of_a_task_never_change(name, starts):
    assert TASKS[name]().sha256.startswith(starts)
