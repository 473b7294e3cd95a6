"""The audit against models whose blind subspace is known by derivation.

    python benchmarks/planted.py [--only NAME] [--largest 512]

The models are in `cases/`, by class, each with its derivation; what all derivations use is in `cases/__init__.py`.

Comparators, on the same models: a norm monitor (alarm when ‖h‖ grows by 2 over 30 loops) and the null space of the
head alone. Exit code 1 when a dimension or a verdict is wrong, or a control raises an alarm.

Shape legend: V vocabulary, D width.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

import loopscope as ls
from cases import channels, codas, exits, machines, norms, penalties, plain, tensors, tokens
from cases.nets import Kind, Net, Planted, centred, plant, rms
from loopscope.machine import limit_cpu_isa

__all__ = ["CASES", "CONTROLS", "FAULTS", "Case", "Kind", "Net", "Planted", "Row", "centred", "examine", "plant", "rms"]

MONITOR_LOOPS, MONITOR_GROWTH = 30, 2.0
HEAD_TOLERANCE = 1e-3
"""Singular values of the head below this share of the median count as zero in the comparator."""
HEAD_NOTHING = 1e-9
"""Below this share of the largest they are left out of that median."""

CLASSES = (plain, channels, norms, penalties, tensors, tokens, exits, codas, machines)
KINDS = tuple(kind for module in CLASSES for kind in module.KINDS)
FAULTS = tuple(kind for kind in KINDS if not kind.control)
CONTROLS = tuple(kind for kind in KINDS if kind.control)


@dataclass(frozen=True)
class Case:
    """One planted model at one width."""

    kind: Kind
    width: int

    def __str__(self) -> str:
        return f"{self.kind.name}, d {self.width}"


CASES = tuple(Case(kind, width) for kind in KINDS for width in kind.widths)


# --- comparators -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def norm_monitor(planted: Planted) -> bool:
    """What a plot of the norm says: alarm when the mean ‖h‖ at loop 30 (or the deepest) is twice that at loop 1."""
    planted.model.eval()
    norms_K = ls.run_loops(planted.model, planted.ids(), num_loops=planted.most_loops or MONITOR_LOOPS).norms_K()
    return bool(norms_K[-1] >= MONITOR_GROWTH * norms_K[0])


@torch.no_grad()
def head_null_space(head_VD: Tensor) -> int:
    """What the head alone hides: d minus the rank of W with its rows centred."""
    head_VD = head_VD.double()
    values = torch.linalg.svdvals(head_VD - head_VD.mean(0))
    middle = values[values > HEAD_NOTHING * values[0]].median()
    return head_VD.shape[1] - int((values > HEAD_TOLERANCE * middle).sum())


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the audit and the comparators say of a case."""

    case: Case
    found: int
    agreement: float
    verdict: str
    scale: str
    mean: str
    tensors: dict[str, set[str]]
    """Carried tensor → verdicts of the variables that are named after it."""
    told: bool
    """Some variable is called blind."""
    norm_alarm: bool
    head_null: int
    seconds: float

    @property
    def dimension_right(self) -> bool:
        """The blind dimension is the derived one."""
        return self.found == self.case.kind.blind

    @property
    def verdicts_right(self) -> bool:
        """The overall verdict and those of scale, mean and carried tensors are the derived ones.

        A blind spot must besides be told as a variable, which has evidence and a remedy.
        """
        kind = self.case.kind
        pairs = ((self.scale, kind.scale), (self.mean, kind.mean))
        return (
            self.verdict == kind.verdict
            and self.told == (kind.blind > 0)
            and all(wanted in (None, said) for said, wanted in pairs)
            and all(wanted in self.tensors[name] for name, wanted in kind.tensors.items())
        )

    @property
    def alarm(self) -> bool:
        """A blind spot is reported."""
        return self.verdict == "blind-spot"

    @property
    def false_alarm(self) -> bool:
        """A blind spot is reported where there is none."""
        return self.alarm and self.case.kind.blind == 0


def examine(case: Case, options: ls.AuditOptions | None = None) -> Row:
    """Audit one planted model and ask the comparators."""
    planted = case.kind.make(case.width)
    started = time.perf_counter()
    result = ls.audit(
        planted.model,
        [planted.ids()],
        supervised=planted.supervised,
        terms=planted.terms,
        options=options,
    )
    seconds = time.perf_counter() - started
    verdicts = {variable.name: variable.verdict for variable in result.variables}
    directions = result.blind_directions
    return Row(
        case=case,
        found=directions.dimension,
        agreement=directions.agreement,
        verdict=result.verdict,
        scale=verdicts["scale"],
        mean=verdicts["mean"],
        tensors={
            tensor: {verdict for name, verdict in verdicts.items() if tensor in name} for tensor in case.kind.tensors
        },
        told="blind" in verdicts.values(),
        norm_alarm=norm_monitor(planted),
        head_null=head_null_space(planted.head_VD.detach()),
        seconds=seconds,
    )


COLUMNS = (
    f"{'case':32} {'d':>4} {'expected':>8} {'found':>5} {'agree':>5}  {'scale':8} {'mean':8} "
    f"{'norm':5} {'head':>4} {'seconds':>7}"
)


def show(row: Row) -> None:
    """Print one line of the table, with what is wrong in it."""
    kind = row.case.kind
    wrong = "" if row.dimension_right else "  WRONG DIMENSION"
    if not row.verdicts_right:
        tensors = "".join(f", {name} {verdict}" for name, verdict in kind.tensors.items())
        wrong += f"  WRONG VERDICT: {kind.verdict}, scale {kind.scale}, mean {kind.mean}{tensors} derived"
    print(
        f"{kind.name:32} {row.case.width:4} {kind.blind:8} {row.found:5} {row.agreement:5.0%}  "
        f"{row.scale:8} {row.mean:8} {'alarm' if row.norm_alarm else '-':5} {row.head_null:4} {row.seconds:7.1f}"
        f"{wrong}",
        flush=True,
    )


def summary(rows: Sequence[Row]) -> str:
    """Totals of the audit and of the comparators."""
    right, verdicts = sum(row.dimension_right for row in rows), sum(row.verdicts_right for row in rows)
    false_alarms = sum(row.false_alarm for row in rows)
    norm = sum(row.norm_alarm == (row.case.kind.blind > 0) for row in rows)
    head = sum(row.head_null == row.case.kind.blind for row in rows)
    total = len(rows)
    return (
        f"audit: {right}/{total} dimensions right, {verdicts}/{total} verdicts right, {false_alarms} false alarms; "
        f"norm monitor: {norm}/{total} alarms right; head SVD: {head}/{total} dimensions right"
    )


def main(only: str = "", largest: int = 512) -> int:
    """Audit the planted models and compare with what was derived.

    Args:
        only: Cases whose name contains this.
        largest: Largest width.
    """
    cases = [case for case in CASES if only in case.kind.name and case.width <= largest]
    if not cases:
        print(f"no case is called {only!r}; there are: {', '.join(kind.name for kind in KINDS)}")
        return 2
    limit_cpu_isa()
    print(COLUMNS)
    rows = []
    for case in cases:
        try:
            rows.append(examine(case))
        except ls.LoopscopeError as error:
            print(f"{case.kind.name:32} {case.width:4} {case.kind.blind:8}  REFUSED: {error}", flush=True)
        else:
            show(rows[-1])
    print(summary(rows) + (f"; {len(cases) - len(rows)} refused" if len(rows) < len(cases) else ""))
    return 0 if len(rows) == len(cases) and all(row.dimension_right and row.verdicts_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
