"""What no verdict may depend on: the unit of the state, how it is laid out, and where the loop is cut.

Each property rewrites one model into another that computes the same, F' = Φ∘F∘Φ⁻¹ and R' = R∘Φ⁻¹ for a change Φ of the
state, and asks for the same verdict and the same blind dimension. And an audit changes nothing.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import loopscope as ls
from cases.nets import Net, blank, centred, rms
from loopscope.errors import ProtocolError

WIDTH, VOCAB, LOOPS = 16, 64, 2
OPTIONS = ls.AuditOptions(states=3, prefix=8, tokens=64, rollout=5)
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Design:
    """A readout and an inter-loop norm around `cases.nets.Net`, and how many directions of it are blind."""

    readout: Change
    blind: int
    scale: str
    mean: str = "visible"
    opens: Change = lambda h: h
    """What a loop does to the state before anything else."""
    closes: Change = lambda h: h
    """What it does to it at last."""

    def audited(self, model, **arguments):
        ids_BT = torch.randint(VOCAB, (4, 20), generator=torch.Generator().manual_seed(3))
        return ls.audit(model, [ids_BT], options=OPTIONS, **arguments)

    def alarm(self) -> tuple[str, int]:
        return ("blind-spot" if self.blind else "controlled", self.blind)


DESIGNS = {
    "rms exits": Design(rms, 1, "blind"),  # N = span(h), carried at gain 1
    "layernorm exits": Design(centred, 2, "blind", "blind"),  # N = span(h, 1), both read by RMSNorm blocks
    "unread channels": Design(partial(blank, channels=3), 3, "visible"),  # N = those channels
    "unread channels before a norm": Design(lambda h: rms(blank(h, 3)), 4, "blind"),  # N = those and the scale
    "raw exits": Design(lambda h: h, 0, "visible"),  # N = 0
    "inter-loop norm": Design(rms, 0, "removed", opens=rms),  # N = span(h) = ker DF
}
designs = pytest.mark.parametrize("design", DESIGNS.values(), ids=DESIGNS)


def conjugated(design: Design, into: Change, back: Change, strength: float = 0.03):
    """The same model with the state Φh: F'(x) = Φ(F(Φ⁻¹x)), R'(x) = R(Φ⁻¹x)."""
    net = Net(WIDTH, strength=strength)
    return ls.adapt(
        embed=lambda ids_BT: into(net.embed(ids_BT)),
        loop=lambda x, k: into(design.closes(net.loop(design.opens(back(x)), k))),
        readout=lambda x, k: net.logits(design.readout(back(x))),
        num_loops=LOOPS,
        module=net,
    )


def judged(result) -> tuple[str, int]:
    return result.verdict, result.blind_directions.dimension


# --- α·h -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "alpha"),
    [
        *[("rms exits", 0.01), ("rms exits", 1000.0), ("layernorm exits", 51.0), ("unread channels", 0.03)],
        *[("unread channels before a norm", 200.0), ("raw exits", 1000.0), ("inter-loop norm", 0.01)],
    ],
)
def test_the_unit_of_the_state_does_not_matter(name, alpha):
    """Φh = α·h."""
    design = DESIGNS[name]
    result = design.audited(conjugated(design, lambda h: alpha * h, lambda x: x / alpha))
    assert judged(result) == design.alarm()
    assert result.variable("scale").verdict == design.scale


@pytest.mark.parametrize(
    ("weight", "scale", "verdict"),
    [(1e-6, 1.0, "blind"), (1e-6, 51.0, "blind"), (1e-6, 300.0, "blind"), (1e-2, 51.0, "visible")],
)
def test_a_state_that_has_run_away_under_a_penalty_is_judged_like_one_that_has_not(weight, scale, verdict):
    """λ·(α² − 1) = 0.01 from scale 1: 100-fold free under λ = 1e-6, 1.4-fold under 1e-2, wherever the state is now.

    The weights make the state `scale` times larger; the network's norms keep what it computes the same.
    """
    net = Net(WIDTH, scale=scale, norm=partial(rms, eps=1e-6 * scale**2))
    model = ls.adapt(
        embed=net.embed, loop=net.loop, readout=lambda h, k: net.logits(net.norm(h)), num_loops=LOOPS, module=net
    )
    result = DESIGNS["rms exits"].audited(model, terms=[ls.NormPenalty(weight)])
    found = result.variable("scale")
    assert found.verdict == verdict
    assert found.free_range == pytest.approx((1 + 0.01 / weight) ** 0.5, rel=0.05)
    assert judged(result) == (("blind-spot", 1) if verdict == "blind" else ("controlled", 0))


# --- one tensor as two -----------------------------------------------------------------------------------------------


def split(design: Design, first: int, unit: float = 1.0):
    """The first channels are h, the others travel in carried["rest"], perhaps in another unit."""
    net = Net(WIDTH)

    def parts(x: Tensor) -> ls.LoopState:
        return ls.LoopState(x[..., :first], {"rest": unit * x[..., first:]})

    def whole(state: ls.LoopState) -> Tensor:
        return torch.cat([state.h_BTD, state.carried["rest"] / unit], -1)

    return ls.adapt(
        embed=lambda ids_BT: parts(net.embed(ids_BT)),
        loop=lambda state, k: parts(design.closes(net.loop(design.opens(whole(state)), k))),
        readout=lambda state, k: net.logits(design.readout(whole(state))),
        num_loops=LOOPS,
        module=net,
    )


@designs
def test_a_state_in_two_tensors_has_as_many_blind_directions_as_in_one(design):
    """Φh = (h_1, h_2). What is hidden may lie across both: the scale of the whole is the scale of neither half."""
    result = design.audited(split(design, WIDTH // 2))
    assert judged(result) == design.alarm()
    assert any("rest" in one.name for one in result.variables), "every tensor gets a verdict"


@pytest.mark.parametrize(("first", "unit"), [(4, 1.0), (12, 1.0), (8, 1000.0), (8, 0.001)])
def test_the_two_tensors_need_not_be_equally_wide_nor_of_one_scale(first, unit):
    """Three unread channels, all in the second tensor, and the scale of what is read before a norm, in both: 4."""
    design = DESIGNS["unread channels before a norm"]
    assert judged(design.audited(split(design, first, unit))) == design.alarm()


# --- equivalent parametrisations -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layernorm exits", "unread channels before a norm"])
def test_the_order_of_channels_does_not_matter(name):
    """Φh = h[π]. Scale and mean keep their meaning, and their verdicts."""
    design, there = DESIGNS[name], torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    result = design.audited(conjugated(design, lambda h: h[..., there], lambda x: x[..., there.argsort()]))
    assert judged(result) == design.alarm()
    assert (result.variable("scale").verdict, result.variable("mean").verdict) == (design.scale, design.mean)


def rotation(seed: int) -> Tensor:
    return torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).double()).Q


@designs
def test_a_rotated_state_has_as_many_blind_directions(design):
    """Φh = Qh. ‖Qh‖ = ‖h‖, so scale stays scale; the mean and unread channels become directions without a name."""
    Q = rotation(1)
    result = design.audited(conjugated(design, lambda h: h @ Q.to(h), lambda x: x @ Q.T.to(x)))
    assert judged(result) == design.alarm()
    assert result.variable("scale").verdict == design.scale


@pytest.mark.parametrize("strength", [0.03, 0.3])
@pytest.mark.parametrize("name", ["rms exits", "unread channels before a norm"])
def test_channels_may_have_units_of_their_own(name, strength):
    """Φh = (h_1, 20·h_2) by halves: N and DF change with it, and in units of each channel's rms not at all."""
    design = DESIGNS[name]
    unit = torch.tensor([1.0] * (WIDTH // 2) + [20.0] * (WIDTH // 2))
    result = design.audited(conjugated(design, lambda h: h * unit.to(h), lambda x: x / unit.to(x), strength))
    assert judged(result) == design.alarm()


def test_a_massive_channel_may_lie_across_all_axes():
    """One channel is thirty times the others, N = span(h): blind 1. Rotated, no channel stands out any more."""
    Q = rotation(0)
    net = Net(WIDTH)
    with torch.no_grad():
        net.positions[:, 0] += 30
    model = ls.adapt(
        embed=lambda ids_BT: net.embed(ids_BT) @ Q.to(net.table),
        loop=lambda x, k: net.loop(x @ Q.T.to(x), k) @ Q.to(x),
        readout=lambda x, k: net.logits(rms(x @ Q.T.to(x))),
        num_loops=LOOPS,
        module=net,
    )
    assert judged(DESIGNS["rms exits"].audited(model)) == ("blind-spot", 1)


# --- the cut ---------------------------------------------------------------------------------------------------------


def half_normed(h: Tensor) -> Tensor:
    """RMSNorm of the first half of the channels; the others pass."""
    return torch.cat([rms(h[..., : WIDTH // 2]), h[..., WIDTH // 2 :]], -1)


def grouped(h: Tensor) -> Tensor:
    """RMSNorm of each half of the channels."""
    return rms(h.unflatten(-1, (2, -1))).flatten(-2)


NORMS = {
    "of the whole state": (rms, rms, 0, "removed"),  # before: DF·h = 0; after: range DF ⟂ h
    "of half of it": (half_normed, grouped, 1, None),  # N = both halves' scales; only the first is taken out
}


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize(("norm", "readout", "blind", "scale"), NORMS.values(), ids=NORMS)
def test_it_does_not_matter_on_which_side_of_the_inter_loop_norm_the_loop_is_cut(norm, readout, blind, scale, cut):
    """h_k before the norm, which then opens loop k + 1, or after it, so that it closes loop k.

    Before, exits see the norm first; here they norm again what is normed already, so both read the same.
    """
    opens, closes = (norm, lambda h: h) if cut == "before" else (lambda h: h, norm)
    design = Design(readout, blind, str(scale), opens=opens, closes=closes)
    result = design.audited(conjugated(design, lambda h: h, lambda x: x))
    assert judged(result) == design.alarm()
    assert scale in (None, result.variable("scale").verdict)


# --- nothing is changed ----------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """A tied head, a spectral norm with its own buffers, running statistics, dropout, and buffers that come and go."""

    def __init__(self, breaks_at: int | None = None) -> None:
        super().__init__()
        self.net = Net(WIDTH)
        self.tied = self.net.table
        self.mix = spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(WIDTH, dtype=torch.bfloat16), persistent=False)
        self.breaks_at = breaks_at

    def loop(self, state: ls.LoopState, k: int) -> ls.LoopState:
        self.steps = self.steps + 1
        self.average = state.h_BTD.detach().mean((0, 1)).to(torch.float16)
        random.random(), np.random.rand(), torch.rand(1)
        if k == self.breaks_at:
            self.breaks_at_this_loop = torch.ones(1)
            return state.with_h(state.h_BTD * torch.nan)
        h_BTD = self.net.loop(self.dropout(state.h_BTD), k) + 0.01 * self.mix(rms(state.h_BTD))
        normed_BTD = self.statistics(h_BTD.transpose(1, 2)).transpose(1, 2)
        return ls.LoopState(h_BTD + 0.01 * normed_BTD, {"seen": state.carried["seen"] + 0.1 * rms(h_BTD)})

    def adapted(self):
        return ls.adapt(
            embed=lambda ids_BT: ls.LoopState(self.net.embed(ids_BT), {"seen": torch.zeros(*ids_BT.shape, WIDTH)}),
            loop=self.loop,
            readout=lambda state, k: rms(state.h_BTD) @ self.tied.T,
            num_loops=LOOPS,
            module=self,
        )


def everything(net: nn.Module, hooks: list[str]) -> dict[str, object]:
    """All that an audit could have left behind, in a form that compares."""
    tensors = {**dict(net.named_parameters(remove_duplicate=False)), **dict(net.named_buffers())}
    values = {name: (id(one), one.data_ptr(), one.dtype, one.tolist()) for name, one in tensors.items()}
    flags = {name: (one.requires_grad, one.grad is None) for name, one in net.named_parameters()}
    return {
        "tensors": values,
        "flags": flags,
        "gradient": net.net.head.grad.tolist(),
        "names": list(net.state_dict()),
        "modes": [module.training for module in net.modules()],
        "hooks": [len(getattr(module, kind)) for module in net.modules() for kind in hooks],
        "attributes": sorted(net.__dict__),
        "Python's generator": random.getstate(),
        "numpy's generator": tuple(np.random.get_state()[1].tolist()),
        "torch's generator": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "attention kernels": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        ),
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.mark.parametrize("breaks_at", [None, 2])
def test_an_audit_leaves_everything_as_it_was_also_one_that_fails(breaks_at):
    net = Stateful(breaks_at).train()
    net.statistics.eval()
    net.net.head.grad = torch.ones_like(net.net.head)
    net.net.up.requires_grad_(False)
    net.register_forward_hook(lambda *_: None)
    net.mix.register_full_backward_hook(lambda *_: None)
    net.dropout.register_forward_pre_hook(lambda *_: None)
    hooks = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]
    ids_BT = torch.randint(VOCAB, (4, 20))
    before, given_ids = everything(net, hooks), ids_BT.clone()
    if breaks_at is None:
        ls.audit(net.adapted(), [ids_BT], options=OPTIONS)
    else:
        with pytest.raises(ProtocolError, match="loop 2"):
            ls.audit(net.adapted(), [ids_BT], options=OPTIONS)
    after = everything(net, hooks)
    assert {what for what in before if after[what] != before[what]} == set()
    assert net.tied is net.net.table and torch.equal(ids_BT, given_ids)


def test_a_model_trains_on_after_an_audit_as_if_there_had_been_none():
    """Training steps with dropout, with and without an audit after the first backward, end in the same weights."""

    def trained(audited: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = Stateful().train()
        model, ids_BT = net.adapted(), torch.arange(40).view(2, 20)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for step in range(3):
            state = ls.run_loops(model, ids_BT).states[-1]
            loss = nn.functional.cross_entropy(model.readout(state, LOOPS).flatten(0, 1), ids_BT.flatten())
            optimizer.zero_grad()
            loss.backward()
            if audited and step == 0:
                ls.audit(model, [ids_BT], options=OPTIONS)
            optimizer.step()
        return [tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers())]

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        assert torch.equal(ours, theirs)
