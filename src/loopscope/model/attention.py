"""Causal self-attention: its positions, its value embeddings, and the attention itself.

Shape legend: B batch, T tokens, S tokens attended to, D width, H heads, G key/value heads, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.kernels import RMSNorm, norm_linear
from loopscope.protocol import Cache, Slot

VALUE_GATE_CHANNELS = 32
"""Channels of a layer's input that the gate of its value embedding reads."""


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the rotary angles, per batch row so that rows can be taken apart.

    Both are as wide as a head, each angle there twice; sin is negative for the first of its two channels.
    """

    cos_BTC: Tensor
    sin_BTC: Tensor


torch.utils._pytree.register_dataclass(Rotation)


def rotation(positions_BT: Tensor, head_width: int, base: float, *, interleaved: bool = False) -> Rotation:
    """Angles position · base^(−2i/C) for each pair of channels i (first half with second half, or neighbours)."""
    exponent_C = torch.arange(0, head_width, 2, device=positions_BT.device, dtype=torch.float32) / head_width
    angles_BTC = positions_BT[..., None].float() * base**-exponent_C
    cos_BTC, sin_BTC = angles_BTC.cos(), angles_BTC.sin()
    if interleaved:
        return Rotation(torch.stack([cos_BTC] * 2, -1).flatten(-2), torch.stack([-sin_BTC, sin_BTC], -1).flatten(-2))
    return Rotation(torch.cat([cos_BTC, cos_BTC], -1), torch.cat([-sin_BTC, sin_BTC], -1))


def rotate(x_BHTC: Tensor, by: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate each pair of channels by its angle, (x_i, x_{i+C/2}) or (x_2i, x_{2i+1}) as in `rotation`.

    Scores then depend on distance only.
    """
    cos_B1TC, sin_B1TC = by.cos_BTC[:, None].to(x_BHTC.dtype), by.sin_BTC[:, None].to(x_BHTC.dtype)
    if interleaved:
        partner_BHTC = x_BHTC.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        left, right = x_BHTC.chunk(2, dim=-1)
        partner_BHTC = torch.cat([right, left], dim=-1)
    return x_BHTC * cos_B1TC + partner_BHTC * sin_B1TC


