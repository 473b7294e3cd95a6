"""The one thing that makes each published design different, against its equations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import loopscope as ls
from loopscope.config import Config, ModelConfig, ObjectiveConfig
from loopscope.designs import DESIGNS
from loopscope.model.feed_forward import MixtureOfExperts
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.model.norms import TaperNorm
from loopscope.model.recurrence import RECURRENCES
from loopscope.objectives.placement import Objective
from loopscope.protocol import run_loops
from loopscope.training.plan import plan_training

WIDTH, LOOPS, VOCABULARY = 16, 3, 23
BASE = Config(
    model=ModelConfig(
        vocab_size=VOCABULARY, width=WIDTH, num_layers=2, num_loops=LOOPS, num_heads=2, mlp_width=32, max_length=8,
        dropout=0.0,
    )
)  # fmt: skip
IDS_BT = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(5))


def made(name: str, **changes: object) -> LoopedLM:
    """The design in float64 with random gains, biases and scales, so that none of them is an identity by chance."""
    config = replace(DESIGNS[name].apply(BASE).model, **changes)
    model = build(config, seed=0).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.recurrence.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def states_of(model: LoopedLM, num_loops: int = LOOPS) -> list[ls.LoopState]:
    with torch.no_grad():
        return run_loops(model, IDS_BT, num_loops=num_loops).states


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + BASE.model.norm_eps).sqrt()


def branches(layer, norm: bool = True) -> tuple:
    """The attention and feed-forward branches of a layer as plain functions of what they read."""
    norms = (layer.attention_norms.norm, layer.feed_forward_norms.norm) if norm else (None, None)
    attend = lambda x: layer.attention(x, norms[0], None, None, ("core", 1, 0))  # noqa: E731
    feed = lambda x: layer.feed_forward(x, norms[1])  # noqa: E731
    return attend, feed


# --- injections ------------------------------------------------------------------------------------------------------


def test_parcae_linear_mixes_state_and_input_by_one_matrix():
    model = made("parcae-linear")
    state = states_of(model)[1]
    weight = model.recurrence.injection.project.weight
    expected = state.h_BTD @ weight[:, :WIDTH].T + state.context.input_BTD @ weight[:, WIDTH:].T
    with torch.no_grad():
        opened = model.recurrence.open(state.h_BTD, state.context.input_BTD, 2)
        torch.testing.assert_close(opened, expected)


def test_no_loop_of_a_fresh_nanoloop_reads_the_state():
    """W = [I | 0] on [e; h]: every loop starts from e, so all states are the same until W has learnt."""
    model = made("nanoloop")
    _, first, second, third = states_of(model)
    torch.testing.assert_close(second.h_BTD, first.h_BTD)
    torch.testing.assert_close(third.h_BTD, first.h_BTD)
    with torch.no_grad():
        model.recurrence.injection.project.weight[:, :WIDTH].fill_diagonal_(0.5)
    assert not torch.allclose(states_of(model)[2].h_BTD, states_of(model)[1].h_BTD)


# --- placements ------------------------------------------------------------------------------------------------------


def test_one_over_n_divides_every_branch_by_loops_and_the_root_of_layers():
    model = made("one-over-n")
    layer, factor = model.recurrence.core.layers[0], 1 / LOOPS / math.sqrt(2 / 12)
    x_BTD = torch.randn(2, 7, WIDTH).double()
    attend, feed = branches(layer)
    with torch.no_grad():
        middle_BTD = x_BTD + factor * attend(x_BTD)
        out_BTD = layer(x_BTD, None, None, ("core", 1, 0))
        torch.testing.assert_close(out_BTD, middle_BTD + factor * feed(middle_BTD))


def test_deeploop_weighs_the_stream_by_square_roots_of_the_unrolled_depth():
    """α = (2M)^½ and β = (8M)^−½ with M = 2 layers × 3 loops."""
    model, plain = (build(DESIGNS[name].apply(BASE).model, seed=0).double() for name in ("deeploop", "paper-rmsnorm"))
    layer, usual = model.recurrence.core.layers[0], plain.recurrence.core.layers[0]
    for ours, theirs in ((layer.attention.out, usual.attention.out), (layer.feed_forward.up, usual.feed_forward.up)):
        torch.testing.assert_close(ours.weight, theirs.weight / math.sqrt(48))
    torch.testing.assert_close(layer.attention.qkv.weight[: 2 * WIDTH], usual.attention.qkv.weight[: 2 * WIDTH])
    x_BTD = torch.randn(2, 7, WIDTH).double()
    attend, _ = branches(layer)
    with torch.no_grad():
        joined_BTD = layer.attention_norms.after(x_BTD, attend(x_BTD))
        expected = F.layer_norm(math.sqrt(12) * x_BTD + attend(x_BTD), (WIDTH,), eps=BASE.model.norm_eps)
        torch.testing.assert_close(joined_BTD, expected)


def test_recall_reads_the_input_in_every_branch_and_norms_the_sum():
    """u = LN(W_r[h; e]); h ← LN_out(h + f(u)), for attention and for the feed-forward."""
    model = made("recall", num_layers=1)
    state = states_of(model)[1]
    (layer,) = model.recurrence.core.layers
    h_BTD, e_BTD = state.h_BTD, state.context.input_BTD
    with torch.no_grad():
        attend, feed = branches(layer, norm=False)
        for norms, branch in ((layer.attention_norms, attend), (layer.feed_forward_norms, feed)):
            u_BTD = norms.norm(torch.cat([h_BTD, e_BTD], -1) @ norms.recall.weight.T)
            h_BTD = norms.sum_norm(h_BTD + branch(u_BTD))
        torch.testing.assert_close(model.loop(state, 2).h_BTD, h_BTD)


def test_at_the_end_of_its_schedule_no_norm_of_tapernorm_normalises():
    model = made("tapernorm").train()
    model.at_progress(0.0)
    with torch.no_grad():
        run_loops(model, IDS_BT)
    norms = [module for module in model.modules() if isinstance(module, TaperNorm)]
    assert len(norms) == 2 * 2 + 1, "two in each layer and the readout"
    x_BTD = torch.randn(1, 3, WIDTH).double()
    model.eval()
    for norm in norms:
        torch.testing.assert_close(norm(2 * x_BTD), norm(x_BTD), rtol=1e-4, atol=1e-4)
    model.at_progress(1.0)
    for norm in norms:
        torch.testing.assert_close(norm(2 * x_BTD), 2 * norm(x_BTD))
    assert DESIGNS["tapernorm"].apply(BASE).objective.scale_anchor > 0


def test_huginn_norms_before_its_coda_and_after_it_by_the_same_gain():
    """logits = head(ln_f(coda(ln_f(h_K))))."""
    model = made("huginn")
    h_BTD = torch.randn(1, 4, WIDTH, dtype=torch.float64)
    assert model.coda_norm is model.readout_map.norm
    with torch.no_grad():
        state = model.embed(IDS_BT[:1, :4])
        shown = model.features(replace(state, h_BTD=h_BTD), LOOPS)
        torch.testing.assert_close(model.features(replace(state, h_BTD=3 * h_BTD), LOOPS), shown, rtol=1e-4, atol=1e-5)


def test_two_states_run_four_stacks_a_loop():
    """Three runs of L and one of H: what initialisations and DeepNorm's M count."""
    assert DESIGNS["hrm"].apply(BASE).model.total_layers == 4 * 2 * LOOPS


