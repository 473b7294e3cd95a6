"""Transformer layers: norms, positions, attention, feed-forward, and where the norms sit.

Shape legend: B batch, T tokens, S tokens attended to, D width, H heads, G key/value heads, C head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.kernels import RMSNorm, norm_linear, swiglu_linear
from loopscope.protocol import Cache, Loop, Slot

SCALED_STD = 0.02
"""Standard deviation of every matrix and table under `init = scaled`."""
VALUE_GATE_CHANNELS = 32
"""Channels of a layer's input that the gate of its value embedding reads."""

Branch = Literal["attention", "feed_forward"]


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the rotary angles, per batch row so that rows can be taken apart.

    Both are as wide as a head, each angle there twice; sin is negative for the first of its two channels.
    """

    cos_BTC: Tensor
    sin_BTC: Tensor


torch.utils._pytree.register_dataclass(Rotation)


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


def scale_of(h_BTD: Tensor, eps: float) -> Tensor:
    """s_BT1 = √(mean over width of h² + eps), in float32 at least: the square of a large half overflows."""
    wide_BTD = h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
    return (wide_BTD.square().mean(dim=-1, keepdim=True) + eps).sqrt()


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


class FeedForward(nn.Module):
    """SwiGLU down(silu(gate x)·up x), or a plain two-layer network with GELU, ReLU² or ½·ReLU² (Parcae)."""

    def __init__(self, config: ModelConfig, hidden: int | None = None) -> None:
        super().__init__()
        self.kind, hidden = config.mlp, hidden or config.mlp_hidden
        self.up = nn.Linear(config.width, hidden * (2 if config.mlp == "swiglu" else 1), bias=False)
        self.out = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x_BTD: Tensor, norm: nn.Module | None, inner: nn.Module | None = None) -> Tensor:
        """out(inner(activation(up(norm(x)))))."""
        hidden = norm_linear(x_BTD, norm, self.up)
        if self.kind == "swiglu" and inner is None:
            return swiglu_linear(hidden, self.out)
        if self.kind == "swiglu":
            gate, value = hidden.chunk(2, dim=-1)
            activated = F.silu(gate) * value
        else:
            activated = F.gelu(hidden) if self.kind == "gelu" else F.relu(hidden).square()
            if self.kind == "half-relu2":
                activated = 0.5 * activated
        return norm_linear(activated, inner, self.out)


class MixtureOfExperts(nn.Module):
    """Each token goes to the k of E feed-forwards that its router likes best (arXiv 2605.09165: 2 of 8).

        p = softmax(W_r x)        out = Σ over the k largest of p_i/Σp · expert_i(x)

    An expert has 1/k of the feed-forward's hidden width, so that a token multiplies as many weights as without. In
    training the router leaves two numbers per call for the model's own losses (`RouterBalance`, `RouterZLoss`):

        balance = E·Σ_i f_i·p̄_i        f_i share of choices that fell on i, p̄_i its mean probability; 1 when even
        z       = mean (log Σ_i exp logit_i)²

    Chosen here: the router reads the normed input, its softmax is float32 at least, and the chosen weights sum to 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.chosen = config.experts_per_token
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        hidden = config.mlp_hidden // self.chosen
        self.experts = nn.ModuleList(FeedForward(config, hidden) for _ in range(config.num_experts))
        self.calls: list[tuple[Tensor, Tensor]] = []
        """(balance, z) of every call since the last `forget`."""

    def forget(self) -> None:
        """A new pass begins."""
        self.calls.clear()

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not go to."""
        stored = sum(parameter.numel() for parameter in self.experts.parameters())
        return stored - stored * self.chosen // len(self.experts)

    def forward(self, x_BTD: Tensor, norm: nn.Module | None, inner: nn.Module | None = None) -> Tensor:
        """Every expert runs once, on the tokens that chose it."""
        x_ND = (x_BTD if norm is None else norm(x_BTD)).flatten(0, -2)
        logits_NE = self.router(x_ND)
        logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        p_NE = logits_NE.softmax(-1)
        best_NK, experts_NK = p_NE.topk(self.chosen, -1)
        if self.training:
            self._remember(logits_NE, p_NE, experts_NK)
        share_R = (best_NK / best_NK.sum(-1, keepdim=True)).to(x_ND.dtype).flatten()
        order_R = experts_NK.flatten().argsort(stable=True)
        rows_R = order_R // self.chosen
        parts = [
            expert(x_MD, None, inner)
            for expert, x_MD in zip(self.experts, x_ND[rows_R].split(self._loads(experts_NK)), strict=True)
        ]
        out_RD = torch.cat(parts) * share_R[order_R, None]
        return torch.zeros_like(x_ND, dtype=out_RD.dtype).index_add(0, rows_R, out_RD).view(x_BTD.shape)

    def _loads(self, experts_NK: Tensor) -> list[int]:
        """Choices that fell on each expert; without numbers (on the meta device) an even deal."""
        count = len(self.experts)
        if experts_NK.is_meta:
            return [experts_NK.numel() // count + (index < experts_NK.numel() % count) for index in range(count)]
        loads: list[int] = experts_NK.flatten().bincount(minlength=count).tolist()
        return loads

    def _remember(self, logits_NE: Tensor, p_NE: Tensor, experts_NK: Tensor) -> None:
        hits_NE = torch.zeros_like(p_NE).scatter_add(1, experts_NK, torch.ones_like(experts_NK, dtype=p_NE.dtype))
        balance = p_NE.shape[-1] * (hits_NE.mean(0) / self.chosen * p_NE.mean(0)).sum()
        self.calls.append((balance, logits_NE.logsumexp(-1).square().mean()))


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
