"""Second carried tensors: the state is h with every tensor in `LoopState.carried`, and a direction may lie in any.

Here h has width d and `slow` has m channels of scale about 1; the blind directions are all in `slow` unless a docstring
says otherwise. The plain loop is

    h ← core(h) + β·R·rms(slow)        slow ← slow + β·G·rms(h)        β = 0.03, R (d × m) and G (m × d) random

so DF = I + O(β) in the joint state: everything is reachable and carried. R is injective and reads all of slow but its
scale, and that at the loop after (rms of α·slow + β·G·rms h moves with α). The raw readout of h shows all of h.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import loopscope as ls
from cases.nets import Kind, Net, Planted, blank, centred, control, rms

Step = Callable[[Tensor, Tensor], Tensor]
Show = Callable[[Tensor, Tensor], Tensor]

HIDDEN = {"slow": "blind"}


class TwoTensors(Net):
    """The plain net with a second carried tensor, its reader R, its writer G and a head U of its own."""

    def __init__(self, width: int, channels: int, strength: float = 0.03) -> None:
        super().__init__(width, strength=strength)
        self.slow_table = self.normal(len(self.table), channels, std=1.0)
        self.reader = self.normal(width, channels, std=channels**-0.5)
        self.writer = self.normal(channels, width, std=width**-0.5)
        self.slow_head = self.normal(len(self.head), channels, std=channels**-0.5)

    def read(self, slow_BTM: Tensor) -> Tensor:
        """β·R·slow."""
        return self.strength * nn.functional.linear(slow_BTM, self.reader)

    def write(self, h_BTD: Tensor) -> Tensor:
        """β·G·rms(h)."""
        return self.strength * nn.functional.linear(rms(h_BTD), self.writer)

    def both(self, h_BTD: Tensor, slow_BTM: Tensor) -> Tensor:
        """W·h + U·slow."""
        return self.logits(h_BTD) + nn.functional.linear(slow_BTM, self.slow_head)


def plant_two(
    net: TwoTensors,
    *,
    new_h: Step | None = None,
    new_slow: Step | None = None,
    show: Show | None = None,
    first_slow: Callable[[Tensor], Tensor] | None = None,
) -> Planted:
    """The plain model with two tensors, or with a loop, readout or beginning of the case's own."""
    step_h = new_h or (lambda h, slow: net.loop(h, 0) + net.read(rms(slow)))
    step_slow = new_slow or (lambda h, slow: slow + net.write(h))
    readout = show or (lambda h, slow: net.logits(h))
    begin = first_slow or (lambda ids_BT: net.slow_table[ids_BT])

    def loop(state: ls.LoopState, k: int) -> ls.LoopState:
        h, slow = state.h_BTD, state.carried["slow"]
        return ls.LoopState(step_h(h, slow), carried={"slow": step_slow(h, slow)})

    model = ls.adapt(
        embed=lambda ids_BT: ls.LoopState(net.embed(ids_BT), carried={"slow": begin(ids_BT)}),
        loop=loop,
        readout=lambda state, k: readout(state.h_BTD, state.carried["slow"]),
        num_loops=3,
        module=net,
    )
    return Planted(model, net.head)


def unread_tensor(width: int, channels: int) -> Planted:
    """The plain model: no exit reads slow, the loop does. N = slow. Blind m."""
    return plant_two(TwoTensors(width, channels))


def unread_tensor_behind_rmsnorm(width: int, channels: int) -> Planted:
    """Readout rms(h): N = slow ⊕ span(h). Blind m in slow and 1 in h, the scale."""
    net = TwoTensors(width, channels)
    return plant_two(net, show=lambda h, slow: net.logits(rms(h)))


def tensor_in_sight(width: int, channels: int) -> Planted:
    """Logits W·h + U·slow, U random and injective, W and U in general position (V = 4d ≥ d + m): N = 0. Blind 0."""
    net = TwoTensors(width, channels)
    return plant_two(net, show=net.both)


def tensor_read_in_part(width: int, channels: int, unread: int) -> Planted:
    """Logits W·h + U·P·slow, where P blanks c of the m channels: N is these. Blind c."""
    net = TwoTensors(width, channels)
    return plant_two(net, show=lambda h, slow: net.both(h, blank(slow, unread)))


