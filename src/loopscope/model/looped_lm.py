"""The whole looped language model: embed → prelude → K × loop → coda → readout → head.

Shape legend: B batch, T tokens, D width, V vocabulary, K loops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loopscope.config import ModelConfig
from loopscope.errors import DataError
from loopscope.model.attention import Rotation, rotation
from loopscope.model.feed_forward import MixtureOfExperts, RouterBalance, RouterZLoss
from loopscope.model.layers import Beside, Layer, Stack
from loopscope.model.norms import TaperNorm, draw, init_std, make_optional_norm
from loopscope.model.readouts import Norm, hidden_by, make_readout
from loopscope.model.recurrence import RECURRENCES, Context, DiagonalInjection, ForgetfulInjection, PonderCost
from loopscope.objectives.placement import Objective, ObjectiveResult
from loopscope.objectives.terms import Term
from loopscope.protocol import (
    Cache,
    DeclaredVisibility,
    ExitGate,
    LinearReadout,
    Loop,
    LoopState,
    LoopTrace,
    MixedDepths,
    OwnLosses,
    ProjectedKeys,
    Scheduled,
    SharedCore,
    run_loops,
)


class LoopedLM(nn.Module, LinearReadout, MixedDepths, ProjectedKeys, DeclaredVisibility, SharedCore, Scheduled):
    """A LoopedModel (see `protocol`) built from a `ModelConfig`.

    With an exit gate it is a `GatedLoopedLM`, with a ponder cost or a mixture of experts a `ChargingLoopedLM`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.num_loops = config.num_loops
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_length, config.width) if config.positions == "learned" else None
        self.dropout = nn.Dropout(config.dropout)
        self.prelude = Stack(config, config.prelude_layers, "prelude")
        self.prelude_norm = make_optional_norm(config.prelude_norm, config)
        self.recurrence = RECURRENCES[config.recurrence](config)
        self.coda_norm = make_optional_norm(config.coda_norm, config)
        self.coda_map = nn.Linear(config.width, config.width, bias=False) if config.coda_map else None
        self.coda = Stack(config, config.coda_layers, "coda")
        self.readout_map = make_readout(config)
        if config.share_readout_norm:
            assert isinstance(self.readout_map, Norm)
            if self.recurrence.inter_loop_norm is not None:
                self.recurrence.inter_loop_norm = self.readout_map.norm
            if self.coda_norm is not None:
                self.coda_norm = self.readout_map.norm
        self.exit_gate = nn.Linear(config.width, 1) if config.exit_gate else None
        self.unembedding = None if config.tie_head else nn.Linear(config.width, config.vocab_size, bias=False)
        _initialise(self, config)

    @property
    def head(self) -> Tensor:
        """W_VD, tied to the embedding unless the configuration says otherwise."""
        return self.embedding.weight if self.unembedding is None else self.unembedding.weight

    def forward(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor | None = None,
        objective: Objective | None = None,
        *,
        num_loops: int | None = None,
    ) -> LoopTrace | ObjectiveResult:
        """The trace of all loops; with targets and an objective, the loss (in forward, where DDP and FSDP see it)."""
        if objective is None and targets_BT is not None:
            raise DataError("targets need an objective: call model(ids, targets, objective)")
        if objective is None:
            return run_loops(self, ids_BT, num_loops=num_loops)
        if targets_BT is None:
            raise DataError("an objective needs targets: call model(ids, targets, objective)")
        return objective(self, ids_BT, targets_BT, num_loops=num_loops)

    def embed(self, ids_BT: Tensor, cache: Cache | None = None) -> LoopState:
        """Token (and learned position) embedding, dropout, prelude, and the initial state."""
        tokens = ids_BT.shape[-1]
        positions_BT = torch.arange(tokens)[None] if cache is None else cache.positions(tokens)
        check_ids(ids_BT, positions_BT, self.config)
        positions_BT = positions_BT.to(ids_BT.device)
        e_BTD = self.embedding(ids_BT)
        if self.config.embedding_scale != 1:
            e_BTD = e_BTD * self.config.embedding_scale
        if self.positions is not None:
            e_BTD = e_BTD + self.positions(positions_BT)
        rotary = self._rotation(positions_BT.expand(ids_BT.shape))
        seen_BT = ids_BT if self.config.value_embeddings else None
        for router in self._routers():
            router.forget()
        e_BTD = self.prelude(self.dropout(e_BTD), rotary, cache, beside=Beside(seen_BT))
        if self.prelude_norm is not None:
            e_BTD = self.prelude_norm(e_BTD)
        plain = LoopState(self._initial_state(e_BTD, positions_BT), context=Context(e_BTD, rotary, seen_BT))
        return self.recurrence.start(plain)

    def loop(self, state: LoopState, k: Loop, cache: Cache | None = None) -> LoopState:
        """h_{k-1} → h_k; see `recurrence`."""
        return self.recurrence(state, k, cache)

    @property
    def can_project(self) -> bool:
        """Whether its loops hand the carried state to the core's layers; see `recurrence`."""
        return self.recurrence.hands_on_the_state

    def project(self, state: LoopState, loops: Sequence[int], cache: Cache) -> None:
        """Keys and values of a state that no loop runs on any more; see `recurrence`."""
        self.recurrence.project(state, loops, cache)

    def features(self, state: LoopState, k: int, cache: Cache | None = None) -> Tensor:
        """What the head multiplies at loop k: readout(coda(C·norm(h_k))), norm and C where there are any."""
        h_BTD, context = self.recurrence.shown(state), state.context
        if self.coda_norm is not None:
            h_BTD = self.coda_norm(h_BTD)
        if self.coda_map is not None:
            h_BTD = self.coda_map(h_BTD)
        beside = Beside(context.ids_BT, context.input_BTD)
        return self.readout_map(self.coda(h_BTD, context.rotary, cache, k, beside=beside), k)

    def hides(self, k: int) -> frozenset[str] | None:
        """What of the state the readout at loop k hides: what the coda's norm does; of a coda nothing is declared.

        Nor is it of a mean over loops, of which the state is a part only.
        """
        if self.config.recurrence == "pondering":
            return None
        if self.config.coda_norm != "none":
            return hidden_by(self.config.coda_norm)
        return None if self.config.coda_layers else self.readout_map.hides(k)

    @property
    def core(self) -> nn.Module:
        """The layers that every loop runs."""
        return self.recurrence.core

    def at_progress(self, share: float) -> None:
        """Move the gates of all norms that taper."""
        for module in self.modules():
            if isinstance(module, TaperNorm):
                module.taper_to(share)

    def _routers(self) -> tuple[MixtureOfExperts, ...]:
        return tuple(module for module in self.modules() if isinstance(module, MixtureOfExperts))

    def _rotation(self, positions_BT: Tensor) -> Rotation | None:
        if self.config.positions != "rope":
            return None
        config = self.config
        interleaved = config.rope_pairs == "interleaved"
        return rotation(positions_BT, config.head_channels, config.rope_base, interleaved=interleaved)

    def _initial_state(self, e_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """h_0: the embedding, zeros, or noise (fresh in training; in evaluation a fixed draw per position)."""
        if self.config.state_init == "embedding":
            return e_BTD
        if self.config.state_init == "zeros":
            return torch.zeros_like(e_BTD)
        if self.training:
            return _truncated_normal(torch.rand_like(e_BTD), self.config.noise_std)
        # A longer draw from the same seed starts with the shorter one, so a position keeps its noise in any chunking.
        longest = int(positions_BT.max()) + 1
        uniform_ND = torch.rand(longest, e_BTD.shape[-1], generator=torch.Generator().manual_seed(0))
        return _truncated_normal(uniform_ND[positions_BT.cpu()], self.config.noise_std).to(e_BTD).expand_as(e_BTD)


class GatedLoopedLM(LoopedLM, ExitGate):
    """A looped language model whose exit gate reads the features of every loop (Ouro)."""

    exit_gate: nn.Linear

    def exit_logits(self, features_BTD: Tensor) -> Tensor:
        """Logit_BT of leaving at this loop, given that no earlier loop was left at."""
        return self.exit_gate(features_BTD).squeeze(-1)


class ChargingLoopedLM(LoopedLM, OwnLosses):
    """A looped language model that has loss terms of its own."""

    def losses(self) -> list[Term]:
        """Ponder cost of a loop that ponders; balance and z-loss of routers."""
        config, routers = self.config, self._routers()
        terms: list[Term] = [PonderCost(config.ponder_cost)] if config.recurrence == "pondering" else []
        if routers:
            terms += [RouterBalance(config.balance_loss, routers), RouterZLoss(config.router_z_loss, routers)]
        return terms


class GatedChargingLoopedLM(GatedLoopedLM, ChargingLoopedLM):
    """Both."""


_KINDS: dict[tuple[bool, bool], type[LoopedLM]] = {
    (False, False): LoopedLM,
    (True, False): GatedLoopedLM,
    (False, True): ChargingLoopedLM,
    (True, True): GatedChargingLoopedLM,
}
"""By exit gate and losses of its own."""


def build(config: ModelConfig, *, seed: int | None = None, device: str | torch.device = "cpu") -> LoopedLM:
    """A freshly initialised model; the same seed gives the same weights and leaves the global RNG untouched."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None), torch.device(device):
        if seed is not None:
            torch.manual_seed(seed)
        charges = config.recurrence == "pondering" or config.num_experts is not None
        return _KINDS[config.exit_gate, charges](config)


def count_parameters(model: LoopedLM) -> dict[str, int]:
    """Parameters by part; shared ones are counted once, so the values add up to the total."""
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts[name.split(".")[0]] += parameter.numel()
    return dict(parts)


def check_ids(ids_BT: Tensor, positions_BT: Tensor, config: ModelConfig) -> None:
    """Refuse what is no batch of token ids, an id outside the vocabulary, and a position beyond the context."""
    if ids_BT.dim() != 2 or ids_BT.dtype not in (torch.int64, torch.int32) or 0 in ids_BT.shape:
        raise DataError(
            f"ids must be a non-empty (batch, tokens) tensor of int64, got {tuple(ids_BT.shape)} of {ids_BT.dtype}"
        )
    if ids_BT.device.type == "cpu":  # GPUs report a wrong index themselves; looking would stall them
        outside_BT = (ids_BT < 0) | (ids_BT >= config.vocab_size)
        if outside_BT.any():
            wrong = ids_BT[outside_BT][0]
            raise DataError(f"id {wrong} is outside the vocabulary of {config.vocab_size} tokens")
    if (end := int(positions_BT.max()) + 1) > config.max_length:
        raise DataError(f"a sequence of {end} tokens is longer than max_length = {config.max_length}")


def _initialise(model: LoopedLM, config: ModelConfig) -> None:
    """One std everywhere, unless it is torch's; then the norm placement has its word on the matrices of its branches.

    Parcae's injection starts with B = I: the input itself.
    """
    if (std := init_std(config)) is not None:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                draw(module.weight, std, config)
    for module in model.modules():
        if isinstance(module, Layer):
            module.initialise(config)
        if isinstance(module, DiagonalInjection) and config.init == "parcae":
            nn.init.eye_(module.project.weight)
        if isinstance(module, ForgetfulInjection):
            module.initialise()


def _truncated_normal(uniform: Tensor, std: float) -> Tensor:
    """Uniform numbers in [0, 1) as a normal truncated at three standard deviations (inverse of its distribution)."""
    reach = math.erf(3 / math.sqrt(2))
    return std * math.sqrt(2) * torch.erfinv((2 * uniform - 1) * reach)
