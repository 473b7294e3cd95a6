"""Ouro's design trained with the norm before its head and without it (Figure 6 of arXiv 2606.24898), as rows.

Only that norm goes: the one that opens every loop stays, in both. {terminal, per-loop} cross-entropy, each a plain mean
of CE over its loops and never a CE of mixed logits; the exit gate, which neither loss would train, is left out. All
rows take the same batches, so their tokens are matched exactly. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loopscope.config import Config, ObjectiveConfig
from loopscope.designs import design
from loopscope.presets import preset
from loopscope.results.ouro import (
    AS_IT_IS,
    OURO,
    OURO_TRAINING,
    REMOVED,
    OuroRecord,
    OuroRequest,
    OuroTraining,
    TrainedOuro,
)
from loopscope.results.record import read_record, write_record
from loopscope.rows.conditions import CONDITIONS, OURO_TRAIN, Condition, OuroTrainingOptions, choose_seeds
from loopscope.rows.grid import Request, lay_out, record
from loopscope.rows.spec import Layout, RowSpec, Say
from loopscope.show.numbers import plain
from loopscope.show.table import Column, Table, columns

FINEWEB = "hf:HuggingFaceFW/fineweb:sample-10BT"
TOKENS_PER_DOCUMENT = 400
"""Fewer than a document of FineWeb has on average in any tokenizer of a few thousand tokens and more, so that what is
streamed is enough; and of its documents 230 in 256 are trained on."""
SEQUENCE_1_4B = 2048
"""Tokens of a sequence at 1.4B: its 65,536 positions would not fit, and FineWeb's documents are shorter."""


def shared(options: OuroTrainingOptions) -> Config:
    """What all rows share: the published design at this size, Ouro's positions, head and initialisation."""
    base = preset(options.size) if options.size == "ouro-1.4b" else design("ouro").apply(preset(options.size))
    model = replace(base.design("a size"), positions="rope", tie_head=False, dropout=0.0, init="scaled")
    model = replace(model, exit_gate=False)
    training = base.training
    if options.size == "ouro-1.4b":
        training = replace(training, lr=3e-4, batch=64, steps=10_000)
    training = replace(
        training,
        steps=options.steps or training.steps,
        batch=options.batch or training.batch,
        accumulate=options.accumulate,
        lr=options.lr or training.lr,
        shard=options.shard,
        checkpoint_loops=options.checkpoint_loops,
        threads=options.threads,
    )
    training = replace(training, warmup=max(1, training.steps // 20))
    length = options.length or (SEQUENCE_1_4B if options.size == "ouro-1.4b" else model.max_length)
    data = replace(base.data, sequence_length=length, stride=length, tokenizer=options.tokenizer or "bpe")
    data = replace(data, data=options.data or fineweb(training.steps * training.batch * length), valid=options.valid)
    return Config(model=model, objective=ObjectiveConfig(), data=data, training=training)


def fineweb(tokens: int) -> tuple[str]:
    """As many documents of FineWeb, streamed, as give so many tokens to train on."""
    return (f"{FINEWEB}:{math.ceil(tokens / TOKENS_PER_DOCUMENT * 256 / 230)}",)


def under(condition: Condition, common: Config) -> Config:
    """The common configuration with the loss and the readout of a condition; the inter-loop norm stays as it is."""
    model = common.design("a condition")
    if condition.readout == "raw":
        model = replace(model, readout="raw", share_readout_norm=False)
    return replace(common, model=model, objective=replace(common.objective, placement=condition.placement))


def laid_out(options: OuroTrainingOptions, out: Path, command: list[str], say: Say) -> Layout:
    """The rows, their text opened and their tokenizer fitted, noted in grid.json."""
    base = shared(options)
    asked = Request(
        size=f"{OURO_TRAIN} {options.size}",
        seeds=dict.fromkeys(options.conditions, choose_seeds(options.seeds)),
        steps=base.training.steps,
        eval_tokens=options.eval_tokens,
        audit=False,
        halting=False,
    )
    grid = lay_out(asked, out, say, base, under)
    record(grid, command)
    training = grid.common.training
    tokens = training.steps * training.batch * grid.common.sequence_length
    return Layout(out, grid.rows(), f"{training.steps} steps ({tokens:,} tokens, {grid.epochs:.2g} epochs)")


# --- what became of the rows -----------------------------------------------------------------------------------------


def checks_asked(spec: RowSpec, sweep_tokens: int) -> OuroRequest:
    """What `check_ouro` measures of a row: its own validation text, every depth it was trained at."""
    depths = list(range(1, spec.config.model.num_loops + 1))
    length = spec.config.sequence_length
    return OuroRequest(
        depths=depths, data=[], tokenizer="", length=length, max_tokens=spec.eval_tokens, sweep_tokens=sweep_tokens
    )


def trained_row(spec: RowSpec, record: OuroRecord) -> TrainedOuro:
    """A row and the checks of it."""
    training, last, depths = spec.config.training, record.last, record.depths
    num_loops = spec.config.model.num_loops
    own = AS_IT_IS if CONDITIONS[spec.condition].readout == "rmsnorm" else REMOVED
    first, full = (None, None) if depths is None else (depths.at(1), depths.at(num_loops))
    ce = None if full is None else full.ce
    return TrainedOuro(
        name=spec.name,
        condition=spec.condition,
        seed=spec.seed,
        steps=training.steps,
        tokens=training.steps * training.batch * spec.config.sequence_length,
        num_loops=num_loops,
        ce=ce,
        perplexity=None if full is None else full.perplexity,
        exit_failure=None if first is None or first.ce is None or ce is None else first.ce - ce,
        norm=None if full is None else full.norm,
        sweep_span=None if last is None else last.span(own),
        radial_share=None if last is None else last.radial_share.get(own),
        verdict=record.verdict,
    )


def publish_training(
    size: str, rows: Mapping[str, RowSpec], out: Path, say: Callable[[str], None]
) -> tuple[list[TrainedOuro], Table]:
    """ouro-train.json, tables/trained.* and Figure 6, from the ouro.json of every row that has one."""
    found = {name: read_record(out / "rows" / name / OURO, OuroRecord, {}) for name in rows}
    records = {name: record for name, record in found.items() if record is not None}
    trained = [trained_row(rows[name], record) for name, record in records.items()]
    write_record(out / OURO_TRAINING, OuroTraining(size=size, rows=trained))
    table = trained_table(trained)
    table.write(out / "tables")
    try:
        from loopscope.studies.figures import draw_ouro_training
    except ImportError as error:
        say(f"no figures: they need {error.name}; run: pip install 'loopscope[report]'")
    else:
        draw_ouro_training(records, out / "figures")
    return trained, table


def trained_table(trained: Sequence[TrainedOuro]) -> Table:
    """One line for each row."""
    rows: list[list[object]] = []
    for each in trained:
        scores = (each.ce, each.perplexity, each.exit_failure, each.norm)
        rows.append([each.name, each.tokens, *scores, each.sweep_span, each.radial_share, each.verdict])
    measured = columns(plain, "CE(K)", "PPL(K)", "CE(1) − CE(K)", "‖h_K‖", "CE over α", "radial share")
    header = [Column("row"), Column("tokens", ","), *measured, Column("Figure 6")]
    note = "CE over α: by how many nats CE varies while the final state is scaled by 0.1 to 10 before the readout"
    return Table("Ouro's design with and without the norm before the head", header, rows, note, name="trained")
