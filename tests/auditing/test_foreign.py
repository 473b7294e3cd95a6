"""Other people's looped models, written from their equations, untrained as they initialise them.

What the audit must say of each is derived in its docstring from what its exits hide (N, the null space of the readout's
Jacobian), what a loop does with it (DF), and what a loop can write (range DF). The shapes are small; equations, norms,
placements of the loss and initialisations are theirs.

Shape legend: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from blocks import PreNorm, Sandwich, initialise, rms
from torch import Tensor, nn
from torch.nn import functional as F

import loopscope as ls
from loopscope.config import ObjectiveConfig

WIDTH, VOCAB, LOOPS = 16, 64, 2
OPTIONS = ls.AuditOptions(states=3, prefix=8, tokens=64, rollout=5)
TERMINAL = "terminal"


@dataclass(frozen=True)
class Expected:
    """What the derivation says."""

    verdict: str
    blind: int
    scale: str
    mean: str = "visible"
    carried: dict[str, set[str]] = field(default_factory=dict)
    """Tensor beside h → the verdicts that its variables may have."""


def ids() -> Tensor:
    return torch.randint(VOCAB, (4, 20), generator=torch.Generator().manual_seed(3))


def audit(model, supervised=TERMINAL):
    return ls.audit(model, [ids()], supervised=supervised, options=OPTIONS)


def notes(result) -> str:
    return " ".join(result.checks.notes)


def check(result, expected: Expected) -> None:
    assert (result.variable("scale").verdict, result.variable("mean").verdict) == (expected.scale, expected.mean)
    assert (result.verdict, result.blind_directions.dimension) == (expected.verdict, expected.blind)
    for tensor, allowed in expected.carried.items():
        found = {one.name: one.verdict for one in result.variables if tensor in one.name}
        assert found and set(found.values()) <= allowed, (tensor, found)


def finite_eps(x: Tensor) -> Tensor:
    """nn.RMSNorm without an eps of its own takes the machine's."""
    return rms(x, torch.finfo(x.dtype).eps)


