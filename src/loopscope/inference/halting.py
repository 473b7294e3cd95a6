"""Halting: at which loop each token leaves.

A rule (`inference.rules`) scores a token after loop k; the token leaves at the first loop whose score reaches the
threshold, and at the last one in any case.

What a token that has left at loop e shows to later tokens at every deeper loop is the fill: copies of its keys and
values of loop e, or those that the layers' maps make of its state h_e (`protocol.ProjectedKeys`). On known text all
tokens can then be run at once (`halt_on_text`): at loop k those that have left stay as they are, and one pass of K
loops gives exactly what decoding one token after another would.

Shape legend: B rows, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loopscope.errors import ConfigError, UnsupportedError
from loopscope.files import MOST_JSON_BYTES, read_bytes
from loopscope.inference.cache import CachePolicy, KVCache
from loopscope.inference.decoding import device_of, last_logits
from loopscope.inference.rules import RULES, Look, Rule, rule_named, rule_of
from loopscope.protocol import Cached, LoopState, ProjectedKeys, Slot
from loopscope.results.halting import Fill, Policy
from loopscope.results.record import decode
from loopscope.words import no_policy


@dataclass(frozen=True)
class Halting:
    """A rule with its threshold."""

    rule: Rule
    threshold: float
    fill: Fill = "copy"
    num_loops: int | None = None
    """The full depth it was calibrated at; None where it was not."""
    width: int | None = None
    """Of the states it was calibrated on; None where it was not."""

    @classmethod
    def of_policy(cls, policy: Policy, flag: str) -> Halting:
        """What a policy file says; a ValueError says what is missing there."""
        threshold = math.inf if policy.threshold is None else policy.threshold
        rule = rule_named(policy.rule, flag).of_policy(policy)
        return cls(rule, threshold, policy.fill, policy.num_loops, policy.width)

    def check_fits(self, model: Cached, num_loops: int) -> None:
        """Refuse a policy that was calibrated on a model of another depth or width, or whose fill this one lacks."""
        if self.num_loops is not None and self.num_loops != num_loops:
            why = f"was calibrated at {self.num_loops} loops, and {num_loops} are asked for: nothing is promised there"
            raise ConfigError.of("halting", self.rule.name, why)
        if self.width is not None:
            width = model.embed(torch.zeros(1, 1, dtype=torch.long, device=device_of(model))).h_BTD.shape[-1]
            if width != self.width:
                why = f"was calibrated on states of width {self.width}, and those of this model have {width}"
                raise ConfigError.of("halting", self.rule.name, why)
        if self.fill == "project":
            ProjectedKeys.needed(model, "the fill project")

    def leaves(self, look: Look) -> Tensor:
        """Leaving_BT: who leaves at this loop."""
        if look.k >= look.num_loops:
            return look.same(1).bool()
        return self.rule.score(look) >= self.threshold


def parse_halting(text: str, flag: str = "halting") -> Halting:
    """RULE:THRESHOLD, as in margin:2.5, or a policy file that `loopscope calibrate` wrote."""
    if text.endswith(".json"):
        return read_policy(Path(text), flag)
    name, _, number = text.partition(":")
    try:
        threshold = float(number)
    except ValueError:
        threshold = math.nan
    if math.isnan(threshold):
        names = ", ".join(name for name, kind in RULES.items() if not kind.is_fitted)
        raise ConfigError.of(flag, text, f"expected a policy.json or RULE:THRESHOLD; rules: {names}")
    return Halting(rule_of(name, flag), threshold)


def read_policy(path: Path, flag: str = "halting") -> Halting:
    """The rule and threshold of a policy file."""
    try:
        return Halting.of_policy(decode(read_bytes(path, MOST_JSON_BYTES), Policy), flag)
    except FileNotFoundError:
        raise no_policy(path, "no such file", flag) from None
    except OSError as error:
        raise no_policy(path, f"cannot be read: {error.strerror}", flag) from None
    except ValueError as error:  # a MisfitError, or what a rule lacks
        why = f"is not a policy that `loopscope calibrate` wrote: {error}"
        raise ConfigError.of(flag, str(path), why) from None


# --- on known text, all tokens at once -------------------------------------------------------------------------------


class _Filled:
    """A cache for one pass over known text, in which tokens that have left show what their fill says."""

    def __init__(self, model: Cached, fill: Fill) -> None:
        self.left_BT: Tensor | None = None
        self._model = ProjectedKeys.needed(model, "the fill project") if fill == "project" else None
        self._projecting = False
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, what tokens that have left show at this loop."""

    def begin(self, state: LoopState, k: int) -> None:
        """Before loop k: what those that have left show there; of the others it is not looked at."""
        if self._model is not None and self.left_BT is not None and self.left_BT.any():
            self._projecting = True
            self._model.project(state, [k], self)
            self._projecting = False

    def positions(self, tokens: int) -> Tensor:
        return torch.arange(tokens)[None]

    def mask(self, tokens: int) -> Tensor | None:
        return None

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        part, _, layer = slot
        if part == "coda":
            raise UnsupportedError(
                "halting on known text in one pass needs a readout that looks at one token alone; this model's coda "
                "attends to others, which leave at loops of their own: decode it token by token"
            )
        if self._projecting:
            self._shown[layer] = k_BHTC, v_BHTC
        elif part == "core":
            if layer in self._shown and self.left_BT is not None:
                left_B1T1 = self.left_BT[:, None, :, None]
                old_k, old_v = self._shown[layer]
                k_BHTC, v_BHTC = torch.where(left_B1T1, old_k, k_BHTC), torch.where(left_B1T1, old_v, v_BHTC)
            if self._model is None:
                self._shown[layer] = k_BHTC, v_BHTC
        return k_BHTC, v_BHTC


