"""The search counts exactly the directions that are hidden, carried, reachable, read and never shown."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import loopscope as ls
from loopscope.auditing.derivatives import _push_by_two_backward_passes, jacobian, least_squares, pull, push
from loopscope.auditing.search import audited_loops, median_dimension
from loopscope.auditing.window import windows
from loopscope.errors import ProtocolError

OPTIONS = ls.AuditOptions(states=4, prefix=8, rollout=6)


def audited(model, ids_BT, **arguments):
    return ls.audit(model, [ids_BT], options=arguments.pop("options", OPTIONS), **arguments)


def verdicts(result):
    return result.blind_directions.dimension, result.variable("scale").verdict, result.variable("mean").verdict


@pytest.mark.parametrize(
    ("changes", "supervised", "expected"),
    [
        ({}, "every-loop", (1, "blind", "visible")),
        ({}, "terminal", (1, "blind", "visible")),
        ({"readout": "raw"}, "every-loop", (0, "visible", "visible")),
        ({"readout": "raw"}, "terminal", (0, "visible", "visible")),
        ({"readout": "final-only"}, "every-loop", (0, "visible", "visible")),
        ({"readout": "final-only"}, "terminal", (1, "blind", "visible")),
        ({"readout": "layernorm"}, "every-loop", (2, "blind", "blind")),
        ({"readout": "layernorm", "norm": "layernorm"}, "every-loop", (1, "blind", "inert")),
        ({"inter_loop_norm": "rmsnorm"}, "every-loop", (0, "removed", "visible")),
        ({"init": "scaled"}, "every-loop", (1, "blind", "visible")),
        ({"readout": "alpha", "alpha": 1e-4}, "every-loop", (1, "blind", "visible")),
        ({"readout": "alpha", "alpha": 0.01}, "every-loop", (1, "blind", "visible")),
        ({"readout": "alpha", "alpha": 0.1}, "every-loop", (0, "weak", "visible")),
        ({"readout": "taper"}, "every-loop", (1, "blind", "visible")),
        ({"positions": "rope", "qk_norm": True, "kv_heads": 2}, "every-loop", (1, "blind", "visible")),
    ],
    ids=str,
)
def test_an_untrained_design_gets_the_verdict_of_its_readout_and_recurrence(
    tiny, ids_BT, changes, supervised, expected
):
    fields = {("num_kv_heads" if name == "kv_heads" else name): value for name, value in changes.items()}
    model = ls.build(replace(tiny, vocab_size=80, **fields), seed=0)
    result = audited(model, ids_BT, supervised=supervised)
    assert verdicts(result) == expected
    assert result.verdict == ("blind-spot" if expected[0] else "controlled")
    assert result.blind_directions.agreement == 1.0


@pytest.mark.parametrize("term", [ls.NormPenalty(0.01), ls.ScaleAnchor(0.01)], ids=lambda term: term.name)
def test_a_loss_term_that_sees_the_scale_makes_it_visible(tiny, ids_BT, term):
    model = ls.build(replace(tiny, vocab_size=80), seed=0)
    result = audited(model, ids_BT, terms=[term])
    assert verdicts(result) == (0, "visible", "visible")
    assert result.model.observables == [term.name]


def test_prelude_coda_and_injection_are_audited_like_any_other_design(tiny, ids_BT):
    """The coda reads through norms of its own, so scale is hidden only as far as the coda hides it: not at all here."""
    config, quick = replace(tiny, vocab_size=80, prelude_layers=1, injection="add"), replace(OPTIONS, states=2)
    assert verdicts(audited(ls.build(config, seed=0), ids_BT, options=quick))[:2] == (1, "blind")
    with_coda = ls.build(replace(config, coda_layers=1), seed=0)
    assert audited(with_coda, ids_BT, options=quick).variable("scale").visibility > 1e-3


def test_dense_and_matrix_free_searches_agree(tiny, ids_BT):
    for changes in ({}, {"inter_loop_norm": "rmsnorm"}, {"readout": "layernorm"}):
        model = ls.build(replace(tiny, vocab_size=80, **changes), seed=0)
        dense, free = (
            audited(model, ids_BT, options=replace(OPTIONS, states=2, method=method)).to_json()
            for method in ("dense", "matrix-free")
        )
        assert dense["blind_directions"]["loops"] == free["blind_directions"]["loops"]
        assert [one["verdict"] for one in dense["variables"]] == [one["verdict"] for one in free["variables"]]


def test_matrix_free_reachability_finds_what_no_loop_can_write():
    """A loop that closes with a norm cannot write along its own output."""
    net = nn.Linear(12, 12, bias=False)
    head = torch.randn(48, 12)

    def rms(h):
        return h / h.square().mean(-1, keepdim=True).sqrt()

    model = ls.adapt(
        embed=lambda ids: torch.nn.functional.one_hot(ids, 12).double(),
        loop=lambda h, k: rms(h + torch.tanh(net.double()(h))),
        readout=lambda h, k: rms(h) @ head.double().T,
        num_loops=3,
        module=net,
    )
    ids_BT = torch.randint(12, (3, 10))
    for method in ("dense", "matrix-free"):
        result = audited(model, ids_BT, options=replace(OPTIONS, method=method))
        assert result.blind_directions.loops[0].unreachable == 1
        assert verdicts(result)[:2] == (0, "removed")


def test_the_least_squares_residual_is_that_of_a_direct_solution():
    matrix = torch.randn(9, 5, dtype=torch.float64)
    targets_RD = torch.randn(4, 9, dtype=torch.float64)
    _, ours = least_squares(lambda x: x @ matrix.T, lambda y: y @ matrix, targets_RD)
    solution = torch.linalg.lstsq(matrix, targets_RD.T).solution
    torch.testing.assert_close(ours, targets_RD - (matrix @ solution).T, atol=1e-6, rtol=1e-6)


def test_damping_leaves_what_only_a_huge_solution_could_explain():
    matrix = torch.diag(torch.tensor([1.0, 0.5, 1e-7], dtype=torch.float64))
    ones = torch.ones(1, 3, dtype=torch.float64)
    _, damped = least_squares(lambda x: x @ matrix.T, lambda y: y @ matrix, ones, damping=1e-4)
    torch.testing.assert_close(damped, torch.tensor([[0.0, 0.0, 1.0]]).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("coda", [0, 1])
@pytest.mark.parametrize("position", [11, 6])
def test_a_window_against_a_cache_is_the_whole_prefix(tiny, ids_BT, coda, position):
    model = ls.build(replace(tiny, coda_layers=coda), seed=0).double().eval()
    cached = windows(model, ids_BT[0], position, 4).ahead
    assert cached.cache is not None
    assert cached.tokens == 12 - position
    states = ls.run_loops(model, ids_BT[:1], num_loops=4).states
    whole = replace(cached, cache=None, states=states, start=position)
    for k in (1, 2, 3):
        w_W = cached.vector(k)
        torch.testing.assert_close(w_W, whole.vector(k))
        for ours, theirs, j in ((cached.loop, whole.loop, k + 1), (cached.shown, whole.shown, k)):
            torch.testing.assert_close(jacobian(partial(ours, k=j), w_W), jacobian(partial(theirs, k=j), w_W))


def test_pushed_pulled_and_twice_pulled_derivatives_agree(tiny, ids_BT):
    model = ls.build(tiny, seed=0).double().eval()
    window = windows(model, ids_BT[0], 6, 3).alone
    w_W = window.vector(1)
    forward_RW, backward_RW = torch.randn(2, 3, 32, dtype=torch.float64)
    (pushed,) = push(lambda w: [window.loop(w, 2)], w_W, forward_RW)
    (twice,) = _push_by_two_backward_passes(lambda w: [window.loop(w, 2)], w_W, forward_RW)
    torch.testing.assert_close(pushed, twice)
    pulled = pull(lambda w: window.loop(w, 2), w_W, backward_RW)
    torch.testing.assert_close((pushed * backward_RW).sum(-1), (pulled * forward_RW).sum(-1))


def test_a_readout_that_shows_the_variable_later_is_not_blind(ids_BT):
    """Normed exits below K and a raw, supervised last readout: the last loss controls the scale."""
    net, head = nn.Linear(16, 16), torch.randn(64, 16).double()
    net.double()

    def rms(h):
        return h / h.square().mean(-1, keepdim=True).sqrt()

    table = torch.randn(37, 16).double()
    model = ls.adapt(
        embed=lambda ids: table[ids],
        loop=lambda h, k: h + 0.1 * torch.tanh(net(rms(h))),
        readout=lambda h, k: (h if k == 3 else rms(h)) @ head.T,
        num_loops=3,
        module=net,
    )
    result = audited(model, ids_BT)
    assert result.blind_directions.loops[0].shown_later == 1
    assert verdicts(result)[:2] == (0, "visible")
    assert verdicts(audited(model, ids_BT, supervised=[1, 2]))[:2] == (1, "blind")


def test_loops_that_are_audited_are_those_whose_state_goes_on_to_an_exit():
    assert audited_loops([1, 2, 3]) == [1, 2]
    assert audited_loops([3]) == [3]
    assert audited_loops([4, 1]) == [1, 2, 3]
    assert audited_loops(range(1, 65))[::7] == [1, 63]


def test_what_is_free_between_two_exits_is_found_there(tiny, ids_BT):
    """Raw at loop 1, RMSNorm at loop 4, nothing between: the exit of loop 1 does not hold what loop 2 writes."""
    model = ls.build(replace(tiny, vocab_size=80, num_loops=4, readout="final-only"), seed=0)
    assert verdicts(audited(model, ids_BT, supervised=[1, 4]))[:2] == (1, "blind")
    assert verdicts(audited(model, ids_BT, supervised=[1, 3, 4]))[:2] == (0, "visible")


def test_a_readout_without_any_derivative_names_its_loop(tiny, ids_BT):
    net = ls.build(tiny, seed=0)
    model = ls.adapt(
        embed=lambda ids: net.embedding(ids),
        loop=lambda h, k: h + 0.1 * torch.tanh(h),
        readout=lambda h, k: torch.zeros(*h.shape[:-1], 37, dtype=h.dtype) + 0 * h.sum(-1, keepdim=True),
        num_loops=2,
        module=net,
    )
    with pytest.raises(ProtocolError, match=r"readout at loop 1 does not depend on the state h_1"):
        audited(model, ids_BT)


def test_the_median_dimension_comes_with_the_share_that_agrees():
    assert median_dimension([1, 1, 1, 2]) == (1, 0.75)
    assert median_dimension([3]) == (3, 1.0)


def test_channels_and_scale_get_their_names(ids_BT):
    """A readout that never sees channels 2, 5 and 7, and hides the scale of the rest: four directions with names."""
    net, head, table = nn.Linear(24, 24).double(), torch.randn(96, 24).double(), torch.randn(37, 24).double()
    mask = torch.ones(24).double()
    mask[[2, 5, 7]] = 0

    def rms(h):
        return h / h.square().mean(-1, keepdim=True).sqrt()

    model = ls.adapt(
        embed=lambda ids: table[ids],
        loop=lambda h, k: h + 0.1 * torch.tanh(net(rms(h))),
        readout=lambda h, k: rms(mask * h) @ head.T,
        num_loops=3,
        module=net,
    )
    result = audited(model, ids_BT)
    assert result.blind_directions.dimension == 4
    assert [one.name for one in result.blind_directions.named] == ["scale", "channels 2, 5, 7"]
    assert result.blind_directions.unnamed == 0
    assert result.variable("channels 2, 5, 7").verdict == "blind"
    assert result.blind_directions.gap > 1e3
