"""`loopscope train`: train a looped model, resume it, fine-tune it; the same command under torchrun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from loopscope.cli.configured import Configured
from loopscope.cli.live import watching
from loopscope.cli.terminal import print_json, print_text, say
from loopscope.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK
from loopscope.presets import PRESETS

if TYPE_CHECKING:
    from loopscope.config import Config
    from loopscope.data.prepare import Prepared
    from loopscope.runs import RunFolder
    from loopscope.training.distributed import Ranks
    from loopscope.training.session import Setup
    from loopscope.training.trainer import Trainer

EXIT_OF = {"finished": EXIT_OK, "interrupted": EXIT_INTERRUPTED, "stopped": EXIT_FINDINGS}


@dataclass(frozen=True, kw_only=True)
class Train(Configured):
    """Flags of `loopscope train`."""

    out: Path | None = None
    """Run folder; by default runs/PRESET-PLACEMENT-READOUT-sSEED."""
    resume: str = "auto"
    """auto: go on if there is a checkpoint. must: fail if there is none. never: fail if there is one. Or a path."""
    init_from: Path | None = None
    """Start from the weights of a run or checkpoint; what cannot be carried over is listed."""
    json: bool = False
    """Print the result as JSON."""

    help: ClassVar[str] = f"""Train a looped model. Ctrl-C and SIGTERM save and exit; the same command goes on.

presets: {", ".join(PRESETS)}

examples:
  loopscope train --preset nano --objective per-loop --readout rmsnorm --data wiki/*.txt
  loopscope train --preset nano --readout raw --steps 2000 --out runs/raw
  loopscope train --preset nano --on-blind-spot penalize
  loopscope train --preset nano --init-from runs/raw --norm-penalty 0.01 --out runs/remedied
  torchrun --nproc-per-node 2 -m loopscope train --preset nano --shard full"""

    def run(self) -> int:
        """Prepare data and model, train, and say how it ended."""
        from loopscope.runs import RunFolder
        from loopscope.training.distributed import join
        from loopscope.training.session import set_up

        config = self.resolved()
        setup = set_up(config)
        run = RunFolder(self.out or self._default_folder())
        with join(setup.device) as ranks:
            if not ranks.is_first:
                return self._train(config, run, setup, ranks)
            with run.locked():
                return self._train(config, run, setup, ranks)

    def _train(self, config: Config, run: RunFolder, setup: Setup, ranks: Ranks) -> int:
        from loopscope.training.session import manifest
        from loopscope.training.track import make_trackers

        tell = say if ranks.is_first else _silent
        data = self._prepare(config, run, ranks, tell)
        trainer = _make_trainer(config, run, setup, ranks, data)
        self._start_point(trainer, run, tell)
        if ranks.is_first:
            run.create(config)
            run.write_manifest(manifest(config, setup, data.manifest(), trainer))
            trainer.listeners = make_trackers(config, run.path)
        with watching(trainer, shown=ranks.is_first):
            outcome = trainer.train()
        if ranks.is_first:
            self._report(run, trainer, outcome)
        return EXIT_OF[outcome]

    def _prepare(self, config: Config, run: RunFolder, ranks: Ranks, tell: Callable[[str], None]) -> Prepared:
        """Rank 0 first: the others then find tokenizer and packed tokens ready."""
        from loopscope.data.prepare import prepare
        from loopscope.training.session import check_resume, inherit_tokenizer

        if not ranks.is_first:
            ranks.barrier()
        elif run.config_path.exists():
            check_resume(run, config)
        if ranks.is_first and self.init_from is not None:
            inherit_tokenizer(config, run.path / "tokenizer", self.init_from, tell)
        prepared = prepare(config, run.path / "tokenizer", tell)
        if ranks.is_first:
            ranks.barrier()
        return prepared

    def _start_point(self, trainer: Trainer, run: RunFolder, tell: Callable[[str], None]) -> None:
        """Go on from a checkpoint, start from other weights, or start fresh; say which."""
        from loopscope.training.session import find_checkpoint, init_from

        found = find_checkpoint(run, self.resume, tell)
        if found is not None:
            trainer.restore(found)
            if trainer.ranks.is_first:
                run.forget_metrics_after(found.step)
            tell(f"resumed {run.path} at step {found.step}")
        elif self.init_from is not None:
            left = init_from(trainer.model, self.init_from)
            tell(f"weights from {self.init_from}" + "".join(f"\n  {line}" for line in left))
        else:
            tell(f"training in {run.path}")

    def _report(self, run: RunFolder, trainer: Trainer, outcome: str) -> None:
        rows = run.read_metrics()
        scores = next((row for row in reversed(rows) if row["kind"] == "eval"), None)
        last_event = next((row["message"] for row in reversed(rows) if row["kind"] == "event"), None)
        if self.json:
            print_json(run=str(run.path), outcome=outcome, step=trainer.progress.step, eval=scores, event=last_event)
            return
        print_text(f"{outcome} at step {trainer.progress.step}: {run.path}")
        if outcome == "stopped" and last_event:
            print_text(f"why: {last_event}")
        if scores is not None:
            for name, unit in (("ce", "nats per token"), ("norm", "mean ‖h_k‖")):
                print_text(f"validation {name} after each loop ({unit}): " + " ".join(f"{v:.4g}" for v in scores[name]))

    def _default_folder(self) -> Path:
        name = f"{self.preset}-{self.objective.placement}-{self.model.readout}-s{self.training.seed}"
        return Path("runs") / name


def _make_trainer(config: Config, run: RunFolder, setup: Setup, ranks: Ranks, data: Prepared) -> Trainer:
    from loopscope.data.stream import TrainingStream, evaluation_batches
    from loopscope.training.trainer import Trainer

    length, training = config.sequence_length, config.training
    stream = TrainingStream(data.train, length, config.data.stride or length, training.batch, training.seed)
    micro = max(1, training.batch // training.accumulate // ranks.world_size)

    def valid() -> Any:
        return evaluation_batches(data.valid, length, micro, training.eval_tokens)

    trainer = Trainer(config, run, stream, valid, ranks=ranks, autocast=setup.autocast)
    if any(choice.name == "compile" and choice.value for choice in setup.choices):
        trainer.model.recurrence.core.compile()
    return trainer


def _silent(text: str) -> None:
    """What ranks other than the first say."""
