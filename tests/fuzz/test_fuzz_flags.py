"""Every flag of every verb with values that nobody should give: an exit code that is documented, and a sentence.

A case is one command, in this process, up to the point where the work would begin (a stub says that it was reached);
`plan`, `eval`, `report` and `env` are done to their end. What is watched is what `watching.py` says.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from readers import LINES, make_grid, make_run
from watching import Watch, peak_memory

from loopscope.cli import COMMANDS, main
from loopscope.cli.flags import Flag, sections_of

FEWEST_CASES = 1000
MOST_MIB = 600
TURNS = {"train": 1, "plan": 2, "report": 8}
"""Values per flag; verbs with few flags get more of them, and a page takes most of a second."""
EXAMPLES = 25
"""Commands of several flags, for every verb."""

VALUES = (
    *("-1", "0", "1", "2", "1.5", "nan", "inf", "-inf", "1e308", "1e-320", "-0.0", "1e400", "0x10", "1_000", "٣"),
    *("2147483648", "9223372036854775807", "9223372036854775808", "99999999999999999999999", "9" * 5000),
    *("x", "None", "True", "false", "ä", "a b", "\udcff", "\x1b[2J", "x" * 5000, "%s%n", "$(true)", "`true`"),
    *("", "-", "=", ",", "1,2,3", "1..4", "4..1", "1..", "..", "0..0", "1,,2", "[1]", "{}", "'", '"'),
    *("..", "/", "/dev/zero", "/dev/null", "/proc/self/mem", "nowhere", "nowhere/*.txt", "text.txt", "run", "grid"),
    *("run/config.yaml", "run/metrics.jsonl", "preset:nano", "preset:", "builtin", "a:b", ":", "loopscope:nothing"),
)
"""What stands behind a flag. No hf: and no factory that exists: those are asked for, and do what they say."""
FIRST = {
    "train": ["--preset", "demo", "--data", "text.txt", "--tokenizer", "bytes", "--vocab-size", "256", "--steps", "1"],
    "eval": ["run", "--data", "text.txt", "--max-tokens", "40"],
    "audit": ["run"],
    "check": ["run"],
    "calibrate": ["run"],
    "generate": ["run", "A river"],
    "convert": ["run", "converted"],
    "remedy": ["run"],
    "report": ["run", "--out", "page.html"],
    "plan": ["--preset", "demo", "--flops-per-second", "1e9"],
    "reproduce": ["--size", "demo", "--out", "grid"],
    "reproduce ouro": ["run", "--out", "ouro"],
    "reproduce ouro-train": ["--size", "demo", "--data", "text.txt", "--out", "ouro-train"],
    "quickstart": ["--out", "grid"],
    "atlas": ["--out", "atlas"],
    "scaling": ["run", "--out", "law"],
    "env": [],
}
"""A command that is right, to which one flag more is added."""

watches: dict[str, Watch] = {}


def reached(*_: Any, **__: Any) -> Any:
    """The command was understood, and its work would now begin."""
    raise SystemExit(0)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """A folder with a run, a grid and a text, in which commands are given and no work is done."""
    folder = tmp_path_factory.mktemp("flags")
    make_run(folder)
    make_grid(folder)
    (folder / "text.txt").write_text("\n".join(LINES) + "\n")
    for name in (
        "remedies",
        "audits",
        "calibration",
        "generation",
        "training",
        "evaluation",
        "conversion",
        "downstream",
    ):
        importlib.import_module(f"loopscope.api.{name}")  # what is first imported later would keep a stub for good
    importlib.import_module("matplotlib.font_manager")  # asks a process for fonts where it remembers none
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LOOPSCOPE_CACHE", str(folder / "cache"))
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("loopscope.machine.git_state", lambda folder: None)  # git is a process, and not what is tested
        patch.setattr("loopscope.training.session.git_state", lambda folder: None)
        patch.setattr("loopscope.data.corpora.read_builtin", lambda files: LINES)  # seconds of parsing
        patch.setattr("loopscope.training.trainer.Trainer.train", reached)
        patch.setattr("loopscope.api.audits.audit", reached)
        patch.setattr("loopscope.api.remedies.remedy", reached)
        patch.setattr("loopscope.api.audits.check", reached)
        patch.setattr("loopscope.api.calibration.calibrate", reached)
        patch.setattr("loopscope.api.conversion.folder_written_whole", reached)
        patch.setattr("loopscope.api.downstream.evaluate_tasks", reached)
        patch.setattr("loopscope.api.generation.Generation.__iter__", reached)
        patch.setattr("loopscope.cli.reproduce.run_rows", reached)
        patch.setattr("loopscope.cli.quickstart.run_rows", reached)
        patch.setattr("loopscope.cli.atlas.run_rows", reached)
        patch.setattr("loopscope.studies.scaling.check_identifiable", reached)  # before it says that it fits
        patch.setattr("loopscope.cli.ouro.run_rows", reached)
        patch.setattr("loopscope.studies.ouro.check_ouro", reached)
        yield folder


def give(watch: Watch, command: list[str]) -> int:
    """One command, and whether it ends as one may."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), watch.one(" ".join(command)[:200]):
        try:
            code = main(command)
        except SystemExit as ended:  # tyro's own way of refusing
            code = ended.code
    said = err.getvalue()
    assert code in (0, 1, 2), f"{command} ends with {code}: {said[-2000:]}"
    assert "Traceback" not in said and "bug in loopscope" not in said, said[-2000:]
    if code == 2:
        assert said.strip() or out.getvalue().strip(), f"{command} is refused without a word"
        assert len(said) < 20_000, f"{command} is told in {len(said)} characters"
    assert watch.faults == []
    return code


