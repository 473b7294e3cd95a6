"""Tasks about digits and brackets."""

from __future__ import annotations

import random
from typing import ClassVar

from loopscope.data.tasks.base import Instance, Task


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
