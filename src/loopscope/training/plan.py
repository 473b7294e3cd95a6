"""What a training run costs, from its configuration alone: parameters, FLOPs, memory, time, devices.

FLOPs of one trained token, with K loops of which B are back-propagated and R readouts (means, where depth is sampled):

    C = 6·W_pre + (2K + 4B)·W_core + 6R·W_coda + 6R·V·d + attention
    attention = 4·d·L·[3.5·n_pre + (K + 2.5B)·n_core + 3.5R·n_coda]           L = (T + 1)/2 keys: causal, on average

W counts the weights that multiply a token (matrices, not norms or tables) and n the layers. A product costs 2 forward
and 4 backward per weight; attention has two products forward and five backward, where the scores are computed again.
Checkpointed loops run forward once more: + 2B·W_core + 4·d·L·B·n_core. Without injection a truncated gradient (B < K)
never reaches the prelude, which then costs 2 instead of 6.

Memory is a ledger of the tensors autograd saves, derived from shapes and never measured. Everything is counted for
eager execution; a compiler may save less.

Legend: T tokens of a sequence, V vocabulary, d width.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loopscope.config import Config
from loopscope.errors import ConfigError
from loopscope.machine import Choice
from loopscope.model.looped_lm import LoopedLM, build, count_parameters
from loopscope.objectives.cross_entropy import choose_chunk_rows
from loopscope.objectives.placement import sample_depth, supervised_loops
from loopscope.training.optim import split_parameters

FLOAT32 = 4
"""Bytes of a number in parameters, gradients, optimiser state, the residual stream and every statistic."""

FLASH_BACKWARD = 2.5
"""Cost of attention's backward pass over its forward: five products against two."""

SAMPLED_STEPS = 4096
"""Sampled depths are averaged over the run's own first steps, at most so many."""

GATE_SCALARS = 7
"""Numbers per row that the exit distribution and its entropy save."""


# --- parameters ------------------------------------------------------------------------------------------------------

PARTS = {
    "embedding": "embedding",
    "positions": "positions",
    "prelude": "prelude",
    "recurrence": "core",
    "coda": "coda",
    "readout_map": "readout",
    "unembedding": "head",
    "exit_gate": "gate",
}
"""Module of the model → part of the plan."""


def parameters_by_part(model: LoopedLM) -> dict[str, int]:
    """Parameters of every part, 0 where it has none; shared ones are counted once (a tied head is the embedding)."""
    counts = count_parameters(model)
    return {part: counts.get(module, 0) for module, part in PARTS.items()}


def multiplied_weights(module: nn.Module) -> int:
    """Weights of all linear maps: those that cost a multiplication per token, unlike gains, biases and tables."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


# --- FLOPs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """How often one training step runs each part; means over steps where depth is sampled."""

    loops: float
    """K: loops run."""
    backprop_loops: float
    """B: loops back-propagated."""
    readouts: float
    """R: loops read out, each through the whole coda."""
    head_rows: float
    """Rows per token that the head multiplies: R, less what `exit_fraction` leaves out."""
    prelude_backward: float
    """1 where the gradient reaches the prelude, 0 where truncation cuts it off."""


def sampled_depths(config: Config) -> Counter[int]:
    """How many of the run's (first 4,096) steps have which depth: the very draws that the trainer will make."""
    steps = range(min(config.training.steps, SAMPLED_STEPS))
    seed, num_loops = config.training.seed, config.model.num_loops
    return Counter(sample_depth(config.objective, num_loops, seed=seed, step=step) for step in steps)


def passes_at(config: Config, depth: int) -> Passes:
    """Passes of a step of `depth` loops."""
    backprop = min(config.objective.backprop_loops or depth, depth)
    readouts = len(supervised_loops(config.objective, depth))
    head_rows = 1 + config.objective.exit_fraction * (readouts - 1)
    reached = backprop == depth or config.model.injection != "none"
    return Passes(depth, backprop, readouts, head_rows, float(reached))


