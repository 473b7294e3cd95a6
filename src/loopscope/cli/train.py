"""`loopscope train`: train a looped model, resume it, fine-tune it; the same command under torchrun."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tyro.conf import Positional

from loopscope.cli.live import watching
from loopscope.cli.terminal import interruptible, print_json, print_text, say
from loopscope.cli.verb import Configured
from loopscope.config import Config, ModelConfig
from loopscope.data.files import check_sources
from loopscope.designs import DESIGNS
from loopscope.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, ConfigError
from loopscope.options import AsJson
from loopscope.presets import PRESETS, preset
from loopscope.words import check_tokenizer, check_word

if TYPE_CHECKING:
    from loopscope.api.training import TrainingResult
    from loopscope.targets import Opened

EXIT_OF = {"finished": EXIT_OK, "interrupted": EXIT_INTERRUPTED, "stopped": EXIT_FINDINGS}


@dataclass(frozen=True, kw_only=True)
class Train(
    Configured,
    command="train",
    example=("train --preset nano", "train; Ctrl-C saves, the same command resumes"),
    out_is_folder=True,
    start_here="preset design data readout placement num_loops steps batch lr seed norm_penalty out resume",
):
    """Flags of `loopscope train`."""

    target: Positional[str | None] = None
    """Somebody's model instead of a preset's: package.module:factory, a Hugging Face folder, hf:ORG/NAME, or a run."""
    out: Path | None = None
    """Run folder; by default runs/PRESET-PLACEMENT-READOUT-sSEED, or runs/PRESET-DESIGN-sSEED."""
    resume: str = "auto"
    """auto: resume if there is a checkpoint. must: fail if there is none. never: fail if there is one. Or a path."""
    init_from: str | None = None
    """Start from the weights of any target; what cannot be carried over is listed."""
    allow_new_data: bool = False
    """Resume although the text has changed; the manifest keeps the hash of what came before."""
    json: AsJson = False

    help: ClassVar[str] = f"""Train a looped model. Ctrl-C and SIGTERM save and exit; the same command resumes.

presets: {", ".join(PRESETS)}
designs: {", ".join(DESIGNS)}

examples:
  loopscope train --preset nano --objective per-loop --readout rmsnorm --data wiki/*.txt
  loopscope train --preset nano --readout raw --steps 2000 --out runs/raw
  loopscope train --preset demo --design huginn
  loopscope train --preset nano --on-blind-spot penalize
  loopscope train --preset nano --init-from runs/raw --norm-penalty 0.01 --out runs/remedied
  loopscope train my_package.my_model:build --data wiki/*.txt --tokenizer bytes --sequence-length 128
  torchrun --nproc-per-node 2 -m loopscope train --preset nano --shard full"""

    def run(self) -> int:
        """Train, and say how it ended."""
        for word in (self.target, self.init_from):
            if word is not None:
                check_word(word)
        check_sources((*self.data.data, *(self.data.valid or ())))
        check_tokenizer(self.data.tokenizer)
        from loopscope.api.training import train
        from loopscope.training.distributed import is_first_process

        weights: str | Opened | None = self.init_from
        if self.target is None:
            config = self.resolved()
        else:
            config, weights = self._of_target(self.target)
        with interruptible("the same command goes on from the last checkpoint, or starts again"):
            result = train(
                config,
                self.out or self._default_folder(config),
                resume=self.resume,
                init_from=weights,
                allow_new_data=self.allow_new_data,
                say=say,
                watching=watching,
            )
        if is_first_process():
            self._print(result)
        return EXIT_OF[result.outcome]

    def _of_target(self, word: str) -> tuple[Config, Opened | None]:
        """The configuration of a model that is named, and where its weights and tokenizer come from, if it has any."""
        from loopscope.api.training import target_config
        from loopscope.targets import open_target

        if self.init_from is not None:
            raise ConfigError.of("init_from", self.init_from, f"{word} already names what to start from; give one")
        if self.model != preset(self.preset).model:
            raise ConfigError(
                f"flags of the model do not go with {word}, which brings its own; drop them, or the target"
            )
        opened = open_target(word, seed=self.training.seed)
        model = target_config(opened, self.data.sequence_length)
        config = Config(model=model, objective=self.objective, data=self.data, training=self.training)
        return config, (opened if opened.is_trained or opened.tokenizer is not None else None)

    def _print(self, result: TrainingResult) -> None:
        if self.json:
            print_json(**result.to_json())
            return
        path = result.run.path
        print_text(f"{result.outcome} at step {result.step}: {path}")
        if result.outcome == "stopped" and result.event:
            print_text(f"why: {result.event}")
        if result.outcome == "interrupted":
            print_text("the same command goes on from there")
        if result.evaluation is not None:
            scores = result.evaluation
            for name, unit, values in (("ce", "nats per token", scores.ce), ("norm", "mean ‖h_k‖", scores.norm)):
                numbers = " ".join("not finite" if value is None else f"{value:.4g}" for value in values)
                print_text(f"validation {name} after each loop ({unit}): {numbers}")
        if result.outcome == "finished":
            folder = shlex.quote(str(path))
            print_text(f"next: loopscope audit {folder}")
            print_text(f"      loopscope eval {folder} --depths 1..{2 * result.num_loops}")
            print_text(f"      loopscope report {folder} -o report.html")

    def _default_folder(self, config: Config) -> Path:
        if self.design is not None and self.target is None:
            return Path("runs") / f"{self.preset}-{self.design}-s{config.training.seed}"
        model = config.model
        what = model.readout if isinstance(model, ModelConfig) else model.target.rpartition("/")[2].replace(":", "-")
        return Path("runs") / f"{self.preset}-{config.objective.placement}-{what}-s{config.training.seed}"