@dataclass(frozen=True)
class Halted:
    """Known text under a halting rule."""

    exits_BT: Tensor
    """The loop at which each token left."""
    ce_BT: Tensor
    """Cross-entropy of each token's target at its exit; where the target is negative it means nothing."""


@torch.no_grad()
def halt_on_text(
    model: Cached, ids_BT: Tensor, targets_BT: Tensor, halting: Halting, *, num_loops: int, prompt: int = 0
) -> Halted:
    """Run known text under a rule in one pass of K loops; the first `prompt` tokens go to full depth."""
    cache = _Filled(model, halting.fill)
    state = model.embed(ids_BT, cache)
    device = state.h_BTD.device
    cache.left_BT = torch.zeros(ids_BT.shape, dtype=torch.bool, device=device)
    exits_BT = torch.zeros(ids_BT.shape, dtype=torch.long, device=device)
    ce_BT = torch.zeros(ids_BT.shape, device=device)
    in_prompt_T = torch.arange(ids_BT.shape[1], device=device) < prompt
    look: Look | None = None
    for k in range(1, num_loops + 1):
        cache.begin(state, k)
        state = _kept_where(cache.left_BT, state, model.loop(state, k, cache))
        look = Look(model, state, k, num_loops, cache, look)
        leaves_BT = halting.leaves(look) & ~cache.left_BT
        if k < num_loops:
            leaves_BT &= ~in_prompt_T
        if leaves_BT.any():
            ce = -look.logprobs_BTV.gather(-1, targets_BT.clamp(min=0)[..., None]).squeeze(-1)
            ce_BT, exits_BT = torch.where(leaves_BT, ce, ce_BT), exits_BT.masked_fill(leaves_BT, k)
        cache.left_BT = cache.left_BT | leaves_BT
        if look.before is not None:
            look.before.before = None  # rules look back one loop
        if cache.left_BT.all():
            break
    return Halted(exits_BT, ce_BT)


