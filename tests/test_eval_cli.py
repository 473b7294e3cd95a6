"""`loopscope eval` beyond the scores: verdict on depth, speed, and cache policies, as a user sees them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import loopscope as ls
from loopscope.cli import main
from loopscope.results.measures import read_run

DOCS = (Path(__file__).parent.parent / "docs" / "json.md").read_text(encoding="utf-8")
DESIGN = """
model: {vocab_size: 256, width: 32, num_layers: 1, num_heads: 2, num_loops: 3, max_length: 32}
data: {tokenizer: bytes}
"""


@pytest.fixture
def evaluate(tmp_path, text, capsys):
    """Run `loopscope eval` on a small design; gives exit code, stdout, stderr."""
    (tmp_path / "design.yaml").write_text(DESIGN)

    def run(*flags: str) -> tuple[int, str, str]:
        named = ("--tokenizer", "bytes", "--data", str(text), "--max-tokens", "640")
        code = main(["eval", str(tmp_path / "design.yaml"), *named, *flags])
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def keys(value):
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


def test_json_has_every_part_that_was_asked_for_and_every_field_is_documented(evaluate):
    code, out, _ = evaluate(
        "--depths", "1..5", "--speed", "--cache-policies", "--exit-gap", "--policies", "margin:9", "--json"
    )
    document = json.loads(out)
    assert code == 0
    assert [each["k"] for each in document["speed"]] == [k for k in range(1, 6) for _ in range(3)]
    assert {each["what"] for each in document["speed"]} == {"prefill", "decode", "decode, speculating"}
    assert document["cache"]["num_loops"] == 3 and document["cache"]["tokens"] == 20 * 16
    assert document["beyond"]["trained"] == 3 and document["beyond"]["deepest"] == 5
    section = DOCS.split("`loopscope eval --json`")[1].split("\n## ")[0]
    assert [key for key in keys(document) if f"`{key}`" not in section] == []


def test_a_policy_that_always_leaves_after_two_loops_is_the_fixed_depth_of_two(evaluate):
    """The same tokens are scored by the same readout, so all that differs is how they got there."""
    code, out, _ = evaluate("--policies", "fixed:2,fixed:9", "--json")
    document = json.loads(out)
    assert code == 0
    for halted, k in zip(document["halting"], (2, 3), strict=True):
        depth = document["depths"][k - 1]
        assert halted["mean_loops"] == k == depth["k"]
        assert halted["ce"] == pytest.approx(depth["ce"], rel=1e-5)
        assert halted["bits_per_byte"] == pytest.approx(depth["bits_per_byte"], rel=1e-5)
    code, out, _ = evaluate("--policies", "fixed:2", "--speed")
    row = next(line for line in out.splitlines() if "fixed:2" in line)
    assert f"{document['depths'][1]['ce']:.4f}" in row
    assert out.split("loops  decoding, tokens/s")[1].splitlines()[-1].split()[0] == "2.00"


def test_policies_of_another_model_or_of_nobody_are_refused(evaluate, tmp_path):
    policy = {"schema_version": 1, "rule": "margin", "threshold": 1.0, "num_loops": 8, "width": 32}
    (tmp_path / "deep.json").write_text(json.dumps(policy))
    (tmp_path / "wide.json").write_text(json.dumps({**policy, "num_loops": 3, "width": 64}))
    for name, why in (("deep.json", "calibrated at 8 loops"), ("wide.json", "of width 64"), ("no.json", "--policies")):
        code, out, err = evaluate("--policies", str(tmp_path / name))
        assert code == 2 and out == "" and why in err


def test_the_table_has_speed_and_bytes_and_the_verdict_stands_under_it(evaluate):
    code, out, _ = evaluate("--depths", "2,3,5", "--speed")
    assert code == 0
    assert "Beyond the trained 3 loops: " in out
    assert re.search(r"decode\s", out) and "cache" in out and f"{5 * 2 * 32 * 4:,}" in out
    chart = out.split("loops  decoding, tokens/s")[1].splitlines()[1:]
    assert [line.split()[0] for line in chart] == ["2", "3", "5"]
    assert all("█" in line or "▏" in line for line in chart)


def test_without_a_deeper_depth_there_is_no_verdict_on_it(evaluate):
    _, out, _ = evaluate("--json")
    document = json.loads(out)
    assert (document["beyond"], document["speed"], document["cache"]) == (None, [], None)
    assert "Beyond" not in evaluate()[1]


def test_the_cache_table_has_a_row_for_every_policy_and_a_sentence(evaluate):
    _, out, _ = evaluate("--cache-policies")
    for policy in ("exact", "last-loop", "first-loop", "first-then-last", "ring-2"):
        assert re.search(rf"│ {policy} ", out)
    assert "cache policies at 3 loops: 20 windows, 320 decoded tokens" in out
    assert re.search(r"(Safe at 0\.01 nats|No policy is safe)", out) and "s_K/s_1" in out


def test_every_exit_among_the_depths_is_taken_apart(evaluate):
    code, out, _ = evaluate("--depths", "1,2,3", "--exit-gap")
    assert code == 0 and "exits: fitted on 320 tokens, asked on 320 in 10 windows" in out and "CE − CE(3)" in out
    code, _, err = evaluate("--depths", "3..4", "--exit-gap")
    assert code == 2 and "none of the depths is an exit below the trained 3" in err


def test_cache_policies_of_a_model_without_a_cache_are_refused_before_anything_runs():
    theirs = ls.adapt(
        embed=lambda ids: ids[..., None].float(), loop=lambda h, k: h, readout=lambda h, k: h, num_loops=2
    )
    opened = ls.Opened(name="theirs", model=theirs, vocab_size=2, batches=[])
    with pytest.raises(ls.LoopscopeError, match="comparing cache policies needs a key-value cache"):
        ls.evaluate(opened, cache_policies=True)


def test_a_text_without_a_whole_window_is_one_sentence(evaluate):
    code, _, err = evaluate("--max-tokens", "20", "--cache-policies")
    assert code == 2 and "no whole window" in err


def test_what_was_measured_stays_in_the_run_also_when_less_is_asked_for_later(train, place, capsys):
    run = place / "run"
    assert train()[0] == 0
    assert main(["eval", str(run), "--depths", "1..4", "--speed", "--cache-policies", "--max-tokens", "160"]) == 0
    assert main(["eval", str(run), "--max-tokens", "160"]) == 0
    read = read_run(run, "run")
    assert not read.problems
    assert {each.k for each in read.evaluation.speed} == {1, 2, 3, 4}
    assert read.evaluation.cache.policies[0].policy == "exact"
    assert read.evaluation.cache.summary in capsys.readouterr().out
