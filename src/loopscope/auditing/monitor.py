"""The online monitor: scale, radial gradient share, carry and headroom while a model trains, and the alarms they raise.

`read` measures one trace, `ScaleMonitor` follows the readings over training; our trainer uses these two. `watch` does
so for anybody's training loop: every so many steps it runs a pass of its own, one row of the batch through the
protocol, which touches nothing of the training.

Shape legend: B batch, T tokens, D width, K loops.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.auditing.free_range import Objections
from loopscope.auditing.visibility import field_shares, scale_field
from loopscope.config import PAPER_PENALTY
from loopscope.errors import ConfigError, DataError, ProtocolError
from loopscope.objectives.cross_entropy import IGNORE_INDEX
from loopscope.objectives.placement import exit_weights
from loopscope.objectives.terms import Term
from loopscope.protocol import AdaptedModel, LoopedModel, LoopTrace, OwnLosses, missing_methods, run_loops
from loopscope.results.thresholds import NOTICED, TENFOLD
from loopscope.show.numbers import percent
from loopscope.show.sentences import driven_by_training
from loopscope.untouched import borrowed, network_of

GROWTH = 10.0
"""A state this many times larger than at the start has left the range it was initialised for."""
LEFT = 2.0
"""Above this many times its start a scale counts as growing: the "since" of an alarm."""
CARRIED = 0.5
"""A loop that hands on less than this of its input's scale has it bounded by a norm or a damping: no blind spot."""
WINDOW = 8
"""Observations that the slope is fitted to."""
HEADROOM_DECADES = 2.0
"""Closer than this to the largest number of the dtype is an alarm, visible or not."""


# --- one pass --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What one pass shows of the states."""

    norms: tuple[float, ...]
    """Mean ‖h_k‖ for k = 1..K."""
    shares: dict[int, float]
    """Radial gradient share at each supervised loop; nan where no token has a gradient."""
    charge: float
    """Nats per token that the objective charges for ten times the scale, median over tokens."""
    carried: float
    """How much of a change of scale the last loop hands on: 1 in a residual loop, 0 behind a norm."""
    largest: tuple[float, ...]
    """Largest absolute value in h_0 … h_K."""
    limit: float
    """Largest number of the dtype that the model computes in."""


def read(
    model: LoopedModel,
    trace: LoopTrace,
    targets_BT: Tensor,
    weights: Mapping[int, float],
    terms: Sequence[Term] = (),
    *,
    gated: bool = False,
) -> Reading:
    """Measure a trace; norms and largest values on the whole batch, the rest on its first row.

    `weights` are those of the supervised loops, `terms` what else is in the loss.
    """
    loops = list(weights)
    states = [state.h_BTD.detach() for state in trace.states]
    largest = torch.stack([h_BTD.abs().max().double() for h_BTD in states])
    shares = radial_gradient_shares(model, trace, targets_BT, loops)
    return Reading(
        norms=tuple(trace.norms_K().tolist()),
        shares=dict(zip(loops, shares, strict=True)),
        charge=tenfold_charge(model, trace, weights, terms, gated=gated),
        carried=carried_scale(model, trace),
        largest=tuple(largest.tolist()),
        limit=torch.finfo(_dtype(states[-1])).max,
    )


def tenfold_charge(
    model: LoopedModel, trace: LoopTrace, weights: Mapping[int, float], terms: Sequence[Term], *, gated: bool = False
) -> float:
    """What the objective charges for ten times the scale (see `free_range`), median over the tokens of one row."""
    first = torch.tensor([0], device=trace.states[0].h_BTD.device)
    row = [state.take(first) for state in trace.states]
    return float(Objections(model, row, weights, terms, gated=gated).charge(scale_field, TENFOLD).median())


def radial_gradient_shares(
    model: LoopedModel, trace: LoopTrace, targets_BT: Tensor, loops: Sequence[int]
) -> list[float]:
    """Median over tokens of |⟨∇_h CE_k, h⟩|/(‖∇_h CE_k‖·‖h‖) at each of the loops, on the batch's first row.

    Through RMSNorm the share is eps/(s² + eps) of a raw one (Lemma 1, arXiv 2606.24898).
    """
    first = torch.tensor([0], device=targets_BT.device)
    shares = [field_shares(model, trace.states[k].take(first), k, targets_BT[:1]).abs() for k in loops]
    return [share.median().item() if len(share) else math.nan for share in shares]


