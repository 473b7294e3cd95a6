"""One row of a grid, as a process of its own: train or go on training, evaluate, audit.

    python -m loopscope.experiments.row FOLDER SPEC WAIT

SPEC is a `RowSpec` as JSON, WAIT the seconds to wait for the row's lock. Each stage that is done is skipped, so the
same command goes on after a crash. Exit codes: 0 finished, 65 failed in a way that a retry would repeat, 75 another
process has the row, 130 interrupted (and saved), anything else a crash. Torch is imported once the row is ours.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopscope.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, DataError, LoopscopeError, RunError
from loopscope.experiments.grid import EXTRA_LOOPS, RowSpec
from loopscope.experiments.ledger import (
    EXIT_GIVEN_UP,
    EXIT_TAKEN,
    is_audited,
    is_complete,
    is_evaluated,
    read_record,
    write_record,
)
from loopscope.readings import RowRecord
from loopscope.runs import RunFolder, folder_written_whole, write_json
from loopscope.scores import Depth, Evaluation, Split

if TYPE_CHECKING:
    from torch import Tensor

    from loopscope.data.packing import PackedTokens
    from loopscope.data.tokenizers import Tokenizer
    from loopscope.model.looped_lm import LoopedLM
    from loopscope.training.trainer import Outcome, Trainer

BATCH = 16
"""Sequences evaluated at a time."""
TIMED_ROUNDS = 7
"""Batches per depth whose median time gives the throughput."""


def say(message: str) -> None:
    """A line in the row's log."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {message}\n")
    sys.stderr.flush()


def main(folder: str, spec_json: str, wait: str) -> int:
    """Run the row and note in row.json what becomes of it."""
    die_with_parent()
    signal.signal(signal.SIGTERM, _interrupt)
    spec, run = RowSpec.from_json(spec_json), RunFolder(Path(folder))
    try:
        with run.locked(wait=float(wait)):  # a process that is just saving and leaving this row gets the time to do so
            return _run_noting(spec, run)
    except RunError as error:  # the lock; what happens under it is noted there
        say(str(error))
        return EXIT_TAKEN


