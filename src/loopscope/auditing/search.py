"""The search for blind directions: what a loop carries on, an earlier loop writes, and no loss sees.

A looped model is taken apart as a control engineer takes a system apart, at the state h_k of one token at a time:

    hidden      J v ≈ 0, J = Jacobian of the centred logits at loop k, stacked with what other loss terms show
    carried     the next loops pass v on: neither removed at once nor damped by more than 5 % a loop
    reachable   v is in the range of the Jacobian of loop k, which wrote h_k, up to hidden directions that are removed
    read        some later loop's logits depend on v; otherwise it is inert
    unshown     v arrives at every later supervised loop among what is hidden there
    unbounded   a huge change along v survives a loop; where an inter-loop norm bounds it, it is a memory

A direction with all six is **blind**: training moves it, depth carries it, and no exit's loss answers for it.
Lemma 1 of arXiv 2606.24898 is the special case v = h, J = Jacobian through RMSNorm.

Decisions are made on singular values themselves. Visibility is measured in the uniform metric on centred logits:
weighting by the model's own probabilities gives false alarms where softmax saturates. Reachable is membership in a
range, never energy along a direction, which norm gains can fake.

Shape legend: N hidden directions, C directions under test, R rows, D width, F features, V vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from loopscope.auditing.free_range import FreeRange
from loopscope.auditing.token_maps import TokenMaps, jacobian, pull, push, with_the_same_noise
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
CARRIED = 1e-3
"""A direction that the next loop shrinks to less than this share of what it leaves of others is removed."""
DAMPED = 0.95
"""Gain per loop below which a direction dies out by itself."""
REACH = 1e-2
"""A unit direction this close to the range of the previous loop's Jacobian is one it can write."""
RANGE = 1e-4
"""Singular values below this share of the median do not count as range: a bounded solution is asked for."""
READ = 1e-9
"""Share of an average direction's effect on later logits below which nothing reads a direction (float64)."""
READ_SINGLE = 1e-5
"""The same in float32."""
STILL_HIDDEN = 0.55
"""Part of a direction, per loop, that must arrive at a later supervised loop among what is hidden there."""
HUGE = 1e4
"""Length, in that of the state, of a change that only a bounded loop absorbs."""
BOUNDED = 1e-2
"""Gain of such a change below which the loop bounds it."""
LATER_LOOPS = 4
"""Loops after k through which a direction is followed."""
CHANGES = (1e-3, 1e-1)
"""Lengths, in that of the state, of the changes that a derivative along a named field is held against."""
CHANGES_SINGLE = (1e-2, 1e-1)
"""The same where the state is not float64: smaller ones drown in rounding."""
DISPUTED = 0.3
"""Relative difference from which derivative and change disagree, or two changes of another size do."""
ROUNDING_MARGIN = 10.0
"""A singular value below so many times the rounding may be zero."""
MOST_AUDITED = 8
"""Loops whose state is searched: each is followed to the last, and the cost of all would grow with their square."""
PROBES = 8
"""Random directions that say what an average one does."""

Fields = dict[str, Callable[[Tensor], Tensor]]
"""Directions with a name, each a function of the state."""

CLASSES = ("removed", "unreachable", "damped", "inert", "shown_later", "memory", "blind")
"""What becomes of a hidden direction, in the order of the questions."""


@dataclass(frozen=True)
class Hidden:
    """What the readout of one loop shows of a state: singular values and the directions it hides."""

    k: int
    spectrum: Tensor
    """What is noticed of ten lengths of the state along each singular direction, √(nats/0.01), descending."""
    reference: float
    """Median of the readout's own singular values that are not zero."""
    gram_DD: Tensor
    """JᵀJ of the readout."""
    basis_DN: Tensor
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

    def largest_visibility(self, basis_DC: Tensor) -> float:
        """The same of the direction in an orthonormal basis of which most is shown."""
        return (
            float(torch.linalg.eigvalsh(basis_DC.T @ self.gram_DD @ basis_DC)[-1].clamp(min=0).sqrt()) / self.reference
        )

    def visibility(self, direction_D: Tensor) -> float:
        """‖J v‖ of a unit direction over the median singular value."""
        return float((direction_D @ self.gram_DD @ direction_D).clamp(min=0).sqrt()) / self.reference


