"""Our tasks. Each says how depth helps, and that nothing in its text gives a shorter way.

`task:hops` is pointer chasing: an array of pointers, then questions that start somewhere in it and are answered with
where the pointers lead. A model that follows one pointer a loop is right after as many loops as there are steps, and
not before. Tasks about facts must be known by heart: the two set-ups of arXiv 2604.07822, where an entity or a relation
is one token. Here a symbol is one ASCII character, so entities (and the 200 relations) are written with two; both
characters of an answer take as many steps.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from loopscope.data.task import PREFIX, TASKS, Instance, Split, Task
from loopscope.errors import ConfigError, suggest


def is_task(source: str) -> bool:
    """Whether a source of data names a task."""
    return source.startswith(PREFIX)


def open_task(source: str) -> Task:
    """The task that `task:NAME` or `task:NAME:STEPS` names."""
    name, _, steps = source.removeprefix(PREFIX).partition(":")
    if name not in TASKS:
        raise ConfigError.of("data", source, f"there is no task {name!r}; {suggest(name, TASKS)}")
    limit = TASKS[name].limit
    if not steps:
        return TASKS[name]()
    if not (steps.isascii() and steps.isdigit() and len(steps) < 4 and 1 <= int(steps) <= limit):
        raise ConfigError.of("data", source, f"answers of task:{name} take 1 to {limit} steps: task:{name}:{limit}")
    return TASKS[name](int(steps))


# --- following pointers through the text ------------------------------------------------------------------------------


class Hops(Task):
    """Pointer chasing: 32 cells named a … z, A … F, then four questions.

        aFchCqgBejtamnrpdrsDyvomAzliEDuf kD wr xm ba

    The i-th character names the cell that the i-th cell points to. ` xm` asks where one ends who sets out from x: x
    points to m, and m to itself. An answer takes as many steps as pointers are followed until a cell points to itself;
    ` kD` takes two, ` ba` fifteen.

    Each question has a path of its own, so that an earlier answer is of no use to a later one. All other cells point to
    themselves, and at least eight are left to: guessing an end does not pay. One question is uniform over 1 … most
    steps, the others over what room is left, so short paths are commoner.
    """

    name = "hops"
    cells: ClassVar[str] = "abcdefghijklmnopqrstuvwxyzABCDEF"
    questions: ClassVar[int] = 4
    spare: ClassVar[int] = 8
    """Cells that no path may use."""
    symbols = cells + " "
    length = len(cells) + 3 * questions
    limit = 16

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        order = list(self.cells)
        rng.shuffle(order)
        points_to = {cell: cell for cell in self.cells}
        asked: list[tuple[str, str, int]] = []
        used = 0
        for others in reversed(range(self.questions)):
            room = len(order) - self.spare - used - 2 * others  # the shortest path has two cells
            steps = rng.randint(1, min(most_steps, room - 1))
            path = order[used : used + steps + 1]
            points_to |= dict(pairwise(path))
            asked.append((path[0], path[-1], steps))
            used += len(path)
        rng.shuffle(asked)
        array = "".join(points_to[cell] for cell in self.cells)
        questions = "".join(f" {start}{end}" for start, end, _ in asked)
        answers = (step for _, _, steps in asked for step in (0, 0, steps))
        return Instance(array + questions, (*[0] * len(array), *answers), array)


class PHop(Task):
    """p-hop induction (Sanford and others, arXiv 2402.09268): 64 letters of eight, then four questions.

        …dbagchfe…  3ab  1hc

    Induction answers a letter with what followed it when it last stood in the text. ` 1hc`: the last h is followed by
    c. p-hop does so p times over, each time looking back from where it has come to: ` 2h·` takes the c that was found,
    and what followed the last c *before it*. An answer takes p steps. The place matters and not the letter, so that an
    earlier answer is of no use to a later one.
    """

    name = "phop"
    letters: ClassVar[str] = "abcdefgh"
    questions: ClassVar[int] = 4
    letters_of_text: ClassVar[int] = 64
    limit = 8
    symbols = letters + "12345678 "
    length = letters_of_text + 4 * questions

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        text = "".join(rng.choices(self.letters, k=self.letters_of_text))
        paths = {letter: self._path(text, letter)[:most_steps] for letter in self.letters}
        asked: list[tuple[str, int, str]] = []
        while len(asked) < self.questions:
            steps = rng.randint(1, most_steps)
            used = {letter for letter, *_ in asked}
            starts = [letter for letter, path in paths.items() if letter not in used and len(path) >= steps]
            if starts:
                start = rng.choice(starts)
                asked.append((start, steps, text[paths[start][steps - 1]]))
            elif all(not path or letter in used for letter, path in paths.items()):
                return self.draw(rng, most_steps)  # so few letters were drawn that four questions cannot be asked
        questions = "".join(f" {steps}{start}{answer}" for start, steps, answer in asked)
        answers = (each for _, steps, _ in asked for each in (0, 0, 0, steps))
        return Instance(text + questions, (*[0] * len(text), *answers), text)

    def _path(self, text: str, letter: str) -> list[int]:
        """Places that are come to by looking back from the end again and again, until nothing is found."""
        path, before = [], len(text)
        while (found := text.rfind(letter, 0, before - 1)) >= 0:
            path.append(found + 1)
            letter, before = text[found + 1], found + 1
        return path


# --- digits and brackets ----------------------------------------------------------------------------------------------


class Addition(Task):
    """Addition with carries: two numbers of 24 digits, then three questions for a digit of their sum.

        503…+421…  c7 …

    The least digit comes first and places are called a … x. ` c7` asks for the third digit of the sum. That is the sum
    of two digits and a carry; whether there is a carry is said by the place below, unless its digits add up to nine:
    then by the one below that, and so on. An answer takes as many steps as places are looked at for the carry. What is
    looked at for one question is not looked at for another, so that an earlier answer is of no use to a later one. Who
    guesses the carry is right half of the time.
    """

    name = "add"
    digits: ClassVar[int] = 24
    questions: ClassVar[int] = 3
    places: ClassVar[str] = "abcdefghijklmnopqrstuvwx"
    limit = 12
    symbols = "0123456789+ " + places
    length = 2 * digits + 1 + 3 * questions

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        chains: list[int] = []
        for others in reversed(range(self.questions)):
            room = self.digits - sum(steps + 1 for steps in chains) - 2 * others  # the shortest chain has two places
            chains.append(rng.randint(1, min(most_steps, room - 1)))
        rng.shuffle(chains)
        sums, asked = self._sums(rng, chains)
        first = [rng.randint(max(0, total - 9), min(9, total)) for total in sums]
        second = [total - digit for total, digit in zip(sums, first, strict=True)]
        carry, answer = 0, []
        for total in sums:
            answer.append((total + carry) % 10)
            carry = (total + carry) // 10
        rng.shuffle(asked)
        numbers = "+".join("".join(map(str, number)) for number in (first, second))
        questions = "".join(f" {self.places[place]}{answer[place]}" for place, _ in asked)
        steps = (each for _, steps in asked for each in (0, 0, steps))
        return Instance(numbers + questions, (*[0] * len(numbers), *steps), numbers)

    def _sums(self, rng: random.Random, chains: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """What the digits of each place add up to, and the places that are asked about, with their steps.

        A chain is a place that makes a carry or none by itself, steps − 1 places of nine, and the place asked about;
        between chains lie places of any kind.
        """
        spare = self.digits - sum(steps + 1 for steps in chains)
        gaps = [0] * (len(chains) + 1)
        for _ in range(spare):
            gaps[rng.randrange(len(gaps))] += 1
        sums: list[int] = []
        asked = []
        for gap, steps in zip(gaps, [*chains, None], strict=True):
            sums += [rng.randint(0, 18) for _ in range(gap)]
            if steps is not None:
                sums += [rng.choice((rng.randint(0, 8), rng.randint(10, 18))), *[9] * (steps - 1), rng.randint(0, 18)]
                asked.append((len(sums) - 1, steps))
        return sums, asked


class Brackets(Task):
    """Nested brackets: 48 brackets of four kinds, balanced; every closing one is an answer.

        [<>({}[])]{(<[]>)}…

    A closing bracket is of the kind of the one that it closes. That is found by matching from the inside out: pairs
    with nothing between them first, then those that enclose only matched ones. An answer takes as many steps as there
    are pairs inside one another in what it closes, itself included: ` >` of `<>` one, the last `]` above three.

    Depth can also be counted, and counting needs no rounds; how many steps a loop does is measured, not assumed.
    """

    name = "brackets"
    pairs: ClassVar[str] = "()[]{}<>"
    limit = 12
    symbols = pairs
    length = 48

    def draw(self, rng: random.Random, most_steps: int) -> Instance:
        deepest = rng.randint(1, most_steps)
        text: list[str] = []
        steps: list[int] = []
        heights = [0]  # of what has been closed inside every open bracket
        opened: list[str] = []
        while len(text) < self.length:
            left = self.length - len(text)
            must_close = len(opened) in (deepest, left)
            if opened and (must_close or rng.random() < 0.4):  # leaning towards opening: deep ones are rarer by chance
                height = heights.pop() + 1
                heights[-1] = max(heights[-1], height)
                text.append(opened.pop())
                steps.append(height)
            else:
                kind = 2 * rng.randrange(len(self.pairs) // 2)
                text.append(self.pairs[kind])
                opened.append(self.pairs[kind + 1])
                heights.append(0)
                steps.append(0)
        written = "".join(text)
        return Instance(written, tuple(steps), written)


# --- facts that are nowhere in the text -------------------------------------------------------------------------------


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
