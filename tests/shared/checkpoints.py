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


HUGINN = {
    "model_type": "huginn_raven",
    "architectures": ["RavenForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "raven_modeling_minimal.RavenForCausalLM"},
    "n_embd": 24,
    "n_heads": 3,
    "n_layers": 4,
    "n_layers_in_prelude": 1,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 1,
    "intermediate_size": 40,
    "mean_recurrence": 4,
    "mean_backprop_depth": 2,
    "block_size": 96,
    "vocab_size": VOCABULARY - 10,
    "padding_multiple": 20,
    "norm_eps": 1e-6,
    "rope_base": 50_000,
    "qk_bias": True,
    "bias": False,
    "tie_embeddings": True,
    "block_class_name": "SandwichBlock",
    "mlp_class_name": "GatedMLP",
    "nonlin_name": "SiLU",
    "injection_type": "linear",
    "state_init": "like-init",
}
PARCAE = {
    "_class_name": "ParcaeConfig",
    "n_embd": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 40,
    "n_layers_in_prelude": 2,
    "n_layers_in_recurrent_block": 2,
    "n_layers_in_coda": 2,
    "mean_recurrence": 4,
    "mean_backprop_depth": 2,
    "block_size": 96,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "norm_eps": 1e-5,
    "rope_settings": {"use_rope": True, "rope_condense_ratio": 1, "rope_base": 50_000},
    "injection_type": "diagonal",
    "state_init": "like-init",
    "init_strategy": "scaled-zero",
    "prelude_norm": True,
    "qk_norm": True,
    "tie_embeddings": True,
    "nonlin_name": "ReLU2",
    "recurrent_embedding_dimension": 36,
    "recurrent_intermediation_embedding_dimension": 40,
    "recurrent_num_attention_heads": None,
}
PAPER = {
    "model_type": "paper_looped_lm",
    "vocab_size": VOCABULARY,
    "width": 16,
    "num_layers": 2,
    "num_loops": 4,
    "num_heads": 2,
    "mlp_width": 24,
    "max_length": 96,
    "norm_eps": 1e-6,
    "readout": "rmsnorm",
    "inter_loop_norm": False,
    "exit_gate": False,
    "placement": "per-loop",
}


def huginn_tensors(config: dict) -> dict[str, Tensor]:
    """Random weights under the published names."""
    width, hidden, heads = config["n_embd"], config["intermediate_size"], config["n_heads"]
    rows = -(-config["vocab_size"] // config["padding_multiple"]) * config["padding_multiple"]
    shapes = {"wte.weight": (rows, width), "adapter.weight": (width, 2 * width), "ln_f.weight": (width,)}
    for part, count in _parts(config):
        for index in range(count):
            layer = {f"norm_{number}.weight": (width,) for number in (1, 2, 3, 4)}
            layer |= {"attn.Wqkv.weight": (3 * width, width), "attn.proj.weight": (width, width)}
            layer |= {"mlp.fc.weight": (2 * hidden, width), "mlp.proj.weight": (width, hidden)}
            if config["qk_bias"]:
                layer["attn.qk_bias"] = (2, 1, heads, width // heads)
            shapes |= {f"{part}.{index}.{name}": shape for name, shape in layer.items()}
    return _drawn({f"transformer.{name}": shape for name, shape in shapes.items()})


def parcae_tensors(config: dict) -> dict[str, Tensor]:
    """Random weights under the published names."""
    width, hidden, heads = config["n_embd"], config["intermediate_size"], config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, width), "C.weight": (width, width)}
    shapes["ln_f.weight"] = (width,)
    if config["prelude_norm"]:
        shapes["ln_prelude.weight"] = (width,)
    if config["injection_type"] == "diagonal":
        shapes |= {"adapter.A_log": (width,), "adapter.dt_bias": (width,), "adapter.B": (width, width)}
    if config["injection_type"] == "linear":
        shapes["adapter.adapter.weight"] = (width, 2 * width)
    for part, count in _parts(config):
        for index in range(count):
            layer: dict[str, tuple[int, ...]] = {f"norm_{number}.weight": (width,) for number in (1, 2)}
            layer |= {f"attn.c_{name}.weight": (width, width) for name in ("q", "k", "v", "proj")}
            layer |= {"mlp.fc.weight": (hidden, width), "mlp.proj.weight": (width, hidden)}
            if index % 2:
                layer["attn.ve_gate.weight"] = (heads, 32)
            shapes |= {f"{part}.{index}.{name}": shape for name, shape in layer.items()}
    shapes = {f"transformer.{name}": shape for name, shape in shapes.items()}
    return _drawn(shapes | {f"value_embeds.{number}.weight": (VOCABULARY, width) for number in (1, 3, 5)})


def paper_tensors(config: dict) -> dict[str, Tensor]:
    """Random weights under the original names."""
    width, hidden = config["width"], config["mlp_width"]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding.weight": (config["vocab_size"], width),
        "position_embedding.weight": (config["max_length"], width),
        "loop_norm.weight": (width,),
    }
    if config["readout"] != "raw":
        shapes["decode_norm.weight"] = (width,)
    if config["exit_gate"]:
        shapes |= {"exit_gate.weight": (1, width), "exit_gate.bias": (1,)}
    for index in range(config["num_layers"]):
        layer = {"attn_norm.weight": (width,), "ffn_norm.weight": (width,), "attn.qkv.weight": (3 * width, width)}
        layer |= {"attn.out_proj.weight": (width, width), "ffn.w2.weight": (width, hidden)}
        layer |= {f"ffn.{name}.weight": (hidden, width) for name in ("w1", "w3")}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors = _drawn(shapes)
    return {**tensors, "lm_head.weight": tensors["token_embedding.weight"].clone()}


def _parts(config: dict) -> list[tuple[str, int]]:
    return [
        (part, config[f"n_layers_in_{name}"])
        for part, name in (("prelude", "prelude"), ("core_block", "recurrent_block"), ("coda", "coda"))
    ]


def _drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: _random(shape, generator) for name, shape in shapes.items()}


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


def save_llama(folder: Path, kind: str = "Llama", **changes: Any) -> Any:
    """A small random folder of an ordinary model as transformers writes it, with gains that are not 1; its network."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
    ids = {"eos_token_id": 7, "bos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, **ids, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.normal_(1 if "norm" in name else 0, 0.3)
    network.save_pretrained(folder)
    return network
