"""What a variable is good for: change it between loops at inference, and see what the last exit loses.

Each intervention rewrites h_k after every loop below the last; ΔCE is against the untouched run. A blind scale can be
clamped at next to no cost (arXiv 2606.24898): the model never learned to use it.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from loopscope.auditing.visibility import mean_cross_entropy
from loopscope.protocol import LoopedModel, LoopState

Rewrite = Callable[[list[Tensor], Tensor], Tensor]
"""(earlier states h_0 … h_{k-1} as rewritten, h_k) → the h_k that goes on."""


def growth_removed(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Take the radial part out of the loop's update, from the second loop on."""
    if len(earlier) < 2:
        return h_BTD
    unit_BTD = earlier[-1] / earlier[-1].norm(dim=-1, keepdim=True).clamp(min=1e-30)
    update_BTD = h_BTD - earlier[-1]
    return h_BTD - (update_BTD * unit_BTD).sum(-1, keepdim=True) * unit_BTD


def frozen_at_loop_1(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Rescale every token to the norm it had after the first loop."""
    return h_BTD if len(earlier) < 2 else _rescaled(h_BTD, earlier[1].norm(dim=-1, keepdim=True))


def mean_clamped(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Give every token the mean over width that it had after the first loop."""
    if len(earlier) < 2:
        return h_BTD
    return h_BTD - h_BTD.mean(-1, keepdim=True) + earlier[1].mean(-1, keepdim=True)


def scale_swapped(earlier: list[Tensor], h_BTD: Tensor) -> Tensor:
    """Give every token the norm of its left neighbour; the first keeps its own, since nothing may come from later."""
    norm_BT1 = h_BTD.norm(dim=-1, keepdim=True)
    return _rescaled(h_BTD, torch.cat([norm_BT1[:, :1], norm_BT1[:, :-1]], dim=1))


INTERVENTIONS: dict[str, Rewrite] = {
    "radial clamp: growth removed": growth_removed,
    "radial clamp: frozen at loop 1": frozen_at_loop_1,
    "mean clamp": mean_clamped,
    "scale swap between tokens": scale_swapped,
}
CLAMPED = {
    "radial clamp: growth removed": "scale",
    "radial clamp: frozen at loop 1": "scale",
    "mean clamp": "mean",
}
"""The variable that an intervention holds still; others do something else to one."""


@torch.no_grad()
def intervened_cross_entropy(
    model: LoopedModel, ids_BT: Tensor, targets_BT: Tensor, num_loops: int, rewrite: Rewrite | None = None
) -> float:
    """CE at loop `num_loops` when every state below it is rewritten."""
    last = rewritten_states(model, ids_BT, num_loops, rewrite)[-1]
    return mean_cross_entropy(model.readout(last, num_loops), targets_BT)


@torch.no_grad()
def rewritten_states(
    model: LoopedModel, ids_BT: Tensor, num_loops: int, rewrite: Rewrite | None = None
) -> list[LoopState]:
    """The states of a run whose carried state is rewritten after every loop; what is read out at K is so too."""
    states = [model.embed(ids_BT)]
    for k in range(1, num_loops + 1):
        state = model.loop(states[-1], k)
        if rewrite is not None:
            state = state.with_h(rewrite([earlier.h_BTD for earlier in states], state.h_BTD))
        states.append(state)
    return states


def _rescaled(h_BTD: Tensor, norm_BT1: Tensor) -> Tensor:
    return h_BTD * (norm_BT1 / h_BTD.norm(dim=-1, keepdim=True).clamp(min=1e-30))
