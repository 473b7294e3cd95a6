"""The audit as a gate: what it tells other programs, and the hook, the action and the page around it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

import loopscope as ls
from loopscope.cli import main
from loopscope.options import AuditOptions
from loopscope.show.formats import AuditedTarget, exit_code, junit, line_of, lines, sarif

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "pipeline"
BLIND, CONTROLLED = "configs/blind.yaml", "configs/controlled.yaml"
QUICK = ["--states", "1", "--prefix", "4", "--tokens", "32", "--loops", "4"]
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e-?\d+)?")


@pytest.fixture(scope="module")
def audited() -> AuditedTarget:
    """The audit of the blind example, as the verb hands it on."""
    result = ls.audit(EXAMPLE / BLIND, options=AuditOptions(states=1, prefix=4, tokens=32, rollout=4))
    return AuditedTarget(BLIND, result, EXAMPLE / BLIND)


@pytest.fixture
def undecided(audited) -> AuditedTarget:
    variables = [replace(variable, verdict="removed") for variable in audited.result.variables]
    checks = replace(audited.result.checks, doubts=["no loop reads the state yet <&> \x00"])
    return AuditedTarget(
        "their:model", replace(audited.result, verdict="undecided", checks=checks, variables=variables)
    )


@pytest.fixture
def controlled(audited) -> AuditedTarget:
    variables = [replace(variable, verdict="visible") for variable in audited.result.variables]
    return AuditedTarget(
        CONTROLLED, replace(audited.result, verdict="controlled", variables=variables), EXAMPLE / CONTROLLED
    )


MISTAKE = AuditedTarget("nowhere", None, error="nowhere is no target")


@pytest.fixture
def audit(capsys, monkeypatch):
    """Run the verb in the example; gives its exit code and its output."""
    monkeypatch.chdir(EXAMPLE)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["audit", *QUICK, *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


# --- SARIF -----------------------------------------------------------------------------------------------------------


def test_a_blind_variable_is_an_error_at_the_line_of_the_readout(audited, monkeypatch):
    monkeypatch.chdir(EXAMPLE)
    (result,) = sarif([audited])["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": BLIND, "uriBaseId": "%SRCROOT%"}
    assert "readout: rmsnorm" in (EXAMPLE / BLIND).read_text().splitlines()[place["region"]["startLine"] - 1]
    assert (result["ruleId"], result["level"], result["properties"]["variable"]) == ("blind-variable", "error", "scale")
    assert "scale is blind" in result["message"]["text"]
    assert "objective: {norm_penalty: 0.01}" in result["message"]["text"]


def test_an_undecided_audit_is_a_warning_without_a_file(undecided):
    (result,) = sarif([undecided])["runs"][0]["results"]
    assert (result["ruleId"], result["level"]) == ("undecided", "warning")
    assert "physicalLocation" not in result["locations"][0]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == "their:model"


def test_every_result_names_a_rule_that_is_described(audited, undecided, controlled):
    log = sarif([audited, undecided, controlled, MISTAKE])
    assert (log["version"], len(log["runs"])) == ("2.1.0", 1) and log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "loopscope"
    assert len(run["results"]) == 2
    for result in run["results"]:
        rule = rules[result["ruleIndex"]]
        assert rule["id"] == result["ruleId"] and rule["defaultConfiguration"]["level"] == result["level"]
    for rule in rules:
        assert rule["shortDescription"]["text"] and rule["fullDescription"]["text"] and rule["help"]["text"]
        assert rule["helpUri"].startswith("https://")
    json.dumps(log, allow_nan=False)


def test_what_could_not_be_audited_is_a_notification_and_no_success(controlled):
    (failed,) = sarif([controlled, MISTAKE])["runs"][0]["invocations"]
    assert failed["executionSuccessful"] is False and failed["exitCode"] == 2
    assert "nowhere is no target" in failed["toolExecutionNotifications"][0]["message"]["text"]
    (fine,) = sarif([controlled])["runs"][0]["invocations"]
    assert fine == {"executionSuccessful": True, "exitCode": 0, "toolExecutionNotifications": []}


def test_paths_are_escaped_and_outside_the_working_folder_absolute(audited, tmp_path, monkeypatch):
    file = tmp_path / "a folder" / "ä.yaml"
    file.parent.mkdir()
    shutil.copy(EXAMPLE / BLIND, file)

    def uri() -> str:
        (result,) = sarif([replace(audited, file=file)])["runs"][0]["results"]
        return result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]

    monkeypatch.chdir(tmp_path)
    assert uri() == "a%20folder/%C3%A4.yaml"
    monkeypatch.chdir(EXAMPLE)
    assert uri().startswith("file:///") and uri().endswith("/a%20folder/%C3%A4.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# a comment\nmodel:\n  width: 8\n  readout: raw\n", 4),
        ("model: {width: 8,\n  readout: raw}\n", 2),
        ("objective:\n  readout: 3\nmodel:\n  width: 8\n", 3),
        ("objective: {placement: per-loop}\n", 1),
        ("", 1),
        ("[", 1),
        ("- a\n- b\n", 1),
    ],
)
def test_the_line_is_that_of_the_first_setting_a_file_has(tmp_path, text, line):
    (tmp_path / "config.yaml").write_text(text)
    assert line_of(tmp_path / "config.yaml", [("model", "readout"), ("model",)]) == line


# --- JUnit and lines -------------------------------------------------------------------------------------------------


def test_every_variable_is_a_test_case_and_what_is_blind_has_failed(audited, controlled):
    root = ElementTree.fromstring(junit([audited, controlled]))
    assert [suite.get("name") for suite in root] == [BLIND, CONTROLLED]
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "1", "0")
    scale, mean = root[0].findall("testcase")
    assert (scale.get("name"), mean.get("name"), mean.find("failure")) == ("scale", "mean", None)
    failure = scale.find("failure")
    assert failure.get("type") == "blind-variable" and "norm_penalty: 0.01" in failure.text
    assert root[1].get("failures") == "0" and root[1].find(".//failure") is None


def test_what_xml_cannot_hold_is_escaped_or_replaced(undecided):
    root = ElementTree.fromstring(junit([undecided, replace(MISTAKE, target='a<b>&"c"', error="\x1b[31mred")]))
    assert root.find(".//testcase[@name='verdict']/failure").text == ("Undecided: no loop reads the state yet <&> �.")
    assert root[1].get("name") == 'a<b>&"c"' and root[1].find(".//error").text == "�[31mred"
    assert (root.get("failures"), root.get("errors")) == ("1", "1")


def test_the_lines_count_what_was_audited_and_what_was_not(audited, controlled):
    *_, last = lines([audited, controlled, MISTAKE])
    assert last == "3 targets: 1 blind-spot, 1 controlled, 1 not audited"


def test_a_mistake_outranks_a_finding_and_a_finding_a_clean_audit(audited, undecided, controlled):
    assert exit_code([controlled, controlled]) == 0
    assert exit_code([controlled, undecided]) == exit_code([audited]) == 1
    assert exit_code([audited, MISTAKE]) == exit_code([MISTAKE]) == 2


# --- the verb --------------------------------------------------------------------------------------------------------


def test_with_out_the_document_goes_to_the_file_and_the_lines_to_the_log(audit, tmp_path):
    code, out, _ = audit(BLIND, CONTROLLED, "--format", "sarif", "-o", str(tmp_path / "new" / "log.sarif"))
    assert code == 1 and out.startswith(f"{BLIND}:9: error: scale is blind")
    log = json.loads((tmp_path / "new" / "log.sarif").read_text())
    assert [result["properties"]["target"] for result in log["runs"][0]["results"]] == [BLIND]
    files = [artifact["location"]["uri"] for artifact in log["runs"][0]["artifacts"]]
    assert files == [BLIND, CONTROLLED]


def test_one_wrong_file_does_not_hide_what_is_said_of_the_others(audit, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model: {widht: 3}\n")
    code, out, err = audit(str(wrong), BLIND, "--json")
    assert code == 2 and "did you mean 'width'" in err and "Traceback" not in err
    found = json.loads(out)
    assert [one["model"]["name"] for one in found["audits"]] == [BLIND] and found["schema_version"] == 1
    (mistake,) = found["errors"]
    assert mistake["target"] == str(wrong) and "widht" in mistake["message"]


def test_a_document_is_printed_even_of_a_single_target_that_is_wrong(audit):
    code, out, _ = audit("nowhere", "--format", "junit")
    assert code == 2 and ElementTree.fromstring(out).get("errors") == "1"


def test_the_short_form_is_the_format(audit):
    _, short, _ = audit(BLIND, "--json")
    _, long, _ = audit(BLIND, "--format", "json")
    assert {**json.loads(short), "cost": None} == {**json.loads(long), "cost": None}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([BLIND, "--json", "--format", "sarif"], "choose one"),
        ([], "name at least one target"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(audit, arguments, sentence):
    code, out, err = audit(*arguments)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1


# --- the hook, the action, the page ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment whose `loopscope` is this one."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "loopscope").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m loopscope "$@"\n')
    (folder / "loopscope").chmod(0o755)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}


def hook() -> dict:
    (found,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    return found


def step(name: str) -> dict:
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    return next(step for step in steps if step.get("name") == name)


def page_block(after: str) -> str:
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8").split(after)[1]
    return re.search(r"^```\w*\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(scope="module")
def hook_run(environment) -> subprocess.CompletedProcess:
    """What pre-commit does: the hook's entry, with the files that the example's pattern matches."""
    (repo,) = yaml.safe_load((EXAMPLE / ".pre-commit-config.yaml").read_text())["repos"]
    (used,) = repo["hooks"]
    assert used["id"] == hook()["id"]
    files = sorted(str(path.relative_to(EXAMPLE)) for path in EXAMPLE.rglob("*") if path.is_file())
    chosen = [file for file in files if re.search(used["files"], file)]
    command = [*shlex.split(hook()["entry"]), *chosen]
    return subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=240)


def test_the_hook_fails_on_the_blind_example(hook_run):
    assert hook_run.returncode == 1, hook_run.stderr
    assert f"{BLIND}:9: error: scale is blind" in hook_run.stdout
    assert f"{CONTROLLED}: controlled" in hook_run.stdout


def test_the_page_shows_what_the_hook_prints(hook_run):
    """Word for word; its numbers up to what another processor rounds differently."""
    shown, printed = page_block("a line for every finding"), hook_run.stdout
    assert NUMBER.sub("#", shown) == NUMBER.sub("#", printed)
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    assert all(float(ours) == pytest.approx(float(theirs), rel=0.5, abs=0.05) for ours, theirs in pairs)


def test_the_page_shows_the_files_of_the_example():
    assert page_block("## As a pre-commit hook") == (EXAMPLE / ".pre-commit-config.yaml").read_text()
    assert page_block("## As a GitHub Action") == (EXAMPLE / ".github" / "workflows" / "audit.yml").read_text()


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        ("loopscope/small.yaml", True),
        ("models/loopscope/small.yml", True),
        ("small.loopscope.yaml", True),
        ("docker-compose.yaml", False),
        ("loopscope/notes.txt", False),
        (".pre-commit-config.yaml", False),
    ],
)
def test_the_hook_by_itself_leaves_other_peoples_yaml_alone(path, is_ours):
    assert bool(re.search(hook()["files"], path)) is is_ours


def run_audit_step(environment, folder: Path, **inputs: str) -> subprocess.CompletedProcess:
    given = {"FILES": "", "ARGUMENTS": " ".join(QUICK), "SARIF": "loopscope.sarif", **inputs}
    assert step("Audit")["env"].keys() == given.keys()
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step("Audit")["run"]]
    environment = {**environment, **given}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def test_the_action_fails_the_pull_request_and_leaves_a_log(environment, tmp_path):
    shutil.copytree(EXAMPLE / "configs", tmp_path / "configs")
    ran = run_audit_step(environment, tmp_path, FILES="configs/*.yaml")
    assert ran.returncode == 1 and f"{BLIND}:9: error" in ran.stdout, ran.stderr
    (run,) = json.loads((tmp_path / "loopscope.sarif").read_text())["runs"]
    assert [result["properties"]["target"] for result in run["results"]] == [BLIND]


def test_the_action_says_when_no_file_matches(environment, tmp_path):
    ran = run_audit_step(environment, tmp_path, FILES="configs/*.yaml")
    assert ran.returncode == 2 and "no file matches: configs/*.yaml" in ran.stdout


def test_the_action_never_runs_its_inputs(environment, tmp_path):
    ran = run_audit_step(environment, tmp_path, FILES='$(touch x);`touch y`";touch z"', SARIF="a b.sarif")
    assert ran.returncode == 2
    assert not {"x", "y", "z"} & {path.name for path in tmp_path.iterdir()}


def test_no_step_of_the_action_has_inputs_inside_its_commands():
    steps = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    assert all("${{" not in step.get("run", "") for step in steps)


def test_the_page_lists_every_input_of_the_action():
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    for name in yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]:
        assert f"| `{name}` |" in page
