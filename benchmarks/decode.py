"""What a token costs: cached decoding against recomputation, against transformers, and against the memory it reads.

    python benchmarks/decode.py [--rounds 9]

a. Tokens per second of the trained `nano` (benchmarks/trained.py) at batch 1 and 8, beside running everything again.
b. The same HRM-Text weights, random ones in a folder that transformers wrote, through our adapter and through
   transformers' `generate`: greedy, batch 1 and 8, token for token. Target: 2× as many tokens per second. Beside it
   the matrix products of the layers alone, which say how much there is to gain.
c. `micro` at batch 1: one loop beside reading its weights once from memory, by the faster of two operations that do
   nothing else. Cold: each call has weights of its own, in turn, more of them than the last-level cache holds. Warm:
   the same weights every time, out of whatever cache they fit in. Target: 1.5× the time of reading, cold. Beside it
   the loop's matrix products alone.
d. `nano` at batch 1: a token's time by kind of operation, each called alone as often as a token calls it, the least of
   all rounds. What is left is Python, views and sums.
e. `nano` with rotary positions and a context of 2,048: by how much a token takes longer at position 2,000 than at 128,
   beside what the attention kernel alone does. Target: at most 1.25× of that.

Everything runs in one process, interleaved, on one thread unless --threads says otherwise; ratios are medians over
rounds with their quartiles. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import copy
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F

import loopscope as ls
from loopscope.adapters.hf import open_folder
from loopscope.adapters.hrm_text import HrmText
from loopscope.inference.cache import KVCache
from loopscope.inference.decoding import CachedRunner, Limits, RecomputingRunner, Runner, decode, last_logits
from loopscope.model.attention import rotate
from loopscope.model.looped_lm import LoopedLM
from loopscope.protocol import LoopedModel
from side_by_side import Measured, machine, measure
from trained import held_out, trained

PROMPT, NEW = 24, 32
"""Tokens of a prompt, and after it."""
LEAST_GAIN, MOST_OVER_READING, MOST_GROWTH = 2.0, 1.5, 1.25
COLD_BYTES = 160 << 20
"""Weights that are cycled through: five times the last-level cache of most machines."""
HRM_SIZES: dict[str, dict[str, Any]] = {
    "nano": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4},
    "micro": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8},
}
"""Widths and heads of our presets, feed-forwards in the proportion of the published model; 2 × (3 + 1) cycles."""
POSITIONS = (128, 512, 1024, 1536, 2000)


@dataclass
class Targets:
    """What was asked for, as it is met or missed."""

    missed: int = 0

    def check(self, met: bool, text: str) -> None:
        """Print one line."""
        self.missed += not met
        print(f"  {'met' if met else 'MISSED'}: {text}")


def spread(ratio: tuple[float, float, float]) -> str:
    """A median with its quartiles."""
    return f"{ratio[0]:.2f}× ({ratio[1]:.2f} to {ratio[2]:.2f})"


def texts(runner: Runner, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ids of all sequences, decoded greedily."""
    found = {token.number: each for each, token in decode(runner, prompts, limits=Limits(max_tokens=NEW))}
    return [found[number].ids for number in range(len(prompts))]


def same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """How many new tokens are the same up to the first that differs in each sequence."""
    same = 0
    for left, right in zip(ours, theirs, strict=True):
        pairs = list(zip(left[PROMPT:], right[PROMPT:], strict=True))
        same += next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return f"{same} of {NEW * len(ours)}"


def print_speed(name: str, batch: int, found: dict[str, Measured]) -> None:
    """Tokens per second of every variant."""
    for variant, measured in found.items():
        print(
            f"  {name:8} batch {batch}  {variant:14} {NEW * batch / statistics.median(measured.seconds):9.1f} tokens/s"
        )


# --- a. recomputation ------------------------------------------------------------------------------------------------


def against_recomputation(rounds: int) -> None:
    """Cached decoding of a trained model beside running the whole text again for every token."""
    print(f"\na. Cached decoding against recomputation: {NEW} tokens after {PROMPT}")
    opened = trained("nano", "controlled")
    model, text = opened.model, held_out(opened)
    assert isinstance(model, LoopedLM)
    for batch in (1, 8):
        prompts = [text[start : start + PROMPT].tolist() for start in range(0, batch * 1000, 1000)]
        variants = {
            "cached": lambda prompts=prompts: texts(CachedRunner(model, model.num_loops), prompts),
            "recomputation": lambda prompts=prompts: texts(RecomputingRunner(model, model.num_loops), prompts),
        }
        print(f"  the same tokens: {same_tokens(*(run() for run in variants.values()))}")
        found = measure(variants, rounds)
        print_speed("nano", batch, found)
        print(f"  cached is {spread(found['recomputation'].ratio_to(found['cached']))} as fast")


