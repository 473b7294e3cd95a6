"""The search for blind directions: what a loop carries on, an earlier loop writes, and no loss sees.

A looped model is taken apart as a control engineer takes a system apart, at the state after loop k of one token at a
time: h and every other tensor that the loop carries, in a window of the tokens after it.

    hidden      ten lengths of the state along v go unnoticed at the exit of loop k (see `hidden`)
    carried     the next loop passes v on, in whatever tensor and token: it is not removed
    reachable   v is in the range of the Jacobian of loop k, which wrote the state, up to hidden directions that are
                removed; the token before may have written it too
    undamped    it does not die out by more than 5 % a loop
    read        the logits of some later loop, of this token or one after it, depend on v; otherwise it is inert
    unshown     from one supervised exit to the next, most of v stays among what is hidden there
    unbounded   a huge change along v survives a loop; where an inter-loop norm bounds it, it is a memory

A direction with all seven is **blind**: training moves it, depth carries it, and no exit's loss answers for it.
Lemma 1 of arXiv 2606.24898 is the special case v = h, exits through RMSNorm.

Decisions are made on singular values themselves. Reachable is membership in a range, never energy along a direction,
which norm gains can fake.

Shape legend: R rows, M named fields, X width of a token's share of the joint state, W width of the joint state of a
window, H hidden directions, C directions under test.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from loopscope.auditing.derivatives import changes, disagree, least_squares, pull, push
from loopscope.auditing.free_range import FreeRange
from loopscope.auditing.hidden import PROBES, Hidden, LogitMetric, Readouts, chosen, probes
from loopscope.auditing.visibility import Fields, field_rows
from loopscope.auditing.window import Carried, Windows
from loopscope.errors import ProtocolError
from loopscope.objectives.terms import Term
from loopscope.protocol import LoopedModel, LoopState
from loopscope.results.audit import VariableVerdict

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
STILL_THERE = 0.5
"""Share of ‖v‖² that must arrive at the next supervised exit among what is hidden there."""
ELSEWHERE = 0.1
"""Part of a direction in other tokens below which it is not asked what their exits hide of it."""
HUGE = 1e4
"""Length, in that of the state, of a change that only a bounded loop absorbs."""
BOUNDED = 1e-2
"""Gain of such a change below which the loop bounds it."""
LATER_LOOPS = 4
"""Loops after k through which a direction is followed at least."""
MOST_AUDITED = 8
"""Loops whose state is searched: each is followed to the last, and the cost of all would grow with their square."""
SILENT = 1e-3
"""Share of the state's scale that a channel counts as, at least, when directions are weighed by their channels."""

CLASSES = ("removed", "unreachable", "damped", "inert", "shown_later", "memory", "blind")
"""What becomes of a hidden direction, in the order of the questions."""
PUBLIC: dict[str, VariableVerdict] = {
    "removed": "removed",
    "unreachable": "removed",
    "damped": "damped",
    "inert": "inert",
    "shown_later": "visible",
    "memory": "memory",
    "blind": "blind",
}
"""Classes as verdicts: what no loop can write is out of the loop, and what a later exit shows is visible."""


@dataclass(frozen=True)
class Strength:
    """The largest of what is shown, read and carried of a direction or subspace."""

    visibility: float
    """Over the median singular value."""
    delayed: float
    """Effect on the logits of the next loops, over that of an average direction."""
    activity: float
    """Gain through the next loop."""


@dataclass(frozen=True)
class ClassStrength(Strength):
    """Of the directions of one class."""

    free: float
    """Lengths of the state that any of it can run before the objective notices."""


@dataclass(frozen=True)
class Fate:
    """What becomes of a subspace of hidden directions."""

    bases: dict[str, Tensor]
    """Class → a basis X×C of the directions that end there."""
    strengths: dict[str, ClassStrength]
    """Of the directions that are blind, besides the named ones, and of those that are memory, where there are such."""


@dataclass(frozen=True)
class FieldFinding(Strength):
    """A named direction field (scale, mean, a user's own) at one state."""

    fate: VariableVerdict | None
    """What becomes of it in the loop; None where that was not asked, since the objective holds it."""


