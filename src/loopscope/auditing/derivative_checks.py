"""Whether the derivatives that the search relies on are those of the functions: a detach would look like a removal.

Shape legend: R rows, W width of the joint state, F outputs.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from loopscope.auditing.derivatives import Map, push, with_the_same_noise
from loopscope.auditing.hidden import Fields, field_rows, lengths
from loopscope.auditing.window import Window
from loopscope.errors import ProtocolError

DERIVATIVE_WRONG = 0.3
"""Relative difference from which a derivative is not that of the function."""
COARSE_STEPS = (1e-2, 1e-1, 3e-1, 1.0)
"""Changes, in lengths of the state, that show where a function goes which jumps at smaller ones."""
COARSE_AGREEMENT = 0.5
"""Cosine of such a change and the declared derivative: one bit per channel still gives 0.6."""


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
            directions_RW = (directions_RW / directions_RW.norm(dim=-1, keepdim=True)).to(w_W) * lengths(window, at).to(
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
    return float((one - other).norm()) <= DERIVATIVE_WRONG * float(other.norm())
