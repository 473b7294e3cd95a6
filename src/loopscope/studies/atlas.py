"""The atlas: every published design, trained a little and measured alike, in one output folder.

OUT/atlas.json        what was asked for, and everything that was found (`atlas_record`)
OUT/tokenizer/        fitted once, on the training text alone, and copied into every row of text
OUT/rows/NAME/        a run folder, with row.json, eval.json, audit.json, audit-untrained.json, probe.json, log.txt
OUT/tables/, OUT/figures/, OUT/atlas.html      made from atlas.json

A row is a design in a setting: the paper's or the modern recipe on text, or the modern one on pointer chasing. Rows
are those of a grid to ledger, schedule and backends. No torch here: rows are processes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loopscope.config import Config
from loopscope.data.preparation import prepare
from loopscope.designs import DESIGN_SIZE, DESIGNS, Design
from loopscope.errors import ConfigError, LoopscopeError
from loopscope.presets import preset
from loopscope.rows.conditions import Recipe, apply_recipe
from loopscope.rows.spec import Layout, RowSpec, Say, in_steps, locked
from loopscope.studies.atlas_record import (
    HOPS,
    NOT_BUILT,
    Asked,
    AtlasOptions,
    AtlasRecord,
    Entry,
    Setting,
    described,
    note_request,
)

EVAL_TOKENS = 16_384
"""Validation and test tokens of each row's scores."""

ON_HOPS = {
    "paper-raw": "the plain loop whose scale the loss sees: known to learn it, so the others have a measure",
    "paper-rmsnorm": "the same with the scale hidden: does the blind spot cost anything where depth is needed?",
    "paper-penalty": "the hidden scale with the paper's remedy",
    "ouro": "the scale taken out between loops, and a gate that may choose how deep to go",
    "huginn": "the input injected in every loop, from noise, at random depth",
    "parcae": "a linear recurrence with decay below one: stable by construction, does it still carry a pointer?",
}
"""Designs that are also trained on pointer chasing, with the reason; chosen before anything was run, at most six,
because each costs as much as several rows of text."""


def bases(request: AtlasOptions) -> dict[Setting, Config]:
    """The configuration of every setting that a design is applied to."""
    text = preset(DESIGN_SIZE)
    text = replace(
        text,
        data=replace(text.data, data=request.data or text.data.data),
        training=replace(in_steps(text.training, request.steps), seed=request.seed, threads=request.threads),
    )
    found = {Setting(recipe, ""): apply_recipe(text, recipe) for recipe in _RECIPES}
    if request.hops_steps:
        found[Setting("modern", HOPS)] = _hops_base(request)
    return found


_RECIPES: tuple[Recipe, ...] = ("paper", "modern")


def _hops_base(request: AtlasOptions) -> Config:
    """The preset hops: the warm-up of the modern recipe with a cosine, under its own initialisation and positions.

    Tried before the atlas was run, on paper-raw for 600 steps: with the small embeddings of the modern recipe its
    cross-entropy stays at that of guessing (3.45 of ln 32 = 3.47 nats), where the preset ends below 0.9 after 400.
    """
    base, steps = preset(HOPS), request.hops_steps
    shorter = replace(base.training, warmup=min(max(1, steps // 20), base.training.steps))
    training = replace(in_steps(shorter, steps), seed=request.seed, threads=request.threads)
    return replace(base, training=training)


def lay_out(request: AtlasOptions) -> tuple[list[RowSpec], list[Entry]]:
    """All rows, settings of one design one after another, and what a design refuses to be built as."""
    specs, refused = [], []
    for name in request.designs:
        for setting, base in bases(request).items():
            if setting.text == HOPS and name not in ON_HOPS:
                continue
            try:
                specs.append(_row(DESIGNS[name], setting, base, request.seed))
            except LoopscopeError as error:  # a told cell, not a failed atlas
                refused.append(Entry.failed(name, setting, NOT_BUILT, str(error)))
    return specs, refused


def _row(of: Design, setting: Setting, base: Config, seed: int) -> RowSpec:
    return RowSpec(
        condition=of.name,
        recipe="modern" if setting.recipe == "modern" else "paper",
        text=setting.text,
        seed=seed,
        config=of.apply(base),
        eval_tokens=EVAL_TOKENS,
        probe=True,
    )


def laid_out(request: AtlasOptions, out: Path, command: Sequence[str], say: Say) -> Layout:
    """The rows of a request: text opened, tokenizer fitted once, the request noted in atlas.json."""
    rows, refused = lay_out(request)
    if not rows:
        raise ConfigError.of("designs", ",".join(request.designs), f"none can be built: {refused[0].error}")
    shared = next(iter(bases(request).values()))
    with locked(out):
        prepared = prepare(shared, out / "tokenizer", say)
        asked = Asked(
            size=DESIGN_SIZE,
            steps=request.steps,
            hops_steps=request.hops_steps,
            seed=request.seed,
            data=list(shared.data.data),
            corpus_sha256=prepared.corpus.sha256,
            on_hops=ON_HOPS,
        )
        record = AtlasRecord.here(asked, list(command), [described(DESIGNS[name]) for name in request.designs], refused)
        note_request(out, record)
    hops = f" ({request.hops_steps} on {HOPS})" if any(row.text for row in rows) else ""
    return Layout(out, rows, f"{request.steps} steps{hops}")