class ValueEmbedding(nn.Module):
    """2·σ(G·x)·E[id]: what a token adds to a layer's values, whatever its context (Parcae, after nanochat).

    The gate has one number per key/value head and reads the first channels of the normed input of the layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.kv_width)
        self.gate = nn.Linear(min(VALUE_GATE_CHANNELS, config.width), config.kv_heads, bias=False)

    def forward(self, x_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """Values_BTGC to add."""
        # A copy of the few channels, or autograd would keep all of x for them.
        gate_BTG = 2 * self.gate(x_BTD[..., : self.gate.in_features].contiguous()).sigmoid()
        return gate_BTG[..., None] * self.table(ids_BT).unflatten(-1, (self.gate.out_features, -1))


class Attention(nn.Module):
    """Causal self-attention through SDPA, one fused projection, optional grouped KV heads, qk-norm and output gate.

    The rows of the projection are those of the gate (if there is one), the queries, the keys and the values. A norm of
    queries and keys without gains commutes with their rotation, so it does not matter which comes first.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = config.num_heads, config.kv_heads
        self.head_width = config.head_channels
        self.interleaved = config.rope_pairs == "interleaved"
        gate_heads, qk_heads = self.num_heads if config.attention_gate else 0, self.num_heads + self.kv_heads
        self.cuts = [gate_heads, gate_heads + qk_heads] if gate_heads else [qk_heads]
        self.qkv = nn.Linear(config.width, (gate_heads + qk_heads + self.kv_heads) * self.head_width, bias=False)
        self.out = nn.Linear(config.attention_width, config.width, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(qk_heads, self.head_width)) if config.qk_bias else None
        self.q_norm, self.k_norm = _head_norm(config), _head_norm(config)

    def forward(
        self,
        x_BTD: Tensor,
        norm: nn.Module | None,
        rotary: Rotation | None,
        cache: Cache | None,
        slot: Slot,
        inner: nn.Module | None = None,
        more_values_BTGC: Tensor | None = None,
        query_BTD: Tensor | None = None,
    ) -> Tensor:
        """W_O inner(heads(norm(x))), or W_O inner(σ(W_G norm(x))∘heads(norm(x))); queries may be made of another x."""
        batch, tokens, _ = x_BTD.shape
        if query_BTD is None:
            heads = norm_linear(x_BTD, norm, self.qkv)
        else:
            heads = self._with_queries_of(query_BTD, x_BTD, norm)
        heads_BTHC = heads.view(batch, tokens, -1, self.head_width)
        *gate_BTHC, qk, v = heads_BTHC.tensor_split(self.cuts, 2)
        if more_values_BTGC is not None:
            v = v + more_values_BTGC
        qk, v = qk.transpose(1, 2), v.transpose(1, 2)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias[:, None]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.tensor_split([self.num_heads], 1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        if rotary is not None:
            qk = rotate(qk, rotary, interleaved=self.interleaved)
        q, k = qk.tensor_split([self.num_heads], 1)
        mask = None
        if cache is not None:
            k, v = cache.extend(slot, k, v)
            mask = cache.mask(tokens)
        attended_BTHC = causal_attention(q, k, v, mask).transpose(1, 2)
        for gate in gate_BTHC:
            attended_BTHC = gate.sigmoid() * attended_BTHC
        return norm_linear(attended_BTHC.reshape(batch, tokens, -1), inner, self.out)

    def _with_queries_of(self, query_BTD: Tensor, x_BTD: Tensor, norm: nn.Module | None) -> Tensor:
        """The projection of x in which the rows of the queries read `query_BTD` instead, behind the same norm."""
        if norm is not None:
            query_BTD, x_BTD = norm(query_BTD), norm(x_BTD)
        gates = (self.cuts[0] if len(self.cuts) == 2 else 0) * self.head_width
        queries = self.num_heads * self.head_width
        gate_rows, query_rows, other_rows = self.qkv.weight.tensor_split([gates, gates + queries])
        parts = [F.linear(x_BTD, gate_rows)] if gates else []
        return torch.cat([*parts, F.linear(query_BTD, query_rows), F.linear(x_BTD, other_rows)], -1)

    def keys_and_values(
        self, x_BTD: Tensor, norm: nn.Module | None, rotary: Rotation | None, more_values_BTGC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of norm(x), as `forward` gives them to a cache, without queries or attention."""
        rows = 2 * self.kv_heads * self.head_width  # the last ones of the fused projection
        both = F.linear(x_BTD if norm is None else norm(x_BTD), self.qkv.weight[-rows:])
        k, v = both.unflatten(-1, (-1, self.head_width)).chunk(2, 2)
        if more_values_BTGC is not None:
            v = v + more_values_BTGC
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if self.qk_bias is not None:
            k = k + self.qk_bias[self.num_heads :, None]
        if self.k_norm is not None:
            k = self.k_norm(k)
        return (k if rotary is None else rotate(k, rotary, interleaved=self.interleaved)), v


def _head_norm(config: ModelConfig) -> nn.Module | None:
    """The norm of a query or key, per head."""
    if not config.qk_norm:
        return None
    if not config.qk_norm_gain:
        return nn.RMSNorm(config.head_channels, elementwise_affine=False)
    return RMSNorm(config.head_channels, eps=config.norm_eps)


def causal_attention(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, mask: Tensor | None = None) -> Tensor:
    """SDPA in which the last query sees all S keys, or what a mask allows; T < S when a cache has earlier tokens."""
    tokens, keys = q_BHTC.shape[-2], k_BGSC.shape[-2]
    if mask is not None:
        mask = mask.to(q_BHTC.device)
    elif 1 < tokens < keys:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=q_BHTC.device).tril(keys - tokens)
    return F.scaled_dot_product_attention(
        q_BHTC,
        k_BGSC,
        v_BGSC,
        attn_mask=mask,
        is_causal=mask is None and tokens == keys,
        enable_gqa=q_BHTC.shape[1] != k_BGSC.shape[1],
    )
