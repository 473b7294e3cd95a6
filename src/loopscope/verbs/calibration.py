"""`loopscope.calibrate`: a halting threshold with a bound on what it costs, certified on held-out text.

Text is cut into units of whole windows of one article (`verbs.units`), and articles are dealt to three splits: on *fit*
thresholds are proposed and a probe is fitted, on *calibration* thresholds are tested (`inference.calibration`), and
*test* shows what the certified one does. The promise is about teacher-forced text of the same kind.

Shape legend: N units, B rows, T tokens, K loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loopscope.errors import ConfigError
from loopscope.files import read_as, write_json
from loopscope.inference.calibration import (
    CLIP,
    alike,
    article_means,
    betting_p_value,
    clipped,
    failures_allowed,
    hoeffding_bentkus_p_value,
    last_certified,
    units_needed,
)
from loopscope.inference.decoding import CachedRunner, Runner, device_of
from loopscope.inference.halting import (
    FILLS,
    POLICY_VERSION,
    RULES,
    Fill,
    Fixed,
    Halting,
    HaltingRunner,
    Look,
    Probe,
    Rule,
    halt_on_text,
    rule_of,
)
from loopscope.inference.probes import fit_probe
from loopscope.inference.speed import DECODE, time_depths
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.protocol import Cached, ExitGate, LoopedModel, ProjectedKeys, run_loops
from loopscope.readings import Audit
from loopscope.results.thresholds import HALVED
from loopscope.targets import Opened, open_target
from loopscope.verbs.text import Say, with_tokenizer
from loopscope.verbs.units import UNIT_TOKENS, Homes, Unit, UnitText, dealt, units_of

CANDIDATES = 24
"""Thresholds that are proposed: quantiles of the score on the fit split, besides "never"."""
ROWS = 64
"""Windows that are run at a time."""
ALIKE = 0.05
"""Level at which units of one article are called alike; shared by the rules that are asked."""
TIMED_TOKENS = 32
"""Tokens that are decoded in each round of timing."""
FULL_DEPTH = "full depth"
CALIBRATION_VERSION = 1
"""Of calibration.json."""

OnProgress = Callable[[str, float], None]


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
    clipped_ppl_increase: float | None = None
    """The same of the clipped loss, which is what the promise is about: exp(mean x) − 1."""
    test_clipped_above: int = 0
    """Test units whose loss was clipped from above."""
    exits: dict[int, float] = field(default_factory=dict)
    """Share of the test tokens that left at each loop."""
    unit_loops: tuple[float, ...] = ()
    """Loops a token of each test unit: what an interval of `mean_loops` is made from."""
    tokens_per_second: float | None = None
    """Of decoding test text at batch 1 under this rule; None where it was not timed."""
    verified: int | None = None
    """Of so many recalibrations, how many held."""
    passed: bool | None = None
    """Whether no more failed than chance explains."""


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
    """Pieces of evidence (see `evidence`) below which nothing can be promised."""
    fixed: Certificate
    """The smallest fixed depth that is certified at the same bound."""
    certificates: list[Certificate]
    """One for every rule that was asked for."""
    notes: tuple[str, ...] = ()
    homes: Homes = "block"
    """What units are parts of: articles, blocks where articles are unknown, or nothing (instances of a task)."""
    articles: dict[str, int] = field(default_factory=dict)
    """Articles or blocks by split."""
    dropped_tokens: int = 0
    dropped_articles: int = 0
    """Ends of articles, and articles, that are no whole unit."""
    evidence: str = "unit"
    """What one loss is the mean of: a unit; or all units of an article (or block), where those are alike."""
    alike_p_value: float | None = None
    """Of "units of one article are no more alike than others", on the fit split; the smallest of all rules."""
    units_needed_hoeffding_bentkus: int | None = None
    """What `units_needed` would be by the bound that is not used."""
    fill: Fill = "copy"
    """What a token that has left shows at deeper loops."""
    scale_ratio: float | None = None
    """s_K / s_1 of the state, by the run's audit where there is one."""
    tokens_per_second: float | None = None
    """Of decoding the same test text at full depth, in turns with the rules; None where it was not timed."""
    verify: int = 0
    """Recalibrations that were asked for."""
    failures_allowed: int | None = None
    """Of those, how many may fail by chance."""
    width: int | None = None
    """Of the state."""
    step: int | None = None
    """Training steps behind the weights; None where they are not known."""
    probe: Probe | None = field(default=None, repr=False)
    """The probe that was fitted, where that rule was asked for."""
    run: Path | None = field(default=None, repr=False)
    """The run folder that stands at these weights, where it may keep what was found."""

    @property
    def best(self) -> Certificate | None:
        """The certificate with the fewest loops on the test split."""
        made = [each for each in self.certificates if each.threshold is not None]
        return min(made, key=lambda each: each.mean_loops or math.inf) if made else None

    @property
    def calibration_evidence(self) -> int:
        """Losses that the promise rests on."""
        return (self.units if self.evidence == "unit" else self.articles)["calibration"]

    def saved_beyond_fixed(self, certificate: Certificate) -> float | None:
        """Loops a token that a rule saves beyond the smallest certified fixed depth: what is adaptive about it."""
        if certificate.mean_loops is None or self.fixed.mean_loops is None:
            return None
        return self.fixed.mean_loops - certificate.mean_loops

    def keep(self) -> Path | None:
        """Leave it in the calibration.json of the run, for reports, and say where; None where there is no such run."""
        if self.run is None:
            return None
        write_json(self.run / "calibration.json", {"schema_version": CALIBRATION_VERSION, **self.to_json()})
        return self.run / "calibration.json"

    def to_json(self) -> dict[str, Any]:
        """What --json prints; the weights of a probe are in its policy alone."""
        plain = asdict(replace(self, probe=None, run=None))
        plain = {name: value for name, value in plain.items() if name not in ("probe", "run")}
        return {**plain, "saved": [self.saved_beyond_fixed(each) for each in self.certificates]}


