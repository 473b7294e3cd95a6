"""Readouts show what they say and hide what they say (Lemma 1, arXiv 2606.24898)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.readouts import Alpha, MeanScale, Readout, Taper, make_readout

WIDTH, VOCABULARY, LOOPS = 24, 50, 3
BASE = ModelConfig(width=WIDTH, num_heads=4, num_loops=LOOPS, vocab_size=VOCABULARY)

EVERY_READOUT = {
    "rmsnorm": {"readout": "rmsnorm"},
    "layernorm": {"readout": "layernorm"},
    "raw": {"readout": "raw"},
    "final-only": {"readout": "final-only"},
    "alpha 0": {"readout": "alpha", "alpha": 0.0, "reference_scale": 3.0},
    "alpha 1e-5": {"readout": "alpha", "alpha": 1e-5},
    "alpha 0.5": {"readout": "alpha", "alpha": 0.5, "alpha_mode": "learned", "reference_mode": "learned"},
    "alpha 0.5, ema": {"readout": "alpha", "alpha": 0.5, "reference_mode": "ema"},
    "alpha 1": {"readout": "alpha", "alpha": 1.0, "alpha_mode": "per-loop"},
    "taper 1": {"readout": "taper", "taper_gate": 1.0},
    "taper 0.5": {"readout": "taper", "taper_gate": 0.5},
    "taper 0": {"readout": "taper", "taper_gate": 0.0},
}


def readout_of(name: str, seed: int = 0, eps: float = 1e-6) -> Readout:
    """In evaluation mode, float64, with random gains: trained readouts do not have gains of one."""
    readout = make_readout(replace(BASE, norm_eps=eps, **EVERY_READOUT[name])).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in readout.named_parameters():
        if parameter.numel() == WIDTH:
            noise = torch.rand(WIDTH, generator=generator, dtype=torch.float64)
            parameter.data = (0.5 + noise) if "bias" not in parameter_name else noise
    return readout


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def change(readout: Readout, k: int, before: torch.Tensor, after: torch.Tensor) -> float:
    shown, other = readout(before, k), readout(after, k)
    return ((shown - other).norm() / shown.norm()).item()


@pytest.mark.parametrize("name", EVERY_READOUT)
@given(
    seed=st.integers(0, 10**6),
    k=st.integers(1, LOOPS + 2),
    factor=st.floats(0.1, 10).filter(lambda a: abs(a - 1) > 0.2),
)
def test_scale_is_hidden_exactly_where_declared(name, seed, k, factor):
    readout, h_BTD = readout_of(name, seed), 3 * draw(seed, 1, 4, WIDTH)
    seen = change(readout, k, h_BTD, factor * h_BTD)
    if "scale" in readout.hides(k):
        assert seen < 1e-4
    else:
        assert seen > 1e-3


@pytest.mark.parametrize("name", EVERY_READOUT)
@given(seed=st.integers(0, 10**6), k=st.integers(1, LOOPS + 2), shift=st.floats(0.5, 5))
def test_the_mean_is_hidden_exactly_where_declared(name, seed, k, shift):
    readout, h_BTD = readout_of(name, seed), 3 * draw(seed, 1, 4, WIDTH)
    seen = change(readout, k, h_BTD, h_BTD + shift)
    if "mean" in readout.hides(k):
        assert seen < 1e-4
    else:
        assert seen > 1e-2


def radial_gradient(readout: Readout, k: int, h_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """⟨∇_h CE, h⟩ per token, and ⟨∇_f CE, f⟩: what it would be if the features were the state itself."""
    head_VD, targets = draw(1, VOCABULARY, WIDTH), torch.arange(h_BTD.shape[1])
    h_BTD = h_BTD.clone().requires_grad_()
    features_BTD = readout(h_BTD, k)
    features_BTD.retain_grad()
    F.cross_entropy((features_BTD @ head_VD.T)[0], targets, reduction="sum").backward()
    assert h_BTD.grad is not None and features_BTD.grad is not None
    return (h_BTD.grad * h_BTD).sum(-1), (features_BTD.grad * features_BTD).sum(-1)


def states_of_scale(scale: float, *, centred: bool = False) -> torch.Tensor:
    h_BTD = draw(3, 1, 6, WIDTH)
    if centred:
        h_BTD = h_BTD - h_BTD.mean(-1, keepdim=True)
    return scale * h_BTD / h_BTD.square().mean(-1, keepdim=True).sqrt()


SCALES = [1e-3, 0.03, 1.0, 100.0]
# Every readout and loop that declares to hide scale; "alpha 1e-5" only nearly does, and has the next test.
HIDING = [
    (name, k)
    for name in EVERY_READOUT
    for k in range(1, LOOPS + 3)
    if name != "alpha 1e-5" and "scale" in readout_of(name).hides(k)
]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("name", "k"), HIDING)
def test_lemma_1_radial_gradient_where_scale_is_hidden_is_the_eps_leak(name, k, scale):
    """The radial gradient is eps/(s² + eps) of the raw one, at every scale. LayerNorm's s is that of centred states."""
    eps, readout = 1e-6, readout_of(name, eps=1e-6)
    if name == "layernorm":
        readout.norm.bias.data.zero_()  # features the state has no part in
    shown, raw = radial_gradient(readout, k, states_of_scale(scale, centred=name == "layernorm"))
    torch.testing.assert_close(shown, eps / (scale**2 + eps) * raw, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["alpha 1e-5", "alpha 0.5", "alpha 0.5, ema", "alpha 1"])