# --- recurrences -----------------------------------------------------------------------------------------------------


def test_the_fully_looped_transformer_asks_with_the_last_output_and_restarts_from_the_input():
    """Attn(Q = W_Q h_{k−1}, K = W_K z, V = W_V z) on a stream that begins at e; loop 1 is an ordinary pass."""
    model, plain = (made(name, num_layers=1, num_heads=1) for name in ("fully-looped", "paper-rmsnorm"))
    start, first, second, _ = states_of(model)
    torch.testing.assert_close(first.h_BTD, states_of(plain)[1].h_BTD)
    (layer,) = model.recurrence.core.layers
    e_BTD, norm = start.h_BTD, layer.attention_norms.norm
    with torch.no_grad():
        to_q, to_k, to_v = layer.attention.qkv.weight.chunk(3)
        q, k, v = norm(first.h_BTD) @ to_q.T, norm(e_BTD) @ to_k.T, norm(e_BTD) @ to_v.T
        scores = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
        middle_BTD = e_BTD + scores.softmax(-1) @ v @ layer.attention.out.weight.T
        expected = middle_BTD + layer.feed_forward(middle_BTD, layer.feed_forward_norms.norm)
    torch.testing.assert_close(second.h_BTD, expected)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


def test_scse_moves_around_an_anchor_and_a_state_at_its_anchor_stays():
    model = made("scse")
    recurrence, state = model.recurrence, states_of(model)[0]
    with torch.no_grad():
        e_BTD = model.embedding(IDS_BT) + model.positions(torch.arange(7))
        anchor_BTD = e_BTD + 0.1 * e_BTD @ recurrence.to_anchor.weight.T
        h_BTD = e_BTD + 0.1 * e_BTD @ recurrence.to_start.weight.T
        torch.testing.assert_close(state.h_BTD, h_BTD)
        delta_BTD = h_BTD - anchor_BTD
        added_BTD = recurrence.core(delta_BTD, None) - delta_BTD
        torch.testing.assert_close(model.loop(state, 1).h_BTD, anchor_BTD + delta_BTD + 0.5 * added_BTD)
        near_BTD = anchor_BTD.clone()
        near_BTD[0, 0, 0] += 0.9e-4  # ‖δ‖² below 1e-8
        torch.testing.assert_close(model.loop(state.with_h(near_BTD), 1).h_BTD, near_BTD, rtol=0, atol=1e-12)


