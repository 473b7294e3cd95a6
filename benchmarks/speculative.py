"""Self-speculation against plain greedy decoding, side by side: acceptance, speed, bound, and every token that differs.

    python benchmarks/speculative.py --sizes nano micro --tokens 20000

Models come from benchmarks/trained.py, prompts from their validation text. Small models soon repeat themselves, and a
loop is easy to draft: tokens are chosen greedily under a repetition penalty of 1.3, and continuations that repeat an
8-gram for the third time end there. Speed is tokens per second after the prompt, of one sequence, prompts taking turns
between plain decoding and each plan, so that all see the same machine. The bound is what the measured
acceptance and the measured times of a loop over 1 … m tokens allow (`speculation.Times.predicted`).

Beside it stands the smallest fixed depth whose cross-entropy is that of full depth to 0.005 nats: where it is one loop,
nobody needs speculation, nor the other loops.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

import loopscope as ls
from loopscope.inference.decoding import Continuation, Limits, Sampling, Token, decode, runner_for
from loopscope.inference.speculation import MOST_DRAFTED, PLAIN, DraftPlan, Speculator, Times
from loopscope.protocol import Cached
from loopscope.targets import Opened
from side_by_side import machine
from trained import PENALTY, held_out, trained

PROMPT = 24
"""Tokens of a prompt; the rest of the context is generated."""
TARGET_BLOCK, TARGET_BOUND = 1.5, 0.85
SAMPLING = Sampling(repetition_penalty=1.3)
SAME_CE = 0.005
"""Nats by which a shallower exit may be worse and still count as the same."""


@dataclass
class Measured:
    """What one way of decoding did over all prompts."""

    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    """A token, by prompt."""
    flips: list[str] = field(default_factory=list)
    compared: int = 0
    accepted: int = 0
    drafted: int = 0
    bounds: list[float] = field(default_factory=list)


def until_it_repeats(stream: Iterator[tuple[Continuation, Token]]) -> Iterator[int]:
    """Ids of a continuation, up to an 8-gram that has been there twice."""
    seen: Counter[tuple[int, ...]] = Counter()
    for continuation, token in stream:
        yield token.id
        ids = tuple(each.id for each in continuation.tokens[-8:])
        seen[ids] += len(ids) == 8
        if seen[ids] >= 3:
            return


def timed(stream: Iterator[tuple[Continuation, Token]], into: Measured) -> list[int]:
    """Run a continuation, and note how long it took."""
    tokens = until_it_repeats(stream)
    ids = [next(tokens)]  # the prompt has run
    started = time.perf_counter()
    ids += tokens
    into.seconds.append((time.perf_counter() - started) / max(len(ids) - 1, 1))
    into.tokens += len(ids)
    return ids


def compare(plain: Sequence[int], other: Sequence[int], prompt: Sequence[int], opened: Opened, into: Measured) -> None:
    """Count tokens up to the first that differs; that one is told with the gap between the two best logits."""
    same = next((n for n, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
    into.compared += min(len(plain), len(other)) if same is None else same + 1
    if same is not None:
        ids_1T = torch.tensor([[*prompt, *plain[:same]]])
        with torch.no_grad():
            logits_V = opened.model.readout(ls.run_loops(opened.model, ids_1T).states[-1], opened.model.num_loops)[
                0, -1
            ]
        best = logits_V.topk(2).values
        into.flips.append(
            f"{plain[same]} → {other[same]} after {len(prompt) + same} tokens, gap {best[0] - best[1]:.2g}"
        )


def acceptance(opened: Opened, prompts: Sequence[Sequence[int]], limits: Limits) -> dict[int, float]:
    """How often each exit would have chosen full depth's token, over texts that full depth writes."""
    num_loops, hits, count = opened.model.num_loops, Counter[int](), 0
    runner = runner_for(opened.model, num_loops)
    for prompt in prompts:
        ids = list(until_it_repeats(decode(runner, [prompt], limits=limits, sampling=SAMPLING)))
        with torch.no_grad():
            states = ls.run_loops(opened.model, torch.tensor([[*prompt, *ids[:-1]]])).states
        for k in range(1, num_loops):
            logits_TV = opened.model.readout(states[k], k)[0, len(prompt) - 1 :]
            seen = [[*prompt, *ids[:n]] for n in range(len(ids))]
            chosen = [int(SAMPLING.penalised(*pair).argmax()) for pair in zip(logits_TV, seen, strict=True)]
            hits[k] += sum(one == other for one, other in zip(chosen, ids, strict=True))
        count += len(ids)
        runner = runner_for(opened.model, num_loops)
    return {k: hits[k] / count for k in range(1, num_loops)}


