"""The ledger and the schedule: what counts as done, whose a row is, what is tried again, and what Ctrl-C does."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from made_up import (
    NUMBERS,
    event_row,
    made_up_audit,
    made_up_eval,
    made_up_halting,
    row_config,
    sample_manifest,
    train_row,
)

from loopscope.errors import EXIT_INTERRUPTED, RunError
from loopscope.files import write_json
from loopscope.results.record import write_record
from loopscope.results.run import RowRecord
from loopscope.rows import schedule as schedule_module
from loopscope.rows.ledger import EXIT_GIVEN_UP, EXIT_TAKEN, Ledger, RowStatus
from loopscope.rows.schedule import Overview, Schedule
from loopscope.rows.spec import RowSpec
from loopscope.runs import RunFolder


def spec(condition: str = "per-loop+raw", seed: int = 42, **changes) -> RowSpec:
    return RowSpec(condition=condition, recipe="paper", seed=seed, config=row_config(condition, seed), **changes)


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path)


def write(ledger: Ledger, row: RowSpec, state: str, **more) -> Path:
    run = ledger.run(row)
    run.create(row.config)
    if state == "finished":
        write_record(run.path / "manifest.json", sample_manifest([], row.seed))
        write_record(run.path / "eval.json", made_up_eval(*NUMBERS[row.condition], 0.0))
        write_json(run.path / "audit.json", made_up_audit(row.condition, 3.0).to_json())
        write_json(run.path / "audit-untrained.json", made_up_audit(row.condition, 3.0, step=None).to_json())
        write_record(run.path / "halting.json", made_up_halting(row.condition))
    write_record(run.path / "row.json", RowRecord(state=state, **more))
    return run.path


# --- what a folder says ----------------------------------------------------------------------------------------------


def test_a_row_without_a_folder_is_open(ledger):
    assert ledger.status(spec()).state == "open"


@pytest.mark.parametrize(("written", "means"), [("running", "open"), ("open", "open"), ("failed", "failed")])
def test_a_row_nobody_holds_is_not_running_whatever_its_record_says(ledger, written, means):
    write(ledger, spec(), written)
    assert ledger.status(spec()).state == means


def test_a_row_runs_while_its_lock_is_held(ledger):
    write(ledger, spec(), "failed")
    with ledger.run(spec()).locked():
        assert ledger.status(spec()).state == "running"
        assert ledger.run(spec()).is_held()
    assert ledger.status(spec()).state == "failed"


def test_a_finished_row_needs_its_audits_unless_none_is_asked_for(ledger):
    folder = write(ledger, spec(), "finished")
    assert ledger.status(spec()).state == "finished"
    (folder / "audit-untrained.json").unlink()
    assert ledger.status(spec()).state == "open"
    assert ledger.status(spec(audit_untrained=False)).state == "finished"
    (folder / "audit.json").unlink()
    assert ledger.status(spec(audit_untrained=False)).state == "open"
    assert ledger.status(spec(audit=False)).state == "finished"


def test_a_finished_row_without_halting_is_open_where_it_is_asked_for(ledger):
    folder = write(ledger, spec(), "finished")
    assert ledger.status(spec(halting=True)).state == "finished"
    (folder / "halting.json").unlink()
    assert ledger.status(spec()).state == "finished"
    assert ledger.status(spec(halting=True)).state == "open"
    gone = {"schema_version": 1, "step": 1000, "num_loops": 4, "reason": "the checkpoint is gone"}
    for content, state in ((gone, "finished"), (gone | {"step": 9}, "open"), (gone | {"reason": ""}, "open")):
        write_json(folder / "halting.json", content)
        assert ledger.status(spec(halting=True)).state == state


@pytest.mark.parametrize(
    ("name", "place", "field"),
    [
        ("eval.json", (), "unigram_ce"),
        ("audit.json", ("loops", 0), "scale_curvature"),
        ("audit.json", ("loops", 3), "lemma_2"),
        ("audit-untrained.json", ("loops", 0), "scale_curvature_size"),
    ],
)
def test_what_an_older_version_did_not_measure_is_measured_by_the_same_command(ledger, name, place, field):
    folder = write(ledger, spec(), "finished")
    content = json.loads((folder / name).read_text())
    part = content
    for step in place:
        part = part[step]
    part[field] = {} if field == "unigram_ce" else None
    write_json(folder / name, content)
    measured = field != "unigram_ce"
    assert ledger.status(spec()).state == ("finished" if measured else "open"), "null is what came of measuring it"
    del part[field]
    write_json(folder / name, content)
    assert ledger.status(spec()).state == "open"


UNREADABLE = ("", "{", "null", "\x00\xff")
OUTDATED = ("{}", '{"step": 3, "model": {"step": 3}}')
DAMAGED = [(name, content) for name in ("eval.json", "audit.json", "row.json") for content in (*UNREADABLE, *OUTDATED)]
DAMAGED += [("audit-untrained.json", content) for content in (*UNREADABLE, *OUTDATED)]
DAMAGED += [("manifest.json", content) for content in UNREADABLE]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_row_with_a_damaged_or_outdated_result_is_open_again(ledger, name, content):
    folder = write(ledger, spec(), "finished")
    assert ledger.status(spec()).state == "finished"
    (folder / name).write_text(content)
    assert ledger.status(spec()).state == "open"


def test_progress_is_the_last_whole_line_of_metrics(ledger):
    folder = write(
        ledger, spec(), "running", stage="training", attempts=2, seconds={"training": 3.0, "evaluating": 1.0}
    )
    for row in (train_row(500, [5.0, 4.0], [1.0, 2.0], []), event_row(501, "skip", "no finite loss")):
        RunFolder(folder).append_metrics(row)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    status = ledger.status(spec())
    assert (status.step, status.ce, status.norm) == (500, 4.0, 2.0)
    assert (status.attempts, status.seconds) == (2, 4.0)
    assert status.share_done == pytest.approx(0.4), "half of the training, which is four fifths of a row"


def test_a_row_run_otherwise_is_refused_by_the_name_of_the_field(ledger):
    write(ledger, spec(), "finished")
    config = spec().config
    ledger.check(replace(spec(), config=replace(config, training=replace(config.training, threads=7))))
    with pytest.raises(RunError, match=r"lr = 0\.001, not 0\.5"):
        ledger.check(replace(spec(), config=replace(config, training=replace(config.training, lr=0.5))))


def test_giving_a_row_up_is_noted_but_not_over_somebody_who_has_it(ledger):
    write(ledger, spec(), "running")
    with ledger.run(spec()).locked():
        ledger.fail(spec(), "no good")
    assert ledger.status(spec()).error is None
    ledger.fail(spec(), "no good")
    assert (ledger.status(spec()).state, ledger.status(spec()).error) == ("failed", "no good")


def test_the_last_words_are_the_end_of_the_log(ledger):
    folder = write(ledger, spec(), "failed")
    assert ledger.last_words(spec()) == []
    (folder / "log.txt").write_text("".join(f"line {n}\n" for n in range(30)))
    assert ledger.last_words(spec(), lines=2) == ["line 28", "line 29"]


# --- the schedule ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A handle whose exit codes are given beforehand."""

    code: int | None
    stopped: bool = False
    killed: bool = False
    stubborn: bool = False

    def poll(self) -> int | None:
        if self.killed or (self.stopped and not self.stubborn):
            return EXIT_INTERRUPTED
        return self.code

    def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.killed = True


