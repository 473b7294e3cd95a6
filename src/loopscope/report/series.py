"""What the files of the runs give to the charts: values along loops, steps, depths and factors. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from loopscope.report.charts import Line, Table, plain
from loopscope.report.files import integer, mapping, mappings, number, numbers
from loopscope.report.grouping import Group
from loopscope.report.records import Depth, Run

Points = list[tuple[float, float | None]]
OfDepth = Callable[[Depth], float | None]
HIDDEN_SHARE = 1e-3
"""Radial gradient share below which a loss does not see the scale: that of `auditing.monitor`, which needs torch."""


def each_run(groups: Sequence[Group]) -> list[tuple[Group, Run]]:
    """All runs with their groups, in the order of the page."""
    return [(group, run) for group in groups for run in group.runs]


def lines_of(groups: Sequence[Group], points_of: Callable[[Run], Points], part: str = "") -> list[Line]:
    """A line for every run that gives at least one value."""
    lines = []
    for group, run in each_run(groups):
        points = points_of(run)
        if any(value is not None for _, value in points):
            lines.append(Line(group, run, [x for x, _ in points], [y for _, y in points], part))
    return lines


def at_depths(of: OfDepth) -> Callable[[Run], Points]:
    """A quantity after each loop, on validation text."""
    return lambda run: [(depth.k, of(depth)) for depth in run.depths]


def while_training(name: str, of: Callable[[list[float | None]], float | None]) -> Callable[[Run], Points]:
    """A quantity that training logs per loop, as one value per step."""

    def points(run: Run) -> Points:
        rows = [(integer(row.get("step")), numbers(row.get(name))) for row in run.train]
        return [(step, of(values)) for step, values in rows if step is not None and values]

    return points


def audited(name: str) -> Callable[[Run], Points]:
    """A quantity that the audit gives per loop."""
    return lambda run: [(k, value) for k, row in run.audit_loops if (value := number(row.get(name))) is not None]


def shares(run: Run) -> Points:
    """Radial gradient share per loop: the audit's, or the last that training logged."""
    known = audited("radial_gradient_share")(run)
    if known or not run.train:
        return known
    last = run.train[-1]
    pairs = zip(numbers(last.get("loops")), numbers(last.get("radial_gradient_share")), strict=False)
    return [(k, share) for loop, share in pairs if (k := integer(loop)) is not None and share is not None]


def alpha_changes(run: Run) -> Points:
    """α and the change of CE at the trained depth, against the α nearest to 1."""
    sweep = mapping(run.audit.get("alpha_sweep"))
    rows = mappings(sweep.get("loops"))
    trained = [row for row in rows if integer(row.get("k")) == run.num_loops] or rows
    ces = numbers(trained[-1].get("ce")) if trained else []
    pairs = zip(numbers(sweep.get("alphas")), ces, strict=False)
    known = [(alpha, ce) for alpha, ce in pairs if alpha is not None and alpha > 0 and ce is not None]
    if not known:
        return []
    _, base = min(known, key=lambda point: abs(math.log(point[0])))
    return [(alpha, ce - base) for alpha, ce in known]


def largest(values: list[float | None]) -> float | None:
    """The largest value that is one."""
    return max((value for value in values if value is not None), default=None)


def last(values: list[float | None]) -> float | None:
    """The value of the last loop."""
    return values[-1]


def common(groups: Sequence[Group], of: Callable[[Run], int | None]) -> int | None:
    """What all runs agree on, or None."""
    found = {of(run) for _, run in each_run(groups)}
    return found.pop() if len(found) == 1 else None


def quality(groups: Sequence[Group]) -> tuple[str, OfDepth, str]:
    """How to compare the runs' quality, and why: perplexity under one tokenizer, else bits per byte."""
    runs = [run for _, run in each_run(groups) if run.depths]
    names, hashes = {run.tokenizer for run in runs} - {""}, {run.tokenizer_sha256 for run in runs} - {""}
    if len(names) <= 1 and len(hashes) <= 1:
        note = f"Perplexity per token ({next(iter(names), '')}): comparable only under the same tokenizer."
        return "perplexity", lambda depth: depth.perplexity, note if names else ""
    if any(depth.bits_per_byte is not None for run in runs for depth in run.depths):
        note = "The runs use different tokenizers, so quality is shown in bits per byte."
        return "bits per byte", lambda depth: depth.bits_per_byte, note
    note = "The runs use different tokenizers: their perplexities cannot be compared with one another."
    return "perplexity", lambda depth: depth.perplexity, note


def splits_table(groups: Sequence[Group], name: str, of: OfDepth) -> Table:
    """Every split of every run at every depth, also in bits per byte."""
    deepest = max((depth.k for _, run in each_run(groups) for depth in run.depths), default=0)
    ks = range(1, min(deepest, 32) + 1)
    measures: dict[str, OfDepth] = {name: of, "bits per byte": lambda depth: depth.bits_per_byte}
    rows = []
    for group, run in each_run(groups):
        for split, depths in (run.splits or {run.depths_from: run.depths}).items():
            at = {depth.k: depth for depth in depths}
            for measure, take in measures.items():
                values = [take(at[k]) if k in at else None for k in ks]
                if any(value is not None for value in values):
                    label = " · ".join(part for part in (group.label, run.name, split, measure) if part)
                    rows.append([label, *(plain(value) for value in values)])
    return Table(["run \\ loops", *(str(k) for k in ks)], rows)
