"""What a training step takes, counted on the real modules, which run without numbers.

The model is built and stepped, forward and backward, on torch's meta device, where a tensor has a shape and no storage.
So nothing describes the model a second time: a new layer, injection, readout or loss term is counted because it is run.

    FLOPs     what torch's FlopCounterMode counts; of attention 4·C·(T + 1)/2 per head and query forward, since a causal
              token sees (T + 1)/2 keys on average, and 2.5 times that backward, where scores are computed again
    bytes     every storage that autograd saves on the way to the loss, once (saved-tensor hooks)

What a kernel saves depends on the device, and no device is there: `Kernels` says which operations to run in its place.
The fused cross-entropy is not run: its three products are known, and `plan` counts what it holds. Routing that depends
on data cannot be followed without any: a part that routes deals evenly where its input is on the meta device.

Everything is counted for eager execution; a compiler may save less. Legend: B batch, T tokens, H heads, C head width.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from loopscope.config import MOST_LOOPS, Config
from loopscope.errors import ConfigError
from loopscope.model.feed_forward import MixtureOfExperts
from loopscope.model.kernels import fused_rms_norm, hand_written_everywhere
from loopscope.model.looped_lm import LoopedLM, build, count_parameters
from loopscope.objectives.cross_entropy import ReadoutLoss
from loopscope.objectives.placement import Objective, num_readouts, sample_depth
from loopscope.results.plan import Passes, TokenFlops

MOST_TOKENS = 2**40
"""Of a step that is counted: with more, sizes of tensors no longer fit into 64 bits."""
SAMPLED_STEPS = 4096
"""Sampled depths are averaged over the run's own first steps, at most so many."""
FLOAT32 = 4
"""Bytes of a number in parameters, gradients, optimiser state, the residual stream and every statistic."""
FLASH_BACKWARD = 2.5
"""Cost of attention's backward pass over its forward: five products against two."""

PARTS = {
    "embedding": "embedding",
    "positions": "positions",
    "prelude": "prelude",
    "prelude_norm": "prelude",
    "recurrence": "core",
    "coda_norm": "coda",
    "coda_map": "coda",
    "coda": "coda",
    "readout_map": "readout",
    "unembedding": "head",
    "exit_gate": "gate",
}
"""Module of the model → part of the plan."""
LOSS = "head"
"""Where products count that no module makes: those of the objective, which are the head's."""
ATTENTION = "attention"
"""Scores and values of all layers, a part of its own."""

# --- parameters ------------------------------------------------------------------------------------------------------


def parameters_by_part(model: LoopedLM) -> dict[str, int]:
    """Parameters of every part, 0 where it has none; shared ones are counted once (a tied head is the embedding)."""
    counts = count_parameters(model)
    parts = dict.fromkeys(PARTS.values(), 0)
    for module, part in PARTS.items():
        parts[part] += counts.get(module, 0)
    return parts


def active_parameters(model: LoopedLM) -> int:
    """Parameters that a token meets, loops counted once: all but those of the experts that it does not go to."""
    idle = sum(module.idle_parameters for module in model.modules() if isinstance(module, MixtureOfExperts))
    return sum(parameters_by_part(model).values()) - idle


# --- one step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """What of a device's kernels decides how much autograd saves."""

    autocast: bool
    """bf16 inside layers; weights, residual stream and norms stay float32."""
    fused_rmsnorm: bool
    """An RMSNorm saves its input and 1/s; a composite also saves h/s."""
    boolean_masks: bool
    """Dropout saves booleans; else its scaled factors."""
    hand_written: bool
    """Our own gradients run (`model.kernels`): float32 on CPUs."""


def kernels_of(device_type: str) -> Kernels:
    """CUDA trains in bf16 autocast with torch's kernels, CPUs in float32 with ours; elsewhere composites."""
    cuda, cpu = device_type == "cuda", device_type == "cpu"
    return Kernels(autocast=cuda, fused_rmsnorm=cuda, boolean_masks=cuda, hand_written=cpu)


