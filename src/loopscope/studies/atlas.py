"""The atlas: every published design, trained a little and measured alike, in one output folder.

OUT/atlas.json        what was asked for, and everything that was found (`results.atlas`)
OUT/tokenizer/        fitted once, on the training text alone, and copied into every row of text
OUT/rows/NAME/        a run folder, with row.json, eval.json, audit.json, audit-untrained.json, probe.json, log.txt
OUT/tables/, OUT/figures/, OUT/atlas.html      made from atlas.json

A row is a design in a setting: the paper's or the modern recipe on text, or the modern one on pointer chasing. Rows
are those of a grid to ledger, schedule and backends. No torch here: rows are processes of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loopscope.config import Config
from loopscope.data.preparation import prepare
from loopscope.designs import DESIGN_SIZE, DESIGNS, Design
from loopscope.errors import ConfigError, LoopscopeError, RunError
from loopscope.machine import provenance
from loopscope.options import AtlasOptions
from loopscope.presets import preset
from loopscope.results.atlas import (
    ATLAS,
    FAR,
    HOPS,
    NOT_BUILT,
    PROBE,
    SETTINGS,
    AtlasRecord,
    AtlasRequest,
    Audited,
    Described,
    Entry,
    Probed,
    Setting,
)
from loopscope.results.audit import AuditResult
from loopscope.results.measures import Run, read_run
from loopscope.results.record import load_record, read_record, write_record
from loopscope.rows.conditions import Recipe, apply_recipe
from loopscope.rows.spec import Layout, RowSpec, Say, in_steps, locked
from loopscope.show import sentences

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
                refused.append(
                    Entry(design=name, recipe=setting.recipe, text=setting.text, state=NOT_BUILT, error=str(error))
                )
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
        asked = AtlasRequest(
            size=DESIGN_SIZE,
            steps=request.steps,
            hops_steps=request.hops_steps,
            seed=request.seed,
            data=list(shared.data.data),
            corpus_sha256=prepared.corpus.sha256,
            on_hops=ON_HOPS,
        )
        designs = [described(DESIGNS[name]) for name in request.designs]
        commands = [list(command)]
        note_request(out, AtlasRecord(asked=asked, commands=commands, designs=designs, entries=refused, **provenance()))
    hops = f" ({request.hops_steps} on {HOPS})" if any(row.text for row in rows) else ""
    return Layout(out, rows, f"{request.steps} steps{hops}")


# --- the file --------------------------------------------------------------------------------------------------------


def described(design: Design) -> Described:
    """A design of the registry."""
    rest = (inspect.getdoc(design.make) or "").partition("\n")[2].strip()
    return Described(
        name=design.name, title=design.title, source=design.source, summary=design.summary.strip(), text=rest
    )


def read_atlas(out: Path) -> AtlasRecord:
    """atlas.json, whole."""
    path = out / ATLAS
    if not path.is_file():
        raise RunError(f"{out} holds no atlas: it has no {ATLAS}; loopscope atlas --out {out} makes one")
    try:
        return load_record(path, AtlasRecord)
    except RunError as error:
        raise RunError(f"{error}; move it away and run its command again: finished rows are not run again") from None


def note_request(out: Path, asked: AtlasRecord) -> None:
    """Write atlas.json before any row runs, or add the request to the one that is there; its findings stay."""
    if (out / ATLAS).exists():
        before = read_atlas(out)
        _check_same(out, before.asked, asked.asked)
        new = [command for command in asked.commands if command not in before.commands]
        names = {design.name for design in asked.designs}
        kept = {(entry.design, entry.setting): entry for entry in (*before.entries, *asked.entries)}
        asked = replace(
            asked,
            commands=[*before.commands, *new],
            designs=[*(design for design in before.designs if design.name not in names), *asked.designs],
            entries=list(kept.values()),
            started=before.started or asked.started,
        )
    write_record(out / ATLAS, asked)


def _check_same(out: Path, before: AtlasRequest, now: AtlasRequest) -> None:
    for name in ("size", "steps", "hops_steps", "seed", "data", "corpus_sha256"):
        theirs, ours = getattr(before, name), getattr(now, name)
        if theirs != ours and not (name == "hops_steps" and not (theirs and ours)):
            flag = f"--{name.replace('_', '-')}"
            if name == "corpus_sha256":
                told = f"was started on text of SHA-256 {theirs}, and --data now has {ours}: restore the text, or"
                raise RunError(f"{out} {told} choose another --out")
            raise RunError(f"{out} was started with {flag} {theirs!r}, not {ours!r}; choose another --out")


def collect(out: Path) -> AtlasRecord:
    """atlas.json with what the rows say now; rows that are gone stay as they were told. Written back.

    Designs come in the order of the registry, whatever order they were asked for in.
    """
    record = read_atlas(out)
    entries = {(entry.design, entry.setting): entry for entry in record.entries}
    for folder in sorted(path.parent for path in (out / "rows").glob("*/row.json")):
        entry = entry_of(read_run(folder, folder.name), folder)
        if entry.design and entry.setting in SETTINGS:
            entries[entry.design, entry.setting] = entry
    order = list(DESIGNS)
    designs = sorted(record.designs, key=lambda each: order.index(each.name) if each.name in order else len(order))
    names = {design.name: n for n, design in enumerate(designs)}
    listed = [entry for entry in entries.values() if entry.design in names and entry.setting in SETTINGS]
    listed.sort(key=lambda entry: (names[entry.design], SETTINGS.index(entry.setting)))
    record = replace(record, designs=designs, entries=listed)
    write_record(out / ATLAS, record)
    return record


def entry_of(run: Run, folder: Path) -> Entry:
    """What the files of a row say; what is missing or damaged is a gap."""
    problems = dict(run.problems)
    probe = read_record(folder / PROBE, Probed, problems)
    row = run.row
    return Entry(
        design=run.condition,
        row=folder.name,
        state=(row.state if row else "") or "",
        stage=(row.stage if row else "") or "",
        error=(row.error if row else "") or "",
        seconds=sum(row.seconds.values()) if row else None,
        steps=run.steps,
        num_loops=run.num_loops or None,
        unigram_ce=run.evaluation.unigram_ce.get("valid") if run.evaluation else None,
        problems=problems,
        recipe=run.recipe,
        text=row.text if row else "",
        scores=run.splits.get("valid"),
        untrained=_audited(run.untrained),
        trained=_audited(run.audit),
        probe=probe,
    )


def _audited(audit: AuditResult | None) -> Audited | None:
    if audit is None:
        return None
    return Audited(
        verdict=audit.verdict,
        summary=sentences.summary(audit),
        variables=audit.variables,
        norms=[loop.norm for loop in audit.loops[:FAR]],
        notes=audit.checks.notes,
    )
