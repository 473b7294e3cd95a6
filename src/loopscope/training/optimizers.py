"""Optimisers and learning-rate schedules; a learning rate is a function of the step, never a state."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from loopscope.config import TrainingConfig
from loopscope.errors import ConfigError
from loopscope.machine import check_bf16_products

COSINE_FLOOR = 0.1
"""The cosine ends at this share of the peak."""


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, then the schedule."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        return config.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
    decaying = max(1, round(config.decay * config.steps))
    return config.lr * min(1.0, (config.steps - step) / decaying)


class Optimizers:
    """One or two torch optimisers that step together: AdamW, or Muon for layer matrices and AdamW for the rest."""

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        matrices, others = split_parameters(model)
        if config.optimizer == "muon" and not matrices:
            why = "is for the matrices of layers (parameters named ….layers.…), and this model has none; use adamw"
            raise ConfigError.of("optimizer", "muon", why)
        adamw_parameters = others if config.optimizer == "muon" else [*matrices, *others]
        fused = all(parameter.device.type in ("cpu", "cuda") for parameter in adamw_parameters)
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(adamw_parameters, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
        ]
        if config.optimizer == "muon":
            if any(matrix.device.type == "cpu" for matrix in matrices):
                check_bf16_products()  # Newton–Schulz runs in bf16, whatever the weights are
            # Scaled so that its updates have AdamW's size, and one learning rate serves both.
            muon = torch.optim.Muon(
                matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
            self.parts.append(muon)

    def step(self, learning_rate: float) -> None:
        """Apply the gradients at this learning rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside layers (attention and feed-forward), and everything else; a table multiplies nothing."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inside = ".layers." in name and parameter.dim() == 2 and id(parameter) not in tables
        (matrices if inside else others).append(parameter)
    return matrices, others


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
    """Scale all gradients so that their joint norm is at most `limit`; returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
