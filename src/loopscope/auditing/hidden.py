"""What the exit of one loop hides of a token's state: the directions of which ten lengths go unnoticed.

In units of √(nats/0.01), so that 1 is the limit, a direction v of unit length is noticed by

    σ(v)² = (10·‖h‖)²·(½·w·Σ_tokens ‖g·J v‖²  +  Σ_terms ‖T v‖²/W) / 0.01

J is the Jacobian of the centred logits over √V, w the exit's weight among those from loop k on, W the sum of these
weights, g weighs changes of logits as `free_range` does (tiny logits are lifted, a change of temperature counts by its
share), and T is what a loss term shows of a state of the scale from which it counts (‖h‖ is the length of that one).
The bound is absolute: it does not depend on how much other directions show. Visibility is measured in the uniform
metric on centred logits; weighting by the model's own probabilities gives false alarms where softmax saturates.

Carried tensors are measured in lengths of their own: y = (h, z·‖h‖/‖z‖, …).

Shape legend: R rows, M named fields, X width of a token's share of the joint state, D width of h, N tokens of a window,
H hidden directions, C directions under test, F features, V vocabulary, W width of the joint state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loopscope.auditing.derivatives import Map, push, with_the_same_noise
from loopscope.auditing.free_range import SAME_LOGITS
from loopscope.auditing.window import NOISE, Window, Windows
from loopscope.errors import ProtocolError
from loopscope.objectives.terms import Term
from loopscope.protocol import LinearReadout, LoopedModel
from loopscope.readings import NOTICED

LENGTHS = 10.0
"""A direction that can run this many lengths of the state before the objective notices is hidden."""
HIDDEN = 1.0
"""Singular values are in such units: below 1, ten lengths go unnoticed."""
WEAK = 10 / 3
"""Below this, three lengths go unnoticed: something is shown, but little."""
LITTLE = 1e-3
"""Share of what an average direction shows below which derivatives and changes need not agree."""
NOTHING = 1e-6
"""Below this share of the largest, a singular value is zero; the median is taken over the others."""
ROUNDING_MARGIN = 10.0
"""A singular value below so many times the rounding may be zero."""
PROBES = 8
"""Random directions that say what an average one does."""
CHANGES = (1e-3, 1e-1)
"""Lengths, in that of the state, of the changes that a derivative along a named field is held against."""
CHANGES_SINGLE = (1e-2, 1e-1)
"""The same where the state is not float64: smaller ones drown in rounding."""
DISPUTED = 0.3
"""Relative difference from which derivative and change disagree, or two changes of another size do."""

Fields = Mapping[str, Callable[[Tensor], Tensor]]
"""Directions of h with a name, each a function of the state."""


@dataclass(frozen=True)
class Hidden:
    """What the readout of one loop shows of a token's state: singular values and the directions it hides."""

    k: int
    spectrum: Tensor
    """What is noticed of ten lengths of the state along each singular direction, √(nats/0.01), descending."""
    reference: float
    """Median of the readout's own singular values that are not zero."""
    gram_XX: Tensor
    """JᵀJ of the readout."""
    noticed_XX: Tensor
    """The quadratic form σ(v)²."""
    basis_XH: Tensor
    """Orthonormal basis of the hidden directions."""
    rounding: float = 0.0
    """What the arithmetic of the readout leaves of nothing, over the same median."""
    unit: float = 1.0
    """That median in units of the spectrum."""
    disputed: tuple[str, ...] = ()
    """Named fields along which a change of the state and the derivative disagree: the change is believed."""

    @property
    def undecided(self) -> int:
        """Directions that are shown so little that rounding may be all of it."""
        return int(((self.spectrum > HIDDEN) & (self.spectrum <= ROUNDING_MARGIN * self.rounding * self.unit)).sum())

    @property
    def weak(self) -> int:
        """Directions that are shown, but little."""
        return int(((self.spectrum > HIDDEN) & (self.spectrum <= WEAK)).sum())

    def visibility(self, basis_XC: Tensor) -> float:
        """Largest ‖J v‖ of an orthonormal basis over the median singular value."""
        return _largest(self.gram_XX, basis_XC) / self.reference

    def free_lengths(self, basis_XC: Tensor) -> float:
        """Lengths of the state that the direction of a basis of which most is shown can run unnoticed."""
        return LENGTHS / max(_largest(self.noticed_XX, basis_XC), 1e-30)