def test_hrm_runs_its_fast_state_three_times_for_each_slow_step_and_carries_it():
    model = made("hrm", init="scaled")
    start, first, second, _ = states_of(model)
    low, high = model.recurrence.core.low, model.recurrence.core.high
    with torch.no_grad():
        e_BTD = model.embedding(IDS_BT) + model.positions(torch.arange(7))
        torch.testing.assert_close(start.h_BTD, e_BTD / 0.02)
        z_H, z_L = e_BTD / 0.02, torch.zeros_like(e_BTD)
        for state in (first, second):
            for _ in range(3):
                z_L = rms(low(z_L + z_H, None))
            h_BTD = high(z_H + z_L, None)
            torch.testing.assert_close(state.h_BTD, h_BTD)
            torch.testing.assert_close(state.carried["z_L"], z_L)
            z_H = rms(h_BTD)


@pytest.mark.parametrize("loops", [LOOPS, LOOPS + 1])
def test_hyperloop_mixes_four_copies_by_gates_of_its_own_in_every_loop(loops):
    """Y ← σ_keep∘Y + 2σ_write∘(F(σ_read·Y) + v_k), σ(a·W z + b), z = RMSNorm(flatten Y); beyond K as at K."""
    model = made("hyperloop")
    recurrence = model.recurrence
    with torch.no_grad():
        for parameter in (recurrence.bias, recurrence.offset, recurrence.strength):
            parameter.add_(torch.randn_like(parameter))
    states = states_of(model, loops)
    with torch.no_grad():
        Y = torch.stack([model.embedding(IDS_BT) + model.positions(torch.arange(7))] * 4, -2)
        for k in range(1, loops + 1):
            at = min(k, LOOPS) - 1
            z = recurrence.norm.weight * rms(Y.flatten(-2))
            mixed = (z @ recurrence.mix[at].weight.T).unflatten(-1, (3, 4))
            read, write, keep = (
                torch.sigmoid(recurrence.strength[at, i] * mixed[..., i, :] + recurrence.bias[at, i]) for i in range(3)
            )
            new = recurrence.core((read[..., None] * Y).sum(-2), None) + recurrence.offset[at]
            Y = keep[..., None] * Y + 2 * write[..., None] * new[..., None, :]
        torch.testing.assert_close(states[loops].h_BTD, Y.flatten(-2))
        torch.testing.assert_close(model.features(states[loops], loops), model.readout_map.norm(Y.mean(-2)))


