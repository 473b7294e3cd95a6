"""What an atlas measures besides scores and audits: the time rows will take; their motion, first exit, caches, cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import islice

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from loopscope.api.evaluation import evaluate
from loopscope.data.stream import evaluation_batches
from loopscope.data.task import TaskText
from loopscope.errors import LoopscopeError, UnsupportedError, words_of
from loopscope.inference.motion import measure_motion
from loopscope.model.looped_lm import build
from loopscope.objectives.placement import Objective
from loopscope.protocol import LoopedModel, run_loops
from loopscope.results.atlas import FirstExit, MendedShare, Moves, Probed, TokenCost
from loopscope.results.evaluation import CacheTable
from loopscope.rows.spec import RowSpec
from loopscope.targets import Opened, tokens_for
from loopscope.untouched import borrowed, network_of

EXIT_WINDOWS, CACHE_WINDOWS = 64, 32
"""Windows of text for the exit's gap (half of them fit the maps) and for cache policies: an atlas asks them of every
design, so it reads a quarter and a half of what `loopscope eval` reads."""
MOVING_ROWS, MOVING_TOKENS = 4, 64
"""Text whose tokens are followed."""
MEASURED_STEPS = 130
"""Scores, two audits, motion, first exit and cache policies take about as long as so many training steps of the same
row, the start of its process included: the mean over nine rows of three designs, on text and on pointer chasing."""

Say = Callable[[str], None]


def probe(opened: Opened, say: Say) -> Probed:
    """Every part that the model offers; one that it does not, or that fails, is a sentence."""
    problems: dict[str, str] = {}
    motion, exit_gap, cache, cost = None, None, None, None
    with _told("motion", problems, say):
        motion = _motion(opened, say)
    with _told("exit_gap", problems, say):
        exit_gap = _first_exit(opened, say)
    with _told("cache", problems, say):
        cache = _cache(opened, say)
    with _told("cost", problems, say):
        kept = cache.policies[0].bytes_per_token if cache is not None and cache.policies else None
        cost = _cost(opened, kept)
    return Probed(step=opened.step, motion=motion, exit_gap=exit_gap, cache=cache, cost=cost, problems=problems)


@contextmanager
def _told(part: str, problems: dict[str, str], say: Say) -> Iterator[None]:
    """One part; what goes wrong in it is its own. torch's errors too: a design may do what no other has done."""
    say(f"probing {part}")
    try:
        yield
    except (LoopscopeError, RuntimeError) as error:
        problems[part] = words_of(error)
        say(f"no {part}: {problems[part]}")


def _motion(opened: Opened, say: Say) -> Moves:
    """Of so many tokens of validation text."""
    tokens = tokens_for(opened, None, say)
    length = min(MOVING_TOKENS, opened.sequence_length)
    rows = islice(evaluation_batches(tokens, length, 1, None), MOVING_ROWS)
    found = measure_motion(opened.model, torch.cat([ids_BT for ids_BT, _ in rows if ids_BT.shape[1] == length]))
    return Moves(**{each.name: getattr(found, each.name) for each in fields(Moves)})


def _first_exit(opened: Opened, say: Say) -> FirstExit:
    loops = opened.model.num_loops
    if loops < 2:
        raise UnsupportedError("one loop has no exit before it")
    most = EXIT_WINDOWS * opened.sequence_length
    (gap,) = evaluate(opened, depths=[1, loops], exit_gap=True, max_tokens=most, say=say).exit_gaps
    told = {each.name: getattr(gap, each.name) for each in fields(FirstExit)}
    mends = [MendedShare(name=each.name, share=each.share, low=each.low, high=each.high) for each in gap.mends]
    return FirstExit(**{**told, "mends": mends, "notes": list(gap.notes)})


def _cache(opened: Opened, say: Say) -> CacheTable:
    if isinstance(tokens_for(opened, None, say), TaskText):
        raise UnsupportedError("cache policies are compared on text that is decoded, not on a task")
    loops = opened.model.num_loops
    most = CACHE_WINDOWS * opened.sequence_length
    table = evaluate(opened, depths=[loops], cache_policies=True, max_tokens=most, say=say).cache
    assert table is not None, "it was asked for"
    return table


def _cost(opened: Opened, cache_bytes: int | None) -> TokenCost:
    network = network_of(opened.model)
    parameters = None if network is None else sum(weight.numel() for weight in network.parameters())
    length = opened.sequence_length
    ids_BT = torch.arange(length).remainder(opened.vocab_size)[None]
    flops = counted_flops(opened.model, ids_BT) / length
    return TokenCost(parameters=parameters, flops_per_token=flops, cache_bytes_per_token=cache_bytes)


def counted_flops(model: LoopedModel, ids_BT: Tensor) -> int:
    """Of all loops and the last readout, counted while they run: whatever a design does is in it.

    Attention runs as plain products (MATH), which the counter sees; it then counts scores above the diagonal too.
    """
    counter = FlopCounterMode(display=False)
    with borrowed(network_of(model)), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model.readout(run_loops(model, ids_BT).states[-1], model.num_loops)
    return counter.get_total_flops()


# --- before a row is paid for ----------------------------------------------------------------------------------------


def row_seconds(spec: RowSpec) -> float | None:
    """Seconds of a row with one process to a core; None where a step of it fails, which the row will tell."""
    try:
        return step_seconds(spec) * (spec.config.training.steps + MEASURED_STEPS)
    except Exception:  # whatever a design does wrong is the row's to tell, not the estimate's
        return None


def step_seconds(spec: RowSpec) -> float:
    """Of one forward and backward pass, after one that warms up."""
    config = spec.config
    threads, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)
    shape = (config.training.batch, config.sequence_length)
    ids_BT = torch.randint(config.model.vocab_size, shape, generator=generator)
    torch.set_num_threads(config.training.threads or threads)
    try:
        with torch.random.fork_rng(devices=[]):
            model, objective = build(config.design("an estimate"), seed=spec.seed), Objective(config.objective)
            for _ in range(2):
                started = time.perf_counter()
                objective(model, ids_BT, ids_BT).loss.backward()
            return time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)


def total_seconds(rows: Sequence[RowSpec], slots: int) -> float:
    """Of all rows, so many side by side; designs are timed once for all their recipes, which cost the same."""
    known: dict[tuple[str, str], float | None] = {}
    for spec in rows:
        if (key := (spec.condition, spec.text)) not in known:
            known[key] = row_seconds(spec)
    found = [seconds for spec in rows if (seconds := known[spec.condition, spec.text]) is not None]
    mean = sum(found) / len(found) if found else 0.0
    return (sum(found) + mean * (len(rows) - len(found))) / min(slots, max(1, len(rows)))
