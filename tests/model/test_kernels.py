"""Hand-written gradients equal the plain operations, and refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import loopscope as ls
from loopscope.errors import UnsupportedError
from loopscope.model.kernels import RMSNorm, swiglu


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 4, 8)])
def test_the_norm_equals_torchs_in_value_and_gradients_at_every_scale(scale, shape):
    norm = RMSNorm(8, eps=1e-6).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = (scale * drawn(*shape)).detach().requires_grad_()
    weights = torch.randn(shape, dtype=torch.float64)
    plain = F.rms_norm(x, (8,), norm.weight, 1e-6)
    for ours, theirs in zip(
        (norm(x), *torch.autograd.grad((weights * norm(x)).sum(), (x, norm.weight))),
        (plain, *torch.autograd.grad((weights * plain).sum(), (x, norm.weight))),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_norm_takes_inputs_that_are_views():
    """qk-norm reads a transposed slice of the fused projection."""
    norm = RMSNorm(4, eps=1e-6).double()
    base = drawn(2, 5, 3, 4)
    view = base.transpose(1, 2)
    (ours,) = torch.autograd.grad(norm(view).pow(2).sum(), base)
    (theirs,) = torch.autograd.grad(F.rms_norm(view, (4,), norm.weight, 1e-6).pow(2).sum(), base)
    torch.testing.assert_close(ours, theirs)


def test_swiglu_equals_its_equation_in_value_and_gradient():
    hidden, module = drawn(3, 4, 10), torch.nn.Identity()
    gate, value = hidden.chunk(2, dim=-1)
    plain = gate * torch.sigmoid(gate) * value
    ours = swiglu(hidden, module)
    torch.testing.assert_close(ours, plain)
    weights = torch.randn_like(plain)
    gradients = [torch.autograd.grad((weights * out).sum(), hidden)[0] for out in (ours, plain)]
    torch.testing.assert_close(*gradients)


def test_a_training_step_is_the_same_with_and_without_them(tiny, ids_BT):
    """Evaluation mode runs the plain operations; without dropout the two modes must agree."""
    model = ls.build(tiny, seed=0).double()
    gradients = []
    for mode in (True, False):
        model.train(mode)
        loss = model(ids_BT, ids_BT, ls.Objective(ls.ObjectiveConfig())).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain)


def test_second_derivatives_raise_in_training_mode_and_work_in_evaluation_mode():
    norm, x = RMSNorm(8, eps=1e-6).double(), drawn(3, 8)
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        torch.autograd.grad(swiglu(x, norm).sum(), x, create_graph=True)
    norm.eval()
    (first,) = torch.autograd.grad(norm(x).pow(3).sum() + swiglu(x, norm).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.norm() > 0


def test_forward_mode_raises_in_training_mode_and_works_in_evaluation_mode():
    norm, x = RMSNorm(8, eps=1e-6).double(), torch.randn(3, 8, dtype=torch.float64)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError):
            norm(forward_ad.make_dual(x, x))
        radial = forward_ad.unpack_dual(norm.eval()(forward_ad.make_dual(x, x))).tangent
    assert radial.abs().max() < 1e-5, "scaling the input does not change the output"