@dataclass(frozen=True)
class StateFindings:
    """One state at one loop."""

    x_X: Tensor
    """The token's share of the joint state, carried tensors as long as h."""
    columns: dict[str, slice]
    """Which of its channels belong to which tensor."""
    hidden: Hidden
    fate: Fate
    fields: dict[str, FieldFinding]
    field_rows: Tensor
    """Those fields as unit rows M×X."""
    tensors: dict[str, FieldFinding]
    """Carried tensors, each along itself, but those that are zero at this token: they have no such direction. The fate
    of a tensor is that of its directions."""
    is_read: bool
    """Whether the next loop depends on the state at all."""
    disputed: tuple[str, ...]
    """Named fields along which the next loop's derivative and a change of the state disagree."""


class Search:
    """The questions, asked of one model under one objective."""

    def __init__(
        self,
        model: LoopedModel,
        weights: Mapping[int, float],
        terms: Sequence[tuple[Term, float]],
        *,
        channels: Mapping[int, Tensor],
        matrix_free: bool,
        seed: int,
        runnable: int | None,
    ) -> None:
        """`terms` come with the scale from which each counts, `channels` are the rms of every channel after each loop,
        `runnable` is the last loop that runs.
        """
        self.runnable, self.channels, self.matrix_free = runnable, channels, matrix_free
        self.metric = LogitMetric(model)
        self.readouts = Readouts(self.metric, dict(weights), terms)
        self.supervised = sorted(weights)
        self.audited = audited_loops(self.supervised)
        self.num_loops = self.supervised[-1]
        self.generator = torch.Generator().manual_seed(seed)

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

    def examine(
        self,
        around: Windows,
        fields: Fields,
        ranges: Mapping[str, FreeRange],
        progress: Callable[[float], None],
    ) -> dict[int, StateFindings]:
        """All audited loops of one token; what becomes of a field is asked only where it is free."""

        @cache
        def hidden(k: int, token: int = 0) -> Hidden:
            return self.readouts.hidden(around, k, fields, token)

        findings = {}
        for index, k in enumerate(self.audited):
            progress(index / len(self.audited))
            question = _Question(self, around, k, hidden, fields)
            named = {name: question.field(index, asked=ranges[name].is_free(k)) for index, name in enumerate(fields)}
            fate = question.fate([index for index, one in enumerate(named.values()) if one.fate == "blind"])
            findings[k] = StateFindings(
                x_X=around.ahead.vector(k)[around.ahead.block(k)].double() / question.units_X,
                columns=around.ahead.layout(k).columns(),
                hidden=hidden(k),
                fate=fate,
                fields=named,
                field_rows=question.units_MX[: len(fields)],
                tensors={name: question.field(len(fields) + i, asked=False) for i, name in enumerate(question.tensors)},
                is_read=question.usual_gain > 0,
                disputed=question.disputed,
            )
        return findings


def carried_on(supervised: Sequence[int]) -> list[int]:
    """Loops whose state goes on to a supervised one: all below the last, supervised or not; the last if it is alone.

    What a loop between two exits leaves is seen by the later ones only.
    """
    last = max(supervised)
    return list(range(1, last)) if len(supervised) > 1 else [last]


def audited_loops(supervised: Sequence[int]) -> list[int]:
    """Loops whose state is audited: those whose state goes on in training, evenly chosen where there are many."""
    loops = carried_on(supervised)
    if len(loops) <= MOST_AUDITED:
        return loops
    return [loops[round(index * (len(loops) - 1) / (MOST_AUDITED - 1))] for index in range(MOST_AUDITED)]


def channel_sizes(states: Sequence[LoopState], carried: Carried, loops: Sequence[int]) -> dict[int, Tensor]:
    """Root mean square of every channel of a token's share after each of the loops, over the same tokens."""
    sizes, rows_B = {}, torch.arange(min(len(states[k].h_BTD) for k in loops), device=states[0].h_BTD.device)
    for k in loops:
        state = states[k].take(rows_B)
        held = [(state.h_BTD, True), *((state.carried[part.name], part.per_token) for part in carried.searched)]
        parts = []
        for tensor, per_token in sorted(held, key=lambda one: not one[1]):  # as in `Layout.columns`
            rows = tensor.double().reshape(len(tensor) * (tensor.shape[1] if per_token else 1), -1)
            rms = rows.square().mean(0).sqrt()
            parts.append(rms.clamp(min=max(SILENT * float(rms.square().mean().sqrt()), 1e-30)))
        sizes[k] = torch.cat(parts)
    return sizes