def test_radial_gradient_through_alpha_is_alpha_times_the_raw_one_and_the_eps_leak(name, scale):
    eps, readout = 1e-6, readout_of(name, eps=1e-6)
    shown, raw = radial_gradient(readout, 1, states_of_scale(scale))
    share = (readout.exponent(1).item() * scale**2 + eps) / (scale**2 + eps)
    torch.testing.assert_close(shown, share * raw, rtol=1e-6, atol=1e-12)


def test_lemma_1_no_gradient_through_layernorm_points_along_the_mean():
    h_BTD = draw(3, 1, 6, WIDTH).requires_grad_()
    loss = (readout_of("layernorm")(h_BTD, 1) @ draw(1, VOCABULARY, WIDTH).T).logsumexp(-1).sum()
    (gradient,) = torch.autograd.grad(loss, h_BTD)
    assert gradient.sum(-1).abs().max() < 1e-9 * gradient.norm()


@pytest.mark.parametrize("name", EVERY_READOUT)
def test_radial_gradient_share_is_tiny_where_scale_is_hidden_and_large_elsewhere(name):
    readout, h_BTD = readout_of(name), draw(5, 1, 40, WIDTH)
    for k in range(1, LOOPS + 1):
        shown, raw = radial_gradient(readout, k, h_BTD)
        share = (shown.abs() / raw.abs()).median()
        assert share < 1e-4 if "scale" in readout.hides(k) else share > 0.1


def alpha_readout(**changes) -> Alpha:
    readout = make_readout(replace(BASE, readout="alpha", **changes)).double()
    assert isinstance(readout, Alpha)
    return readout


@given(alpha=st.floats(-1, 2), factor=st.floats(0.2, 5), seed=st.integers(0, 1000))
def test_alpha_readout_shows_scale_to_the_power_alpha(alpha, factor, seed):
    readout = make_readout(replace(BASE, readout="alpha", alpha=alpha, norm_eps=1e-12)).double()
    h_BTD = draw(seed, 1, 3, WIDTH)
    torch.testing.assert_close(readout(factor * h_BTD, 1), factor ** readout.exponent(1) * readout(h_BTD, 1))


def test_alpha_readout_spans_rmsnorm_to_raw():
    h_BTD = draw(0, 1, 3, WIDTH)
    norm, raw = alpha_readout(alpha=0.0, reference_scale=2.0), alpha_readout(alpha=1.0)
    torch.testing.assert_close(norm(h_BTD, 1), 2.0 * F.rms_norm(h_BTD, (WIDTH,), eps=BASE.norm_eps))
    torch.testing.assert_close(raw(h_BTD, 1), h_BTD)


