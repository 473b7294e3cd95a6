"""Our own models as a Hugging Face folder (model_type "loopscope"): the fields of its config.json, and its tensors.

A field that everybody knows has everybody's name (hidden_size), the other ones of a `ModelConfig` are kept together in
"design": no fact is written twice. What outside readers want to know besides follows from these and is only written,
never read: above all num_hidden_layers, the number of key/value slots,

    prelude_layers + num_loops · num_layers + coda_layers,

since whoever makes a cache from a configuration makes so many. "num_loops" is the depth that is run unless a call says
otherwise, the design's own the depth that was trained.

transformers is not needed here; `loopscope.hf` has the classes for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from loopscope.adapters.foreign import FieldError, Fields, Foreign
from loopscope.config import MOST_LOOPS, Config, ModelConfig, config_from_dict, config_to_dict
from loopscope.model.looped_lm import LoopedLM, build

MODEL_TYPE = "loopscope"
ARCHITECTURE = "LoopscopeForCausalLM"
PREFIX = "model."
"""Of all tensors: in `loopscope.hf` our model is a part of transformers'."""
STANDARD = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "max_length",
    "tie_word_embeddings": "tie_head",
}
"""Everybody's name of a field → ours."""
SECTIONS = ("objective", "data", "training")
"""Parts of a `Config` besides the model; all but the first are there where a run was exported."""


def to_fields(config: Config, design: ModelConfig, *, num_loops: int | None = None) -> dict[str, Any]:
    """What a config.json says of a model of this design, and of its training."""
    depth = num_loops or design.num_loops
    values = config_to_dict(dataclasses.replace(config, model=design))
    theirs = {name: values["model"].pop(ours) for name, ours in STANDARD.items()}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **theirs,
        **derived(design, depth),
        "num_loops": depth,
        "design": values["model"],
        **{name: values[name] for name in SECTIONS},
    }


def derived(design: ModelConfig, num_loops: int) -> dict[str, int]:
    """What follows from the rest, for outside readers."""
    slots = design.prelude_layers + num_loops * design.num_layers + design.coda_layers
    return {
        "num_hidden_layers": slots,
        "num_key_value_heads": design.kv_heads,
        "head_dim": design.head_channels,
        "intermediate_size": design.mlp_hidden,
    }


def config_of(values: Mapping[str, Any], source: str) -> Config:
    """The configuration behind the fields of a config.json; every rule of ours is checked."""
    design = values.get("design")
    if not isinstance(design, Mapping):
        raise FieldError(f"{source}: the field design is missing or no object")
    if absent := [name for name in STANDARD if values.get(name) is None]:
        raise FieldError(f"{source}: the field {absent[0]} is missing")
    model = {**design, **{ours: values[name] for name, ours in STANDARD.items()}}
    sections = {name: values[name] for name in SECTIONS if values.get(name) is not None}
    return config_from_dict({"model": model, **sections}, source=source)


def num_loops_of(values: Mapping[str, Any], design: ModelConfig, source: str) -> int:
    """The depth that is run: the field num_loops, or the trained one."""
    found = values.get("num_loops")
    if found is None:
        return design.num_loops
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= MOST_LOOPS:
        raise FieldError(f"{source}: num_loops = {found!r} is not a number of loops from 1 up to {MOST_LOOPS:,}")
    return found


def described(fields: Fields) -> Foreign:
    """The model that config.json describes, without weights."""
    source = str(fields.path)
    config = config_of(fields.values, source)
    design = config.design("an exported folder")
    model = build(design, device="meta")
    depth = num_loops_of(fields.values, design, source)
    other = f"config.json asks for {depth} loops; it was trained at {design.num_loops}, which is what is meant here"
    step = fields.get("step")
    return Foreign(
        make=lambda: model,
        vocab_size=design.vocab_size,
        max_length=design.max_length,
        objective=config.objective,
        layout={name: {PREFIX + name: tuple(tensor.shape)} for name, tensor in own_tensors(model).items()},
        notes=() if depth == design.num_loops else (other,),
        step=step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None,
    )


def own_tensors(model: LoopedLM) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tensor of two modules appears once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def tensor_names(model: LoopedLM) -> dict[str, str]:
    """Every name of a tensor → the name it has in `own_tensors`; they differ where two modules are one."""
    first = {id(tensor): name for name, tensor in own_tensors(model).items()}
    return {name: first[id(tensor)] for name, tensor in model.state_dict(keep_vars=True).items()}