def test_lanes_read_one_of_four_at_first_and_write_a_normed_step_into_all():
    model = made("lanes")
    recurrence, states = model.recurrence, states_of(model)
    with torch.no_grad():
        e_BTD = model.embedding(IDS_BT) + model.positions(torch.arange(7))
        lanes = [e_BTD] * 4
        for k in (1, 2, 3):
            step_BTD = recurrence.norm.weight * rms(recurrence.core(lanes[k % 4], None))
            lanes = [lane + step_BTD for lane in lanes]
            torch.testing.assert_close(states[k].h_BTD, torch.cat(lanes, -1))
        torch.testing.assert_close(model.features(states[3], 3), model.readout_map.norm(sum(lanes)))
        recurrence.keep[1] = torch.eye(4).roll(1, 0)  # loop 2 hands every lane on to the next
        recurrence.write[1] = torch.tensor([0.0, 0.0, 0.0, 2.0])
        moved = model.loop(states[1], 2).h_BTD.chunk(4, -1)
        before = states[1].h_BTD.chunk(4, -1)
        step_BTD = recurrence.norm.weight * rms(recurrence.core(before[2], None))
        torch.testing.assert_close(torch.stack(moved[:3]), torch.stack([before[3], before[0], before[1]]))
        torch.testing.assert_close(moved[3], before[2] + 2 * step_BTD)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_rows_at_different_loops_run_as_they_would_alone(recurrence):
    """Nothing of a loop but its number differs between rows: what batching across depth rests on."""
    model = build(replace(BASE.model, recurrence=recurrence), seed=0).double().eval()
    states = states_of(model)
    pair = ls.LoopState.joined([states[0].take(slice(0, 1)), states[2].take(slice(1, 2))], 0)
    with torch.no_grad():
        mixed = model.loop(pair, (1, 3))
        for row, after in ((0, states[1]), (1, states[3])):
            torch.testing.assert_close(mixed.h_BTD[row], after.h_BTD[row])
            for name, tensor in mixed.carried.items():
                torch.testing.assert_close(tensor[row], after.carried[name][row])


def test_act_reads_out_the_mean_of_states_weighted_by_when_a_token_halts():
    """p = 0.4 in every loop: N = 3, since 0.8 ≤ 0.99 < 1.2, and the third state has the remainder 0.2."""
    model = made("act")
    with torch.no_grad():
        model.recurrence.halting.weight.zero_()
        model.recurrence.halting.bias.fill_(math.log(0.4 / 0.6))
    states = states_of(model, 5)
    h = [state.h_BTD for state in states]
    means = {1: h[1], 2: 0.4 * h[1] + 0.6 * h[2], 3: 0.4 * h[1] + 0.4 * h[2] + 0.2 * h[3]}
    for k in range(1, 6):
        torch.testing.assert_close(model.recurrence.shown(states[k]), means[min(k, 3)])


def test_act_gates_read_the_state_before_the_step():
    model = made("act")
    start, first, *_ = states_of(model)
    with torch.no_grad():
        p_BT1 = model.recurrence.halting(start.h_BTD).sigmoid()
    torch.testing.assert_close(first.carried["left"], torch.where(p_BT1 > 0.99, 0, 1 - p_BT1))


