"""Tasks about facts that are nowhere in the text and must be known by heart: the two set-ups of arXiv 2604.07822.

There, an entity or a relation is one token. Here a symbol is one ASCII character, so entities (and the 200 relations)
are written with two; both characters of an answer take as many steps.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import ClassVar

from loopscope.data.tasks.base import Instance, Split, Task


def named(number: int, letters: str) -> str:
    """A number as two letters."""
    return letters[number // len(letters)] + letters[number % len(letters)]


@dataclass(frozen=True)
class World:
    """Facts: for every entity its relations, each with the tail it leads to; and those kept out of distribution."""

    tails: tuple[dict[int, int], ...]
    is_outside: tuple[dict[int, bool], ...]


@functools.cache
def world(entities: int, relations: int, facts_each: int, outside: float) -> World:
    """The same facts for everybody: they are what is learnt, and no matter of a run's seed."""
    rng = random.Random(f"facts {entities} {relations} {facts_each}")
    tails = tuple(
        {relation: rng.randrange(entities) for relation in rng.sample(range(relations), facts_each)}
        for _ in range(entities)
    )
    return World(tails, tuple({relation: rng.random() < outside for relation in known} for known in tails))


class Facts(Task):
    """Two-hop questions about 40,000 facts: 2,000 entities, 20 facts each, of 200 relations.

        AbxyzwKq    from Ab along xy to some entity, from there along zw to Kq: two steps
        Abxy..Lm    from Ab along xy to Lm: one step

    95 % of the facts are inside the distribution: training asks for them alone and for some of their compositions, and
    validation for others. The rest are asked for alone in training and never composed; the test split composes them. A
    model that has memorised both hops but cannot chain them fails validation; one that chains only what it has seen
    chained fails the test split. (How many facts an entity has is open in the paper.)
    """

    name = "facts"
    entities: ClassVar[int] = 2000
    relations: ClassVar[int] = 200
    facts_each: ClassVar[int] = 20
    outside: ClassVar[float] = 0.05
    letters: ClassVar[str] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrs"
    marks: ClassVar[str] = "tuvwxyz01234567"
    symbols = letters + marks + "."
    length = 8
    limit = 2

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        known = world(self.entities, self.relations, self.facts_each, self.outside)
        is_outside = rng.random() < 0.5
        if most_steps < 2 or rng.random() < 0.3:
            start = rng.randrange(self.entities)
            relation = rng.choice(list(known.tails[start]))
            return self._instance(start, [relation], known.tails[start][relation], "train")
        while True:  # facts of one side only: half of both is neither training nor a test of anything
            start = rng.randrange(self.entities)
            first = rng.choice(list(known.tails[start]))
            middle = known.tails[start][first]
            second = rng.choice(list(known.tails[middle]))
            if known.is_outside[start][first] == known.is_outside[middle][second] == is_outside:
                break
        found = self._instance(start, [first, second], known.tails[middle][second], "test" if is_outside else None)
        held_out = not is_outside and found.split != "train"  # hashed to either of the others: validation
        return self._instance(start, [first, second], known.tails[middle][second], "valid") if held_out else found

    def _instance(self, start: int, along: list[int], tail: int, belongs_to: Split | None) -> Instance:
        prompt = named(start, self.letters) + "".join(named(relation, self.marks) for relation in along)
        prompt = prompt.ljust(self.length - 2, ".")
        steps = len(along)
        return Instance(prompt + named(tail, self.letters), (*[0] * len(prompt), steps, steps), prompt, belongs_to)


@functools.cache
def permutations(relations: int, entities: int) -> tuple[tuple[int, ...], ...]:
    """Relations that lead from every entity to one, and to every entity from one; the same for everybody."""
    rng = random.Random(f"relations {relations} {entities}")
    return tuple(tuple(rng.sample(range(entities), entities)) for _ in range(relations))


class Relations(Task):
    """Chains of up to 16 relations between 200 entities, ten relations that are permutations.

        ...........Cd31720Bf    from Cd along 3, 1, 7, 2 and 0 to Bf: five steps

    Single relations are facts that can only be known by heart, so all 2,000 of them belong to the training split;
    longer chains belong to a split as in every task. Longer chains than were trained show extrapolation: train
    `task:relations:4`, evaluate `task:relations`. A prompt is filled up in front. The paper's model has no
    positions, and adds a hop when the last is 95 % right; ours has positions, and a curriculum that counts steps.
    """

    name = "relations"
    entities: ClassVar[int] = 200
    relations: ClassVar[int] = 10
    letters: ClassVar[str] = "ABCDEFGHIJKLMNO"
    limit = 16
    symbols = letters + "0123456789."
    length = 2 + limit + 2

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        maps = permutations(self.relations, self.entities)
        start = entity = rng.randrange(self.entities)
        along = [rng.randrange(self.relations) for _ in range(rng.randint(1, most_steps))]
        for relation in along:
            entity = maps[relation][entity]
        prompt = (named(start, self.letters) + "".join(map(str, along))).rjust(self.length - 2, ".")
        steps = (*[0] * len(prompt), len(along), len(along))
        return Instance(prompt + named(entity, self.letters), steps, prompt, "train" if len(along) == 1 else None)