def calibrate(
    target: str | Path | Opened,
    *,
    rules: Sequence[str | Rule] = ("margin",),
    max_ppl_increase: float = 0.01,
    confidence: float = 0.95,
    data: Sequence[str] | None = None,
    tokenizer: str | None = None,
    max_units: int | None = 400,
    unit_tokens: int = UNIT_TOKENS,
    fill: str = "copy",
    verify: int = 0,
    speed: bool = False,
    seed: int = 0,
    say: Say = lambda text: None,
    progress: OnProgress = lambda what, share: None,
) -> Calibration:
    """The furthest threshold of each rule that costs at most `max_ppl_increase` with this confidence.

    A rule is named, or one of your own that was fitted on other text. Several rules share δ equally, so that all their
    promises hold at once and any of them may be chosen. `verify` recalibrates so often on articles drawn again from
    calibration and test, and counts how often the promise held. `speed` times decoding of test text under every
    certified rule and at full depth, in turns.
    """
    if not 0 < max_ppl_increase < math.inf:
        raise ConfigError.of("max_ppl_increase", max_ppl_increase, "must be above 0, as 0.01 for 1 %")
    if not rules:
        raise ConfigError.of("rule", rules, f"name at least one of {', '.join((*RULES, Probe.name))}, or all")
    if not 0.5 <= confidence < 1:
        raise ConfigError.of("confidence", confidence, "must be at least 0.5 and below 1")
    if unit_tokens < 1:
        raise ConfigError.of("unit_tokens", unit_tokens, "must be at least 1")
    chosen = next((each for each in FILLS if each == fill), None)
    if chosen is None:
        raise ConfigError.of("fill", fill, f"expected one of {', '.join(FILLS)}")
    opened = with_tokenizer(open_target(target), tokenizer)
    model, num_loops = Cached.needed(opened.model, "halting on known text"), opened.model.num_loops
    if chosen == "project":
        ProjectedKeys.needed(model, "the fill project")
    if num_loops < 2:
        raise ConfigError(f"{opened.name} has one loop: there is none to leave out")
    names: list[str | Rule] = [*all_rules(opened)] if "all" in rules else list(dict.fromkeys(rules))
    plain = {rule: rule if isinstance(rule, Rule) else rule_of(rule, "rule") for rule in names if rule != Probe.name}
    text = units_of(opened, data, max_units, say, unit_tokens=unit_tokens, seed=seed)
    splits = dealt(text.units, seed)
    bound, delta = math.log1p(max_ppl_increase), (1 - confidence) / len(names)
    if isinstance(model, torch.nn.Module):
        model.eval()
    session = _Session(model, num_loops, splits, bound, chosen, verify, seed)
    probe = session.probe(opened.model) if Probe.name in names else None
    everything: list[tuple[Rule, float]] = [(Fixed(), 1 - confidence)]
    everything += [(probe if name == Probe.name and probe is not None else plain[name], delta) for name in names]
    for rule, _ in everything:
        session.propose(rule)
    alike_p = session.look_for_likeness() if text.homes != "instances" else None
    certificates = []
    for number, (rule, level) in enumerate(everything):

        def advance(what: str, share: float, rule: Rule = rule, number: int = number) -> None:
            progress(f"{rule.name}, {what}", (number + share) / len(everything))

        certificates.append(session.certified(rule, level, advance))
    allowed = failures_allowed(verify, confidence) if verify else None
    certificates = [
        each if each.verified is None or allowed is None else replace(each, passed=verify - each.verified <= allowed)
        for each in certificates
    ]
    speeds = (
        _speeds(session, certificates, {rule.name: rule for rule, _ in everything}, opened, progress) if speed else {}
    )
    certificates = [replace(each, tokens_per_second=speeds.get(each.rule)) for each in certificates]
    ratio, whose = _scale_ratio(opened, session)
    return Calibration(
        target=opened.name,
        num_loops=num_loops,
        max_ppl_increase=max_ppl_increase,
        confidence=confidence,
        units={name: len(units) for name, units in splits.items()},
        unit_tokens=text.unit_tokens,
        units_needed=units_needed(bound, delta),
        fixed=certificates[0],
        certificates=certificates[1:],
        notes=tuple(_notes(text, session, [rule for rule, _ in everything], ratio, whose)),
        homes=text.homes,
        articles={name: len({unit.article for unit in units}) for name, units in splits.items()},
        dropped_tokens=text.dropped_tokens,
        dropped_articles=text.dropped_articles,
        evidence=text.homes if session.by_article else "unit",
        alike_p_value=alike_p,
        units_needed_hoeffding_bentkus=units_needed(bound, delta, hoeffding_bentkus_p_value),
        fill=chosen,
        scale_ratio=ratio,
        tokens_per_second=speeds.get(FULL_DEPTH),
        verify=verify,
        failures_allowed=allowed,
        width=session.width,
        step=opened.step,
        probe=probe,
        run=_keeping(opened),
    )


