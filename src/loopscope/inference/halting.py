"""Halting: at which loop each token leaves, decided from what is known there and then.

A rule looks at a token after loop k and gives a score, the larger the readier; the token leaves at the first loop whose
score reaches the threshold, and at the last one in any case. Rules are per token and causal: nothing of later tokens,
nothing of deeper loops.

What a token that has left at loop e shows to later tokens at every deeper loop is the fill: copies of its keys and
values of loop e, or those that the layers' maps make of its state h_e (`protocol.ProjectedKeys`). On known text all
tokens can then be run at once (`halt_on_text`): at loop k those that have left stay as they are, and one pass of K
loops gives exactly what decoding one token after another would.

Shape legend: B rows, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from loopscope.config import MOST_LOOPS
from loopscope.errors import ConfigError, UnsupportedError, suggest
from loopscope.files import Problems, integer, read_json
from loopscope.files import number as finite
from loopscope.inference.cache import CachePolicy, KVCache
from loopscope.inference.decoding import check_finite, device_of, last_logits
from loopscope.protocol import Cache, Cached, ExitGate, LinearReadout, LoopState, ProjectedKeys, Slot
from loopscope.words import no_policy

POLICY_VERSION = 1
"""Of the policy files that are read and written."""
NEVER = float("-inf")
"""Score of a token that a rule cannot judge yet."""
MOST_WIDTH = 1 << 17
"""Widest state that a policy's probe is read for."""

Fill = Literal["copy", "project"]
"""What a token that has left shows at deeper loops: the keys and values of its exit, or those made of its state."""
FILLS: tuple[Fill, ...] = get_args(Fill)


# --- what a rule sees ------------------------------------------------------------------------------------------------


@dataclass
class Look:
    """What is known of some tokens after loop k; readouts are computed when a rule asks for them, once."""

    model: Any
    state: LoopState
    k: int
    num_loops: int
    cache: Cache
    before: Look | None
    """The same tokens one loop earlier; None at loop 1."""

    @cached_property
    def features_BTD(self) -> Tensor:
        """What the head multiplies."""
        return LinearReadout.needed(self.model, "this halting rule").features(self.state, self.k, self.cache)

    @cached_property
    def logits_BTV(self) -> Tensor:
        """Of the exit at loop k."""
        linear = LinearReadout.of(self.model)
        if linear is None:
            logits_BTV = self.model.readout(self.state, self.k, self.cache)
        else:
            logits_BTV = torch.nn.functional.linear(self.features_BTD, linear.head)
        check_finite(logits_BTV, self.k)
        return logits_BTV

    @cached_property
    def logprobs_BTV(self) -> Tensor:
        """Log-probabilities of the exit."""
        return self.logits_BTV.float().log_softmax(-1)

    @cached_property
    def margin_BT(self) -> Tensor:
        """By how much the likeliest token's logit is above the next."""
        best = self.logits_BTV.float().topk(2, -1).values
        return best[..., 0] - best[..., 1]

    @cached_property
    def stay_BT(self) -> Tensor:
        """Probability, by the model's own gate, of not having left at this loop or an earlier one."""
        gate = ExitGate.needed(self.model, "the halting rule gate")
        stay_BT = 1 - gate.exit_logits(self.features_BTD).float().sigmoid()
        return stay_BT if self.before is None else stay_BT * self.before.stay_BT

    def take(self, rows: Tensor) -> Look:
        """Of some rows; what has been computed comes along."""
        before = None if self.before is None else self.before.take(rows)
        chosen = Look(self.model, self.state.take(rows), self.k, self.num_loops, self.cache, before)
        for name in ("features_BTD", "logits_BTV", "logprobs_BTV", "margin_BT", "stay_BT"):
            if name in self.__dict__:
                chosen.__dict__[name] = self.__dict__[name][rows]
        return chosen


# --- rules -----------------------------------------------------------------------------------------------------------


