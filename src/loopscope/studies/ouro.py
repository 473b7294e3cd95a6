"""The paper's checks of Ouro 1.4B (arXiv 2606.24898, Figures 5 and 7 and their tables) on any model of its kind.

The state is scaled *before* the norm that stands between it and the head, at the loop that is read out, whatever the
number of loops. Ouro has one norm that closes a loop: it feeds the head and opens the next loop. "Without the norm"
means that the head gets the state itself, and the norm inside the loop stays.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from loopscope.api.downstream import evaluate_tasks
from loopscope.api.evaluation import evaluate, throughput
from loopscope.auditing.visibility import ALPHAS, alpha_sweep, field_shares, mean_cross_entropy
from loopscope.data.stream import evaluation_batches
from loopscope.errors import RunError, UnsupportedError
from loopscope.files import Problems
from loopscope.model.looped_lm import LoopedLM
from loopscope.model.readouts import Norm, Raw
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.protocol import ExitGate, LoopedModel, LoopState, run_loops
from loopscope.results.ouro import (
    AS_IT_IS,
    EXIT_THRESHOLDS,
    FROZEN,
    NORM_QUANTILES,
    OURO,
    REMOVED,
    GateLoop,
    GateSpread,
    GateThreshold,
    LoopStates,
    OuroModel,
    OuroRecord,
    OuroRequest,
    OuroStates,
    ReadoutKind,
    TaskScore,
)
from loopscope.results.record import as_json, read_record, write_record
from loopscope.targets import Opened, Say, corpus_for, open_target, tokens_for, with_tokenizer
from loopscope.training.plan import check_logits
from loopscope.training.session import set_up

Progress = Callable[[str, float], None]
Pairs = Sequence[tuple[Tensor, Tensor]]


def check_ouro(
    target: str | Path | Opened,
    asked: OuroRequest,
    out: Path,
    *,
    batch: int = 8,
    say: Say = lambda text: None,
    progress: Progress = lambda what, share: None,
) -> OuroRecord:
    """Measure what is not in `out`/ouro.json yet, keeping it after every section.

    Sections: scores by depth, throughput by depth, the states (sweeps, gradients, norms, exit gate), downstream tasks.
    """
    opened = with_tokenizer(open_target(target), asked.tokenizer or None)
    readouts = readouts_of(opened.model, opened.name)
    device = set_up().device
    model = opened.model
    assert isinstance(model, nn.Module)
    model.to(device).eval()
    data, length = tuple(asked.data) or None, asked.length or opened.sequence_length
    check_logits(batch * length, opened.vocab_size, batch=batch, device_type=device)
    corpus = corpus_for(opened, data)
    text = ", ".join(asked.data) or f"its own ({corpus.name})"
    fresh = OuroRecord(asked=asked, subject=_subject(opened, device), text=text, text_sha256=corpus.sha256)
    record = begun(out, fresh, say)

    def kept(record: OuroRecord) -> OuroRecord:
        write_record(out / OURO, record)
        return record

    if record.depths is None:
        say(f"{opened.name}: scores after {_range(asked.depths)} loops")
        result = evaluate(
            opened,
            depths=asked.depths,
            data=data,
            batch=batch,
            length=asked.length,
            max_tokens=asked.max_tokens,
            say=say,
            progress=progress,
        )
        record = kept(replace(record, depths=result.scores))
    if not record.throughput:
        say("throughput, all depths in turns")
        rates = throughput(model, opened.vocab_size, length, asked.depths, batch=batch, progress=progress)
        record = kept(replace(record, throughput=rates))
    if record.states is None:
        say(f"states of {asked.sweep_tokens:,} tokens: α-sweep, radial gradient, norms, exit gate")
        batches = evaluation_batches(tokens_for(opened, data, say), length, batch, asked.sweep_tokens)
        pairs = [(ids_BT.to(device), targets_BT.to(device)) for ids_BT, targets_BT in batches]
        states = measure_states(model, readouts, pairs, asked.depths, progress)
        record = kept(replace(record, states=states, gate=measure_gate(model, pairs)))
    if asked.tasks and not record.tasks:
        say(f"{', '.join(asked.tasks)} after {_range(asked.depths)} loops")
        found = evaluate_tasks(
            opened,
            asked.tasks,
            depths=asked.depths,
            task_folder=asked.task_folder or None,
            limit=asked.limit,
            batch=batch,
            say=say,
            progress=progress,
        )
        scores = [
            TaskScore(k=depth.k, task=each.task, metric=each.metric, value=depth.value, error=depth.stderr)
            for each in found.tasks
            for depth in each.depths
        ]
        record = kept(replace(record, tasks=scores))
    return record


def begun(folder: Path, fresh: OuroRecord, say: Say) -> OuroRecord:
    """What an earlier command has measured already for the same request, model and text, or the fresh record.

    Results of another request are not overwritten, and those of a damaged file are measured again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    problems: Problems = {}
    path = folder / OURO
    found = read_record(path, OuroRecord, problems)
    if found is None:
        if problems:
            say(f"{path} is damaged: measuring again")
        return fresh
    for what, before, now in (("model", found.subject, fresh.subject), ("request", found.asked, fresh.asked)):
        if before != now:
            names = (name for name, value in as_json(now).items() if as_json(before)[name] != value)
            raise RunError(f"{path} is about another {what} ({', '.join(names)}); choose another --out")
    if found.text_sha256 != fresh.text_sha256:
        raise RunError(
            f"{path} is about text of SHA-256 {found.text_sha256}, and {fresh.text} now has {fresh.text_sha256}; "
            "restore the text, or choose another --out"
        )
    return replace(found, text=fresh.text)


