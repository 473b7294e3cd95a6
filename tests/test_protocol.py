"""The protocol: any number of loops, states as pytrees, truncated gradients, and strangers' models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import loopscope as ls
from loopscope import machine
from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, ProtocolError, UnsupportedError
from loopscope.inference.cache import KVCache
from loopscope.options import AuditOptions
from loopscope.protocol import Capability, LoopState, run_loops
from loopscope.training.scores import score_batch


@pytest.mark.parametrize("num_loops", [1, 2, 3, 7])
def test_a_model_runs_any_number_of_loops_and_deeper_runs_extend_shallower_ones(tiny, ids_BT, num_loops):
    model = ls.build(replace(tiny, loop_embedding=True, readout="final-only"), seed=0).eval()
    trace, deep = run_loops(model, ids_BT, num_loops=num_loops), run_loops(model, ids_BT, num_loops=9)
    assert trace.num_loops == num_loops
    for k in range(num_loops + 1):
        assert torch.equal(trace.states[k].h_BTD, deep.states[k].h_BTD)
    assert model.readout(trace.states[num_loops], num_loops).isfinite().all()


def test_zero_loops_are_refused(tiny, ids_BT):
    with pytest.raises(ConfigError, match="at least one loop"):
        run_loops(ls.build(tiny), ids_BT, num_loops=0)


def test_readout_is_features_times_head(tiny, ids_BT):
    model = ls.build(tiny).eval()
    state = run_loops(model, ids_BT).states[2]
    torch.testing.assert_close(model.readout(state, 2), model.features(state, 2) @ model.head.T)


def test_the_state_of_some_rows_goes_on_like_the_whole(tiny, ids_BT):
    """`take` must slice everything a loop reads: h, the injected input, and the rotary angles."""
    config = replace(tiny, injection="concat", positions="rope", prelude_layers=1)
    model = ls.build(config, seed=0).eval()
    whole = run_loops(model, ids_BT)
    rows = torch.tensor([1])
    part = model.loop(whole.states[1].take(rows), 2)
    torch.testing.assert_close(part.h_BTD, whole.states[2].h_BTD[rows])
    by_index, by_mask = (whole.states[1].take(chosen) for chosen in (rows, torch.tensor([False, True])))
    leaves = zip(pytree.tree_leaves(by_index), pytree.tree_leaves(by_mask), strict=True)
    assert all(torch.equal(a, b) for a, b in leaves)


def test_take_slices_carried_tensors_too():
    state = LoopState(torch.randn(3, 4, 5), carried={"low": torch.arange(3.0)}, context={"x": torch.arange(3)})
    taken = state.take(torch.tensor([2, 0]))
    assert taken.carried["low"].tolist() == [2.0, 0.0]
    assert taken.context["x"].tolist() == [2, 0]


def test_norms_are_means_over_tokens_of_the_euclidean_norm(tiny, ids_BT):
    trace = run_loops(ls.build(tiny).eval(), ids_BT)
    expected = trace.h_KBTD.square().sum(-1).sqrt().mean((1, 2))
    torch.testing.assert_close(trace.norms_K(), expected)


def test_truncated_backpropagation_sees_the_last_loops_only(tiny, ids_BT):
    """With one of three loops back-propagated, the gradient is that of one loop started from a constant state."""
    model = ls.build(tiny, seed=0).double()
    weight = model.recurrence.core.layers[0].attention.qkv.weight

    def gradient(h_BTD):
        return torch.autograd.grad(h_BTD.square().sum(), weight)[0]

    truncated = gradient(run_loops(model, ids_BT, backprop_loops=1).states[-1].h_BTD)
    before = run_loops(model, ids_BT, num_loops=2).states[-1]
    restarted = gradient(model.loop(before.with_h(before.h_BTD.detach()), 3).h_BTD)
    full = gradient(run_loops(model, ids_BT).states[-1].h_BTD)
    torch.testing.assert_close(truncated, restarted)
    assert not torch.allclose(truncated, full)


class Stranger(nn.Module):
    """Somebody else's looped model, with its own names."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def step(self, h, k):
        return h + torch.tanh(self.mix(h)) / k


def adapted(stranger: Stranger, **changes):
    functions = {"embed": stranger.table, "loop": stranger.step, "readout": lambda h, k: stranger.out(h)}
    return ls.adapt(**{**functions, **changes}, num_loops=3, module=stranger)


