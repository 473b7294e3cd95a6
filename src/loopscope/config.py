"""Configuration: frozen dataclasses, strict YAML, and every rule that a combination must obey.

A run is a preset plus a small delta. Field names are the YAML keys and, with dashes, the flags.
No torch here: the command line reads configurations before it knows whether torch is needed.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from loopscope.checks import (
    check_at_most,
    check_not_negative,
    check_only_with,
    check_pairing,
    check_positive,
    check_share,
    check_types,
)
from loopscope.errors import ConfigError, suggest
from loopscope.files import MOST_YAML_BYTES, Problems, parse_yaml, read_text, read_yaml

HUGINN_NOISE_STD = math.sqrt(2 / 5)
"""Of Huginn's initial state."""
MOST_EPS = 0.01
"""A norm with a larger epsilon does not hide scale any more: the leak is eps/(s² + eps)."""
PAPER_PENALTY = 0.01
"""λ of the norm penalty in arXiv 2606.24898."""
MOST_LOOPS = 10_000
"""Loops, and layers, beyond any use: what is larger is a slip of the hand."""
MOST_THREADS = 1024
"""CPU threads of a process; the largest machines have a few hundred cores, and torch dies of a hundred thousand."""
_LEARNS = "changes what is learned"


def how_it_is_run(default: Any) -> Any:
    """A field that says how a run is run, watched and guarded; every other field changes what is learned.

    Two runs that differ only in such fields are the same experiment: a resume may change them, rows may differ
    in them, and pages do not take them for a factor. Guards are among them: they act only on a step gone wrong.
    """
    return field(default=default, metadata={_LEARNS: False})


