"""RMSNorm and SwiGLU with hand-written gradients: most of a CPU's training time outside matrix products.

torch computes RMSNorm and SwiGLU on CPUs from many small operations, each a pass over memory, and saves what they leave
behind. Here each has one node: fewer passes, fewer saved tensors. They are used in training only, where one backward
pass is all that is asked for; in evaluation mode, where audits take forward-mode and second derivatives, and under
compilation, the plain operations run. Tests prove that both give the same values and gradients.

Shape legend: N tokens (all leading dimensions), D width, F hidden width of the feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.errors import UnsupportedError

_ONE_BACKWARD_ONLY = "a model in training mode supports one backward pass only; call model.eval() for other derivatives"


def worthwhile(module: nn.Module, x: Tensor) -> bool:
    """Training eagerly on a CPU in full precision: where the hand-written gradients pay."""
    eager = module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    full_precision = x.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    return eager and x.device.type == "cpu" and full_precision


class RMSNorm(nn.RMSNorm):
    """y = g·x/√(mean x² + eps)."""

    def forward(self, x: Tensor) -> Tensor:
        if not worthwhile(self, x):
            return super().forward(x)
        assert self.eps is not None
        return _RMSNorm.apply(x, self.weight, self.eps)


def swiglu(hidden: Tensor, module: nn.Module) -> Tensor:
    """silu(gate)·value of a hidden layer that holds gate and value side by side."""
    if worthwhile(module, hidden):
        return _SwiGLU.apply(hidden)
    gate, value = hidden.chunk(2, dim=-1)
    return F.silu(gate) * value


class _RMSNorm(torch.autograd.Function):
    """With r = 1/√(mean x² + eps): dx = r·(g∘dy) − x·r³/d·⟨g∘dy, x⟩ and dg = Σ_n r·dy∘x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.rsqrt(norm.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, gain_D, inverse)
        return (x * inverse).mul_(gain_D)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        _refuse_second_derivatives()
        x, gain_D, inverse = ctx.saved_tensors
        width = x.shape[-1]
        product_ND = (dy * x).reshape(-1, width)
        inverse_N = inverse.reshape(-1)
        d_gain_D = inverse_N @ product_ND
        radial_N = (product_ND @ gain_D).mul_(inverse_N.pow(3)).div_(-width)
        dx = (dy * gain_D).mul_(inverse)
        return dx.addcmul_(x, radial_N.view(inverse.shape)), d_gain_D, None


class _SwiGLU(torch.autograd.Function):
    """Saves the hidden layer only; the gradient of both halves is written into one tensor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        gate, value = hidden.chunk(2, dim=-1)
        return F.silu(gate).mul_(value)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        _refuse_second_derivatives()
        (hidden,) = ctx.saved_tensors
        gate, value = hidden.chunk(2, dim=-1)
        d_hidden = torch.empty_like(hidden)
        d_gate, d_value = d_hidden.chunk(2, dim=-1)
        torch.mul(F.silu(gate), dy, out=d_value)
        torch.ops.aten.silu_backward.grad_input(dy * value, gate, grad_input=d_gate)
        return d_hidden


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # create_graph: a later derivative would silently miss this operation
        raise UnsupportedError(_ONE_BACKWARD_ONLY)