@torch.no_grad()
def carried_scale(model: LoopedModel, trace: LoopTrace) -> float:
    """Median over tokens of ‖F(h) − F(h/2)‖/‖h/2‖ for the last loop F, on the batch's first row.

    Lemma 2 (activity, arXiv 2606.24898): a pre-norm residual loop hands the scale on, so this is about 1. A norm that
    opens or closes the loop makes it 0, a damping its factor. Modules should be in eval mode: dropout differs by call.
    """
    k = trace.num_loops
    before = trace.states[k - 1].take(torch.tensor([0], device=trace.states[0].h_BTD.device))
    whole_BTD, half_BTD = (model.loop(before.with_h(part * before.h_BTD), k).h_BTD.double() for part in (1.0, 0.5))
    step_BT = (before.h_BTD.double() / 2).norm(dim=-1)
    return ((whole_BTD - half_BTD).norm(dim=-1) / step_BT).nanmedian().item()


def _dtype(h_BTD: Tensor) -> torch.dtype:
    """The dtype that products are computed in: autocast's where it is on, else that of the state."""
    device = h_BTD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h_BTD.dtype


# --- over training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alarm:
    """What, since when, how fast, and what to do."""

    kind: str
    """blind-spot, headroom or non-finite."""
    step: int
    """When it was raised."""
    since: int
    """The step from which on it was building up."""
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Observation:
    """One step as the monitor saw it."""

    step: int
    norms: tuple[float, ...]
    """Mean ‖h_k‖ for k = 1..K."""
    shares: dict[int, float]
    """Radial gradient share at each supervised loop."""
    charge: float
    """Nats per token that the objective charges for ten times the scale."""
    carried: float
    """How much of a change of scale the last loop hands on."""
    slope: float
    """Growth of log ‖h_K‖ per step, fitted to the last observations; 0 at the first."""
    headroom: float
    """Decades between the largest state and the largest number of the dtype."""
    controlled: bool
    """The user says that a loss term of theirs holds the scale."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms raised at this step; each kind is raised once."""

    def scalars(self) -> dict[str, float]:
        """The four numbers worth a curve; a share that no token could give is left out."""
        known = [share for share in self.shares.values() if not math.isnan(share)]
        share = {"loopscope/radial_gradient_share": max(known)} if known else {}
        rest = {"loopscope/slope": self.slope, "loopscope/headroom": self.headroom}
        return {"loopscope/norm_K": self.norms[-1], **share, **rest}


