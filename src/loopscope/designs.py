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


Make = Callable[[Config], Config]


@dataclass(frozen=True)
class Design:
    """A published design: what it is called, where it comes from, and the configuration it makes of a base."""

    name: str
    """As in design:NAME and --design NAME."""
    title: str
    """As in tables."""
    source: str
    """Where it was published."""
    make: Make
    """The function itself, whose docstring has the equations and what was open."""

    @property
    def summary(self) -> str:
        """The first line of the docstring: what it is, in a sentence."""
        assert self.make.__doc__ is not None
        return self.make.__doc__.strip().splitlines()[0]

    def apply(self, base: Config) -> Config:
        """The configuration of this design at the size of `base`."""
        return self.make(base)


DESIGNS: dict[str, Design] = {}
"""By name, in the order of tables."""
PAPER = "arXiv 2606.24898"


def _design(title: str, source: str) -> Callable[[Make], Make]:
    """Register a function as the design that it is named after."""

    def register(make: Make) -> Make:
        name = make.__name__.replace("_", "-")
        DESIGNS[name] = Design(name, title, source, make)
        return make

    return register


def design(name: str) -> Design:
    """The design of that name; a wrong name gets a suggestion."""
    if name not in DESIGNS:
        raise ConfigError.of("design", name, suggest(name, DESIGNS))
    return DESIGNS[name]


def _designed(base: Config, objective: ObjectiveConfig | None = None, **model: Any) -> Config:
    """`base` with a model that keeps its sizes and recipe and is otherwise `model`, under `objective`."""
    ours = base.design("a design")
    kept = {name: getattr(ours, name) for name in KEPT if name not in model}
    if kept.get("positions", model.get("positions")) != "rope":
        kept.pop("rope_base", None)
    return replace(base, model=ModelConfig(**kept, **model), objective=objective or ObjectiveConfig())


