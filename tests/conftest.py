"""What all tests share: a small model configuration and a fixed seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from loopscope.config import ModelConfig

settings.register_profile("loopscope", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("loopscope")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    yield
    torch.set_flush_denormal(False)  # training in this process turns it on, and hypothesis refuses to draw floats then


@pytest.fixture(scope="module")
def flushed_denormals():
    """As the command line sets it; training slows down on denormal numbers otherwise."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def tiny() -> ModelConfig:
    """A model small enough for float64 derivatives."""
    return ModelConfig(vocab_size=37, width=32, num_layers=2, num_loops=3, num_heads=4, max_length=24, dropout=0.0)


@pytest.fixture
def ids_BT() -> torch.Tensor:
    return torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(7))
