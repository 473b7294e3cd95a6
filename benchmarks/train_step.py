"""Our training step against a straightforward one of the same model, interleaved step by step.

    python benchmarks/train_step.py [--rounds 5] [--only nano]

Straightforward: manual softmax attention, K logit tensors, K cross-entropies, torch's default AdamW, eager. Ours: what
`loopscope train` runs. Both start from the same weights and see the same batches, dropout off. "As usually run" is the
straightforward step with denormals not flushed, after 5 steps from the paper's initialisation; it runs in a process of
its own, because threads keep the setting they were born with, and takes its turn in every round. MFU is our model FLOPs
over the SGEMM rate measured between the two. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.config import Config
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.placement import Objective
from loopscope.presets import preset
from loopscope.training.counting import CountedSteps
from loopscope.training.optimizers import Optimizers, clip_gradients
from side_by_side import extra_peak_mib, machine, sgemm_gflops


@dataclass(frozen=True)
class Case:
    """A preset, its batch, and what must be reached."""

    name: str
    batch: int
    faster: float
    """Least tokens/s over the straightforward step's."""
    mfu: float | None = None
    memory: float | None = None
    """Most peak memory over the straightforward step's."""
    faster_than_usual: float | None = None


CASES = (
    Case("paper-44m", batch=4, faster=1.05, mfu=0.75, memory=0.5, faster_than_usual=2.5),
    Case("nano", batch=16, faster=1.3),
)


EXIT_FRACTION = 0.25
WARM_UP = 5
"""Steps after which denormals appear."""


class PlainLoopedLM(nn.Module):
    """The paper's model as most people would write it first; takes the weights of ours."""

    def __init__(self, ours: LoopedLM) -> None:
        super().__init__()
        config = ours.config
        self.num_loops, self.num_heads = config.num_loops, config.num_heads
        self.tokens = nn.Embedding.from_pretrained(ours.embedding.weight.detach().clone(), freeze=False)
        assert ours.positions is not None
        self.positions = nn.Embedding.from_pretrained(ours.positions.weight.detach().clone(), freeze=False)
        layers = [PlainLayer(config.width, config.num_heads) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        for mine, theirs in zip(layers, ours.recurrence.core.layers, strict=True):
            mine.load_from(theirs)

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean over loops of cross-entropy, from K logit tensors."""
        h = self.tokens(ids_BT) + self.positions(torch.arange(ids_BT.shape[1]))
        losses = []
        for _ in range(self.num_loops):
            for layer in self.layers:
                h = layer(h)
            logits = F.linear(self.norm(h), self.tokens.weight)
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten()))
        return torch.stack(losses).mean()


class PlainLayer(nn.Module):
    """Pre-norm attention and SwiGLU with separate projections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 4 * width, bias=False), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def load_from(self, theirs: nn.Module) -> None:
        """Copy our layer's matrices (its norms start at one, like ours)."""
        weights = dict(theirs.named_parameters())
        gate, up = weights["feed_forward.up.weight"].chunk(2)
        with torch.no_grad():
            self.qkv.weight.copy_(weights["attention.qkv.weight"])
            self.out.weight.copy_(weights["attention.out.weight"])
            self.gate.weight.copy_(gate)
            self.up.weight.copy_(up)
            self.down.weight.copy_(weights["feed_forward.out.weight"])

    def forward(self, h: Tensor) -> Tensor:
        batch, tokens, width = h.shape
        shape = (batch, tokens, self.num_heads, self.head_width)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.attention_norm(h)).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_width)
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.mlp_norm(h)
        return h + self.down(F.silu(self.gate(normed)) * self.up(normed))


Step = Callable[[Tensor, Tensor], float]


def plain_step(ours: LoopedLM, config: Config) -> Step:
    """Forward, backward, clip, AdamW."""
    model = PlainLoopedLM(ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.training.lr, weight_decay=config.training.weight_decay)

    def step(ids_BT: Tensor, targets_BT: Tensor) -> float:
        loss = model(ids_BT, targets_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.clip)
        optimizer.step()
        return loss.item()

    return step


def our_step(model: LoopedLM, config: Config) -> Step:
    """The trainer's step, without its bookkeeping."""
    objective, optimizers = Objective(config.objective), Optimizers(model, config.training)
    model.train()

    def step(ids_BT: Tensor, targets_BT: Tensor) -> float:
        loss = model(ids_BT, targets_BT, objective).loss
        loss.backward()
        clip_gradients(model.parameters(), config.training.clip)
        optimizers.step(config.training.lr)
        optimizers.zero_grad()
        return float(loss.item())

    return step


@dataclass
class Timings:
    """Seconds per step of each variant, and the SGEMM rate measured in each round."""

    ours: list[float]
    plain: list[float]
    usual: list[float]
    sampled: list[float]
    """Ours with the early exits supervised at a quarter of the positions."""
    gflops: list[float]


Batch = tuple[Tensor, Tensor]