def changes_learning(name: str) -> bool:
    """Whether a configuration field changes what is learned; a name that no section has is taken to."""
    return _LEARNING.get(name, True)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A looped language model: embed → prelude → num_loops × core → coda → readout → head."""

    vocab_size: int = 2048
    """Vocabulary size V."""
    width: int = 128
    """Width d of the state."""
    num_layers: int = 2
    """Layers in the shared core, which is run once per loop."""
    num_loops: int = 4
    """Loops K the model is trained at; any other number can be asked for later."""
    prelude_layers: int = 0
    """Layers run once, before the first loop."""
    coda_layers: int = 0
    """Layers run at every readout, between the state and the readout norm."""

    num_heads: int = 4
    """Attention heads; must divide the width."""
    num_kv_heads: int | None = None
    """Key/value heads (grouped-query attention); None means as many as heads."""
    head_width: int | None = None
    """Channels of a head; None means width / num_heads."""
    qk_bias: bool = False
    """Add a learned bias to queries and keys (Huginn)."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    qk_norm_gain: bool = True
    """Learned gains of the query and key norms; without them (Parcae) their epsilon is the machine's."""
    attention_gate: bool = False
    """Multiply what the heads return by a sigmoid of the layer's input, channel by channel (HRM-Text)."""
    value_embeddings: bool = False
    """Every other layer adds a gated embedding of the token to its values (Parcae)."""
    mlp: Literal["swiglu", "gelu", "relu2", "half-relu2"] = "swiglu"
    """Feed-forward kind."""
    mlp_width: int | None = None
    """Hidden width of the feed-forward; None means 4 × width."""
    num_experts: int | None = None
    """Experts of a mixture in place of each feed-forward; None means one feed-forward for all tokens."""
    experts_per_token: int = 2
    """Experts that a token goes to; each has the feed-forward's hidden width divided by this."""
    balance_loss: float = 0.01
    """num_experts: weight of the loss that keeps experts evenly loaded."""
    router_z_loss: float = 0.001
    """num_experts: weight of the squared log-sum-exp of the router's logits."""
    dropout: float = 0.1
    """Dropout on the embedding and on every residual branch."""

    embedding_scale: float = 1.0
    """Factor on the token embedding; Huginn's is the root of its width."""
    positions: Literal["learned", "rope"] = "learned"
    """Learned absolute positions (the paper) or rotary ones."""
    max_length: int = 256
    """Longest sequence; the size of the learned position table."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_pairs: Literal["halves", "interleaved"] = "halves"
    """Channels that turn together: c and c + C/2 of a head, or its neighbours 2c and 2c + 1 (Huginn, Parcae)."""

    norm: Literal["rmsnorm", "layernorm", "taper"] = "rmsnorm"
    """Kind of the norms inside the layers; taper turns from an RMSNorm into a fixed map as training goes on."""
    norm_eps: float = 1e-6
    """Epsilon of every norm; through an RMSNorm readout it is the only leak of scale (Lemma 1)."""
    norm_placement: Literal["pre", "sum", "sandwich", "normformer", "deepnorm", "deeploop", "one-over-n", "recall"] = (
        "pre"
    )
    """Where the layer norms sit: pre-norm, also on the sum (Huginn), on the branch (Ouro); NormFormer's; DeepNorm's and
    DeepLoop's; pre-norm with branches divided by the loops; on the sum, with the input recalled in every branch."""

    recurrence: Literal["plain", "query", "anchored", "hyper", "lanes", "two-state", "pondering"] = "plain"
    """What a loop is: the core on the state; the state as queries only (Fully Looped Transformer); around an anchor
    (SCSE); copies with gates, or lanes (Hyperloop); a slow and a fast state (HRM); a halting mean of states (ACT)."""
    ponder_cost: float = 0.01
    """pondering: weight of the loops that a token takes before it halts."""
    inter_loop_norm: Literal["none", "rmsnorm", "layernorm"] = "none"
    """Norm that opens every loop after the first: it removes scale from the recurrence."""
    prelude_norm: Literal["none", "rmsnorm", "layernorm"] = "none"
    """Norm on the embedded input, behind the prelude (Parcae)."""
    coda_norm: Literal["none", "rmsnorm", "layernorm"] = "none"
    """Norm on the state before the coda (Huginn)."""
    coda_map: bool = False
    """A learned matrix on the state before the coda, behind its norm (Parcae)."""
    share_readout_norm: bool = False
    """The readout's norm is also the inter-loop norm (Ouro) and the coda's (Huginn), where there are any."""
    spectral_damping: bool = False
    """Scale the carried state by a learned sigmoid at the start of every loop after the first."""
    injection: Literal["none", "add", "concat", "forgetful", "gated", "diagonal"] = "none"
    """How each loop reads the embedded input again; forgetful is a concat that starts with the input alone (nanoLOOP).
    """
    state_init: Literal["embedding", "zeros", "noise"] = "embedding"
    """State before the first loop."""
    noise_std: float = HUGINN_NOISE_STD
    """Standard deviation of a noise state, which is cut at three of them."""
    loop_embedding: bool = False
    """Add a learned vector that tells the core which loop it is in."""

    readout: Literal["rmsnorm", "layernorm", "raw", "final-only", "alpha", "taper"] = "rmsnorm"
    """What of the state the head, and so the loss, gets to see."""
    alpha: float = 1.0
    """alpha readout: exponent of the scale that stays visible; 0 hides scale, 1 is raw."""
    alpha_mode: Literal["fixed", "learned", "per-loop"] = "fixed"
    """alpha readout: a fixed exponent, one learned for all loops, or one learned per loop."""
    reference_scale: float = 1.0
    """alpha readout: (initial) reference scale s_ref."""
    reference_mode: Literal["fixed", "learned", "ema"] = "fixed"
    """alpha readout: how s_ref is kept."""
    taper_gate: float = 1.0
    """taper readout: initial gate; 1 is RMSNorm, 0 a fixed linear map."""
    exit_gate: bool = False
    """A learned exit probability per loop and token (needed by the gated objective)."""

    tie_head: bool = True
    """The head is the token embedding."""
    init: Literal["pytorch-default", "scaled", "huginn", "parcae"] = "pytorch-default"
    """pytorch-default: N(0, 1) embedding (the paper); scaled: std 0.02, residual outputs scaled by depth; huginn: the
    same with std √(2/5d); parcae: that std, residual outputs zero."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "vocab_size", "width", "num_layers", "num_loops", "num_heads", "max_length")
        check_positive(self, "num_kv_heads", "head_width", "mlp_width", "norm_eps", "rope_base", "reference_scale")
        check_positive(self, "embedding_scale", "noise_std")
        check_not_negative(self, "prelude_layers", "coda_layers")
        check_at_most(self, MOST_LOOPS, "num_layers", "num_loops", "prelude_layers", "coda_layers")
        check_at_most(self, 100_000_000, "vocab_size", "width", "head_width", "mlp_width", "max_length")
        check_at_most(self, MOST_EPS, "norm_eps")
        check_positive(self, "num_experts", "experts_per_token")
        check_not_negative(self, "balance_loss", "router_z_loss", "ponder_cost")
        check_at_most(self, MOST_LOOPS, "num_experts")
        _check_attention(self)
        _check_experts(self)
        _check_recurrence(self)
        _check_readout(self)
        if not 0 <= self.dropout < 1:
            raise ConfigError.of("dropout", self.dropout, "must be at least 0 and below 1")

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads actually built."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_channels(self) -> int:
        """Channels of a head actually built."""
        return self.head_width or self.width // self.num_heads

    @property
    def attention_width(self) -> int:
        """Channels of all heads together: the width, unless heads have one of their own."""
        return self.num_heads * self.head_channels

    @property
    def kv_width(self) -> int:
        """Channels of all keys, or values, of a token."""
        return self.kv_heads * self.head_channels

    @property
    def mlp_hidden(self) -> int:
        """Hidden width of the feed-forward actually built."""
        return self.mlp_width or 4 * self.width

    @property
    def total_layers(self) -> int:
        """Layers a token passes through when all loops are run."""
        runs = 4 if self.recurrence == "two-state" else 1  # three of L and one of H in every loop
        return self.prelude_layers + self.num_layers * self.num_loops * runs + self.coda_layers

    def first_layer(self, part: str) -> int:
        """Number of the first layer of a part, counted through prelude, core and coda."""
        before_coda = self.prelude_layers + self.num_layers
        return {"prelude": 0, "core": self.prelude_layers, "coda": before_coda}[part]

    def has_value_embedding(self, layer: int) -> bool:
        """Whether the layer of this number has one: every other layer, the last of the coda included."""
        return self.value_embeddings and (self.first_layer("coda") + self.coda_layers - 1 - layer) % 2 == 0


Placement = Literal["terminal", "per-loop", "weighted", "last-n", "gated", "distilled"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Which loops are supervised, how deep a training step goes, and what else the loss sees."""

    placement: Annotated[Placement, tyro.conf.arg(aliases=("--objective",))] = "per-loop"
    """Loops that get cross-entropy: the last, all equally, weighted, the last n, by exit gate, or the last and one
    other at a time, which comes to learn from the last (ELT)."""
    loop_weights: tuple[float, ...] | None = None
    """weighted: one weight per loop, 1..num_loops."""
    last_n: int | None = None
    """last-n: how many loops, counted from the end."""
    exit_entropy: float = 0.0
    """gated: weight w of the entropy bonus in Σ p_k·CE_k − w·H(p)."""

    exit_kl: float = 0.0
    """gated: weight β of KL(p ‖ geometric with rate exit_rate) (PonderNet)."""
    exit_rate: float = 0.2
    """exit_kl: rate λ of the geometric prior, the share that leaves at each loop; the rest leaves at the last."""
    distil_from: int = 1
    """distilled: the first loop that may be drawn as the other exit."""

    depth: Literal["fixed", "uniform", "poisson-lognormal"] = "fixed"
    """Loops per training step: always num_loops, uniform on 1..num_loops, or Poisson-lognormal with that mean."""
    backprop_loops: int | None = None
    """Back-propagate through the last so many loops only; None means all."""

    exit_fraction: float = 1.0
    """Supervise exits below full depth on this random share of positions; an unbiased estimate of the same loss."""

    norm_penalty: float = 0.0
    """λ of λ · mean over loops, tokens and width of h²; the paper uses 0.01."""
    scale_anchor: float = 0.0
    """w of w · mean (s − anchor_scale)²."""
    anchor_scale: float = 1.0
    """Target scale of the anchor."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits."""
    jacobian_penalty: float = 0.0
    """λ of (1 − λ)·CE + λ·‖Jv‖², J of one loop at the last state, v a random unit vector (STARS)."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "last_n", "backprop_loops", "anchor_scale")
        check_positive(self, "distil_from")
        check_not_negative(
            self, "norm_penalty", "scale_anchor", "z_loss", "exit_entropy", "exit_kl", "jacobian_penalty"
        )
        check_pairing(self, "placement", {"weighted": "loop_weights", "last-n": "last_n"})
        check_only_with(self, "placement", "gated", "exit_entropy", "exit_kl")
        check_only_with(self, "placement", "distilled", "distil_from")
        if not 0 < self.exit_rate < 1:
            raise ConfigError.of("exit_rate", self.exit_rate, "must be above 0 and below 1")
        if self.exit_rate != 0.2 and not self.exit_kl:
            raise ConfigError.of("exit_rate", self.exit_rate, "has no effect while exit_kl is 0")
        if self.jacobian_penalty >= 1:
            raise ConfigError.of("jacobian_penalty", self.jacobian_penalty, "must be below 1")
        check_share(self, "exit_fraction")
        if self.exit_fraction < 1 and self.placement in ("terminal", "gated", "distilled"):
            why = f"has no fixed exits to thin out under placement = {self.placement!r}"
            raise ConfigError.of("exit_fraction", self.exit_fraction, why)
        if self.anchor_scale != 1.0 and not self.scale_anchor:
            raise ConfigError.of("anchor_scale", self.anchor_scale, "has no effect while scale_anchor is 0")
        if self.loop_weights is not None and (min(self.loop_weights, default=-1) < 0 or not any(self.loop_weights)):
            raise ConfigError.of("loop_weights", self.loop_weights, "needs weights ≥ 0, at least one of them above 0")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, its tokens, and how it is cut into sequences."""

    data: tuple[str, ...] = ("builtin",)
    """Training text: builtin, files or globs (.txt, .jsonl, .parquet, also .gz and .zst), hf:DATASET[:CONFIG], or
    task:NAME[:STEPS]."""
    valid: tuple[str, ...] | None = None
    """Validation text; None takes the corpus's own split, or holds out documents by their hash."""
    text_field: str = "text"
    """Field of .jsonl, .parquet and Hugging Face records that holds the text."""
    tokenizer: str = "bpe"
    """bytes, bpe (byte-level, trained here), word (the paper's regex), or the path of a tokenizer.json. A task is read
    in bytes instead of bpe and word."""
    sequence_length: int | None = None
    """Tokens of a training sequence; None means max_length."""
    stride: int | None = None
    """Tokens between the starts of training sequences; None means no overlap. The paper uses half the length."""
    curriculum: int | None = None
    """Of a task: training steps after which its answers may take one step more, from one on; None asks all at once."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "sequence_length", "stride", "curriculum")
        for name in ("data", "valid"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise ConfigError.of(name, (), "needs at least one source")
        if self.curriculum is not None and not self.data[0].startswith("task:"):
            raise ConfigError.of("curriculum", self.curriculum, "is for tasks (task:hops): other text has no steps")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained, watched and saved."""

    steps: int = 1000
    """Optimiser steps."""
    batch: int = 16
    """Sequences per step, over all processes and micro-batches."""
    accumulate: int = 1
    """Micro-batches a step is split into."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices of the layers and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on everything (the paper)."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up: constant, cosine to a tenth, or stable and then linear decay to zero."""
    warmup: int = 0
    """Steps of linear warm-up."""
    decay: float = 0.2
    """wsd: share of the steps that decay."""
    seed: int = 42
    """Seed of weights, data order, dropout and sampled depth."""

    checkpoint_loops: bool = how_it_is_run(False)
    """Recompute each loop in the backward pass: memory no longer grows with the layers of all loops."""
    compile: Literal["auto", "on", "off"] = how_it_is_run("auto")
    """Compile one loop's core with torch.compile."""
    shard: Literal["none", "full"] = how_it_is_run("none")
    """Under torchrun: replicate the model (DDP) or shard it (FSDP2)."""
    threads: int | None = how_it_is_run(None)
    """CPU threads of this process; None leaves torch's choice."""

    log_every: int = how_it_is_run(10)
    """Steps between lines of metrics."""
    eval_every: int = how_it_is_run(250)
    """Steps between evaluations on validation text."""
    eval_tokens: int = how_it_is_run(32_768)
    """Most validation tokens of such an evaluation."""
    save_every: int = how_it_is_run(250)
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int = how_it_is_run(2)
    """Checkpoints kept besides the best one."""
    track: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = how_it_is_run(())
    """Trackers that get the metrics too (the track extra)."""

    max_skips: int = how_it_is_run(5)
    """Consecutive non-finite or spiking steps that are skipped before rolling back."""
    max_rollbacks: int = how_it_is_run(3)
    """Rollbacks to the last checkpoint, each halving the learning rate, before the run stops."""
    spike_factor: float = how_it_is_run(4.0)
    """A loss this many times its recent median is a spike."""
    on_blind_spot: Literal["warn", "penalize", "stop"] = how_it_is_run("warn")
    """What to do when the state's scale runs away unseen: warn, turn the norm penalty on, or stop."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "steps", "batch", "accumulate", "lr", "clip", "threads", "log_every", "eval_every")
        check_positive(self, "eval_tokens", "save_every", "keep_last", "max_skips", "spike_factor")
        check_at_most(self, MOST_THREADS, "threads")
        check_not_negative(self, "weight_decay", "warmup", "seed", "max_rollbacks")
        check_only_with(self, "schedule", "wsd", "decay")
        if self.batch % self.accumulate:
            raise ConfigError.of("accumulate", self.accumulate, f"must divide batch = {self.batch}")
        if self.warmup > self.steps:
            raise ConfigError.of("warmup", self.warmup, f"is longer than the run of {self.steps} steps")
        check_share(self, "decay")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A model that is opened by its name instead of built here: somebody's factory, or a checkpoint of theirs."""

    target: str
    """package.module:factory, a local Hugging Face folder, or hf:ORG/NAME[@REVISION]."""
    num_loops: int
    """Loops K it runs by itself."""
    vocab_size: int
    """Vocabulary size V of its logits."""
    max_length: int
    """Longest sequence it is trained on."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "num_loops", "vocab_size", "max_length")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A model, the objective it is trained with, the text, and the training itself."""

    model: ModelConfig | TargetConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        self._check_objective()
        if self.sequence_length > self.model.max_length:
            why = f"is longer than max_length = {self.model.max_length}"
            raise ConfigError.of("sequence_length", self.sequence_length, why)

    @property
    def sequence_length(self) -> int:
        """Tokens of a training sequence."""
        return self.data.sequence_length or self.model.max_length

    def design(self, what: str) -> ModelConfig:
        """The model's configuration, for whatever (`what`) works on our own designs only."""
        if isinstance(self.model, TargetConfig):
            raise ConfigError(f"{what} needs a model that loopscope builds itself; {self.model.target} is not one")
        return self.model

    def _check_objective(self) -> None:
        model, objective = self.model, self.objective
        if isinstance(model, ModelConfig):
            if objective.placement == "gated" and not model.exit_gate:
                raise ConfigError.of("placement", "gated", "needs a model with exit_gate; add --exit-gate")
            if model.readout == "final-only" and objective.depth == "fixed" and _only_last(objective):
                why = "never shows its raw loops to an objective that supervises the last loop only; use rmsnorm"
                raise ConfigError.of("readout", "final-only", why)
        if model.num_loops == 1 and (objective.placement == "gated" or objective.depth != "fixed"):
            raise ConfigError.of("num_loops", 1, "leaves nothing to choose for gated exits or a sampled depth")
        if objective.loop_weights is not None and len(objective.loop_weights) != model.num_loops:
            raise ConfigError.of(
                "loop_weights", objective.loop_weights, f"needs one weight for each of {model.num_loops} loops"
            )
        if objective.loop_weights is not None and objective.depth != "fixed":
            raise ConfigError.of(
                "loop_weights", objective.loop_weights, f"cannot be matched to depth = {objective.depth!r}"
            )
        for name in ("last_n", "backprop_loops", "distil_from"):
            if (count := getattr(objective, name)) is not None and count > model.num_loops:
                raise ConfigError.of(name, count, f"exceeds num_loops = {model.num_loops}")


