"""Tasks that follow pointers through the text: hops, and p-hop induction."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import ClassVar

from loopscope.data.tasks.base import Instance, Task


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
