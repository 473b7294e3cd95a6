"""What a verb and the function under it can be asked: each option is declared once.

A field is a keyword of the function and, with dashes, a flag of the verb; the help of both is its docstring, or what
its type says where several verbs have it. What it may be is checked here and nowhere else, as far as that can be known
without opening a model, and without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from loopscope.checks import check_at_least, check_not_negative, check_one_of, check_seed, check_share, refuse
from loopscope.config import MOST_LOOPS
from loopscope.designs import DESIGNS
from loopscope.errors import ConfigError, suggest

Options = TypeVar("Options")


def chosen(usual: Options, given: Options | None, fields: Mapping[str, Any]) -> Options:
    """The options that a function was given, or the usual ones, with the fields it was given as keywords."""
    options = usual if given is None else given
    return replace(options, **fields) if fields else options  # type: ignore[type-var]


# --- how a value is written ------------------------------------------------------------------------------------------


def parse_depths(text: str) -> tuple[int, ...]:
    """1..8 or 1,2,4 as numbers of loops."""
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        depths = tuple(range(_depth(span[1]), _depth(span[2]) + 1))
    elif re.fullmatch(r"\d+(,\d+)*", text):
        depths = tuple(_depth(part) for part in text.split(","))
    else:
        raise ConfigError.of("depths", text, "expected something like 1..8 or 1,2,4")
    if not depths or min(depths) < 1:
        raise ConfigError.of("depths", text, "depths count loops, from 1 up")
    return depths


def _depth(digits: str) -> int:
    if len(digits) > len(str(MOST_LOOPS)) or int(digits) > MOST_LOOPS:  # so many digits are not made a number
        raise ConfigError.of("depths", digits[:40], f"must be at most {MOST_LOOPS:,} loops")
    return int(digits)


def check_depths(depths: Sequence[int] | None) -> None:
    """Numbers of loops, at least one, where they are given."""
    if depths is not None and (not depths or min(depths) < 1 or max(depths) > MOST_LOOPS):
        raise ConfigError.of("depths", depths, f"depths count loops, from 1 up to {MOST_LOOPS:,}")


def written(parse: Callable[[str], Any], show: Callable[[Any], str] = lambda values: ",".join(map(str, values))) -> Any:
    """One word of the command line that stands for several values, and how a default is written."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="TEXT",
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, Sequence),
        str_from_instance=lambda values: [show(values)],
    )


Depths = Annotated[Sequence[int], written(parse_depths, lambda depths: f"{min(depths)}..{max(depths)}")]
"""1..8 or 1,2,4."""
Listed = Annotated[Sequence[str], written(lambda text: tuple(text.split(",")))]
"""Names with commas between."""


def parse_designs(text: str) -> tuple[str, ...]:
    """`huginn,ouro` or `all`, in the order of the registry; a wrong name gets a suggestion."""
    if text == "all":
        return tuple(DESIGNS)
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if not asked:
        raise ConfigError.of("designs", text, "names of designs with commas between, or all; see docs/designs.md")
    for name in asked:
        if name not in DESIGNS:
            raise ConfigError.of("designs", name, suggest(name, DESIGNS))
    return tuple(name for name in DESIGNS if name in asked)


# --- options that several verbs have ----------------------------------------------------------------------------------

Target = Annotated[
    Positional[str],
    arg(
        help="Run folder, checkpoint, Hugging Face folder, hf:ORG/NAME, preset:NAME, design:NAME, configuration file, "
        "or package.module:factory."
    ),
]
OpenedAs = Annotated[
    str | None,
    arg(
        help="float32, bfloat16, float16, or own: as a folder of other people's stores its weights. By default other "
        "people's weights are opened in float32, and everything else as it is."
    ),
]
Tokenizer = Annotated[str | None, arg(help="bytes or a tokenizer.json, for a target that brings no tokenizer.")]
Length = Annotated[
    int | None,
    arg(help="Tokens of a sequence; by default as in training, and 256 for models that do not say."),
]
TaskFolder = Annotated[
    str | None,
    arg(help="A folder with YAML files of further tasks; Python that they name is run by the harness."),
]
Questions = Annotated[int | None, arg(help="Questions of each task; all by default.")]
On = Annotated[str, arg(help="Where rows run: here, ray (a cluster of this machine) or ray:ADDRESS.")]
RowsAtOnce = Annotated[
    int | None,
    arg(help="Rows that run side by side; by default as many as there are cores for, and on Ray as it has room."),
]
Retries = Annotated[int, arg(help="Further attempts at a row whose process crashed.")]
AsJson = Annotated[bool, arg(help="Print the result as JSON.")]


