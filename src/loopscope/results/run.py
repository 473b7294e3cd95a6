"""The files of a run folder that say how it went: row.json, manifest.json, and the lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from loopscope.files import MOST_METRICS_BYTES, Problems, lines_of
from loopscope.results.record import Choice, Count, MisfitError, Record, Text, Whole, decode, encode

ROW_FILE, MANIFEST_FILE, METRICS_FILE = "row.json", "manifest.json", "metrics.jsonl"

RowState = Literal["open", "running", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord(Record):
    """row.json: what has become of a row of a grid or an atlas."""

    name: Text = ""
    condition: Text = ""
    recipe: Text = ""
    text: Text = ""
    """What it is trained on, where that is not the text that the rows of its folder share."""
    seed: Whole | None = None
    state: RowState | None = None
    stage: Text | None = None
    attempts: Count = 0
    seconds: dict[Text, float] = field(default_factory=dict)
    """By stage, over all attempts."""
    error: str | None = None
    threads: Count | None = None
    host: Text | None = None
    pid: Count | None = None


# --- manifest.json ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSizes:
    """Tokens or bytes of a corpus; a task's training text has no end."""

    train: Count | None
    valid: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierText:
    """Text that a run left behind under --allow-new-data."""

    corpus: Text
    corpus_sha256: Text
    until_step: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """The text that a run is trained on."""

    corpus: Text
    corpus_sha256: Text
    tokenizer: Text
    tokenizer_sha256: Text
    tokens: SplitSizes | None = None
    bytes: SplitSizes | None = None
    earlier: list[EarlierText] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The commit that a command was given in, and whether there were changes."""

    commit: Text
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """manifest.json: what a reader of a run needs to know besides its configuration."""

    converted_from: Text | None = None
    """Where `loopscope convert` had it from; nothing but command, versions and data is known then."""
    command: list[str] = field(default_factory=list)
    versions: dict[Text, Text | None] = field(default_factory=dict)
    git: GitState | None = None
    system: Text = ""
    threads: Count | None = None
    world_size: Count | None = None
    seed: Whole | None = None
    parameters: Count | None = None
    choices: list[Choice] = field(default_factory=list)
    data: DataRecord | None = None

    def choice(self, name: str) -> str | int | float | bool | None:
        """What was chosen automatically under that name."""
        return next((choice.value for choice in self.choices if choice.name == name), None)


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A training step; lists have a value for each loop."""

    kind: Literal["train"] = "train"
    step: Count
    loss: float | None = None
    ce: list[float | None] = field(default_factory=list)
    """Of the supervised loops."""
    loops: list[Count] = field(default_factory=list)
    """The supervised loops."""
    norm: list[float | None] = field(default_factory=list)
    """Mean ‖h_k‖ of every loop."""
    radial_gradient_share: list[float | None] = field(default_factory=list)
    """Of the supervised loops."""
    terms: dict[Text, float | None] = field(default_factory=dict)
    """Loss terms besides cross-entropy."""
    tenfold_charge: float | None = None
    """Nats per token that ten times the scale would cost."""
    depth: Count | None = None
    gradient_norm: float | None = None
    lr: float | None = None
    tokens_per_second: float | None = None

    @property
    def final_norm(self) -> float | None:
        """‖h_K‖."""
        return self.norm[-1] if self.norm else None

    @property
    def largest_share(self) -> float | None:
        """The largest radial gradient share of the supervised loops."""
        return max((share for share in self.radial_gradient_share if share is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvaluation:
    """Validation text after each loop, while training."""

    kind: Literal["eval"] = "eval"
    step: Count
    ce: list[float | None]
    norm: list[float | None]

    @property
    def final_norm(self) -> float | None:
        """‖h_K‖."""
        return self.norm[-1] if self.norm else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """Something that a guard or a monitor did or said."""

    kind: Literal["event"] = "event"
    step: Count
    event: Text
    message: Text


Logged = LoggedStep | LoggedEvaluation | LoggedEvent
KINDS: dict[str, type[Logged]] = {"train": LoggedStep, "eval": LoggedEvaluation, "event": LoggedEvent}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What every line of metrics begins with."""

    kind: str
    step: Count


def line_of(row: Logged) -> bytes:
    """A row as metrics.jsonl holds it."""
    return encode(row) + b"\n"


def decode_line(line: bytes) -> Logged | None:
    """The row in a line; None for one of a kind that this version does not know."""
    kind = KINDS.get(decode(line, _Head).kind)
    return None if kind is None else decode(line, kind)


def step_of(line: bytes) -> int | None:
    """The step that a line is about; None where nobody can tell."""
    try:
        return decode(line, _Head).step
    except MisfitError:
        return None


def read_metrics(path: Path, problems: Problems) -> list[Logged]:
    """All rows; a last line without an end is still being written."""
    rows = []
    for number, line in enumerate(lines_of(path, MOST_METRICS_BYTES, problems), start=1):
        try:
            row = decode_line(line)
        except MisfitError as error:
            if line.endswith(b"\n"):
                problems[path.name] = f"{error} (line {number}); it is left out"
                return []
            continue
        if row is not None:
            rows.append(row)
    return rows


def last_step(lines: Iterator[bytes]) -> LoggedStep | None:
    """The first of some lines that is about a training step, whatever the others are."""
    for line in lines:
        try:
            if isinstance(row := decode_line(line), LoggedStep):
                return row
        except MisfitError:
            continue
    return None
