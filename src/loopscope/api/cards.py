"""A model card: README.md of an exported folder, with what is known of the model and nothing that is not."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from loopscope.config import Config, ModelConfig
from loopscope.files import without_nan
from loopscope.results.audit import AuditResult
from loopscope.results.evaluation import Evaluation
from loopscope.results.halting import Policy
from loopscope.results.record import read_record
from loopscope.results.run import DataRecord
from loopscope.show.numbers import fold
from loopscope.show.sentences import driven, summary
from loopscope.show.table import Column, Table, columns, escape_markdown

FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- loopscope
- looped-transformer
---"""
"""What the hub sorts models by; no licence is claimed for anybody's weights."""
ESSENTIAL = ("vocab_size", "width", "num_layers", "num_loops", "prelude_layers", "coda_layers", "num_heads", "readout")
"""Fields of the design that a card shows even where they have their usual values."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card is made of; what is None was not measured."""

    name: str
    design: ModelConfig
    parameters: int
    dtype: str
    config: Config | None
    """How it was trained, where that is known."""
    step: int | None
    text: DataRecord | None
    """What the manifest says of its text."""
    audit: AuditResult | None
    evaluation: Evaluation | None
    policy: Policy | None

    def to_markdown(self) -> str:
        """The whole README.md."""
        sections = [
            FRONT_MATTER,
            f"# {escape_markdown(self.name)}\n\n{self._opening()}",
            _loading(self.design.num_loops),
            self._configuration(),
            self._training(),
            "" if self.audit is None else _audited(self.audit),
            "" if self.evaluation is None else _frontier(self.evaluation),
            "" if self.policy is None else _halting(self.policy),
        ]
        text: str = without_nan("\n\n".join(filter(None, sections)) + "\n")  # half of a surrogate pair is no text
        return text

    def _opening(self) -> str:
        design = self.design
        around = [f"{n} {part}" for part, n in (("prelude", design.prelude_layers), ("coda", design.coda_layers)) if n]
        beside = f" (and {' and '.join(around)} layers outside the loop)" if around else ""
        return (
            f"A looped language model: {design.num_layers} shared layers of width {design.width}, run "
            f"{design.num_loops} times{beside}; {self.parameters:,} parameters in {self.dtype}. It can be read out "
            "after any loop, and run for more loops than it was trained at."
        )

    def _configuration(self) -> str:
        usual = ModelConfig()
        shown = {
            each.name: getattr(self.design, each.name)
            for each in fields(ModelConfig)
            if each.name in ESSENTIAL or getattr(self.design, each.name) != getattr(usual, each.name)
        }
        rows = [[f"`{name}`", json.dumps(value).strip('"')] for name, value in shown.items()]
        return Table("Configuration", ["field", "value"], rows).markdown().rstrip()

    def _training(self) -> str:
        lines = [] if self.step is None else [f"Trained for {self.step:,} steps."]
        if self.config is not None:
            objective, training = self.config.objective, self.config.training
            terms = {"norm penalty": objective.norm_penalty, "scale anchor": objective.scale_anchor}
            besides = "".join(f", {name} {value:g}" for name, value in terms.items() if value)
            lines.append(
                f"Objective: cross-entropy placed {objective.placement}{besides}. {training.optimizer}, learning rate "
                f"{training.lr:g} ({training.schedule}), {training.batch} sequences of "
                f"{self.config.sequence_length} tokens a step, seed {training.seed}."
            )
        if self.text is not None and self.text.corpus:
            digest = self.text.corpus_sha256
            lines.append(
                f"Text: {escape_markdown(self.text.corpus)}"
                + (f", SHA-256 `{escape_markdown(digest)}`." if digest else ".")
            )
        if self.text is not None and self.text.tokenizer:
            lines.append(f"Tokenizer: {escape_markdown(self.text.tokenizer)}.")
        return "## Training\n\n" + "\n".join(lines) if lines else ""


def read_results(folder: Path) -> tuple[AuditResult | None, Evaluation | None, Policy | None]:
    """audit.json, eval.json and policy.json of a folder, as far as they are there and can be read."""
    return (
        read_record(folder / "audit.json", AuditResult, {}),
        read_record(folder / "eval.json", Evaluation, {}),
        read_record(folder / "policy.json", Policy, {}),
    )


def _loading(num_loops: int) -> str:
    return f"""## Load

```python
import loopscope.hf  # registers the model; no remote code
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER_OR_NAME)
tokenizer = AutoTokenizer.from_pretrained(FOLDER_OR_NAME)
inputs = tokenizer("The river", return_tensors="pt")
model.generate(**inputs, max_new_tokens=40, num_loops={num_loops})  # any depth
```

Every verb of [loopscope](https://pypi.org/project/loopscope/) opens it, too: `loopscope audit FOLDER`,
`loopscope eval hf:ORG/NAME --depths 1..{2 * num_loops}`."""


def _halting(policy: Policy) -> str:
    """The rule, what it promises and what it saves."""
    threshold = "never" if policy.threshold is None else f"{policy.threshold:.4g}"
    lines = [f"`policy.json`: a token leaves as soon as its {escape_markdown(policy.rule)} reaches {threshold}."]
    if (promise := policy.promise) is not None:
        lines.append(
            f"Certified: at most {promise.max_ppl_increase:.3g} more perplexity with confidence "
            f"{promise.confidence:g}, on teacher-forced text of the same kind."
        )
    if policy.test is not None and policy.test.mean_loops is not None and policy.num_loops is not None:
        lines.append(f"Mean loops a token on test text: {policy.test.mean_loops:.2f} of {policy.num_loops}.")
    return "## Halting\n\n" + "\n".join(lines)


def _audited(audit: AuditResult) -> str:
    rows: list[list[object]] = []
    for each in audit.variables:
        rows.append([each.name, each.verdict, each.free_range, driven(each) if each.driven else None])
    table = Table("", ["variable", "verdict", Column("free range", fold), "in training"], rows, absent="")
    step = "" if audit.model.step is None else f" at step {audit.model.step:,}"
    return (
        f"## Audit\n\nVerdict{step}: **{escape_markdown(audit.verdict)}**. {escape_markdown(summary(audit))}\n\n"
        "A free range is how far a variable of the state may grow before the objective notices 1 % of perplexity.\n\n"
        + table.markdown(heading=False).rstrip()
    )


def _frontier(evaluation: Evaluation) -> str:
    parts = []
    header = [Column("loops", "d"), *columns(".4g", "CE (nats/token)", "perplexity", "bits per byte", "‖h‖")]
    for name, split in evaluation.splits.items():
        if split.depths:
            counted = "" if split.tokens is None else f", {split.tokens:,} tokens"
            parts.append(f"Text: {escape_markdown(name)}{counted} ({escape_markdown(evaluation.tokenizer)} tokenizer).")
            rows = [[depth.k, depth.ce, depth.perplexity, depth.bits_per_byte, depth.norm] for depth in split.depths]
            parts.append(Table("", header, rows, absent="").markdown(heading=False).rstrip())
    return "\n\n".join(["## By depth", *parts]) if parts else ""
