"""The paper's 2×2 at demo size: what to ask of the grid, and what its rows show, in words. No torch here.

The recipe is the paper's (arXiv 2606.24898) but for size: demo preset, the interpreter's own documentation in 512
byte-pair tokens, learning rate 2e-3. Everything but loss placement and readout is equal in all four rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loopscope.experiments.conditions import CONDITIONS, CORE, Condition
from loopscope.experiments.grid import Request
from loopscope.experiments.results import Results

EVAL_TOKENS = 16_384
"""Validation tokens of each row's scores."""
CLEAR = 20.0
"""Ratio of norms from which the contrast speaks for itself."""


def make_request(seed: int, steps: int) -> Request:
    """The four corners with one seed, a row per core."""
    seeds = {condition.name: (seed,) for condition in CORE}
    return Request(scale="demo", seeds=seeds, steps=steps, eval_tokens=EVAL_TOKENS)


@dataclass(frozen=True)
class Corner:
    """What one corner of the 2×2 ended with: validation scores after each trained loop, and its audit."""

    condition: Condition
    ce_K: list[float]
    norms_K: list[float]
    verdict: str
    blind: list[str]
    """Blind variables by name."""

    @property
    def exit_failure(self) -> float:
        """CE(1) − CE(K): how much worse the first exit is than full depth."""
        return self.ce_K[0] - self.ce_K[-1]


def corners(results: Results, seed: int) -> list[Corner]:
    """The finished corners of a seed, in the paper's order."""
    found = []
    for row in results.rows:
        if row.seed != seed or row.recipe != "paper" or CONDITIONS[row.condition] not in CORE or row.audit is None:
            continue
        depths = row.evaluation["splits"]["valid"]["depths"][: row.num_loops]
        blind = [variable["name"] for variable in row.audit["variables"] if variable["verdict"] == "blind"]
        ce_K, norms_K = ([float(depth[name]) for depth in depths] for name in ("ce", "norm"))
        found.append(Corner(CONDITIONS[row.condition], ce_K, norms_K, row.audit["verdict"], blind))
    return found


def norm_ratio(four: Sequence[Corner]) -> float:
    """‖h_K‖ of per-loop + RMSNorm over that of per-loop + raw."""
    by_name = {corner.condition.name: corner for corner in four}
    return by_name["per-loop+rmsnorm"].norms_K[-1] / by_name["per-loop+raw"].norms_K[-1]


def in_words(four: Sequence[Corner]) -> str:
    """What the four corners show, in sentences whose numbers are the measured ones."""
    by_name = {corner.condition.name: corner for corner in four}
    rmsnorm, raw, terminal = (by_name[name] for name in ("per-loop+rmsnorm", "per-loop+raw", "terminal+rmsnorm"))
    ratio, loops = norm_ratio(four), len(raw.ce_K)
    return "\n".join(
        [
            f"Exits: CE(1) − CE({loops}) is {terminal.exit_failure:+.2f} nats when only the last loop is supervised "
            f"and {rmsnorm.exit_failure:+.2f} when every loop is.",
            f"Scale: with every loop supervised, the state ends at norm {rmsnorm.norms_K[-1]:.0f} through the RMSNorm "
            f"readout and at {raw.norms_K[-1]:.1f} through the raw one: {ratio:.0f} times less.",
            f"Audits: {_audits(four)}.",
            _conclusion(ratio, rmsnorm, raw),
        ]
    )


def _audits(four: Sequence[Corner]) -> str:
    """The verdicts, each with its corners: "blind spot (scale) in A and B; controlled in C and D"."""
    by_verdict: dict[str, list[str]] = {}
    for corner in four:
        said = (
            f"blind spot ({', '.join(corner.blind) or 'unnamed'})" if corner.verdict == "blind-spot" else "controlled"
        )
        by_verdict.setdefault(said, []).append(corner.condition.title)
    return "; ".join(f"{said} in {' and '.join(titles)}" for said, titles in by_verdict.items())


def _conclusion(ratio: float, rmsnorm: Corner, raw: Corner) -> str:
    if ratio < CLEAR:
        return "So few steps do not show it in the norms yet; try: loopscope quickstart --steps 600 --out runs/longer"
    if (rmsnorm.verdict, raw.verdict) != ("blind-spot", "controlled"):
        return "The norms differ as the paper says, and the audits do not: please report this."
    return "The norm readout hides scale from the loss, and the loop goes on carrying it."
