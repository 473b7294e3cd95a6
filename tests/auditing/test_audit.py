"""An audit leaves the model alone, depends on nothing it should not, and refuses what it cannot judge."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.errors import DataError, ProtocolError

OPTIONS = ls.AuditOptions(states=3, prefix=8, rollout=5)


def audit(model, batches, **arguments):
    return ls.audit(model, batches, options=OPTIONS, **arguments)


def judged(result):
    """Everything but the time it took."""
    return {name: value for name, value in result.to_json().items() if name != "cost"}


def test_the_model_comes_back_as_it_was(tiny, ids_BT):
    model = ls.build(replace(tiny, dropout=0.3, readout="taper", taper_gate=0.5), seed=0)
    model.recurrence.train()
    model.coda.eval()
    called = []
    hook = model.recurrence.register_forward_hook(lambda *_: called.append(1))
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: (tensor.data_ptr(), tensor.dtype, tensor.detach().clone()) for name, tensor in tensors.items()}
    modes = [module.training for module in model.modules()]
    random_state = torch.random.get_rng_state()
    audit(model, [ids_BT])
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for name, tensor in tensors.items():
        pointer, dtype, value = before[name]
        assert (tensor.data_ptr(), tensor.dtype) == (pointer, dtype) and torch.equal(tensor, value), name
    assert torch.equal(model.embedding.weight.grad, torch.ones_like(model.embedding.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "embedding.weight")
    assert called and list(model.recurrence._forward_hooks) == [hook.id]


def test_the_model_comes_back_even_when_the_audit_fails(tiny, ids_BT):
    model = ls.build(tiny, seed=0).train()
    with torch.no_grad():
        model.recurrence.core.layers[0].attention.qkv.weight[0, 0] = float("nan")
    with pytest.raises(ProtocolError, match="loop 1 leaves NaN"):
        audit(model, [ids_BT])
    assert model.training and model.embedding.weight.dtype == torch.float32


def test_the_same_audit_twice_is_the_same(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    first = judged(audit(model, [ids_BT]))
    torch.rand(3)
    assert judged(audit(model, [ids_BT])) == first


def test_the_order_of_batches_and_rows_does_not_matter(tiny):
    model = ls.build(tiny, seed=0)
    ids_BT = torch.randint(37, (6, 12))
    first = judged(audit(model, [ids_BT[:4], ids_BT[4:]]))
    assert judged(audit(model, [ids_BT[4:], ids_BT[:4].flip(0)])) == first


def test_the_verdict_does_not_depend_on_how_the_readout_is_written(tiny, ids_BT):
    """norm(h)·g W₁ᵀ = norm(h)·(W₁g)ᵀ = (norm(h)Q)(WQ)ᵀ: gains folded into the head, or features rotated."""
    net = ls.build(replace(tiny, vocab_size=80), seed=0)
    gain, (rotation, _) = torch.rand(32) + 0.5, torch.linalg.qr(torch.randn(32, 32))

    def rms(h):
        return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    ways = {
        "gains": lambda h, k: (rms(h) * gain.to(h)) @ net.head.T,
        "folded": lambda h, k: rms(h) @ (net.head * gain.to(h)).T,
        "rotated": lambda h, k: (rms(h) * gain.to(h) @ rotation.to(h)) @ (net.head @ rotation.to(h)).T,
        "shifted": lambda h, k: (rms(h) * gain.to(h)) @ net.head.T + 7.0,
    }
    results = []
    for readout in ways.values():
        model = ls.adapt(
            embed=net.embed,
            loop=lambda state, k: net.loop(state, k),
            readout=lambda state, k, readout=readout: readout(state.h_BTD, k),
            num_loops=3,
            module=net,
        )
        found = audit(model, [ids_BT])
        spectrum = torch.tensor(found.blind_directions.spectrum[:-1])
        results.append((found.blind_directions.loops, [one.verdict for one in found.variables], spectrum))
    for loops, verdicts, spectrum in results[1:]:
        assert (loops, verdicts) == results[0][:2]
        torch.testing.assert_close(spectrum, results[0][2], rtol=1e-3, atol=1e-6)


def test_a_field_of_ones_own_gets_a_verdict(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    channel = torch.zeros(32)
    channel[3] = 1
    result = audit(model, [ids_BT], fields={"channel 3": lambda h: channel.to(h).expand_as(h)})
    assert result.variable("channel 3").verdict == "visible"


def test_half_precision_weights_are_judged_like_full_ones(tiny, ids_BT):
    model = ls.build(replace(tiny, vocab_size=80), seed=0).bfloat16()
    result = audit(model, [ids_BT])
    assert (result.model.dtype, result.model.audited_in) == ("bfloat16", "float64")
    assert (result.verdict, result.variable("scale").verdict) == ("blind-spot", "blind")


def test_a_model_that_insists_on_its_dtype_is_audited_in_it(tiny, ids_BT):
    net = ls.build(replace(tiny, vocab_size=80), seed=0)
    fixed = torch.randn(80, 32)  # float32, whatever the module is turned into
    model = ls.adapt(
        embed=lambda ids: net.embedding(ids),
        loop=lambda h, k: h + 0.1 * torch.tanh(h),
        readout=lambda h, k: torch.nn.functional.rms_norm(h, (32,)) @ fixed.T,
        num_loops=3,
        module=net,
    )
    result = audit(model, [ids_BT])
    assert result.model.audited_in == "float32"
    assert "does not run in torch.float64" in result.checks.notes[0]
    assert result.variable("scale").verdict == "blind"


def test_the_json_is_plain_and_has_no_nan(tiny, ids_BT):
    result = audit(ls.build(tiny, seed=0), [ids_BT], name="tiny", step=7)
    text = json.dumps(result.to_json(), allow_nan=False)
    again = json.loads(text)
    assert again["schema_version"] == 1 and again["model"]["name"] == "tiny" and again["model"]["step"] == 7
    assert [loop["k"] for loop in again["loops"]] == [1, 2, 3, 4, 5]
    assert again["loops"][-1]["radial_increment"] is None
    assert again["loops"][3]["radial_gradient_share"] is None, "beyond the trained depth no exit was trained"
    assert again["loops"][2]["supervised"] and not again["loops"][3]["supervised"]


def test_norms_and_ce_are_those_of_the_model(tiny, ids_BT):
    model = ls.build(tiny, seed=0).double().eval()
    result = ls.audit(model, [(ids_BT, ids_BT)], options=OPTIONS)
    trace = ls.run_loops(model, ids_BT)
    assert [loop.norm for loop in result.loops[:3]] == pytest.approx(trace.norms_K().tolist())
    logits = model.readout(trace.states[3], 3)
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_BT.flatten())
    assert result.loops[2].ce == pytest.approx(float(ce))
    heaviest = trace.states[3].h_BTD.norm(dim=-1).max()
    assert result.heaviest_tokens[0].norm == pytest.approx(float(heaviest))


def test_a_rollout_that_overflows_beyond_the_trained_depth_is_a_note(tiny, ids_BT):
    net = ls.build(replace(tiny, vocab_size=80), seed=0)
    model = ls.adapt(
        embed=lambda ids: net.embedding(ids),
        loop=lambda h, k: 1e9 * h,
        readout=lambda h, k: torch.nn.functional.rms_norm(h, (32,)) @ net.head.T,
        num_loops=2,
        module=net,
    )
    result = ls.audit(model, [ids_BT], options=replace(OPTIONS, rollout=40), supervised=[1, 2])
    assert any("beyond the trained depth" in note for note in result.checks.notes)


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ([], "at least one batch"),
        ([torch.zeros(2, 1, dtype=torch.long)], "at least two tokens"),
        ([torch.zeros(5, dtype=torch.long)], r"\(batch, tokens\) tensor of ids"),
        ([torch.zeros(2, 5)], "float32"),
        (["text"], "got str"),
        ([(torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long))], "do not match"),
        ([(torch.zeros(2, 5, dtype=torch.long), torch.full((2, 5), 40))], "target 40 is outside the 37 logits"),
    ],
)
def test_batches_that_cannot_be_used_are_refused_in_a_sentence(tiny, batches, sentence):
    with pytest.raises(DataError, match=sentence):
        audit(ls.build(tiny, seed=0), batches)
