"""How fast a model prefills and decodes at every depth, timed side by side.

Every round runs all depths and all ways of decoding one after the other, so that a machine that is busy for a while is
busy for all of them; what is given is the median over rounds with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from loopscope.inference.decoding import CachedRunner, Limits, decode, runner_for
from loopscope.protocol import LoopedModel
from loopscope.results.evaluation import Timing

ROUNDS = 7
"""Timed rounds; one more comes before them to warm up."""
PREFILL, DECODE = "prefill", "decode"

Tokens = Iterator[object]
"""Something for every token as it is decoded; the first comes when the prompt has run."""
Way = Callable[[LoopedModel, Sequence[int], int, int], Tokens]
"""A way to decode: model, prompt, number of loops, number of tokens → the tokens."""


def time_depths(
    model: LoopedModel,
    prompt: Sequence[int],
    depths: Sequence[int],
    *,
    tokens: int,
    ways: Mapping[str, Way] | None = None,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[Timing]:
    """Timings of each depth: prefill, decoding, and decoding in other `ways` by the name of what they add."""
    kept: dict[int, int | None] = {}

    def plainly(model: LoopedModel, prompt: Sequence[int], num_loops: int, count: int) -> Tokens:
        runner = runner_for(model, num_loops)
        yield from decode(runner, [prompt], limits=Limits(max_tokens=count))
        kept[num_loops] = runner.cache.bytes_per_token if isinstance(runner, CachedRunner) else None

    all_ways: dict[str, Way] = {DECODE: plainly}
    all_ways |= {f"{DECODE}, {name}": way for name, way in (ways or {}).items()}
    rates: dict[tuple[int, str], list[float]] = {}
    for number in range(1 + rounds):
        for k in depths:
            for what, way in all_ways.items():
                started, came = clock(), []
                for _ in way(model, prompt, k, tokens):
                    came.append(clock())
                if what == DECODE:
                    rates.setdefault((k, PREFILL), []).append(len(prompt) / (came[0] - started))
                rates.setdefault((k, what), []).append((len(came) - 1) / (came[-1] - came[0]))
        progress(f"round {number} of {rounds}", (number + 1) / (1 + rounds))
    timings = []
    for (k, what), each in rates.items():
        low, middle, high = statistics.quantiles(each[1:], n=4, method="inclusive")
        timings.append(Timing(k, what, middle, low, high, kept[k]))
    return timings