def measure(case: Case, config: Config, rounds: int) -> tuple[Timings, float, float]:
    """Interleaved timings and the extra peak memory of ours and of the straightforward step."""
    torch.set_flush_denormal(True)
    model = build(config.design("a benchmark"), seed=0)
    plain, ours = plain_step(model, config), our_step(model, config)
    batches = random_batches(case, config, WARM_UP + 1 + rounds)
    for number, batch in enumerate(batches[:WARM_UP]):
        difference = abs(plain(*batch) - ours(*batch))
        assert number or difference < 1e-3, f"the two models differ by {difference} at the first step"
    our_mib, plain_mib = (extra_peak_mib(partial(step, *batches[WARM_UP])) for step in (ours, plain))
    quarter = replace(config, objective=replace(config.objective, exit_fraction=EXIT_FRACTION))
    sampled = our_step(build(config.design("a benchmark"), seed=0), quarter)
    sampled(*batches[WARM_UP])
    timings = Timings([], [], [], [], [])
    with ExitStack() as stack:
        usual = stack.enter_context(_UsualProcess(case, config)) if case.faster_than_usual is not None else None
        for batch in batches[WARM_UP + 1 :]:
            timings.ours.append(_seconds(ours, batch))
            timings.gflops.append(sgemm_gflops())
            timings.plain.append(_seconds(plain, batch))
            timings.sampled.append(_seconds(sampled, batch))
            if usual is not None:
                timings.usual.append(usual.seconds(batch))
    return timings, our_mib, plain_mib


def random_batches(case: Case, config: Config, count: int) -> list[Batch]:
    """The same ids in every process."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, case.batch, config.sequence_length + 1)
    ids = torch.randint(config.model.vocab_size, shape, generator=generator)
    return [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in ids]


class _UsualProcess:
    """The straightforward step in a new process, whose threads never learn to flush denormals."""

    def __init__(self, case: Case, config: Config) -> None:
        self.pool = multiprocessing.get_context("spawn").Pool(1, _start_usual, (case, config))

    def __enter__(self) -> _UsualProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.terminate()

    def seconds(self, batch: Batch) -> float:
        """Time of one step there; this process waits."""
        return self.pool.apply(_usual_seconds, (batch,))


def denormal_cost() -> float:
    """Time of multiplying denormal numbers over normal ones, denormals kept: 1 where the CPU does not mind them."""
    torch.set_flush_denormal(False)
    half = torch.full((1 << 20,), 0.5)
    seconds: dict[float, float] = {}
    for value in (1.0, 1e-39) * 5:
        numbers = torch.full((1 << 20,), value)
        started = time.perf_counter()
        torch.mul(numbers, half, out=numbers)
        seconds[value] = min(time.perf_counter() - started, seconds.get(value, math.inf))
    return seconds[1e-39] / seconds[1.0]


_usual: list[Step] = []


def _start_usual(case: Case, config: Config) -> None:
    _usual.append(plain_step(build(config.design("a benchmark"), seed=0), config))
    for batch in random_batches(case, config, WARM_UP):
        _usual[0](*batch)


def _usual_seconds(batch: Batch) -> float:
    return _seconds(_usual[0], batch)


def _seconds(step: Step, batch: Batch) -> float:
    started = time.perf_counter()
    step(*batch)
    return time.perf_counter() - started


def report(case: Case, rounds: int) -> bool:
    """Print one case; true when every target is met."""
    base = preset(case.name)
    config = replace(
        base, model=replace(base.design("a benchmark"), dropout=0.0), training=replace(base.training, batch=case.batch)
    )
    timings, our_mib, plain_mib = measure(case, config, rounds)
    tokens = case.batch * config.sequence_length
    flops = CountedSteps(config).flops_per_token().total * tokens
    print(f"\n{case.name}, {case.batch}×{config.sequence_length} tokens, {rounds} rounds")
    for name in ("ours", "plain", "usual", "sampled"):
        if seconds := getattr(timings, name):
            middle = statistics.median(seconds)
            print(f"  {name:7} {middle * 1e3:9.1f} ms a step, {tokens / middle:8,.0f} tokens/s")
    mfu = [flops / seconds / (rate * 1e9) for seconds, rate in zip(timings.ours, timings.gflops, strict=True)]
    met = _verdict("tokens/s, ours over straightforward", _ratios(timings.plain, timings.ours), case.faster)
    met &= _verdict("MFU of ours", mfu, case.mfu)
    met &= _verdict("extra peak memory, straightforward over ours", [plain_mib / our_mib], _inverse(case.memory))
    name = f"tokens/s, exits supervised at {EXIT_FRACTION:.0%} of positions over all"
    _verdict(name, _ratios(timings.ours, timings.sampled), None)
    if timings.usual:
        met &= _verdict(
            "tokens/s, ours over as usually run", _ratios(timings.usual, timings.ours), case.faster_than_usual
        )
    return met


def _ratios(theirs: list[float], ours: list[float]) -> list[float]:
    return [slow / fast for slow, fast in zip(theirs, ours, strict=True)]


def _inverse(share: float | None) -> float | None:
    return None if share is None else 1 / share


def _verdict(name: str, values: list[float], target: float | None) -> bool:
    middle = statistics.median(values)
    wanted = "" if target is None else f"  target ≥ {target:.2f}: {'met' if middle >= target else 'MISSED'}"
    print(f"  {name}: {middle:.3f} [{min(values):.3f}, {max(values):.3f}]{wanted}")
    return target is None or middle >= target


def main(rounds: int = 5, only: str | None = None) -> int:
    """Run all cases.

    Args:
        rounds: Steps of each variant; ratios are medians over rounds, with their range.
        only: Run only the case of this name.
    """
    torch.manual_seed(0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # its threads are new, and keep denormals
        slower = pool.apply(denormal_cost)
    print(f"{machine()}; a product with denormals takes {slower:.1f}× the time of one without")
    met = [report(case, rounds) for case in CASES if only in (None, case.name)]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
