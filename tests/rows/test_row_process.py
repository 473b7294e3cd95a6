"""What the process of a row measures: scores with a unigram model beside them, audits before and after training, and
what halting saves."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from loopscope.config import Config, DataConfig, ModelConfig, TrainingConfig
from loopscope.errors import NotFiniteError
from loopscope.files import write_json
from loopscope.results.measures import read_run
from loopscope.results.run import RowRecord
from loopscope.rows.grid import Request, lay_out
from loopscope.rows.ledger import is_audited, is_calibrated, is_complete, is_evaluated
from loopscope.rows.process import (
    _run_stages,
    audit_row,
    calibrate_row,
    evaluate_row,
    probe_row,
    train_row,
)
from loopscope.rows.spec import RowSpec
from loopscope.runs import RunFolder

TRAIN = "".join(f"line {n} about rivers and {n * n} stones\n\n" for n in range(300)).rstrip("\n")
VALID = ("another line about a river\n\n" * 20).rstrip("\n")
LONG = "\n\n".join(f"another line about river {n % 97} and stone {n % 89}" for n in range(600))


@pytest.fixture
def row(tmp_path, monkeypatch) -> tuple[RowSpec, RunFolder]:
    """A trained row whose learning rate is so small that it has learned nothing."""
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text(TRAIN)
    (tmp_path / "valid.txt").write_text(VALID)
    base = Config(
        model=ModelConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, num_loops=2, max_length=16),
        data=DataConfig(data=(str(tmp_path / "train.txt"),), valid=(str(tmp_path / "valid.txt"),), tokenizer="bytes"),
        training=TrainingConfig(steps=2, batch=4, threads=1, lr=1e-12),
    )
    request = Request(size="demo", seeds={"per-loop+raw": (101,)}, steps=2, eval_tokens=100)
    spec = lay_out(request, tmp_path / "out", lambda text: None, base).rows()[0]
    run = RunFolder(tmp_path / "out" / "rows" / spec.name)
    with run.locked():
        train_row(spec, run)
    return spec, run


def test_a_row_is_evaluated_beside_a_unigram_model_of_its_training_text(row):
    spec, run = row
    evaluate_row(spec, run)
    found = json.loads((run.path / "eval.json").read_text())["unigram_ce"]
    seen, targets = Counter(TRAIN.encode()), VALID.encode()[1:101]
    nats = [-math.log((seen[byte] + 1) / (len(TRAIN) + 256)) for byte in targets]
    assert found == {"valid": pytest.approx(sum(nats) / 100)}
    assert is_evaluated(run.path, spec)


def test_a_row_is_audited_with_the_weights_it_began_with_and_with_those_it_ended_with(row):
    spec, run = row
    audit_row(replace(spec, audit_untrained=False), run)
    assert [path.name for path in run.path.glob("audit*")] == ["audit.json"]
    trained = read(run.path / "audit.json")
    audit_row(spec, run)
    assert is_audited(run.path, spec) and read(run.path / "audit.json") == trained, "it was there"
    untrained = read(run.path / "audit-untrained.json")
    assert (untrained["model"]["step"], trained["model"]["step"]) == (None, 2)
    for name in ("norm", "ce", "radial_gradient_share", "scale_curvature"):
        ours, theirs = ([loop[name] for loop in audit["loops"][:2]] for audit in (untrained, trained))
        assert ours == pytest.approx(theirs, rel=1e-5), "it learned nothing: the same seed, the same text"
    (run.path / "audit-untrained.json").unlink()
    for loop in trained["loops"]:
        del loop["lemma_2"]
    write_json(run.path / "audit.json", trained)
    assert not is_audited(run.path, spec)
    audit_row(spec, run)
    assert is_audited(run.path, spec), "an older version's audit is made again"


def test_a_row_that_finished_before_halting_was_measured_is_completed_and_not_trained_again(row, monkeypatch):
    spec, run = row
    monkeypatch.setattr("loopscope.rows.halting.UNITS", 40)
    monkeypatch.setattr("loopscope.rows.process.train_row", lambda *given: pytest.fail("trained again"))
    spec = replace(spec, audit=False)
    Path(spec.config.data.valid[0]).write_text(LONG)
    evaluate_row(spec, run)
    assert not is_complete(run.path, spec)
    _run_stages(spec, run, RowRecord())
    found = read(run.path / "halting.json")
    assert is_calibrated(run.path, spec) and found["step"] == 2 and found["units"]["calibration"] == 20
    assert len(found["unit_loops"]) == found["units"]["test"]
    assert found["fixed_depth"] <= 2 and found["ppl_increase"] < 0.01, "it learned nothing: no loop matters"
    assert [gate["reads"] for gate in found["gates"]] == ["h", "norm(h)"]
    assert [loop["k"] for loop in found["gates"][0]["loops"]] == list(range(1, 31)), "far beyond its depth"
    _run_stages(spec, run, RowRecord())
    assert read(run.path / "halting.json") == found, "it was there"


def test_a_row_whose_checkpoint_is_gone_says_so_instead(row, monkeypatch):
    spec, run = row
    monkeypatch.setattr("loopscope.rows.process.train_row", lambda *given: pytest.fail("trained again"))
    spec = replace(spec, audit=False)
    evaluate_row(spec, run)
    shutil.rmtree(run.checkpoints)
    _run_stages(spec, run, RowRecord())
    found = read_run(run.path, "row").halting
    assert found.reason.startswith("the checkpoint of step 2 is gone") and found.saved is None
    assert is_calibrated(run.path, spec), "it is not asked for again"


def test_too_little_text_for_a_promise_is_told_with_what_would_do(row):
    spec, run = row
    calibrate_row(spec, run)
    found = read_run(run.path, "row").halting
    assert "too few" in found.reason and found.saved is None


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_an_audit_that_fails_ends_a_row_of_a_grid_and_is_told_in_one_of_an_atlas(row, monkeypatch):
    spec, run = row

    def fails(*_, **__):
        raise NotFiniteError("a derivative is not finite")

    monkeypatch.setattr("loopscope.api.audits.audit", fails)
    with pytest.raises(NotFiniteError):
        audit_row(spec, run)
    probed = replace(spec, probe=True)
    told = audit_row(probed, run)
    assert told == dict.fromkeys(("untrained", "trained"), "a derivative is not finite")
    assert not is_audited(run.path, probed)
    probe_row(probed, run, told)
    found = read(run.path / "probe.json")
    assert found["problems"].items() >= told.items() and found["motion"] and found["cost"]["flops_per_token"] > 0
    assert is_audited(run.path, probed) and not is_audited(run.path, spec)
