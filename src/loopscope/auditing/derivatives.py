"""Derivatives of a map of one state, many directions at once, and whether they are what the map does.

Many perturbed copies of a state go through a model as rows of one batch; a row depends on the same row only.

A detach inside a model would look like a removal, so the search asks first whether changes do what derivatives say.

Shape legend: R rows, M named fields, W width of the state, F outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cosine_similarity

from loopscope.auditing.visibility import Fields, field_rows
from loopscope.errors import ProtocolError

if TYPE_CHECKING:
    from loopscope.auditing.window import Window

ROWS_AT_ONCE = 512
"""Copies of a state that go through a loop in one batch: enough for the matrix multiply, little memory."""
MOST_ITERATIONS = 400
"""Of conjugate gradients; what they leave by then counts as left."""

CHANGES = (1e-3, 1e-1)
"""Lengths, in that of the state, of the changes that a derivative along a named field is held against."""
CHANGES_SINGLE = (1e-2, 1e-1)
"""The same where the state is not float64: smaller ones drown in rounding."""
DISPUTED = 0.3
"""Relative difference from which derivative and change disagree, or two changes of another size do."""
COARSE_STEPS = (1e-2, 1e-1, 3e-1, 1.0)
"""Changes, in lengths of the state, that show where a function goes which jumps at smaller ones."""
COARSE_AGREEMENT = 0.5
"""Cosine of such a change and the declared derivative: one bit per channel still gives 0.6."""
EVERY_DERIVATIVE = SDPBackend.MATH
"""The one attention backend that has every derivative."""

Map = Callable[[Tensor], Tensor]
"""w_RW → anything with R rows; each row depends on the same row only."""


def push(function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor) -> list[Tensor]:
    """Jacobian-vector products of every output of `function` at w, one row for every tangent."""
    parts = []
    for rows_RW in tangents_RW.to(w_W.dtype).split(ROWS_AT_ONCE):
        try:
            parts.append(_push_forward(function, w_W, rows_RW))
        except RuntimeError:  # of an operation without a forward-mode derivative; any other fault is raised again there
            parts.append(_push_by_two_backward_passes(function, w_W, rows_RW))
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


def pull(function: Map, w_W: Tensor, cotangents_RF: Tensor) -> Tensor:
    """Vector-Jacobian products at w, one row for every cotangent."""
    with sdpa_kernel(EVERY_DERIVATIVE), torch.enable_grad():
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
    for _ in range(MOST_ITERATIONS):
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


def _push_forward(function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor) -> list[Tensor]:
    with sdpa_kernel(EVERY_DERIVATIVE), torch.no_grad(), forward_ad.dual_level():
        outputs = function(forward_ad.make_dual(w_W.expand_as(tangents_RW).clone(), tangents_RW))
        pushed = [forward_ad.unpack_dual(output) for output in outputs]
        return [torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in pushed]


def _push_by_two_backward_passes(
    function: Callable[[Tensor], list[Tensor]], w_W: Tensor, tangents_RW: Tensor
) -> list[Tensor]:
    """J v as the derivative of u ↦ Jᵀu along v: for operations without a forward-mode derivative."""
    pushed = []
    with sdpa_kernel(EVERY_DERIVATIVE), torch.enable_grad():
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


# --- derivatives against changes --------------------------------------------------------------------------------------


def changes(function: Map, w_W: Tensor, units_MW: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """What ±10 % of a state's length along each direction does, per unit, and whether ±0.1 % does the same.

    Where a function jumps (a coarse dtype, a quantisation) the two differ, and neither is an answer.
    """
    moved = []
    for step in CHANGES if w_W.dtype == torch.float64 else CHANGES_SINGLE:
        offsets_MW = (step * length * units_MW).to(w_W.dtype)
        ahead, behind = (with_the_same_noise(function, w_W + sign * offsets_MW).double() for sign in (1, -1))
        moved.append((ahead - behind) / (2 * step * length))
    return moved[0], ~disagree(moved[0], moved[1])


def disagree(one_MF: Tensor, other_MF: Tensor, floor: float = 0.0) -> Tensor:
    """Rows that are further apart than `DISPUTED` of the longer one, and than `floor`."""
    longer_M = torch.maximum(one_MF.norm(dim=-1), other_MF.norm(dim=-1))
    apart_M = (one_MF - other_MF).norm(dim=-1)
    return (apart_M > DISPUTED * longer_M) & (apart_M > floor)


def check_derivatives(window: Window, fields: Fields) -> str | None:
    """Derivatives of a token's loops and readouts against finite differences; a note where they change in jumps."""
    coarse = []
    num_loops = window.model.num_loops
    for k in range(1, num_loops + 1):
        checks = {
            f"loop {k}": (k - 1, partial(window.loop, k=k)),
            f"readout at loop {k}": (k, partial(window.shown, k=k)),
        }
        for what, (at, function) in checks.items():
            w_W, h_D = window.vector(at), window.h_D(at)
            random_RW = torch.randn(4, len(w_W), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            named_MW = field_rows(fields, h_D, len(w_W)).cpu()  # the search compares derivative and change along these
            directions_RW = random_RW - random_RW @ torch.linalg.pinv(named_MW) @ named_MW
            directions_RW = (directions_RW / directions_RW.norm(dim=-1, keepdim=True)).to(w_W) * window.lengths(at).to(
                w_W
            )
            directions_RW *= h_D.norm() if h_D.any() else len(h_D) ** 0.5  # a state may start from zeros
            if not _passes_its_derivative(what, function, w_W, directions_RW):
                coarse.append(what)
    if not coarse:
        return None
    return (
        f"the {coarse[0]} changes in jumps (a cast to a coarse dtype, a straight-through quantisation?), "
        f"{len(coarse)} of the {2 * num_loops} loops and readouts do: declared derivatives are believed"
    )


def _passes_its_derivative(what: str, function: Map, w_W: Tensor, directions_RW: Tensor) -> bool:
    """True where small changes confirm the derivative, False where the function is too coarse for small ones.

    A function is smooth here if its differences at two small steps agree; then they are its derivative, and another one
    is an error. A coarse function (bf16 inside, a rounding with a straight-through derivative) jumps: its differences
    at small steps are noise or zero. Over larger steps it must still move where its declared derivative points.
    """
    steps = (1e-5, 1e-4) if w_W.dtype == torch.float64 else (1e-2, 3e-2)
    nothing = 1e-6 * float(with_the_same_noise(function, w_W[None]).double().norm())
    if not math.isfinite(nothing):
        raise ProtocolError(f"the {what} makes NaN or infinity of a finite state h")
    small = _difference(function, w_W, directions_RW, steps[0])
    (tangents_RF,) = push(lambda w_RW: [function(w_RW)], w_W, directions_RW)
    tangent = tangents_RF.double().flatten()
    if not tangent.isfinite().all():
        return True  # the search says so, and of which state
    if float(small.norm()) > nothing and _close(tangent, small):
        return True
    less_small, *large = (_difference(function, w_W, directions_RW, step) for step in (steps[1], *COARSE_STEPS))
    if all(float(difference.norm()) <= nothing for difference in (small, less_small, *large)):
        return True
    smooth = float(small.norm()) > nothing and _close(small, less_small) and _close(less_small, small)
    if smooth or not any(_points_the_same_way(tangent, difference) for difference in large):
        raise ProtocolError(
            f"the {what} depends on its state h but does not pass on its derivative (a detach or no_grad inside?): "
            "nothing can be said about what it hides or carries"
        )
    return False


def _difference(function: Map, w_W: Tensor, directions_RW: Tensor, step: float) -> Tensor:
    """(f(h + step·v) − f(h − step·v))/(2·step) of all directions, each side with the same random numbers."""
    ahead, behind = (with_the_same_noise(function, w_W + sign * step * directions_RW) for sign in (1, -1))
    return ((ahead.double() - behind.double()) / (2 * step)).flatten()


def _points_the_same_way(tangent: Tensor, difference: Tensor) -> bool:
    """Roughly: as one bit per channel still does, and a derivative of which most is missing does not."""
    share = float(tangent.norm()) / max(float(difference.norm()), 1e-300)
    return float(cosine_similarity(tangent, difference, dim=0)) >= COARSE_AGREEMENT and 0.2 <= share <= 5


def _close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= DISPUTED * float(other.norm())
