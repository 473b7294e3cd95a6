"""An ordinary `llama`- or `qwen3`-type checkpoint as a looped model: the cheapest way into loops (arXiv 2511.07384).

    e = first layers(embed_tokens[ids])         prelude
    h_k = middle layers(h_{k−1}), h_0 = e       core, run num_loops times; with an adapter on W·[h_{k−1}; e]
    logits_k = lm_head(norm(last layers(h_k)))  coda

With one loop it is the ordinary model itself. Every layer keeps its weights; layers may be dropped, as in the published
retrofit of TinyLlama (prelude 0–3, core 10–17, coda 18–21).

Open: how the published adapter starts. Ours starts as the mean, W = [½I | ½I]: since h_0 = e, the first loop still is
the ordinary model, and every later loop reads the input again. The published model starts from noise instead of e.
"""

from __future__ import annotations

import torch

from loopscope.adapters.foreign import (
    BACKPROP_LOOPS,
    Fields,
    Foreign,
    Layout,
    Shape,
    layers,
    llama_design,
    llama_layer,
    outside,
    randomly_deep,
)
from loopscope.config import ModelConfig
from loopscope.errors import ConfigError
from loopscope.words import Retrofit

EMBEDDING = "model.embed_tokens.weight"
ORDINARY = ("llama", "qwen3")
"""Model types that can be looped."""


def described(fields: Fields, how: Retrofit) -> Foreign:
    """The looped model that config.json and the word describe, without weights."""
    parts = _parts(fields, how)
    model = design_of(fields, how, parts)
    given = {}
    if how.adapter:
        half = torch.eye(model.width) / 2
        given["recurrence.injection.project.weight"] = torch.cat([half, half], dim=1)
    return Foreign.of_design(
        model,
        randomly_deep(model.num_loops, BACKPROP_LOOPS),
        layout(model, parts),
        embedding=EMBEDDING,
        given=given,
        unused=[
            f"model.layers.{number}.{name}"
            for number in how.drop_layers
            for theirs in _layer(model).values()
            for name in theirs
        ],
        notes=(_note(parts, how),),
    )


def design_of(fields: Fields, how: Retrofit, parts: dict[str, list[int]]) -> ModelConfig:
    """The configuration of the looped model; what our layers do not have is refused."""
    fields.check_plain_transformer(own_head_width=True)
    if fields.flag("use_sliding_window") or fields.get("sliding_window") is not None:
        raise fields.unsupported("sliding_window", "only full attention is")
    fields.check_full_attention()
    return llama_design(
        fields,
        prelude_layers=len(parts["prelude"]),
        num_layers=len(parts["core"]),
        coda_layers=len(parts["coda"]),
        num_loops=how.num_loops,
        num_kv_heads=fields.whole(
            "num_attention_heads" if fields.get("num_key_value_heads") is None else "num_key_value_heads"
        ),
        head_width=None if fields.get("head_dim") is None else fields.whole("head_dim"),
        qk_norm=fields.get("model_type") == "qwen3",
        init="scaled",
        injection="concat" if how.adapter else "none",
    )


def _parts(fields: Fields, how: Retrofit) -> dict[str, list[int]]:
    """Their layers in prelude, core and coda, by number."""
    count = fields.whole("num_hidden_layers")
    for name, chosen in (("loop-layers", how.loop_layers), ("drop-layers", how.drop_layers)):
        if chosen and chosen[-1] >= count:
            given = f"{name}={chosen[0]}..{chosen[-1]}"
            raise ConfigError(f"{given}: {fields.path} has {count} layers, numbered from 0 to {count - 1}")
    kept = [number for number in range(count) if number not in how.drop_layers]
    first, last = how.loop_layers[0], how.loop_layers[-1]
    return {
        "prelude": [number for number in kept if number < first],
        "core": list(how.loop_layers),
        "coda": [number for number in kept if number > last],
    }


def layout(config: ModelConfig, parts: dict[str, list[int]]) -> Layout:
    """Where every tensor of a checkpoint goes."""
    places = [
        (f"{'recurrence.core' if part == 'core' else part}.layers.{index}", f"model.layers.{number}")
        for part, numbers in parts.items()
        for index, number in enumerate(numbers)
    ]
    return outside(config, EMBEDDING, "model.norm.weight") | layers(_layer(config), places)


def _layer(config: ModelConfig) -> Layout:
    gain: Shape = (config.head_channels,)
    gains = {f"attention.{one}_norm.weight": {f"self_attn.{one}_norm.weight": gain} for one in "qk"}
    return llama_layer(config) | (gains if config.qk_norm else {})


def _note(parts: dict[str, list[int]], how: Retrofit) -> str:
    counts = ", ".join(f"{len(numbers)} in the {part}" for part, numbers in parts.items())
    adapter = "; the adapter on [h; e] starts as their mean" if how.adapter else ""
    return f"an ordinary model, opened as a looped one ({counts}): its loops have not been trained{adapter}"