def _keeping(opened: Opened) -> Path | None:
    """The folder that may keep a calibration: a run's, of what it stands at, and not a row of a grid."""
    run = opened.run
    return run.path if run is not None and opened.is_newest and not (run.path / "row.json").exists() else None


def _notes(text: UnitText, session: _Session, rules: Sequence[Rule], ratio: float, whose: str) -> Iterator[str]:
    """What a reader of the promise should know."""
    if text.homes == "block":
        yield "articles of the text are not known: blocks of neighbouring units stand in for them"
    if text.dropped_tokens:
        short = f", among them {text.dropped_articles:,} articles shorter than a unit" if text.dropped_articles else ""
        yield f"{text.dropped_tokens:,} tokens are left out: ends of articles that are no whole unit{short}"
    if session.by_article:
        yield (
            f"units of one {text.homes} are alike on the fit split: each {text.homes} counts as one unit, and the "
            f"promise is about the mean over {text.homes}s"
        )
    divided = [rule.name for rule in rules if rule.divides_by_norm]
    if divided and not HALVED < ratio < 1 / HALVED:
        yield (
            f"{' and '.join(divided)} divide by ‖h‖ and take growth for convergence, and here the scale drifts: "
            f"s_K/s_1 = {ratio:.3g} {whose}"
        )


