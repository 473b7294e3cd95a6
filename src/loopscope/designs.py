"""Published looped designs, each a configuration on our parts. No torch here.

A design is a plain function from a base configuration to one of the same size under that design. Of the base it keeps
sizes, text, training, and the recipe (positions, initialisation, a tied head, dropout: `KEPT`); everything else is the
design's own, so a design is the same thing whatever it is applied to. "Open" in a docstring is what the source does not
say, or what we have not read, and how we chose.

    loopscope audit design:huginn                           at the size of the preset demo
    loopscope train --preset nano --design huginn
    DESIGNS["huginn"].apply(preset("nano"))

Legend: K loops, h the carried state, e the embedded input, CE_k the cross-entropy of loop k, s the scale of h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from loopscope.config import PAPER_PENALTY, Config, ModelConfig, ObjectiveConfig
from loopscope.errors import ConfigError, suggest

KEPT = (
    *("vocab_size", "width", "num_layers", "num_loops", "num_heads", "num_kv_heads", "mlp_width", "max_length"),
    *("dropout", "positions", "rope_base", "norm_eps", "tie_head", "init"),
)
"""Fields of a model that a design takes from its base, unless it is about them: sizes and the recipe."""

DESIGN_SIZE = "demo"
"""The preset that design:NAME is the size of."""


@dataclass(frozen=True)
class Design:
    """A published design: what it is called, where it comes from, and the configuration it makes of a base."""

    name: str
    """As in design:NAME and --design NAME."""
    title: str
    """As in tables."""
    source: str
    """Where it was published."""
    make: Callable[[Config], Config]
    """The function itself, whose docstring has the equations and what was open."""

    @property
    def summary(self) -> str:
        """The first line of the docstring: what it is, in a sentence."""
        assert self.make.__doc__ is not None
        return self.make.__doc__.strip().splitlines()[0]

    def apply(self, base: Config) -> Config:
        """The configuration of this design at the size of `base`."""
        return self.make(base)


def _designed(base: Config, objective: ObjectiveConfig | None = None, **model: Any) -> Config:
    """`base` with a model that keeps its sizes and recipe and is otherwise `model`, under `objective`."""
    ours = base.design("a design")
    kept = {name: getattr(ours, name) for name in KEPT if name not in model}
    if kept.get("positions", model.get("positions")) != "rope":
        kept.pop("rope_base", None)
    return replace(base, model=ModelConfig(**kept, **model), objective=objective or ObjectiveConfig())


def _around(base: Config) -> dict[str, int]:
    """Prelude and coda for a core of n layers: n/2 each, at least one (Huginn: 2, 4, 2)."""
    layers = max(1, base.design("a design").num_layers // 2)
    return {"prelude_layers": layers, "coda_layers": layers}


# --- the paper's own (arXiv 2606.24898) ------------------------------------------------------------------------------


def paper_rmsnorm(base: Config) -> Config:
    """A plain pre-norm loop, every loop supervised through an RMSNorm, which hides the scale of the state.

    h_k = F(h_{k−1}), h_0 = e; logits_k = W·RMSNorm(h_k); loss = mean over k of CE_k. No injection, no inter-loop norm.
    """
    return _designed(base, readout="rmsnorm")


def paper_layernorm(base: Config) -> Config:
    """A plain pre-norm loop read through a LayerNorm, which hides scale and mean.

    As `paper-rmsnorm`, with logits_k = W·LayerNorm(h_k).
    """
    return _designed(base, readout="layernorm")


def paper_raw(base: Config) -> Config:
    """A plain pre-norm loop read without a norm: the loss sees all of the state.

    As `paper-rmsnorm`, with logits_k = W·h_k.
    """
    return _designed(base, readout="raw")


def paper_final_only(base: Config) -> Config:
    """A plain pre-norm loop whose exits are raw and whose last readout is an RMSNorm.

    logits_k = W·h_k for k < K, W·RMSNorm(h_K) at K: the raw exits show the scale, the last readout keeps its form.
    """
    return _designed(base, readout="final-only")


def paper_terminal_rmsnorm(base: Config) -> Config:
    """The plain loop with RMSNorm readout, supervised after the last loop alone: exits are never trained.

    loss = CE_K. The other column of the paper's 2×2.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), readout="rmsnorm")


