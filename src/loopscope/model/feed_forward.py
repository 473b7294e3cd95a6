"""Feed-forward networks: one for all tokens, or experts among which a router chooses, with what routing costs.

Shape legend: B batch, T tokens, N = B·T, D width, E experts, K chosen of them, R = N·K rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopscope.config import ModelConfig
from loopscope.model.kernels import norm_linear, swiglu_linear
from loopscope.objectives.terms import Pass, Term


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


@dataclass(frozen=True)
class RouterBalance(Term):
    """w · mean over calls of E·Σ f_i·p̄_i: 1 where experts are loaded evenly, E where one has all."""

    weight: float
    routers: tuple[MixtureOfExperts, ...] = ()
    name: str = "router_balance"
    which: ClassVar[int] = 0

    def value(self, seen: Pass) -> Tensor:
        calls = [call[self.which] for router in self.routers for call in router.calls]
        return seen.nothing if seen.model is None or not calls else self.weight * torch.stack(calls).mean()


@dataclass(frozen=True)
class RouterZLoss(RouterBalance):
    """w · mean over calls and tokens of the router's squared log-sum-exp."""

    name: str = "router_z_loss"
    which: ClassVar[int] = 1
