"""Trackers: TensorBoard, Weights & Biases and trackio get the rows that metrics.jsonl gets (the track extra)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from loopscope.config import Config, config_to_dict
from loopscope.errors import UnsupportedError
from loopscope.results.record import as_json
from loopscope.results.run import Logged

Listener = Callable[[Logged], None]


def check_installed(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed, before a run is touched; nothing is imported for it."""
    for name in names:
        found = sys.modules[name] if name in sys.modules else importlib.util.find_spec(name)
        if found is None:
            raise UnsupportedError(f"--track {name} needs {name}: pip install 'loopscope[track]'")


def make_trackers(config: Config, folder: Path) -> tuple[Listener, ...]:
    """A listener for every tracker the configuration names."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
    try:
        return tuple(makers[name](config, folder) for name in config.training.track)
    except ImportError as error:
        raise UnsupportedError(f"--track needs {error.name}: pip install 'loopscope[track]'") from error


def scalars(row: Logged) -> dict[str, float]:
    """A row as flat numbers: lists become name/1, name/2 (loops), mappings name/key."""
    flat: dict[str, float] = {}
    for name, value in as_json(row).items():
        if isinstance(value, list):
            flat.update({f"{name}/{k}": item for k, item in enumerate(value, start=1)})
        elif isinstance(value, dict):
            flat.update({f"{name}/{key}": item for key, item in value.items()})
        elif isinstance(value, (int, float)) and name != "step":
            flat[name] = value
    return {f"{row.kind}/{name}": value for name, value in flat.items()}


def _tensorboard(config: Config, folder: Path) -> Listener:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))

    def listen(row: Logged) -> None:
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, row.step)
        writer.flush()

    return listen


def _wandb(config: Config, folder: Path) -> Listener:
    import wandb

    run = wandb.init(project="loopscope", name=folder.name, dir=str(folder), config=config_to_dict(config))
    return lambda row: run.log(scalars(row), step=row.step)


def _trackio(config: Config, folder: Path) -> Listener:
    import trackio

    trackio.init(project="loopscope", name=folder.name, config=config_to_dict(config))
    return lambda row: trackio.log(scalars(row), step=row.step)
