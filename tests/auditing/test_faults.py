"""Faults that an audit had once, each as the few lines that showed it.

What other people's models do: leave a table behind, keep exactly K of something, draw noise, compute in coarse
arithmetic, detach a statistic. The audit answers with a finding or with the true cause, and leaves them as they were.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import loopscope as ls
import planted

WIDTH, VOCAB, LOOPS = 16, 64, 3
OPTIONS = ls.AuditOptions(states=3, prefix=8, rollout=6)


@pytest.fixture
def net():
    return planted.Net(WIDTH)


def looped(net, *, embed=None, loop=None, readout=None, num_loops=LOOPS, module="net"):
    return ls.adapt(
        embed=embed or net.embed,
        loop=loop or net.loop,
        readout=readout or (lambda h, k: net.logits(planted.rms(h))),
        num_loops=num_loops,
        module=net if module == "net" else module,
    )


def ids(rows=4, length=20, vocab=VOCAB):
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(3))


def audit(model, *, options=OPTIONS, **arguments):
    return ls.audit(model, [ids()], options=options, **arguments)


def notes(result):
    return " ".join(result.checks.notes)


# --- the model comes back as it was ----------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Everything that a forward pass can leave behind."""

    def __init__(self):
        super().__init__()
        self.net = planted.Net(WIDTH)
        self.register_buffer("assigned", torch.ones(WIDTH))
        self.register_buffer("written", torch.ones(WIDTH))
        self.register_buffer("lazy", None)
        self.plain = torch.ones(WIDTH)
        self.table = None

    def loop(self, h, k):
        self.assigned = (self.assigned * 2).to(torch.float16)
        self.written.mul_(0.5)
        self.lazy = h.detach().mean((0, 1))
        self.plain = h.detach().mean((0, 1))
        self.table = self.lazy_table = torch.ones_like(h)
        self.net.table.requires_grad_(False)
        if not self._forward_hooks:
            self.register_forward_hook(lambda *_: None)
        random.random(), np.random.rand(), torch.rand(1)
        return self.net.loop(h, k)


def test_whatever_a_forward_pass_leaves_behind_is_put_back():
    net = Stateful().train()
    kept = {name: (buffer, buffer.clone()) for name, buffer in net.named_buffers()}
    plain, gradient = net.plain, torch.ones_like(net.net.head)
    net.net.head.grad = gradient
    generators = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    audit(
        ls.adapt(
            embed=net.net.embed,
            loop=net.loop,
            readout=lambda h, k: net.net.logits(planted.rms(h)),
            num_loops=LOOPS,
            module=net,
        )
    )
    for name, (buffer, value) in kept.items():
        assert getattr(net, name) is buffer and buffer.dtype == value.dtype and torch.equal(buffer, value), name
    assert net.lazy is None and net.table is None and net.plain is plain and not hasattr(net, "lazy_table")
    assert net.net.table.requires_grad and not net._forward_hooks and net.training
    assert net.net.head.grad is gradient and torch.equal(gradient, torch.ones_like(gradient))
    assert random.getstate() == generators[0]
    assert np.array_equal(np.random.get_state()[1], generators[1])
    assert torch.equal(torch.get_rng_state(), generators[2])


def test_a_buffer_that_two_modules_share_is_one_buffer_in_the_audit_too():
    net = planted.Net(WIDTH)
    net.register_buffer("gain", torch.ones(WIDTH))
    other = nn.Module()
    other.register_buffer("gain", net.gain)
    net.other = other
    differences = []

    def loop(h, k):
        net.gain.add_(0.01)
        differences.append(float((net.gain - net.other.gain).abs().max()))
        return net.loop(h, k)

    audit(looped(net, loop=loop))
    assert max(differences) == 0 and net.gain is net.other.gain and float(net.gain.max()) == 1.0


def test_a_buffer_that_functions_hold_by_themselves_is_audited_in_the_same_dtype():
    net = planted.Net(WIDTH)
    net.register_buffer("gain", torch.rand(WIDTH) + 0.5)
    gain = net.gain
    result = audit(looped(net, readout=lambda h, k: net.logits(planted.rms(h) * gain)))
    assert result.model.audited_in == "float64" and result.verdict == "blind-spot"
    assert gain.dtype == torch.float32


