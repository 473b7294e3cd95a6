"""Loss terms that belong to a model and not to an objective: what pondering and routing cost (`protocol.OwnLosses`).

    ponder cost       τ · mean over tokens of N + R (ACT)
    router balance    w · mean over calls of E·Σ f_i·p̄_i
    router z-loss     w · mean over calls and tokens of (log Σ_i exp logit_i)²

None of them shows anything of h. Shape legend: K loops, B batch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from loopscope.objectives.terms import Pass, Term


@dataclass(frozen=True)
class PonderCost(Term):
    """τ·mean over tokens of N + R, the loops until a token halts and what was left of its weight then (ACT).

    Read from the carried weights `left` of every loop; only R has a gradient.
    """

    weight: float
    name: str = "ponder_cost"

    def value(self, seen: Pass) -> Tensor:
        lefts = [state.carried["left"] for state in seen.trace.states if "left" in state.carried]
        if not lefts:
            return seen.nothing
        before_KBT1 = torch.stack(lefts[:-1])
        runs_KBT1 = before_KBT1 > 0
        runs_on_KBT1 = torch.cat([runs_KBT1[1:], torch.zeros_like(runs_KBT1[:1])])
        remainder_BT1 = (before_KBT1 * (runs_KBT1 & ~runs_on_KBT1)).sum(0)
        return self.weight * (runs_KBT1.sum(0) + remainder_BT1).mean()


class Router(Protocol):
    """What a mixture of experts leaves for its losses."""

    calls: list[tuple[Tensor, Tensor]]
    """(balance, z) of every call of the pass."""


@dataclass(frozen=True)
class RouterBalance(Term):
    """w · mean over calls of E·Σ f_i·p̄_i: 1 where experts are loaded evenly, E where one has all."""

    weight: float
    routers: tuple[Router, ...] = ()
    name: str = "router_balance"
    which: ClassVar[int] = 0

    def value(self, seen: Pass) -> Tensor:
        calls = [call[self.which] for router in self.routers for call in router.calls]
        return seen.nothing if seen.model is None or not calls else self.weight * torch.stack(calls).mean()


@dataclass(frozen=True)
class RouterZLoss(RouterBalance):
    """w · mean over calls and tokens of the router's squared log-sum-exp."""

    name: str = "router_z_loss"
    which: ClassVar[int] = 1
