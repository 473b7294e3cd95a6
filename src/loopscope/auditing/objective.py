"""What an objective shows of the state: the loops it supervises, and what its other terms see."""

from __future__ import annotations

from torch import Tensor

from loopscope.auditing.search import Observable
from loopscope.config import ObjectiveConfig
from loopscope.objectives.placement import supervised_loops


def supervised_of(objective: ObjectiveConfig, num_loops: int) -> list[int]:
    """The loops that get cross-entropy at the trained depth."""
    return supervised_loops(objective, num_loops)


def observables_of(objective: ObjectiveConfig) -> list[Observable]:
    """The scale terms that are on."""
    on = []
    if objective.norm_penalty:
        on.append(norm_penalty_observable(objective.norm_penalty))
    if objective.scale_anchor:
        on.append(scale_anchor_observable(objective.scale_anchor))
    return on


def norm_penalty_observable(weight: float) -> Observable:
    """√λ·h: the penalty λ·s² is the squared length of this, over d."""
    return Observable("norm_penalty", lambda h_BTD: weight**0.5 * h_BTD)


def scale_anchor_observable(weight: float) -> Observable:
    """√w·‖h‖: the anchor w·(s − target)² sees the length and nothing else."""

    def length(h_BTD: Tensor) -> Tensor:
        return weight**0.5 * h_BTD.norm(dim=-1, keepdim=True)

    return Observable("scale_anchor", length)
