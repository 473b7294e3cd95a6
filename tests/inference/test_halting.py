"""Halting: rules that look at one token at one loop, and one pass over known text that equals decoding it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

import loopscope as ls
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.inference.halting import Halting, HaltingRunner, halt_on_text, parse_halting
from loopscope.inference.rules import RULES, Probe, Rule, logistic, rule_of, rules_for
from loopscope.results.halting import Fill

FILLS = get_args(Fill)

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
    "everything that makes keys and values": {
        "positions": "rope",
        "qk_norm": True,
        "qk_bias": True,
        "attention_gate": True,
        "value_embeddings": True,
        "loop_embedding": True,
        "num_kv_heads": 2,
    },
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


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", RULES)
def test_one_pass_over_known_text_equals_decoding_it_token_by_token(tiny, ids_BT, name, fill):
    model = built(tiny)
    rule = probe(model) if name == "probe" else rule_of(name)
    if name == "fixed":
        threshold = 2.0
    elif name == "probe":
        threshold = 0.05
    else:
        threshold = median_threshold(model, ids_BT, rule)
    halting, prompt = Halting(rule, threshold, fill), 3
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


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("design", DESIGNS)
def test_the_same_in_every_design(tiny, ids_BT, design, fill):
    model = built(tiny, design)
    halting = Halting(rule_of("margin"), median_threshold(model, ids_BT, rule_of("margin")), fill)
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

    plain = [name for name, kind in RULES.items() if not kind.is_fitted]
    for name in plain:
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


def test_a_rule_is_known_by_its_definition_and_nothing_else(tiny, ids_BT, monkeypatch):
    monkeypatch.setattr("loopscope.inference.rules.RULES", dict(RULES))

    class AtOnce(Rule, name="at-once"):
        def score(self, look):
            return look.same(1)

    halting = parse_halting("at-once:0.5")
    assert isinstance(halting.rule, AtOnce) and "at-once" in rules_for(built(tiny))
    assert (halt_on_text(built(tiny), ids_BT, ids_BT, halting, num_loops=4).exits_BT == 1).all()


class Kept:
    """A cache that remembers what it is given and shows nothing of it."""

    def __init__(self):
        self.given = {}

    def positions(self, tokens):
        return torch.arange(tokens)[None]

    def mask(self, tokens):
        return None

    def extend(self, slot, k_BHTC, v_BHTC):
        self.given[slot] = k_BHTC, v_BHTC
        return k_BHTC, v_BHTC


@pytest.mark.parametrize("design", DESIGNS)
def test_a_projected_state_shows_what_the_first_layer_of_a_loop_on_it_would_show(tiny, ids_BT, design):
    """The first layer reads the state itself, and so must give the same; with a single layer there is no other."""
    model = ls.build(replace(tiny, num_loops=4, num_layers=1, **DESIGNS[design]), seed=3).double().eval()
    state = ls.run_loops(model, ids_BT, num_loops=2).states[2]
    ran, projected = Kept(), Kept()
    for k in (3, 4):
        model.loop(state, k, ran)
    model.project(state, (3, 4), projected)
    assert projected.given.keys() == ran.given.keys()
    for slot, expected in ran.given.items():
        torch.testing.assert_close(projected.given[slot], expected)


def test_the_fills_differ_and_only_beyond_the_exit(tiny, ids_BT):
    """Tokens that all leave at loop 2 never look at deeper slots; of a rule that keeps some running, they do."""
    model = built(tiny)
    together = [
        halt_on_text(model, ids_BT, ids_BT, Halting(rule_of("fixed"), 2.0, fill), num_loops=4) for fill in FILLS
    ]
    torch.testing.assert_close(together[0].ce_BT, together[1].ce_BT, atol=0, rtol=0)
    threshold = median_threshold(model, ids_BT, rule_of("margin"))
    apart = [
        halt_on_text(model, ids_BT, ids_BT, Halting(rule_of("margin"), threshold, fill), num_loops=4) for fill in FILLS
    ]
    assert not torch.equal(apart[0].ce_BT, apart[1].ce_BT)


def test_a_fill_that_a_model_cannot_give_is_refused_by_name(tiny, ids_BT):
    class OnlyCached(torch.nn.Module, ls.Cached):
        """The same model, without its key and value maps."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def embed(self, ids_BT, cache=None):
            return self.inner.embed(ids_BT, cache)

        def loop(self, state, k, cache=None):
            return self.inner.loop(state, k, cache)

        def readout(self, state, k, cache=None):
            return self.inner.readout(state, k, cache)

    model, halting = OnlyCached(built(tiny)), Halting(rule_of("margin"), 0.1, "project")
    with pytest.raises(UnsupportedError, match="ProjectedKeys"):
        halt_on_text(model, ids_BT, ids_BT, halting, num_loops=4)
    with pytest.raises(UnsupportedError, match="ProjectedKeys"):
        halting.check_fits(model, 4)