def _scale_ratio(opened: Opened, session: _Session) -> tuple[float, str]:
    """s_K/s_1 by the audit of these weights where the run folder has one, else measured on a unit; and whose word."""
    audit = None if opened.run is None else read_as(opened.run.path / "audit.json", Audit.from_json, {})
    if audit is not None and audit.step == opened.step:
        scales = [audit.loops[k].scale for k in (1, session.num_loops) if k in audit.loops]
        if len(scales) == 2 and scales[0] and scales[1]:
            return scales[1] / scales[0], "in this run's audit"
    with torch.no_grad():
        ids_BT = session.splits["fit"][0].ids_BT.to(device_of(session.model))
        states = run_loops(opened.model, ids_BT, num_loops=session.num_loops).states
    first, last = (states[k].h_BTD.float().square().mean(-1).sqrt().mean() for k in (1, session.num_loops))
    return float(last / first), "on a unit of the fit split"


@dataclass
class _Session:
    """One calibration: the model, the units of each split, and what was computed of them already."""

    model: Cached
    num_loops: int
    splits: dict[str, list[Unit]]
    bound: float
    fill: Fill
    verify: int
    seed: int
    by_article: bool = False
    """Whether an article, or a block, is one piece of evidence."""
    width: int = 0

    def __post_init__(self) -> None:
        ids_BT = self.splits["fit"][0].ids_BT[:1, :1].to(device_of(self.model))
        self.width = self.model.embed(ids_BT).h_BTD.shape[-1]
        self._proposed: dict[str, tuple[Rule, list[float]]] = {}
        self._known: dict[tuple[str, str, float], Losses] = {}
        everyone = Halting(Fixed(), float(self.num_loops))
        self._full = {name: self._ce(units, everyone)[0] for name, units in self.splits.items()}

    # --- on the fit split --------------------------------------------------------------------------------------------

    def probe(self, model: LoopedModel) -> Probe:
        """A probe fitted on half of the fit split's articles.

        Its thresholds come from the other half. Scores of tokens that a probe was fitted on spread further than those
        of new ones, so quantiles of them would propose thresholds that no new token reaches. The promise would hold
        all the same, since calibration text is neither; only the proposals would be poor.
        """
        texts = [unit.ids_BT for unit in self._halves()[0]]
        return fit_probe(model, texts, self.num_loops, self.bound, seed=self.seed)

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
        if isinstance(rule, Fixed):
            self._proposed[rule.name] = rule, [float(k) for k in range(self.num_loops, 0, -1)]
            return
        units = self._halves()[1] if isinstance(rule, Probe) else self.splits["fit"]
        found = torch.cat([_scores(self.model, unit, rule, self.num_loops) for unit in units])
        finite = found[found.isfinite()].double().numpy()
        shares = np.linspace(1, 0, CANDIDATES + 1)[:-1]
        quantiles = np.unique(np.quantile(finite, shares))[::-1].tolist() if len(finite) else []
        self._proposed[rule.name] = rule, [math.inf, *quantiles]

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

    def certified(self, rule: Rule, delta: float, advance: OnProgress) -> Certificate:
        """Test a rule's thresholds from "never" outwards; stop at the first that is not rejected."""
        (_, thresholds), p_values = self._proposed[rule.name], []
        for number, threshold in enumerate(thresholds):
            share = number / len(thresholds) / (2 if self.verify else 1)
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
        return Certificate(
            rule=rule.name,
            threshold=thresholds[last],
            p_value=p_values[last],
            hoeffding_bentkus=hoeffding_bentkus_p_value(x_N, self.bound),
            mean_loops=test.mean_loops,
            ppl_increase=math.expm1(float(test.delta_N.mean())),
            clipped_above=int((x_N > CLIP * self.bound).sum()),
            clipped_ppl_increase=math.expm1(float(clipped(test_N, self.bound).mean())),
            test_clipped_above=int((test_N > CLIP * self.bound).sum()),
            exits={k: count / test.exits.total() for k, count in sorted(test.exits.items())},
            unit_loops=tuple(test.loops_N.tolist()),
            verified=self._verified(rule, thresholds, delta, advance) if self.verify else None,
        )

    def _verified(self, rule: Rule, thresholds: Sequence[float], delta: float, advance: OnProgress) -> int:
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
        for _ in range(self.verify):
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


