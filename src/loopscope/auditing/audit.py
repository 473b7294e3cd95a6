"""One call that audits any looped model: measure, search, judge.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loopscope.auditing import verdict as verdicts
from loopscope.auditing.activity import destination
from loopscope.auditing.drift import TRIALS, TrialObjective, affordable, drift, size_along, size_within
from loopscope.auditing.free_range import Objections
from loopscope.auditing.interventions import INTERVENTIONS, intervened_cross_entropy
from loopscope.auditing.rollout import heaviest_tokens, is_causal, measured_loops, roll_out
from loopscope.auditing.search import audited_loops
from loopscope.auditing.survey import Progress, Survey, search_tokens
from loopscope.auditing.visibility import ALPHAS, FIELDS, Field, alpha_sweep, raw_readout_control
from loopscope.config import ObjectiveConfig
from loopscope.errors import DataError, LoopscopeError
from loopscope.objectives.placement import Objective, exit_weights, pairs_of
from loopscope.objectives.terms import Term, terms_of
from loopscope.options import AuditOptions
from loopscope.protocol import LoopedModel, OwnLosses, check_products
from loopscope.results.audit import (
    AlphaSweep,
    AuditChecks,
    AuditCost,
    AuditedModel,
    AuditResult,
    Intervention,
    Recipe,
    SweptLoop,
    Variable,
)
from loopscope.show.sentences import with_sentences
from loopscope.untouched import borrowed, network_of, widened, widest_affordable

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
    ids_BT, targets_BT = gather(batches, options)
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
    weights_in = None if network is None else next((weight.dtype for weight in network.parameters()), None)
    with borrowed(network) as held:
        torch.manual_seed(options.seed)  # a state that starts from noise is then the same in every audit
        try:
            with widened(network, dtype, held):
                result, found = _measure(run, name, step, weights_in)
        except RuntimeError as error:  # torch's own, mostly of a tensor that kept its dtype; ours are not of this kind
            if dtype is None:
                raise
            run = replace(run, notes=[], doubts=[], runnable=None)
            run.notes.append(f"the model does not run in {dtype}, so it was audited in its own dtype ({error})")
            result, found = _measure(run, name, step, weights_in)
    if recipe is not None:
        objective = TrialObjective(supervised, told, model.num_loops)
        result = replace(result, variables=_with_drift(run, recipe, objective, result.variables, found))
    checks = replace(result.checks, doubts=run.doubts, notes=[*run.doubts, *run.notes])
    return with_sentences(replace(result, checks=checks, cost=AuditCost(seconds=time.perf_counter() - started)))


def _measure(
    run: Survey, name: str | None, step: int | None, weights_in: torch.dtype | None
) -> tuple[AuditResult, verdicts.Found]:
    """The audit but for drift, notes and time; `weights_in` is the dtype of weights that nobody has widened."""
    check_products(run.model, run.ids_BT.device)
    num_loops = run.model.num_loops
    with torch.no_grad():
        run.progress("activity", 0.0)
        states = roll_out(run)
        causal = is_causal(run)
    loops = measured_loops(run, states)
    run.progress("visibility", 0.2)
    swept = sorted({run.supervised[0], run.supervised[-1]})
    sweeps = [SweptLoop(k=k, ce=alpha_sweep(run.model, states[k], k, run.targets_BT)) for k in swept]
    run.progress("interventions", 0.3)
    before, interventions = loops[num_loops - 1].ce, []
    for what, change in INTERVENTIONS.items():
        ce = intervened_cross_entropy(run.model, run.ids_BT, run.targets_BT, num_loops, change.rewrite)
        delta = None if ce is None or before is None else ce - before
        interventions.append(Intervention(name=what, clamps=change.clamps, ce=ce, delta_ce=delta))
    run.progress("free ranges", 0.35)
    objections = Objections(
        run.model, states, run.weights, run.terms, gated=run.gated, untrained_scale=run.untrained_scale
    )
    audited = audited_loops(run.supervised)
    ranges = {name: objections.free_range(of, audited) for name, of in run.fields.items()}
    found, variables = search_tokens(run, states, objections, ranges, causal)
    with torch.no_grad():
        vocab_size = run.model.readout(states[1], 1).shape[-1]
    blind = found.directions.dimension or any(one.verdict == "blind" for one in variables)
    audited_in = states[0].h_BTD.dtype
    weights = [] if run.network is None else list(run.network.parameters())
    result = AuditResult(
        model=AuditedModel(
            name=name or type(run.network if run.network is not None else run.model).__name__,
            num_loops=num_loops,
            width=states[0].h_BTD.shape[-1],
            vocab_size=vocab_size,
            parameters=sum(weight.numel() for weight in weights),
            dtype=str(weights_in or audited_in).removeprefix("torch."),
            audited_in=str(audited_in).removeprefix("torch."),
            step=step,
            supervised=run.supervised,
            observables=[term.name for term in run.terms if type(term).shows is not Term.shows],
        ),
        verdict="blind-spot" if blind else "undecided" if run.doubts else "controlled",
        variables=variables,
        blind_directions=found.directions,
        loops=loops,
        motion=destination(states),
        alpha_sweep=AlphaSweep(alphas=list(ALPHAS), loops=sweeps),
        interventions=interventions,
        heaviest_tokens=heaviest_tokens(run.ids_BT, states[num_loops].h_BTD),
        checks=AuditChecks(
            raw_readout_control=raw_readout_control(states[num_loops].h_BTD, run.targets_BT),
            causal=causal,
            doubts=[],
            notes=[],
        ),
        cost=AuditCost(seconds=0.0),
    )
    return result, found


def _with_drift(
    run: Survey, recipe: Recipe, objective: Objective, variables: list[Variable], found: verdicts.Found
) -> list[Variable]:
    """What is blind, each with the rate at which training drives it."""
    sizes = {
        one.name: size_along(run.fields[one.name]) if one.name in run.fields else size_within(found.h_directions_DC)
        for one in variables
        if one.verdict == "blind" and (one.name in run.fields or one.name in found.discovered)
    }
    if not sizes:
        return variables
    if not affordable(run.model):
        run.notes.append("whether training drives what is blind was not tried: no weights to train, or very many")
        return variables
    pairs = list(zip(run.ids_BT.chunk(TRIALS), run.targets_BT.chunk(TRIALS), strict=True))
    run.progress("drift", 0.95)
    try:
        drifts = drift(run.model, pairs, objective, sizes, recipe=recipe)
    except (LoopscopeError, RuntimeError) as error:
        run.notes.append(f"whether training drives what is blind could not be tried: {error}")
        return variables
    run.notes.append(f"drift: {TRIALS} trials of a few AdamW steps at a learning rate of {recipe.lr:g}")
    return [
        replace(one, drift=drifts[one.name].rate, driven=drifts[one.name].driven) if one.name in drifts else one
        for one in variables
    ]


def gather(batches: Iterable[Batch], options: AuditOptions) -> tuple[Tensor, Tensor]:
    """Rows of all batches, cropped to one length, in an order of their own: that of the batches does not matter."""
    rows: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        ((ids_BT, targets_BT),) = pairs_of([batch])
        if targets_BT.shape != ids_BT.shape:
            raise DataError(f"targets {tuple(targets_BT.shape)} do not match ids {tuple(ids_BT.shape)}")
        rows += zip(ids_BT, targets_BT, strict=True)
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
