"""Figures as SVG and PDF: of arXiv 2606.24898 from the files of a grid and ouro.json (5–7), and of a law of loops.

The same files give the same bytes: no dates, fixed identifiers. No torch here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from loopscope.files import file_written_whole
from loopscope.readings import AuditedLoop, Measure, Run, alpha_changes, exit_failure, final_norm, perplexity_at
from loopscope.results.halting import Gate
from loopscope.results.ouro import AS_IT_IS, FROZEN, READOUTS, REMOVED, LoopStates, OuroRecord, ReadoutKind
from loopscope.results.scaling import ScalingRecord
from loopscope.results.thresholds import SATURATED_LOGIT
from loopscope.rows.conditions import CONDITIONS
from loopscope.studies.paper_claims import ROLLOUT, symlog, unsymlog
from loopscope.studies.results import Results, View, mean

# Okabe and Ito's colours, which people with any kind of colour vision tell apart; lines differ in their markers too.
STYLES: dict[str, tuple[str, str]] = {
    "terminal+rmsnorm": ("#000000", "s"),
    "terminal+raw": ("#8c8c8c", "D"),
    "per-loop+rmsnorm": ("#d55e00", "o"),
    "per-loop+raw": ("#0072b2", "^"),
    "per-loop+final-only": ("#56b4e9", "v"),
    "terminal+penalty": ("#7a6a2f", "P"),
    "per-loop+penalty": ("#009e73", "X"),
    "per-loop+inter-loop-norm": ("#cc79a7", "*"),
    "per-loop+layernorm": ("#e69f00", "p"),
}
SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "loopscope",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
NO_DATES: dict[str, dict[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}

Draw = Callable[[View], Figure | None]


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Every figure that the rows have the numbers for; those of another recipe than the paper's carry its name."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for recipe in results.recipes():
        for name, draw in FIGURES.items():
            with mpl.rc_context(SETTINGS):
                figure = draw(results.view(recipe))
            written += save(figure, folder / (name if recipe == "paper" else f"{name}-{recipe}"))
    return written


def save(figure: Figure | None, path: Path) -> Iterator[Path]:
    """Write a figure, or take away the one of earlier rows where there is nothing to draw any more."""
    for ending, metadata in NO_DATES.items():
        target = path.with_name(f"{path.name}.{ending}")
        if figure is None:
            target.unlink(missing_ok=True)
            continue
        with mpl.rc_context(SETTINGS), file_written_whole(target) as beside:
            figure.savefig(beside, format=ending, metadata=metadata, bbox_inches="tight")
        yield target


def new_figure(columns: int = 1, *, width: float = 8.0, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """An empty figure with axes side by side."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def _points(axes: Axes, view: View, first: Measure, second: Measure) -> bool:
    """Each seed as a small point and each condition's mean as a large one; says whether there was anything to draw.

    Large points are hollow, so that one on top of another can be seen.
    """
    drawn = False
    for name in view.conditions():
        found = view.paired_measures(name, first, second)
        if not found:
            continue
        drawn = True
        colour, marker = STYLES[name]
        xs, ys = zip(*found, strict=True)
        axes.scatter(xs, ys, s=14, color=colour, marker=marker, linewidths=0)
        look: dict[str, Any] = {"facecolors": "none", "edgecolors": colour, "linewidths": 1.8, "zorder": 3}
        axes.scatter(mean(xs), mean(ys), s=90, marker=marker, label=_label(view, name), **look)
    return drawn


