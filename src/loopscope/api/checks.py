"""`loopscope.check`: does a looped model give the same numbers however it is run?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from loopscope.adapters.transformers_lm import TransformersModel, is_pretrained_model
from loopscope.errors import ConfigError, ProtocolError
from loopscope.inference.conformance import Progress, check_looped, check_text_model
from loopscope.options import CheckOptions, chosen
from loopscope.protocol import LoopedModel
from loopscope.results.check import Conformance
from loopscope.targets import Opened, is_factory, made_by_factory, of_made, open_target
from loopscope.untouched import borrowed, network_of, widened, widest_affordable


def check(
    target: str | Path | Opened | LoopedModel | nn.Module,
    options: CheckOptions | None = None,
    *,
    progress: Progress = lambda what, share: None,
    **fields: Any,
) -> Conformance:
    """Whether cached is uncached, ragged is alone, depth n of a deeper run is a run of n, and so on; see docs/check.md.

    `target` is a word that names a model, what `loopscope.open` gave, a LoopedModel, or a causal language model of
    transformers. `fields` are those of CheckOptions. The model comes back as it was.
    """
    options = chosen(CheckOptions(), options, fields)
    context, device, seed = options.context, options.device, options.seed
    made: Any = target
    name = type(target).__name__
    if isinstance(target, (str, Path)):
        name = str(target)
        made = made_by_factory(name, seed) if is_factory(name) else open_target(target, seed=seed)
    if is_pretrained_model(made):
        if context is not None:
            raise ConfigError.of("context", context, "a model of transformers does not refuse positions itself")
        network = made
        _bring(network, device)
        found = _at_its_widest(
            network, lambda: check_text_model(TransformersModel(network), seed=seed, progress=progress)
        )
        return replace(found, target=name)
    with borrowed(network_of(made)):  # a model that was handed in is given back in the mode it was in
        opened = made if isinstance(made, Opened) else of_made(name, made)
        model, length = opened.model, opened.max_length if context is None else context
        _bring(network_of(model), device)

        def run() -> Conformance:
            return check_looped(model, opened.vocab_size, length, seed=seed, progress=progress)

        return replace(_at_its_widest(network_of(model), run), target=opened.name)


def _bring(network: nn.Module | None, device: str | None) -> None:
    if network is None or device is None:
        return
    try:
        network.to(device)
    except (RuntimeError, AssertionError) as error:  # torch's own words: no such device, or no build for it
        raise ConfigError.of("device", device, str(error).splitlines()[0]) from None


def _at_its_widest(network: nn.Module | None, run: Callable[[], Conformance]) -> Conformance:
    """In float64 where the weights are small enough, so that rounding is out of the way; else in float32.

    A model may have weights that it does not show, or masks of a fixed dtype: what then fails is run as it is.
    """
    dtype = widest_affordable(network)
    wide: Conformance | None = None
    with borrowed(network) as held:
        try:
            with widened(network, dtype, held):
                wide = run()
            why = _raised(wide)
        except ProtocolError as error:
            why = str(error)
        if wide is not None and why is None:
            return wide
        own = run()
    if wide is not None and _raised(own) is not None:
        return wide  # it fails in any dtype
    note = f"the model does not run in {str(dtype).removeprefix('torch.')}, so it was checked in its own dtype ({why})"
    return replace(own, notes=(*own.notes, note))


def _raised(result: Conformance) -> str | None:
    """The first error that a model raised in a check."""
    return next((finding.raised for finding in result.findings if finding.raised is not None), None)