# --- no loop beyond K ------------------------------------------------------------------------------------------------


def exactly_k_embeddings(net):
    marks = nn.Parameter(0.1 * torch.randn(LOOPS, WIDTH, generator=torch.Generator().manual_seed(4)))
    net.marks = marks
    return {"loop": lambda h, k: net.loop(h + net.marks[k - 1], k)}


def exactly_k_gains(net):
    net.gains = nn.Parameter(torch.ones(LOOPS, WIDTH))
    return {"readout": lambda h, k: net.logits(net.gains[k - 1] * planted.rms(h))}


def refusing_further_loops(net):
    def loop(h, k):
        if k > LOOPS:
            raise NotImplementedError(f"trained for {LOOPS} loops,\n not {k}")
        return net.loop(h, k)

    return {"loop": loop}


def breaking_down_after_k(net):
    return {"loop": lambda h, k: net.loop(h, k) * (torch.nan if k > LOOPS else 1.0)}


BOUND = [exactly_k_embeddings, exactly_k_gains, refusing_further_loops, breaking_down_after_k]


@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.parametrize("supervised", ["every-loop", "terminal", [1, 3]])
def test_a_model_without_a_loop_beyond_its_depth_is_audited_up_to_it(net, bound, supervised):
    """RMSNorm readouts hide h, and F = h + β·B(norm h) carries and reads it: one blind direction."""
    result = audit(looped(net, **bound(net)), supervised=supervised)
    assert (result.verdict, result.blind_directions.dimension) == ("blind-spot", 1)
    assert result.variable("scale").verdict == "blind"
    assert [loop.k for loop in result.loops] == [1, 2, 3]
    said = notes(result)
    assert "beyond the trained depth" in said or "beyond its trained depth" in said
    assert "loop 4" in said and "\n" not in said


@pytest.mark.parametrize("bound", BOUND[:3])
def test_such_a_model_with_raw_readouts_or_a_damped_loop_stays_controlled(net, bound):
    parts = bound(net)
    raw = parts | {"readout": lambda h, k: net.logits(h) if k <= LOOPS else net.gains[k]}
    assert audit(looped(net, **raw)).verdict == "controlled"
    loop = parts.get("loop", net.loop)
    damped = audit(looped(net, **parts | {"loop": lambda h, k: loop(0.8 * h, k)}))
    assert (damped.verdict, damped.variable("scale").verdict) == ("controlled", "damped")


def test_an_error_within_the_trained_depth_is_still_an_error(net):
    table = nn.Parameter(torch.zeros(LOOPS - 1, WIDTH))
    with pytest.raises(IndexError):
        audit(looped(net, loop=lambda h, k: net.loop(h + table[k - 1], k)))


# --- states that no loop reads yet -----------------------------------------------------------------------------------


def nano_loop(net, readout, weight=0.0):
    """u = W[e; h] with W = [I | weight·I], then the shared layers and a norm; nanoLOOP starts with a weight of 0."""

    def embed(token_ids):
        e = net.embed(token_ids)
        return ls.LoopState(e, context={"e": e})

    def loop(state, k):
        u = state.context["e"] + weight * state.h_BTD
        return state.with_h(planted.rms(net.loop(u, k)))

    return looped(net, embed=embed, loop=loop, readout=lambda state, k: net.logits(readout(state.h_BTD)))


@pytest.mark.parametrize("supervised", ["every-loop", "terminal"])
def test_where_no_loop_reads_the_state_yet_the_audit_says_so_and_gives_no_all_clear(net, supervised):
    """Its exits hide scale, and what the loop will carry of it once W_h has trained nobody can know."""
    result = audit(nano_loop(net, planted.rms), supervised=supervised)
    assert result.verdict == "undecided" and "no loop reads the state yet" in result.summary
    k = 1 if supervised == "every-loop" else LOOPS
    assert f"loop {k + 1} does not depend on h_{k}" in notes(result)
    assert result.variable("scale").verdict == "removed" and result.variable("scale").activity == 0


