"""The plan against reality: FLOPs against torch's counter, memory against what a real training step holds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from loopscope.config import Config, ModelConfig, ObjectiveConfig, TrainingConfig
from loopscope.designs import DESIGNS
from loopscope.errors import ConfigError
from loopscope.model.looped_lm import build
from loopscope.objectives.placement import Objective
from loopscope.presets import preset
from loopscope.results.plan import TokenFlops
from loopscope.results.record import encode
from loopscope.training import counting, plan
from loopscope.training.counting import CountedSteps, Kernels, count_step, kernels_of, parameters_by_part
from loopscope.training.optimizers import Optimizers
from loopscope.training.plan import plan_memory, plan_training

BASE = ModelConfig(vocab_size=301, width=64, num_layers=2, num_loops=3, num_heads=4, max_length=32, dropout=0.0)
PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def configure(model=(), objective=(), training=()) -> Config:
    return Config(
        model=replace(BASE, **dict(model)),
        objective=ObjectiveConfig(**dict(objective)),
        training=TrainingConfig(**{"batch": 2, **dict(training)}),
    )


def flops_of(config: Config) -> TokenFlops:
    return CountedSteps(config).flops_per_token()


PAPER_LIKE = configure({"dropout": 0.1})
OURO_LIKE = configure(
    {"positions": "rope", "num_kv_heads": 2, "norm_placement": "sandwich", "inter_loop_norm": "rmsnorm"},
    training={"optimizer": "muon"},
)
HUGINN_LIKE = configure(
    {"injection": "concat", "state_init": "noise", "prelude_layers": 1, "coda_layers": 1, "num_loops": 5},
    training={"checkpoint_loops": True},
)
NAMED = {"paper-like": PAPER_LIKE, "ouro-like": OURO_LIKE, "huginn-like": HUGINN_LIKE}


class RealStep:
    """A training step that is really run, and the bytes it holds."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config, build(config.model, seed=0)
        self.ids_BT = torch.randint(config.model.vocab_size, (config.training.batch, config.sequence_length))
        self.storages: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # a freed storage's address could be given out again
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}

    def hold(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        self.alive.append(tensor)
        return tensor

    def forward(self, *, autocast: bool = False):
        """Run forward, counting every storage once that autograd saves or a checkpoint starts from."""
        recompute = self.config.training.checkpoint_loops
        objective = Objective(self.config.objective, recompute=recompute)
        count = torch.autograd.graph.saved_tensors_hooks(self.hold, lambda tensor: tensor)
        with count, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = self.model(self.ids_BT, self.ids_BT, objective)
        if recompute:  # checkpoint holds its arguments, which are not tensors but states, outside the hooks
            pytree.tree_map_only(torch.Tensor, self.hold, result.trace.states[:-1])
        return result

    @property
    def saved(self) -> int:
        return sum(self.storages.values())

    def count_recomputed(self, result) -> int:
        """Bytes that the last loop saves beyond what is already held, when it is run again."""
        before = self.saved
        with torch.autograd.graph.saved_tensors_hooks(self.hold, lambda tensor: tensor):
            self.model.loop(result.trace.states[-2], result.trace.num_loops)
        return self.saved - before

    def count_rest(self, result) -> int:
        """Parameters, gradients and optimiser state after a step."""
        optimizers = Optimizers(self.model, self.config.training)
        result.loss.backward()
        optimizers.step(1e-3)
        tensors = [tensor for parameter in self.model.parameters() for tensor in (parameter, parameter.grad)]
        states = [state for part in optimizers.parts for state in part.state.values()]
        tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in tensors)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_memory_is_within_15_percent_of_the_bytes_a_real_step_holds(name):
    """Parameters, gradients, optimiser state and what autograd saves; the prediction is in fact within 1 %."""
    config = NAMED[name]
    step = RealStep(config)
    result = step.forward()
    saved = step.saved
    recomputed = step.count_recomputed(result) if config.training.checkpoint_loops else 0
    counted = saved + recomputed + step.count_rest(result)
    memory = plan_memory(config)
    # The workspace lives inside the loss's forward, where no hook sees it.
    assert memory.total - memory.loss_workspace == pytest.approx(counted, rel=0.01)
    assert memory.activations + memory.loss_gradients == pytest.approx(saved, rel=0.01)
    assert memory.recomputed == pytest.approx(recomputed, rel=0.01)


