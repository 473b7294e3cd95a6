"""What verbs print with: words that stay whole, and signs of life."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from loopscope.cli import live, terminal
from loopscope.results.run import LoggedStep


def test_sentences_break_between_words_on_a_terminal_and_nowhere_else(monkeypatch, capsys):
    sentence = "C9 does not hold at this size: the largest perplexity excess is 1.13e+19 in 0 of 1 seeds"
    terminal.print_words(sentence)
    assert capsys.readouterr().out == sentence + "\n"
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    terminal.print_words(sentence)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 30 and " ".join(lines) == sentence


def test_progress_that_takes_long_says_more_than_a_line_halfway(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    with terminal.progress("runs/x") as advance:
        for done in range(1, 5):
            now = 6.0 * done
            advance(f"{done} of 100", done / 100)
    assert capsys.readouterr().err.splitlines() == [
        "loopscope: runs/x: 2%, 2 of 100",
        "loopscope: runs/x: 4%, 4 of 100",
    ]


def test_the_live_view_is_at_the_step_of_the_run_not_of_the_last_logged_row():
    training = SimpleNamespace(steps=100, batch=2)
    config = SimpleNamespace(training=training, sequence_length=8, model="somebody else's")
    trainer = SimpleNamespace(config=config, progress=SimpleNamespace(step=0))
    watch = live.Watch(trainer)
    row = LoggedStep(step=10, loss=1.0, lr=0.1, loops=[1], ce=[1.0], radial_gradient_share=[0.1], norm=[1.0])
    titles = []
    for trainer.progress.step in (10, 17):
        titles.append(watch.table(row, None, []).title)
    assert titles[0].startswith("step 10/100") and titles[1].startswith("step 17/100")
