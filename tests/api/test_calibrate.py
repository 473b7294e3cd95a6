"""Certified halting: a model whose every token is known to need so many loops, and the verb around it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import loopscope as ls
from loopscope.api.calibration import calibrate, policy_of, units_of
from loopscope.cli import main
from loopscope.data.tasks import Hops
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import ConfigError, DataError, UnsupportedError
from loopscope.inference.certification import BLOCK_UNITS, Unit, dealt
from loopscope.inference.halting import parse_halting
from loopscope.inference.rules import rules_for
from loopscope.results.record import write_record
from loopscope.targets import Opened

LOOPS = 8


class FollowsPointers(torch.nn.Module, ls.Cached):
    """Follows one pointer a loop; the state is the character it has arrived at. Ends point to themselves."""

    num_loops = LOOPS

    def __init__(self):
        super().__init__()
        cells = torch.full((256,), -1)
        cells[torch.tensor([ord(cell) for cell in Hops.cells])] = torch.arange(len(Hops.cells))
        self.cells = cells

    def embed(self, ids_BT, cache=None):
        return ls.LoopState(torch.nn.functional.one_hot(ids_BT, 256).float(), context=ids_BT)

    def loop(self, state, k, cache=None):
        here_BT = state.h_BTD.argmax(-1)
        place_BT = self.cells[here_BT]
        held_BT = state.context.gather(1, place_BT.clamp(min=0))
        here_BT = torch.where(place_BT >= 0, held_BT, here_BT)
        return state.with_h(torch.nn.functional.one_hot(here_BT, 256).float())

    def readout(self, state, k, cache=None):
        return 9 * state.h_BTD


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))


def opened():
    return Opened(name="by hand", model=FollowsPointers(), tokenizer=bytes_tokenizer(), vocab_size=256)


def test_a_token_that_needs_s_steps_leaves_after_s_plus_one_loops():
    """It has settled when a loop changed nothing: one more than it needs. Loops beyond its need change nothing, so the
    promise costs nothing, and no fixed depth below the longest path keeps it."""
    found = calibrate(opened(), rules=["kl"], data=["task:hops:6"], verify=20)
    (certificate,) = found.certificates
    table = {row.steps: row.count for row in ls.evaluate(opened(), data=["task:hops:6"]).scores.answers}
    assert found.fixed.threshold == 6.0
    assert certificate.ppl_increase == pytest.approx(0, abs=1e-6)
    assert set(certificate.exits) == {2, 3, 4, 5, 6, 7}
    mean = sum((steps + 1) * count for steps, count in table.items()) / sum(table.values())
    assert certificate.mean_loops == pytest.approx(mean, abs=0.25)  # the test units are a part of all
    assert len(certificate.unit_loops) == found.units["test"]
    assert np.mean(certificate.unit_loops) == pytest.approx(certificate.mean_loops, abs=1e-2)
    assert found.saved_beyond_fixed(certificate) == pytest.approx(6 - certificate.mean_loops)
    assert certificate.verified == found.fixed.verified == 20


def test_a_rule_that_is_sure_of_wrong_answers_is_not_let_loose():
    """Every exit has the same margin, right or wrong: the first threshold that lets anybody leave lets all leave."""
    found = calibrate(opened(), rules=["margin"], data=["task:hops:6"])
    assert found.certificates[0].threshold is None, "never"
    assert found.certificates[0].mean_loops == LOOPS


def test_too_few_units_promise_nothing_and_say_how_many_would_do(capsys, monkeypatch):
    monkeypatch.setattr("loopscope.targets.open_target", lambda word, **how: opened())
    monkeypatch.setattr("loopscope.cli.calibrate.check_word", lambda word: None)
    code = main(["calibrate", "by-hand", "--data", "task:hops:6", "--max-units", "24", "--rule", "kl"])
    out = capsys.readouterr().out
    assert code == 1
    assert "nothing is promised: there are 12 calibration units" in out


def test_the_verb_writes_a_policy_that_generate_takes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("loopscope.targets.open_target", lambda word, **how: opened())
    monkeypatch.setattr("loopscope.cli.calibrate.check_word", lambda word: None)
    out = tmp_path / "policy.json"
    arguments = ["--data", "task:hops:6", "--rule", "kl", "--no-speed", "--out", str(out), "--json"]
    assert main(["calibrate", "by-hand", *arguments]) == 0
    printed = json.loads(capsys.readouterr().out)
    policy = json.loads(out.read_text())
    assert policy["rule"] == "kl" and policy["fixed_depth"] == 6.0
    assert policy["threshold"] == printed["certificates"][0]["threshold"]
    assert parse_halting(str(out)).threshold == policy["threshold"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema_version": 1}', '{"schema_version": 9, "rule": "kl", "threshold": 1}', '{"rule": "kl"}',
     '{"schema_version": 1, "rule": "kl", "threshold": "low"}', '{"schema_version": 1, "rule": "klm", "threshold": 1}'],
)  # fmt: skip
def test_a_damaged_policy_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--halting"):
        parse_halting(str(path))
    with pytest.raises(ConfigError, match="--halting"):
        parse_halting(str(tmp_path / "nowhere.json"))


def test_a_block_goes_to_one_split_as_a_whole_and_nothing_is_lost():
    ids = torch.zeros(1, 4, dtype=torch.long)
    units = [Unit(ids, ids, article=number // BLOCK_UNITS) for number in range(82)]
    splits = dealt(units, seed=3)
    homes = Counter(block for split in splits.values() for block in {unit.article for unit in split})
    assert set(homes.values()) == {1}
    assert sum(map(len, splits.values())) == 82
    again = dealt(units, seed=3)
    assert [unit.article for unit in again["test"]] == [unit.article for unit in splits["test"]]


# --- units -----------------------------------------------------------------------------------------------------------


def demo(**changes):
    return replace(ls.open("preset:demo"), tokenizer=bytes_tokenizer(), **changes)


def wiki(path, sizes, letters="abcdefghij"):
    """Articles of one letter each, so that a window that crosses into the next is seen."""
    path.write_text("".join(f" = {letter} =\n{letter * size}\n" for letter, size in zip(letters, sizes, strict=False)))
    return [str(path)]


def test_windows_never_cross_articles_and_what_is_left_over_is_counted(tmp_path):
    """128 tokens a window, four windows a unit; a heading and the blank line after it are 8 tokens."""
    sizes = [512 * 3, 505, 504, 100, 1024]
    text = units_of(demo(), wiki(tmp_path / "wiki.txt", sizes), None, lambda _: None)
    assert text.homes == "article" and text.unit_tokens == 512
    assert Counter(unit.article for unit in text.units) == {0: 3, 1: 1, 4: 2}, "a target more than tokens is needed"
    for unit in text.units:
        letters = set(bytes_tokenizer().decode(unit.ids_BT.flatten().tolist())) - set(" =\n")
        assert letters == {"abcdefghij"[unit.article]}
        assert torch.equal(unit.ids_BT.flatten()[1:], unit.targets_BT.flatten()[:-1])
    assert text.dropped_tokens == sum(size + 8 for size in sizes) - 6 * 512
    assert text.dropped_articles == 2


def test_where_units_are_many_articles_take_turns(tmp_path):
    data = wiki(tmp_path / "wiki.txt", [512 * 9, 512 * 2, 512 * 9, 512 * 9])
    text = units_of(demo(), data, 9, lambda _: None)
    assert Counter(unit.article for unit in text.units) == {0: 3, 1: 2, 2: 2, 3: 2}


def test_text_without_articles_comes_in_blocks_and_the_policy_says_so(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("".join(f"line {n} of a text about rivers and {n * n} stones\n" for n in range(500)))
    found = calibrate(demo(), rules=["margin"], data=[str(path)], max_ppl_increase=9.0, unit_tokens=128)
    assert found.homes == "block" and any("blocks" in note for note in found.notes)
    assert "articles being unknown" in policy_of(found, found.certificates[0]).promise.about
    assert found.articles["calibration"] <= -(-found.units["calibration"] // BLOCK_UNITS) + 1


def test_too_little_text_is_told_in_a_sentence(tmp_path):
    with pytest.raises(DataError, match="--unit-tokens"):
        calibrate(demo(), data=wiki(tmp_path / "short.txt", [100, 100]))
    with pytest.raises(DataError, match="too few to deal"):
        calibrate(demo(), data=wiki(tmp_path / "one.txt", [6000]))
    with pytest.raises(DataError, match="too few to deal"):
        calibrate(opened(), data=["task:hops:6"], max_units=2)


# --- evidence --------------------------------------------------------------------------------------------------------


class CostsByArticle(torch.nn.Module, ls.Cached):
    """Leaving early costs or saves a lot in every article as a whole: units of one are no independent draws."""

    num_loops = 2

    def embed(self, ids_BT, cache=None):
        return ls.LoopState(torch.nn.functional.one_hot(ids_BT, 256).float(), context=ids_BT)

    def loop(self, state, k, cache=None):
        return state.with_h(state.h_BTD + 0)

    def readout(self, state, k, cache=None):
        worse = (state.context % 2 == 0) & (state.context >= ord("a"))
        certain = torch.where(worse, 1.0, 2.0) if k == 1 else torch.full(state.context.shape, 1.5)
        return certain[..., None] * state.h_BTD


def test_units_of_articles_that_share_their_luck_make_the_article_the_unit(tmp_path):
    letters = "".join(map(chr, range(ord("a"), ord("a") + 26)))
    data = wiki(tmp_path / "wiki.txt", [512 * 4 + 20] * 26, letters)
    model = Opened(name="by hand", model=CostsByArticle(), tokenizer=bytes_tokenizer(), vocab_size=256, max_length=128)
    found = calibrate(model, rules=["fixed"], data=data)
    assert found.evidence == "article" and found.alike_p_value <= 0.025
    assert found.calibration_evidence == found.articles["calibration"] == 13 < found.units["calibration"]
    assert found.best is None, "13 articles are too few for any promise, however many units they have"
    assert any("each article counts as one unit" in note for note in found.notes)


def test_a_verification_that_fails_too_often_says_so(monkeypatch):
    """A p-value that certifies everything is caught by drawing again."""
    monkeypatch.setattr("loopscope.inference.certification.betting_p_value", lambda *_: 0.0)
    found = calibrate(opened(), rules=["margin"], data=["task:hops:6"], verify=20)
    assert found.failures_allowed == 3
    assert found.certificates[0].verified == 0 and found.certificates[0].passed is False


# --- the probe, fills and speed --------------------------------------------------------------------------------------


def test_a_probe_goes_through_its_policy_file_into_decoding(tmp_path):
    path = tmp_path / "policy.json"
    found = calibrate(
        demo(), rules=["probe"], max_ppl_increase=9.0, fill="project", speed=True, max_units=60, unit_tokens=32
    )
    (certificate,) = found.certificates
    assert certificate.mean_loops < 4 and certificate.tokens_per_second > 0 and found.tokens_per_second > 0
    write_record(path, policy_of(found, certificate))
    halting = parse_halting(str(path))
    assert halting.fill == "project" and halting.rule.weights == found.probe
    text = ls.generate(demo(), "The river", halting=str(path), max_tokens=8)
    assert any(token.loops < 4 for token in text.tokens)
    with pytest.raises(ConfigError, match="calibrated at 4 loops, and 3 are asked for"):
        ls.generate(demo(), "The river", halting=str(path), num_loops=3)


@pytest.mark.parametrize(
    "change",
    [{"probe": None}, {"probe": {"weights": [[1.0] * 3] * 3, "biases": [0.0] * 2}}, {"width": 4}, {"num_loops": 5},
     {"probe": {"weights": [[1.0, 2.0], [1.0] * 3, [1.0] * 3], "biases": [0.0] * 3}}, {"fill": "guess"},
     {"probe": {"weights": [[1.0, float("nan"), 2.0]] * 3, "biases": [0.0] * 3}}, {"num_loops": 0}, {"width": 1 << 40},
     {"threshold": float("inf")}, {"threshold": 10**400}],
)  # fmt: skip
def test_a_probe_that_is_not_whole_is_refused_in_a_sentence(tmp_path, change):
    whole = {"schema_version": 1, "rule": "probe", "threshold": 0.5, "num_loops": 4, "width": 3}
    whole["probe"] = {"weights": [[1.0, 2.0, 3.0]] * 3, "biases": [0.0] * 3}
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(whole))
    assert parse_halting(str(path)).rule.biases_K == (0.0,) * 3
    path.write_text(json.dumps({**whole, **change}))
    with pytest.raises(ConfigError, match="is not a policy that `loopscope calibrate` wrote"):
        parse_halting(str(path))


def test_all_rules_are_those_the_model_has():
    names = rules_for(demo().model)
    assert "probe" in names and "gate" not in names and "fixed" not in names


@pytest.mark.parametrize(("scale", "warned"), [(1.0, False), (3.0, True)])
def test_rules_that_divide_by_the_norm_are_warned_of_where_the_scale_drifts_and_only_there(scale, warned):
    class Drifting(FollowsPointers):
        def loop(self, state, k, cache=None):
            return state.with_h(super().loop(state, k, cache).h_BTD * scale**k)

    model = Opened(name="drifting", model=Drifting(), tokenizer=bytes_tokenizer(), vocab_size=256)
    found = calibrate(model, rules=["cosine"], data=["task:hops:6"], max_units=40)
    assert any("divide by ‖h‖" in note for note in found.notes) == warned
    assert found.scale_ratio == pytest.approx(scale ** (LOOPS - 1))


# --- the verb --------------------------------------------------------------------------------------------------------


def test_an_interrupted_calibration_leaves_nothing_half_written(monkeypatch, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    out = tmp_path / "policy.json"
    monkeypatch.setattr("loopscope.inference.certification.halt_on_text", interrupt)
    arguments = ["preset:demo", "--tokenizer", "bytes", "--max-units", "60", "--out", str(out)]
    assert main(["calibrate", *arguments]) == 130
    assert list(tmp_path.glob("*policy*")) == []


def test_a_coda_that_attends_and_a_rule_of_another_name_are_refused(tmp_path, capsys):
    (tmp_path / "coda.yaml").write_text("model: {vocab_size: 256, width: 16, num_heads: 2, coda_layers: 1}\n")
    asked = ["--tokenizer", "bytes", "--max-units", "60", "--unit-tokens", "64", "--no-speed"]
    assert main(["calibrate", str(tmp_path / "coda.yaml"), *asked]) == 2
    assert "this model's coda attends to others" in capsys.readouterr().err
    assert main(["calibrate", "preset:demo", *asked, "--rule", "margins"]) == 2
    assert "did you mean 'margin'" in (err := capsys.readouterr().err) and "--rule" in err


def test_every_field_that_is_printed_as_json_is_documented(capsys):
    docs = (Path(__file__).parents[2] / "docs" / "halting.md").read_text(encoding="utf-8")
    asked = ["--tokenizer", "bytes", "--max-units", "100", "--unit-tokens", "32", "--max-ppl-increase", "9"]
    assert main(["calibrate", "preset:demo", *asked, "--rule", "margin", "--verify", "5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    certificate = printed["certificates"][0]
    for name in {*printed, *certificate}:
        assert f"`{name}`" in docs, f"{name} of loopscope calibrate --json is not in docs/halting.md"
    assert certificate["tokens_per_second"] > 0 and certificate["passed"] is True


def test_a_policy_that_never_leaves_is_null_in_its_file():
    found = calibrate(opened(), rules=["margin"], data=["task:hops:6"])
    assert policy_of(found, found.certificates[0]).threshold is None


def test_bounds_and_models_that_cannot_be_are_refused():
    wrong = (("max_ppl_increase", 0.0), ("max_ppl_increase", np.inf), ("confidence", 1.0), ("rules", ()))
    for name, value in wrong:
        with pytest.raises(ConfigError, match=name.removesuffix("s")):
            calibrate(opened(), **{name: value}, data=["task:hops:6"])
    plain = ls.adapt(embed=lambda ids: ids[..., None].float(), loop=lambda h, k: h, readout=lambda h, k: h, num_loops=2)
    with pytest.raises(UnsupportedError, match="key-value cache"):
        calibrate(Opened(name="plain", model=plain, vocab_size=2))