def _subject(opened: Opened, device: str) -> OuroModel:
    model = opened.model
    assert isinstance(model, LoopedLM)
    weight = next(model.parameters())
    return OuroModel(
        name=opened.name,
        step=opened.step,
        num_loops=model.num_loops,
        width=model.config.width,
        vocab_size=opened.vocab_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=device,
    )


def _range(depths: Sequence[int]) -> str:
    return f"{depths[0]} to {depths[-1]}" if len(depths) > 1 else str(depths[0])


# --- readouts --------------------------------------------------------------------------------------------------------


def readouts_of(model: LoopedModel, name: str) -> dict[ReadoutKind, LoopedModel]:
    """The model by what stands between its state and its head: as it is and, where that is a norm, with it removed."""
    if isinstance(model, LoopedLM) and not model.config.coda_layers:
        if isinstance(model.readout_map, Norm):
            return {AS_IT_IS: model, REMOVED: without_readout_norm(model)}
        if isinstance(model.readout_map, Raw):
            return {REMOVED: model}
    raise UnsupportedError(
        f"{name} is not read out as Ouro is, by a norm (or nothing) between state and head; loopscope audit has an "
        "α-sweep of any model"
    )


def without_readout_norm(model: LoopedLM) -> LoopedLM:
    """The same weights with the state itself before the head. Only that norm goes: the one inside the loop stays."""
    config = replace(model.config, readout="raw", share_readout_norm=False)
    bare = copy.copy(model)
    bare._modules = dict(model._modules)  # else the model that was copied would lose its norm too
    bare.config, bare.readout_map = config, Raw()
    return bare


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    """What has been seen of the states after one loop."""

    ce: dict[ReadoutKind, Tensor] = field(default_factory=dict)
    """Readout → Σ over tokens of CE at each α."""
    shares: dict[ReadoutKind, list[Tensor]] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)


def measure_states(
    model: LoopedModel,
    readouts: dict[ReadoutKind, LoopedModel],
    pairs: Pairs,
    depths: Sequence[int],
    progress: Progress = lambda what, share: None,
) -> OuroStates:
    """α-sweep and radial gradient share through every readout, and the norms of all tokens, after each of `depths`."""
    sums, tokens = {k: _Sums() for k in depths}, 0
    for number, (ids_BT, targets_BT) in enumerate(pairs, 1):
        counted = int((targets_BT != IGNORE_INDEX).sum())
        tokens += counted
        with torch.no_grad():
            states = run_loops(model, ids_BT, num_loops=max(depths)).states
        for k in depths:
            _add(sums[k], readouts, states[k], k, targets_BT, counted)
        progress(f"{tokens:,} tokens", number / len(pairs))
    loops = [_loop_states(k, found, tokens) for k, found in sums.items()]
    return OuroStates(tokens=tokens, alphas=list(ALPHAS), loops=loops)


