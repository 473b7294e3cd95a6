"""One row of a grid or an atlas, as a process of its own: train or resume, evaluate, audit, calibrate, probe.

    python -m loopscope.rows.process FOLDER SPEC WAIT

SPEC is a `RowSpec` as JSON, WAIT the seconds to wait for the row's lock. Each stage that is done is skipped, so the
same command resumes after a crash. Exit codes: 0 finished, 65 failed in a way that a retry would repeat, 75 another
process has the row, 130 interrupted (and saved), anything else a crash. Torch is imported once the row is ours.
Under torchrun the first process does all this, and the others only train with it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from loopscope.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    DataError,
    LoopscopeError,
    RunError,
    UnsupportedError,
)
from loopscope.files import folder_written_whole
from loopscope.machine import limit_cpu_isa
from loopscope.results.atlas import PROBE
from loopscope.results.evaluation import Evaluation
from loopscope.results.halting import CalibratedHalting
from loopscope.results.record import write_record
from loopscope.results.run import ROW_FILE, Logged, LoggedEvent, RowRecord
from loopscope.rows.ledger import (
    EXIT_GIVEN_UP,
    EXIT_TAKEN,
    TRAINED_AUDIT,
    UNTRAINED_AUDIT,
    has_audit,
    has_probe,
    is_calibrated,
    is_complete,
    is_evaluated,
    is_measured,
    row_record,
    told_problems,
)
from loopscope.rows.spec import EXTRA_LOOPS, RowSpec
from loopscope.runs import RunFolder

if TYPE_CHECKING:
    from loopscope.api.training import TrainingResult
    from loopscope.data.packing import SplitTokens
    from loopscope.targets import Opened
    from loopscope.training.trainer import Trainer


def say(message: str) -> None:
    """A line in the row's log."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {message}\n")
    sys.stderr.flush()


def main(folder: str, spec_json: str, wait: str) -> int:
    """Run the row and note in row.json what becomes of it."""
    die_with_parent()
    limit_cpu_isa()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec, run = RowSpec.from_json(spec_json), RunFolder(Path(folder))
    if os.environ.get("RANK", "0") != "0":
        return _train_along(spec, run)
    try:
        with run.locked(wait=float(wait)):  # a process that is just saving and leaving this row gets the time to do so
            return _run_noting(spec, run)
    except RunError as error:  # the lock; what happens under it is noted there
        say(str(error))
        return EXIT_TAKEN


def _run_noting(spec: RowSpec, run: RunFolder) -> int:
    if is_complete(run.path, spec):
        return EXIT_OK
    before = row_record(run.path)
    record = RowRecord(
        name=spec.name,
        condition=spec.condition,
        recipe=spec.recipe,
        text=spec.text,
        seed=spec.seed,
        state="running",
        attempts=before.attempts + 1,
        seconds=dict(before.seconds),
        threads=spec.config.training.threads,
        host=os.uname().nodename,
        pid=os.getpid(),
    )
    say(f"attempt {record.attempts} at {spec.name}")
    try:
        _run_stages(spec, run, record)
    except KeyboardInterrupt:
        say("interrupted")
        write_record(run.path / ROW_FILE, replace(row_record(run.path), state="open"))
        return EXIT_INTERRUPTED
    except LoopscopeError as error:
        say(f"error: {error}")
        write_record(run.path / ROW_FILE, replace(row_record(run.path), state="failed", error=str(error)))
        return EXIT_GIVEN_UP
    write_record(run.path / ROW_FILE, replace(row_record(run.path), stage=None, state="finished"))
    return EXIT_OK


def _train_along(spec: RowSpec, run: RunFolder) -> int:
    """What every process but the first does."""
    if is_complete(run.path, spec):
        return EXIT_OK
    try:
        return EXIT_INTERRUPTED if train_row(spec, run).outcome == "interrupted" else EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except LoopscopeError:  # the first one meets it too, and says so
        return EXIT_GIVEN_UP


class GuardStopError(LoopscopeError):
    """A guard stopped the training; it would do so again."""