@dataclass(frozen=True)
class Strength:
    """The largest of what is shown, carried and read of a subspace."""

    visibility: float
    """Over the median singular value."""
    delayed: float
    """Effect on the logits of the next loops, over that of an average direction."""
    activity: float
    """Gain through the next loop."""


@dataclass(frozen=True)
class Fate:
    """What becomes of a subspace of hidden directions: how many end in each class, and a basis of the blind ones."""

    counts: dict[str, int]
    blind_DC: Tensor
    strengths: dict[str, Strength] = field(default_factory=dict)
    """Of the directions that are blind, besides the named ones, and of those that are memory, where there are such."""


@dataclass(frozen=True)
class StateFindings:
    """One state at one loop."""

    hidden: Hidden
    fate: Fate
    fields: dict[str, FieldFinding] = field(default_factory=dict)
    is_read: bool = True
    """Whether the next loop depends on the state at all."""
    disputed: tuple[str, ...] = ()
    """Named fields along which the next loop's derivative and a change of the state disagree."""


@dataclass(frozen=True)
class FieldFinding:
    """A named direction field (scale, mean, a user's own) at one state."""

    fate: str
    """What becomes of it in the loop; "unasked" where the objective holds it."""
    visibility: float
    delayed: float
    activity: float


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

    def logits(self, tangents_RF: Tensor) -> Tensor:
        """Rows whose inner products are those of the logit changes."""
        tangents_RF = tangents_RF.double()
        if self.root_FF is not None:
            return tangents_RF @ self.root_FF
        return (tangents_RF - tangents_RF.mean(-1, keepdim=True)) / tangents_RF.shape[-1] ** 0.5


