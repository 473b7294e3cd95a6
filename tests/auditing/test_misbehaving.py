"""Models that misbehave: the audit answers with a finding, or with an error that names the loop and the tensor.

A wrong answer would be worse than none: a broken derivative looks like a blind spot, or like the lack of one.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

import loopscope as ls
import planted
from loopscope.errors import LoopscopeError

WIDTH, VOCAB, LOOPS = 16, 64, 3


@pytest.fixture
def net():
    return planted.Net(WIDTH)


def looped(net, *, embed=None, loop=None, readout=None):
    return ls.adapt(
        embed=embed or net.embed,
        loop=loop or net.loop,
        readout=readout or (lambda h, k: net.logits(planted.rms(h))),
        num_loops=LOOPS,
        module=net,
    )


def audit(model):
    ids_BT = torch.randint(VOCAB, (4, 20), generator=torch.Generator().manual_seed(3))
    return ls.audit(model, [ids_BT])


def notes(result):
    return " ".join(result.to_json()["checks"]["notes"])


def names_loop(sentence: str, k: int) -> bool:
    """`loop 2`, `loop(h, 2)` or `readout(h, 2)`."""
    return re.search(rf"loop {k}\b|\(h, {k}\)", sentence) is not None


def refusal(model) -> str:
    with pytest.raises(LoopscopeError) as caught:
        audit(model)
    return str(caught.value)


def finding_or_refusal(model) -> tuple[object, str]:
    """The result (None if refused) and the sentences that the user gets to read."""
    try:
        result = audit(model)
    except LoopscopeError as error:
        return None, str(error)
    return result, notes(result)


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_loop_that_writes_non_finite_states_is_named(net, poison):
    said = refusal(looped(net, loop=lambda h, k: net.loop(h, k) + (poison if k == 2 else 0.0)))
    assert names_loop(said, 2) and re.search("finite|NaN", said)


def test_one_non_finite_token_is_enough(net):
    def loop(h, k):
        h = net.loop(h, k)
        return torch.cat([h[:, :3], h[:, 3:4] * torch.nan, h[:, 4:]], dim=1) if k == 2 else h

    said = refusal(looped(net, loop=loop))
    assert names_loop(said, 2) and re.search("finite|NaN", said)


def test_a_non_finite_embedding_is_named(net):
    said = refusal(looped(net, embed=lambda ids: net.embed(ids) / 0))
    assert "embed" in said and re.search("finite|NaN", said)


def test_a_readout_with_non_finite_logits_is_named(net):
    said = refusal(looped(net, readout=lambda h, k: net.logits(h) / (0 if k == 2 else 1)))
    assert "readout" in said and names_loop(said, 2) and re.search("finite|NaN", said)


def test_finite_logits_with_a_non_finite_derivative_are_named(net):
    """√(0·h) is 0 with the derivative ∞·0: every comparison with NaN is false, so nothing would look hidden."""
    said = refusal(looped(net, readout=lambda h, k: net.logits(h + (0 * h).sqrt())))
    assert "readout" in said and names_loop(said, 1) and re.search("finite|NaN", said)


def test_a_state_that_breaks_down_far_beyond_the_trained_depth_is_a_finding(net):
    result = audit(looped(net, loop=lambda h, k: net.loop(h, k) * (torch.nan if k == 12 else 1.0)))
    assert result.verdict == "blind-spot" and result.blind_directions.dimension == 1
    assert names_loop(notes(result), 12)
    json.dumps(result.to_json(), allow_nan=False)


def test_a_state_of_zeros_has_no_direction_and_is_not_given_one(net):
    result, said = finding_or_refusal(looped(net, loop=lambda h, k: 0 * h))
    if result is None:
        assert "zero" in said and re.search(r"loop 1\b|h_1\b", said)
    else:
        assert result.verdict == "controlled"
        json.dumps(result.to_json(), allow_nan=False)


# --- shapes and types ------------------------------------------------------------------------------------------------


def test_a_loop_that_changes_the_shape_is_named(net):
    said = refusal(looped(net, loop=lambda h, k: net.loop(h, k)[..., : -2 if k == 2 else None]))
    assert names_loop(said, 2) and "shape" in said and "14" in said


class Shrinking:
    """A LoopedModel of its own, not adapted: nobody has checked its shapes before."""

    num_loops = LOOPS

    def __init__(self, net):
        self.net = net

    def embed(self, ids_BT):
        return ls.LoopState(self.net.embed(ids_BT))

    def loop(self, state, k):
        return state.with_h(state.h_BTD[:, :-1] if k == 2 else self.net.loop(state.h_BTD, k))

    def readout(self, state, k):
        return self.net.logits(planted.rms(state.h_BTD))


def test_a_model_that_is_not_adapted_is_checked_too(net):
    said = refusal(Shrinking(net))
    assert names_loop(said, 2) and "shape" in said


def test_an_integer_state_has_no_derivative_and_is_refused(net):
    said = refusal(looped(net, embed=lambda ids: ids[..., None].expand(-1, -1, WIDTH), loop=lambda h, k: h + k))
    assert "embed" in said and "int64" in said


def test_a_loop_that_returns_integers_is_named(net):
    said = refusal(looped(net, loop=lambda h, k: h.long() if k == 2 else net.loop(h, k)))
    assert names_loop(said, 2) and "int64" in said


def test_a_vocabulary_that_changes_between_loops_is_refused_with_both_sizes(net):
    said = refusal(looped(net, readout=lambda h, k: net.logits(h)[..., : VOCAB - 3 if k == 2 else VOCAB]))
    assert "readout" in said and names_loop(said, 2) and "64" in said and "61" in said


# --- derivatives that are not there ----------------------------------------------------------------------------------


def test_a_readout_that_ignores_its_input_is_never_called_controlled(net):
    result, said = finding_or_refusal(looped(net, readout=lambda h, k: net.head[:, 0].expand(*h.shape[:2], VOCAB)))
    assert result is None or result.verdict == "blind-spot"
    assert "readout" in said and names_loop(said, 1)


NO_DERIVATIVE = "gradient|derivative"


def test_a_detached_readout_is_not_taken_for_a_blind_one(net):
    """The logits do depend on the state; only the derivative is missing, and the loss trains nothing before it."""
    said = refusal(looped(net, readout=lambda h, k: net.logits(h.detach())))
    assert "readout" in said and names_loop(said, 1) and re.search(NO_DERIVATIVE, said)


def test_a_readout_under_no_grad_is_not_taken_for_a_working_one(net):
    said = refusal(looped(net, readout=torch.no_grad()(lambda h, k: net.logits(h))))
    assert "readout" in said and names_loop(said, 1) and re.search(NO_DERIVATIVE, said)


@pytest.mark.parametrize(
    "cut",
    [
        lambda net: lambda h, k: net.loop(h.detach(), k),
        lambda net: torch.no_grad()(net.loop),
        lambda net: lambda h, k: h.detach() + (net.loop(h, k) - h),
    ],
    ids=["detached", "no_grad", "residual path detached"],
)
def test_a_loop_without_a_gradient_path_is_not_taken_for_one_that_removes_scale(net, cut):
    """As a function the loop carries scale, whatever its derivative says; anything but "blind" is a false all-clear."""
    result, said = finding_or_refusal(looped(net, loop=cut(net)))
    if result is None:
        assert re.search(NO_DERIVATIVE, said) and names_loop(said, 1)
    else:
        assert {variable.name: variable.verdict for variable in result.variables}["scale"] == "blind"
        assert result.blind_directions.dimension == 1


def test_only_the_loop_without_a_gradient_path_is_named(net):
    said = refusal(looped(net, loop=lambda h, k: net.loop(h.detach() if k == 2 else h, k)))
    assert re.search(NO_DERIVATIVE, said) and names_loop(said, 2) and not names_loop(said, 1)


# --- side effects ----------------------------------------------------------------------------------------------------


def in_place_loop(net):
    return {"loop": lambda h, k: h.add_(net.loop(h, k) - h)}


def in_place_readout(net):
    return {"readout": lambda h, k: net.logits(h.mul_(h.square().mean(-1, keepdim=True).add(1e-6).rsqrt()))}


@pytest.mark.parametrize("broken", [in_place_loop, in_place_readout])
def test_an_in_place_operation_on_the_state_is_refused_or_does_not_matter(net, broken):
    """A readout that normalises the state in place *is* an inter-loop norm, unless states are kept apart."""
    clean = audit(looped(net))
    result, said = finding_or_refusal(looped(net, **broken(net)))
    if result is None:
        assert "in place" in said or "in-place" in said
        assert names_loop(said, 1)
        return
    assert result.blind_directions.dimension == clean.blind_directions.dimension == 1
    for ours, theirs in zip(result.loops, clean.loops, strict=True):
        assert ours.norm == pytest.approx(theirs.norm)


def test_attention_to_later_tokens_is_found(net):
    def loop(h, k):
        return net.loop(h, k) + 0.1 * planted.rms(h).mean(dim=1, keepdim=True)

    assert audit(looped(net)).to_json()["checks"]["causal"] is True
    result, said = finding_or_refusal(looped(net, loop=loop))
    assert "causal" in said
    assert result is None or result.to_json()["checks"]["causal"] is False


def test_a_refused_model_is_left_as_it_was(net):
    model = looped(net, loop=lambda h, k: net.loop(h, k) * (torch.nan if k == 2 else 1.0))
    model.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    random = torch.get_rng_state()
    refusal(model)
    assert net.training and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(tensor.dtype == before[name].dtype for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
