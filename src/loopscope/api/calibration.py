"""`loopscope.calibrate`: a halting threshold with a bound on what it costs, certified on held-out text.

Text is cut into units of whole windows of one article, articles are dealt to three splits, and each rule's thresholds
are proposed, tested and shown on one of them (`inference.certification`). The promise is about teacher-forced text of
the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loopscope.data.corpora import joined
from loopscope.data.stream import evaluation_batches
from loopscope.data.task import TaskText
from loopscope.errors import ConfigError, DataError
from loopscope.inference.calibration import CLIP, failures_allowed, hoeffding_bentkus_p_value, units_needed
from loopscope.inference.certification import (
    FULL_DEPTH,
    UNIT_INSTANCES,
    UNIT_TOKENS,
    Certifier,
    Unit,
    UnitText,
    dealt,
    decoding_speeds,
    in_blocks,
    of_articles,
)
from loopscope.inference.costs import OnProgress
from loopscope.inference.decoding import device_of
from loopscope.inference.rules import Fixed, Probe, Rule, rule_named, rules_for
from loopscope.options import CalibrateOptions, chosen
from loopscope.protocol import Cached, ProjectedKeys, run_loops
from loopscope.results.audit import AuditResult
from loopscope.results.halting import Calibration, Certificate, OnTest, Policy, Promise
from loopscope.results.record import read_record, write_record
from loopscope.results.thresholds import HALVED
from loopscope.targets import Opened, Say, corpus_for, open_target, tokens_for, with_tokenizer

ABOUT = {
    "article": "in articles",
    "block": "in blocks, articles being unknown",
    "instances": "of this task, answers only",
}
"""What a promise says of where its units come from."""


def calibrate(
    target: str | Path | Opened,
    options: CalibrateOptions | None = None,
    *,
    say: Say = lambda text: None,
    progress: OnProgress = lambda what, share: None,
    **fields: Any,
) -> Calibration:
    """The furthest threshold of each rule that costs at most so much perplexity, with so much confidence.

    `fields` are those of CalibrateOptions. A rule is named, or one of your own that was fitted on other text. Several
    rules share δ equally, so that all their promises hold at once and any of them may be chosen.
    """
    options = chosen(CalibrateOptions(), options, fields)
    fill, verify, seed = options.fill, options.verify, options.seed
    opened = with_tokenizer(open_target(target), options.tokenizer)
    model, num_loops = Cached.needed(opened.model, "halting on known text"), opened.model.num_loops
    if fill == "project":
        ProjectedKeys.needed(model, "the fill project")
    if num_loops < 2:
        raise ConfigError(f"{opened.name} has one loop: there is none to leave out")
    asked = rules_for(opened.model) if "all" in options.rules else list(dict.fromkeys(options.rules))
    kinds = [rule if isinstance(rule, Rule) else rule_named(rule, "rule") for rule in asked]
    text = units_of(opened, options.data, options.max_units, say, unit_tokens=options.unit_tokens, seed=seed)
    splits = dealt(text.units, seed)
    bound, delta = math.log1p(options.max_ppl_increase), (1 - options.confidence) / len(kinds)
    session = Certifier(model, num_loops, splits, bound=bound, fill=fill, seed=seed)
    made = [rule if isinstance(rule, Rule) else session.fitted(rule, opened.model) for rule in kinds]
    everything = [Fixed(), *made]
    for rule in everything:
        session.propose(rule)
    alike_p = session.look_for_likeness() if text.homes != "instances" else None
    allowed, certificates = failures_allowed(verify, options.confidence) if verify else None, list[Certificate]()
    for number, rule in enumerate(everything):

        def advance(what: str, share: float, rule: Rule = rule, number: int = number) -> None:
            progress(f"{rule.name}, {what}", (number + share) / len(everything))

        # The fixed depth is no choice among rules: it has the whole of 1 − confidence to itself.
        found = session.certified(rule, delta if number else 1 - options.confidence, verify, advance)
        if found.verified is not None and allowed is not None:
            found = replace(found, passed=verify - found.verified <= allowed)
        certificates.append(found)
    speeds = decoding_speeds(session, opened.model, certificates, everything, progress) if options.speed else {}
    fixed, *certificates = (replace(each, tokens_per_second=speeds.get(each.rule)) for each in certificates)
    ratio, whose = _scale_ratio(opened, session)
    calibration = Calibration(
        target=opened.name,
        num_loops=num_loops,
        max_ppl_increase=options.max_ppl_increase,
        confidence=options.confidence,
        units={name: len(units) for name, units in splits.items()},
        unit_tokens=text.unit_tokens,
        units_needed=units_needed(bound, delta),
        fixed=fixed,
        certificates=tuple(certificates),
        notes=tuple(_notes(text, session, everything, ratio, whose)),
        homes=text.homes,
        articles={name: len({unit.article for unit in units}) for name, units in splits.items()},
        dropped_tokens=text.dropped_tokens,
        dropped_articles=text.dropped_articles,
        evidence=text.homes if session.by_article else "unit",
        alike_p_value=alike_p,
        units_needed_hoeffding_bentkus=units_needed(bound, delta, hoeffding_bentkus_p_value),
        fill=fill,
        scale_ratio=ratio,
        tokens_per_second=speeds.get(FULL_DEPTH),
        verify=verify,
        failures_allowed=allowed,
        width=session.width,
        step=opened.step,
        probe=next((rule.weights for rule in made if rule.weights is not None), None),
    )
    return replace(calibration, saved=tuple(map(calibration.saved_beyond_fixed, certificates)))


def keep_calibration(opened: Opened, calibration: Calibration) -> Path | None:
    """Leave it in the calibration.json of the run, for reports, and say where.

    None where there is no such run: only what a run stands at is kept, and a row of a grid has a halting.json.
    """
    run = opened.run
    if run is None or not opened.is_newest or (run.path / "row.json").exists():
        return None
    write_record(run.path / "calibration.json", replace(calibration, probe=None))
    return run.path / "calibration.json"


def policy_of(calibration: Calibration, certificate: Certificate) -> Policy:
    """What a policy file holds."""
    assert certificate.is_certified
    about = f"teacher-forced text of the same kind, {ABOUT[calibration.homes]}"
    if calibration.evidence != "unit":
        about += f", each {calibration.evidence} counting once"
    if certificate.clipped_above:
        about += f"; the loss of a unit clipped to {CLIP:g} times the bound"
    return Policy(
        rule=certificate.rule,
        threshold=certificate.threshold,
        fill=calibration.fill,
        num_loops=calibration.num_loops,
        width=calibration.width,
        target=calibration.target,
        promise=Promise(
            max_ppl_increase=calibration.max_ppl_increase,
            confidence=calibration.confidence,
            units=calibration.calibration_evidence,
            unit_tokens=calibration.unit_tokens,
            clipped_above=certificate.clipped_above,
            about=about,
        ),
        test=OnTest(mean_loops=certificate.mean_loops, ppl_increase=certificate.ppl_increase),
        fixed_depth=calibration.fixed.threshold,
        probe=calibration.probe if certificate.rule == Probe.name else None,
    )


def units_of(
    opened: Opened,
    data: Sequence[str] | None,
    max_units: int | None,
    say: Say,
    *,
    unit_tokens: int = UNIT_TOKENS,
    seed: int = 0,
) -> UnitText:
    """Whole units of a text, up to `max_units`, of as many articles as there are."""
    tokens, length = tokens_for(opened, data, say), opened.sequence_length
    rows = max(1, unit_tokens // length)
    if isinstance(tokens, TaskText):
        batches = evaluation_batches(tokens, length, UNIT_INSTANCES)
        whole = [pair for pair in batches if len(pair[0]) == UNIT_INSTANCES][:max_units]
        return UnitText(units=[Unit(*pair, number) for number, pair in enumerate(whole)], homes="instances")
    articles = corpus_for(opened, data).articles("valid")
    if articles is None:
        text = in_blocks(tokens, rows, length, max_units)
    else:
        assert opened.tokenizer is not None
        encode = opened.tokenizer.encode_counted
        # An article's documents are joined as they are for training.
        encoded = (np.concatenate([ids_N for ids_N, _ in encode(list(joined(each)))]) for each in articles)
        text = of_articles(encoded, rows, length, max_units, np.random.default_rng(seed))
    if not text.units:
        raise DataError(
            f"no article of the text has the {rows * length + 1:,} tokens of one unit; name longer text with --data, "
            "or shorter units with --unit-tokens"
        )
    return text


def _notes(text: UnitText, session: Certifier, rules: Sequence[Rule], ratio: float, whose: str) -> Iterator[str]:
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


def _scale_ratio(opened: Opened, session: Certifier) -> tuple[float, str]:
    """s_K/s_1 by the audit of these weights where the run folder has one, else measured on a unit; and whose word."""
    audit = None if opened.run is None else read_record(opened.run.path / "audit.json", AuditResult, {})
    if audit is not None and audit.model.step == opened.step:
        first, last = audit.loop(1), audit.loop(session.num_loops)
        if first is not None and last is not None and first.scale and last.scale:
            return last.scale / first.scale, "in this run's audit"
    with torch.no_grad():
        ids_BT = session.splits["fit"][0].ids_BT.to(device_of(session.model))
        states = run_loops(opened.model, ids_BT, num_loops=session.num_loops).states
    at_first, at_last = (states[k].h_BTD.float().square().mean(-1).sqrt().mean() for k in (1, session.num_loops))
    return float(at_last / at_first), "on a unit of the fit split"
