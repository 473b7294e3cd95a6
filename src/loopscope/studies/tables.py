"""From the files of a grid's rows to claims.json, tables/ and figures/, again at any time; and the paper's tables, in
Markdown, CSV and LaTeX. No torch here.

A cell is mean ± standard deviation over seeds (the mean alone where there is one seed); – is not measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from loopscope.config import changes_learning, config_to_dict
from loopscope.errors import RunError
from loopscope.files import write_atomically
from loopscope.results.audit import AuditedLoop, AuditResult
from loopscope.results.measures import (
    Measure,
    Run,
    exit_failure,
    final_norm,
    final_perplexity,
    is_raw_at,
    norms_in_training,
    perplexity_at,
    radial_clamps,
)
from loopscope.results.record import write_record
from loopscope.results.reproduction import (
    CLAIMS,
    FAILS,
    HOLDS,
    NOT_MEASURED,
    TOO_EARLY,
    ClaimsRecord,
    Difference,
    Judgement,
    Measured,
)
from loopscope.results.thresholds import CHANCE
from loopscope.rows.conditions import CONDITIONS, FACTORS, OURO_TRAIN, file_name
from loopscope.rows.grid import read_grid, update_differences
from loopscope.show.numbers import ABSENT, mean_deviation, padded, signed_mean_deviation
from loopscope.show.table import Column, Table, columns
from loopscope.studies.paper_claims import INVARIANT, is_adaptive, judge_all, saved_interval
from loopscope.studies.results import Results, View, read_results

QUANTILES = ("p5", "p25", "median", "p75", "p95", "largest")


def publish(out: Path, say: Callable[[str], None]) -> tuple[Results, ClaimsRecord]:
    """Write everything that follows from the rows; gives them, and what claims.json holds."""
    results = read_results(out)
    if results.grid.size.startswith(OURO_TRAIN):
        raise RunError(
            f"{out} has rows of `loopscope reproduce {OURO_TRAIN}`, of which no claim speaks; give that again"
        )
    if results.rows:
        update_differences(out, bf16=any(row.manifest.choice("autocast") == "bfloat16" for row in results.rows))
        results = replace(results, grid=read_grid(out))
    for note in results.notes:
        say(note)
    claims = judge_all(results)
    write_record(out / CLAIMS, claims)
    (out / "tables").mkdir(exist_ok=True)
    for table in all_tables(results, claims):
        table.write(out / "tables")
    write_atomically(out / "tables" / "depths.csv", depths_csv(results))
    try:
        from loopscope.studies.figures import draw_all
    except ImportError as error:
        say(f"no figures: they need {error.name}; run: pip install 'loopscope[report]'")
    else:
        draw_all(results, out / "figures")
    return results, claims


def all_tables(results: Results, claims: ClaimsRecord) -> list[Table]:
    """Every table of every recipe; those of another recipe than the paper's carry its name."""
    tables = []
    for recipe in results.recipes():
        view = results.view(recipe)
        made = [make(view) for make in MAKERS]
        made += [claims_table(claims.of(recipe, "valid")), differences_table(results.grid.recipes[recipe].differences)]
        if recipe != "paper":
            made = [
                replace(each, name=f"{each.name}-{recipe}", title=f"{each.title}, {recipe} recipe") for each in made
            ]
        tables += made
    return tables


# --- the tables ------------------------------------------------------------------------------------------------------


def main_table(view: View) -> Table:
    """The 2×2 and its extensions."""
    test = View("test", view.rows)
    rows = []
    for name in view.conditions():
        measured = [view.each(name, final_perplexity), test.each(name, final_perplexity), view.each(name, _final_bits)]
        measured += [view.each(name, exit_failure), view.each(name, final_norm)]
        rows.append([_title(name), len(view.of(name)), *(each.values() for each in measured), _audits(view, name)])
    header = columns(mean_deviation, "PPL(K) valid", "PPL(K) test", "bits per byte", "CE(1) − CE(K)", "‖H_K‖")
    tokenizers = sorted({row.evaluation.tokenizer for row in view.rows if row.evaluation})
    note = f"Mean ± standard deviation over n seeds. Perplexity per token of the {', '.join(tokenizers)} tokenizer."
    return Table("Main results", ["condition", Column("n", "d"), *header, "audit"], rows, note, name="main")


