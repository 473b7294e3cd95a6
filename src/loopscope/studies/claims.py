"""The paper's claims C1–C11: what is measured, the paper's value with its source, the rule, and a verdict.

A claim holds when the mean over seeds obeys every rule of it (C2's ratios, C5, C6 and C10: every seed); seeds are
listed one by one. It fails as soon as one measured rule is broken, and is not measured while one is missing. Of claims
about CE it is too early to speak while one of their models is hardly better than a unigram model. A claim that fails at
a size is reported as such, never tuned until it passes. Made from files alone. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loopscope.results.reproduction import (
    FAILS,
    HOLDS,
    NOT_MEASURED,
    TOO_EARLY,
    ClaimsRecord,
    Judgement,
    PaperValue,
    Verdict,
)
from loopscope.scores import SPLITS
from loopscope.show.numbers import padded
from loopscope.studies import evidence
from loopscope.studies.evidence import RESAMPLES, Quantity
from loopscope.studies.results import Results, View

SOURCES = {
    "P": "abstract and project page of arXiv 2606.24898",
    "R": "an independent review that quotes the tables of arXiv 2606.24898",
}


UNGUARDED = "rows of an older version do not tell whether it is too early to say: they have no unigram model"


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    id: str
    title: str
    measured: str
    rule: str
    paper: tuple[PaperValue, ...]
    evidence: Callable[[View], list[Quantity]]
    on_validation_alone: bool = False
    """Measured by audits or by calibration alone, which run on validation text; judged on no other."""
    compares_ce: tuple[str, ...] = ()
    """Conditions whose CE it is about: twelve steps make differences of CE as large as one likes, and mean nothing."""

    def judge(self, view: View, recipe: str) -> Judgement:
        """The claim on the rows of one recipe and split."""
        quantities = self.evidence(view)
        verdict, reason = self._verdict(view, quantities)
        return Judgement(
            recipe=recipe,
            split=view.split,
            id=self.id,
            title=self.title,
            measured=self.measured,
            rule=self.rule,
            paper=list(self.paper),
            quantities=[quantity.summary() for quantity in quantities],
            verdict=verdict,
            reason=reason,
        )

    def _verdict(self, view: View, quantities: list[Quantity]) -> tuple[Verdict, str]:
        missing = [quantity.name for quantity in quantities if quantity.bound and not quantity.seeds]
        judged = [quantity for quantity in quantities if quantity.obeyed is not None]
        words = [quantity.in_words() for quantity in judged] + [f"not measured: {name}" for name in missing]
        if judged and (early := evidence.untaught(view, self.compares_ce)):
            rows = ", ".join(f"{name} {padded(gain, 3, '+')}" for name, gain in early.items())
            asked = f"must be at least {evidence.LEARNED:g}"
            return TOO_EARLY, f"nats by which a unigram model of the same text is worse ({asked}): {rows}"
        if evidence.unguarded(view, self.compares_ce):
            words.append(UNGUARDED)
        if not all(quantity.obeyed for quantity in judged):
            return FAILS, "; ".join(words)
        return NOT_MEASURED if missing or not judged else HOLDS, "; ".join(words)


def judge_all(results: Results) -> ClaimsRecord:
    """claims.json: every claim under every recipe and on every split that was measured."""
    claims = []
    for recipe in results.recipes():
        splits = [split for split in SPLITS if any(split in row.splits for row in results.rows)]
        for split in splits or SPLITS[:1]:
            view = results.view(recipe, split)
            judged = [claim for claim in CLAIMS if split == evidence.AUDITED or not claim.on_validation_alone]
            claims += [claim.judge(view, recipe) for claim in judged]
    return ClaimsRecord(
        size=results.grid.size,
        sources=SOURCES,
        interval=f"95 % percentile bootstrap over seeds, {RESAMPLES:,} resamples; of two or three seeds "
        "their range, of one none",
        claims=claims,
    )


CLAIMS = (
    Claim(
        "C1",
        "Per-loop supervision through RMSNorm lets the norm run away",
        "‖H_K‖ of per-loop + RMSNorm over that of per-loop + raw",
        "ratio at least 10",
        (PaperValue("39,207 (44M), 56,051 (129M) against tens", "P"),),
        evidence.c1,
    ),
    Claim(
        "C2",
        "Exit training and scale control are orthogonal",
        "mean absolute effects of placement and readout in the 2×2 on ±log(1 + |CE(1) − CE(K)|/0.1) and on log ‖H_K‖",
        "every seed: placement moves the exit failure at least twice as far as the readout does, and the readout the "
        "norm; per-loop supervision lowers the one, raw readouts lower the other",
        (PaperValue("Figure 1: placement moves exit failure, readout moves norm drift", "P"),),
        evidence.c2,
        compares_ce=evidence.CORNERS,
    ),
    Claim(
        "C3",
        "A norm penalty controls the scale with the RMSNorm readout kept",
        "‖H_K‖ of per-loop + penalty over that of per-loop + RMSNorm",
        "ratio at most 0.2",
        (PaperValue("17–22 against 39,207 (44M) and 56,051 (129M)", "P"),),
        evidence.c3,
    ),
    Claim(
        "C4",
        "An inter-loop norm removes the growth",
        "‖H_K‖ before the norm, over that of per-loop + RMSNorm; and ‖H_30‖ / ‖H_K‖",
        "ratio at most 0.2, growth beyond the trained depth at most 1.1",
        (PaperValue("no number quoted; its design rule: removed from the loop, scale cannot grow", "P"),),
        evidence.c4,
    ),
    Claim(
        "C5",
        "Norm readouts hide the scale from the loss, raw ones show it",
        "share: median over tokens of |⟨∇CE, h⟩| / (‖∇CE‖‖h‖); response: d²CE/d(ln α)² of a token when the state is "
        "multiplied by α; the worst loop through any norm, and of each raw readout",
        "every seed: share at most 1e-4 and median |response| at most 1e-4 nats through a norm readout; mean response "
        "at least 0.01 nats through raw; untrained, share at least 0.3/√d through raw (chance is 0.8/√d)",
        (PaperValue("no number quoted; zero through RMSNorm by its first lemma", "P"),),
        evidence.c5,
        on_validation_alone=True,
    ),
    Claim(
        "C6",
        "Lemma 2 predicts how scale and direction move over 30 loops",
        "per-loop + RMSNorm, tokens and loops with s ≥ 10·‖b⊥‖: Σ|measured − predicted| / Σ|measured| of s' − s "
        "against a(u), and of ‖u' − u‖·s' against ‖b⊥(u)‖; a and b⊥ from one run of the loop at 100 times the scale",
        "every seed: at most 0.1 for both",
        (PaperValue("Figure 3: prediction and measurement agree; angular step × scale about constant", "P"),),
        evidence.c6,
        on_validation_alone=True,
    ),
    Claim(
        "C7",
        "Scaling the final state changes nothing through RMSNorm and everything through raw",
        "largest minus smallest CE over α in [0.1, 10] at loop K",
        "at most 0.01 nats through RMSNorm, at least 0.1 through raw",
        (PaperValue("Ouro 1.4B: flat with RMSNorm, sharp without", "P"),),
        evidence.c7,
        on_validation_alone=True,
    ),
    Claim(
        "C8",
        "The grown scale is not needed: a radial clamp costs next to nothing",
        "per-loop + RMSNorm: ΔCE of the radial clamp that changes CE most, its size and its sign",
        "size at most 0.01 nats",
        (PaperValue("+0.0004 … +0.0055", "R"),),
        evidence.c8,
        on_validation_alone=True,
    ),
    Claim(
        "C9",
        "Scale-controlled per-loop models gain from loops where the RMSNorm one is flat",
        "CE(K) − CE(1) of each; largest PPL excess over per-loop + RMSNorm at depths 2..K",
        "RMSNorm at most 0.02 nats either way; raw, final-only, penalty below 0, with less PPL than it at every K ≥ 2",
        (
            PaperValue("ΔPPL from K=1 to 4: RMSNorm +0.01, raw −0.20, final-only −0.20, penalty −0.22", "R"),
            PaperValue("0.42 lower PPL at full depth, 0.30 at a matched shallower one (129M)", "P"),
        ),
        evidence.c9,
        compares_ce=(evidence.RMSNORM, *evidence.CONTROLLED),
    ),
    Claim(
        "C10",
        "Calibrated halting adapts in scale-controlled models; through RMSNorm it finds K-invariance",
        "margin rule, at most 1 % more PPL with 95 % confidence: the smallest fixed depth that is certified at the "
        "same bound − mean loops of the rule, on test units of the validation text",
        "every seed: below 0.05 loops for RMSNorm; at least 0.1 for one of raw, final-only and penalty, its 95 % "
        "interval over units above 0",
        (PaperValue("mean loops: RMSNorm 1.00, raw 2.16, final-only 1.78, penalty 2.60; no fixed depth beside", "R"),),
        evidence.c10,
        on_validation_alone=True,
        compares_ce=(evidence.RMSNORM, *evidence.CONTROLLED),
    ),
    Claim(
        "C11",
        "Terminal supervision is better at full depth and leaves early exits unusable",
        "RMSNorm readout: PPL(K) of terminal − per-loop; CE(1) − CE(K) of terminal",
        "PPL difference below 0, exit failure at least 1 nat",
        (
            PaperValue("PPL 5.40 / 6.04 (44M), 4.88 / 5.35 (129M)", "R"),
            PaperValue("CE 5.52 at K=1 against 1.54 at K=4", "R"),
        ),
        evidence.c11,
        compares_ce=("terminal+rmsnorm", evidence.RMSNORM),
    ),
)
