"""Certified halting: a model whose every token is known to need so many loops, and the verb around it."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

import loopscope as ls
from loopscope.cli import main
from loopscope.data.tasks import Hops
from loopscope.data.tokenizers import bytes_tokenizer
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.inference.halting import parse_halting
from loopscope.targets import Opened
from loopscope.verbs.calibration import calibrate, to_policy
from loopscope.verbs.units import BLOCK_UNITS, Unit, dealt

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
    assert found.certificates[0].threshold == math.inf
    assert found.certificates[0].mean_loops == LOOPS


def test_too_few_units_promise_nothing_and_say_how_many_would_do(capsys, monkeypatch):
    monkeypatch.setattr("loopscope.verbs.calibration.open_target", lambda word: opened())
    monkeypatch.setattr("loopscope.cli.calibrate.check_word", lambda word: None)
    code = main(["calibrate", "by-hand", "--data", "task:hops:6", "--max-units", "24", "--rule", "kl"])
    out = capsys.readouterr().out
    assert code == 1
    assert "nothing is promised: there are 12 calibration units" in out


def test_the_verb_writes_a_policy_that_generate_takes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("loopscope.verbs.calibration.open_target", lambda word: opened())
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


def test_a_policy_that_never_leaves_is_null_in_its_file():
    found = calibrate(opened(), rules=["margin"], data=["task:hops:6"])
    assert to_policy(found, found.certificates[0])["threshold"] is None


def test_bounds_and_models_that_cannot_be_are_refused():
    wrong = (("max_ppl_increase", 0.0), ("max_ppl_increase", np.inf), ("confidence", 1.0), ("rules", ()))
    for name, value in wrong:
        with pytest.raises(ConfigError, match=name.removesuffix("s")):
            calibrate(opened(), **{name: value}, data=["task:hops:6"])
    plain = ls.adapt(embed=lambda ids: ids[..., None].float(), loop=lambda h, k: h, readout=lambda h, k: h, num_loops=2)
    with pytest.raises(UnsupportedError, match="key-value cache"):
        calibrate(Opened(name="plain", model=plain, vocab_size=2))
