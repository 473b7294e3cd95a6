"""Audits as other programs read them: SARIF 2.1.0 for code scanning, JUnit XML for test reports; lines for people.

A finding is one blind variable, or an audit that could not decide. Where the target is a configuration file or a run
folder, it is placed at the line of the setting that would change it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.etree import ElementTree

import yaml

from loopscope.config import ModelConfig, ObjectiveConfig
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE
from loopscope.files import MOST_YAML_BYTES, parse_yaml, read_text, without_nan
from loopscope.machine import own_version
from loopscope.show import sentences

if TYPE_CHECKING:
    from loopscope.results.audit import AuditResult, Variable

SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PAPER = "https://arxiv.org/abs/2606.24898"
NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, escaped or not."""


@dataclass(frozen=True)
class SarifRule:
    """A kind of finding."""

    id: str
    name: str
    level: str
    short: str
    full: str
    help: str


RULES = (
    SarifRule(
        id="blind-variable",
        name="BlindVariable",
        level="error",
        short="The loop carries a variable of the state that no loss sees",
        full="The variable can run tenfold or more before the objective notices by 1 % of perplexity, and the loop "
        "carries it on: training can move it, depth carries it, and nothing answers for it.",
        help="Let a loss see the variable (a norm penalty; a raw or final-only readout) or take it out of the loop (an "
        "inter-loop norm). `loopscope audit FILE` shows the evidence in full; docs/audit.md explains every verdict.",
    ),
    SarifRule(
        id="undecided",
        name="Undecided",
        level="warning",
        short="No blind spot was found, and none can be ruled out",
        full="The audit found nothing blind, but something keeps it from an all-clear: no loop reads the state yet, or "
        "the arithmetic is too coarse.",
        help="The message says what is in the way. A design whose loops do not read the state yet can be audited after "
        "some steps of training; docs/audit.md has the cases.",
    ),
)
BLIND, UNDECIDED = RULES
WHOLE = "verdict"
"""What a finding about an audit as a whole is called."""


@dataclass(frozen=True)
class Place:
    """Where something is written, lines from 1."""

    path: Path
    line: int

    @property
    def location(self) -> dict[str, Any]:
        """A SARIF artifactLocation: relative to the working folder where the file is inside it."""
        path = self.path.resolve()
        if path.is_relative_to(Path.cwd()):
            return {"uri": quote(path.relative_to(Path.cwd()).as_posix()), "uriBaseId": "%SRCROOT%"}
        return {"uri": path.as_uri()}


@dataclass(frozen=True)
class Finding:
    """Something that fails the gate."""

    rule: SarifRule
    name: str
    """The variable, or WHOLE."""
    evidence: str
    remedy: str | None
    place: Place | None
    free_range: float | None = None

    @property
    def said(self) -> str:
        """What was found."""
        return self.evidence if self.name == WHOLE else f"{self.name} is blind: {self.evidence}"

    @property
    def message(self) -> str:
        """The same with the remedy."""
        return self.said if self.remedy is None else f"{self.said}. Remedy: {self.remedy}"


@dataclass(frozen=True)
class AuditedTarget:
    """A target with its audit, or with the mistake that kept it from being audited."""

    target: str
    result: AuditResult | None
    file: Path | None = None
    """The configuration file behind the target, where it has one."""
    error: str = ""
    is_finite: bool = True
    """False where no mistake but the model kept it from being audited: its states are not finite."""

    def findings(self) -> list[Finding]:
        """Every blind variable; of an audit that fails without one, the verdict itself."""
        if self.result is None or self.result.verdict == "controlled":
            return []
        blind = [variable for variable in self.result.variables if variable.verdict == "blind"]
        if blind:
            return [self._blind(variable) for variable in blind]
        rule = UNDECIDED if self.result.verdict == "undecided" else BLIND
        return [Finding(rule, WHOLE, sentences.summary(self.result), None, self._place(("model",)))]

    def _blind(self, variable: Variable) -> Finding:
        remedy = sentences.remedy(variable)
        assert remedy is not None  # of what is blind there is one
        text, setting = remedy.text, _setting(remedy.flag)
        keys = [("model", "readout"), ("model",), ("objective",)]
        if setting is not None:
            keys.insert(1, setting.key)
        if remedy.flag is not None:
            text += f"; for instance {remedy.flag if setting is None or self.file is None else setting}"
        return Finding(
            BLIND, variable.name, sentences.evidence(variable), text, self._place(*keys), variable.free_range
        )

    def _place(self, *keys: tuple[str, ...]) -> Place | None:
        return None if self.file is None else Place(self.file, line_of(self.file, keys))


def exit_code(audits: Sequence[AuditedTarget]) -> int:
    """2 when a target could not be audited, since nothing is known of it; else 1 on any finding, else 0.

    A model that is not finite is a finding.
    """
    if any(one.result is None and one.is_finite for one in audits):
        return EXIT_USAGE
    return EXIT_FINDINGS if any(one.findings() or not one.is_finite for one in audits) else EXIT_OK


# --- where a setting is written --------------------------------------------------------------------------------------


def line_of(path: Path, keys: Sequence[tuple[str, ...]]) -> int:
    """The line of the first of these settings, as ("model", "readout"), that a YAML file has; else its first line."""
    try:
        text = read_text(path, MOST_YAML_BYTES)
        parse_yaml(text)  # refuses what would take without end
        root = yaml.compose(text, yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return 1
    lines = [line for line in (_line_in(root, key) for key in keys) if line is not None]
    return lines[0] if lines else 1


def _line_in(node: yaml.Node | None, key: tuple[str, ...]) -> int | None:
    line = None
    for name in key:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((name_node, value) for name_node, value in pairs if name_node.value == name), None)
        if found is None:
            return None
        line, node = found[0].start_mark.line + 1, found[1]
    return line


