"""A tiny training run on random tokens, for tests of the trainer. Run as a script it trains in its own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import loopscope as ls
from loopscope.config import Config, ModelConfig, ObjectiveConfig, TrainingConfig, config_from_dict
from loopscope.runs import RunFolder
from loopscope.training.distributed import Ranks, join
from loopscope.training.session import find_checkpoint
from loopscope.training.trainer import Trainer

VOCABULARY, LENGTH, BATCH = 29, 12, 4

CONFIG = Config(
    model=ModelConfig(
        vocab_size=VOCABULARY, width=16, num_layers=1, num_heads=2, num_loops=3, max_length=LENGTH, dropout=0.1
    ),
    objective=ObjectiveConfig(depth="uniform", norm_penalty=0.01),
    training=TrainingConfig(steps=12, batch=BATCH, lr=1e-2, log_every=1, eval_every=4, save_every=4, schedule="cosine"),
)


class RandomTokens:
    """Batches of a learnable sequence (each token follows from the one before), as a function of the step."""

    def batch(self, step, *, rank=0, world_size=1, micro=0, accumulate=1):
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        ids = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        share = BATCH // (world_size * accumulate)
        rows = ids[(rank * accumulate + micro) * share :][:share]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def valid() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield RandomTokens().batch(10**6)


def change(config: Config, **sections) -> Config:
    """`change(CONFIG, training={"steps": 20})`."""
    return config_from_dict(sections, config)


def make_trainer(folder: Path, config: Config = CONFIG, *, ranks: Ranks | None = None, listeners=()) -> Trainer:
    run = RunFolder(folder)
    if ranks is None or ranks.is_first:
        run.create(config)
    if ranks is not None:
        ranks.barrier()
    model = ls.build(config.model, seed=config.training.seed)
    trainer = Trainer(model, config, run, RandomTokens(), valid, ranks=ranks, listeners=listeners)
    found = find_checkpoint(run, "auto", lambda text: sys.stderr.write(text + "\n"))
    if found is not None:
        trainer.restore(found)
    return trainer


def main(folder: str, shard: str, steps: str, dropout: str) -> None:
    """One rank of a distributed run: `torchrun synthetic.py FOLDER none|full STEPS DROPOUT`."""
    torch.set_num_threads(1)
    config = change(
        CONFIG,
        training={"steps": int(steps), "shard": shard, "schedule": "constant"},
        model={"dropout": float(dropout)},
    )
    config = replace(config, objective=ObjectiveConfig(norm_penalty=0.01))
    with join("cpu") as ranks:
        make_trainer(Path(folder), config, ranks=ranks).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
