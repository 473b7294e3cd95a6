"""The trainer: one step at a time, each a function of (weights, optimiser state, seed, step).

Data order, dropout masks and sampled depth are drawn from (seed, step), so a run that was killed and resumed makes the
same steps as one that was not, bit for bit on a CPU with equal threads.

Shape legend: B batch, T tokens, K loops.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from loopscope.auditing.monitor import ScaleMonitor, read, undisturbed
from loopscope.config import PAPER_PENALTY, Config, ModelConfig
from loopscope.errors import RunError
from loopscope.objectives.placement import Objective, exit_weights, sample_depth
from loopscope.protocol import ExitGate, Scheduled, SharedCore
from loopscope.results.checkpoint import MonitorState, SavedRun
from loopscope.results.evaluation import Depth
from loopscope.results.record import as_json
from loopscope.results.run import Logged, LoggedEvaluation, LoggedEvent, LoggedStep
from loopscope.runs import RunFolder
from loopscope.training import checkpoint
from loopscope.training.distributed import Ranks, spread
from loopscope.training.guard import StepGuard, StepVerdict
from loopscope.training.optimizers import Optimizers, clip_gradients, learning_rate
from loopscope.training.scores import evaluate_depths, score_batch
from loopscope.training.trackers import Listener

Outcome = Literal["finished", "interrupted", "stopped"]
Batch = tuple[Tensor, Tensor]


class Stream(Protocol):
    """Training batches as a function of the step."""

    def batch(self, step: int, *, rank: int, world_size: int, micro: int, accumulate: int) -> Batch:
        """(ids_BT, targets_BT) of one micro-batch of one rank."""
        ...


class TrainingStep(nn.Module):
    """The root module: everything that touches parameters happens in its forward, where DDP and FSDP see it."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model: Any = model
        self.objective = objective

    def forward(
        self, ids_BT: Tensor, targets_BT: Tensor, num_loops: int, mode: Literal["train", "watch", "evaluate"]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss, and what a log wants to know: more of it in watch mode; scores of every depth in evaluate mode."""
        if mode == "evaluate":
            scores = score_batch(self.model, ids_BT, targets_BT, num_loops)
            return scores.ce_K.mean(), {"scores": scores}
        result = self.objective(self.model, ids_BT, targets_BT, num_loops=num_loops)
        seen: dict[str, Any] = {"ce": result.ce_K, "norm": result.norms_K, "loops": result.supervised}
        seen["terms"] = result.terms
        if mode == "watch":
            config, terms = self.objective.config, self.objective.terms(self.model)
            gated, drawn = config.placement == "gated", config.placement == "distilled"
            weights = exit_weights(result.supervised if drawn else config, num_loops)
            with undisturbed(self.model, ids_BT.device):
                seen["reading"] = read(self.model, result.trace, targets_BT, weights, terms, gated=gated)
        return result.loss, seen


@dataclass
class Progress:
    """Where a run is; what a checkpoint keeps besides tensors, guards and monitor."""

    step: int = 0
    penalty_on: bool = False
    best_ce: float | None = None
    best_step: int | None = None


class Trainer:
    """Trains one model in one run folder. `listeners` get every row that goes to metrics.jsonl.

    The model is any module that is a LoopedModel; what only ours has is asked for as a capability.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        run: RunFolder,
        stream: Stream,
        valid: Callable[[], Iterator[Batch]] | None,
        *,
        ranks: Ranks | None = None,
        autocast: torch.dtype | None = None,
        listeners: tuple[Listener, ...] = (),
    ) -> None:
        self.config, self.run_folder, self.stream, self.valid = config, run, stream, valid
        self.ranks = ranks or Ranks()
        self.autocast, self.listeners = autocast, listeners
        self.model: Any = model.to(self.ranks.device)
        self.step_module = TrainingStep(self.model, self._objective(penalty_on=False))
        shared, is_ours = SharedCore.of(model), isinstance(config.model, ModelConfig)
        idle_gate = ExitGate.of(model) is not None and config.objective.placement != "gated"
        uneven = config.objective.depth != "fixed" or config.objective.backprop_loops is not None or idle_gate
        self.spread = spread(
            self.step_module,
            None if shared is None else shared.core,
            self.ranks,
            config.training.shard,
            unused_parameters=uneven or not is_ours,  # of a stranger's model nobody knows which are used
        )
        self.optimizers = Optimizers(self.model, config.training)
        self.guard = StepGuard(config.training)
        self.monitor = ScaleMonitor()
        self.progress = Progress()
        self._signal: int | None = None

    # --- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> Outcome:
        """Run to the last step, to a signal, or to a guard that stops; the last finite model is in a checkpoint."""
        training = self.config.training
        if (fault := self._fault([])) is not None:  # it came so, from elsewhere: no rollback would help
            self._tell_event(self.progress.step, "stop", f"step {self.progress.step}: {fault}")
            return "stopped"
        if not checkpoint.list_steps(self.run_folder.checkpoints):
            self.save()  # so that a rollback always has somewhere to go
        with self._signals_caught():
            while self.progress.step < training.steps:
                if self.ranks.any(self._signal is not None):
                    if self._fault([]) is None:
                        self.save()
                    return "interrupted"
                if self._advance() == "stop":
                    return "stopped"
                step, scores = self.progress.step, list[Depth]()
                evaluates, saves = (step % every == 0 for every in (training.eval_every, training.save_every))
                if evaluates or step == training.steps:
                    scores = self.evaluate()
                if not (evaluates or saves or step == training.steps):
                    continue
                if (fault := self._fault(scores)) is not None:
                    if self._act_on(self.guard.judge_model(step, fault), step) == "stop":
                        return "stopped"
                elif saves or step == training.steps:
                    self.save()
        return "finished"

    def _fault(self, scores: list[Depth]) -> str | None:
        """What of the model is not finite: its weights, or its scores on validation text; all ranks agree on it."""
        found = None
        for depth in scores:
            for name, value in (("validation CE", depth.ce), ("validation norm", depth.norm)):
                if value is not None and not math.isfinite(value):
                    found = found or f"the {name} after loop {depth.k} is {value}"
        for name, parameter in self.model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if found is None and not local.detach().isfinite().all():
                found = f"the weights of {name} are not finite"
        return (found or "the weights of another rank are not finite") if self.ranks.any(found is not None) else None

    @property
    def was_signalled(self) -> bool:
        """Whether somebody asked to stop, be it during the last step."""
        return self._signal is not None

    def _advance(self) -> Literal["go on", "stop"]:
        """One step under guard; after a rollback the step counter has moved back."""
        started = time.perf_counter()
        step = self.progress.step
        watch = (step + 1) % self.config.training.log_every == 0 or step == 0
        loss, seen = self._accumulate(step, watch=watch)
        norm = clip_gradients(self.model.parameters(), self.config.training.clip).item()
        verdict = self.guard.judge(step + 1, loss, norm)
        if verdict.action == "apply":
            self.optimizers.step(learning_rate(self.config.training, step) * self.guard.lr_factor)
        self.optimizers.zero_grad()
        if verdict.action != "apply" and (outcome := self._act_on(verdict, step + 1)) is not None:
            return outcome
        self.progress.step += 1
        self._follow_schedule()  # what is scored and saved has come as far as its steps, the last one to the end
        if watch:
            seconds = time.perf_counter() - started
            self._log(step + 1, loss, norm, seen, seconds)
            return self._watch(step + 1, seen)
        return "go on"

    def _accumulate(self, step: int, *, watch: bool) -> tuple[float, dict[str, Any]]:
        """Forward and backward of all micro-batches; the loss is the mean over them and over ranks."""
        training = self.config.training
        depth = sample_depth(self.config.objective, self.model.num_loops, seed=training.seed, step=step)
        self._follow_schedule()
        self.step_module.train()
        total = torch.zeros((), device=self.ranks.device)
        seen: dict[str, Any] = {}
        for micro in range(training.accumulate):
            seed_step(training.seed, step, self.ranks.rank, micro)
            ids_BT, targets_BT = self._batch(step, micro)
            last = micro == training.accumulate - 1
            with self._communicate_only_if(last), self._autocast():
                mode = "watch" if watch and last else "train"
                loss, seen = self.spread(ids_BT, targets_BT, depth, mode)
                (loss / training.accumulate).backward()
            total += loss.detach() / training.accumulate
        seen["depth"] = depth
        return self.ranks.mean(total).item(), seen

    def _follow_schedule(self) -> None:
        """Bring what changes with training to the share of steps that are done."""
        share = self.progress.step / self.config.training.steps
        if (scheduled := Scheduled.of(self.model)) is not None:
            scheduled.at_progress(share)
        self.step_module.objective.progress = share

    def _batch(self, step: int, micro: int) -> Batch:
        ids_BT, targets_BT = self.stream.batch(
            step,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            micro=micro,
            accumulate=self.config.training.accumulate,
        )
        return ids_BT.to(self.ranks.device), targets_BT.to(self.ranks.device)

    def _act_on(self, verdict: StepVerdict, step: int) -> Literal["go on", "stop"] | None:
        """Tell what happened, and roll back or stop if that is the verdict; None means: just skip the step."""
        self._tell_event(step, verdict.action, verdict.reason)
        if verdict.action == "skip":
            return None
        if verdict.action == "stop":
            return "stop"
        found = checkpoint.newest(self.run_folder.checkpoints, lambda text: None)
        if found is None:
            raise RunError(f"{verdict.reason}; no whole checkpoint is left to go back to")
        rollbacks, penalty_on = self.guard.rollbacks, self.progress.penalty_on
        self.restore(found)
        self.guard.rollbacks = rollbacks  # the checkpoint's own count would let the run go back for ever
        self.guard.rolled_back()
        self._set_penalty(penalty_on)
        message = f"rolled back to step {found.step}, learning rate × {self.guard.lr_factor:g} from here on"
        self._tell_event(found.step, "rolled-back", message)
        return "go on"

    def _watch(self, step: int, seen: dict[str, Any]) -> Literal["go on", "stop"]:
        """Hand the step to the scale monitor and act on its alarms as --on-blind-spot says."""
        alarms = self.monitor.observe(step, seen["reading"]).alarms
        for alarm in alarms:
            self._tell_event(step, alarm.kind, alarm.message)
        if not self.ranks.any(any(alarm.kind == "blind-spot" for alarm in alarms)):
            return "go on"
        if self.config.training.on_blind_spot == "penalize":
            self._set_penalty(True)
            message = f"norm penalty {PAPER_PENALTY} is on from step {step + 1}"
            self._tell_event(step, "penalty-on", message)
        if self.config.training.on_blind_spot == "stop":
            self.save()
            return "stop"
        return "go on"

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self) -> list[Depth]:
        """CE and norm at every trained depth on validation text; remembers the best full depth."""
        if self.valid is None:
            return []
        self.step_module.eval()
        with torch.no_grad(), self._autocast():
            scores = evaluate_depths(self._score, self.valid(), self.model.num_loops).depths
        step, ce = self.progress.step, scores[-1].ce
        assert ce is not None
        if math.isfinite(ce) and (self.progress.best_ce is None or ce < self.progress.best_ce):
            self.progress.best_ce, self.progress.best_step = ce, step
        self._tell(LoggedEvaluation(step=step, ce=[each.ce for each in scores], norm=[each.norm for each in scores]))
        return scores

    def _score(self, ids_BT: Tensor, targets_BT: Tensor, num_loops: int) -> Any:
        ids_BT, targets_BT = ids_BT.to(self.ranks.device), targets_BT.to(self.ranks.device)
        return self.spread(ids_BT, targets_BT, num_loops, "evaluate")[1]["scores"]

    # --- saving and resuming -----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the current step and drop old ones."""
        state = SavedRun(
            **vars(self.progress),
            guard=self.guard.state(),
            monitor=MonitorState(**self.monitor.state()),
            world_size=self.ranks.world_size,
        )
        folder, keep = self.run_folder.checkpoints, self.config.training.keep_last
        sharded = self.config.training.shard == "full"
        if sharded:
            checkpoint.save_sharded(folder, self.model, self.optimizers, state, self.ranks)
        elif self.ranks.is_first:
            checkpoint.save(folder, self.model, self.optimizers, state)
        if self.ranks.is_first:
            checkpoint.prune(folder, keep, self.progress.best_step)
        self.ranks.barrier()

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Go on exactly where a checkpoint was written."""
        state = found.resumable()
        found.restore_tensors(self.model, self.optimizers)
        self.progress = Progress(state.step, state.penalty_on, state.best_ce, state.best_step)
        self.guard.restore(state.guard)
        self.monitor.restore(as_json(state.monitor))
        self._set_penalty(self.progress.penalty_on)

    # --- small parts -------------------------------------------------------------------------------------------------

    def _objective(self, *, penalty_on: bool) -> Objective:
        config = self.config.objective
        if penalty_on and not config.norm_penalty:
            config = replace(config, norm_penalty=PAPER_PENALTY)
        return Objective(config, recompute=self.config.training.checkpoint_loops)

    def _set_penalty(self, on: bool) -> None:
        self.progress.penalty_on = on
        self.step_module.objective = self._objective(penalty_on=on)

    def _autocast(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.autocast)

    def _communicate_only_if(self, last: bool) -> Any:
        """DDP and FSDP exchange gradients once per step, after the last micro-batch."""
        if isinstance(self.spread, FSDPModule):
            self.spread.set_requires_gradient_sync(last)
            return nullcontext()
        if isinstance(self.spread, nn.parallel.DistributedDataParallel) and not last:
            return self.spread.no_sync()
        return nullcontext()

    def _log(self, step: int, loss: float, gradient_norm: float, seen: dict[str, Any], seconds: float) -> None:
        tokens = self.config.training.batch * self.config.sequence_length
        self._tell(
            LoggedStep(
                step=step,
                loss=loss,
                ce=seen["ce"].tolist(),
                loops=list(seen["loops"]),
                norm=seen["norm"].tolist(),
                radial_gradient_share=list(seen["reading"].shares.values()),
                terms={name: term.item() for name, term in seen["terms"].items()},
                tenfold_charge=seen["reading"].charge,
                depth=seen["depth"],
                gradient_norm=gradient_norm,
                lr=learning_rate(self.config.training, step - 1) * self.guard.lr_factor,
                tokens_per_second=tokens / seconds,
            )
        )

    def _tell_event(self, step: int, event: str, message: str) -> None:
        self._tell(LoggedEvent(step=step, event=event, message=message))

    def _tell(self, row: Logged) -> None:
        if not self.ranks.is_first:
            return
        self.run_folder.append_metrics(row)
        for listener in self.listeners:
            listener(row)

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the run after the current step; a second Ctrl-C ends it at once."""

        def remember(number: int, frame: object) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number

        before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def seed_step(seed: int, step: int, rank: int, micro: int) -> None:
    """Seed dropout (and every other draw) of one micro-batch from what identifies it."""
    state = np.random.SeedSequence([seed, step, rank, micro]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0] >> 1))