def _final_bits(row: Run, split: str) -> float | None:
    full = row.depth(row.num_loops, split)
    return full.bits_per_byte if full else None


def norms_in_training_table(view: View) -> Table:
    """‖H_K‖ while training: whether a norm is still on its way."""
    steps = sorted({step for row in view.rows for step in norms_in_training(row)})
    at = {step: _norm_at(step) for step in steps}
    rows = [[_title(name), *(view.each(name, at[step]).values() for step in steps)] for name in view.conditions()]
    pairs = [view.paired(at[step], "per-loop+rmsnorm", "per-loop+raw").values() for step in steps]
    if any(pairs):
        rows.append(["per-loop: RMSNorm over raw", *([a / b for a, b in pair if b] for pair in pairs)])
    header = [Column("‖H_K‖ at step"), *columns(mean_deviation, *(f"{step:,}" for step in steps))]
    note = "On validation text as training evaluates it. Mean ± standard deviation over seeds."
    return Table("Norms while training", header, rows, note, name="norms_in_training")


def _norm_at(step: int) -> Measure:
    return lambda row, split: norms_in_training(row).get(step)


def radial_gradient_table(view: View) -> Table:
    """Radial gradient share at every loop."""
    loops = _trained_loops(view)
    rows = []
    for name in view.conditions():
        first = next(iter(view.of(name).values()))
        at_first, at_last = is_raw_at(first, 1), is_raw_at(first, first.num_loops)
        kind = "raw" if at_last else "raw, norm at K" if at_first else "norm"
        shares = [_of_loop(view, name, k, lambda loop: loop.radial_gradient_share) for k in loops]
        rows.append([_title(name), kind, *shares])
    header = [Column("condition"), Column("readout"), *columns(mean_deviation, *(f"loop {k}" for k in loops))]
    chance = CHANCE / next((row.width for row in view.rows), 1) ** 0.5
    note = f"Median over tokens of |⟨∇CE, h⟩| / (‖∇CE‖‖h‖). A random direction has {CHANCE}/√d = {chance:.3f}."
    return Table("Radial gradient share", header, rows, note, name="radial_gradient")


def scale_response_table(view: View) -> Table:
    """What a change of scale does to the loss of every exit, before and after training."""
    loops = _trained_loops(view)
    rows = []
    for name in view.conditions():
        for weights in WEIGHTS:
            responses = [
                [
                    (loop.scale_curvature if is_raw_at(row, k) else loop.scale_curvature_size)
                    for row in view.of(name).values()
                    if (audit := _audit_of(row, weights)) and (loop := audit.loop(k))
                ]
                for k in loops
            ]
            rows.append([_title(name), weights, *responses])
    header = [Column("condition"), Column("weights"), *columns(mean_deviation, *(f"loop {k}" for k in loops))]
    note = (
        "d²CE/d(ln α)² in nats when the state is multiplied by α before the readout: through raw the mean over tokens, "
        "through a norm the median of absolute values."
    )
    return Table("Response to a change of scale", header, rows, note, name="scale_response")


def lemma_2_table(view: View) -> Table:
    """How much of the motion of scale and direction Lemma 2 misses."""
    rows = []
    for name in view.conditions():
        for weights in WEIGHTS:
            audits = [audit for row in view.of(name).values() if (audit := _audit_of(row, weights))]
            counts = [sum(one.tokens for one in audit.tests_of_lemma_2) for audit in audits]
            missed = [[audit.scale_missed for audit in audits], [audit.direction_missed for audit in audits]]
            rows.append([_title(name), weights, counts, *missed])
    measured = columns(mean_deviation, "tokens × loops", "missed of scale", "missed of direction")
    note = (
        "Σ|measured − predicted| / Σ|measured| over 30 loops and the tokens with s ≥ 10·‖b⊥‖, predicted by one run of "
        "each loop on the same directions at 100 times the scale."
    )
    return Table("Lemma 2", ["condition", "weights", *measured], rows, note, name="lemma_2")


WEIGHTS = ("untrained", "trained")


def _audit_of(row: Run, weights: str) -> AuditResult | None:
    return row.untrained if weights == "untrained" else row.audit