def tensor_behind_a_norm(width: int, channels: int, norm: Callable[[Tensor], Tensor]) -> Planted:
    """Logits W·h + U·norm(slow): RMSNorm hides span(slow), blind 1; LayerNorm span(1, slow), which R reads, blind 2."""
    net = TwoTensors(width, channels)
    return plant_two(net, show=lambda h, slow: net.both(h, norm(slow)))


def decaying_tensor(width: int, channels: int) -> Planted:
    """slow ← ½·slow + β·G·rms(h): hidden, halved by every loop: damped. Blind 0."""
    net = TwoTensors(width, channels)
    return plant_two(net, new_slow=lambda h, slow: 0.5 * slow + net.write(h))


def slowly_decaying_tensor(width: int, channels: int) -> Planted:
    """slow ← 0.99·slow + β·G·rms(h): above 0.95 a loop, not damped. Blind m."""
    net = TwoTensors(width, channels)
    return plant_two(net, new_slow=lambda h, slow: 0.99 * slow + net.write(h))


def tensor_never_read(width: int, channels: int) -> Planted:
    """h ← core(h): slow is written and carried, and nobody ever reads it: inert. Blind 0."""
    net = TwoTensors(width, channels)
    return plant_two(net, new_h=lambda h, slow: net.loop(h, 0))


def injected_tensor(width: int) -> Planted:
    """slow = e, the embedding: slow ← slow, and h ← core(h + β·e). Every loop reads it, no exit does.

    No loop writes it: what it adds, new − old, is 0 whatever h is. It is the input, carried in sight. Blind 0.
    """
    net = TwoTensors(width, width)
    return plant_two(
        net,
        new_h=lambda h, slow: net.loop(h + net.strength * slow, 0),
        new_slow=lambda h, slow: slow,
        first_slow=net.embed,
    )


def tensor_behind_an_inter_loop_norm(width: int, channels: int, closing: bool) -> Planted:
    """slow ← rms(slow + β·G·rms h), or rms(slow) + β·G·rms h: hidden, carried, read and bounded: memory. Blind 0.

    (Its scale: the closing norm leaves it unwritten, the opening one removes it.)
    """
    net = TwoTensors(width, channels)
    closed: Step = lambda h, slow: rms(slow + net.write(h))  # noqa: E731
    opened: Step = lambda h, slow: rms(slow) + net.write(h)  # noqa: E731
    return plant_two(net, new_slow=closed if closing else opened)


def mirrored_state(width: int, norm: Callable[[Tensor], Tensor] | None) -> Planted:
    """slow ← core(slow) and h ← the same: h is a copy of slow for the exits to read, and no loop reads h.

    range DF = {(x, x)}: (0, δ) is at a distance of 1/√2 from it, no loop writes slow without writing h. Raw: N meets
    the range in 0, blind 0. RMSNorm: N = {(c·h, anything)} meets it in span((h, slow)), the scale of both. Blind 1, in
    h and slow together; scale of h alone is not derived (no loop carries it).
    """
    net = TwoTensors(width, width)
    return plant_two(
        net,
        new_h=lambda h, slow: net.loop(slow, 0),
        new_slow=lambda h, slow: net.loop(slow, 0),
        show=lambda h, slow: net.logits(h if norm is None else norm(h)),
        first_slow=net.embed,
    )


def two_step_recurrence(width: int, norm: Callable[[Tensor], Tensor] | None) -> Planted:
    """h ← core(½·(h + slow)), slow ← the old h: slow is copied into h by the next loop and gone.

    Raw: N = slow; (0, δ) ↦ (½·δ, 0) has nothing hidden at the next exit: a = 0. Shown later, blind 0.
    RMSNorm: N = span(h) ⊕ slow. The next exit hides (x, y) only with x ∥ h, and h and slow are parallel up to O(β):
    left are (a·h, b·h), which the loop maps by [[½, ½], [1, 0]]. Its eigenvalues are 1 at (1, 1) and −½ at (1, −2):
    one is carried, one damped. Blind 1, the scale of h and slow together.
    """
    net = TwoTensors(width, width)
    return plant_two(
        net,
        new_h=lambda h, slow: net.loop((h + slow) / 2, 0),
        new_slow=lambda h, slow: h,
        show=lambda h, slow: net.logits(h if norm is None else norm(h)),
        first_slow=net.embed,
    )


