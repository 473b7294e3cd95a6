"""Hand-written gradients for what a CPU spends time and memory on outside matrix products.

torch computes RMSNorm and SwiGLU on CPUs from many small operations, each a pass over memory, and keeps what they leave
behind, as well as the input of every matrix product. Here linear(norm(x)) and linear(silu(gate)·value) have one node
each, which keeps x or (gate, value) alone and makes the product's input again in the backward pass: a few passes over
memory for a third of what autograd would keep. They are used in training only, where one backward pass is all that is
asked for; in evaluation mode, where audits take forward-mode and second derivatives, and under compilation, the plain
operations run. Tests prove that both give the same values and gradients.

Shape legend: N tokens (all leading dimensions), D width, F hidden width of the feed-forward, M outputs of a linear map.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.errors import UnsupportedError

_ONE_BACKWARD_ONLY = "a model in training mode supports one backward pass only; call model.eval() for other derivatives"


def worthwhile(module: nn.Module, x: Tensor) -> bool:
    """Training eagerly on a CPU in full precision: where the hand-written gradients pay."""
    if not module.training:  # asked first, since decoding asks it in every layer
        return False
    eager = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    full_precision = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return eager and (x.device.type == "cpu" or (x.is_meta and _on_meta.get())) and full_precision


_on_meta: ContextVar[bool] = ContextVar("hand-written gradients on the meta device", default=False)


@contextmanager
def hand_written_everywhere(wanted: bool = True) -> Iterator[None]:
    """Run the hand-written gradients on the meta device too, where a step is counted as a CPU would run it."""
    before = _on_meta.set(wanted)
    try:
        yield
    finally:
        _on_meta.reset(before)


def fused_rms_norm(x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """RMSNorm that keeps x and 1/s alone, as the fused kernels of GPUs do."""
    return _RMSNorm.apply(x, gain_D, eps)


class RMSNorm(nn.RMSNorm):
    """y = g·x/√(mean x² + eps)."""

    def forward(self, x: Tensor) -> Tensor:
        if not worthwhile(self, x):
            return torch.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        assert self.eps is not None
        return _RMSNorm.apply(x, self.weight, self.eps)


def norm_linear(x: Tensor, norm: nn.Module | None, linear: nn.Module) -> Tensor:
    """linear(norm(x)), without keeping norm(x) where the hand-written gradients run; linear(x) without a norm."""
    if norm is None:
        return linear(x)
    if worthwhile(linear, x) and isinstance(norm, RMSNorm) and _untouched(norm, linear):
        return _NormLinear.apply(x, norm.weight, linear.weight, norm.eps)
    return linear(norm(x))


def swiglu_linear(hidden: Tensor, linear: nn.Module) -> Tensor:
    """linear(silu(gate)·value) of a hidden layer that holds gate and value side by side."""
    if worthwhile(linear, hidden) and _untouched(linear):
        return _SwiGLULinear.apply(hidden, linear.weight)
    gate, value = hidden.chunk(2, dim=-1)
    return linear(F.silu(gate) * value)


def _untouched(*modules: nn.Module) -> bool:
    """A plain norm or a linear map without bias, and without hooks, which a call past `forward` would skip."""
    plain = all(type(module) in (RMSNorm, nn.Linear) and getattr(module, "bias", None) is None for module in modules)
    return plain and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and r = 1/√(mean x² + eps); see `_norm_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        inverse = _inverse_scale(x, eps)
        ctx.save_for_backward(x, gain_D, inverse)
        return (x * inverse).mul_(gain_D)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        _refuse_second_derivatives()
        x, gain_D, inverse = ctx.saved_tensors
        return *_norm_backward(dy * gain_D, dy, x * inverse, gain_D, inverse), None


class _NormLinear(torch.autograd.Function):
    """y = (g∘û) Wᵀ with û = r·x: dW = dyᵀ(g∘û), and dy W is the gradient that the norm gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, weight_MD: Tensor, eps: float) -> Tensor:
        inverse = _inverse_scale(x, eps)
        ctx.save_for_backward(x, gain_D, weight_MD, inverse)
        return F.linear((x * inverse).mul_(gain_D), weight_MD)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        _refuse_second_derivatives()
        x, gain_D, weight_MD, inverse = ctx.saved_tensors
        unit = x * inverse
        normed = unit * gain_D
        d_weight_MD = dy.flatten(0, -2).T @ normed.flatten(0, -2)
        d_normed = dy @ weight_MD
        d_unit = torch.mul(d_normed, gain_D, out=normed)
        dx, d_gain_D = _norm_backward(d_unit, d_normed, unit, gain_D, inverse)
        return dx, d_gain_D, d_weight_MD, None


def _inverse_scale(x: Tensor, eps: float) -> Tensor:
    """r = 1/√(mean x² + eps) of every token."""
    if x.is_meta:  # torch would work out the shapes of five operations in Python: half the time of a plan
        return x.new_empty((*x.shape[:-1], 1))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(
    d_unit: Tensor, d_normed: Tensor, unit: Tensor, gain_D: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """dx = r·(g∘dy − û·⟨g∘dy, û⟩/d) and dg = Σ_n dy∘û, with û = r·x; `d_unit` = g∘dy is overwritten."""
    width = unit.shape[-1]
    product_ND = (d_normed * unit).reshape(-1, width)
    d_gain_D = product_ND.sum(0)
    radial_N = torch.mv(product_ND, gain_D).div_(-width)
    return d_unit.addcmul_(unit, radial_N.view(inverse.shape)).mul_(inverse), d_gain_D


class _SwiGLULinear(torch.autograd.Function):
    """y = p Wᵀ with p = silu(gate)∘value; the gradient of both halves is written into one tensor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_MF: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight_MF)
        gate, value = hidden.chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(value), weight_MF)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        _refuse_second_derivatives()
        hidden, weight_MF = ctx.saved_tensors
        gate, value = hidden.chunk(2, dim=-1)
        d_product = dy @ weight_MF
        d_hidden = torch.empty_like(hidden)
        d_gate, d_value = d_hidden.chunk(2, dim=-1)
        activated = F.silu(gate)
        torch.mul(activated, d_product, out=d_value)
        d_weight_MF = dy.flatten(0, -2).T @ activated.mul_(value).flatten(0, -2)
        torch.ops.aten.silu_backward.grad_input(d_product.mul_(value), gate, grad_input=d_gate)
        return d_hidden, d_weight_MF


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # create_graph: a later derivative would silently miss this operation
        raise UnsupportedError(_ONE_BACKWARD_ONLY)
