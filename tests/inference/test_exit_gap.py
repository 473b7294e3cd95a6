"""What an exit lacks, on models where that is known: a wrong temperature, a turned state, missing information."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import loopscope as ls
from loopscope.errors import ConfigError, DataError
from loopscope.inference.exit_gap import ExitGap, measure_exit_gap, measure_exit_gaps
from loopscope.protocol import LinearReadout, LoopState

SIDES = 4
"""An id is a pair (i, j) of numbers below 4, and so is a target."""


def answers() -> Tensor:
    """Log-probability_IV of target (a, b) given id (i, j): a is likely i and b is likely j, independently."""
    near = F.log_softmax(3.0 * torch.eye(SIDES), dim=-1)
    return (near[:, None, :, None] + near[None, :, None, :]).reshape(SIDES**2, SIDES**2)


class Known(torch.nn.Module, LinearReadout):
    """State h_2 = the true log-probabilities, and h_1 = `first` of the same, read out by a head of ones."""

    num_loops = 2

    def __init__(self, first) -> None:
        super().__init__()
        self.first = first
        self.weight = torch.nn.Parameter(torch.eye(SIDES**2))

    @property
    def head(self) -> Tensor:
        return self.weight

    def embed(self, ids_BT: Tensor) -> LoopState:
        return LoopState(answers()[ids_BT], context=ids_BT)

    def loop(self, state: LoopState, k: int) -> LoopState:
        truth_BTV = answers()[state.context]
        return state.with_h(self.first(truth_BTV) if k == 1 else truth_BTV)

    def features(self, state: LoopState, k: int, cache=None) -> Tensor:
        return state.h_BTD


def text(seed: int, rows: int = 96, tokens: int = 24) -> list[tuple[Tensor, Tensor]]:
    """Ids at random and targets drawn as the model's last loop says: full depth is the truth."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(SIDES**2, (rows, tokens), generator=generator)
    targets_N = torch.multinomial(answers().exp()[ids_BT.flatten()], 1, generator=generator)
    pairs = zip(ids_BT.split(40), targets_N.view_as(ids_BT).split(40), strict=True)
    return list(pairs)


def gap_of(first) -> ExitGap:
    return measure_exit_gap(Known(first), text(1), text(2))


def share(gap: ExitGap, name: str) -> float:
    found = next(mend for mend in gap.mends if mend.name == name)
    assert found.low <= found.share <= found.high
    return found.share


def test_a_temperature_mends_an_exit_that_is_only_too_hot():
    gap = gap_of(lambda truth: 0.2 * truth)
    assert gap.gap_low > 0.3
    assert all(share(gap, name) == pytest.approx(1, abs=0.03) for name in ("temperature", "affine", "full-rank"))
    assert gap.verdict == "badly read"


def test_a_gain_per_channel_mends_what_one_temperature_cannot():
    stretch = torch.linspace(0.1, 3.0, SIDES**2)
    gap = gap_of(lambda truth: truth * stretch)
    assert share(gap, "temperature") < 0.5 and share(gap, "affine") > 0.95


def test_a_turned_state_is_mended_by_a_full_rank_map_alone():
    turn, _ = torch.linalg.qr(torch.randn(SIDES**2, SIDES**2, generator=torch.Generator().manual_seed(3)))
    gap = gap_of(lambda truth: 0.1 * truth @ turn)  # so small that no exit is confidently wrong: cooling is no help
    temperature, affine, full_rank = (mend.share for mend in gap.mends)
    assert full_rank > 0.95 and gap.mends[-1].low > 0.9 and gap.verdict == "badly read"
    assert full_rank - temperature > 0.3 and full_rank - affine > 0.3


def test_nothing_mends_an_exit_that_lacks_information():
    """After one loop i is known and j is not, and the exit says just that: its gap is the information in j."""

    def half(truth_BTV: Tensor) -> Tensor:
        first = truth_BTV.exp().unflatten(-1, (SIDES, SIDES)).sum(-1) / SIDES
        return first.log()[..., None].expand(*first.shape, SIDES).flatten(-2)

    gap = gap_of(half)
    near = F.softmax(torch.tensor([3.0, 0, 0, 0]), dim=0)
    information = math.log(SIDES) + float((near * near.log()).sum())
    assert gap.gap == pytest.approx(information, rel=0.08)
    assert all(abs(mend.share) < 0.03 for mend in gap.mends) and gap.verdict == "not yet computed"
    assert "mostly not yet computed" in gap.summary