def _largest(form_XX: Tensor, basis_XC: Tensor) -> float:
    return float(torch.linalg.eigvalsh(basis_XC.T @ form_XX @ basis_XC)[-1].clamp(min=0).sqrt())


class LogitMetric:
    """The length ‖centred logits‖/√V of changes of features: with G = (WᵀW − V·w̄w̄ᵀ)/V = SSᵀ, that of rows t is ‖t S‖.

    w̄ is the mean row of the head. A model with a readout of its own gives logits, which are centred as they are.
    """

    def __init__(self, model: LoopedModel) -> None:
        self.root_FF: Tensor | None = None
        if (linear := LinearReadout.of(model)) is not None:
            head_VF = linear.head.detach().double()
            head_VF = head_VF - head_VF.mean(0)
            squares_F, vectors_FF = torch.linalg.eigh(head_VF.T @ head_VF / len(head_VF))
            self.root_FF = vectors_FF * squares_F.clamp(min=0).sqrt()

    def logits(self, tangents_RNF: Tensor) -> Tensor:
        """Rows whose inner products are those of the logit changes."""
        tangents_RNF = tangents_RNF.double()
        if self.root_FF is not None:
            return tangents_RNF @ self.root_FF
        return (tangents_RNF - tangents_RNF.mean(-1, keepdim=True)) / tangents_RNF.shape[-1] ** 0.5