def test_a_policy_of_another_model_is_refused_with_what_differs(tiny):
    model = built(tiny)
    rule, width = rule_of("margin"), model.config.width
    Halting(rule, 1.0, num_loops=4, width=width).check_fits(model, 4)
    with pytest.raises(ConfigError, match="calibrated at 8 loops, and 4 are asked for"):
        Halting(rule, 1.0, num_loops=8, width=width).check_fits(model, 4)
    with pytest.raises(ConfigError, match=f"width 12345, and those of this model have {width}"):
        Halting(rule, 1.0, num_loops=4, width=12345).check_fits(model, 4)


def test_a_probe_has_to_be_fitted_and_says_by_which_command():
    with pytest.raises(ConfigError, match="calibrate TARGET --rule probe"):
        parse_halting("probe:0.5")


# --- the probe -------------------------------------------------------------------------------------------------------


def test_logistic_regression_finds_the_minimum_and_nothing_beside_it_is_lower():
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    y_N = (x_ND @ torch.tensor([2.0, -1, 0, 0.5, 0], dtype=torch.float64) + 0.3 > 0).double()
    w_D, c = logistic(x_ND, y_N, ridge=1e-2)
    z_N = x_ND @ w_D + c
    residual_N = z_N.sigmoid() - y_N
    gradient = torch.cat([x_ND.T @ residual_N / 400 + 1e-2 * w_D, (residual_N.mean() + 1e-2 * c)[None]])
    assert gradient.abs().max() < 1e-8
    assert ((z_N > 0) == (y_N > 0)).double().mean() > 0.97


def test_a_probe_of_tokens_that_are_all_alike_stays_finite():
    x_ND = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    w_D, c = logistic(x_ND, torch.ones(50))
    assert w_D.isfinite().all() and 0 < c < 100


class SettlesByFirstChannel(torch.nn.Module, ls.Cached):
    """Its prediction changes with every loop unless the first channel says that it is settled."""

    num_loops = 3

    def embed(self, ids_BT, cache=None):
        h_BTD = torch.nn.functional.one_hot(ids_BT, 8).float()
        settled_BT = ids_BT % 2 == 0
        return ls.LoopState(torch.cat([torch.where(settled_BT, 1.0, -1.0)[..., None], h_BTD], -1))

    def loop(self, state, k, cache=None):
        moving_BT1 = state.h_BTD[..., :1] < 0
        turned = torch.cat([state.h_BTD[..., :1], state.h_BTD[..., 1:].roll(1, -1)], -1)
        return state.with_h(torch.where(moving_BT1, turned, state.h_BTD))

    def readout(self, state, k, cache=None):
        return 5 * state.h_BTD[..., 1:]


def test_a_probe_learns_which_tokens_have_settled(ids_BT):
    model, ids_BT = SettlesByFirstChannel(), ids_BT % 8
    fitted = Probe.fitted(model, [ids_BT], 3, 0.01)
    halted = halt_on_text(model, ids_BT, ids_BT, Halting(fitted, 0.0), num_loops=3)
    assert torch.equal(halted.exits_BT == 1, ids_BT % 2 == 0)
    assert set(halted.exits_BT.flatten().tolist()) == {1, 3}
