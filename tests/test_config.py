"""Configurations are strict: a wrong one is told in one sentence that names field, value and flag."""

from __future__ import annotations

import dataclasses

import pytest

from loopscope.config import (
    Config,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    TrainingConfig,
    changes_learning,
    config_from_dict,
    config_to_yaml,
    load_config,
)
from loopscope.errors import ConfigError
from loopscope.presets import PRESETS, preset

WRONG_MODELS = [
    ({"width": 64, "num_heads": 5}, "num_heads = 5: must divide width = 64 (flag --num-heads)"),
    ({"num_heads": 4, "num_kv_heads": 3}, "must divide num_heads = 4"),
    ({"num_loops": 0}, "num_loops = 0: must be above 0"),
    ({"num_layers": -1}, "num_layers = -1"),
    ({"prelude_layers": -1}, "must not be negative"),
    ({"vocab_size": 1}, "at least two tokens"),
    ({"dropout": 1.0}, "below 1"),
    ({"width": 12, "num_heads": 4, "positions": "rope"}, "even head width"),
    ({"readout": "final-only", "num_loops": 1}, "num_loops ≥ 2"),
    ({"state_init": "zeros"}, "the input never reaches the loop"),
    ({"share_readout_norm": True}, "the same norm"),
    (
        {"share_readout_norm": True, "inter_loop_norm": "rmsnorm", "coda_norm": "layernorm", "coda_layers": 1},
        "the same",
    ),
    ({"coda_norm": "rmsnorm"}, "needs coda_layers"),
    ({"coda_map": True}, "needs coda_layers"),
    ({"qk_norm_gain": False}, "has no effect unless qk_norm = True"),
    ({"rope_pairs": "interleaved"}, "has no effect unless positions = 'rope'"),
    ({"noise_std": 1.0}, "has no effect unless state_init = 'noise'"),
    ({"positions": "rope", "head_width": 5}, "needs an even head width"),
    ({"alpha": 0.5}, "has no effect unless readout = 'alpha'"),
    ({"norm_eps": 0.5}, "must be at most 0.01"),
    ({"num_loops": 10**9}, "must be at most 10,000"),
    ({"num_loops": 1, "inter_loop_norm": "rmsnorm"}, "has no effect with one loop"),
    ({"readout": "alpha", "reference_scale": 2.0}, "has no effect at alpha = 1"),
    ({"taper_gate": 0.5}, "has no effect unless readout = 'taper'"),
    ({"readout": "taper", "taper_gate": 1.5}, "between 0 and 1"),
    ({"experts_per_token": 3}, "has no effect without num_experts"),
    ({"balance_loss": 0.5}, "has no effect without num_experts"),
    ({"router_z_loss": 0.5}, "has no effect without num_experts"),
    ({"num_experts": 1}, "experts_per_token = 2: exceeds num_experts = 1"),
    ({"num_experts": 4, "experts_per_token": 3, "mlp_width": 64}, "must divide the feed-forward's hidden width, 64"),
    ({"num_experts": 4, "norm_placement": "normformer"}, "no place for NormFormer's inner norm"),
    ({"ponder_cost": 0.1}, "has no effect unless recurrence = 'pondering'"),
    ({"recurrence": "query", "injection": "add"}, "has no place in recurrence = 'query'"),
    ({"recurrence": "hyper", "loop_embedding": True}, "has no place in recurrence = 'hyper'"),
    ({"recurrence": "anchored", "norm_placement": "deepnorm"}, "needs layers that add to the stream"),
    ({"norm_placement": "recall", "prelude_layers": 1}, "cannot recall an input that it is to make"),
    ({"rope_base": 500.0}, "has no effect unless positions = 'rope'"),
    ({"readout": "rms"}, "expected one of rmsnorm, layernorm"),
    ({"width": "64"}, "expected a whole number"),
    ({"width": True}, "expected a whole number"),
    ({"dropout": float("nan")}, "finite"),
    ({"qk_norm": 1}, "expected true or false"),
]

