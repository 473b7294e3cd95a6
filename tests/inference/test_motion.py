"""How tokens move: loops whose motion is known by derivation are called by their names, with their numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loopscope.config import ModelConfig
from loopscope.errors import ConfigError, NotFiniteError, UnsupportedError
from loopscope.inference.motion import Motion, contraction_rates, measure_motion, settling_loops
from loopscope.model.looped_lm import build
from loopscope.protocol import LoopedModel, LoopState, adapt

IDS = torch.arange(6).reshape(2, 3)


def along(states_LD: Tensor, head_VD: Tensor | None = None, num_loops: int = 4) -> LoopedModel:
    """A model whose every token has the given states, one for each loop."""
    head_VD = torch.eye(states_LD.shape[1], dtype=states_LD.dtype) if head_VD is None else head_VD

    def embed(ids_BT: Tensor) -> Tensor:
        return torch.zeros(*ids_BT.shape, states_LD.shape[1], dtype=states_LD.dtype)

    def loop(h_BTD: Tensor, k: int) -> Tensor:
        return states_LD[k - 1].expand_as(h_BTD).clone()

    return adapt(embed=embed, loop=loop, readout=lambda h, k: h @ head_VD.T, num_loops=num_loops)


def only(motion: Motion) -> str:
    """The kind of all tokens."""
    return next(kind for kind, share in motion.shares.items() if share == 1)


def turning(period: float, still: float = 0.0, loops: int = 64) -> Tensor:
    """A unit vector that turns in a plane, beside a part that stands still."""
    angles = torch.arange(1, loops + 1, dtype=torch.float64) * 2 * math.pi / period
    return torch.stack([angles.cos(), angles.sin(), torch.full_like(angles, still)], dim=1)


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_a_contraction_is_fixed_and_its_rate_is_found(rate):
    t = torch.arange(1, 65, dtype=torch.float64)[:, None]
    motion = measure_motion(along(torch.tensor([[3.0, 4.0]]).double() + rate**t * torch.tensor([[0.6, -0.2]])), IDS)
    assert only(motion) == "fixed" and motion.period is None
    assert motion.contraction_rate == pytest.approx(rate, rel=1e-6)
    assert motion.median_cosine[-1] == pytest.approx(1) and motion.median_cosine[0] < motion.median_cosine[20]


def test_a_rate_is_of_the_steps_above_rounding_and_there_is_none_of_a_state_that_stands():
    t = torch.arange(1, 65, dtype=torch.float64)[:, None, None]
    shrinking = (10000 + 0.5**t * torch.ones(1, 1, 4)).float()
    assert contraction_rates(list(shrinking)) == [None], "64 roundings of 20,000 are 0.15, and two steps are more"
    shrinking = (10000 + 0.5 ** (t - 8) * torch.ones(1, 1, 4)).float()
    assert contraction_rates(list(shrinking))[0] == pytest.approx(0.5, rel=0.01)
    assert contraction_rates([torch.ones(1, 4)] * 20) == [None]


def test_some_odd_loops_do_not_change_the_rate():
    t = torch.arange(1, 65, dtype=torch.float64)
    h = (0.9**t)[:, None] * torch.tensor([1.0, 0.0])
    h[10] += torch.tensor([0.0, 5.0])
    h[40] += torch.tensor([0.0, 2.0])
    assert contraction_rates(list(h[:, None]))[0] == pytest.approx(0.9, rel=0.01)


@pytest.mark.parametrize("period", [2.5, 7.0, 9.0, 12.6, 31.5])
def test_a_rotation_is_an_orbit_of_its_period(period):
    motion = measure_motion(along(turning(period)), IDS)
    assert only(motion) == "orbit"
    assert motion.period == pytest.approx(period, rel=0.02)
    assert motion.purity > 0.95 and motion.contraction_rate == pytest.approx(1, rel=1e-6)


def test_the_amplitude_of_an_orbit_is_that_of_its_cosines():
    motion = measure_motion(along(turning(9.0, still=3.0)), IDS)  # cos = (9 + cos θ)/10
    assert only(motion) == "orbit" and motion.tokens[0].amplitude == pytest.approx(0.1, rel=0.02)


def test_a_small_wobble_around_a_point_is_fixed():
    motion = measure_motion(along(turning(9.0, still=10.0)), IDS)  # cos ≥ 99/101
    assert only(motion) == "fixed"


def test_less_than_two_turns_are_no_orbit():
    motion = measure_motion(along(turning(60.0)), IDS)
    assert motion.shares["orbit"] == 0


def test_a_direction_that_turns_steadily_slides():
    motion = measure_motion(along(turning(4 * 64)), IDS)  # a quarter of a turn: cosines rise from 0 to 1
    assert only(motion) == "slider"
    assert motion.tokens[0].rise == pytest.approx(1.0, abs=0.2)


def test_growth_of_scale_alone_is_no_motion_of_direction():
    t = torch.arange(1, 65, dtype=torch.float64)[:, None]
    motion = measure_motion(along(t * torch.tensor([[1.0, 2.0]])), IDS)
    assert only(motion) == "fixed" and motion.contraction_rate == pytest.approx(1)


def test_noise_in_a_wide_state_is_unknown_and_in_a_narrow_one_an_impure_orbit():
    wide = torch.randn(64, 16384, generator=torch.Generator().manual_seed(1))
    assert only(measure_motion(along(wide, torch.ones(2, 16384)), IDS)) == "unknown"
    narrow = measure_motion(along(torch.randn(64, 8, generator=torch.Generator().manual_seed(1))), IDS)
    assert only(narrow) == "orbit" and narrow.purity < 0.6


def test_the_cosine_of_the_reference_with_itself_decides_nothing():
    alternating = torch.zeros(64, 64).double()
    alternating[torch.arange(64), torch.arange(64)] = 1  # every loop is orthogonal to every other
    motion = measure_motion(along(alternating), IDS)
    assert only(motion) == "unknown" and motion.tokens[0].rise == pytest.approx(0, abs=1e-9)


def test_a_prediction_settles_where_it_changes_last():
    likeliest = torch.tensor([[1, 5, 2], [1, 4, 2], [1, 5, 3], [1, 5, 2], [1, 5, 3]])
    assert settling_loops(likeliest) == [1, 3, 5]


def test_settling_is_seen_through_the_readout():
    states = torch.zeros(64, 3)
    states[:10, 0], states[10:, 1] = 1, 1
    motion = measure_motion(along(states, num_loops=12), IDS)
    assert motion.settled_at == 11 and motion.settled_by_trained_depth == 1
    assert measure_motion(along(states, num_loops=8), IDS).settled_by_trained_depth == 0


def test_tokens_move_each_for_itself():
    turn, stand = turning(9.0), torch.tensor([0.0, 0.0, 1.0]).double()

    def loop(h_BTD: Tensor, k: int) -> Tensor:
        h_BTD = stand.expand_as(h_BTD).clone()
        h_BTD[0, 1] = turn[k - 1]
        return h_BTD

    model = adapt(embed=lambda ids: torch.zeros(2, 3, 3).double(), loop=loop, readout=lambda h, k: h, num_loops=2)
    motion = measure_motion(model, IDS)
    assert [token.kind for token in motion.tokens] == ["fixed", "orbit", *["fixed"] * 4]
    assert motion.shares == pytest.approx({"fixed": 5 / 6, "orbit": 1 / 6, "slider": 0, "unknown": 0})


def test_a_model_without_loops_beyond_its_depth_is_followed_as_far_as_it_goes():
    motion = measure_motion(along(turning(5.0, loops=20), num_loops=20), IDS)
    assert motion.loops == 20 and "loop 21 fails with IndexError" in motion.notes[0] and only(motion) == "orbit"
    with pytest.raises(UnsupportedError, match="ends after 4: loop 5 fails"):
        measure_motion(along(turning(5.0, loops=4)), IDS)
    with pytest.raises(IndexError):
        measure_motion(along(turning(5.0, loops=3), num_loops=4), IDS)


def test_a_state_that_overflows_ends_the_course_and_within_the_trained_depth_is_an_error():
    def model(num_loops: int) -> LoopedModel:
        return adapt(embed=lambda ids: torch.ones(2, 3, 2), loop=lambda h, k: 1e3 * h, readout=lambda h, k: h,
                     num_loops=num_loops)  # fmt: skip

    motion = measure_motion(model(4), IDS)
    assert motion.loops == 12 and motion.notes == ["loop 13 leaves NaN or infinity."]
    with pytest.raises(NotFiniteError, match="h_13"):
        measure_motion(model(16), IDS)


def test_too_few_loops_are_refused():
    with pytest.raises(ConfigError, match="loops = 7"):
        measure_motion(along(turning(5.0)), IDS, loops=7)


def test_a_model_of_ours_comes_back_as_it_was_and_its_motion_is_the_same_twice(tiny: ModelConfig, ids_BT: Tensor):
    model = build(tiny, seed=0).train()
    state = torch.random.get_rng_state()
    motion = measure_motion(model, ids_BT, loops=16)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert len(motion.tokens) == ids_BT.numel() and measure_motion(model, ids_BT, loops=16) == motion


def test_a_loop_that_changes_its_state_in_place_does_not_rewrite_its_past():
    def embed(ids_BT: Tensor) -> LoopState:
        return LoopState(torch.ones(*ids_BT.shape, 2).double())

    def loop(state: LoopState, k: int) -> LoopState:
        state.h_BTD[..., 1] *= 0.5
        return state

    motion = measure_motion(adapt(embed=embed, loop=loop, readout=lambda s, k: s.h_BTD, num_loops=2), IDS, loops=20)
    assert motion.contraction_rate == pytest.approx(0.5)
