"""The cost of a cache policy: the same targets for all, counted once, and the exact cache costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import loopscope as ls
from loopscope.inference.cache import CachePolicy
from loopscope.inference.costs import policy_costs, shared_policies
from loopscope.inference.decoding import CachedRunner, Policies
from loopscope.protocol import run_loops


@pytest.fixture
def model(tiny) -> ls.LoopedLM:
    return ls.build(replace(tiny, tie_head=False, num_loops=4), seed=0).double().eval()


@pytest.fixture
def text() -> tuple[torch.Tensor, torch.Tensor]:
    windows = torch.randint(37, (5, 13), generator=torch.Generator().manual_seed(1))
    return windows[:, :-1], windows[:, 1:]


def test_every_policy_that_keeps_fewer_loops_is_compared():
    names = {loops: [policy.name for policy in shared_policies(loops)] for loops in (1, 2, 4, 5, 16)}
    assert names[1] == []
    assert names[2] == ["last-loop", "first-loop"]
    assert names[4] == ["last-loop", "first-loop", "first-then-last", "ring-2"]
    assert names[5] == ["last-loop", "first-loop", "first-then-last", "ring-2", "ring-4"]
    assert names[16] == ["last-loop", "first-loop", "first-then-last", "ring-2", "ring-4", "ring-8"]


def test_the_exact_cache_scores_the_second_half_of_each_window_as_one_pass_does(model, text):
    ids_WT, targets_WT = text
    exact = next(policy_costs(model, ids_WT, targets_WT, 4, batch=2))
    with torch.no_grad():
        logits_WTV = model.readout(run_loops(model, ids_WT).states[-1], 4)
    ce_WT = F.cross_entropy(logits_WTV.flatten(0, 1), targets_WT.flatten(), reduction="none").view(5, 12)
    assert exact.ce == pytest.approx(float(ce_WT[:, 6:].mean()), rel=1e-9)
    assert (exact.policy, exact.share, exact.delta_ce, exact.standard_error) == ("exact", 1.0, 0.0, 0.0)
    assert exact.bytes_per_token == 4 * 2 * 2 * 32 * 8


@pytest.mark.parametrize("name", ["last-loop", "first-loop", "first-then-last", "ring-2"])
@pytest.mark.parametrize("applies_to", ["decode", "prefill and decode"])
def test_a_cost_is_the_mean_over_windows_of_what_each_loses_alone(model, text, name, applies_to):
    ids_WT, targets_WT = text
    costs = list(policy_costs(model, ids_WT, targets_WT, 4, batch=3))
    found = next(each for each in costs if (each.policy, each.applies_to) == (name, applies_to))
    policy = CachePolicy(name)
    lost = []
    for ids, targets in zip(ids_WT.tolist(), targets_WT, strict=True):
        ce = []
        for policies in (Policies(), Policies(policy) if applies_to == "decode" else Policies(policy, policy)):
            runner = CachedRunner(model, 4, policies)
            runner.prefill([ids[:6]])
            logits_TV = torch.cat([runner.step([0], [each]) for each in ids[6:]])
            ce.append(float(F.cross_entropy(logits_TV, targets[6:])))
        lost.append(ce[1] - ce[0])
    lost_W = torch.tensor(lost, dtype=torch.float64)
    assert found.delta_ce == pytest.approx(float(lost_W.mean()), abs=1e-9)
    assert found.standard_error == pytest.approx(float(lost_W.std()) / 5**0.5, abs=1e-9)
    assert abs(found.delta_ce) > 1e-4
    assert found.share == (0.5 if name in ("ring-2", "first-then-last") else 0.25)


def test_a_policy_under_which_the_model_gives_no_numbers_is_unsafe_and_the_rest_is_still_measured(text):
    class Fragile(ls.LoopedLM):
        """Breaks when a loop sees keys of another loop than its own, in a single slot."""

        def loop(self, state, k, cache=None):
            broken = cache.cache.policy.name == "last-loop"
            after = super().loop(state, k, cache)
            return after.with_h(after.h_BTD * float("nan")) if broken else after

    config = ls.ModelConfig(vocab_size=37, width=16, num_layers=1, num_loops=2, num_heads=2, max_length=24)
    costs = list(policy_costs(Fragile(config).eval(), *text, 2, batch=5))
    assert [each.verdict for each in costs if each.policy == "last-loop"] == ["unsafe", "unsafe"]
    assert all((each.ce is None) == (each.policy == "last-loop") for each in costs)
