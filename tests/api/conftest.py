"""A stranger's module, a text, and a cache of the tests' own, in the working folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from strangers import SOURCE, write_text


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LOOPSCOPE_CACHE", str(tmp_path / "cache"))
    return write_text(tmp_path / "text.txt")


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Their module in the working folder; gives a function that appends code to it and names a factory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_model", raising=False)

    def word(factory: str = "build", code: str = "") -> str:
        (tmp_path / "their_model.py").write_text(SOURCE + code)
        sys.modules.pop("their_model", None)
        return f"their_model:{factory}"

    yield word
    sys.modules.pop("their_model", None)


@pytest.fixture
def one_thread():
    """Bit-for-bit comparisons pin the threads; other tests get theirs back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