class Rule(ABC):
    """A score of how ready a token is to leave."""

    name: ClassVar[str]
    divides_by_norm: ClassVar[bool] = False
    """Whether a state that merely grows looks as if it had settled: a false stop where scale drifts."""

    @abstractmethod
    def score(self, look: Look) -> Tensor:
        """Score_BT after loop k; the larger, the readier."""


class Fixed(Rule):
    """Every token leaves at the same loop: the threshold."""

    name = "fixed"

    def score(self, look: Look) -> Tensor:
        return torch.full(look.state.h_BTD.shape[:2], float(look.k), device=look.state.h_BTD.device)


class Margin(Rule):
    """z_(1) − z_(2), the two largest logits."""

    name = "margin"

    def score(self, look: Look) -> Tensor:
        return look.margin_BT


class MaxProbability(Rule):
    """max_v p(v)."""

    name = "max-probability"

    def score(self, look: Look) -> Tensor:
        return look.logprobs_BTV.amax(-1).exp()


class Entropy(Rule):
    """Σ p·ln p: minus the entropy, in nats."""

    name = "entropy"

    def score(self, look: Look) -> Tensor:
        return (look.logprobs_BTV.exp() * look.logprobs_BTV).sum(-1)


class Divergence(Rule):
    """−KL(p_k ‖ p_{k−1}): the prediction has stopped changing."""

    name = "kl"

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return torch.full(look.state.h_BTD.shape[:2], NEVER)
        now, then = look.logprobs_BTV, look.before.logprobs_BTV
        return -(now.exp() * (now - then)).sum(-1)


class StateDifference(Rule):
    """−‖h_k − h_{k−1}‖/‖h_k‖."""

    name, divides_by_norm = "state-difference", True

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return torch.full(look.state.h_BTD.shape[:2], NEVER)
        now, then = look.state.h_BTD.float(), look.before.state.h_BTD.float()
        return -(now - then).norm(dim=-1) / now.norm(dim=-1).clamp(min=1e-30)


class Cosine(Rule):
    """cos(h_k, h_{k−1})."""

    name, divides_by_norm = "cosine", True

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return torch.full(look.state.h_BTD.shape[:2], NEVER)
        return torch.cosine_similarity(look.state.h_BTD.float(), look.before.state.h_BTD.float(), dim=-1)


class Gate(Rule):
    """Σ_{j ≤ k} p_j, the cumulative exit probability of the model's own gate (Ouro)."""

    name = "gate"

    def score(self, look: Look) -> Tensor:
        return 1 - look.stay_BT


class Certain(Rule):
    """margin_k / (2·max_v |z_k − z_{k−1}|·(K − k)), logits centred.

    If no later loop moves the logits by more than the last one did, the remaining K − k loops move the margin by at
    most the denominator: from 1 on the decision cannot change any more.
    """

    name = "certain"

    def score(self, look: Look) -> Tensor:
        if look.before is None:
            return torch.full(look.state.h_BTD.shape[:2], NEVER)
        moved_BTV = look.logits_BTV.float() - look.before.logits_BTV.float()
        moved_BT = (moved_BTV - moved_BTV.mean(-1, keepdim=True)).abs().amax(-1)
        return look.margin_BT / (2 * moved_BT * max(look.num_loops - look.k, 1)).clamp(min=1e-30)


@dataclass(frozen=True)
class Probe(Rule):
    """w_k·h_k/‖h_k‖_rms + b_k: a linear map of the state's direction, fitted on text of its own; d products a check."""

    weights_KD: Sequence[Sequence[float]]
    """One row for every loop but the last."""
    biases_K: Sequence[float]
    name: ClassVar[str] = "probe"

    @cached_property
    def _weights(self) -> Tensor:
        return torch.tensor(self.weights_KD)

    def score(self, look: Look) -> Tensor:
        h_BTD = look.state.h_BTD.float()
        inverse_BT = h_BTD.square().mean(-1).clamp(min=1e-30).rsqrt()
        return (h_BTD @ self._weights[look.k - 1].to(h_BTD.device)) * inverse_BT + self.biases_K[look.k - 1]


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (Fixed, Margin, MaxProbability, Entropy, Divergence, StateDifference, Cosine, Gate, Certain)
}
"""Rules that need nothing but a threshold; a probe is fitted first."""


