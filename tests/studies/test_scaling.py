"""Laws of loops: φ comes back from losses that were made with it, and what runs cannot tell is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from made_up import eval_row, sample_manifest, write_sample

from loopscope.cli import main
from loopscope.config import Config, ModelConfig, TrainingConfig
from loopscope.errors import DataError
from loopscope.model.looped_lm import build
from loopscope.results.measures import read_run
from loopscope.results.record import text_of
from loopscope.results.scaling import Fit, Point
from loopscope.studies import scaling as scaling_module
from loopscope.studies.scaling import (
    HIGH_P,
    LOW_P,
    PHI,
    check_identifiable,
    counted_by_the_laws,
    fit_law,
    fit_test_time,
    huber,
    points_of,
    predicted_log_loss,
    predicted_losses,
    scaling,
)

TRUE = Fit(E=1.7, A=60.0, B=400.0, alpha=0.25, beta=0.35, phi=0.46, is_phi_fixed=False, objective=0.0, error=0.0)


def grid(law: Fit = TRUE, *, noise: float = 0.0, seed: int = 0, widths=(64, 96, 128, 192), tokens=(2e6, 8e6, 32e6)):
    """Losses of a grid at equal unrolled depth, loops 1, 2, 4, 8 of 8, 4, 2, 1 layers, in some widths and budgets."""
    rng = np.random.default_rng(seed)
    made = []
    for width in widths:
        for loops in (1, 2, 4, 8):
            layer = 12 * width**2
            for budget in tokens:
                point = Point(f"w{width}-r{loops}", loops, 2 * layer, 8 // loops * layer, int(budget), 1.0)
                loss = predicted_losses(law, [point])[0] * math.exp(noise * rng.standard_normal())
                made.append(replace(point, loss=loss))
    return made


def test_phi_comes_back_from_losses_without_noise():
    fit, _ = fit_law(grid())
    assert fit.phi == pytest.approx(0.46, abs=2e-3) and fit.alpha == pytest.approx(0.25, abs=2e-3)
    assert pytest.approx(1.7, rel=1e-2) == fit.E and fit.error < 1e-5


@pytest.mark.parametrize("phi", [0.0, 0.46, 0.9])
def test_phi_lies_within_its_interval_where_losses_are_noisy(phi):
    found = scaling(grid(replace(TRUE, phi=phi), noise=2e-3, seed=3), starts=200)
    assert found.phi_low <= phi <= found.phi_high and found.phi_high - found.phi_low < 0.5
    assert found.phi_low <= found.fit.phi <= found.phi_high and found.at_bound == 0
    assert (found.phi_low <= 0 <= found.phi_high) == ("It holds 0" in found.summary)


def test_more_noise_makes_the_interval_wider():
    narrow, wide = (scaling(grid(noise=noise), starts=100, bootstraps=100) for noise in (1e-4, 4e-3))
    assert wide.phi_high - wide.phi_low > 4 * (narrow.phi_high - narrow.phi_low)


def test_a_wrong_phi_beside_predicts_left_out_cells_worse():
    found = scaling(grid(noise=1e-3), starts=200, bootstraps=20)
    assert [fit.phi for fit in found.beside] == [0.0, 1.0] and all(fit.is_phi_fixed for fit in found.beside)
    assert all(fit.held_out_error > 1.5 * found.fit.held_out_error for fit in found.beside)
    assert found.fit.held_out_error >= found.fit.error, "what was not fitted is missed by more"


def test_an_outlier_hardly_moves_the_law():
    points = grid(noise=5e-4)
    points[7] = replace(points[7], loss=2 * points[7].loss)
    assert fit_law(points)[0].phi == pytest.approx(0.46, abs=0.05)


def test_the_fit_side_by_side_finds_the_minimum_that_l_bfgs_b_finds_start_by_start():
    optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")
    points = grid(noise=3e-3, seed=1)
    data = scaling_module._Data.of(points)

    def objective(theta_P):
        logs, slopes = predicted_log_loss(theta_P[None], data)
        residual = logs[0] - data.log_loss_n
        pull = np.clip(residual, -scaling_module.DELTA, scaling_module.DELTA)
        return 1e4 * huber(residual).sum(), 1e4 * slopes[0].T @ pull  # scaled: its tolerances are absolute

    starts = scaling_module.random_starts(60, seed=5)
    bounds = list(zip(LOW_P, HIGH_P, strict=True))
    theirs = min(
        (
            optimize.minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 4000})
            for start in starts
        ),
        key=lambda found: found.fun,
    )
    ours, _ = fit_law(points)
    assert ours.objective <= 1e-4 * theirs.fun * (1 + 1e-3)
    assert ours.phi == pytest.approx(theirs.x[PHI], abs=0.02)


def test_the_derivatives_are_those_of_the_law():
    data, theta = scaling_module._Data.of(grid()), scaling_module.random_starts(5, seed=2)
    _, slopes = predicted_log_loss(theta, data)
    for place in range(6):
        step = np.zeros(6)
        step[place] = 1e-6
        around = [predicted_log_loss(theta + sign * step, data)[0] for sign in (1, -1)]
        assert np.allclose((around[0] - around[1]) / 2e-6, slopes[..., place], atol=1e-5)


def test_no_start_leaves_the_bounds_and_a_fixed_phi_stays():
    data = scaling_module._Data.of(grid(noise=0.05))
    starts = scaling_module.random_starts(50, seed=0, phi=1.0)
    theta, _ = scaling_module.fit_side_by_side(data, starts, np.ones((50, len(data.loops_n))), (PHI,))
    assert (theta >= LOW_P).all() and (theta <= HIGH_P).all() and (theta[:, PHI] == 1.0).all()


def test_the_worth_of_loops_adds_up_to_r_to_the_phi():
    found = scaling(grid(noise=1e-3), starts=100, bootstraps=50)
    assert found.worth[0].worth == 1.0 == found.worth[0].low
    assert sum(each.worth for each in found.worth) == pytest.approx(8**found.fit.phi)
    assert all(each.low <= each.worth <= each.high for each in found.worth)


# --- what cannot be told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "missing"),
    [
        ([p for p in grid() if p.loops == 4], r"two numbers of loops or more \(all have 4\)"),
        (grid(widths=(64,)), "two sizes or more at the same number of loops"),
        (grid(tokens=(2e6, 8e6)), r"3 token budgets or more \(here 2,000,000, 8,000,000\)"),
        (grid()[:5], r"8 runs or more \(5 here\)"),
        ([], "8 runs or more"),
    ],
)
def test_runs_that_cannot_identify_phi_are_refused_with_what_is_missing(points, missing):
    with pytest.raises(DataError, match=missing):
        check_identifiable(points, "iso-depth")


def test_everything_that_is_missing_is_said_at_once():
    with pytest.raises(DataError) as caught:
        scaling(grid(widths=(64,), tokens=(2e6,)))
    assert "8 runs" in str(caught.value) and "two sizes" in str(caught.value) and "budgets" in str(caught.value)


def test_an_interval_that_says_nothing_is_called_so():
    found = scaling(grid(noise=0.08, widths=(64, 72)), starts=100, bootstraps=60)
    assert "too wide to say what a loop is worth" in found.summary


def test_what_the_bounds_hold_and_not_the_runs_is_said():
    assert "Held by the bounds" not in scaling(grid(noise=1e-3), starts=100, bootstraps=20).summary
    found = scaling(grid(replace(TRUE, E=1e-9), noise=1e-3), starts=100, bootstraps=20)
    assert "Held by the bounds of the fit and not by the runs: E." in found.summary


# --- Parcae ----------------------------------------------------------------------------------------------------------


def test_parcaes_law_counts_parameters_unrolled_and_finds_the_decay_at_test_time():
    points = []
    for p in grid(replace(TRUE, phi=1.0), noise=1e-4):
        depths = tuple((k, p.loss + 0.8 * math.exp(-2.5 * k / p.loops)) for k in range(1, 2 * p.loops + 2))
        points.append(replace(p, depths=depths))
    found = scaling(points, law="parcae", starts=100, bootstraps=30)
    assert found.fit.phi == 1.0 and found.phi_low is None and found.worth == []
    assert found.fit.error < 1e-3 < found.beside[0].error
    assert found.test_time.z == pytest.approx(2.5, rel=0.01) and pytest.approx(0.8, rel=0.01) == found.test_time.Z
    assert found.test_time.z_low <= found.test_time.z <= found.test_time.z_high


def test_without_depths_there_is_no_law_of_test_time():
    assert fit_test_time(grid()) is None


def test_the_result_is_strict_json_with_every_prediction():
    points = json.loads(text_of(scaling(grid(noise=1e-3), starts=50, bootstraps=10)))["points"]
    assert all(point["predicted"] == pytest.approx(point["loss"], rel=0.02) for point in points)


# --- from run folders ------------------------------------------------------------------------------------------------


def write_run(folder, *, width=16, loops=2, steps=10, loss=4.0, tokenizer="t", logged=None):
    """A run of two core layers with a prelude, as training leaves it, at a loss of our choice."""
    model = ModelConfig(
        vocab_size=64, width=width, num_layers=2, num_loops=loops, prelude_layers=1, num_heads=2, max_length=8
    )
    config = Config(model=model, training=TrainingConfig(steps=steps, batch=4))
    manifest = sample_manifest(["loopscope", "train"], 42)
    manifest = replace(manifest, data=replace(manifest.data, tokenizer_sha256=tokenizer))
    scores = [*[loss + 1.0] * (loops - 1), loss]
    rows = [eval_row(steps if logged is None else logged, scores, [1.0] * loops)]
    return write_sample(folder, config, metrics=rows, manifest=manifest)


def read(*folders):
    return [read_run(folder, folder.name) for folder in folders]


def test_a_run_is_a_point_with_the_parameters_of_its_loop_apart(tmp_path):
    (point,), told = points_of(read(write_run(tmp_path / "a")))
    layer = 4 * 16 * 16 + 3 * 16 * 64 + 2 * 16  # attention, SwiGLU of four widths, two gains
    assert told == [] and (point.loops, point.recurrent, point.tokens, point.loss) == (2, 2 * layer, 10 * 4 * 8, 4.0)
    assert point.once == layer + 16, "the prelude and the gain of the readout; no embedding, positions or head"
    assert point.depths == ((1, 5.0), (2, 4.0))


def test_tables_of_values_are_looked_up_and_no_parameters_of_the_law():
    """Every other layer of Parcae has one, V × kv wide; only its gate multiplies anything."""
    tiny = ModelConfig(vocab_size=19, width=16, num_layers=2, num_loops=2, num_heads=2, max_length=8)
    plain, with_tables = (
        counted_by_the_laws(build(replace(tiny, value_embeddings=value), device="meta")) for value in (False, True)
    )
    assert with_tables == (plain[0], plain[1] + 16 * 2), (
        "16 channels, a gate for each of two heads, in one layer of two"
    )


def test_a_run_that_is_not_finished_is_left_out_with_a_sentence(tmp_path):
    points, (told,) = points_of(read(write_run(tmp_path / "a"), write_run(tmp_path / "b", logged=5)))
    assert len(points) == 1 and told.startswith("b is left out: at step 5 of 10")


def test_losses_in_other_tokens_do_not_compare(tmp_path):
    with pytest.raises(DataError, match="a and b were trained on other text, or in other tokens"):
        points_of(read(write_run(tmp_path / "a"), write_run(tmp_path / "b", tokenizer="u")))


def test_the_verb_reads_runs_fits_prints_and_writes(tmp_path, capsys):
    for width in (16, 32, 64):
        for loops in (1, 2, 4):
            for steps in (10, 100, 1000):
                name = f"w{width}-r{loops}-s{steps}"
                asked = {"width": width, "loops": loops, "steps": steps}
                (point,), _ = points_of(read(write_run(tmp_path / "first" / name, **asked)))
                write_run(tmp_path / "runs" / name, **asked, loss=predicted_losses(TRUE, [point])[0])
    command = ["scaling", str(tmp_path / "runs"), "--out", str(tmp_path / "law"), "--starts", "200"]
    assert main([*command, "--bootstraps", "20"]) == 0
    told = capsys.readouterr().out
    assert "φ = 0.46 [0.4" in told and "0 (fixed)" in told and "what the r-th loop is worth" in told
    assert {path.name for path in (tmp_path / "law").iterdir()} == {"scaling.json", "scaling.svg", "scaling.pdf"}
    assert json.loads((tmp_path / "law/scaling.json").read_text())["fit"]["phi"] == pytest.approx(0.46, abs=0.01)
    assert main([*command, "--law", "parcae", "--bootstraps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["phi"] == 1.0
    assert main(["scaling", str(tmp_path / "runs" / "w16-r1-s10"), "--out", str(tmp_path / "law")]) == 2
    assert "missing: 8 runs or more (1 here)" in capsys.readouterr().err
