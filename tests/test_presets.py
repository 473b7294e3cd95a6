"""Presets have the sizes that were published."""

from __future__ import annotations

import pytest

from loopscope.errors import ConfigError
from loopscope.model.looped_lm import build, count_parameters
from loopscope.presets import PRESETS, preset


def total(name: str) -> int:
    return sum(count_parameters(build(preset(name).model, device="meta")).values())


def test_paper_sizes_are_the_published_ones():
    assert round(total("paper-44m") / 1e6, 1) == 43.9
    assert round(total("paper-129m") / 1e6) == 129


def test_ouro_has_exactly_the_parameters_of_its_checkpoint():
    """24 layers of 11 tensors, untied head, one norm shared by readout and recurrence, an exit gate."""
    width, hidden, vocabulary, layers = 2048, 5632, 49_152, 24
    layer = 4 * width**2 + 3 * width * hidden + 4 * width
    assert total("ouro-1.4b") == 2 * vocabulary * width + layers * layer + width + (width + 1)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_on_the_meta_device_and_counts_every_parameter_once(name):
    model = build(preset(name).model, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(count_parameters(model).values()) == sum(parameter.numel() for parameter in model.parameters())


def test_the_named_small_sizes():
    nano, micro, demo = (preset(name).model for name in ("nano", "micro", "demo"))
    assert (nano.width, nano.num_layers, nano.vocab_size) == (128, 2, 2048)
    assert (micro.width, micro.num_layers) == (256, 4)
    assert (demo.width, demo.vocab_size) == (64, 512)


def test_a_wrong_preset_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'paper-44m'"):
        preset("paper-44")
