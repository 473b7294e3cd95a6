"""The cache against tokens that are run alone, and its policies against attention written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loopscope as ls
from loopscope.errors import ConfigError
from loopscope.inference.cache import EXACT, FIRST_CAPACITY, CachePolicy, KVCache
from loopscope.inference.decoding import CachedRunner, Policies
from loopscope.protocol import LoopState, run_loops

DESIGNS = {
    "paper": {},
    "rope, grouped heads, inter-loop norm": {
        "positions": "rope", "num_kv_heads": 2, "inter_loop_norm": "rmsnorm", "loop_embedding": True
    },
    "prelude and coda": {"prelude_layers": 1, "coda_layers": 1, "positions": "rope", "injection": "concat"},
}  # fmt: skip


@pytest.fixture(params=DESIGNS)
def model(request, tiny) -> ls.LoopedLM:
    return ls.build(replace(tiny, **DESIGNS[request.param]), seed=0).double().eval()


@pytest.fixture
def paper(tiny) -> ls.LoopedLM:
    return ls.build(tiny, seed=0).double().eval()


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(37, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def logits_alone(model, ids, num_loops=3):
    """Logits_TV of a sequence without a cache and without company."""
    return model.readout(run_loops(model, torch.tensor([ids]), num_loops=num_loops).states[-1], num_loops)[0]


@torch.no_grad()
def run(model, cache, ids_BT, rows=None, num_loops=3):
    """Logits_BTV of the next tokens of some rows of a cache."""
    view = cache.append(len(ids_BT[0]), rows)
    state = run_loops(model, torch.tensor(ids_BT), num_loops=num_loops, cache=view).states[-1]
    return model.readout(state, num_loops, view)


# --- room ------------------------------------------------------------------------------------------------------------


def fill(cache, count, value=1.0, rows=None, part="core", k=1):
    """Extend one slot by so many tokens that all have this value; what it shows then."""
    view = cache.append(count, rows)
    new = torch.full((len(view.rows), 2, count, 4), value)
    return view.extend((part, k, 0), new, -new)


def test_a_slot_doubles_so_that_appending_copies_each_token_a_few_times_at_most():
    cache, homes, copied = KVCache(1), [], 0
    for number in range(1000):
        keys, values = fill(cache, 1, number)
        held = cache.slot("core", 1, 0)[0]
        if not homes or held.data_ptr() != homes[-1]:
            homes.append(held.data_ptr())
            copied += number
    assert len(homes) == 1 + math.ceil(math.log2(1000 / FIRST_CAPACITY))
    assert copied < 2 * 1000
    assert keys[0, 0, :, 0].tolist() == list(range(1000))
    assert values[0, 1, :, 3].tolist() == [-number for number in range(1000)]


def test_what_a_cache_shows_is_a_view_of_it_where_rows_lie_side_by_side():
    cache = KVCache(3)
    keys, _ = fill(cache, 5, 1.0)
    assert keys.data_ptr() == cache.slot("core", 1, 0)[0].data_ptr()
    some, _ = fill(cache, 1, 2.0, rows=[1, 2])
    assert some.data_ptr() == cache.slot("core", 1, 0)[0][1].data_ptr()


def test_truncating_moves_nothing_and_the_next_token_takes_the_place():
    cache = KVCache(1)
    fill(cache, 10, 1.0)
    before = cache.slot("core", 1, 0)[0].data_ptr()
    cache.truncate(4)
    keys, _ = fill(cache, 1, 2.0)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 1, 2]
    assert cache.slot("core", 1, 0)[0].data_ptr() == before


def test_a_cache_is_never_truncated_to_more_than_it_holds():
    cache = KVCache(1)
    fill(cache, 3)
    with pytest.raises(AssertionError, match="never truncated to more"):
        cache.truncate(4)


def test_rows_that_were_given_back_are_taken_again_and_are_empty():
    cache = KVCache(2)
    fill(cache, 4)
    cache.give_back([0])
    assert cache.lengths == [0, 4]
    assert cache.take_rows(2) == [0, 2]
    assert cache.lengths == [0, 4, 0]
    keys, _ = fill(cache, 1, 9.0, rows=[0, 2])
    assert keys[:, 0, :, 0].tolist() == [[9], [9]]
    assert cache.slot("core", 1, 0)[0][1, 0, :4, 0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bytes_per_token_are_those_of_all_slots_heads_and_layers(tiny, dtype):
    model = ls.build(replace(tiny, num_kv_heads=2), seed=0).to(dtype)
    runner = CachedRunner(model, 5)
    runner.cache.take_rows(3)  # other rows are not this token's
    runner.prefill([tokens(3)])
    head_width, layers, loops, keys_and_values = 32 // 4, 2, 5, 2
    assert runner.cache.bytes_per_token == loops * layers * keys_and_values * 2 * head_width * dtype.itemsize


def test_a_prelude_has_one_slot_and_a_coda_one_for_each_loop_that_is_read_out(tiny):
    model = ls.build(replace(tiny, prelude_layers=1, coda_layers=1), seed=0).double()
    layer = 2 * 32 * 8
    cache = KVCache(1, num_loops=3)
    run(model, cache, [tokens(4)])
    assert cache.bytes_per_token == (1 + 3 * 2 + 1) * layer
    view = cache.append(1)
    trace = run_loops(model, torch.tensor([[1]]), num_loops=3, cache=view)
    model.readout(trace.states[1], 1, view)
    assert cache.bytes_per_token == (1 + 3 * 2 + 2) * layer


@pytest.mark.parametrize("name", ["exact ", "ring-0", "ring-N", "ring--1", "ring-1.5", "last", "", "ring-99999"])
def test_a_policy_that_does_not_exist_is_refused_with_those_that_do(name):
    with pytest.raises(ConfigError, match=r"--cache-policy"):
        CachePolicy(name)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_of_different_lengths_give_what_each_gives_alone(model):
    texts = [tokens(9, 1), tokens(4, 2), tokens(12, 3)]
    cache = KVCache(3)
    for row, ids in enumerate(texts):
        run(model, cache, [ids[:-3]], [row])
    together = run(model, cache, [ids[-3:] for ids in texts])
    for row, ids in enumerate(texts):
        torch.testing.assert_close(together[row], logits_alone(model, ids)[-3:])


def test_rows_in_any_order_and_not_side_by_side_give_what_each_gives_alone(model):
    texts = [tokens(5 + seed, seed) for seed in range(4)]
    cache = KVCache(4)
    for row, ids in enumerate(texts):
        run(model, cache, [ids[:-1]], [row])
    order = [3, 0, 2]
    together = run(model, cache, [texts[row][-1:] for row in order], order)
    for place, row in enumerate(order):
        torch.testing.assert_close(together[place, -1], logits_alone(model, texts[row])[-1])
    assert cache.lengths == [5, 5, 7, 8]  # row 1 was not run


def test_what_was_truncated_was_never_there(model):
    ids, wrong = tokens(10), tokens(8, seed=9)
    cache = KVCache(2)
    run(model, cache, [ids[:4], ids[:4]])
    run(model, cache, [wrong], [0])
    cache.truncate(4, row=0)
    torch.testing.assert_close(
        run(model, cache, [ids[4:], ids[4:]]), logits_alone(model, ids)[None, 4:].expand(2, -1, -1)
    )


def test_a_row_that_held_another_sequence_shows_nothing_of_it(model):
    ids = tokens(5)
    cache = KVCache(2)
    run(model, cache, [tokens(14, 3), tokens(14, 4)])
    cache.truncate(9, row=1)
    cache.give_back([0])
    (row,) = cache.take_rows(1)
    run(model, cache, [ids[:4]], [row])
    together = run(model, cache, [ids[4:], [7]], [row, 1])  # ragged: the other row is longer
    torch.testing.assert_close(together[0, -1], logits_alone(model, ids)[-1])


@given(st.data())
def test_any_history_of_appending_and_truncating_gives_what_the_rest_gives_alone(data):
    config = ls.ModelConfig(
        vocab_size=37, width=16, num_layers=1, num_loops=2, num_heads=2, max_length=40, positions="rope", dropout=0.0
    )
    model = ls.build(config, seed=0).double().eval()
    cache, texts = KVCache(2, capacity=2), [[], []]
    for number in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.sampled_from([[0], [1], [0, 1], [1, 0]]))
        new = data.draw(st.integers(1, 4))
        ids = [tokens(new, seed=10 * number + row) for row in rows]
        logits_BTV = run(model, cache, ids, rows, num_loops=2)
        for row, own in zip(rows, ids, strict=True):
            texts[row] += own
        for row, logits_TV in zip(rows, logits_BTV, strict=True):
            torch.testing.assert_close(logits_TV, logits_alone(model, texts[row], 2)[-new:])
        row = data.draw(st.sampled_from([0, 1]))
        length = data.draw(st.integers(0, len(texts[row])))
        cache.truncate(length, row)
        texts[row] = texts[row][:length]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cache_keeps_the_dtype_of_the_weights_and_costs_no_more_than_its_rounding(tiny, dtype):
    model = ls.build(tiny, seed=0).eval().to(dtype)
    ids = tokens(12)
    cache = KVCache(1)
    stepwise = torch.cat([run(model, cache, [[each]])[0] for each in ids])
    assert cache.slot("core", 1, 0)[0].dtype == dtype
    whole = logits_alone(model, ids)
    scale = whole.float().std()
    assert (stepwise - whole).float().abs().max() < 60 * torch.finfo(dtype).eps * scale


# --- rows at different loops -----------------------------------------------------------------------------------------


def wavefront(model, ids, num_loops):
    """h_K of each token when token t runs its loop k in call t + k: several loops of one sequence in one call."""
    cache = KVCache(1, num_loops=num_loops)
    states, done = {}, []
    for call in range(len(ids) + num_loops):
        if call < len(ids):
            states[call] = (0, model.embed(torch.tensor([[ids[call]]]), cache.append(1)))
        lanes = sorted(states)[::-1]  # the youngest token is at the first loop
        loops = tuple(states[token][0] + 1 for token in lanes)
        joined = LoopState.joined([states[token][1] for token in lanes], dim=0)
        after = model.loop(joined, loops, cache.at([0] * len(lanes), lanes))
        for lane, token in enumerate(lanes):
            states[token] = (loops[lane], after.take(torch.tensor([lane])))
            if loops[lane] == num_loops:
                done.append(states.pop(token)[1].h_BTD)
        if not states:
            break
    return torch.cat(done, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("num_loops", [3, 5])
def test_tokens_of_one_sequence_at_successive_loops_share_a_call(model, num_loops):
    ids = tokens(11)
    whole = run_loops(model, torch.tensor([ids]), num_loops=num_loops).states[-1].h_BTD
    torch.testing.assert_close(wavefront(model, ids, num_loops), whole)


@torch.no_grad()
@pytest.mark.parametrize("loops", [(1, 3, 2), (3, 3, 1), (2, 2, 2)])
def test_sequences_at_loops_of_their_own_share_a_call(model, loops):
    """Their slots are gathered: neither the rows nor the loops are evenly spaced."""
    texts, rows = [tokens(6, 1), tokens(9, 2), tokens(4, 3)], [2, 0, 1]
    cache, states = KVCache(3), []
    for row, ids, k in zip(rows, texts, loops, strict=True):
        run(model, cache, [ids[:-1]], [row])
        view = cache.append(1, [row])
        state = model.embed(torch.tensor([ids[-1:]]), view)
        for before in range(1, k):
            state = model.loop(state, before, view)
        states.append(state)
    view = cache.at(rows, [len(ids) - 1 for ids in texts])
    after = model.loop(LoopState.joined(states, dim=0), loops, view)
    for place, (ids, k) in enumerate(zip(texts, loops, strict=True)):
        alone = run_loops(model, torch.tensor([ids]), num_loops=3).states[k].h_BTD[0, -1]
        torch.testing.assert_close(after.h_BTD[place, 0], alone)


# --- policies, against attention by hand -----------------------------------------------------------------------------


class ByHand:
    """The paper's model for one sequence, token by token, with keys and values in plain lists: no loopscope layer."""

    def __init__(self, model, num_loops):
        self.weights, self.config = model.state_dict(), model.config
        self.num_loops, self.length = num_loops, 0
        self.kept: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Loop and layer → keys and values (H, C) of each token."""

    def rms(self, x, name):
        return self.weights[name] * x / torch.sqrt(x.square().mean() + self.config.norm_eps)

    def seen(self, policy, k):
        """The loop whose keys of an *earlier* token loop k looks at."""
        if policy == "exact":
            return k
        if policy == "last-loop":
            return self.num_loops
        if policy == "first-loop":
            return 1
        if policy == "first-then-last":
            return 1 if k == 1 else self.num_loops
        ring = int(policy.removeprefix("ring-"))
        return max(other for other in range(1, self.num_loops + 1) if (other - k) % ring == 0)

    def token(self, token, policy):
        """Logits_V after one more token, which sees earlier ones under this policy."""
        heads = self.config.num_heads
        x = self.weights["embedding.weight"][token] + self.weights["positions.weight"][self.length]
        for k in range(1, self.num_loops + 1):
            for layer in range(self.config.num_layers):
                name = f"recurrence.core.layers.{layer}."
                normed = self.rms(x, f"{name}attention_norms.norm.weight")
                q, key, value = (self.weights[f"{name}attention.qkv.weight"] @ normed).view(3, heads, -1)
                earlier = self.kept.get((self.seen(policy, k), layer), [])[: self.length]
                own = self.kept[1, layer][self.length] if policy == "first-loop" and k > 1 else (key, value)
                keys, values = (torch.stack(each) for each in zip(*earlier, own, strict=True))
                scores = torch.einsum("hc,shc->hs", q, keys) / math.sqrt(q.shape[-1])
                mixed = torch.einsum("hs,shc->hc", scores.softmax(-1), values).flatten()
                x = x + self.weights[f"{name}attention.out.weight"] @ mixed
                normed = self.rms(x, f"{name}feed_forward_norms.norm.weight")
                gate, up = (self.weights[f"{name}feed_forward.up.weight"] @ normed).chunk(2)
                x = x + self.weights[f"{name}feed_forward.out.weight"] @ (torch.nn.functional.silu(gate) * up)
                self.kept.setdefault((k, layer), []).append((key, value))
        self.length += 1
        return self.weights["embedding.weight"] @ self.rms(x, "readout_map.norm.weight")


POLICIES = ["exact", "last-loop", "first-loop", "first-then-last", "ring-1", "ring-2", "ring-3", "ring-4", "ring-9"]


@pytest.mark.parametrize("prefill", ["exact", "as decoded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_computes_what_its_definition_says(paper, policy, prefill):
    num_loops, prompt, rest = 5, tokens(6), tokens(6, seed=1)
    by_hand = ByHand(paper, num_loops)
    expected = [by_hand.token(each, "exact" if prefill == "exact" else policy) for each in prompt][-1:]
    expected += [by_hand.token(each, policy) for each in rest]
    kept = CachePolicy(policy)
    runner = CachedRunner(paper, num_loops, Policies(kept, EXACT if prefill == "exact" else kept))
    logits = runner.prefill([prompt, tokens(3, seed=5)])[:1]  # a neighbour, to be ragged
    logits += [runner.step([0, 1], [each, 3])[0] for each in rest]
    torch.testing.assert_close(torch.stack(logits), torch.stack(expected))
    assert runner.cache.bytes_per_token == min(kept.slots or 5, 5) * 2 * 2 * 32 * 8


def test_policies_differ_from_one_another(paper):
    """So that the test above cannot pass by looking away."""
    prompt, after = tokens(8), {}
    for policy in ("exact", "last-loop", "first-loop", "first-then-last", "ring-2", "ring-3"):
        by_hand = ByHand(paper, 5)
        after[policy] = [by_hand.token(each, policy) for each in prompt][-1]
    for one in after:
        assert all((after[one] - after[other]).abs().max() > 1e-3 for other in after if other != one)


def test_prompts_under_a_policy_of_their_own_that_decoding_does_not_share_are_refused():
    with pytest.raises(ConfigError, match="must be exact or that of decoding"):
        Policies(CachePolicy("last-loop"), CachePolicy("ring-2"))


def test_thinning_keeps_the_last_loop_that_would_have_written_each_slot(paper):
    cache = KVCache(1, num_loops=5)
    run(paper, cache, [tokens(4)], num_loops=5)
    whole = [cache.slot("core", k, 1)[0].clone() for k in range(1, 6)]
    cache.thin(CachePolicy("ring-2"), 5)
    assert torch.equal(cache.slot("core", 1, 1)[0], whole[4])  # loops 1, 3, 5
    assert torch.equal(cache.slot("core", 2, 1)[0], whole[3])  # loops 2, 4
    with pytest.raises(AssertionError, match="cannot be brought back"):
        cache.thin(EXACT, 5)


@pytest.mark.parametrize("policy", ["exact", "last-exited", "ring-2", "last-loop"])
@pytest.mark.parametrize("left_at", [1, 2, 4])
def test_a_token_that_left_shows_its_last_keys_at_all_deeper_loops(paper, policy, left_at):
    """One token of five leaves early; the next one runs all four loops and sees copies where it has nothing."""
    cache = KVCache(2, CachePolicy(policy))  # made for one loop: room for more is made when needed
    last = 4
    for position in range(5):
        view = cache.append(1, [1])
        state = paper.embed(torch.tensor([[position]]), view)
        for k in range(1, (left_at if position == 2 else last) + 1):
            state = paper.loop(state, k, view)
        before = cache.slot("core", left_at, 0)[0][1, :, 2].clone() if position == 2 else None
        if position == 2:
            cache.leave(1, 2, left_at, last)
            kept = before
    for k in range(left_at, last + 1):
        assert torch.equal(cache.slot("core", k, 0)[0][1, :, 2], kept)
    if cache.policy.slots is None:
        for k in range(2, left_at):
            assert not torch.equal(cache.slot("core", k, 0)[0][1, :, 2], kept)
        assert not torch.equal(cache.slot("core", last, 0)[0][1, :, 1], cache.slot("core", 1, 0)[0][1, :, 1])
    assert not cache.slot("core", 1, 0)[0][0].any()  # the other row was never written