WRONG_OBJECTIVES = [
    ({"placement": "weighted"}, "needs loop_weights; add --loop-weights"),
    ({"loop_weights": (1.0,)}, "has no effect unless placement = 'weighted'"),
    ({"placement": "weighted", "loop_weights": (0.0, 0.0)}, "at least one of them above 0"),
    ({"placement": "last-n"}, "needs last_n"),
    ({"exit_entropy": 0.1}, "has no effect unless placement = 'gated'"),
    ({"exit_kl": 0.1}, "has no effect unless placement = 'gated'"),
    ({"placement": "gated", "exit_kl": 0.1, "exit_rate": 1.0}, "above 0 and below 1"),
    ({"exit_rate": 0.5}, "while exit_kl is 0"),
    ({"distil_from": 2}, "has no effect unless placement = 'distilled'"),
    ({"jacobian_penalty": 1.0}, "must be below 1"),
    ({"norm_penalty": -1.0}, "must not be negative"),
    ({"anchor_scale": 2.0}, "while scale_anchor is 0"),
    ({"backprop_loops": 0}, "must be above 0"),
]

WRONG_PAIRS = [
    ({}, {"placement": "gated"}, "--exit-gate"),
    ({"num_loops": 1}, {"depth": "uniform"}, "leaves nothing to choose"),
    ({"num_loops": 1, "exit_gate": True}, {"placement": "gated"}, "leaves nothing to choose"),
    ({"readout": "final-only"}, {"placement": "last-n", "last_n": 1}, "never shows its raw loops"),
    ({"readout": "final-only"}, {"placement": "weighted", "loop_weights": (0.0, 0.0, 0.0, 1.0)}, "never shows its raw"),
    ({"readout": "final-only"}, {"placement": "terminal"}, "never shows its raw loops"),
    ({"num_loops": 3}, {"placement": "weighted", "loop_weights": (1.0, 1.0)}, "each of 3 loops"),
    ({"num_loops": 2}, {"placement": "weighted", "loop_weights": (1.0, 1.0), "depth": "uniform"}, "cannot be matched"),
    ({"num_loops": 2}, {"placement": "last-n", "last_n": 3}, "exceeds num_loops = 2"),
    ({"num_loops": 2}, {"backprop_loops": 3}, "exceeds num_loops = 2"),
    ({"num_loops": 2}, {"placement": "distilled", "distil_from": 3}, "exceeds num_loops = 2"),
]


@pytest.mark.parametrize(("fields", "sentence"), WRONG_MODELS)
def test_a_wrong_model_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**fields)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "(flag --" in str(caught.value)


@pytest.mark.parametrize(("fields", "sentence"), WRONG_OBJECTIVES)
def test_a_wrong_objective_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(ConfigError, match="flag --") as caught:
        ObjectiveConfig(**fields)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("model", "objective", "sentence"), WRONG_PAIRS)
def test_a_model_and_an_objective_that_contradict_each_other_are_refused(model, objective, sentence):
    with pytest.raises(ConfigError) as caught:
        Config(model=ModelConfig(**model), objective=ObjectiveConfig(**objective))
    assert sentence in str(caught.value)


WRONG_DATA_AND_TRAINING = [
    (DataConfig, {"data": ()}, "needs at least one source"),
    (DataConfig, {"stride": 0}, "must be above 0"),
    (DataConfig, {"data": ("task:hops",), "curriculum": 0}, "must be above 0"),
    (DataConfig, {"curriculum": 50}, "is for tasks"),
    (DataConfig, {"data": (3,)}, "expected a list of values, each a text"),
    (TrainingConfig, {"batch": 6, "accumulate": 4}, "must divide batch = 6"),
    (TrainingConfig, {"steps": 5, "warmup": 9}, "is longer than the run of 5 steps"),
    (TrainingConfig, {"decay": 0.5}, "has no effect unless schedule = 'wsd'; its default is 0.2"),
    (TrainingConfig, {"schedule": "wsd", "decay": 0.0}, "must be above 0 and at most 1"),
    (TrainingConfig, {"track": ("tensorbord",)}, "each one of tensorboard, wandb, trackio"),
    (ObjectiveConfig, {"exit_fraction": 0.0}, "must be above 0 and at most 1"),
    (ObjectiveConfig, {"placement": "terminal", "exit_fraction": 0.5}, "has no fixed exits to thin out"),
]


@pytest.mark.parametrize(("section", "fields", "sentence"), WRONG_DATA_AND_TRAINING)
def test_wrong_data_and_training_are_refused_in_one_sentence(section, fields, sentence):
    with pytest.raises(ConfigError, match="flag --") as caught:
        section(**fields)
    assert sentence in str(caught.value)


def test_a_sequence_longer_than_the_model_takes_is_refused():
    with pytest.raises(ConfigError, match="is longer than max_length = 256"):
        Config(data=DataConfig(sequence_length=300))


