"""Other tokens: channels that only they read, states that are handed to them, and variables hidden for some of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import loopscope as ls
from cases.nets import PREFIXES, TOKENS, Kind, Net, Planted, blank, control, plant, rms

# --- readers and homes in other tokens -------------------------------------------------------------------------------


def earlier(x_BTD: Tensor, first_BTD: Tensor | None = None) -> Tensor:
    """Every token gets what the token before it has; the first gets nothing, or the first of another tensor."""
    first_B1D = torch.zeros_like(x_BTD[:, :1]) if first_BTD is None else first_BTD[:, :1]
    return torch.cat([first_B1D, x_BTD[:, :-1]], dim=1)


def attended(net: Net, x_BTD: Tensor) -> Tensor:
    """Attention to *earlier* tokens only: attention of what the token before has, whose values are shifted too."""
    return net.attention(earlier(x_BTD))


def _only(h_BTD: Tensor, channels: int) -> Tensor:
    """The last channels, the others set to zero."""
    return F.pad(h_BTD[..., -channels:], (h_BTD.shape[-1] - channels, 0))


def _masked_core(width: int, channels: int) -> Net:
    """The plain core with M, c channels, left out of what its blocks read; it writes to all channels."""
    return Net(width, norm=lambda x: rms(blank(x, channels)))


def read_by_later_tokens(width: int, channels: int, reads: Callable[[Net, Tensor], Tensor] | None) -> Planted:
    """M is left out by the token's own blocks and by the raw readout; `reads` writes β·(M of earlier tokens) to h.

    N = M. The token itself never feels M, F(h + m) = F(h) + m there. Through attention, or from the next token, later
    tokens do, in shown channels at O(β): read, hidden and carried. Blind c. Without a reader: inert, blind 0.
    """
    net = _masked_core(width, channels)

    def loop(h: Tensor, k: int) -> Tensor:
        heard = 0 if reads is None else net.strength * reads(net, _only(h, channels))
        return net.loop(h, k) + heard

    return plant(net, lambda h, k: net.logits(blank(h, channels)), loop=loop)


def next_token_listens(net: Net, x_BTD: Tensor) -> Tensor:
    """The next token reads them through a random matrix."""
    return F.linear(earlier(x_BTD), net.out)


def handed_on(width: int, channels: int, *, gain: float = 1.0, read: bool = True, tokens: int = 1) -> Planted:
    """Each loop first hands M, c channels, to the next token (the first token keeps its own). Raw readout of Ph.

    N = M in every token: m is gone from its own token after one loop, and in the next one's M in full, hidden there
    too. The core writes M and reads it. Blind c. With gain ½ it is halved at every step: damped, blind 0. With a core
    that reads Ph only nobody ever reads it: inert, blind 0. The same if it is handed on by several tokens at once.
    """
    net = Net(width) if read else _masked_core(width, channels)

    def loop(h: Tensor, k: int) -> Tensor:
        moved = h[..., -channels:]
        for _ in range(tokens):
            moved = earlier(moved, moved)
        moved = gain * moved
        return net.loop(torch.cat([h[..., :-channels], moved], dim=-1), k)

    return plant(net, lambda h, k: net.logits(blank(h, channels)), loop=loop)


def handed_into_sight(width: int, channels: int) -> Planted:
    """Each loop hands M to the next token's first c channels, which are shown, and takes the old ones of those as M.

    (0 … m) of token t ↦ (m … 0) of token t + 1: at the next exit all of it is shown. Blind 0.
    """
    net = Net(width)

    def loop(h: Tensor, k: int) -> Tensor:
        shown, rest, hidden = h[..., :channels], h[..., channels:-channels], h[..., -channels:]
        return net.loop(torch.cat([earlier(hidden, hidden), rest, shown], dim=-1), k)

    return plant(net, lambda h, k: net.logits(blank(h, channels)), loop=loop)


def read_out_by_the_next_token(width: int, channels: int, share: float) -> Planted:
    """Raw readout of Ph plus `share` times the M of the token before, in M's place: the next token's exit shows M.

    share = 1: as strongly as any channel, N = 0 but for the last token of a text. Blind 0. share = 1e-4: ten lengths
    are 1e-3 in the next token's logits, noticed by 1e-6: hidden, and the core reads it. Blind c.
    """
    net = Net(width)
    return plant(net, lambda h, k: net.logits(blank(h, channels) + share * earlier(_only(h, channels))))


def scale_kept_to_itself(width: int, listening: bool) -> Planted:
    """RMSNorm readout: N = span(h). The loop h ← h·(1 + β·tanh mean B(û)) + s·β·c·v leaves F(αh) = α·F(h) (eps = 0).

    Whatever a token's own scale is, its directions are the same. c = 0: nobody ever reads the scale: inert, blind 0.
    c = tanh log s of the token before, v a fixed vector: the next token reads it, and only that one. Blind 1.
    """
    net = Net(width)

    def loop(h: Tensor, k: int) -> Tensor:
        grown = h * (1 + net.strength * torch.tanh(net.attention(rms(h, eps=0.0)).mean(-1, keepdim=True)))
        scale = h.square().mean(-1, keepdim=True).sqrt()
        heard = net.strength * scale * torch.tanh(earlier(scale.log())) * net.table[0]
        return grown + heard if listening else grown

    return plant(net, lambda h, k: net.logits(rms(h, eps=0.0)), loop=loop)


# --- some of the tokens ----------------------------------------------------------------------------------------------


def _marked_text(vocab_size: int, every: int, of: int) -> Tensor:
    """Random tokens from the upper half of the vocabulary, but `every` of each `of` in a row from the lower half."""
    random = torch.Generator().manual_seed(2)
    half = vocab_size // 2
    ids_N = torch.randint(half, vocab_size, (PREFIXES * TOKENS,), generator=random)
    marked_N = torch.arange(len(ids_N)) % of < every
    return torch.where(marked_N, ids_N - half, ids_N).view(PREFIXES, TOKENS)


def seen_by_some(width: int, every: int, of: int, power: float = 0.0) -> Planted:
    """Features h·s^(a−1): a = 1, raw, for most tokens; `power` for `every` of each `of` tokens, 0 hiding the scale.

    A token notices at α = 1.136^(1/a): 1.14 for raw, 20 for a = 0.0425, 1000 for a = 0.0185, never for 0. It is a
    finding when half of the tokens are free tenfold, or 5 % a hundredfold:

        free for ever      2 %: none       6 %, 12.5 %, 40 %, 60 %: blind 1, the scale
        free 20-fold       20 %, 40 %: none, the tail of a distribution       60 %: blind 1
        free 1000-fold     20 %: blind 1, a population that no loss sees
    """
    net = Net(width)
    half = len(net.table) // 2

    def embed(ids_BT: Tensor) -> ls.LoopState:
        power_BT1 = torch.where(ids_BT < half, power, 1.0)[..., None].to(net.table)
        return ls.LoopState(net.embed(ids_BT), context=power_BT1)

    def readout(state: ls.LoopState, k: int) -> Tensor:
        scale_BT1 = (state.h_BTD.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return net.logits(state.h_BTD * scale_BT1 ** (state.context - 1))

    model = ls.adapt(
        embed=embed,
        loop=lambda state, k: state.with_h(net.loop(state.h_BTD, k)),
        readout=readout,
        num_loops=3,
        module=net,
    )
    return Planted(model, net.head, text_BT=_marked_text(len(net.head), every, of))


KINDS = (
    Kind(
        "read by later tokens",
        partial(read_by_later_tokens, channels=3, reads=attended),
        (32, 128),
        3,
        scale="visible",
    ),
    Kind(
        "read by the next token",
        partial(read_by_later_tokens, channels=3, reads=next_token_listens),
        (16, 32),
        3,
        scale="visible",
    ),
    control("read by no token", partial(read_by_later_tokens, channels=3, reads=None), (16, 32)),
    Kind("handed to the next token", partial(handed_on, channels=3), (16, 32), 3, scale="visible"),
    control("handed on, halved", partial(handed_on, channels=3, gain=0.5), (32,)),
    control("handed on, never read", partial(handed_on, channels=3, read=False), (32,)),
    Kind("handed two tokens on", partial(handed_on, channels=3, tokens=2), (32,), 3, scale="visible"),
    control("handed two tokens on, halved", partial(handed_on, channels=3, tokens=2, gain=0.5), (32,)),
    control("handed into sight", partial(handed_into_sight, channels=3), (32,)),
    control("the next token's exit", partial(read_out_by_the_next_token, channels=3, share=1.0), (32,)),
    Kind(
        "the next token's exit, 1e-4",
        partial(read_out_by_the_next_token, channels=3, share=1e-4),
        (32,),
        3,
        scale="visible",
    ),
    Kind("scale read by the next token", partial(scale_kept_to_itself, listening=True), (32,), 1),
    control("scale read by no token", partial(scale_kept_to_itself, listening=False), (32,), scale="inert"),
    Kind("hidden for 60 % of tokens", partial(seen_by_some, every=3, of=5), (32,), 1, every_token=False),
    Kind("hidden for 40 % of tokens", partial(seen_by_some, every=2, of=5), (32, 128), 1, every_token=False),
    Kind("hidden for 12.5 % of tokens", partial(seen_by_some, every=1, of=8), (32,), 1, every_token=False),
    Kind("hidden for 6 % of tokens", partial(seen_by_some, every=1, of=16), (32,), 1, every_token=False),
    control("hidden for 2 % of tokens", partial(seen_by_some, every=1, of=48), (32,), every_token=False),
    Kind("20-fold for 60 % of tokens", partial(seen_by_some, every=3, of=5, power=0.0425), (32,), 1, every_token=False),
    control("20-fold for 40 % of tokens", partial(seen_by_some, every=2, of=5, power=0.0425), (32,), every_token=False),
    control("20-fold for 20 % of tokens", partial(seen_by_some, every=1, of=5, power=0.0425), (32,), every_token=False),
    Kind(
        "1000-fold for 20 % of tokens", partial(seen_by_some, every=1, of=5, power=0.0185), (32,), 1, every_token=False
    ),
)