def _run_noting(spec: RowSpec, run: RunFolder) -> int:
    if is_complete(run.path, spec):
        return EXIT_OK
    before = read_record(run.path)
    record = RowRecord(
        name=spec.name,
        condition=spec.condition,
        recipe=spec.recipe,
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
        write_record(run.path, replace(read_record(run.path), state="open"))
        return EXIT_INTERRUPTED
    except LoopscopeError as error:
        say(f"error: {error}")
        write_record(run.path, replace(read_record(run.path), state="failed", error=str(error)))
        return EXIT_GIVEN_UP
    write_record(run.path, replace(read_record(run.path), stage=None, state="finished"))
    return EXIT_OK


class GuardStopError(LoopscopeError):
    """A guard stopped the training; it would do so again."""


def _run_stages(spec: RowSpec, run: RunFolder, record: RowRecord) -> None:
    with _stage(run, record, "training"):
        _copy_tokenizer(run)
        outcome = train_row(spec, run)
        if outcome == "interrupted":
            raise KeyboardInterrupt
        if outcome == "stopped":
            raise GuardStopError(next(row["message"] for row in reversed(run.read_metrics()) if row["kind"] == "event"))
    with _stage(run, record, "evaluating"):
        if not is_evaluated(run.path, spec):
            evaluate_row(spec, run)
    if spec.audit:
        with _stage(run, record, "auditing"):
            if not is_audited(run.path, spec):
                audit_row(run.path)


@contextmanager
def _stage(run: RunFolder, record: RowRecord, name: str) -> Iterator[None]:
    """Note the stage, and add its seconds to those of earlier attempts, however it ends."""
    write_record(run.path, replace(record, stage=name))
    started = time.perf_counter()
    try:
        yield
    finally:
        record.seconds[name] = round(record.seconds.get(name, 0.0) + time.perf_counter() - started, 3)
        write_record(run.path, replace(record, stage=name))


# --- the stages ------------------------------------------------------------------------------------------------------


def train_row(spec: RowSpec, run: RunFolder) -> Outcome:
    """As `loopscope train --resume auto` does it, in a run folder that looks the same."""
    from loopscope.data.prepare import prepare
    from loopscope.training.distributed import join
    from loopscope.training.session import check_resume, find_checkpoint, manifest, set_up
    from loopscope.training.track import make_trackers

    config = spec.config
    setup = set_up(config)
    if run.config_path.exists():
        check_resume(run, config)
    data = prepare(config, run.path / "tokenizer", say)
    with join(setup.device) as ranks:
        trainer = _make_trainer(spec, run, data, ranks, setup)
        if (found := find_checkpoint(run, "auto", say)) is not None:
            trainer.restore(found)
            run.forget_metrics_after(found.step)
            say(f"resumed at step {found.step}")
        run.create(config)
        run.write_manifest(manifest(config, setup, data.manifest(), trainer))
        trainer.listeners = (*make_trackers(config, run.path), lambda row: say(_line(row, config.training.steps)))
        outcome = trainer.train()
        return "interrupted" if trainer.was_signalled else outcome


def _make_trainer(spec: RowSpec, run: RunFolder, data: Any, ranks: Any, setup: Any) -> Trainer:
    from loopscope.data.stream import TrainingStream, evaluation_batches
    from loopscope.training.trainer import Trainer

    config, training, length = spec.config, spec.config.training, spec.config.sequence_length
    stream = TrainingStream(data.train, length, config.data.stride or length, training.batch, training.seed)
    micro = max(1, training.batch // training.accumulate)

    def valid() -> Iterator[tuple[Tensor, Tensor]]:
        return evaluation_batches(data.valid, length, micro, training.eval_tokens)

    trainer = Trainer(config, run, stream, valid, ranks=ranks, autocast=setup.autocast)
    if any(choice.name == "compile" and choice.value for choice in setup.choices):
        trainer.model.recurrence.core.compile()
    return trainer


def evaluate_row(spec: RowSpec, run: RunFolder) -> None:
    """eval.json: scores of every depth up to a few beyond the trained one, on validation and test text."""
    import torch

    from loopscope.data.tokenizers import load_tokenizer
    from loopscope.training.session import load, set_up

    device = set_up(spec.config).device
    tokenizer = load_tokenizer(run.path / "tokenizer")
    model = load(run.path).to(device)
    with torch.no_grad():
        splits = {split: _scores(spec, model, tokens, device) for split, tokens in _splits(spec, tokenizer)}
        throughput = _throughput(model, spec.config.model.num_loops, spec.config.sequence_length, device)
    result = Evaluation(
        step=spec.config.training.steps,
        tokenizer=tokenizer.kind,
        num_loops=spec.config.model.num_loops,
        splits=splits,
        throughput=throughput,
        threads=torch.get_num_threads(),
        device=device,
    )
    write_json(run.path / "eval.json", result.to_json())


def _splits(spec: RowSpec, tokenizer: Tokenizer) -> Iterator[tuple[str, PackedTokens]]:
    """Validation text, and test text: what was asked for, else the corpus's own or held-out test split, if any."""
    from loopscope.data.corpora import open_corpus
    from loopscope.data.prepare import evaluation_tokens, pack_split

    corpus = open_corpus(spec.config.data)
    yield "valid", pack_split(corpus, "valid", tokenizer, say)
    if spec.test_data is not None:
        yield "test", evaluation_tokens(spec.test_data, spec.config.data.text_field, tokenizer, say)
        return
    try:
        yield "test", pack_split(corpus, "test", tokenizer, say)
    except DataError as error:
        say(f"no test scores: {error}")


def _scores(spec: RowSpec, model: LoopedLM, tokens: PackedTokens, device: str) -> Split:
    from loopscope.data.stream import covered_bytes, evaluation_batches
    from loopscope.training.evaluate import evaluate_depths, score_batch

    def score(ids_BT: Tensor, targets_BT: Tensor, num_loops: int) -> Any:
        return score_batch(model, ids_BT.to(device), targets_BT.to(device), num_loops)

    batches = evaluation_batches(tokens, spec.config.sequence_length, BATCH, spec.eval_tokens)
    scores = evaluate_depths(score, batches, spec.config.model.num_loops + EXTRA_LOOPS)
    num_bytes = covered_bytes(tokens, spec.eval_tokens)
    depths = [Depth(each.k, each.ce, each.norm, each.bits_per_byte(num_bytes)) for each in scores]
    return Split(depths, scores[0].tokens, num_bytes)


def _throughput(model: LoopedLM, num_loops: int, length: int, device: str) -> dict[int, float]:
    """Tokens per second of running k loops and reading out once: median of rounds in which all depths take turns."""
    import torch

    from loopscope.protocol import readout, run_loops

    ids_BT = torch.randint(model.config.vocab_size, (BATCH, length), device=device)
    seconds: dict[int, list[float]] = {k: [] for k in range(1, num_loops + 1)}
    for _ in range(1 + TIMED_ROUNDS):  # the first warms up
        for k, times in seconds.items():
            started = time.perf_counter()
            readout(model, run_loops(model, ids_BT, num_loops=k).states[k], k)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return {k: ids_BT.numel() / statistics.median(times[1:]) for k, times in seconds.items()}


def audit_row(folder: Path) -> None:
    """audit.json, by `loopscope audit` as a process of its own; a blind spot (exit code 1) is a result."""
    started = time.time()
    code = subprocess.run([sys.executable, "-m", "loopscope", "audit", str(folder)], stdout=sys.stderr).returncode
    path = folder / "audit.json"
    if code not in (EXIT_OK, EXIT_FINDINGS) or not path.exists() or path.stat().st_mtime < started - 1:
        raise AuditError(f"the audit of {folder} ended with exit code {code} and left no audit.json")


class AuditError(Exception):
    """Not a LoopscopeError: worth another attempt."""


# --- small parts -----------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Be told (SIGTERM) when the process that started us dies: nobody would wait for this row any more. Linux only."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _copy_tokenizer(run: RunFolder) -> None:
    """The grid's tokenizer becomes the row's own, whole or not at all."""
    common, own = run.path.parent.parent / "tokenizer", run.path / "tokenizer"
    if common.is_dir() and not own.exists():
        with folder_written_whole(own) as beside:
            shutil.copytree(common, beside, dirs_exist_ok=True)


def _line(row: dict[str, Any], steps: int) -> str:
    if row["kind"] == "event":
        return str(row["message"])
    ce, norm = (" ".join(f"{value:.4g}" for value in row[name]) for name in ("ce", "norm"))
    return f"{row['kind']} step {row['step']}/{steps}: CE {ce}, ‖h‖ {norm}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