def scale_of(h_BTD: torch.Tensor) -> torch.Tensor:
    return (h_BTD.square().mean(-1, keepdim=True) + BASE.norm_eps).sqrt()


def alpha_equation(h_BTD: torch.Tensor, exponent: float, reference: float) -> torch.Tensor:
    """γ·h/s with γ = s_ref^(1−a)·s^a."""
    s_BT1 = scale_of(h_BTD)
    return reference ** (1 - exponent) * s_BT1**exponent * h_BTD / s_BT1


def test_per_loop_alpha_gives_each_loop_its_own_exponent_and_the_last_to_those_beyond():
    readout, h_BTD = alpha_readout(alpha=0.5, alpha_mode="per-loop", reference_scale=2.0), 3 * draw(0, 1, 3, WIDTH)
    readout.alpha.data = torch.tensor([0.2, 0.0, 0.7], dtype=torch.float64)
    for k, exponent in {1: 0.2, 2: 0.0, 3: 0.7, 4: 0.7, 5: 0.7, 9: 0.7}.items():
        torch.testing.assert_close(readout(h_BTD, k), alpha_equation(h_BTD, exponent, 2.0))
        assert readout.hides(k) == ({"scale"} if exponent == 0 else set())


@pytest.mark.parametrize(("mode", "learned"), [("fixed", []), ("learned", [True]), ("per-loop", [False, True, False])])
def test_alpha_mode_decides_which_exponents_are_learned(mode, learned):
    """Which exponents get a gradient when loop 2 of 3 is supervised."""
    readout = alpha_readout(alpha=0.5, alpha_mode=mode)
    loss = readout(3 * draw(0, 1, 3, WIDTH), 2).square().sum()
    gradients = torch.autograd.grad(loss, exponents) if (exponents := list(readout.parameters())) else []
    assert [value != 0 for gradient in gradients for value in gradient.tolist()] == learned


def test_alpha_readout_uses_the_reference_scale_as_it_is_kept():
    """fixed: as configured; learned: the parameter; ema: the running mean, which takes in a training batch first."""
    h_BTD, settings = 3 * draw(0, 1, 3, WIDTH), {"alpha": 0.3, "reference_scale": 2.0}
    fixed, learned, ema = (alpha_readout(**settings, reference_mode=mode) for mode in ("fixed", "learned", "ema"))
    for readout in (fixed, learned, ema.eval()):
        torch.testing.assert_close(readout(h_BTD, 1), alpha_equation(h_BTD, 0.3, 2.0), rtol=1e-6, atol=0)
    assert not list(fixed.parameters()) and not list(ema.parameters())
    (parameter,) = learned.parameters()
    parameter.data.fill_(math.log(5.0))
    torch.testing.assert_close(learned(h_BTD, 1), alpha_equation(h_BTD, 0.3, 5.0), rtol=1e-6, atol=0)
    mean = 2.0 + 0.01 * (scale_of(h_BTD).mean().item() - 2.0)
    assert mean == pytest.approx(2.01, abs=0.005)
    torch.testing.assert_close(ema.train()(h_BTD, 1), alpha_equation(h_BTD, 0.3, mean), rtol=1e-6, atol=0)


def test_ema_reference_follows_training_batches_and_ignores_evaluation_and_non_finite_ones():
    mean_scale = MeanScale(1.0, momentum=0.5)
    assert mean_scale(torch.full((1, 1, 1), 3.0)).item() == 2.0
    assert mean_scale(torch.full((1, 1, 1), float("nan"))).item() == 2.0
    assert mean_scale(torch.full((1, 1, 1), float("inf"))).item() == 2.0
    mean_scale.eval()
    assert mean_scale(torch.full((1, 1, 1), 9.0)).item() == 2.0


