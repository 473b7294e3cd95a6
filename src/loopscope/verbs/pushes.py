"""`loopscope.push`: the push test of anything that names or is a looped model, on the text of its training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from loopscope.auditing.audit import Supervised
from loopscope.auditing.push import Progress
from loopscope.auditing.push import push as push_model
from loopscope.auditing.trial import Size, TrialObjective, size_along, trainable
from loopscope.auditing.visibility import FIELDS, Field
from loopscope.data.preparation import prepare
from loopscope.data.stream import Tokens, training_stream
from loopscope.data.tasks import TaskText
from loopscope.errors import ConfigError, suggest
from loopscope.objectives.terms import Term, terms_of
from loopscope.options import PushOptions
from loopscope.protocol import LoopedModel
from loopscope.results.audit import AuditResult, PushResult, Recipe
from loopscope.results.thresholds import RAN
from loopscope.targets import Batch, Opened, open_target
from loopscope.verbs.audits import RANDOM_LENGTH, RANDOM_ROWS
from loopscope.verbs.text import Say, tokens_for, with_tokenizer

USUAL_BATCH = 8
"""Sequences of a step for a target that does not say."""
WHAT = "the push test"


def push(
    target: str | Path | Opened | LoopedModel,
    batches: Iterable[Batch] | None = None,
    *,
    variables: Sequence[str] = ("scale",),
    fields: dict[str, Field] | None = None,
    sizes: Mapping[str, Size] | None = None,
    supervised: Supervised = None,
    terms: Sequence[Term] | None = None,
    data: Sequence[str] | None = None,
    tokenizer: str | None = None,
    lr: float | None = None,
    options: PushOptions | None = None,
    seed: int = 0,
    progress: Progress = lambda *_: None,
    say: Say = lambda text: None,
) -> PushResult:
    """Reward variables for growing, for a few dozen steps on a copy of the weights: how far do they go, at what price?

    `target` is a word that names a model, what `loopscope.open` gave, or a LoopedModel with `batches` of ids (B, T) or
    pairs of ids and targets, one for every step. `variables` names fields: scale, mean, or one of `fields`; `sizes` are
    variables of any other kind, h_BTD → their size at every token. The objective is what `supervised` and `terms` say,
    by default what the target says. The model comes back as it was.
    """
    known = {**FIELDS, **(fields or {})}
    for variable in variables:
        if variable not in known:
            raise ConfigError(f"there is no variable {variable!r} to push; {suggest(variable, known)}")
    followed = {**{each: size_along(known[each]) for each in variables}, **(sizes or {})}
    recipe, name = Recipe(), None
    notes: list[str] = []
    if isinstance(target, (str, Path, Opened)):
        opened = with_tokenizer(open_target(target, seed=seed), tokenizer)
        model, name = opened.model, opened.name
        trainable(model, WHAT)  # before any text is packed
        supervised = supervised if supervised is not None else opened.objective
        terms = terms if terms is not None else [] if opened.objective is None else terms_of(opened.objective)
        if opened.config is not None:
            recipe = Recipe.of(opened.config.training)
            if opened.config.training.optimizer != "adamw":
                notes.append(f"pushed with AdamW, not with {opened.config.training.optimizer}")
        if batches is None:
            note, batches = training_text(opened, data, seed, say)
            notes += [note] if note else []
        notes = [*opened.notes, *notes]
    else:
        if batches is None or data is not None or tokenizer is not None:
            raise ConfigError("a push of a model itself takes batches of ids; open a target to name text for it")
        model = target
    result = push_model(
        model,
        batches,
        TrialObjective(supervised, terms, model.num_loops),
        followed,
        recipe=recipe if lr is None else replace(recipe, lr=lr),
        options=options,
        name=name,
        progress=progress,
    )
    return replace(result, notes=[*notes, *result.notes])


def training_text(
    opened: Opened, data: Sequence[str] | None, seed: int, say: Say
) -> tuple[str | None, Iterable[Batch]]:
    """A batch for every step, from the text of the target's training; a note where there is none.

    A design that has no tokenizer yet gets the one that its training would fit.
    """
    config = opened.config
    if opened.tokenizer is None and config is not None and opened.batches is None:
        if data is not None:
            config = replace(config, data=replace(config.data, data=tuple(data), valid=None, curriculum=None))
        with tempfile.TemporaryDirectory() as folder:
            return None, _stream(prepare(config, Path(folder), say).train, opened, seed)
    if opened.tokenizer is not None:
        return None, _stream(tokens_for(opened, data, say, split="train"), opened, seed)
    if data is not None:
        tokens_for(opened, data, say)  # says what is missing
    if opened.batches is not None:
        return None, opened.batches
    return "pushed on random token ids, since there is no tokenizer: its costs mean little", _random(opened, seed)


def _stream(tokens: Tokens | TaskText, opened: Opened, seed: int) -> Iterator[Batch]:
    length = opened.sequence_length
    batch = USUAL_BATCH if opened.config is None else opened.config.training.batch
    stream = training_stream(tokens, length, batch, seed)
    return (stream.batch(step) for step in count())


def _random(opened: Opened, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    shape = (RANDOM_ROWS, min(RANDOM_LENGTH, opened.max_length or RANDOM_LENGTH))
    return (torch.randint(opened.vocab_size, shape, generator=generator) for _ in count())


def with_push(audited: AuditResult, pushed: PushResult) -> AuditResult:
    """An audit with its push test; a note where the two disagree about a variable."""
    verdicts = {variable.name: variable.verdict for variable in audited.variables}
    notes = list(audited.checks.notes)
    for push in pushed.pushes:
        verdict = verdicts.get(push.name)
        if verdict == "blind" and not push.far:
            notes.append(f"{push.name} is called blind, but a reward moved it only {push.growth:.3g}-fold")
        if verdict in ("visible", "weak") and push.far:
            notes.append(
                f"{push.name} is called {verdict} at these weights, but weights that follow a reward let it go "
                f"{push.growth:.3g}-fold for {push.paid:.2g} nats (the limit is {RAN:g})"
            )
    return replace(audited, push=pushed, checks=replace(audited.checks, notes=notes))