def run(size: str, kind: str, tokens: int) -> list[str]:
    """Print one model's table; the targets it missed."""
    opened = trained(size, kind)
    model, num_loops = Cached.needed(opened.model, "speculation"), opened.model.num_loops
    context = opened.max_length or 256
    limits = Limits(max_tokens=context - PROMPT, context=context)
    text = held_out(opened)
    starts = range(0, len(text) - PROMPT, max(PROMPT, (len(text) - PROMPT) * (context - PROMPT) // (2 * tokens)))
    prompts = [text[start : start + PROMPT].tolist() for start in starts]
    rates = acceptance(opened, prompts[:: max(1, len(prompts) // 20)], limits)
    speculator = Speculator(model, num_loops, limits=limits, sampling=SAMPLING)
    list(speculator.decode(prompts[0]))
    times = speculator._times or Times()
    blocks = [DraftPlan("block", d, m) for d in rates for m in range(2, MOST_DRAFTED + 1)]
    block = min(blocks, key=lambda plan: times.predicted(plan, num_loops, rates[plan.loops]))
    waves = [DraftPlan("wave", d) for d in rates]
    wave = min(waves, key=lambda plan: times.predicted(plan, num_loops, rates[plan.loops]))
    ways: dict[str, DraftPlan | None] = {"block": block, "wave": wave, "auto": None}
    plain, found = Measured(), {name: Measured() for name in ways}
    speculators = {
        name: Speculator(model, num_loops, limits=limits, sampling=SAMPLING, plan=plan) for name, plan in ways.items()
    }
    for prompt in prompts:
        ids = timed(decode(runner_for(opened.model, num_loops), [prompt], limits=limits, sampling=SAMPLING), plain)
        for name in ways:
            other = timed(speculators[name].decode(prompt), found[name])
            compare(ids, other, prompt, opened, found[name])
        if plain.tokens >= tokens:
            break
    for name, each in speculators.items():
        found[name].drafted, found[name].accepted = each.tally.drafted, each.tally.accepted
    return report(size, kind, opened, times, ways, plain, found)


def report(
    size: str,
    kind: str,
    opened: Opened,
    times: Times,
    ways: dict[str, DraftPlan | None],
    plain: Measured,
    found: dict[str, Measured],
) -> list[str]:
    """The table, and the targets that were missed."""
    num_loops, missed = opened.model.num_loops, []
    depths = ls.evaluate(opened, max_tokens=16_384).scores.depths
    ces = [depth.ce or float("inf") for depth in depths]
    enough = next(k for k, ce in enumerate(ces, start=1) if ce <= ces[-1] + SAME_CE)
    print(f"\n{size}, {kind}: K = {num_loops}, CE {' '.join(f'{ce:.3f}' for ce in ces)}")
    print(f"  plain: {1 / statistics.median(plain.seconds):.0f} tokens/s, {plain.tokens:,} tokens")
    at_one = times.predicted(PLAIN, num_loops, 0.0) / (enough * times.loop[1] + times.readout[1])
    print(f"  the same CE with {enough} of {num_loops} loops: {at_one:.2f}× without any speculation")
    many = ", ".join(f"{n}: {times.loop[n] / times.loop[1]:.2f}" for n in (2, 4, 8))
    print(f"  a loop over n tokens, in times of one: {many}; of lanes {max(times.lanes)}: "
          f"{times.lanes[max(times.lanes)] / times.loop[1]:.2f}")  # fmt: skip
    speeds = {}
    for name, plan in ways.items():
        this = found[name]
        ratios = [ours / theirs for ours, theirs in zip(plain.seconds, this.seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        speeds[name] = middle
        rate = this.accepted / max(this.drafted, 1)
        line = f"  {name:5} {plan or 'auto'!s:10} acceptance {rate:.3f}  {middle:.2f}× [{low:.2f}, {high:.2f}]"
        if plan is not None:
            bound = times.predicted(PLAIN, num_loops, 0.0) / times.predicted(plan, num_loops, rate)
            line += f"  bound {bound:.2f}×, reached {middle / bound:.2f} of it"
            if middle < TARGET_BOUND * bound:
                missed.append(f"{size} {kind} {name}: {middle / bound:.2f} of its bound (target {TARGET_BOUND})")
        print(line)
        print(f"        {this.compared:,} tokens compared, {len(this.flips)} differ", *this.flips, sep="; ")
    if speeds["block"] < TARGET_BLOCK:
        missed.append(f"{size} {kind} block: {speeds['block']:.2f}× (target {TARGET_BLOCK})")
    if speeds["wave"] < speeds["block"]:
        missed.append(f"{size} {kind} wave: {speeds['wave']:.2f}× is not above the block's {speeds['block']:.2f}×")
    return missed


def main() -> None:
    """Every model that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["nano", "micro"])
    parser.add_argument("--kinds", nargs="+", default=list(PENALTY))
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of plain decoding to compare with")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    missed = [line for size in options.sizes for kind in options.kinds for line in run(size, kind, options.tokens)]
    print()
    for line in missed:
        print(f"MISSED {line}")
    if not missed:
        print("every target is met")


if __name__ == "__main__":
    main()
