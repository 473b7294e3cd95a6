"""Checks that all configurations share; each refuses in one sentence that names field, value and flag."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal

from loopscope.errors import ConfigError

MOST_WHOLE = 2**63 - 1
"""The largest whole number of 64 bits."""


def check_only_with(config: Any, chooser: str, choice: str | bool, *names: str) -> None:
    """Fields that mean something only under one choice must keep their default under the others."""
    if getattr(config, chooser) == choice:
        return
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if spec.name in names and value != spec.default:
            why = f"has no effect unless {chooser} = {choice!r}; its default is {spec.default!r}"
            raise ConfigError.of(spec.name, value, why)


def check_pairing(config: Any, chooser: str, needed: dict[str, str]) -> None:
    """A choice that needs a field, and a field that needs that choice, come together or not at all."""
    for choice, name in needed.items():
        chosen, given = getattr(config, chooser) == choice, getattr(config, name) is not None
        if chosen and not given:
            raise ConfigError.of(chooser, choice, f"needs {name}; add --{name.replace('_', '-')}")
        if given and not chosen:
            raise ConfigError.of(name, getattr(config, name), f"has no effect unless {chooser} = {choice!r}")


def refuse(config: Any, is_wrong: Callable[[Any], bool], why: str, *names: str) -> None:
    """Fields that are wrong where they are given."""
    for name in names:
        if (value := getattr(config, name)) is not None and is_wrong(value):
            raise ConfigError.of(name, value, why)


def check_seed(config: Any) -> None:
    """A seed that every generator of random numbers takes."""
    refuse(config, lambda seed: not 0 <= seed < 2**31, "must be between 0 and 2³¹ − 1", "seed")


def check_positive(config: Any, *names: str) -> None:
    """Numbers that must be above 0 where they are given."""
    refuse(config, lambda value: value <= 0, "must be above 0", *names)


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Numbers with a lower limit, where they are given."""
    refuse(config, lambda value: value < least, f"must be at least {least}", *names)


def check_one_of(config: Any, name: str, allowed: Iterable[str]) -> None:
    """A choice, where one is made."""
    if (value := getattr(config, name)) is not None and value not in (known := tuple(allowed)):
        raise ConfigError.of(name, value, f"allowed: {', '.join(known)}")


def check_at_most(config: Any, most: float, *names: str) -> None:
    """Numbers with an upper limit."""
    refuse(config, lambda value: value > most, f"must be at most {most:,}", *names)


def check_not_negative(config: Any, *names: str) -> None:
    """Numbers that must be at least 0 where they are given."""
    refuse(config, lambda value: value < 0, "must not be negative", *names)


def check_share(config: Any, name: str) -> None:
    """A share of a whole."""
    refuse(config, lambda value: not 0 < value <= 1, "must be above 0 and at most 1", name)


def check_whole_numbers(config: Any) -> None:
    """Whole numbers fit into 64 bits: torch and numpy, which get them in the end, hold no larger ones."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not -MOST_WHOLE - 1 <= number <= MOST_WHOLE:
                shown = "a number of very many digits" if abs(number) > 10**40 else number  # Python refuses to print it
                raise ConfigError.of(spec.name, shown, f"must be at most {MOST_WHOLE:,} in size")


def check_types(config: Any) -> None:
    """Every value has its field's declared type; YAML and Python callers get no silent coercion."""
    check_whole_numbers(config)
    for name, hint in _hints(config.__class__).items():
        value = getattr(config, name)
        if not _matches(value, hint):
            raise ConfigError.of(name, value, f"expected {_describe(hint)}")
        value = _as_float(value, hint)
        object.__setattr__(config, name, value)  # frozen, and a whole number in a float field must become a float
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            raise ConfigError.of(name, value, "must be a finite number")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """Evaluating them takes longer than all that is checked with them, and a grid has hundreds of configurations."""
    return typing.get_type_hints(kind)


def _as_float(value: Any, hint: Any) -> Any:
    """Whole numbers where the field holds floats."""
    if isinstance(value, tuple):
        return tuple(_as_float(item, typing.get_args(_without_none(hint))[0]) for item in value)
    return float(value) if isinstance(value, int) and _without_none(hint) is float else value


def _without_none(hint: Any) -> Any:
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    return args[0] if typing.get_origin(hint) in (types.UnionType, typing.Union) else hint


def _matches(value: object, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(_matches(item, args[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(arg) for arg in args)
    if origin is tuple:
        return f"a list of values, each {_describe(args[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "nothing"}
    return names.get(hint, str(hint))
