"""A few training steps on a borrowed model, after which it is what it was.

Drift and the push test ask what training does to a variable, and only training answers. The steps are AdamW's, on
copies of the weights, in evaluation mode (no dropout: two trials on the same batches differ in what is asked and in
nothing else), at the trained depth, with an optimiser state of their own.

The size of a variable at a state is a number per token: ‖h‖ for scale, |⟨h, f̂⟩| for a field f, ‖P h‖ for a subspace.
What is followed is its logarithm at the last loop whose state is carried on,

    log size = mean over tokens of ½·log(size² + (0.1·rms size)²)

Shape legend: B batch, T tokens, D width, K loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from loopscope.auditing.visibility import Field
from loopscope.config import ObjectiveConfig
from loopscope.errors import DataError, UnsupportedError
from loopscope.objectives.placement import Batch, Objective, ObjectiveResult, supervised_loops
from loopscope.objectives.terms import Term
from loopscope.protocol import LoopedModel, LoopTrace
from loopscope.results.audit import Recipe
from loopscope.untouched import borrowed, network_of

Size = Callable[[Tensor], Tensor]
"""h_BTD → how large the variable is at each token (B, T)."""

FLOOR = 0.1
"""Share of the rms over tokens below which a size counts no further: a token at which a mean happens to cross zero has
a logarithm of −∞, and must not decide."""


class TrialObjective(Objective):
    """The loss that an audit is told of: cross-entropy where `supervised` says, `terms`, and the model's own terms.

    Without `terms`, those of `supervised` where it is a configuration.
    """

    def __init__(
        self,
        supervised: ObjectiveConfig | str | Sequence[int] | None,
        terms: Sequence[Term] | None,
        num_loops: int,
    ) -> None:
        if not isinstance(supervised, ObjectiveConfig):
            loops = supervised_loops(supervised, num_loops)
            weights = tuple(float(k in loops) for k in range(1, num_loops + 1))
            supervised = ObjectiveConfig(placement="weighted", loop_weights=weights)
        super().__init__(supervised, terms)


def size_along(field: Field) -> Size:
    """|⟨h, f̂(h)⟩|: ‖h‖ for scale, √d·|mean of h| for the mean."""

    def size(h_BTD: Tensor) -> Tensor:
        direction_BTD = field(h_BTD)
        length_BT = direction_BTD.detach().norm(dim=-1).clamp(min=1e-30)
        # Along h itself the derivative of h·f̂ is that of the length: the direction may be taken as constant.
        return ((h_BTD * direction_BTD.detach()).sum(-1) / length_BT).abs()

    return size


def size_within(basis_DN: Tensor) -> Size:
    """‖P h‖ of the projection on the span of orthonormal columns: directions that a search found."""

    def size(h_BTD: Tensor) -> Tensor:
        return (h_BTD @ basis_DN.to(h_BTD)).norm(dim=-1)

    return size


def followed_loop(num_loops: int) -> int:
    """The last loop whose state is carried on: K − 1, for h_K goes nowhere; of a single loop, that one."""
    return max(1, num_loops - 1)


def log_size(trace: LoopTrace, size: Size, *, lifted: bool = False) -> Tensor:
    """Mean over tokens of the logarithm of a variable's size, floored; see the module's docstring.

    `lifted` measures states below scale 1 as if they had scale 1.
    """
    h_BTD = trace.states[followed_loop(trace.num_loops)].h_BTD
    h_BTD = h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
    if lifted:
        scale_BT1 = h_BTD.norm(dim=-1, keepdim=True) / h_BTD.shape[-1] ** 0.5
        h_BTD = h_BTD / scale_BT1.clamp(min=1e-30, max=1)
    size_BT = size(h_BTD)
    if size_BT.shape != h_BTD.shape[:2]:
        raise DataError(f"the size of a variable must be a number per token, got {tuple(size_BT.shape)}")
    floor = FLOOR**2 * size_BT.detach().square().mean()
    return 0.5 * (size_BT.square() + floor).clamp(min=1e-60).log().mean()


class Trial:
    """One short training: step, and look."""

    def __init__(self, model: LoopedModel, objective: Objective, recipe: Recipe) -> None:
        self.model, self.objective, self.recipe = model, objective, recipe
        self.weights = [weight for weight in trainable(model, "a trial").parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=recipe.lr, weight_decay=recipe.weight_decay)

    def step(self, batch: Batch, reward: Callable[[LoopTrace], Tensor] | None = None) -> ObjectiveResult:
        """One step on the objective, minus a reward; returns the objective alone, as it was before the step."""
        with torch.enable_grad():
            result = self.objective(self.model, *batch)
            loss = result.loss if reward is None else result.loss - reward(result.trace)
            if not loss.isfinite():
                raise DataError(f"the loss of a trial step is {loss.item()}: nothing can be learned from it")
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    @torch.no_grad()
    def look(self, batch: Batch) -> ObjectiveResult:
        """The objective and its states on a batch, without a step."""
        return self.objective(self.model, *batch)


def trainable(model: LoopedModel, why: str) -> nn.Module:
    """The model's network, or the sentence that says that it has no weights to train."""
    network = network_of(model)
    if network is None or not any(weight.requires_grad for weight in network.parameters()):
        raise UnsupportedError(
            f"{why} trains the model a little, and this one shows no weights to train (adapt takes module=)"
        )
    return network


@contextmanager
def trial_weights(model: LoopedModel, why: str) -> Iterator[None]:
    """Copies for weights and buffers, in float32 at least; the model's own are never written to."""
    network = trainable(model, why)
    with borrowed(network) as held:
        tensors = {id(tensor): tensor for tensor in [*network.parameters(), *network.buffers(), *held]}
        own = [(tensor, tensor.data) for tensor in tensors.values() if tensor.is_floating_point()]
        try:
            for tensor, data in own:
                # bf16 would round the steps away
                tensor.data = data.to(torch.promote_types(data.dtype, torch.float32), copy=True)
            yield
        finally:
            for tensor, data in own:
                tensor.data = data
