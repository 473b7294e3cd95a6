"""Models whose blind subspace is known by derivation, by class; `python benchmarks/planted.py` audits them all.

Every case is a small looped model with one fault planted in it (or none: a control). Its docstring derives N, the
directions of the state that no supervised exit notices, and how many of them the loop carries, can write and reads:
the blind dimension. What all derivations use:

- Width d, K loops, state h = s·√d·û with ‖û‖ = 1, F one loop, W the head with its rows centred. W is random with
  V = 4d, so it is injective: what is hidden is hidden by the readout in front of it.
- s ≈ 1.04 (tokens of variance 1, positions of 0.09), and entries of W have the variance 1/d: raw logits have rms 1.04.
- RMSNorm: δ ↦ (I − ûûᵀ)δ/s. Null space span(h). LayerNorm: null space span(1, h).
- The plain core is F(h) = h + β·B(norm h) with β = 0.03, so DF = I + O(β): invertible. Every direction is reachable and
  carried with a gain within 0.05 of 1. RMSNorm blocks read all of h, its scale included: F(αh)/α moves with α. So
  blind = dim N, unless the case changes the loop.
- "In general position": random subspaces of dimensions a and b meet in max(0, a + b − d) dimensions.

What "notices" means. An exit j of weight w_j (1/K each, divided by W_k = Σ_{j≥k} w_j) notices ½·w_j/W_k·(g·rms Δz)² of
a change Δz of its centred logits, g = max(1, 1/rms z); noticed is 0.01.

- Scale moved by α multiplies raw logits by α: ½·(α − 1)² = 0.01 at α = 1.14, visible. Weak from 3, free from 10.
- A direction is hidden where ten lengths of the state go unnoticed by the tangent. Shown at ℓ times the strength of an
  ordinary channel of a raw readout it answers 10·ℓ·g: with w = 1/3 to 1/2 the limit is ℓ·g = 0.02.
- From one supervised exit to the next, u = DF·v falls into a, what is hidden there, and b, the rest, both in units of
  each channel's rms. Directions with ‖a‖ ≥ ‖b‖ and ‖a‖ ≥ 0.71·‖v‖ stay hidden.

No case lies within a factor of 1.5 of a limit. Shape legend: B batch, T tokens, D width, V vocabulary, H heads,
C head width, R lost directions, M channels of a second carried tensor.
"""