def test_three_functions_make_a_looped_model():
    stranger, ids = Stranger(), torch.randint(11, (2, 5))
    model = adapted(stranger)
    h = stranger.table(ids)
    for k in (1, 2, 3):
        h = stranger.step(h, k)
    trace = run_loops(model, ids)
    assert torch.equal(trace.states[3].h_BTD, h)
    assert torch.equal(model.readout(trace.states[3], 3), stranger.out(h))
    assert set(model.parameters()) == set(stranger.parameters())
    model.eval()
    assert not stranger.training


def test_an_adapted_model_may_carry_a_second_tensor():
    def embed(ids):
        return LoopState(ids[..., None].float().expand(-1, -1, 2), carried={"speed": torch.ones(len(ids), 1, 1)})

    def loop(state, k):
        return LoopState(state.h_BTD + state.carried["speed"], carried={"speed": 2 * state.carried["speed"]})

    model = ls.adapt(embed=embed, loop=loop, readout=lambda state, k: state.h_BTD, num_loops=3)
    trace = run_loops(model, torch.zeros(1, 4, dtype=torch.long))
    assert trace.states[3].h_BTD.unique().tolist() == [1.0 + 2.0 + 4.0]


def test_an_adapted_state_knows_by_itself_what_its_functions_take():
    """No hidden order of calls: a state can be looped on a model that never embedded it."""
    state = adapted(Stranger()).embed(torch.randint(11, (2, 5)))
    again = adapted(Stranger())
    assert again.loop(state, 1).h_BTD.shape == (2, 5, 6)
    assert not hasattr(again, "head")


def test_recomputed_loops_give_the_same_gradients(tiny, ids_BT):
    model = ls.build(replace(tiny, dropout=0.3), seed=0)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5)
        loss = run_loops(model, ids_BT, recompute=recompute).states[-1].h_BTD.square().sum()
        gradients.append(torch.autograd.grad(loss, model.embedding.weight)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"embed": lambda ids: ids.float()}, r"embed\(ids\) must return a state of shape"),
        ({"embed": lambda ids: [ids]}, r"embed\(ids\) must return a tensor or a LoopState, got list"),
        ({"loop": lambda h, k: h[:, :-1] if k == 2 else h}, r"loop\(h, 2\) changed the shape of the state"),
        ({"loop": lambda h, k: None}, r"loop\(h, 1\) must return a tensor"),
        ({"readout": lambda h, k: h.mean(1)}, r"readout\(h, 3\) must return logits of shape"),
    ],
)
def test_a_stranger_that_breaks_the_protocol_is_told_which_function_and_loop(changes, sentence):
    model = adapted(Stranger(), **changes)
    with pytest.raises(ProtocolError, match=sentence):
        model.readout(run_loops(model, torch.randint(11, (2, 5))).states[-1], 3)


def test_a_bf16_model_is_refused_in_a_sentence_where_its_products_would_end_the_process(tiny, ids_BT, monkeypatch):
    """On a machine that announces AMX and forbids it; an audit computes in float64 and may go on."""
    for variable in machine.ISA_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(machine, "bf16_products", lambda: "die")
    model = ls.build(replace(tiny, vocab_size=80), seed=0).bfloat16()
    with pytest.raises(UnsupportedError, match="set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        run_loops(model, ids_BT)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UnsupportedError, match="announces AMX"):
        run_loops(ls.build(tiny), ids_BT)
    options = ls.AuditOptions(states=1, prefix=4, rollout=4)
    assert ls.audit(model, [ids_BT], options=options).model.audited_in == "float64"


# --- capabilities ----------------------------------------------------------------------------------------------------

CAPABILITIES = (
    ls.LinearReadout, ls.Cached, ls.ExitGate, ls.DeclaredVisibility, ls.OwnLosses, ls.SharedCore, ls.Scheduled,
)  # fmt: skip
OURS = {ls.LinearReadout, ls.Cached, ls.DeclaredVisibility, ls.SharedCore, ls.Scheduled}


def test_every_capability_of_the_protocol_is_tested_here():
    assert set(Capability.__subclasses__()) == set(CAPABILITIES)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda one: one.__name__)
def test_a_model_without_a_capability_is_none_and_the_sentence_names_capability_purpose_and_model(capability):
    model = adapted(Stranger())
    assert capability.of(model) is None
    with pytest.raises(UnsupportedError) as caught:
        capability.needed(model, "walking on water")
    sentence = str(caught.value)
    assert sentence.startswith("walking on water needs ") and "AdaptedModel" in sentence
    assert capability.what in sentence and f"loopscope.{capability.__name__}" in sentence


