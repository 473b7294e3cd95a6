"""Cross-entropy at many readouts: one fused operation, and the plain path it must equal.

Both compute, over K loops and N tokens (n counts those whose target is not ignored),

    loss = Σ_k Σ_n w_kn · (CE_kn + z·lse_kn²) / n        lse = log Σ_v exp(logit_v)        CE = lse − logit_target

The plain path keeps K·N·V log-probabilities for the backward pass. The fused one walks over rows in chunks and turns
each chunk of logits, in place, into its own gradient, so it never holds more than one chunk:

    p = softmax(logits)                      (one buffer, overwritten)
    ∂loss/∂logits = (w/n)·(p·(1 + 2z·lse) − onehot)
    d_features = ∂logits @ head              d_head += ∂logitsᵀ @ features

The gradients are ready when the forward pass ends; backward only multiplies by the incoming gradient. Such an operation
cannot be differentiated again: it raises on double backward and on forward mode instead of returning a silent zero,
which an audit would read as a blind spot. Audits use the plain path.

Shape legend: K loops, N tokens, R = K·N rows, C rows of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import DataError, UnsupportedError
from loopscope.results.record import Choice

IGNORE_INDEX = -100
"""Target of a position that has none; every loss leaves it out."""


@dataclass(frozen=True)
class ReadoutLoss:
    """The loss and what the same pass over the logits gives for free; all but `loss` without gradient."""

    loss: Tensor
    ce_KN: Tensor
    """Cross-entropy of every loop and token; 0 where the target is ignored."""
    ce_K: Tensor
    """Cross-entropy of every loop, mean over the tokens that are not ignored."""
    lse_KN: Tensor
    """Log-sum-exp of the logits."""
    margin_KN: Tensor | None = None
    """Largest logit minus the second largest, on request."""


def choose_chunk_rows(num_rows: int, vocab_size: int, itemsize: int, device_type: str) -> Choice:
    """Rows per chunk: enough to feed the matrix multiply, few enough that a chunk of logits stays small."""
    budget_mib = 24 if device_type == "cpu" else 256
    fitting = (budget_mib << 20) // (vocab_size * itemsize)
    rows = max(128, min(1024, 1 << max(fitting, 1).bit_length() - 1))
    if rows >= num_rows:
        return Choice("loss_chunk_rows", max(num_rows, 1), f"one chunk holds all {num_rows} rows")
    mib = rows * vocab_size * itemsize / 2**20
    limit = {128: "the least that keeps the matrix multiply busy", 1024: "more rows gain nothing"}
    reason = limit.get(rows, f"the largest power of two within {budget_mib} MiB")
    return Choice("loss_chunk_rows", rows, f"{mib:.0f} MiB of logits per chunk on {device_type}: {reason}")


def multi_readout_cross_entropy(
    features_KND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    loop_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    margin: bool = False,
    chunk_rows: int | None = None,
) -> ReadoutLoss:
    """Weighted cross-entropy over all K readouts in one operation that never holds K×N×V logits.

    `loop_weights` has shape (K,) or (K, N), may require grad, and is 1/K by default: the mean over loops. Under
    torch.compile the operation runs as a graph break. `chunk_rows` is chosen by `choose_chunk_rows` when not given.
    """
    _check_shapes(features_KND, head_VD)
    weights_KN = _checked_weights(features_KND, targets_N, loop_weights)
    _check_targets(targets_N, len(head_VD), ignore_index)
    if chunk_rows is not None and chunk_rows < 1:
        raise DataError(f"chunk_rows must be at least 1, got {chunk_rows}")
    compute_dtype = _compute_dtype(features_KND)
    if chunk_rows is None:
        itemsize = _statistics_dtype(compute_dtype).itemsize
        chosen = choose_chunk_rows(weights_KN.numel(), len(head_VD), itemsize, features_KND.device.type)
        chunk_rows = int(chosen.value)
    tensors = (features_KND, head_VD, weights_KN)
    wants_features, wants_head, wants_weights = (torch.is_grad_enabled() and t.requires_grad for t in tensors)
    wants = (wants_features, wants_head, wants_weights)
    plan = _Plan(ignore_index, z_loss, margin, chunk_rows, compute_dtype, wants)
    if torch.compiler.is_compiling():
        # Its gradients come from forward, in place, chunk by chunk: no compiler may trace that. Disabled here, not by a
        # decorator: that would import torch's compiler with this module, and double the time `plan` and `env` take.
        return torch.compiler.disable(_fused)(features_KND, head_VD, targets_N, weights_KN, plan)
    return _fused(features_KND, head_VD, targets_N, weights_KN, plan)


def reference_cross_entropy(
    features_KND: Tensor,
    head_VD: Tensor,
    targets_N: Tensor,
    *,
    loop_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    margin: bool = False,
) -> ReadoutLoss:
    """The same value through plain linear + cross-entropy: differentiable in every mode and to every order."""
    _check_shapes(features_KND, head_VD)
    return logits_cross_entropy(
        F.linear(features_KND, head_VD),
        targets_N,
        loop_weights=loop_weights,
        ignore_index=ignore_index,
        z_loss=z_loss,
        margin=margin,
    )


def logits_cross_entropy(
    logits_KNV: Tensor,
    targets_N: Tensor,
    *,
    loop_weights: Tensor | None = None,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    margin: bool = False,
) -> ReadoutLoss:
    """The same loss from logits that are already there: for models with a readout of their own."""
    weights_KN = _checked_weights(logits_KNV, targets_N, loop_weights)
    vocab_size = logits_KNV.shape[-1]
    _check_targets(targets_N, vocab_size, ignore_index)
    logits_KNV = logits_KNV.to(_statistics_dtype(logits_KNV.dtype))
    rows = targets_N.repeat(len(logits_KNV))
    ce_R = F.cross_entropy(logits_KNV.reshape(-1, vocab_size), rows, ignore_index=ignore_index, reduction="none")
    ce_KN = ce_R.view_as(weights_KN)
    lse_KN = logits_KNV.logsumexp(-1)
    valid_N = targets_N != ignore_index
    terms_KN = ce_KN + z_loss * lse_KN.square().where(valid_N, 0) if z_loss else ce_KN
    loss = (weights_KN * terms_KN).sum() / valid_N.sum().clamp(min=1)
    margin_KN = _top2_margin(logits_KNV.detach()) if margin else None
    return _pack(loss, ce_KN.detach(), lse_KN.detach(), margin_KN, valid_N)


def _fused(features_KND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_KN: Tensor, plan: _Plan) -> ReadoutLoss:
    with _without_autocast(features_KND.device.type):
        try:
            loss, ce_KN, lse_KN, margin_KN = _MultiReadoutCrossEntropy.apply(
                features_KND, head_VD, targets_N, weights_KN, plan
            )
        except RuntimeError as error:
            if "functorch" in str(error):
                raise UnsupportedError(_ONE_BACKWARD_ONLY) from error
            raise
    return _pack(loss, ce_KN, lse_KN, margin_KN, targets_N != plan.ignore_index)


_ONE_BACKWARD_ONLY = (
    "multi_readout_cross_entropy supports one backward pass only: no retained graph, no double backward, no forward "
    "mode, no torch.func; use reference_cross_entropy, as audits do"
)


@dataclass(frozen=True)
class _Plan:
    """Everything about a call that is not a tensor."""

    ignore_index: int
    z_loss: float
    margin: bool
    chunk_rows: int
    compute_dtype: torch.dtype
    """What the matrix multiplies run in; statistics are at least float32."""
    wants: tuple[bool, bool, bool]
    """Whether features, head and weights need a gradient."""


class _MultiReadoutCrossEntropy(torch.autograd.Function):
    """Forward computes value and gradients in one walk over row chunks; backward scales the gradients."""

    @staticmethod
    def forward(
        ctx: Any, features_KND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_KN: Tensor, plan: _Plan
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        walk = _Walk(features_KND, head_VD, targets_N, weights_KN, plan)
        for start in range(0, walk.num_rows, plan.chunk_rows):
            walk.chunk(slice(start, start + plan.chunk_rows))
        if walk.d_head_VD is not None:
            walk.d_head_VD /= walk.num_valid
        terms_KN = walk.terms_KN()
        loss = (weights_KN * terms_KN).sum()
        ctx.save_for_backward(walk.d_features_RD, walk.d_head_VD, terms_KN if plan.wants[2] else None)
        ctx.used = False
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in (features_KND, head_VD, weights_KN)]
        outputs = (walk.ce_KN, walk.lse_KN, walk.margin_KN)
        ctx.mark_non_differentiable(*(output for output in outputs if output is not None))
        return loss, *outputs

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        # With create_graph a later derivative would silently miss this term; after a first backward pass the gradients
        # belong to whoever got them.
        if torch.is_grad_enabled() or ctx.used:
            raise UnsupportedError(_ONE_BACKWARD_ONLY)
        ctx.used = True
        d_features_KND, d_head_VD, d_weights_KN = (
            _times(saved, d_loss, shape, dtype)
            for saved, (shape, dtype) in zip(ctx.saved_tensors, ctx.like, strict=True)
        )
        return d_features_KND, d_head_VD, None, d_weights_KN, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedError(_ONE_BACKWARD_ONLY)


class _Walk:
    """One pass over all rows: statistics of every row, and gradients of whatever needs them."""

    def __init__(
        self, features_KND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_KN: Tensor, plan: _Plan
    ) -> None:
        self.plan = plan
        self.num_rows = weights_KN.numel()
        self.valid_N = targets_N != plan.ignore_index
        self.any_ignored = not targets_N.is_meta and not bool(self.valid_N.all())
        self.features_RD = features_KND.reshape(self.num_rows, features_KND.shape[-1]).to(plan.compute_dtype)
        self.head_VD = head_VD.to(plan.compute_dtype)
        self.num_valid = self.valid_N.sum().clamp(min=1)
        # Ignored rows get target 0 and weight 0: they cost their share of the multiply and change nothing.
        self.targets_R = torch.where(self.valid_N, targets_N, 0).repeat(len(features_KND))
        self.valid_R = self.valid_N.repeat(len(features_KND))
        dtype, device = _statistics_dtype(plan.compute_dtype), features_KND.device
        self.weights_R = (weights_KN.to(dtype) * self.valid_N).reshape(-1)
        self.ce_KN, self.lse_KN = (torch.empty(weights_KN.shape, dtype=dtype, device=device) for _ in range(2))
        self.margin_KN = torch.empty_like(self.ce_KN) if plan.margin else None
        wants_features, wants_head, _ = plan.wants
        self.d_features_RD = torch.empty_like(self.features_RD, dtype=dtype) if wants_features else None
        self.d_head_VD = torch.zeros_like(head_VD, dtype=dtype) if wants_head else None
        self.buffer_CV = torch.empty(min(plan.chunk_rows, self.num_rows), len(head_VD), dtype=dtype, device=device)

    def terms_KN(self) -> Tensor:
        """(CE + z·lse²)/n of every row, 0 where ignored: what the weights multiply, and so their gradient."""
        terms_KN = self.ce_KN.masked_fill_(~self.valid_N, 0)
        if self.plan.z_loss:
            terms_KN = terms_KN + self.plan.z_loss * self.lse_KN.square().where(self.valid_N, 0)
        return terms_KN / self.num_valid

    def chunk(self, rows: slice) -> None:
        """Logits of some rows, their statistics, and from the same buffer their gradients."""
        features_CD, target_C1 = self.features_RD[rows], self.targets_R[rows, None]
        logits_CV = _multiply(features_CD, self.head_VD.T, self.buffer_CV[: len(features_CD)])
        top_C1 = logits_CV.amax(-1, keepdim=True)
        target_logit_C1 = logits_CV.gather(1, target_C1)
        if self.margin_KN is not None:
            self.margin_KN.view(-1)[rows] = _top2_margin(logits_CV)
        p_CV = torch.softmax(logits_CV, -1, out=logits_CV)  # one pass over rows that fit a cache
        lse_C1 = top_C1 - p_CV.amax(-1, keepdim=True).log()
        self.lse_KN.view(-1)[rows] = lse_C1[:, 0]
        self.ce_KN.view(-1)[rows] = (lse_C1 - target_logit_C1)[:, 0]
        if self.d_features_RD is not None or self.d_head_VD is not None:
            self._gradients(rows, p_CV, lse_C1)

    def _gradients(self, rows: slice, p_CV: Tensor, lse_C1: Tensor) -> None:
        """From p, in place: ∂logits = p·(1 + 2z·lse) − onehot.

        The row factor w is applied to rows of width D instead of V; 1/n follows, so that fp16 does not underflow.
        """
        if self.plan.z_loss:
            p_CV *= 1 + 2 * self.plan.z_loss * lse_C1
        target_C1 = self.targets_R[rows, None]
        d_logits_CV = p_CV.scatter_add_(1, target_C1, -torch.ones_like(lse_C1)).to(self.plan.compute_dtype)
        factor_C1 = self.weights_R[rows, None].clone()
        weighted_CD = self.features_RD[rows] * factor_C1
        if self.any_ignored:  # not even a NaN in an ignored row may reach a gradient
            ignored_C1 = ~self.valid_R[rows, None]
            for tensor in (d_logits_CV, factor_C1, weighted_CD):
                tensor.masked_fill_(ignored_C1, 0)
        if self.d_features_RD is not None:
            _multiply(d_logits_CV, self.head_VD, self.d_features_RD[rows]).mul_(factor_C1 / self.num_valid)
        if self.d_head_VD is not None:
            _multiply_add(d_logits_CV.T, weighted_CD, self.d_head_VD)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right into `out`, which may be of a wider dtype."""
    return torch.mm(left, right, out=out) if left.dtype == out.dtype else out.copy_(left @ right)


