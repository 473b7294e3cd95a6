"""`loopscope.check`: does a looped model give the same numbers however it is run?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from loopscope.adapters.transformers_lm import TransformersModel, is_pretrained_model
from loopscope.auditing.untouched import borrowed, network_of, widened, widest_affordable
from loopscope.errors import ConfigError
from loopscope.inference.black_box import check_text_model
from loopscope.inference.conformance import Conformance, check_looped
from loopscope.protocol import LoopedModel
from loopscope.targets import Opened, is_factory, made_by_factory, of_made, open_target

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Checked:
    """What `loopscope check` prints: what came of the checks, with whose they are."""

    name: str
    conformance: Conformance

    def to_json(self) -> dict[str, Any]:
        """As `loopscope check --json` prints it."""
        return {"target": self.name, **self.conformance.to_json()}


def check(
    target: str | Path | Opened | LoopedModel | nn.Module,
    *,
    context: int | None = None,
    device: str | None = None,
    seed: int = 0,
    progress: Progress = lambda what, share: None,
) -> Checked:
    """Whether cached is uncached, ragged is alone, depth n of a deeper run is a run of n, and so on; see docs/check.md.

    `target` is a word that names a model, what `loopscope.open` gave, a LoopedModel, or a causal language model of
    transformers. `context` is the number of tokens it takes, for one that does not say. The model comes back as it was.
    """
    made: Any = target
    name = type(target).__name__
    if isinstance(target, (str, Path)):
        name = str(target)
        made = made_by_factory(name, seed) if is_factory(name) else open_target(target, seed=seed)
    if is_pretrained_model(made):
        network = made
        return Checked(name, _widest(network, device, lambda: _of_network(network, context, seed, progress)))
    opened = made if isinstance(made, Opened) else of_made(name, made)
    name, model = opened.name, opened.model
    length = context or opened.max_length

    def run() -> Conformance:
        return check_looped(model, opened.vocab_size, length, seed=seed, progress=progress)

    return Checked(name, _widest(network_of(model), device, run))


def _of_network(network: Any, context: int | None, seed: int, progress: Progress) -> Conformance:
    if context is not None:
        raise ConfigError.of("context", context, "a model of transformers does not refuse positions itself")
    return check_text_model(TransformersModel(network), seed=seed, progress=progress)


def _widest(network: nn.Module | None, device: str | None, run: Callable[[], Conformance]) -> Conformance:
    """In float64 where the weights are small enough, so that rounding is out of the way; else in float32."""
    if network is not None and device is not None:
        try:
            network.to(device)
        except (RuntimeError, AssertionError) as error:  # torch's own words: no such device, or no build for it
            raise ConfigError.of("device", device, str(error).splitlines()[0]) from None
    with borrowed(network) as held, widened(network, widest_affordable(network), held):
        return run()