_LEARNING = {
    each.name: each.metadata.get(_LEARNS, True)
    for section in (ModelConfig, ObjectiveConfig, DataConfig, TrainingConfig)
    for each in dataclasses.fields(section)
}


def config_from_dict(data: object, base: Config | None = None, *, source: str = "config") -> Config:
    """`base` changed by a nested mapping {section: {field: value}}; unknown keys fail with a suggestion."""
    base = base or Config()
    sections = _mapping(data, source)
    _check_keys(sections, [f.name for f in dataclasses.fields(Config)], source)
    changed: dict[str, Any] = {}
    for name, values in sections.items():
        values = {key: _from_yaml(value) for key, value in _mapping(values, f"{source}: {name}").items()}
        section = getattr(base, name)
        if name == "model" and isinstance(section, TargetConfig) != ("target" in values):
            section = TargetConfig if "target" in values else ModelConfig()
        fields = dataclasses.fields(section)
        _check_keys(values, [f.name for f in fields], f"{source}: {name}")
        if isinstance(section, type):
            if absent := [f.name for f in fields if f.name not in values]:
                raise ConfigError(f"{source}: {name}: a model with a target also needs {', '.join(absent)}")
            changed[name] = section(**values)
        else:
            changed[name] = dataclasses.replace(section, **values)
    return dataclasses.replace(base, **changed)


