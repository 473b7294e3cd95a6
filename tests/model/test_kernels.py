"""Hand-written gradients equal the plain operations, and refuse what they cannot do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

import loopscope as ls
from loopscope.errors import UnsupportedError
from loopscope.model.kernels import RMSNorm, norm_linear, swiglu_linear


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


def assert_same_values_and_gradients(ours, plain, inputs):
    torch.testing.assert_close(ours, plain)
    weights = torch.randn_like(plain)
    gradients = [torch.autograd.grad((weights * out).sum(), inputs) for out in (ours, plain)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)


def test_swiglu_and_its_matrix_equal_their_equation_in_value_and_gradients():
    hidden, out = drawn(3, 4, 10), linear(5, 7)
    gate, value = hidden.chunk(2, dim=-1)
    plain = F.linear(gate * torch.sigmoid(gate) * value, out.weight)
    assert_same_values_and_gradients(swiglu_linear(hidden, out), plain, (hidden, out.weight))


def test_a_norm_and_its_matrix_equal_their_equation_in_value_and_gradients():
    x, norm, up = drawn(3, 4, 8), RMSNorm(8, eps=1e-6).double(), linear(8, 6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    plain = F.linear(F.rms_norm(x, (8,), norm.weight, 1e-6), up.weight)
    assert_same_values_and_gradients(norm_linear(x, norm, up), plain, (x, norm.weight, up.weight))


def test_a_gain_of_zero_still_gets_its_gradient():
    x, norm, up = drawn(3, 8), RMSNorm(8, eps=1e-6).double(), linear(8, 6)
    with torch.no_grad():
        norm.weight[2] = 0
    plain = F.linear(F.rms_norm(x, (8,), norm.weight, 1e-6), up.weight)
    assert_same_values_and_gradients(norm_linear(x, norm, up), plain, (x, norm.weight))


def test_the_input_of_a_matrix_is_not_kept():
    x, norm, up, out = drawn(3, 8), RMSNorm(8, eps=1e-6).double(), linear(8, 10), linear(5, 8)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu_linear(norm_linear(x, norm, up), out)
    assert sorted(tensor.numel() for tensor in kept) == sorted([24, 8, 80, 3, 30, 40])  # x, g, W, r; hidden, W


def test_hooks_on_the_modules_still_run_in_training():
    """Somebody who hooks a projection must see it called, so such a layer takes the plain path."""
    x, norm, up, out = drawn(3, 8), RMSNorm(8, eps=1e-6).double(), linear(8, 10), linear(5, 8)
    seen = []
    for module in (norm, up, out):
        module.register_forward_hook(lambda module, _, __: seen.append(module))
    swiglu_linear(norm_linear(x, norm, up), out)
    assert seen == [norm, up, out]


@pytest.mark.parametrize("other", [nn.Linear(8, 6, dtype=torch.float64), nn.Identity()], ids=["bias", "identity"])
def test_other_maps_take_the_plain_path(other):
    x, norm = drawn(3, 8), RMSNorm(8, eps=1e-6).double()
    torch.testing.assert_close(norm_linear(x, norm, other), other(F.rms_norm(x, (8,), norm.weight, 1e-6)))


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
    norm, out, x = RMSNorm(8, eps=1e-6).double(), linear(4, 8), drawn(3, 8)
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match=r"call model\.eval\(\)"):
        torch.autograd.grad(swiglu_linear(x, out).sum(), x, create_graph=True)
    norm.eval()
    out.eval()
    (first,) = torch.autograd.grad(norm(x).pow(3).sum() + swiglu_linear(x, out).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert second.norm() > 0


def test_forward_mode_raises_in_training_mode_and_works_in_evaluation_mode():
    norm, x = RMSNorm(8, eps=1e-6).double(), torch.randn(3, 8, dtype=torch.float64)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError):
            norm(forward_ad.make_dual(x, x))
        radial = forward_ad.unpack_dual(norm.eval()(forward_ad.make_dual(x, x))).tangent
    assert radial.abs().max() < 1e-5, "scaling the input does not change the output"
