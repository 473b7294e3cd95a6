"""A grid: condition × seed under one recipe, everything else equal, in one output folder.

OUT/grid.json         commands, common configuration, differences from the paper, data, versions
OUT/tokenizer/        fitted once, on the training text alone, and copied into every row
OUT/rows/NAME/        a run folder as `loopscope train` makes it, and row.json, eval.json, log.txt,
                      audit.json, audit-untrained.json, halting.json
OUT/claims.json, OUT/tables/, OUT/figures/      made from the files above

No torch here: rows are processes of their own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loopscope.config import Config, config_from_dict, config_to_dict
from loopscope.data.preparation import Prepared, evaluation_corpus, pack_split, prepare
from loopscope.errors import ConfigError, RunError
from loopscope.files import write_atomically
from loopscope.machine import provenance
from loopscope.presets import preset
from loopscope.results.record import as_json, load_record, write_record
from loopscope.results.reproduction import GRID, GridRecord, RecipeRecord
from loopscope.rows.conditions import (
    CONDITIONS,
    PAPER_EPOCHS,
    PAPER_SIZES,
    Condition,
    Recipe,
    apply_recipe,
    differences,
)
from loopscope.rows.spec import Layout, RowSpec, Say, first_difference, in_steps, locked

FLAGS = frozenset({"size", "steps", "data", "valid", "test_data", "eval_tokens"})
"""Fields that `loopscope reproduce` has a flag for."""

OTHER_OUT = "choose another --out"

Under = Callable[[Condition, Config], Config]
"""What a condition makes of the configuration that all rows share."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for."""

    size: str = "nano"
    recipe: Recipe = "paper"
    seeds: Mapping[str, tuple[int, ...]]
    """The seeds of each condition."""
    steps: int | None = None
    """Optimiser steps; None takes the size's: a preset's, or the paper's four epochs."""
    data: tuple[str, ...] | None = None
    valid: tuple[str, ...] | None = None
    test_data: tuple[str, ...] | None = None
    eval_tokens: int | None = None
    audit: bool = True
    audit_untrained: bool = True
    halting: bool = True
    """Calibrate a halting rule on every row whose exits are trained."""
    threads: int | None = 1

    def base(self) -> Config:
        """The size's preset on the text asked for."""
        base = preset(self.size)
        data = replace(base.data, data=self.data or base.data.data, valid=self.valid or base.data.valid)
        return replace(base, data=data, training=replace(base.training, threads=self.threads))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The rows of one request, and the configuration they share."""

    out: Path
    request: Request
    common: Config
    epochs: float
    data: dict[str, Any]
    """What a manifest keeps of the data."""
    under: Under

    def rows(self) -> list[RowSpec]:
        """All rows; the first seed of every condition comes before the second of any."""
        turns = itertools.zip_longest(*([(name, seed) for seed in seeds] for name, seeds in self.request.seeds.items()))
        return [self._row(*pair) for turn in turns for pair in turn if pair is not None]

    def _row(self, name: str, seed: int) -> RowSpec:
        config = self.under(CONDITIONS[name], self.common)
        return RowSpec(
            condition=name,
            recipe=self.request.recipe,
            seed=seed,
            config=replace(config, training=replace(config.training, seed=seed)),
            test_data=self.request.test_data,
            eval_tokens=self.request.eval_tokens,
            audit=self.request.audit,
            audit_untrained=self.request.audit_untrained,
            halting=self.request.halting and CONDITIONS[name].placement == "per-loop",
        )


def lay_out(request: Request, out: Path, say: Say, base: Config | None = None, under: Under = Condition.apply) -> Grid:
    """Open the text, fit the tokenizer once, and settle the configuration that all rows share.

    Another configuration than the size's comes in as `base`, what a condition makes of it as `under`.
    """
    base = base or request.base()
    with locked(out):
        _check_tokenizer(base, out)
        prepared = prepare(base, out / "tokenizer", say)
    data = as_json(prepared.record()) | _test_text(request, base, prepared, say)
    windows = _windows(base, prepared)
    steps = request.steps
    if steps is None:
        in_epochs = request.size in PAPER_SIZES
        steps = round(PAPER_EPOCHS * windows / base.training.batch) if in_epochs else base.training.steps
    common = apply_recipe(replace(base, training=in_steps(base.training, max(1, steps))), request.recipe)
    epochs = common.training.steps * common.training.batch / windows
    return Grid(out=out, request=request, common=common, epochs=epochs, data=data, under=under)


def _test_text(request: Request, base: Config, prepared: Prepared, say: Say) -> dict[str, str]:
    """Open and pack the test text before anything is trained: a wrong name must not cost a grid. Gives its hash."""
    if request.test_data is None:
        return {}
    test = evaluation_corpus(request.test_data, base.data.text_field)
    pack_split(test, "valid", prepared.tokenizer, say)
    return {"test_sha256": test.sha256}


def _check_tokenizer(base: Config, out: Path) -> None:
    """Refuse a tokenizer that an interrupted request for other text left behind; note what ours will be fitted on."""
    mark = out / ".tokenizer-of"
    asked = json.dumps([*config_to_dict(base)["data"].values(), base.model.vocab_size])
    left_behind = (out / "tokenizer").exists() and mark.exists() and not (out / "grid.json").exists()
    if left_behind and mark.read_text("utf-8") != asked:
        raise RunError(f"{out}/tokenizer was fitted for another command, which was interrupted; {OTHER_OUT}")
    write_atomically(mark, asked)


def laid_out(request: Request, out: Path, command: list[str], say: Say) -> Layout:
    """The rows of a request, noted in grid.json."""
    grid = lay_out(request, out, say)
    record(grid, command)
    return Layout(out, grid.rows(), f"{grid.common.training.steps} steps ({grid.epochs:.2g} epochs)")


def record(grid: Grid, command: list[str]) -> None:
    """Note a grid in its folder's grid.json."""
    request = grid.request
    recipe = RecipeRecord(
        config=config_to_dict(grid.common),
        epochs=grid.epochs,
        seeds={name: list(request.seeds[name]) for name in CONDITIONS if name in request.seeds},
        differences=differences(grid.common, request.size, epochs=grid.epochs) if grid.under is Condition.apply else [],
    )
    test_data = None if request.test_data is None else list(request.test_data)
    recipes = {str(request.recipe): recipe}
    asked = GridRecord(
        size=request.size,
        commands=[command],
        recipes=recipes,
        data=grid.data,
        test_data=test_data,
        eval_tokens=request.eval_tokens,
        **provenance(),
    )
    add_request(grid.out, asked)