class Search:
    """The questions, asked of one model under one objective."""

    def __init__(
        self,
        model: LoopedModel,
        weights: Mapping[int, float],
        terms: Sequence[Term] = (),
        *,
        matrix_free: bool = False,
        seed: int = 0,
        runnable: int | None = None,
    ) -> None:
        """`runnable` is the last loop that the model runs, where that ends."""
        self.metric, self.runnable = LogitMetric(model), runnable
        self.weights, self.terms, self.matrix_free = dict(weights), terms, matrix_free
        self.supervised = sorted(weights)
        self.num_loops = self.supervised[-1]
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def audited(self) -> list[int]:
        """Supervised loops whose state goes on in training, a few of many; if only the last is supervised, that one."""
        return audited_loops(self.supervised)

    @property
    def repeats(self) -> bool:
        """Whether no loop comes after the audited one, so that the last loop is run again in its stead."""
        return self.runnable is not None and self.runnable <= max(self.audited)

    def later(self, k: int) -> int:
        """Loops after k through which a direction is followed: to the last supervised one, and a few at least."""
        wanted = max(LATER_LOOPS, self.num_loops - k)
        return wanted if self.repeats or self.runnable is None else min(wanted, self.runnable - k)

    @property
    def deepest(self) -> int:
        """The last loop that any question runs."""
        return max(k + self.later(k) for k in self.audited)

    def examine(self, token: TokenMaps, fields: Fields, ranges: Mapping[str, FreeRange]) -> dict[int, StateFindings]:
        """All audited loops of one token; what becomes of a field is asked only where it is free."""
        hidden = {k: self.hidden(token, k, fields) for k in self.supervised}
        findings = {}
        for k in self.audited:
            question = _Question(self, token, k, hidden, fields)
            named = {name: question.field(index, asked=ranges[name].is_free(k)) for index, name in enumerate(fields)}
            fate = question.fate([index for index, one in enumerate(named.values()) if one.fate == "blind"])
            findings[k] = StateFindings(hidden[k], fate, named, question.usual_gain > 0, question.disputed)
        return findings

    def hidden(self, token: TokenMaps, k: int, fields: Fields) -> Hidden:
        """What the readout of loop k hides of its state, at a scale of at least 1 where that hides scale besides.

        Below it a norm's eps leaks, eps/(s² + eps), and an untrained model would pass for a visible one until it has
        grown. A readout that collapses at another scale than its own (a soft cap) is judged at its own.
        """
        h_D = token.h_D(k)
        if not h_D.any():
            raise ProtocolError(f"loop {k} leaves a state h_{k} of zeros, which has no direction")
        found = self._hidden_at(token, k, h_D, fields)
        scale = float(h_D.norm()) / len(h_D) ** 0.5
        if scale >= 1:
            return found
        grown = self._hidden_at(token, k, h_D / scale, fields)
        return grown if grown.basis_DN.shape[1] == found.basis_DN.shape[1] + 1 else found

    def _hidden_at(self, token: TokenMaps, k: int, h_D: Tensor, fields: Fields) -> Hidden:
        """The singular values of what is shown of one state, from the Gram matrix of its Jacobian.

        Probes say how far the arithmetic is from linear: in bf16 as much as a weak direction shows. Where that matters,
        and where a change of the state contradicts the derivative, named fields are asked about by themselves.
        """
        identity_DD = torch.eye(len(h_D), dtype=torch.float64, device=h_D.device)
        units_MD = unit_fields(fields, h_D)
        probes_RD = self._probes(len(h_D)).to(h_D.device)
        rows_RD = torch.cat([identity_DD, units_MD, probes_RD])
        (tangents_RF,) = push(lambda h_RD: [token.shown(h_RD, k)], h_D, rows_RD)
        shown_RF = self.metric.logits(tangents_RF)
        logits_DF, along_MF, probed_RF = shown_RF.split([len(h_D), len(units_MD), len(probes_RD)])
        usual = float(probed_RF.norm(dim=-1).median())
        rounding = float((probed_RF - probes_RD @ logits_DF).norm(dim=-1).median())
        moved_MF, believed_M = changes(lambda h_RD: self.metric.logits(token.shown(h_RD, k)), h_D, units_MD)
        disputed_M = believed_M & disagree(moved_MF, along_MF, floor=LITTLE * usual)
        asked_M = disputed_M | (rounding > LITTLE / ROUNDING_MARGIN * usual)
        if asked_M.any():
            along_MF = torch.where(disputed_M[:, None], moved_MF, along_MF)[asked_M]
            logits_DF = logits_DF + torch.linalg.pinv(units_MD[asked_M]) @ (along_MF - units_MD[asked_M] @ logits_DF)
        gram_DD = logits_DF @ logits_DF.T
        if not gram_DD.isfinite().all():
            raise ProtocolError(f"the readout at loop {k} has a derivative that is NaN or infinite")
        if gram_DD.diagonal().sum() == 0:
            raise ProtocolError(f"the readout at loop {k} does not depend on the state h_{k}: its derivative is zero")
        own_D = torch.linalg.eigvalsh(gram_DD).clamp(min=0).sqrt()
        reference = float(own_D[own_D > NOTHING * own_D[-1]].median())
        charge = self._exit_charge(token, k, h_D)
        squares_D, vectors_DD = torch.linalg.eigh(charge * gram_DD + self._terms_noticed(token, k, h_D))
        spectrum_D = squares_D.clamp(min=0).sqrt()
        basis_DN = vectors_DD[:, spectrum_D <= HIDDEN]
        rest = (rounding / reference, reference * charge**0.5, _chosen(fields, disputed_M))
        return Hidden(k, spectrum_D.flip(0), reference, gram_DD, basis_DN, *rest)

    def _exit_charge(self, token: TokenMaps, k: int, h_D: Tensor) -> float:
        """½·w·g²·(ten lengths)² over the limit: times ‖J v‖², what the exit notices of ten lengths along v.

        w is the exit's weight among those from k on, g = max(1, 1/rms z) lifts the tiny logits of an untrained model.
        """
        with torch.no_grad():
            (logits_V,) = token.logits(h_D[None], k).double()
        gain = 1 / min(float((logits_V - logits_V.mean()).square().mean().sqrt().clamp(min=1e-30)), 1.0)
        weight = self.weights[k] / sum(weight for j, weight in self.weights.items() if j >= k)
        return 0.5 * weight * gain**2 * LENGTHS**2 * float(h_D.double().square().sum()) / NOTICED

    def _terms_noticed(self, token: TokenMaps, k: int, h_D: Tensor) -> Tensor:
        """The quadratic form of what the terms notice of ten lengths, at the scale that the design fixes."""
        noticed_DD = torch.zeros(len(h_D), len(h_D), dtype=torch.float64, device=h_D.device)
        scale = float(h_D.norm()) / len(h_D) ** 0.5
        for term in self.terms:
            seen_FD = jacobian(partial(token.shown_by, term, k), h_D / scale)
            noticed_DD = noticed_DD + LENGTHS**2 * len(h_D) / NOTICED * seen_FD.T @ seen_FD
        return noticed_DD

    def _probes(self, width: int) -> Tensor:
        """The same random unit directions at every state."""
        probes_RD = torch.randn(PROBES, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
        return probes_RD / probes_RD.norm(dim=-1, keepdim=True)


def unit_fields(fields: Fields, h_D: Tensor) -> Tensor:
    """Named fields at a state as unit rows, in float64; of zeros where a field vanishes."""
    rows_MD = torch.stack([of(h_D.double()).double() for of in fields.values()])
    return rows_MD / rows_MD.norm(dim=-1, keepdim=True).clamp(min=1e-300)


def changes(function: Callable[[Tensor], Tensor], h_D: Tensor, units_MD: Tensor) -> tuple[Tensor, Tensor]:
    """What ±10 % of a state's length along each direction does, per unit, and whether ±0.1 % does the same.

    Where a function jumps (a coarse dtype, a quantisation) the two differ, and neither is an answer.
    """
    steps, length = CHANGES if h_D.dtype == torch.float64 else CHANGES_SINGLE, float(h_D.double().norm())
    moved = []
    for step in steps:
        offsets_MD = (step * length * units_MD).to(h_D.dtype)
        ahead, behind = (with_the_same_noise(function, h_D + sign * offsets_MD).double() for sign in (1, -1))
        moved.append((ahead - behind) / (2 * step * length))
    return moved[0], ~disagree(moved[0], moved[1])


def disagree(one_MF: Tensor, other_MF: Tensor, floor: float = 0.0) -> Tensor:
    """Rows that are further apart than `DISPUTED` of the longer one, and than `floor`."""
    longer_M = torch.maximum(one_MF.norm(dim=-1), other_MF.norm(dim=-1))
    apart_M = (one_MF - other_MF).norm(dim=-1)
    return (apart_M > DISPUTED * longer_M) & (apart_M > floor)


def _chosen(fields: Fields, mask_M: Tensor) -> tuple[str, ...]:
    return tuple(name for name, chosen in zip(fields, mask_M.tolist(), strict=True) if chosen)


def carried_on(supervised: Sequence[int]) -> list[int]:
    """Supervised loops below the last; the last if it is the only one."""
    return [k for k in supervised if k < max(supervised)] or list(supervised)


def audited_loops(supervised: Sequence[int]) -> list[int]:
    """Loops whose state is audited: those whose state goes on in training, a few of many."""
    return _spread(carried_on(sorted(supervised)), MOST_AUDITED)


def _spread(loops: list[int], most: int) -> list[int]:
    """At most so many of them, evenly, the first and the last included."""
    if len(loops) <= most:
        return loops
    return [loops[round(index * (len(loops) - 1) / (most - 1))] for index in range(most)]


class _Question:
    """One state at one loop: follows directions through the loops before and after it, all of them at once."""

    def __init__(self, search: Search, token: TokenMaps, k: int, hidden: dict[int, Hidden], fields: Fields) -> None:
        self.search, self.token, self.k, self.hidden = search, token, k, hidden
        self.h_D = token.h_D(k)
        self.disputed: tuple[str, ...] = ()
        self._corrections: tuple[Tensor, list[Tensor]] | None = None
        self.units_MD = unit_fields(fields, self.h_D)
        self._compare_with_changes(fields)
        probes_RD = torch.randn(PROBES, len(self.h_D), generator=search.generator, dtype=torch.float64)
        probes_RD = probes_RD.to(self.h_D.device) / probes_RD.norm(dim=-1, keepdim=True).to(self.h_D.device)
        rows_RD = torch.cat([probes_RD, self.units_MD, hidden[k].basis_DN.T])
        self._images = self._follow(rows_RD)
        carried, effects = self._followed(0, PROBES)
        self.usual_gain = float(carried[0].norm(dim=-1).median())
        self.usual_effect = float(torch.cat(effects, dim=-1).norm(dim=-1).median())
        self.read_floor = READ if self.h_D.dtype == torch.float64 else READ_SINGLE
        self._range: Tensor | None = None
        self._outside_removed_DC: Tensor | None = None

    def _followed(self, start: int, stop: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Some rows of what was followed: probes, named fields, hidden directions."""
        carried, effects = self._images
        return [image[start:stop] for image in carried], [image[start:stop] for image in effects]

    def field(self, index: int, *, asked: bool) -> FieldFinding:
        """One named direction. Whether a later exit shows it is not asked: its free range has moved it there, too."""
        unit_D = self.units_MD[index]
        visibility = self.hidden[self.k].visibility(unit_D)
        carried, effects = self._followed(PROBES + index, PROBES + index + 1)
        fate = "unasked"
        if asked:
            counts, *_ = self._sort(unit_D[:, None], carried, effects, but=("shown_later",))
            fate = next(name for name in CLASSES if counts[name])
        gain, delayed = self._strengths(carried, effects)
        return FieldFinding(_PUBLIC.get(fate, fate), visibility, delayed, gain)

    def fate(self, named: Sequence[int]) -> Fate:
        """What becomes of the hidden directions; named fields that are blind are measured by themselves."""
        basis_DC = self.hidden[self.k].basis_DN
        if basis_DC.shape[1] == 0:
            return Fate(dict.fromkeys(CLASSES, 0), basis_DC)
        carried, effects = self._followed(PROBES + len(self.units_MD))
        counts, blind, memory = self._sort(basis_DC, carried, effects)
        strengths = {}
        others = blind @ _complement((self.units_MD[list(named)] @ basis_DC @ blind).T)
        for name, coordinates in (("blind", others if others.shape[1] else blind), ("memory", memory)):
            if coordinates.shape[1]:
                rows = ([coordinates.T @ image for image in images] for images in (carried, effects))
                gain, delayed = self._strengths(*rows)
                visibility = self.hidden[self.k].largest_visibility(basis_DC @ coordinates)
                strengths[name] = Strength(visibility, delayed, gain)
        return Fate(counts, basis_DC @ blind, strengths)

    def _strengths(self, carried: list[Tensor], effects: list[Tensor]) -> tuple[float, float]:
        """Largest gain through the next loop, and effect on later logits over an average direction's."""
        gain = float(torch.linalg.matrix_norm(carried[0], ord=2))
        effect = float(torch.linalg.matrix_norm(torch.cat(effects, dim=-1), ord=2))
        return gain, effect / self.usual_effect if self.usual_effect else 0.0

    def _sort(
        self, basis_DC: Tensor, carried: list[Tensor], effects: list[Tensor], but: Sequence[str] = ()
    ) -> tuple[dict[str, int], Tensor, Tensor]:
        """Directions by class, each question taking some away; coordinates of those left, the blind, and of memory."""
        counts = dict.fromkeys(CLASSES, 0)
        memory = torch.zeros(basis_DC.shape[1], 0, dtype=torch.float64, device=basis_DC.device)
        rest = torch.eye(basis_DC.shape[1], dtype=torch.float64, device=basis_DC.device)
        for name, question in self._questions(basis_DC, carried, effects):
            if name in but:
                continue
            kept = question(rest)
            counts[name] = rest.shape[1] - kept.shape[1]
            if name == "memory":
                memory = rest @ _complement(rest.T @ kept)
            rest = kept
            if rest.shape[1] == 0:
                break
        counts["blind"] = rest.shape[1]
        return counts, rest, memory

    def _questions(
        self, basis_DC: Tensor, carried: list[Tensor], effects: list[Tensor]
    ) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
        """Each maps coordinates (in `basis_DC`) of the directions left to those that pass."""
        return [
            ("removed", lambda rest: self._kept(carried[0].T, rest, CARRIED * self.usual_gain)),
            ("unreachable", lambda rest: self._reachable(basis_DC, rest)),
            ("damped", lambda rest: self._undamped(carried, rest)),
            ("inert", lambda rest: self._read(effects, rest)),
            ("shown_later", lambda rest: self._unshown(carried, rest)),
            ("memory", lambda rest: self._unbounded(basis_DC, rest)),
        ]

    def _follow(self, rows_RD: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Images of directions after 1, 2, … loops, and their effects on the logits there."""
        later = self.search.later(self.k)
        pushed = push(self._loops_and_readouts, self.h_D, rows_RD)
        if self._corrections is not None:
            inverse_DM, errors = self._corrections
            pushed = [
                image + (rows_RD @ inverse_DM @ error).to(image) for image, error in zip(pushed, errors, strict=True)
            ]
        for index, image in enumerate(pushed):
            if not image.isfinite().all():
                what = f"{'loop' if index < later else 'readout at loop'} {self.k + 1 + index % later}"
                raise ProtocolError(f"the {what} has a derivative with respect to h_{self.k} that is NaN or infinite")
        return [image.double() for image in pushed[:later]], [
            self.search.metric.logits(rows) for rows in pushed[later:]
        ]

    def _loops_and_readouts(self, h_RD: Tensor) -> list[Tensor]:
        states = self.token.loops(h_RD, self.k, self.search.later(self.k))
        shown = [self.token.shown(state_RD, self.k + m) for m, state_RD in enumerate(states, start=1)]
        return [*states, *shown]

    def _compare_with_changes(self, fields: Fields) -> None:
        """Where the next loop's derivative along a named field is not what a change does, the change is followed."""
        units_MD = self.units_MD
        (along_MD,) = push(lambda h_RD: [self.token.loops(h_RD, self.k, 1)[0]], self.h_D, units_MD)
        moved_MD, believed_M = changes(lambda h_RD: self.token.loops(h_RD, self.k, 1)[0], self.h_D, units_MD)
        disputed_M = believed_M & disagree(moved_MD, along_MD.double(), floor=CARRIED)
        if not disputed_M.any():
            return
        self.disputed, units_MD = _chosen(fields, disputed_M), units_MD[disputed_M]
        pushed = push(self._loops_and_readouts, self.h_D, units_MD)
        widths = [image.shape[-1] for image in pushed]
        moved_MF, _ = changes(lambda h_RD: torch.cat(self._loops_and_readouts(h_RD), dim=-1), self.h_D, units_MD)
        errors = [one - image.double() for one, image in zip(moved_MF.split(widths, dim=-1), pushed, strict=True)]
        self._corrections = (torch.linalg.pinv(units_MD), errors)

    @staticmethod
    def _kept(image_DC: Tensor, rest: Tensor, floor: float) -> Tensor:
        """Directions that a linear map does not shrink below `floor`."""
        _, gains, right = torch.linalg.svd(image_DC @ rest, full_matrices=False)
        return rest @ right.T[:, gains > floor]

    def _undamped(self, carried: list[Tensor], rest: Tensor) -> Tensor:
        """Directions whose image shrinks by less than 5 % a loop from the first loop on; at it, if it is alone."""
        loops = min(LATER_LOOPS, len(carried))
        if loops == 1:
            return self._kept(carried[0].T, rest, DAMPED)
        first_DC, last_DC = (carried[index].T @ rest for index in (0, loops - 1))
        _, triangle = torch.linalg.qr(first_DC)
        back = torch.linalg.inv(triangle)
        _, gains, right = torch.linalg.svd(last_DC @ back, full_matrices=False)
        return _orthonormal(rest @ back @ right.T[:, gains >= DAMPED ** (loops - 1)])

    def _reachable(self, basis_DC: Tensor, rest: Tensor) -> Tensor:
        """Directions within `REACH` of what the loop that wrote this state can write."""
        outside = self._unwritable(basis_DC @ rest)
        _, residuals, right = torch.linalg.svd(outside, full_matrices=False)
        return rest @ right.T[:, residuals <= REACH]

    def _unwritable(self, directions_DC: Tensor) -> Tensor:
        """What is left of directions without the range of the previous loop and without what the next one removes.

        A direction may be written together with hidden ones that vanish at once: that is as good as writing it alone.
        """
        if self._outside_removed_DC is None:
            basis_DN = self.hidden[self.k].basis_DN
            removed_DC = basis_DN[:, :0]
            if basis_DN.shape[1]:
                carried, _ = self._followed(PROBES + len(self.units_MD))
                _, gains, right = torch.linalg.svd(carried[0].T, full_matrices=False)
                removed_DC = basis_DN @ right.T[:, gains <= CARRIED * self.usual_gain]
            left, sizes, _ = torch.linalg.svd(self._outside_range(removed_DC), full_matrices=False)
            self._outside_removed_DC = left[:, sizes > REACH]
        outside_DC = self._outside_range(directions_DC)
        return outside_DC - self._outside_removed_DC @ (self._outside_removed_DC.T @ outside_DC)

    def _outside_range(self, directions_DC: Tensor) -> Tensor:
        """What is left of unit directions when the range of the previous loop's Jacobian is taken away."""
        if directions_DC.shape[1] == 0:
            return directions_DC
        if self.search.matrix_free:
            return self._outside_range_matrix_free(directions_DC)
        if self._range is None:
            jacobian_DD = jacobian(lambda h_RD: self.token.loop(h_RD, self.k), self.token.h_D(self.k - 1))
            left_DD, singular_D, _ = torch.linalg.svd(jacobian_DD)
            self._range = left_DD[:, singular_D > RANGE * singular_D.median()]
        return directions_DC - self._range @ (self._range.T @ directions_DC)

    def _outside_range_matrix_free(self, directions_DC: Tensor) -> Tensor:
        h_D = self.token.h_D(self.k - 1)

        def forward(rows_RD: Tensor) -> Tensor:
            return push(lambda h_RD: [self.token.loop(h_RD, self.k)], h_D, rows_RD)[0].double()

        def backward(rows_RD: Tensor) -> Tensor:
            return pull(lambda h_RD: self.token.loop(h_RD, self.k), h_D, rows_RD).double()

        probes_RD = torch.randn(PROBES, len(h_D), generator=self.search.generator, dtype=torch.float64).to(h_D.device)
        gain = float((forward(probes_RD).norm(dim=-1) / probes_RD.norm(dim=-1)).median())
        return least_squares_residual(forward, backward, directions_DC.T, damping=RANGE * gain, tolerance=REACH / 10).T

    def _read(self, effects: list[Tensor], rest: Tensor) -> Tensor:
        """Directions that change the logits of some later loop."""
        return self._kept(torch.cat(effects, dim=-1).T, rest, self.read_floor * self.usual_effect)

    def _unshown(self, carried: list[Tensor], rest: Tensor) -> Tensor:
        """Directions that arrive at every later supervised loop among what is hidden there."""
        for later in (k for k in self.search.supervised if k > self.k):
            loops = later - self.k
            arrived = self.hidden[later].basis_DN.T @ carried[loops - 1].T
            rest = self._kept(arrived, rest, STILL_HIDDEN**loops) if len(arrived) else rest[:, :0]
            if rest.shape[1] == 0:
                break
        return rest

    def _unbounded(self, basis_DC: Tensor, rest: Tensor) -> Tensor:
        """Directions along which even a huge change survives a loop; an inter-loop norm bounds all of them."""
        size = HUGE * max(float(self.h_D.norm()), 1.0)
        with torch.no_grad():
            directions_CD = (basis_DC @ rest).T.to(self.h_D.dtype)
            ahead_CD, here_1D = (
                self.token.loops(h, self.k, 1)[0] for h in (self.h_D + size * directions_CD, self.h_D[None])
            )
        change_DC = ((ahead_CD.double() - here_1D.double()) / size).T
        if not change_DC.isfinite().all():
            return rest
        _, gains, right = torch.linalg.svd(change_DC, full_matrices=False)
        return rest @ right.T[:, gains > BOUNDED]


_PUBLIC = {"unreachable": "removed", "shown_later": "visible"}
"""A direction that no loop can write is out of the loop; one that a later exit shows at full strength is visible."""


def least_squares_residual(
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
    targets_RD: Tensor,
    *,
    damping: float = 0.0,
    tolerance: float = 0.0,
    iterations: int = 400,
) -> Tensor:
    """b − A·argmin ‖A x − b‖² + λ²‖x‖² of every row b, by conjugate gradients (CGLS) on all rows at once.

    λ = `damping` bounds the solution: what only a singular value far below λ could explain stays in the residual.
    Once no residual is longer than `tolerance`, it is small enough.
    """
    residual_RD = targets_RD.double().clone()
    gradient_RD = backward(residual_RD)
    solution_RD, search_RD = torch.zeros_like(gradient_RD), gradient_RD.clone()
    size_R1 = gradient_RD.square().sum(-1, keepdim=True)
    enough_R1 = (1e-16 * size_R1).clamp(min=max(1e-3 * damping, 1e-15) ** 2)  # below it, rounding
    for _ in range(iterations):
        image_RD = forward(search_RD)
        curvature_R1 = image_RD.square().sum(-1, keepdim=True)
        curvature_R1 = curvature_R1 + damping**2 * search_RD.square().sum(-1, keepdim=True)
        step_R1 = torch.where(size_R1 > enough_R1, size_R1 / curvature_R1.clamp(min=1e-300), 0.0)
        solution_RD, residual_RD = solution_RD + step_R1 * search_RD, residual_RD - step_R1 * image_RD
        gradient_RD = backward(residual_RD) - damping**2 * solution_RD
        before_R1, size_R1 = size_R1, gradient_RD.square().sum(-1, keepdim=True)
        if ((size_R1 <= enough_R1) | (residual_RD.norm(dim=-1, keepdim=True) <= tolerance)).all():
            break
        search_RD = gradient_RD + size_R1 / before_R1.clamp(min=1e-300) * search_RD
    return residual_RD


def _orthonormal(columns_DC: Tensor) -> Tensor:
    return torch.linalg.qr(columns_DC)[0] if columns_DC.shape[1] else columns_DC


def _complement(columns_NC: Tensor) -> Tensor:
    """Orthonormal basis of what is orthogonal to all columns."""
    left_NN, sizes, _ = torch.linalg.svd(columns_NC, full_matrices=True)
    return left_NN[:, int((sizes > REACH).sum()) :]


def median_dimension(dimensions: Sequence[int]) -> tuple[int, float]:
    """The (lower) median over states, and the share of states that agree with it."""
    middle = int(statistics.median_low(dimensions))
    return middle, sum(one == middle for one in dimensions) / len(dimensions)