@dataclass(frozen=True)
class PlacedSetting:
    """A field of a configuration with a value."""

    key: tuple[str, ...]
    value: str

    def __str__(self) -> str:
        section, name = self.key
        return f"{section}: {{{name}: {self.value}}}"


def _setting(flag: str | None) -> PlacedSetting | None:
    """`--norm-penalty 0.01` as a configuration has it: objective: {norm_penalty: 0.01}."""
    typed, _, value = (flag or "").partition(" ")
    name = typed.removeprefix("--").replace("-", "_")
    for section, config in (("model", ModelConfig), ("objective", ObjectiveConfig)):
        if any(field.name == name for field in dataclasses.fields(config)):
            return PlacedSetting((section, name), value)
    return None


# --- lines -----------------------------------------------------------------------------------------------------------


def lines(audits: Sequence[AuditedTarget]) -> Iterator[str]:
    """A line for every finding with its file and line, as compilers print them, and a count."""
    for one in audits:
        for finding in one.findings():
            where = one.target if finding.place is None else f"{one.file}:{finding.place.line}"
            yield f"{where}: {finding.rule.level}: {finding.said}"
            if finding.remedy is not None:
                yield f"  remedy: {finding.remedy}"
        if one.result is not None and not one.findings():
            yield f"{one.target}: {one.result.verdict}: {sentences.summary(one.result)}"
    counts = Counter("not audited" if one.result is None else one.result.verdict for one in audits)
    yield f"{len(audits)} targets: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"


# --- SARIF -----------------------------------------------------------------------------------------------------------


def sarif(audits: Sequence[AuditedTarget]) -> dict[str, Any]:
    """One SARIF 2.1.0 log with one run: a result for each finding, a notification for each target that failed."""
    driver = {"name": "loopscope", "version": own_version(), "informationUri": PAPER, "rules": _rules()}
    mistakes = [
        {"level": "error", "message": {"text": f"{one.target}: {one.error}"}} for one in audits if one.result is None
    ]
    invocation = {
        "executionSuccessful": not mistakes,
        "exitCode": exit_code(audits),
        "toolExecutionNotifications": mistakes,
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "artifacts": [{"location": Place(one.file, 1).location} for one in audits if one.file is not None],
        "results": [_result(one, finding) for one in audits for finding in one.findings()],
        "columnKind": "unicodeCodePoints",
    }
    return without_nan({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]})


def _rules() -> list[dict[str, Any]]:
    return [
        {
            "id": rule.id,
            "name": rule.name,
            "shortDescription": {"text": rule.short},
            "fullDescription": {"text": rule.full},
            "help": {"text": rule.help, "markdown": rule.help},
            "helpUri": PAPER,
            "defaultConfiguration": {"level": rule.level},
        }
        for rule in RULES
    ]


def _result(audited: AuditedTarget, finding: Finding) -> dict[str, Any]:
    location: dict[str, Any] = {"logicalLocations": [{"name": finding.name, "fullyQualifiedName": audited.target}]}
    if finding.place is not None:
        region = {"startLine": finding.place.line}
        location["physicalLocation"] = {"artifactLocation": finding.place.location, "region": region}
    return {
        "ruleId": finding.rule.id,
        "ruleIndex": RULES.index(finding.rule),
        "level": finding.rule.level,
        "message": {"text": finding.message},
        "locations": [location],
        "properties": {"target": audited.target, "variable": finding.name, "free_range": finding.free_range},
    }


# --- JUnit -----------------------------------------------------------------------------------------------------------


def junit(audits: Sequence[AuditedTarget]) -> str:
    """A test suite for each target, a test case for each variable of its state; what is blind has failed."""
    root = ElementTree.Element("testsuites", name="loopscope audit")
    for one in audits:
        _suite(root, one)
    for count in ("tests", "failures", "errors"):
        root.set(count, str(sum(int(suite.attrib[count]) for suite in root)))
    for element in root.iter():
        element.attrib.update({name: NOT_XML.sub("�", value) for name, value in element.attrib.items()})
        element.text = element.text and NOT_XML.sub("�", element.text)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _suite(root: ElementTree.Element, one: AuditedTarget) -> None:
    findings = {finding.name: finding for finding in one.findings()}
    seconds = 0.0 if one.result is None else one.result.cost.seconds
    suite = ElementTree.SubElement(root, "testsuite", name=one.target, time=f"{seconds:.3f}")
    variables = [] if one.result is None else [variable.name for variable in one.result.variables]
    names = ["audit"] if one.result is None else list(dict.fromkeys([*variables, *findings]))
    counts = {"tests": len(names), "failures": len(findings), "errors": int(one.result is None), "skipped": 0}
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    for name in names:
        case = ElementTree.SubElement(suite, "testcase", classname=one.target, name=name)
        if one.result is None:
            ElementTree.SubElement(case, "error", type="not-audited", message=one.error).text = one.error
        if (finding := findings.get(name)) is not None:
            if finding.place is not None:
                case.attrib.update({"file": str(finding.place.path), "line": str(finding.place.line)})
            failure = ElementTree.SubElement(case, "failure", type=finding.rule.id, message=finding.rule.short)
            failure.text = finding.message
    if one.result is not None:
        ElementTree.SubElement(suite, "system-out").text = f"{one.result.verdict}: {sentences.summary(one.result)}"
