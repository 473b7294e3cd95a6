"""Keys and values of earlier tokens, one slot per part of the model, loop and layer."""

from __future__ import annotations

import torch
from torch import Tensor

from loopscope.protocol import Slot


class KVCache:
    """A cache that grows by concatenation; implements `protocol.Cache`."""

    def __init__(self) -> None:
        self.length = 0
        self._slots: dict[Slot, tuple[Tensor, Tensor]] = {}

    def extend(self, slot: Slot, k_BHTC: Tensor, v_BHTC: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values of a slot and return all of them."""
        if slot in self._slots:
            old_k, old_v = self._slots[slot]
            k_BHTC, v_BHTC = torch.cat([old_k, k_BHTC], dim=2), torch.cat([old_v, v_BHTC], dim=2)
        self._slots[slot] = (k_BHTC, v_BHTC)
        return k_BHTC, v_BHTC