def test_act_charges_for_loops_and_remainders():
    """τ·mean(N + R), whose gradient is that of R: at p = 0.4 and N = 3, R = 1 − 2p, so dR/dlogit = −2·p(1 − p)."""
    model = made("act", num_loops=5, ponder_cost=0.5)
    with torch.no_grad():
        model.recurrence.halting.weight.zero_()
        model.recurrence.halting.bias.fill_(math.log(0.4 / 0.6))
    objective = Objective(ObjectiveConfig(placement="terminal"))
    (term,) = objective.terms(model)
    result = objective(model, IDS_BT, IDS_BT)
    assert result.terms["ponder_cost"].item() == pytest.approx(0.5 * (3 + 0.2))
    charged = term.value(type("Seen", (), {"trace": result.trace})())
    (gradient,) = torch.autograd.grad(charged, model.recurrence.halting.bias)
    assert gradient.item() == pytest.approx(0.5 * -2 * 0.4 * 0.6)
    cut = objective(model, IDS_BT, IDS_BT, num_loops=2)
    assert cut.terms["ponder_cost"].item() == pytest.approx(0.5 * (2 + 0.6)), "the last loop takes what is left"


# --- experts ---------------------------------------------------------------------------------------------------------


def test_a_token_goes_to_the_two_experts_that_its_router_likes_best():
    model = made("looped-moe")
    mixture = model.recurrence.core.layers[0].feed_forward
    assert isinstance(mixture, MixtureOfExperts) and len(mixture.experts) == 8
    x_BTD = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        out_BTD = mixture(x_BTD, None)
        for b, t in ((0, 0), (1, 6), (0, 3)):
            x = x_BTD[b, t]
            p = (mixture.router.weight @ x).softmax(-1)
            first, second = p.argsort(descending=True)[:2].tolist()
            expected = 0
            for i in (first, second):
                gate, value = (mixture.experts[i].up.weight @ x).chunk(2)
                expected = expected + p[i] / (p[first] + p[second]) * (
                    mixture.experts[i].out.weight @ (F.silu(gate) * value)
                )
            torch.testing.assert_close(out_BTD[b, t], expected, rtol=1e-5, atol=1e-7)


def test_the_losses_of_a_mixture_weigh_balance_and_logits_of_its_router():
    """One layer, one loop: E·Σ f_i·p̄_i with f the share of choices, and mean logsumexp², each with its weight."""
    model = made("looped-moe", num_layers=1, balance_loss=0.5, router_z_loss=0.25).train()
    mixture = model.recurrence.core.layers[0].feed_forward
    seen = []
    handle = mixture.router.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    result = Objective(ObjectiveConfig(placement="terminal"))(model, IDS_BT, IDS_BT, num_loops=1)
    handle.remove()
    (logits_NE,) = seen
    p_NE, f = logits_NE.softmax(-1), torch.zeros(8).double()
    for row in p_NE:
        f[row.argsort(descending=True)[:2]] += 1 / (2 * len(p_NE))
    balance = 8 * (f * p_NE.mean(0)).sum()
    assert result.terms["router_balance"].item() == pytest.approx(0.5 * balance.item(), rel=1e-5)
    squared = logits_NE.exp().sum(-1).log().square().mean()
    assert result.terms["router_z_loss"].item() == pytest.approx(0.25 * squared.item(), rel=1e-5)
    result.loss.backward()
    assert mixture.router.weight.grad.any()


def test_the_plan_counts_experts_stored_and_active():
    """Stored: layers × (A + E·F/k); active, each loop once: layers × (A + F), F = 3·d·hidden of a SwiGLU, A = 4·d²."""
    plain, mixed = (
        plan_training(replace(DESIGNS[name].apply(BASE), training=BASE.training), flops_per_second=1e9)
        for name in ("paper-terminal-rmsnorm", "looped-moe")
    )
    feed_forward, router = 3 * WIDTH * 32, WIDTH * 8
    stored = sum(mixed.parameters.values()) - sum(plain.parameters.values())
    assert stored == 2 * (8 / 2 * feed_forward - feed_forward + router)
    assert mixed.active_parameters - plain.active_parameters == 2 * router
    assert plain.active_parameters == sum(plain.parameters.values())
    assert mixed.flops_per_token.core == plain.flops_per_token.core + 6 * LOOPS * 2 * router