def _plain(axis: Axis) -> None:
    """Ticks as numbers, not as powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))


EXIT_TICKS = (-10, -3, -1, -0.3, -0.1, 0, 0.1, 0.3, 1, 3, 10, 30, 100)
"""Nats."""

# --- Figure 1: the 2×2 plane -----------------------------------------------------------------------------------------


def exit_plane(view: View) -> Figure | None:
    """Exit failure CE(1) − CE(K) against the final norm: placement moves one, the readout the other."""
    figure, (axes,) = new_figure()
    axes.set_xscale("log")
    axes.set_yscale("function", functions=(symlog, unsymlog))
    axes.yaxis.set_major_locator(FixedLocator(EXIT_TICKS))
    if not _points(axes, view, final_norm, exit_failure):
        return None
    axes.margins(0.08)
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_xlabel("final norm ‖H_K‖ (scale drifts →)")
    axes.set_ylabel("CE(1) − CE(K), nats (exits fail ↑)")
    axes.set_title("Exit failure and norm drift")
    figure.legend(loc="outside right upper")
    return figure


# --- Figure 2: visibility and activity -------------------------------------------------------------------------------


def visibility_activity(view: View) -> Figure | None:
    """How well the loss sees the scale, against how strongly the loop carries it."""
    figure, (axes,) = new_figure()
    axes.set_xscale("symlog", linthresh=1e-6)
    if not _points(axes, view, _visibility, _activity):
        return None
    axes.set_ylim(min(-0.05, axes.get_ylim()[0]), max(1.15, axes.get_ylim()[1]))
    axes.set_xlabel("visibility of scale to the loss")
    axes.set_ylabel("activity: gain of scale through the next loop")
    axes.set_title("Carried and not seen (upper left): a blind spot")
    figure.legend(loc="outside right upper")
    return figure


def _visibility(row: Run, split: str) -> float | None:
    found = row.audit.variables if row.audit else []
    return next((variable.visibility for variable in found if variable.name == "scale"), None)


def _activity(row: Run, split: str) -> float | None:
    found = row.audit.variables if row.audit else []
    return next((variable.activity for variable in found if variable.name == "scale"), None)


# --- Figure 3: thirty loops ------------------------------------------------------------------------------------------


def thirty_loops(view: View) -> Figure | None:
    """Scale, its increments with their prediction, and angular step × scale, over the audit's rollout."""
    names = [name for name in view.conditions() if any(row.loops for row in view.of(name).values())]
    if not names:
        return None
    figure, (scale, increment, angle) = new_figure(3, width=11.5, height=3.9)
    for name in names:
        colour, marker = STYLES[name]
        line: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3, "linewidth": 1.2}
        scale.plot(*_over_loops(view, name, lambda loop: loop.scale), label=_label(view, name), **line)
        ks, predicted = _over_loops(view, name, lambda loop: loop.predicted_increment)
        increment.plot(ks, predicted, color=colour, linewidth=1.2)
        marks = {**line, "linewidth": 0}
        increment.plot(*_over_loops(view, name, lambda loop: loop.radial_increment), **marks)
        angle.plot(*_over_loops(view, name, lambda loop: loop.angular_step_times_scale), **line)
    scale.set_yscale("log")
    increment.set_yscale("symlog", linthresh=0.01)
    angle.set_yscale("log")
    scale.set_title("scale s_k")
    increment.set_title("increment of s: measured (marks), ã/d (lines)")
    angle.set_title("angular step × scale")
    for axes in (scale, increment, angle):
        axes.set_xlabel("loop k")
        axes.set_xlim(0, ROLLOUT + 1)
        for depth in {row.num_loops for row in view.rows}:
            axes.axvline(depth, color="0.5", linewidth=0.8, linestyle=":")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def _over_loops(view: View, name: str, of: Callable[[AuditedLoop], float | None]) -> tuple[list[int], list[float]]:
    """Means over seeds at every loop that has the value."""
    values: dict[int, list[float]] = {}
    for row in view.of(name).values():
        for loop in row.loops:
            if (value := of(loop)) is not None:
                values.setdefault(loop.k, []).append(value)
    ks = sorted(values)
    return ks, [mean(values[k]) for k in ks]


# --- Figure 4: the frontier ------------------------------------------------------------------------------------------


def frontier(view: View) -> Figure | None:
    """Perplexity against throughput at every trained depth, of the models whose exits are trained.

    Rows were timed in different minutes, beside others, and do the same work at a depth: only their readouts differ.
    So every condition stands at the same throughput, the median over all rows.
    """
    names = [name for name in view.conditions() if CONDITIONS[name].placement == "per-loop"]
    evaluations = [row.evaluation for row in view.rows if row.evaluation and row.evaluation.throughput]
    timed = [{each.k: each.tokens_per_second for each in found.throughput} for found in evaluations]
    if not names or not timed:
        return None
    figure, (axes,) = new_figure()
    ks = sorted(set(timed[0]).intersection(*timed))
    speeds = [statistics.median(each[k] for each in timed) for k in ks]
    for name in names:
        colour, marker = STYLES[name]
        rows = list(view.of(name).values())
        quality = [mean(perplexity_at(row, k, view.split) or math.nan for row in rows) for k in ks]
        axes.plot(speeds, quality, color=colour, marker=marker, markersize=5, linewidth=1.2, label=_label(view, name))
    axes.set_xscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _plain(axis)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(speeds)
    axes.set_xticklabels([f"{speed:,.0f}\nK = {k}" for k, speed in zip(ks, speeds, strict=True)])
    axes.set_xlabel(f"tokens per second at depth K with one readout (median of {len(view.rows)} rows)")
    axes.set_ylabel("validation perplexity")
    axes.set_title("Compute and quality, per-loop models")
    figure.legend(loc="outside right upper")
    return figure


