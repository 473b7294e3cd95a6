"""What an exit's loss sees of a state: radial gradient share, its response to a change of scale, and the α-sweep.

Lemma 1 (visibility, arXiv 2606.24898): if R(αh) = R(h) for all α > 0, then ⟨∇_h CE, h⟩ = 0. The leak of an RMSNorm's
eps is eps/(s² + eps) of a raw readout's derivative. Everything here is immediate: h feeds the readout of its own loop
and nothing else, because what comes back through later loops is no signal of this exit.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import ProtocolError
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.protocol import LoopedModel, LoopState
from loopscope.results.record import measured

ALPHAS = (0.1, 0.18, 0.32, 0.56, 1.0, 1.8, 3.2, 5.6, 10.0)
"""Factors on the state before the readout, even in log."""
CURVATURE_STEP = 2.0**-8
"""Step of ln α: the error of fourth-order differences is below 1e-3 of d²CE/d(ln α)² for logits of a hundred, and
rounding in float64 below 1e-7 nats."""

Field = Callable[[Tensor], Tensor]
"""h_…D → a direction of the same shape, at any state."""
Fields = Mapping[str, Field]
"""By name."""


def scale_field(h: Tensor) -> Tensor:
    """The radial direction: the state itself."""
    return h


def mean_field(h: Tensor) -> Tensor:
    """The constant vector."""
    return torch.ones_like(h)


FIELDS: dict[str, Field] = {"scale": scale_field, "mean": mean_field}
"""Always audited."""


def field_rows(fields: Fields, h_D: Tensor, width: int) -> Tensor:
    """Named fields at a state as unit rows, in float64; of zeros where a field vanishes, and outside of h."""
    rows_MD = torch.stack([of(h_D.double()).double() for of in fields.values()])
    rows_MD = rows_MD / rows_MD.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return F.pad(rows_MD, (0, width - rows_MD.shape[1]))


def token_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """CE_BT of every token by the plain path, in float32 at least; 0 where the target is ignored."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    flat = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return flat.view(targets_BT.shape)


def mean_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> float:
    """Mean over the tokens that count."""
    return float(token_cross_entropy(logits_BTV, targets_BT).sum() / (targets_BT != IGNORE_INDEX).sum())


def field_shares(
    model: LoopedModel, state: LoopState, k: int, targets_BT: Tensor, field: Field = scale_field
) -> Tensor:
    """⟨∇_h CE, f(h)⟩/(‖∇_h CE‖·‖f(h)‖) of every token that has a gradient: the cosine of gradient and field.

    h is a detached alias that feeds only the readout of loop k.
    """

    def logits_of(h_BTD: Tensor) -> Tensor:
        return model.readout(state.with_h(h_BTD), k)

    return cosine_with_gradient(logits_of, state.h_BTD, targets_BT, field, f"readout at loop {k}")


def cosine_with_gradient(
    logits_of: Callable[[Tensor], Tensor], h_BTD: Tensor, targets_BT: Tensor, field: Field, what: str
) -> Tensor:
    """The cosine of ∇_h CE and a field for every token that has a gradient.

    One without (an ignored target, a saturated softmax) says nothing about the readout and is not counted.
    """
    with torch.enable_grad():
        h_BTD = h_BTD.detach().clone().requires_grad_()
        loss = token_cross_entropy(logits_of(h_BTD), targets_BT).sum()
        if not loss.requires_grad:
            raise ProtocolError(f"the {what} passes no gradient to its state (a detach or no_grad inside?)")
        (gradient_BTD,) = torch.autograd.grad(loss, h_BTD, materialize_grads=True)
    direction_BTD = field(h_BTD.detach()).double()
    cosine_BT = F.cosine_similarity(gradient_BTD.double(), direction_BTD, dim=-1, eps=0.0)
    return cosine_BT[(targets_BT != IGNORE_INDEX) & ~cosine_BT.isnan()]


def raw_readout_control(h_BTD: Tensor, targets_BT: Tensor) -> float | None:
    """Median radial share through a random head on the raw state: clearly above zero, or the check itself is broken."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = max(int(targets_BT.max()) + 1, 2)
    head_VD = torch.randn(vocab_size, h_BTD.shape[-1], generator=generator, dtype=torch.float64).to(h_BTD)
    unit_BTD = h_BTD / h_BTD.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    shares = cosine_with_gradient(lambda h: F.linear(h, head_VD), unit_BTD, targets_BT, scale_field, "control")
    return measured(float(shares.abs().median()))


@torch.no_grad()
def scale_curvatures(model: LoopedModel, state: LoopState, k: int, targets_BT: Tensor) -> Tensor | None:
    """d²CE/d(ln α)² at α = 1 of every token that counts, when all states are multiplied by α before the readout.

    It tells a visible scale from a hidden one also where training has brought the visible one to its optimum and the
    mean first derivative vanishes. Through a raw head it is Var_p z + E_p z − z_y, through an RMSNorm what eps leaks,
    −2·eps/s²·(E_p z − z_y) to leading order. By differences of the loss itself, so that it is what a change does,
    whatever autograd makes of the readout. They need float64: None where the loss comes in less.
    """

    def stretched_BT(steps: int) -> Tensor:
        h_BTD = math.exp(steps * CURVATURE_STEP) * state.h_BTD
        return token_cross_entropy(model.readout(state.with_h(h_BTD), k), targets_BT)

    here_BT = stretched_BT(0)
    if here_BT.dtype != torch.float64:
        return None
    near_BT, far_BT = stretched_BT(-1) + stretched_BT(1), stretched_BT(-2) + stretched_BT(2)
    curvature_BT = (16 * near_BT - far_BT - 30 * here_BT) / (12 * CURVATURE_STEP**2)
    return curvature_BT[targets_BT != IGNORE_INDEX]


@torch.no_grad()
def alpha_sweep(
    model: LoopedModel, state: LoopState, k: int, targets_BT: Tensor, alphas: tuple[float, ...] = ALPHAS
) -> list[float | None]:
    """CE of the readout at loop k when the state is first multiplied by α: flat where scale is hidden."""
    states = (state.with_h(alpha * state.h_BTD) for alpha in alphas)
    return [measured(mean_cross_entropy(model.readout(scaled, k), targets_BT)) for scaled in states]
