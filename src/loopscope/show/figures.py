"""The charts of the page, each from what the runs' files say. The order is the page's. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loopscope.results.audit import AuditedLoop
from loopscope.results.evaluation import Depth, Split
from loopscope.results.measures import Run, alpha_changes, exit_failure, final_norm, shares_by_loop
from loopscope.results.run import LoggedStep
from loopscope.results.thresholds import CHANCE, HIDDEN_SHARE, LINEAR_BELOW, SATURATED_LOGIT
from loopscope.show.chart import Axis, Chart, Level, Series
from loopscope.show.inputs import Group, each_run
from loopscope.show.numbers import plain
from loopscope.show.table import Column, Table, columns

ALPHA_WIDTH = 0.01
ALPHA_SHOWN = 1.0
"""Nats to both sides that the α-sweep always shows: what the loss hardly notices looks flat."""
SMALLEST_SHARE = 1e-12
ONE_SIZE = 10.0
"""Times the smallest growth that the largest may be for both to be read off a linear axis."""
FRAME = 3.0
"""Times the worst full depth that the charts of quality reach up to."""

MOST_COLUMNS = 32
"""Columns of the text behind a chart."""

LOOP = Axis("loop", whole=True)
STEP = Axis("training step")
SHARE = Axis("radial gradient share (0 to 1)", "log", floor=SMALLEST_SHARE, shows=(1e-4, 1.0))

NEEDS_AUDIT = "no run has been audited; loopscope audit RUN writes audit.json into a run's folder."
NEEDS_EVAL = "no run has been evaluated on validation text yet."
NEEDS_SPEED = "no run has been timed; loopscope eval RUN --speed leaves its timings in eval.json."
NEEDS_HALTING = "no row has been calibrated; loopscope reproduce calibrates every row whose exits are trained."
NEEDS_CALIBRATION = "no halting rule was certified; loopscope calibrate RUN --rule all leaves what it finds in the run."
NEEDS_POLICIES = (
    "no halting policy was evaluated; loopscope eval RUN --policies policy.json leaves its point in eval.json."
)
NEEDS_METRICS = "no run has logged a step yet."

Points = list[tuple[float, float | None]]
OfDepth = Callable[[Depth], float | None]


def plane(groups: Sequence[Group]) -> Chart:
    """Exit failure against final norm: the two things that loss placement and readout move separately (Figure 1)."""
    points = _lines_of(groups, lambda run: [(norm, exit_failure(run))] if (norm := final_norm(run)) else [])
    x = Axis("final norm ‖h_K‖", "log", shows=(3.0, 300.0))
    y = Axis("CE(1) − CE(K), nats per token", "signed-log", linear_below=LINEAR_BELOW, shows=(-LINEAR_BELOW, 1.0))
    return Chart(
        name="plane",
        title="Exits and scale",
        look="Look at the two directions: the lower a point, the better its early exits; the further left, the better "
        "its scale is held. Bottom left is where a model should be; towards the right, the scale has run away.",
        x=x,
        y=y,
        series=_drawn(points, "marks"),
        levels=[Level(0.0, "first exit =\nfull depth")],
        table=Table(
            "",
            ["run", *columns(plain, "CE(1)", "CE(K)", "CE(1) − CE(K)", "‖h_K‖"), "measured on"],
            [[point.label, *_plane_cells(point.run)] for point in points],
        ),
        missing=NEEDS_EVAL,
        note=f"Vertical axis: linear within ±{LINEAR_BELOW} nats, logarithmic beyond.",
    )


def norm_over_loops(groups: Sequence[Group]) -> Chart:
    """‖h_k‖ after each loop, on validation text."""
    lines = _lines_of(groups, _at_depths(lambda depth: depth.norm))
    return Chart(
        name="norm-loops",
        title="Length of the state after each loop",
        look="Look at which lines lie high and climb: there every loop adds to a length that no loss sees.",
        x=LOOP,
        y=Axis("norm ‖h_k‖", "log"),
        series=_drawn(lines),
        levels=_trained_depth(groups, lines),
        table=_lines_table(lines, "run \\ loop"),
        missing=NEEDS_EVAL,
    )


def norm_over_training(groups: Sequence[Group]) -> Chart:
    """‖h_K‖ of the training batches, step by step."""
    lines = _lines_of(groups, _while_training(lambda row: row.final_norm))
    return Chart(
        name="norm-training",
        title="Length of the final state while training",
        look="Look at where the lines part: runs that start alike go up or down with what the readout shows the loss.",
        x=STEP,
        y=Axis("norm ‖h_K‖", "log"),
        series=_drawn(lines, "lines"),
        table=_lines_table(lines, "run \\ step"),
        missing=NEEDS_METRICS,
    )


def share_over_loops(groups: Sequence[Group]) -> Chart:
    """Median |cos| between the loss's gradient and the state, at each supervised loop (Lemma 1)."""
    lines = _lines_of(groups, lambda run: list(shares_by_loop(run).items()))
    return Chart(
        name="share-loops",
        title="How much of the loss's gradient points along the state",
        look="Look at the gap: the lines far down belong to readouts that hide the length of the state, so that "
        "cross-entropy cannot correct it; a direction picked by chance would lie at the line marked chance.",
        x=LOOP,
        y=SHARE,
        series=_drawn(lines),
        levels=_share_levels(groups),
        table=_lines_table(lines, "run \\ loop"),
        missing=NEEDS_METRICS,
        note="Median over tokens of |⟨∇CE, h⟩| / (‖∇CE‖·‖h‖): of the audit, which reads every loop out, supervised or "
        "not; where there is none, of the supervised loops at the last logged training step (in its lower precision).",
    )


