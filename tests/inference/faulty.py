"""Looped models with one planted fault each: the kind that is made when a looped model gets a cache.

All but a few are right as long as nobody caches, batches or goes beyond the trained depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.attention import Attention, Rotation, causal_attention, rotate, rotation
from loopscope.model.looped_lm import LoopedLM
from loopscope.protocol import LoopState

CONFIG = ModelConfig(
    vocab_size=37, width=32, num_layers=2, num_loops=3, num_heads=4, max_length=24, dropout=0.0, positions="rope",
    inter_loop_norm="rmsnorm",
)  # fmt: skip


class Through:
    """A cache with something changed about it."""

    def __init__(self, cache):
        self.cache = cache

    def positions(self, tokens):
        return self.cache.positions(tokens)

    def mask(self, tokens):
        return self.cache.mask(tokens)

    def extend(self, slot, k_BHTC, v_BHTC):
        return self.cache.extend(slot, k_BHTC, v_BHTC)


class OtherCache(LoopedLM):
    """Sees every cache through a `Through`."""

    View: type[Through] = Through

    def embed(self, ids_BT, cache=None):
        return super().embed(ids_BT, None if cache is None else self.View(cache))

    def loop(self, state, k, cache=None):
        return super().loop(state, k, None if cache is None else self.View(cache))

    def features(self, state, k, cache=None):
        return super().features(state, k, None if cache is None else self.View(cache))


class LoopsShareASlot(OtherCache):
    class View(Through):
        def extend(self, slot, k_BHTC, v_BHTC):
            part, k, layer = slot
            return self.cache.extend((part, 1 if isinstance(k, int) else (1,) * len(k), layer), k_BHTC, v_BHTC)


class LoopsBeyondTheTrainedDepthShareASlot(OtherCache):
    class View(Through):
        def extend(self, slot, k_BHTC, v_BHTC):
            part, k, layer = slot
            k = min(k, 3) if isinstance(k, int) else tuple(min(each, 3) for each in k)
            return self.cache.extend((part, k, layer), k_BHTC, v_BHTC)


class MaskLostInDecoding(OtherCache):
    class View(Through):
        def mask(self, tokens):
            return None


class MaskOfTheFirstRow(OtherCache):
    class View(Through):
        def mask(self, tokens):
            mask = self.cache.mask(tokens)
            return mask if mask is None else mask[:1].expand_as(mask)


class PositionsOffByOneAfterPrefill(OtherCache):
    class View(Through):
        def positions(self, tokens):
            positions = self.cache.positions(tokens)
            return positions + (positions[:, :1] > 0)


class PositionsNotAdvancedInDecoding(LoopedLM):
    prompt_end = 0

    def embed(self, ids_BT, cache=None):
        if cache is None:
            return super().embed(ids_BT)
        positions = cache.positions(ids_BT.shape[1])
        if positions.shape[1] > 1:
            self.prompt_end = int(positions.max()) + 1
        through, stuck = Through(cache), self.prompt_end
        if positions.shape[1] == 1 and positions.min() > 0:
            through.positions = lambda tokens: torch.full_like(positions, stuck)
        return super().embed(ids_BT, through)


class ClampsPositions(LoopedLM):
    """Beyond the context every token stands at the last position."""

    def embed(self, ids_BT, cache=None):
        asked = torch.arange(ids_BT.shape[1])[None] if cache is None else cache.positions(ids_BT.shape[1])
        through = Through(cache)
        through.positions = lambda tokens: asked.clamp(max=self.config.max_length - 1)
        return super().embed(ids_BT, through)


class NormSkippedInDecoding(LoopedLM):
    def loop(self, state, k, cache=None):
        norm = self.recurrence.inter_loop_norm
        if cache is not None and k == 2 and state.h_BTD.shape[1] == 1:
            self.recurrence.inter_loop_norm = None
        try:
            return super().loop(state, k, cache)
        finally:
            self.recurrence.inter_loop_norm = norm


class NormOfTheFirstRowsLoop(LoopedLM):
    """With rows at different loops, what opens the loop goes by the first of them."""

    def __init__(self, config):
        super().__init__(config)
        own = self.recurrence.open
        self.recurrence.open = lambda h_BTD, e_BTD, k: own(h_BTD, e_BTD, k if isinstance(k, int) else k[0])


class SlotOfTheFirstRowsLoop(OtherCache):
    class View(Through):
        def extend(self, slot, k_BHTC, v_BHTC):
            part, k, layer = slot
            return self.cache.extend((part, k if isinstance(k, int) else k[0], layer), k_BHTC, v_BHTC)


class BatchStatistics(LoopedLM):
    def loop(self, state, k, cache=None):
        return super().loop(state.with_h(state.h_BTD - 0.1 * state.h_BTD.mean(0)), k, cache)


class SeesItsFuture(LoopedLM):
    def loop(self, state, k, cache=None):
        new = super().loop(state, k, cache)
        return new.with_h(new.h_BTD - 0.1 * new.h_BTD.mean(1, keepdim=True)) if k == 2 else new


class StaleAfterRollback(OtherCache):
    """What stands at a position of loop 2's layer 1 is never written again."""

    class View(Through):
        kept: ClassVar[dict] = {}

        def extend(self, slot, k_BHTC, v_BHTC):
            if slot != ("core", 2, 1) or len(k_BHTC) > 1:
                return self.cache.extend(slot, k_BHTC, v_BHTC)
            view = self.cache.view
            home = self.kept.setdefault((id(view.cache), view.rows[0]), (view.cache, {}))[1]  # kept: no id comes again
            for place, position in enumerate(self.cache.positions(k_BHTC.shape[2])[0].tolist()):
                first = home.setdefault(position, (k_BHTC[:, :, place].clone(), v_BHTC[:, :, place].clone()))
                k_BHTC[:, :, place], v_BHTC[:, :, place] = first
            return self.cache.extend(slot, k_BHTC, v_BHTC)


