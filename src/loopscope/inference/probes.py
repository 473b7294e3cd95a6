"""A probe: a linear map of the state that says whether leaving now would cost anything, for D products a check.

After loop k it is asked whether going on would still change the prediction:

    y = 1 where KL(p_K ‖ p_k) ≤ b        P(y = 1) = σ(w_k·u_k + c_k),  u = h/‖h‖_rms

KL(p_K ‖ p_k) is what leaving costs on average, nats a token, if the token that comes is drawn from what the full depth
predicts. The cost at the token that did come has the same mean where the model is right, and far more noise. Weights
are fitted by logistic regression with a ridge, in float64, by Newton's method: the problem is strictly convex, so there
is one answer and nothing to tune.

Shape legend: B rows, T tokens, N tokens looked at, D width, K loops.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from loopscope.errors import DataError
from loopscope.inference.decoding import device_of
from loopscope.inference.halting import Probe
from loopscope.protocol import LoopedModel, run_loops

RIDGE = 1e-3
"""Of the mean loss. Inputs have unit RMS; a weight of 1 then costs as much as 0.0005 nats, and where all tokens have
the same y the weights stay finite."""
MOST_TOKENS = 1 << 14
MOST_NUMBERS = 1 << 27
"""Tokens looked at, and channels of all their states that are held: 0.5 GB."""
NEWTON_STEPS = 50
GRADIENT = 1e-9
"""Largest entry of the gradient of a solution."""


def fit_probe(model: LoopedModel, texts: Iterable[Tensor], num_loops: int, bound: float, *, seed: int = 0) -> Probe:
    """A probe of every loop but the last, fitted on all tokens of these ids_BT.

    Also on those that are no answer of a task: they leave by the same score, and answers look at what they show.
    """
    states: list[list[Tensor]] = [[] for _ in range(num_loops - 1)]
    settled: list[list[Tensor]] = [[] for _ in range(num_loops - 1)]
    texts, generator = list(texts), torch.Generator().manual_seed(seed)
    count = sum(ids_BT.numel() for ids_BT in texts)
    with torch.no_grad():
        for ids_BT in texts:
            trace = run_loops(model, ids_BT.to(device_of(model)), num_loops=num_loops).states
            most = min(MOST_TOKENS, MOST_NUMBERS // (trace[0].h_BTD.shape[-1] * num_loops))
            asked_BT = torch.rand(ids_BT.shape, generator=generator) * count < most
            asked_BT = asked_BT.to(trace[0].h_BTD.device)
            last_NV = _logprobs(model.readout(trace[num_loops], num_loops)[asked_BT])
            for k in range(1, num_loops):
                early_NV = _logprobs(model.readout(trace[k], k)[asked_BT])
                divergence_N = (last_NV.exp() * (last_NV - early_NV)).sum(-1)
                settled[k - 1].append((divergence_N <= bound).double().cpu())
                states[k - 1].append(trace[k].h_BTD[asked_BT].float().cpu())
    weights, biases = [], []
    for parts, targets in zip(states, settled, strict=True):
        h_ND, y_N = torch.cat(parts).double(), torch.cat(targets)
        if not len(h_ND):
            raise DataError("there is no text to fit a probe on; name more text with --data")
        u_ND = h_ND * h_ND.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()
        w_D, c = logistic(u_ND, y_N)
        weights.append(w_D.tolist())
        biases.append(float(c))
    return Probe(weights, biases)


def _logprobs(logits_NV: Tensor) -> Tensor:
    return logits_NV.float().log_softmax(-1)


def logistic(x_ND: Tensor, y_N: Tensor, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """(w_D, c) of the least mean ln(1 + e^z) − y·z + ridge/2·(‖w‖² + c²), z = x·w + c, by Newton's method, float64."""
    x_NE = torch.cat([x_ND, x_ND.new_ones(len(x_ND), 1)], 1).double()
    y_N = y_N.double()
    theta_E = x_NE.new_zeros(x_NE.shape[1])

    def loss(theta_E: Tensor) -> Tensor:
        z_N = x_NE @ theta_E
        return (F.softplus(z_N) - y_N * z_N).mean() + ridge / 2 * theta_E.square().sum()

    for _ in range(NEWTON_STEPS):
        p_N = (x_NE @ theta_E).sigmoid()
        gradient_E = x_NE.T @ (p_N - y_N) / len(y_N) + ridge * theta_E
        if gradient_E.abs().max() <= GRADIENT:
            break
        hessian_EE = (x_NE.T * (p_N * (1 - p_N))) @ x_NE / len(y_N)
        hessian_EE.diagonal().add_(ridge)
        step_E = torch.cholesky_solve(gradient_E[:, None], torch.linalg.cholesky(hessian_EE))[:, 0]
        before, size = loss(theta_E), 1.0
        # Far from the solution a whole step may overshoot: halve it until the loss falls as it should.
        while size > 1e-6 and loss(theta_E - size * step_E) > before - 1e-4 * size * (gradient_E @ step_E):
            size /= 2
        theta_E = theta_E - size * step_E
    return theta_E[:-1], theta_E[-1]