def share_over_training(groups: Sequence[Group]) -> Chart:
    """The largest radial gradient share of the supervised loops, step by step."""
    lines = _lines_of(groups, _while_training(lambda row: row.largest_share))
    return Chart(
        name="share-training",
        title="That share while training",
        look="Look at how early it is settled: a readout hides the length from the first steps on, or it never does.",
        x=STEP,
        y=SHARE,
        series=_drawn(lines, "lines"),
        levels=_share_levels(groups),
        table=_lines_table(lines, "run \\ step"),
        missing=NEEDS_METRICS,
        note="The largest of the supervised loops.",
    )


def alpha_sweep(groups: Sequence[Group]) -> Chart:
    """Change of CE when the final state is multiplied by α before it is read out."""
    lines = _lines_of(groups, lambda run: list(alpha_changes(run).items()))
    x = Axis("α, factor on the state", "log")
    y = Axis("change of CE, nats per token", "signed-log", linear_below=ALPHA_WIDTH, shows=(-ALPHA_SHOWN, ALPHA_SHOWN))
    return Chart(
        name="alpha",
        title="What the loss notices when the state is stretched",
        look="Look at which lines stay flat at zero: to them a state of a tenth or of ten times the length is the "
        "same, so the loss cannot tell them apart. Lines that leave zero on both sides do see the length.",
        x=x,
        y=y,
        series=_drawn(lines),
        is_nested=True,
        table=_lines_table(lines, "run \\ α"),
        missing=NEEDS_AUDIT,
        note=f"Vertical axis: linear within ±{ALPHA_WIDTH} nats, logarithmic beyond."
        + (" Lines that coincide lie over one another; switch conditions off to see those below." * (len(groups) > 1)),
    )


def scale_over_loops(groups: Sequence[Group]) -> Chart:
    """s_k far beyond the trained depth."""
    lines = _lines_of(groups, _audited(lambda loop: loop.scale))
    return Chart(
        name="activity-scale",
        title="Scale far beyond the trained depth",
        look="Look to the right of the trained depth: a scale that the loop carries on keeps growing, loop by loop.",
        x=LOOP,
        y=Axis("scale s_k", "log"),
        series=_drawn(lines, "lines"),
        levels=_trained_depth(groups, lines),
        table=_lines_table(lines, "run \\ loop"),
        missing=NEEDS_AUDIT,
        note="The scale s is the root mean square of the state h: ‖h‖ / √width.",
    )