def _from_yaml(value: object) -> object:
    """Lists as tuples, and 1e-5 as a number: YAML 1.1 takes it for a text."""
    if isinstance(value, list):
        return tuple(_from_yaml(item) for item in value)
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def load_config(path: Path, base: Config | None = None) -> Config:
    """Read a YAML configuration; a missing, unreadable or wrong file is one clear sentence."""
    try:
        text = read_text(path, MOST_YAML_BYTES)
        if _is_toml(text):
            raise ValueError("is TOML; a configuration is YAML or JSON: `model: {width: 64}`")
        data = parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except ValueError as error:
        why = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
        raise ConfigError(f"cannot read the configuration {path}: it {why}") from error
    return config_from_dict({} if data is None else data, base, source=str(path))


def read_config(path: Path, problems: Problems) -> Config | None:
    """The configuration of a run; None where there is none, and with a problem where it cannot be used."""
    if (data := read_yaml(path, problems)) is None:
        return None
    try:
        return config_from_dict(data)
    except ConfigError as error:
        problems[path.name] = f"is not a configuration: {error}; it is left out"
        return None


def _is_toml(text: str) -> bool:
    """Whether a text says something in TOML; none that does is a mapping in YAML."""
    try:
        return bool(tomllib.loads(text))
    except (ValueError, RecursionError):
        return False