def identity_then_zero() -> nn.Linear:
    """W = [I | 0] on [e; h]: the loop starts as a function of e alone."""
    inject = nn.Linear(2 * WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        inject.weight.copy_(torch.eye(WIDTH, 2 * WIDTH))
    return inject


def training_steps(model, supervised: Sequence[int], steps: int = 3) -> None:
    """A few steps of Adam on the cross-entropy of the supervised loops."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        states = ls.run_loops(model, ids()[:, :-1]).states
        exits = [model.readout(states[k], k).flatten(0, 1) for k in supervised]
        loss = torch.stack([F.cross_entropy(logits, ids()[:, 1:].flatten()) for logits in exits]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --- injections that start at [I | 0] --------------------------------------------------------------------------------


class NanoLoop(nn.Module):
    """nanoLOOP: GPT-2's initialisation, RMSNorm, prelude, injection, core, inter-loop norm, coda.

        e = prelude(wte + wpe)      u = W[e; s], or s itself ("passthrough")      s ← norm(core(u)), s_0 = e
        logits = wte · norm(coda(s))                                             cross-entropy after the last loop

    All matrices N(0, 0.02²), those that write to the residual stream 0.02/√(2·layers), W = [I | 0].
    """

    def __init__(self) -> None:
        super().__init__()
        layer = partial(PreNorm, WIDTH, "gelu", finite_eps, rotary=False)
        self.prelude, self.core, self.coda = layer(), layer(), layer()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(32, WIDTH)
        initialise(self, partial(nn.init.normal_, std=0.02), partial(nn.init.normal_, std=0.02 / math.sqrt(2 * 3)))
        self.inject = identity_then_zero()

    def adapted(self, *, cut: str, passthrough: bool = False):
        """Cut before the inter-loop norm (h is what the core leaves), or after it (h is s)."""
        opens = finite_eps if cut == "before" else (lambda h: h)
        closes = (lambda h: h) if cut == "before" else finite_eps

        def embed(ids_BT):
            e = self.prelude(self.wte(ids_BT) + self.wpe.weight[: ids_BT.shape[1]])
            return ls.LoopState(e, context=e)

        def loop(state, k):
            s = state.h_BTD if k == 1 else opens(state.h_BTD)
            u = s if passthrough else self.inject(torch.cat([state.context, s], -1))
            return state.with_h(closes(self.core(u)))

        def readout(state, k):
            return finite_eps(self.coda(opens(state.h_BTD))) @ self.wte.weight.T

        return ls.adapt(embed=embed, loop=loop, readout=readout, num_loops=LOOPS, module=self)


@pytest.mark.parametrize("cut", ["before", "after"])
def test_untrained_nanoloop_is_undecided_because_no_loop_reads_its_state_yet(cut):
    """W = [I | 0]: loop k + 1 is a function of e alone, DF = 0.

    Cut before the norm, the readout opens with it: R(αh) = R(h), N = span(h). Cut after it, h has scale 1 and meets the
    coda's branches, which at 0.02 write 0.4 % of it: ten times the scale turns the features by as much, unnoticed.
    Whether a trained W will carry it nobody can know: no all-clear. What 1 adds to h is shown like any direction, and
    g lifts logits of rms 0.08: mean visible.
    """
    result = audit(NanoLoop().adapted(cut=cut))
    check(result, Expected("undecided", blind=0, scale="removed"))
    assert "no loop reads the state yet" in result.summary
    assert f"loop {LOOPS + 1} does not depend on h_{LOOPS}" in notes(result)
    assert result.variable("scale").activity == 0


@pytest.mark.parametrize("cut", ["before", "after"])
def test_nanoloop_is_controlled_once_its_injection_has_trained(cut):
    """W_h ≠ 0. Cut before: F(αh) = F(h), so DF·h = 0. Cut after: h leaves a norm, range DF ⟂ h. Removed both ways."""
    net = NanoLoop()
    model = net.adapted(cut=cut)
    training_steps(model, [LOOPS])
    assert net.inject.weight[:, WIDTH:].abs().max() > 1e-3
    check(audit(model), Expected("controlled", blind=0, scale="removed"))


def test_nanoloop_without_injection_is_controlled_untrained():
    """u = s is read from the first step on; the norm between loops takes scale out as above."""
    model = NanoLoop().adapted(cut="before", passthrough=True)
    check(audit(model), Expected("controlled", blind=0, scale="removed"))


class LoopedNanochat(nn.Module):
    """looped_nanochat: sandwich norms, ReLU², QK norm, soft-capped logits, an exit after every loop.

        e = prelude(norm wte)     s ← norm(core(W[e; s])), s_0 = e     logits = 15·tanh(head·norm(coda(s))/15)

    Outputs of attention and MLP start at 0, the others uniform with std 1/√d, wte at N(0, 1), the head at N(0, 0.001²),
    W = [I | 0]. Its exit gate starts at 0: λ = ½, so the first of two exits weighs ½, the last the rest.
    """

    exits = ObjectiveConfig(placement="weighted", loop_weights=(0.5, 0.5))

    def __init__(self) -> None:
        super().__init__()
        layer = partial(Sandwich, WIDTH, "relu2", qk_norm=True)
        self.prelude, self.core, self.coda = layer(), layer(), layer()
        bound = math.sqrt(3 / WIDTH)
        initialise(self, lambda weight: nn.init.uniform_(weight, -bound, bound), nn.init.zeros_)
        self.wte = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.head = nn.Parameter(1e-3 * torch.randn(VOCAB, WIDTH))
        self.inject = identity_then_zero()

    def adapted(self, *, cut: str, passthrough: bool = False):
        """Cut before the norm that closes the loop, or after it."""
        opens = rms if cut == "before" else (lambda h: h)
        closes = (lambda h: h) if cut == "before" else rms

        def embed(ids_BT):
            e = self.prelude(rms(self.wte[ids_BT]))
            return ls.LoopState(e, context=e)

        def loop(state, k):
            s = state.h_BTD if k == 1 else opens(state.h_BTD)
            u = s if passthrough else self.inject(torch.cat([state.context, s], -1))
            return state.with_h(closes(self.core(u)))

        def readout(state, k):
            return 15 * torch.tanh(rms(self.coda(opens(state.h_BTD))) @ self.head.T / 15)

        return ls.adapt(embed=embed, loop=loop, readout=readout, num_loops=LOOPS, module=self)


@pytest.mark.parametrize("cut", ["before", "after"])
def test_untrained_looped_nanochat_is_undecided_because_no_loop_reads_its_state_yet(cut):
    """DF = 0 as in nanoLOOP. With outputs of 0 the coda is norm(norm(s)): R(αh) = R(h) for either cut, N = span(h).

    Logits have rms 0.004; g = 250 makes a response of 14 % of them the one that is noticed, so the mean is visible.
    """
    result = audit(LoopedNanochat().adapted(cut=cut), LoopedNanochat.exits)
    check(result, Expected("undecided", blind=0, scale="removed"))
    assert "no loop reads the state yet" in result.summary
    assert "loop 2 does not depend on h_1" in notes(result)


def test_looped_nanochat_is_controlled_once_its_injection_has_trained():
    """The core's own last norm ends in h: range DF ⟂ h, and the norm that follows removes scale once more."""
    net = LoopedNanochat()
    model = net.adapted(cut="before")
    training_steps(model, range(1, LOOPS + 1))
    assert net.inject.weight[:, WIDTH:].abs().max() > 1e-3
    check(audit(model, LoopedNanochat.exits), Expected("controlled", blind=0, scale="removed"))


def test_looped_nanochat_without_injection_is_controlled_untrained():
    """With outputs of 0 the loop is F(h) = norm(…norm(h)): DF is the projection off h, N = span(h). Removed."""
    model = LoopedNanochat().adapted(cut="after", passthrough=True)
    check(audit(model, LoopedNanochat.exits), Expected("controlled", blind=0, scale="removed"))


# --- noise as the first state ----------------------------------------------------------------------------------------


def truncated_normal(weight: Tensor, std: float) -> Tensor:
    return nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def noise_like(e_BTD: Tensor, std: float) -> Tensor:
    """A state that is drawn anew in every pass."""
    return truncated_normal(torch.empty_like(e_BTD), std)


class Huginn(nn.Module):
    """Huginn: the state starts as noise and enters every loop beside the input, through one matrix.

        e = prelude(√d·wte)      h_0 ~ N(0, 2/5) cut at 3σ      h ← core(A[h; e])
        logits = wte · norm(coda(norm h))                        cross-entropy after the last loop

    Sandwich norms throughout; matrices truncated normal with std √(2/5d), outputs divided by √(2·132).
    """

    std = math.sqrt(2 / (5 * WIDTH))

    def __init__(self) -> None:
        super().__init__()
        layer = partial(Sandwich, WIDTH, "swiglu")
        self.prelude, self.core, self.coda = layer(), layer(), layer()
        self.adapter, self.wte = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Embedding(VOCAB, WIDTH)
        out_std = self.std / math.sqrt(2 * 132)
        initialise(self, partial(truncated_normal, std=self.std), partial(truncated_normal, std=out_std))

    def adapted(self):
        def embed(ids_BT):
            e = self.prelude(math.sqrt(WIDTH) * self.wte(ids_BT))
            return ls.LoopState(math.sqrt(WIDTH) * noise_like(e, self.std), context=e)

        def loop(state, k):
            return state.with_h(self.core(self.adapter(torch.cat([state.h_BTD, state.context], -1))))

        def readout(state, k):
            return rms(self.coda(rms(state.h_BTD))) @ self.wte.weight.T

        return ls.adapt(embed=embed, loop=loop, readout=readout, num_loops=LOOPS, module=self)


@pytest.mark.parametrize("supervised", [TERMINAL, "every-loop"])
def test_huginn_is_controlled_because_its_blocks_close_with_a_norm(supervised):
    """Exits open with a norm: N = span(h). A[h; e] would carry scale, but h leaves the last block through a norm.

    h = x/rms x with range DF = h^⊥: no loop can write along what is hidden. Removed; nothing else is hidden. Training
    samples the depth, so that every loop is an exit now and then: the same.
    """
    result = audit(Huginn().adapted(), supervised)
    check(result, Expected("controlled", blind=0, scale="removed"))
    assert result.checks.causal, "fresh noise is no look at later tokens"


class Parcae(nn.Module):
    """Parcae: nothing but the injection stands between loops; pre-norm blocks, C, coda and a last norm read the state.

        e = norm(prelude(wte))       u = injection(h, e)       h ← core(u)       logits = wte · norm(coda(C·h))
        diagonal: u = exp(−Δ·a)·h + Δ·B e with Δ = softplus(b), a = exp(A_log)
        linear:   u = W[h; e]
        add:      u = h + e

    h_0 and W are truncated normal with std √(2/5d), the other matrices orthogonal of that std, outputs 0 (so that an
    untrained core is the identity); A_log = 0, b such that exp(−Δ) = √(1/5), B = I. Its value embeddings are left out:
    they add a function of the ids. Cross-entropy after the last loop, whose number is sampled. Its other strategy of
    initialisation has outputs of std √(2/5d)/√(2·layers), unrolled layers.
    """

    std = math.sqrt(2 / (5 * WIDTH))
    unrolled_layers = 1 + 8 + 1

    def __init__(self, *, outputs: float = 0.0) -> None:
        super().__init__()
        layer = partial(PreNorm, WIDTH, "relu2", partial(rms, eps=1e-5), qk_norm=True)
        self.prelude, self.core, self.coda = layer(), layer(), layer()
        self.wte, self.C = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        initialise(self, self.orthogonal, nn.init.zeros_ if not outputs else partial(truncated_normal, std=outputs))
        self.adapter = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        truncated_normal(self.adapter.weight.data, self.std)
        delta = -math.log(math.sqrt(1 / 5))
        self.A_log, self.B = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.eye(WIDTH))
        self.dt_bias = nn.Parameter(torch.full((WIDTH,), math.log(math.expm1(delta))))

    @classmethod
    def orthogonal(cls, weight: Tensor) -> Tensor:
        return nn.init.orthogonal_(weight, cls.std * math.sqrt(max(weight.shape)))

    def injected(self, injection: str, h: Tensor, e: Tensor) -> Tensor:
        if injection == "add":
            return h + e
        if injection == "linear":
            return self.adapter(torch.cat([h, e], -1))
        delta = F.softplus(self.dt_bias)
        return torch.exp(-delta * self.A_log.exp()) * h + delta * (e @ self.B.T)

    def adapted(self, injection: str):
        def embed(ids_BT):
            e = rms(self.prelude(self.wte(ids_BT)), 1e-5)
            return ls.LoopState(noise_like(e, self.std), context=e)

        def loop(state, k):
            return state.with_h(self.core(self.injected(injection, state.h_BTD, state.context)))

        def readout(state, k):
            return rms(self.coda(self.C(state.h_BTD)), 1e-5) @ self.wte.weight.T

        return ls.adapt(embed=embed, loop=loop, readout=readout, num_loops=LOOPS, module=self)