def increments(groups: Sequence[Group]) -> Chart:
    """Measured growth of scale per loop against what one inner product predicts (the estimator of the paper)."""
    measured = _lines_of(groups, _audited(lambda loop: loop.radial_increment), "measured")
    predicted = _lines_of(groups, _audited(lambda loop: loop.predicted_increment), "predicted")
    both = sorted([*measured, *predicted], key=lambda line: (line.group.index, line.run.name, line.part))
    y = _growth_axis(_values(both))
    return Chart(
        name="activity-increments",
        title="Growth per loop: predicted and measured",
        look="Look at whether the marks lie on their lines: marks are the growth measured in each loop, lines what the "
        "part of the update that points along the state predicts.",
        x=LOOP,
        y=y,
        series=[*_drawn(predicted, "lines"), *_drawn(measured, "marks")],
        table=_lines_table(both, "run \\ loop"),
        missing=NEEDS_AUDIT,
        note=f"Vertical axis: linear within ±{plain(y.linear_below)}, logarithmic beyond."
        if y.scale == "signed-log"
        else "",
    )


def angular_motion(groups: Sequence[Group]) -> Chart:
    """‖u_{k+1} − u_k‖·s_k: about constant where direction slows down as scale grows (Lemma 2)."""
    lines = _lines_of(groups, _audited(lambda loop: loop.angular_step_times_scale))
    return Chart(
        name="activity-angle",
        title="Turning of the state, times its scale",
        look="Look for level lines: there the state turns more slowly exactly as it gets longer, so that later loops "
        "change the answer less and less.",
        x=LOOP,
        y=Axis("angular step × scale", "log"),
        series=_drawn(lines, "lines"),
        table=_lines_table(lines, "run \\ loop"),
        missing=NEEDS_AUDIT,
        note="The angular step is how far the direction h / s moves in one loop, as a root mean square.",
    )


def frontier(groups: Sequence[Group]) -> Chart:
    """Quality after each loop: perplexity under one tokenizer, else bits per byte."""
    name, of, note = _quality(groups)
    lines = _lines_of(groups, _at_depths(of))
    top, leaving = _frame(lines, groups, of, name)
    return Chart(
        name="frontier",
        title="Quality at every depth",
        look="Look at the left end and at the slope: a low left end is an early exit that works, and a line that falls "
        "to the right gets something for its extra loops.",
        x=Axis("loops run", whole=True),
        y=Axis(name, "log", top=top),
        series=_drawn(lines),
        levels=_trained_depth(groups, lines),
        table=_splits_table(groups, name, of),
        missing=NEEDS_EVAL,
        note=" ".join(part for part in (note, leaving) if part),
    )


def halting(groups: Sequence[Group]) -> Chart:
    """Quality under halting policies, beside the fixed depths of the same runs."""
    name, of, note = _quality(groups)
    marks, rows = [], []
    for group, run in each_run(groups):
        for each in run.splits["valid"].halting if "valid" in run.splits else []:
            if each.mean_loops is not None and (value := of(each.as_depth)) is not None:
                marks.append(Line(group, run, [each.mean_loops], [value], each.policy))
                figures = (each.threshold, each.mean_loops, value, each.tokens_per_second)
                rows.append([marks[-1].label, each.rule, *figures])
    runs = {mark.run.name for mark in marks}
    lines = [line for line in _lines_of(groups, _at_depths(of)) if line.run.name in runs]
    return Chart(
        name="halting",
        title="Quality under halting policies",
        look="Look for marks below the line of their run: there tokens that leave early pay less than all of them "
        "leaving at the same loop. Marks on the line are what a fixed depth gives too.",
        x=Axis("loops a token"),
        y=Axis(name, "log"),
        series=[*_drawn(lines, "lines"), *_drawn(marks, "marks")],
        table=Table(
            "", ["run", "rule", *columns(plain, "threshold", "loops a token", name, "tokens per second")], rows
        ),
        missing=NEEDS_POLICIES,
        note=note,
    )


