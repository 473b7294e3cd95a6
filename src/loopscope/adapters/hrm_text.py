"""HRM-Text checkpoints (model_type "hrm_text") on our own layers: a loop is one high-level cycle.

    z_H ← norm(h_{k-1})                 opens every cycle but the first; h_0 is the scaled embedding
    z_L ← norm(L(z_L + z_H))            L_cycles times; z_L is carried beside h
    h_k = H(z_H + z_L)                  logits_k = lm_head(norm(h_k))

L and H are stacks of pre-norm layers with gated attention and rotary positions; no norm has a gain. h_k is the
high-level state before the norm that closes its stack (the canonical cut). Only the last cycle is supervised. The
published forward pass runs all but the last few low-level cycles (`L_bp_cycles`) under no_grad, in any mode; here every
cycle has its derivative, so what an audit calls carried is what the cycles do, not what training was shown of it.
Without token types the prefix language model is a causal one, and that is how it is run.

Shape legend: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from loopscope.adapters.foreign import FieldError, Fields, Foreign, Layout, llama_design
from loopscope.config import ModelConfig, ObjectiveConfig
from loopscope.model.attention import rotation
from loopscope.model.kernels import RMSNorm
from loopscope.model.looped_lm import check_ids
from loopscope.model.recurrence import Context, TwoStacks, between_loops
from loopscope.protocol import Cache, LinearReadout, Loop, LoopState, MixedDepths

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class HrmDesign:
    """An hrm_text config.json in our words."""

    model: ModelConfig
    """Of the layers, which both stacks share but for their weights; its loops are the high-level cycles."""
    low_cycles: int
    """Low-level cycles in each high-level one."""
    embedding_scale: float
    backprop_cycles: tuple[int, ...]
    """Low-level cycles of each high-level one that training back-propagates through, counted from its end."""


def described(fields: Fields) -> Foreign:
    """The model that config.json describes, without weights."""
    design = design_of(fields)
    branches = [f"{branch}_norms.norm.weight" for branch in ("attention", "feed_forward")]
    stacks = ("core.low", "core.high")
    layers = [f"{stack}.layers.{index}" for stack in stacks for index in range(design.model.num_layers)]
    gains = [f"{layer}.{branch}" for layer in layers for branch in branches]

    def empty() -> HrmText:
        with torch.device("meta"):
            return HrmText(design)

    return Foreign(
        make=empty,
        vocab_size=design.model.vocab_size,
        max_length=design.model.max_length,
        objective=ObjectiveConfig(placement="terminal"),
        layout=layout(design.model),
        given=dict.fromkeys(gains, torch.ones(design.model.width)),
        copies={"lm_head.weight": EMBEDDING} if design.model.tie_head else {},
        notes=(_note(design),),
    )


class HrmText(nn.Module, LinearReadout, MixedDepths):
    """A LoopedModel of two stacks, one inside the other's cycle."""

    def __init__(self, design: HrmDesign) -> None:
        super().__init__()
        config = design.model
        self.design = design
        self.num_loops = config.num_loops
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.low_start = nn.Parameter(torch.zeros(config.width), requires_grad=False)
        self.core = TwoStacks(config, design.low_cycles)
        self.unembedding = None if config.tie_head else nn.Linear(config.width, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.requires_grad_(False)  # published norms have no gain: ours stay at 1

    @property
    def head(self) -> Tensor:
        """W_VD."""
        return self.embedding.weight if self.unembedding is None else self.unembedding.weight

    def embed(self, ids_BT: Tensor, cache: Cache | None = None) -> LoopState:
        """z_H is the scaled embedding, z_L its fixed start."""
        config, tokens = self.design.model, ids_BT.shape[-1]
        positions_BT = torch.arange(tokens)[None] if cache is None else cache.positions(tokens)
        check_ids(ids_BT, positions_BT, config)
        e_BTD = self.embedding(ids_BT) * self.design.embedding_scale
        positions_BT = positions_BT.to(ids_BT.device).expand(ids_BT.shape)
        rotary = rotation(positions_BT, config.width // config.num_heads, config.rope_base)
        return LoopState(e_BTD, {"z_L": self.low_start.expand_as(e_BTD)}, context=Context(e_BTD, rotary))

    def loop(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        """One high-level cycle with its low-level ones, each of which has slots of its own."""
        high_BTD = between_loops(k, state.h_BTD, self.core.norm)
        h_BTD, low_BTD = self.core(high_BTD, state.carried["z_L"], state.context, cache, k)
        return replace(state, h_BTD=h_BTD, carried={"z_L": low_BTD})

    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """The norm that closes the high-level stack."""
        return self.core.norm(state.h_BTD)


def design_of(fields: Fields) -> HrmDesign:
    """What a config.json describes; what our layers do not have is refused."""
    fields.check_plain_transformer()
    if fields.get("attention_dropout") not in (None, 0):
        raise fields.unsupported("attention_dropout", "only 0 is")
    # Files tell the layers of a stack from those of all its runs since `num_hidden_layers` counts cache slots.
    layers = "num_hidden_layers" if fields.get("num_layers_per_stack") is None else "num_layers_per_stack"
    model = llama_design(
        fields, num_layers=fields.whole(layers), num_loops=fields.whole("H_cycles"), attention_gate=True
    )
    if fields.get("embedding_scale") is None:  # so the published class reads it
        scale = 1 / fields.number("initializer_range")
    else:
        scale = fields.number("embedding_scale")
    return HrmDesign(model, fields.whole("L_cycles"), scale, _backprop_cycles(fields, model.num_loops))


def layout(config: ModelConfig) -> Layout:
    """Where every tensor of a checkpoint goes; files stack gate, q, k and v, and gate and up, as we do."""
    width, hidden = config.width, config.mlp_hidden
    table: Layout = {
        "embedding.weight": {EMBEDDING: (config.vocab_size, width)},
        "low_start": {"model.z_L_init": (width,)},
    }
    if not config.tie_head:
        table["unembedding.weight"] = {"lm_head.weight": (config.vocab_size, width)}
    for ours, theirs in (("core.low", "L_module"), ("core.high", "H_module")):
        for index in range(config.num_layers):
            at, layer = f"{ours}.layers.{index}", f"model.{theirs}.layers.{index}"
            table |= {
                f"{at}.attention.qkv.weight": {f"{layer}.attn.gqkv_proj.weight": (4 * width, width)},
                f"{at}.attention.out.weight": {f"{layer}.attn.o_proj.weight": (width, width)},
                f"{at}.feed_forward.up.weight": {f"{layer}.mlp.gate_up_proj.weight": (2 * hidden, width)},
                f"{at}.feed_forward.out.weight": {f"{layer}.mlp.down_proj.weight": (width, hidden)},
            }
    return table


def _backprop_cycles(fields: Fields, num_loops: int) -> tuple[int, ...]:
    """`L_bp_cycles`, where absent [2]; the high-level cycles before those of the list have 1."""
    value = [2] if fields.get("L_bp_cycles") is None else fields.get("L_bp_cycles")
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise FieldError(f"{fields.path}: L_bp_cycles = {value!r} is not a list of whole numbers")
    return (*[1] * (num_loops - len(value)), *value)[:num_loops]


def _note(design: HrmDesign) -> str:
    return (
        f"of the {design.low_cycles} low-level cycles in each high-level one, training back-propagates through "
        f"the last {', '.join(map(str, design.backprop_cycles))}; the audit takes the derivative of all, in "
        "evaluation mode. z_L is carried beside h, and leaves every cycle through a norm"
    )
