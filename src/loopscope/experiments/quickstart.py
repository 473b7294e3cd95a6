"""The paper's 2×2 at demo size: {terminal, per-loop} cross-entropy × {RMSNorm, raw} readout, in a minute or two.

Everything but the named factors is equal: initial weights, batches, optimiser, steps. The recipe is the paper's
(arXiv 2606.24898) but for size: demo preset, built-in corpus in 512 byte-pair tokens, learning rate 2e-3.

Shape legend: B batch, T tokens, K loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from loopscope.config import Config
from loopscope.data.corpora import Corpus
from loopscope.data.tokenizers import train_bpe
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.cross_entropy import reference_cross_entropy
from loopscope.objectives.placement import Objective, ObjectiveResult
from loopscope.presets import preset
from loopscope.protocol import run_loops

LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.01
CLIP = 1.0
BATCH, LENGTH = 16, 128
VALID_BATCHES = 8

OnStep = Callable[[str, int, ObjectiveResult], None]


@dataclass(frozen=True)
class Condition:
    """One corner of the 2×2."""

    placement: Literal["terminal", "per-loop"]
    readout: Literal["rmsnorm", "raw"]

    @property
    def name(self) -> str:
        """The way the paper's tables name it."""
        return f"{self.placement} + {self.readout}"

    def config(self) -> Config:
        """The demo preset under this condition."""
        base = preset("demo")
        model = replace(base.model, readout=self.readout)
        return Config(model=model, objective=replace(base.objective, placement=self.placement))


CONDITIONS = (
    Condition("terminal", "rmsnorm"),
    Condition("terminal", "raw"),
    Condition("per-loop", "rmsnorm"),
    Condition("per-loop", "raw"),
)


@dataclass(frozen=True)
class TokenSplits:
    """Token ids of the training and validation splits."""

    train: Tensor
    valid: Tensor


@dataclass(frozen=True)
class ConditionResult:
    """What a condition ended with, measured on the validation split after each loop."""

    condition: Condition
    ce_K: list[float]
    norms_K: list[float]

    @property
    def exit_failure(self) -> float:
        """CE(1) − CE(K): how much worse the first exit is than full depth."""
        return self.ce_K[0] - self.ce_K[-1]


def tokenize(corpus: Corpus) -> TokenSplits:
    """The corpus in the demo preset's vocabulary, learned from its training split."""
    tokenizer = train_bpe(corpus.documents["train"], preset("demo").model.vocab_size)
    return TokenSplits(*(torch.tensor(tokenizer.encode(corpus.text(split)).ids) for split in ("train", "valid")))


def run_condition(
    condition: Condition, tokens: TokenSplits, *, steps: int, seed: int, on_step: OnStep = lambda *_: None
) -> ConditionResult:
    """Train one corner and measure it; the same seed and threads give the same numbers."""
    config = condition.config()
    model = build(config.model, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # dropout
        train(model, Objective(config.objective), tokens.train, steps, seed, partial(on_step, condition.name))
    return ConditionResult(condition, *evaluate(model, tokens.valid))


def train(
    model: LoopedLM,
    objective: Objective,
    ids: Tensor,
    steps: int,
    seed: int,
    on_step: Callable[[int, ObjectiveResult], None],
) -> None:
    """The paper's recipe as a plain loop: AdamW, constant learning rate, weight decay on everything, clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    model.train()
    batches = random_batches(ids, seed)
    for step in range(1, steps + 1):
        result = model(*next(batches), objective)
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        on_step(step, result)


@torch.no_grad()
def evaluate(model: LoopedLM, ids: Tensor) -> tuple[list[float], list[float]]:
    """CE and mean ‖h_k‖ after each loop, over the first tokens of the validation split, each token once."""
    model.eval()
    count = min(VALID_BATCHES * BATCH, (len(ids) - 1) // LENGTH)
    ids_BT, targets_BT = (ids[o : o + count * LENGTH].view(count, LENGTH) for o in (0, 1))
    trace = run_loops(model, ids_BT)
    features_KND = torch.stack([model.features(state, k).flatten(0, 1) for k, state in enumerate(trace.states) if k])
    ce_K = reference_cross_entropy(features_KND, model.head, targets_BT.flatten()).ce_K
    return ce_K.tolist(), trace.norms_K().tolist()


def random_batches(ids: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids_BT, targets_BT): windows at random places, targets one token on."""
    generator = torch.Generator().manual_seed(seed)
    offsets_T = torch.arange(LENGTH)
    while True:
        starts_B = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
        index_BT = starts_B[:, None] + offsets_T
        yield ids[index_BT], ids[index_BT + 1]