def radial_clamp_table(view: View) -> Table:
    """What removing or freezing the growth of scale costs at inference."""
    names = list(dict.fromkeys(name for row in view.rows for name in radial_clamps(row)))
    rows = []
    for condition in view.conditions():
        found = [radial_clamps(row) for row in view.of(condition).values()]
        rows.append([_title(condition), *([each.get(name) for each in found] for name in names)])
    note = "ΔCE in nats at full depth, with its sign: above zero, the intervention costs something."
    header = [Column("condition"), *columns(signed_mean_deviation, *names)]
    return Table("Radial clamp", header, rows, note, name="radial_clamp")


def variable_depth_table(view: View) -> Table:
    """Perplexity of exits, also beyond the trained depth."""
    depths = sorted({depth.k for row in view.rows for depth in row.depths})
    rows = []
    for name in view.conditions():
        by_depth = [[perplexity_at(row, k, view.split) for row in view.of(name).values()] for k in depths]
        rows.append([_title(name), *by_depth])
    trained = ", ".join(sorted({str(row.num_loops) for row in view.rows}))
    note = f"Validation perplexity when exiting after loop K; trained at K = {trained}."
    header = [Column("condition"), *columns(mean_deviation, *(f"K = {k}" for k in depths))]
    return Table("Variable depth", header, rows, note, name="variable_depth")


PAPER_LOOPS = {
    "per-loop+rmsnorm": "1.00",
    "per-loop+raw": "2.16",
    "per-loop+final-only": "1.78",
    "per-loop+penalty": "2.60",
}
"""Mean loops of the paper's table of calibrated halting, quoted by R; K = 4, the size is not given."""


def halting_table(view: View) -> Table:
    """The paper's table of calibrated halting, and beside each saving what a fixed depth saves at the same bound."""
    rows = []
    for name in view.conditions():
        if CONDITIONS[name].placement != "per-loop":
            continue
        runs = list(view.of(name).values())
        found = [run.halting for run in runs if run.halting and not run.halting.reason]
        intervals = [f"[{padded(ends[0], 2)}, {padded(ends[1], 2)}]" for run in runs if (ends := saved_interval(run))]
        rows.append(
            [
                _title(name),
                len(found),
                PAPER_LOOPS.get(name),
                [each.mean_loops for each in found],
                [each.fixed_depth for each in found],
                " ".join([signed_mean_deviation(each.saved for each in found), *intervals]),
                [100 * each.ppl_increase for each in found if each.ppl_increase is not None],
                "; ".join(dict.fromkeys(map(kind_of_saving, runs))),
            ]
        )
    header = [
        Column("condition"),
        Column("n", "d"),
        Column("loops, paper [R]"),
        *columns(mean_deviation, "loops", "fixed depth"),
    ]
    header += [Column("saved beyond it"), Column("PPL, %", signed_mean_deviation), Column("so it")]
    note = (
        "Margin rule, at most 1 % more perplexity with 95 % confidence, calibrated and tested on different units of "
        "the validation text; loops, the 95 % interval over units of each seed and the change of perplexity are of the "
        "test units. What a rule saves beyond the smallest fixed depth that is certified at the same bound is "
        "adaptive; the paper's means have no fixed depth beside them, and no bound."
    )
    return Table("Calibrated halting", header, rows, note, name="halting")


def kind_of_saving(run: Run) -> str:
    """What a row's saving is: adaptive computation, K-invariance, or nothing."""
    found = run.halting
    if found is None or found.reason or found.saved is None or found.fixed_depth is None:
        return f"not measured: {found.reason}" if found and found.reason else "not measured"
    if is_adaptive(run):
        return "adapts"
    if found.saved >= INVARIANT:
        return "is undecided: it saves too little, or not clearly"
    if run.num_loops and found.fixed_depth < run.num_loops:
        return f"is K-invariant: {padded(found.fixed_depth, 1)} of {run.num_loops} loops do for every token"
    return "saves nothing: every loop is needed"