def _at_random_depth(base: Config) -> ObjectiveConfig:
    """CE at the last of a random number of loops, gradient through the last quarter of K, 2 to 8 of them."""
    num_loops = base.model.num_loops
    truncated = min(num_loops, max(2, min(8, num_loops // 4)))
    return ObjectiveConfig(placement="terminal", depth="poisson-lognormal", backprop_loops=truncated)


def _around(base: Config) -> dict[str, int]:
    """Prelude and coda for a core of n layers: n/2 each, at least one (Huginn: 2, 4, 2)."""
    layers = max(1, base.design("a design").num_layers // 2)
    return {"prelude_layers": layers, "coda_layers": layers}


# --- the paper's own (arXiv 2606.24898) -------------------------------------------------------------------------------


@_design("per-loop + RMSNorm", PAPER)
def paper_rmsnorm(base: Config) -> Config:
    """A plain pre-norm loop, every loop supervised through an RMSNorm, which hides the scale of the state.

    h_k = F(h_{k−1}), h_0 = e; logits_k = W·RMSNorm(h_k); loss = mean over k of CE_k. No injection, no inter-loop norm.
    """
    return _designed(base, readout="rmsnorm")


@_design("per-loop + LayerNorm", PAPER)
def paper_layernorm(base: Config) -> Config:
    """A plain pre-norm loop read through a LayerNorm, which hides scale and mean.

    As `paper-rmsnorm`, with logits_k = W·LayerNorm(h_k).
    """
    return _designed(base, readout="layernorm")


@_design("per-loop + raw", PAPER)
def paper_raw(base: Config) -> Config:
    """A plain pre-norm loop read without a norm: the loss sees all of the state.

    As `paper-rmsnorm`, with logits_k = W·h_k.
    """
    return _designed(base, readout="raw")


@_design("per-loop + final-only norm", PAPER)
def paper_final_only(base: Config) -> Config:
    """A plain pre-norm loop whose exits are raw and whose last readout is an RMSNorm.

    logits_k = W·h_k for k < K, W·RMSNorm(h_K) at K: the raw exits show the scale, the last readout keeps its form.
    """
    return _designed(base, readout="final-only")


@_design("terminal + RMSNorm", PAPER)
def paper_terminal_rmsnorm(base: Config) -> Config:
    """The plain loop with RMSNorm readout, supervised after the last loop alone: exits are never trained.

    loss = CE_K. The other column of the paper's 2×2.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), readout="rmsnorm")


@_design("terminal + raw", PAPER)
def paper_terminal_raw(base: Config) -> Config:
    """The plain loop with raw readout, supervised after the last loop alone.

    loss = CE_K on W·h_K.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), readout="raw")


@_design("per-loop + alpha readout", PAPER)
def paper_alpha(base: Config) -> Config:
    """The plain loop behind a readout that lets a learned power of the scale through.

    features = s_ref^(1−a)·s^a·h/s. Open: where a starts; chosen a = ½, one for all loops, s_ref = 1.
    """
    return _designed(base, readout="alpha", alpha=0.5, alpha_mode="learned")


@_design("per-loop + norm penalty", PAPER)
def paper_penalty(base: Config) -> Config:
    """The RMSNorm readout, with a penalty that sees what it hides.

    loss = mean CE_k + λ·mean over loops, tokens and width of h², λ = 0.01.
    """
    return _designed(base, ObjectiveConfig(norm_penalty=PAPER_PENALTY), readout="rmsnorm")


@_design("per-loop + inter-loop norm", PAPER)
def paper_inter_loop_norm(base: Config) -> Config:
    """The RMSNorm readout, and a norm that opens every loop after the first: scale leaves the recurrence.

    h_k = F(RMSNorm(h_{k−1})) for k > 1.
    """
    return _designed(base, readout="rmsnorm", inter_loop_norm="rmsnorm")


@_design("per-loop + scale anchor", PAPER)
def paper_scale_anchor(base: Config) -> Config:
    """The RMSNorm readout, with an anchor that charges for a scale other than 1.

    loss = mean CE_k + w·mean over loops and tokens of (s − 1)². Open: w; chosen 0.01, that of the penalty.
    """
    return _designed(base, ObjectiveConfig(scale_anchor=PAPER_PENALTY), readout="rmsnorm")


@_design("per-loop + spectral damping", PAPER)
def paper_spectral_damping(base: Config) -> Config:
    """The RMSNorm readout, with the state multiplied by a learned sigmoid between loops.

    h_k = F(σ(γ)·h_{k−1}) for k > 1, σ(γ) = 0.95 at first.
    """
    return _designed(base, readout="rmsnorm", spectral_damping=True)


# --- published models -------------------------------------------------------------------------------------------------


@_design("Ouro", "ByteDance/Ouro-1.4B")
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


@_design("Huginn", "arXiv 2502.05171")
def huginn(base: Config) -> Config:
    """Prelude, core, coda; norms on every sum; noise state, input injected in every loop, random depth.

    e = prelude(ids); h_0 truncated normal, std √(2/5); h_k = core(W·[h_{k−1}; e]); logits = head(norm(coda(norm h_K))),
    both norms the same. Loss at the last loop, r = 1 + Poisson(LogNormal) loops, gradient through the last few of them.

    Chosen here: r has the mean K, where the published draw has K + 1; the published 8 of 32 loops back-propagated
    become a quarter of K, at least 2 and at most 8; prelude and coda have half the layers of the core. Rotary
    positions, √d on the embedding, qk-bias and the initialisation are recipe.
    """
    return _designed(
        base,
        _at_random_depth(base),
        **_around(base),
        norm_placement="sum",
        injection="concat",
        state_init="noise",
        coda_norm="rmsnorm",
        share_readout_norm=True,
    )


def _parcae(base: Config, injection: str) -> Config:
    return _designed(
        base,
        _at_random_depth(base),
        **_around(base),
        qk_norm=True,
        qk_norm_gain=False,
        mlp="half-relu2",
        prelude_norm="rmsnorm",
        injection=injection,
        state_init="zeros",
        coda_map=True,
    )


@_design("Parcae, diagonal", "arXiv 2604.12946")
def parcae(base: Config) -> Config:
    """A diagonal linear recurrence with decay below 1 carries the state; pre-norm blocks, no norm on what is carried.

    e = norm(prelude(ids)); h ← h·exp(−Δ·exp(A)) + Δ·(B e), Δ = softplus(dt), A and dt per channel, then the pre-norm
    core; logits = head(norm(coda(C h_K))). ½·ReLU², queries and keys normed without gains. Loss at the last loop,
    random depth with mean K, gradient through the last few loops.

    Chosen here: of the two published h_0 zeros, not small noise; the depth is Poisson-lognormal, not Poisson, and
    truncated as for `huginn`. Its value embeddings and initialisation are recipe.
    """
    return _parcae(base, "diagonal")


@_design("Parcae, add", "arXiv 2604.12946")
def parcae_add(base: Config) -> Config:
    """Parcae's model with the input merely added in every loop.

    h ← h + e, then the pre-norm core; otherwise as `parcae`.
    """
    return _parcae(base, "add")


@_design("Parcae, linear", "arXiv 2604.12946")
def parcae_linear(base: Config) -> Config:
    """Parcae's model with state and input mixed by one matrix in every loop: nothing bounds what is carried.

    h ← W·[h; e], then the pre-norm core; otherwise as `parcae`. Our `concat` injection, Huginn's.
    """
    return _parcae(base, "concat")


@_design("nanoLOOP", "nanoLOOP, looped_nanochat")
def nanoloop(base: Config) -> Config:
    """A plain loop that starts by forgetting: state and input go through a matrix that begins with the input alone.

    u = W·[e; h], W = [I | 0] at first; h_k = stack(u), h_0 = e, an RMSNorm after each loop, which in our cut opens the
    next one and is the readout's. No loop reads the state until W has trained.

    Open: what is supervised; chosen the last loop.
    """
    return _designed(
        base,
        ObjectiveConfig(placement="terminal"),
        injection="forgetful",
        inter_loop_norm="rmsnorm",
        readout="rmsnorm",
        share_readout_norm=True,
    )


@_design("NormFormer", "arXiv 2110.09456")
def normformer(base: Config) -> Config:
    """A plain loop of NormFormer layers: further norms in each branch, learned head and residual scales.

    x ← x + LN_a(W_O·[γ_i·head_i]); x ← w_res∘x + W_2·LN_f(act(W_1·LN x)); γ and w_res start at 1.

    Open: it was not published as a loop; every loop is supervised through LayerNorm, as its final norm is.
    """
    return _designed(base, norm="layernorm", norm_placement="normformer", readout="layernorm")


@_design("DeepNorm", "arXiv 2203.00555")
def deepnorm(base: Config) -> Config:
    """A plain loop of post-norm layers with a weighted residual; no final norm.

    x ← LN(α·x + f(x)), α = (2M)^¼; values, outputs and feed-forward initialised × β = (8M)^−¼.

    Open: what M counts in a loop, and what is supervised; chosen the unrolled depth, layers × loops, and every loop.
    """
    return _designed(base, norm="layernorm", norm_placement="deepnorm", readout="raw")


@_design("DeepLoop", "arXiv 2607.13491")
def deeploop(base: Config) -> Config:
    """DeepNorm with weights made for loops: square roots of the unrolled depth for fourth roots.

    x ← LN(α·x + f(x)), α = (2M)^½; values, outputs and feed-forward initialised × β = (8M)^−½, M the unrolled depth.

    Open: readout and placement of its loss; chosen as for `deepnorm`.
    """
    return _designed(base, norm="layernorm", norm_placement="deeploop", readout="raw")


@_design("1/N residuals", "arXiv 2606.18524")
def one_over_n(base: Config) -> Config:
    """A pre-norm loop whose branches are divided by the number of loops.

    x ← x + N⁻¹·(L/12)^−½·f(norm x), N loops, L layers, each counted once.

    Open: the placement of its loss; chosen every loop through RMSNorm, as `paper-rmsnorm`.
    """
    return _designed(base, norm_placement="one-over-n", readout="rmsnorm")


@_design("recall + outer norm", "arXiv 2604.15259")
def recall(base: Config) -> Config:
    """Every branch recalls the input, and an outer norm closes it: fixed points that depend on the input.

    u = LN(W_r·[h; e]); h ← LN'(h + Attn(u)); the same with the feed-forward; h_0 = e, W_r of each branch 2d → d.

    Open: whether both branches share W_r, initialisation and depths; chosen one for each, and those of the base.
    Supervised at the last loop, read without a further norm.
    """
    objective = ObjectiveConfig(placement="terminal")
    return _designed(base, objective, norm="layernorm", norm_placement="recall", readout="raw")


@_design("TaperNorm", "arXiv 2602.10408")
def tapernorm(base: Config) -> Config:
    """Norms that fade into fixed maps while it trains, the last one too, with an anchor on the scale.

    y = g·γ∘x/r + (1 − g)·c·γ₂∘x in every layer and in the readout; g = 1 for the first 0.3 of training, then a cosine
    to 0; c and γ₂ are those of the norm at the end of that time. loss = mean CE_k + λ·mean (s − 1)².

    Open: warm-up, λ and the target of the anchor; chosen 0.3, 1 and 1. At λ = 0.01, the weight of the paper's penalty,
    small models diverged here once the norms had faded. It was not published as a loop; every loop is supervised.
    """
    return _designed(base, ObjectiveConfig(scale_anchor=1.0), norm="taper", readout="taper")


@_design("STARS", "arXiv 2605.26733")
def stars(base: Config) -> Config:
    """A plain loop whose loss charges for how much one more loop would stretch a random change of the state.

    loss = (1 − λ)·CE_K + λ·‖J v‖², λ = 0.1, v a random unit vector, J of one loop at the last state, held fixed.

    Open: the model around it; chosen the plain loop with RMSNorm readout, supervised at the last loop.
    """
    return _designed(base, ObjectiveConfig(placement="terminal", jacobian_penalty=0.1), readout="rmsnorm")


@_design("ELT", "arXiv 2604.09168")
def elt(base: Config) -> Config:
    """A plain loop that learns at the last loop, and at one random exit, which the last one comes to teach.

    loss = CE_K + λ·CE_j + (1 − λ)·D_j, j uniform in 1..K, λ from 1 to 0 in a line over training, D_j the cross-entropy
    of exit j against the probabilities of loop K, which get no gradient from it.

    Open: the model around it and the least j; chosen the plain loop with RMSNorm readout, and 1.
    """
    return _designed(base, ObjectiveConfig(placement="distilled"), readout="rmsnorm")


@_design("PonderNet", "arXiv 2107.05407")
def pondernet(base: Config) -> Config:
    """Gated exits under a geometric prior on the depth.

    λ_k = σ(gate), p_k = λ_k·Π_{j<k}(1 − λ_j), the last loop takes the rest; loss = Σ p_k·CE_k + β·KL(p ‖ geometric),
    rate 0.2 with its remaining mass on the last loop, β = 0.01.

    Open: the model around it; chosen the plain loop with RMSNorm readout. The gate reads what the head reads, as ours
    does everywhere; the published one reads the state. Halting is by a threshold on the cumulative p; no exit is drawn.
    """
    return _designed(base, ObjectiveConfig(placement="gated", exit_kl=0.01), exit_gate=True, readout="rmsnorm")


@_design("ACT", "arXiv 1603.08983")
def act(base: Config) -> Config:
    """Tokens halt when their gates have added up; what is read out is the mean of the states on the way.

    p_n = σ(w·h_{n−1} + b); out = Σ_{n<N} p_n·h_n + R·h_N; loss = CE_K + τ·mean(N + R), τ = 0.01, b = 1 at first.

    Open: the norm before the head; chosen RMSNorm on the mean.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), recurrence="pondering", readout="rmsnorm")


@_design("SCSE", "arXiv 2607.27656")
def scse(base: Config) -> Config:
    """The loop acts on the distance to an anchor that the input sets, and halts where that is zero.

    anchor = e + 0.1·P_a e; h_0 = e + 0.1·P_0 e; δ = h − anchor; h ← anchor + δ + ½·m·G(δ), m = 1 where ‖δ‖² > 1e-8.

    Open: readout and loss; chosen the last loop through RMSNorm. G(δ) is taken for what the layers add to δ.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), recurrence="anchored", readout="rmsnorm")


