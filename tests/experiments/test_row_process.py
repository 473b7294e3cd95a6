"""What the process of a row measures: scores with a unigram model beside them, and audits before and after training."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from loopscope.config import Config, DataConfig, ModelConfig, TrainingConfig
from loopscope.experiments.grid import Request, lay_out
from loopscope.experiments.ledger import is_audited, is_evaluated
from loopscope.experiments.row_process import audit_row, evaluate_row, train_row
from loopscope.experiments.rows import RowSpec
from loopscope.runs import RunFolder, write_json

TRAIN = "".join(f"line {n} about rivers and {n * n} stones\n\n" for n in range(300)).rstrip("\n")
VALID = ("another line about a river\n\n" * 20).rstrip("\n")


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


def read(path: Path) -> dict:
    return json.loads(path.read_text())
