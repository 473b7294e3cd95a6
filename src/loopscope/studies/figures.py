"""Figures of arXiv 2606.24898 from the files of a grid (1–4, α-sweep, gates) and of ouro.json (5–7), and of a law of
loops, as charts. No torch here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from loopscope.results.audit import AuditedLoop, Variable
from loopscope.results.measures import (
    Measure,
    Run,
    alpha_changes,
    exit_failure,
    final_norm,
    perplexity_at,
)
from loopscope.results.ouro import AS_IT_IS, FROZEN, READOUTS, REMOVED, LoopStates, OuroRecord, ReadoutKind
from loopscope.results.scaling import ScalingRecord
from loopscope.results.thresholds import LINEAR_BELOW, SATURATED_LOGIT
from loopscope.rows.conditions import CONDITIONS
from loopscope.show.chart import Axis, Chart, Level, Series, Style
from loopscope.show.drawing import save
from loopscope.show.numbers import brief
from loopscope.studies.paper_claims import ROLLOUT
from loopscope.studies.results import Results, View, mean

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; lines differ in their markers too.
STYLES = {
    "terminal+rmsnorm": Style(colour="#000000", marker="s"),
    "terminal+raw": Style(colour="#8c8c8c", marker="D"),
    "per-loop+rmsnorm": Style(colour="#d55e00", marker="o"),
    "per-loop+raw": Style(colour="#0072b2", marker="^"),
    "per-loop+final-only": Style(colour="#56b4e9", marker="v"),
    "terminal+penalty": Style(colour="#7a6a2f", marker="P"),
    "per-loop+penalty": Style(colour="#009e73", marker="X"),
    "per-loop+inter-loop-norm": Style(colour="#cc79a7", marker="*"),
    "per-loop+layernorm": Style(colour="#e69f00", marker="p"),
}
READOUT_STYLES = {
    AS_IT_IS: Style(colour="#d55e00", marker="o"),
    REMOVED: Style(colour="#0072b2", marker="^"),
    FROZEN: Style(colour="#56b4e9", marker="v"),
}
GREY = Style(colour="#808080", width=0.8)
LOOPS = [
    Style(colour=colour, marker=marker)
    for colour, marker in zip(("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9"), "osD^vP", strict=True)
]
"""Of models of one number of loops."""
ALPHA = Axis("α: final state × α before the readout", "log")
CHANGE = Axis("change of CE at loop K, nats", "signed-log", linear_below=0.01)


def draw_all(results: Results, folder: Path) -> None:
    """Every figure that the rows have the numbers for; those of another recipe than the paper's carry its name."""
    for recipe in results.recipes():
        for name, charts in FIGURES.items():
            save(charts(results.view(recipe)), folder / (name if recipe == "paper" else f"{name}-{recipe}"))


# --- Figures 1 and 2: planes -----------------------------------------------------------------------------------------


def exit_plane(view: View) -> list[Chart]:
    """Exit failure CE(1) − CE(K) against the final norm: placement moves one, the readout the other."""
    chart = Chart(
        name="exit-plane",
        title="Exit failure and norm drift",
        x=Axis("final norm ‖H_K‖ (scale drifts →)", "log"),
        y=Axis("CE(1) − CE(K), nats (exits fail ↑)", "signed-log", linear_below=LINEAR_BELOW),
        series=_points(view, final_norm, exit_failure),
        levels=[Level(0.0)],
    )
    return [chart]


def visibility_activity(view: View) -> list[Chart]:
    """How well the loss sees the scale, against how strongly the loop carries it."""
    chart = Chart(
        name="visibility-activity",
        title="Carried and not seen (upper left): a blind spot",
        x=Axis("visibility of scale to the loss", "signed-log", linear_below=1e-6),
        y=Axis("activity: gain of scale through the next loop", shows=(-0.05, 1.15)),
        series=_points(view, _of_scale(lambda variable: variable.visibility), _of_scale(lambda one: one.activity)),
    )
    return [chart]


def _points(view: View, first: Measure, second: Measure) -> list[Series]:
    """Each seed as a small point and each condition's mean as a large one, hollow, so that one below it is seen."""
    seeds, means = [], []
    for name in view.conditions():
        if found := view.paired_measures(name, first, second):
            xs, ys = zip(*found, strict=True)
            style = STYLES[name]
            seeds.append(Series(label="", xs=xs, ys=ys, style=replace(style, size=4.0), mode="marks"))
            large = replace(style, size=10.0, is_open=True)
            means.append(Series(label=_label(view, name), xs=[mean(xs)], ys=[mean(ys)], style=large, mode="marks"))
    return [*seeds, *means]


