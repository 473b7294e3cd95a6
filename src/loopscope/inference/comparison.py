"""Two ways of running one text, compared token by token, and the layer where they part.

What a token gives is kept under its position: the state after every loop, the logits of every exit, and the keys and
values of every slot, in the order in which they were written. Two ways agree when no output of any token differs by
more than rounding. Where one does, the first slot whose keys differ says which layer is to blame: the one before it.

Shape legend: B rows of a call, T tokens, H heads, C head width, N numbers of one output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from loopscope.protocol import Slot

COARSEST_EPS = float(torch.finfo(torch.float32).eps)
"""Many models keep norms or angles in float32 whatever their weights are, so no finer rounding is relied on."""
ROUNDINGS = 8.0
"""Roundings of one layer that may add up in the same direction."""
MOST_GROWTH = 64.0
"""What a rounding may grow to by a model's own doing; beyond, whatever makes it grow must not hide a fault."""


class Stage(NamedTuple):
    """One output of a token."""

    loop: int | None
    """0 is the state before the first loop; None where the loops are inside and cannot be seen."""
    kind: str
    """ "state", a carried tensor's name, or "logits"."""

    def __str__(self) -> str:
        after = "" if self.loop is None else " before loop 1" if self.loop == 0 else f" after loop {self.loop}"
        return f"{self.kind}{after}"


class Write(NamedTuple):
    """Keys and values that one layer left of one token."""

    slot: Slot
    """Where they were put."""
    part: str
    """Of the model: what the slot says, or the name of a module."""
    loop: int
    """That was running, whatever the slot says; 0 is the embedding."""
    keys_N: Tensor
    values_N: Tensor

    def __str__(self) -> str:
        layer = self.slot[2]
        if self.part == "prelude":
            return f"prelude layer {layer}"
        if self.part in ("core", "coda"):
            return f"{self.part} layer {layer} of loop {self.loop}"
        return f"{self.part} in loop {self.loop} (slot {layer})"


@dataclass
class Computed:
    """What the tokens of one text gave in one way of running it."""

    outputs: dict[Stage, dict[int, Tensor]] = field(default_factory=dict)
    """Stage → position → numbers."""
    writes: dict[int, list[Write]] = field(default_factory=dict)
    """Position → what was written, in this order."""

    def keep(self, stage: Stage, positions: Iterable[int], values_TN: Tensor) -> None:
        """One output of successive tokens."""
        self.outputs.setdefault(stage, {}).update(zip(positions, values_TN.detach(), strict=True))

    def write(self, slot: Slot, part: str, loop: int, positions: Iterable[int], k_HTC: Tensor, v_HTC: Tensor) -> None:
        """Keys and values of successive tokens in one slot."""
        for place, position in enumerate(positions):
            keys_N, values_N = (each[:, place].flatten().detach().clone() for each in (k_HTC, v_HTC))
            self.writes.setdefault(position, []).append(Write(slot, part, loop, keys_N, values_N))


@dataclass(frozen=True)
class Tolerance:
    """How far two ways may differ, relative to the size of what is compared, and why."""

    value: float
    why: str

    @classmethod
    def of(cls, dtype: torch.dtype, layers: int, grown: float) -> Tolerance:
        """8·√layers·r: roundings of successive layers add up, and each arrives at the output as r.

        r is eps, or what one rounding that was put in on purpose has grown to, up to 64·eps. No finer than float32's
        eps, since parts of a model may stay in float32.
        """
        eps = coarse_eps(dtype)
        value = ROUNDINGS * max(layers, 1) ** 0.5 * min(max(eps, grown), MOST_GROWTH * eps)
        why = (
            f"8·√layers·r over {layers} layers run, where r is one rounding as it arrives at the output: eps = "
            f"{eps:.1g} (of float32 or coarser: parts may stay in it), or {grown:.1g}, which one grew to here"
        )
        return cls(value, why)


def coarse_eps(dtype: torch.dtype) -> float:
    """Of the dtype, or of float32 where that is coarser."""
    return max(float(torch.finfo(dtype).eps), COARSEST_EPS)


