"""What halting saves of a row's loops: one calibrated rule, and the same linear gate on h and on norm(h).

The rule, its bound and its confidence were chosen before any row was calibrated: the margin rule at 1 % and 95 %, as
the paper has it. Text is the row's validation text, which no weight was trained on; gates are trained on its training
text. Imports torch: only the process of a row needs it.

A gate asks whether a linear map of the state knows whether further loops would decide otherwise:

    p_k = σ(w·x_k + b),  x_k = h_k  or  x_k = h_k/RMS(h_k)

One gate for all loops, as Ouro has it, trained by cross-entropy to say whether the likeliest token after loop k is
that of full depth. Where the loop carries the scale of its state and no loss sees it, h_k grows from loop to loop and
in training, and w·h_k with it: p_k sits at 0 or 1, its gradient p·(1 − p) is gone, and neither training nor a threshold
can tell tokens apart. A gate on norm(h), or on a model whose scale is controlled, has inputs of one size.

Shape legend: K loops, N tokens, D width, B rows, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.api.calibration import calibrate
from loopscope.data.corpora import Split
from loopscope.data.stream import evaluation_batches
from loopscope.inference.decoding import device_of
from loopscope.inference.rules import Look, Rule
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.protocol import LoopedModel, run_loops
from loopscope.results.halting import CalibratedHalting, Calibration, ExitShare, Gate, GatedLoop, Reads
from loopscope.results.thresholds import SATURATED_LOGIT
from loopscope.targets import Opened, Say, tokens_for

RULE, MAX_PPL_INCREASE, CONFIDENCE = "margin", 0.01, 0.95
SPLIT: Split = "valid"
UNITS = 200
"""Most units: about 100,000 tokens, half of which calibrate."""
GATE_TOKENS = 16_384
"""Training tokens whose states a gate is trained on; a quarter as many of validation text show what became of it."""
WATCHED = 30
"""Loops over which a gate is watched, as many as the audit's rollout has."""
ROWS = 16
"""Windows that are run at a time."""
READS: tuple[Reads, ...] = get_args(Reads)
STEPS, BATCH, LR = 500, 512, 1e-3
"""Of Adam, for every gate alike: a gate that is trained beside a model gets the model's learning rate, not one that was
chosen for the length of its input."""


def measure_halting(opened: Opened, step: int, say: Say) -> CalibratedHalting:
    """Calibrate the rule and both gates; too little text for a promise is a result too."""
    found = _calibrated(opened, [RULE], say)
    (certificate,) = found.certificates
    missing = ""
    if certificate.mean_loops is None or found.fixed.threshold is None:
        missing = (
            f"nothing can be promised: {found.units['calibration']} calibration units of {found.unit_tokens} tokens "
            f"are too few, {found.units_needed} would do for a rule that changes nothing"
        )
    return CalibratedHalting(
        step=step,
        num_loops=found.num_loops,
        split=SPLIT,
        rule=RULE,
        max_ppl_increase=MAX_PPL_INCREASE,
        confidence=CONFIDENCE,
        units=found.units,
        units_needed=found.units_needed,
        threshold=certificate.threshold,
        p_value=certificate.p_value,
        ppl_increase=certificate.ppl_increase,
        mean_loops=certificate.mean_loops,
        fixed_depth=found.fixed.threshold,
        unit_loops=certificate.unit_loops,
        exits=tuple(ExitShare(k, share) for k, share in certificate.exits.items()),
        gates=() if missing or found.num_loops < 2 else _gates(opened, say),
        notes=found.notes,
        reason=missing,
    )


def _calibrated(opened: Opened, rules: Sequence[str | Rule], say: Say) -> Calibration:
    return calibrate(
        opened,
        rules=rules,
        max_ppl_increase=MAX_PPL_INCREASE,
        confidence=CONFIDENCE,
        max_units=UNITS,
        say=say,
        progress=lambda what, share: say(f"calibrating: {what}"),
    )


def _gates(opened: Opened, say: Say) -> tuple[Gate, ...]:
    """The same gate on h and on norm(h), watched far beyond the loops it was trained on."""
    seen = examples(opened.model, _text(opened, "train", GATE_TOKENS, say))
    unseen = examples(opened.model, _text(opened, SPLIT, GATE_TOKENS // 4, say), loops=WATCHED)
    made = [fit_gate(seen, reads) for reads in READS]
    say("trained gates on h and on norm(h)")
    gates = []
    for gate in made:
        found = _calibrated(opened, [gate], say)
        loss, constant = gate_loss(gate, unseen)
        gates.append(
            Gate(
                reads=gate.reads,
                loss=loss,
                constant_loss=constant,
                mean_loops=found.certificates[0].mean_loops,
                fixed_depth=found.fixed.threshold,
                loops=saturation(gate, unseen),
            )
        )
    return tuple(gates)


def _text(opened: Opened, split: Split, tokens: int, say: Say) -> Iterator[Tensor]:
    """Whole windows of a split, so many tokens."""
    length, device = opened.sequence_length, device_of(opened.model)
    batches = evaluation_batches(tokens_for(opened, None, say, split=split), length, ROWS, max_tokens=tokens)
    for ids_BT, targets_BT in batches:
        whole_B = (targets_BT != IGNORE_INDEX).all(1)
        if whole_B.any():
            yield ids_BT[whole_B].to(device)


# --- gates -----------------------------------------------------------------------------------------------------------


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
        size_N = gate.logits(h_ND).abs()
        means = (float(each_N.mean()) for each_N in (h_ND.norm(dim=-1), size_N))
        norm, logit = (mean if math.isfinite(mean) else None for mean in means)
        share = float((size_N >= SATURATED_LOGIT).float().mean())
        told.append(GatedLoop(k=k, norm=norm, logit=logit, saturated=share))
    return tuple(told)
