"""Decoding: every loop of every token once, a batch as each alone, cached as recomputed, and why a text ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loopscope as ls
from loopscope.errors import ConfigError, DataError, ProtocolError, UnsupportedError
from loopscope.inference.cache import CachePolicy
from loopscope.inference.decoding import (
    CachedRunner,
    Continuation,
    Limits,
    Policies,
    RecomputingRunner,
    Sampling,
    decode,
    logprob,
    runner_for,
)
from loopscope.protocol import run_loops

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8]]


@pytest.fixture
def model(tiny) -> ls.LoopedLM:
    """With a head of its own: through a tied one an untrained model says the same token over and over."""
    return ls.build(replace(tiny, positions="rope", tie_head=False), seed=0).double().eval()


def generated(runner, prompts, **options):
    """Ids that follow each prompt."""
    made: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for _, token in decode(runner, prompts, **options):
        made[token.number].append(token.id)
    return list(made.values())


class Counting(ls.LoopedLM):
    """Counts how often each (row of the cache, position, loop) is run."""

    def embed(self, ids_BT, cache=None):
        self.embedded = getattr(self, "embedded", Counter())
        self.embedded.update(self.places(ids_BT, cache))
        return super().embed(ids_BT, cache)

    def loop(self, state, k, cache=None):
        self.looped = getattr(self, "looped", Counter())
        self.looped.update((*place, k) for place in self.places(state.h_BTD[..., 0], cache))
        return super().loop(state, k, cache)

    def places(self, ids_BT, cache):
        positions_BT = cache.positions(ids_BT.shape[1]).expand(ids_BT.shape)
        return [(row, int(p)) for row, own in zip(cache.rows, positions_BT, strict=True) for p in own]


@pytest.mark.parametrize("policy", ["exact", "last-loop"])
def test_every_loop_of_every_token_of_prompts_of_different_lengths_is_run_once(tiny, policy):
    model = Counting(tiny).eval()
    policies = Policies(CachePolicy(policy), CachePolicy(policy))
    runner = CachedRunner(model, 3, policies)
    runner.prefill(PROMPTS)
    expected = {(runner.row[number], p) for number, prompt in enumerate(PROMPTS) for p in range(len(prompt))}
    assert model.embedded == Counter(expected)
    assert model.looped == Counter((*place, k) for place in expected for k in (1, 2, 3))
    runner.step([2, 0], [7, 7])
    new = {(runner.row[2], 3), (runner.row[0], 5)}
    assert model.embedded == Counter(expected | new)


@given(st.lists(st.lists(st.integers(0, 36), min_size=1, max_size=7), min_size=1, max_size=5))
def test_prompts_in_a_batch_give_the_logits_of_each_alone(prompts):
    config = ls.ModelConfig(
        vocab_size=37, width=16, num_layers=1, num_loops=2, num_heads=2, max_length=24, dropout=0.0, positions="rope"
    )
    model = ls.build(config, seed=0).double().eval()
    together = CachedRunner(model, 2).prefill(prompts)
    for prompt, logits_V in zip(prompts, together, strict=True):
        alone = model.readout(run_loops(model, torch.tensor([prompt])).states[-1], 2)[0, -1]
        torch.testing.assert_close(logits_V, alone)


@pytest.mark.parametrize("num_loops", [1, 3, 6])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.5, top_p=0.9, seed=3)], ids=["greedy", "drawn"]
)
def test_a_batch_generates_what_each_prompt_generates_alone(model, num_loops, sampling):
    limits = Limits(max_tokens=10)
    together = generated(CachedRunner(model, num_loops), PROMPTS, sampling=sampling, limits=limits)
    for number, prompt in enumerate(PROMPTS):
        alone = CachedRunner(model, num_loops)
        # Random numbers belong to the place in the batch: the same place, and nobody else in it.
        before = [[1]] * number if not sampling.is_greedy else []
        assert generated(alone, [*before, prompt], sampling=sampling, limits=limits)[-1] == together[number]


@pytest.mark.parametrize("num_loops", [1, 3, 6])
def test_recomputing_everything_generates_what_the_cache_does(model, num_loops):
    limits = Limits(max_tokens=12)
    cached = generated(CachedRunner(model, num_loops), PROMPTS, limits=limits)
    assert cached == generated(RecomputingRunner(model, num_loops), PROMPTS, limits=limits)
    assert cached != generated(CachedRunner(model, 2), PROMPTS, limits=limits)  # depth matters


def test_greedy_decoding_takes_the_likeliest_token_of_the_whole_text_every_time(model):
    ids = list(PROMPTS[0])
    for continuation, token in decode(CachedRunner(model, 3), [PROMPTS[0]], limits=Limits(max_tokens=8)):
        logits_V = model.readout(run_loops(model, torch.tensor([ids])).states[-1], 3)[0, -1]
        assert token.id == int(logits_V.argmax())
        assert token.logprob == pytest.approx(logits_V.log_softmax(-1)[token.id].item(), abs=1e-9)
        assert token.loops == 3
        ids.append(token.id)
        assert continuation.ids == ids


def test_the_model_takes_as_many_tokens_as_it_says_and_not_one_more(model):
    """24 tokens: a prompt of 20 leaves room for four, and a prompt of 24 for none."""
    made = {}
    for continuation, token in decode(CachedRunner(model, 3), [[1] * 20, [1] * 23], limits=Limits(context=24)):
        made[token.number] = continuation
    assert [len(each.tokens) for each in made.values()] == [4, 1]
    assert {each.finish for each in made.values()} == {"context"}
    with pytest.raises(DataError, match=r"24 tokens, and the model takes 24 with what follows.*--truncate"):
        next(decode(CachedRunner(model, 3), [[1] * 24], limits=Limits(context=24)))


def test_a_prompt_without_tokens_is_refused_before_anything_runs(model):
    runner = CachedRunner(model, 3)
    with pytest.raises(DataError, match="at least one token"):
        next(decode(runner, [[1], []]))
    assert runner.cache.lengths == []


def test_a_sequence_ends_at_the_end_of_text_and_the_others_go_on(model):
    free = generated(CachedRunner(model, 3), PROMPTS, limits=Limits(max_tokens=8))
    end = free[0][2]
    finished = {}
    for continuation, token in decode(CachedRunner(model, 3), PROMPTS, limits=Limits(max_tokens=8, end_ids=(end,))):
        finished[token.number] = continuation
    for number, ids in enumerate(free):
        until = ids.index(end) + 1 if end in ids else 8
        assert [token.id for token in finished[number].tokens] == ids[:until]
        assert finished[number].finish == ("end-of-text" if end in ids else "length")


def test_a_caller_ends_one_sequence_and_the_others_do_not_notice(model):
    free = generated(CachedRunner(model, 3), PROMPTS, limits=Limits(max_tokens=6))
    made = [[] for _ in PROMPTS]
    for continuation, token in decode(CachedRunner(model, 3), PROMPTS, limits=Limits(max_tokens=6)):
        made[token.number].append(token.id)
        if token.number == 1 and len(made[1]) == 2:
            continuation.finish = "enough"
    assert made == [ids[:2] if number == 1 else ids for number, ids in enumerate(free)]


@pytest.mark.parametrize(
    ("tokens", "prompt", "expected"),
    [(1, 2, None), (5, 2, "length"), (2, 8, "context"), (5, 5, "length")],
)
def test_the_first_limit_that_is_reached_is_the_reason(tokens, prompt, expected):
    continuation = Continuation([0] * prompt)
    continuation.tokens = [ls.inference.decoding.Token(0, 1, 0.0, 1)] * tokens
    assert Limits(max_tokens=5, context=10, end_ids=(2,)).reached(continuation) == expected


def test_no_tokens_at_all_is_no_limit():
    with pytest.raises(ConfigError, match="--max-tokens"):
        Limits(max_tokens=0)


def stranger(network) -> ls.LoopedModel:
    return ls.adapt(
        embed=lambda ids: network.embed(ids).h_BTD,
        loop=lambda h, k: h,
        readout=lambda h, k: h @ network.head.T,
        num_loops=2,
        module=network,
    )


def test_a_model_without_a_cache_decodes_all_the_same_and_takes_no_cache_policy(model):
    theirs = stranger(model)
    runner = runner_for(theirs, 2)
    assert isinstance(runner, RecomputingRunner)
    assert all(len(ids) == 3 for ids in generated(runner, PROMPTS, limits=Limits(max_tokens=3)))
    with pytest.raises(UnsupportedError, match="the cache policy last-loop needs a key-value cache"):
        runner_for(theirs, 2, Policies(CachePolicy("last-loop")))
    assert isinstance(runner_for(model, 2), CachedRunner)


@pytest.mark.parametrize("runner", [CachedRunner, RecomputingRunner])
def test_logits_that_are_no_numbers_are_named_with_their_loop(model, runner):
    model.recurrence.core.layers[0].attention.out.weight.data.fill_(float("nan"))
    with pytest.raises(ProtocolError, match="the logits after loop 3 are not finite"):
        next(decode(runner(model, 3), [[1, 2]]))


def test_a_readout_of_its_own_is_used_as_it_is(tiny):
    class Negated(ls.LoopedLM):
        def readout(self, state, k, cache=None):
            return -super().readout(state, k, cache)

    torch.manual_seed(0)
    plain = ls.LoopedLM(tiny).eval()
    negated = Negated(tiny).eval()
    negated.load_state_dict(plain.state_dict())
    for runner in (CachedRunner, RecomputingRunner):
        torch.testing.assert_close(runner(negated, 3).prefill(PROMPTS)[2], -runner(plain, 3).prefill(PROMPTS)[2])


def test_the_log_probability_is_the_models_own_whatever_the_sampling(model):
    plain = {token.id: token.logprob for _, token in decode(CachedRunner(model, 3), [[1]], limits=Limits(max_tokens=1))}
    sampling = Sampling(temperature=0.3, top_k=1, repetition_penalty=1.0)
    drawn = [
        token for _, token in decode(CachedRunner(model, 3), [[1]], sampling=sampling, limits=Limits(max_tokens=1))
    ]
    assert drawn[0].logprob == pytest.approx(plain[drawn[0].id])
    assert logprob(torch.tensor([0.0, 0.0]), 1) == pytest.approx(-0.6931, abs=1e-4)


def test_nothing_to_continue_gives_nothing(model):
    assert list(decode(CachedRunner(model, 3), [])) == []