# --- options of one verb ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """How much an audit looks at."""

    states: int = 8
    """Token states that are searched for blind directions."""
    prefix: int = 16
    """Tokens up to such a state."""
    tokens: int = 256
    """Tokens that norms, shares, sweeps and interventions are measured on."""
    rollout: Annotated[int, arg(name="loops")] = 30
    """Loops that the activity is followed through."""
    method: Literal["auto", "dense", "matrix-free"] = "auto"
    """How reachability is decided: whole Jacobians of a loop, or products with them."""
    seed: int = 0
    """Which states are drawn; for an untrained model, also its weights."""
    motion: bool = False
    """Follow every token over 64 loops: does it settle, circle, slide on, or none of these? Costs 64 loops with
    a readout after each on --tokens tokens: under a second at demo size, minutes for a billion weights on a CPU."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "states", "tokens")
        if self.rollout < 1:
            raise ConfigError.of("loops", self.rollout, "must be at least 1")
        if self.rollout > MOST_LOOPS:
            raise ConfigError.of("loops", self.rollout, f"must be at most {MOST_LOOPS:,}")
        check_at_least(self, 2, "prefix")
        check_one_of(self, "method", ("auto", "dense", "matrix-free"))

    def matrix_free(self, width: int) -> bool:
        """Dense Jacobians of a whole loop are affordable up to a width of about a thousand."""
        return self.method == "matrix-free" or (self.method == "auto" and width > 1024)


@dataclass(frozen=True, slots=True, kw_only=True)  # the record of a push test holds it, too
class PushOptions:
    """How hard and how long a push test pushes."""

    weight: float = 0.5
    """Nats that an e-fold of the variable's size is rewarded with."""
    warm_up: int = 60
    """Steps on the objective alone, before the two ways part: the first steps of a fresh model are like no others."""
    steps: int = 80
    """Steps with the reward, and as many without."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"the reward of a push is {self.weight}: it must be a finite number above 0")
        if self.warm_up < 0 or self.steps < 1:
            raise ConfigError(f"a push of {self.steps} steps after {self.warm_up}: needs at least 1, after 0 or more")

    def total_steps(self, variables: int) -> int:
        """Training steps of a push of so many variables: warm-up, twin, and one run for each."""
        return self.warm_up + (1 + variables) * self.steps


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """On what a model is checked."""

    context: int | None = None
    """Tokens the model takes, for a factory whose model does not say."""
    seed: int = 0
    """Of the random ids, and of the weights of a fresh model."""
    device: str | None = None
    """Where to run: cpu, cuda, cuda:1, mps; where the weights are by default."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Which scores of which text."""

    depths: Depths | None = None
    """Depths to report, as 1..8 or 1,2,4; by default 1 to the trained depth."""
    data: tuple[str, ...] | None = None
    """Text to evaluate on instead of the run's validation split."""
    tokenizer: Tokenizer = None
    batch: int = 16
    """Sequences at a time."""
    length: Length = None
    max_tokens: int | None = None
    """Stop after so many tokens."""
    speed: bool = False
    """Time prefill and decoding at every depth, and draw speed against quality."""
    cache_policies: bool = False
    """Decode the text under every cache policy, and say which are safe for this model."""
    exit_gap: bool = False
    """Take every exit among the depths apart: how much of what it costs would a temperature, an affine map of the
    head's input or a full-rank map of the state mend? Fits each on half of up to 256 windows of the text: seconds at
    demo size, as much as about 300 readouts of that text a depth."""
    policies: Listed | None = None
    """Halting policies that `loopscope calibrate` wrote, or RULE:THRESHOLD, as a.json,b.json: what the text costs under
    each, and how many loops a token, beside the fixed depths."""

    def __post_init__(self) -> None:
        check_depths(self.depths)
        check_at_least(self, 1, "batch", "length", "max_tokens")


