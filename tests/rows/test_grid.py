"""The grid: conditions that differ in what they name, one configuration for all rows, one folder per grid."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loopscope.config import Config, DataConfig, ModelConfig, TrainingConfig, config_to_dict
from loopscope.errors import ConfigError, DataError, RunError
from loopscope.presets import preset
from loopscope.rows.conditions import (
    CONDITIONS,
    FACTORS,
    RECIPES,
    apply_recipe,
    choose_seeds,
    differences,
    parse_conditions,
)
from loopscope.rows.grid import Request, lay_out, record, update_differences
from loopscope.rows.spec import RowSpec


def fields(config: Config) -> dict[str, object]:
    return {f"{section}.{name}": v for section, values in config_to_dict(config).items() for name, v in values.items()}


def changed(left: Config, right: Config) -> dict[str, object]:
    return {name: value for name, value in fields(right).items() if fields(left)[name] != value}


@pytest.fixture
def base(tmp_path, monkeypatch) -> Config:
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "train.txt"
    text.write_text("".join(f"line {n} of a text about rivers and {n * n} stones\n" for n in range(300)))
    (tmp_path / "valid.txt").write_text("another line about a river\n" * 20)
    return Config(
        model=ModelConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, num_loops=3, max_length=16),
        data=DataConfig(data=(str(text),), valid=(str(tmp_path / "valid.txt"),), tokenizer="bytes"),
        training=TrainingConfig(steps=8, batch=4, threads=1),
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_conditions_differ_from_each_other_in_their_named_factors_alone(recipe):
    common = apply_recipe(preset("nano"), recipe)
    configs = [condition.apply(common) for condition in CONDITIONS.values()]
    assert len({repr(config) for config in configs}) == len(CONDITIONS) == 9
    for config in configs:
        names = {name.split(".")[1] for name in changed(configs[0], config)}
        assert names <= set(FACTORS)


def test_the_extensions_are_the_papers():
    applied = {name: condition.apply(preset("nano")) for name, condition in CONDITIONS.items()}
    assert (
        applied["per-loop+penalty"].objective.norm_penalty == applied["terminal+penalty"].objective.norm_penalty == 0.01
    )
    assert applied["per-loop+penalty"].model.readout == "rmsnorm", "the penalty keeps the readout"
    assert applied["per-loop+inter-loop-norm"].model.inter_loop_norm == "rmsnorm"
    assert applied["per-loop+final-only"].model.readout == "final-only"
    assert {c.objective.placement for name, c in applied.items() if name.startswith("terminal")} == {"terminal"}


def test_the_modern_recipe_changes_initialisation_positions_and_warm_up_and_nothing_else():
    paper, modern = (apply_recipe(preset("nano"), recipe) for recipe in RECIPES)
    assert changed(paper, modern) == {"model.init": "scaled", "model.positions": "rope", "training.warmup": 50}


def test_training_windows_overlap_by_half_as_in_the_paper():
    assert apply_recipe(preset("nano"), "paper").data.stride == 64
    assert apply_recipe(preset("paper-44m"), "paper").data.stride == 128


def test_conditions_are_named_alone_in_groups_and_with_a_number_of_seeds():
    counts = parse_conditions("per-loop+penalty, 2x2,all:1", 3)
    assert list(counts.values()) == [3, 3, 3, 3, 1, 1, 3, 1, 1]
    assert list(counts) == list(CONDITIONS), "in the paper's order"
    assert parse_conditions("per-loop+raw:2,per-loop+raw:1", 5) == {"per-loop+raw": 2}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("per-loop+rawr", "did you mean 'per-loop\\+raw'"),
        ("2x2:0", "at least 1"),
        ("2x2:many", "number of seeds"),
        ("", "conditions"),
    ],
)
def test_a_wrong_condition_is_named_with_what_would_be_right(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parse_conditions(text, 3)


def test_the_papers_seeds_come_first_and_none_comes_twice():
    assert choose_seeds(5) == (42, 101, 202, 303, 404)
    assert len(set(choose_seeds(50))) == 50


def test_a_row_survives_being_handed_to_another_process(base):
    spec = RowSpec(
        condition="per-loop+raw",
        recipe="modern",
        seed=101,
        config=base,
        test_data=("a", "b"),
        eval_tokens=5,
        audit=False,
    )
    assert RowSpec.from_json(spec.to_json()) == spec
    assert spec.name == "per-loop+raw-modern-s101"
    assert RowSpec.from_json(replace(spec, test_data=None, recipe="paper").to_json()).name == "per-loop+raw-s101"


def test_rows_share_everything_but_condition_and_seed(base, tmp_path):
    seeds = {name: choose_seeds(count) for name, count in parse_conditions("2x2,per-loop+penalty:1", 2).items()}
    grid = lay_out(Request(size="demo", seeds=seeds, steps=40), tmp_path / "out", print, base)
    rows = grid.rows()
    assert [row.seed for row in rows] == [42] * 5 + [101] * 4, "the first seed of all comes first"
    assert {row.config.training.seed for row in rows} == {42, 101}
    for row in rows:
        assert {name.split(".")[1] for name in changed(rows[0].config, row.config)} <= {*FACTORS, "seed"}
    assert {row.config.training.steps for row in rows} == {40}
    assert rows[0].config.training.save_every == 10, "often enough to be resumed"


def test_a_size_of_the_paper_takes_four_epochs(base, tmp_path):
    grid = lay_out(Request(size="paper-44m", seeds={"per-loop+raw": (42,)}), tmp_path / "out", print, base)
    assert grid.epochs == pytest.approx(4, abs=0.01)
    windows = (grid.data["tokens"]["train"] - 1 - 16) // 8 + 1
    assert grid.common.training.steps == round(4 * windows / 4)


def test_the_tokenizer_is_fitted_once_on_the_training_text(base, tmp_path):
    bpe = replace(base, data=replace(base.data, tokenizer="bpe"), model=replace(base.model, vocab_size=300))
    said: list[str] = []
    request = Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    for _ in range(2):
        lay_out(request, tmp_path / "out", said.append, bpe)
    assert sum("training the bpe tokenizer on the training split" in line for line in said) == 1
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").is_file()


def test_requests_add_up_in_one_folder(base, tmp_path):
    out = tmp_path / "out"
    asked = [
        ({"per-loop+raw": (42, 101)}, "paper"),
        ({"per-loop+raw": (42,), "terminal+raw": (7,)}, "paper"),
        ({"per-loop+raw": (42,)}, "modern"),
    ]
    for seeds, recipe in asked:
        request = Request(size="demo", recipe=recipe, seeds=seeds, steps=4)
        record(lay_out(request, out, print, base), ["loopscope", recipe, str(len(seeds))])
    known = json.loads((out / "grid.json").read_text())
    assert known["recipes"]["paper"]["seeds"] == {"terminal+raw": [7], "per-loop+raw": [42, 101]}
    assert known["recipes"]["modern"]["seeds"] == {"per-loop+raw": [42]}
    assert known["recipes"]["modern"]["config"]["model"]["positions"] == "rope"
    assert [command[1] for command in known["commands"]] == ["paper", "paper", "modern"]
    assert known["versions"]["torch"] and known["data"]["tokenizer_sha256"]


@pytest.mark.parametrize(
    ("request_change", "base_change", "named"),
    [
        ({"size": "nano"}, {}, "size"),
        ({"steps": 5}, {}, "steps"),
        ({"test_data": ("TEST",)}, {}, "test_data"),
        ({"eval_tokens": 7}, {}, "eval_tokens"),
        ({}, {"lr": 0.5}, "lr"),
    ],
)
def test_a_folder_holds_one_grid_and_names_what_is_asked_for_differently(
    base, tmp_path, request_change, base_change, named
):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    record(lay_out(request, out, print, base), [])
    (out / "rows" / "per-loop+raw-s42").mkdir(parents=True)
    (out / "rows" / "per-loop+raw-s42" / "eval.json").write_text("{}")
    (tmp_path / "test.txt").write_text("words to be tested on\n" * 50)
    if "test_data" in request_change:
        request_change = {"test_data": (str(tmp_path / "test.txt"),)}
    other = replace(base, training=replace(base.training, **base_change))
    with pytest.raises(RunError, match=f"{named} = .*choose another --out"):
        record(lay_out(replace(request, **request_change), out, print, other), [])


def test_other_text_under_the_same_name_is_another_grid(base, tmp_path):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    record(lay_out(request, out, print, base), [])
    (tmp_path / "train.txt").write_text("an entirely different text\n" * 300)
    with pytest.raises(RunError, match=r"--data is not what .*: corpus_sha256 was \w{64} and is \w{64}; restore"):
        record(lay_out(request, out, print, base), [])


def test_test_text_may_change_until_a_row_was_evaluated_on_it(base, tmp_path):
    text = tmp_path / "test.txt"
    text.write_text("words to be tested on\n" * 50)
    out = tmp_path / "out"
    request = Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4, test_data=(str(text),))
    record(lay_out(replace(request, test_data=None), out, print, base), [])
    record(lay_out(request, out, print, base), [])
    text.write_text("other words to be tested on\n" * 50)
    record(lay_out(request, out, print, base), [])
    (out / "rows" / "per-loop+raw-s42").mkdir(parents=True)
    (out / "rows" / "per-loop+raw-s42" / "eval.json").write_text("{}")
    record(lay_out(request, out, print, base), [])
    text.write_text("words of another kind\n" * 50)
    with pytest.raises(RunError, match="the text of --test-data is not what"):
        record(lay_out(request, out, print, base), [])


@pytest.mark.parametrize("wrong", ["data", "test_data"])
def test_a_wrong_file_name_costs_nothing(base, tmp_path, wrong):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    mistaken_base = replace(base, data=replace(base.data, data=("nowhere.txt",))) if wrong == "data" else base
    mistaken = replace(request, test_data=("nowhere.txt",)) if wrong == "test_data" else request
    with pytest.raises(DataError, match=r"no such file: nowhere\.txt"):
        lay_out(mistaken, out, print, mistaken_base)
    record(lay_out(request, out, print, base), [])


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "{}", '{"recipes": {"paper": null}}'])
def test_a_damaged_grid_json_is_one_sentence_that_says_what_to_do(base, tmp_path, content):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    grid = lay_out(request, out, print, base)
    record(grid, [])
    (out / "grid.json").write_text(content)
    with pytest.raises(RunError, match=r"grid\.json.*; move it away and run the command of this grid again"):
        record(grid, [])


def test_a_tokenizer_left_behind_by_an_interrupted_request_for_other_text_is_refused(base, tmp_path):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    lay_out(request, out, print, base)  # and no grid.json: interrupted
    (tmp_path / "other.txt").write_text("other words\n" * 300)
    other = replace(base, data=replace(base.data, data=(str(tmp_path / "other.txt"),)))
    with pytest.raises(RunError, match="tokenizer was fitted for another command"):
        lay_out(request, out, print, other)
    lay_out(request, out, print, base)


def test_a_grid_from_before_a_field_existed_is_the_same_grid(base, tmp_path):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    record(lay_out(request, out, print, base), [])
    known = json.loads((out / "grid.json").read_text())
    del known["recipes"]["paper"]["config"]["objective"]["z_loss"]
    (out / "grid.json").write_text(json.dumps(known))
    record(lay_out(request, out, print, base), [])


def test_more_threads_are_the_same_grid(base, tmp_path):
    out, request = tmp_path / "out", Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4)
    record(lay_out(request, out, print, base), [])
    record(lay_out(request, out, print, replace(base, training=replace(base.training, threads=2))), [])


def test_the_papers_own_configuration_differs_from_the_paper_in_guards_and_the_mended_leak_alone():
    common = apply_recipe(preset("paper-44m"), "paper")
    found = differences(common, "paper-44m", epochs=4.0, bf16=True)
    assert [difference.field for difference in found] == ["bad steps", "tokenizer is fitted on"]


def test_every_difference_of_a_small_size_is_listed_without_telling_folders():
    data = replace(preset("nano").data, data=("/home/somebody/texts/train.txt",))
    common = apply_recipe(replace(preset("nano"), data=data), "modern")
    found = {d.field: d.here for d in differences(common, "nano", epochs=0.5, bf16=False)}
    assert found["model.width"] == "128" and found["training.lr"] == "0.001" and found["model.init"] == "scaled"
    assert found["data.data"] == "train.txt"
    assert found["precision"] == "float32" and found["length"].startswith("0.5 epochs")
    assert not {"objective.placement", "training.seed"} & found.keys(), "what the grid varies is no difference"


def test_precision_is_added_once_rows_can_tell(base, tmp_path):
    out = tmp_path / "out"
    record(lay_out(Request(size="demo", seeds={"per-loop+raw": (42,)}, steps=4), out, print, base), [])

    def told() -> set[str]:
        known = json.loads((out / "grid.json").read_text())
        return {difference["field"] for difference in known["recipes"]["paper"]["differences"]}

    assert "precision" not in told()
    update_differences(out, bf16=False)
    assert "precision" in told()
