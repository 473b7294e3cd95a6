"""One call that audits any looped model: measure, search, judge.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loopscope.auditing.drift import TRIALS, affordable, drift
from loopscope.auditing.motion import measure_motion
from loopscope.auditing.result import AuditResult, Subject, Variable
from loopscope.auditing.survey import Measured, Progress, Survey, measure
from loopscope.auditing.trial import Recipe, TrialObjective, pairs_of, size_along, size_within
from loopscope.auditing.untouched import borrowed, network_of, widened, widest_affordable
from loopscope.auditing.verdict import summary, with_drift
from loopscope.auditing.visibility import FIELDS, Field
from loopscope.config import ObjectiveConfig
from loopscope.errors import DataError, LoopscopeError, UnsupportedError
from loopscope.objectives.placement import Objective, exit_weights
from loopscope.objectives.terms import Term, terms_of
from loopscope.options import AuditOptions
from loopscope.protocol import LoopedModel, LoopState, OwnLosses

Batch = Tensor | tuple[Tensor, Tensor]
Supervised = ObjectiveConfig | str | Sequence[int] | None


def audit(
    model: LoopedModel,
    batches: Iterable[Batch],
    *,
    supervised: Supervised = None,
    terms: Sequence[Term] | None = None,
    fields: dict[str, Field] | None = None,
    options: AuditOptions | None = None,
    recipe: Recipe | None = None,
    untrained_scale: float = 1.0,
    name: str | None = None,
    step: int | None = None,
    progress: Progress = lambda *_: None,
) -> AuditResult:
    """Which parts of the state are active in the loop and invisible to every loss, with evidence and remedy.

    `batches` are ids (B, T) or pairs of ids and targets; without targets, each token predicts the next. `supervised`
    says which loops get cross-entropy ("every-loop", "terminal", a list, or an objective's configuration), `terms` what
    else is in the loss, besides the model's own losses: by default what the configuration turns on. With a `recipe` of
    training, what is blind is also asked whether training drives it. `untrained_scale` is that of the states before
    training, from which a penalty counts if it is above 1. The model comes back as it was.
    """
    started = time.perf_counter()
    options = options or AuditOptions()
    ids_BT, targets_BT = _gather(batches, options)
    weights = exit_weights(supervised, model.num_loops)
    gated = isinstance(supervised, ObjectiveConfig) and supervised.placement == "gated"
    network = network_of(model)
    if terms is None:
        terms = terms_of(supervised) if isinstance(supervised, ObjectiveConfig) else ()
    own = OwnLosses.of(model)
    told, terms = terms, [*terms, *(() if own is None else own.losses())]
    for term in terms:
        term.check()
    fields = {**FIELDS, **(fields or {})}
    run = Survey(model, network, ids_BT, targets_BT, weights, gated, terms, fields, untrained_scale, options, progress)
    dtype = widest_affordable(network)
    with borrowed(network) as held:
        torch.manual_seed(options.seed)  # a state that starts from noise is then the same in every audit
        try:
            with widened(network, dtype, held):
                seen = measure(run)
        except RuntimeError as error:  # torch's own, mostly of a tensor that kept its dtype; ours are not of this kind
            if dtype is None:
                raise
            run = replace(run, notes=[], doubts=[], runnable=None)
            run.notes.append(f"the model does not run in {dtype}, so it was audited in its own dtype ({error})")
            seen = measure(run)
    if recipe is not None:
        seen.variables = _with_drift(run, recipe, TrialObjective(supervised, told, model.num_loops), seen)
    subject = _subject(run, seen.states, name, step)
    moves = None
    if options.motion:
        progress("motion", 0.97)
        try:
            moves = measure_motion(model, ids_BT)
        except UnsupportedError as error:  # it ends with its trained depth: what was audited stands
            run.notes.append(str(error))
    return replace(_assemble(run, subject, seen, time.perf_counter() - started), token_motion=moves)


def _with_drift(run: Survey, recipe: Recipe, objective: Objective, seen: Measured) -> list[Variable]:
    """What is blind, each with the rate at which training drives it."""
    sizes = {
        one.name: size_along(run.fields[one.name])
        if one.name in run.fields
        else size_within(seen.found.h_directions_DC)
        for one in seen.variables
        if one.verdict == "blind" and (one.name in run.fields or one.name in seen.found.discovered)
    }
    if not sizes:
        return seen.variables
    if not affordable(run.model):
        run.notes.append("whether training drives what is blind was not tried: no weights to train, or very many")
        return seen.variables
    pairs = list(zip(run.ids_BT.chunk(TRIALS), run.targets_BT.chunk(TRIALS), strict=True))
    run.progress("drift", 0.95)
    try:
        drifts = drift(run.model, pairs, objective, sizes, recipe=recipe)
    except (LoopscopeError, RuntimeError) as error:
        run.notes.append(f"whether training drives what is blind could not be tried: {error}")
        return seen.variables
    run.notes.append(f"drift: {TRIALS} trials of a few AdamW steps at a learning rate of {recipe.lr:g}")
    return [with_drift(one, drifts[one.name]) if one.name in drifts else one for one in seen.variables]


def _gather(batches: Iterable[Batch], options: AuditOptions) -> tuple[Tensor, Tensor]:
    """Rows of all batches, cropped to one length, in an order of their own: that of the batches does not matter."""
    rows = [row for batch in batches for row in _rows(batch)]
    if not rows:
        raise DataError("an audit needs at least one batch of token ids; got none")
    length = min(len(ids) for ids, _ in rows)
    if length < 2:
        raise DataError("an audit needs sequences of at least two tokens")
    length = min(length, max(options.prefix, options.tokens))
    rows = sorted(((ids[:length], targets[:length]) for ids, targets in rows), key=lambda row: row[0].tolist())
    count = max(1, min(len(rows), options.tokens // length))
    chosen = [rows[index * len(rows) // count] for index in range(count)]
    return torch.stack([ids for ids, _ in chosen]), torch.stack([targets for _, targets in chosen])


def _rows(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    ((ids_BT, targets_BT),) = pairs_of([batch])
    if targets_BT.shape != ids_BT.shape:
        raise DataError(f"targets {tuple(targets_BT.shape)} do not match ids {tuple(ids_BT.shape)}")
    return list(zip(ids_BT, targets_BT, strict=True))


def _subject(run: Survey, states: list[LoopState], name: str | None, step: int | None) -> Subject:
    weights = [] if run.network is None else list(run.network.parameters())
    audited_in = states[0].h_BTD.dtype
    own = weights[0].dtype if weights else audited_in
    with borrowed(run.network), torch.no_grad():
        vocab_size = run.model.readout(run.model.loop(run.model.embed(run.ids_BT[:1, :2]), 1), 1).shape[-1]
    return Subject(
        name=name or type(run.network if run.network is not None else run.model).__name__,
        num_loops=run.model.num_loops,
        width=states[0].h_BTD.shape[-1],
        vocab_size=vocab_size,
        parameters=sum(weight.numel() for weight in weights),
        dtype=str(own).removeprefix("torch."),
        audited_in=str(audited_in).removeprefix("torch."),
        step=step,
        supervised=run.supervised,
        observables=[term.name for term in run.terms if type(term).shows is not Term.shows],
    )


def _assemble(run: Survey, subject: Subject, seen: Measured, seconds: float) -> AuditResult:
    directions = seen.found.directions
    blind = directions.dimension or any(variable.verdict == "blind" for variable in seen.variables)
    verdict = "blind-spot" if blind else "undecided" if run.doubts else "controlled"
    undecided = verdict == "undecided"
    notes = [*run.doubts, *run.notes]
    return AuditResult(
        model=subject,
        verdict=verdict,
        summary=f"Undecided: {run.doubts[0]}." if undecided else summary(verdict, directions, seen.variables),
        variables=seen.variables,
        blind_directions=directions,
        loops=seen.loops,
        motion=seen.motion,
        alpha_sweep=seen.alpha_sweep,
        interventions=seen.interventions,
        heaviest_tokens=seen.heaviest_tokens,
        checks={"raw_readout_control": seen.raw_readout_control, "causal": seen.causal, "notes": notes},
        cost={"seconds": seconds},
    )
