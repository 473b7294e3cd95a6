"""`loopscope.calibrate`: a halting threshold with a bound on what it costs, certified on held-out text.

Text is cut into units of whole windows, units into blocks of neighbouring units, and blocks are dealt to three splits:
on *fit* thresholds are proposed, on *calibration* they are tested (`inference.calibration`), and *test* shows what the
certified one does. Neighbouring units are alike, so blocks and not units are dealt. Of a task a unit is a fixed number
of instances, and only answers count. The promise is about teacher-forced text of the same kind.

Shape legend: N units, B rows, T tokens, K loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopscope.data.stream import evaluation_batches
from loopscope.data.tasks import TaskText
from loopscope.errors import ConfigError, DataError
from loopscope.inference.calibration import (
    CLIP,
    betting_p_value,
    clipped,
    hoeffding_bentkus_p_value,
    last_certified,
    units_needed,
)
from loopscope.inference.decoding import device_of
from loopscope.inference.halting import (
    POLICY_VERSION,
    RULES,
    Fixed,
    Halting,
    Look,
    Rule,
    halt_on_text,
    rule_of,
)
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.protocol import Cached, ExitGate
from loopscope.targets import Opened, open_target
from loopscope.verbs.text import Say, tokens_for, with_tokenizer

UNIT_TOKENS = 512
"""Tokens of a unit, as whole windows."""
UNIT_INSTANCES = 8
"""Instances of a unit of a task."""
BLOCK_UNITS = 4
"""Units of a block."""
SHARES = {"fit": 0.2, "calibration": 0.5, "test": 0.3}
"""How blocks are dealt."""
CANDIDATES = 24
"""Thresholds that are proposed: quantiles of the score on the fit split, besides "never"."""
ROWS = 64
"""Windows that are run at a time."""

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True)
class Unit:
    """Neighbouring windows of one text."""

    ids_BT: Tensor
    targets_BT: Tensor
    block: int


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


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The furthest threshold of one rule whose cost is certified, and what it does on text it was not chosen on."""

    rule: str
    threshold: float | None
    """None: nothing is certified, not even full depth; there are too few units."""
    p_value: float | None
    hoeffding_bentkus: float | None
    mean_loops: float | None
    """On the test split."""
    ppl_increase: float | None
    """On the test split, unclipped: exp(mean ΔCE) − 1."""
    clipped_above: int
    """Calibration units whose loss was clipped from above: the promise is then about the clipped loss."""
    exits: dict[int, float] = field(default_factory=dict)
    """Share of the test tokens that left at each loop."""
    unit_loops: tuple[float, ...] = ()
    """Loops a token of each test unit: what an interval of `mean_loops` is made from."""
    verified: int | None = None
    """Of so many recalibrations, how many held."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `loopscope calibrate` found."""

    target: str
    num_loops: int
    max_ppl_increase: float
    confidence: float
    units: dict[str, int]
    """By split."""
    unit_tokens: int
    units_needed: int
    """Calibration units below which nothing can be promised."""
    fixed: Certificate
    """The smallest fixed depth that is certified at the same bound."""
    certificates: list[Certificate]
    """One for every rule that was asked for."""
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Certificate | None:
        """The certificate with the fewest loops on the test split."""
        made = [each for each in self.certificates if each.threshold is not None]
        return min(made, key=lambda each: each.mean_loops or math.inf) if made else None

    def saved_beyond_fixed(self, certificate: Certificate) -> float | None:
        """Loops a token that a rule saves beyond the smallest certified fixed depth: what is adaptive about it."""
        if certificate.mean_loops is None or self.fixed.mean_loops is None:
            return None
        return self.fixed.mean_loops - certificate.mean_loops


