"""The verdict in words: what a reader should know who reads nothing else. Every number in it is a measured one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from loopscope.results.audit import Variable
from loopscope.results.measures import (
    Run,
    exit_failure,
    final_norm,
    hides_scale,
)
from loopscope.results.reproduction import TOO_EARLY, Reproduction
from loopscope.results.thresholds import CLEAR, FURTHEST
from loopscope.show.inputs import Group, each_run, group_runs
from loopscope.show.numbers import brief, fold, signed
from loopscope.show.sections import AuditView, ClaimTable, audit_views
from loopscope.show.sentences import driven_by_training, free_to_grow

PER_LOOP, TERMINAL, NORMED, RAW = "per-loop", "terminal", "RMSNorm", "raw"
SMALL = 0.1
"""Nats below which an exit costs next to nothing."""
MOST_NAMED = 3
"""Variables that are spoken of by name; the section on audits has all of them."""
STATES = {
    "failed": ("failed", "failed"),
    "stopped": ("was stopped by a guard", "were stopped by a guard"),
    "unfinished": ("is not finished and counts as far as it is", "are not finished and count as far as they are"),
    "empty": ("has logged nothing yet", "have logged nothing yet"),
}
"""Runs that do not count fully: of one and of several."""


@dataclass(frozen=True)
class VerdictLine:
    """A sentence of the verdict, and what it is about."""

    about: str
    text: str

    def __str__(self) -> str:
        return f"{self.about}: {self.text}"


@dataclass(frozen=True)
class Verdict:
    """A headline, points, and whether it is a finding (bad), clear (good) or not settled (open)."""

    tone: Literal["bad", "good", "open"]
    headline: str
    points: list[VerdictLine]

    @property
    def sentences(self) -> list[str]:
        """The points as sentences."""
        return [str(point) for point in self.points]

    @property
    def lines(self) -> list[str]:
        """Everything, as a terminal shows it."""
        return [self.headline, *(f"  {sentence}" for sentence in self.sentences)]


def verdict_on(runs: Sequence[Run]) -> Verdict:
    """The verdict on some runs alone, without claims."""
    groups = group_runs(runs)
    return judge(groups, audit_views(groups), [], [])


def judge(
    groups: Sequence[Group], audits: Sequence[AuditView], claims: Sequence[ClaimTable], grids: Sequence[Reproduction]
) -> Verdict:
    """The verdict on everything that is on the page."""
    tone, headline = _headline(groups, audits, claims)
    points = [
        VerdictLine("Where", _where(audits)),
        VerdictLine("Free range", _free(audits)),
        VerdictLine("Scale", _scale(groups)),
        VerdictLine("Exits", _exits(groups)),
        VerdictLine("Remedy", _remedies(audits)),
        *_claims(claims),
        VerdictLine("Mind", _missing(groups, grids)),
    ]
    return Verdict(tone, headline, [point for point in points if point.text])


def _headline(
    groups: Sequence[Group], audits: Sequence[AuditView], claims: Sequence[ClaimTable]
) -> tuple[Literal["bad", "good", "open"], str]:
    runs = [run for _, run in each_run(groups)]
    settled = _with_verdict(audits, "blind-spot", "controlled")
    if settled:
        blind = _with_verdict(audits, "blind-spot")
        if not blind:
            who = "The audited run is" if len(settled) == 1 else f"All {len(settled)} audited runs are"
            return "good", f"Controlled. {who} free of blind spots: a loss sees, or the loop removes, what it carries."
        what = _unseen(blind)
        if len(settled) == 1:
            return "bad", f"Blind spot. The loop of this run carries {what}, and no loss sees it."
        who = f"{len(blind)} of {len(settled)} audited runs"
        return "bad", f"Blind spot in {who}: the loop carries {what}, and no loss sees it."
    alarmed = [run for run in runs if any(event.event == "blind-spot" for event in run.events)]
    if alarmed:
        who = "this run" if len(runs) == 1 else f"{len(alarmed)} of {len(runs)} runs"
        return "bad", f"Alarm. In {who} the scale ran away while no loss saw it; no audit has confirmed it yet."
    failed = [run for run in runs if run.state == "failed"]
    if failed and len(failed) == len(runs):
        who = "This run" if len(runs) == 1 else f"Each of the {len(runs)} runs"
        return "open", f"Failed. {who} broke off before it was audited."
    hidden = [run for run in runs if hides_scale(run)]
    if hidden:
        who = "this run" if len(runs) == 1 else f"{len(hidden)} of {len(runs)} runs"
        return "open", f"Not audited. In {who} the loss hardly sees the scale of the state; an audit would settle it."
    if any(run.train for run in runs):
        return "open", "Not audited. Nothing that training logged points to a blind spot; an audit would settle it."
    if any(table.claims for table in claims):
        return "open", "The claims of the paper, judged elsewhere; the runs themselves are not on this page."
    return "open", "Nothing has been measured yet."


def _unseen(blind: Sequence[AuditView]) -> str:
    """What it is that no loss sees."""
    names = {variable.name for audit in blind for variable in audit.variables if variable.verdict == "blind"}
    return "the length of its state" if names == {"scale"} else "something in its state"


def _with_verdict(audits: Sequence[AuditView], *verdicts: str) -> list[AuditView]:
    return [audit for audit in audits if audit.run.verdict in verdicts]


def _where(audits: Sequence[AuditView]) -> str:
    """Which conditions the audits found blind, and which not."""
    blind = _with_verdict(audits, "blind-spot")
    free = _with_verdict(audits, "controlled")
    if not blind or len(audits) == 1:
        return ""
    return f"{_listed(_labels(blind))}." + (f" Free of it: {_listed(_labels(free))}." if free else "")


def _free(audits: Sequence[AuditView]) -> str:
    """How far the blind variables are free, and whether training drives them; over several runs, from least to most."""
    blind = _with_verdict(audits, "blind-spot")
    found: dict[str, list[Variable]] = {}
    for variable in (variable for audit in blind for variable in audit.variables):
        if variable.verdict == "blind" and variable.free_range is not None:
            found.setdefault(variable.name, []).append(variable)
    parts = [f"{name} is {_range(each)}{_driven(each)}" for name, each in list(found.items())[:MOST_NAMED]]
    more = [f"{len(found) - MOST_NAMED} more variables are free"] if len(found) > MOST_NAMED else []
    return f"{'; '.join([*parts, *more])}." if parts else ""


def _range(variables: Sequence[Variable]) -> str:
    """From the smallest free range of a variable to the largest."""
    if len(variables) == 1:
        return free_to_grow(variables[0].free_range or 1.0, variables[0].free_tokens)
    ranges = [variable.free_range for variable in variables if variable.free_range is not None]
    low, high = fold(min(ranges)), fold(max(ranges))
    if low == high:
        return free_to_grow(min(ranges))
    most = "without limit in some runs" if max(ranges) >= FURTHEST else f"{high} in others"
    return f"free to grow {low} before it costs 1 % of perplexity, {most}"


def _driven(variables: Sequence[Variable]) -> str:
    """What training does to a variable in those runs where that was tried."""
    tried = [variable for variable in variables if variable.driven is not None]
    rates = [variable.drift for variable in tried if variable.driven and variable.drift is not None]
    if not rates:
        return ", and training from these weights does not drive it" if tried else ""
    if len(tried) == 1:
        return f", and {driven_by_training(rates[0])}"
    most = max(rates, key=abs)
    return f", and {driven_by_training(most)} at most (in {len(rates)} of {len(tried)} runs it is driven)"


def _scale(groups: Sequence[Group]) -> str:
    """How long the state gets: the paper's contrast where both sides are here, else the widest one."""
    norms = {key: value for key, value in _means(groups, final_norm).items() if value > 0}
    normed, raw = norms.get((PER_LOOP, NORMED)), norms.get((PER_LOOP, RAW))
    if normed and raw:
        ratio = normed / raw
        text = (
            f"with every loop supervised, the state ends at norm {brief(normed)} through the RMSNorm readout, "
            f"{_times(ratio)} the {brief(raw)} it ends at through the raw one."
        )
        penalised = norms.get((PER_LOOP, "penalty"))
        text += f" With a norm penalty and the RMSNorm readout kept it ends at {brief(penalised)}." if penalised else ""
        return text if ratio >= CLEAR else f"{text} That is not a clear contrast; longer runs may show one."
    if len(norms) > 1:
        low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
        return (
            f"after the last loop the state has norms from {brief(norms[low])} ({' + '.join(low)}) to "
            f"{brief(norms[high])} ({' + '.join(high)})."
        )
    return _growth(groups)