def expected_passes(config: Config) -> Passes:
    """Mean passes of a step, over the depths that the run samples."""
    depths = sampled_depths(config)
    passes = [(passes_at(config, depth), count / depths.total()) for depth, count in depths.items()]
    names = [field.name for field in dataclasses.fields(Passes)]
    return Passes(**{name: sum(getattr(at, name) * share for at, share in passes) for name in names})


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one trained token, forward, backward and recomputation."""

    prelude: float
    core: float
    coda: float
    head: float
    """Head and exit gate."""
    attention: float
    """Scores and values of all layers, for the causal average length."""

    @property
    def total(self) -> float:
        """C of the module's docstring."""
        return self.prelude + self.core + self.coda + self.head + self.attention


def flops_per_token(config: Config, model: LoopedLM | None = None) -> TokenFlops:
    """C and its parts; see the module's docstring for the formula."""
    model = model or build(config.model, device="meta")
    passes = expected_passes(config)
    recomputed = passes.backprop_loops if config.training.checkpoint_loops else 0.0
    core = 2 * (passes.loops + recomputed) + 4 * passes.backprop_loops
    gate = 0 if model.exit_gate is None else passes.readouts * model.exit_gate.weight.numel()
    return TokenFlops(
        prelude=(2 + 4 * passes.prelude_backward) * multiplied_weights(model.prelude),
        core=core * multiplied_weights(model.recurrence),
        coda=6 * passes.readouts * multiplied_weights(model.coda),
        head=6 * (passes.head_rows * model.head.numel() + gate),
        attention=_attention_flops(config, passes, recomputed),
    )


def _attention_flops(config: Config, passes: Passes, recomputed: float) -> float:
    """4·d·L per layer forward (scores and values), 2.5 times that backward."""
    model = config.model
    layers = model.prelude_layers * (1 + FLASH_BACKWARD * passes.prelude_backward)
    layers += model.num_layers * (passes.loops + recomputed + FLASH_BACKWARD * passes.backprop_loops)
    layers += model.coda_layers * passes.readouts * (1 + FLASH_BACKWARD)
    return layers * 4 * model.width * (config.sequence_length + 1) / 2


# --- what autograd saves ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """What of a device's kernels decides how much autograd saves."""

    compute: int
    """Bytes of a number inside layers: 2 under bf16 autocast, else 4."""
    mask: int
    """Bytes of a dropout mask's entry: the CPU keeps the scaled factors, GPUs a boolean."""
    fused_rmsnorm: bool
    """GPUs save an RMSNorm's input and 1/s only; the CPU's composite also saves h/s."""


def kernels_of(device_type: str) -> Kernels:
    """CUDA trains in bf16 autocast with fused kernels; elsewhere float32 and the CPU's composites are assumed."""
    if device_type == "cuda":
        return Kernels(compute=2, mask=1, fused_rmsnorm=True)
    return Kernels(compute=FLOAT32, mask=FLOAT32, fused_rmsnorm=False)


