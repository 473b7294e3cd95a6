"""Norms, where they sit around a residual branch, and how the matrices of the branch are drawn.

Shape legend: B batch, T tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from loopscope.config import ModelConfig
from loopscope.model.attention import Attention
from loopscope.model.feed_forward import FeedForward
from loopscope.model.kernels import RMSNorm

SCALED_STD = 0.02
"""Standard deviation of every matrix and table under `init = scaled`."""

Branch = Literal["attention", "feed_forward"]


def scale_of(h_BTD: Tensor, eps: float) -> Tensor:
    """s_BT1 = √(mean over width of h² + eps), in float32 at least: the square of a large half overflows."""
    wide_BTD = h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
    return (wide_BTD.square().mean(dim=-1, keepdim=True) + eps).sqrt()


class TaperNorm(nn.Module):
    """g·γ∘x/r + (1 − g)·c·γ₂∘x with r = √(mean x² + eps): an RMSNorm that becomes a fixed map (arXiv 2602.10408).

    The gate g is a buffer that training moves (`taper_to`). While it is 1, c follows the constant that fits the norm
    best in least squares, and γ₂ follows γ:

        c = E[‖γ∘x‖²/r] / E[‖γ∘x‖²]        running means over training batches, in every call of the module
    """

    gate: Tensor
    moments: Tensor

    def __init__(self, width: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.eps, self.start, self.was_held = eps, start, False
        self.weight, self.linear_weight = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.register_buffer("gate", torch.tensor(start))
        self.register_buffer("moments", torch.zeros(2))

    @torch.no_grad()
    def taper_to(self, progress: float, *, hold: float = 0.3) -> None:
        """Set the gate for a training progress in [0, 1]: its start until `hold`, then a cosine down to 0."""
        fraction = min(max((progress - hold) / (1 - hold), 0.0), 1.0)
        self.gate.fill_(self.start * 0.5 * (1 + math.cos(math.pi * fraction)))
        if not fraction or self.was_held:  # the step that ends the hold has moved γ once more
            self.linear_weight.copy_(self.weight)
        self.was_held = not fraction

    @property
    def constant(self) -> Tensor:
        """c; 1 before the first training batch. Both means start at 0, which cancels in their ratio."""
        return torch.where(self.moments[1] > 0, self.moments[0] / self.moments[1].clamp(min=1e-30), 1.0)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = scale_of(wide, self.eps)
        if self.training:
            self._calibrate((self.weight * wide).detach().square().sum(-1, keepdim=True), r.detach())
        gained = self.gate * self.weight * wide / r + (1 - self.gate) * self.constant * self.linear_weight * wide
        return gained.to(x.dtype)

    @torch.no_grad()
    def _calibrate(self, energy: Tensor, r: Tensor, momentum: float = 0.01) -> None:
        """While the gate is at 1; a batch that is not finite changes nothing."""
        batch = torch.stack([(energy / r).mean(), energy.mean()]).to(self.moments.dtype)
        wanted = batch.isfinite().all() & (self.gate == 1)
        self.moments.copy_(torch.where(wanted, torch.lerp(self.moments, batch, momentum), self.moments))


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "rmsnorm": lambda width, eps: RMSNorm(width, eps=eps),
    "layernorm": lambda width, eps: nn.LayerNorm(width, eps=eps),
    "taper": TaperNorm,
}


def make_norm(kind: str, width: int, eps: float) -> nn.Module:
    """RMSNorm h/√(mean h² + eps)·g; LayerNorm, which also removes the mean and adds a bias; or TaperNorm."""
    return NORMS[kind](width, eps)


def make_optional_norm(kind: str, config: ModelConfig) -> nn.Module | None:
    """A norm of the state's width, or None where the kind is none."""
    return None if kind == "none" else make_norm(kind, config.width, config.norm_eps)


def init_std(config: ModelConfig) -> float | None:
    """Standard deviation that `init` draws every matrix and table with; None leaves them to torch.

    √(2/5d) is Huginn's (arXiv 2502.05171), cut at three standard deviations; Parcae's code shares it.
    """
    if config.init in ("huginn", "parcae"):
        return math.sqrt(2 / (5 * config.width))
    return SCALED_STD if config.init == "scaled" else None


