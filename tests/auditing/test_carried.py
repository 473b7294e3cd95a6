"""Whatever a loop carries beside h gets a verdict of its own, or a note that says why not."""

from __future__ import annotations

import pytest
import torch

import loopscope as ls
from loopscope.errors import ProtocolError
from loopscope.results.audit import NamedDirection

OPTIONS = ls.AuditOptions(states=3, prefix=8, tokens=64, rollout=6)
WIDTH, VOCABULARY = 16, 64
IDS_BT = torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1))


def normal(*shape, std=1.0, seed=0):
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLE, HEAD = normal(VOCABULARY, WIDTH), normal(VOCABULARY, WIDTH, std=WIDTH**-0.5, seed=1)
BLOCK, READER = normal(WIDTH, WIDTH, std=WIDTH**-0.5, seed=2), normal(WIDTH, WIDTH, std=WIDTH**-0.5, seed=3)


def rms(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def two_tensors(first, following, read=lambda z_BTD: 0.03 * rms(z_BTD) @ READER, readout=lambda h_BTD: h_BTD):
    """h ← h + 0.03·(tanh of its norm) + what is read of z; z ← following(z, h). Raw exits of h by default."""

    def embed(ids_BT):
        e_BTD = TABLE[ids_BT]
        return ls.LoopState(e_BTD, carried={"z": first(e_BTD)})

    def loop(state, k):
        h_BTD, z = state.h_BTD, state.carried["z"]
        h_BTD = h_BTD + 0.03 * torch.tanh(rms(h_BTD) @ BLOCK) + read(z)
        return ls.LoopState(h_BTD, carried={"z": following(z, h_BTD)})

    return ls.adapt(
        embed=embed, loop=loop, readout=lambda state, k: readout(state.h_BTD) @ HEAD.T, num_loops=3, module=None
    )


def audited(model, **arguments):
    return ls.audit(model, [IDS_BT], options=OPTIONS, **arguments)


def test_a_second_tensor_that_no_exit_sees_is_blind_by_its_name():
    """z ← z + 0.03·norm(h)·B: written, carried at gain 1, read into h at strength 0.03, shown nowhere. All of it."""
    model = two_tensors(lambda e: e, lambda z, h: z + 0.03 * rms(h) @ BLOCK)
    result = audited(model)
    assert result.verdict == "blind-spot" and result.blind_directions.dimension == WIDTH
    assert result.variable("z").verdict == "blind" and result.variable("z").remedy
    assert result.variable("scale").verdict == "visible"
    assert "(z)" in result.summary
    assert "16 of its 16 directions are blind, any number of lengths of the state along them go unnoticed" in (
        result.variable("z").evidence
    )
    assert result.blind_directions.named == [NamedDirection(name="z", share=pytest.approx(1, abs=1e-6))]


def test_a_second_tensor_that_dies_out_is_damped():
    model = two_tensors(lambda e: e, lambda z, h: 0.5 * z + 0.03 * rms(h) @ BLOCK)
    result = audited(model)
    assert result.verdict == "controlled" and result.variable("z").verdict == "damped"


def test_a_second_tensor_that_nobody_reads_is_inert():
    model = two_tensors(lambda e: e, lambda z, h: z + 0.03 * rms(h) @ BLOCK, read=lambda z: 0.0)
    result = audited(model)
    assert result.verdict == "controlled" and result.variable("z").verdict == "inert"


def test_a_second_tensor_behind_a_norm_of_its_own_is_a_memory():
    model = two_tensors(lambda e: e, lambda z, h: rms(z) + 0.03 * rms(h) @ BLOCK)
    result = audited(model)
    assert result.verdict == "controlled" and result.variable("z").verdict == "memory"


def test_an_input_that_travels_along_is_written_by_no_loop():
    result = audited(two_tensors(lambda e: e, lambda z, h: z))
    assert result.verdict == "controlled" and result.variable("z").verdict == "removed"
    assert "no loop writes it" in result.variable("z").evidence


def test_a_tensor_without_tokens_is_searched_too():
    """One slot of four numbers per row, to which every token writes and from which every token reads."""

    def slot(z_B4, h_BTD):
        return z_B4 + 0.03 * rms(h_BTD).mean(1)[:, :4]

    model = two_tensors(
        lambda e: e.mean(1)[:, :4], slot, read=lambda z: 0.03 * torch.nn.functional.pad(z, (0, WIDTH - 4))[:, None]
    )
    result = audited(model)
    assert result.variable("z").verdict == "blind" and result.blind_directions.dimension == 4


def test_a_tensor_of_zeros_is_judged_with_a_little_noise():
    """An untrained writer of zeros leaves z at zero; what it will carry is known all the same."""
    model = two_tensors(lambda e: 0 * e, lambda z, h: z + 0 * h, read=lambda z: 0.03 * z @ READER)
    result = audited(model)
    assert result.variable("z").verdict == "blind" and result.blind_directions.dimension == WIDTH


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_tensor_that_is_zero_at_some_tokens_is_judged_by_the_others(share):
    """A sum that some tokens keep and others do not, as a weight that halted tokens have used up."""
    kept_V1 = (torch.rand(VOCABULARY, 1, generator=torch.Generator().manual_seed(4)) < share).double()

    def embedded(e_BTD):
        return e_BTD * kept_V1[(e_BTD[..., None, :] == TABLE).all(-1).int().argmax(-1)]

    model = two_tensors(embedded, lambda z, h: z + (z != 0) * 0.03 * rms(h) @ BLOCK, read=lambda z: 0.03 * z @ READER)
    z = audited(model).variable("z")
    assert z.verdict == "blind" and z.activity == pytest.approx(1, abs=0.05)


def test_a_tensor_that_is_zero_at_every_token_searched_is_said_to_be():
    """It lives at the first token alone, and no token so early in the text is searched."""
    model = two_tensors(lambda e: torch.cat([e[:, :1], 0 * e[:, 1:]], 1), lambda z, h: 1.1 * z, read=lambda z: 0.03 * z)
    z = audited(model).variable("z")
    assert "zero at every token that was searched" in z.evidence and z.visibility == 0


@pytest.mark.parametrize(
    ("first", "following", "why"),
    [
        (lambda e: torch.zeros(e.shape[:2], dtype=torch.long), lambda z, h: z + 1, "holds int64"),
        (lambda e: torch.zeros(()), lambda z, h: z + 1, "does not lead with the batch"),
        (lambda e: e[:, :, :1], lambda z, h: torch.cat([z, h[:, :, :1]], -1), "of another shape"),
    ],
    ids=["integers", "no batch", "growing"],
)
def test_a_tensor_that_cannot_be_searched_is_named_in_a_note(first, following, why):
    result = audited(two_tensors(first, following, read=lambda z: 0.0))
    assert any("carried['z']" in note and why in note for note in result.checks.notes)
    assert [one.name for one in result.variables] == ["scale", "mean"]


@pytest.mark.parametrize("name", ["mean", "scale"])
def test_a_tensor_that_is_called_like_a_field_of_h_keeps_its_own_verdict(name):
    """z of the first test under another name: the field of h is visible, the tensor is blind."""

    def loop(state, k):
        z = state.carried[name]
        h_BTD = state.h_BTD + 0.03 * torch.tanh(rms(state.h_BTD) @ BLOCK) + 0.03 * rms(z) @ READER
        return ls.LoopState(h_BTD, carried={name: z + 0.03 * rms(h_BTD) @ BLOCK})

    def embed(ids_BT):
        return ls.LoopState(TABLE[ids_BT], carried={name: TABLE[ids_BT]})

    model = ls.adapt(embed=embed, loop=loop, readout=lambda s, k: s.h_BTD @ HEAD.T, num_loops=3, module=None)
    result = audited(model)
    assert result.variable(name).verdict == "visible"
    assert result.variable(f"carried[{name!r}]").verdict == "blind"
    assert result.blind_directions.named == [
        NamedDirection(name=f"carried[{name!r}]", share=pytest.approx(1, abs=1e-6))
    ]


def test_a_tensor_that_is_called_h_is_refused():
    model = ls.adapt(
        embed=lambda ids: ls.LoopState(TABLE[ids], carried={"h": TABLE[ids]}),
        loop=lambda state, k: ls.LoopState(state.h_BTD * 1.1, carried={"h": state.carried["h"] * 1.1}),
        readout=lambda state, k: state.h_BTD @ HEAD.T,
        num_loops=3,
        module=None,
    )
    with pytest.raises(ProtocolError, match="has the name of the state itself"):
        audited(model)


def test_channels_of_a_tensor_are_counted_within_it():
    """The first four channels of z are shown, the others are not."""

    def readout(state, k):
        return torch.cat([state.h_BTD, state.carried["z"][..., :4]], -1) @ torch.cat([HEAD, HEAD[:, :4].flip(0)], 1).T

    whole = two_tensors(lambda e: e.flip(-1), lambda z, h: z + 0.03 * rms(h) @ BLOCK)
    model = ls.adapt(embed=whole.embed, loop=whole.loop, readout=readout, num_loops=3)
    result = audited(model)
    assert result.blind_directions.dimension == WIDTH - 4
    assert "12 of its 16 directions are blind" in result.variable("z").evidence
    names = [one.name for one in result.blind_directions.named]
    assert names == ["channels 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 of z"]


# --- driven, and what a penalty counts from --------------------------------------------------------------------------


def test_with_a_recipe_what_is_blind_is_asked_whether_training_drives_it(tiny, ids_BT):
    model = ls.build(tiny, seed=0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    scale = ls.audit(model, [ids_BT], options=OPTIONS, recipe=ls.Recipe(lr=1e-3)).variable("scale")
    assert scale.verdict == "blind" and scale.drift is not None and scale.driven is not None
    assert "training" in scale.evidence
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_without_a_recipe_or_a_blind_spot_nothing_is_trained(tiny, ids_BT):
    assert ls.audit(ls.build(tiny, seed=0), [ids_BT], options=OPTIONS).variable("scale").drift is None
    held = ls.audit(ls.build(tiny, seed=0), [ids_BT], options=OPTIONS, recipe=ls.Recipe(), terms=[ls.NormPenalty(0.01)])
    assert held.verdict == "controlled" and held.variable("scale").drift is None


def test_a_blind_model_without_weights_is_told_that_nothing_was_tried():
    model = two_tensors(lambda e: e, lambda z, h: z, readout=rms)
    result = audited(model, recipe=ls.Recipe())
    assert result.variable("scale").verdict == "blind" and result.variable("scale").drift is None
    assert any("was not tried" in note for note in result.checks.notes)


def test_a_penalty_counts_from_the_scale_of_the_untrained_states(tiny, ids_BT):
    """λ·s²·(α² − 1) = 0.01 with λ = 1e-4: α = √(1 + 100/s²) is 10.05 at s = 1, 6.7 at 1.5, 1.4 at 10."""
    model, terms = ls.build(tiny, seed=0), [ls.NormPenalty(1e-4)]
    said = {
        scale: ls.audit(model, [ids_BT], options=OPTIONS, terms=terms, untrained_scale=scale).variable("scale")
        for scale in (0.1, 1.0, 1.5, 10.0)
    }
    assert {scale: one.verdict for scale, one in said.items()} == {
        0.1: "blind",
        1.0: "blind",
        1.5: "weak",
        10.0: "visible",
    }
    assert said[1.5].free_range == pytest.approx(6.74, rel=0.05)
    assert said[10.0].free_range == pytest.approx(1.41, rel=0.05)
