"""Certifying halting rules on one model and one text: thresholds are proposed, tested and shown, each on its own split.

A unit is a fixed number of whole windows of one article, so that its mean loss is a mean over as many tokens as any
other's. Windows never cross from one article into the next; what is left over of an article is dropped and counted.
Of a task a unit is a fixed number of instances, which are drawn independently. Where a text does not tell where its
articles begin, blocks of neighbouring units stand in for them.

Articles, not units, are dealt to fit, calibration and test: what is proposed on one article is never tested on it.

On *fit* thresholds are proposed, from "never" outwards, and a probe is fitted; on *calibration* they are tested in that
order (`inference.calibration`); *test* shows what the certified one does.

Shape legend: N units, B rows, T tokens, K loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from loopscope.errors import DataError
from loopscope.inference.calibration import (
    CLIP,
    alike,
    article_means,
    betting_p_value,
    clipped,
    hoeffding_bentkus_p_value,
    last_certified,
)
from loopscope.inference.costs import DECODE, TIMED_TOKENS, OnProgress, time_depths
from loopscope.inference.decoding import CachedRunner, Runner, device_of
from loopscope.inference.halting import Halting, HaltingRunner, halt_on_text
from loopscope.inference.rules import NEVER, Fixed, Look, Rule
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.protocol import Cached, LoopedModel
from loopscope.results.halting import Certificate, Fill, Homes

# --- units -----------------------------------------------------------------------------------------------------------

UNIT_TOKENS = 512
"""Tokens of a unit, as whole windows."""
UNIT_INSTANCES = 8
"""Instances of a unit of a task."""
BLOCK_UNITS = 4
"""Units of a block."""
MOST_OF_ARTICLE = 16
"""Units that one article gives at most: a book among short notes would otherwise be half of a split."""
READ_TIMES = 8
"""Units that are read for one that is wanted, before articles take turns."""
SHARES = {"fit": 0.2, "calibration": 0.5, "test": 0.3}
"""How articles are dealt."""


@dataclass(frozen=True)
class Unit:
    """Windows of one article."""

    ids_BT: Tensor
    targets_BT: Tensor
    article: int
    """Number of its article, or of what stands in for one."""


@dataclass(frozen=True, kw_only=True)
class UnitText:
    """A text as units."""

    units: list[Unit]
    homes: Homes
    dropped_tokens: int = 0
    """Ends of articles that are no whole unit, as far as the text was read."""
    dropped_articles: int = 0
    """Articles that are shorter than one unit."""

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return self.units[0].ids_BT.numel()


class Tokens(Protocol):
    """A text that is too long to be held at once."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: slice, /) -> np.ndarray: ...