@dataclass
class Counted:
    """What one training step of some loops takes."""

    saved: int = 0
    """Bytes that autograd saves on the way to the loss, the fused loss itself left out."""
    recomputed: int = 0
    """Under checkpointing: bytes that one loop saves when it is run again."""
    loss_gradients: int = 0
    """Bytes that the fused loss saves: gradients of features and head in every call, and of weights that learn."""
    flops: Counter[str] = field(default_factory=Counter)
    """By part, forward, backward and what checkpointing runs again."""
    prelude_reached: bool = True
    """Whether a gradient reaches the embedded input."""

    def further(self, following: Counted, loops: int) -> Counted:
        """This step with `loops` more, each of which takes what `following`, a step of one more, takes beyond it."""

        def on(here: int, there: int) -> int:
            return here + loops * (there - here)

        return dataclasses.replace(
            following,
            saved=on(self.saved, following.saved),
            recomputed=on(self.recomputed, following.recomputed),
            loss_gradients=on(self.loss_gradients, following.loss_gradients),
            flops=Counter({part: on(self.flops[part], following.flops[part]) for part in following.flops}),
        )


def count_step(config: Config, *, depth: int, sequences: int, kernels: Kernels, flops: bool = True) -> Counted:
    """Run one training step of `depth` loops and count what it takes: without FLOPs in a sixth of the time."""
    if sequences * config.sequence_length > MOST_TOKENS:
        raise ConfigError.of("batch", config.training.batch, f"a step of more than {MOST_TOKENS:,} tokens fits nowhere")
    model = build(config.design("a plan"), device="meta").train()
    recompute = config.training.checkpoint_loops
    objective = Objective(config.objective, recompute=recompute)
    loss = objective.cross_entropy = _FusedLoss()
    ids_BT = torch.empty(sequences, config.sequence_length, dtype=torch.int64, device="meta")
    counted, ledger, parts = Counted(), _Ledger(model), _Parts()
    saving = torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda tensor: tensor)
    with hand_written_everywhere(kernels.hand_written), _RunAs(kernels):
        with parts.told_by(model) if flops else nullcontext():
            with saving:
                result = objective(model, ids_BT, ids_BT, num_loops=depth)
            if flops:
                parts.mark(result.loss, LOSS)
                # Not by `backward`: inside it torch switches function modes off, and checkpointed loops run there.
                start = (torch.ones_like(result.loss),)
                _engine_run_backward(
                    (result.loss,), start, False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        if recompute:  # checkpoint holds its arguments, which are not tensors but states, outside the hooks
            first = depth - min(config.objective.backprop_loops or depth, depth)
            pytree.tree_map_only(Tensor, ledger.keep, result.trace.states[first:-1])
        counted.saved = ledger.total
        if recompute:
            with saving:
                model.loop(result.trace.states[-2], depth)
            counted.recomputed = ledger.total - counted.saved
    counted.flops, counted.loss_gradients = parts.flops, loss.saved
    counted.flops[LOSS] += loss.flops
    counted.prelude_reached = "embedding" in parts.reached
    return counted


class _Ledger:
    """Storages that autograd saves, each once; parameters are there anyway."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[int, int] = {}
        self.alive: list[Tensor] = []  # the address of a freed storage could be given out again
        self.parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(self, tensor: Tensor) -> Tensor:
        """Enter the storage of a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.parameters and storage._cdata not in self.bytes:
            self.bytes[storage._cdata] = storage.nbytes()
            self.alive.append(tensor)
        return tensor

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return sum(self.bytes.values())


class _FusedLoss:
    """Stands in for the fused cross-entropy: counts what it would take, and hands a gradient on without saving any."""

    def __init__(self) -> None:
        self.flops, self.saved = 0, 0

    def __call__(
        self, features_KND: Tensor, head_VD: Tensor, targets_N: Tensor, *, loop_weights: Tensor, **_: Any
    ) -> ReadoutLoss:
        loops, tokens = features_KND.shape[:2]
        rows, learned = loops * tokens, loop_weights.requires_grad
        self.flops += 3 * 2 * rows * head_VD.numel()  # logits, and the gradients of features and head
        self.saved += FLOAT32 * (features_KND.numel() + head_VD.numel() + rows * learned)
        loss = features_KND.sum() + head_VD.sum() + (loop_weights.sum() if learned else 0)
        ce_KN = features_KND.new_empty(loops, tokens, dtype=torch.float32)
        return ReadoutLoss(loss, ce_KN, ce_KN.mean(-1), ce_KN)


class _Parts:
    """FLOPs by part of the model: forward its modules tell which one runs, backward the nodes that it made."""

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False, custom_mapping=_CAUSAL_ATTENTION)
        self.flops = Counter[str]()
        self.running, self.told = LOSS, 0
        self.owner: dict[Node, str] = {}
        self.reached: set[str] = set()
        """Parts that a gradient has come to."""

    @contextmanager
    def told_by(self, model: LoopedLM) -> Iterator[None]:
        """Count while the block runs."""
        handles = []
        for name, module in model.named_modules():
            # Children too, since a loop's start calls some. Not what is inside layers: a hook there would keep the
            # hand-written gradients from running.
            part = PARTS.get(name.split(".")[0])
            if part is None or name.count(".") > 1:
                continue
            before: list[str] = []

            def enter(module: nn.Module, inputs: Any, part: str = part, before: list[str] = before) -> None:
                before.append(self.running)
                self.run(part)

            def leave(
                module: nn.Module, inputs: Any, outputs: Any, part: str = part, before: list[str] = before
            ) -> None:
                self.mark(outputs, part)
                self.run(before.pop())

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        try:
            with self.counter:
                yield
                self.run("")
        finally:
            for handle in handles:
                handle.remove()

    def run(self, part: str) -> None:
        """What was counted since the last call was the running part's; from here on it is this one's."""
        if part == self.running:
            return
        counts = self.counter.flop_counts["Global"]
        self.flops[ATTENTION] = sum(counts[operation] for operation in _CAUSAL_ATTENTION)
        products = sum(counts.values()) - self.flops[ATTENTION]
        self.flops[self.running] += products - self.told
        self.running, self.told = part, products

    def mark(self, outputs: Any, part: str) -> None:
        """Every node behind these outputs that is no other part's is this one's; a parameter's own node is nobody's."""
        waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        while waiting:
            node = waiting.pop()
            if node is None or node in self.owner or not node.next_functions:
                continue
            self.owner[node] = part
            node.register_prehook(lambda _: self.reach(part))
            waiting.extend(following for following, _ in node.next_functions)

    def reach(self, part: str) -> None:
        """A gradient comes to a node of this part."""
        self.reached.add(part)
        self.run(part)