def _run_stages(spec: RowSpec, run: RunFolder, record: RowRecord) -> None:
    problems = told_problems(run.path) if spec.probe else {}
    if not is_measured(run.path, spec):  # a row that has been is never trained again, even if its weights are gone
        problems = _train_and_measure(spec, run, record)
    if spec.halting and not is_calibrated(run.path, spec):
        with _stage(run, record, "calibrating"):
            calibrate_row(spec, run)
    if spec.probe:
        with _stage(run, record, "probing"):
            probe_row(spec, run, problems)


def _train_and_measure(spec: RowSpec, run: RunFolder, record: RowRecord) -> dict[str, str]:
    """Up to the audits; gives what could not be audited, where that does not end the row."""
    with _stage(run, record, "training"):
        if not spec.text:
            _copy_tokenizer(run)
        result = train_row(spec, run)
        if result.outcome == "interrupted" or result.was_signalled:
            raise KeyboardInterrupt
        if result.outcome == "stopped":
            raise GuardStopError(result.event or "a guard stopped the training")
    with _stage(run, record, "evaluating"):
        if not is_evaluated(run.path, spec):
            evaluate_row(spec, run)
    if spec.audit:
        with _stage(run, record, "auditing"):
            return audit_row(spec, run)
    return {}


@contextmanager
def _stage(run: RunFolder, record: RowRecord, name: str) -> Iterator[None]:
    """Note the stage, and add its seconds to those of earlier attempts, however it ends."""
    write_record(run.path / ROW_FILE, replace(record, stage=name))
    started = time.perf_counter()
    try:
        yield
    finally:
        record.seconds[name] = round(record.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
        write_record(run.path / ROW_FILE, replace(record, stage=name))


# --- the stages ------------------------------------------------------------------------------------------------------


def train_row(spec: RowSpec, run: RunFolder) -> TrainingResult:
    """As `loopscope.train` does it, in a folder whose lock this process holds."""
    from loopscope.api.training import train_in
    from loopscope.training.distributed import join
    from loopscope.training.session import set_up

    setup = set_up(spec.config.training)
    train = partial(train_in, allow_new_data=True)  # the grid has compared the text; a row may lose its hash
    with join(setup.device) as ranks:
        if not ranks.is_first:
            return train(run, spec.config, setup, ranks)
        return train(run, spec.config, setup, ranks, say=say, watching=_logging)


@contextmanager
def _logging(trainer: Trainer) -> Iterator[None]:
    steps = trainer.config.training.steps
    trainer.listeners = (*trainer.listeners, lambda row: say(_line(row, steps)))
    yield


def evaluate_row(spec: RowSpec, run: RunFolder) -> None:
    """eval.json: scores of every depth up to a few beyond the trained one, on validation and test text.

    With the CE of a unigram model on the same targets: claims about CE wait until the row is clearly below it.
    """
    import torch

    from loopscope.api.evaluation import score_tokens, throughput
    from loopscope.data.stream import unigram_cross_entropy
    from loopscope.targets import open_target, tokens_for
    from loopscope.training.session import set_up

    setup, opened = set_up(spec.config.training), open_target(run.path)
    assert opened.tokenizer is not None, "training gave the row its tokenizer"
    depth, length = spec.config.model.num_loops + EXTRA_LOOPS, spec.config.sequence_length
    splits = dict(_splits(spec, opened))
    train, vocab_size = tokens_for(opened, None, say, split="train"), opened.tokenizer.vocab_size
    result = Evaluation(
        step=spec.config.training.steps,
        tokenizer=opened.tokenizer.kind,
        num_loops=spec.config.model.num_loops,
        splits={
            split: score_tokens(opened.model, tokens, depth, length, max_tokens=spec.eval_tokens)
            for split, tokens in splits.items()
        },
        unigram_ce={
            split: unigram_cross_entropy(train, tokens, vocab_size, spec.eval_tokens)
            for split, tokens in splits.items()
        },
        throughput=throughput(opened.model, opened.vocab_size, length),
        threads=torch.get_num_threads(),
        device=setup.device,
    )
    write_record(run.path / "eval.json", result)


def _splits(spec: RowSpec, opened: Opened) -> Iterator[tuple[str, SplitTokens]]:
    """Validation text, and test text: what was asked for, else the corpus's own or held-out test split, if any."""
    from loopscope.targets import tokens_for

    yield "valid", tokens_for(opened, None, say)
    if spec.test_data is not None:
        yield "test", tokens_for(opened, spec.test_data, say)
        return
    try:
        yield "test", tokens_for(opened, None, say, split="test")
    except DataError as error:
        say(f"no test scores: {error}")


def audit_row(spec: RowSpec, run: RunFolder) -> dict[str, str]:
    """audit.json, and audit-untrained.json of the weights that training began with; a blind spot is a result.

    A design that cannot be audited ends a row of a grid; in an atlas it is told, by `trained` and `untrained`, and the
    rest of it is measured.
    """
    from loopscope.api.audits import audit
    from loopscope.targets import of_config, open_target

    opened = open_target(run.path)
    wanted: list[tuple[str, str, Opened]] = []
    if spec.audit_untrained and not has_audit(run.path / UNTRAINED_AUDIT, None):
        fresh = of_config(opened.name, spec.config, seed=spec.seed)
        wanted.append(("untrained", UNTRAINED_AUDIT, replace(fresh, tokenizer=opened.tokenizer, run=run)))
    if not has_audit(run.path / TRAINED_AUDIT, spec.config.training.steps):
        wanted.append(("trained", TRAINED_AUDIT, opened))
    problems: dict[str, str] = {}
    for which, file, subject in wanted:
        say(f"auditing the {which} weights")
        try:
            write_record(run.path / file, audit(subject, say=say))
        except LoopscopeError as error:
            if not spec.probe:
                raise
            problems[which] = str(error)
            say(f"no audit: {error}")
    return problems


def calibrate_row(spec: RowSpec, run: RunFolder) -> None:
    """halting.json: what a calibrated halting rule saves; a row that cannot tell any more says why."""
    from loopscope.rows.halting import measure_halting
    from loopscope.targets import open_target, tokens_for
    from loopscope.training.checkpoint import list_steps

    steps, loops = spec.config.training.steps, spec.config.model.num_loops
    checkpoints = list_steps(run.checkpoints)
    if not checkpoints or int(checkpoints[-1].name.removeprefix("step-")) != steps:
        gone = f"the checkpoint of step {steps} is gone, and with it what could be calibrated"
        result = CalibratedHalting(step=steps, num_loops=loops, reason=gone)
    else:
        opened = open_target(run.path)
        tokens_for(opened, None, say)  # text that is missing fails the row; text that is short is a result
        try:
            result = measure_halting(opened, steps, say)
        except (ConfigError, DataError, UnsupportedError) as error:
            result = CalibratedHalting(step=steps, num_loops=loops, reason=str(error))
    write_record(run.path / "halting.json", result)


def probe_row(spec: RowSpec, run: RunFolder, problems: dict[str, str]) -> None:
    """probe.json: how tokens move, what the first exit lacks, cache policies and cost; what fails is told in it.

    So are `problems` of its audits.
    """
    from loopscope.rows.probing import probe
    from loopscope.targets import open_target

    if not has_probe(run.path, spec.config.training.steps):
        found = probe(open_target(run.path), say)
        audits = {which: why for which, why in problems.items() if which in ("trained", "untrained")}
        write_record(run.path / PROBE, replace(found, problems={**audits, **found.problems}))


# --- small parts -----------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Be told (SIGTERM) when the process that started us dies: nobody would wait for this row any more. Linux only."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _copy_tokenizer(run: RunFolder) -> None:
    """The tokenizer of the shared text becomes the row's own, whole or not at all."""
    common, own = run.path.parent.parent / "tokenizer", run.path / "tokenizer"
    if common.is_dir() and not own.exists():
        with folder_written_whole(own) as beside:
            shutil.copytree(common, beside, dirs_exist_ok=True)


def _line(row: Logged, steps: int) -> str:
    if isinstance(row, LoggedEvent):
        return row.message
    ce, norm = (" ".join(f"{value:.4g}" for value in values) for values in (row.ce, row.norm))
    return f"{row.kind} step {row.step}/{steps}: CE {ce}, ‖h‖ {norm}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
