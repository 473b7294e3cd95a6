"""Transformer layers: attention and feed-forward, each a residual branch under a norm placement.

Shape legend: B batch, T tokens, D width, G key/value heads, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopscope.config import ModelConfig
from loopscope.model.attention import Attention, Rotation, ValueEmbedding
from loopscope.model.feed_forward import FeedForward, MixtureOfExperts
from loopscope.model.norms import make_placement
from loopscope.protocol import Cache, Loop, Slot


@dataclass(frozen=True)
class Beside:
    """What layers may read besides the stream; all of it may be absent."""

    ids_BT: Tensor | None = None
    """Token ids, for value embeddings."""
    input_BTD: Tensor | None = None
    """The embedded input, for placements that recall it."""
    query_BTD: Tensor | None = None
    """What every layer makes its queries of, instead of the stream."""
    queried_B11: Tensor | None = None
    """The rows that do so; None means all."""


torch.utils._pytree.register_dataclass(Beside)


NOTHING_BESIDE = Beside()


class Layer(nn.Module):
    """Attention, then feed-forward, each as a residual branch under the chosen norm placement."""

    def __init__(self, config: ModelConfig, *, with_value_embedding: bool = False) -> None:
        super().__init__()
        self.value_embedding = ValueEmbedding(config) if with_value_embedding else None
        self.attention, self.attention_norms = Attention(config), make_placement(config, "attention")
        self.feed_forward: FeedForward | MixtureOfExperts
        self.feed_forward = FeedForward(config) if config.num_experts is None else MixtureOfExperts(config)
        self.feed_forward_norms = make_placement(config, "feed_forward")
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, rotary: Rotation | None, cache: Cache | None, slot: Slot, beside: Beside = NOTHING_BESIDE
    ) -> Tensor:
        norms, query_BTD = self.attention_norms, beside.query_BTD
        read_BTD = norms.open(x_BTD, beside.input_BTD)
        more_values_BTGC = self._more_values(read_BTD, beside.ids_BT)
        if query_BTD is not None and beside.queried_B11 is not None:
            query_BTD = torch.where(beside.queried_B11, query_BTD, read_BTD)
        branch_BTD = self.attention(read_BTD, norms.norm, rotary, cache, slot, norms.inner, more_values_BTGC, query_BTD)
        if self.training:
            branch_BTD = self.dropout(branch_BTD)
        x_BTD = norms.after(x_BTD, branch_BTD)
        norms = self.feed_forward_norms
        branch_BTD = self.feed_forward(norms.open(x_BTD, beside.input_BTD), norms.norm, norms.inner)
        if self.training:
            branch_BTD = self.dropout(branch_BTD)
        return norms.after(x_BTD, branch_BTD)

    def keys_and_values(self, x_BTD: Tensor, rotary: Rotation | None, beside: Beside) -> tuple[Tensor, Tensor]:
        """What attention would show of x."""
        norms = self.attention_norms
        read_BTD = norms.open(x_BTD, beside.input_BTD)
        more_values_BTGC = self._more_values(read_BTD, beside.ids_BT)
        return self.attention.keys_and_values(read_BTD, norms.norm, rotary, more_values_BTGC)

    def _more_values(self, read_BTD: Tensor, ids_BT: Tensor | None) -> Tensor | None:
        if self.value_embedding is None:
            return None
        assert ids_BT is not None
        norm = self.attention_norms.norm
        return self.value_embedding(read_BTD if norm is None else norm(read_BTD), ids_BT)

    def initialise(self, config: ModelConfig) -> None:
        """The placement's word on the matrices of both branches, once all of the model's are drawn."""
        self.attention_norms.initialise(self.attention, config)
        experts = self.feed_forward.experts if isinstance(self.feed_forward, MixtureOfExperts) else [self.feed_forward]
        for expert in experts:
            assert isinstance(expert, FeedForward)
            self.feed_forward_norms.initialise(expert, config)


class Stack(nn.Module):
    """Layers in a row: the prelude, the shared core, or the coda."""

    def __init__(self, config: ModelConfig, num_layers: int, part: str) -> None:
        super().__init__()
        self.part = part
        first = config.first_layer(part)
        self.layers = nn.ModuleList(
            Layer(config, with_value_embedding=config.has_value_embedding(first + index)) for index in range(num_layers)
        )

    def forward(
        self,
        x_BTD: Tensor,
        rotary: Rotation | None,
        cache: Cache | None = None,
        k: Loop = 0,
        first_slot: int = 0,
        beside: Beside = NOTHING_BESIDE,
    ) -> Tensor:
        """All layers; a loop that runs more than one stack, or one more than once, gives each run its first slot."""
        for index, layer in enumerate(self.layers, start=first_slot):
            x_BTD = layer(x_BTD, rotary, cache, (self.part, k, index), beside)
        return x_BTD