def calibrate(
    target: str | Path | Opened,
    *,
    rules: Sequence[str | Rule] = ("margin",),
    max_ppl_increase: float = 0.01,
    confidence: float = 0.95,
    data: Sequence[str] | None = None,
    tokenizer: str | None = None,
    max_units: int | None = 400,
    verify: int = 0,
    seed: int = 0,
    say: Say = lambda text: None,
    progress: OnProgress = lambda what, share: None,
) -> Calibration:
    """The furthest threshold of each rule that costs at most `max_ppl_increase` with this confidence.

    A rule is named, or one of your own that was fitted on other text than this. Several rules share δ equally, so that
    the best of them may be chosen. `verify` recalibrates so often on blocks drawn again from calibration and test, and
    counts how often the promise held.
    """
    if not 0 < max_ppl_increase < math.inf:
        raise ConfigError.of("max_ppl_increase", max_ppl_increase, "must be above 0, as 0.01 for 1 %")
    if not rules:
        raise ConfigError.of("rule", rules, f"name at least one of {', '.join(RULES)}, or all")
    if not 0.5 <= confidence < 1:
        raise ConfigError.of("confidence", confidence, "must be at least 0.5 and below 1")
    opened = with_tokenizer(open_target(target), tokenizer)
    model = Cached.needed(opened.model, "halting on known text")
    names = all_rules(opened) if "all" in rules else list(dict.fromkeys(rules))
    made = [rule if isinstance(rule, Rule) else rule_of(rule) for rule in names]
    splits = dealt(_units(opened, data, max_units, say), seed)
    bound, delta = math.log1p(max_ppl_increase), (1 - confidence) / len(made)
    session = _Session(model, opened.model.num_loops, splits, bound, verify, seed)
    everything = [(Fixed(), 1 - confidence), *((rule, delta) for rule in made)]
    certificates = []
    for number, (rule, level) in enumerate(everything):
        certificates.append(session.certified(rule, level))
        progress(rule.name, (number + 1) / len(everything))
    notes = ["articles of the text are not known: blocks of neighbouring units stand in for them"]
    if any(rule.divides_by_norm for rule in made):
        notes.append("a rule that divides by ‖h‖ takes growth of the scale for convergence: audit the model first")
    return Calibration(
        target=opened.name,
        num_loops=opened.model.num_loops,
        max_ppl_increase=max_ppl_increase,
        confidence=confidence,
        units={name: len(units) for name, units in splits.items()},
        unit_tokens=splits["fit"][0].ids_BT.numel(),
        units_needed=units_needed(bound, delta),
        fixed=certificates[0],
        certificates=certificates[1:],
        notes=tuple(notes),
    )


@dataclass
class _Session:
    """One calibration: the model, the units of each split, and what was computed of them already."""

    model: Cached
    num_loops: int
    splits: dict[str, list[Unit]]
    bound: float
    verify: int
    seed: int

    def __post_init__(self) -> None:
        everyone = Halting(Fixed(), float(self.num_loops))
        self._full = {name: self._ce(units, everyone)[0] for name, units in self.splits.items()}

    def certified(self, rule: Rule, delta: float) -> Certificate:
        """Test a rule's thresholds from "never" outwards; stop at the first that is not rejected."""
        thresholds = self._thresholds(rule)
        losses, p_values = [], []
        for threshold in thresholds:
            losses.append(self._losses("calibration", Halting(rule, threshold)))
            p_values.append(betting_p_value(losses[-1].delta_N, self.bound, delta))
            if p_values[-1] > delta and not self.verify:
                break
        last = last_certified(p_values, delta)
        if last is None:
            return Certificate(
                rule=rule.name, threshold=None, p_value=p_values[0], hoeffding_bentkus=None, mean_loops=None,
                ppl_increase=None, clipped_above=0,
            )  # fmt: skip
        test = self._losses("test", Halting(rule, thresholds[last]))
        return Certificate(
            rule=rule.name,
            threshold=thresholds[last],
            p_value=p_values[last],
            hoeffding_bentkus=hoeffding_bentkus_p_value(losses[last].delta_N, self.bound),
            mean_loops=test.mean_loops,
            ppl_increase=math.expm1(float(test.delta_N.mean())),
            clipped_above=int((losses[last].delta_N > CLIP * self.bound).sum()),
            exits={k: count / test.exits.total() for k, count in sorted(test.exits.items())},
            unit_loops=tuple(test.loops_N.tolist()),
            verified=self._verified(rule, thresholds, losses, delta) if self.verify else None,
        )

    def _thresholds(self, rule: Rule) -> list[float]:
        """From full depth outwards."""
        if isinstance(rule, Fixed):
            return [float(k) for k in range(self.num_loops, 0, -1)]
        found = torch.cat([_scores(self.model, unit, rule, self.num_loops) for unit in self.splits["fit"]])
        found = found[found.isfinite()].double()
        shares = torch.linspace(1, 0, CANDIDATES + 1, dtype=torch.float64)[:-1]
        return [math.inf, *torch.quantile(found, shares).unique().flip(0).tolist()]

    def _losses(self, split: str, halting: Halting) -> Losses:
        ce_N, exits, loops_N = self._ce(self.splits[split], halting)
        return Losses(ce_N - self._full[split], exits, loops_N)

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

    def _verified(self, rule: Rule, thresholds: Sequence[float], losses: Sequence[Losses], delta: float) -> int:
        """How often a calibration on blocks drawn again, with replacement, from calibration and test keeps its promise
        on all of them."""
        pool = [*self.splits["calibration"], *self.splits["test"]]
        table = [
            np.concatenate([calibrated.delta_N, self._losses("test", Halting(rule, threshold)).delta_N])
            for threshold, calibrated in zip(thresholds, losses, strict=True)
        ]
        members: dict[int, list[int]] = {}
        for index, unit in enumerate(pool):
            members.setdefault(unit.block, []).append(index)
        blocks, rng, held = list(members.values()), np.random.default_rng(self.seed), 0
        size = len({unit.block for unit in self.splits["calibration"]})
        truth = [float(clipped(row, self.bound).mean()) for row in table]
        for _ in range(self.verify):
            drawn = np.concatenate([blocks[block] for block in rng.integers(len(blocks), size=size)])
            last = last_certified([betting_p_value(row[drawn], self.bound, delta) for row in table], delta)
            held += last is None or truth[last] <= self.bound
        return held