def config_to_dict(config: Config) -> dict[str, Any]:
    """The fully resolved configuration as plain JSON and YAML values."""
    data = dataclasses.asdict(config)
    return {name: {k: list(v) if isinstance(v, tuple) else v for k, v in part.items()} for name, part in data.items()}


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


# --- rules -----------------------------------------------------------------------------------------------------------


def _only_last(objective: ObjectiveConfig) -> bool:
    return (
        objective.placement == "terminal"
        or objective.last_n == 1
        or (objective.loop_weights is not None and not any(objective.loop_weights[:-1]))
    )


def _check_attention(config: ModelConfig) -> None:
    if config.head_width is None and config.width % config.num_heads:
        raise ConfigError.of("num_heads", config.num_heads, f"must divide width = {config.width}")
    if config.num_heads % config.kv_heads:
        raise ConfigError.of("num_kv_heads", config.kv_heads, f"must divide num_heads = {config.num_heads}")
    if config.positions == "rope" and config.head_channels % 2:
        why = f"needs an even head width, and width / num_heads is {config.head_channels}"
        raise ConfigError.of("positions", "rope", why)
    check_only_with(config, "positions", "rope", "rope_base", "rope_pairs")
    check_only_with(config, "qk_norm", True, "qk_norm_gain")


def _check_experts(config: ModelConfig) -> None:
    if config.num_experts is None:
        for name, usual in (("experts_per_token", 2), ("balance_loss", 0.01), ("router_z_loss", 0.001)):
            if getattr(config, name) != usual:
                raise ConfigError.of(name, getattr(config, name), "has no effect without num_experts")
        return
    if config.experts_per_token > config.num_experts:
        raise ConfigError.of(
            "experts_per_token", config.experts_per_token, f"exceeds num_experts = {config.num_experts}"
        )
    if config.mlp_hidden % config.experts_per_token:
        why = f"must divide the feed-forward's hidden width, {config.mlp_hidden}"
        raise ConfigError.of("experts_per_token", config.experts_per_token, why)
    if config.norm_placement == "normformer":
        raise ConfigError.of("num_experts", config.num_experts, "has no place for NormFormer's inner norm")


