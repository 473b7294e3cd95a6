"""The online monitor as a callback of other people's trainers.

    from loopscope.adapters.callbacks import LoopscopeCallback              # transformers.Trainer (the hf extra)
    from loopscope.adapters.callbacks import LoopscopeLightningCallback     # lightning.Trainer (the lightning extra)

Each name is a subclass of the other package's callback, made when it is first asked for: importing this module imports
neither package. What they do is below, in `_HuggingFaceEvents` and `_LightningEvents`.

Shape legend: B batch, T tokens.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn

from loopscope.auditing.monitor import EVERY, Alarm, Observation, Watcher, next_ids, watch
from loopscope.errors import ConfigError, DataError, UnsupportedError
from loopscope.objectives.terms import Term
from loopscope.protocol import LoopedModel

logger = logging.getLogger(__name__)

Batch = tuple[Tensor, Tensor | None]
STATE_KEY = "loopscope.watch"
"""Where the Hugging Face trainer's checkpoint keeps what the monitor must remember."""


def ids_and_targets(batch: Any) -> Batch:
    """(ids_BT, targets_BT) of a batch: a tensor of ids, (ids, targets), or a mapping with input_ids.

    `labels` are Hugging Face's: equal to the ids, and shifted by the model. `targets` are already the next ids.
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        labels, targets = batch.get("labels"), batch.get("targets")
        return batch["input_ids"], targets if labels is None else next_ids(labels)
    if isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor):
        return batch[0], batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) else None
    what = f"a mapping with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise DataError(f"no ids found in {what}; pass ids_of=lambda batch: (ids, targets)")


class _Events:
    """What both callbacks share: how to watch, and what to do about an alarm."""

    def __init__(
        self,
        model: LoopedModel | nn.Module | None = None,
        *,
        every: int = EVERY,
        supervised: str | Sequence[int] = "every-loop",
        terms: Sequence[Term] = (),
        controlled: bool = False,
        on_blind_spot: Literal["warn", "stop"] = "warn",
        ids_of: Callable[[Any], Any] | None = None,
    ) -> None:
        """Watch `model`, or the looped model inside the one that is trained; see `loopscope.watch` for the options.

        `on_blind_spot="stop"` ends the training there. `ids_of` gets a training batch and returns ids or a pair of ids
        and targets, for batches that are neither tensors, pairs nor mappings with input_ids.
        """
        super().__init__()
        if on_blind_spot not in ("warn", "stop"):
            raise ConfigError(f"on_blind_spot = {on_blind_spot!r}; allowed: warn, stop")
        self.model, self.on_blind_spot = model, on_blind_spot
        self.options: dict[str, Any] = {
            "every": every,
            "supervised": supervised,
            "terms": terms,
            "controlled": controlled,
        }
        self.ids_of = ids_of
        self.monitor: Watcher | None = None
        self.remembered: dict[str, Any] | None = None

    def _start(self, trained: nn.Module, autocast: torch.dtype | None, *, speak: bool) -> None:
        """Begin to watch; only the first process speaks."""
        model = trained if self.model is None else self.model

        def tell(alarm: Alarm) -> None:
            if speak:  # other processes see other batches of the same model
                logger.warning("%s", alarm)

        self.monitor = watch(model, **self.options, autocast=autocast, on_alarm=tell)
        if self.remembered is not None:
            self.monitor.restore(self.remembered)

    def _look(self, batch: Any, step: int) -> Observation | None:
        """Hand a step to the watcher; a batch that cannot be read is one warning, like every failure of ours."""
        assert self.monitor is not None
        try:
            ids_BT, targets_BT = ids_and_targets(batch if self.ids_of is None else self.ids_of(batch))
        except Exception as error:
            self.monitor.fail(error, step)
            return None
        return self.monitor.step(ids_BT, targets_BT, step=step)

    def _wants_to_stop(self, seen: Observation | None) -> bool:
        blind = seen is not None and any(alarm.kind == "blind-spot" for alarm in seen.alarms)
        return blind and self.on_blind_spot == "stop"


class _HuggingFaceEvents(_Events):
    """For transformers.Trainer: figures in its logs, alarms through `logging`, `stop` ends the training.

    A hook that is there only while training remembers the last batch that the model's forward got.
    """

    hook: Any = None
    batch: Any = None
    unlogged: dict[str, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        """Begin to watch; a resumed run continues with what its checkpoint remembers."""
        self.remembered = state.stateful_callbacks.get(STATE_KEY)
        autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        self._start(model, autocast, speak=state.is_world_process_zero)
        self._unhook()
        self.hook = model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Look at the model if this step is due."""
        if self.monitor is None or not self.monitor.due(state.global_step):
            return control
        seen = self._look(self.batch, state.global_step)
        if seen is not None:
            self.unlogged = seen.scalars()
            state.stateful_callbacks[STATE_KEY] = self.monitor.state()
        if _any_rank(self._wants_to_stop(seen), args.device):
            control.should_log = control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Add what was seen since the last log, to the log and to the history that is saved."""
        if logs is not None and self.unlogged:
            logs.update(self.unlogged)
            state.log_history[-1].update(self.unlogged)
            self.unlogged = None

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop watching and take the hook away."""
        self._unhook()
        if self.monitor is not None:
            self.monitor.close()

    def _remember(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if module.training:
            self.batch = keywords or arguments

    def _unhook(self) -> None:
        self.batch = None
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class _LightningEvents(_Events):
    """For lightning.Trainer: figures by `log_dict`, alarms through `logging`, `stop` ends the training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch; a resumed run continues with what its checkpoint remembers."""
        autocast = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(trainer.precision)
        self._start(pl_module, autocast, speak=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at the model if the optimiser has made a step and that step is due."""
        step = trainer.global_step
        if self.monitor is None or step == self.monitor.last_step or not self.monitor.due(step):
            return
        seen = self._look(batch, step)
        if seen is not None:
            pl_module.log_dict(seen.scalars(), on_step=True, on_epoch=False)
        if trainer.strategy.reduce_boolean_decision(self._wants_to_stop(seen), all=False):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching."""
        if self.monitor is not None:
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.monitor is None else self.monitor.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, once training starts."""
        self.remembered = state_dict or None


_CLASSES: dict[str, tuple[type[_Events], str, str, str]] = {
    "LoopscopeCallback": (_HuggingFaceEvents, "transformers", "TrainerCallback", "hf"),
    "LoopscopeLightningCallback": (_LightningEvents, "lightning.pytorch", "Callback", "lightning"),
}


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _callback_class(name)


@functools.cache
def _callback_class(name: str) -> type:
    """The callback class of that name: our events on top of the other package's base class."""
    events, package, base, extra = _CLASSES[name]
    try:
        bases = (events, getattr(importlib.import_module(package), base))
    except ImportError as error:
        raise UnsupportedError(f"{name} needs {error.name or package}: pip install 'loopscope[{extra}]'") from error
    return type(name, bases, {"__module__": __name__, "__doc__": events.__doc__})


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether any process says so: a trainer that stops on one of them only would hang on the others."""
    if not distributed.is_available() or not distributed.is_initialized():
        return flag
    votes = torch.tensor(int(flag), device=device)
    distributed.all_reduce(votes)
    return bool(votes.item())
