"""The rollout of an audit: states over many loops, what each loop does to them, and what its exit sees.

Shape legend: B batch, T tokens, D width, V vocabulary, N = B·T.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loopscope.auditing.activity import FAR, lemma_2, loop_activity
from loopscope.auditing.derivatives import with_the_same_noise
from loopscope.auditing.search import LATER_LOOPS, carried_on
from loopscope.auditing.survey import Survey
from loopscope.auditing.visibility import field_shares, mean_cross_entropy, scale_curvatures
from loopscope.errors import DataError, NotFiniteError, ProtocolError
from loopscope.machine import check_bf16_products
from loopscope.protocol import LoopState
from loopscope.results.audit import AuditedLoop, HeavyToken, Lemma2
from loopscope.results.record import measured

SHARE_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HEAVIEST = 5
"""Tokens that are named: a few that the state singles out (the first of a text, a line break), not a ranking."""
TOKENS_BEYOND = 64
"""Tokens that are followed beyond the trained depth: thirty loops of all of them would cost more than the search."""
LOOKS_AHEAD = 1e-4
"""Relative change of the states before a token that is another one, from which a model looks ahead: above the rounding
of float32, in which a network that is not shown may run."""


def roll_out(run: Survey) -> list[LoopState]:
    """h_0 … h_rollout, each checked; the search may run some loops more, which are tried here too."""
    states = [run.model.embed(run.ids_BT)]
    _check_state(states[0].h_BTD, "embed(ids)", 0)
    if states[0].h_BTD.dtype == torch.bfloat16 and run.ids_BT.device.type == "cpu":
        check_bf16_products()  # a network that is not shown may compute in it too
    searched = max(carried_on(run.supervised)) + max(LATER_LOOPS, run.supervised[-1])
    for k in range(1, max(run.options.rollout, run.model.num_loops + 1, searched) + 1):
        before = states[-1]
        if k > run.model.num_loops + 1:  # a few tokens tell where many loops lead
            rows = max(1, TOKENS_BEYOND // before.h_BTD.shape[1])
            before = before.take(torch.arange(min(rows, len(before.h_BTD)), device=before.h_BTD.device))
        try:
            state = _next(run, before, k)
        except Exception as error:
            if k <= run.model.num_loops:
                raise
            _stop(run, k, f"loop {k} fails with {type(error).__name__}: {error}")
            break
        if k > run.model.num_loops and not state.h_BTD.isfinite().all():
            run.notes.append(f"loop {k}, beyond the trained depth, leaves NaN or infinity: the rollout stops there")
            run.runnable = k - 1
            break
        _check_state(state.h_BTD, f"loop {k}", k)
        states.append(state)
    return states


def _next(run: Survey, before: LoopState, k: int) -> LoopState:
    """Loop k, which must leave its input alone and keep its shape."""
    version = before.h_BTD._version
    state = run.model.loop(before, k)
    if before.h_BTD._version != version:
        raise ProtocolError(f"loop {k} changes its input h_{k - 1} in place; clone it first")
    if state.h_BTD.shape != before.h_BTD.shape:
        was, became = tuple(before.h_BTD.shape), tuple(state.h_BTD.shape)
        raise ProtocolError(f"loop {k} changed the shape of the state from {was} to {became}")
    return state


def _stop(run: Survey, k: int, why: str) -> None:
    """A model with exactly K loop embeddings or readout gains has no loop K + 1: everything ends before it."""
    run.runnable = k - 1
    why = " ".join(why.split())
    run.notes.append(f"the model cannot be run beyond its trained depth: {why}; it is audited up to loop {k - 1}")


def _check_state(h_BTD: Tensor, what: str, k: int) -> None:
    if not h_BTD.is_floating_point():
        raise ProtocolError(f"{what} returns a state h_{k} of {h_BTD.dtype}: a state must be real numbers")
    if not h_BTD.isfinite().all():
        raise NotFiniteError(f"{what} leaves NaN or infinity in the state h_{k}")


def is_causal(run: Survey) -> bool:
    """Whether a token's state stays the same when the last token is another one.

    Both runs have the same shape and the same random numbers, so that neither a state that starts from noise nor coarse
    arithmetic is taken for a look ahead.
    """
    ids_BT = run.ids_BT[:1]
    if ids_BT.shape[1] < 2:
        return True
    last = int(ids_BT[0, -1])
    others = run.ids_BT[run.ids_BT != last]
    changed_BT = ids_BT.clone()
    changed_BT[0, -1] = others[0] if len(others) else int(last == 0)

    def after_a_loop(ids_BT: Tensor) -> Tensor:
        return run.model.loop(run.model.embed(ids_BT), 1).h_BTD[:, :-1]

    one, other = (with_the_same_noise(after_a_loop, ids) for ids in (ids_BT, changed_BT))
    causal = bool((one - other).norm() <= LOOKS_AHEAD * one.norm())
    if not causal:
        run.notes.append("the state of a token depends on later tokens: the model is not causal")
    return causal


def measured_loops(run: Survey, states: list[LoopState]) -> list[AuditedLoop]:
    """The loops that are reported, up to one beyond the trained depth that cannot be read out; states end with them."""
    reported = states[: max(run.options.rollout, run.model.num_loops + 1) + 1]
    loops: list[AuditedLoop] = []
    with torch.no_grad():
        first = states[1].take(torch.tensor([0], device=run.ids_BT.device))
        vocab_size = run.model.readout(first, 1).shape[-1]
    for k in range(1, len(states)):
        try:
            if k < len(reported):
                loops.append(_loop(run, reported, k, vocab_size))
            else:
                with torch.no_grad():
                    run.model.readout(states[k], k)
        except Exception as error:
            if k <= run.model.num_loops:
                raise
            _stop(run, k, f"the readout at loop {k} fails with {type(error).__name__}: {error}")
            break
    del states[len(loops) + 1 :]
    return loops


def _loop(run: Survey, states: list[LoopState], k: int, vocab_size: int) -> AuditedLoop:
    following = states[k + 1].h_BTD if k + 1 < len(states) else None
    here_BTD = states[k].h_BTD if following is None else states[k].h_BTD[: len(following)]
    tested = None if following is None else _lemma_2(run, states[k], k, following)
    activity, targets_BT = loop_activity(k, here_BTD, following, tested), run.targets_BT[: len(states[k].h_BTD)]
    with torch.no_grad():
        version = states[k].h_BTD._version
        logits_BTV = run.model.readout(states[k], k)
        if states[k].h_BTD._version != version:
            raise ProtocolError(f"the readout at loop {k} changes its state h_{k} in place; clone it first")
        if logits_BTV.shape[-1] != vocab_size:
            raise ProtocolError(f"the readout at loop {k} has {logits_BTV.shape[-1]} logits, at loop 1 {vocab_size}")
        if int(targets_BT.max()) >= vocab_size:
            raise DataError(f"target {int(targets_BT.max())} is outside the {vocab_size} logits of loop {k}")
        loop = replace(
            activity, supervised=k in run.supervised, ce=measured(mean_cross_entropy(logits_BTV, targets_BT))
        )
    if k > run.model.num_loops:
        return loop
    shares = field_shares(run.model, states[k], k, run.targets_BT).abs()
    if not len(shares):
        return loop
    quantiles = torch.quantile(shares, torch.tensor(SHARE_QUANTILES, dtype=shares.dtype, device=shares.device))
    curvatures = scale_curvatures(run.model, states[k], k, run.targets_BT)
    return replace(
        loop,
        radial_gradient_share=float(shares.median()),
        radial_gradient_quantiles=quantiles.tolist(),
        scale_curvature=None if curvatures is None else measured(float(curvatures.mean())),
        scale_curvature_size=None if curvatures is None else measured(float(curvatures.abs().median())),
    )


@torch.no_grad()
def _lemma_2(run: Survey, state: LoopState, k: int, next_BTD: Tensor) -> Lemma2 | None:
    """Lemma 2 from h_k to h_{k+1}; None where the loop fails at a hundred times the scale, which nobody promised."""
    state = state.take(torch.arange(len(next_BTD), device=next_BTD.device))
    try:
        far_BTD = run.model.loop(state.with_h(FAR * state.h_BTD), k + 1).h_BTD
    except Exception:
        return None
    return lemma_2(state.h_BTD, next_BTD, far_BTD) if far_BTD.isfinite().all() else None


def heaviest_tokens(ids_BT: Tensor, h_BTD: Tensor) -> list[HeavyToken]:
    """The tokens with the largest final norm, once each."""
    norm_N = h_BTD.flatten(0, 1).double().norm(dim=-1)
    middle = float(norm_N.median())
    found: dict[int, HeavyToken] = {}
    for index in norm_N.argsort(descending=True).tolist():
        token = int(ids_BT.flatten()[index])
        size, position = float(norm_N[index]), index % ids_BT.shape[1]
        ratio = size / max(middle, 1e-300)
        found.setdefault(token, HeavyToken(token=token, text=None, position=position, norm=size, ratio=ratio))
        if len(found) == HEAVIEST:
            break
    return list(found.values())