def _check_recurrence(config: ModelConfig) -> None:
    check_only_with(config, "recurrence", "pondering", "ponder_cost")
    if config.recurrence not in ("plain", "pondering"):
        own = {"injection": "none", "inter_loop_norm": "none", "spectral_damping": False, "loop_embedding": False}
        for name, usual in own.items():
            if getattr(config, name) != usual:
                why = f"has no place in recurrence = {config.recurrence!r}, which is a loop of its own"
                raise ConfigError.of(name, getattr(config, name), why)
    if config.norm_placement == "recall" and config.prelude_layers:
        raise ConfigError.of("prelude_layers", config.prelude_layers, "cannot recall an input that it is to make")
    if config.recurrence == "anchored" and config.norm_placement not in ("pre", "sandwich", "one-over-n"):
        why = "needs layers that add to the stream (pre, sandwich, one-over-n), for the loop acts on what they add"
        raise ConfigError.of("recurrence", "anchored", why)
    if config.state_init != "embedding" and config.injection == "none":
        raise ConfigError.of("state_init", config.state_init, "needs an injection, or the input never reaches the loop")
    if config.num_loops == 1 and config.inter_loop_norm != "none":
        raise ConfigError.of("inter_loop_norm", config.inter_loop_norm, "has no effect with one loop")
    check_only_with(config, "state_init", "noise", "noise_std")
    others = {config.inter_loop_norm, config.coda_norm} - {"none"}
    if config.share_readout_norm and others != {config.readout}:
        why = (
            "needs the readout and the inter-loop norm, or the coda's, to be the same norm, not "
            f"{config.readout} and {', '.join(sorted(others)) or 'none'}"
        )
        raise ConfigError.of("share_readout_norm", True, why)


