"""The fused loss equals the plain one in value and gradient, never holds all logits, and refuses what it cannot do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import loopscope as ls
from loopscope.errors import DataError, UnsupportedError
from loopscope.objectives.cross_entropy import choose_chunk_rows

LOOPS, TOKENS, WIDTH, VOCABULARY = 3, 29, 16, 53


def case(seed=0, dtype=torch.float32, loops=LOOPS, tokens=TOKENS, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    features = size * torch.randn(loops, tokens, WIDTH, generator=generator, dtype=dtype)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=dtype)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    return features.requires_grad_(), head.requires_grad_(), targets


def value_and_gradients(function, features, head, targets, weights=None, scale=1.0, **options):
    result = function(features, head, targets, loop_weights=weights, **options)
    inputs = [features, head, *([weights] if weights is not None and weights.requires_grad else [])]
    gradients = torch.autograd.grad(scale * result.loss, inputs)
    return result, [result.loss.detach(), result.ce_K, result.ce_KN, result.lse_KN, *gradients]


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()


def assert_same(features, head, targets, limit=1e-5, weights=None, scale=1.0, chunk_rows=None, **options):
    _, plain = value_and_gradients(ls.reference_cross_entropy, features, head, targets, weights, scale, **options)
    ours, fused = value_and_gradients(
        ls.multi_readout_cross_entropy, features, head, targets, weights, scale, chunk_rows=chunk_rows, **options
    )
    for mine, reference in zip(fused, plain, strict=True):
        assert mine.dtype == reference.dtype and mine.shape == reference.shape
        assert relative(mine, reference) < limit
    return ours


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([0.01, 1.0, 30.0]),
    chunk_rows=st.integers(1, 100),
    z_loss=st.sampled_from([0.0, 1e-3]),
    weight_shape=st.sampled_from(["none", "loops", "tokens"]),
    ignored=st.integers(0, TOKENS - 1),
    scale=st.sampled_from([1.0, 0.25, -3.0]),
)
def test_value_and_gradients_equal_the_plain_path(seed, size, chunk_rows, z_loss, weight_shape, ignored, scale):
    """Any chunking, weights, ignored targets and incoming gradient; also at a hundred nats, where p underflows."""
    features, head, targets = case(seed, size=size)
    targets[:ignored] = -100
    shape = {"none": None, "loops": (LOOPS,), "tokens": (LOOPS, TOKENS)}[weight_shape]
    weights = None
    if shape is not None:
        weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    assert_same(features, head, targets, weights=weights, scale=scale, chunk_rows=chunk_rows, z_loss=z_loss)


def test_it_is_right_in_float64_to_fourteen_digits():
    features, head, targets = case(dtype=torch.float64)
    assert_same(features, head, targets, limit=1e-13, z_loss=0.01, chunk_rows=10)


def test_the_default_is_the_mean_over_loops_of_ordinary_cross_entropy():
    features, head, targets = case()
    expected = torch.stack([torch.nn.functional.cross_entropy(f @ head.T, targets) for f in features])
    result = ls.multi_readout_cross_entropy(features, head, targets)
    torch.testing.assert_close(result.ce_K, expected.detach())
    torch.testing.assert_close(result.loss, expected.mean())


def test_margin_is_the_gap_between_the_two_largest_logits():
    features, head, targets = case()
    top = (features @ head.T).sort(-1, descending=True).values
    for function in (ls.multi_readout_cross_entropy, ls.reference_cross_entropy):
        result = function(features, head, targets, margin=True)
        torch.testing.assert_close(result.margin_KN, (top[..., 0] - top[..., 1]).detach())
    assert ls.multi_readout_cross_entropy(features, head, targets).margin_KN is None


def test_all_targets_ignored_is_a_loss_of_zero_with_zero_gradients():
    features, head, targets = case()
    result, values = value_and_gradients(ls.multi_readout_cross_entropy, features, head, torch.full_like(targets, -100))
    assert result.loss.item() == 0.0
    assert all(gradient.abs().max() == 0 for gradient in values[-2:])


def test_a_row_of_weight_zero_gets_no_gradient():
    features, head, targets = case()
    weights = torch.ones(LOOPS, TOKENS)
    weights[1, 4] = 0.0
    _, values = value_and_gradients(ls.multi_readout_cross_entropy, features, head, targets, weights)
    row_norms = values[-2].norm(dim=-1)
    assert row_norms[1, 4] == 0.0 and (row_norms > 0).sum() == LOOPS * TOKENS - 1


def test_a_second_backward_pass_over_a_retained_graph_raises():
    features, head, targets = case()
    loss = ls.multi_readout_cross_entropy(features, head, targets).loss
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="no retained graph"):
        loss.backward()


def test_gradients_of_several_calls_accumulate():
    features, head, targets = case()
    for _ in range(3):
        ls.multi_readout_cross_entropy(features, head, targets).loss.backward()
        torch.nn.utils.clip_grad_norm_([features], 1e9)
    _, once = value_and_gradients(ls.reference_cross_entropy, features, head, targets)
    assert relative(features.grad, 3 * once[-2]) < 1e-5


@pytest.mark.parametrize("function", [ls.multi_readout_cross_entropy, ls.reference_cross_entropy])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_what_stands_at_an_ignored_target_does_not_matter(function, z_loss):
    """Not even a NaN there reaches the loss or a gradient of another row."""
    features, head, targets = case()
    targets[4] = -100
    _, clean = value_and_gradients(function, features, head, targets, z_loss=z_loss)
    with torch.no_grad():
        features[:, 4] = float("nan")
    result, values = value_and_gradients(function, features, head, targets, z_loss=z_loss)
    assert torch.equal(result.loss, clean[0])
    if function is ls.multi_readout_cross_entropy:
        assert torch.equal(values[-1], clean[-1]) and values[-2].isfinite().all()


def test_no_tokens_at_all_is_a_loss_of_zero():
    features, head, targets = case(tokens=0)
    assert ls.multi_readout_cross_entropy(features, head, targets).loss.item() == 0.0


def test_it_runs_on_the_meta_device():
    features, head, targets = (tensor.detach().to("meta") for tensor in case())
    result = ls.multi_readout_cross_entropy(features.requires_grad_(), head, targets)
    result.loss.backward()
    assert features.grad.shape == features.shape


def test_only_what_needs_a_gradient_gets_one():
    features, head, targets = case()
    ls.multi_readout_cross_entropy(features.detach(), head, targets).loss.backward()
    assert features.grad is None and head.grad is not None
    ls.multi_readout_cross_entropy(features, head.detach(), targets).loss.backward()
    assert features.grad is not None
    with torch.no_grad():
        assert not ls.multi_readout_cross_entropy(features, head, targets).loss.requires_grad


@pytest.mark.parametrize("features_dtype", [torch.float32, torch.bfloat16])
def test_under_bf16_autocast_it_is_as_close_to_the_truth_as_the_plain_path(features_dtype):
    """The truth is float32; autocast rounds the multiplies, and nothing else may be lost."""
    features, head, targets = case(tokens=200)
    _, truth = value_and_gradients(ls.reference_cross_entropy, features, head, targets)
    inputs = features.detach().to(features_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, plain = value_and_gradients(ls.reference_cross_entropy, inputs, head, targets)
        _, fused = value_and_gradients(ls.multi_readout_cross_entropy, inputs, head, targets, chunk_rows=64)
    assert fused[-2].dtype == features_dtype and fused[-1].dtype == torch.float32
    for mine, theirs, true in zip(fused, plain, truth, strict=True):
        assert relative(mine.float(), true) < 1.5 * relative(theirs.float(), true) + 1e-3


def test_a_pure_bf16_model_keeps_its_dtype_and_float32_statistics():
    features, head, targets = (t.detach().bfloat16().requires_grad_() if t.is_floating_point() else t for t in case())
    result, values = value_and_gradients(ls.multi_readout_cross_entropy, features, head, targets)
    assert result.loss.dtype == result.ce_KN.dtype == torch.float32
    assert values[-1].dtype == values[-2].dtype == torch.bfloat16
    assert relative(values[-2].float(), value_and_gradients(ls.reference_cross_entropy, *case())[1][-2]) < 0.02


def test_under_compile_it_falls_back_and_stays_right():
    features, head, targets = case()

    @torch.compile(backend="eager")
    def step(features, head):
        return ls.multi_readout_cross_entropy(2 * features, head, targets).loss * 3

    expected = ls.reference_cross_entropy(2 * features, head, targets).loss * 3
    compiled = torch.autograd.grad(step(features, head), (features, head))
    for mine, reference in zip(compiled, torch.autograd.grad(expected, (features, head)), strict=True):
        assert relative(mine, reference) < 1e-5


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_double_backward_raises_also_when_another_term_would_hide_the_zero():
    features, head, targets = case()
    loss = ls.multi_readout_cross_entropy(features, head, targets).loss + features.pow(3).sum()
    with pytest.raises(UnsupportedError, match="double backward"):
        torch.autograd.grad(loss, features, create_graph=True)


def test_forward_mode_raises():
    features, head, targets = case()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward mode"):
        dual = forward_ad.make_dual(features.detach(), torch.ones_like(features))
        ls.multi_readout_cross_entropy(dual, head, targets)


def test_functional_transforms_raise():
    features, head, targets = (tensor.detach() for tensor in case())

    def loss(features):
        return ls.multi_readout_cross_entropy(features, head, targets).loss

    for call in (
        lambda: torch.func.grad(loss)(features),
        lambda: torch.func.jvp(loss, (features,), (features,)),
        lambda: torch.func.hessian(loss)(features),
    ):
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            call()


def test_the_reference_path_supports_every_derivative():
    """What an audit relies on: a raw readout shows a non-zero radial derivative in both modes."""
    features, head, targets = (t.detach().double() if t.is_floating_point() else t for t in case())

    def loss(features):
        return ls.reference_cross_entropy(features, head, targets, z_loss=0.01).loss

    _, forward = torch.func.jvp(loss, (features,), (features,))
    reverse = (torch.func.grad(loss)(features) * features).sum()
    torch.testing.assert_close(forward, reverse)
    assert forward.abs() > 1e-3
    _, curvature = torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (features,))[1], (features,), (features,))
    assert curvature.abs() > 1e-3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f, w, t: (f[0], w, t), r"expected features \(loops, tokens, width\)"),
        (lambda f, w, t: (f, w[:, 1:], t), "and head"),
        (lambda f, w, t: (f, w, t[1:]), f"expected {TOKENS} targets of int64"),
        (lambda f, w, t: (f, w, t.int()), "int32"),
        (lambda f, w, t: (f, w, t + VOCABULARY), f"outside the vocabulary of {VOCABULARY}"),
        (lambda f, w, t: (f, w, t - VOCABULARY - 1), "outside the vocabulary"),
        (lambda f, w, t: (f, w.double(), t), "cast one, or use autocast"),
    ],
)
@pytest.mark.parametrize("function", [ls.multi_readout_cross_entropy, ls.reference_cross_entropy])
def test_wrong_inputs_are_refused_in_a_sentence(function, change, sentence):
    with pytest.raises(DataError, match=sentence):
        function(*change(*case()))


def test_a_call_without_loops_or_with_empty_chunks_is_refused():
    features, head, targets = case()
    with pytest.raises(DataError, match="at least one loop"):
        ls.multi_readout_cross_entropy(features[:0], head, targets)
    with pytest.raises(DataError, match="chunk_rows must be at least 1"):
        ls.multi_readout_cross_entropy(features, head, targets, chunk_rows=0)


def test_weights_of_a_wrong_shape_are_refused():
    with pytest.raises(DataError, match=rf"must be \({LOOPS},\) or \({LOOPS}, {TOKENS}\)"):
        ls.multi_readout_cross_entropy(*case(), loop_weights=torch.ones(TOKENS))


def test_non_finite_features_give_a_non_finite_loss_instead_of_hiding():
    features, head, targets = case()
    with torch.no_grad():
        features[1, 3] = float("nan")
    result = ls.multi_readout_cross_entropy(features, head, targets)
    assert result.loss.isnan()
    assert result.ce_K.isnan().tolist() == [False, True, False]


# --- memory ----------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_tensor_is_ever_larger_than_a_chunk_of_logits():
    loops, tokens, width, vocabulary, chunk = 4, 500, 8, 3000, 50
    features, head = (
        torch.randn(loops, tokens, width, requires_grad=True),
        torch.randn(vocabulary, width, requires_grad=True),
    )
    with LargestTensor() as seen:
        result = ls.multi_readout_cross_entropy(features, head, torch.randint(vocabulary, (tokens,)), chunk_rows=chunk)
        result.loss.backward()
    assert seen.largest == chunk * vocabulary


@given(rows=st.integers(1, 10**7), vocabulary=st.integers(2, 300_000))
def test_the_chunk_is_bounded_and_its_reason_is_true(rows, vocabulary):
    choice = choose_chunk_rows(rows, vocabulary, 4, "cpu")
    chunk = int(choice.value)
    assert 1 <= chunk <= max(rows, 1)
    assert chunk * vocabulary * 4 <= 24 * 2**20 or chunk <= 128
    claims = {
        f"one chunk holds all {rows} rows": chunk == rows,
        "the least that keeps the matrix multiply busy": chunk == 128,
        "more rows gain nothing": chunk == 1024,
        "the largest power of two within 24 MiB": chunk * vocabulary * 4 <= 24 * 2**20 < 2 * chunk * vocabulary * 4,
    }
    assert [true for claim, true in claims.items() if claim in choice.reason] == [True]