def test_once_a_loop_reads_the_state_there_is_a_verdict(net):
    """h_k leaves a norm, so no loop writes along it: scale is out of the loop."""
    result = audit(nano_loop(net, planted.rms, weight=0.1))
    assert (result.verdict, result.variable("scale").verdict) == ("controlled", "removed")


def test_exits_that_show_all_of_a_state_need_no_loop_that_reads_it(net):
    result = audit(nano_loop(net, lambda h: h))
    assert result.verdict == "controlled" and "no loop reads the state yet" in notes(result)


def test_one_loop_that_starts_afresh_is_a_note(net):
    start = torch.randn(WIDTH)
    result = audit(looped(net, loop=lambda h, k: net.loop(start.to(h) + 0 * h if k == 2 else h, k), num_loops=4))
    assert "loop 2 does not depend on h_1" in notes(result)
    assert result.verdict == "blind-spot", "h_3 is written from h_2 and carried on to loop 4"


# --- context that all rows share -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 4, 20])
@pytest.mark.parametrize("rows", [2, 4])
def test_a_context_without_rows_is_shared_by_all_of_them(net, rows, length):
    """Angles of shape (T, C), a table of two heads, a scalar, nothing: whatever B and T are, like the plain model."""

    def embed(token_ids):
        h = net.embed(token_ids)
        angles = torch.ones(token_ids.shape[1], WIDTH).to(h)
        context = {"angles": angles, "heads": torch.ones(2, 1, 1), "half": torch.tensor(0.5), "none": None, "e": h}
        return ls.LoopState(h, context=context)

    def loop(state, k):
        context = state.context
        factor = context["heads"].to(state.h_BTD).mean() * context["angles"] * 2 * context["half"].to(state.h_BTD)
        return state.with_h(net.loop(state.h_BTD * factor + 0 * context["e"], k))

    def readout(state, k):
        return net.logits(planted.rms(state.h_BTD))

    batch = [ids(rows, length + 1)]
    ours = ls.audit(looped(net, embed=embed, loop=loop, readout=readout), batch, options=OPTIONS)
    plain = ls.audit(looped(net), batch, options=OPTIONS)
    assert ours.verdict == plain.verdict and ours.blind_directions.loops == plain.blind_directions.loops
    assert ours.blind_directions.spectrum == pytest.approx(plain.blind_directions.spectrum, rel=1e-6, abs=1e-9)


# --- coarse, quantised, coupled --------------------------------------------------------------------------------------


def straight_through(x, levels):
    rounded = (x * levels).round() / levels
    return x + (rounded - x).detach()


COARSE = {
    "bf16 before the head": lambda net, x: nn.functional.linear(x.bfloat16(), net.head.bfloat16()),
    "half before the head": lambda net, x: net.logits(x.half().to(x.dtype)),
    "eight bits, straight through": lambda net, x: net.logits(straight_through(x, 64)),
    "two levels, straight through": lambda net, x: net.logits(x + (x.sign() - x).detach()),
}


@pytest.mark.parametrize("logits", COARSE.values(), ids=COARSE)
def test_coarse_but_honest_readouts_are_not_called_a_detach(net, logits):
    """Behind RMSNorm scale is hidden however coarse the rest is; a raw one shows it."""
    hidden = audit(looped(net, readout=lambda h, k: logits(net, planted.rms(h))))
    assert hidden.variable("scale").verdict == "blind" and "changes in jumps" in notes(hidden)
    assert hidden.blind_directions.dimension == 1
    shown = audit(looped(net, readout=lambda h, k: logits(net, h)))
    signs = logits is COARSE["two levels, straight through"]  # sign(α·h) = sign(h), whatever the derivative declares
    assert shown.variable("scale").verdict == ("blind" if signs else "visible")