def add_request(out: Path, asked: GridRecord) -> None:
    """Write grid.json, or add a request to it; a folder holds one size and one configuration per recipe."""
    path = out / GRID
    with locked(out):
        before = read_grid(out) if path.exists() else None
        if before is not None:
            _check_same(out, before, asked)
            asked = _joined(before, asked)
        write_record(path, asked)


def read_grid(out: Path) -> GridRecord:
    """grid.json, whole and with configurations that are some."""
    path = out / GRID
    try:
        found = load_record(path, GridRecord)
        for name, recipe in found.recipes.items():
            try:
                config_from_dict(recipe.config)
            except ConfigError as error:
                raise RunError(f"{path} has a configuration under {name} that is none: {error}") from None
    except RunError as error:
        raise RunError(
            f"{error}; move it away and run the command of this grid again: its rows stay as they are"
        ) from None
    return found


def update_differences(out: Path, bf16: bool) -> None:
    """Add to grid.json what only a row can tell: whether it ran in bfloat16."""
    path = out / GRID
    with locked(out):
        known = read_grid(out)
        recipes = {}
        for name, part in known.recipes.items():
            found = differences(config_from_dict(part.config), known.size, epochs=part.epochs, bf16=bf16)
            recipes[name] = replace(part, differences=found)
        write_record(path, replace(known, recipes=recipes))


def _joined(before: GridRecord, asked: GridRecord) -> GridRecord:
    """Both requests: rows of either, versions of the later, the start of the earlier."""
    recipes = dict(before.recipes)
    for name, recipe in asked.recipes.items():
        known = recipes[name].seeds if name in recipes else {}
        both = {
            row: list(dict.fromkeys([*known.get(row, ()), *recipe.seeds.get(row, ())])) for row in known | recipe.seeds
        }
        order = [*CONDITIONS, *both]
        recipes[name] = replace(recipe, seeds=dict(sorted(both.items(), key=lambda pair: order.index(pair[0]))))
    new = [command for command in asked.commands if command not in before.commands]
    started = before.started or asked.started
    return replace(asked, recipes=recipes, commands=[*before.commands, *new], started=started)


def _check_same(out: Path, before: GridRecord, asked: GridRecord) -> None:
    compared: list[tuple[str, Any, Any]] = [("size", before.size, asked.size)]
    texts = {"corpus_sha256": "data", "tokenizer_sha256": "data"}
    if any(out.glob("rows/*/eval.json")):  # until then, how rows are evaluated may change
        compared += [(name, getattr(before, name), getattr(asked, name)) for name in ("test_data", "eval_tokens")]
        texts["test_sha256"] = "test_data"
    for name, theirs, ours in compared:
        if theirs != ours:
            raise _other_grid(out, name, theirs, ours)
    for name, flag in texts.items():
        if before.data.get(name, asked.data.get(name)) != asked.data.get(name):
            raise RunError(
                f"the text of --{flag.replace('_', '-')} is not what {out} was started with: {name} was "
                f"{before.data[name]} and is {asked.data.get(name)}; restore the text, or {OTHER_OUT}"
            )
    for name, recipe in asked.recipes.items():
        same = before.recipes.get(name)
        if same is not None and (found := first_difference(same.config, recipe.config)) is not None:
            raise _other_grid(out, *found)


def _other_grid(out: Path, name: str, before: object, now: object) -> RunError:
    flag = f" (flag --{name.replace('_', '-')})" if name in FLAGS else ""
    return RunError(f"{out} holds a grid with {name} = {before!r}, not {now!r}{flag}; {OTHER_OUT}")


def _windows(base: Config, prepared: Prepared) -> int:
    """Training sequences of an epoch under the recipe's stride."""
    data = apply_recipe(base, "paper").data
    return max(1, (len(prepared.train) - 1 - base.sequence_length) // (data.stride or base.sequence_length) + 1)