VARIANTS = [
    ({"dropout": 0.1, "norm_placement": "sum"}, {}),
    ({"norm_placement": "sandwich", "norm": "layernorm"}, {}),
    ({"norm_placement": "normformer", "dropout": 0.1}, {}),
    ({"norm_placement": "normformer", "norm": "layernorm", "mlp": "gelu", "positions": "rope"}, {}),
    ({"norm_placement": "normformer", "mlp": "relu2", "num_loops": 6}, {"backprop_loops": 2}),
    ({"norm_placement": "deepnorm", "dropout": 0.1}, {}),
    ({"norm_placement": "deepnorm", "norm": "layernorm", "prelude_layers": 1, "coda_layers": 1}, {}),
    ({"norm_placement": "deepnorm", "mlp": "relu2", "num_loops": 6, "readout": "raw"}, {"backprop_loops": 2}),
    ({"mlp": "gelu"}, {}),
    ({"mlp": "relu2", "mlp_width": 100}, {}),
    ({"qk_norm": True}, {}),
    ({"positions": "rope"}, {}),
    ({"num_kv_heads": 1}, {}),
    ({"positions": "rope", "qk_norm": True, "num_kv_heads": 2}, {}),
    ({"attention_gate": True}, {}),
    ({"attention_gate": True, "positions": "rope", "num_kv_heads": 2}, {}),
    ({"attention_gate": True, "norm_placement": "normformer", "dropout": 0.1}, {}),
    ({"head_width": 24, "positions": "rope", "num_kv_heads": 2, "qk_norm": True}, {}),
    ({"qk_bias": True}, {}),
    ({"qk_bias": True, "positions": "rope", "rope_pairs": "interleaved", "embedding_scale": 8.0}, {}),
    ({"qk_norm": True, "qk_norm_gain": False, "positions": "rope"}, {}),
    ({"mlp": "half-relu2", "value_embeddings": True, "prelude_layers": 1, "coda_layers": 1}, {}),
    ({"value_embeddings": True, "qk_norm": True, "qk_norm_gain": False, "positions": "rope"}, {}),
    ({"value_embeddings": True, "positions": "rope", "num_kv_heads": 2}, {}),
    ({"prelude_norm": "rmsnorm", "prelude_layers": 1, "injection": "diagonal", "state_init": "zeros"}, {}),
    ({"coda_layers": 1, "coda_norm": "rmsnorm", "share_readout_norm": True}, {}),
    ({"coda_layers": 1, "coda_norm": "layernorm", "coda_map": True}, {}),
    ({"injection": "add", "state_init": "zeros", "spectral_damping": True}, {}),
    ({"injection": "concat"}, {}),
    ({"injection": "gated"}, {}),
    ({"injection": "diagonal", "state_init": "noise"}, {}),
    ({"inter_loop_norm": "layernorm", "loop_embedding": True}, {}),
    ({"prelude_layers": 2, "coda_layers": 1, "tie_head": False}, {}),
    ({"readout": "layernorm"}, {}),
    ({"readout": "raw"}, {"placement": "terminal", "scale_anchor": 0.1}),
    ({"readout": "final-only"}, {}),
    ({"readout": "alpha"}, {}),
    ({"readout": "taper"}, {"norm_penalty": 0.1}),
    ({"exit_gate": True}, {"placement": "gated"}),
    ({"num_loops": 6}, {"backprop_loops": 1}),
    ({"num_loops": 6, "coda_layers": 1, "injection": "add"}, {"backprop_loops": 2, "placement": "last-n", "last_n": 3}),
    ({"num_loops": 6}, {"exit_fraction": 0.25}),
    ({}, {"placement": "weighted", "loop_weights": (1.0, 0.0, 2.0)}),
]


