"""`loopscope.audit`: the audit of anything that names or is a looped model, on the text that fits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from loopscope.auditing.audit import Supervised, gather
from loopscope.auditing.audit import audit as audit_model
from loopscope.auditing.drift import affordable
from loopscope.auditing.visibility import Field
from loopscope.config import ModelConfig
from loopscope.data.stream import evaluation_batches
from loopscope.errors import ConfigError, UnsupportedError
from loopscope.inference.motion import measure_motion
from loopscope.model.looped_lm import build
from loopscope.objectives.placement import pairs_of
from loopscope.objectives.terms import Term, terms_of
from loopscope.options import AuditOptions
from loopscope.protocol import LoopedModel, run_loops
from loopscope.results.audit import AuditResult, Recipe
from loopscope.targets import Batch, Opened, open_target
from loopscope.untouched import borrowed, network_of
from loopscope.verbs.text import Say, tokens_for, with_tokenizer

VALIDATION_ROWS = 16
"""Rows of text that an audit chooses its tokens from."""
RANDOM_ROWS, RANDOM_LENGTH = 8, 64
"""Random ids that a model without text of its own is audited on."""
TEXT_LENGTH = 64
"""Tokens of a row of text for a model without a configuration: many short rows say more than few long ones."""

Progress = Callable[[str, float], None]


def audit(
    target: str | Path | Opened | LoopedModel,
    batches: Iterable[Batch] | None = None,
    *,
    supervised: Supervised = None,
    terms: Sequence[Term] | None = None,
    data: Sequence[str] | None = None,
    tokenizer: str | None = None,
    fields: dict[str, Field] | None = None,
    options: AuditOptions | None = None,
    recipe: Recipe | None = None,
    untrained_scale: float | None = None,
    name: str | None = None,
    step: int | None = None,
    progress: Progress = lambda *_: None,
    say: Say = lambda text: None,
) -> AuditResult:
    """Which parts of the state are active in the loop and invisible to every loss, with evidence and remedy.

    `target` is a word that names a model, what `loopscope.open` gave, or a LoopedModel with `batches` of ids (B, T) or
    pairs of ids and targets. `supervised` says which loops get cross-entropy ("every-loop", "terminal" or a list) and
    `terms` what else is in the loss; by default both are what the target says. `recipe` is how it is trained, to say
    whether training drives what is blind; that of the target by default, and without a target nothing is tried.
    `untrained_scale`, from which penalties count, is the target's own, else 1. The model comes back as it was.
    """
    options = options or AuditOptions()
    if not isinstance(target, (str, Path, Opened)):
        if batches is None or data is not None or tokenizer is not None:
            raise ConfigError("an audit of a model itself takes batches of ids; open a target to name text for it")
        batches = list(batches)
        result = audit_model(
            target,
            batches,
            supervised=supervised,
            terms=terms,
            fields=fields,
            options=options,
            recipe=recipe,
            untrained_scale=1.0 if untrained_scale is None else untrained_scale,
            name=name,
            step=step,
            progress=progress,
        )
        return _with_motion(result, target, batches, options, progress)
    opened = with_tokenizer(open_target(target, seed=options.seed), tokenizer)
    on, texts = (None, batches) if batches is not None else text_for(opened, data, options.seed, say)
    texts = list(texts)
    objective = opened.objective
    result = audit_model(
        opened.model,
        texts,
        supervised=supervised if supervised is not None else objective,
        terms=terms if terms is not None else [] if objective is None else terms_of(objective),
        fields=fields,
        options=options,
        recipe=recipe or Recipe.of(None if opened.config is None else opened.config.training),
        untrained_scale=_untrained_scale(opened, texts) if untrained_scale is None else untrained_scale,
        name=name or opened.name,
        step=opened.step if step is None else step,
        progress=progress,
    )
    result = _with_motion(result, opened.model, texts, options, progress)
    notes = [*([on] if on else []), *opened.notes, *result.checks.notes]
    return replace(_with_texts(result, opened), checks=replace(result.checks, notes=notes))


def _with_motion(
    result: AuditResult, model: LoopedModel, batches: Sequence[Batch], options: AuditOptions, progress: Progress
) -> AuditResult:
    """The audit with the motion of the tokens that were audited, where that is asked for."""
    if not options.motion:
        return result
    progress("motion", 0.97)
    ids_BT, _ = gather(batches, options)
    try:
        return replace(result, token_motion=measure_motion(model, ids_BT))
    except UnsupportedError as error:  # it ends with its trained depth: what was audited stands
        return replace(result, checks=replace(result.checks, notes=[*result.checks.notes, str(error)]))


def text_for(opened: Opened, data: Sequence[str] | None, seed: int, say: Say) -> tuple[str | None, Iterable[Batch]]:
    """What to audit on, and a note where that is not the target's own text."""
    if opened.tokenizer is not None:
        tokens = tokens_for(opened, data, say)
        length = opened.sequence_length if opened.config is not None else min(TEXT_LENGTH, opened.sequence_length)
        rows = list(islice(evaluation_batches(tokens, length, 1, None), VALIDATION_ROWS))
        names = data or opened.data.data
        where = "the built-in text (--data names another)" if names == ("builtin",) else ", ".join(names)
        return (None if opened.run is not None else f"audited on {where}"), rows
    if data is not None:
        tokens_for(opened, data, say)  # says what is missing
    if opened.batches is not None:
        return None, opened.batches
    note = "audited on random token ids, since there is no tokenizer: its cross-entropies mean little"
    return (note if opened.is_trained else None), [random_ids(opened, seed)]


def random_ids(opened: Opened, seed: int) -> Tensor:
    """Uniform ids from a generator of their own."""
    length = min(RANDOM_LENGTH, opened.max_length or RANDOM_LENGTH)
    return torch.randint(opened.vocab_size, (RANDOM_ROWS, length), generator=torch.Generator().manual_seed(seed))


def _untrained_scale(opened: Opened, texts: Sequence[Batch]) -> float:
    """Root mean square of h over the loops of the design as its training began; 1 where that is not known.

    Freshly built where the weights have been trained, unless they are very many.
    """
    model = opened.model
    if opened.is_trained:
        if opened.config is None or not isinstance(opened.config.model, ModelConfig) or not affordable(model):
            return 1.0
        model = build(opened.config.model, seed=opened.config.training.seed)
    pairs_of(texts[:1])  # refuses what is no batch of ids
    first = texts[0][0] if isinstance(texts[0], (tuple, list)) else texts[0]
    with borrowed(network_of(model)), torch.no_grad():
        states = run_loops(model, first[:1]).states[1:]
    return float(torch.stack([state.h_BTD.double().square().mean() for state in states]).mean().sqrt())


def _with_texts(result: AuditResult, opened: Opened) -> AuditResult:
    """The heaviest tokens as text, where the target has a tokenizer."""
    if opened.tokenizer is None:
        return result
    named = [replace(one, text=opened.tokenizer.decode([one.token])) for one in result.heaviest_tokens]
    return replace(result, heaviest_tokens=named)