def test_taper_goes_from_rmsnorm_to_a_linear_map_and_declares_it():
    readout = make_readout(replace(BASE, readout="taper")).double().eval()
    assert isinstance(readout, Taper)
    h_BTD = draw(0, 1, 3, WIDTH)
    torch.testing.assert_close(readout(h_BTD, 1), F.rms_norm(h_BTD, (WIDTH,), eps=BASE.norm_eps))
    readout.norm.taper_to(0.29)
    assert readout.hides(1) == {"scale"}
    readout.norm.taper_to(0.65)
    assert readout.norm.gate.item() == pytest.approx(0.5)
    assert not readout.hides(1)
    readout.norm.taper_to(1.0)
    torch.testing.assert_close(readout(5 * h_BTD, 1), 5 * readout(h_BTD, 1))


@pytest.mark.parametrize("gate", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("k", [1, LOOPS + 1])
def test_taper_mixes_the_normed_and_the_linear_map_by_its_gate(gate, k):
    """g·γ∘h/s + (1 − g)·c·γ₂∘h."""
    readout, h_BTD = readout_of("taper 1"), 3 * draw(0, 1, 3, WIDTH)
    assert isinstance(readout, Taper)
    with torch.no_grad():
        readout.norm.gate.fill_(gate)
        readout.norm.moments.copy_(torch.tensor([5.0, 2.0]))
        readout.norm.linear_weight.copy_(draw(1, WIDTH))
    gains = (readout.norm.weight, readout.norm.linear_weight)
    expected = gate * gains[0] * h_BTD / scale_of(h_BTD) + (1 - gate) * 2.5 * gains[1] * h_BTD
    torch.testing.assert_close(readout(h_BTD, k), expected, rtol=1e-6, atol=0)


def test_taper_leaves_from_the_gate_it_was_given():
    readout = readout_of("taper 0.5")
    assert isinstance(readout, Taper)
    for progress, gate in ((0.0, 0.5), (0.3, 0.5), (0.65, 0.25), (1.0, 0.0)):
        readout.norm.taper_to(progress)
        assert readout.norm.gate.item() == pytest.approx(gate)


def test_taper_calibrates_its_constant_on_training_batches_and_only_while_the_gate_is_closed():
    """c = E[‖γ∘h‖²/s] / E[‖γ∘h‖²]: the map that fits the norm best in least squares."""
    readout, h_BTD = readout_of("taper 1").train(), 100 * draw(0, 1, 3, WIDTH)
    assert isinstance(readout, Taper)
    with torch.no_grad():
        readout.norm.weight.copy_(draw(1, WIDTH))
    normed_BTD = readout(h_BTD, 1).detach()
    gained_BTD = readout.norm.weight.detach() * h_BTD
    best = torch.linalg.lstsq(gained_BTD.reshape(-1, 1), normed_BTD.reshape(-1, 1)).solution.item()
    assert readout.norm.constant.item() == pytest.approx(best, rel=1e-5)
    readout.norm.taper_to(0.3)
    assert torch.equal(readout.norm.linear_weight, readout.norm.weight), "γ₂ starts from γ"
    readout.norm.taper_to(0.5)
    readout(3 * h_BTD, 1)
    assert readout.norm.constant.item() == pytest.approx(best, rel=1e-5)


def test_final_only_norms_at_the_trained_depth_and_beyond_whatever_is_run():
    readout, h_BTD = readout_of("final-only"), draw(0, 1, 3, WIDTH)
    for k in (1, LOOPS - 1):
        assert torch.equal(readout(h_BTD, k), h_BTD)
    for k in (LOOPS, LOOPS + 1):
        assert not torch.allclose(readout(h_BTD, k), h_BTD)


@pytest.mark.parametrize("name", EVERY_READOUT)
def test_states_whose_squares_overflow_in_half_precision_are_read_out_as_in_double(name):
    h_BTD = (1000 * draw(0, 1, 3, WIDTH)).half()
    shown = readout_of(name).half()(h_BTD, LOOPS)
    assert shown.dtype == torch.float16
    expected = readout_of(name)(h_BTD.double(), LOOPS)
    torch.testing.assert_close(shown.double(), expected, rtol=1e-2, atol=1e-2)
