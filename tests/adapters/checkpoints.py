"""Small random checkpoints in other people's formats: their names and shapes, none of their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY = 300
OURO = {
    "model_type": "ouro",
    "architectures": ["OuroForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"},
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
    "total_ut_steps": 4,
    "early_exit_threshold": 1.0,
    "torch_dtype": "bfloat16",
}


def ouro_tensors(config: dict) -> dict[str, Tensor]:
    """Random weights under the published names."""
    width, hidden, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,), "model.early_exit_gate": (1, width)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocabulary, width)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (width, width) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (keys, width) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (hidden, width) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (width, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= {f"{layer}.{name}": (width,), f"{layer}.{name}_2": (width,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": _random(shape, generator) for name, shape in shapes.items()}
    return {**tensors, "model.early_exit_gate.bias": _random((1,), generator)}


def save_folder(folder: Path, config: object, tensors: dict[str, Tensor]) -> Path:
    """config.json and one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_sharded(folder: Path, config: object, tensors: dict[str, Tensor]) -> Path:
    """The same in two files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = {name: shards[place % 2] for place, name in enumerate(names)}
    for file in shards:
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Gains around 1; matrices that keep the size of what they multiply."""
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5


def save_hrm(folder: Path, **changes: Any) -> tuple[Path, Any]:
    """A small hrm_text folder as transformers writes it, and the network of transformers that it holds."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "head_dim": 8, "max_position_embeddings": 96}
    config = transformers.HrmTextConfig(
        **{**sizes, **heads, "H_cycles": 3, "L_cycles": 2, "initializer_range": 0.25, **changes}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.HrmTextForCausalLM(config).eval()
        torch.nn.init.normal_(network.model.z_L_init)
    network.save_pretrained(folder)
    return folder, network