@pytest.mark.parametrize(
    "cut",
    [
        lambda net, h, k: net.logits((8 * h).round() / 8),
        lambda net, h, k: nn.functional.linear(h.detach().bfloat16(), net.head.bfloat16()),
        lambda net, h, k: net.logits(h.detach().bfloat16().to(h) + 0.01 * h),
    ],
    ids=["rounded without a derivative", "bf16 of a detached state", "bf16 with most of it detached"],
)
def test_a_coarse_readout_whose_derivative_is_missing_is_still_refused(net, cut):
    with pytest.raises(ls.LoopscopeError, match=r"readout at loop 1 .*(derivative|gradient)"):
        audit(looped(net, readout=lambda h, k: cut(net, h, k)))


@pytest.mark.parametrize("norm_of", ["batch", "batch and tokens"])
def test_batch_statistics_are_searched_row_by_row(net, norm_of):
    """h/√(mean over the batch of h²): one state alone, as a batch of its own, is normed by itself. Normed over tokens
    too, a token's own scale shows, and the scale of all tokens together, which training may drive, does not: blind.
    """
    dims = {"batch": (0, 2), "batch and tokens": (0, 1, 2)}[norm_of]

    def normed(h):
        return h * (h.square().mean(dims, keepdim=True) + 1e-6).rsqrt()

    result = audit(looped(net, readout=lambda h, k: net.logits(normed(h))))
    assert "rows of a batch depend on one another" in notes(result)
    assert result.variable("scale").verdict == "blind"
    assert "rows of a batch" not in notes(audit(looped(net)))


# --- derivatives that are only half there ----------------------------------------------------------------------------


def detached_rms(h):
    return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt().detach()


def test_where_a_norm_detaches_its_statistic_the_change_of_the_state_decides(net):
    """R(αh) = R(h), whatever autograd says: hidden, carried, read. The note names the readout and the field."""
    result = audit(looped(net, readout=lambda h, k: net.logits(detached_rms(h))))
    sweep = result.alpha_sweep.loops[0].ce
    assert max(sweep) - min(sweep) < 1e-3, "its own sweep is flat"
    assert (result.verdict, result.blind_directions.dimension) == ("blind-spot", 1)
    assert result.variable("scale").verdict == "blind" and result.variable("scale").visibility < 1e-3
    assert "readout at loop 1, 2 along scale" in notes(result)


def test_where_an_inter_loop_norm_detaches_its_statistic_scale_is_out_of_the_loop_all_the_same(net):
    result = audit(looped(net, loop=lambda h, k: net.loop(detached_rms(h), k)))
    whole = audit(looped(net, loop=lambda h, k: net.loop(planted.rms(h), k)))
    assert result.variable("scale").verdict == whole.variable("scale").verdict == "removed"
    assert result.verdict == whole.verdict == "controlled"
    assert "the loop 2, 3 along scale" in notes(result)


def test_a_readout_whose_scale_only_the_function_shows_is_visible(net):
    """ln‖h‖ through a detach: the loss notices scale, though no gradient says so."""

    def readout(h, k):
        return net.logits(planted.rms(h) * (1 + h.norm(dim=-1, keepdim=True).log().detach()))

    result = audit(looped(net, readout=readout))
    assert result.variable("scale").verdict == "visible" and "along scale" in notes(result)


def test_an_honest_model_has_no_such_note(net):
    for readout in (planted.rms, planted.centred, lambda h: h, torch.tanh):
        assert "is not what a change" not in notes(audit(looped(net, readout=lambda h, k, r=readout: net.logits(r(h)))))


# --- coarse arithmetic, noise, many loops ----------------------------------------------------------------------------


def in_bf16(readout):
    """A stranger's model whose functions close over a bf16 network and show none of it."""
    net = planted.Net(WIDTH).bfloat16()
    return looped(net, readout=lambda h, k: net.logits(readout(h)), module=None)


def test_a_bf16_network_that_is_not_shown_gets_no_all_clear_from_its_rounding():
    """RMSNorm in bf16 leaves 2⁻⁸ of a radial change, which is only rounding, and goes unnoticed however far it runs."""
    result = audit(in_bf16(planted.rms))
    assert (result.verdict, result.variable("scale").verdict) == ("blind-spot", "blind")
    assert result.model.audited_in == "bfloat16"