@_design("HRM, two states", "HRM-Text")
def hrm(base: Config) -> Config:
    """Two states: a fast one that runs three times for each time a slow one does, and is carried beside it.

    z_L ← norm(L(z_L + z_H)) three times; h = H(z_H + z_L); z_H = norm(h) opens the next loop. z_H starts from the
    embedding over the std that it was drawn with, z_L from zero; the last loop is supervised. L and H each have the
    base's layers.

    Chosen here: all cycles are back-propagated, and the readout's norm has a gain. Rotary positions are recipe; the
    output gate of attention is its own.
    """
    objective = ObjectiveConfig(placement="terminal")
    return _designed(base, objective, recurrence="two-state", attention_gate=True, readout="rmsnorm")


@_design("Hyperloop", "arXiv 2604.21254")
def hyperloop(base: Config) -> Config:
    """Four copies of the stream, which each loop reads, writes and keeps by gates of its own.

    z = RMSNorm(flatten Y); Y ← σ(·)∘Y + 2σ(·)∘(F(σ(·)·Y) + v_k), each σ of a·W z + b, per loop; read out their mean.

    Open: prelude, coda and loss; chosen none, none, and the last loop through RMSNorm. With b = 0 the gates read
    2·mean(Y) and keep half, and F has a residual of its own: a fresh loop makes the state about 2.5 times as long.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), recurrence="hyper", readout="rmsnorm")


@_design("hyper-connections, lanes", "arXiv 2604.21254")
def lanes(base: Config) -> Config:
    """Four lanes, of which each loop reads one at first and writes a normed step into all.

    u = α_k·lanes; lanes ← M_k·lanes + β_k·norm(F(u)); α_k one-hot at k mod 4, M_k = I, β_k = 1 at first; their sum is
    read out.

    Open: where lanes start, and loss; chosen e in each, and the last loop through RMSNorm.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), recurrence="lanes", readout="rmsnorm")


@_design("Fully Looped Transformer", "arXiv 2605.18797")
def fully_looped(base: Config) -> Config:
    """The state comes back as the queries of every layer, while the stream itself restarts from the input.

    Loop 1 is ordinary; in loop k > 1 every layer attends with Q = W_Q·h_{k−1}, K and V of its own input, and the
    residual stream begins at e again. No parameters are added.

    Open: a norm on the query; chosen the layer's own. Supervised at the last loop through RMSNorm.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), recurrence="query", readout="rmsnorm")


@_design("looped mixture of experts", "arXiv 2605.09165")
def looped_moe(base: Config) -> Config:
    """A plain loop whose feed-forwards are mixtures: each token goes to 2 of 8 experts of half the width.

    loss = CE_K + w_b·E·Σ f_i·p̄_i + w_z·mean(logsumexp²) of the router's logits.

    Open: both weights; chosen 0.01 and 0.001. Its norms have no gain, ours do; its rotary positions are recipe.
    Supervised at the last loop.
    """
    return _designed(base, ObjectiveConfig(placement="terminal"), num_experts=8, mlp="swiglu", readout="rmsnorm")
