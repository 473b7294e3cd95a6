"""Text that needs depth: tasks whose every answer says how many sequential steps it takes to find.

A task is generated, seeded and endless. `task:hops` is pointer chasing: an array of pointers, then questions that
start somewhere in it and are answered with where the pointers lead. Nothing in the text gives a shorter way, so a
model that follows one pointer a loop is right after as many loops as there are steps, and not before.

Further tasks are one class and one line in TASKS.
"""

from __future__ import annotations

from loopscope.data.tasks.base import BUCKETS, HELD_OUT_INSTANCES, PREFIX, Instance, Split, Task
from loopscope.data.tasks.facts import Facts, Relations
from loopscope.data.tasks.formal import Addition, Brackets
from loopscope.data.tasks.pointers import Hops, PHop
from loopscope.data.tasks.text import Rows, TaskText
from loopscope.errors import ConfigError, suggest

__all__ = [
    "BUCKETS",
    "HELD_OUT_INSTANCES",
    "TASKS",
    "Addition",
    "Brackets",
    "Facts",
    "Hops",
    "Instance",
    "PHop",
    "Relations",
    "Rows",
    "Split",
    "Task",
    "TaskText",
    "is_task",
    "open_task",
]

TASKS: dict[str, type[Task]] = {task.name: task for task in (Hops, PHop, Addition, Brackets, Facts, Relations)}


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