@pytest.mark.parametrize(("model", "objective"), VARIANTS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_activations_of_every_part_are_counted_without_numbers(model, objective):
    config = configure(model, objective)
    step = RealStep(config)
    step.forward()
    memory = plan_memory(config)
    assert memory.activations + memory.loss_gradients == pytest.approx(step.saved, rel=0.01)


AUTOCAST: list[dict[str, object]] = [
    {"dropout": 0.1},
    {"positions": "rope", "qk_norm": True},
    {"attention_gate": True, "positions": "rope"},
    {"injection": "gated"},
    {"norm_placement": "normformer"},
    {"norm_placement": "normformer", "mlp": "gelu", "positions": "rope"},
    {"norm_placement": "deepnorm"},
]


@pytest.mark.parametrize("model", AUTOCAST)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_autocast_saves_layers_in_low_precision_and_a_copy_of_every_weight(model):
    """GPUs train so; the CPU's autocast differs only in its kernels, which the plan takes as an argument."""
    config = configure(model)
    step = RealStep(config)
    step.forward(autocast=True)
    kernels = Kernels(autocast=True, fused_rmsnorm=False, boolean_masks=False, hand_written=False)
    counted = count_step(config, depth=3, sequences=2, kernels=kernels)
    assert counted.saved + plan_memory(config).loss_gradients == pytest.approx(step.saved, rel=0.01)


def test_checkpointed_loops_cost_one_state_each_and_not_their_layers():
    states = []
    for checkpoint_loops in (False, True):
        training = {"checkpoint_loops": checkpoint_loops}
        few, many = (plan_memory(configure({"num_loops": k, "readout": "raw"}, training=training)) for k in (4, 16))
        states.append((many.activations - few.activations) / (12 * 2 * 32 * 64 * 4))
        assert (many.recomputed > 0) == checkpoint_loops
        assert many.recomputed == few.recomputed
    layers, checkpointed = states
    assert checkpointed == pytest.approx(1, abs=0.01)
    assert layers > 20


def test_sharding_divides_what_is_kept_and_adds_what_is_gathered():
    training = {"batch": 16, "shard": "full"}
    one = plan_memory(configure(training={**training, "batch": 4}))
    four = plan_memory(configure(training=training), devices=4)
    replicated = plan_memory(configure(training={**training, "shard": "none"}), devices=4)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(four, part) == pytest.approx(getattr(one, part) / 4, abs=1)
        assert getattr(replicated, part) == getattr(one, part)
    assert (one.communication, replicated.communication) == (0, one.gradients)
    assert four.communication == 2 * one.parameters
    assert four.activations == replicated.activations == one.activations, "each device has 4 of the 16 sequences"


def test_accumulation_shrinks_activations_only():
    whole, split = (plan_memory(configure(training={"batch": 16, "accumulate": n})) for n in (1, 4))
    # All but the indices of the positions, which all rows share.
    assert split.activations * 4 == pytest.approx(whole.activations, rel=1e-3)
    assert split.optimizer == whole.optimizer


def test_a_sampled_depth_is_given_memory_for_its_deepest_step_and_flops_for_its_mean():
    fixed, sampled = (configure({"num_loops": 4}, {"depth": depth}) for depth in ("fixed", "poisson-lognormal"))
    deepest = plan.largest_micro_batch(sampled, 1).depth
    assert deepest > 8
    alone = configure({"num_loops": deepest})
    assert plan_memory(sampled).activations == plan_memory(alone).activations
    assert flops_of(sampled).core == pytest.approx(flops_of(fixed).core, rel=0.05)
    several = {depth: flops_of(configure({"num_loops": depth})).total for depth in (2, 3, deepest)}
    assert several[deepest] == pytest.approx(several[3] + (deepest - 3) * (several[3] - several[2]), rel=1e-9)
    uniform = configure({"num_loops": 4}, {"depth": "uniform"}, {"steps": 5000})
    assert CountedSteps(uniform).passes().loops == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("checkpoint_loops", [False, True])
@pytest.mark.parametrize("name", DESIGNS)
def test_a_deep_step_that_is_not_run_is_what_running_it_gives(name, checkpoint_loops):
    """Every design: nothing that a loop beyond the first few takes differs from what the one before it takes."""
    config = DESIGNS[name].apply(preset("demo"))
    model, training = replace(config.model, num_loops=7), replace(config.training, checkpoint_loops=checkpoint_loops)
    config = replace(config, model=model, training=training)
    torch.manual_seed(0)
    known = CountedSteps(config, sequences=2).at(7)
    torch.manual_seed(0)  # an exit that is drawn
    assert known == count_step(config, depth=7, sequences=2, kernels=kernels_of("cpu"))


def test_loops_beyond_the_first_few_cost_a_plan_nothing(monkeypatch):
    depths = []
    monkeypatch.setattr(
        counting, "count_step", lambda *a, depth, **k: depths.append(depth) or count_step(*a, depth=depth, **k)
    )
    deep = plan_training(configure({"num_loops": 10_000}), flops_per_second=1e9)
    assert deep.passes.loops == 10_000 and sorted(depths) == [2, 3]
    weighted = configure({"num_loops": 5}, {"placement": "weighted", "loop_weights": (1.0, 0.0, 1.0, 0.0, 1.0)})
    assert plan_training(weighted, flops_per_second=1e9).passes.readouts == 3
    assert depths[2:] == [5], "which loops are read is no rule that further ones follow"


# --- FLOPs -----------------------------------------------------------------------------------------------------------

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, out_shape=None, **__: (
        sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda d, q, k, v, *_, out_shape=None, **__: (
        sdpa_backward_flop_count(d, q, k, v)
    ),
}


def counted_flops(config: Config) -> tuple[float, float]:
    """Matrix products and attention of one real step, per token, by torch's counter.

    The plain loss stands in for the fused one, whose in-place products (in forward) the counter does not know.
    """
    model = build(config.model, seed=0)
    ids_BT = torch.randint(config.model.vocab_size, (config.training.batch, config.sequence_length))
    objective = Objective(config.objective, fused=False, recompute=config.training.checkpoint_loops)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        model(ids_BT, ids_BT, objective).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    attention = sum(count for operation, count in counts.items() if operation in ATTENTION)
    return (sum(counts.values()) - attention) / ids_BT.numel(), attention / ids_BT.numel()


@pytest.mark.parametrize(
    "config",
    [
        *NAMED.values(),
        configure({"num_loops": 6, "prelude_layers": 2, "coda_layers": 1}, {"backprop_loops": 2}),
        configure({"injection": "gated", "prelude_layers": 1, "tie_head": False}, {"backprop_loops": 1}),
        configure({"exit_gate": True, "mlp": "gelu"}, {"placement": "gated"}),
        configure({"coda_layers": 1, "vocab_size": 2000}, {"exit_fraction": 0.25}),
        configure({"num_loops": 4}, {"placement": "terminal", "backprop_loops": 3}, {"checkpoint_loops": True}),
        configure({"num_loops": 3}, {"placement": "weighted", "loop_weights": (1.0, 0.0, 2.0)}),
    ],
)
def test_flops_agree_with_the_counter_on_real_steps(config):
    products, attention = counted_flops(config)
    flops = flops_of(config)
    assert flops.total - flops.attention == pytest.approx(products, rel=1e-9)
    # The counter knows no causal mask: it counts T keys where (T + 1)/2 are seen on average.
    length = config.sequence_length
    assert flops.attention == pytest.approx(attention * (length + 1) / (2 * length), rel=1e-9)


def test_the_fused_loss_costs_three_products_per_readout():
    """6RVd, as the plan counts it: seen as the difference that a larger vocabulary makes to the plain loss."""
    small, large = (configure({"vocab_size": size}) for size in (300, 600))
    difference = counted_flops(large)[0] - counted_flops(small)[0]
    assert difference == flops_of(large).head - flops_of(small).head == 6 * 3 * 300 * 64


# --- parameters, time, the whole -------------------------------------------------------------------------------------


def test_parts_add_up_to_the_model_and_a_tied_head_is_counted_once():
    for tied in (True, False):
        model = build(replace(BASE, tie_head=tied, exit_gate=True, prelude_layers=1, inter_loop_norm="rmsnorm"))
        parts = parameters_by_part(model)
        assert sum(parts.values()) == sum(parameter.numel() for parameter in model.parameters())
        assert parts["head"] == (0 if tied else 301 * 64)
        assert parts["core"] == sum(parameter.numel() for parameter in model.recurrence.parameters())


def test_time_is_work_over_speed_and_devices_share_it():
    config = configure(training={"batch": 16, "steps": 10})
    one, four = (plan_training(config, devices=n, flops_per_second=1e9) for n in (1, 4))
    assert one.tokens == 10 * 16 * 32
    assert one.seconds == pytest.approx(one.flops / (1e9 * one.utilisation))
    assert four.seconds == pytest.approx(one.seconds / 4)
    assert plan_training(config, flops_per_second=1e9, tokens=500).seconds == pytest.approx(
        one.seconds * 500 / one.tokens
    )


def test_the_device_count_is_the_smallest_that_is_fast_enough():
    one = plan_training(configure(training={"batch": 16}), flops_per_second=1e9)
    needed = one.devices_for(one.seconds / 3.5)
    assert needed == 4
    with pytest.raises(ConfigError, match="seconds = 0"):
        one.devices_for(0)


def test_the_speed_is_the_best_of_several_products(monkeypatch):
    durations = iter([9.0, 2.0, 0.5, 4.0, 1.0, 3.0])
    monkeypatch.setattr(plan, "seconds_of_product", lambda matrix: next(durations))
    plan.measure_flops.cache_clear()
    measured = plan_training(configure())
    assert measured.flops_per_second == 2 * 1024**3 / 0.5
    assert measured.choices[0].reason.startswith("measured")
    plan.measure_flops.cache_clear()


def test_every_assumption_carries_its_reason():
    on_cpu, on_gpu = (
        plan_training(configure(), flops_per_second=1e12, device_type=device_type) for device_type in ("cpu", "cuda")
    )
    assert (on_cpu.utilisation, on_gpu.utilisation) == (0.7, 0.4)
    names = ["flops_per_second", "utilisation", "precision", "loss_chunk_rows"]
    assert [choice.name for choice in on_gpu.choices] == names
    assert on_gpu.choices[0].reason == "given"
    assert all("assumed" in planned.choices[1].reason for planned in (on_cpu, on_gpu))
    assert [planned.choices[2].value for planned in (on_cpu, on_gpu)] == ["float32", "bfloat16"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"devices": 0}, "devices = 0: must be at least 1 (flag --devices)"),
        ({"devices": 4}, "batch = 2: cannot be split over 4 devices × 1 micro-batches (flag --batch)"),
        ({"tokens": 0}, "tokens = 0: must be at least 1 (flag --tokens)"),
        ({"flops_per_second": -1.0}, "flops_per_second = -1.0: must be a finite number above 0"),
        ({"flops_per_second": float("nan")}, "flops_per_second = nan: must be a finite number above 0"),
    ],
)
def test_a_mistake_names_field_and_value(arguments, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        plan_training(configure(), **{"flops_per_second": 1e12, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_needs_its_speed_to_be_given():
    with pytest.raises(ConfigError, match="no cuda device here to measure"):
        plan_training(configure(), device_type="cuda")


def test_a_billion_parameters_are_planned_without_building_them():
    config = preset("ouro-1.4b")
    planned = plan_training(config, devices=16, flops_per_second=1e15, device_type="cuda")
    total = sum(planned.parameters.values())
    assert total == pytest.approx(1.43e9, rel=0.01)
    assert planned.memory.parameters == 4 * total
    # Where T dominates, attention does: 24 layers × 4 loops × 3.5 × 4·d·(T + 1)/2.
    assert planned.flops_per_token.attention == 24 * 4 * 3.5 * 4 * 2048 * 65_537 / 2


def leaves(value) -> set[str]:
    if isinstance(value, list):
        return set().union(*(leaves(item) for item in value))
    return set(value).union(*(leaves(item) for item in value.values())) if isinstance(value, dict) else set()


def test_every_field_of_the_json_is_documented():
    planned = plan_training(OURO_LIKE, flops_per_second=1e12)
    data = json.loads(encode(planned))
    assert data["memory"]["total"] == planned.memory.total and data["seconds"] == planned.seconds
    page = PAGE.read_text(encoding="utf-8")
    assert {field for field in leaves(data) if f"`{field}`" not in page} == set()