# --- the α-sweep -----------------------------------------------------------------------------------------------------


def alpha_sweep(view: View) -> Figure | None:
    """Change of CE at full depth when the final state is scaled by α before the readout."""
    curves = {name: _curve(view, name) for name in view.conditions()}
    curves = {name: curve for name, curve in curves.items() if curve[0]}
    if not curves:
        return None
    figure, (axes,) = new_figure()
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.01)
    for place, (name, (alphas, change)) in enumerate(curves.items()):
        colour, marker = STYLES[name]
        width = 1 + 0.4 * (len(curves) - place)  # lines that lie on one another are seen as stripes
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": width}
        axes.plot(alphas, change, label=_label(view, name), **look)
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.set_xlabel("α: final state × α before the readout")
    axes.set_ylabel("change of CE at loop K, nats")
    axes.set_title("What the loss sees of the scale")
    figure.legend(loc="outside right upper")
    return figure


def _curve(view: View, name: str) -> tuple[list[float], list[float]]:
    """The αs, and the mean over seeds of CE(α) − CE(1)."""
    found = [changes for row in view.of(name).values() if (changes := alpha_changes(row))]
    alphas = list(found[0]) if found else []
    same = [changes for changes in found if list(changes) == alphas]
    return alphas, [mean(changes[alpha] for changes in same) for alpha in alphas]


# --- gates -----------------------------------------------------------------------------------------------------------

GATE_LINES = {"h": "-", "norm(h)": ":"}


def gates(view: View) -> Figure | None:
    """The same gate on h (solid) and on norm(h) (dotted): how large its logits get where the state is long, and what it
    saves at the same bound."""
    names = [name for name in view.conditions() if any(_gates(view, name, reads) for reads in GATE_LINES)]
    if not names:
        return None
    figure, (size, saving) = new_figure(2, width=10.5, height=3.9)
    for place, name in enumerate(names):
        colour, marker = STYLES[name]
        for reads, dashes in GATE_LINES.items():
            found = _gates(view, name, reads)
            loops = [loop for gate in found for loop in gate.loops if loop.k and loop.norm and loop.logit is not None]
            ks = sorted({loop.k for loop in loops if loop.k})
            norms = [mean(loop.norm for loop in loops if loop.k == k and loop.norm) for k in ks]
            logits = [mean(loop.logit for loop in loops if loop.k == k and loop.logit is not None) for k in ks]
            look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linestyle": dashes}
            label = _label(view, name) if reads == "h" else None
            size.plot(norms, logits, linewidth=1.2, label=label, **look)
            saved = [value for gate in found if (value := gate.saved) is not None]
            if saved:
                at = place + (-0.2 if reads == "h" else 0.2)
                fill = colour if reads == "h" else "none"
                saving.bar(at, mean(saved), 0.38, facecolor=fill, edgecolor=colour, linestyle=dashes)
    size.set_xscale("log")
    size.set_yscale("log")
    size.axhline(SATURATED_LOGIT, color="0.5", linewidth=0.8)
    size.text(0.02, SATURATED_LOGIT * 1.05, "saturated", color="0.4", transform=size.get_yaxis_transform())
    for axis in (size.xaxis, size.yaxis):
        _plain(axis)
    size.set_xlabel(f"norm ‖h_k‖, loops 1 … {ROLLOUT}")
    size.set_ylabel("mean |logit| of the gate")
    size.set_title("a gate on h (solid) and on norm(h) (dotted)")
    saving.axhline(0, color="0.5", linewidth=0.8)
    saving.set_xticks([])
    saving.set_ylabel("loops saved beyond the fixed depth")
    saving.set_title("saved at the same bound: on h (full), norm(h) (open)")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _gates(view: View, name: str, reads: str) -> list[Gate]:
    """The gates of a condition's rows that read this."""
    found = [gate for row in view.of(name).values() if row.halting for gate in row.halting.gates]
    return [gate for gate in found if gate.reads == reads]


