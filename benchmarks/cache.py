"""What a cache costs: extending and truncating it take O(new tokens), however many it holds already.

    python benchmarks/cache.py [--rounds 15]

Side by side with the cache that concatenates, as most do: it copies everything it holds for every new token. Both hold
one row of `micro` (4 loops, 4 layers, 8 heads of 32) and get one token at a time in every slot, as decoding does.

- Bytes written per appended token, counted over every operation that torch runs while a cache is filled: with 256 and
  with 4,096 tokens (the concatenating one with 1,024: it writes n/2 times the token, which takes long). Doubling clears
  new room and copies each token less than twice in all, so that ours stays below four times the token.
- Time per appended token in blocks of 64, at lengths of 256 and of 4,096, interleaved, and the ratio of the two.
- Bytes written by truncating to half.

Exit code 1 when ours writes more than twice as many bytes per token at 4,096 as at 256, takes more than 1.5 times as
long, or writes anything to truncate.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import tyro
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loopscope.inference.cache import KVCache
from side_by_side import machine, measure

LOOPS, LAYERS, HEADS, HEAD_WIDTH = 4, 4, 8, 32
SHORT, LONG = 256, 4096
BLOCK = 64
"""Tokens appended in each timed round."""
MOST_TIME, MOST_BYTES = 1.5, 2.0
SLOTS = [("core", k, layer) for k in range(1, LOOPS + 1) for layer in range(LAYERS)]
TOKEN_BYTES = len(SLOTS) * 2 * HEADS * HEAD_WIDTH * 4


class Held(Protocol):
    """What both caches can do."""

    def token(self) -> None:
        """Append one token in every slot, and look at all there is."""

    def truncate(self, length: int) -> None:
        """Forget what lies beyond."""


class Ours:
    """Preallocated slots that double."""

    def __init__(self) -> None:
        self.cache = KVCache(1, num_loops=LOOPS)
        self.new = torch.randn(1, HEADS, 1, HEAD_WIDTH)

    def token(self) -> None:
        view = self.cache.append(1)
        for slot in SLOTS:
            view.extend(slot, self.new, self.new)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)


class Concatenating:
    """A tensor per slot, made anew for every token."""

    def __init__(self) -> None:
        self.slots: dict[tuple[str, int, int], tuple[Tensor, Tensor]] = {}
        self.new = torch.randn(1, HEADS, 1, HEAD_WIDTH)

    def token(self) -> None:
        for slot in SLOTS:
            held = self.slots.get(slot)
            both = (self.new, self.new) if held is None else tuple(torch.cat([old, self.new], 2) for old in held)
            self.slots[slot] = (both[0], both[1])

    def truncate(self, length: int) -> None:
        self.slots = {slot: (k[:, :, :length], v[:, :, :length]) for slot, (k, v) in self.slots.items()}


class Writes(TorchDispatchMode):
    """Counts the bytes that operations write: results in memory of their own, and what is copied in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            is_view = result.untyped_storage().data_ptr() in given
            if not is_view or func.overloadpacket.__name__.endswith("_"):
                self.bytes += result.numel() * result.element_size()
        return result


@contextmanager
def counted(found: list[int]) -> Iterator[None]:
    """Append the bytes that were written inside."""
    with Writes() as writes:
        yield
    found.append(writes.bytes)


def filled(make: Callable[[], Held], length: int) -> Held:
    """A cache of so many tokens."""
    cache = make()
    for _ in range(length):
        cache.token()
    return cache


@dataclass(frozen=True)
class Options:
    """Flags of this benchmark."""

    rounds: int = 15
    """Timed rounds; all variants take turns in each."""


def main(options: Options) -> int:
    """Count, time, print, and say whether ours grew."""
    print(machine())
    kinds: dict[str, Callable[[], Held]] = {"ours": Ours, "concatenating": Concatenating}
    grew: dict[str, float] = {}
    print(f"bytes written per appended token, over those of the token itself ({TOKEN_BYTES:,})")
    for name, make in kinds.items():
        written: list[int] = []
        lengths = (SHORT, LONG) if name == "ours" else (SHORT, SHORT * 4)
        for length in lengths:
            with counted(written):
                filled(make, length)
        each = [total / length / TOKEN_BYTES for total, length in zip(written, lengths, strict=True)]
        print(f"  {name:14} {each[0]:8.2f} at {lengths[0]:,}   {each[1]:8.2f} at {lengths[1]:,} tokens")
        grew[name] = each[1] / each[0]

    caches = {(name, length): filled(make, length) for name, make in kinds.items() for length in (SHORT, LONG)}

    def appending(name: str, length: int) -> Callable[[], None]:
        def run() -> None:
            cache = caches[name, length]
            for _ in range(BLOCK):
                cache.token()
            cache.truncate(length)

        return run

    found = measure({f"{name} {length}": appending(name, length) for name, length in caches}, options.rounds)
    print(f"microseconds per appended token, blocks of {BLOCK}, median of {options.rounds} interleaved rounds")
    slowed = {}
    for name in kinds:
        short, long = found[f"{name} {SHORT}"], found[f"{name} {LONG}"]
        ratio, low, high = long.ratio_to(short)
        times = [1e6 * sorted(each.seconds)[len(each.seconds) // 2] / BLOCK for each in (short, long)]
        slowed[name] = ratio
        print(
            f"  {name:14} {times[0]:8.0f} at {SHORT:,}   {times[1]:8.0f} at {LONG:,}"
            f"   ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
        )
    truncated: list[int] = []
    ours = caches["ours", LONG]
    with counted(truncated):
        ours.truncate(LONG // 2)
    print(f"bytes written by truncating {LONG:,} tokens to half: {truncated[0]}")
    is_flat = grew["ours"] <= MOST_BYTES and slowed["ours"] <= MOST_TIME and truncated[0] == 0
    print("extending and truncating cost O(new tokens)" if is_flat else "the cost grows with what is held")
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