def rule_of(name: str, flag: str = "halting") -> Rule:
    """The rule of that name; `flag` is where it was named."""
    if name == Probe.name:
        raise ConfigError.of(
            flag, name, "is fitted to a model: `loopscope calibrate TARGET --rule probe -o policy.json` writes it"
        )
    if name not in RULES:
        raise ConfigError.of(flag, name, suggest(name, (*RULES, Probe.name)))
    return RULES[name]()


def parse_halting(text: str, flag: str = "halting") -> Halting:
    """RULE:THRESHOLD, as in margin:2.5, or a policy file that `loopscope calibrate` wrote."""
    if text.endswith(".json"):
        return read_policy(Path(text), flag)
    name, _, number = text.partition(":")
    try:
        threshold = float(number)
    except ValueError:
        threshold = float("nan")
    if threshold != threshold:
        raise ConfigError.of(flag, text, f"expected a policy.json or RULE:THRESHOLD; rules: {', '.join(RULES)}")
    return Halting(rule_of(name, flag), threshold)


def read_policy(path: Path, flag: str = "halting") -> Halting:
    """The rule and threshold of a policy file; a threshold of null never leaves."""
    problems: Problems = {}
    found = read_json(path, problems)
    if found is None:
        why = problems.get(path.name, "no such file").removesuffix(" and is left out")
        raise no_policy(path, why, flag)
    try:
        return _policy(found)
    except ValueError as error:
        why = f"is not a policy that `loopscope calibrate` wrote: {error}"
        raise ConfigError.of(flag, str(path), why) from None


def _policy(found: dict[str, Any]) -> Halting:
    """A policy as its file holds it; a ValueError says what is not as it was written."""
    if found.get("schema_version") != POLICY_VERSION:
        raise ValueError(f"schema_version is not {POLICY_VERSION}")
    threshold = finite(found.get("threshold"))
    if threshold is None and ("threshold" not in found or found["threshold"] is not None):
        raise ValueError("threshold is neither a number nor null")
    fill = next((each for each in FILLS if each == found.get("fill", FILLS[0])), None)
    if fill is None:
        raise ValueError(f"fill is none of {', '.join(FILLS)}")
    num_loops, width = (_count(found, name, most) for name, most in (("num_loops", MOST_LOOPS), ("width", MOST_WIDTH)))
    name = str(found.get("rule"))
    rule = _probe(found.get("probe"), num_loops, width) if name == Probe.name else rule_of(name)
    return Halting(rule, float("inf") if threshold is None else threshold, fill, num_loops, width)


def _count(found: dict[str, Any], name: str, most: int) -> int | None:
    """A whole number from 1 to `most`, or None where there is none."""
    count = integer(found.get(name))
    if found.get(name) is not None and (count is None or not 1 <= count <= most):
        raise ValueError(f"{name} is not a whole number from 1 to {most:,}")
    return count


def _probe(found: object, num_loops: int | None, width: int | None) -> Probe:
    """One row of `width` finite weights and a bias for every loop but the last."""
    match found:
        case {"weights": [*rows], "biases": [*biases]} if num_loops is not None and width is not None:
            weights_KD = [[finite(each) for each in row] for row in rows if isinstance(row, list) and len(row) == width]
            biases_K = [finite(each) for each in biases]
            if len(rows) == len(weights_KD) == len(biases_K) == num_loops - 1:
                finite_KD = [[each for each in row if each is not None] for row in weights_KD]
                finite_K = [each for each in biases_K if each is not None]
                if finite_KD == weights_KD and finite_K == biases_K:
                    return Probe(finite_KD, finite_K)
    raise ValueError("probe is not a row of width finite weights and a bias for every loop but the last")


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
            return torch.ones(look.state.h_BTD.shape[:2], dtype=torch.bool, device=look.state.h_BTD.device)
        return self.rule.score(look) >= self.threshold


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
