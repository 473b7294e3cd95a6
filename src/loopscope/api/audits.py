"""`loopscope.audit`, `loopscope.push` and `loopscope.check`: of anything that names or is a looped model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.adapters.transformers_lm import TransformersModel, is_pretrained_model
from loopscope.auditing.audit import Supervised, gather
from loopscope.auditing.audit import audit as audit_model
from loopscope.auditing.drift import Size, TrialObjective, affordable, size_along, trainable
from loopscope.auditing.drift import push as push_model
from loopscope.auditing.survey import Progress
from loopscope.auditing.visibility import FIELDS, Field
from loopscope.config import ModelConfig
from loopscope.data.preparation import prepare
from loopscope.data.stream import TokenSequence, evaluation_batches, training_stream
from loopscope.data.task import TaskText
from loopscope.errors import ConfigError, ProtocolError, UnsupportedError, suggest
from loopscope.inference.conformance import check_all
from loopscope.inference.motion import measure_motion
from loopscope.inference.subjects import LoopedSubject, WholeSubject
from loopscope.model.looped_lm import build
from loopscope.objectives.placement import pairs_of
from loopscope.objectives.terms import Term, terms_of
from loopscope.options import AuditOptions, CheckOptions, PushOptions, chosen
from loopscope.protocol import LoopedModel, run_loops
from loopscope.results.audit import AuditResult, PushResult, Recipe
from loopscope.results.check import Conformance
from loopscope.results.thresholds import RAN
from loopscope.targets import (
    Batch,
    Opened,
    Say,
    bring,
    is_factory,
    made_by_factory,
    of_made,
    open_target,
    tokens_for,
    with_tokenizer,
)
from loopscope.untouched import borrowed, network_of, widened, widest_affordable

VALIDATION_ROWS = 16
"""Rows of text that an audit chooses its tokens from."""
RANDOM_ROWS, RANDOM_LENGTH = 8, 64
"""Random ids that a model without text of its own is audited on."""
TEXT_LENGTH = 64
"""Tokens of a row of text for a model without a configuration: many short rows say more than few long ones."""
USUAL_BATCH = 8
"""Sequences of a step for a target that does not say."""


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
    opened: Opened | None = None
    on: str | None = None
    if not isinstance(target, (str, Path, Opened)):
        if batches is None or data is not None or tokenizer is not None:
            raise ConfigError("an audit of a model itself takes batches of ids; open a target to name text for it")
        model, texts = target, list(batches)
    else:
        opened = with_tokenizer(open_target(target, seed=options.seed), tokenizer)
        on, read = (None, batches) if batches is not None else text_for(opened, data, options.seed, say)
        model, texts, objective = opened.model, list(read), opened.objective
        supervised = supervised if supervised is not None else objective
        terms = terms if terms is not None else [] if objective is None else terms_of(objective)
        recipe = recipe or Recipe.of(None if opened.config is None else opened.config.training)
        untrained_scale = _untrained_scale(opened, texts) if untrained_scale is None else untrained_scale
        name, step = name or opened.name, opened.step if step is None else step
    result = audit_model(
        model,
        texts,
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
    result = _with_motion(result, model, texts, options, progress)
    if opened is None:
        return result
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
    return (note if opened.is_trained else None), [next(random_ids(opened, seed))]


def random_ids(opened: Opened, seed: int) -> Iterator[Tensor]:
    """Batches of uniform ids from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    shape = (RANDOM_ROWS, min(RANDOM_LENGTH, opened.max_length or RANDOM_LENGTH))
    return (torch.randint(opened.vocab_size, shape, generator=generator) for _ in count())


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
        trainable(model, "the push test")  # before any text is packed
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
    return "pushed on random token ids, since there is no tokenizer: its costs mean little", random_ids(opened, seed)


def _stream(tokens: TokenSequence | TaskText, opened: Opened, seed: int) -> Iterator[Batch]:
    length = opened.sequence_length
    batch = USUAL_BATCH if opened.config is None else opened.config.training.batch
    stream = training_stream(tokens, length, batch, seed)
    return (stream.batch(step) for step in count())


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


# --- the same numbers, however it is run? ----------------------------------------------------------------------------


def check(
    target: str | Path | Opened | LoopedModel | nn.Module,
    options: CheckOptions | None = None,
    *,
    progress: Progress = lambda *_: None,
    **fields: Any,
) -> Conformance:
    """Whether cached is uncached, ragged is alone, depth n of a deeper run is a run of n, and so on; see docs/check.md.

    `target` is a word that names a model, what `loopscope.open` gave, a LoopedModel, or a causal language model of
    transformers. `fields` are those of CheckOptions. The model comes back as it was.
    """
    options = chosen(CheckOptions(), options, fields)
    context, device, seed = options.context, options.device, options.seed
    made: Any = target
    name = type(target).__name__
    if isinstance(target, (str, Path)):
        name = str(target)
        made = made_by_factory(name, seed) if is_factory(name) else open_target(target, seed=seed)
    if is_pretrained_model(made):
        if context is not None:
            raise ConfigError.of("context", context, "a model of transformers does not refuse positions itself")
        bring(made, device)
        found = _at_its_widest(made, lambda: check_all(WholeSubject(TransformersModel(made), seed), progress))
        return replace(found, target=name)
    with borrowed(network_of(made)):  # a model that was handed in is given back in the mode it was in
        opened = made if isinstance(made, Opened) else of_made(name, made)
        model, length = opened.model, opened.max_length if context is None else context
        bring(network_of(model), device)

        def run() -> Conformance:
            return check_all(LoopedSubject(model, opened.vocab_size, length, seed), progress)

        return replace(_at_its_widest(network_of(model), run), target=opened.name)


def _at_its_widest(network: nn.Module | None, run: Callable[[], Conformance]) -> Conformance:
    """In float64 where the weights are small enough, so that rounding is out of the way; else in float32.

    A model may have weights that it does not show, or masks of a fixed dtype: what then fails is run as it is.
    """
    dtype = widest_affordable(network)
    wide: Conformance | None = None
    with borrowed(network) as held:
        try:
            with widened(network, dtype, held):
                wide = run()
            why = _raised(wide)
        except ProtocolError as error:
            why = str(error)
        if wide is not None and why is None:
            return wide
        own = run()
    if wide is not None and _raised(own) is not None:
        return wide  # it fails in any dtype
    note = f"the model does not run in {str(dtype).removeprefix('torch.')}, so it was checked in its own dtype ({why})"
    return replace(own, notes=(*own.notes, note))


def _raised(result: Conformance) -> str | None:
    """The first error that a model raised in a check."""
    return next((finding.raised for finding in result.findings if finding.raised is not None), None)