How = Literal["penalty", "raw", "final-only", "inter-loop-norm", "clamp"]


@dataclass(frozen=True, kw_only=True)
class RemedyOptions:
    """Which fix, and how it is trained."""

    how: How = "penalty"
    """The fix; clamp needs no training: it freezes every token's norm at loop 1 when the model runs."""
    steps: int = 300
    """Fine-tuning steps."""
    lr: float | None = None
    """Learning rate; by default the run's own, and 1e-4 for other people's models."""
    data: tuple[str, ...] | None = None
    """Text to fine-tune and measure on; by default the run's own, and the built-in one for other people's models."""
    tokenizer: Tokenizer = None
    out: Path | None = None
    """Run folder of the fixed model; by default the run's, followed by the fix."""

    def __post_init__(self) -> None:
        check_one_of(self, "how", get_args(How))
        check_at_least(self, 1, "steps")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What a converted folder is to be."""

    to: Literal["hf", "loopscope"] = "hf"
    """hf: for AutoModelForCausalLM, after `import loopscope.hf`; loopscope: a run folder, without optimiser state."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights; as they are by default."""
    overwrite: bool = False
    """Replace a folder that an earlier conversion wrote."""
    push: str | None = None
    """ORG/NAME on Hugging Face's hub to upload the folder to, through huggingface_hub and the token it finds."""
    public: bool = False
    """A repository that --push makes is private without this."""

    def __post_init__(self) -> None:
        check_one_of(self, "to", ("hf", "loopscope"))
        check_one_of(self, "dtype", ("float32", "bfloat16", "float16"))
        if self.push is not None and self.to != "hf":
            raise ConfigError.of("push", self.push, "the hub takes Hugging Face folders: --to hf")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen: the repetition penalty first, then temperature, top-k, top-p and min-p."""

    temperature: float = 0.0
    """0 takes the likeliest token (greedy); above, tokens are drawn with logits divided by it."""
    top_k: int | None = None
    """Draw among so many of the likeliest tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability."""
    min_p: float | None = None
    """Draw among tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that occurred become less likely."""
    seed: int = 0
    """Of the random numbers."""

    def __post_init__(self) -> None:
        refuse(self, lambda it: not 0 <= it < math.inf, "must be 0 (greedy) or more, and finite", "temperature")
        check_at_least(self, 1, "top_k")
        check_share(self, "top_p")
        refuse(self, lambda it: not 0 <= it <= 1, "must be between 0 and 1", "min_p")
        refuse(self, lambda it: not 0 < it < math.inf, "must be above 0, and finite", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions):
    """What a generation is asked for, beside the prompts."""

    max_tokens: int = 128
    """Tokens to generate after each prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not printed."""
    num_loops: int | None = None
    """Loops per token, also beyond the trained depth; the trained depth by default."""
    halting: str | None = None
    """A policy file of `loopscope calibrate`, or RULE:THRESHOLD, as in margin:2.5, of whose cost nothing is promised:
    a token leaves as soon as its score reaches the threshold."""
    speculate: str = "plain"
    """Draft with the first loops, decide with all: auto, block:D,M (D loops draft M tokens) or wave:D. The same text,
    sooner; several prompts then run one after another."""
    cache_policy: str = "exact"
    """What the cache keeps of every token: exact, last-loop, first-loop, first-then-last, ring-N or
    last-exited."""
    prefill_policy: str = "exact"
    """exact, or the same as --cache-policy: what prompts see of one another's tokens."""
    truncate: bool = False
    """Drop the beginning of a prompt that is too long for the model."""
    tokenizer: Tokenizer = None
    device: str | None = None
    """Where to run: cpu, cuda, cuda:1, mps; the best there is by default."""
    dtype: OpenedAs = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "max_tokens")
        why = f"a number of loops is between 1 and {MOST_LOOPS:,}"
        refuse(self, lambda it: not 1 <= it <= MOST_LOOPS, why, "num_loops")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a run is planned for, beside its configuration."""

    devices: int = 1
    """Devices the run is spread over."""
    device_type: Literal["cpu", "cuda"] = "cpu"
    """What the devices are."""
    flops_per_second: float | None = None
    """FLOP/s of one device; measured here when not given."""
    tokens: int | None = None
    """Token budget, instead of steps × batch × sequence length."""
    within_hours: float | None = None
    """Also say how many devices finish the run in so many hours."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "devices", "tokens")
        why = "must be a finite number above 0"
        refuse(self, lambda it: not 0 < it < math.inf, why, "flops_per_second", "within_hours")