def paper_terminal_raw(base: Config) -> Config:
    """The plain loop with raw readout, supervised after the last loop alone.

    loss = CE_K on W·h_K.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), readout="raw")


def paper_alpha(base: Config) -> Config:
    """The plain loop behind a readout that lets a learned power of the scale through.

    features = s_ref^(1−a)·s^a·h/s. Open: where a starts; chosen a = ½, one for all loops, s_ref = 1.
    """
    return _designed(base, readout="alpha", alpha=0.5, alpha_mode="learned")


def paper_penalty(base: Config) -> Config:
    """The RMSNorm readout, with a penalty that sees what it hides.

    loss = mean CE_k + λ·mean over loops, tokens and width of h², λ = 0.01.
    """
    return _designed(base, ObjectiveConfig(norm_penalty=PAPER_PENALTY), readout="rmsnorm")


def paper_inter_loop_norm(base: Config) -> Config:
    """The RMSNorm readout, and a norm that opens every loop after the first: scale leaves the recurrence.

    h_k = F(RMSNorm(h_{k−1})) for k > 1.
    """
    return _designed(base, readout="rmsnorm", inter_loop_norm="rmsnorm")


def paper_scale_anchor(base: Config) -> Config:
    """The RMSNorm readout, with an anchor that charges for a scale other than 1.

    loss = mean CE_k + w·mean over loops and tokens of (s − 1)². Open: w; chosen 0.01, that of the penalty.
    """
    return _designed(base, ObjectiveConfig(scale_anchor=PAPER_PENALTY), readout="rmsnorm")


def paper_spectral_damping(base: Config) -> Config:
    """The RMSNorm readout, with the state multiplied by a learned sigmoid between loops.

    h_k = F(σ(γ)·h_{k−1}) for k > 1, σ(γ) = 0.95 at first.
    """
    return _designed(base, readout="rmsnorm", spectral_damping=True)


# --- published models ------------------------------------------------------------------------------------------------


def ouro(base: Config) -> Config:
    """Sandwich norms, one norm that closes each loop and feeds head, exit gate and next loop; gated exits.

    x ← x + norm'(f(norm x)); h_k = norm(stack(h_{k−1})); λ_k = σ(gate(h_k)), p_k = λ_k·Π_{j<k}(1 − λ_j), the last loop
    takes the rest; loss = Σ p_k·CE_k − w·H(p). In our cut that norm is readout and inter-loop norm at once.

    Open: w over the stages of its training; chosen 0.05, as in the preset ouro-1.4b. Its rotary positions and untied
    head are recipe here.
    """
    return _designed(
        base,
        ObjectiveConfig(placement="gated", exit_entropy=0.05),
        norm_placement="sandwich",
        inter_loop_norm="rmsnorm",
        readout="rmsnorm",
        share_readout_norm=True,
        exit_gate=True,
    )


def huginn(base: Config) -> Config:
    """Prelude, core, coda; norms on every sum; noise state, input injected in every loop, random depth.

    e = prelude(ids); h_0 truncated normal, std √(2/5); h_k = core(W·[h_{k−1}; e]); logits = head(norm(coda(h_K))). Loss
    at the last loop, r = 1 + Poisson(LogNormal) loops, gradient through the last few of them.

    Chosen here: the published 8 of 32 loops back-propagated become a quarter of K, at least 2 and at most 8; prelude
    and coda have half the layers of the core; rotary positions, √d on the embedding and qk-bias are recipe.
    """
    num_loops = base.model.num_loops
    truncated = min(num_loops, max(2, min(8, num_loops // 4)))
    return _designed(
        base,
        ObjectiveConfig(placement="terminal", depth="poisson-lognormal", backprop_loops=truncated),
        **_around(base),
        norm_placement="sum",
        injection="concat",
        state_init="noise",
    )


def _parcae(base: Config, injection: str) -> Config:
    return _designed(
        base,
        ObjectiveConfig(placement="terminal", depth="poisson-lognormal"),
        **_around(base),
        qk_norm=True,
        mlp="relu2",
        injection=injection,
        state_init="zeros",
    )


def parcae(base: Config) -> Config:
    """A diagonal linear recurrence with decay below 1 carries the state; pre-norm blocks, no norm on what is carried.

    h ← h·exp(−Δ·exp(A)) + Δ·(B e), Δ = softplus(dt), A and dt per channel, then the pre-norm core; qk-norm, ReLU²,
    prelude and coda. Loss at the last loop, random depth with mean K.

    Open: h_0; chosen zeros. Its value embeddings are recipe.
    """
    return _parcae(base, "diagonal")


def parcae_add(base: Config) -> Config:
    """Parcae's model with the input merely added in every loop.

    h ← h + e, then the pre-norm core; otherwise as `parcae`.
    """
    return _parcae(base, "add")


def normformer(base: Config) -> Config:
    """A plain loop of NormFormer layers: further norms in each branch, learned head and residual scales.

    x ← x + LN_a(W_O·[γ_i·head_i]); x ← w_res∘x + W_2·LN_f(act(W_1·LN x)); γ and w_res start at 1.

    Open: it was not published as a loop; every loop is supervised through LayerNorm, as its final norm is.
    """
    return _designed(base, norm="layernorm", norm_placement="normformer", readout="layernorm")


def deepnorm(base: Config) -> Config:
    """A plain loop of post-norm layers with a weighted residual; no final norm.

    x ← LN(α·x + f(x)), α = (2M)^¼; values, outputs and feed-forward initialised × β = (8M)^−¼.

    Open: what M counts in a loop; chosen the unrolled depth, layers × loops.
    """
    return _designed(base, norm="layernorm", norm_placement="deepnorm", readout="raw")


# --- the registry ----------------------------------------------------------------------------------------------------

_PAPER = "arXiv 2606.24898"

DESIGNS: dict[str, Design] = {
    design.name: design
    for design in (
        Design("paper-rmsnorm", "per-loop + RMSNorm", _PAPER, paper_rmsnorm),
        Design("paper-layernorm", "per-loop + LayerNorm", _PAPER, paper_layernorm),
        Design("paper-raw", "per-loop + raw", _PAPER, paper_raw),
        Design("paper-final-only", "per-loop + final-only norm", _PAPER, paper_final_only),
        Design("paper-terminal-rmsnorm", "terminal + RMSNorm", _PAPER, paper_terminal_rmsnorm),
        Design("paper-terminal-raw", "terminal + raw", _PAPER, paper_terminal_raw),
        Design("paper-alpha", "per-loop + alpha readout", _PAPER, paper_alpha),
        Design("paper-penalty", "per-loop + norm penalty", _PAPER, paper_penalty),
        Design("paper-inter-loop-norm", "per-loop + inter-loop norm", _PAPER, paper_inter_loop_norm),
        Design("paper-scale-anchor", "per-loop + scale anchor", _PAPER, paper_scale_anchor),
        Design("paper-spectral-damping", "per-loop + spectral damping", _PAPER, paper_spectral_damping),
        Design("ouro", "Ouro", "ByteDance/Ouro-1.4B", ouro),
        Design("huginn", "Huginn", "arXiv 2502.05171", huginn),
        Design("parcae", "Parcae, diagonal", "arXiv 2604.12946", parcae),
        Design("parcae-add", "Parcae, add", "arXiv 2604.12946", parcae_add),
        Design("normformer", "NormFormer", "arXiv 2110.09456", normformer),
        Design("deepnorm", "DeepNorm", "arXiv 2203.00555", deepnorm),
    )
}


def design(name: str) -> Design:
    """The design of that name; a wrong name gets a suggestion."""
    if name not in DESIGNS:
        raise ConfigError.of("design", name, suggest(name, DESIGNS))
    return DESIGNS[name]
