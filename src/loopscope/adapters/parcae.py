"""Parcae checkpoints (arXiv 2604.12946) as our own looped model.

    e = ln_prelude(prelude(wte[ids]))           h_0 a normal of std √(2/5d), cut at three of it, or zeros
    h_k = core(h_{k−1}·exp(−Δ·exp(A_log)) + Δ·(B e))        Δ = softplus(dt_bias)
    logits_k = wte·ln_f(coda(C h_k))

Layers are pre-norm with ½·ReLU², normalised queries and keys without gains, and value embeddings in every other layer;
rotary positions turn neighbouring channels. Nothing normalises the carried state: its decay is what bounds it.

Published files are `config.json` (without a model_type: it says `"_class_name": "ParcaeConfig"`) and a pickle, which
`loopscope convert` turns into safetensors.
"""

from __future__ import annotations

import math
from typing import Any

from loopscope.adapters.foreign import (
    Fields,
    Foreign,
    Layout,
    attention_rows,
    layers,
    litgpt_design,
    litgpt_places,
    outside,
    randomly_deep,
)
from loopscope.config import ModelConfig
from loopscope.model.attention import VALUE_GATE_CHANNELS

EMBEDDING = "transformer.wte.weight"
CLASS_NAME = "ParcaeConfig"
INJECTIONS = {"diagonal": "diagonal", "linear": "concat", "add": "add"}
STATES = {"like-init": "noise", "zero": "zeros"}


def described(fields: Fields) -> Foreign:
    """The model that config.json describes, without weights."""
    model = design_of(fields)
    return Foreign.of_design(
        model,
        randomly_deep(model.num_loops, fields.backprop_loops()),
        layout(model),
        embedding=EMBEDDING,
        unused=("freqs_cis",),
        notes=("published training draws the depth from a Poisson distribution; here it is Poisson-lognormal",),
    )


def design_of(fields: Fields) -> ModelConfig:
    """A Parcae config.json in our words; what our layers do not have is refused."""
    fields.only(
        block_class_name="TransformerPreNormBlock",
        norm_class_name="RMSNorm",
        mlp_class_name="BaseMLP",
        nonlin_name="ReLU2",
        init_strategy="scaled-zero",  # others scale the embedding and the logits
        mup_model_scaling_factor=1,
        bias=False,
        qk_bias=False,
    )
    for name in ("logit_softcap", "clip_qkv", "randomize_positions_from"):
        if fields.get(name) is not None:
            raise fields.unsupported(name, "only null is")
    width, hidden, heads = (fields.whole(name) for name in ("n_embd", "intermediate_size", "num_attention_heads"))
    fields.only(
        recurrent_embedding_dimension=width,
        recurrent_intermediation_embedding_dimension=hidden,
        recurrent_num_attention_heads=heads,
        num_key_value_heads=heads,
    )
    injection = fields.one_of("injection_type", INJECTIONS)
    state = "like-init" if fields.get("state_init") is None else fields.one_of("state_init", STATES)
    chosen: dict[str, Any] = {"injection": INJECTIONS[injection], "state_init": STATES[state]}
    if fields.flag("qk_norm"):
        chosen |= {"qk_norm": True, "qk_norm_gain": False}
    if state == "like-init":
        chosen["noise_std"] = math.sqrt(2 / (5 * width))
    rotary = fields.inside("rope_settings")
    if rotary is not None:
        rotary.only(use_rope=True, rope_condense_ratio=1)
    model = litgpt_design(
        fields,
        num_heads=heads,
        value_embeddings=True,
        mlp="half-relu2",
        rope_base=(rotary or fields).number("rope_base"),
        prelude_norm="rmsnorm" if fields.flag("prelude_norm") else "none",
        coda_map=True,
        **chosen,
        init="parcae",
    )
    _check_gates(fields, model)
    return model


def _check_gates(fields: Fields, model: ModelConfig) -> None:
    """Refuse a shape in which published code puts gates and value embeddings into different layers.

    It counts layers in two ways: tables go by the layers that there are; gates by those that run, the core
    `mean_recurrence` times before the coda, up to the depth that is back-propagated. A layer with one of the two alone
    reads neither.
    """
    last = model.num_layers * fields.backprop_loops() - 1
    before_coda = model.prelude_layers + model.num_layers * model.num_loops
    for part, first in (("prelude", 0), ("core", model.prelude_layers), ("coda", before_coda)):
        if model.has_value_embedding(model.first_layer(part)) != ((first - last) % 2 == 0):
            raise fields.unsupported(
                "n_layers_in_recurrent_block", f"the {part}'s gates and value embeddings are in different layers"
            )


def layout(config: ModelConfig) -> Layout:
    """Where every tensor of a checkpoint goes."""
    width = config.width
    table = outside(config, EMBEDDING, "transformer.ln_f.weight")
    table["coda_map.weight"] = {"transformer.C.weight": (width, width)}
    if config.prelude_norm != "none":
        table["prelude_norm.weight"] = {"transformer.ln_prelude.weight": (width,)}
    return table | _injection(config) | layers(_layer(config), litgpt_places(config)) | _value_embeddings(config)


def _injection(config: ModelConfig) -> Layout:
    at, width = "recurrence.injection", config.width
    if config.injection == "diagonal":
        return {
            f"{at}.log_rate": {"transformer.adapter.A_log": (width,)},
            f"{at}.step_bias": {"transformer.adapter.dt_bias": (width,)},
            f"{at}.project.weight": {"transformer.adapter.B": (width, width)},
        }
    if config.injection == "concat":
        return {f"{at}.project.weight": {"transformer.adapter.adapter.weight": (width, 2 * width)}}
    return {}


def _layer(config: ModelConfig) -> Layout:
    width, hidden = config.width, config.mlp_hidden
    return {
        "attention_norms.norm.weight": {"norm_1.weight": (width,)},
        "attention.qkv.weight": attention_rows(config, [f"attn.c_{name}.weight" for name in "qkv"]),
        "attention.out.weight": {"attn.c_proj.weight": (width, width)},
        "feed_forward_norms.norm.weight": {"norm_2.weight": (width,)},
        "feed_forward.up.weight": {"mlp.fc.weight": (hidden, width)},
        "feed_forward.out.weight": {"mlp.proj.weight": (width, hidden)},
    }


def _value_embeddings(config: ModelConfig) -> Layout:
    """Tables are numbered through all layers, gates are in theirs."""
    table: Layout = {}
    gate_width = min(VALUE_GATE_CHANNELS, config.width)
    for number, (ours, theirs) in enumerate(litgpt_places(config)):
        if config.has_value_embedding(number):
            gate, values = f"{theirs}.attn.ve_gate.weight", f"value_embeds.{number}.weight"
            table[f"{ours}.value_embedding.gate.weight"] = {gate: (config.kv_heads, gate_width)}
            table[f"{ours}.value_embedding.table.weight"] = {values: (config.vocab_size, config.kv_width)}
    return table