def test_what_bf16_shows_clearly_is_not_doubted():
    result = audit(in_bf16(lambda h: h))
    assert (result.verdict, result.variable("scale").verdict) == ("controlled", "visible")
    assert "too coarse" not in notes(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_is_not_shown_is_judged_in_its_own_dtype(dtype):
    net = planted.Net(WIDTH).to(dtype)
    result = audit(looped(net, module=None))
    assert (result.verdict, result.blind_directions.dimension) == ("blind-spot", 1)
    assert "too coarse" not in notes(result)


def test_a_state_that_starts_from_fresh_noise_is_causal_and_its_audit_repeats(net):
    model = looped(net, embed=lambda token_ids: net.embed(token_ids) + torch.randn(*token_ids.shape, WIDTH))
    first = audit(model)
    assert first.checks.causal and first.variable("scale").verdict == "blind"
    torch.rand(3)
    again = audit(model)
    assert again.loops == first.loops


def test_a_look_at_the_next_token_is_found_under_noise_too(net):
    def embed(token_ids):
        h = net.embed(token_ids) + torch.randn(*token_ids.shape, WIDTH)
        return h + 0.01 * h.roll(-1, dims=1)

    assert not audit(looped(net, embed=embed)).checks.causal


def test_of_many_loops_a_few_are_searched_the_first_and_the_last_among_them(net):
    result = audit(looped(net, num_loops=20))
    assert [row.k for row in result.blind_directions.loops] == [1, 4, 6, 9, 11, 14, 16, 19]
    assert "of the 19 loops whose state goes on, 8 were searched" in notes(result)
    assert (result.verdict, result.blind_directions.dimension) == ("blind-spot", 1)


# --- numbers are measured, and agree ---------------------------------------------------------------------------------


def test_what_the_search_discovers_is_reported_with_what_was_measured(net):
    """Three channels times 2e-4 before the head: shown by that much, carried at gain about 1, read by every loop."""
    leak = torch.cat([torch.ones(WIDTH - 3), torch.full((3,), 2e-4)])
    result = audit(looped(net, readout=lambda h, k: net.logits(h * leak.to(h))))
    found = result.variable("channels 13, 14, 15")
    assert found.verdict == "blind" and 5e-5 < found.visibility < 1e-3
    assert 0.9 < found.activity < 1.2 and found.activity != 1.0 and 0 < found.delayed_visibility < 10


def test_a_hidden_memory_is_reported_with_what_was_measured(net):
    """An inter-loop norm bounds the unread channels: its gain on them is 1/s of the state it norms."""
    mask = torch.cat([torch.ones(WIDTH - 3), torch.zeros(3)])
    result = audit(
        looped(net, loop=lambda h, k: net.loop(planted.rms(4 * h), k), readout=lambda h, k: net.logits(h * mask.to(h)))
    )
    memory = next(one for one in result.variables if one.verdict == "memory")
    assert memory.visibility < 1e-6 and memory.delayed_visibility > 0 and memory.activity not in (0.0, 1.0)


@pytest.mark.parametrize("hiding", range(9))
def test_the_summary_agrees_with_the_variables_however_many_states_hide_scale(net, hiding):
    """Scale is hidden where channel 0 is below a quantile of it: at some of eight states, a tie included."""
    level = planted.Net(WIDTH).table[:, 0].quantile(hiding / 8).item()

    def readout(h, k):
        hides = (h[..., :1] < level).to(h)
        return net.logits(hides * planted.rms(h) + (1 - hides) * h)

    result = audit(looped(net, readout=readout), options=ls.AuditOptions(states=8, prefix=8, rollout=4))
    blind = [one.name for one in result.variables if one.verdict == "blind"]
    assert (result.verdict == "blind-spot") == bool(blind)
    assert "()" not in result.summary and not result.summary.startswith("0 ")
    assert all(name in result.summary for name in blind)
