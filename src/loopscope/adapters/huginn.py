"""Huginn checkpoints (model_type "huginn_raven", arXiv 2502.05171) as our own looped model.

    e = prelude(√d·wte[ids])                    h_0 a normal of std √(2/5), cut at three of it
    h_k = core(adapter·[h_{k−1}; e])            logits_k = wte·ln_f(coda(ln_f(h_k)))

Layers normalise every sum (`norm_placement = sum`), queries and keys have a bias, and rotary positions turn
neighbouring channels. Published code puts `ln_f` behind the recurrence and behind the coda; in the canonical cut h_k is
the state before the first of the two. The state that a text starts from is drawn anew by the published code in every
call, and fixed per position here, so that a text has one answer.
"""

from __future__ import annotations

import math

from loopscope.adapters.foreign import (
    Fields,
    Foreign,
    Layout,
    layers,
    litgpt_design,
    litgpt_places,
    outside,
    randomly_deep,
)
from loopscope.config import ModelConfig

EMBEDDING = "transformer.wte.weight"


def described(fields: Fields) -> Foreign:
    """The model that config.json describes, without weights."""
    model = design_of(fields)
    return Foreign.of_design(
        model,
        randomly_deep(model.num_loops, fields.backprop_loops()),
        layout(model),
        embedding=EMBEDDING,
        unused=("freqs_cis",),
        notes=("the state a text starts from is noise: published code draws it anew, here every position has its own",),
    )


def design_of(fields: Fields) -> ModelConfig:
    """A Huginn config.json in our words; what our layers do not have is refused."""
    fields.only(
        block_class_name="SandwichBlock",
        mlp_class_name="GatedMLP",
        nonlin_name="SiLU",
        injection_type="linear",
        state_init="like-init",
        bias=False,
        test_time_noise=0,
    )
    heads = fields.whole("num_attention_heads" if fields.get("n_heads") is None else "n_heads")
    fields.only(num_key_value_heads=heads)
    width = fields.whole("n_embd")
    initial = fields.inside("init_values")  # absent, √d and √(2/5d)
    embedding_scale = math.sqrt(width) if initial is None else initial.number("embed_scale")
    std = math.sqrt(2 / (5 * width)) if initial is None else initial.number("std")
    return litgpt_design(
        fields,
        num_heads=heads,
        qk_bias=fields.flag("qk_bias"),
        embedding_scale=embedding_scale,
        rope_base=fields.number("rope_base"),
        norm_placement="sum",
        coda_norm="rmsnorm",
        share_readout_norm=True,
        injection="concat",
        state_init="noise",
        noise_std=std * embedding_scale,
        init="huginn",
    )


def layout(config: ModelConfig) -> Layout:
    """Where every tensor of a checkpoint goes."""
    width = config.width
    adapter: Layout = {"recurrence.injection.project.weight": {"transformer.adapter.weight": (width, 2 * width)}}
    around = outside(config, EMBEDDING, "transformer.ln_f.weight")
    return around | adapter | layers(_layer(config), litgpt_places(config))


def _layer(config: ModelConfig) -> Layout:
    """Files stack q, k and v, and gate and up, as we do."""
    width, hidden, heads = config.width, config.mlp_hidden, config.num_heads
    table: Layout = {
        "attention_norms.norm.weight": {"norm_1.weight": (width,)},
        "attention.qkv.weight": {"attn.Wqkv.weight": (3 * width, width)},
        "attention.out.weight": {"attn.proj.weight": (width, width)},
        "attention_norms.sum_norm.weight": {"norm_2.weight": (width,)},
        "feed_forward_norms.norm.weight": {"norm_3.weight": (width,)},
        "feed_forward.up.weight": {"mlp.fc.weight": (2 * hidden, width)},
        "feed_forward.out.weight": {"mlp.proj.weight": (width, hidden)},
        "feed_forward_norms.sum_norm.weight": {"norm_4.weight": (width,)},
    }
    if config.qk_bias:
        table["attention.qk_bias"] = {"attn.qk_bias": (2, 1, heads, config.head_channels)}
    return table
