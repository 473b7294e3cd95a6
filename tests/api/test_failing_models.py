"""Somebody's model that fails after it was opened: their mistake, told with the line it is in, and never a success."""

from __future__ import annotations

import pytest

from loopscope.cli import main

MODULE = """
import torch
from torch import nn
import loopscope as ls

class Failing(nn.Module):
    num_loops = 2

    def __init__(self, how):
        super().__init__()
        self.how, self.table, self.head = how, nn.Embedding(300, 8), nn.Linear(8, 300)

    def embed(self, ids):
        if self.how == "long" and ids.shape[1] > 2:
            raise RuntimeError("too long for me")
        return ls.LoopState(self.table(ids))

    def loop(self, state, k):
        if self.how == "exit" and k == 2:
            raise SystemExit(0)
        return state.with_h(state.h_BTD + 1)

    def readout(self, state, k):
        return self.head(state.h_BTD)

class Batches:
    def __iter__(self):
        yield torch.zeros(2, 8, dtype=torch.long)
        raise ValueError("no more text")

def long(): return Failing("long")
def exits(): return Failing("exit")
def beyond(): return Failing(""), [torch.full((2, 8), 10**6)]
def batches(): return Failing(""), Batches()
def number(): return Failing(""), 5
def words(): return Failing(""), ["text"]
"""


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("long", "failing_model.py:15: RuntimeError: too long for me"),
        ("exits", "failing_model.py:20: SystemExit: 0"),
        ("beyond", "failing_model.py:16: IndexError"),
        ("batches", "failing_model.py:29: ValueError: no more text"),
        ("words", "a batch must be a (batch, tokens) tensor of ids"),
        ("number", "returned a int beside the model"),
    ],
)
def test_it_is_told_as_theirs_with_the_line(factory, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "failing_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert main(["audit", f"failing_model:{factory}"]) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and "bug in loopscope" not in err