def tensor_poured_into_h(width: int) -> Planted:
    """h ← core(h + slow), slow ← β·G·rms(h): what slow holds is handed to h each loop, and slow starts anew.

    (0, δ) ↦ (δ, 0) + O(β): nothing of it is hidden at the next exit, and nothing of it is left in slow. Blind 0.
    """
    net = TwoTensors(width, width)
    return plant_two(
        net, new_h=lambda h, slow: net.loop(h + slow, 0), new_slow=lambda h, slow: net.write(h), first_slow=net.embed
    )


def split_state(width: int, norm: Callable[[Tensor], Tensor] | None, unread: int = 0) -> Planted:
    """One state of width 2d cut in two, the plain net of 2d: h is its first half, slow its second.

    Both halves are read out together, so the verdict is that of the whole. Raw: N = 0. RMSNorm: 1, the scale of both
    (of neither alone). c unread channels of the second half under raw: c, in slow.
    """
    whole = Net(2 * width)

    def joint(state: ls.LoopState) -> Tensor:
        return torch.cat([state.h_BTD, state.carried["slow"]], dim=-1)

    def parts(x: Tensor) -> ls.LoopState:
        return ls.LoopState(x[..., :width], carried={"slow": x[..., width:]})

    def readout(state: ls.LoopState, k: int) -> Tensor:
        x = joint(state)
        x = blank(x, unread) if unread else x
        return whole.logits(x if norm is None else norm(x))

    model = ls.adapt(
        embed=lambda ids_BT: parts(whole.embed(ids_BT)),
        loop=lambda state, k: parts(whole.loop(joint(state), k)),
        readout=readout,
        num_loops=3,
        module=whole,
    )
    return Planted(model, whole.head)


def tensor_that_starts_at_zero(width: int, channels: int) -> Planted:
    """Blocks start at nothing: h ← h + R·slow, slow ← slow + G·(h − e). Untrained h = e and slow = 0 at every loop.

    The Jacobian is that of a working model all the same: slow is carried, G writes it, R reads it into h, no exit
    shows it. Blind m. (Judged with small noise in slow, in its own units, which what arrives in h is nothing beside.)
    """
    net = TwoTensors(width, channels)

    def embed(ids_BT: Tensor) -> ls.LoopState:
        e_BTD = net.embed(ids_BT)
        zero_BTM = 0 * net.slow_table[ids_BT]
        return ls.LoopState(e_BTD, carried={"slow": zero_BTM}, context=e_BTD)

    def loop(state: ls.LoopState, k: int) -> ls.LoopState:
        h, slow = state.h_BTD, state.carried["slow"]
        written = slow + net.strength * nn.functional.linear(h - state.context, net.writer)
        return ls.LoopState(h + net.read(slow), carried={"slow": written}, context=state.context)

    model = ls.adapt(embed=embed, loop=loop, readout=lambda state, k: net.logits(state.h_BTD), num_loops=3, module=net)
    return Planted(model, net.head)


def writer_that_starts_at_zero(width: int, channels: int, *, zeros: bool) -> Planted:
    """slow ← slow + Z·rms(h), Z = 0 so far; h reads R·rms(slow).

    Slow is the same after every loop, as an injected input is, and yet the first step of training writes it: the
    derivative by Z is not zero. Hidden, carried at gain 1, and what the loop before it leaves is written through slow
    itself. Blind m, be slow the embedding or zero so far.
    """
    net = TwoTensors(width, channels)
    zero = nn.Parameter(torch.zeros(channels, width))
    net.register_parameter("zero", zero)
    return plant_two(
        net,
        new_slow=lambda h, slow: slow + nn.functional.linear(rms(h), zero),
        first_slow=(lambda ids_BT: torch.zeros(*ids_BT.shape, channels).to(zero)) if zeros else None,
    )


