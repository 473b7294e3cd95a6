"""FLOPs and saved bytes of a training step, counted on the real modules, which run without numbers.

The model is built and stepped on torch's meta device, where a tensor has a shape and no storage. So nothing describes
the model a second time: a new layer, injection, readout or loss term is counted because it is run.

    bytes     every storage that autograd saves on the way to the loss, once (saved-tensor hooks)
    FLOPs     2·m·n·k of every matrix product, and as much again for each factor that gets a gradient; of attention
              4·C·(T + 1)/2 per head and query forward, and 2.5 times that backward, where scores are computed again

What a kernel saves depends on the device, and no device is there: `Kernels` says which operations to run in its place.
The cross-entropy is not run: the fused one holds one chunk of logits at a time and is counted by `plan`. Routing that
depends on data cannot be followed without any: a part that routes deals evenly where its input is on the meta device.

Everything is counted for eager execution; a compiler may save less. Legend: B batch, T tokens, H heads, C head width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from loopscope.config import Config
from loopscope.errors import ConfigError
from loopscope.model.kernels import fused_rms_norm, hand_written_everywhere
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.objectives.cross_entropy import ReadoutLoss
from loopscope.objectives.placement import Objective
from loopscope.protocol import LoopState

MOST_TOKENS = 2**40
"""Of a step that is counted: with more, sizes of tensors no longer fit into 64 bits."""
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

ATTENTION = "attention"
LOSS = "head"
"""Where products count that no module makes: those of the objective, which are the head's."""


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


Flops = defaultdict[str, float]
"""By part."""


@dataclass
class Counted:
    """What one training step of some loops takes."""

    saved: int = 0
    """Bytes that autograd saves on the way to the loss, the fused loss itself left out."""
    recomputed: int = 0
    """Under checkpointing: bytes that one loop saves when it is run again."""
    forward: Flops = field(default_factory=lambda: Flops(float))
    """FLOPs forward by part; attention is a part of its own."""
    backward: Flops = field(default_factory=lambda: Flops(float))
    again: Flops = field(default_factory=lambda: Flops(float))
    """FLOPs forward of checkpointed loops, which run once more."""
    loss_calls: list[tuple[int, bool]] = field(default_factory=list)
    """Rows that the head multiplies, and whether their weights are learned, for each call of the fused loss."""
    prelude_reached: bool = True
    """Whether a gradient reaches the embedded input."""

    def flops(self, part: str) -> float:
        """Of one part, forward, backward and recomputed."""
        return self.forward[part] + self.backward[part] + self.again[part]

    def further(self, following: Counted, loops: int) -> Counted:
        """This step with `loops` more, each of which takes what `following`, a step of one more, takes beyond it."""

        def on(here: float, there: float) -> float:
            return here + loops * (there - here)

        def flops(here: Flops, there: Flops) -> Flops:
            return Flops(float, {part: on(here[part], there[part]) for part in {*here, *there}})

        calls = zip(self.loss_calls, following.loss_calls, strict=True)
        return Counted(
            saved=int(on(self.saved, following.saved)),
            recomputed=int(on(self.recomputed, following.recomputed)),
            forward=flops(self.forward, following.forward),
            backward=flops(self.backward, following.backward),
            again=flops(self.again, following.again),
            loss_calls=[(int(on(rows, more)), learned) for (rows, learned), (more, _) in calls],
            prelude_reached=following.prelude_reached,
        )