def draw(weight: Tensor, std: float, config: ModelConfig) -> None:
    """Fill a matrix under `init`: normal, and cut at three standard deviations where the families' own are."""
    if config.init == "scaled":
        nn.init.normal_(weight, std=std)
    else:
        nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


class PreNorm(nn.Module):
    """x + f(norm(x)): the residual stream itself is never normalised, so the loop carries its scale.

    Every other placement is a subclass. It is made once per residual branch, and decides five things about it:

        open          what the branch reads of the stream: x itself, unless the input e is recalled
        norm          opens the branch: what its first matrix reads is norm(x), or x itself where it is None
        inner         sits before the branch's last matrix, on the joined heads or the activated hidden layer; or None
        after         how the branch's output joins the stream
        initialise    what becomes of the branch's matrices once they have been drawn

    The branch applies `norm` and `inner` together with its matrices, which saves memory (see `kernels`).
    """

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__()
        self.norm: nn.Module | None = make_norm(config.norm, config.width, config.norm_eps)
        self.inner: nn.Module | None = None

    def open(self, x_BTD: Tensor, e_BTD: Tensor | None) -> Tensor:
        """What the branch reads of the stream, given the embedded input where there is one (in core and coda)."""
        return x_BTD

    def after(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        """How the branch's output joins the stream."""
        return x_BTD + branch_BTD

    def initialise(self, branch: Attention | FeedForward, config: ModelConfig) -> None:
        """What writes into the stream is drawn smaller by √(2·depth), loops counted; Parcae's is zero at first."""
        if config.init == "parcae":
            nn.init.zeros_(branch.out.weight)
        elif (std := init_std(config)) is not None:
            draw(branch.out.weight, std / math.sqrt(2 * config.total_layers), config)


class SumNorm(PreNorm):
    """norm'(x + f(norm(x))): the sum is normalised too, so no scale survives a layer (Huginn)."""

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__(config, branch)
        self.sum_norm = make_norm(config.norm, config.width, config.norm_eps)

    def after(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return self.sum_norm(x_BTD + branch_BTD)


class SandwichNorm(PreNorm):
    """x + norm'(f(norm(x))): every branch writes a bounded amount, the stream still carries its scale (Ouro)."""

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__(config, branch)
        self.branch_norm = make_norm(config.norm, config.width, config.norm_eps)

    def after(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return x_BTD + self.branch_norm(branch_BTD)


class HeadScale(nn.Module):
    """γ_i·head_i: one learned factor per head, 1 at first."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (x_BTD.unflatten(-1, (self.weight.shape[0], -1)) * self.weight[:, None]).flatten(-2)


class NormFormer(PreNorm):
    """Pre-norm, with a further norm in each branch and learned scales (arXiv 2110.09456).

        x ← x + LN_a(W_O·[γ_1·head_1, …, γ_H·head_H])        heads of LN x
        x ← w_res∘x + W_2·LN_f(act(W_1·LN x))

    γ and w_res are learned and start at 1; LN_f has the width of the hidden layer; w_res acts on the feed-forward's
    residual alone. The head scale sits before W_O, as in the paper; public code has it on slices of W_O's output.
    Chosen here: `norm` names the kind of all norms; under SwiGLU LN_f acts on silu(gate)·value; dropout acts on what
    the branch's last matrix writes, as in every placement (public code: after LN_a); matrices are drawn as for `pre`.

    In a loop: no norm is on the stream. At w_res = 1 the core is F(h) = h + B(norm(h)), and Lemma 2 holds as for `pre`:
    scale is carried. LN_a and LN_f bound what one loop adds to it, not what many add up to. All loops share w_res:
    if it is w in all channels of n layers, each loop multiplies the carried state by wⁿ; scale dies out below 1, which
    is where weight decay pulls it, and grows geometrically above.
    """

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__(config, branch)
        attention = branch == "attention"
        self.inner = (
            HeadScale(config.num_heads) if attention else make_norm(config.norm, config.mlp_hidden, config.norm_eps)
        )
        self.branch_norm = make_norm(config.norm, config.width, config.norm_eps) if attention else None
        self.residual = None if attention else nn.Parameter(torch.ones(config.width))

    def after(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        if self.residual is not None:
            x_BTD = self.residual * x_BTD
        return x_BTD + (branch_BTD if self.branch_norm is None else self.branch_norm(branch_BTD))


class DeepNorm(SumNorm):
    """Post-norm with a weighted residual and smaller matrices, so that very deep stacks train (arXiv 2203.00555).

        x ← LN(α·x + f(x))        α = (2M)^¼        both branches; f reads x itself
        V, W_O, W_1, W_2 ← β·what `init` drew       β = (8M)^−¼        not Q and K

    Chosen here: M is the unrolled depth, layers × loops + prelude + coda at the trained number of loops. α weighs the
    stream against as many branches as a token passes through, and a looped layer adds its two in every loop. (DeepLoop,
    arXiv 2607.13491, counts the same way, with square roots for fourth roots.) More loops at test time change neither.
    `norm` names the kind of LN. β is a factor on `init`'s own matrices, and under `scaled` takes the place of
    1/√(2·depth), which serves the same end for pre-norm; under SwiGLU both halves of W_1 have it. The published model
    has no final norm: that is `readout = raw`.

    In a loop: every sublayer ends in a norm, so h has unit RMS (times a gain) after every loop, and no loop can write
    its scale: it is removed. A scale put there from outside would be read, for f is not blind to it.
    """

    exponent: ClassVar[float] = 0.25

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__(config, branch)
        self.norm = None
        self.alpha = (2 * config.total_layers) ** self.exponent
        self.beta = (8 * config.total_layers) ** -self.exponent

    def after(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return self.sum_norm(self.alpha * x_BTD + branch_BTD)

    @torch.no_grad()
    def initialise(self, branch: Attention | FeedForward, config: ModelConfig) -> None:
        """β on all but queries and keys, which decide where attention looks and not how much it writes."""
        branch.out.weight.mul_(self.beta)
        if isinstance(branch, Attention):
            branch.qkv.weight[-branch.kv_heads * branch.head_width :].mul_(self.beta)  # the values come last
        else:
            branch.up.weight.mul_(self.beta)


class DeepLoop(DeepNorm):
    """DeepNorm for loops: x ← LN(α·x + f(x)), α = (2M)^½, β = (8M)^−½, M the unrolled depth (arXiv 2607.13491)."""

    exponent: ClassVar[float] = 0.5


class OneOverN(PreNorm):
    """x + N⁻¹·(L/12)^−½·f(norm(x)): N loops add up to as much as one would (arXiv 2606.18524).

    N is the trained number of loops, more of them at test time do not change it; L counts layers, each once, prelude
    and coda included. Chosen here: both branches of all layers have the factor, and matrices are drawn as for `pre`.
    """

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__(config, branch)
        layers = config.prelude_layers + config.num_layers + config.coda_layers
        self.factor = 1 / config.num_loops / math.sqrt(layers / 12)

    def after(self, x_BTD: Tensor, branch_BTD: Tensor) -> Tensor:
        return x_BTD + self.factor * branch_BTD


class RecallNorm(SumNorm):
    """norm'(x + f(norm(W_r·[x; e]))): every branch recalls the input, and the sum is normalised (arXiv 2604.15259).

    W_r is 2d → d without bias, one for each branch. In a loop: the outer norm removes the scale of the state.
    """

    def __init__(self, config: ModelConfig, branch: Branch) -> None:
        super().__init__(config, branch)
        self.recall = nn.Linear(2 * config.width, config.width, bias=False)

    def open(self, x_BTD: Tensor, e_BTD: Tensor | None) -> Tensor:
        assert e_BTD is not None, "ModelConfig allows no prelude, where there is no input to recall yet"
        return self.recall(torch.cat([x_BTD, e_BTD], -1))


# A further placement is one class, one line here, and its name among those of `ModelConfig.norm_placement`.
NORM_PLACEMENTS: dict[str, type[PreNorm]] = {
    "pre": PreNorm,
    "sum": SumNorm,
    "sandwich": SandwichNorm,
    "normformer": NormFormer,
    "deepnorm": DeepNorm,
    "deeploop": DeepLoop,
    "one-over-n": OneOverN,
    "recall": RecallNorm,
}


def make_placement(config: ModelConfig, branch: Branch) -> PreNorm:
    """The norms around one residual branch."""
    return NORM_PLACEMENTS[config.norm_placement](config, branch)
