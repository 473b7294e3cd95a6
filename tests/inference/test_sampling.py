"""Every filter against its plain definition, and draws against the distribution they come from."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopscope.errors import ConfigError
from loopscope.inference.decoding import Sampling, accept

LOGITS = st.lists(st.floats(-6, 6).map(lambda x: round(x, 1)), min_size=2, max_size=12)
"""Rounded, so that ties come up."""


def softmax(logits, temperature=1.0):
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def likeliest_first(p):
    return sorted(range(len(p)), key=lambda token: (-p[token], token))


def renormalised(p, kept):
    total = sum(p[token] for token in kept)
    return [p[token] / total if token in kept else 0.0 for token in range(len(p))]


def by_definition(logits, temperature, top_k, top_p, min_p):
    """Temperature, then top-k, top-p and min-p, each on what is left of the one before."""
    p = softmax(logits, temperature)
    kept = likeliest_first(p)[:top_k]
    p = renormalised(p, kept)
    if top_p is not None:
        nucleus = []
        for token in likeliest_first(p):
            if sum(p[each] for each in nucleus) < top_p - 1e-12:
                nucleus.append(token)
        kept = [token for token in nucleus if token in kept]
        p = renormalised(p, kept)
    if min_p is not None:
        p = renormalised(p, [token for token in kept if p[token] >= min_p * max(p) - 1e-12])
    return p


@given(
    LOGITS,
    st.sampled_from([0.3, 1.0, 2.5]),
    st.one_of(st.none(), st.integers(1, 15)),
    st.one_of(st.none(), st.sampled_from([1e-9, 0.37, 0.83, 1.0])),
    st.one_of(st.none(), st.sampled_from([0.0, 0.11, 0.53, 1.0])),
)
def test_the_filters_together_are_their_definitions_one_after_the_other(logits, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    p_V = sampling.probabilities(torch.tensor(logits, dtype=torch.float64), [])
    expected = by_definition(logits, temperature, top_k, top_p, min_p)
    torch.testing.assert_close(p_V, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_top_k_keeps_k_tokens_also_where_more_are_equally_likely():
    p_V = Sampling(temperature=1.0, top_k=2).probabilities(torch.zeros(5), [])
    assert p_V.tolist() == [0.5, 0.5, 0, 0, 0]


def test_top_p_keeps_the_token_that_crosses_the_limit():
    logits_V = torch.tensor([0.5, 0.3, 0.2]).log()
    assert Sampling(temperature=1.0, top_p=0.5).probabilities(logits_V, []).count_nonzero() == 1
    assert Sampling(temperature=1.0, top_p=0.51).probabilities(logits_V, []).count_nonzero() == 2


@given(LOGITS)
def test_the_likeliest_token_alone_is_greedy_however_it_is_asked_for(logits):
    logits_V = torch.tensor(logits)
    greedy = Sampling().draw(logits_V, [], torch.Generator())
    assert greedy == likeliest_first(logits)[0]
    for options in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-308, "top_k": 1}):
        sampling = Sampling(**{"temperature": 1.0, **options})
        assert sampling.draw(logits_V, [], torch.Generator().manual_seed(1)) == greedy


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-6])
@pytest.mark.parametrize("flush", [False, True])
def test_the_coldest_temperatures_leave_the_likeliest_tokens(temperature, flush):
    torch.set_flush_denormal(flush)
    p_V = Sampling(temperature=temperature).probabilities(torch.tensor([3.0, 700.0, 700.0, -5.0]), [])
    assert p_V[1:3].sum() == 1  # both, or the first of them where the processor takes the temperature for 0


def test_the_repetition_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits_V = torch.tensor([2.0, -2.0, 2.0, 0.0])
    penalised_V = Sampling(repetition_penalty=2.0).penalised(logits_V, [0, 1, 1, 3])
    assert penalised_V.tolist() == [1.0, -4.0, 2.0, 0.0]
    assert logits_V.tolist() == [2.0, -2.0, 2.0, 0.0]  # the caller's own are left alone
    assert Sampling(repetition_penalty=2.0).draw(logits_V, [0], torch.Generator()) == 2


def frequencies(draw, count, size):
    counts = torch.zeros(size, dtype=torch.float64)
    for _ in range(count):
        counts[draw()] += 1
    return counts / count


def test_tokens_are_drawn_as_often_as_they_are_likely():
    sampling = Sampling(temperature=0.8, top_p=0.95, repetition_penalty=1.3)
    logits_V, seen = torch.tensor([1.0, 0.5, -1.0, 2.0, -4.0]), [3, 1]
    p_V, generator, count = sampling.probabilities(logits_V, seen), sampling.generator(0), 4000
    found_V = frequencies(lambda: sampling.draw(logits_V, seen, generator), count, 5)
    assert ((found_V - p_V).abs() <= 4 * (p_V * (1 - p_V) / count).sqrt()).all()  # and so never where p is 0


def test_each_prompt_has_random_numbers_of_its_own_and_each_seed_others():
    def numbers(seed, number):
        return torch.rand(4, generator=Sampling(seed=seed).generator(number)).tolist()

    assert numbers(1, 0) == numbers(1, 0)
    assert len({tuple(numbers(seed, number)) for seed in (0, 1, 2, -1) for number in range(3)}) == 12


P = st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda p: sum(p) > 0.1)


@given(P, P, st.integers(0, 10))
def test_speculation_keeps_the_target_distribution_in_expectation(p, q, seed):
    """P(y) = Σ_x q(x)·[kept]: the rule is asked for each draft x what it would do, at every random number."""
    size = min(len(p), len(q))
    target_V, draft_V = (torch.tensor(each[:size], dtype=torch.float64) for each in (p, q))
    if not (target_V.sum() > 0 and draft_V.sum() > 0):
        return
    target_V, draft_V = target_V / target_V.sum(), draft_V / draft_V.sum()
    left_V = (target_V - draft_V).clamp(min=0)
    kept_V = torch.minimum(target_V, draft_V)
    total_V = kept_V + (1 - kept_V.sum()) * (left_V / left_V.sum() if left_V.any() else left_V)
    torch.testing.assert_close(total_V, target_V, atol=1e-12, rtol=1e-9)
    generator = torch.Generator().manual_seed(seed)
    for drafted in range(size):
        if draft_V[drafted] == 0:
            continue
        stands = accept(drafted, draft_V, target_V, generator)
        assert target_V[stands] > 0
        assert stands == drafted or (target_V[drafted] < draft_V[drafted] and target_V[stands] > draft_V[stands])


def test_speculation_gives_tokens_as_often_as_the_target_has_them_whatever_drafts():
    target_V = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    count, generator = 5000, torch.Generator().manual_seed(0)
    for draft in ([0.1, 0.1, 0.1, 0.7], [0.5, 0.3, 0.2, 0.0], [0.9, 0.05, 0.05, 0.0]):
        draft_V = torch.tensor(draft, dtype=torch.float64)

        def draw(draft_V=draft_V):
            drafted = int(torch.multinomial(draft_V, 1, generator=generator))
            return accept(drafted, draft_V, target_V, generator)

        found_V = frequencies(draw, count, 4)
        assert ((found_V - target_V).abs() <= 4 * (target_V * (1 - target_V) / count).sqrt()).all()


def test_a_greedy_draft_stands_exactly_where_the_target_says_the_same():
    one, other = (torch.nn.functional.one_hot(torch.tensor(token), 4).double() for token in (1, 3))
    assert accept(1, one, one, torch.Generator()) == 1
    assert accept(1, one, other, torch.Generator()) == 3


def test_a_draft_that_differs_from_the_target_by_rounding_stands():
    target_V = torch.tensor([0.5, 0.5], dtype=torch.float64)
    draft_V = target_V * (1 + 1e-15)
    assert all(accept(0, draft_V, target_V, torch.Generator().manual_seed(seed)) == 0 for seed in range(3))
    # As if the random number had been the one that refuses:
    refusing = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert accept(0, refusing, refusing * 0.0, torch.Generator()) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan), ("top_k", 0), ("top_p", 0.0),
        ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0), ("repetition_penalty", math.inf),
    ],
)  # fmt: skip
def test_an_option_out_of_range_names_its_flag(field, value):
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}"):
        Sampling(**{field: value})