class CodaKeepsNoKeys(LoopedLM):
    def features(self, state, k, cache=None):
        return super().features(state, k)


class CountsItsOwnLoops(LoopedLM):
    """The loop embedding goes by a counter that takes every run to be of the trained depth."""

    count = 0

    def loop(self, state, k, cache=None):
        self.count = self.count % self.num_loops + 1
        own = self.recurrence.open
        self.recurrence.open = lambda h_BTD, e_BTD, _: own(h_BTD, e_BTD, self.count)
        try:
            return super().loop(state, k, cache)
        finally:
            self.recurrence.open = own


class ReadsTheLastState(LoopedLM):
    """Every exit shows the state of the last loop that was run."""

    last: LoopState | None = None

    def loop(self, state, k, cache=None):
        self.last = super().loop(state, k, cache)
        return self.last

    def features(self, state, k, cache=None):
        last = self.last if self.last is not None and self.last.h_BTD.shape == state.h_BTD.shape else state
        return super().features(last, k, cache)


class DropoutLeftOn(LoopedLM):
    def loop(self, state, k, cache=None):
        return super().loop(state.with_h(F.dropout(state.h_BTD, 0.1, training=True)), k, cache)


class OtherAttention(LoopedLM):
    """One layer of the core has another attention."""

    layer = 0
    Own: type[Attention] = Attention

    def __init__(self, config):
        super().__init__(config)
        own = self.recurrence.core.layers[self.layer].attention
        own.__class__ = self.Own


class LayerForgetsToCache(OtherAttention):
    layer = 1

    class Own(Attention):
        def forward(self, x_BTD, norm, rotary, cache, slot, inner=None, more_values_BTGC=None, query_BTD=None):
            alone = cache is not None and x_BTD.shape[1] == 1
            return super().forward(x_BTD, norm, rotary, None if alone else cache, slot, inner)