class SavedTensors:
    """A ledger of the tensors that autograd saves in one forward pass, as name → bytes.

    A name is a storage: a tensor saved by two operations (a state by the next loop's norm and by its readout) counts
    once. Methods follow the model's own modules and return the name of what they compute; a tensor enters the ledger
    only when an operation saves it, so one that nobody saves (a residual sum before an addition) costs nothing.
    """

    def __init__(self, config: Config, kernels: Kernels, tokens: int) -> None:
        self.config, self.model, self.kernels, self.tokens = config, config.model, kernels, tokens
        self.bytes: dict[str, int] = {}
        self.detached: set[str] = set()

    @property
    def total(self) -> int:
        """Bytes of all tensors saved so far."""
        return sum(self.bytes.values())

    def step(self, depth: int) -> list[str]:
        """Everything a training step of `depth` loops saves up to the loss; returns the names of h_0 … h_depth."""
        objective, backprop = self.config.objective, passes_at(self.config, depth).backprop_loops
        states = [self.embed()]
        for k in range(1, depth + 1):
            states.append(self.run(states[k - 1], k) if k > depth - backprop else self.without_gradient(k))
        supervised = supervised_loops(objective, depth)
        for k in supervised:
            self.readout(states[k], k)
        if self.model.exit_gate:
            self.exit_gate(len(supervised))
        if objective.norm_penalty or objective.scale_anchor:
            self.scale_terms([state for state in states[1:] if state not in self.detached])
        return states

    def keep(self, name: str, bytes_per_token: int) -> None:
        """Enter a tensor; twice is once."""
        self.bytes[name] = bytes_per_token * self.tokens

    def keep_state(self, name: str) -> None:
        """Enter a tensor of the residual stream."""
        self.keep(name, FLOAT32 * self.model.width)

    def embed(self) -> str:
        """Token ids, dropout mask, prelude; h_0 is the embedded input e, unless it starts from zeros or noise."""
        self.keep("ids", 8)
        self.dropout("embed", FLOAT32)
        if self.model.positions == "rope":
            self.keep("rotary", FLOAT32 * self.model.width // self.model.num_heads)
        self.input = self.stack("prelude", "embed.out", self.model.prelude_layers)
        return self.input if self.model.state_init == "embedding" else "h0"

    def run(self, h: str, k: int) -> str:
        """Loop k with gradient: all its tensors, or under checkpointing only what it starts from."""
        if not self.config.training.checkpoint_loops:
            return self.loop(h, k)
        self.keep_state(h)
        self.keep_state(self.input)
        return f"loop{k}.out"

    def without_gradient(self, k: int) -> str:
        """Loop k before the truncation: it saves nothing, and its state needs no gradient."""
        self.detached.add(f"loop{k}.out")
        return f"loop{k}.out"

    def loop(self, h: str, k: int) -> str:
        """h_{k-1} → h_k, in the order of `model.recurrence`."""
        if self.model.inter_loop_norm != "none" and k > 1:
            self.norm(f"loop{k}.norm", h, self.model.inter_loop_norm)
            h = f"loop{k}.normed"
        if self.model.spectral_damping:
            self.keep_state(h)
            h = f"loop{k}.damped"
        if self.model.injection != "none":
            h = self.inject(f"loop{k}.injection", h)
        if self.model.loop_embedding:
            h = f"loop{k}.marked"
        return self.stack(f"loop{k}", h, self.model.num_layers)

    def inject(self, name: str, h: str) -> str:
        """Add saves nothing; a projection its input; a product both factors."""
        kind, width = self.model.injection, self.model.width
        if kind in ("concat", "gated"):
            self.keep(f"{name}.joined", self.kernels.compute * 2 * width)
        if kind in ("gated", "diagonal"):
            self.keep_state(h)
            self.keep_state(self.input)
        if kind == "gated":
            self.keep(f"{name}.gate", self.kernels.compute * width)
            self.keep(f"{name}.one_minus_gate", self.kernels.compute * width)
        if kind == "diagonal":
            self.keep(f"{name}.projected", self.kernels.compute * width)
        return f"{name}.out"

    def stack(self, part: str, x: str, num_layers: int) -> str:
        """Layers in a row, two residual branches each."""
        for index in range(num_layers):
            for branch, save in (("attention", self.attention), ("feed_forward", self.feed_forward)):
                name = f"{part}.{index}.{branch}"
                self.norm(f"{name}.norm", x, self.model.norm)
                save(name)
                x = self.join(name)
        return x

    def join(self, name: str) -> str:
        """How a branch joins the stream: dropout, and the second norm of the sandwich and sum placements."""
        self.dropout(name, self.kernels.compute)
        if self.model.norm_placement != "pre":
            normed = "branch" if self.model.norm_placement == "sandwich" else "sum"
            self.norm(f"{name}.{normed}_norm", f"{name}.{normed}", self.model.norm)
        return f"{name}.out"

    def norm(self, name: str, x: str, kind: str) -> None:
        """LayerNorm saves input, mean and 1/σ; RMSNorm input and 1/s, and on CPUs h/s for its gain's gradient."""
        composite = kind == "rmsnorm" and not self.kernels.fused_rmsnorm
        if composite:
            self.keep_state(f"{name}.normalised")
        # The composite differentiates s only where the input needs it; fused kernels save their input always.
        if not composite or x not in self.detached:
            self.keep_state(x)
            self.keep(f"{name}.statistics", FLOAT32 * (2 if kind == "layernorm" else 1))

    def attention(self, name: str) -> None:
        """Input, q, k and v (one storage), output and log-sum-exp; new q and k where they are normed or rotated."""
        model, compute = self.model, self.kernels.compute
        keys = model.kv_heads * model.width // model.num_heads
        self.keep(f"{name}.input", compute * model.width)
        self.keep(f"{name}.qkv", compute * (model.width + 2 * keys))
        self.keep(f"{name}.mixed", compute * model.width)
        self.keep(f"{name}.logsumexp", FLOAT32 * model.num_heads)
        if model.qk_norm:
            self.qk_norm(name, model.width + keys)
        if model.positions == "rope" or model.qk_norm:
            self.keep(f"{name}.qk", compute * (model.width + keys))
            # SDPA lays its output out like q, which is contiguous by heads now: merging the heads copies it.
            self.keep(f"{name}.merged", compute * model.width)
        if model.positions == "rope" and compute != FLOAT32:
            self.keep(f"{name}.rotary", compute * 2 * model.width // model.num_heads)

    def qk_norm(self, name: str, size: int) -> None:
        """RMSNorm per head: its input is a view of qkv, unless autocast lifts that to float32."""
        self.keep(f"{name}.qk_statistics", FLOAT32 * (self.model.num_heads + self.model.kv_heads))
        if not self.kernels.fused_rmsnorm:
            self.keep(f"{name}.qk_normalised", FLOAT32 * size)
        if self.kernels.compute != FLOAT32:
            self.keep(f"{name}.qk_lifted", FLOAT32 * size)

    def feed_forward(self, name: str) -> None:
        """Input, hidden layer, what the activation makes of it; SwiGLU: gate and value, silu(gate), their product."""
        hidden = self.model.mlp_hidden * (4 if self.model.mlp == "swiglu" else 2)
        self.keep(f"{name}.input", self.kernels.compute * self.model.width)
        self.keep(f"{name}.hidden", self.kernels.compute * hidden)

    def dropout(self, name: str, input_bytes: int) -> None:
        """The mask; CPUs keep it in the dtype of the input."""
        if self.model.dropout:
            self.keep(f"{name}.mask", min(self.kernels.mask, input_bytes) * self.model.width)

    def readout(self, h: str, k: int) -> None:
        """Coda and readout of loop k; `alpha` and `taper` save the state and a few numbers per token."""
        h = self.stack(f"coda{k}", h, self.model.coda_layers)
        kind = self.model.readout
        if kind in ("rmsnorm", "layernorm") or (kind == "final-only" and k >= self.model.num_loops):
            self.norm(f"readout{k}", h, "layernorm" if kind == "layernorm" else "rmsnorm")
        if kind in ("alpha", "taper"):
            self.keep_state(h)
            self.keep(f"readout{k}.scale", FLOAT32 * 3)
        if kind == "taper":
            self.keep_state(f"readout{k}.gained")

    def exit_gate(self, num_readouts: int) -> None:
        """The stacked features of all readouts, and what turns their logits into exit probabilities."""
        self.keep("features", FLOAT32 * self.model.width * num_readouts)
        self.keep("exits", FLOAT32 * GATE_SCALARS * num_readouts)

    def scale_terms(self, states: list[str]) -> None:
        """Norm penalty and anchor save the states they look at."""
        for state in states:
            self.keep_state(state)
            if self.config.objective.scale_anchor:
                self.keep(f"{state}.scale", FLOAT32 * 2)


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as if all gradients already existed when a forward pass ends.

    No moment of a step holds all of it; the temporaries of single operations are not counted.
    """

    parameters: int
    gradients: int
    optimizer: int
    """AdamW: two moments of everything; Muon: one momentum of the layers' matrices, two moments of the rest."""
    communication: int
    """Several devices: DDP's copy of the gradients, or FSDP2's gathered parameters and not yet reduced gradients."""
    activations: int
    """What autograd saves of one micro-batch, up to the features."""
    recomputed: int
    """Checkpointed loops: one loop's activations, computed again in the backward pass."""
    loss_gradients: int
    """What the fused loss saves: its V×d gradient of the head and its gradient of every row of features."""
    loss_workspace: int
    """What only the forward pass of the loss holds: stacked features and one chunk of logits."""

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class MicroBatch:
    """The largest piece of work that one device does at once: a micro-batch at the deepest depth the run samples."""

    sequences: int
    tokens: int
    depth: int
    """Loops."""
    readouts: int
    """Loops that are read out."""
    rows: int
    """Rows that the head multiplies."""


def largest_micro_batch(config: Config, devices: int) -> MicroBatch:
    """A device's share of the batch; one that cannot be split evenly is a mistake."""
    if devices < 1:
        raise ConfigError.of("devices", devices, "must be at least 1")
    sequences, left_over = divmod(config.training.batch, config.training.accumulate * devices)
    if left_over:
        why = f"cannot be split over {devices} devices × {config.training.accumulate} micro-batches"
        raise ConfigError.of("batch", config.training.batch, why)
    tokens, depth = sequences * config.sequence_length, max(sampled_depths(config))
    passes = passes_at(config, depth)
    return MicroBatch(sequences, tokens, depth, int(passes.readouts), math.ceil(passes.head_rows * tokens))


def plan_memory(config: Config, *, devices: int = 1, device_type: str = "cpu", model: LoopedLM | None = None) -> Memory:
    """Memory of a training step, from shapes; see `Memory` for what each number holds."""
    model = model or build(config.model, device="meta")
    kernels, batch = kernels_of(device_type), largest_micro_batch(config, devices)
    activations, recomputed = activation_bytes(config, kernels, batch, model)
    parameters = FLOAT32 * sum(parameters_by_part(model).values())
    shards = devices if config.training.shard == "full" else 1
    copies = 0 if devices == 1 else 1 if config.training.shard == "none" else 2
    return Memory(
        parameters=math.ceil(parameters / shards),
        gradients=math.ceil(parameters / shards),
        optimizer=math.ceil(_optimizer_bytes(config, model) / shards),
        communication=copies * parameters,
        activations=activations,
        recomputed=recomputed,
        loss_gradients=_loss_gradient_bytes(config, batch),
        loss_workspace=_loss_workspace_bytes(config, kernels, batch, device_type),
    )


def activation_bytes(config: Config, kernels: Kernels, batch: MicroBatch, model: LoopedLM) -> tuple[int, int]:
    """What autograd saves up to the features, and what checkpointing adds to it when a loop is computed again."""
    ledger = SavedTensors(config, kernels, batch.tokens)
    states = ledger.step(batch.depth)
    saved = ledger.total
    if config.training.checkpoint_loops:
        ledger.loop(states[-2], batch.depth)
    recomputed = ledger.total - saved
    if kernels.compute != FLOAT32:  # autocast saves its low-precision copy of every weight, once
        saved += kernels.compute * sum(map(multiplied_weights, (model.prelude, model.recurrence, model.coda)))
    return saved, recomputed


def _optimizer_bytes(config: Config, model: LoopedLM) -> int:
    matrices, others = (sum(p.numel() for p in part) for part in split_parameters(model))
    return FLOAT32 * ((1 if config.training.optimizer == "muon" else 2) * matrices + 2 * others)


def _loss_gradient_bytes(config: Config, batch: MicroBatch) -> int:
    """Gradients of features and head; thinned-out exits are a second call of the loss, with a V×d of its own."""
    calls = 2 if config.objective.exit_fraction < 1 and batch.readouts > 1 else 1
    return FLOAT32 * config.model.width * (batch.rows + calls * config.model.vocab_size)


def _loss_workspace_bytes(config: Config, kernels: Kernels, batch: MicroBatch, device_type: str) -> int:
    """Stacked features (an exit gate saves them anyway) and a chunk of logits; autocast copies both, and the head."""
    width, vocab_size = config.model.width, config.model.vocab_size
    chunk = int(_loss_chunk(config, batch, device_type).value) * vocab_size
    stacked = 0 if config.model.exit_gate else batch.readouts * batch.tokens * width
    copies = 0 if kernels.compute == FLOAT32 else kernels.compute * (width * (batch.rows + vocab_size) + chunk)
    return FLOAT32 * (stacked + chunk) + copies


def _loss_chunk(config: Config, batch: MicroBatch, device_type: str) -> Choice:
    return choose_chunk_rows(batch.rows, config.model.vocab_size, FLOAT32, device_type)


# --- time ------------------------------------------------------------------------------------------------------------


def measure_flops(device_type: str = "cpu", *, repeats: int = 5) -> float:
    """FLOP/s of one device: the best of several square matrix products, in the dtype that layers compute in."""
    size, dtype = (8192, torch.bfloat16) if device_type == "cuda" else (1024, torch.float32)
    try:
        matrix = torch.randn(size, size, dtype=dtype, device=device_type)
    except (AssertionError, RuntimeError) as error:
        why = f"there is no {device_type} device here to measure; give the FLOP/s of one"
        raise ConfigError.of("flops_per_second", None, why) from error
    best = min(_seconds_of_product(matrix) for _ in range(repeats + 1))
    return 2 * size**3 / best


def _seconds_of_product(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    (matrix @ matrix)[0, 0].item()  # reading a number waits for the device
    return time.perf_counter() - start


def choose_utilisation(device_type: str) -> Choice:
    """Share of a large matrix product's FLOP/s that a training step is assumed to reach."""
    if device_type == "cpu":
        return Choice("utilisation", 0.7, "assumed: CPUs spend most of a step in matrix products")
    return Choice("utilisation", 0.4, "assumed: on GPUs norms, attention and launches wait for memory; measure yours")


def choose_speed(device_type: str, flops_per_second: float | None) -> Choice:
    """FLOP/s of one device: as given, or measured here."""
    if flops_per_second is None:
        measured = measure_flops(device_type)
        return Choice("flops_per_second", measured, f"measured: best of several square products on this {device_type}")
    if not (flops_per_second > 0 and math.isfinite(flops_per_second)):
        raise ConfigError.of("flops_per_second", flops_per_second, "must be a finite number above 0")
    return Choice("flops_per_second", flops_per_second, "given")


def choose_precision(device_type: str) -> Choice:
    """What memory is counted in."""
    if kernels_of(device_type).compute == FLOAT32:
        return Choice("precision", "float32", f"no autocast on {device_type}")
    return Choice("precision", "bfloat16", "autocast: layers in bf16; weights, gradients and residual stream float32")


# --- the plan --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingPlan:
    """What a run costs; `to_dict` is its JSON, documented in docs/plan.md."""

    parameters: dict[str, int]
    passes: Passes
    flops_per_token: TokenFlops
    memory: Memory
    devices: int
    shard: str
    micro_batch: MicroBatch
    tokens: int
    """Tokens of the run."""
    flops_per_second: float
    """Of one device, before utilisation."""
    utilisation: float
    choices: tuple[Choice, ...]

    @property
    def flops(self) -> float:
        """FLOPs of the whole run."""
        return self.flops_per_token.total * self.tokens

    @property
    def tokens_per_second(self) -> float:
        """Of all devices together, if none waits for another."""
        return self.devices * self.flops_per_second * self.utilisation / self.flops_per_token.total

    @property
    def seconds(self) -> float:
        """Wall time of the run; evaluation and checkpoints come on top."""
        return self.tokens / self.tokens_per_second

    def devices_for(self, seconds: float) -> int:
        """Fewest devices that finish the run in this time, if none waits for another."""
        if not seconds > 0:
            raise ConfigError.of("seconds", seconds, "must be above 0")
        return math.ceil(self.flops / (self.flops_per_second * self.utilisation * seconds))

    def to_dict(self) -> dict[str, Any]:
        """All numbers, the derived ones included, as plain JSON values."""
        plan = dataclasses.asdict(self)
        plan["choices"] = list(plan["choices"])
        for name in ("flops_per_token", "memory"):
            plan[name]["total"] = getattr(self, name).total
        derived = {name: getattr(self, name) for name in ("flops", "tokens_per_second", "seconds")}
        return {**plan, **derived, "total_parameters": sum(self.parameters.values())}


def plan_training(
    config: Config,
    *,
    devices: int = 1,
    flops_per_second: float | None = None,
    tokens: int | None = None,
    device_type: str = "cpu",
) -> TrainingPlan:
    """The cost of training `config` on some devices; FLOP/s are measured here unless given.

    `tokens` replaces the configuration's own budget of steps × batch × sequence_length.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError.of("tokens", tokens, "must be at least 1")
    model, batch = build(config.model, device="meta"), largest_micro_batch(config, devices)
    speed, utilisation = choose_speed(device_type, flops_per_second), choose_utilisation(device_type)
    return TrainingPlan(
        parameters=parameters_by_part(model),
        passes=expected_passes(config),
        flops_per_token=flops_per_token(config, model),
        memory=plan_memory(config, devices=devices, device_type=device_type, model=model),
        devices=devices,
        shard=config.training.shard,
        micro_batch=batch,
        tokens=tokens or config.training.steps * config.training.batch * config.sequence_length,
        flops_per_second=float(speed.value),
        utilisation=float(utilisation.value),
        choices=(speed, utilisation, choose_precision(device_type), _loss_chunk(config, batch, device_type)),
    )