@pytest.mark.parametrize("supervised", [TERMINAL, "every-loop"])
def test_parcae_with_diagonal_injection_damps_the_scale_that_its_exits_hide(supervised):
    """Coda and core write nothing yet: R(αh) = R(h), N = span(h), and DF = √(1/5)·I. 0.45 a loop: damped."""
    check(audit(Parcae().adapted("diagonal"), supervised), Expected("controlled", blind=0, scale="damped"))


def test_parcae_with_linear_injection_damps_the_scale_that_its_exits_hide():
    """DF = W_h, whose d² entries of variance 2/5d have a spectral radius of about √(2/5) = 0.63: damped."""
    check(audit(Parcae().adapted("linear")), Expected("controlled", blind=0, scale="damped"))


@pytest.mark.parametrize("supervised", [TERMINAL, "every-loop"])
def test_parcae_with_added_injection_is_blind_to_scale_and_to_nothing_else(supervised):
    """DF = I: all that is hidden is carried at gain 1, can be written, and is not bounded. N = span(h): blind 1.

    It is read: h_{k+1} = h_k + e turns less the longer h_k is. And it is hidden on arrival: h_k = k·e + h_0 with h_0
    √(2/5d) = 0.16 of e, so that h_k and h_{k+1} are nearly parallel. The mean is shown like any direction.
    """
    result = audit(Parcae().adapted("add"), supervised)
    check(result, Expected("blind-spot", blind=1, scale="blind"))
    assert result.blind_directions.unnamed == 0, "what is found is the scale"