# --- b. transformers -------------------------------------------------------------------------------------------------


def against_transformers(rounds: int, targets: Targets) -> None:
    """The same weights through both."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print(f"\nb. HRM-Text against transformers {transformers.__version__}'s generate: {NEW} tokens after {PROMPT}")
    for name, sizes in HRM_SIZES.items():
        head = sizes["hidden_size"] // sizes["num_attention_heads"]
        config = transformers.HrmTextConfig(vocab_size=2048, head_dim=head, initializer_range=0.1, **sizes)
        torch.manual_seed(0)
        network = transformers.HrmTextForCausalLM(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            network.save_pretrained(folder)
            model = open_folder(Path(folder)).model
        for batch in (1, 8):
            prompts_BT = torch.randint(2048, (batch, PROMPT), generator=torch.Generator().manual_seed(batch))
            variants = {
                "loopscope": lambda model=model, ids=prompts_BT: texts(
                    CachedRunner(model, model.num_loops), ids.tolist()
                ),
                "transformers": lambda network=network, ids=prompts_BT: generated(network, ids),
            }
            same = same_tokens(*(run() for run in variants.values()))
            found = measure(variants | {"products alone": products(model, batch)}, rounds)
            print_speed(name, batch, found)
            ratio = found["transformers"].ratio_to(found["loopscope"])
            targets.check(same == f"{NEW * batch} of {NEW * batch}", f"{name}, batch {batch}: the same tokens: {same}")
            line = f"{name}, batch {batch}: {spread(ratio)} the tokens per second of generate; target {LEAST_GAIN}×"
            targets.check(ratio[0] >= LEAST_GAIN, line)
            bound = found["transformers"].ratio_to(found["products alone"])
            print(f"  no more than {spread(bound)} is possible with these matrix products, if all else took no time")


def products(model: LoopedModel, batch: int) -> Callable[[], None]:
    """The matrix products of the layers that as many decoded tokens need, and nothing else."""
    assert isinstance(model, HrmText)
    design = model.design
    stacks = [model.core.low] * design.low_cycles + [model.core.high]
    weights = [each.weight for stack in stacks for each in stack.modules() if isinstance(each, nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(batch, 1, weight.shape[1]) for weight in weights}

    @torch.inference_mode()
    def run() -> None:
        for _ in range(NEW * model.num_loops):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    return run


@torch.no_grad()
def generated(network: Any, ids_BT: Tensor) -> list[list[int]]:
    """transformers' own greedy decoding."""
    mask_BT = torch.ones_like(ids_BT)
    return network.generate(
        ids_BT, attention_mask=mask_BT, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    ).tolist()


# --- c. the memory a loop reads --------------------------------------------------------------------------------------


