"""Halting: rules that look at one token at one loop, and one pass over known text that equals decoding it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import loopscope as ls
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.inference.halting import RULES, Halting, HaltingRunner, Probe, halt_on_text, rule_of

DESIGNS = {
    "paper": {},
    "raw, rope": {"readout": "raw", "positions": "rope", "num_kv_heads": 2},
    "ouro-like": {
        "norm_placement": "sandwich",
        "inter_loop_norm": "rmsnorm",
        "share_readout_norm": True,
        "exit_gate": True,
        "positions": "rope",
    },
    "parcae-like": {"injection": "diagonal", "state_init": "zeros", "prelude_layers": 1, "readout": "raw"},
}


def built(tiny, design="ouro-like"):
    return ls.build(replace(tiny, num_loops=4, **DESIGNS[design]), seed=3).double().eval()


def targets_of(ids_BT):
    return torch.cat([ids_BT[:, 1:], ids_BT[:, :1]], dim=1)


def median_threshold(model, ids_BT, rule):
    """A threshold between the scores, so that some tokens leave at every loop."""
    scores = []

    class Watching(type(rule)):
        def score(self, look):
            scores.append(rule.score(look))
            return torch.full_like(scores[-1], float("-inf"))

    halt_on_text(model, ids_BT, ids_BT, Halting(Watching(), 0.0), num_loops=4)
    found = torch.stack(scores).flatten()
    return float(found[found.isfinite()].median())


def probe(model):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, model.config.width, generator=generator).tolist()
    return Probe(weights, [0.0, 0.1, 0.2])


@pytest.mark.parametrize("name", [*RULES, "probe"])
def test_one_pass_over_known_text_equals_decoding_it_token_by_token(tiny, ids_BT, name):
    model = built(tiny)
    rule = probe(model) if name == "probe" else rule_of(name)
    if name == "fixed":
        threshold = 2.0
    elif name == "probe":
        threshold = 0.05
    else:
        threshold = median_threshold(model, ids_BT, rule)
    halting, prompt = Halting(rule, threshold), 3
    halted = halt_on_text(model, ids_BT, targets_of(ids_BT), halting, num_loops=4, prompt=prompt)
    runner = HaltingRunner(model, 4, halting)
    rows = range(len(ids_BT))
    runner.prefill([ids_BT[row, :prompt].tolist() for row in rows])
    for position in range(prompt, ids_BT.shape[1]):
        logits_BV = runner.step(list(rows), ids_BT[:, position].tolist())
        ce_B = torch.nn.functional.cross_entropy(logits_BV, targets_of(ids_BT)[:, position], reduction="none")
        assert [runner.spent(row) for row in rows] == halted.exits_BT[:, position].tolist()
        torch.testing.assert_close(ce_B, halted.ce_BT[:, position].double(), atol=1e-5, rtol=1e-5)
    if name != "fixed":
        assert len(halted.exits_BT[:, prompt:].unique()) > 1, "otherwise nothing was decided"


@pytest.mark.parametrize("design", DESIGNS)
def test_the_same_in_every_design(tiny, ids_BT, design):
    model = built(tiny, design)
    halting = Halting(rule_of("margin"), median_threshold(model, ids_BT, rule_of("margin")))
    halted = halt_on_text(model, ids_BT, targets_of(ids_BT), halting, num_loops=4)
    runner = HaltingRunner(model, 4, halting, halt_prompts=True)
    runner.prefill([row[:1].tolist() for row in ids_BT])
    exits = [[runner.spent(row) for row in range(len(ids_BT))]]
    for position in range(1, ids_BT.shape[1]):
        runner.step(list(range(len(ids_BT))), ids_BT[:, position].tolist())
        exits.append([runner.spent(row) for row in range(len(ids_BT))])
    assert torch.tensor(exits).T.tolist() == halted.exits_BT.tolist()


def test_tokens_that_never_leave_are_those_of_the_whole_model(tiny, ids_BT):
    model = built(tiny, "paper")
    halted = halt_on_text(model, ids_BT, targets_of(ids_BT), Halting(rule_of("margin"), float("inf")), num_loops=4)
    logits_BTV = model.readout(ls.run_loops(model, ids_BT).states[4], 4)
    expected_BT = torch.nn.functional.cross_entropy(logits_BTV.mT, targets_of(ids_BT), reduction="none")
    torch.testing.assert_close(halted.ce_BT.double(), expected_BT, atol=1e-5, rtol=1e-5)
    assert (halted.exits_BT == 4).all()


def test_a_later_token_never_changes_an_earlier_exit(tiny, ids_BT):
    model = built(tiny)
    halting = Halting(rule_of("entropy"), median_threshold(model, ids_BT, rule_of("entropy")))
    changed_BT = ids_BT.clone()
    changed_BT[:, 8] = (changed_BT[:, 8] + 5) % 37
    before, after = (halt_on_text(model, ids, ids, halting, num_loops=4) for ids in (ids_BT, changed_BT))
    assert before.exits_BT[:, :8].tolist() == after.exits_BT[:, :8].tolist()


def test_scores_are_what_their_names_say(tiny, ids_BT):
    model = built(tiny)
    states = ls.run_loops(model, ids_BT).states
    logits = [model.readout(state, k).float() for k, state in enumerate(states) if k]
    seen = {}

    def noting(name):
        class Noting(RULES[name]):
            def score(self, look):
                seen.setdefault(name, []).append(super().score(look))
                return torch.full_like(seen[name][-1], float("-inf"))

        return Noting()

    for name in RULES:
        halt_on_text(model, ids_BT, ids_BT, Halting(noting(name), 0.0), num_loops=4)
    p, q = logits[1].softmax(-1), logits[0].softmax(-1)
    ordered = logits[1].sort(-1, descending=True).values
    h, h_before = states[2].h_BTD.float(), states[1].h_BTD.float()
    gates = [model.exit_logits(model.features(states[k], k)).sigmoid() for k in (1, 2)]
    move = logits[1] - logits[0]
    move = (move - move.mean(-1, keepdim=True)).abs().amax(-1)
    expected = {
        "fixed": torch.full(ids_BT.shape, 2.0),
        "margin": ordered[..., 0] - ordered[..., 1],
        "max-probability": p.amax(-1),
        "entropy": (p * p.log()).sum(-1),
        "kl": -(p * (p / q).log()).sum(-1),
        "state-difference": -(h - h_before).norm(dim=-1) / h.norm(dim=-1),
        "cosine": (h * h_before).sum(-1) / h.norm(dim=-1) / h_before.norm(dim=-1),
        "gate": (gates[0] + (1 - gates[0]) * gates[1]).float(),
        "certain": (ordered[..., 0] - ordered[..., 1]) / (2 * move * 2),
    }
    for name, values in expected.items():
        torch.testing.assert_close(seen[name][1], values, atol=1e-4, rtol=1e-4, msg=name)


def test_a_coda_that_looks_at_other_tokens_is_refused_on_known_text(tiny, ids_BT):
    model = ls.build(replace(tiny, coda_layers=1), seed=0).double().eval()
    with pytest.raises(UnsupportedError, match="coda"):
        halt_on_text(model, ids_BT, ids_BT, Halting(rule_of("margin"), 0.1), num_loops=3)


def test_a_rule_of_another_name_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'margin'"):
        rule_of("margins")


def test_a_gate_is_asked_for_by_name(tiny, ids_BT):
    with pytest.raises(UnsupportedError, match="an exit gate"):
        halt_on_text(built(tiny, "paper"), ids_BT, ids_BT, Halting(rule_of("gate"), 0.5), num_loops=4)