def token_norms_table(view: View) -> Table:
    """How norms are spread over tokens at full depth."""
    rows = []
    for name in view.conditions():
        found: list[list[float | None]] = [[] for _ in range(len(QUANTILES) + 1)]
        for row in view.of(name).values():
            last = row.audit.loop(row.num_loops) if row.audit else None
            quantiles = last.norm_quantiles if last else []
            if len(quantiles) == len(QUANTILES):
                ratio = quantiles[-1] / quantiles[2] if quantiles[2] else None
                for values, value in zip(found, [*quantiles, ratio], strict=True):
                    values.append(value)
        rows.append([_title(name), *found])
    note = "‖h‖ of single tokens after loop K, from the audit's text."
    header = [Column("condition"), *columns(mean_deviation, *QUANTILES, "largest / median")]
    return Table("Norms of single tokens", header, rows, note, name="token_norms")


def residual_updates_table(view: View) -> Table:
    """What a loop adds along the state and across it."""
    fields: list[OfLoop] = [
        lambda loop: loop.scale,
        lambda loop: loop.radial_update,
        lambda loop: loop.tangential_update,
    ]
    fields += [lambda loop: loop.angular_step, lambda loop: loop.angular_step_times_scale]
    rows = []
    for name in view.conditions():
        for k in _trained_loops(view):
            rows.append([_title(name), k, *(_of_loop(view, name, k, field) for field in fields)])
    header = [Column("condition"), Column("loop", "d")]
    header += columns(mean_deviation, "s", "radial", "tangential", "‖Δu‖", "‖Δu‖·s")
    note = "What the loop after this state adds, as RMS over the width: along the state, across it, and its turn."
    return Table("Residual updates", header, rows, note, name="residual_updates")


def fixed_and_varied_table(view: View) -> Table:
    """Every field of the resolved configurations: what varied, by condition, and what was fixed."""
    values: dict[str, dict[str, list[Run]]] = {}
    for row in view.rows:
        assert row.config is not None, "a row without is refused"
        for section, fields in config_to_dict(row.config).items():
            for name, value in fields.items():
                values.setdefault(f"{section}.{name}", {}).setdefault(_plain(name, value), []).append(row)
    varied = {field: found for field, found in values.items() if len(found) > 1}
    fixed = {field: found for field, found in values.items() if len(found) == 1}
    rows = [[field, "varied", _who(field, found)] for field, found in varied.items()]
    rows += [[field, "fixed", next(iter(found))] for field, found in fixed.items()]
    others = unexpected_variation(varied)
    note = f"These vary besides the named factors: {', '.join(others)}." if others else ONLY_FACTORS
    guarded = [f"{row.condition}-s{row.seed} ({row.guarded})" for row in view.rows if row.guarded]
    note += f" A guard skipped or rolled back steps of {', '.join(guarded)}." if guarded else " No guard had to act."
    return Table("What was fixed and what varied", ["field", "", "value"], rows, note, name="fixed_and_varied")


ONLY_FACTORS = "Only the named factors and the seed vary; everything else is equal in all rows."


def unexpected_variation(fields: Iterable[str]) -> list[str]:
    """Fields that vary and are neither a condition's factor, nor the seed, nor how a row was run."""
    names = {field: field.split(".")[1] for field in fields}
    return [field for field, name in names.items() if changes_learning(name) and name not in (*FACTORS, "seed")]


def claims_table(claims: list[Judgement]) -> Table:
    """Each claim with our value, the paper's, and the verdict."""
    rows = []
    for claim in claims:
        told = [quantity for quantity in claim.quantities if quantity.headline and quantity.n]
        ours = "; ".join(f"{quantity.name}: {measured(quantity)}" for quantity in told)
        paper = "; ".join(f"{value.value} [{value.source}]" for value in claim.paper)
        decided = claim.quantities and claim.verdict != TOO_EARLY
        verdict = claim.verdict if decided else f"{claim.verdict}: {claim.reason}"
        absent = [quantity.name for quantity in claim.quantities if quantity.rule and not quantity.n]
        verdict += f" (missing: {'; '.join(absent)})" if absent and told else ""
        rows.append([claim.id, claim.title, claim.rule, ours or ABSENT, paper, verdict])
    header = ["", "claim", "rule", "here (validation text)", "paper", "verdict"]
    note = (
        "Here: mean over seeds [95 % bootstrap interval; of two or three seeds that is their range], n seeds. "
        "P: abstract and project page; R: a review."
    )
    return Table("Claims", header, rows, note, name="claims")


