"""What an audit found, said from its fields."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import made_up_audit, sample_variable

from loopscope.results.audit import Variable
from loopscope.show.sentences import (
    REMEDIES,
    driven,
    driven_by_training,
    evidence,
    free_to_grow,
    remedy,
    summary,
    with_sentences,
)

BLIND = sample_variable("scale", "blind", 1e-6, free_range=1e6, free_tokens=0.98, loop=3, activity=0.99)


def test_a_free_range_is_said_for_the_median_token_unless_others_are_freer():
    assert free_to_grow(70.04) == "free to grow 70-fold before it costs 1 % of perplexity"
    assert free_to_grow(1e6, 1.0).startswith("free to grow without limit")
    assert free_to_grow(1.1, 0.08).endswith("for 8 % of the tokens (1.1-fold for the median one)")


def test_what_training_does_is_said_up_down_or_not_at_all():
    assert driven_by_training(-0.02) == "training drives it down by 2 % a step"
    assert driven(replace(BLIND, drift=0.041, driven=True)) == "training drives it up by 4.1 % a step"
    assert driven(replace(BLIND, drift=0.001, driven=False)) == "training from these weights does not drive it"
    assert driven(BLIND) == ""


def test_the_evidence_of_a_blind_field_is_a_claim_what_training_does_and_the_numbers():
    claim, numbers = evidence(replace(BLIND, drift=0.25, driven=True, held_from=1234.5)).split(". ")
    assert claim.startswith("free to grow without limit") and claim.endswith("; training drives it up by 25 % a step")
    assert "(the penalty begins to cost from ‖h‖ ≈ 1,234)" in claim
    assert numbers.startswith(
        "At loop 3, 98 % of tokens are free tenfold or more, the next loop carries it on with gain"
    )


@pytest.mark.parametrize("verdict", ["visible", "weak", "removed", "damped", "inert", "memory"])
def test_every_other_verdict_says_where(verdict):
    assert "loop 3" in evidence(replace(BLIND, verdict=verdict))


def test_what_was_not_measured_is_not_made_up():
    assert "was not measured" in evidence(replace(BLIND, free_range=None))
    audit = replace(made_up_audit("per-loop+raw", 3.0), variables=[])
    assert summary(audit) == "No blind spot: every direction that the loop carries is shown to a loss."
    assert summary(replace(audit, verdict="undecided")) == "Undecided: nobody said why."


def test_only_what_is_blind_needs_a_remedy_and_a_direction_near_a_field_needs_that_of_the_field():
    def told(**change: object) -> object:
        return remedy(replace(BLIND, **change))

    assert told() == told(name="a direction near scale", kind="found") == REMEDIES["scale"]
    assert told(name="unnamed (2 dimensions)", kind="found") not in (None, *REMEDIES.values())
    assert told(name="z", kind="tensor").flag is None
    assert told(verdict="weak") is None


def test_an_audit_that_is_written_carries_what_is_said_of_it():
    audit = made_up_audit("per-loop+rmsnorm", 348.0)
    written = with_sentences(audit)
    scale: Variable = written.variable("scale")
    assert written.summary == "1 blind direction (scale): the loop carries it on and no loss sees it."
    assert (scale.evidence, scale.flag) == (evidence(scale), "--norm-penalty 0.01")
    assert written.variable("mean").remedy is None