def _of_scale(of: Callable[[Variable], float | None]) -> Measure:
    def measure(row: Run, split: str) -> float | None:
        found = row.audit.variables if row.audit else ()
        return next((of(variable) for variable in found if variable.name == "scale"), None)

    return measure


# --- Figure 3: thirty loops ------------------------------------------------------------------------------------------


def thirty_loops(view: View) -> list[Chart]:
    """Scale, its increments with their prediction, and angular step × scale, over the audit's rollout."""
    scale = _over_loops(view, lambda loop: loop.scale, is_named=True)
    measured = _over_loops(view, lambda loop: loop.radial_increment, "marks")
    predicted = _over_loops(view, lambda loop: loop.predicted_increment, "lines")
    angle = _over_loops(view, lambda loop: loop.angular_step_times_scale)
    x = Axis("loop k", whole=True, shows=(0, ROLLOUT + 1))
    depths = [Level(float(depth), of="x") for depth in sorted({row.num_loops for row in view.rows})]
    log, signed = Axis("", "log"), Axis("", "signed-log", linear_below=0.01)
    panels = {
        "scale s_k": (log, scale),
        "increment of s: measured (marks), ã/d (lines)": (signed, [*predicted, *measured]),
        "angular step × scale": (log, angle),
    }
    return [
        Chart(name="thirty-loops", title=title, x=x, y=y, series=series, levels=depths)
        for title, (y, series) in panels.items()
    ]


def _over_loops(
    view: View,
    of: Callable[[AuditedLoop], float | None],
    mode: Literal["both", "lines", "marks"] = "both",
    *,
    is_named: bool = False,
) -> list[Series]:
    """Of every condition the means over seeds at every loop that has the value."""
    made = []
    for name in view.conditions():
        values: dict[int, list[float]] = {}
        for row in view.of(name).values():
            for loop in row.loops:
                if (value := of(loop)) is not None:
                    values.setdefault(loop.k, []).append(value)
        ks = sorted(values)
        if ks:
            style = replace(STYLES[name], size=3.0, width=1.2)
            label = _label(view, name) if is_named else ""
            made.append(Series(label=label, xs=ks, ys=[mean(values[k]) for k in ks], style=style, mode=mode))
    return made


# --- Figure 4: the frontier ------------------------------------------------------------------------------------------


def frontier(view: View) -> list[Chart]:
    """Perplexity against throughput at every trained depth, of the models whose exits are trained.

    Rows were timed in different minutes, beside others, and do the same work at a depth: only their readouts differ.
    So every condition stands at the same throughput, the median over all rows.
    """
    evaluations = [row.evaluation for row in view.rows if row.evaluation and row.evaluation.throughput]
    timed = [{each.k: each.tokens_per_second for each in found.throughput} for found in evaluations]
    ks = sorted(set(timed[0]).intersection(*timed)) if timed else []
    speeds = {k: statistics.median(each[k] for each in timed) for k in ks}
    series = []
    for name in view.conditions():
        if CONDITIONS[name].placement == "per-loop" and ks:
            rows = list(view.of(name).values())
            quality = [mean(perplexity_at(row, k, view.split) or math.nan for row in rows) for k in ks]
            series.append(Series(label=_label(view, name), xs=list(speeds.values()), ys=quality, style=STYLES[name]))
    x = Axis(
        f"tokens per second at depth K with one readout (median of {len(view.rows)} rows)",
        "log",
        ticks={speed: f"{speed:,.0f}\nK = {k}" for k, speed in speeds.items()},
    )
    y = Axis("validation perplexity")
    return [Chart(name="frontier", title="Compute and quality, per-loop models", x=x, y=y, series=series)]


# --- the α-sweep and the gates ---------------------------------------------------------------------------------------


def alpha_sweep(view: View) -> list[Chart]:
    """Change of CE at full depth when the final state is scaled by α before the readout: means over seeds."""
    series = []
    for name in view.conditions():
        found = [changes for row in view.of(name).values() if (changes := alpha_changes(row))]
        alphas = list(found[0]) if found else []
        same = [changes for changes in found if list(changes) == alphas]
        if alphas:
            change = [mean(changes[alpha] for changes in same) for alpha in alphas]
            series.append(Series(label=_label(view, name), xs=alphas, ys=change, style=replace(STYLES[name], size=3.0)))
    title = "What the loss sees of the scale"
    return [Chart(name="alpha-sweep", title=title, x=ALPHA, y=CHANGE, series=series, is_nested=True)]