def _growth(groups: Sequence[Group]) -> str:
    """For one condition: where the norm began and where it is."""
    found = [(run, norm) for _, run in each_run(groups) if (norm := final_norm(run)) is not None]
    if not found:
        return ""
    run, norm = found[0]
    start = run.train[0].final_norm if run.train else None
    since = ""
    if start and norm:
        ratio = norm / start
        since = f", {_times(ratio)} the {brief(start)}" if ratio > 1 else f", down from {brief(start)}"
        since += " of the first logged step" if ratio > 1 else " at the first logged step"
    return f"the state has norm {brief(norm)} after the last loop{since}."


def _exits(groups: Sequence[Group]) -> str:
    """What leaving after the first loop costs."""
    failures = _means(groups, exit_failure)
    for readout in (NORMED, RAW):
        terminal, dense = failures.get((TERMINAL, readout)), failures.get((PER_LOOP, readout))
        if terminal is not None and dense is not None:
            return (
                f"leaving after loop 1 instead of the last costs {signed(terminal)} nats per token when only "
                f"the last loop is supervised and {signed(dense)} when every loop is (through the {readout} readout)."
            )
    if len(failures) == 1:
        (cost,) = failures.values()
        factor = f", {math.exp(cost):.3g} times the perplexity" if SMALL < cost < 100 else ""
        usable = "next to nothing" if abs(cost) <= SMALL else "much" if cost > 1 else "something"
        return f"leaving after loop 1 instead of the last costs {usable}: {signed(cost)} nats per token{factor}."
    if failures:
        low, high = min(failures, key=failures.__getitem__), max(failures, key=failures.__getitem__)
        return (
            f"leaving after loop 1 instead of the last costs between {signed(failures[low])} "
            f"({' + '.join(low)}) and {signed(failures[high])} nats per token ({' + '.join(high)})."
        )
    return ""