def _label(view: View, name: str) -> str:
    return f"{CONDITIONS[name].title} (n={len(view.of(name))})"


FIGURES: dict[str, Draw] = {
    "figure1_exit_plane": exit_plane,
    "figure2_visibility_activity": visibility_activity,
    "figure3_thirty_loops": thirty_loops,
    "figure4_frontier": frontier,
    "alpha_sweep": alpha_sweep,
    "gates": gates,
}


# --- Figures 5 and 7: one model of Ouro's kind -----------------------------------------------------------------------

READOUT_STYLES = {AS_IT_IS: ("#d55e00", "o"), REMOVED: ("#0072b2", "^"), FROZEN: ("#56b4e9", "v")}


def draw_ouro(record: OuroRecord, folder: Path) -> list[Path]:
    """Figures 5 and 7 of one model."""
    return _draw({"figure5_alpha_sweep": _sweep_of_one(record), "figure7_variable_depth": _depth(record)}, folder)


def draw_ouro_training(records: dict[str, OuroRecord], folder: Path) -> list[Path]:
    """Figure 6: the sweep of Figure 5 on models that were trained with and without the norm, by condition."""
    return _draw({"figure6_trained_alpha_sweep": _sweep_of_trained(records)}, folder)


def _draw(figures: dict[str, Callable[[], Figure | None]], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, draw in figures.items():
        with mpl.rc_context(SETTINGS):
            figure = draw()
        written += save(figure, folder / name)
    return written


def _sweep_of_one(record: OuroRecord) -> Callable[[], Figure | None]:
    def draw() -> Figure | None:
        if record.states is None or record.last is None:
            return None
        curves = {READOUTS[name]: (record.last, name, READOUT_STYLES[name]) for name in record.last.sweep}
        title = f"{Path(record.subject.name).name}, loop {record.last.k}: what the loss sees of the scale"
        return _sweep_figure(record.states.alphas, curves, title)

    return draw


def _sweep_of_trained(records: dict[str, OuroRecord]) -> Callable[[], Figure | None]:
    def draw() -> Figure | None:
        known = {name: record for name, record in records.items() if record.states and record.last}
        if not known:
            return None
        curves: dict[str, Curve] = {}
        for name, record in known.items():
            assert record.last is not None
            own = AS_IT_IS if AS_IT_IS in record.last.sweep else REMOVED
            curves[name] = (record.last, own, STYLES[name.rpartition("-s")[0]])
        states = next(iter(known.values())).states
        assert states is not None
        return _sweep_figure(states.alphas, curves, "Trained with and without the norm before the head")

    return draw


Curve = tuple[LoopStates, ReadoutKind, tuple[str, str]]
"""States, the readout they are swept through, colour and marker."""


def _sweep_figure(alphas: list[float], curves: dict[str, Curve], title: str) -> Figure:
    """Change of CE against α; the legend has the CE at α = 1, where every curve is zero."""
    figure, (axes,) = new_figure()
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.01)
    middle = alphas.index(1.0)
    for label, (loop, readout, (colour, marker)) in curves.items():
        ce = [math.nan if value is None else value for value in loop.sweep[readout]]
        change = [value - ce[middle] for value in ce]
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.4}
        axes.plot(alphas, change, label=f"{label} (CE {ce[middle]:.3g})", **look)
    for axis in (axes.xaxis, axes.yaxis):
        _plain(axis)
    axes.set_xlabel("α: final state × α before the readout")
    axes.set_ylabel("change of CE at loop K, nats")
    axes.set_title(title)
    figure.legend(loc="outside right upper")
    return figure


