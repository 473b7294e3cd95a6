"""Self-speculation: the first d loops draft, all K loops decide. Nothing is computed twice.

**Block.** Draft m tokens one after another through loops 1..d, then run loops d+1..K of the whole block from the
drafted states. The first token that the full depth would not have chosen ends the block, and what comes after it is
forgotten: the cache is truncated.

**Wave.** Weights are shared, so tokens at different loops can go through the core in one call. While the newest token
is in loops 1..d, the one before it is in d+1..2d, and so on: one call of ⌈K/d⌉ lanes for every d loops. A token that
the full depth rejects sends all younger lanes away.

With acceptance a (the chance that full depth chooses what the draft chose), t_n the time of one loop over n tokens and
r_n that of reading n tokens out, the time of a token is

    plain   K·t_1 + r_1
    block   [m·(d·t_1 + r_1) + (K − d)·t_m + r_m] / Σ_{i<m} aⁱ
    wave    [d·t_L + r_2]·(1 + (1 − a)·(L − 1))        L = ⌈K/d⌉ lanes

and what runs follows from a and t as they are measured, corrected by what tokens of each kind of plan really took.
Greedy output is that of plain decoding, but for rounding: a token's logits change in their last digits with the shape
of the batch it is in. Sampled output has the distribution of plain decoding exactly (`decoding.accept`).

Shape legend: V vocabulary, K loops.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loopscope.errors import ConfigError
from loopscope.inference.cache import CachePolicy, CacheView, KVCache
from loopscope.inference.decoding import (
    Continuation,
    Limits,
    Sampling,
    Token,
    accept,
    check_finite,
    device_of,
    last_logits,
    logprob,
)
from loopscope.protocol import Cache, Cached, LinearReadout, LoopState, MixedDepths

LOOKED_AT = 12
"""Tokens whose every exit is read at first, and now and then: how often would each have drafted the right token?"""
LOOK_AGAIN = 128
"""Tokens after which exits are looked at again; texts change."""
MEMORY = 0.98
"""What is known about acceptance loses so much weight with every token: some fifty tokens count."""
PLANNED = 32
"""Tokens after which the plan is thought over."""
COMPARED = 6
"""Tokens that are decoded plainly before anything else: what speculation is compared with."""
WORTH_IT = 1.05
"""Predicted gain below which tokens are decoded plainly."""
MOST_DRAFTED = 8
"""Longest block: at the acceptance of any model worth drafting with, later tokens hardly ever stand."""


@dataclass(frozen=True)
class DraftPlan:
    """What runs: plain decoding, a look at every exit, blocks, or waves."""

    kind: str = "plain"
    loops: int = 0
    """d: loops that draft."""
    tokens: int = 1
    """m: tokens of a block."""

    def __str__(self) -> str:
        numbers = {"block": f":{self.loops},{self.tokens}", "wave": f":{self.loops}"}
        return self.kind + numbers.get(self.kind, "")


PLAIN, LOOK = DraftPlan(), DraftPlan("look")


def parse_plan(text: str) -> DraftPlan | None:
    """auto (None), plain, block:D,M or wave:D."""
    if text == "auto":
        return None
    if text == "plain":
        return PLAIN
    if found := re.fullmatch(r"block:(\d{1,4}),(\d{1,4})", text):
        return DraftPlan("block", int(found[1]), int(found[2]))
    if found := re.fullmatch(r"wave:(\d{1,4})", text):
        return DraftPlan("wave", int(found[1]))
    raise ConfigError.of("speculate", text, "expected auto, plain, block:D,M or wave:D (D loops draft, M tokens)")


@dataclass
class Tally:
    """What speculation did."""

    drafted: int = 0
    """Drafts that full depth decided about."""
    accepted: int = 0
    loops: int = 0
    """Loops of tokens that were run, those of rejected tokens included."""
    plans: dict[str, int] = field(default_factory=dict)
    """Tokens that came of each plan."""


@dataclass
class Acceptance:
    """How often drafts of one depth stand: a mean that forgets, and begins as even odds that weigh one token."""

    hits: float = 0.5
    weight: float = 1.0

    def learn(self, outcome: float) -> None:
        """One more draft, kept (1) or not (0), or the chance of it."""
        self.hits, self.weight = MEMORY * self.hits + outcome, MEMORY * self.weight + 1

    @property
    def rate(self) -> float:
        """The chance that the next draft stands."""
        return self.hits / self.weight


@dataclass
class Times:
    """Seconds of one loop over n tokens, and of reading n tokens out, as measured on this machine just before."""

    loop: dict[int, float] = field(default_factory=dict)
    lanes: dict[int, float] = field(default_factory=dict)
    readout: dict[int, float] = field(default_factory=dict)

    def predicted(self, plan: DraftPlan, num_loops: int, acceptance: float) -> float:
        """Seconds a token, by the equations above."""
        d, m = plan.loops, plan.tokens
        if plan.kind == "plain":
            return num_loops * self.loop[1] + self.readout[1]
        if plan.kind == "block":
            drafting = m * (d * self.loop[1] + self.readout[1])
            verifying = (num_loops - d) * self.loop[m] + self.readout[m]
            return (drafting + verifying) / sum(acceptance**i for i in range(m))
        lanes = -(-num_loops // d)
        return (d * self.lanes[lanes] + self.readout[2]) * (1 + (1 - acceptance) * (lanes - 1))


class Speculator:
    """Decodes one sequence at a time, drafting with the model's own early exits."""

    def __init__(
        self,
        model: Cached,
        num_loops: int,
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        plan: DraftPlan | None = None,
    ) -> None:
        """`plan` None: what runs follows from measured acceptance and times."""
        self.model, self.num_loops = model, num_loops
        self.plan = PLAIN if num_loops == 1 else plan  # a single loop has nothing to draft with
        self.sampling, self.limits = sampling or Sampling(), limits or Limits()
        self.device = device_of(model)
        self.tally = Tally()
        self.acceptance = {d: Acceptance() for d in range(1, num_loops)}
        """By loops that draft."""
        self._times: Times | None = None
        self.excess: dict[str, float] = {}
        """By kind of plan: seconds that a token took, over those that were predicted."""
        self._plain_until = 0
        if plan is not None and plan.kind != "plain" and not 1 <= plan.loops < num_loops:
            raise ConfigError.of("speculate", str(plan), f"at least one and fewer than all {num_loops} loops draft")
        if plan is not None and plan.kind == "block" and plan.tokens < 1:
            raise ConfigError.of("speculate", str(plan), "a block has at least one token")
        if plan is not None and plan.kind == "wave":
            MixedDepths.needed(model, "a wave of tokens at different loops")

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], number: int = 0) -> Iterator[tuple[Continuation, Token]]:
        """Tokens as full depth confirms them; the same interface as `decoding.decode` has for one prompt."""
        self.limits.check_prompt(prompt)
        self._text = Continuation(list(prompt))
        self._number, self._random = number, self.sampling.generator(number)
        # Exact in the core. A coda has one slot: drafts look at what full depth left there.
        self.cache = KVCache(1, CachePolicy("last-exited"), num_loops=self.num_loops)
        view = self.cache.append(len(prompt))
        state = self._loops(self.model.embed(self._ids(prompt), view), 1, self.num_loops, view)
        logits_V = last_logits(self.model, state, self.num_loops, view)[0]
        yield self._emitted(self.sampling.draw(logits_V, self._text.ids, self._random), logits_V)
        known = all(each.weight >= LOOKED_AT for each in self.acceptance.values())  # from an earlier text
        self._look_until, self._planned_until = 0 if known else LOOKED_AT, 0
        plan = PLAIN
        while self._text.finish is None:
            plan = self._next_plan(plan)
            made, seconds = 0, 0.0
            started = time.perf_counter()
            for emitted in self._run(plan):
                seconds += time.perf_counter() - started  # what the caller does between two tokens is not counted
                made += 1
                if made % COMPARED == 0:  # a wave may go on for long
                    self.note_time(plan, seconds / made)
                yield emitted
                started = time.perf_counter()
            self.tally.plans[str(plan)] = self.tally.plans.get(str(plan), 0) + made
            self.note_time(plan, seconds / made)

    def _run(self, plan: DraftPlan) -> Iterator[tuple[Continuation, Token]]:
        """Tokens of one plan, at least one."""
        if plan.kind == "look":
            yield self._look()
        elif plan.kind == "plain":
            yield self._plain()
        elif plan.kind == "block":
            yield from self._block(plan)
        else:
            yield from self._wave(plan)

    # --- one token after another -------------------------------------------------------------------------------------

    def _plain(self) -> tuple[Continuation, Token]:
        """The last token through all loops."""
        view = self.cache.append(1)
        state = self._loops(self._embedded(view), 1, self.num_loops, view)
        logits_V = last_logits(self.model, state, self.num_loops, view)[0]
        return self._emitted(self.sampling.draw(logits_V, self._text.ids, self._random), logits_V)

    def _look(self) -> tuple[Continuation, Token]:
        """The same, reading every exit: Σ min(p_d, p_K) is the chance that a draft of loop d stands."""
        view, seen = self.cache.append(1), self._text.ids
        state, exits = self._embedded(view), []
        for k in range(1, self.num_loops + 1):
            state = self._loops(state, k, k, view)
            exits.append(last_logits(self.model, state, k, view)[0])
        target_V = self.sampling.probabilities(exits[-1], seen)
        for d, logits_V in enumerate(exits[:-1], start=1):
            overlap = torch.minimum(self.sampling.probabilities(logits_V, seen), target_V).sum()
            self.acceptance[d].learn(float(overlap))
        return self._emitted(self.sampling.draw(exits[-1], seen, self._random), exits[-1])

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _block(self, plan: DraftPlan) -> Iterator[tuple[Continuation, Token]]:
        start, d, seen = self.cache.lengths[0], plan.loops, self._text.ids
        states: list[LoopState] = []
        drafts: list[int] = []
        chances: list[Tensor] = []
        for _ in range(min(plan.tokens, self._room())):
            view = self.cache.append(1)
            states.append(self._loops(self._embedded(view, drafts[-1:]), 1, d, view))
            logits_V = last_logits(self.model, states[-1], d, view)[0]
            drafts.append(self._drafted(logits_V, [*seen, *drafts], chances))
        view = self.cache.at([0], [start])
        state = self._loops(LoopState.joined(states, 1), d + 1, self.num_loops, view)
        logits_MV = self.model.readout(state, self.num_loops, view)[0]
        check_finite(logits_MV, self.num_loops)
        for index, draft in enumerate(drafts):
            chosen = self._decided(logits_MV[index], draft, chances, index, d)
            if chosen != draft or index == len(drafts) - 1:
                self.cache.truncate(start + index + 1)
            yield self._emitted(chosen, logits_MV[index])
            if chosen != draft or self._text.finish is not None:
                return

    def _drafted(self, logits_V: Tensor, seen: Sequence[int], chances: list[Tensor]) -> int:
        """A draft; what it was drawn from is kept where chance plays a part."""
        if self.sampling.is_greedy:
            return self.sampling.draw(logits_V, seen, self._random)
        chances.append(self.sampling.probabilities(logits_V, seen))
        return int(torch.multinomial(chances[-1], 1, generator=self._random))

    def _decided(self, logits_V: Tensor, draft: int, chances: Sequence[Tensor], index: int, d: int) -> int:
        """What full depth makes of a draft."""
        if self.sampling.is_greedy:
            chosen = self.sampling.draw(logits_V, self._text.ids, self._random)
        else:
            target_V = self.sampling.probabilities(logits_V, self._text.ids)
            chosen = accept(draft, chances[index], target_V, self._random)
        self.tally.drafted += 1
        self.tally.accepted += chosen == draft
        self.acceptance[d].learn(float(chosen == draft))
        return chosen

    # --- waves -------------------------------------------------------------------------------------------------------

    def _wave(self, plan: DraftPlan) -> Iterator[tuple[Continuation, Token]]:
        """Lanes, the newest first, until a draft is rejected, the text ends, or another plan is better."""
        model, d, oldest = MixedDepths.needed(self.model, "a wave"), plan.loops, self.cache.lengths[0]
        joint: LoopState | None = None
        loops: tuple[int, ...] = ()
        drafts: list[int] = []
        """What full depth has not decided about yet, the oldest first."""
        chances: list[Tensor] = []
        is_last = False
        while True:
            is_last = is_last or self._room() <= len(drafts) or self._next_plan(plan) != plan
            if not is_last:  # a new lane, at loop 0
                new = self._embedded(self.cache.append(1), drafts[-1:])
                joint, loops = (new if joint is None else LoopState.joined([new, joint], 0)), (0, *loops)
            for _ in range(d):
                assert joint is not None
                loops = tuple(k + 1 for k in loops)
                view = self.cache.at([0] * len(loops), [oldest + age for age in reversed(range(len(loops)))])
                joint = model.loop(joint, loops[0] if len(loops) == 1 else loops, view)
                self.tally.loops += len(loops)
                drafting, deciding = loops[0] == d and not is_last, loops[-1] == self.num_loops
                draft_V, full_V = self._read(joint, loops, view, drafting, deciding)
                if draft_V is not None:
                    drafts.append(self._drafted(draft_V, [*self._text.ids, *drafts], chances))
                if full_V is None:
                    continue
                chosen = self._decided(full_V, drafts[0], chances, 0, d)
                oldest += 1
                yield self._emitted(chosen, full_V)
                if chosen != drafts[0] or self._text.finish is not None or len(loops) == 1:
                    self.cache.truncate(oldest)  # younger lanes ran on a token that does not stand
                    return
                del drafts[0], chances[:1]
                joint, loops = joint.take(slice(0, -1)), loops[:-1]

    def _read(
        self, joint: LoopState, loops: Sequence[int], view: CacheView, drafting: bool, deciding: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits_V of the newest lane at the draft's depth and of the oldest at full depth, through one product."""
        wanted = ([0] if drafting else []) + ([len(loops) - 1] if deciding else [])
        if not wanted:
            return None, None
        linear, rows = LinearReadout.of(self.model), []
        for lane in wanted:
            state, own = joint.take(slice(lane, lane + 1)), self.cache.at([0], [view.starts[lane]])
            read = self.model.readout if linear is None else linear.features
            rows.append(read(state, loops[lane], own)[0])
        logits_NV = torch.cat(rows) if linear is None else nn.functional.linear(torch.cat(rows), linear.head)
        check_finite(logits_NV, self.num_loops)
        return (logits_NV[0] if drafting else None), (logits_NV[-1] if deciding else None)

    # --- what runs next ----------------------------------------------------------------------------------------------

    def _next_plan(self, plan: DraftPlan) -> DraftPlan:
        """What was asked for; else a look at the exits when it is time for one, and the best plan now and then."""
        done = len(self._text.tokens)
        if self.plan is not None:
            return self.plan
        if done < self._look_until:
            return LOOK
        if done >= self._look_until + LOOK_AGAIN:
            self._look_until = done + LOOKED_AT // 3
            return LOOK
        if self._times is None:
            self._times = self.measure_times()
        if "plain" not in self.excess or (plan == PLAIN and done < self._plain_until):
            self._plain_until = self._plain_until if "plain" in self.excess else done + COMPARED
            return PLAIN
        if plan == LOOK or done >= self._planned_until:
            self._planned_until = done + PLANNED
            return self._best_plan()
        return plan

    def note_time(self, plan: DraftPlan, seconds: float) -> None:
        """Note by how much a token took longer than predicted: embedding, choosing and Python are in no equation."""
        if self._times is None or plan == LOOK:
            return
        rate = self.acceptance[plan.loops].rate if plan.loops else 0.0
        excess = seconds / self._times.predicted(plan, self.num_loops, rate)
        self.excess[plan.kind] = 0.9 * self.excess.get(plan.kind, excess) + 0.1 * excess

    def _best_plan(self) -> DraftPlan:
        """The plan with the least predicted time a token, if it gains anything worth the trouble."""
        assert self._times is not None
        draft_loops = range(1, self.num_loops)
        plans = [DraftPlan("block", d, m) for d in draft_loops for m in range(2, MOST_DRAFTED + 1)]
        if MixedDepths.of(self.model) is not None:
            plans += [DraftPlan("wave", d) for d in draft_loops]
        rates = {d: acceptance.rate for d, acceptance in self.acceptance.items()}
        usual = self.excess["plain"]
        seconds = {
            plan: self._times.predicted(plan, self.num_loops, rates[plan.loops]) * self.excess.get(plan.kind, usual)
            for plan in plans
        }
        best = min(plans, key=lambda plan: seconds[plan])
        plain = self._times.predicted(PLAIN, self.num_loops, 0.0) * usual
        return best if plain >= WORTH_IT * seconds[best] else PLAIN

    def measure_times(self, rounds: int = 5) -> Times:
        """Loops and readouts over 1 … m tokens and lanes, at positions after the text: nothing there is ever read."""
        start, token = self.cache.lengths[0], self._text.ids[-1]
        room = (self.limits.context or start + MOST_DRAFTED) - start
        times = Times()
        for n in range(1, MOST_DRAFTED + 1):
            fits = min(n, max(room, 1))
            view = self.cache.at([0], [min(start, (self.limits.context or start + fits) - fits)])
            if fits < n:  # at the end of the context no long block fits either
                times.loop[n], times.readout[n] = times.loop[fits] * n / fits, times.readout[fits] * n / fits
                continue
            state = self.model.embed(self._ids([token] * n), view)
            times.loop[n] = _least(rounds, lambda: self.model.loop(state, 1, view))  # noqa: B023
            times.readout[n] = _least(rounds, lambda: self.model.readout(state, self.num_loops, view))  # noqa: B023
        mixed = MixedDepths.of(self.model)
        for lanes in sorted({-(-self.num_loops // d) for d in range(1, self.num_loops)}) if mixed is not None else ():
            assert mixed is not None
            if lanes > room:
                times.lanes[lanes] = lanes * times.loop[1]
                continue
            views = [self.cache.at([0], [start + lane]) for lane in reversed(range(lanes))]
            state = LoopState.joined([self.model.embed(self._ids([token]), view) for view in views], 0)
            view = self.cache.at([0] * lanes, [start + lane for lane in reversed(range(lanes))])
            loops = tuple(range(1, lanes + 1))
            times.lanes[lanes] = _least(rounds, lambda: mixed.loop(state, loops, view))  # noqa: B023
        return times

    # --- small things ------------------------------------------------------------------------------------------------

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)

    def _embedded(self, view: Cache, drafts: Sequence[int] = ()) -> LoopState:
        """The newest token: the last draft, or the last of the text."""
        newest = drafts[-1] if drafts else self._text.tokens[-1].id
        return self.model.embed(self._ids([newest]), view)

    def _loops(self, state: LoopState, first: int, last: int, view: Cache) -> LoopState:
        for k in range(first, last + 1):
            state = self.model.loop(state, k, view)
        self.tally.loops += (last - first + 1) * state.h_BTD.shape[1]
        return state

    def _room(self) -> int:
        """Tokens that may still be generated."""
        left = self.limits.max_tokens - len(self._text.tokens)
        return left if self.limits.context is None else min(left, self.limits.context - len(self._text.ids))

    def _emitted(self, chosen: int, logits_V: Tensor) -> tuple[Continuation, Token]:
        token = Token(self._number, chosen, logprob(logits_V, chosen), self.num_loops)
        self._text.tokens.append(token)
        self._text.finish = self.limits.reached(self._text)
        return self._text, token


def _least(rounds: int, action: Callable[[], object]) -> float:
    """Least seconds of some rounds: what is asked for is the work, not what else the machine did meanwhile."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best