def _remedies(audits: Sequence[AuditView]) -> str:
    """Flags that the audits suggest; one that not all blind runs need comes with those that do."""
    blind = _with_verdict(audits, "blind-spot")
    needed: dict[str, list[AuditView]] = {}
    for audit in blind:
        for flag in dict.fromkeys(remedy.flag for remedy in audit.remedies if remedy.flag):
            needed.setdefault(flag, []).append(audit)
    parts = [
        flag if len(who) == len(blind) else f"{flag} for {_listed(_labels(who))}"
        for flag, who in sorted(needed.items(), key=lambda item: -len(item[1]))
    ]
    return f"the audits suggest training with {_listed(parts)}; see Audits and remedies on the page." if parts else ""


def _claims(tables: Sequence[ClaimTable]) -> list[VerdictLine]:
    """One sentence for all splits of which the same is to be said."""
    said: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        held, failed, open_ = (table.with_tone(tone) for tone in ("good", "bad", "open"))
        parts = [f"{len(held)} of {len(table.claims)} hold"]
        if failed:
            parts.append(
                f"{_listed([c.id for c in failed])} {'does' if len(failed) == 1 else 'do'} not hold at this size"
            )
        early = [claim.id for claim in open_ if claim.verdict == TOO_EARLY]
        absent = [claim.id for claim in open_ if claim.verdict != TOO_EARLY]
        if early:
            parts.append(f"for {_listed(early)} it is too early to say")
        if absent:
            parts.append(f"{_listed(absent)} {'was' if len(absent) == 1 else 'were'} not measured")
        said.setdefault((table.about, "; ".join(parts)), []).append(table.split)
    return [
        VerdictLine(
            f"Claims of the paper ({' · '.join(part for part in (about, _listed(splits)) if part)})", f"{verdict}."
        )
        for (about, verdict), splits in said.items()
    ]


def _missing(groups: Sequence[Group], grids: Sequence[Reproduction]) -> str:
    """Runs that do not count fully, and rows that were asked for and are not here."""
    runs = [run for _, run in each_run(groups)]
    alone = runs[0] if len(runs) == 1 else None
    parts = []
    for state, (one, several) in STATES.items():
        count = sum(run.state == state for run in runs)
        if count and alone is not None:
            parts.append(alone.state_in_words)
        elif count:
            parts.append(f"1 run {one}" if count == 1 else f"{count} runs {several}")
    unread = sum(bool(run.problems) for run in runs)
    if unread:
        parts.append(f"{unread} ha{'s' if unread == 1 else 've'} files that are not right and left out")
    unaudited = sum(not run.verdict for run in runs)
    if 0 < unaudited < len(runs):
        parts.append(f"{unaudited} ha{'s' if unaudited == 1 else 've'} not been audited")
    recipes = [recipe for each in grids if each.grid for recipe in each.grid.recipes.values()]
    asked = sum(len(seeds) for recipe in recipes for seeds in recipe.seeds.values())
    there = sum(bool(run.row) for run in runs)
    if asked > there:
        parts.append(f"{asked - there} of {asked} rows are not here: not begun yet, or kept elsewhere")
    return f"{'; '.join(parts)}." if parts else ""


def _means(groups: Sequence[Group], of: Callable[[Run], float | None]) -> dict[tuple[str, str], float]:
    """Mean over the runs of each group that have a value, as in the tables of a reproduction."""
    found = {}
    for group in groups:
        values = [value for run in group.runs if (value := of(run)) is not None]
        if values:
            found[group.placement, group.kind] = statistics.fmean(values)
    return found


def _times(ratio: float) -> str:
    return f"{brief(ratio)} times"


def _labels(audits: Sequence[AuditView]) -> list[str]:
    counts = dict.fromkeys(audit.group.label for audit in audits)
    totals = {audit.group.label: len([run for run in audit.group.runs if run.audit]) for audit in audits}
    found = {label: sum(audit.group.label == label for audit in audits) for label in counts}
    return [
        label if found[label] == totals[label] else f"{label} ({found[label]} of {totals[label]})" for label in counts
    ]


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""