class _Question:
    """One state at one loop: follows directions through the loops before and after it, all of them at once.

    Directions are unit vectors of y = x/units: every carried tensor counts in lengths of its own.
    """

    def __init__(self, search: Search, around: Windows, k: int, hidden: Callable[..., Hidden], fields: Fields) -> None:
        self.search, self.around, self.window, self.k, self.hidden = search, around, around.ahead, k, hidden
        window = self.window
        self.w_W, self.h_D = window.vector(k), window.h_D(k)
        self.units_X = window.lengths(k)
        self.units_W = window.layout(k).repeated(self.units_X)
        self.channels_W = window.layout(k).repeated(search.channels[k])
        self.disputed: tuple[str, ...] = ()
        self._corrections: tuple[Tensor, list[Tensor]] | None = None
        columns = window.layout(k).columns()
        x_X = self.w_W[window.block(k)].double() / self.units_X
        self.tensors = [name for name, where in columns.items() if name != "h" and x_X[where].any()]
        along_itself = torch.zeros(len(self.tensors), len(x_X), dtype=torch.float64, device=x_X.device)
        for index, name in enumerate(self.tensors):
            along_itself[index, columns[name]] = x_X[columns[name]] / x_X[columns[name]].norm()
        named_MX = field_rows(fields, self.h_D, len(self.units_X))
        self._compare_with_changes(fields, named_MX)
        self.units_MX = torch.cat([named_MX, along_itself])
        rows_RX = torch.cat([probes(len(self.units_X)).to(self.h_D.device), self.units_MX, hidden(k).basis_XH.T])
        self._images = self._follow(rows_RX)
        carried, effects = self._followed(0, PROBES)
        self.usual_gain = float(carried[0].norm(dim=-1).median())
        self.usual_effect = float(torch.cat(effects, dim=-1).norm(dim=-1).median())
        self.read_floor = READ if self.h_D.dtype == torch.float64 else READ_SINGLE
        self._range: dict[bool, Tensor] = {}
        self._outside_removed_XC: Tensor | None = None

    def _followed(self, start: int, stop: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Some rows of what was followed: probes, named fields, hidden directions."""
        carried, effects = self._images
        return [image[start:stop] for image in carried], [image[start:stop] for image in effects]

    def field(self, index: int, *, asked: bool) -> FieldFinding:
        """One named direction. Whether a later exit shows it is not asked: its free range has moved it there, too."""
        unit_X1 = self.units_MX[index][:, None]
        carried, effects = self._followed(PROBES + index, PROBES + index + 1)
        fate: VariableVerdict | None = None
        if asked:
            bases = self._sort(unit_X1, carried, effects, but=("shown_later",))
            fate = PUBLIC[next(name for name in CLASSES if bases[name].shape[1])]
        gain, delayed = self._strengths(carried, effects)
        return FieldFinding(self.hidden(self.k).visibility(unit_X1), delayed, gain, fate)

    def fate(self, named: Sequence[int]) -> Fate:
        """What becomes of the hidden directions; named fields that are blind are measured by themselves."""
        hidden = self.hidden(self.k)
        basis_XH = hidden.basis_XH
        if basis_XH.shape[1] == 0:
            return Fate(dict.fromkeys(CLASSES, basis_XH), {})
        carried, effects = self._followed(PROBES + len(self.units_MX))
        coordinates = self._sort(basis_XH, carried, effects)
        blind = coordinates["blind"]
        others = blind @ _complement((self.units_MX[list(named)] @ basis_XH @ blind).T)
        strengths = {}
        for name, of in (("blind", others if others.shape[1] else blind), ("memory", coordinates["memory"])):
            if of.shape[1]:
                gain, delayed = self._strengths(*([of.T @ image for image in images] for images in (carried, effects)))
                directions_XC = basis_XH @ of
                visibility, free = hidden.visibility(directions_XC), hidden.free_lengths(directions_XC)
                strengths[name] = ClassStrength(visibility, delayed, gain, free)
        return Fate({name: basis_XH @ of for name, of in coordinates.items()}, strengths)

    def _strengths(self, carried: list[Tensor], effects: list[Tensor]) -> tuple[float, float]:
        """Largest gain through the next loop, and effect on later logits over an average direction's."""
        gain = float(torch.linalg.matrix_norm(carried[0], ord=2))
        effect = float(torch.linalg.matrix_norm(torch.cat(effects, dim=-1), ord=2))
        return gain, effect / self.usual_effect if self.usual_effect else 0.0

    def _sort(
        self, basis_XC: Tensor, carried: list[Tensor], effects: list[Tensor], but: Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Coordinates of the directions of each class: each question takes some away, those left are blind."""
        rest = torch.eye(basis_XC.shape[1], dtype=torch.float64, device=basis_XC.device)
        questions: dict[str, Callable[[Tensor], Tensor]] = {
            "removed": lambda rest: self._kept(carried[0].T, rest, CARRIED * self.usual_gain),
            "unreachable": lambda rest: self._reachable(basis_XC, rest),
            "damped": lambda rest: self._undamped(carried, rest),
            "inert": lambda rest: self._read(basis_XC, carried, effects, rest),
            "shown_later": lambda rest: self._unshown(basis_XC, carried, rest),
            "memory": lambda rest: self._unbounded(basis_XC, rest, everywhere="shown_later" in but),
        }
        found = dict.fromkeys(CLASSES, rest[:, :0])
        for name, question in questions.items():
            if name in but or rest.shape[1] == 0:
                continue
            kept = question(rest)
            found[name] = rest @ _complement(rest.T @ kept)
            rest = kept
        return {**found, "blind": rest}

    def _follow(self, rows_RX: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Images of directions after 1, 2, … loops, and their effects on the logits there."""
        later = self.search.later(self.k)
        pushed = push(self._loops_and_readouts, self.w_W, self.window.placed(rows_RX * self.units_X, self.k))
        if self._corrections is not None:
            inverse_XM, errors = self._corrections
            pushed = [
                image + (rows_RX @ inverse_XM @ error).to(image) for image, error in zip(pushed, errors, strict=True)
            ]
        for index, image in enumerate(pushed):
            if not image.isfinite().all():
                what = f"{'loop' if index < later else 'readout at loop'} {self.k + 1 + index % later}"
                raise ProtocolError(f"the {what} has a derivative with respect to h_{self.k} that is NaN or infinite")
        effects = (image.unflatten(-1, (self.window.tokens, -1)) for image in pushed[later:])
        return [image.double() / self.units_W for image in pushed[:later]], [
            self.search.metric.logits(effect).flatten(1) for effect in effects
        ]

    def _loops_and_readouts(self, w_RW: Tensor) -> list[Tensor]:
        states = self.window.loops(w_RW, self.k, self.search.later(self.k))
        shown = [self.window.shown(state_RW, self.k + m) for m, state_RW in enumerate(states, start=1)]
        return [*states, *shown]

    def _compare_with_changes(self, fields: Fields, named_MX: Tensor) -> None:
        """Where the next loop's derivative along a named field is not what a change does, the change is followed."""
        alone, length = self.around.alone, float(self.h_D.double().norm())
        w_W, units_MW = alone.vector(self.k), alone.placed(named_MX, self.k)

        def next_loop(w_RW: Tensor) -> Tensor:
            return alone.loops(w_RW, self.k, 1)[0]

        (along_MW,) = push(lambda w_RW: [next_loop(w_RW)], w_W, units_MW)
        moved_MW, believed_M = changes(next_loop, w_W, units_MW, length)
        disputed_M = believed_M & disagree(moved_MW, along_MW.double(), floor=CARRIED)
        if not disputed_M.any():
            return
        units_MW = self.window.placed(named_MX, self.k)
        self.disputed, units_MW = chosen(fields, disputed_M), units_MW[disputed_M]
        pushed = push(self._loops_and_readouts, self.w_W, units_MW)
        widths = [image.shape[-1] for image in pushed]
        moved_MF, _ = changes(lambda w: torch.cat(self._loops_and_readouts(w), dim=-1), self.w_W, units_MW, length)
        errors = [one - image.double() for one, image in zip(moved_MF.split(widths, dim=-1), pushed, strict=True)]
        self._corrections = (torch.linalg.pinv(named_MX[disputed_M]), errors)

    @staticmethod
    def _kept(image_WC: Tensor, rest: Tensor, floor: float) -> Tensor:
        """Directions that a linear map does not shrink below `floor`."""
        _, gains, right = torch.linalg.svd(image_WC @ rest, full_matrices=False)
        return rest @ right.T[:, gains > floor]

    def _undamped(self, carried: list[Tensor], rest: Tensor) -> Tensor:
        """Directions whose image shrinks by less than 5 % a loop from the first loop on; at it, if it is alone.

        Damped is what shrinks both in length and in units of each channel's rms: a loop that turns a direction into
        smaller channels does not damp it, and one that moves channels on does not either.
        """
        loops = min(LATER_LOOPS, len(carried), self._loops_within_the_window(rest.T @ carried[0]))
        if loops == 1:
            return self._kept(carried[0].T, rest, DAMPED)
        damped = rest
        for weights_W1 in (torch.ones_like(self.units_W)[:, None], (self.units_W / self.channels_W)[:, None]):
            if damped.shape[1] == 0:
                break
            first_WC, last_WC = (weights_W1 * carried[index].T @ damped for index in (0, loops - 1))
            _, triangle = torch.linalg.qr(first_WC)
            back = torch.linalg.inv(triangle)
            _, gains, right = torch.linalg.svd(last_WC @ back, full_matrices=False)
            damped = _orthonormal(damped @ back @ right.T[:, gains < DAMPED ** (loops - 1)])
        return rest @ _complement(rest.T @ damped)

    def _loops_within_the_window(self, images_CW: Tensor) -> int:
        """Loops until what is handed on to other tokens leaves the window, where it cannot be followed.

        What has left this token by most of its length after one loop, by n tokens on average, has left a window of N
        tokens after (N − 1)/n loops.
        """
        tokens, width = self.window.tokens, self.window.layout(self.k + 1).token_width
        sizes_CN = images_CW[:, : tokens * width].unflatten(1, (tokens, width)).square().sum(-1)
        total_C = sizes_CN.sum(-1).clamp(min=1e-300)
        handed_C = sizes_CN[:, 0] < 0.5 * total_C
        if not handed_C.any():
            return LATER_LOOPS
        steps_N = torch.arange(tokens, dtype=sizes_CN.dtype, device=sizes_CN.device)
        return max(1, int((tokens - 1) / float(((sizes_CN @ steps_N) / total_C)[handed_C].max())))

    def _read(self, basis_XC: Tensor, carried: list[Tensor], effects: list[Tensor], rest: Tensor) -> Tensor:
        """Directions that the logits of a later loop depend on, those of this token or of one after it.

        Exits of rank r (at most V − 1) of n tokens show r·n numbers a loop. Where that is fewer than there are
        directions to ask about, their silence proves nothing. Then a direction is read if the next loop makes anything
        of it but itself: its image leaves the span of those that no exit has shown, in whatever token.
        """
        read = self._kept(torch.cat(effects, -1).T, rest, self.read_floor * self.usual_effect)
        reached = sum(int(each.unflatten(-1, (self.window.tokens, -1)).any(-1).any(0).sum()) for each in effects)
        if read.shape[1] == rest.shape[1] or reached * self.hidden(self.k).rank >= rest.shape[1]:
            return read
        unread = rest @ _complement(rest.T @ read)
        images_CW, layout = unread.T @ carried[0], self.window.layout(self.k + 1)
        own_XC = basis_XC @ unread
        for token in range(self.window.tokens):
            block = layout.block(token)[: layout.token_width] if token else layout.block(token)
            kept_XC = _orthonormal(own_XC[: len(block)])
            images_CW[:, block] -= images_CW[:, block] @ kept_XC @ kept_XC.T
        alone = torch.eye(len(images_CW), dtype=torch.float64, device=images_CW.device)
        return torch.cat([read, unread @ self._kept(images_CW.T, alone, self.read_floor * self.usual_gain)], dim=1)

    def _reachable(self, basis_XC: Tensor, rest: Tensor) -> Tensor:
        """Directions within `REACH` of what the loop that wrote this state can write."""
        outside = self._unwritable(basis_XC @ rest, neighbours=False)
        if float(torch.linalg.matrix_norm(outside, ord=2)) > REACH and self.around.position:
            self._outside_removed_XC = None
            outside = self._unwritable(basis_XC @ rest, neighbours=True)
            self._outside_removed_XC = None
        _, residuals, right = torch.linalg.svd(outside, full_matrices=False)
        return rest @ right.T[:, residuals <= REACH]

    def _unwritable(self, directions_XC: Tensor, *, neighbours: bool) -> Tensor:
        """What is left of directions without the range of the previous loop and without what the next one removes.

        A direction may be written together with hidden ones that vanish at once: that is as good as writing it alone.
        """
        if self._outside_removed_XC is None:
            basis_XH = self.hidden(self.k).basis_XH
            removed_XC = basis_XH[:, :0]
            if basis_XH.shape[1]:
                carried, _ = self._followed(PROBES + len(self.units_MX))
                _, gains, right = torch.linalg.svd(carried[0].T, full_matrices=False)
                removed_XC = basis_XH @ right.T[:, gains <= CARRIED * self.usual_gain]
            left, sizes, _ = torch.linalg.svd(self._outside_range(removed_XC, neighbours), full_matrices=False)
            self._outside_removed_XC = left[:, sizes > REACH]
        outside_XC = self._outside_range(directions_XC, neighbours)
        return outside_XC - self._outside_removed_XC @ (self._outside_removed_XC.T @ outside_XC)

    def _outside_range(self, directions_XC: Tensor, neighbours: bool) -> Tensor:
        """What is left of unit directions when the range of the previous loop's Jacobian is taken away.

        With `neighbours`, the token before may have written them too.
        """
        if directions_XC.shape[1] == 0:
            return directions_XC
        window = self.around.with_the_token_before() if neighbours else self.around.alone
        k, block = self.k, window.block(self.k)
        units = [window.lengths(k - 1, token) for token in range(window.tokens)]
        width = window.layout(k - 1).token_width
        units_W = torch.cat([*(each[:width] for each in units), units[0][width:]])
        w_W = window.vector(k - 1)

        def written(w_RW: Tensor) -> Tensor:
            return window.loop(w_RW, k)[:, block]

        def forward(rows_RW: Tensor) -> Tensor:
            return push(lambda w_RW: [written(w_RW)], w_W, rows_RW * units_W)[0].double() / self.units_X

        def backward(rows_RX: Tensor) -> Tensor:
            return pull(written, w_W, rows_RX / self.units_X).double() * units_W

        if self.search.matrix_free:
            probes_RW = torch.randn(PROBES, len(w_W), generator=self.search.generator, dtype=torch.float64)
            probes_RW = probes_RW.to(w_W.device)
            gain = float((forward(probes_RW).norm(dim=-1) / probes_RW.norm(dim=-1)).median())
            _, residual_CX = least_squares(
                forward, backward, directions_XC.T, damping=RANGE * gain, tolerance=REACH / 10
            )
            return residual_CX.T
        if neighbours not in self._range:
            images_WX = forward(torch.eye(len(w_W), dtype=torch.float64, device=w_W.device))
            left_XX, singular_X, _ = torch.linalg.svd(images_WX.T, full_matrices=False)
            self._range[neighbours] = left_XX[:, singular_X > RANGE * singular_X.median()]
        range_XC = self._range[neighbours]
        return directions_XC - range_XC @ (range_XC.T @ directions_XC)

    def _unshown(self, basis_XC: Tensor, carried: list[Tensor], rest: Tensor) -> Tensor:
        """Directions that stay hidden from one supervised exit to the next.

        u = DF·v; a is its part among what is hidden there, b the rest, all in units of each channel's rms. Kept are
        those with ‖a‖ ≥ ‖b‖ and ‖a‖² ≥ ½·‖v‖², and a is what is followed to the exit after that. A direction that has
        left through the last token of the window cannot be followed, and is kept.
        """
        window, here = self.window, self.k
        rows_CW = window.placed((basis_XC @ rest).T * self.units_X, here)
        gone: list[Tensor] = []
        for there in (j for j in self.search.supervised if j > self.k):
            if window.tokens > 1:
                own_CW = rows_CW / self.channels_W
                last_CX = own_CW[:, window.layout(here).block(window.tokens - 1)[: window.layout(here).token_width]]
                leaving, staying = _split(last_CX @ last_CX.T - 0.5 * own_CW @ own_CW.T)
                gone.append(rest @ leaving)
                rest, rows_CW = rest @ staying, staying.T @ rows_CW
            if rest.shape[1] == 0:
                break
            if here == self.k:  # followed already
                images_CW = rest.T @ carried[there - here - 1] * self.units_W
            else:
                between = partial(window.loops, k=here, count=there - here)
                (images_CW,) = push(lambda w_RW: between(w_RW)[-1:], window.vector(here), rows_CW)  # noqa: B023
            v_CW, u_CW = rows_CW / self.channels_W, images_CW.double() / self.channels_W
            a_CW = self._hidden_part(u_CW, there)
            b_CW = u_CW - a_CW
            hidden_CC, shown_CC, before_CC = (each @ each.T for each in (a_CW, b_CW, v_CW))
            kept, _ = _split(hidden_CC - shown_CC)
            still, _ = _split(kept.T @ (hidden_CC - STILL_THERE * before_CC) @ kept)
            kept = kept @ still
            rest, rows_CW, here = rest @ kept, kept.T @ (a_CW * self.channels_W), there
        return _orthonormal(torch.cat([*gone, rest], dim=1))

    def _hidden_part(self, u_CW: Tensor, k: int) -> Tensor:
        """What the exits at loop k hide of directions of the joint state, in units of each channel's rms."""
        window, layout = self.window, self.window.layout(k)
        a_CW = torch.zeros_like(u_CW)
        own = layout.block(0)
        elsewhere = u_CW.square().sum(-1) - u_CW[:, own].square().sum(-1)
        asked = range(1, window.tokens) if (elsewhere > ELSEWHERE**2 * u_CW.square().sum(-1)).any() else ()
        for token in (0, *asked):
            block = layout.block(token)
            basis_XH = self.hidden(k, token).basis_XH * window.lengths(k, token)[:, None]
            basis_XH = basis_XH / self.channels_W[block][:, None]
            if token:  # what has no token is asked of the audited one
                block, basis_XH = block[: layout.token_width], basis_XH[: layout.token_width]
            basis_XH = _orthonormal(basis_XH)
            a_CW[:, block] = u_CW[:, block] @ basis_XH @ basis_XH.T
        return a_CW

    def _unbounded(self, basis_XC: Tensor, rest: Tensor, *, everywhere: bool) -> Tensor:
        """Directions along which even a huge change survives a loop; an inter-loop norm bounds all of them.

        Unless `everywhere` counts, it must survive among what the next exit hides: what a loop reads of it into sight
        is no way to run.
        """
        size = HUGE * max(float(self.h_D.norm()), 1.0)
        with torch.no_grad():
            rows_CW = self.window.placed((basis_XC @ rest).T * self.units_X, self.k).to(self.w_W.dtype)
            ahead_CW, here_1W = (
                self.window.loops(w, self.k, 1)[0] for w in (self.w_W + size * rows_CW, self.w_W[None])
            )
        change_WC = ((ahead_CW.double() - here_1W.double()) / size / self.units_W).T
        if not change_WC.isfinite().all():
            return rest
        if not everywhere and self.k < self.search.num_loops:
            in_channels_W1 = (self.units_W / self.channels_W)[:, None]
            change_WC = self._hidden_part((in_channels_W1 * change_WC).T, self.k + 1).T / in_channels_W1
        _, gains, right = torch.linalg.svd(change_WC, full_matrices=False)
        return rest @ right.T[:, gains > BOUNDED]


def _split(form_CC: Tensor) -> tuple[Tensor, Tensor]:
    """The eigenspaces of a quadratic form where it is not negative, and where it is."""
    values_C, vectors_CC = torch.linalg.eigh(form_CC)
    return vectors_CC[:, values_C >= 0], vectors_CC[:, values_C < 0]


def _orthonormal(columns_XC: Tensor) -> Tensor:
    return torch.linalg.qr(columns_XC)[0] if columns_XC.shape[1] else columns_XC


def _complement(columns_NC: Tensor) -> Tensor:
    """Orthonormal basis of what is orthogonal to all columns."""
    left_NN, sizes, _ = torch.linalg.svd(columns_NC, full_matrices=True)
    return left_NN[:, int((sizes > REACH).sum()) :]


def median_dimension(dimensions: Sequence[int]) -> tuple[int, float]:
    """The (lower) median over states, and the share of states that agree with it."""
    middle = int(statistics.median_low(dimensions))
    return middle, sum(one == middle for one in dimensions) / len(dimensions)
