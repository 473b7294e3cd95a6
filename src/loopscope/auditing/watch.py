"""`watch`: the online monitor for anybody's training loop.

Every so many steps the watcher runs its own pass, one row of the batch through the protocol, and hands what it reads to
the same `ScaleMonitor` that our trainer uses. Nothing of the training is touched by that pass.

Shape legend: B batch, T tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.auditing.monitor import Alarm, Observation, Reading, ScaleMonitor, read
from loopscope.errors import ConfigError, DataError, ProtocolError
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.objectives.placement import exit_weights
from loopscope.objectives.terms import Term
from loopscope.protocol import AdaptedModel, LoopedModel, LoopTrace, OwnLosses, missing_methods, run_loops
from loopscope.untouched import borrowed, network_of

EVERY = 50
"""Steps between observations: often enough to see a scale leave, seldom enough to cost below 1 % of step time."""


def watch(
    model: LoopedModel | nn.Module,
    *,
    every: int = EVERY,
    supervised: str | Sequence[int] = "every-loop",
    terms: Sequence[Term] = (),
    controlled: bool = False,
    autocast: torch.dtype | None = None,
    on_alarm: Callable[[Alarm], object] | None = None,
) -> Watcher:
    """Watch scale, radial gradient share and headroom of a looped model while your own loop trains it.

    `model` is a LoopedModel, or a module that contains one (a DDP wrapper, a LightningModule). `supervised` says which
    loops get cross-entropy: "every-loop", "terminal" or their numbers. `terms` is what else is in your loss
    (`ls.NormPenalty(0.01)`), besides the model's own; whether it holds the scale is measured. `controlled` is your word
    that some other term does.
    `autocast` is the dtype you train in under torch.autocast. `on_alarm` gets each alarm; without it they are Python
    warnings.

        with ls.watch(model, on_alarm=print) as monitor:
            for ids, targets in batches:
                ...  # your forward, backward and optimiser step
                monitor.step(ids, targets)
    """
    looped = looped_part(model)
    if not isinstance(looped, nn.Module) or (isinstance(looped, AdaptedModel) and looped.module is None):
        what = "this model shows no module (adapt takes module=), so loopscope.watch cannot put it into eval mode"
        warnings.warn(f"{what} nor keep its buffers as they are while it looks", RuntimeWarning, stacklevel=2)
    return Watcher(looped, every, supervised, terms, controlled, autocast, on_alarm)


class Watcher:
    """What `watch` returns: call `step` once per training step, read `history`; a context manager."""

    def __init__(
        self,
        model: LoopedModel,
        every: int,
        supervised: str | Sequence[int],
        terms: Sequence[Term],
        controlled: bool,
        autocast: torch.dtype | None,
        on_alarm: Callable[[Alarm], object] | None,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every = {every}: the watcher looks every 1 or more steps")
        self.model, self.every, self.autocast = model, every, autocast
        self.weights = exit_weights(supervised, model.num_loops)
        own = OwnLosses.of(model)
        self.terms = [*terms, *(() if own is None else own.losses())]
        """What is in the loss besides cross-entropy; may be changed while training, when a penalty is turned on."""
        self.controlled = controlled
        self.on_alarm = on_alarm or _warn
        self.monitor = ScaleMonitor()
        self.history: list[Observation] = []
        self.last_step = 0
        self.looked = False
        self.failure: str | None = None
        """What the last pass that failed said; training goes on without it."""
        self.closed = False

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms so far."""
        return [alarm for seen in self.history for alarm in seen.alarms]

    def step(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        step: int | None = None,
        trace: LoopTrace | None = None,
    ) -> Observation | None:
        """Count one training step; at the first and at every `every`-th look at the model and return what was seen.

        Without targets those are the next ids. `step` is for loops that count themselves (from 1). A `trace` of the
        step's own forward pass (`ObjectiveResult.trace`) is read instead of running another one.
        """
        if self.closed:
            return None
        step = self.last_step = self.last_step + 1 if step is None else step
        if not self.due(step):
            return None
        self.looked = True
        try:
            reading = self._read(ids_BT, targets_BT, trace)
        except Exception as error:
            self.fail(error, step)
            return None
        seen = self.monitor.observe(step, reading, controlled=self.controlled)
        self.history.append(seen)
        for alarm in seen.alarms:
            self.on_alarm(alarm)
        return seen

    def due(self, step: int) -> bool:
        """Whether that step will be looked at."""
        return not self.closed and (not self.looked or step % self.every == 0)

    def fail(self, error: Exception, step: int) -> None:
        """A failure of ours must not end a training of yours: it is told once, and the next due step tries again."""
        first, self.failure, self.looked = self.failure is None, f"{type(error).__name__}: {error}", True
        if first:
            what = f"loopscope.watch cannot look at the model at step {step}, and training goes on"
            warnings.warn(f"{what}: {self.failure}", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Stop watching; `step` does nothing from here on, `history` stays."""
        self.closed = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint of yours should keep, as JSON: without it a resumed run takes its scale for the start."""
        return {"step": self.last_step, **self.monitor.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.last_step = state["step"]
        self.monitor.restore(state)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, ids_BT: Tensor, targets_BT: Tensor | None, trace: LoopTrace | None) -> Reading:
        targets_BT = next_ids(ids_BT) if targets_BT is None else targets_BT
        if ids_BT.dim() != 2 or ids_BT.shape != targets_BT.shape:
            shapes = f"ids {tuple(ids_BT.shape)} and targets {tuple(targets_BT.shape)}"
            raise DataError(f"{shapes} must both be (batch, tokens)")
        with undisturbed(self.model, ids_BT.device, self.autocast):
            trace = run_loops(self.model, ids_BT[:1]) if trace is None else trace
            return read(self.model, trace, targets_BT, self.weights, self.terms)


def looped_part(model: LoopedModel | nn.Module) -> LoopedModel:
    """The model itself if it follows the protocol, else the outermost part of it that does."""
    parts = model.modules() if isinstance(model, nn.Module) else iter([model])
    for part in parts:
        if not missing_methods(part):
            return part  # type: ignore[return-value]
    raise ProtocolError(
        f"{type(model).__name__} is not a looped model and contains none: it needs num_loops, embed, loop and readout; "
        "loopscope.adapt makes one of three functions"
    )


def next_ids(ids_BT: Tensor) -> Tensor:
    """Targets of a language model: the ids one to the left, and nothing at the end."""
    return torch.cat([ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORE_INDEX)], dim=1)


@contextmanager
def undisturbed(model: LoopedModel, device: torch.device, autocast: torch.dtype | None = None) -> Iterator[None]:
    """A pass in eval mode without gradients, after which model and random numbers are as before (`borrowed`)."""
    dtype = torch.get_autocast_dtype(device.type) if autocast is None else autocast
    enabled = torch.is_autocast_enabled(device.type) or autocast is not None
    with (
        torch.inference_mode(False),
        borrowed(network_of(model)),
        torch.no_grad(),
        # Without its cache: weights cast without gradient would be taken for the next training step's.
        torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
    ):
        yield


def _warn(alarm: Alarm) -> None:
    warnings.warn(str(alarm), RuntimeWarning, stacklevel=3)