@dataclass(frozen=True)
class Readouts:
    """What the exits and terms of one objective notice."""

    metric: LogitMetric
    weights: Mapping[int, float]
    terms: Sequence[tuple[Term, float]]
    """Each with the scale of h from which it counts."""

    def hidden(self, around: Windows, k: int, fields: Fields, token: int = 0) -> Hidden:
        """What the readout of loop k hides of one token, the audited one or one of those after it.

        A state below scale 1 is judged at scale 1 where its logits keep their direction: below it a norm's eps leaks,
        eps/(s² + eps), and an untrained model would pass for a visible one until it has grown. A readout that collapses
        at another scale than its own (a soft cap) is judged at its own.
        """
        h_D = around.ahead.h_D(k, token)
        if not h_D.any():
            raise ProtocolError(f"loop {k} leaves a state h_{k} of zeros, which has no direction")
        window = around.alone if token == 0 and not self._attends(around.ahead, k) else around.ahead
        w_W, columns = window.vector(k), window.block(k, token)[: len(h_D)]
        scale = float(h_D.norm()) / len(h_D) ** 0.5
        if scale < 1:
            grown_W = w_W.clone()
            grown_W[columns] /= scale
            with torch.no_grad():
                here_V, there_V = (window.logits(w[None], k)[0, token].double() for w in (w_W, grown_W))
            here_V, there_V = here_V - here_V.mean(), there_V - there_V.mean()
            if torch.nn.functional.cosine_similarity(here_V, there_V, dim=0) >= SAME_LOGITS:
                w_W = grown_W
        return self._hidden_at(window, token, k, w_W, fields)

    def _attends(self, ahead: Window, k: int) -> bool:
        """Whether the exits of later tokens see this token's state of the same loop: a coda with attention."""
        if ahead.tokens == 1:
            return False
        probes_RX = probes(len(ahead.block(k))).to(ahead.vector(k))[:2]
        (seen_RF,) = push(lambda w_RW: [ahead.shown(w_RW, k)], ahead.vector(k), ahead.placed(probes_RX, k))
        seen_RNF = seen_RF.unflatten(-1, (ahead.tokens, -1))
        return bool(seen_RNF[:, 1:].norm() > 1e-9 * seen_RNF.norm())

    def _hidden_at(self, window: Window, token: int, k: int, w_W: Tensor, fields: Fields) -> Hidden:
        """The singular values of what is shown of one state, from the Gram matrix of its Jacobian.

        Probes say how far the arithmetic is from linear: in bf16 as much as a weak direction shows. Where that matters,
        and where a change of the state contradicts the derivative, named fields are asked about by themselves.
        """
        block, units_X = window.block(k, token), lengths(window, k, token)
        h_D = w_W[block[: window.layout(k).parts[0].width]]
        units_MX = field_rows(fields, h_D, len(block))
        probes_RX = probes(len(block)).to(h_D.device)
        identity_XX = torch.eye(len(block), dtype=torch.float64, device=h_D.device)

        def shown(w_RW: Tensor) -> Tensor:
            return window.shown(w_RW, k)

        with torch.no_grad():
            z_NF = self.metric.logits(shown(w_W[None]).unflatten(-1, (window.tokens, -1)))[0]
        rms_N1 = z_NF.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        unit_NF = z_NF / rms_N1

        def noticed(rows_RF: Tensor) -> Tensor:
            """Changes of logits, those of the temperature alone as shares of it; see `free_range`."""
            rows_RNF = self.metric.logits(rows_RF.unflatten(-1, (window.tokens, -1)))
            hotter_RNF = (rows_RNF * unit_NF).sum(-1, keepdim=True) * unit_NF
            return ((rows_RNF - hotter_RNF) / rms_N1.clamp(max=1) + hotter_RNF / rms_N1).flatten(1)

        rows_RX = torch.cat([identity_XX, units_MX, probes_RX])
        (tangents_RF,) = push(lambda w_RW: [shown(w_RW)], w_W, window.placed(rows_RX * units_X, k, token))
        seen_XF, along_MF, probed_RF = noticed(tangents_RF).split([len(block), len(units_MX), len(probes_RX)])
        usual = float(probed_RF.norm(dim=-1).median())
        rounding = float((probed_RF - probes_RX @ seen_XF).norm(dim=-1).median())
        moved_MF, believed_M = changes(
            lambda w_RW: noticed(shown(w_RW)), w_W, window.placed(units_MX, k, token), float(h_D.double().norm())
        )
        disputed_M = believed_M & disagree(moved_MF, along_MF, floor=LITTLE * usual)
        asked_M = disputed_M | (rounding > LITTLE / ROUNDING_MARGIN * usual)
        if asked_M.any():
            along_MF = torch.where(disputed_M[:, None], moved_MF, along_MF)[asked_M]
            seen_XF = seen_XF + torch.linalg.pinv(units_MX[asked_M]) @ (along_MF - units_MX[asked_M] @ seen_XF)
        gram_XX = seen_XF @ seen_XF.T
        if not gram_XX.isfinite().all():
            raise ProtocolError(f"the readout at loop {k} has a derivative that is NaN or infinite")
        if gram_XX.diagonal().sum() == 0:
            raise ProtocolError(f"the readout at loop {k} does not depend on the state h_{k}: its derivative is zero")
        own_X = torch.linalg.eigvalsh(gram_XX).clamp(min=0).sqrt()
        reference = float(own_X[own_X > NOTHING * own_X[-1]].median())
        later = sum(weight for j, weight in self.weights.items() if j >= k)
        charge = 0.5 * self.weights[k] / later * LENGTHS**2 * float(h_D.double().square().sum()) / NOTICED
        noticed_XX = charge * gram_XX + self._terms_noticed(window, token, k, w_W) / later
        squares_X, vectors_XX = torch.linalg.eigh(noticed_XX)
        basis_XH = vectors_XX[:, squares_X <= HIDDEN**2]
        if (held := self._held(window, token, k, w_W, basis_XH) / later) > 0:
            squares_X = torch.where(squares_X <= HIDDEN**2, squares_X + held, squares_X)
            noticed_XX = noticed_XX + held * basis_XH @ basis_XH.T
        spectrum_X = squares_X.clamp(min=0).sqrt().sort().values
        return Hidden(
            k,
            spectrum_X.flip(0),
            reference,
            gram_XX,
            noticed_XX,
            basis_XH if held <= HIDDEN**2 else basis_XH[:, :0],
            rounding / reference,
            reference * charge**0.5,
            chosen(fields, disputed_M),
        )

    def _held(self, window: Window, token: int, k: int, w_W: Tensor, basis_XH: Tensor) -> float:
        """What terms notice at least of ten lengths along any hidden direction, beyond what their derivatives say.

        A term that sees ‖h‖ alone has no derivative across h, and holds the state on a sphere all the same: of f(h) it
        is the even part, ½·(f(h + Δ) + f(h − Δ)) − f(h), that such a step moves. The least over a basis is taken, so
        that a term on some directions does not speak for others.
        """
        if basis_XH.shape[1] == 0 or not self.terms:
            return 0.0
        steps_HW = LENGTHS * window.placed(basis_XH.T * lengths(window, k, token), k, token)
        noticed_H = torch.zeros(basis_XH.shape[1], dtype=torch.float64, device=w_W.device)
        for term, scale in self.terms:
            at_W, length = _at_scale(scale, window, token, k, w_W)
            with torch.no_grad():
                ahead_HF, behind_HF = (
                    window.shown_by(term, k, at_W + sign * length * steps_HW.to(at_W)).double() for sign in (1, -1)
                )
                here_1F = window.shown_by(term, k, at_W[None]).double()
            noticed_H += ((ahead_HF + behind_HF) / 2 - here_1F).square().sum(-1) / NOTICED
        return float(noticed_H.min())

    def _terms_noticed(self, window: Window, token: int, k: int, w_W: Tensor) -> Tensor:
        """The quadratic form of what the terms' derivatives notice of ten lengths."""
        block = window.block(k, token)
        width = window.layout(k).parts[0].width
        identity_DX = torch.eye(width, len(block), dtype=torch.float64, device=w_W.device)
        noticed_XX = torch.zeros(len(block), len(block), dtype=torch.float64, device=w_W.device)
        for term, scale in self.terms:
            at_W, length = _at_scale(scale, window, token, k, w_W)
            shown = partial(window.shown_by, term, k)
            (seen_DF,) = push(lambda w_RW: [shown(w_RW)], at_W, window.placed(identity_DX, k, token))  # noqa: B023
            noticed_XX[:width, :width] += (LENGTHS * length) ** 2 / NOTICED * seen_DF.double() @ seen_DF.double().T
        return noticed_XX