def test_no_share_is_told_of_a_gap_that_may_be_none():
    gap = gap_of(lambda truth: truth)
    assert gap.gap == 0 and gap.verdict == "no gap" and all(mend.share is None for mend in gap.mends)


def test_a_map_that_helps_both_depths_alike_mends_nothing():
    """Both depths are as hot: cooling each down is no merit of the exit's readout."""

    class Hot(Known):
        def loop(self, state: LoopState, k: int) -> LoopState:
            truth_BTV = answers()[state.context].unflatten(-1, (SIDES, SIDES))
            known_BTV = truth_BTV if k == 2 else truth_BTV.logsumexp(-1, keepdim=True).expand_as(truth_BTV)
            return state.with_h(0.3 * known_BTV.flatten(-2))

    gap = measure_exit_gap(Hot(None), text(1), text(2))
    temperature = gap.mends[0]
    assert gap.ce_full - temperature.ce_full > 0.1, "a temperature does help"
    assert temperature.share < 0.1


def test_the_same_text_gives_the_same_maps_and_the_model_comes_back():
    model = Known(lambda truth: 0.2 * truth)
    one, other = (measure_exit_gap(model, text(1), text(2)) for _ in range(2))
    assert one == other and model.weight.requires_grad and torch.equal(model.weight, torch.eye(SIDES**2))


def test_a_readout_that_is_no_head_gets_no_affine_map():
    known = Known(lambda truth: 0.2 * truth)
    model = ls.adapt(embed=known.embed, loop=known.loop, readout=lambda state, k: state.h_BTD, num_loops=2)
    gap = measure_exit_gap(model, text(1), text(2))
    assert [mend.name for mend in gap.mends] == ["temperature", "full-rank"]
    assert share(gap, "temperature") > 0.97 and "no affine map" in gap.notes[-1]


class Copied(Known):
    """The same with a state of two copies side by side, of which the readout takes the mean."""

    def embed(self, ids_BT: Tensor) -> LoopState:
        return self.copied(super().embed(ids_BT))

    def loop(self, state: LoopState, k: int) -> LoopState:
        return self.copied(super().loop(state, k))

    def copied(self, state: LoopState) -> LoopState:
        return state.with_h(state.h_BTD.repeat(1, 1, 2))

    def features(self, state: LoopState, k: int, cache=None) -> Tensor:
        return state.h_BTD.unflatten(-1, (2, -1)).mean(-2)


def test_a_state_wider_than_the_heads_input_is_read_as_the_narrow_one():
    first = lambda truth: truth * torch.linspace(0.1, 1.0, SIDES**2)  # noqa: E731
    wide, narrow = (measure_exit_gap(kind(first), text(1), text(2)) for kind in (Copied, Known))
    assert wide.gap == pytest.approx(narrow.gap)
    for name in ("temperature", "affine"):
        assert share(wide, name) == pytest.approx(share(narrow, name), abs=1e-3)
    assert share(wide, "full-rank") == pytest.approx(share(narrow, "full-rank"), abs=0.1)
    assert [mend.parameters for mend in wide.mends] == [1, 2 * SIDES**2, (2 * SIDES**2) * (2 * SIDES**2 + 1) + 1]


def test_only_targets_that_count_count():
    def masked(pairs):
        return [(ids, torch.where(torch.arange(24) < 12, targets, -100)) for ids, targets in pairs]

    gap = measure_exit_gap(Known(lambda truth: 0.2 * truth), masked(text(1)), masked(text(2)))
    short = [(ids[:, :12], targets[:, :12]) for ids, targets in text(2)]
    alone = measure_exit_gap(Known(lambda truth: 0.2 * truth), masked(text(1)), short)
    assert gap.test_tokens == 96 * 12 and gap.gap == pytest.approx(alone.gap, rel=1e-5)


def test_several_exits_are_each_as_alone():
    model = ls.build(ls.ModelConfig(vocab_size=16, width=16, num_heads=2, num_layers=1, num_loops=3, max_length=24))
    both = measure_exit_gaps(model, text(1, 8), text(2, 8), loops=[1, 2])
    assert [gap.loop for gap in both] == [1, 2] and both[1] == measure_exit_gap(model, text(1, 8), text(2, 8), loop=2)
    assert "an interval over 8 units of text is too narrow" in both[0].notes


def test_an_exit_at_or_beyond_full_depth_is_refused():
    with pytest.raises(ConfigError, match="loop = 2: an exit lies below the trained depth"):
        measure_exit_gap(Known(None), text(1), text(2), loop=2)
    with pytest.raises(DataError, match="at least two rows"):
        measure_exit_gap(Known(None), text(1, rows=1), text(2))