def in_blocks(tokens: Tokens, rows: int, length: int, max_units: int | None) -> UnitText:
    """A text without articles, from its beginning, in units of `rows` windows."""
    size = rows * length
    count = (len(tokens) - 1) // size
    count = count if max_units is None else min(count, max_units)
    units = [_unit(tokens[at * size : (at + 1) * size + 1], rows, at // BLOCK_UNITS) for at in range(count)]
    return UnitText(units=units, homes="block", dropped_tokens=(len(tokens) - 1) % size)


def of_articles(
    articles: Iterable[np.ndarray], rows: int, length: int, max_units: int | None, rng: np.random.Generator
) -> UnitText:
    """Articles in units of `rows` windows.

    Where there are more units than wanted, articles take turns to give one, of a place in them that is drawn: many
    articles are better evidence than much of a few, and beginnings are not what articles are like.
    """
    size, found, dropped, short = rows * length, [], 0, 0
    most = None if max_units is None else READ_TIMES * max_units
    for number, ids in enumerate(articles):
        whole = (len(ids) - 1) // size
        dropped, short = dropped + len(ids) - whole * size, short + (whole == 0)
        for turn, at in enumerate(rng.permutation(whole)[:MOST_OF_ARTICLE].tolist()):
            found.append((turn, number, at, ids[at * size : (at + 1) * size + 1]))
        if most is not None and len(found) >= most:
            break
    chosen = sorted(sorted(found, key=lambda each: each[:2])[:max_units], key=lambda each: each[1:3])
    units = [_unit(ids, rows, number) for _, number, _, ids in chosen]
    return UnitText(units=units, homes="article", dropped_tokens=dropped, dropped_articles=short)


def _unit(ids: np.ndarray, rows: int, article: int) -> Unit:
    """A target is the token after; the last one of a window is the first token of the next."""
    ids_N = torch.from_numpy(ids.astype(np.int64))
    return Unit(ids_N[:-1].view(rows, -1), ids_N[1:].view(rows, -1), article)


def dealt(units: Sequence[Unit], seed: int) -> dict[str, list[Unit]]:
    """Units by split, each in an order of its own; an article goes to one split as a whole."""
    articles = sorted({unit.article for unit in units})
    order = np.random.default_rng(seed).permutation(len(articles))
    ends = np.round(np.cumsum(list(SHARES.values())) * len(articles)).astype(int)
    splits: dict[str, list[Unit]] = {}
    for name, start, end in zip(SHARES, (0, *ends[:-1]), ends, strict=True):
        chosen = {articles[index] for index in order[start:end]}
        splits[name] = [unit for unit in units if unit.article in chosen]
        if not splits[name]:
            raise DataError(
                f"{len(articles)} articles or blocks, {len(units)} units, are too few to deal into "
                f"{', '.join(SHARES)}; name more --data"
            )
        np.random.default_rng(seed).shuffle(splits[name])
    return splits


# --- certificates ----------------------------------------------------------------------------------------------------

CANDIDATES = 24
"""Thresholds that are proposed: quantiles of the score on the fit split, besides "never". Each that is tested costs a
pass over the calibration text."""
ROWS = 64
"""Windows that are run at a time."""
ALIKE = 0.05
"""Level at which units of one article are called alike; shared by the rules that are asked."""
FULL_DEPTH = "full depth"


@dataclass(frozen=True)
class Losses:
    """What one threshold does to some units, against full depth."""

    delta_N: np.ndarray
    """ΔCE of each unit, nats a token; not clipped."""
    exits: Counter[int]
    """Tokens by the loop they left at."""
    loops_N: np.ndarray
    """Loops a token of each unit."""

    @property
    def mean_loops(self) -> float:
        """Loops a token."""
        return sum(k * count for k, count in self.exits.items()) / self.exits.total()


class Certifier:
    """One calibration: the model, the units of each split, and what was computed of them already."""

    def __init__(
        self, model: Cached, num_loops: int, splits: dict[str, list[Unit]], *, bound: float, fill: Fill, seed: int
    ) -> None:
        self.model, self.num_loops, self.splits = model, num_loops, splits
        self.bound, self.fill, self.seed = bound, fill, seed
        self.by_article = False
        """Whether an article, or a block, is one piece of evidence."""
        if isinstance(model, torch.nn.Module):
            model.eval()
        self.width = model.embed(splits["fit"][0].ids_BT[:1, :1].to(device_of(model))).h_BTD.shape[-1]
        self._proposed: dict[str, tuple[Rule, list[float]]] = {}
        self._known: dict[tuple[str, str, float], Losses] = {}
        everyone = Halting(Fixed(), float(num_loops))
        self._full = {name: self._ce(units, everyone)[0] for name, units in splits.items()}

    # --- on the fit split --------------------------------------------------------------------------------------------

    def fitted(self, kind: type[Rule], model: LoopedModel) -> Rule:
        """A rule of this kind for the model, fitted on half of the fit split's articles.

        Its thresholds come from the other half. Scores of tokens that a probe was fitted on spread further than those
        of new ones, so quantiles of them would propose thresholds that no new token reaches. The promise would hold
        all the same, since calibration text is neither; only the proposals would be poor.
        """
        texts = [unit.ids_BT for unit in self._halves()[0]]
        return kind.fitted(model, texts, self.num_loops, self.bound, seed=self.seed)

    def _halves(self) -> tuple[list[Unit], list[Unit]]:
        """The fit split in two, by article where there is more than one."""
        units = self.splits["fit"]
        articles = list(dict.fromkeys(unit.article for unit in units))
        if len(articles) < 2:
            return units[::2], units[1::2] or units
        first = set(articles[::2])
        return [each for each in units if each.article in first], [each for each in units if each.article not in first]

    def propose(self, rule: Rule) -> None:
        """A rule's thresholds, from full depth outwards, before any is tested: quantiles of its score."""
        if not rule.is_adaptive:
            self._proposed[rule.name] = rule, [float(k) for k in range(self.num_loops, 0, -1)]
            return
        units = self._halves()[1] if rule.is_fitted else self.splits["fit"]
        found = torch.cat([self._scores(unit, rule) for unit in units])
        finite = found[found.isfinite()].double().numpy()
        shares = np.linspace(1, 0, CANDIDATES + 1)[:-1]
        quantiles = np.unique(np.quantile(finite, shares))[::-1].tolist() if len(finite) else []
        self._proposed[rule.name] = rule, [math.inf, *quantiles]

    @torch.no_grad()
    def _scores(self, unit: Unit, rule: Rule) -> Tensor:
        """A rule's scores of all tokens that have a target, at all loops but the last, when nobody leaves."""
        found, counted_BT, device = list[Tensor](), unit.targets_BT != IGNORE_INDEX, device_of(self.model)

        class Noting(Rule):
            def score(self, look: Look) -> Tensor:
                found.append(rule.score(look).cpu()[counted_BT])
                return look.same(NEVER)

        never, ids_BT, targets_BT = Halting(Noting(), 0.0), unit.ids_BT.to(device), unit.targets_BT.to(device)
        halt_on_text(self.model, ids_BT, targets_BT, never, num_loops=self.num_loops)
        return torch.cat(found)

    def look_for_likeness(self) -> float:
        """Whether units of one article are alike, asked on the fit split at the middle threshold of every rule.

        The fit split is as good as any for that, and nothing of the calibration split is used up.
        """
        articles = [unit.article for unit in self.splits["fit"]]
        p_values = []
        for rule, thresholds in self._proposed.values():
            halting = Halting(rule, thresholds[len(thresholds) // 2], self.fill)
            p_values.append(alike(clipped(self._losses("fit", halting).delta_N, self.bound), articles, self.seed))
        self.by_article = min(p_values) <= ALIKE / len(p_values)
        return min(p_values)

    # --- on the other two --------------------------------------------------------------------------------------------

    def certified(self, rule: Rule, delta: float, verify: int, advance: OnProgress) -> Certificate:
        """Test a rule's thresholds from "never" outwards; stop at the first that is not rejected."""
        (_, thresholds), p_values = self._proposed[rule.name], []
        for number, threshold in enumerate(thresholds):
            share = number / len(thresholds) / (2 if verify else 1)
            advance(f"threshold {number + 1} of at most {len(thresholds)}", share)
            x_N = self._evidence("calibration", Halting(rule, threshold, self.fill))
            p_values.append(betting_p_value(x_N, self.bound, delta))
            if p_values[-1] > delta:
                break
        last = last_certified(p_values, delta)
        if last is None:
            return Certificate(
                rule=rule.name, threshold=None, p_value=p_values[0], hoeffding_bentkus=None, mean_loops=None,
                ppl_increase=None, clipped_above=0,
            )  # fmt: skip
        halting = Halting(rule, thresholds[last], self.fill)
        test, x_N = self._losses("test", halting), self._evidence("calibration", halting)
        test_N = self._evidence("test", halting)
        verified = self._verified(rule, thresholds, delta, verify, advance) if verify else None
        return Certificate(
            rule=rule.name,
            threshold=halting.threshold if math.isfinite(halting.threshold) else None,
            p_value=p_values[last],
            hoeffding_bentkus=hoeffding_bentkus_p_value(x_N, self.bound),
            mean_loops=test.mean_loops,
            ppl_increase=math.expm1(float(test.delta_N.mean())),
            clipped_above=int((x_N > CLIP * self.bound).sum()),
            clipped_ppl_increase=math.expm1(float(clipped(test_N, self.bound).mean())),
            test_clipped_above=int((test_N > CLIP * self.bound).sum()),
            exits={k: count / test.exits.total() for k, count in sorted(test.exits.items())},
            unit_loops=tuple(test.loops_N.tolist()),
            verified=verified,
        )

    def _verified(self, rule: Rule, thresholds: Sequence[float], delta: float, verify: int, advance: OnProgress) -> int:
        """How often a calibration on articles drawn again, with replacement, from calibration and test keeps its
        promise on all of them.

        Losses of a threshold are computed when the first draw gets that far, and once: draws run no model.
        """
        pool = [*self.splits["calibration"], *self.splits["test"]]
        homes = [unit.article for unit in pool]
        if self.by_article:
            members = [[index] for index in range(len(set(homes)))]
        else:
            members = [[index for index, home in enumerate(homes) if home == each] for each in dict.fromkeys(homes)]
        rows: list[np.ndarray] = []

        def row(index: int) -> np.ndarray:
            while len(rows) <= index:
                halting = Halting(rule, thresholds[len(rows)], self.fill)
                rows.append(np.concatenate([self._evidence(split, halting) for split in ("calibration", "test")]))
                share = (1 + len(rows) / len(thresholds)) / 2
                advance(f"verifying: threshold {len(rows)} of at most {len(thresholds)}", share)
            return rows[index]

        rng, held = np.random.default_rng(self.seed), 0
        size = len({unit.article for unit in self.splits["calibration"]})
        for _ in range(verify):
            drawn = np.concatenate([members[each] for each in rng.integers(len(members), size=size)])
            rng.shuffle(drawn)  # a bet should not know that the next unit is of the same article
            last = -1
            while last + 1 < len(thresholds) and betting_p_value(row(last + 1)[drawn], self.bound, delta) <= delta:
                last += 1
            held += last < 0 or float(clipped(rows[last], self.bound).mean()) <= self.bound
        return held

    def _evidence(self, split: str, halting: Halting) -> np.ndarray:
        """Losses as the test takes them: of units, or of articles."""
        delta_N = self._losses(split, halting).delta_N
        return article_means(delta_N, [unit.article for unit in self.splits[split]]) if self.by_article else delta_N

    def _losses(self, split: str, halting: Halting) -> Losses:
        key = (split, halting.rule.name, halting.threshold)
        if key not in self._known:
            ce_N, exits, loops_N = self._ce(self.splits[split], halting)
            self._known[key] = Losses(ce_N - self._full[split], exits, loops_N)
        return self._known[key]

    def _ce(self, units: Sequence[Unit], halting: Halting) -> tuple[np.ndarray, Counter[int], np.ndarray]:
        """Mean cross-entropy of each unit, where tokens left, and the mean loops of each unit."""
        device, exits = device_of(self.model), Counter[int]()
        at_once = max(1, ROWS // len(units[0].ids_BT))
        ces, loops = [], []
        for first in range(0, len(units), at_once):
            some = units[first : first + at_once]
            ids_BT = torch.cat([unit.ids_BT for unit in some]).to(device)
            targets_BT = torch.cat([unit.targets_BT for unit in some]).to(device)
            halted = halt_on_text(self.model, ids_BT, targets_BT, halting, num_loops=self.num_loops)
            counted_BT = targets_BT != IGNORE_INDEX
            counts_N = counted_BT.view(len(some), -1).sum(1)
            ces += ((halted.ce_BT.double() * counted_BT).view(len(some), -1).sum(1) / counts_N).tolist()
            loops += ((halted.exits_BT.double() * counted_BT).view(len(some), -1).sum(1) / counts_N).tolist()
            exits.update(halted.exits_BT[counted_BT].tolist())
        return np.array(ces), exits, np.array(loops)


def decoding_speeds(
    session: Certifier,
    model: LoopedModel,
    certificates: Sequence[Certificate],
    rules: Sequence[Rule],
    progress: OnProgress,
) -> dict[str, float]:
    """Tokens a second of decoding test windows at batch 1, by rule and at full depth; all take turns.

    The second half of a window is decoded after the first, its known tokens being fed one by one, so that tokens leave
    where the report says that they do; each round takes another window, the same for all.
    """
    cached, num_loops = session.model, session.num_loops
    windows = [row.tolist() for unit in session.splits["test"] for row in unit.ids_BT]

    def forced(make: Callable[[], Runner]) -> Callable[..., Iterator[None]]:
        turn = 0

        def way(model: LoopedModel, prompt: Sequence[int], num_loops: int, tokens: int) -> Iterator[None]:
            nonlocal turn
            ids, runner, half = windows[turn % len(windows)], make(), len(prompt)
            turn += 1
            runner.prefill([ids[:half]])
            yield
            for token in ids[half : half + tokens]:
                runner.step([0], [token])
                yield

        return way

    makers: dict[str, Callable[[], Runner]] = {FULL_DEPTH: lambda: CachedRunner(cached, num_loops)}
    for rule, each in zip(rules, certificates, strict=True):
        if each.is_certified:
            halting = Halting(rule, math.inf if each.threshold is None else each.threshold, session.fill)
            makers[each.rule] = lambda halting=halting: HaltingRunner(cached, num_loops, halting)  # type: ignore[misc]
    if len(makers) == 1:
        return {}
    prompt = windows[0][: len(windows[0]) // 2]
    timings = time_depths(
        model,
        prompt,
        [num_loops],
        tokens=min(TIMED_TOKENS, len(windows[0]) - len(prompt)),
        ways={name: forced(make) for name, make in makers.items()},
        progress=lambda what, share: progress(f"speed, {what}", share),
    )
    rates = {each.what.removeprefix(f"{DECODE}, "): each.tokens_per_second for each in timings}
    return {name: rate for name in makers if (rate := rates.get(name)) is not None}