def flags_of(verb: str) -> list[Flag]:
    return [flag for section in sections_of(COMMANDS[verb]) for flag in section.flags]


@pytest.fixture
def watch(request, place, record_property) -> Iterator[Watch]:
    made = watches[request.node.name] = Watch(place.resolve())
    with peak_memory() as peak:
        yield made
    record_property("fuzz", [made.cases, made.slowest, made.slowest_case, peak[0]])
    assert peak[0] < MOST_MIB


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_that_is_right_is_understood(verb, watch):
    assert give(watch, [*verb.split(), *FIRST[verb]]) in (0, 1)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_flag_with_a_wrong_value_is_refused_in_words_or_works(verb, watch):
    number = 0
    for flag in flags_of(verb):
        switch = [flag.names[-1]] if flag.names else []
        if not flag.values:  # the same command each time
            give(watch, [*verb.split(), *FIRST[verb], *switch])
            continue
        for _ in range(TURNS.get(verb, 16)):
            give(watch, [*verb.split(), *FIRST[verb], *switch, VALUES[number % len(VALUES)]])
            number += 1


@pytest.mark.parametrize("verb", COMMANDS)
def test_flags_together_in_any_order_are_refused_in_words_or_work(verb, watch):
    names = [name for flag in flags_of(verb) for name in flag.names]
    words = st.one_of(st.sampled_from(names), st.sampled_from(VALUES), st.text(max_size=6).filter(is_no_name))
    choices = [choice for flag in flags_of(verb) for choice in re.findall(r"[\w-]+", flag.values)]

    @seed(0)
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(words, st.sampled_from(choices)) if choices else words, max_size=5))
    def anything(command: list[str]) -> None:
        give(watch, [*verb.split(), *FIRST[verb], *command])

    anything()


def is_no_name(word: str) -> bool:
    """Words with a colon may name code; a command line cannot hold a NUL."""
    return ":" not in word and "\x00" not in word


@pytest.mark.parametrize("words", [[], ["x"], ["--x"], ["-"], ["--"], [""], ["\udcff"], ["help"], ["train", "--", "x"]])
def test_a_command_that_does_not_exist_is_told(words, watch):
    assert give(watch, words) in (0, 2)


def test_as_many_cases_ran_as_are_promised():
    if len(watches) < 3 * len(COMMANDS):
        pytest.skip("not all verbs were asked for")
    assert sum(watch.cases for watch in watches.values()) >= FEWEST_CASES
