"""Checkpoints of the paper's own models (arXiv 2606.24898) as our own looped model.

    h_0 = token_embedding[ids] + position_embedding
    h_k = layers(h_{k−1}), pre-norm                 or layers(loop_norm(h_{k−1})) from the second loop on
    logits_k = token_embedding·decode_norm(h_k)     or of h_k itself: raw

The originals are pickles, which `loopscope convert` turns into a folder that this module reads: `model.safetensors`
with the original names, and a `config.json` of our making, whose fields are named as in `ModelConfig`. Files have a
`loop_norm` also where no loop applies it; `inter_loop_norm` says which.
"""

from __future__ import annotations

from typing import Any

from loopscope.adapters.foreign import Fields, Foreign, Layout, layers
from loopscope.config import ModelConfig, ObjectiveConfig

MODEL_TYPE = "paper_looped_lm"
EMBEDDING = "token_embedding.weight"
LOOP_NORM = "loop_norm.weight"
READOUTS = ("rmsnorm", "raw", "final-only")
PLACEMENTS = ("terminal", "per-loop", "gated")


def described(fields: Fields) -> Foreign:
    """The model that config.json describes, without weights."""
    model = design_of(fields)
    placement: Any = fields.one_of("placement", PLACEMENTS)
    if placement == "gated" and not model.exit_gate:
        raise fields.unsupported("placement", "it needs exit_gate")
    return Foreign.of_design(
        model,
        ObjectiveConfig(placement=placement),
        layout(model),
        embedding=EMBEDDING,
        unused=() if model.inter_loop_norm != "none" else (LOOP_NORM,),
    )


def design_of(fields: Fields) -> ModelConfig:
    """Such a config.json as a configuration."""
    readout: Any = fields.one_of("readout", READOUTS)
    with fields.building():
        return ModelConfig(
            vocab_size=fields.whole("vocab_size"),
            width=fields.whole("width"),
            num_layers=fields.whole("num_layers"),
            num_loops=fields.whole("num_loops"),
            num_heads=fields.whole("num_heads"),
            mlp_width=fields.whole("mlp_width"),
            max_length=fields.whole("max_length"),
            norm_eps=fields.number("norm_eps"),
            readout=readout,
            inter_loop_norm="rmsnorm" if fields.flag("inter_loop_norm") else "none",
            exit_gate=fields.flag("exit_gate"),
        )


def layout(config: ModelConfig) -> Layout:
    """Where every tensor of a checkpoint goes."""
    width = config.width
    table: Layout = {
        "embedding.weight": {EMBEDDING: (config.vocab_size, width)},
        "positions.weight": {"position_embedding.weight": (config.max_length, width)},
    }
    if config.inter_loop_norm != "none":
        table["recurrence.inter_loop_norm.weight"] = {LOOP_NORM: (width,)}
    if config.readout != "raw":
        table["readout_map.norm.weight"] = {"decode_norm.weight": (width,)}
    if config.exit_gate:
        table["exit_gate.weight"] = {"exit_gate.weight": (1, width)}
        table["exit_gate.bias"] = {"exit_gate.bias": (1,)}
    places = [(f"recurrence.core.layers.{index}", f"layers.{index}") for index in range(config.num_layers)]
    return table | layers(_layer(config), places)


def _layer(config: ModelConfig) -> Layout:
    """One layer: w1 is the gate, w3 what it multiplies."""
    width, hidden = config.width, config.mlp_hidden
    return {
        "attention_norms.norm.weight": {"attn_norm.weight": (width,)},
        "attention.qkv.weight": {"attn.qkv.weight": (3 * width, width)},
        "attention.out.weight": {"attn.out_proj.weight": (width, width)},
        "feed_forward_norms.norm.weight": {"ffn_norm.weight": (width,)},
        "feed_forward.up.weight": {"ffn.w1.weight": (hidden, width), "ffn.w3.weight": (hidden, width)},
        "feed_forward.out.weight": {"ffn.w2.weight": (width, hidden)},
    }
