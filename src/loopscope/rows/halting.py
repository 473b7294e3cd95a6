"""What halting saves of a row's loops: one calibrated rule, and the same linear gate on h and on norm(h).

The rule, its bound and its confidence were chosen before any row was calibrated: the margin rule at 1 % and 95 %, as
the paper has it. Text is the row's validation text, which no weight was trained on; gates are trained on its training
text. Imports torch: only the process of a row needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from loopscope.data.corpora import Split
from loopscope.data.stream import evaluation_batches
from loopscope.inference.decoding import device_of
from loopscope.inference.gates import READS, examples, fit_gate, gate_loss, saturation
from loopscope.inference.rules import Rule
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.results.halting import CalibratedHalting, Calibration, ExitShare, Gate
from loopscope.targets import Opened
from loopscope.verbs.calibration import calibrate
from loopscope.verbs.text import Say, tokens_for

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
