"""An exit's gap taken apart: is it badly read, or not yet computed?

Reading out after loop k instead of loop K costs CE(k) − CE(K). Part of that may be no lack of computation: the readout,
made for other states, reads this one badly. How much a better reading would mend is asked of three maps, each fitted on
text apart, for the exit *and* for full depth, since what helps both depths alike is no fault of the exit:

    temperature   logits ← e^τ · logits
    affine        head's input x ← g∘x + b                     (a gain and a bias per channel)
    full-rank     state h ← h + W h + c, logits ← e^τ · logits (before coda, norm and head)

    share = [gap − (CE_cal(k) − CE_cal(K))] / gap              (arXiv 2609.19934)

with a paired bootstrap over units of text (rows of the batches). Open there and chosen here: affine is per channel, and
the full-rank map has a temperature too, which a norm would hide from W; so each map can do what a temperature can.

A map with D² numbers overfits short text. It is fitted on three quarters of the fitting text by L-BFGS, and the iterate
that is best on the last quarter is kept, the untouched readout being the first of them: on that quarter no calibration
is worse than none. What a map mends is therefore what it learns from so much text: no bound, above or below.

Shape legend: B batch, T tokens, D width of the state, F width of the head's input, V vocabulary, U units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.errors import ConfigError, DataError
from loopscope.files import without_nan
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.objectives.placement import pairs_of
from loopscope.protocol import LinearReadout, LoopedModel, LoopState, run_loops
from loopscope.show.numbers import span
from loopscope.untouched import borrowed, network_of

Batch = Tensor | tuple[Tensor, Tensor]

RESAMPLES = 1000
INTERVAL = (0.025, 0.975)
STOPPING_SHARE = 0.25
"""Of the fitting text, by which the iterate is chosen."""
ROUNDS, ITERATIONS = 20, 5
"""L-BFGS steps are made so many at a time, and after each round the last quarter is asked."""
PATIENCE = 3
"""Rounds without a better one after which fitting ends."""
FEW_UNITS = 16
"""Below this the bootstrap's interval is noticeably narrower than the truth."""
HALF = 0.5
"""Share of the gap from which an exit is called by its larger part."""


@dataclass(frozen=True)
class Mend:
    """What one map would mend of the gap."""

    name: str
    parameters: int
    """Numbers that were fitted, for each depth."""
    ce_exit: float
    """CE(k) with the map."""
    ce_full: float
    """CE(K) with a map of its own."""
    share: float | None
    """Of the gap; None where there is none to mend."""
    low: float | None
    high: float | None
    """95 % interval over units."""


@dataclass(frozen=True)
class ExitGap:
    """What reading out after `loop` costs, and how much of it a better reading would mend."""

    loop: int
    num_loops: int
    ce_exit: float
    ce_full: float
    gap: float
    gap_low: float
    gap_high: float
    """95 % interval over units."""
    units: int
    fit_tokens: int
    test_tokens: int
    mends: tuple[Mend, ...]
    """Temperature, affine (where the readout is features times a head) and full-rank."""
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """badly read, not yet computed, both (the interval does not say which is more), or no gap."""
        strongest = self.mends[-1]
        if strongest.share is None or strongest.low is None or strongest.high is None:
            return "no gap"
        if strongest.low >= HALF:
            return "badly read"
        return "not yet computed" if strongest.high < HALF else "both"

    @property
    def summary(self) -> str:
        """The gap, the shares, the verdict."""
        says = f"The exit after loop {self.loop} costs {self.gap:+.4f} {span(self.gap_low, self.gap_high, '+.4f')} nats"
        if self.verdict == "no gap":
            return f"{says}: no gap that could be taken apart."
        shares = [f"{mend.name} {mend.share:.0%} {span(mend.low, mend.high, '.0%')}" for mend in self.mends]
        meaning = {"both": "partly badly read, partly not yet computed"}.get(self.verdict, f"mostly {self.verdict}")
        return f"{says}; mended by {', '.join(shares)}: {meaning}."

    def to_json(self) -> dict[str, Any]:
        """As `loopscope eval --exit-gap --json` prints it."""
        return without_nan({**asdict(self), "verdict": self.verdict, "summary": self.summary})


def measure_exit_gap(
    model: LoopedModel, fit_batches: Iterable[Batch], test_batches: Iterable[Batch], *, loop: int = 1
) -> ExitGap:
    """The gap of the exit after `loop`, maps fitted on one text and asked on another; the model is left as it was."""
    return measure_exit_gaps(model, fit_batches, test_batches, loops=[loop])[0]