@pytest.mark.parametrize("supervised", [TERMINAL, "every-loop"])
def test_a_coda_that_writes_leaves_one_blind_direction_which_is_counted_once(supervised):
    """Outputs of 0.035 instead of 0: the coda c turns h a little before the last norm hides the length of c(C·h).

    c is invertible, so N = D(c∘C)⁻¹·span(c) is one direction still, near h but not h. It is free without limit: along
    c(C·h) = λ·x the logits stay the same and h grows like λ. Carried, writable and read as before: blind 1. The scale
    turns the features by about a tenth, near what is noticed; whether it is the name of that direction or the direction
    has none, there is one.
    """
    outputs = Parcae.std / math.sqrt(2 * Parcae.unrolled_layers)
    result = audit(Parcae(outputs=outputs).adapted("add"), supervised)
    assert (result.verdict, result.blind_directions.dimension) == ("blind-spot", 1)
    assert result.blind_directions.unnamed + (result.variable("scale").verdict == "blind") == 1, result.summary


# --- two states ------------------------------------------------------------------------------------------------------


class HrmText(nn.Module):
    """HRM-Text: a low-level state z_L runs three cycles for one of the high-level state z_H, which is read out.

        z_H = e/0.02, z_L = 0    three times z_L ← norm(L(z_L + z_H))    z_H ← norm(H(z_H + z_L))    logits = head·z_H

    L and H are stacks of pre-norm layers with gated attention; all matrices N(0, 0.02²). Only the last cycle is
    supervised.
    """

    low_cycles = 3

    def __init__(self) -> None:
        super().__init__()
        layer = partial(PreNorm, WIDTH, "swiglu", gated=True)
        self.low, self.high = layer(), layer()
        self.wte, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        initialise(self, partial(nn.init.normal_, std=0.02), partial(nn.init.normal_, std=0.02))

    def adapted(self, *, cut: str):
        """Cut before the norm that closes the high-level stack, or after it."""
        opens = rms if cut == "before" else (lambda h: h)
        closes = (lambda h: h) if cut == "before" else rms

        def embed(ids_BT):
            z_H = self.wte(ids_BT) / 0.02
            return ls.LoopState(z_H, {"z_L": torch.zeros_like(z_H)})

        def loop(state, k):
            z_H, z_L = state.h_BTD if k == 1 else opens(state.h_BTD), state.carried["z_L"]
            for _ in range(self.low_cycles):
                z_L = rms(self.low(z_L + z_H))
            return replace(state, h_BTD=closes(self.high(z_H + z_L)), carried={"z_L": z_L})

        def readout(state, k):
            return self.head(opens(state.h_BTD))

        return ls.adapt(embed=embed, loop=loop, readout=readout, num_loops=LOOPS, module=self)


@pytest.mark.parametrize(
    ("cut", "supervised", "scale"),
    [("before", TERMINAL, "removed"), ("before", "every-loop", "removed"), ("after", TERMINAL, "visible")],
)
def test_hrm_text_is_controlled_in_both_of_its_states(cut, supervised, scale):
    """z_H: cut before the norm, exits hide its scale and the next cycle opens with the norm: removed. Cut after it, the
    head reads z_H raw: visible.

    z_L is shown to no exit of its own loop: N holds all d of its directions. At 0.02 the stacks are nearly the identity
    and z_L ≈ z_H/rms z_H. Each low-level cycle divides by rms(z_L + z_H) ≈ 2 and projects off z_L: of a change δ ⟂ z_L
    three cycles leave δ/8, damped; one along z_L is projected off, and no norm writes along its own output: removed.
    """
    expected = Expected("controlled", blind=0, scale=scale, carried={"z_L": {"damped", "removed"}})
    check(audit(HrmText().adapted(cut=cut), supervised), expected)