def certified(groups: Sequence[Group]) -> Chart:
    """Halting rules whose cost is certified at the same bound: what each saves, and what it costs on test text."""
    marks, rows, bounds = [], [], set()
    for group, run in each_run(groups):
        found = run.calibrated
        for each in () if found is None else found.every:
            if each.mean_loops is not None and each.ppl_increase is not None and found is not None:
                marks.append(Line(group, run, [each.mean_loops], [100 * each.ppl_increase], each.rule))
                bounds.add((found.max_ppl_increase, found.confidence))
                figures = (each.threshold, each.mean_loops, each.ppl_increase, each.tokens_per_second)
                rows.append([marks[-1].label, *figures])
    levels = [Level(100 * bound, "allowed") for bound, _ in bounds] if len(bounds) == 1 else []
    return Chart(
        name="certified",
        title="Halting rules at the same bound",
        look="Look at how far a rule's mark lies to the left of the one of fixed depth: that is what leaving at a loop "
        "of one's own saves beyond all leaving at the same one.",
        x=Axis("loops a token"),
        y=Axis("increase of perplexity, %"),
        series=_drawn(marks, "marks"),
        levels=levels,
        table=Table(
            "",
            ["run", *columns(plain, "threshold", "loops a token", "increase of perplexity", "tokens per second")],
            rows,
        ),
        missing=NEEDS_CALIBRATION,
        note="The promise is about the true mean; a mean over test text is a measurement, and may lie above it.",
    )


def speed(groups: Sequence[Group]) -> Chart:
    """Quality against the speed of decoding, a point for every depth that was timed."""
    name, of, note = _quality(groups)
    lines, rows = [], []
    for group, run in each_run(groups):
        timed = [] if run.evaluation is None else run.evaluation.speed
        rates = {each.k: each.tokens_per_second for each in timed if each.what == "decode"}
        points = [(rate, of(depth), depth.k) for depth in run.depths if (rate := rates.get(depth.k))]
        if points:
            lines.append(Line(group, run, [x for x, _, _ in points], [y for _, y, _ in points]))
            rows += [[lines[-1].label, k, x, y] for x, y, k in points]
    return Chart(
        name="speed",
        title="Quality against the speed of decoding",
        look="Look for the lower right: fast and good. Along a line from right to left every point runs one loop more.",
        x=Axis("tokens decoded per second, at batch 1", "log"),
        y=Axis(name, "log"),
        series=_drawn(lines),
        table=Table("", ["run", Column("loops", "d"), *columns(plain, "tokens per second", name)], rows),
        missing=NEEDS_SPEED,
        note=note,
    )


def gates(groups: Sequence[Group]) -> Chart:
    """How large the logits of a linear exit gate get where the state is long, and what halting saves."""
    lines, rows = [], []
    calibrated = [(group, run, run.halting) for group, run in each_run(groups) if run.halting]
    for group, run, found in calibrated:
        told = (found.mean_loops, found.fixed_depth, found.saved, None, None, None)
        rows.append([" · ".join((group.label, run.name, f"rule {found.rule}")), *told])
        for gate in found.gates:
            points = [(loop.norm, loop.logit) for loop in gate.loops if loop.norm]
            lines.append(Line(group, run, [x for x, _ in points], [y for _, y in points], f"gate on {gate.reads}"))
            by_loop = {loop.k: loop.logit for loop in gate.loops}
            logits = [by_loop.get(1), by_loop.get(run.num_loops), points[-1][1] if points else None]
            rows.append([lines[-1].label, gate.mean_loops, gate.fixed_depth, gate.saved, *logits])
    header = ["loops", "fixed depth", "saved beyond it", "|logit|, loop 1", "loop K", "the last watched"]
    return Chart(
        name="gates",
        title="Exit gates: how sure they are where the state is long",
        look="Look at what rises to the right: a gate on the state itself takes a long state for certainty, and above "
        "the line it says 0 or 1 whatever the token is. The table has what a calibrated rule and the gates save beyond "
        "the smallest fixed depth at the same bound.",
        x=Axis("norm ‖h_k‖ of the state", "log"),
        y=Axis("mean |logit| of the gate", "log", shows=(1.0,)),
        series=_drawn(lines),
        levels=[Level(SATURATED_LOGIT, "saturated")],
        table=Table("", ["run", *columns(plain, *header)], rows),
        missing=NEEDS_HALTING,
    )