def gates(view: View) -> list[Chart]:
    """The same gate on h (solid) and on norm(h) (dotted): how large its logits get where the state is long, and what it
    saves at the same bound."""
    sizes, savings = [], []
    for place, name in enumerate(view.conditions()):
        for reads, side in (("h", -0.1), ("norm(h)", 0.1)):
            rows = [row.halting for row in view.of(name).values() if row.halting]
            found = [gate for row in rows for gate in row.gates if gate.reads == reads]
            by_loop: dict[int, list[tuple[float, float]]] = {}
            for loop in (loop for gate in found for loop in gate.loops):
                if loop.k and loop.norm and loop.logit is not None:
                    by_loop.setdefault(loop.k, []).append((loop.norm, loop.logit))
            norms, logits = ([mean(pair[n] for pair in by_loop[k]) for k in sorted(by_loop)] for n in (0, 1))
            style = replace(STYLES[name], dash="-" if reads == "h" else ":", is_open=reads != "h")
            label = _label(view, name) if reads == "h" else ""
            if by_loop:
                sizes.append(Series(label=label, xs=norms, ys=logits, style=replace(style, size=4.0, width=1.2)))
            saved = [value for gate in found if (value := gate.saved) is not None]
            if saved:
                style = replace(style, size=9.0)
                savings.append(Series(label="", xs=[place + side], ys=[mean(saved)], style=style, mode="marks"))
    size = Chart(
        name="gates",
        title="a gate on h (solid) and on norm(h) (dotted)",
        x=Axis(f"norm ‖h_k‖, loops 1 … {ROLLOUT}", "log"),
        y=Axis("mean |logit| of the gate", "log"),
        series=sizes,
        levels=[Level(SATURATED_LOGIT, "saturated")],
    )
    saving = Chart(
        name="gates",
        title="saved at the same bound: on h (full), norm(h) (open)",
        x=Axis("", ticks={}),
        y=Axis("loops saved beyond the fixed depth"),
        series=savings,
        levels=[Level(0.0)],
    )
    return [size, saving]


def _label(view: View, name: str) -> str:
    return f"{CONDITIONS[name].title} (n={len(view.of(name))})"


FIGURES: dict[str, Callable[[View], list[Chart]]] = {
    "figure1_exit_plane": exit_plane,
    "figure2_visibility_activity": visibility_activity,
    "figure3_thirty_loops": thirty_loops,
    "figure4_frontier": frontier,
    "alpha_sweep": alpha_sweep,
    "gates": gates,
}


# --- Figures 5 to 7: models of Ouro's kind ---------------------------------------------------------------------------


def draw_ouro(record: OuroRecord, folder: Path) -> None:
    """Figures 5 and 7 of one model."""
    last, name = record.last, Path(record.subject.name).name
    curves = {READOUTS[each]: (last, each, READOUT_STYLES[each]) for each in last.sweep} if last else {}
    title = f"{name}, loop {last.k if last else 0}: what the loss sees of the scale"
    save([_sweep(record, curves, title)], folder / "figure5_alpha_sweep")
    save(_depth(record), folder / "figure7_variable_depth", title=f"{name} at variable depth (dotted: as trained)")


def draw_ouro_training(records: Mapping[str, OuroRecord], folder: Path) -> None:
    """Figure 6: the sweep of Figure 5 on models that were trained with and without the norm, by condition."""
    curves = {}
    for name, record in records.items():
        if record.states and (last := record.last):
            own = AS_IT_IS if AS_IT_IS in last.sweep else REMOVED
            curves[name] = (last, own, STYLES[name.rpartition("-s")[0]])
    first = next((record for record in records.values() if record.states and record.last), None)
    charts = [_sweep(first, curves, "Trained with and without the norm before the head")] if first else []
    save(charts, folder / "figure6_trained_alpha_sweep")


