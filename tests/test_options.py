"""Options are declared once: what a keyword of a function may be, its flag may be, and a wrong one is told alike."""

from __future__ import annotations

import pytest

import loopscope as ls
from loopscope.cli import parse
from loopscope.errors import ConfigError
from loopscope.options import (
    AuditOptions,
    CalibrateOptions,
    CheckOptions,
    ConvertOptions,
    EvaluateOptions,
    GenerateOptions,
    RemedyOptions,
    chosen,
    parse_depths,
)

WRONG = [
    ("audit preset:demo", AuditOptions, {"states": 0}, "states = 0: must be at least 1 (flag --states)"),
    ("audit preset:demo", AuditOptions, {"prefix": 1}, "prefix = 1: must be at least 2 (flag --prefix)"),
    ("audit preset:demo", AuditOptions, {"loops": 0}, "loops = 0: must be at least 1 (flag --loops)"),
    ("eval run", EvaluateOptions, {"length": 0}, "length = 0: must be at least 1 (flag --length)"),
    ("eval run", EvaluateOptions, {"batch": 0}, "batch = 0: must be at least 1 (flag --batch)"),
    ("calibrate run", CalibrateOptions, {"confidence": 0.3}, "confidence = 0.3: must be at least 0.5 and below 1"),
    ("calibrate run", CalibrateOptions, {"verify": -1}, "verify = -1: must not be negative (flag --verify)"),
    ("remedy run", RemedyOptions, {"steps": 0}, "steps = 0: must be at least 1 (flag --steps)"),
    ("convert run out", ConvertOptions, {"to": "loopscope", "push": "org/it"}, "push = 'org/it': the hub takes"),
    ("generate run A", GenerateOptions, {"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1 (flag --top-p)"),
    ("generate run A", GenerateOptions, {"num_loops": 0}, "num_loops = 0: a number of loops is between 1 and 10,000"),
]


@pytest.mark.parametrize(("command", "kind", "fields", "sentence"), WRONG)
def test_a_flag_and_a_keyword_out_of_range_are_refused_in_the_same_words(command, kind, fields, sentence):
    flags = [word for name, value in fields.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    keywords = {{"loops": "rollout"}.get(name, name): value for name, value in fields.items()}
    for refused in (lambda: parse([*command.split(), *flags]), lambda: kind(**keywords)):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert str(caught.value).startswith(sentence)


def test_what_a_verb_is_given_is_what_its_function_takes():
    given = parse(
        ["eval", "run", "--depths", "2..4", "--policies", "margin:1,kl:2", "--batch", "3", "--data", "a.txt", "b.txt"]
    )
    assert isinstance(given, EvaluateOptions)
    wanted = EvaluateOptions(depths=(2, 3, 4), policies=("margin:1", "kl:2"), batch=3, data=("a.txt", "b.txt"))
    assert all(getattr(given, name) == value for name, value in vars(wanted).items())
    assert parse(["audit", "run", "--loops", "7"]).rollout == 7


def test_keywords_change_the_options_that_a_function_is_given():
    assert chosen(CheckOptions(), None, {"context": 24}) == CheckOptions(context=24)
    assert chosen(CheckOptions(), CheckOptions(seed=3), {"context": 24}) == CheckOptions(seed=3, context=24)
    with pytest.raises(TypeError, match="depht"):
        ls.evaluate("preset:demo", depht=3)


def test_depths_are_spans_or_lists():
    assert parse_depths("2..4") == (2, 3, 4) and parse_depths("1,4") == (1, 4)
    for wrong in ("0..2", "4..2", "a", "1..", "1,,2", "1..99999999999999999999", "10001", "9" * 5000):
        with pytest.raises(ConfigError, match="depths"):
            parse_depths(wrong)
    with pytest.raises(ConfigError, match="from 1 up to 10,000"):
        EvaluateOptions(depths=[3, 0])