def count_step(config: Config, *, depth: int, sequences: int, kernels: Kernels) -> Counted:
    """Run one training step of `depth` loops without numbers, and count what it takes."""
    if sequences * config.sequence_length > MOST_TOKENS:
        raise ConfigError.of("batch", config.training.batch, f"a step of more than {MOST_TOKENS:,} tokens fits nowhere")
    model = build(config.design("a plan"), device="meta").train()
    counted, recompute = Counted(), config.training.checkpoint_loops
    objective = Objective(config.objective, recompute=recompute)
    objective.cross_entropy = _FusedLoss(counted)
    ids_BT = torch.empty(sequences, config.sequence_length, dtype=torch.int64, device="meta")
    ledger, products = _Ledger(model), _Products(counted, kernels)
    with ExitStack() as running:
        running.enter_context(hand_written_everywhere(kernels.hand_written))
        running.enter_context(_parts_told(model, products))
        running.enter_context(torch.autograd.graph.saved_tensors_hooks(ledger.keep, lambda tensor: tensor))
        running.enter_context(products)
        result = objective(model, ids_BT, ids_BT, num_loops=depth)
        if recompute:  # checkpoint holds its arguments, which are not tensors but states, outside the hooks
            first = depth - min(config.objective.backprop_loops or depth, depth)
            pytree.tree_map_only(Tensor, ledger.keep, result.trace.states[first:-1])
        counted.saved = ledger.total
        if recompute:
            counted.again = Flops(float, {part: products.differentiated[part] for part in ("core", ATTENTION)})
            products.counts = False
            model.loop(result.trace.states[-2], depth)
            counted.recomputed = ledger.total - counted.saved
    counted.prelude_reached = _reaches(result.loss, result.trace.states[0])
    if not counted.prelude_reached:
        counted.backward["prelude"] = 0
        counted.backward[ATTENTION] -= products.attention_backward["prelude"]
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
    """Stands in for the fused cross-entropy: remembers its rows, and hands a gradient on without saving anything."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted

    def __call__(
        self, features_KND: Tensor, head_VD: Tensor, targets_N: Tensor, *, loop_weights: Tensor, **_: Any
    ) -> ReadoutLoss:
        loops, tokens = features_KND.shape[:2]
        rows, learned = loops * tokens, loop_weights.requires_grad
        self.counted.loss_calls.append((rows, learned))
        self.counted.forward[LOSS] += 2 * rows * head_VD.numel()
        self.counted.backward[LOSS] += 4 * rows * head_VD.numel()
        loss = features_KND.sum() + head_VD.sum() + (loop_weights.sum() if learned else 0)
        ce_KN = features_KND.new_empty(loops, tokens, dtype=torch.float32)
        return ReadoutLoss(loss, ce_KN, ce_KN.mean(-1), ce_KN)


class _Products(TorchFunctionMode):
    """Counts matrix products and attention by part, and runs what `kernels` would run in place of what is not here."""

    def __init__(self, counted: Counted, kernels: Kernels) -> None:
        super().__init__()
        self.counted, self.kernels, self.counts = counted, kernels, True
        self.modules: list[tuple[str, bool]] = []
        """Part and grad mode of every module that is being run; a hand-written gradient hides both."""
        self.differentiated = Flops(float)
        """FLOPs forward that autograd follows, by part."""
        self.attention_backward = Flops(float)
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
        if func not in _FACTORS:
            return func(*args, **kwargs)
        left, right = _FACTORS[func](args, kwargs)
        if self.kernels.autocast:
            left, right = self.lower(left), self.lower(right)
            args = (left, right, *args[2:])
            kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "weight", "other")}
        out: Tensor = func(*args, **kwargs)
        shared = left.shape[-1]
        self.add(2 * out.numel() * shared, left, right)
        return out

    def add(self, forward: float, *factors: Tensor) -> None:
        """A product's FLOPs; inside a hand-written gradient, which hides them, all factors are taken to need one."""
        part, followed = self.modules[-1] if self.modules else (LOSS, torch.is_grad_enabled())
        hidden = followed and not torch.is_grad_enabled()
        needing = len(factors) if hidden else sum(factor.requires_grad for factor in factors) if followed else 0
        if self.counts:
            self.counted.forward[part] += forward
            self.counted.backward[part] += needing * forward
            self.differentiated[part] += forward if needing else 0

    def lower(self, tensor: Tensor) -> Tensor:
        """In bf16, as autocast does it: the copy of a weight is made once."""
        if tensor.dtype != torch.float32:
            return tensor
        if not tensor.is_leaf or not tensor.requires_grad:
            return tensor.to(torch.bfloat16)
        if id(tensor) not in self.lowered:
            self.lowered[id(tensor)] = tensor.to(torch.bfloat16)
        return self.lowered[id(tensor)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Flash attention's account: a causal token sees (T + 1)/2 keys on average."""
        if self.kernels.autocast:
            q, k, v = self.lower(q), self.lower(k), self.lower(v)
        tokens, keys = q.shape[-2], k.shape[-2]
        seen = (tokens + 1) / 2 if options.get("is_causal") else keys
        forward = 2 * q.shape[:-1].numel() * seen * (q.shape[-1] + v.shape[-1])
        part, followed = self.modules[-1] if self.modules else (LOSS, torch.is_grad_enabled())
        if self.counts:
            self.counted.forward[ATTENTION] += forward
        if self.counts and followed:
            self.counted.backward[ATTENTION] += FLASH_BACKWARD * forward
            self.attention_backward[part] += FLASH_BACKWARD * forward
            self.differentiated[ATTENTION] += forward if part == "core" else 0
        return _FlashAttention.apply(q, k, v)

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


def _two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The factors of a product, however they are handed over."""
    left, right, *_ = (*args, *(kwargs[name] for name in ("input", "other", "weight", "mat2") if name in kwargs))
    return left, right


_FACTORS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor, Tensor]]] = dict.fromkeys(
    (F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
    _two,
)
"""Operations that multiply matrices, the shared dimension last in the first factor."""


class _FlashAttention(torch.autograd.Function):
    """Keeps q, k, v, the output, which is laid out like q, and the log-sum-exp of every query."""

    @staticmethod
    def forward(ctx: Any, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor) -> Tensor:
        out_BHTC = torch.empty_like(q_BHTC)
        ctx.save_for_backward(
            q_BHTC, k_BGSC, v_BGSC, out_BHTC, q_BHTC.new_empty(q_BHTC.shape[:-1], dtype=torch.float32)
        )
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("a counted step has no backward pass")


@contextmanager
def _parts_told(model: LoopedLM, products: _Products) -> Iterator[None]:
    """Tell `products` which part is being run, and in which grad mode each module was entered.

    Matrices and norms inside a part are left alone: a hook would keep the hand-written gradients from running.
    """
    handles = []
    for name, module in model.named_modules():
        part = PARTS.get(name.split(".")[0])
        if part is not None and (name in PARTS or not isinstance(module, (nn.Linear, nn.RMSNorm, nn.LayerNorm))):

            def enter(module: nn.Module, inputs: Any, part: str = part) -> None:
                products.modules.append((part, torch.is_grad_enabled()))

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(lambda *_: products.modules.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reaches(loss: Tensor, start: LoopState) -> bool:
    """Whether the loss's graph leads back to what the first loop starts from, or to the input that loops read again."""
    wanted = {leaf.grad_fn for leaf in pytree.tree_leaves(start) if isinstance(leaf, Tensor)} - {None}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in wanted:
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False