class ScaleMonitor:
    """Follows the readings over training and raises each kind of alarm once."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.since: int | None = None
        """The step at which ‖h_K‖ was first seen above twice its start, if it has been there ever since."""
        self.recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.raised: set[str] = set()

    def observe(self, step: int, reading: Reading, *, controlled: bool = False) -> Observation:
        """Take in one reading; `controlled` is the user's word that a loss term holds the scale."""
        finite = all(map(math.isfinite, (*reading.largest, *reading.norms)))
        if finite:
            self._follow(step, reading.norms[-1])
        seen = Observation(
            step=step,
            norms=reading.norms,
            shares=reading.shares,
            charge=reading.charge,
            carried=reading.carried,
            slope=self.slope(),
            headroom=math.log10(reading.limit) - math.log10(max(*reading.largest, 1e-30)) if finite else -math.inf,
            controlled=controlled,
        )
        found = [self._blind_spot(seen), self._headroom(seen)] if finite else [self._non_finite(seen, reading)]
        alarms = tuple(alarm for alarm in found if alarm is not None and alarm.kind not in self.raised)
        self.raised.update(alarm.kind for alarm in alarms)
        return replace(seen, alarms=alarms)

    def slope(self) -> float:
        """Least-squares slope of log ‖h_K‖ per step over the recent observations."""
        if len(self.recent) < 2:
            return 0.0
        mean_x = sum(x for x, _ in self.recent) / len(self.recent)
        mean_y = sum(y for _, y in self.recent) / len(self.recent)
        spread = sum((x - mean_x) ** 2 for x, _ in self.recent)
        return sum((x - mean_x) * (y - mean_y) for x, y in self.recent) / spread if spread else 0.0

    def _follow(self, step: int, norm: float) -> None:
        self.start = norm if self.start is None else self.start
        self.recent.append((step, math.log(max(norm, 1e-30))))
        if norm <= LEFT * self.start:
            self.since = None
        elif self.since is None:
            self.since = step

    def _blind_spot(self, seen: Observation) -> Alarm | None:
        assert self.start is not None
        free = seen.charge < NOTICED  # not so where it is not a number
        if not free or seen.controlled or not seen.carried >= CARRIED or seen.norms[-1] < GROWTH * self.start:
            return None
        since = seen.step if self.since is None else self.since
        return Alarm(
            "blind-spot",
            seen.step,
            since,
            f"step {seen.step}: ‖h_K‖ is {seen.norms[-1]:.3g}, {seen.norms[-1] / self.start:.0f} times its start, "
            f"beyond twice since step {since}. No loss sees the scale: tenfold growth is charged {seen.charge:.1g} "
            f"nats a token, and {NOTICED} would be noticed (1 % of perplexity); "
            f"{driven_by_training(math.expm1(seen.slope))}. "
            f"The loop hands on {seen.carried:.2g} of a change of it, and the radial gradient share is at most "
            f"{max(seen.shares.values(), default=math.nan):.1g}. Remedy: --norm-penalty {PAPER_PENALTY} "
            f"(in your own loop loss += ls.norm_penalty(states, {PAPER_PENALTY})), --readout raw or final-only, or "
            "--inter-loop-norm rmsnorm",
        )

    def _headroom(self, seen: Observation) -> Alarm | None:
        if seen.headroom > HEADROOM_DECADES:
            return None
        since = seen.step if self.since is None else self.since
        pace = f"at {_percent(seen.slope)} per step"
        if seen.slope > 0:
            pace += f" it is reached in about {max(seen.headroom, 0) * math.log(10) / seen.slope:.0f} steps"
        return Alarm(
            "headroom",
            seen.step,
            since,
            f"step {seen.step}: the largest state is {seen.headroom:.1f} decades from the largest number of its dtype, "
            f"and {pace} (growing since step {since}). Remedy: a norm penalty, or a wider dtype",
        )

    def _non_finite(self, seen: Observation, reading: Reading) -> Alarm:
        pairs = zip(reading.largest, (0.0, *reading.norms), strict=True)
        loop = next(k for k, pair in enumerate(pairs) if not math.isfinite(sum(pair)))
        where = f"step {seen.step}: the state is not finite " + (f"from loop {loop} on" if loop else "before loop 1")
        if not self.recent:
            return Alarm("non-finite", seen.step, seen.step, f"{where}, and never was. Remedy: check weights and data")
        since, log = self.recent[-1]
        return Alarm(
            "non-finite",
            seen.step,
            since,
            f"{where}; at step {since} it still was, with ‖h_K‖ {math.exp(log):.3g} changing by {_percent(seen.slope)} "
            f"per step. Remedy: go back to a checkpoint of step {since} or earlier, and lower the learning rate, clip "
            "gradients or penalise the norm",
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        recent = [list(pair) for pair in self.recent]
        return {"start": self.start, "since": self.since, "recent": recent, "raised": sorted(self.raised)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.start, self.since, self.raised = state["start"], state.get("since"), set(state["raised"])
        self.recent = deque(((int(step), float(log)) for step, log in state["recent"]), maxlen=WINDOW)


def _percent(slope: float) -> str:
    """A slope of the logarithm as growth: 0.0488 → +5 %."""
    return f"{'-' if slope < 0 else '+'}{percent(math.expm1(slope))}"


# --- anybody's training loop -----------------------------------------------------------------------------------------

EVERY = 50
"""Steps between observations: often enough to see a scale leave, seldom enough to cost below 1 % of step time."""


def watch(
    model: LoopedModel | nn.Module,
    *,
    every: int = EVERY,
    supervised: str | Sequence[int] = "every-loop",
    terms: Sequence[Term] = (),
    controlled: bool = False,
    autocast: torch.dtype | None = None,
    on_alarm: Callable[[Alarm], object] | None = None,
) -> Watcher:
    """Watch scale, radial gradient share and headroom of a looped model while your own loop trains it.

    `model` is a LoopedModel, or a module that contains one (a DDP wrapper, a LightningModule). `supervised` says which
    loops get cross-entropy: "every-loop", "terminal" or their numbers. `terms` is what else is in your loss
    (`ls.NormPenalty(0.01)`), besides the model's own; whether it holds the scale is measured. `controlled` is your word
    that some other term does.
    `autocast` is the dtype you train in under torch.autocast. `on_alarm` gets each alarm; without it they are Python
    warnings.

        with ls.watch(model, on_alarm=print) as monitor:
            for ids, targets in batches:
                ...  # your forward, backward and optimiser step
                monitor.step(ids, targets)
    """
    looped = looped_part(model)
    if not isinstance(looped, nn.Module) or (isinstance(looped, AdaptedModel) and looped.module is None):
        what = "this model shows no module (adapt takes module=), so loopscope.watch cannot put it into eval mode"
        warnings.warn(f"{what} nor keep its buffers as they are while it looks", RuntimeWarning, stacklevel=2)
    return Watcher(looped, every, supervised, terms, controlled, autocast, on_alarm)


class Watcher:
    """What `watch` returns: call `step` once per training step, read `history`; a context manager."""

    def __init__(
        self,
        model: LoopedModel,
        every: int,
        supervised: str | Sequence[int],
        terms: Sequence[Term],
        controlled: bool,
        autocast: torch.dtype | None,
        on_alarm: Callable[[Alarm], object] | None,
    ) -> None:
        if every < 1:
            raise ConfigError(f"every = {every}: the watcher looks every 1 or more steps")
        self.model, self.every, self.autocast = model, every, autocast
        self.weights = exit_weights(supervised, model.num_loops)
        own = OwnLosses.of(model)
        self.terms = [*terms, *(() if own is None else own.losses())]
        """What is in the loss besides cross-entropy; may be changed while training, when a penalty is turned on."""
        self.controlled = controlled
        self.on_alarm = on_alarm or _warn
        self.monitor = ScaleMonitor()
        self.history: list[Observation] = []
        self.last_step = 0
        self.looked = False
        self.failure: str | None = None
        """What the last pass that failed said; training goes on without it."""
        self.closed = False

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms so far."""
        return [alarm for seen in self.history for alarm in seen.alarms]

    def step(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        step: int | None = None,
        trace: LoopTrace | None = None,
    ) -> Observation | None:
        """Count one training step; at the first and at every `every`-th look at the model and return what was seen.

        Without targets those are the next ids. `step` is for loops that count themselves (from 1). A `trace` of the
        step's own forward pass (`ObjectiveResult.trace`) is read instead of running another one.
        """
        if self.closed:
            return None
        step = self.last_step = self.last_step + 1 if step is None else step
        if not self.due(step):
            return None
        self.looked = True
        try:
            reading = self._read(ids_BT, targets_BT, trace)
        except Exception as error:
            self.fail(error, step)
            return None
        seen = self.monitor.observe(step, reading, controlled=self.controlled)
        self.history.append(seen)
        for alarm in seen.alarms:
            self.on_alarm(alarm)
        return seen

    def due(self, step: int) -> bool:
        """Whether that step will be looked at."""
        return not self.closed and (not self.looked or step % self.every == 0)

    def fail(self, error: Exception, step: int) -> None:
        """A failure of ours must not end a training of yours: it is told once, and the next due step tries again."""
        first, self.failure, self.looked = self.failure is None, f"{type(error).__name__}: {error}", True
        if first:
            what = f"loopscope.watch cannot look at the model at step {step}, and training goes on"
            warnings.warn(f"{what}: {self.failure}", RuntimeWarning, stacklevel=3)

    def close(self) -> None:
        """Stop watching; `step` does nothing from here on, `history` stays."""
        self.closed = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint of yours should keep, as JSON: without it a resumed run takes its scale for the start."""
        return {"step": self.last_step, **self.monitor.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.last_step = state["step"]
        self.monitor.restore(state)

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, ids_BT: Tensor, targets_BT: Tensor | None, trace: LoopTrace | None) -> Reading:
        targets_BT = next_ids(ids_BT) if targets_BT is None else targets_BT
        if ids_BT.dim() != 2 or ids_BT.shape != targets_BT.shape:
            shapes = f"ids {tuple(ids_BT.shape)} and targets {tuple(targets_BT.shape)}"
            raise DataError(f"{shapes} must both be (batch, tokens)")
        with undisturbed(self.model, ids_BT.device, self.autocast):
            trace = run_loops(self.model, ids_BT[:1]) if trace is None else trace
            return read(self.model, trace, targets_BT, self.weights, self.terms)


def looped_part(model: LoopedModel | nn.Module) -> LoopedModel:
    """The model itself if it follows the protocol, else the outermost part of it that does."""
    parts = model.modules() if isinstance(model, nn.Module) else iter([model])
    for part in parts:
        if not missing_methods(part):
            return part  # type: ignore[return-value]
    raise ProtocolError(
        f"{type(model).__name__} is not a looped model and contains none: it needs num_loops, embed, loop and readout; "
        "loopscope.adapt makes one of three functions"
    )


def next_ids(ids_BT: Tensor) -> Tensor:
    """Targets of a language model: the ids one to the left, and nothing at the end."""
    return torch.cat([ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], IGNORE_INDEX)], dim=1)


@contextmanager
def undisturbed(model: LoopedModel, device: torch.device, autocast: torch.dtype | None = None) -> Iterator[None]:
    """A pass in eval mode without gradients, after which model and random numbers are as before (`borrowed`)."""
    dtype = torch.get_autocast_dtype(device.type) if autocast is None else autocast
    enabled = torch.is_autocast_enabled(device.type) or autocast is not None
    with (
        torch.inference_mode(False),
        borrowed(network_of(model)),
        torch.no_grad(),
        # Without its cache: weights cast without gradient would be taken for the next training step's.
        torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False),
    ):
        yield


def _warn(alarm: Alarm) -> None:
    warnings.warn(str(alarm), RuntimeWarning, stacklevel=3)