def nudged(values: Tensor) -> Tensor:
    """Numbers as if each had been rounded once more, the same way every time: x·(1 + eps·n) with normal n."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return values * (1 + coarse_eps(values.dtype) * noise).to(values)


@dataclass(frozen=True)
class TensorDifference:
    """The first output that differs, by position and then by stage."""

    position: int
    stage: Stage
    size: float
    """Root mean square of the difference over that of what is expected."""


@dataclass(frozen=True)
class Comparison:
    """How one way of running a text compares with another."""

    tokens: int
    """Compared."""
    largest: float
    differing: int
    """Tokens with any output beyond the tolerance."""
    choices: int
    """Logits compared: tokens times exits."""
    flips: int
    """Of these, how many would choose another token greedily, whatever the size of the difference."""
    first: TensorDifference | None


def compare(got: Computed, expected: Computed, tolerance: float) -> Comparison:
    """Every output of every token that both have."""
    largest, choices, flips, wrong = 0.0, 0, 0, set[int]()
    first: TensorDifference | None = None
    tokens = set[int]()
    for stage, theirs in expected.outputs.items():
        positions = sorted(theirs.keys() & got.outputs.get(stage, {}).keys())
        if not positions:
            continue
        tokens.update(positions)
        got_TN = torch.stack([got.outputs[stage][position] for position in positions])
        expected_TN = torch.stack([theirs[position] for position in positions])
        sizes = relative(got_TN, expected_TN).tolist()
        if stage.kind == "logits":
            choices += len(positions)
            flips += int((got_TN.argmax(-1) != expected_TN.argmax(-1)).sum())
        largest = max(largest, *sizes)
        beyond = [(position, size) for position, size in zip(positions, sizes, strict=True) if size > tolerance]
        wrong.update(position for position, _ in beyond)
        # Stages come in the order in which they are computed, so an equal position keeps the earlier one.
        if beyond and (first is None or beyond[0][0] < first.position):
            first = TensorDifference(beyond[0][0], stage, beyond[0][1])
    return Comparison(len(tokens), largest, len(wrong), choices, flips, first)


def relative(got_TN: Tensor, expected_TN: Tensor) -> Tensor:
    """rms(got − expected)/rms(expected) of each row; what is not a number counts as infinitely far."""
    expected_TN = expected_TN.double()
    size_T = expected_TN.square().mean(-1).sqrt()
    off_T = (got_TN.double() - expected_TN).square().mean(-1).sqrt()
    return (off_T / torch.where(size_T > 0, size_T, 1.0)).nan_to_num(nan=torch.inf)


# --- the layer to blame ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blame:
    """Where two ways part, as far as the keys tell."""

    part: str | None
    """prelude, core or coda; embedding, positions, opening (of a loop) or readout; a module's name; None: unknown."""
    loop: int | None
    layer: int | None
    """The last whose keys are right: what is wrong lies between them and those of the next."""
    how: str
    """What points there."""


def blame(got: Computed, expected: Computed | None, difference: TensorDifference, tolerance: float) -> Blame:
    """The layer before the first slot whose keys of that token differ, or the one that left none.

    `expected` must be a run whose outputs are right; without one, nothing is known beyond the loop.
    """
    position, stage = difference.position, difference.stage
    if expected is None or not expected.writes.get(position):
        return Blame(None, stage.loop, None, "there are no keys of a right run to name a layer by")
    if not got.writes:
        return Blame(None, stage.loop, None, "a run without a cache shows no keys to name a layer by")
    right = expected.writes[position]
    own = {(each.part, each.loop, each.slot[2]): each for each in got.writes.get(position, [])}
    before: Write | None = None
    for write in right:
        mine = own.get((write.part, write.loop, write.slot[2]))
        if mine is None:
            return Blame(write.part, write.loop, write.slot[2], f"{write} leaves no keys of this token")
        if _differ(mine.values_N, write.values_N, tolerance):
            return _between(before, write, stage)
        if _differ(mine.keys_N, write.keys_N, tolerance):
            # What a layer reads makes its values too: these keys were made of the right state, at the wrong place.
            how = f"the values of {write} are right and its keys are not: its position, or their rotation"
            if before is None:
                return Blame("positions", 0, None, how)
            return Blame(write.part, write.loop, write.slot[2], how)
        before = write
    last = [each for each in right if each.loop == stage.loop and (each.part == "coda") == (stage.kind == "logits")]
    if last:
        how = f"all keys are right, and what follows {last[-1]} is not"
        return Blame(last[-1].part, stage.loop, last[-1].slot[2], how)
    if stage.kind == "logits":
        return Blame("readout", stage.loop, None, "all keys are right: what follows them, up to the logits, is not")
    return Blame(None, stage.loop, None, "all keys are right, and this loop writes none")


def _differ(got_N: Tensor, expected_N: Tensor, tolerance: float) -> bool:
    return float(relative(got_N[None], expected_N[None])) > tolerance


def _between(before: Write | None, wrong: Write, stage: Stage) -> Blame:
    """What runs between the last right keys and the first wrong ones."""
    layer = wrong.slot[2]
    in_one_stack = before is not None and (before.part, before.loop) == (wrong.part, wrong.loop)
    if (before is None and layer > 0) or (before is not None and in_one_stack and layer > before.slot[2] + 1):
        how = f"the keys of {wrong} differ, and the layer before it keeps none"
        return Blame(wrong.part, wrong.loop, layer - 1, how)
    if stage.loop is not None and (0 if before is None else before.loop) < wrong.loop <= stage.loop:
        how = f"the state before loop {wrong.loop} is right, and the first keys of the loop are not"
        return Blame("opening", wrong.loop, None, f"{how}: what opens it (norm, injection, loop embedding)")
    if before is None:
        return Blame("embedding", 0, None, f"the first keys ({wrong}) differ already")
    how = f"keys are right up to {before} and differ from {wrong} on"
    return Blame(before.part, before.loop, before.slot[2], how)


def shared_slots(writes: Sequence[Write]) -> list[tuple[Write, Write]]:
    """Pairs of writes of one token into the same slot."""
    first: dict[Slot, Write] = {}
    return [(first[each.slot], each) for each in writes if first.setdefault(each.slot, each) is not each]