def _check_readout(config: ModelConfig) -> None:
    if config.vocab_size < 2:
        raise ConfigError.of("vocab_size", config.vocab_size, "needs at least two tokens to tell apart")
    if config.readout == "final-only" and config.num_loops < 2:
        raise ConfigError.of("readout", "final-only", "needs num_loops ≥ 2; with one loop it is rmsnorm")
    if not 0 <= config.taper_gate <= 1:
        raise ConfigError.of("taper_gate", config.taper_gate, "must be between 0 and 1")
    check_only_with(config, "readout", "alpha", "alpha", "alpha_mode", "reference_scale", "reference_mode")
    check_only_with(config, "readout", "taper", "taper_gate")
    for name, default in (("coda_norm", "none"), ("coda_map", False)):
        if getattr(config, name) != default and not config.coda_layers:
            raise ConfigError.of(name, getattr(config, name), "needs coda_layers ≥ 1; without a coda there is readout")
    if config.alpha == 1 and config.alpha_mode == "fixed":
        for name, usual in (("reference_scale", 1.0), ("reference_mode", "fixed")):
            if getattr(config, name) != usual:
                raise ConfigError.of(name, getattr(config, name), "has no effect at alpha = 1, where s_ref cancels")


def _mapping(data: object, source: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping of names to values, found {type(data).__name__}")
    return data


def _check_keys(data: dict[str, Any], allowed: list[str], source: str) -> None:
    for key in data:
        if key not in allowed:
            raise ConfigError(f"{source}: unknown key {key!r}; {suggest(str(key), allowed)}")
