"""Ouro checkpoints (model_type "ouro") as our own looped model.

    h_k = layers(norm(h_{k-1}))        norm opens every loop but the first
    logits_k = lm_head(norm(h_k))      λ_k = σ(early_exit_gate(norm(h_k)))

Published code closes each loop with `model.norm`, which then feeds the next loop, the gate and the head. In the
canonical cut h_k is the state before it, so one norm is both our inter-loop norm and our readout's, and it takes the
scale out of the loop. How the weights were trained, no file says: with cross-entropy at every loop, weighted by the
exit gate.
"""

from __future__ import annotations

from dataclasses import replace

from loopscope.adapters.foreign import Fields, Foreign, Layout, layers, llama_design, llama_layer, outside
from loopscope.config import Config, ModelConfig
from loopscope.presets import preset

DESIGN = "ouro-1.4b"
"""The preset whose design all sizes share."""
EMBEDDING = "model.embed_tokens.weight"


def described(fields: Fields) -> Foreign:
    """The model that config.json describes, without weights."""
    config = config_of(fields)
    model = config.design("an adapter")
    return Foreign.of_design(model, config.objective, layout(model), embedding=EMBEDDING)


def config_of(fields: Fields) -> Config:
    """An Ouro config.json in our words; what would change the forward pass into one we do not have is refused."""
    fields.check_plain_transformer()
    if fields.flag("use_sliding_window"):
        raise fields.unsupported("use_sliding_window", "only false is")
    fields.check_full_attention()
    num_heads = fields.whole("num_attention_heads")
    if num_heads % fields.whole("num_key_value_heads"):
        raise fields.unsupported("num_key_value_heads", f"it does not divide num_attention_heads = {num_heads}")
    if fields.whole("total_ut_steps") < 2:
        raise fields.unsupported("total_ut_steps", "a single loop carries nothing on")
    design = preset(DESIGN)
    model = llama_design(
        fields,
        design.design("an adapter"),
        num_layers=fields.whole("num_hidden_layers"),
        num_loops=fields.whole("total_ut_steps"),
        num_kv_heads=fields.whole("num_key_value_heads"),
    )
    return replace(design, model=model)


def layout(config: ModelConfig) -> Layout:
    """Where every tensor of a checkpoint goes."""
    width = config.width
    layer = llama_layer(config) | {
        "attention_norms.branch_norm.weight": {"input_layernorm_2.weight": (width,)},
        "feed_forward_norms.branch_norm.weight": {"post_attention_layernorm_2.weight": (width,)},
    }
    gate: Layout = {
        "exit_gate.weight": {"model.early_exit_gate.weight": (1, width)},
        "exit_gate.bias": {"model.early_exit_gate.bias": (1,)},
    }
    places = [(f"recurrence.core.layers.{index}", f"model.layers.{index}") for index in range(config.num_layers)]
    return outside(config, EMBEDDING, "model.norm.weight") | gate | layers(layer, places)
