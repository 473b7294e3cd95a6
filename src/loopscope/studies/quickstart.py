"""The paper's 2×2 at demo size: what to ask of the grid, and whether its rows show it. No torch here.

The recipe is the paper's (arXiv 2606.24898) but for size: demo preset, the interpreter's own documentation in 512
byte-pair tokens, learning rate 2e-3. Everything but loss placement and readout is equal in all four rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from loopscope.results.measures import Run, final_norm
from loopscope.results.thresholds import CLEAR
from loopscope.rows.conditions import CONDITIONS, CORE
from loopscope.rows.grid import Request
from loopscope.studies.results import Results

EVAL_TOKENS = 16_384
"""Validation tokens of each row's scores."""


def make_request(seed: int, steps: int) -> Request:
    """The four corners with one seed, a row per core, audited when trained: nothing here tells of untrained weights,
    nor of halting."""
    seeds = {condition.name: (seed,) for condition in CORE}
    return Request(size="demo", seeds=seeds, steps=steps, eval_tokens=EVAL_TOKENS, audit_untrained=False, halting=False)


def corners(results: Results, seed: int) -> list[Run]:
    """The finished and audited corners of a seed, in the paper's order."""
    rows = [row for row in results.rows if row.seed == seed and row.recipe == "paper" and row.audit is not None]
    return [row for row in rows if CONDITIONS[row.condition] in CORE]


def conclusion(four: Sequence[Run]) -> str:
    """Whether the four corners show what the paper says: norms that differ, and audits that differ alike."""
    by_condition = {run.condition: run for run in four}
    rmsnorm, raw = by_condition["per-loop+rmsnorm"], by_condition["per-loop+raw"]
    if (final_norm(rmsnorm) or 0.0) < CLEAR * (final_norm(raw) or 0.0):
        return "So few steps do not show it in the norms yet; try: loopscope quickstart --steps 600 --out runs/longer"
    if (rmsnorm.verdict, raw.verdict) != ("blind-spot", "controlled"):
        return "The norms differ as the paper says, and the audits do not: please report this."
    return "The norm readout hides scale from the loss, and the loop goes on carrying it."
