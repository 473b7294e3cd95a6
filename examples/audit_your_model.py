"""Audit a looped model of your own: three functions are all that loopscope needs of it.

    python examples/audit_your_model.py

The network below is plain torch and imports nothing of loopscope. `ls.adapt` says how its parts make a loop, and the
audit says what the loop carries that no loss sees, before a single step is trained: first through an RMSNorm readout,
then with the state read out as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import loopscope as ls

VOCABULARY, WIDTH, NUM_LOOPS = 128, 32, 4


class YourNetwork(nn.Module):
    """Tokens attend to what came before, then a feed-forward; the same weights in every loop."""

    def __init__(self, *, with_readout_norm: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.readout_norm = nn.RMSNorm(WIDTH) if with_readout_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Ids (batch, tokens) → the state before the first loop."""
        return self.embedding(ids)

    def loop(self, h: Tensor, k: int) -> Tensor:
        """The state after loop k."""
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1], device=h.device, dtype=h.dtype)
        return self.block(h, src_mask=mask, is_causal=True)

    def readout(self, h: Tensor, k: int) -> Tensor:
        """State → logits."""
        return self.head(self.readout_norm(h))


def audited(*, with_readout_norm: bool) -> ls.AuditResult:
    """The audit of a fresh network with cross-entropy at every loop, on random tokens; give it your text."""
    torch.manual_seed(0)
    network = YourNetwork(with_readout_norm=with_readout_norm).eval()
    model = ls.adapt(
        embed=network.embed, loop=network.loop, readout=network.readout, num_loops=NUM_LOOPS, module=network
    )
    batches = [torch.randint(VOCABULARY, (4, 24))]
    options = ls.AuditOptions(states=2, prefix=8, tokens=64)
    return ls.audit(model, batches, supervised="every-loop", options=options)


if __name__ == "__main__":
    for name, with_readout_norm in (("RMSNorm readout", True), ("raw readout", False)):
        result = audited(with_readout_norm=with_readout_norm)
        scale = result.variable("scale")
        print(f"{name}: {result.verdict}")
        print(f"  scale is {scale.verdict}: {scale.evidence}")
        if scale.remedy is not None:
            print(f"  remedy: {scale.remedy}")
