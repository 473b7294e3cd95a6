"""What autograd saves in a training step: a ledger of tensors, derived from shapes and never measured.

Everything is counted for eager execution; a compiler may save less.

Legend: T tokens of a sequence, V vocabulary, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from loopscope.config import Config
from loopscope.model.layers import VALUE_GATE_CHANNELS, PreNorm, make_placement
from loopscope.objectives.placement import supervised_loops
from loopscope.objectives.terms import terms_of
from loopscope.training.flops import passes_at

FLOAT32 = 4
"""Bytes of a number in parameters, gradients, optimiser state, the residual stream and every statistic."""

GATE_SCALARS = 7
"""Numbers per row that the exit distribution and its entropy save."""


@dataclass(frozen=True)
class Kernels:
    """What of a device's kernels decides how much autograd saves."""

    compute: int
    """Bytes of a number inside layers: 2 under bf16 autocast, else 4."""
    mask: int
    """Bytes of a dropout mask's entry: the CPU keeps the scaled factors, GPUs a boolean."""
    fused_rmsnorm: bool
    """GPUs, and our own norm in float32 on CPUs, save an RMSNorm's input and 1/s only; a composite also saves h/s."""
    own_kernels: bool
    """Float32 on CPUs: a matrix makes its normed or SwiGLU input again; the norm keeps its input's layout."""


def kernels_of(device_type: str) -> Kernels:
    """CUDA trains in bf16 autocast with torch's kernels, CPUs in float32 with ours; elsewhere composites."""
    if device_type == "cuda":
        return Kernels(compute=2, mask=1, fused_rmsnorm=True, own_kernels=False)
    ours = device_type == "cpu"
    return Kernels(compute=FLOAT32, mask=FLOAT32, fused_rmsnorm=ours, own_kernels=ours)