def _at_scale(scale: float, window: Window, token: int, k: int, w_W: Tensor) -> tuple[Tensor, float]:
    """The state with the token's h at another scale, and the length of that h."""
    width = window.layout(k).parts[0].width
    columns, at_W, length = window.block(k, token)[:width], w_W.clone(), scale * width**0.5
    at_W[columns] *= length / at_W[columns].norm()
    return at_W, length


def lengths(window: Window, k: int, token: int | None = None) -> Tensor:
    """How long each tensor of a token's share is, over h and per √channel; a tensor of zeros counts as long as h."""
    layout, x_X = window.layout(k), window.vector(k)[window.block(k, token)].double()
    units_X, columns = torch.ones_like(x_X), layout.columns()
    h_norm, width = float(x_X[columns["h"]].norm()), layout.parts[0].width
    for name, where in columns.items():
        if name == "h":
            continue
        share = float(x_X[where].norm()) / max(h_norm, 1e-300)
        alike = ((where.stop - where.start) / width) ** 0.5
        units_X[where] = share if share > 2 * NOISE * alike else alike
    return units_X


def probes(width: int) -> Tensor:
    """The same random unit directions at every state."""
    probes_RX = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return probes_RX / probes_RX.norm(dim=-1, keepdim=True)


def field_rows(fields: Fields, h_D: Tensor, width: int) -> Tensor:
    """Named fields at a state as unit rows, in float64; of zeros where a field vanishes, and outside of h."""
    rows_MD = torch.stack([of(h_D.double()).double() for of in fields.values()])
    rows_MD = rows_MD / rows_MD.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    return torch.nn.functional.pad(rows_MD, (0, width - rows_MD.shape[1]))


def changes(function: Map, w_W: Tensor, units_MW: Tensor, length: float) -> tuple[Tensor, Tensor]:
    """What ±10 % of a state's length along each direction does, per unit, and whether ±0.1 % does the same.

    Where a function jumps (a coarse dtype, a quantisation) the two differ, and neither is an answer.
    """
    moved = []
    for step in CHANGES if w_W.dtype == torch.float64 else CHANGES_SINGLE:
        offsets_MW = (step * length * units_MW).to(w_W.dtype)
        ahead, behind = (with_the_same_noise(function, w_W + sign * offsets_MW).double() for sign in (1, -1))
        moved.append((ahead - behind) / (2 * step * length))
    return moved[0], ~disagree(moved[0], moved[1])


def disagree(one_MF: Tensor, other_MF: Tensor, floor: float = 0.0) -> Tensor:
    """Rows that are further apart than `DISPUTED` of the longer one, and than `floor`."""
    longer_M = torch.maximum(one_MF.norm(dim=-1), other_MF.norm(dim=-1))
    apart_M = (one_MF - other_MF).norm(dim=-1)
    return (apart_M > DISPUTED * longer_M) & (apart_M > floor)


def chosen(fields: Fields, mask_M: Tensor) -> tuple[str, ...]:
    """Names of the fields that a mask marks."""
    return tuple(name for name, one in zip(fields, mask_M.tolist(), strict=True) if one)