def _add(
    sums: _Sums, readouts: dict[ReadoutKind, LoopedModel], state: LoopState, k: int, targets_BT: Tensor, counted: int
) -> None:
    for name, model in readouts.items():
        ce = torch.tensor(alpha_sweep(model, state, k, targets_BT), dtype=torch.float64)
        sums.ce[name] = sums.ce.get(name, 0) + counted * ce
        sums.shares.setdefault(name, []).append(field_shares(model, state, k, targets_BT).abs().cpu())
    if AS_IT_IS in readouts:
        # R(αh) with the divisor of α = 1 is γ·αh/s: the head is linear, so the logits are those of the norm times α.
        with torch.no_grad():
            logits_BTV = readouts[AS_IT_IS].readout(state, k)
            ce = torch.tensor([mean_cross_entropy(a * logits_BTV, targets_BT) for a in ALPHAS], dtype=torch.float64)
        sums.ce[FROZEN] = sums.ce.get(FROZEN, 0) + counted * ce
    sums.norms.append(state.h_BTD.float().norm(dim=-1)[targets_BT != IGNORE_INDEX].cpu())


def _loop_states(k: int, found: _Sums, tokens: int) -> LoopStates:
    norms = torch.cat(found.norms)
    return LoopStates(
        k=k,
        sweep={name: (ce / tokens).tolist() for name, ce in found.ce.items()},
        radial_share={name: float(torch.cat(shares).median()) for name, shares in found.shares.items()},
        norm=float(norms.mean()),
        norm_quantiles=_quantiles(norms),
    )


def _quantiles(values: Tensor) -> list[float | None]:
    """Of all tokens; torch.quantile takes 16 million values at most, and sorting takes any number."""
    ordered = values.sort().values
    return [float(ordered[round(q * (len(ordered) - 1))]) for q in NORM_QUANTILES]


# --- the exit gate ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_gate(model: LoopedModel, pairs: Pairs) -> GateSpread | None:
    """How the gate spreads the exits over the trained loops; None for a model without one."""
    gate = ExitGate.of(model)
    if gate is None or not isinstance(model, LoopedLM):
        return None
    leaving_KN = torch.cat(
        [_leaving(model, gate, ids_BT)[:, targets_BT != IGNORE_INDEX] for ids_BT, targets_BT in pairs], dim=1
    ).double()
    num_loops = len(leaving_KN)
    staying_KN = (1 - leaving_KN).cumprod(0).roll(1, 0)
    staying_KN[0] = 1.0
    p_KN = leaving_KN * staying_KN
    p_KN[-1] = staying_KN[-1]  # the last loop takes the rest
    ks_K = torch.arange(1, num_loops + 1, dtype=p_KN.dtype)
    thresholds = []
    for threshold in EXIT_THRESHOLDS:
        reached_KN = p_KN.cumsum(0) >= threshold
        reached_KN[-1] = True
        exits_N = reached_KN.int().argmax(0) + 1  # the first of the largest values
        shares = [float((exits_N == k).double().mean()) for k in range(1, num_loops + 1)]
        thresholds.append(
            GateThreshold(threshold=threshold, mean_loops=float(exits_N.double().mean()), shares=list(shares))
        )
    loops = [
        GateLoop(k=k, leaving=float(lam.mean()), exit_probability=float(p.mean()), exit_quantiles=_quantiles(p))
        for k, (lam, p) in enumerate(zip(leaving_KN, p_KN, strict=True), 1)
    ]
    expected = float((ks_K[:, None] * p_KN).sum(0).mean())
    return GateSpread(tokens=p_KN.shape[1], expected_loops=expected, loops=loops, thresholds=thresholds)


def _leaving(model: LoopedLM, gate: ExitGate, ids_BT: Tensor) -> Tensor:
    """λ_KBT of the trained loops."""
    states = run_loops(model, ids_BT).states
    return torch.stack([gate.exit_logits(model.features(states[k], k)).sigmoid() for k in range(1, len(states))]).cpu()
