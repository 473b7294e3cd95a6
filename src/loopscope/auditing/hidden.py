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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loopscope.auditing.derivatives import Map, changes, disagree, least_squares, pull, push
from loopscope.auditing.free_range import SAME_LOGITS
from loopscope.auditing.visibility import Fields, field_rows
from loopscope.auditing.window import Window, Windows
from loopscope.errors import ProtocolError
from loopscope.objectives.terms import Term
from loopscope.protocol import LinearReadout, LoopedModel
from loopscope.results.thresholds import NOTICED

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
IN_EVERY_TOKEN = 4.0
"""A field is hidden behind a coda if so many times more of it lies in what the coda hides than of a random direction.
"""
UNNOTICED = 0.1
"""What may be left to see of it, where 1 is the limit."""
SOLVED = 1e-4
"""Share of an average gain that bounds how far other tokens may move to make up for a field."""


@dataclass(frozen=True)
class Hidden:
    """What the readout of one loop shows of a token's state: singular values and the directions it hides."""

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
    rounding: float
    """What the arithmetic of the readout leaves of nothing, over the same median."""
    unit: float
    """That median in units of the spectrum."""
    disputed: tuple[str, ...]
    """Named fields along which a change of the state and the derivative disagree: the change is believed."""

    @property
    def rank(self) -> int:
        """How many directions the readout shows at all."""
        squares_X = torch.linalg.eigvalsh(self.gram_XX)
        return int((squares_X > (NOTHING**2) * squares_X[-1]).sum())

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
        block, units_X = window.block(k, token), window.lengths(k, token)
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
        charge = 0.5 * self.weights.get(k, 0.0) / later * LENGTHS**2 * float(h_D.double().square().sum()) / NOTICED
        terms_XX = self._terms_noticed(window, token, k, w_W) / later
        noticed_XX = charge * gram_XX + terms_XX
        if window.tokens > 1:
            own_XF = seen_XF.unflatten(-1, (window.tokens, -1))[:, token]
            own_X, own_XX = torch.linalg.eigh(charge * own_XF @ own_XF.T)
            own_XH = own_XX[:, own_X <= HIDDEN**2]
            least = IN_EVERY_TOKEN * own_XH.shape[1] / len(block)
            seen_M = (units_MX @ noticed_XX * units_MX).sum(-1)
            asked = chosen(fields, (seen_M > HIDDEN**2) & ((units_MX @ own_XH).square().sum(-1) > least / 2))
            for v_X, seen in self._in_every_token(
                window,
                token,
                k,
                w_W,
                {name: fields[name] for name in asked},
                lambda w_RW: noticed(shown(w_RW)),
                charge,
                least,
            ):
                across_XX = identity_XX - torch.outer(v_X, v_X)
                gram_XX, terms = across_XX @ gram_XX @ across_XX, float(v_X @ terms_XX @ v_X)
                noticed_XX = across_XX @ noticed_XX @ across_XX + (charge * seen + terms) * torch.outer(v_X, v_X)
        squares_X, vectors_XX = torch.linalg.eigh(noticed_XX)
        basis_XH = vectors_XX[:, squares_X <= HIDDEN**2]
        if (held := self._held(window, token, k, w_W, basis_XH) / later) > 0:
            squares_X = torch.where(squares_X <= HIDDEN**2, squares_X + held, squares_X)
            noticed_XX = noticed_XX + held * basis_XH @ basis_XH.T
        spectrum_X = squares_X.clamp(min=0).sqrt().sort().values
        return Hidden(
            spectrum_X.flip(0),
            reference,
            gram_XX,
            noticed_XX,
            basis_XH if held <= HIDDEN**2 else basis_XH[:, :0],
            rounding / reference,
            reference * charge**0.5,
            chosen(fields, disputed_M),
        )

    def _in_every_token(
        self, window: Window, token: int, k: int, w_W: Tensor, fields: Fields, noticed: Map, charge: float, least: float
    ) -> list[tuple[Tensor, float]]:
        """Named fields that are hidden when every token moves: a unit direction of this token, and what is seen of it.

        Behind a coda C the exits rms C(H) hide the curve C(H(c)) = c·C(H), which leads to infinity; its tangent is near
        h and not equal to it. Where C attends, it is one of all tokens together: each makes up for what it sees of the
        others. So F, the field in every token, is followed by the nearest V = F − U that the exits do not see,
        U = argmin ‖J(F − U)‖² + λ²‖U‖². It counts if more than the share `least` of F is left of this token's V.
        """
        if not fields:
            return []
        layout, tokens = window.layout(k), range(window.tokens)
        width, units_W = layout.parts[0].width, layout.repeated(window.lengths(k, token))
        fields_MW = w_W.new_zeros(len(fields), len(w_W), dtype=torch.float64)
        own = float(w_W[window.block(k, token)[:width]].double().norm())
        for each in tokens:
            columns = window.block(k, each)[:width]
            h_D = w_W[columns]
            fields_MW[:, columns] = field_rows(fields, h_D, width) * float(h_D.double().norm()) / own

        def forward(rows_RW: Tensor) -> Tensor:
            return push(lambda w_RW: [noticed(w_RW)], w_W, rows_RW * units_W)[0].double()

        def backward(rows_RF: Tensor) -> Tensor:
            return pull(noticed, w_W, rows_RF).double() * units_W

        seen_MF = forward(fields_MW)
        gain = float((seen_MF.norm(dim=-1) / fields_MW.norm(dim=-1).clamp(min=1e-300)).max())
        enough = UNNOTICED / max(charge, 1e-300) ** 0.5
        made_up_MW, left_MF = least_squares(forward, backward, seen_MF, damping=SOLVED * gain, tolerance=enough)
        found: list[tuple[Tensor, float]] = []
        for f_W, v_W, left_F in zip(fields_MW, fields_MW - made_up_MW, left_MF, strict=True):
            f_X, v_X = (each_W[window.block(k, token)] for each_W in (f_W, v_W))
            share = float(v_X.square().sum() / f_X.square().sum().clamp(min=1e-300))
            if share >= least and float(v_W.norm()) > 0:
                unit_X = v_X / v_X.norm()
                for other_X, _ in found:
                    unit_X = unit_X - other_X * (other_X @ unit_X)
                if float(unit_X.norm()) > least**0.5:
                    found.append((unit_X / unit_X.norm(), float(left_F.square().sum() / v_W.square().sum())))
        return found

    def _held(self, window: Window, token: int, k: int, w_W: Tensor, basis_XH: Tensor) -> float:
        """What terms notice at least of ten lengths along any hidden direction, beyond what their derivatives say.

        A term that sees ‖h‖ alone has no derivative across h, and holds the state on a sphere all the same: of f(h) it
        is the even part, ½·(f(h + Δ) + f(h − Δ)) − f(h), that such a step moves. The least over a basis is taken, so
        that a term on some directions does not speak for others. Of a term that shows nothing it is the value's.
        """
        if basis_XH.shape[1] == 0 or not self.terms:
            return 0.0
        steps_HW = LENGTHS * window.placed(basis_XH.T * window.lengths(k, token), k, token)
        noticed_H = torch.zeros(basis_XH.shape[1], dtype=torch.float64, device=w_W.device)
        for term, scale in self.terms:
            at_W, length = _at_scale(scale, window, token, k, w_W)
            silent = type(term).shows is Term.shows and not term.inside_cross_entropy
            of = partial(window.charged_by, token=token) if silent else window.shown_by
            with torch.no_grad():
                ahead, behind = (of(term, k, at_W + sign * length * steps_HW.to(at_W)).double() for sign in (1, -1))
                even = (ahead + behind) / 2 - of(term, k, at_W[None]).double()
            noticed_H += (even.clamp(min=0) if silent else even.square().sum(-1)) / NOTICED
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


def probes(width: int) -> Tensor:
    """The same random unit directions at every state."""
    probes_RX = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    return probes_RX / probes_RX.norm(dim=-1, keepdim=True)


def chosen(fields: Fields, mask_M: Tensor) -> tuple[str, ...]:
    """Names of the fields that a mask marks."""
    return tuple(name for name, one in zip(fields, mask_M.tolist(), strict=True) if one)