def measure_exit_gaps(
    model: LoopedModel,
    fit_batches: Iterable[Batch],
    test_batches: Iterable[Batch],
    *,
    loops: Sequence[int],
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> list[ExitGap]:
    """The gaps of several exits; full depth is calibrated once for all of them."""
    for loop in loops:
        if not 1 <= loop < model.num_loops:
            raise ConfigError.of("loop", loop, f"an exit lies below the trained depth, {model.num_loops}")
    network = network_of(model)
    stepping, stopping = _divided(pairs_of(fit_batches))
    texts = (stepping, stopping, pairs_of(test_batches))
    every = [*loops, model.num_loops]
    readings: list[_Reading] = []
    with borrowed(network):
        if network is not None:
            network.requires_grad_(False)  # given back by `borrowed`; gradients are for the maps alone
        torch.manual_seed(0)  # a state that starts from noise is then the same in every measurement
        for index, loop in enumerate(every):
            progress(f"exit gap: calibrating loop {loop}", index / len(every))
            readings.append(_read(model, loop, *(_after(model, text, loop) for text in texts)))
    progress("exit gap: done", 1.0)
    return [_taken_apart(exit_, readings[-1]) for exit_ in readings[:-1]]


# --- maps ------------------------------------------------------------------------------------------------------------


class _Map(nn.Module, ABC):
    """A readout with something in front of it or behind it; as it is made, it changes nothing."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def of(cls, model: LoopedModel, state: LoopState) -> Self | None:
        """As wide as what it changes of this model's readout of such a state; None where it cannot be put to it."""

    @abstractmethod
    def logits(self, model: LoopedModel, state: LoopState, k: int) -> Tensor:
        """Logits_BTV at loop k."""


class _Temperature(_Map):
    name = "temperature"

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    @classmethod
    def of(cls, model: LoopedModel, state: LoopState) -> Self:
        return cls()

    def logits(self, model: LoopedModel, state: LoopState, k: int) -> Tensor:
        return self.log_scale.exp() * model.readout(state, k).float()


class _Affine(_Map):
    name = "affine"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain_F = nn.Parameter(torch.ones(width))
        self.bias_F = nn.Parameter(torch.zeros(width))

    @classmethod
    def of(cls, model: LoopedModel, state: LoopState) -> Self | None:
        linear = LinearReadout.of(model)
        return None if linear is None else cls(linear.head.shape[-1])

    def logits(self, model: LoopedModel, state: LoopState, k: int) -> Tensor:
        linear = LinearReadout.needed(model, "an affine map of the head's input")
        return F.linear(self.gain_F * linear.features(state, k).float() + self.bias_F, linear.head.float())


class _FullRank(_Map):
    name = "full-rank"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight_DD = nn.Parameter(torch.zeros(width, width))
        self.bias_D = nn.Parameter(torch.zeros(width))
        self.log_scale = nn.Parameter(torch.zeros(()))

    @classmethod
    def of(cls, model: LoopedModel, state: LoopState) -> Self:
        return cls(state.h_BTD.shape[-1])

    def logits(self, model: LoopedModel, state: LoopState, k: int) -> Tensor:
        h_BTD = state.h_BTD.float()
        # The state's own scale in front of W and c: a step of the fit then means the same at every scale.
        scale = h_BTD.square().mean().sqrt()
        moved_BTD = h_BTD + F.linear(h_BTD, self.weight_DD) + scale * self.bias_D
        return self.log_scale.exp() * model.readout(state.with_h(moved_BTD.to(state.h_BTD.dtype)), k).float()


# --- fitting ---------------------------------------------------------------------------------------------------------

_Text = list[tuple[LoopState, Tensor]]
"""States after one loop, with targets_BT."""


@dataclass(frozen=True)
class _Reading:
    """One depth: nats of every unit of the test text, as it is read and as each map reads it."""

    loop: int
    counts_U: Tensor
    plain_U: Tensor
    mapped_U: dict[str, Tensor]
    parameters: dict[str, int]
    fit_tokens: int


def _divided(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Rows to step on, and the rows after them by which the steps are judged."""
    rows = sum(len(ids_BT) for ids_BT, _ in pairs)
    cut = round(rows * (1 - STOPPING_SHARE))
    if not 0 < cut < rows:
        raise DataError(f"an exit is calibrated on at least two rows of text, got {rows}")
    stepping, stopping = [], []
    for ids_BT, targets_BT in pairs:
        here = min(max(cut, 0), len(ids_BT))
        stepping += [(ids_BT[:here], targets_BT[:here])] if here else []
        stopping += [(ids_BT[here:], targets_BT[here:])] if here < len(ids_BT) else []
        cut -= len(ids_BT)
    return stepping, stopping


def _after(model: LoopedModel, pairs: Sequence[tuple[Tensor, Tensor]], loop: int) -> _Text:
    weight = next(iter(() if (network := network_of(model)) is None else network.parameters()), None)
    device = torch.device("cpu") if weight is None else weight.device
    with torch.no_grad():
        return [
            (run_loops(model, ids_BT.to(device), num_loops=loop).states[loop], targets_BT.to(device))
            for ids_BT, targets_BT in pairs
        ]


def _read(model: LoopedModel, loop: int, stepping: _Text, stopping: _Text, test: _Text) -> _Reading:
    """Every map fitted at one depth, and the test text read plainly and through each."""
    like, device = stepping[0][0], stepping[0][0].h_BTD.device
    mapped: dict[str, Tensor] = {}
    parameters: dict[str, int] = {}
    for kind in (_Temperature, _Affine, _FullRank):
        if (fresh := kind.of(model, like)) is not None:
            fitted = _fitted(fresh.to(device), model, loop, stepping, stopping)
            mapped[kind.name] = _nats(fitted, model, loop, test)[0]
            parameters[kind.name] = sum(weight.numel() for weight in fitted.parameters())
    plain_U, counts_U = _nats(_Temperature().to(device), model, loop, test)
    tokens = sum(int((targets_BT != IGNORE_INDEX).sum()) for _, targets_BT in (*stepping, *stopping))
    return _Reading(loop, counts_U, plain_U, mapped, parameters, tokens)


def _fitted(kind: _Map, model: LoopedModel, loop: int, stepping: _Text, stopping: _Text) -> _Map:
    """The L-BFGS iterate that is best on the stopping text, of those that are no worse than plain on the stepping text.

    Full batches and a line search: nothing is drawn, so the same text gives the same map.
    """
    optimizer = torch.optim.LBFGS(kind.parameters(), max_iter=ITERATIONS, line_search_fn="strong_wolfe")
    tokens = max(1, sum(int((targets_BT != IGNORE_INDEX).sum()) for _, targets_BT in stepping))

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for state, targets_BT in stepping:
            loss = _row_nats(kind.logits(model, state, loop), targets_BT).sum() / tokens
            loss.backward()
            total += float(loss.detach())
        return total

    def heard(text: _Text) -> float:
        return float(_nats(kind, model, loop, text)[0].sum())

    best, best_weights, plain, waited = heard(stopping), _copied(kind), heard(stepping), 0
    for _ in range(ROUNDS):
        with torch.enable_grad():
            optimizer.step(closure)
        found = heard(stopping)
        if found < best and heard(stepping) <= plain:
            waited = 0 if found < best * (1 - 1e-5) else waited + 1
            best, best_weights = found, _copied(kind)
        else:
            waited += 1
        if waited >= PATIENCE or not found < float("inf"):
            break
    kind.load_state_dict(best_weights)
    return kind


def _copied(kind: _Map) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in kind.state_dict().items()}


@torch.no_grad()
def _nats(kind: _Map, model: LoopedModel, loop: int, text: _Text) -> tuple[Tensor, Tensor]:
    """Nats of every row, and how many targets each has; float64, on the CPU."""
    nats = [_row_nats(kind.logits(model, state, loop), targets_BT) for state, targets_BT in text]
    counts = [(targets_BT != IGNORE_INDEX).sum(dim=1) for _, targets_BT in text]
    return torch.cat(nats).double().cpu(), torch.cat(counts).double().cpu()


def _row_nats(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    nats_N = F.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return nats_N.view(targets_BT.shape).sum(dim=1)


# --- the gap ---------------------------------------------------------------------------------------------------------


def _taken_apart(exit_: _Reading, full: _Reading) -> ExitGap:
    counts_U = exit_.counts_U
    units, tokens = len(counts_U), float(counts_U.sum())
    drawn_RU = torch.randint(units, (RESAMPLES, units), generator=torch.Generator().manual_seed(0))
    counts_R = counts_U[drawn_RU].sum(dim=1)
    gap_U = exit_.plain_U - full.plain_U
    gap, gap_R = float(gap_U.sum()) / tokens, gap_U[drawn_RU].sum(dim=1) / counts_R
    gap_low, gap_high = _interval(gap_R)
    mends = []
    for name, mapped_U in exit_.mapped_U.items():
        left_U = mapped_U - full.mapped_U[name]
        share, low, high = None, None, None
        if gap_low > 0:  # a share of a gap that may be none means nothing
            share = 1 - float(left_U.sum()) / tokens / gap
            low, high = _interval(1 - left_U[drawn_RU].sum(dim=1) / counts_R / gap_R)
        ce_exit, ce_full = (float(nats_U.sum()) / tokens for nats_U in (mapped_U, full.mapped_U[name]))
        mends.append(Mend(name, exit_.parameters[name], ce_exit, ce_full, share, low, high))
    return ExitGap(
        loop=exit_.loop,
        num_loops=full.loop,
        ce_exit=float(exit_.plain_U.sum()) / tokens,
        ce_full=float(full.plain_U.sum()) / tokens,
        gap=gap,
        gap_low=gap_low,
        gap_high=gap_high,
        units=units,
        fit_tokens=exit_.fit_tokens,
        test_tokens=int(tokens),
        mends=tuple(mends),
        notes=_notes(exit_, units),
    )


def _notes(exit_: _Reading, units: int) -> tuple[str, ...]:
    notes = []
    if units < FEW_UNITS:
        notes.append(f"an interval over {units} units of text is too narrow")
    if exit_.parameters["full-rank"] > exit_.fit_tokens:
        notes.append(
            f"the full-rank map has {exit_.parameters['full-rank']:,} numbers and was fitted on {exit_.fit_tokens:,} "
            "tokens: more text may let it mend more"
        )
    if "affine" not in exit_.parameters:
        notes.append("the readout is not features times a head, so no affine map was put before it")
    return tuple(notes)


def _interval(values_R: Tensor) -> tuple[float, float]:
    low, high = torch.quantile(values_R, torch.tensor(INTERVAL, dtype=values_R.dtype)).tolist()
    return low, high