def against_memory(rounds: int, targets: Targets) -> None:
    """One loop of one token beside reading the weights of the loop once."""
    design = ls.preset("micro").design("a benchmark")
    model = ls.build(design, seed=0).eval()
    cache = KVCache(1, num_loops=design.num_loops)
    with torch.inference_mode():
        runner_state = model.embed(torch.arange(PROMPT)[None], cache.append(PROMPT))
        for k in (1, 2):
            runner_state = model.loop(runner_state, k, cache.at([0], [0]))
        view = cache.append(1)
        state = model.loop(model.embed(torch.tensor([[3]]), view), 1, view)
    matrices = [module.weight for module in model.recurrence.modules() if isinstance(module, nn.Linear)]
    size = sum(matrix.nbytes for matrix in matrices)
    inputs = {matrix.shape[1]: torch.randn(1, 1, matrix.shape[1]) for matrix in matrices}
    copies = [model.recurrence, *(copy.deepcopy(model.recurrence) for _ in range(COLD_BYTES // size))]
    print(f"\nc. One loop of micro at batch 1, position {PROMPT}: it reads {size / 1e6:.1f} MB of weights")
    for name, loops in {"cold": copies, "warm": copies[:1] * len(copies)}.items():
        weights = [[m.weight for m in loop.modules() if isinstance(m, nn.Linear)] for loop in loops]

        @torch.inference_mode()
        def run_loops(loops: Sequence[nn.Module] = loops) -> None:
            for loop in loops:
                loop(state, 2, view)

        @torch.inference_mode()
        def read(operation: Callable[[Tensor], Tensor], weights: Sequence[Sequence[Tensor]] = weights) -> None:
            for matrices in weights:
                for matrix in matrices:
                    operation(matrix.view(-1))

        @torch.inference_mode()
        def run_products(weights: Sequence[Sequence[Tensor]] = weights) -> None:
            for matrices in weights:
                for matrix in matrices:
                    F.linear(inputs[matrix.shape[1]], matrix)

        found = measure(
            {
                "loop": run_loops,
                "dot": partial(read, lambda weight: torch.dot(weight, weight)),
                "sum": partial(read, torch.sum),
                "products": run_products,
            },
            rounds,
        )
        reading = min((found["dot"], found["sum"]), key=lambda way: statistics.median(way.seconds))
        ratio = found["loop"].ratio_to(reading)
        for way in (found["loop"], found["products"], reading):
            seconds = statistics.median(way.seconds) / len(loops)
            print(f"  {name}  {way.name:8} {1e6 * seconds:8.0f} µs  {size / seconds / 1e9:5.1f} GB/s")
        if name == "cold":
            line = f"a loop takes {spread(ratio)} the time of reading its weights; target {MOST_OVER_READING}×"
            targets.check(ratio[0] <= MOST_OVER_READING, line)
        else:
            print(f"  warm: {spread(ratio)} the time of reading")
        print(f"  {name}: the matrix products alone take {spread(found['products'].ratio_to(reading))}")


# --- d. where the time of a small model goes -------------------------------------------------------------------------


def profile_nano(rounds: int) -> None:
    """A token's time by kind of operation."""
    design = ls.preset("nano").design("a benchmark")
    print(f"\nd. A token of nano at batch 1 and position {PROMPT}, by kind of operation")
    print("  | kind | calls | µs, learned positions | share | µs, rotary | share |\n  |---|---|---|---|---|---|")
    columns = [_parts(replace(design, positions=kind), rounds) for kind in ("learned", "rope")]
    for name, (calls, _) in columns[1].items():
        cells = [
            (times[1], times[1] / column["a token"][1]) for column in columns if (times := column.get(name, (0, 0.0)))
        ]
        print(
            f"  | {name} | {calls} | "
            + " | ".join(f"{1e6 * seconds:.0f} | {share:.0%}" for seconds, share in cells)
            + " |"
        )


def _parts(design: ls.ModelConfig, rounds: int) -> dict[str, tuple[int, float]]:
    """Calls and seconds of a token by kind of operation, the whole and the rest included."""
    model = ls.build(design, seed=0).eval()
    layer: Any = model.recurrence.core.layers[0]
    runs = design.num_layers * design.num_loops
    runner = CachedRunner(model, design.num_loops)
    runner.prefill([list(range(PROMPT))])
    x_BTD = torch.randn(1, 1, design.width)
    hidden = torch.randn(1, 1, design.mlp_hidden)
    q_BHTC = torch.randn(1, design.num_heads, 1, design.width // design.num_heads)
    keys, _ = runner.cache.slot("core", 1, 0)
    keys = keys[:, :, : PROMPT + 1]
    view = runner.cache.append(1)
    state = model.embed(torch.tensor([[3]]), view)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "matrices of the layers": (
            4 * runs,
            lambda: [
                layer.attention.qkv(x_BTD), layer.attention.out(x_BTD), layer.feed_forward.up(x_BTD),
                layer.feed_forward.out(hidden),
            ],
        ),
        "norms": (2 * runs, lambda: [layer.attention_norms.norm(x_BTD), layer.feed_forward_norms.norm(x_BTD)]),
        "attention kernel": (runs, lambda: F.scaled_dot_product_attention(q_BHTC, keys, keys)),
        "cache": (runs, lambda: (view.extend(("core", 1, 0), q_BHTC, q_BHTC), view.mask(1))),
        "embedding, readout and choice": (
            1,
            lambda: (
                model.embed(torch.tensor([[3]]), view),
                last_logits(model, state, design.num_loops, view).argmax(),
            ),
        ),
    }  # fmt: skip
    if design.positions == "rope":
        both_BHTC = torch.cat([q_BHTC, q_BHTC], 1)
        calls["rotary positions"] = (runs, lambda: rotate(both_BHTC, state.context.rotary))

    def token() -> None:
        runner.cache.truncate(PROMPT, runner.row[0])
        runner.step([0], [3])

    # Each kind is repeated, so that the clock is read seldom; layers call four matrices and two norms at a time.
    variants = {name: _repeated(call, 20) for name, (_, call) in calls.items()} | {"a token": _repeated(token, 5)}
    with torch.inference_mode():
        found = measure(variants, rounds)
    seconds = {
        name: min(found[name].seconds) / 20 * (1 if number == 1 else runs) for name, (number, _) in calls.items()
    }
    whole = min(found["a token"].seconds) / 5
    rest = {"Python, views, sums, activation": (1, whole - sum(seconds.values())), "a token": (1, whole)}
    return {name: (number, seconds[name]) for name, (number, _) in calls.items()} | rest


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


# --- e. long contexts ------------------------------------------------------------------------------------------------


def growth_with_position(rounds: int, targets: Targets) -> None:
    """Time of a token at several positions, beside that of the attention kernel over as many keys."""
    design = replace(ls.preset("nano").design("a benchmark"), positions="rope", max_length=2048)
    model = ls.build(design, seed=0).eval()
    runner = CachedRunner(model, design.num_loops)
    runner.prefill([torch.randint(design.vocab_size, (2047,)).tolist()])
    q_BHTC = torch.randn(1, design.num_heads, 1, design.width // design.num_heads)
    slots = [
        runner.cache.slot("core", k, layer)
        for k in range(1, design.num_loops + 1)
        for layer in range(design.num_layers)
    ]

    @torch.inference_mode()
    def attend(position: int) -> None:
        for keys, values in slots * 5:
            F.scaled_dot_product_attention(q_BHTC, keys[:, :, : position + 1], values[:, :, : position + 1])

    def token(position: int) -> None:
        for _ in range(5):
            runner.cache.truncate(position, runner.row[0])
            runner.step([0], [3])
            runner.cache.lengths[runner.row[0]] = 2047  # what lies beyond is still there

    variants = {f"token {p}": lambda p=p: token(p) for p in POSITIONS} | {
        f"attention {p}": lambda p=p: attend(p) for p in POSITIONS
    }
    found = measure(variants, rounds)
    print(f"\ne. A token of nano with rotary positions and a context of {design.max_length:,}")
    print("  | position | a token, µs | attention alone, µs |\n  |---|---|---|")
    for p in POSITIONS:
        both = [statistics.median(found[f"{name} {p}"].seconds) / 5 for name in ("token", "attention")]
        print(f"  | {p:,} | {1e6 * both[0]:.0f} | {1e6 * both[1]:.0f} |")
    slopes = {name: _slopes([found[f"{name} {p}"] for p in POSITIONS]) for name in ("token", "attention")}
    low, middle, high = statistics.quantiles(
        [whole / alone for whole, alone in zip(slopes["token"], slopes["attention"], strict=True)],
        n=4,
        method="inclusive",
    )
    line = f"a token grows by {spread((middle, low, high))} what attention grows by; target {MOST_GROWTH}×"
    targets.check(middle <= MOST_GROWTH, line)


def _slopes(by_position: Sequence[Measured]) -> list[float]:
    """Seconds a position, of each round: the line of least squares through its times."""
    rounds = zip(*(each.seconds for each in by_position), strict=True)
    return [statistics.linear_regression(POSITIONS, times).slope for times in rounds]


def main(rounds: int = 9, threads: int = 1, only: str = "abcde") -> int:
    """Print all tables; `only` names the parts to run."""
    torch.set_num_threads(threads)
    logging.disable(logging.WARNING)
    print(machine())
    targets = Targets()
    parts: dict[str, Callable[[], None]] = {
        "a": lambda: against_recomputation(rounds),
        "b": lambda: against_transformers(rounds, targets),
        "c": lambda: against_memory(rounds, targets),
        "d": lambda: profile_nano(5 * rounds),
        "e": lambda: growth_with_position(rounds, targets),
    }
    for name, run in parts.items():
        if name in only:
            run()
    return int(targets.missed > 0)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
