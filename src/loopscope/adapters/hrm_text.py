"""HRM-Text (model_type "hrm_text", transformers' own class) on the protocol: a loop is one high-level cycle.

    z_H ← norm(h_{k-1})                 opens every cycle but the first
    z_L ← norm(L(z_L + z_H))            L_cycles times; z_L is carried beside h
    h_k = H(z_H + z_L)                  logits_k = lm_head(norm(h_k))

h_k is the high-level state before the norm that closes its stack (the canonical cut). Only the last cycle is
supervised. The published forward pass runs all but the last few low-level cycles (`L_bp_cycles`) under no_grad, in any
mode; here every cycle has its derivative, so what an audit calls carried is what the cycles do, not what training was
shown of it. Without token types the prefix language model is a causal one, and that is how it is run.

Shape legend: B batch, T tokens, S tokens attended to, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from loopscope.adapters.foreign import Fields, Foreign, Weights
from loopscope.config import ObjectiveConfig
from loopscope.errors import ConfigError, DataError, UnsupportedError
from loopscope.protocol import Cache, Cached, LinearReadout, LoopState

STACKED = {
    "attn.gqkv_proj": ("self_attn.gate_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""A matrix of a file → the matrices of transformers' class that its rows are cut into, in this order."""


def load(fields: Fields, weights: Weights, dtype: torch.dtype = torch.float32) -> Foreign:
    """The model that config.json describes with the folder's weights; both must fit exactly."""
    network = _network(fields).to(dtype)
    homes = _homes(network)
    weights.check({name: (sum(map(len, parts)), *parts[0].shape[1:]) for name, parts in homes.items()})
    for name, parts in homes.items():
        for part, rows in zip(parts, weights.read(name, dtype).split([len(part) for part in parts]), strict=True):
            part.copy_(rows)
    config, objective = network.config, ObjectiveConfig(placement="terminal")
    model = HrmText(network).eval()
    return Foreign(model, config.vocab_size, config.max_position_embeddings, objective, (_note(network),))


class HrmText(nn.Module, LinearReadout, Cached):
    """A LoopedModel around transformers' HrmTextForCausalLM."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        self.num_loops: int = network.config.H_cycles

    @property
    def head(self) -> Tensor:
        """W_VD."""
        return self.network.lm_head.weight

    def embed(self, ids_BT: Tensor, cache: Cache | None = None) -> LoopState:
        """z_H is the scaled embedding, z_L its fixed start."""
        model, tokens = self.network.model, ids_BT.shape[1]
        positions_BT = torch.arange(tokens)[None] if cache is None else cache.positions(tokens)
        end, context = int(positions_BT.max()) + 1, self.network.config.max_position_embeddings
        if end > context:
            raise DataError(f"a sequence of {end} tokens is longer than max_position_embeddings = {context}")
        e_BTD = model.embed_tokens(ids_BT) * model.embedding_scale
        rotary = model.rotary_emb(e_BTD, positions_BT.to(ids_BT.device).expand(ids_BT.shape))
        return LoopState(e_BTD, {"z_L": model.z_L_init.to(e_BTD).expand_as(e_BTD)}, context=rotary)

    def loop(self, state: LoopState, k: int, cache: Cache | None = None) -> LoopState:
        """One high-level cycle with its low-level ones."""
        model, low_BTD = self.network.model, state.carried["z_L"]
        high_BTD = state.h_BTD if k == 1 else model.H_module.final_norm(state.h_BTD)
        stack = _Stacks(state.context, cache, k, self.network.config.num_layers_per_stack)
        for cycle in range(self.network.config.L_cycles):
            low_BTD = model.L_module.final_norm(stack(model.L_module, low_BTD + high_BTD, cycle))
        h_BTD = stack(model.H_module, high_BTD + low_BTD, self.network.config.L_cycles)
        return replace(state, h_BTD=h_BTD, carried={"z_L": low_BTD})

    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """The norm that closes the high-level stack."""
        return self.network.model.H_module.final_norm(state.h_BTD)


@dataclass(frozen=True)
class _Stacks:
    """Runs a stack's layers without its closing norm, in one loop; to the layers it is their cache, too."""

    rotary: tuple[Tensor, Tensor]
    cache: Cache | None
    k: int
    num_layers: int

    def __call__(self, stack: Any, x_BTD: Tensor, cycle: int) -> Tensor:
        mask = _mask(x_BTD.shape[1], self.cache, x_BTD.device)
        for layer in stack.layers:
            x_BTD = layer(
                x_BTD,
                attention_mask=mask,
                past_key_values=None if self.cache is None else self,
                position_embeddings=self.rotary,
                cycle_offset=cycle * self.num_layers,
            )
        return x_BTD

    def update(self, k_BHTC: Tensor, v_BHTC: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """What transformers' attention calls on a cache."""
        assert self.cache is not None
        return self.cache.extend(("core", self.k, index), k_BHTC, v_BHTC)


def _mask(tokens: int, cache: Cache | None, device: torch.device) -> Tensor | None:
    """Causal attention is the layers' own default, except for ragged rows and several tokens after a cached prefix."""
    if cache is None:
        return None
    if (mask := cache.mask(tokens)) is not None:
        return mask.to(device)
    keys = int(cache.positions(tokens)[0, -1]) + 1
    if not 1 < tokens < keys:
        return None
    return torch.ones(1, 1, tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)


def _network(fields: Fields) -> Any:
    try:
        from transformers import HrmTextConfig, HrmTextForCausalLM
    except ImportError as error:
        raise UnsupportedError(f"hrm_text needs transformers ≥ 5.17: pip install 'loopscope[hf]' ({error})") from error
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_hidden_layers", "H_cycles", "L_cycles"):
        fields.whole(name)
    if fields.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "only null is")
    try:
        config = HrmTextConfig.from_dict({**fields.values, "attn_implementation": "sdpa"})
        return HrmTextForCausalLM(config)
    except Exception as error:  # the library's own checks of fields raise many kinds
        raise ConfigError(f"{fields.path} describes no model that transformers can build: {error}") from error


def _homes(network: Any) -> dict[str, list[Tensor]]:
    """Name in a file → the network's own tensors, in the order of its rows."""
    own: dict[str, Tensor] = network.state_dict()
    if network.config.tie_word_embeddings:
        del own["lm_head.weight"]
    homes: dict[str, list[Tensor]] = {}
    for name in [name for name in own if name.endswith("self_attn.o_proj.weight")]:
        layer = name.removesuffix("self_attn.o_proj.weight")
        for stored, parts in STACKED.items():
            homes[f"{layer}{stored}.weight"] = [own.pop(f"{layer}{part}.weight") for part in parts]
    return homes | {name: [tensor] for name, tensor in own.items()}


def _note(network: Any) -> str:
    return (
        f"of the {network.config.L_cycles} low-level cycles in each high-level one, training back-propagates through "
        f"the last {', '.join(map(str, network.model.L_bp_cycles_padded))}; the audit takes the derivative of all, in "
        "evaluation mode. z_L is carried beside h, and leaves every cycle through a norm"
    )
