"""`loopscope audit` and `loopscope remedy` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loopscope.api.remedies import remedied
from loopscope.cli import main
from loopscope.cli.audit import parse_supervised
from loopscope.cli.terminal import progress
from loopscope.config import Config, ModelConfig
from loopscope.errors import ConfigError
from loopscope.show.numbers import sparkline

QUICK = ["--states", "2", "--prefix", "6", "--tokens", "48", "--loops", "5"]
TINY = """
model: {vocab_size: 256, width: 16, num_layers: 1, num_heads: 2, num_loops: 3, max_length: 16, readout: READOUT}
objective: {placement: per-loop}
"""


@pytest.fixture
def audit(capsys):
    def run(*flags: str) -> tuple[int, str, str]:
        code = main(["audit", *QUICK, *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def design(tmp_path):
    def write(readout: str) -> str:
        path = tmp_path / f"{readout}.yaml"
        path.write_text(TINY.replace("READOUT", readout))
        return str(path)

    return write


@pytest.fixture
def run_folder(train, place) -> Path:
    assert train("--steps", "6", "--log-every", "3", "--eval-every", "6", "--save-every", "6")[0] == 0
    return place / "run"


def test_a_design_with_a_norm_readout_is_a_finding_before_it_is_trained(audit, design):
    code, out, _ = audit(design("rmsnorm"))
    assert code == 1
    assert "verdict: BLIND-SPOT. 1 blind direction (scale)" in out
    assert "untrained" in out and "remedy for scale" in out and "--norm-penalty 0.01" in out
    assert "‖h_k‖ over 5 loops" in out and "CE at loop 3, α·h" in out


def test_a_design_with_a_raw_readout_is_clean(audit, design):
    code, out, _ = audit(design("raw"))
    assert (code, "CONTROLLED" in out, "remedy" in out) == (0, True, False)


def test_a_penalty_on_the_command_line_counts_as_part_of_the_loss(audit, design):
    code, out, _ = audit(design("rmsnorm"), "--norm-penalty", "0.01")
    assert code == 0 and "+ norm_penalty" in out


def test_which_loops_are_supervised_decides(audit, design):
    assert audit(design("final-only"))[0] == 0
    assert audit(design("final-only"), "--supervised", "terminal")[0] == 1
    assert parse_supervised("1,3") == [1, 3]
    with pytest.raises(ConfigError, match="every-loop, terminal"):
        parse_supervised("most")


def test_the_json_is_what_is_written_beside_the_run(audit, run_folder):
    code, out, _ = audit(str(run_folder), "--json")
    assert code == 1
    assert json.loads(out) == json.loads((run_folder / "audit.json").read_text())
    assert json.loads(out)["model"]["step"] == 6
    assert all(isinstance(token["text"], str) for token in json.loads(out)["heaviest_tokens"])


def test_one_checkpoint_is_audited_without_touching_the_runs_audit(audit, run_folder, tmp_path):
    first = run_folder / "checkpoints" / "step-00000000"
    code, out, _ = audit(str(first), "--json", "--out", str(tmp_path / "elsewhere.json"))
    assert code == 1 and json.loads(out)["model"]["step"] == 0
    assert (tmp_path / "elsewhere.json").exists() and not (run_folder / "audit.json").exists()


def test_a_factory_of_somebody_elses_model_is_audited(audit, tmp_path, monkeypatch):
    (tmp_path / "their_model.py").write_text(
        "import torch, loopscope as ls\n"
        "def build():\n"
        "    net, table = torch.nn.Linear(12, 12), torch.randn(40, 12)\n"
        "    norm = lambda h: torch.nn.functional.rms_norm(h, (12,), eps=1e-6)\n"
        "    return ls.adapt(embed=lambda ids: table[ids].to(net.weight), loop=lambda h, k: h + 0.1 * net(norm(h)),\n"
        "        readout=lambda h, k: norm(h) @ table.to(h).T, num_loops=3, module=net)\n"
        "def nothing():\n"
        "    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = audit("their_model:build")
    assert code == 1 and "scale" in out
    assert audit("their_model:nothing")[2].count("no num_loops, embed, loop, readout") == 1


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nowhere", "nowhere is not a run folder"),
        ("preset:nanno", "did you mean 'nano'"),
        ("missing_module_xyz:build", "cannot import 'missing_module_xyz'"),
        ("json:nothing_there", "has no 'nothing_there'"),
    ],
)
def test_a_target_that_is_none_is_one_sentence_and_exit_code_2(audit, target, sentence):
    code, out, err = audit(target)
    assert (code, out) == (2, "") and sentence in err and "Traceback" not in err


def test_a_hugging_face_folder_without_an_adapter_says_so(audit, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    code, _, err = audit(str(tmp_path))
    assert code == 2 and "model type 'gpt2'" in err and "package.module:factory" in err


@pytest.mark.parametrize("penalty", ["nan", "inf", "-1"])
def test_a_penalty_that_is_no_weight_is_one_sentence_before_anything_is_opened(audit, penalty):
    code, out, err = audit("nowhere", "--norm-penalty", penalty)
    assert code == 2 and not out
    assert err.count("\n") == 1 and f"norm_penalty = {float(penalty)}" in err and "--norm-penalty" in err


@pytest.mark.parametrize("flags", [["--states", "0"], ["--prefix", "1"], ["--supervised", "9"]])
def test_a_wrong_flag_is_named(audit, design, flags):
    code, _, err = audit(design("raw"), *flags)
    assert code == 2 and flags[0].lstrip("-") in err


def test_a_remedy_fine_tunes_into_a_new_folder_and_compares(run_folder, capsys):
    code = main(["remedy", str(run_folder), "--how", "final-only", "--steps", "30"])
    out = capsys.readouterr().out
    assert code == 0 and "outcome: FIXED" in out
    assert "before and after: final-only" in out and "blind-spot" in out and "controlled" in out
    fixed = run_folder.with_name("run-final-only")
    comparison = json.loads((fixed / "remedy.json").read_text())
    assert comparison["before"]["verdict"] == "blind-spot" and comparison["after"]["verdict"] == "controlled"
    assert [row["k"] for row in comparison["after"]["depths"]] == [1, 2, 3]
    assert json.loads((fixed / "audit.json").read_text())["model"]["step"] == 30
    assert not (run_folder / "remedy.json").exists()


def test_a_remedy_that_costs_perplexity_is_not_called_fixed(run_folder, capsys):
    """Three steps through another readout: the verdict is controlled at once, and the exits are ruined."""
    assert main(["remedy", str(run_folder), "--how", "final-only", "--steps", "3"]) == 1
    out = capsys.readouterr().out
    assert "outcome: WORSE" in out and "perplexity at loop" in out and "FIXED" not in out
    comparison = json.loads((run_folder.with_name("run-final-only") / "remedy.json").read_text())
    assert comparison["after"]["verdict"] == "controlled" and comparison["outcome"] == "worse"
    assert len(comparison["reasons"]) == 1 and "got worse" in comparison["reasons"][0]


def test_a_remedy_that_sends_the_norm_up_is_not_called_fixed(run_folder, capsys):
    """Two large steps with a penalty: it is seen now, and has not come down."""
    assert main(["remedy", str(run_folder), "--steps", "2", "--lr", "0.3", "--json"]) == 1
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["after"]["verdict"] == "controlled" and comparison["outcome"] == "worse"
    assert comparison["reasons"][0].startswith("the norm went up: ‖h_3‖ ")


def test_a_remedy_that_diverges_says_so_instead_of_blaming_derivatives(run_folder, capsys):
    assert main(["remedy", str(run_folder), "--steps", "3", "--lr", "1e30"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    error = said.err.splitlines()[-1]
    assert "norm after loop 1 is nan" in error and "try a smaller --lr than 1e+30" in error


def test_the_clamp_needs_no_training(run_folder, capsys):
    assert main(["remedy", str(run_folder), "--how", "clamp", "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    norms = [row["norm"] for row in comparison["after"]["depths"]]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert not (run_folder.with_name("run-clamp") / "checkpoints").exists()


def test_a_remedy_into_the_run_itself_is_refused(run_folder, capsys):
    assert main(["remedy", str(run_folder), "--out", str(run_folder)]) == 2
    assert "choose another --out" in capsys.readouterr().err


def test_a_remedy_changes_the_named_thing_alone():
    config = Config(model=ModelConfig())
    assert remedied(config, "penalty", 5, None).objective.norm_penalty == 0.01
    assert remedied(config, "raw", 5, None).model == ModelConfig(readout="raw")
    assert remedied(config, "inter-loop-norm", 5, 1e-4).model.inter_loop_norm == "rmsnorm"
    assert remedied(config, "inter-loop-norm", 5, 1e-4).training.lr == 1e-4
    assert remedied(config, "penalty", 5, None).model == config.model


def test_a_sparkline_goes_from_low_to_high_and_is_flat_for_equal_numbers():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert len(set(sparkline([5.0, 5.0, 5.001]))) == 1


# --- the push test ---------------------------------------------------------------------------------------------------

PUSH = ["--push", "--push-steps", "4"]


def test_a_push_is_told_in_a_table_with_its_price_and_progress_on_stderr(audit, run_folder):
    code, out, err = audit(str(run_folder), *PUSH)
    assert code == 1
    assert "push test" in out and "nats" in out and "4 steps after 3" in out
    assert "run: push: " in err and "run: push: " not in err.splitlines()[0], "the audit first"


def test_a_push_of_a_run_is_kept_in_its_audit_and_in_the_json(audit, run_folder):
    code, out, _ = audit(str(run_folder), *PUSH, "--json")
    printed, kept = json.loads(out), json.loads((run_folder / "audit.json").read_text())
    assert code == 1 and printed == kept
    assert [push["name"] for push in printed["push"]["pushes"]] == ["scale"]
    assert printed["push"]["recipe"]["lr"] == 0.01, "the run's own"
    assert len(printed["push"]["pushes"][0]["growth_by_step"]) == 4


def test_how_tokens_move_is_told_in_shares_and_kept_in_the_audit(audit, design):
    _, out, _ = audit(design("rmsnorm"), "--motion")
    assert "tokens, by how they move" in out and "Over 64 loops 45 tokens are" in out
    _, out, _ = audit(design("rmsnorm"), "--motion", "--json")
    motion = json.loads(out)["token_motion"]
    assert len(motion["tokens"]) == 45 and sum(motion["shares"].values()) == pytest.approx(1)


def test_a_model_that_ends_with_its_depth_is_audited_and_its_motion_is_missing_with_a_reason(
    audit, tmp_path, monkeypatch
):
    (tmp_path / "ends.py").write_text(
        "import torch, loopscope as ls\n"
        "gain = torch.ones(3, 1)\n"
        "def build():\n"
        "    table = torch.nn.Embedding(32, 8)\n"
        "    return ls.adapt(embed=table, loop=lambda h, k: h + gain[k - 1] * torch.tanh(h), num_loops=3,\n"
        "                    readout=lambda h, k: h @ table.weight.T, module=table)\n"
    )
    monkeypatch.chdir(tmp_path)
    _, out, _ = audit("ends:build", "--motion", "--json")
    result = json.loads(out)
    assert result["token_motion"] is None
    assert any("this model ends after 3: loop 4 fails with IndexError" in note for note in result["checks"]["notes"])


def test_an_audit_without_a_push_says_so(audit, design):
    assert json.loads(audit(design("raw"), "--json")[1])["push"] is None


def test_a_push_takes_the_penalty_that_the_audit_is_told_of(audit, run_folder):
    free, held = (
        json.loads(audit(str(run_folder), "--push", "--push-steps", "40", "--norm-penalty", weight, "--json")[1])[
            "push"
        ]
        for weight in ("0", "10")
    )
    assert held["twin_loss"] > free["twin_loss"]
    assert held["pushes"][0]["growth"] < free["pushes"][0]["growth"]


def test_an_interrupted_push_leaves_the_audit_behind(audit, run_folder, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("loopscope.api.audits.push", interrupted)
    code, out, err = audit(str(run_folder), *PUSH)
    assert code == 130 and not out and "interrupted" in err
    assert json.loads((run_folder / "audit.json").read_text())["push"] is None


def test_a_push_of_no_steps_is_refused(audit, design):
    code, _, err = audit(design("raw"), "--push", "--push-steps", "0")
    assert code == 2 and "--push-steps" in err


def test_without_a_terminal_progress_is_told_once_halfway(capsys):
    with progress("a model") as advance:
        for share in (0.0, 0.3, 0.6, 0.7, 0.9):
            advance("search", share)
    assert capsys.readouterr().err == "loopscope: a model: 60%, search\n"
