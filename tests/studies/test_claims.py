"""The claims: each holds on numbers that show it, fails on numbers that do not, and is not measured without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_up import LOOPS, STEPS, sample_halting, write_made_up_grid, write_row

from loopscope.results.halting import CalibratedHalting
from loopscope.results.record import decode, text_of, write_record
from loopscope.results.reproduction import FAILS, HOLDS, NOT_MEASURED, TOO_EARLY, ClaimsRecord, Judgement
from loopscope.studies.claims import UNGUARDED, Bound, Quantity, bootstrap
from loopscope.studies.paper_claims import CLAIMS, judge_all, symlog
from loopscope.studies.results import read_results
from loopscope.studies.tables import claims_table


@pytest.fixture
def grid(tmp_path) -> Path:
    return write_made_up_grid(tmp_path / "grid")


def judged(out: Path, split: str = "valid", recipe: str = "paper") -> dict[str, Judgement]:
    return {claim.id: claim for claim in judge_all(read_results(out)).of(recipe, split)}


def rewrite(out: Path, condition: str, change) -> None:
    """Change what every row of a condition measured."""
    for folder in sorted((out / "rows").glob(f"{condition}-s*")):
        write_row(out, condition, int(folder.name.rsplit("-s", 1)[1]), change=change)


def scaled_norm(factor: float):
    def change(evaluation, audit):
        for split in evaluation["splits"].values():
            for depth in split["depths"]:
                depth["norm"] *= factor

    return change


def each_loop(name: str, value):
    def change(evaluation, audit):
        for loop in audit["loops"]:
            if loop[name] is not None:
                loop[name] = value(loop) if callable(value) else value

    return change


def ce_at(k: int, ce: float, perplexity: float):
    def change(evaluation, audit):
        evaluation["splits"]["valid"]["depths"][k - 1] |= {"ce": ce, "perplexity": perplexity}

    return change


def first_clamp(delta: float):
    return lambda evaluation, audit: audit["interventions"][0].update(delta_ce=delta)


def missing(what: str, share: float):
    """Lemma 2 as measured, but for a motion of which a share is missed."""
    return lambda loop: loop["lemma_2"] | {f"{what}_missed": share * loop["lemma_2"][f"{what}_moved"]}


def flat_sweep(evaluation, audit):
    audit["alpha_sweep"]["loops"][0]["ce"] = [4.4] * 5


def steep_sweep(evaluation, audit):
    audit["alpha_sweep"]["loops"][0]["ce"] = [4.4, 4.4, 4.4, 4.4, 4.42]


def test_all_claims_hold_on_the_papers_pattern(grid):
    verdicts = {name: claim.verdict for name, claim in judged(grid).items()}
    assert verdicts == dict.fromkeys([f"C{number}" for number in range(1, 12)], HOLDS)


@pytest.mark.parametrize(
    ("claim", "condition", "change"),
    [
        ("C1", "per-loop+raw", scaled_norm(20)),
        ("C2", "terminal+rmsnorm", scaled_norm(1 / 50)),
        ("C2", "per-loop+raw", ce_at(1, 12.0, 1e5)),
        ("C3", "per-loop+penalty", scaled_norm(3)),
        ("C4", "per-loop+inter-loop-norm", scaled_norm(5)),
        ("C4", "per-loop+inter-loop-norm", each_loop("norm", lambda loop: 20.0 + loop["k"])),
        ("C5", "per-loop+layernorm", each_loop("radial_gradient_share", 2e-4)),
        ("C5", "per-loop+layernorm", each_loop("scale_curvature_size", 2e-4)),
        ("C5", "terminal+raw", each_loop("scale_curvature", 0.009)),
        ("C5", "per-loop+final-only", each_loop("scale_curvature", lambda loop: -0.5 if loop["k"] == 2 else 0.8)),
        ("C6", "per-loop+rmsnorm", each_loop("lemma_2", missing("scale", 0.11))),
        ("C6", "per-loop+rmsnorm", each_loop("lemma_2", missing("direction", 0.11))),
        ("C7", "per-loop+rmsnorm", steep_sweep),
        ("C7", "per-loop+raw", flat_sweep),
        ("C8", "per-loop+rmsnorm", first_clamp(-0.02)),
        ("C9", "per-loop+rmsnorm", ce_at(1, 4.55, 94.0)),
        ("C9", "per-loop+raw", ce_at(1, 4.3, 74.0)),
        ("C9", "per-loop+penalty", ce_at(2, 4.6, 99.0)),
        ("C9", "per-loop+final-only", ce_at(3, 4.6, 99.0)),
        ("C11", "terminal+rmsnorm", ce_at(LOOPS, 4.6, 99.0)),
        ("C11", "terminal+rmsnorm", ce_at(1, 4.9, 134.0)),
    ],
)
def test_a_claim_fails_on_numbers_that_contradict_it(grid, claim, condition, change):
    rewrite(grid, condition, change)
    found = judged(grid)[claim]
    assert found.verdict == FAILS
    assert any(quantity.obeyed is False for quantity in found.quantities)
    assert "must be" in found.reason


@pytest.mark.parametrize(
    ("claim", "condition"),
    [
        ("C1", "per-loop+raw"),
        ("C2", "terminal+raw"),
        ("C3", "per-loop+penalty"),
        ("C4", "per-loop+inter-loop-norm"),
        ("C6", "per-loop+rmsnorm"),
        ("C7", "per-loop+raw"),
        ("C8", "per-loop+rmsnorm"),
        ("C9", "per-loop+rmsnorm"),
        ("C10", "per-loop+rmsnorm"),
        ("C11", "terminal+rmsnorm"),
    ],
)
def test_a_claim_without_its_rows_is_not_measured(grid, claim, condition):
    for folder in (grid / "rows").glob(f"{condition}-s*"):
        (folder / "row.json").unlink()
    assert judged(grid)[claim].verdict == NOT_MEASURED


def test_claims_that_need_an_audit_are_not_measured_without_one(grid):
    for path in grid.glob("rows/*/audit.json"):
        path.unlink()
    verdicts = {name: claim.verdict for name, claim in judged(grid).items()}
    assert {name for name, verdict in verdicts.items() if verdict == NOT_MEASURED} == {
        "C4",
        "C5",
        "C6",
        "C7",
        "C8",
    }


def test_a_claim_does_not_hold_while_a_model_it_names_is_missing_but_may_fail_without_it(grid):
    (grid / "rows" / "per-loop+final-only-s42" / "row.json").unlink()
    claim = judged(grid)["C9"]
    assert claim.verdict == NOT_MEASURED
    assert "not measured: ΔCE from 1 to K, per-loop+final-only" in claim.reason
    assert "(missing: ΔCE from 1 to K, per-loop+final-only; " in claims_table([claim]).rows[0][-1]
    rewrite(grid, "per-loop+penalty", ce_at(2, 4.6, 99.0))
    assert judged(grid)["C9"].verdict == FAILS


def test_claim_2_needs_every_seed_and_the_papers_directions(grid):
    write_row(grid, "per-loop+raw", 101, change=ce_at(1, 12.0, 1e5))
    assert judged(grid)["C2"].verdict == FAILS, "one seed in which the readout moves the exits"
    swapped = write_made_up_grid(grid.parent / "swapped")
    for placement in ("terminal", "per-loop"):
        rewrite(swapped, f"{placement}+rmsnorm", scaled_norm(1e-4))
    claim = judged(swapped)["C2"]
    assert claim.verdict == FAILS and "log norm: RMSNorm above raw -" in claim.reason


def test_what_audits_measure_is_told_of_validation_text_alone(grid):
    assert set(judged(grid)) - set(judged(grid, "test")) == {"C5", "C6", "C7", "C8", "C10"}
    names = [quantity.name for quantity in judged(grid, "test")["C4"].quantities]
    assert "norm ratio" in names and not any(name.startswith("growth") for name in names)


def test_the_sign_of_the_clamp_is_printed(grid):
    rewrite(grid, "per-loop+rmsnorm", first_clamp(0.005))
    assert "that ΔCE with its sign: +0.005" in claims_table([judged(grid)["C8"]]).rows[0][3]


def test_opposite_signs_of_the_clamp_do_not_cancel_between_seeds(grid):
    for seed, delta in ((42, 0.03), (101, -0.03)):
        write_row(grid, "per-loop+rmsnorm", seed, change=first_clamp(delta))
    claim = judged(grid)["C8"]
    assert claim.verdict == FAILS
    signed = next(quantity for quantity in claim.quantities if quantity.signed)
    assert [each.value for each in signed.seeds] == [0.03, -0.03, -0.004] and signed.headline


def test_claim_5_asks_a_floor_of_the_share_of_untrained_weights_alone(grid):
    """A visible scale is at its optimum after training, where the mean radial gradient vanishes."""
    rewrite(grid, "per-loop+raw", each_loop("radial_gradient_share", 0.0))
    assert judged(grid)["C5"].verdict == HOLDS
    path = grid / "rows" / "per-loop+raw-s101" / "audit-untrained.json"
    audit = json.loads(path.read_text())
    audit["loops"][2]["radial_gradient_share"] = 0.29 / 128**0.5
    path.write_text(json.dumps(audit))
    claim = judged(grid)["C5"]
    assert claim.verdict == FAILS, "one loop of one seed"
    assert "untrained, smallest share through raw × √d, per-loop+raw" in claim.reason and "2 of 3 seeds" in claim.reason
    path.unlink()
    for seed in (42, 202):
        (grid / "rows" / f"per-loop+raw-s{seed}" / "audit-untrained.json").unlink()
    assert judged(grid)["C5"].verdict == NOT_MEASURED


@pytest.mark.parametrize("what", ["scale", "direction"])
def test_claim_6_sums_over_tokens_and_loops_and_needs_every_seed(grid, what):
    def one_bad_loop(evaluation, audit):
        audit["loops"][0]["lemma_2"][f"{what}_missed"] *= 50

    rewrite(grid, "per-loop+rmsnorm", one_bad_loop)
    claim = judged(grid)["C6"]
    index = ["scale", "direction"].index(what)
    share = [0.01, 0.03][index]
    assert claim.verdict == HOLDS
    assert claim.quantities[index].mean == pytest.approx(share * (28 + 50) / 29), "one loop of 29, fifty times"
    assert claim.quantities[2].mean == 60 * 29
    write_row(grid, "per-loop+rmsnorm", 202, change=each_loop("lemma_2", missing(what, 0.11)))
    assert judged(grid)["C6"].verdict == FAILS


def test_claim_6_is_not_measured_where_no_scale_is_large(grid):
    nothing = dict.fromkeys(("tokens", "scale_moved", "scale_missed", "direction_moved", "direction_missed"), 0)
    rewrite(grid, "per-loop+rmsnorm", each_loop("lemma_2", lambda loop: nothing))
    assert judged(grid)["C6"].verdict == NOT_MEASURED


def halts(out: Path, condition: str, loops: float, fixed: float, seeds=(42, 101, 202), spread: float = 0.05) -> None:
    """Change what a calibrated rule saves in rows of a condition."""
    for seed in seeds:
        found = sample_halting(loops, fixed, spread=spread)
        path = out / "rows" / f"{condition}-s{seed}" / "halting.json"
        if path.exists():
            write_record(path, found)


def test_claim_10_fails_where_the_rmsnorm_model_halts_adaptively(grid):
    halts(grid, "per-loop+rmsnorm", 1.96, 2.0)
    assert judged(grid)["C10"].verdict == HOLDS, "0.04 loops are nothing"
    halts(grid, "per-loop+rmsnorm", 1.94, 2.0, seeds=[101])
    claim = judged(grid)["C10"]
    assert claim.verdict == FAILS and "2 of 3 seeds" in claim.reason, "in one seed it saves 0.06"


def test_claim_10_asks_of_every_seed_that_one_controlled_model_adapts(grid):
    halts(grid, "per-loop+raw", 2.95, 3.0)
    assert judged(grid)["C10"].verdict == HOLDS, "the penalty still saves 0.4"
    halts(grid, "per-loop+penalty", 2.95, 3.0, seeds=[42])
    assert judged(grid)["C10"].verdict == FAILS, "in seed 42 all three were measured, and none adapts"


def test_claim_10_is_open_while_a_model_that_may_adapt_is_not_measured(grid):
    for name in ("per-loop+raw", "per-loop+penalty"):
        halts(grid, name, 2.95, 3.0, seeds=[101])
    claim = judged(grid)["C10"]
    assert claim.verdict == NOT_MEASURED, "in seed 101 the final-only model was not trained"
    assert "not measured: halting of per-loop+final-only, seed 101" in claim.reason


def test_a_saving_that_units_of_text_do_not_agree_on_is_no_adaptation(grid):
    for name in ("per-loop+raw", "per-loop+penalty", "per-loop+final-only"):
        halts(grid, name, 2.85, 3.0, spread=1.0)
    claim = judged(grid)["C10"]
    low = next(quantity for quantity in claim.quantities if quantity.name.startswith("the lower end"))
    assert claim.verdict == FAILS and low.obeyed is False and low.mean < 0 < 0.15


def test_a_row_that_cannot_tell_what_halting_saves_says_why_and_decides_nothing(grid):
    for path in (grid / "rows").glob("per-loop+*/halting.json"):
        gone = CalibratedHalting(step=STEPS, num_loops=LOOPS, reason="the checkpoint is gone")
        write_record(path, gone)
    assert judged(grid)["C10"].verdict == NOT_MEASURED


def unigram(ce: float | None):
    def change(evaluation, audit):
        evaluation["unigram_ce"] = {} if ce is None else {"valid": ce, "test": 9.0}

    return change


@pytest.mark.parametrize(
    ("condition", "affected"),
    [
        ("terminal+rmsnorm", {"C2", "C11"}),
        ("terminal+raw", {"C2"}),
        ("per-loop+rmsnorm", {"C2", "C9", "C10", "C11"}),
        ("per-loop+final-only", {"C9", "C10"}),
        ("per-loop+layernorm", set()),
    ],
)
def test_it_is_too_early_for_claims_about_ce_while_a_model_they_name_is_hardly_better_than_a_unigram_model(
    grid, condition, affected
):
    rewrite(grid, condition, unigram(4.5))  # a seed's CE at full depth is between 4.40 and 4.50
    found = judged(grid)
    assert {name for name, claim in found.items() if claim.verdict == TOO_EARLY} == affected
    for name in affected:
        assert "a unigram model of the same text is worse (must be at least 0.1)" in found[name].reason
        assert f"{condition}-s42 +" in found[name].reason and found[name].quantities
        assert claims_table([found[name]]).rows[0][-1].startswith("too early to say: nats by which a unigram model")
    assert not any(claim.verdict == TOO_EARLY for claim in judged(grid, "test").values())


def test_a_claim_about_ce_that_would_hold_or_fail_is_too_early_alike(grid):
    rewrite(grid, "terminal+rmsnorm", ce_at(LOOPS, 5.95, 384.0))
    assert judged(grid)["C11"].verdict == TOO_EARLY, "0.05 nats below 6"
    rewrite(grid, "terminal+rmsnorm", ce_at(LOOPS, 5.85, 347.0))
    assert judged(grid)["C11"].verdict == FAILS, "0.15 below: trained, and worse than per-loop"


def test_rows_without_a_unigram_model_keep_their_verdict_and_say_so(grid):
    rewrite(grid, "terminal+rmsnorm", unigram(None))
    assert judged(grid)["C11"].verdict == HOLDS and UNGUARDED in judged(grid)["C11"].reason
    assert UNGUARDED not in judged(grid)["C9"].reason


def test_seeds_are_paired_and_all_listed(grid):
    (grid / "rows" / "per-loop+raw-s101" / "row.json").unlink()
    ratio = judged(grid)["C1"].quantities[0]
    assert [each.seed for each in ratio.seeds] == [42, 202]
    assert ratio.n == 2 and ratio.mean == pytest.approx(348 / 3.4)
    assert ratio.low <= ratio.mean <= ratio.high


def test_one_seed_has_no_interval(grid):
    ratio = judged(grid)["C4"].quantities[0]
    assert (ratio.n, ratio.low, ratio.high) == (1, None, None)


def test_the_verdict_is_about_the_mean_and_tells_how_many_seeds_agree(grid):
    write_row(grid, "per-loop+raw", 42, change=scaled_norm(20))
    claim = judged(grid)["C1"]
    assert claim.verdict == HOLDS
    assert "2 of 3 seeds" in claim.reason


def test_claims_are_judged_on_test_text_too(grid):
    def change(evaluation, audit):
        evaluation["splits"] = {name: json.loads(json.dumps(split)) for name, split in evaluation["splits"].items()}
        for depth in evaluation["splits"]["test"]["depths"]:
            depth["norm"] *= 20

    rewrite(grid, "per-loop+raw", change)
    assert judged(grid, "valid")["C1"].verdict == HOLDS
    assert judged(grid, "test")["C1"].verdict == FAILS


def test_recipes_are_judged_apart(grid):
    write_row(grid, "per-loop+rmsnorm", 42, recipe="modern", change=scaled_norm(1 / 50))
    write_row(grid, "per-loop+raw", 42, recipe="modern")
    assert judged(grid)["C1"].verdict == HOLDS
    assert judged(grid, recipe="modern")["C1"].verdict == FAILS
    assert judged(grid, recipe="modern")["C3"].verdict == NOT_MEASURED


def test_every_claim_says_what_the_paper_reports_and_where_from(grid):
    document = judge_all(read_results(grid))
    assert [claim.id for claim in CLAIMS] == [f"C{number}" for number in range(1, 12)]
    for claim in document.claims:
        assert claim.paper and all(value.source in document.sources for value in claim.paper)
        assert claim.rule and claim.measured
    values = " ".join(value.value for claim in document.claims for value in claim.paper)
    for quoted in (
        "39,207",
        "56,051",
        "17–22",
        "5.40 / 6.04",
        "4.88 / 5.35",
        "5.52",
        "+0.0004 … +0.0055",
        "2.60",
        "0.42",
    ):
        assert quoted in values
    assert decode(text_of(document).encode(), ClaimsRecord) == document, "what is written is read back"


def test_the_bootstrap_is_seeded_and_covers_the_spread():
    low, high = bootstrap([1.0, 2.0, 3.0])
    assert (low, high) == bootstrap([1.0, 2.0, 3.0])
    assert (low, high) == (1.0, 3.0), "the interval of three seeds is their range"
    low, high = bootstrap([float(n) for n in range(12)])
    assert 0 < low < 5.5 < high < 11
    assert bootstrap([5.0, 5.0]) == (5.0, 5.0)
    assert bootstrap([5.0]) is None


def test_bounds_include_their_limit_but_below_does_not():
    assert Bound("at least", 2).obeyed(2.0) and not Bound("at least", 2).obeyed(1.99)
    assert Bound("at most", 2).obeyed(2.0) and not Bound("at most", 2).obeyed(2.01)
    assert Bound("below", 0).obeyed(-0.01) and not Bound("below", 0).obeyed(0.0)
    assert Quantity("x", "", {}, Bound("below", 0)).obeyed is None


def test_the_symlog_axis_is_odd_and_grows():
    assert symlog(0.0) == 0 and symlog(-3.0) == -symlog(3.0)
    assert symlog(0.001) == pytest.approx(0.01, rel=0.01), "linear near zero"
    assert symlog(100.0) - symlog(10.0) == pytest.approx(2.3, abs=0.02), "logarithmic far from it"


def test_claims_tables_and_figures_are_made_without_torch(grid):
    for path in grid.glob("rows/*/audit.json"):
        path.unlink()  # half of the figures will do
    code = (
        "import sys; from pathlib import Path; from loopscope.studies.tables import publish; "
        f"publish(Path({str(grid)!r}), print); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert (grid / "claims.json").exists() and list((grid / "figures").glob("*.svg"))