def brief_claims_table(claims: list[Judgement]) -> Table:
    """Claim, what decides it here, whether it holds: of a claim that fails, the first quantity that breaks its rule."""
    rows = []
    for claim in claims:
        ruled = [quantity for quantity in claim.quantities if quantity.rule and quantity.n]
        deciding = next((quantity for quantity in ruled if quantity.obeyed is False), ruled[0] if ruled else None)
        here = (
            claim.reason
            if deciding is None or claim.verdict == TOO_EARLY
            else f"{deciding.name}: {_brief(deciding)} (rule: {deciding.rule})"
        )
        rows.append([f"{claim.id} {claim.title}", here, IN_A_WORD.get(claim.verdict, claim.verdict)])
    return Table("Claims", ["claim", "here", "holds"], rows, name="claims_in_brief")


def _brief(quantity: Measured) -> str:
    """Mean and interval in three digits: a rule for every seed may be broken where the mean obeys it."""
    low, middle, high = (padded(value, 3) for value in (quantity.low, quantity.mean, quantity.high))
    return middle if quantity.low is None else f"{middle} [{low}, {high}]"


IN_A_WORD = {HOLDS: "yes", FAILS: "no", TOO_EARLY: "too early", NOT_MEASURED: "not measured"}


def measured(quantity: Measured) -> str:
    """Mean, interval and n of a quantity of claims.json."""
    sign = "+" if quantity.signed else ""
    low, middle, high = (padded(value, sign=sign) for value in (quantity.low, quantity.mean, quantity.high))
    interval = "" if quantity.low is None else f" [{low}, {high}]"
    return f"{middle}{interval}, n = {quantity.n}"


def depths_csv(results: Results) -> str:
    """Every score of every row, one line each: the numbers behind the tables."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("ce", "perplexity", "bits_per_byte", "norm")
    writer.writerow(["condition", "recipe", "seed", "split", "loops", *names])
    for row in results.rows:
        for split, scores in row.splits.items():
            for depth in scores.depths:
                values = (depth.ce, depth.perplexity, depth.bits_per_byte, depth.norm)
                writer.writerow([row.condition, row.recipe, row.seed, split, depth.k, *values])
    return text.getvalue()


def differences_table(differences: list[Difference]) -> Table:
    """Everything that is not as in the paper."""
    rows = [[difference.field, difference.paper, difference.here] for difference in differences]
    return Table("Differences from the paper", ["", "paper", "here"], rows, name="differences")


MAKERS: tuple[Callable[[View], Table], ...] = (
    main_table,
    norms_in_training_table,
    radial_gradient_table,
    scale_response_table,
    lemma_2_table,
    radial_clamp_table,
    variable_depth_table,
    halting_table,
    token_norms_table,
    residual_updates_table,
    fixed_and_varied_table,
)


# --- cells -----------------------------------------------------------------------------------------------------------


def _title(condition: str) -> str:
    return CONDITIONS[condition].title


def _trained_loops(view: View) -> range:
    return range(1, max((row.num_loops for row in view.rows), default=0) + 1)


OfLoop = Callable[[AuditedLoop], float | None]


def _of_loop(view: View, condition: str, k: int, of: OfLoop) -> list[float | None]:
    audits = (row.audit for row in view.of(condition).values() if row.audit)
    return [of(loop) for audit in audits if (loop := audit.loop(k)) is not None]


def _audits(view: View, name: str) -> str:
    verdicts = [row.verdict for row in view.of(name).values() if row.audit]
    kinds = list(dict.fromkeys(verdicts))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds) or ABSENT


def _plain(name: str, value: Any) -> str:
    if name in ("data", "valid") and value:
        return ", ".join(map(file_name, value))
    return "none" if value is None else str(value)


def _who(field: str, found: dict[str, list[Run]]) -> str:
    if field == "training.seed":
        return ", ".join(found)
    parts = []
    for value, rows in found.items():
        names = list(dict.fromkeys(row.condition for row in rows))
        parts.append(f"{value} ({', '.join(names)})")
    return "; ".join(parts)