def _depth(record: OuroRecord) -> Callable[[], Figure | None]:
    """Perplexity and throughput at every depth, and downstream scores where tasks were asked for."""

    def curve(axes: Axes, values: dict[int, float | None], **look: Any) -> None:
        known = {k: value for k, value in values.items() if value is not None}
        axes.plot(list(known), list(known.values()), **look)

    def draw() -> Figure | None:
        if record.depths is None:
            return None
        scored = bool(record.tasks)
        figure, panels = new_figure(3 if scored else 2, width=11.5 if scored else 8.0, height=3.6)
        look: dict[str, Any] = {"color": "#d55e00", "marker": "o", "markersize": 4, "linewidth": 1.4}
        curve(panels[0], {depth.k: depth.perplexity for depth in record.depths.depths}, **look)
        panels[0].set_ylabel("perplexity")
        curve(panels[1], {speed.k: speed.tokens_per_second for speed in record.throughput}, **look)
        panels[1].set_ylabel("tokens per second, one readout")
        panels[1].set_ylim(bottom=0)
        first_metric = {score.task: score.metric for score in reversed(record.tasks)}
        for (colour, marker), (task, metric) in zip(STYLES.values(), first_metric.items(), strict=False):
            scores = {score.k: score.value for score in record.tasks if (score.task, score.metric) == (task, metric)}
            curve(panels[2], scores, **{**look, "color": colour, "marker": marker}, label=f"{task} ({metric})")
        if scored:
            panels[2].set_ylabel("downstream score")
            panels[2].legend(fontsize=7)
        for axes in panels:
            axes.set_xlabel("loops K")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            _plain(axes.yaxis)
            axes.axvline(record.subject.num_loops, color="0.5", linewidth=0.8, linestyle=":")
        figure.suptitle(f"{Path(record.subject.name).name} at variable depth (dotted: as trained)")
        return figure

    return draw


# --- laws of loops ---------------------------------------------------------------------------------------------------

COLOURS = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9")
MARKERS = "osD^vP"


def draw_scaling(found: ScalingRecord, folder: Path) -> list[Path]:
    """scaling.svg and scaling.pdf: does the law fit, and what is the next loop worth?"""
    with mpl.rc_context(SETTINGS):
        figure = _scaling_figure(found)
    return list(save(figure, folder / "scaling"))


def _scaling_figure(found: ScalingRecord) -> Figure:
    figure, (fits, right) = new_figure(2, width=10.0)
    loops = sorted({p.loops for p in found.points})
    for place, r in enumerate(loops):
        pairs = [(p.loss, p.predicted) for p in found.points if p.loops == r and p.predicted is not None]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        label = f"{r} loop{'' if r == 1 else 's'}"
        measured, expected = ([pair[side] for pair in pairs] for side in (0, 1))
        fits.scatter(measured, expected, s=24, linewidths=0, label=label, color=colour, marker=marker)
    ends = [min(p.loss for p in found.points), max(p.loss for p in found.points)]
    fits.plot(ends, ends, color="0.5", linewidth=0.8)
    fits.set_xlabel("measured loss, nats per token")
    fits.set_ylabel("loss by the law")
    fits.set_title(f"Every run; missed by {found.fit.error:.2%} on average")
    fits.legend(loc="lower right")
    if found.worth:
        xs = [each.loop for each in found.worth]
        ys = [each.worth for each in found.worth]
        bars = [[y - each.low for y, each in zip(ys, found.worth, strict=True)]]
        bars.append([each.high - y for y, each in zip(ys, found.worth, strict=True)])
        right.errorbar(xs, ys, yerr=bars, fmt="o", color=COLOURS[0], capsize=3)
        right.axhline(1, color="0.5", linewidth=0.8)
        right.axhline(0, color="0.5", linewidth=0.8)
        right.set_xticks(xs)
        right.set_xlabel("loop r")
        right.set_ylabel("worth in recurrent parameters, r^φ − (r−1)^φ")
        right.set_title(f"φ = {found.told_phi}")
    else:
        for place, r in enumerate(loops):
            for p in (p for p in found.points if p.loops == r and len(p.depths) > 1):
                ks, losses = zip(*p.depths, strict=True)
                right.plot([k / r for k in ks], losses, color=COLOURS[place % len(COLOURS)], linewidth=0.8)
        right.set_xlabel("loops at test time over loops trained, T/μ")
        right.set_ylabel("loss, nats per token")
        told = "" if found.test_time is None else f": z = {found.test_time.z:.2f}"
        right.set_title(f"Loops at test time{told}")
    return figure