def _kept_where(left_BT: Tensor, before: LoopState, after: LoopState) -> LoopState:
    """Tokens that have left stay as they were."""

    def keep(old: Any, new: Any) -> Any:
        if not isinstance(new, Tensor) or new.shape[:2] != left_BT.shape:
            return new
        return torch.where(left_BT.view(*left_BT.shape, *[1] * (new.dim() - 2)), old, new)

    carried = {name: keep(before.carried.get(name, new), new) for name, new in after.carried.items()}
    return LoopState(keep(before.h_BTD, after.h_BTD), carried, after.context)


# --- while decoding --------------------------------------------------------------------------------------------------


class HaltingRunner:
    """A `decoding.Runner` whose tokens leave when their rule says so: loops are saved, not only counted."""

    def __init__(self, model: Cached, num_loops: int, halting: Halting, *, halt_prompts: bool = False) -> None:
        self.model, self.num_loops, self.halting, self.halt_prompts = model, num_loops, halting, halt_prompts
        self.device = device_of(model)
        self.cache = KVCache(0, CachePolicy("last-exited"), num_loops=num_loops)
        self.row: list[int] = []
        self._spent: dict[int, int] = {}

    def spent(self, number: int) -> int:
        """Loops of the last token of a sequence."""
        return self._spent[number]

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits_V after each prompt, at full depth unless prompts halt too, token by token."""
        self.row = self.cache.take_rows(len(prompts))
        logits = []
        for number, prompt in enumerate(prompts):
            if self.halt_prompts:
                for token in prompt:
                    logits_BV = self.step([number], [token])
            else:
                view = self.cache.append(len(prompt), [self.row[number]])
                state = self.model.embed(torch.tensor([list(prompt)], device=self.device), view)
                for k in range(1, self.num_loops + 1):
                    state = self.model.loop(state, k, view)
                logits_BV = last_logits(self.model, state, self.num_loops, view)
                self._spent[number] = self.num_loops
            logits.append(logits_BV[0])
        return logits

    @torch.inference_mode()
    def step(self, numbers: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Logits_BV after one more token of each of these sequences, at the loop each of them leaves at."""
        rows = [self.row[number] for number in numbers]
        view = self.cache.append(1, rows)
        state = self.model.embed(torch.tensor(ids, device=self.device)[:, None], view)
        running, starts = list(range(len(rows))), list(view.starts)
        logits: dict[int, Tensor] = {}
        look: Look | None = None
        for k in range(1, self.num_loops + 1):
            state = self.model.loop(state, k, view)
            look = Look(self.model, state, k, self.num_loops, view, look)
            leaves_B = self.halting.leaves(look)[:, -1]
            leaves = leaves_B.tolist()  # one word from the device a loop
            if not any(leaves):
                continue
            gone = [index for index, is_leaving in zip(running, leaves, strict=True) if is_leaving]
            for place, index in zip((place for place, it in enumerate(leaves) if it), gone, strict=True):
                logits[index], self._spent[numbers[index]] = look.logits_BTV[place, -1], k
            if k < self.num_loops:
                self._fill(state, leaves_B, k, [rows[index] for index in gone], [starts[index] for index in gone])
            if len(gone) == len(running):
                break
            running = [index for index, is_leaving in zip(running, leaves, strict=True) if not is_leaving]
            state, look = state.take(~leaves_B), look.take(~leaves_B)
            view = self.cache.at([rows[index] for index in running], [starts[index] for index in running])
        return torch.stack([logits[index] for index in range(len(rows))])

    def _fill(self, state: LoopState, leaves_B: Tensor, k: int, rows: Sequence[int], starts: Sequence[int]) -> None:
        """What tokens that leave after loop k, at these places of the cache, show at deeper loops."""
        if self.halting.fill == "project":
            model = ProjectedKeys.needed(self.model, "the fill project")
            model.project(state.take(leaves_B), range(k + 1, self.num_loops + 1), self.cache.at(rows, starts))
        else:
            for row, start in zip(rows, starts, strict=True):
                self.cache.leave(row, start, k, self.num_loops)