def zeros_that_no_loop_writes(width: int, channels: int) -> Planted:
    """slow = 0 and slow ← slow: an injected input that is not used. No weight of a loop reaches it. Blind 0."""
    net = TwoTensors(width, channels)
    return plant_two(
        net, new_slow=lambda h, slow: slow, first_slow=lambda ids_BT: torch.zeros(*ids_BT.shape, channels).to(net.head)
    )


def normed_injection(width: int, channels: int) -> Planted:
    """slow ← rms(slow), h ← core(h) + R·slow/10: an injected input that is normed on its way.

    N = slow. Its scale no loop can write; its other directions stay on a sphere, and a change of 10⁴ lengths is gone
    from slow after a loop: bounded. What R reads of it is in h, and shown there. Blind 0.
    """
    net = TwoTensors(width, channels)
    return plant_two(
        net,
        new_h=lambda h, slow: net.loop(h, 0) + 0.1 * nn.functional.linear(slow, net.reader),
        new_slow=lambda h, slow: rms(slow),
    )


KINDS = (
    Kind("unread tensor", partial(unread_tensor, channels=4), (16, 32), 4, scale="visible", tensors=HIDDEN),
    Kind("unread tensor, wide", partial(unread_tensor, channels=16), (128,), 16, scale="visible", tensors=HIDDEN),
    Kind("unread tensor, rmsnorm", partial(unread_tensor_behind_rmsnorm, channels=4), (32,), 5, tensors=HIDDEN),
    control("tensor in sight", partial(tensor_in_sight, channels=4), (16, 32)),
    Kind(
        "tensor read in part",
        partial(tensor_read_in_part, channels=8, unread=3),
        (32,),
        3,
        scale="visible",
        tensors=HIDDEN,
    ),
    Kind(
        "tensor behind rmsnorm",
        partial(tensor_behind_a_norm, channels=8, norm=rms),
        (32,),
        1,
        scale="visible",
        tensors=HIDDEN,
    ),
    Kind(
        "tensor behind layernorm",
        partial(tensor_behind_a_norm, channels=8, norm=centred),
        (32,),
        2,
        scale="visible",
        tensors=HIDDEN,
    ),
    control("decaying tensor", partial(decaying_tensor, channels=4), (32,)),
    Kind(
        "slowly decaying tensor",
        partial(slowly_decaying_tensor, channels=4),
        (32,),
        4,
        scale="visible",
        tensors=HIDDEN,
    ),
    control("tensor never read", partial(tensor_never_read, channels=4), (32,)),
    control("injection as a tensor", injected_tensor, (32,)),
    control("tensor, norm closes", partial(tensor_behind_an_inter_loop_norm, channels=8, closing=True), (32,)),
    control("tensor, norm opens", partial(tensor_behind_an_inter_loop_norm, channels=8, closing=False), (32,)),
    control("mirrored state, raw", partial(mirrored_state, norm=None), (16,)),
    Kind("mirrored state, rmsnorm", partial(mirrored_state, norm=rms), (16,), 1, scale=None),
    control("two-step, raw", partial(two_step_recurrence, norm=None), (16,)),
    Kind("two-step, rmsnorm", partial(two_step_recurrence, norm=rms), (16,), 1, scale=None),
    control("tensor poured into h", tensor_poured_into_h, (16,)),
    control("split state, raw", partial(split_state, norm=None), (16, 64)),
    Kind("split state, rmsnorm", partial(split_state, norm=rms), (16,), 1, scale=None),
    Kind(
        "split state, 3 unread",
        partial(split_state, norm=None, unread=3),
        (16,),
        3,
        scale="visible",
        tensors=HIDDEN,
    ),
    Kind("tensor of zeros", partial(tensor_that_starts_at_zero, channels=4), (32,), 4, scale="visible", tensors=HIDDEN),
    Kind(
        "writer starts at zero",
        partial(writer_that_starts_at_zero, channels=4, zeros=False),
        (32,),
        4,
        scale="visible",
        tensors=HIDDEN,
    ),
    Kind(
        "zeros, writer starts at zero",
        partial(writer_that_starts_at_zero, channels=4, zeros=True),
        (32,),
        4,
        scale="visible",
        tensors=HIDDEN,
    ),
    control("zeros that no loop writes", partial(zeros_that_no_loop_writes, channels=4), (32,)),
    control("normed injection", partial(normed_injection, channels=8), (32,)),
)