def dealt(units: Sequence[Unit], seed: int) -> dict[str, list[Unit]]:
    """Units by split; a block goes to one split as a whole."""
    blocks = sorted({unit.block for unit in units})
    order = np.random.default_rng(seed).permutation(len(blocks))
    ends = np.round(np.cumsum(list(SHARES.values())) * len(blocks)).astype(int)
    splits: dict[str, list[Unit]] = {}
    for name, start, end in zip(SHARES, (0, *ends[:-1]), ends, strict=True):
        chosen = {blocks[index] for index in order[start:end]}
        splits[name] = [unit for unit in units if unit.block in chosen]
        if not splits[name]:
            raise DataError(
                f"{len(units)} units of text are too few to deal into {', '.join(SHARES)}; name more --data"
            )
        np.random.default_rng(seed).shuffle(splits[name])
    return splits


def _units(opened: Opened, data: Sequence[str] | None, max_units: int | None, say: Say) -> list[Unit]:
    """Whole units of the text, in its order; what is left over is dropped."""
    tokens, length = tokens_for(opened, data, say), opened.sequence_length
    is_task = isinstance(tokens, TaskText)
    rows = UNIT_INSTANCES if is_task else max(1, UNIT_TOKENS // length)
    units: list[Unit] = []
    for ids_BT, targets_BT in evaluation_batches(tokens, length, rows):
        is_whole = len(ids_BT) == rows and (is_task or bool((targets_BT != IGNORE_INDEX).all()))
        if not is_whole or len(units) == max_units:
            break
        units.append(Unit(ids_BT, targets_BT, block=len(units) // BLOCK_UNITS))
    if not units:
        raise DataError(f"the text has less than one unit ({rows} rows of {length} tokens)")
    return units


@torch.no_grad()
def _scores(model: Cached, unit: Unit, rule: Rule, num_loops: int) -> Tensor:
    """A rule's scores of all tokens at all loops but the last, when nobody leaves."""
    found = []

    class Noting(Rule):
        name = rule.name

        def score(self, look: Look) -> Tensor:
            found.append(rule.score(look).flatten().cpu())
            return torch.full(look.state.h_BTD.shape[:2], -math.inf, device=look.state.h_BTD.device)

    device = device_of(model)
    halt_on_text(model, unit.ids_BT.to(device), unit.targets_BT.to(device), Halting(Noting(), 0.0), num_loops=num_loops)
    return torch.cat(found)


def all_rules(opened: Opened) -> list[str]:
    """Rules that a model can be asked about, fixed depth aside."""
    return [name for name in RULES if name != "fixed" and (name != "gate" or ExitGate.of(opened.model) is not None)]


def to_policy(calibration: Calibration, certificate: Certificate) -> dict[str, Any]:
    """What a policy file holds."""
    assert certificate.threshold is not None
    return {
        "schema_version": POLICY_VERSION,
        "rule": certificate.rule,
        "threshold": certificate.threshold if math.isfinite(certificate.threshold) else None,
        "num_loops": calibration.num_loops,
        "target": calibration.target,
        "promise": {
            "max_ppl_increase": calibration.max_ppl_increase,
            "confidence": calibration.confidence,
            "units": calibration.units["calibration"],
            "unit_tokens": calibration.unit_tokens,
            "clipped_above": certificate.clipped_above,
            "about": "teacher-forced text of the same kind, in blocks, articles being unknown",
        },
        "test": {"mean_loops": certificate.mean_loops, "ppl_increase": certificate.ppl_increase},
        "fixed_depth": calibration.fixed.threshold,
    }
