"""Derivatives of a map of one state, many directions at once.

Many perturbed copies of a state go through a model as rows of one batch; a row depends on the same row only.

Shape legend: R rows, W width of the state, F outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

ROWS_AT_ONCE = 512
"""Copies of a state that go through a loop in one batch: enough for the matrix multiply, little memory."""

Map = Callable[[Tensor], Tensor]
"""w_RW → anything with R rows; each row depends on the same row only."""


def push(function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor) -> list[Tensor]:
    """Jacobian-vector products of every output of `function` at w, one row for every tangent."""
    parts = [_push(function, w_W, rows_RW) for rows_RW in tangents_RW.to(w_W.dtype).split(ROWS_AT_ONCE)]
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


def pull(function: Map, w_W: Tensor, cotangents_RF: Tensor) -> Tensor:
    """Vector-Jacobian products at w, one row for every cotangent."""
    with _derivatives(), torch.enable_grad():
        w_RW = w_W.expand(len(cotangents_RF), -1).clone().requires_grad_()
        out_RF = function(w_RW)
        if not out_RF.requires_grad:
            return torch.zeros_like(w_RW)
        (pulled_RW,) = torch.autograd.grad(out_RF, w_RW, cotangents_RF.to(out_RF.dtype), materialize_grads=True)
    return pulled_RW


def jacobian(function: Map, w_W: Tensor) -> Tensor:
    """Dense ∂f/∂w as F×W, in float64."""
    identity_WW = torch.eye(len(w_W), dtype=w_W.dtype, device=w_W.device)
    return push(lambda w_RW: [function(w_RW)], w_W, identity_WW)[0].double().T


def with_the_same_noise(function: Map, w_RW: Tensor) -> Tensor:
    """A model that draws random numbers draws the same ones at every call through here."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return function(w_RW).detach()


def least_squares(
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    targets_RD: Tensor,
    *,
    damping: float = 0.0,
    tolerance: float = 0.0,
    iterations: int = 400,
) -> tuple[Tensor, Tensor]:
    """x = argmin ‖A x − b‖² + λ²‖x‖² and b − A x of every row b, by conjugate gradients (CGLS) on all rows at once.

    λ = `damping` bounds the solution: what only a singular value far below λ could explain stays in the residual.
    Once no residual is longer than `tolerance`, it is small enough.
    """
    residual_RD = targets_RD.double().clone()
    gradient_RD = backward(residual_RD)
    solution_RD, search_RD = torch.zeros_like(gradient_RD), gradient_RD.clone()
    size_R1 = gradient_RD.square().sum(-1, keepdim=True)
    enough_R1 = (1e-16 * size_R1).clamp(min=max(1e-3 * damping, 1e-15) ** 2)  # below it, rounding
    for _ in range(iterations):
        image_RD = forward(search_RD)
        curvature_R1 = image_RD.square().sum(-1, keepdim=True)
        curvature_R1 = curvature_R1 + damping**2 * search_RD.square().sum(-1, keepdim=True)
        step_R1 = torch.where(size_R1 > enough_R1, size_R1 / curvature_R1.clamp(min=1e-300), 0.0)
        solution_RD, residual_RD = solution_RD + step_R1 * search_RD, residual_RD - step_R1 * image_RD
        gradient_RD = backward(residual_RD) - damping**2 * solution_RD
        before_R1, size_R1 = size_R1, gradient_RD.square().sum(-1, keepdim=True)
        if ((size_R1 <= enough_R1) | (residual_RD.norm(dim=-1, keepdim=True) <= tolerance)).all():
            break
        search_RD = gradient_RD + size_R1 / before_R1.clamp(min=1e-300) * search_RD
    return solution_RD, residual_RD


def _push(function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor) -> list[Tensor]:
    try:
        return _push_forward(function, w_W, tangents_RW)
    except RuntimeError:  # of an operation without a forward-mode derivative; any other fault is raised again there
        return _push_by_two_backward_passes(function, w_W, tangents_RW)


def _push_forward(function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor) -> list[Tensor]:
    with _derivatives(), torch.no_grad(), forward_ad.dual_level():
        outputs = function(forward_ad.make_dual(w_W.expand_as(tangents_RW).clone(), tangents_RW))
        pushed = [forward_ad.unpack_dual(output) for output in outputs]
        return [torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in pushed]


def _push_by_two_backward_passes(
    function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor
) -> list[Tensor]:
    """J v as the derivative of u ↦ Jᵀu along v: for operations without a forward-mode derivative."""
    pushed = []
    with _derivatives(), torch.enable_grad():
        w_RW = w_W.expand_as(tangents_RW).clone().requires_grad_()
        for output in function(w_RW):
            weights = torch.zeros_like(output, requires_grad=True)
            if not output.requires_grad:
                pushed.append(torch.zeros_like(output))
                continue
            (back_RW,) = torch.autograd.grad(output, w_RW, weights, create_graph=True, materialize_grads=True)
            (out,) = torch.autograd.grad(back_RW, weights, tangents_RW, retain_graph=True, materialize_grads=True)
            pushed.append(out)
    return [out.detach() for out in pushed]


@contextmanager
def _derivatives() -> Iterator[None]:
    """The one attention backend that has every derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