def _seen(q: torch.Size, k: torch.Size, v: torch.Size, causal: bool) -> int:
    """FLOPs of attention forward: a causal token sees (T + 1)/2 keys on average."""
    pairs = q[-2] * (q[-2] + 1) // 2 if causal else q[-2] * k[-2]
    return 2 * q[:-2].numel() * pairs * (q[-1] + v[-1])


_CAUSAL_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, dropout=0.0, causal=False, **_: _seen(
        q, k, v, causal
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda d, q, k, v, o, lse, p, causal, **_: int(
        FLASH_BACKWARD * _seen(q, k, v, causal)
    ),
}
"""The counter's own formulas know no causal mask: they count T keys for every query."""

_PRODUCTS = frozenset(
    (F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm)
)
"""What autocast runs in bf16, besides attention."""


class _RunAs(TorchFunctionMode):
    """Runs what the kernels of a device would run in place of what is not here, so that autograd saves the same."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.lowered: dict[int, Tensor] = {}
        self.instead: dict[Callable[..., Any], Callable[..., Any]] = {
            F.scaled_dot_product_attention: self.attention,
            **dict.fromkeys((torch.rms_norm, F.rms_norm), self.rms_norm),
            F.layer_norm: self.layer_norm,
            F.dropout: self.dropout,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.instead:
            return self.instead[func](*args, **kwargs)
        if func in _PRODUCTS:
            args, kwargs = pytree.tree_map_only(Tensor, self.lower, (args, kwargs))
        return func(*args, **kwargs)

    def lower(self, tensor: Tensor) -> Tensor:
        """In bf16 where autocast has it so: the copy of a weight is made once."""
        if not self.kernels.autocast or tensor.dtype != torch.float32:
            return tensor
        if not tensor.is_leaf or not tensor.requires_grad:
            return tensor.to(torch.bfloat16)
        if id(tensor) not in self.lowered:
            self.lowered[id(tensor)] = tensor.to(torch.bfloat16)
        return self.lowered[id(tensor)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Flash attention, which keeps q, k, v, the output and the log-sum-exp of every query."""
        q, k, v = self.lower(q), self.lower(k), self.lower(v)
        causal = options.get("is_causal", False)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal)[0]

    def rms_norm(
        self, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None, **named: Any
    ) -> Tensor:
        """In float32 under autocast; fused it keeps x and 1/s."""
        weight, x = named.get("weight", weight), x.float() if self.kernels.autocast else x
        if self.kernels.fused_rmsnorm and weight is not None:
            return fused_rms_norm(x, weight, eps or 0.0)
        return torch.rms_norm(x, shape, weight, eps)

    def layer_norm(self, x: Tensor, *args: Any, **named: Any) -> Tensor:
        """In float32 under autocast."""
        return F.layer_norm(x.float() if self.kernels.autocast else x, *args, **named)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """With a mask of booleans, or of factors."""
        if self.kernels.boolean_masks and training and p:
            return torch.native_dropout(x, p, True)[0]
        return F.dropout(x, p, training)


