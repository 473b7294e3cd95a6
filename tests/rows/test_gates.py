"""Exit gates: the same one saturates on a state that grows, and not on its direction."""

from __future__ import annotations

import math

import torch

import loopscope as ls
from loopscope.inference.halting import Halting, halt_on_text
from loopscope.rows.halting import Examples, LinearGate, examples, fit_gate, gate_loss, saturation

WIDTH, TOKENS, LOOPS = 32, 4000, 4


def grown(factor: float, seed: int = 0) -> Examples:
    """Directions of which one coordinate says whether a token is settled; the scale is `factor` times larger a loop."""
    generator = torch.Generator().manual_seed(seed)
    u_KND = torch.randn(LOOPS, TOKENS, WIDTH, generator=generator)
    settled_KN = (u_KND[: LOOPS - 1, :, 0] + torch.randn(LOOPS - 1, TOKENS, generator=generator) > 0).float()
    scale_K11 = factor ** torch.arange(LOOPS, dtype=torch.float)[:, None, None]
    return Examples(10 * scale_K11 * u_KND if factor > 1 else u_KND, settled_KN)


def test_where_the_scale_grows_the_gate_on_h_saturates_and_the_one_on_its_direction_does_not():
    seen, unseen = grown(10.0), grown(10.0, seed=1)
    raw, normed = fit_gate(seen, "h"), fit_gate(seen, "norm(h)")
    shares = {gate.reads: [each.saturated for each in saturation(gate, unseen)] for gate in (raw, normed)}
    assert shares["h"][-1] > 0.8 > 0.1 > shares["norm(h)"][-1]
    assert shares["h"] == sorted(shares["h"]), "it follows the length of the state"
    loss, constant = gate_loss(raw, unseen)
    assert loss > constant > gate_loss(normed, unseen)[0], "worse than a gate that always says the same"


def test_where_the_scale_is_controlled_the_same_gate_reads_the_state_itself():
    seen, unseen = grown(1.0), grown(1.0, seed=1)
    raw = fit_gate(seen, "h")
    assert max(each.saturated for each in saturation(raw, unseen)) < 0.1
    loss, constant = gate_loss(raw, unseen)
    assert loss < 0.9 * constant


def test_a_gate_on_the_direction_does_not_notice_the_scale():
    gate = LinearGate("norm(h)", torch.randn(8), 0.5)
    h = torch.randn(3, 8)
    torch.testing.assert_close(gate.logits(1000 * h), gate.logits(h))


def test_examples_say_where_an_exit_has_decided_as_full_depth_does():
    """A state that counts its loops, and decides at the second."""
    model = ls.adapt(
        embed=lambda ids: torch.zeros(*ids.shape, 1),
        loop=lambda h, k: h + 1,
        readout=lambda h, k: torch.cat([torch.full_like(h, 1.5), h], -1),
        num_loops=3,
    )
    found = examples(model, [torch.zeros(2, 5, dtype=torch.long)], loops=6)
    assert found.settled_KN.tolist() == [[0.0] * 10, [1.0] * 10]
    assert found.h_KND[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6], "also beyond full depth"
    assert len(found.choices[0]) == 20, "at full depth there is no choice"


def test_a_gate_is_a_halting_rule_of_its_own():
    model = ls.build(ls.preset("demo").model, seed=0).eval()
    gate = LinearGate("h", torch.zeros(model.config.width), math.log(3))
    ids = torch.randint(512, (2, 8))
    for threshold, loop in ((0.7, 1), (0.8, model.num_loops)):
        halted = halt_on_text(model, ids, ids, Halting(gate, threshold), num_loops=model.num_loops)
        assert (halted.exits_BT == loop).all(), "p is 3/4 everywhere"
