"""Keys and values of earlier tokens: one slot per part of the model, loop and layer, or what a policy keeps of them.

A token's keys differ from loop to loop, so an exact cache has K times the slots of an ordinary one. Slots are allocated
ahead and grow by doubling: appending costs O(new tokens). A row of the cache is one sequence with a length of its own;
what lies beyond that length is never read, so truncating is setting a number.

One call of the model sees the cache through a view, which says whose tokens it runs and where they stand. Tokens of
the same row may stand in several rows of one call, at different positions and loops, since all loops share the weights.

Shape legend: B rows of a call, T new tokens, S tokens attended to, H key/value heads, C head width, R its rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from loopscope.errors import ConfigError
from loopscope.protocol import Slot

FIRST_CAPACITY = 64
"""Tokens a slot has room for when it is first written."""
POLICIES = ("exact", "last-loop", "first-loop", "first-then-last", "ring-N", "last-exited")


@dataclass(frozen=True)
class CachePolicy:
    """Which loops' keys and values are kept of every token, and what loop k then looks at in earlier ones.

        exact             loop k sees the keys of loop k
        last-loop         loop k sees the keys that each earlier token ended with; a single slot
        first-loop        loop k sees the keys of loop 1, its own token's too; a single slot
        first-then-last   loop 1 sees the keys of loop 1, deeper ones those that each token ended with; two slots
        ring-N            loop k sees the keys of the last loop that is congruent to k modulo N; N slots (Huginn)
        last-exited       as exact; below the loop at which a token left, its last keys stand for those it never had

    A token always sees its own keys of the loop it is in, except under first-loop, whose later loops make none.
    """

    name: str = "exact"

    def __post_init__(self) -> None:
        if self.name not in POLICIES and re.fullmatch(r"ring-[1-9]\d{0,3}", self.name) is None:
            raise ConfigError.of("cache_policy", self.name, f"expected one of {', '.join(POLICIES)}")
        if self.name == "ring-N":
            raise ConfigError.of("cache_policy", self.name, "N is a number of slots, as in ring-4")

    @property
    def slots(self) -> int | None:
        """Loops that are kept of a token; None: all."""
        if self.name in ("exact", "last-exited"):
            return None
        if self.name == "first-then-last":
            return 2
        return int(self.name.removeprefix("ring-")) if self.name.startswith("ring-") else 1

    def index(self, k: int) -> int:
        """The slot that loop k of the core looks at."""
        if self.name == "first-then-last":
            return min(k - 1, 1)
        return k - 1 if self.slots is None else (k - 1) % self.slots

    def writes(self, part: str, k: int) -> bool:
        """Whether loop k leaves its keys and values."""
        return self.name != "first-loop" or part != "core" or k == 1


EXACT = CachePolicy()


class KVCache:
    """Keys and values of some sequences, each a row with a length of its own."""

    def __init__(
        self, rows: int = 1, policy: CachePolicy = EXACT, *, num_loops: int = 1, capacity: int = FIRST_CAPACITY
    ) -> None:
        """Room for `num_loops` loops and `capacity` tokens is made at once; more of either is made when needed."""
        self.policy = policy
        self.lengths = [0] * rows
        """Tokens of each row."""
        self._loops, self._capacity = num_loops, capacity
        self._free: list[int] = []
        self._held: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        """Part and layer → keys and values (slots, R, H, capacity, C), so that lanes at several loops are one view."""
        self._coda_slots: dict[int, int] = {}
        """Loop that is read out → slot of the coda."""

    # --- rows and tokens ---------------------------------------------------------------------------------------------

    def append(self, tokens: int, rows: Sequence[int] | None = None) -> CacheView:
        """A view of the next tokens of these rows (all by default), which are longer from now on."""
        rows = range(len(self.lengths)) if rows is None else rows
        starts = [self.lengths[row] for row in rows]
        for row in rows:
            self.lengths[row] += tokens
        return CacheView(self, rows, starts)

    def at(self, rows: Sequence[int], starts: Sequence[int]) -> CacheView:
        """A view of tokens that are there already, whose further loops are run; a row may come several times."""
        return CacheView(self, rows, starts)

    def truncate(self, length: int, row: int = 0) -> None:
        """Forget a row's tokens from this position on."""
        assert 0 <= length <= self.lengths[row], "a cache is never truncated to more than it holds"
        self.lengths[row] = length

    def take_rows(self, count: int) -> list[int]:
        """Empty rows for new sequences, those that were given back first."""
        rows = [self._free.pop() for _ in range(min(count, len(self._free)))]
        new = range(len(self.lengths), len(self.lengths) + count - len(rows))
        self.lengths += [0] * len(new)
        return [*rows, *new]

    def give_back(self, rows: Sequence[int]) -> None:
        """Rows whose sequences have ended; nothing is moved."""
        for row in rows:
            self.lengths[row] = 0
        self._free += rows

    def leave(self, row: int, position: int, k: int, num_loops: int) -> None:
        """Let a token that has left at loop k show its keys and values of that loop at all deeper ones."""
        index = self.policy.index
        deeper = sorted({index(other) for other in range(k + 1, num_loops + 1)} - {index(k)})
        for (part, layer), held in list(self._held.items()):
            if part == "core" and deeper:
                for tensor in self._room((part, layer), deeper[-1], held[0][0], held[1][0], position + 1):
                    tensor[deeper, row, :, position] = tensor[index(k), row, :, position]

    def thin(self, policy: CachePolicy, num_loops: int) -> None:
        """Keep of an exact cache, `num_loops` deep, what another policy would have kept, and go on under that one."""
        assert self.policy == EXACT, "what was not kept cannot be brought back"
        self.policy = policy
        if policy.slots is None:
            return
        # The last loop that writes a slot is the one whose keys stay in it.
        last = {policy.index(k): k for k in range(1, num_loops + 1) if policy.writes("core", k)}
        for (part, layer), (keys, values) in self._held.items():
            if part == "core":
                kept = [last[index] - 1 for index in sorted(last)]
                self._held[part, layer] = keys[kept], values[kept]

    # --- memory ------------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> int:
        """Of one token of one row, over all slots."""
        held = [tensor for tensors in self._held.values() for tensor in tensors]
        return sum(len(tensor) * tensor.shape[2] * tensor.shape[4] * tensor.element_size() for tensor in held)

    def slot(self, part: str, k: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (R, H, capacity, C) that loop k of a part and layer looks at."""
        keys, values = self._held[part, layer]
        return keys[self.index(part, k)], values[self.index(part, k)]

    def index(self, part: str, k: int) -> int:
        """The slot that loop k of a part looks at.

        Only the core is looped. A coda has a slot for each loop that is read out, in the order they come, and a single
        one where tokens leave at loops of their own.
        """
        if part == "core":
            return self.policy.index(k)
        if part == "prelude" or self.policy.name == "last-exited":
            return 0
        return self._coda_slots.setdefault(k, len(self._coda_slots))

    def _room(
        self, home: tuple[str, int], index: int, k_BHTC: Tensor, v_BHTC: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """The tensors of a part and layer, with room for a slot of this index, all rows and `length` tokens."""
        held = self._held.get(home)
        asked = (index + 1, len(self.lengths), length)
        if held is not None and all(have >= want for have, want in zip(_sizes(held[0]), asked, strict=True)):
            return held
        if held is None:
            loops = min(self.policy.slots or self._loops, self._loops) if home[0] == "core" else 1
            sizes = tuple(map(max, asked, (loops, 1, self._capacity)))
        else:  # by doubling, so that each entry is copied O(1) times
            pairs = zip(_sizes(held[0]), asked, strict=True)
            sizes = tuple(have if have >= want else max(want, 2 * have) for have, want in pairs)
        grown = []
        for number, new in enumerate((k_BHTC, v_BHTC)):
            tensor = new.new_zeros(sizes[0], sizes[1], new.shape[1], sizes[2], new.shape[3])
            if held is not None:
                old = held[number]
                tensor[: old.shape[0], : old.shape[1], :, : old.shape[3]] = old
            grown.append(tensor)
        self._held[home] = (grown[0], grown[1])
        return self._held[home]


def _sizes(held: Tensor) -> tuple[int, int, int]:
    """Slots, rows and tokens that there is room for."""
    return held.shape[0], held.shape[1], held.shape[3]


class CacheView:
    """A cache as one call of the model sees it; implements `protocol.Cache`."""

    def __init__(self, cache: KVCache, rows: Sequence[int], starts: Sequence[int]) -> None:
        self.cache, self.rows, self.starts = cache, rows, starts
        self._start = starts[0] if len(set(starts)) == 1 else None
        """Where all rows begin, if they begin at the same position."""
        self._longest = max(starts)
        self._masks: dict[int, Tensor] = {}

    @cached_property
    def _chosen(self) -> slice | Tensor:
        """The rows of the cache: a slice where they lie side by side, since indexing by a tensor copies."""
        first = self.rows[0]
        if all(row == first + offset for offset, row in enumerate(self.rows)):
            return slice(first, first + len(self.rows))
        return self._rows_B

    @cached_property
    def _rows_B(self) -> Tensor:
        return torch.tensor(list(self.rows))

    def positions(self, tokens: int) -> Tensor:
        """Position_BT of each new token, or position_1T where all rows have the same."""
        if self._start is not None:
            return torch.arange(self._start, self._start + tokens)[None]
        return torch.tensor(self.starts)[:, None] + torch.arange(tokens)

    def mask(self, tokens: int) -> Tensor | None:
        """Which keys each new token may see (B, 1, T, S); None where the last token sees all and the rest is causal."""
        if self._start is not None:
            return None
        if tokens not in self._masks:
            positions_B1T1 = self.positions(tokens)[:, None, :, None]
            self._masks[tokens] = torch.arange(self._longest + tokens) <= positions_B1T1
        return self._masks[tokens]

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of a slot and return all that its rows have, the longest row's length."""
        part, loop, layer = slot
        if isinstance(loop, tuple):
            return self._extend_each(part, loop, layer, k_BHTC, v_BHTC)
        policy, tokens = self.cache.policy, k_BHTC.shape[2]
        index, end = self.cache.index(part, loop), self._longest + tokens
        keys, values = self.cache._room((part, layer), index, k_BHTC, v_BHTC, end)
        keys, values, chosen, writes = keys[index], values[index], self._chosen, policy.writes(part, loop)
        if self._start is not None and isinstance(chosen, slice):
            keys, values = keys[chosen, :, :end], values[chosen, :, :end]
            if writes:
                keys[:, :, self._start :] = k_BHTC
                values[:, :, self._start :] = v_BHTC
            return keys, values
        if writes:
            rows_B1, positions_BT = self._rows_B[:, None], self.positions(tokens)
            keys[rows_B1, :, positions_BT] = k_BHTC.transpose(1, 2)
            values[rows_B1, :, positions_BT] = v_BHTC.transpose(1, 2)
        return keys[chosen][:, :, :end], values[chosen][:, :, :end]

    def _extend_each(
        self, part: str, loops: tuple[int, ...], layer: int, k_BHTC: Tensor, v_BHTC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Every row of the call at a loop of its own.

        Tokens of one sequence at evenly spaced loops, as in a wavefront, are a strided view; anything else is gathered.
        """
        policy, tokens = self.cache.policy, k_BHTC.shape[2]
        indices, end = [self.cache.index(part, k) for k in loops], self._longest + tokens
        keys, values = self.cache._room((part, layer), max(indices), k_BHTC, v_BHTC, end)
        for number, (k, index, row, start) in enumerate(zip(loops, indices, self.rows, self.starts, strict=True)):
            if policy.writes(part, k):
                keys[index, row, :, start : start + tokens] = k_BHTC[number]
                values[index, row, :, start : start + tokens] = v_BHTC[number]
        if (spaced := _evenly(indices)) is not None and len(set(self.rows)) == 1:
            row = self.rows[0]
            return keys[spaced, row, :, :end], values[spaced, row, :, :end]
        slots_B = torch.tensor(indices)
        return keys[slots_B, self._rows_B, :, :end], values[slots_B, self._rows_B, :, :end]


def _evenly(indices: Sequence[int]) -> slice | None:
    """Rising numbers at equal distances as a slice."""
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step < 1 or any(index != indices[0] + number * step for number, index in enumerate(indices)):
        return None
    return slice(indices[0], indices[-1] + 1, step)