# --- steps of any depth ----------------------------------------------------------------------------------------------

Means = TypeVar("Means", Passes, TokenFlops)


def sampled_depths(config: Config) -> Counter[int]:
    """How many of the run's (first 4,096) steps have which depth: the very draws that the trainer will make."""
    steps = range(min(config.training.steps, SAMPLED_STEPS))
    seed, num_loops = config.training.seed, config.model.num_loops
    return Counter(sample_depth(config.objective, num_loops, seed=seed, step=step) for step in steps)


class CountedSteps:
    """Steps of any number of loops, of which only a few are counted, when they are asked for.

    From a few loops on (more than are back-propagated or supervised) each further one takes as much as the last, so a
    step of a thousand loops is as soon known as one of four.
    """

    def __init__(
        self, config: Config, *, sequences: int = 1, kernels: Kernels | None = None, flops: bool = True
    ) -> None:
        self.config, self.sequences, self.kernels, self.flops = config, sequences, kernels or kernels_of("cpu"), flops
        objective = config.objective
        self.regular = 1 + max(objective.backprop_loops or 1, objective.last_n or 1)
        if objective.placement in ("weighted", "distilled"):  # loops of weight 0 are not read; exits are drawn
            self.regular = MOST_LOOPS
        self.counted: dict[int, Counted] = {}

    def at(self, depth: int) -> Counted:
        """A step of `depth` loops."""
        if depth > self.regular + 1:
            return self.at(self.regular).further(self.at(self.regular + 1), depth - self.regular)
        if depth not in self.counted:
            config = self.config
            if config.objective.depth == "fixed":  # a design may hold weights for each loop
                config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_loops=depth))
            self.counted[depth] = count_step(
                config, depth=depth, sequences=self.sequences, kernels=self.kernels, flops=self.flops
            )
        return self.counted[depth]

    def passes(self) -> Passes:
        """Mean passes of a step, over the depths that the run samples."""

        def at(depth: int) -> Passes:
            objective = self.config.objective
            readouts = num_readouts(objective, depth)
            return Passes(
                loops=depth,
                backprop_loops=min(objective.backprop_loops or depth, depth),
                readouts=readouts,
                head_rows=1 + objective.exit_fraction * (readouts - 1),
                prelude_backward=float(self.at(depth).prelude_reached),
            )

        return self._mean(at, Passes)

    def flops_per_token(self) -> TokenFlops:
        """C and its parts; the mean over the depths that the run samples."""
        tokens = self.sequences * self.config.sequence_length

        def at(depth: int) -> TokenFlops:
            flops = self.at(depth).flops
            return TokenFlops(
                prelude=flops["prelude"] / tokens,
                core=flops["core"] / tokens,
                coda=flops["coda"] / tokens,
                head=(flops[LOSS] + flops["gate"] + flops["readout"]) / tokens,
                attention=flops[ATTENTION] / tokens,
                total=flops.total() / tokens,
            )

        return self._mean(at, TokenFlops)

    def _mean(self, at: Callable[[int], Means], kind: type[Means]) -> Means:
        """The mean over the run's own depths, field by field."""
        depths = sampled_depths(self.config)
        values = [(at(depth), count / depths.total()) for depth, count in depths.items()]
        names = [each.name for each in dataclasses.fields(kind)]
        return kind(**{name: sum(getattr(value, name) * share for value, share in values) for name in names})