def _sweep(record: OuroRecord, curves: Mapping[str, tuple[LoopStates, ReadoutKind, Style]], title: str) -> Chart:
    """Change of CE against α; the legend has the CE at α = 1, where every curve is zero."""
    alphas = record.states.alphas if record.states else []
    series = []
    for label, (loop, readout, style) in curves.items():
        ce = [math.nan if value is None else value for value in loop.sweep[readout]]
        own = ce[alphas.index(1.0)]
        change = [value - own for value in ce]
        series.append(Series(label=f"{label} (CE {brief(own)})", xs=alphas, ys=change, style=style))
    return Chart(name="alpha-sweep", title=title, x=ALPHA, y=CHANGE, series=series)


def _depth(record: OuroRecord) -> list[Chart]:
    """Perplexity and throughput at every depth, and downstream scores where tasks were asked for."""
    if record.depths is None:
        return []
    style = STYLES["per-loop+rmsnorm"]
    depths = record.depths.depths
    panels = {
        "perplexity": [_line("", {depth.k: depth.perplexity for depth in depths}, style)],
        "tokens per second, one readout": [_line("", {s.k: s.tokens_per_second for s in record.throughput}, style)],
    }
    first_metric = {score.task: score.metric for score in reversed(record.tasks)}
    if record.tasks:
        panels["downstream score"] = [
            _line(
                f"{task} ({metric})",
                {score.k: score.value for score in record.tasks if (score.task, score.metric) == (task, metric)},
                style,
            )
            for style, (task, metric) in zip(STYLES.values(), first_metric.items(), strict=False)
        ]
    trained = [] if record.subject.num_loops is None else [Level(float(record.subject.num_loops), of="x")]
    x = Axis("loops K", whole=True)
    return [
        Chart(
            name="variable-depth",
            title="",
            x=x,
            y=Axis(what, shows=(0.0,) if what.startswith("tokens") else ()),
            series=series,
            levels=trained,
        )
        for what, series in panels.items()
    ]


def _line(label: str, values: Mapping[int, float | None], style: Style) -> Series:
    return Series(label=label, xs=list(values), ys=list(values.values()), style=style)


# --- a law of loops --------------------------------------------------------------------------------------------------


def draw_scaling(found: ScalingRecord, folder: Path) -> None:
    """Does the law fit, and what is the next loop worth?"""
    styles = {r: LOOPS[n % len(LOOPS)] for n, r in enumerate(sorted({p.loops for p in found.points}))}
    ends = [min(p.loss for p in found.points), max(p.loss for p in found.points)]
    series = [Series(label="", xs=ends, ys=ends, style=GREY, mode="lines")]
    for r, style in styles.items():
        points = [p for p in found.points if p.loops == r]
        xs, ys = [p.loss for p in points], [p.predicted for p in points]
        series.append(Series(label=f"{r} loop{'' if r == 1 else 's'}", xs=xs, ys=ys, style=style, mode="marks"))
    fits = Chart(
        name="scaling",
        title=f"Every run; missed by {found.fit.error:.2%} on average",
        x=Axis("measured loss, nats per token"),
        y=Axis("loss by the law"),
        series=series,
    )
    save([fits, _worth(found) if found.worth else _at_test_time(found, styles)], folder / "scaling")


def _worth(found: ScalingRecord) -> Chart:
    loops = [each.loop for each in found.worth]
    worth = Series(
        label="",
        xs=loops,
        ys=[each.worth for each in found.worth],
        style=LOOPS[0],
        mode="marks",
        ends=[(each.low, each.high) for each in found.worth],
    )
    return Chart(
        name="scaling",
        title=f"φ = {found.told_phi}",
        x=Axis("loop r", ticks={float(loop): str(loop) for loop in loops}),
        y=Axis("worth of loop r, r^φ − (r−1)^φ"),
        series=[worth],
        levels=[Level(0.0), Level(1.0)],
    )


def _at_test_time(found: ScalingRecord, styles: Mapping[int, Style]) -> Chart:
    told = "" if found.test_time is None else f": z = {found.test_time.z:.2f}"
    series = []
    for p in found.points:
        if len(p.depths) > 1:
            ks, losses = zip(*p.depths, strict=True)
            style = replace(styles[p.loops], width=0.8)
            series.append(Series(label="", xs=[k / p.loops for k in ks], ys=losses, style=style, mode="lines"))
    x, y = Axis("loops at test time over loops trained, T/μ"), Axis("loss, nats per token")
    return Chart(name="scaling", title=f"Loops at test time{told}", x=x, y=y, series=series)