@torch.no_grad()
def _scores(model: Cached, unit: Unit, rule: Rule, num_loops: int) -> Tensor:
    """A rule's scores of all tokens that have a target, at all loops but the last, when nobody leaves."""
    found, counted_BT = [], unit.targets_BT != IGNORE_INDEX

    class Noting(Rule):
        name = rule.name

        def score(self, look: Look) -> Tensor:
            found.append(rule.score(look).cpu()[counted_BT])
            return torch.full(look.state.h_BTD.shape[:2], -math.inf, device=look.state.h_BTD.device)

    device = device_of(model)
    halt_on_text(model, unit.ids_BT.to(device), unit.targets_BT.to(device), Halting(Noting(), 0.0), num_loops=num_loops)
    return torch.cat(found)


def _speeds(
    session: _Session,
    certificates: Sequence[Certificate],
    rules: dict[str, Rule],
    opened: Opened,
    progress: OnProgress,
) -> dict[str, float]:
    """Tokens a second of decoding test windows at batch 1, by rule and at full depth; all take turns.

    The second half of a window is decoded after the first, its known tokens being fed one by one, so that tokens leave
    where the report says that they do; each round takes another window, the same for all.
    """
    model, num_loops = session.model, session.num_loops
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

    if all(each.threshold is None for each in certificates):
        return {}
    makers: dict[str, Callable[[], Runner]] = {FULL_DEPTH: lambda: CachedRunner(model, num_loops)}
    for each in certificates:
        if each.threshold is not None:
            halting = Halting(rules[each.rule], each.threshold, session.fill)
            makers[each.rule] = lambda halting=halting: HaltingRunner(model, num_loops, halting)  # type: ignore[misc]
    prompt = windows[0][: len(windows[0]) // 2]
    timings = time_depths(
        opened.model,
        prompt,
        [num_loops],
        tokens=min(TIMED_TOKENS, len(windows[0]) - len(prompt)),
        ways={name: forced(make) for name, make in makers.items()},
        progress=lambda what, share: progress(f"speed, {what}", share),
    )
    rates = {each.what.removeprefix(f"{DECODE}, "): each.tokens_per_second for each in timings}
    return {name: rate for name in makers if (rate := rates.get(name)) is not None}


def all_rules(opened: Opened) -> list[str]:
    """Rules that a model can be asked about, fixed depth aside."""
    has_gate = ExitGate.of(opened.model) is not None
    return [*(name for name in RULES if name != "fixed" and (name != "gate" or has_gate)), Probe.name]


ABOUT = {
    "article": "in articles",
    "block": "in blocks, articles being unknown",
    "instances": "of this task, answers only",
}
"""What a promise says of where its units come from."""


def to_policy(calibration: Calibration, certificate: Certificate) -> dict[str, Any]:
    """What a policy file holds."""
    assert certificate.threshold is not None
    about = f"teacher-forced text of the same kind, {ABOUT[calibration.homes]}"
    if calibration.evidence != "unit":
        about += f", each {calibration.evidence} counting once"
    if certificate.clipped_above:
        about += f"; the loss of a unit clipped to {CLIP:g} times the bound"
    probe = calibration.probe if certificate.rule == Probe.name else None
    return {
        "schema_version": POLICY_VERSION,
        "rule": certificate.rule,
        "threshold": certificate.threshold if math.isfinite(certificate.threshold) else None,
        "fill": calibration.fill,
        "num_loops": calibration.num_loops,
        "width": calibration.width,
        "target": calibration.target,
        "promise": {
            "max_ppl_increase": calibration.max_ppl_increase,
            "confidence": calibration.confidence,
            "units": calibration.calibration_evidence,
            "unit_tokens": calibration.unit_tokens,
            "clipped_above": certificate.clipped_above,
            "about": about,
        },
        "test": {"mean_loops": certificate.mean_loops, "ppl_increase": certificate.ppl_increase},
        "fixed_depth": calibration.fixed.threshold,
        **({} if probe is None else {"probe": {"weights": probe.weights_KD, "biases": probe.biases_K}}),
    }