# --- objectives ------------------------------------------------------------------------------------------------------


def elt_step(progress: float, **changes: object) -> tuple[LoopedLM, Objective, int]:
    model = made("elt")
    objective = Objective(replace(DESIGNS["elt"].apply(BASE).objective, **changes), fused=False)
    objective.progress = progress
    return model, objective, LOOPS


@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0])
def test_elt_learns_from_text_at_first_and_from_its_own_last_loop_in_the_end(progress):
    """CE_K + λ·CE_j + (1 − λ)·D_j, λ = 1 − progress; what D_j teaches never reaches the teacher."""
    model, objective, last = elt_step(progress)
    results = (objective(model, IDS_BT, IDS_BT) for _ in range(100))
    result = next(result for result in results if result.supervised == [1, last])
    j = result.supervised[0]
    logits = {k: model.readout(state, k).flatten(0, 1) for k, state in enumerate(run_loops(model, IDS_BT).states) if k}
    targets = IDS_BT.flatten()
    soft = -(logits[last].detach().softmax(-1) * logits[j].log_softmax(-1)).sum(-1).mean()
    ce = {k: -logits[k].log_softmax(-1)[range(len(targets)), targets].mean() for k in (j, last)}
    expected = ce[last] + (1 - progress) * ce[j] + progress * soft
    torch.testing.assert_close(result.loss, expected, rtol=1e-6, atol=0)
    ours, theirs = (
        torch.autograd.grad(loss, model.recurrence.core.layers[0].attention.out.weight)
        for loss in (result.loss, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)


def test_elt_draws_its_exit_from_where_it_is_told():
    for distil_from in (1, 2):
        model, objective, last = elt_step(0.5, distil_from=distil_from)
        drawn = {objective(model, IDS_BT, IDS_BT).supervised[0] for _ in range(25)}
        assert drawn == set(range(distil_from, last + 1))


def test_pondernet_pays_nothing_for_exits_that_follow_its_prior():
    """λ = 0.2 in every loop is the geometric prior itself, what remains on the last loop included."""
    model = made("pondernet")
    objective = Objective(DESIGNS["pondernet"].apply(BASE).objective)
    with torch.no_grad():
        model.exit_gate.weight.zero_()
        model.exit_gate.bias.fill_(math.log(0.2 / 0.8))
    result = objective(model, IDS_BT, IDS_BT)
    assert result.terms["exit_prior"].item() == pytest.approx(0, abs=1e-8)
    weights = torch.tensor([0.2, 0.16, 0.64]).double()
    torch.testing.assert_close(result.loss, (weights * result.ce_K).sum(), rtol=1e-5, atol=0)
    with torch.no_grad():
        model.exit_gate.bias.fill_(0.0)
    p = torch.tensor([0.5, 0.25, 0.25]).double()
    expected = 0.01 * (p * (p / weights).log()).sum().item()
    assert objective(model, IDS_BT, IDS_BT).terms["exit_prior"].item() == pytest.approx(expected, rel=1e-5)


def test_stars_gives_a_tenth_of_its_loss_to_the_jacobian():
    """A loop that is the identity has ‖J v‖ = 1 for every unit vector: the penalty is λ."""
    model = made("stars")
    with torch.no_grad():
        for layer in model.recurrence.core.layers:
            layer.attention.out.weight.zero_()
            layer.feed_forward.out.weight.zero_()
    result = Objective(DESIGNS["stars"].apply(BASE).objective)(model, IDS_BT, IDS_BT)
    assert result.terms["jacobian_penalty"].item() == pytest.approx(0.1, rel=1e-4)
    assert result.loss.item() == pytest.approx(0.9 * result.ce_K.item() + 0.1, rel=1e-4)