class SavedTensors:
    """A ledger of the tensors that autograd saves in one forward pass, as name → bytes.

    A name is a storage: a tensor saved by two operations (a state by the next loop's norm and by its readout) counts
    once. Methods follow the model's own modules and return the name of what they compute; a tensor enters the ledger
    only when an operation saves it, so one that nobody saves (a residual sum before an addition) costs nothing.
    """

    def __init__(self, config: Config, kernels: Kernels, tokens: int) -> None:
        self.config, self.model, self.kernels, self.tokens = config, config.design("a plan"), kernels, tokens
        self.bytes: dict[str, int] = {}
        self.detached: set[str] = set()
        self.with_value_embedding = False  # of the layer that is being entered
        with torch.device("meta"):  # asked for what they save, never run
            self.attention_norms = make_placement(self.model, "attention")
            self.feed_forward_norms = make_placement(self.model, "feed_forward")

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
        if self.config.objective.placement == "gated":  # otherwise a gate that the model has is not asked
            self.exit_gate(len(supervised))
        self.terms([state for state in states[1:] if state not in self.detached])
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
            self.keep("rotary", FLOAT32 * 2 * self.model.head_channels)
        self.input = self.stack("prelude", "prelude", "embed.out", self.model.prelude_layers)
        if self.model.prelude_norm != "none":
            self.norm("prelude_norm", self.input, self.model.prelude_norm)
            self.input = "prelude_norm.out"
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
        if self.model.spectral_damping and k > 1:
            self.keep_state(h)
            h = f"loop{k}.damped"
        if self.model.injection != "none":
            h = self.inject(f"loop{k}.injection", h)
        if self.model.loop_embedding:
            h = f"loop{k}.marked"
        return self.stack("core", f"loop{k}", h, self.model.num_layers)

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

    def stack(self, part: str, run: str, x: str, num_layers: int) -> str:
        """One run of a part's layers, two residual branches each; how a branch joins the stream, its placement says."""
        for index in range(num_layers):
            self.with_value_embedding = self.model.has_value_embedding(self.model.first_layer(part) + index)
            for branch, save, norms in (
                ("attention", self.attention, self.attention_norms),
                ("feed_forward", self.feed_forward, self.feed_forward_norms),
            ):
                name = f"{run}.{index}.{branch}"
                save(name, x, norms)
                self.dropout(name, self.kernels.compute)
                norms.saves(self, name, x)
                x = f"{name}.out"
        return x

    def norm(self, name: str, x: str, kind: str | None = None, width: int | None = None) -> None:
        """LayerNorm saves input, mean and 1/σ; RMSNorm input and 1/s, and on CPUs h/s for its gain's gradient.

        Kind and width are those of the norms inside the layers, unless given.
        """
        kind, size = kind or self.model.norm, FLOAT32 * (width or self.model.width)
        composite = kind == "rmsnorm" and not self.kernels.fused_rmsnorm
        if composite:
            self.keep(f"{name}.normalised", size)
        # The composite differentiates s only where the input needs it; fused kernels save their input always.
        if not composite or x not in self.detached:
            self.keep(x, size)
            self.keep(f"{name}.statistics", FLOAT32 * (2 if kind == "layernorm" else 1))

    def matrix(self, name: str, x: str, before: nn.Module | None, width: int, number: int) -> None:
        """A matrix that reads `before`(x): its input, unless it is made again in backward, and what `before` saves.

        `number` is the bytes of a number of x: float32 in the stream, `compute` inside a branch, which norms lift.
        """
        if isinstance(before, (nn.RMSNorm, nn.LayerNorm)):
            kind = "layernorm" if isinstance(before, nn.LayerNorm) else "rmsnorm"
            self.norm(f"{name}.norm", x if number == FLOAT32 else f"{x}.lifted", kind, width)
            if self.kernels.own_kernels and kind == "rmsnorm":
                return
        elif before is not None or number == self.kernels.compute:
            self.keep(x, number * width)
        if before is not None or number != self.kernels.compute:
            self.keep(f"{name}.input", self.kernels.compute * width)

    def attention(self, name: str, x: str, norms: PreNorm) -> None:
        """Both matrices, gate, q, k, v (one storage), heads and log-sum-exp; new q and k where normed or rotated.

        A gate also saves its sigmoid and the heads that it multiplies.
        """
        model, compute = self.model, self.kernels.compute
        keys, wide = model.kv_width, model.attention_width
        gate = wide if model.attention_gate else 0
        self.matrix(name, x, norms.norm, model.width, FLOAT32)
        has_new_qk = model.positions == "rope" or model.qk_bias
        if not (self.with_value_embedding and has_new_qk and not gate) or (model.qk_norm and not model.qk_bias):
            self.keep(f"{name}.qkv", compute * (gate + wide + 2 * keys))
        if self.with_value_embedding:
            self.value_embedding(name, x, norms)
        self.keep(heads := f"{name}.heads", compute * wide)
        self.keep(f"{name}.logsumexp", FLOAT32 * model.num_heads)
        if model.qk_norm:
            self.qk_norm(name, wide + keys)
        if has_new_qk or model.qk_norm:
            self.keep(f"{name}.qk", compute * (wide + keys))
        if model.qk_norm:
            # SDPA lays its output out like q, which is contiguous by heads now: merging the heads copies it.
            heads = f"{name}.merged"
        if model.positions == "rope" and compute != FLOAT32:
            self.keep(f"{name}.rotary", compute * 2 * model.head_channels)
        if gate:
            self.keep(heads, compute * wide)
            self.keep(f"{name}.gate", compute * wide)
            heads = f"{name}.gated"
        self.matrix(f"{name}.last", heads, norms.inner, wide, compute)

    def qk_norm(self, name: str, size: int) -> None:
        """RMSNorm per head: its input is a view of qkv, unless a bias makes it new or autocast lifts it to float32.

        h/s is kept for the gradient of the gain, where there is one.
        """
        self.keep(f"{name}.qk_statistics", FLOAT32 * (self.model.num_heads + self.model.kv_heads))
        if self.model.qk_norm_gain and not self.kernels.fused_rmsnorm:
            self.keep(f"{name}.qk_normalised", FLOAT32 * size)
        if self.kernels.compute != FLOAT32 or self.model.qk_bias:
            self.keep(f"{name}.qk_lifted", FLOAT32 * size)

    def value_embedding(self, name: str, x: str, norms: PreNorm) -> None:
        """The gate's input, its sigmoid twice (once doubled), the rows of the table, and the values they are added to.

        The gate reads norm(x), which is computed for it once more.
        """
        model, compute = self.model, self.kernels.compute
        if norms.norm is not None:
            self.norm(f"{name}.value_norm", x)
        self.keep(f"{name}.value_gate_input", compute * min(VALUE_GATE_CHANNELS, model.width))
        self.keep(f"{name}.value_gate", 2 * compute * model.kv_heads)
        self.keep(f"{name}.value_rows", FLOAT32 * model.kv_width)
        self.keep(f"{name}.values", FLOAT32 * model.kv_width)

    def feed_forward(self, name: str, x: str, norms: PreNorm) -> None:
        """Both matrices and what the activation saves; SwiGLU: gate, value and silu(gate)."""
        compute, hidden = self.kernels.compute, self.model.mlp_hidden
        self.matrix(name, x, norms.norm, self.model.width, FLOAT32)
        if self.model.mlp == "swiglu" and norms.inner is None and self.kernels.own_kernels:
            self.keep(f"{name}.hidden", compute * 2 * hidden)  # gate and value: the rest is made again in backward
            return
        self.keep(f"{name}.hidden", compute * hidden * (3 if self.model.mlp == "swiglu" else 1))
        self.matrix(f"{name}.last", f"{name}.activated", norms.inner, hidden, compute)

    def dropout(self, name: str, input_bytes: int) -> None:
        """The mask; CPUs keep it in the dtype of the input."""
        if self.model.dropout:
            self.keep(f"{name}.mask", min(self.kernels.mask, input_bytes) * self.model.width)

    def readout(self, h: str, k: int) -> None:
        """Coda and readout of loop k; `alpha` and `taper` save the state and a few numbers per token."""
        if self.model.coda_norm != "none":
            self.norm(f"coda{k}.norm", h, self.model.coda_norm)
            h = f"coda{k}.normed"
        if self.model.coda_map:
            self.matrix(f"coda{k}.map", h, None, self.model.width, FLOAT32)
            h = f"coda{k}.mapped"
        h = self.stack("coda", f"coda{k}", h, self.model.coda_layers)
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

    def terms(self, states: list[str]) -> None:
        """What the other terms of the loss keep, as each of them says."""
        for term in terms_of(self.config.objective):
            for state in states:
                if term.keeps_states:
                    self.keep_state(state)
                if term.kept_scalars:
                    self.keep(f"{state}.{term.name}", FLOAT32 * term.kept_scalars)
