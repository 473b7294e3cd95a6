"""Our models in transformers: the same numbers, through everything that transformers does with a model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import loopscope as ls
from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.model.norms import TaperNorm
from loopscope.objectives.placement import Objective

pytest.importorskip("transformers")

import transformers

import loopscope.hf
from loopscope.hf import LoopscopeConfig, LoopscopeForCausalLM

DESIGNS = {
    "paper": {},
    "ouro": {
        "positions": "rope",
        "inter_loop_norm": "rmsnorm",
        "share_readout_norm": True,
        "norm_placement": "sandwich",
        "exit_gate": True,
    },
    "huginn": {
        "positions": "rope",
        "prelude_layers": 1,
        "coda_layers": 1,
        "injection": "concat",
        "state_init": "noise",
        "coda_norm": "rmsnorm",
        "share_readout_norm": True,
        "norm_placement": "sum",
    },
    "parcae": {
        "positions": "rope",
        "prelude_layers": 1,
        "coda_layers": 1,
        "injection": "diagonal",
        "value_embeddings": True,
        "qk_norm": True,
    },
    "tapered": {"readout": "taper", "loop_embedding": True, "spectral_damping": True, "num_kv_heads": 2},
}
LOOPS = 3
"""Trained depth of every model here."""


def made(name: str = "paper", *, objective: dict | None = None, dtype: torch.dtype = torch.float64, **design):
    """A small random model whose greedy choices are no ties."""
    fields = {"num_layers": 2, "num_loops": LOOPS, "dropout": 0.0, "mlp_width": 40, **DESIGNS[name], **design}
    config = LoopscopeConfig(
        vocab_size=61,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=48,
        design=fields,
        objective=objective,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    return LoopscopeForCausalLM(config).to(dtype).eval()


def prompts(rows: int = 3, tokens: int = 7) -> torch.Tensor:
    return torch.randint(1, 61, (rows, tokens), generator=torch.Generator().manual_seed(5))


def greedy(model, ids_BT, **options):
    return model.generate(ids_BT, do_sample=False, max_new_tokens=9, **options)


def recomputed(model: ls.LoopedLM, ids_BT: torch.Tensor, num_loops: int, count: int = 9) -> torch.Tensor:
    """Greedy text by our own model, every token from the whole text before it."""
    for _ in range(count):
        state = ls.run_loops(model, ids_BT, num_loops=num_loops).states[-1]
        ids_BT = torch.cat([ids_BT, model.readout(state, num_loops)[:, -1:].argmax(-1)], dim=1)
    return ids_BT


@pytest.fixture(params=DESIGNS)
def model(request):
    return made(request.param)


# --- numbers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_logits_at_every_depth_are_those_of_our_own_model(model):
    ids = prompts()
    for num_loops in (1, LOOPS, LOOPS + 2):
        states = ls.run_loops(model.model, ids, num_loops=num_loops).states
        out = model(ids, num_loops=num_loops, output_hidden_states=True, use_cache=False)
        assert torch.equal(out.logits, model.model.readout(states[-1], num_loops))
        assert all(torch.equal(h, state.h_BTD) for h, state in zip(out.hidden_states, states, strict=True))


@torch.no_grad()
def test_generate_with_its_cache_gives_the_text_that_our_model_gives_without_one(model):
    ids = prompts()
    for num_loops in (1, LOOPS, LOOPS + 2):
        expected = recomputed(model.model, ids, num_loops)
        assert torch.equal(greedy(model, ids, num_loops=num_loops), expected)
        assert torch.equal(greedy(model, ids, num_loops=num_loops, use_cache=False), expected)


def test_every_loop_and_layer_has_a_slot_and_the_configuration_counts_them(model):
    cache = model(prompts(), use_cache=True).past_key_values
    design = model.model.config
    assert len(cache) == model.config.num_hidden_layers == design.total_layers
    assert {int(cache.get_seq_length(slot)) for slot in range(len(cache))} == {7}
    assert len({tuple(layer.keys.flatten().tolist()) for layer in cache.layers}) == len(cache)


def test_conformance_finds_nothing_in_it():
    checked = ls.check(made("huginn"))
    assert not checked.findings
    passed = {each.name for each in checked.checks if each.status == "passed"}
    assert passed >= {"cached", "split", "padded", "slots", "rollback", "generate"}


@torch.no_grad()
def test_rows_that_are_padded_on_the_left_are_continued_as_each_alone(model):
    ids, lengths = prompts(), (3, 6, 7)
    mask = torch.stack([(torch.arange(7) >= 7 - length).long() for length in lengths])
    together = greedy(model, ids * mask, attention_mask=mask)[:, 7:]
    for row, length in enumerate(lengths):
        alone = greedy(model, ids[row : row + 1, 7 - length :])[0, length:]
        assert torch.equal(together[row], alone)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}, {"prefill_chunk_size": 3}],
    ids=lambda options: next(iter(options)),
)
def test_beams_fixed_caches_and_chunked_prompts_change_nothing(model, options):
    ids = prompts()
    uncached = {name: value for name, value in options.items() if name == "num_beams"}
    assert torch.equal(greedy(model, ids, **options), greedy(model, ids, use_cache=False, **uncached))


@torch.no_grad()
def test_sampling_draws_the_same_tokens_with_and_without_a_cache(model):
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        drawn.append(model.generate(prompts(), do_sample=True, max_new_tokens=9, use_cache=use_cache))
    assert torch.equal(*drawn)


@torch.no_grad()
def test_a_shallow_copy_and_a_look_up_draft_without_changing_the_text():
    model, ids = made("huginn"), prompts(rows=1)
    shallow = copy.deepcopy(model)
    shallow.config.num_loops = 1
    expected = recomputed(model.model, ids, LOOPS)
    assert torch.equal(greedy(model, ids, assistant_model=shallow), expected)
    assert torch.equal(greedy(model, ids, prompt_lookup_num_tokens=3), expected)


def test_drafting_with_the_first_layers_is_refused_in_a_sentence():
    with pytest.raises(UnsupportedError, match="leaves after some of its loops"):
        greedy(made(), prompts(), assistant_early_exit=2)


def test_keys_of_another_depth_are_not_gone_on_with():
    model = made("huginn")
    filled = model(prompts(), num_loops=2, use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="have 6 slots, and 8 are needed"):
        model(prompts()[:, :1], past_key_values=filled)
    fixed = transformers.StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ConfigError, match="a cache of a fixed size has no slots"):
        model(prompts(), past_key_values=fixed, num_loops=LOOPS + 1)


def test_the_depth_of_the_configuration_is_run_unless_a_call_says_otherwise():
    model, ids = made(), prompts()
    model.config.num_loops = LOOPS + 2
    assert model.config.num_hidden_layers == 2 * (LOOPS + 2)
    assert torch.equal(model(ids).logits, model(ids, num_loops=LOOPS + 2).logits)
    assert not torch.equal(model(ids).logits, model(ids, num_loops=LOOPS).logits)
    with pytest.raises(ConfigError, match="num_loops"):
        model(ids, num_loops=-1)


def test_attention_weights_are_refused_and_not_left_out():
    with pytest.raises(UnsupportedError, match="output_attentions"):
        made()(prompts(), output_attentions=True)


# --- loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("paper", {"placement": "per-loop", "norm_penalty": 0.01}),
        ("paper", {"placement": "terminal"}),
        ("ouro", {"placement": "gated", "exit_entropy": 0.1}),
        ("huginn", {"placement": "last-n", "last_n": 2, "z_loss": 1e-3}),
    ],
)
def test_the_loss_of_labels_in_training_is_ours_and_in_evaluation_that_of_the_logits(name, objective):
    model, ids = made(name, objective=objective, dtype=torch.float32), prompts()
    labels = ids.clone()
    labels[0, :3] = -100
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    model.train()
    losses = []
    for run in (
        lambda: model(ids, labels=labels),
        lambda: Objective(ObjectiveConfig(**objective))(model.model, ids, targets),
    ):
        torch.manual_seed(0)  # of the noise that a state may start from
        losses.append(run().loss)
    assert torch.equal(*losses)
    out = model.eval()(ids, labels=labels)
    expected = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(out.loss, expected)


def test_a_step_of_several_micro_batches_divides_by_the_tokens_of_all():
    model, ids = made().train(), prompts()
    whole = model(ids, labels=ids).loss
    parts = [model(row, labels=row, num_items_in_batch=torch.tensor(18)).loss for row in ids[:, None]]
    torch.testing.assert_close(sum(parts), whole)


def test_padding_on_the_left_does_not_change_what_a_text_costs_in_training():
    model, ids = made("parcae", objective={"placement": "per-loop"}).train(), prompts(rows=1)
    padded, mask = F.pad(ids, (4, 0)), F.pad(torch.ones_like(ids), (4, 0))
    labels = padded.masked_fill(mask.cumsum(1) <= 1, -100)  # nothing is asked of the padding before the first token
    torch.testing.assert_close(model(padded, attention_mask=mask, labels=labels).loss, model(ids, labels=ids).loss)


def test_recomputing_loops_gives_the_same_gradients_and_runs_the_core_again():
    model, ids = made("tapered").train(), prompts()
    calls = []
    model.model.core.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        calls.clear()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert len(calls) == LOOPS * (1 + recompute)
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_the_readout_in_training_is_computed_once_so_that_running_means_move_once():
    model, ids = made("tapered").train(), prompts()
    ours = copy.deepcopy(model.model)
    model(ids, labels=ids)
    Objective(ObjectiveConfig())(ours, ids, F.pad(ids, (0, 1), value=-100)[:, 1:])
    (theirs,), (own,) = ([m.moments for m in net.modules() if isinstance(m, TaperNorm)] for net in (model.model, ours))
    assert torch.equal(theirs, own) and own.all()


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded_bit_for_bit_and_modules_that_are_one_stay_one(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LoopscopeForCausalLM) and again.config.model_config == model.config.model_config
    theirs = again.state_dict()
    assert theirs.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    if model.model.config.share_readout_norm:
        shared = again.model.recurrence.inter_loop_norm or again.model.coda_norm
        assert shared.weight is again.model.readout_map.norm.weight
    opened = ls.open(tmp_path)
    ids = prompts()
    state = ls.run_loops(opened.model.double(), ids).states[-1]
    assert torch.allclose(opened.model.readout(state, LOOPS), model(ids).logits, atol=1e-5)


def test_tensors_that_a_checkpoint_lacks_are_drawn_as_a_fresh_model_draws_them(tmp_path):
    model = made("ouro", init="scaled")
    kept = {name: tensor for name, tensor in model.state_dict().items() if "norm" not in name and "qkv" not in name}
    again, info = LoopscopeForCausalLM.from_pretrained(
        None, config=model.config, state_dict=kept, output_loading_info=True
    )
    assert info["missing_keys"] == model.state_dict().keys() - kept.keys()
    assert torch.equal(again.model.readout_map.norm.weight, torch.ones(32, dtype=again.dtype))
    assert again.model.core.layers[0].attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(again.model.embedding.weight, model.model.embedding.weight)


@torch.no_grad()
def test_in_bfloat16_it_says_what_it_says_in_float32_within_its_precision(tmp_path):
    from loopscope.machine import check_bf16_products

    try:
        check_bf16_products()
    except UnsupportedError as error:
        pytest.skip(str(error))
    model = made("ouro", dtype=torch.float32, init="scaled")
    model.save_pretrained(tmp_path)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.bfloat16}
    logits = model(prompts()).logits
    difference = (half(prompts()).logits.float() - logits).abs().max()
    assert 0 < difference < 0.05 * logits.abs().max()
    assert torch.equal(greedy(half, prompts()), greedy(half, prompts(), use_cache=False))


def test_a_longer_vocabulary_is_saved_with_its_size(tmp_path):
    model, ids = made("ouro", tie_head=False), prompts()
    before = model(ids).logits
    model.resize_token_embeddings(64, mean_resizing=False)
    torch.testing.assert_close(model(ids).logits[..., :61], before)
    assert model(torch.full((1, 2), 63)).logits.shape[-1] == 64
    model.save_pretrained(tmp_path)
    assert ls.open(tmp_path).vocab_size == 64
    with pytest.raises(UnsupportedError, match="value_embeddings"):
        made("parcae").resize_token_embeddings(64)


def test_a_configuration_is_checked_by_our_rules():
    with pytest.raises(ConfigError, match="num_heads"):
        LoopscopeConfig(hidden_size=30, num_attention_heads=4)
    with pytest.raises(ConfigError, match="unknown key 'num_layer'"):
        LoopscopeConfig(design={"num_layer": 3})


def test_the_trainer_of_transformers_trains_it_for_five_steps_under_the_audit_callback(tmp_path):
    from loopscope.adapters.callbacks import LoopscopeCallback

    model = made(objective={"placement": "per-loop"}, dtype=torch.float32)
    texts = [{"input_ids": row, "labels": row} for row in prompts(rows=4, tokens=24).repeat(5, 1)]
    callback = LoopscopeCallback(every=2)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=texts, callbacks=[callback])
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    seen = [row for row in trainer.state.log_history if any("norm" in name and "/" in name for name in row)]
    assert seen, "the callback's figures are in the log"
    trainer.save_model(str(tmp_path / "saved"))
    assert ls.open(tmp_path / "saved").objective == ObjectiveConfig(placement="per-loop")