def test_final_only_under_a_sampled_depth_shows_its_raw_loops_and_is_accepted():
    objective = ObjectiveConfig(placement="terminal", depth="uniform")
    assert Config(model=ModelConfig(readout="final-only"), objective=objective)


def test_a_whole_number_in_a_float_field_becomes_a_float():
    """An int kept as it is would make integer tensors downstream."""
    assert type(ModelConfig(readout="taper", taper_gate=1).taper_gate) is float
    weights = ObjectiveConfig(placement="weighted", loop_weights=(1, 2)).loop_weights
    assert weights == (1.0, 2.0) and all(type(weight) is float for weight in weights)
    assert type(ModelConfig(width=64).width) is int


def test_scientific_notation_in_yaml_is_a_number(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: {norm_eps: 1e-5}\nobjective: {z_loss: 1e-4}\n")
    config = load_config(path)
    assert (config.model.norm_eps, config.objective.z_loss) == (1e-5, 1e-4)


def test_unknown_keys_get_a_suggestion():
    with pytest.raises(ConfigError, match="unknown key 'widht'; did you mean 'width'"):
        config_from_dict({"model": {"widht": 64}})
    with pytest.raises(ConfigError, match="unknown key 'modle'; did you mean 'model'"):
        config_from_dict({"modle": {}})


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_a_trip_through_yaml(name, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(preset(name)))
    assert load_config(path) == preset(name)


def test_lists_and_changes_survive_a_trip_through_yaml(tmp_path):
    objective = ObjectiveConfig(placement="weighted", loop_weights=(0.0, 1.0, 2.5, 3.0), z_loss=1e-4)
    config = Config(objective=objective)
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(path) == config


def test_a_file_changes_only_what_it_names(tmp_path):
    path = tmp_path / "delta.yaml"
    path.write_text("model: {readout: raw}\n")
    base = preset("paper-44m")
    changed = load_config(path, base)
    assert changed.model == dataclasses.replace(base.model, readout="raw")
    assert changed.objective == base.objective


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00binary",
        b"model: [unclosed",
        b"- a list",
        b"model: 3",
        b"0",
        b"false",
        b"model: {width: [64]}",
        b"!!python/object:os.system x",
    ],
)
def test_a_corrupt_file_is_one_clear_sentence(tmp_path, content):
    path = tmp_path / "corrupt.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[" * 60_000, "it is nested more than 16 levels deep"),
        ("model: " + "{a: " * 15_000, "it is nested more than 16 levels deep"),
        ("[" * 100_000, "it is larger than 64 kB"),
        ("model: &a {width: 64}\nobjective: *a", "it uses YAML aliases"),
        ("model: {width: " + "1" * 5000 + "}", "it has a value of more than 3,000 characters"),
        ("model: {width: 64", "it is not YAML: "),
        ("[model]\nwidth = 64\n", "it is TOML; a configuration is YAML or JSON"),
        ("model.width = 64\n", "it is TOML; a configuration is YAML or JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_from_one_that_takes_without_end(tmp_path, content, sentence):
    path = tmp_path / "made.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"cannot read the configuration {path}: {sentence}")


def test_a_configuration_may_be_json(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('{"model": {"width": 64}, "training": {"lr": 1e-4}}')
    assert (load_config(path).model.width, load_config(path).training.lr) == (64, 1e-4)


def test_an_empty_file_changes_nothing(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_config(path, preset("micro")) == preset("micro")


def test_configurations_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().width = 3  # type: ignore[misc]


HOW_IT_IS_RUN = {
    "checkpoint_loops", "compile", "shard", "threads", "log_every", "eval_every", "eval_tokens", "save_every",
    "keep_last", "track", "max_skips", "max_rollbacks", "spike_factor", "on_blind_spot",
}  # fmt: skip


def test_every_field_says_whether_it_changes_what_is_learned():
    """A new field does, unless it says otherwise where it stands: the careful side for resuming and comparing."""
    sections = [getattr(Config(), section.name) for section in dataclasses.fields(Config)]
    names = [each.name for section in sections for each in dataclasses.fields(section)]
    assert len(set(names)) == len(names), "a name stands for one field, whatever its section"
    assert {name for name in names if not changes_learning(name)} == HOW_IT_IS_RUN
    assert changes_learning("steps") and changes_learning("a field of another version")