@dataclass(frozen=True, kw_only=True)
class AtlasOptions:
    """Which designs an atlas is of, and how they are trained."""

    designs: Annotated[Sequence[str], written(parse_designs, lambda names: "all")] = tuple(DESIGNS)
    """Designs with commas between; see docs/designs.md for their names."""
    steps: int = 400  # `loopscope quickstart` shows the paper's blind spot after 150
    """Training steps of a row of text."""
    hops_steps: int = 1000  # what the preset hops takes to learn it
    """Training steps of a row of pointer chasing (task:hops), which at most six designs get; 0 leaves it out."""
    data: tuple[str, ...] | None = None
    """Training text, as in `loopscope train`; by default the built-in one."""
    seed: int = 42
    """Seed of weights, batches and dropout."""
    threads: int = 1
    """CPU threads of a row."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "steps", "threads")
        check_not_negative(self, "hops_steps")
        check_seed(self)


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """How a law is fitted to runs."""

    law: Literal["iso-depth", "parcae"] = "iso-depth"
    """iso-depth fits what a loop is worth; parcae counts parameters unrolled and fits depth at test time."""
    starts: int = 500
    """Starting points of each fit."""
    bootstraps: int = 200
    """Draws of (budget, loops) cells behind the interval."""
    seed: int = 0
    """Of starting points and draws."""

    def __post_init__(self) -> None:
        refuse(self, lambda it: not 1 <= it <= 100_000, "must be between 1 and 100,000", "starts", "bootstraps")
        check_not_negative(self, "seed")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Which halting rules, what they may cost, and the text that has to show it."""

    rules: Annotated[tuple[str, ...], arg(name="rule")] = ("margin",)
    """Halting rules by name (docs/halting.md), or all that the model can be asked. Several share what may go
    wrong between them."""
    max_ppl_increase: float = 0.01
    """What leaving early may cost: 0.01 is 1 % of perplexity."""
    confidence: float = 0.95
    """How sure the promise is."""
    data: tuple[str, ...] | None = None
    """Text to calibrate on instead of the target's validation split."""
    tokenizer: Tokenizer = None
    max_units: int = 400
    """At most so many units of text, of as many articles as there are."""
    unit_tokens: int = 512
    """Tokens of a unit: whole windows of one article. Of a task a unit is 8 instances, answers only."""
    fill: Literal["copy", "project"] = "copy"
    """What a token that has left shows to later ones at deeper loops: copies of the keys and values of its exit, or
    those that the layers' maps make of the state it left with."""
    verify: int = 0
    """Calibrate so often again, on articles drawn anew, and count how often the promise held."""
    speed: bool = False
    """Time decoding of test text under every certified rule and at full depth, in turns."""
    seed: int = 0
    """Of how articles are dealt to fit, calibration and test."""

    def __post_init__(self) -> None:
        if not self.rules:
            raise ConfigError.of("rule", self.rules, "name at least one (docs/halting.md), or all")
        refuse(self, lambda it: not 0 < it < math.inf, "must be above 0, as 0.01 for 1 %", "max_ppl_increase")
        refuse(self, lambda it: not 0.5 <= it < 1, "must be at least 0.5 and below 1", "confidence")
        check_at_least(self, 1, "max_units", "unit_tokens")
        check_one_of(self, "fill", ("copy", "project"))
        check_not_negative(self, "verify", "seed")