# --- values along an axis --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A run's values along an axis."""

    group: Group
    run: Run
    xs: Sequence[float]
    ys: Sequence[float | None]
    part: str = ""
    """Which of several lines of a run it is."""

    @property
    def label(self) -> str:
        """Condition, run and part."""
        return " · ".join(text for text in (self.group.label, self.run.name, self.part) if text)


def _drawn(lines: Sequence[Line], mode: Literal["both", "lines", "marks"] = "both") -> list[Series]:
    """Lines as they are drawn; open marks first, which are larger where others may lie on them."""
    ordered = sorted(lines, key=lambda line: not line.group.style.is_open)
    return [
        Series(
            label=each.label,
            xs=each.xs,
            ys=each.ys,
            style=replace(each.group.style, size=8.0 if mode == "marks" else 5.0),
            mode=mode,
            group=str(each.group.index),
        )
        for each in ordered
    ]


def _lines_table(lines: Sequence[Line], corner: str) -> Table:
    """A row per run, a column per place; of many places an even choice that has the last."""
    places = sorted({x for line in lines for x in line.xs})
    if len(places) > MOST_COLUMNS:
        longest = max(lines, key=lambda line: len(line.xs)).xs
        places = sorted({longest[round(n * (len(longest) - 1) / 11)] for n in range(12)})
    rows = [[line.label, *map(dict(zip(line.xs, line.ys, strict=True)).get, places)] for line in lines]
    return Table("", [corner, *columns(plain, *map(plain, places))], rows)


def _lines_of(groups: Sequence[Group], points_of: Callable[[Run], Points], part: str = "") -> list[Line]:
    """A line for every run that gives at least one value."""
    lines = []
    for group, run in each_run(groups):
        points = points_of(run)
        if any(value is not None for _, value in points):
            lines.append(Line(group, run, [x for x, _ in points], [y for _, y in points], part))
    return lines


def _at_depths(of: OfDepth) -> Callable[[Run], Points]:
    """A quantity after each loop, on validation text."""
    return lambda run: [(depth.k, of(depth)) for depth in run.depths]


def _while_training(of: Callable[[LoggedStep], float | None]) -> Callable[[Run], Points]:
    """A quantity that training logs, by step."""
    return lambda run: [(row.step, of(row)) for row in run.train]


def _audited(of: Callable[[AuditedLoop], float | None]) -> Callable[[Run], Points]:
    """A quantity that the audit gives per loop."""
    return lambda run: [(loop.k, value) for loop in run.loops if (value := of(loop)) is not None]


def _common(groups: Sequence[Group], of: Callable[[Run], int]) -> int | None:
    """What all runs agree on, or None."""
    found = {of(run) for _, run in each_run(groups)}
    return found.pop() if len(found) == 1 else None


