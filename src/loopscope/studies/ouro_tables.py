"""The tables of ouro.json, and everything that is drawn of it. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loopscope.results.ouro import (
    AS_IT_IS,
    EXIT_THRESHOLDS,
    NORM_QUANTILES,
    READOUTS,
    REMOVED,
    OuroRecord,
)
from loopscope.results.thresholds import FLAT, SHARP
from loopscope.show.numbers import brief, plain
from loopscope.show.table import Column, Table, columns


def publish_ouro(record: OuroRecord, out: Path, say: Callable[[str], None]) -> list[Table]:
    """Write tables/ and, where matplotlib is there, figures/."""
    tables = ouro_tables(record)
    for table in tables:
        table.write(out / "tables")
    try:
        from loopscope.studies.figures import draw_ouro
    except ImportError as error:
        say(f"no figures: they need {error.name}; run: pip install 'loopscope[report]'")
    else:
        draw_ouro(record, out / "figures")
    return tables


def ouro_tables(record: OuroRecord) -> list[Table]:
    """Every table that the record has the numbers for."""
    made = (_variable_depth, _alpha_sweep, _radial_gradient, _token_norms, _exit_gate, _downstream)
    return [table for make in made if (table := make(record)) is not None]


def conclusion(record: OuroRecord) -> str:
    """What the sweep at the trained depth says, beside what the paper does."""
    last = record.last
    if last is None:
        return "the α-sweep is not measured at the trained depth"
    found = {READOUTS[name]: last.span(name) for name in (AS_IT_IS, REMOVED)}
    spans = [f"{name} by {brief(span)} nats" for name, span in found.items() if span is not None]
    return (
        f"Scaling the state of loop {last.k} by 0.1 to 10 before the readout moves CE {' and '.join(spans)}. The paper "
        f"finds it flat with RMSNorm and sharp without: {record.verdict} (limits: at most {FLAT}, at least {SHARP})."
    )


def _variable_depth(record: OuroRecord) -> Table | None:
    if record.depths is None:
        return None
    speeds = {speed.k: speed.tokens_per_second for speed in record.throughput}
    rows = [
        [_loop(record, each.k), each.ce, each.perplexity, each.bits_per_byte, each.norm, speeds.get(each.k)]
        for each in record.depths.depths
    ]
    header = [Column("loops K"), *columns(plain, "CE", "perplexity", "bits per byte", "mean norm", "tokens per second")]
    note = f"{record.depths.tokens or 0:,} tokens of {record.text}; * as trained; one readout, {record.subject.device}"
    return Table("Variable depth", header, rows, note, name="variable_depth")


def _alpha_sweep(record: OuroRecord) -> Table | None:
    if record.states is None:
        return None
    alphas = [f"{alpha:g}" for alpha in record.states.alphas]
    rows = [
        [_loop(record, loop.k), READOUTS[name], *ce] for loop in record.states.loops for name, ce in loop.sweep.items()
    ]
    note = f"CE in nats, {record.states.tokens:,} tokens; the state is scaled before the norm. * as trained"
    header = [Column("loop"), Column("readout"), *columns(plain, *alphas)]
    return Table("CE when the state is scaled by α", header, rows, note, name="alpha_sweep")


def _radial_gradient(record: OuroRecord) -> Table | None:
    if record.states is None:
        return None
    names = list(record.states.loops[0].radial_share) if record.states.loops else []
    rows = [[_loop(record, loop.k), *(loop.radial_share.get(name) for name in names)] for loop in record.states.loops]
    note = "Median over tokens of |⟨∇_h CE, h⟩|/(‖∇_h CE‖‖h‖), through the readout of that loop alone"
    header = [Column("loop"), *columns(plain, *(READOUTS[name] for name in names))]
    return Table("Radial gradient share", header, rows, note, name="radial_gradient")


def _token_norms(record: OuroRecord) -> Table | None:
    if record.states is None:
        return None
    quantiles = ["largest" if q == 1 else f"{100 * q:g} %" for q in NORM_QUANTILES]
    rows = [[_loop(record, loop.k), loop.norm, *loop.norm_quantiles] for loop in record.states.loops]
    note = f"‖h_k‖ of {record.states.tokens:,} tokens before any norm"
    return Table("Norms of tokens", ["loop", *columns(plain, "mean", *quantiles)], rows, note, name="token_norms")


def _exit_gate(record: OuroRecord) -> Table | None:
    gate = record.gate
    if gate is None:
        return None
    median = NORM_QUANTILES.index(0.5)
    rows: list[list[object]] = []
    for loop in gate.loops:
        shares = (each.shares[loop.k - 1] for each in gate.thresholds)
        median_exit = loop.exit_quantiles[median]
        rows.append([str(loop.k), loop.leaving, loop.exit_probability, median_exit, *shares])
    rows.append(["mean loops", "", gate.expected_loops, "", *(each.mean_loops for each in gate.thresholds)])
    leaves = (f"leave at {q:g}" for q in EXIT_THRESHOLDS)
    note = (
        f"{gate.tokens:,} tokens. λ: probability of leaving at a loop once there; p: of leaving there at all, "
        "the last loop taking the rest; leave at q: share of tokens whose cumulative p first reaches q there"
    )
    header = [Column("loop"), *columns(plain, "mean λ", "mean p", "median p", *leaves)]
    return Table("Exit gate", header, rows, note, name="exit_gate")


def _downstream(record: OuroRecord) -> Table | None:
    if not record.tasks:
        return None
    ks = sorted({score.k for score in record.tasks})
    cells = {
        (score.task, score.metric, score.k): plain(score.value)
        + ("" if score.error is None else f" ± {score.error:.2g}")
        for score in record.tasks
    }
    names = list(dict.fromkeys((score.task, score.metric) for score in record.tasks))
    rows = [[task, metric, *(cells.get((task, metric, k)) for k in ks)] for task, metric in names]
    header = [Column("task"), Column("metric"), *(Column(f"K = {k}", align="right") for k in ks)]
    return Table("Downstream tasks by depth", header, rows, "± standard error", name="downstream")


def _loop(record: OuroRecord, k: int) -> str:
    return f"{k}*" if k == record.subject.num_loops else str(k)