class RotatesCachedKeysWrongly(OtherAttention):
    """Keys are cached before their rotation, and later rotated as if the cache began one position further on."""

    layer = 1

    class Own(Attention):
        def forward(self, x_BTD, norm, rotary, cache, slot, inner=None, more_values_BTGC=None, query_BTD=None):
            if cache is None:
                return super().forward(x_BTD, norm, rotary, cache, slot, inner)
            x_BTD = x_BTD if norm is None else norm(x_BTD)
            qkv_BTHC = self.qkv(x_BTD).unflatten(-1, (-1, self.head_width))
            q, k, v = (each.transpose(1, 2) for each in qkv_BTHC.chunk(3, 2))
            k, v = cache.extend(slot, k, v)
            late = int(k.shape[2] > q.shape[2])
            angles: Rotation = rotation(
                torch.arange(k.shape[2])[None].expand(len(k), -1) + late, self.head_width, 10_000.0
            )
            heads = causal_attention(rotate(q, rotary), rotate(k, angles), v, cache.mask(q.shape[2]))
            return self.out(heads.transpose(1, 2).flatten(-2))


class FirstTokenOfAChunkUnmasked(OtherAttention):
    class Own(Attention):
        def forward(self, x_BTD, norm, rotary, cache, slot, inner=None, more_values_BTGC=None, query_BTD=None):
            if cache is None or x_BTD.shape[1] == 1:
                return super().forward(x_BTD, norm, rotary, cache, slot, inner)
            through, tokens = Through(cache), x_BTD.shape[1]
            keys = int(cache.positions(tokens).max()) + 1
            mask: Tensor = cache.mask(tokens)
            if mask is None:
                mask = torch.ones(len(x_BTD), 1, tokens, keys, dtype=torch.bool).tril(keys - tokens)
            mask[:, :, 0] = True
            through.mask = lambda _: mask
            return super().forward(x_BTD, norm, rotary, through, slot, inner)


@dataclass(frozen=True)
class Fault:
    """A faulty model, and what must be said of it."""

    model: type[LoopedLM]
    check: str
    part: str | None
    loop: int | None
    layer: int | None
    position: int
    changes: tuple[tuple[str, object], ...] = ()

    def build(self) -> LoopedLM:
        torch.manual_seed(0)
        return self.model(replace(CONFIG, **dict(self.changes))).eval()


FAULTS = [
    Fault(LoopsShareASlot, "slots", "core", 2, 0, 1),
    Fault(LoopsBeyondTheTrainedDepthShareASlot, "slots", "core", 4, 0, 1),
    Fault(MaskLostInDecoding, "ragged", "core", 1, 0, 2),
    Fault(MaskOfTheFirstRow, "ragged", "core", 1, 0, 3),
    Fault(PositionsOffByOneAfterPrefill, "cached", "positions", 0, None, 6),
    Fault(PositionsOffByOneAfterPrefill, "cached", "embedding", 0, None, 6, (("positions", "learned"),)),
    Fault(PositionsNotAdvancedInDecoding, "cached", "positions", 0, None, 7),
    Fault(ClampsPositions, "context", "embedding", 0, None, 24),
    # An RMSNorm changes the scale alone, which the layer's own norm hides from its keys: the next layer's tell.
    Fault(NormSkippedInDecoding, "cached", "core", 2, 0, 6),
    Fault(NormSkippedInDecoding, "cached", "opening", 2, None, 6, (("inter_loop_norm", "layernorm"),)),
    Fault(NormOfTheFirstRowsLoop, "mixed-depths", "opening", 1, None, 2, (("inter_loop_norm", "layernorm"),)),
    Fault(SlotOfTheFirstRowsLoop, "mixed-depths", "core", 1, 0, 2),
    Fault(BatchStatistics, "neighbours", None, 1, None, 0),
    Fault(SeesItsFuture, "causal", None, 2, None, 0),
    Fault(StaleAfterRollback, "rollback", "core", 2, 0, 6),
    Fault(CodaKeepsNoKeys, "cached", "readout", 1, None, 6, (("coda_layers", 1),)),
    Fault(CountsItsOwnLoops, "depth", None, 1, None, 0, (("loop_embedding", True),)),
    Fault(ReadsTheLastState, "depth", None, 1, None, 0),
    Fault(DropoutLeftOn, "two-runs", None, 1, None, 0),
    Fault(LayerForgetsToCache, "cached", "core", 1, 1, 6),
    Fault(RotatesCachedKeysWrongly, "cached", "core", 1, 1, 6),
    Fault(FirstTokenOfAChunkUnmasked, "cached", "core", 1, 0, 0),
]