def _quality(groups: Sequence[Group]) -> tuple[str, OfDepth, str]:
    """How to compare the runs' quality, and why: perplexity under one tokenizer, else bits per byte."""
    runs = [run for _, run in each_run(groups) if run.depths]
    names, hashes = {run.tokenizer for run in runs} - {""}, {run.tokenizer_sha256 for run in runs} - {""}
    if len(names) <= 1 and len(hashes) <= 1:
        note = f"Perplexity per token ({next(iter(names), '')}): comparable only under the same tokenizer."
        return "perplexity", lambda depth: depth.perplexity, note if names else ""
    if any(depth.bits_per_byte is not None for run in runs for depth in run.depths):
        note = "The runs use different tokenizers, so quality is shown in bits per byte."
        return "bits per byte", lambda depth: depth.bits_per_byte, note
    note = "The runs use different tokenizers: their perplexities cannot be compared with one another."
    return "perplexity", lambda depth: depth.perplexity, note


def _splits_table(groups: Sequence[Group], name: str, of: OfDepth) -> Table:
    """Every split of every run at every depth, also in bits per byte."""
    deepest = max((depth.k for _, run in each_run(groups) for depth in run.depths), default=0)
    ks = range(1, min(deepest, 32) + 1)
    measures: dict[str, OfDepth] = {name: of, "bits per byte": lambda depth: depth.bits_per_byte}
    rows = []
    for group, run in each_run(groups):
        for split, scores in (run.splits or {run.depths_from: Split(depths=run.depths)}).items():
            at = {depth.k: depth for depth in scores.depths}
            for measure, take in measures.items():
                values = [take(at[k]) if k in at else None for k in ks]
                if any(value is not None for value in values):
                    label = " · ".join(part for part in (group.label, run.name, split, measure) if part)
                    rows.append([label, *values])
    return Table("", ["run \\ loops", *columns(plain, *map(str, ks))], rows)


# --- parts -----------------------------------------------------------------------------------------------------------


def _plane_cells(run: Run) -> list[object]:
    ces = [depth.ce if depth else None for depth in (run.depth(1), run.depth(run.num_loops))]
    return [*ces, exit_failure(run), final_norm(run), run.depths_from]


def _growth_axis(values: Sequence[float]) -> Axis:
    """Linear where growth is of one size; else around zero up to a size below most, and logarithmic beyond."""
    title, sizes = "growth of scale s_k per loop", [abs(value) for value in values]
    if not values or max(sizes) <= ONE_SIZE * min(sizes):
        return Axis(title)
    sizes = sorted(size for size in sizes if size)
    low, high = math.log10(sizes[len(sizes) // 10]), math.log10(sizes[-1])
    return Axis(title, "signed-log", linear_below=10.0 ** max(math.floor(low), math.floor(high) - 4))


def _trained_depth(groups: Sequence[Group], lines: Sequence[Line]) -> list[Level]:
    """A line at the trained depth, where all runs share one and something lies beyond it."""
    depth = _common(groups, lambda run: run.num_loops)
    if not depth or not any(max(line.xs) > depth for line in lines):
        return []
    return [Level(depth, "trained depth", of="x")]


def _frame(lines: Sequence[Line], groups: Sequence[Group], of: OfDepth, name: str) -> tuple[float | None, str]:
    """Where the frame ends when exits far worse than any full depth would flatten all else, and the words for it."""
    full = [depth for _, run in each_run(groups) if (depth := run.depth(run.num_loops)) is not None]
    worst = max((value for depth in full if (value := of(depth)) is not None), default=None)
    highest = max(_values(lines), default=0.0)
    if worst is None or highest <= FRAME * worst:
        return None, ""
    words = f"Exits with a {name} above {plain(FRAME * worst)} leave the frame at the top; the table has them."
    return FRAME * worst, words


def _share_levels(groups: Sequence[Group]) -> list[Level]:
    """Where chance lies, and below what the length counts as hidden."""
    width = _common(groups, lambda run: run.width)
    chance = [Level(CHANCE / math.sqrt(width), "chance")] if width and width > 0 else []
    return [*chance, Level(HIDDEN_SHARE, "hidden below")]


def _values(lines: Sequence[Line]) -> list[float]:
    return [value for line in lines for value in line.ys if value is not None]
