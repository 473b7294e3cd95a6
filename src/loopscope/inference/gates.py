"""Exit gates on a frozen model: does a linear map of the state know whether further loops would decide otherwise?

    p_k = σ(w·x_k + b),  x_k = h_k  or  x_k = h_k/RMS(h_k)

One gate for all loops, as Ouro has it, trained by cross-entropy to say whether the likeliest token after loop k is
that of full depth. Where the loop carries the scale of its state and no loss sees it, h_k grows from loop to loop and
in training, and w·h_k with it: p_k sits at 0 or 1, its gradient p·(1 − p) is gone, and neither training nor a threshold
can tell tokens apart. A gate on norm(h), or on a model whose scale is controlled, has inputs of one size.

Shape legend: K loops, N tokens, D width, B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.files import number as finite
from loopscope.inference.rules import Look, Rule
from loopscope.protocol import LoopedModel, run_loops
from loopscope.results.halting import GatedLoop, Reads
from loopscope.results.thresholds import SATURATED_LOGIT

READS: tuple[Reads, ...] = get_args(Reads)
STEPS, BATCH, LR = 500, 512, 1e-3
"""Of Adam, for every gate alike: a gate that is trained beside a model gets the model's learning rate, not one that was
chosen for the length of its input."""


@dataclass(frozen=True, eq=False)
class LinearGate(Rule):
    """σ(w·x + b), as a halting rule: a token leaves once p reaches the threshold."""

    reads: Reads
    weight_D: Tensor
    bias: float
    name: ClassVar[str] = "linear-gate"

    def logits(self, h: Tensor) -> Tensor:
        """Of states of any shape (…, D)."""
        return inputs(h, self.reads) @ self.weight_D.to(h.device) + self.bias

    def score(self, look: Look) -> Tensor:
        """The exit probability in float32, as a model would have it: what saturates is tied."""
        return self.logits(look.state.h_BTD).sigmoid()


@dataclass(frozen=True)
class Examples:
    """States of known text, and whether their exits had decided as full depth does."""

    h_KND: Tensor
    """After every loop that was run, also beyond full depth."""
    settled_KN: Tensor
    """1 where the likeliest token of exit k is that of full depth, for k below full depth."""

    @property
    def choices(self) -> tuple[Tensor, Tensor]:
        """States at which a gate has a choice, and what it should say."""
        return self.h_KND[: len(self.settled_KN)].flatten(0, 1), self.settled_KN.flatten()


def inputs(h: Tensor, reads: Reads) -> Tensor:
    """What a gate multiplies."""
    h = h.float()
    return h if reads == "h" else h * h.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()


@torch.no_grad()
def examples(model: LoopedModel, batches_BT: Iterable[Tensor], loops: int | None = None) -> Examples:
    """Run a model on known text for so many loops, by default its own number."""
    full = model.num_loops
    states, settled = [], []
    for ids_BT in batches_BT:
        trace = run_loops(model, ids_BT, num_loops=max(full, loops or full))
        states.append(torch.stack([state.h_BTD.flatten(0, 1).float() for state in trace.states[1:]]))
        chosen = [model.readout(trace.states[k], k).argmax(-1).flatten() for k in range(1, full + 1)]
        settled.append(torch.stack([exit_N == chosen[-1] for exit_N in chosen[:-1]]).float())
    return Examples(torch.cat(states, 1), torch.cat(settled, 1))


def fit_gate(found: Examples, reads: Reads, *, seed: int = 0) -> LinearGate:
    """Train a gate on states; the model is not touched. Starts at p = 1/2 everywhere."""
    h_ND, settled_N = found.choices
    weight_D = torch.zeros(h_ND.shape[-1], device=h_ND.device, requires_grad=True)
    bias = torch.zeros((), device=h_ND.device, requires_grad=True)
    optimizer = torch.optim.Adam([weight_D, bias], lr=LR)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        some = torch.randint(len(h_ND), (BATCH,), generator=generator).to(h_ND.device)
        loss = F.binary_cross_entropy_with_logits(inputs(h_ND[some], reads) @ weight_D + bias, settled_N[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return LinearGate(reads, weight_D.detach(), float(bias.detach()))


def gate_loss(gate: LinearGate, found: Examples) -> tuple[float, float]:
    """Cross-entropy of a gate on states, in nats, and that of a gate that always says how often exits are settled."""
    h_ND, settled_N = found.choices
    share = settled_N.mean().clamp(1e-6, 1 - 1e-6)
    constant = -(share * share.log() + (1 - share) * (1 - share).log())
    return float(F.binary_cross_entropy_with_logits(gate.logits(h_ND), settled_N)), float(constant)


def saturation(gate: LinearGate, found: Examples) -> tuple[GatedLoop, ...]:
    """Where a gate saturates, |logit| ≥ `SATURATED_LOGIT`: loop by loop, with the length of the state that it reads."""
    told = []
    for k, h_ND in enumerate(found.h_KND, start=1):
        size_N, norm = gate.logits(h_ND).abs(), float(h_ND.norm(dim=-1).mean())
        share = float((size_N >= SATURATED_LOGIT).float().mean())
        told.append(GatedLoop(k=k, norm=finite(norm), logit=finite(float(size_N.mean())), saturated=share))
    return tuple(told)