def _multiply_add(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """out += left @ right; `out` may be of a wider dtype than `left`."""
    return out.addmm_(left, right) if left.dtype == out.dtype else out.add_(left @ right.to(left.dtype))


def _times(saved: Tensor | None, d_loss: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
    """saved · d_loss; where looking at d_loss is free (CPU), a factor of 1 gives `saved` away without a copy."""
    if saved is None:
        return None
    if not (d_loss.device.type == "cpu" and d_loss.item() == 1.0):
        saved = saved * d_loss
    return saved.view(shape).to(dtype)


def _top2_margin(logits: Tensor) -> Tensor:
    top, second = logits.topk(2, dim=-1).values.unbind(-1)
    return top - second


def _pack(loss: Tensor, ce_KN: Tensor, lse_KN: Tensor, margin_KN: Tensor | None, valid_N: Tensor) -> ReadoutLoss:
    ce_K = ce_KN.sum(-1) / valid_N.sum().clamp(min=1)
    return ReadoutLoss(loss, ce_KN, ce_K, lse_KN, margin_KN)


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over the vocabulary run in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _compute_dtype(features_KND: Tensor) -> torch.dtype:
    """What `F.linear` would compute in here: autocast's dtype where it is on, else the features' own."""
    device_type = features_KND.device.type
    if not torch.amp.is_autocast_available(device_type):
        return features_KND.dtype
    if torch.is_autocast_enabled(device_type) and features_KND.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return features_KND.dtype


def _without_autocast(device_type: str) -> Any:
    """The operation chooses its own dtypes."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _check_shapes(features_KND: Tensor, head_VD: Tensor) -> None:
    if features_KND.dim() != 3 or head_VD.dim() != 2 or features_KND.shape[-1] != head_VD.shape[-1]:
        raise DataError(
            "expected features (loops, tokens, width) and head (vocabulary, width), "
            f"got {tuple(features_KND.shape)} and {tuple(head_VD.shape)}"
        )
    device_type = features_KND.device.type
    autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    if features_KND.dtype != head_VD.dtype and not autocast:
        raise DataError(f"features are {features_KND.dtype} and the head is {head_VD.dtype}; cast one, or use autocast")


def _checked_weights(rows_KNX: Tensor, targets_N: Tensor, loop_weights: Tensor | None) -> Tensor:
    """`loop_weights` as (K, N), after a look at what they and the targets must fit."""
    if rows_KNX.dim() != 3 or not len(rows_KNX):
        raise DataError(f"expected at least one loop of (tokens, …), got {tuple(rows_KNX.shape)}")
    loops, tokens, _ = rows_KNX.shape
    if targets_N.shape != (tokens,) or targets_N.dtype != torch.int64:
        raise DataError(f"expected {tokens} targets of int64, got {tuple(targets_N.shape)} of {targets_N.dtype}")
    if loop_weights is None:
        loop_weights = torch.full((loops,), 1 / loops, device=rows_KNX.device)
    if loop_weights.shape not in ((loops,), (loops, tokens)):
        raise DataError(f"loop_weights must be ({loops},) or ({loops}, {tokens}), got {tuple(loop_weights.shape)}")
    return loop_weights if loop_weights.dim() == 2 else loop_weights[:, None].expand(loops, tokens)


def _check_targets(targets_N: Tensor, vocab_size: int, ignore_index: int) -> None:
    """On CPU, where looking is free; GPUs report an out-of-range index themselves."""
    if targets_N.device.type != "cpu":
        return
    wrong_N = ((targets_N < 0) | (targets_N >= vocab_size)) & (targets_N != ignore_index)
    if wrong_N.any():
        raise DataError(f"target {targets_N[wrong_N][0].item()} is outside the vocabulary of {vocab_size} tokens")
