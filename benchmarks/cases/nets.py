"""What planted models are made of: the plain net, a readout or loop of the case's own, and what is derived of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import loopscope as ls

PREFIXES, TOKENS = 8, 24

Loop = Callable[[Any, int], Any]
Readout = Callable[[Any, int], Tensor]


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm without gains."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def centred(x: Tensor, eps: float = 1e-6) -> Tensor:
    """LayerNorm without gains: RMSNorm of x minus its mean."""
    return rms(x - x.mean(-1, keepdim=True), eps)


def blank(x: Tensor, channels: int) -> Tensor:
    """x with its last channels set to zero."""
    return F.pad(x[..., :-channels], (0, channels))


class Net(nn.Module):
    """Embedding, one pre-norm residual layer (attention and MLP) for the loop, and a head; random weights."""

    lost_DR: Tensor
    gains: nn.Parameter

    def __init__(
        self,
        width: int,
        *,
        vocab_size: int | None = None,
        norm: Callable[[Tensor], Tensor] = rms,
        strength: float = 0.03,
        scale: float = 1.0,
        head_std: float = 1.0,
        tied: bool = False,
        mirrored: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        vocab_size = vocab_size or 4 * width
        self.norm, self.strength, self.num_heads = norm, strength * scale, 4
        self.random = torch.Generator().manual_seed(width + seed)
        self.table = self.normal(vocab_size, width, std=scale)
        self.positions = self.normal(TOKENS, width, std=0.3 * scale)
        self.qkv = self.normal(3 * width, width, std=width**-0.5)
        self.out = self.normal(width, width, std=width**-0.5)
        self.up = self.normal(2 * width, width, std=width**-0.5)
        self.down = (
            nn.Parameter(self.up.detach().T.clone()) if mirrored else self.normal(width, 2 * width, std=width**-0.5)
        )
        self.head = self.table if tied else self.normal(vocab_size, width, std=head_std * width**-0.5)

    def normal(self, *shape: int, std: float) -> nn.Parameter:
        """A random matrix from the model's own generator."""
        return nn.Parameter(std * torch.randn(shape, generator=self.random))

    def embed(self, ids_BT: Tensor) -> Tensor:
        """h_0."""
        return self.table[ids_BT] + self.positions[: ids_BT.shape[1]]

    def loop(self, h_BTD: Tensor, k: int) -> Tensor:
        """F(h) = h + β·B(norm h), k ignored."""
        h_BTD = h_BTD + self.strength * self.attention(self.norm(h_BTD))
        return h_BTD + self.strength * F.linear(F.gelu(F.linear(self.norm(h_BTD), self.up)), self.down)

    def attention(self, x_BTD: Tensor) -> Tensor:
        """Causal self-attention, spelled out."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in F.linear(x_BTD, self.qkv).chunk(3, -1)
        )
        scores_BHTT = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future_TT = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        mixed_BHTC = scores_BHTT.masked_fill(future_TT, -math.inf).softmax(-1) @ v
        return F.linear(mixed_BHTC.transpose(1, 2).flatten(-2), self.out)

    def logits(self, features_BTD: Tensor) -> Tensor:
        """features @ head.T."""
        return F.linear(features_BTD, self.head)


@dataclass(frozen=True)
class Planted:
    """A model, what its objective supervises and sees, and its head for the comparator."""

    model: Any
    head_VD: Tensor
    supervised: str | Sequence[int] | ls.ObjectiveConfig = "every-loop"
    terms: Sequence[ls.Term] = ()
    text_BT: Tensor | None = None
    """The tokens to audit it on, where random ones will not do."""
    most_loops: int | None = None
    """How deep it can be run, where that is no deeper than trained."""

    def ids(self) -> Tensor:
        """The text, or random prefixes, the same on every call."""
        if self.text_BT is not None:
            return self.text_BT
        return torch.randint(len(self.head_VD), (PREFIXES, TOKENS), generator=torch.Generator().manual_seed(1))


def plant(
    net: Net,
    readout: Readout,
    *,
    embed: Callable[[Tensor], Any] | None = None,
    loop: Loop | None = None,
    num_loops: int = 3,
    **objective: Any,
) -> Planted:
    """A looped model of a net, with a readout and perhaps a beginning or a loop of the case's own."""
    model = ls.adapt(embed=embed or net.embed, loop=loop or net.loop, readout=readout, num_loops=num_loops, module=net)
    return Planted(model, net.head, **objective)


def plant_injected(net: Net, keep: Callable[[Tensor], Tensor], readout: Callable[[Tensor], Tensor]) -> Planted:
    """F(h) = core(keep(h) + e): the embedding e travels in the state's context."""

    def embed(ids_BT: Tensor) -> ls.LoopState:
        e_BTD = net.embed(ids_BT)
        return ls.LoopState(e_BTD, context=e_BTD)

    def loop(state: ls.LoopState, k: int) -> ls.LoopState:
        return state.with_h(net.loop(keep(state.h_BTD) + state.context, k))

    model = ls.adapt(embed=embed, loop=loop, readout=lambda s, k: readout(s.h_BTD), num_loops=3, module=net)
    return Planted(model, net.head)


def built(width: int, **fields: Any) -> Planted:
    """One of our own models, default initialisation, dropout on in training mode."""
    config = ls.ModelConfig(
        **{"vocab_size": 4 * width, "width": width, "num_layers": 1, "num_loops": 3, "max_length": TOKENS} | fields
    )
    model = ls.build(config, seed=width)
    return Planted(model, model.head)


def regular_text(vocab_size: int) -> Tensor:
    """Sixteen rows in which every token fixes the next."""
    first_B = torch.arange(16) * 5 % vocab_size
    return torch.stack([(first_B + 7 * t) % vocab_size for t in range(TOKENS)], dim=1)


def trained(planted: Planted, steps: int = 25) -> Planted:
    """The same after some steps of per-loop cross-entropy on the regular text."""
    optimizer = torch.optim.Adam(planted.model.parameters(), lr=3e-3)
    vocab_size = len(planted.head_VD)
    ids_BT = regular_text(vocab_size)
    for _ in range(steps):
        states = ls.run_loops(planted.model, ids_BT).states
        logits = [planted.model.readout(states[k], k) for k in range(1, len(states))]
        loss = sum(F.cross_entropy(part[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()) for part in logits)
        optimizer.zero_grad()
        torch.as_tensor(loss).backward()
        optimizer.step()
    return planted


@dataclass(frozen=True)
class Kind:
    """A planted model at several widths, with what its docstring derives. None: not derived, not checked."""

    name: str
    make: Callable[[int], Planted]
    widths: tuple[int, ...]
    blind: int
    """Blind directions of h and of all carried tensors together."""
    scale: str | None = "blind"
    mean: str | None = "visible"
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Carried tensor → a verdict that some variable of that tensor has."""
    control: bool = False
    every_token: bool = True
    """The same for every token, so that all searched states must agree."""

    @property
    def verdict(self) -> str:
        """Of the whole model."""
        return "blind-spot" if self.blind else "controlled"


control = partial(Kind, blind=0, scale="visible", control=True)
