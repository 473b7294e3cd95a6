"""Norm placements: everything one decides is in its class, which is checked against its own equations."""

from __future__ import annotations

import math
import typing
from dataclasses import replace

import pytest
import torch
from test_plan import RealStep, configure

import loopscope as ls
from loopscope.config import ModelConfig, config_to_yaml
from loopscope.model.layers import Layer
from loopscope.model.norms import NORM_PLACEMENTS, PreNorm, make_norm
from loopscope.results.checkpoint import SavedWeights
from loopscope.training import checkpoint
from loopscope.training.counting import Kernels, count_step
from loopscope.training.optimizers import Optimizers
from loopscope.training.plan import plan_memory

SLOT = ("core", 0, 0)
MLPS = ("swiglu", "gelu", "relu2")
NORMS = ("rmsnorm", "layernorm")


# --- the published placements, from their equations ------------------------------------------------------------------


def normed(weights, name, x, eps):
    """RMSNorm, or LayerNorm where there is a bias."""
    bias = weights.get(f"{name}.bias")
    centred = x if bias is None else x - x.mean(-1, keepdim=True)
    unit = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
    return unit * weights[f"{name}.weight"] + (0 if bias is None else bias)


def heads(weights, config, x):
    """softmax(QKᵀ/√C) V of every head, side by side; key/value heads are repeated for the queries that share them."""
    batch, tokens, width = x.shape
    head_width = width // config.num_heads
    keys = config.kv_heads * head_width
    q, k, v = (
        part.reshape(batch, tokens, -1, head_width).transpose(1, 2)
        for part in (x @ weights["attention.qkv.weight"].T).split([width, keys, keys], -1)
    )
    k, v = (part.repeat_interleave(config.num_heads // config.kv_heads, 1) for part in (k, v))
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(head_width)).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def activation(kind, hidden):
    gate, value = hidden.chunk(2, -1)
    return {
        "swiglu": lambda: gate * torch.sigmoid(gate) * value,
        "gelu": lambda: hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2,
        "relu2": lambda: hidden.clamp(min=0) ** 2,
    }[kind]()


def normformer(weights, config, x):
    """x + LN_a(W_O [γ_i head_i](LN x)), then w_res∘x + W_2 LN_f(act(W_1 LN x))."""
    eps = config.norm_eps
    scaled = weights["attention_norms.inner.weight"][:, None] * heads(
        weights, config, normed(weights, "attention_norms.norm", x, eps)
    )
    written = scaled.flatten(-2) @ weights["attention.out.weight"].T
    x = x + normed(weights, "attention_norms.branch_norm", written, eps)
    hidden = normed(weights, "feed_forward_norms.norm", x, eps) @ weights["feed_forward.up.weight"].T
    inside = normed(weights, "feed_forward_norms.inner", activation(config.mlp, hidden), eps)
    return weights["feed_forward_norms.residual"] * x + inside @ weights["feed_forward.out.weight"].T


def deepnorm(weights, config, x):
    """LN(α·x + attention(x)), then LN(α·x + feed_forward(x)), with α = (2M)^¼ for M unrolled layers."""
    alpha = (2 * (config.prelude_layers + config.num_layers * config.num_loops + config.coda_layers)) ** 0.25
    written = heads(weights, config, x).flatten(-2) @ weights["attention.out.weight"].T
    x = normed(weights, "attention_norms.sum_norm", alpha * x + written, config.norm_eps)
    hidden = x @ weights["feed_forward.up.weight"].T
    written = activation(config.mlp, hidden) @ weights["feed_forward.out.weight"].T
    return normed(weights, "feed_forward_norms.sum_norm", alpha * x + written, config.norm_eps)


REFERENCES = {"normformer": normformer, "deepnorm": deepnorm}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("placement", REFERENCES)
def test_a_layer_computes_the_published_equations(tiny, placement, mlp, norm):
    """In both modes: the hand-written gradients run in training, plain operations in evaluation."""
    config = replace(tiny, norm_placement=placement, mlp=mlp, norm=norm, num_kv_heads=2)
    layer = Layer(config).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norms" in name:
                parameter.uniform_(0.5, 1.5)
    x_BTD = 3 * torch.randn(2, 5, tiny.width, dtype=torch.float64)
    expected_BTD = REFERENCES[placement](layer.state_dict(), config, x_BTD)
    for training in (True, False):
        written_BTD = layer.train(training)(x_BTD, None, None, SLOT)
        torch.testing.assert_close(written_BTD, expected_BTD, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("placement", REFERENCES)
def test_a_training_step_reaches_every_parameter_and_is_the_same_with_and_without_own_kernels(
    tiny, ids_BT, placement, mlp
):
    model = ls.build(replace(tiny, norm_placement=placement, mlp=mlp), seed=0).double()
    gradients = []
    for training in (True, False):
        loss = model.train(training)(ids_BT, ids_BT, ls.Objective(ls.ObjectiveConfig())).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, plain in zip(*gradients, strict=True):
        assert ours.isfinite().all() and ours.any()
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("placement", REFERENCES)
def test_decoding_through_a_cache_equals_the_whole_sequence(tiny, ids_BT, placement, mlp):
    config = replace(tiny, norm_placement=placement, mlp=mlp, positions="rope", num_kv_heads=2, coda_layers=1)
    model = ls.build(config, seed=0).double().eval()
    whole = [model.features(state, k) for k, state in enumerate(ls.run_loops(model, ids_BT).states)]
    cache, parts = ls.KVCache(len(ids_BT)), []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        view = cache.append(end - start)
        states = ls.run_loops(model, ids_BT[:, start:end], cache=view).states
        parts.append([model.features(state, k, view) for k, state in enumerate(states)])
    for k in range(1, tiny.num_loops + 1):
        torch.testing.assert_close(torch.cat([part[k] for part in parts], dim=1), whole[k], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("placement", REFERENCES)
def test_a_trained_model_comes_back_from_its_checkpoint_and_its_configuration(tiny, ids_BT, placement, tmp_path):
    config = ls.Config(model=replace(tiny, norm_placement=placement))
    model, optimizers = _trained_one_step(config, ids_BT)
    path = checkpoint.save(tmp_path, model, optimizers, SavedWeights(step=1))
    (tmp_path / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    again = ls.build(ls.load_config(tmp_path / "config.yaml").model, seed=1)
    checkpoint.load_model_tensors(again, checkpoint.load(path).model_tensors(), path)
    assert torch.equal(ls.run_loops(again, ids_BT).states[-1].h_BTD, ls.run_loops(model, ids_BT).states[-1].h_BTD)


def _trained_one_step(config, ids_BT):
    """One step away from its initialisation, so that no scale is still 1 by construction."""
    model = ls.build(config.model, seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizers = Optimizers(model, config.training)
    model(ids_BT, ids_BT, ls.Objective(config.objective)).loss.backward()
    optimizers.step(1e-2)
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    return model, optimizers


@pytest.mark.parametrize("mlp", MLPS)
def test_deepnorm_starts_with_smaller_values_outputs_and_feed_forwards_but_not_queries_and_keys(tiny, mlp):
    """M = 1 + 2·3 + 1 = 8 unrolled layers: β = 64^−¼ = 0.3536 and α = 16^¼ = 2."""
    config = replace(tiny, prelude_layers=1, coda_layers=1, num_kv_heads=2, mlp=mlp)
    plain, deep = (ls.build(replace(config, norm_placement=name), seed=0) for name in ("pre", "deepnorm"))
    layers = [layer for layer in deep.modules() if isinstance(layer, Layer)]
    assert len(layers) == 4
    assert {norms.alpha for layer in layers for norms in (layer.attention_norms, layer.feed_forward_norms)} == {2.0}
    beta, weights = 0.35355339, deep.state_dict()
    for name, weight in plain.state_dict().items():
        if name.endswith(("attention.out.weight", "feed_forward.up.weight", "feed_forward.out.weight")):
            weight = beta * weight
        elif name.endswith("attention.qkv.weight"):
            weight = weight * torch.tensor([1.0] * (32 + 16) + [beta] * 16)[:, None]  # 4 queries, 2 keys, 2 values
        if "norms.norm" not in name:  # deepnorm has no norm before a branch
            torch.testing.assert_close(weights[name], weight)


def test_under_scaled_initialisation_deepnorms_factor_takes_the_place_of_the_depths(tiny):
    """M = 6: outputs have std 0.02·48^−¼ = 0.0076, not 0.02/√12 = 0.0058 nor both."""
    model = ls.build(replace(tiny, norm_placement="deepnorm", init="scaled"), seed=0)
    for layer in model.recurrence.core.layers:
        for out in (layer.attention.out, layer.feed_forward.out):
            assert out.weight.std().item() == pytest.approx(0.0076, rel=0.1)
        assert layer.attention.qkv.weight[:64].std().item() == pytest.approx(0.02, rel=0.1)


# --- what each does to scale -----------------------------------------------------------------------------------------

OPTIONS = ls.AuditOptions(states=3, prefix=8, rollout=5)


def audited_scale(model, ids_BT):
    result = ls.audit(model, [ids_BT], options=OPTIONS)
    return result.verdict, result.variable("scale").verdict, result.blind_directions.dimension


def test_normformer_carries_the_scale_that_an_rmsnorm_readout_hides(tiny, ids_BT):
    """At w_res = 1 a sublayer is x + f(LN x), and f forgets the size of x, so that the loop is h + B(norm h).

    Lemma 2: a change of h along itself leaves B alone (at leading order in 1/s) and arrives with gain 1, along the new
    state, which the rmsnorm readout hides again. It is written (the loop's Jacobian is I + O(1/s), of full rank), and
    read: s decides how much B turns the direction. So scale is blind, and the only blind direction; a raw readout
    shows it.
    """
    config = replace(tiny, vocab_size=80, norm_placement="normformer")
    assert audited_scale(ls.build(config, seed=0), ids_BT) == ("blind-spot", "blind", 1)
    assert audited_scale(ls.build(replace(config, readout="raw"), seed=0), ids_BT) == ("controlled", "visible", 0)


def test_a_residual_weight_below_one_lets_scale_die_out(tiny, ids_BT):
    """w_res = 0.7 in both layers: a loop carries scale with gain 0.49 at leading order, far below 0.95: damped."""
    model = ls.build(replace(tiny, vocab_size=80, norm_placement="normformer"), seed=0)
    with torch.no_grad():
        for layer in model.recurrence.core.layers:
            layer.feed_forward_norms.residual.fill_(0.7)
    assert audited_scale(model, ids_BT) == ("controlled", "damped", 0)


def test_deepnorm_writes_no_scale(tiny, ids_BT):
    """h_k = LN(…) with gain 1 has mean h² = 1 whatever went in, so ⟨h_k, dh_k⟩ = 0 for whatever the loop can write.

    The rmsnorm readout hides the direction h_k alone, and that is orthogonal to the range of the loop's Jacobian: no
    loop writes it, and scale is out of the loop. A raw readout shows it.
    """
    config = replace(tiny, vocab_size=80, norm_placement="deepnorm")
    model = ls.build(config, seed=0)
    state = model.embed(ids_BT)
    for size in (1e-2, 1.0, 1e4):
        scale_BT = model.loop(state.with_h(size * state.h_BTD), 1).h_BTD.square().mean(-1).sqrt()
        torch.testing.assert_close(scale_BT, torch.ones_like(scale_BT), rtol=1e-3, atol=0)
    assert audited_scale(model, ids_BT) == ("controlled", "removed", 0)
    assert audited_scale(ls.build(replace(config, readout="raw"), seed=0), ids_BT) == ("controlled", "visible", 0)


# --- a placement of one's own ----------------------------------------------------------------------------------------


def test_every_placement_of_the_configuration_has_its_class():
    words = typing.get_args(typing.get_type_hints(ModelConfig)["norm_placement"])
    assert sorted(words) == sorted(NORM_PLACEMENTS)


class MadeUp(PreNorm):
    """x/2 + norm''(f(norm x)) with norm' inside f, and last matrices a tenth of their size: all of it in one class."""

    def __init__(self, config, branch):
        super().__init__(config, branch)
        self.inner = make_norm(config.norm, config.width if branch == "attention" else config.mlp_hidden, 1e-6)
        self.closing = make_norm(config.norm, config.width, 1e-6)

    def after(self, x_BTD, branch_BTD):
        return x_BTD / 2 + self.closing(branch_BTD)

    def initialise(self, branch, config):
        with torch.no_grad():
            branch.out.weight.mul_(0.1)


@pytest.fixture
def made_up(monkeypatch):
    """One class and one entry of the registry, under a name that the configuration knows already."""
    monkeypatch.setitem(NORM_PLACEMENTS, "pre", MadeUp)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu", "relu2"])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_made_up_placement_is_planned_from_its_class_alone(made_up, mlp, norm):
    config = configure({"mlp": mlp, "norm": norm, "positions": "rope", "qk_norm": True})
    step = RealStep(config)
    step.forward()
    memory = plan_memory(config)
    assert memory.activations + memory.loss_gradients == pytest.approx(step.saved, rel=0.01)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_made_up_placement_is_planned_under_autocast_where_norms_lift_what_they_read(made_up):
    config = configure()
    step = RealStep(config)
    step.forward(autocast=True)
    kernels = Kernels(autocast=True, fused_rmsnorm=False, boolean_masks=False, hand_written=False)
    counted = count_step(config, depth=3, sequences=2, kernels=kernels)
    assert counted.saved + plan_memory(config).loss_gradients == pytest.approx(step.saved, rel=0.01)


def test_a_made_up_placement_decides_how_its_branches_are_initialised(tiny, made_up, monkeypatch):
    smaller = ls.build(tiny, seed=0).state_dict()
    monkeypatch.undo()
    for name, weight in ls.build(tiny, seed=0).state_dict().items():
        last = name.endswith(("attention.out.weight", "feed_forward.out.weight"))
        torch.testing.assert_close(smaller[name], 0.1 * weight if last else weight)


@pytest.mark.parametrize("training", [True, False])
def test_a_made_up_placement_computes_what_it_says(tiny, made_up, training):
    """The attention branch is silenced by its closing norm: what is left of it is the halved stream."""
    layer = Layer(replace(tiny, mlp="relu2")).double().train(training)
    norms, feed_forward = layer.feed_forward_norms, layer.feed_forward
    with torch.no_grad():
        layer.attention_norms.closing.weight.zero_()
        norms.inner.weight.uniform_(0.5, 1.5)
    x_BTD = torch.randn(2, 5, tiny.width, dtype=torch.float64)
    activated = (norms.norm(x_BTD / 2) @ feed_forward.up.weight.T).clamp(min=0) ** 2
    written_BTD = norms.inner(activated) @ feed_forward.out.weight.T
    torch.testing.assert_close(layer(x_BTD, None, None, SLOT), x_BTD / 4 + norms.closing(written_BTD))