@pytest.mark.parametrize("gate", [False, True])
def test_our_model_has_its_capabilities_and_a_gate_only_where_the_configuration_says_so(tiny, gate):
    model = ls.build(replace(tiny, exit_gate=gate))
    expected = OURS | ({ls.ExitGate} if gate else set())
    assert {capability for capability in CAPABILITIES if capability.of(model) is model} == expected
    for capability in expected:
        assert capability.needed(model, "anything") is model


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda one: one.__name__)
def test_a_class_that_inherits_a_capability_without_implementing_it_cannot_be_made(capability):
    class Hollow(nn.Module, capability):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Hollow()


def test_attributes_of_the_same_name_are_not_taken_for_a_capability():
    """Only inheriting says so: a `head` that is a module, `features` that are a list, a `core` that is a number."""

    class Lookalike(Stranger):
        num_loops = 3

        def __init__(self):
            super().__init__()
            self.head, self.features, self.cache, self.exit_logits = nn.Linear(6, 11), ["a", "b"], {}, None
            self.core, self.hides, self.losses = 7, True, [3]

        def embed(self, ids):
            return LoopState(self.table(ids))

        def loop(self, state, k):
            return state.with_h(self.step(state.h_BTD, k))

        def readout(self, state, k):
            return self.out(state.h_BTD)

    model, ids = Lookalike(), torch.randint(11, (2, 5))
    assert all(capability.of(model) is None for capability in CAPABILITIES)
    result = ls.Objective(ObjectiveConfig())(model, ids, ids)
    by_hand = [
        nn.functional.cross_entropy(model.out(state.h_BTD).flatten(0, 1), ids.flatten())
        for state in result.trace.states[1:]
    ]
    torch.testing.assert_close(result.loss, torch.stack(by_hand).mean())
    assert ls.audit(model, [ids], options=QUICK).model.vocab_size == 11


def test_a_cache_is_refused_by_name_where_the_model_takes_none():
    with pytest.raises(UnsupportedError, match=r"needs a key-value cache \(loopscope\.Cached\)"):
        run_loops(adapted(Stranger()), torch.randint(11, (1, 4)), cache=KVCache().append(4))


QUICK = AuditOptions(states=2, prefix=6, tokens=24, rollout=5)


class Shouting(ls.LoopedLM):
    """A readout of its own: it puts the scale back that the norm took out."""

    def readout(self, state, k, cache=None):
        return super().readout(state, k, cache) * state.h_BTD.norm(dim=-1, keepdim=True)


def test_a_subclass_with_a_readout_of_its_own_is_taken_at_its_word(tiny, ids_BT):
    model = Shouting(tiny).eval()
    assert ls.LinearReadout.of(model) is None and ls.Cached.of(model) is model
    targets_BT = ids_BT.roll(1, dims=1)
    trace = run_loops(model, ids_BT)
    ce_K = torch.stack(
        [
            nn.functional.cross_entropy(model.readout(trace.states[k], k).flatten(0, 1), targets_BT.flatten())
            for k in (1, 2, 3)
        ]
    )
    result = ls.Objective(ObjectiveConfig())(model, ids_BT, targets_BT)
    torch.testing.assert_close(result.ce_K, ce_K)
    torch.testing.assert_close(result.loss, ce_K.mean())
    scores = score_batch(model, ids_BT, targets_BT, 3)
    torch.testing.assert_close((scores.ce_K / scores.tokens).float(), ce_K)
    audited = ls.audit(model, [(ids_BT, targets_BT)], options=QUICK)
    assert [loop.ce for loop in audited.loops[:3]] == pytest.approx(ce_K.tolist(), rel=1e-4)


def test_the_audit_sees_what_an_overridden_readout_shows(tiny, ids_BT):
    """Behind RMSNorm the scale is hidden; multiplied back in, it is visible, whatever the class inherits."""
    verdicts = {}
    for kind in (ls.LoopedLM, Shouting):
        torch.manual_seed(0)
        verdicts[kind] = ls.audit(kind(tiny), [ids_BT], options=QUICK).variable("scale").verdict
    assert verdicts == {ls.LoopedLM: "blind", Shouting: "visible"}


@pytest.mark.parametrize(
    ("returns", "message"),
    [(lambda state: 3, "LoopState, got int"), (lambda state: state.with_h(state.h_BTD[:, :1]), "changed the shape")],
)
def test_a_loop_that_returns_no_state_or_another_shape_is_named(tiny, ids_BT, monkeypatch, returns, message):
    model = ls.build(tiny, seed=0)
    monkeypatch.setattr(model, "loop", lambda state, k: state if k == 1 else returns(state))
    with pytest.raises(ProtocolError, match=f"loop 2 .*{message}"):
        run_loops(model, ids_BT)