@dataclass
class Scripted:
    """A backend that ends each attempt at a row with the next code of its script; 0 finishes the row."""

    ledger: Ledger
    codes: dict[str, list[int | None]] = field(default_factory=dict)
    slots: int = 2
    started: list[str] = field(default_factory=list)
    handles: list[Row] = field(default_factory=list)
    most: int = 0

    def start(self, row: RowSpec, folder: Path) -> Row:
        running = sum(handle.poll() is None for handle in self.handles)
        self.most = max(self.most, running + 1)
        self.started.append(row.name)
        code = self.codes.get(row.name, [0]).pop(0) if row.name in self.codes else 0
        if code == 0:
            write(self.ledger, row, "finished")
        self.handles.append(Row(code))
        return self.handles[-1]

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(schedule_module, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(schedule_module, "LOOK_SECONDS", 0.02)


def rows(count: int) -> list[RowSpec]:
    return [spec(seed=seed, audit=False) for seed in (42, 101, 202)[:count]]


def test_finished_rows_are_skipped_and_the_others_run(ledger):
    write(ledger, rows(3)[1], "finished")
    backend, events = Scripted(ledger), []
    final = Schedule(ledger, rows(3), backend, on_event=lambda event: events.append((event.what, event.row.seed))).run()
    assert backend.started == ["per-loop+raw-s42", "per-loop+raw-s202"]
    assert [status.state for status in final] == ["finished"] * 3
    assert ("skipped", 101) in events and ("finished", 202) in events


def test_a_crash_is_tried_again_and_then_reported(ledger):
    name = rows(1)[0].name
    backend, events = Scripted(ledger, {name: [-9, 1, 139]}), []
    final = Schedule(ledger, rows(1), backend, retries=2, on_event=lambda event: events.append(event.what)).run()
    assert backend.started == [name] * 3
    assert events.count("retried") == 2 and events[-1] == "failed"
    assert final[0].state == "failed" and final[0].error == "exit code 139"


def test_a_row_that_succeeds_on_its_second_attempt_is_finished(ledger):
    backend = Scripted(ledger, {rows(1)[0].name: [-9, 0]})
    assert Schedule(ledger, rows(1), backend).run()[0].state == "finished"
    assert len(backend.started) == 2


def test_what_a_retry_would_repeat_is_not_retried(ledger):
    backend = Scripted(ledger, {rows(1)[0].name: [EXIT_GIVEN_UP]})
    write(ledger, rows(1)[0], "failed", error="no such file: x.txt")
    final = Schedule(ledger, rows(1), backend).run()
    assert len(backend.started) == 1
    assert final[0].error == "no such file: x.txt"


def test_a_failed_row_is_tried_again_by_the_next_invocation(ledger):
    write(ledger, rows(1)[0], "failed", error="the disk was full")
    assert Schedule(ledger, rows(1), Scripted(ledger)).run()[0].state == "finished"


def test_no_more_rows_run_than_there_are_slots(ledger):
    backend = Scripted(ledger, slots=1)
    Schedule(ledger, rows(3), backend).run()
    assert backend.most == 1 and len(backend.started) == 3


def test_a_row_that_another_invocation_has_is_waited_for_and_not_run(ledger):
    row = rows(1)[0]
    write(ledger, row, "running")
    backend, looks = Scripted(ledger), []
    lock = ledger.run(row).locked()
    lock.__enter__()

    def look(overview: Overview) -> None:
        looks.append(overview.rows[0].state)
        if len(looks) == 3:  # the other one gets done
            write(ledger, row, "finished")
            lock.__exit__(None, None, None)

    final = Schedule(ledger, [row], backend, on_view=look).run()
    assert looks[:3] == ["running"] * 3
    assert backend.started == [] and final[0].state == "finished"


def test_a_row_whose_other_process_died_is_taken_over(ledger):
    row = rows(1)[0]
    write(ledger, row, "running")
    backend, looks = Scripted(ledger), []
    lock = ledger.run(row).locked()
    lock.__enter__()

    def look(overview: Overview) -> None:
        looks.append(overview)
        if len(looks) == 3:
            lock.__exit__(None, None, None)

    Schedule(ledger, [row], backend, on_view=look).run()
    assert backend.started == [row.name]


def test_losing_the_race_for_a_row_is_no_failure(ledger):
    name = rows(1)[0].name
    backend = Scripted(ledger, {name: [EXIT_TAKEN] * 4 + [0]})
    assert Schedule(ledger, rows(1), backend, retries=0).run()[0].state == "finished"


def test_ctrl_c_stops_the_running_rows_and_waits_for_them(ledger):
    backend = Scripted(ledger, {row.name: [None] for row in rows(3)}, slots=2)

    def interrupt(overview: Overview) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Schedule(ledger, rows(3), backend, on_view=interrupt).run()
    assert [handle.stopped for handle in backend.handles] == [True, True], "the third was never started"
    assert not any(handle.killed for handle in backend.handles)


def test_a_second_ctrl_c_ends_rows_at_once(ledger, monkeypatch):
    backend = Scripted(ledger, {rows(1)[0].name: [None]})

    def interrupt(overview: Overview) -> None:
        backend.handles[0].stubborn = True
        monkeypatch.setattr(schedule_module.time, "sleep", second)
        raise KeyboardInterrupt

    def second(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Schedule(ledger, rows(1), backend, on_view=interrupt).run()
    assert backend.handles[0].killed


def test_a_grid_that_does_not_fit_its_folder_starts_nothing(ledger):
    write(ledger, rows(2)[1], "finished")
    other = replace(rows(2)[1], config=row_config("per-loop+rmsnorm", 101))
    backend = Scripted(ledger)
    with pytest.raises(RunError, match="readout = 'raw', not 'rmsnorm'"):
        Schedule(ledger, [rows(1)[0], other], backend).run()
    assert backend.started == []


def test_time_left_is_judged_by_the_work_of_this_invocation():
    finished, half = RowStatus(rows(1)[0], "finished"), RowStatus(rows(2)[1], "running", step=500)
    failed, waiting = RowStatus(rows(1)[0], "failed"), RowStatus(rows(3)[2], "open")
    overview = Overview([finished, half, failed, waiting], elapsed=100.0, done_before=1.0)
    assert overview.finished == 1
    assert overview.seconds_left == pytest.approx(100 * (0.6 + 1.0) / 0.4), "what was there before is no pace"
    assert Overview([finished, waiting], elapsed=100.0, done_before=1.0).seconds_left is None
