"""From findings at many states to verdicts: how many directions, a name for what is blind, and how strong it is.

Shape legend: M named fields, X width of a token's share of the joint state, C blind directions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from loopscope.auditing.free_range import FreeRange
from loopscope.auditing.hidden import HIDDEN
from loopscope.auditing.search import CLASSES, PUBLIC, StateFindings, Strength, median_dimension
from loopscope.results.audit import (
    BlindDirections,
    LoopDirections,
    NamedDirection,
    Variable,
    VariableKind,
    VariableVerdict,
)
from loopscope.results.thresholds import FURTHEST, WEAKLY_HELD

SEVERITY: tuple[VariableVerdict, ...] = ("visible", "weak", "removed", "damped", "inert", "memory", "blind")
"""From harmless to alarm; over loops the last one counts."""
EXPLAINED = 0.98
"""Share of a direction (or of a subspace) that a name must explain."""
NEAR = 0.5
"""Share of a named field within the blind directions from which one of them is that field, or near it."""
BY_CHANCE = 4
"""…if that is so many times what a random direction would have."""
HARMLESS = ("removed", "unreachable", "damped", "inert", "memory")
"""Classes whose directions are hidden and need no answer."""
PRINCIPAL_COMPONENTS = 4

Findings = list[dict[int, StateFindings]]
"""One entry per state: loop → findings."""


@dataclass(frozen=True)
class Found:
    """What a search found, and the directions themselves."""

    directions: BlindDirections
    discovered: list[str]
    """Variables besides named fields and tensors."""
    h_directions_DC: Tensor
    """Orthonormal directions of h that these span, on average over states."""


def judge(findings: Findings, ranges: Mapping[str, FreeRange], constant: Sequence[str]) -> tuple[Found, list[Variable]]:
    """What is blind, counted and named, and every variable: named fields, carried tensors, what was found besides.

    A named field is judged by its free range and counts once; of what the search found, only the directions besides the
    blind fields count, since a curved level set gives a tangent that is near to the field and not equal to it.
    """
    fields = [_field_variable(name, findings, ranges[name]) for name in ranges]
    blind = [one.name for one in fields if one.verdict == "blind"]
    numbers = [list(ranges).index(name) for name in blind]
    besides = {k: [_besides(one[k], numbers) for one in findings] for k in findings[0]}
    medians = {k: median_dimension([basis_XC.shape[1] for basis_XC in bases]) for k, bases in besides.items()}
    worst = max(medians, key=lambda k: (medians[k][0], medians[k][1], -k))
    at_worst = [one[worst] for one in findings]
    extra, agreement = medians[worst]
    named, unnamed = _names(at_worst, besides[worst], [name for name in ranges if name not in blind], extra)
    named = [*(NamedDirection(name=name, share=_share_of(name, at_worst)) for name in blind), *named]
    spectrum = torch.stack([one.hidden.spectrum for one in at_worst]).median(0).values
    hidden, shown = spectrum[spectrum <= HIDDEN], spectrum[spectrum > HIDDEN]
    directions = BlindDirections(
        dimension=len(blind) + extra,
        agreement=agreement,
        states=len(findings),
        spectrum=spectrum.tolist(),
        gap=float(shown.min() / hidden.max().clamp(min=1e-300)) if len(hidden) and len(shown) else None,
        named=named,
        unnamed=unnamed,
        loops=[_loop_row(k, [one[k] for one in findings]) for k in findings[0]],
    )
    beside_h = [name for name in at_worst[0].columns if name != "h"]
    tensors = [_tensor_variable(name, findings) for name in beside_h]
    others = _discovered(worst, findings, directions, [*blind, *beside_h])
    found = Found(directions, [one.name for one in others], _common(at_worst, besides[worst], extra))
    constants = [
        Variable(kind="constant", name=name, verdict="removed", visibility=0.0, delayed_visibility=0.0, activity=1.0)
        for name in constant
    ]
    return found, [*fields, *tensors, *constants, *others, *_memory(findings, directions)]


# --- counts ----------------------------------------------------------------------------------------------------------


def _besides(one: StateFindings, fields: Sequence[int]) -> Tensor:
    """The blind directions of a state without the blind fields, each of which takes away the one that is nearest.

    What is harmless of a field does not count: of h = (h₁, h₂) whose first half is removed, h₂ is the blind direction.
    """
    basis_XC = one.fate.bases["blind"]
    harmless_XC = torch.cat([one.fate.bases[fate] for fate in HARMLESS], dim=1)
    for index in fields:
        rest_X = one.field_rows[index] - harmless_XC @ (harmless_XC.T @ one.field_rows[index])
        basis_XC, _ = _without(basis_XC, rest_X / rest_X.norm().clamp(min=1e-300), NEAR)
    return basis_XC


def _without(basis_XC: Tensor, unit_X: Tensor, least: float) -> tuple[Tensor, float]:
    """A subspace without a direction, if so much of it lies inside; and the share that does."""
    if basis_XC.shape[1] == 0:
        return basis_XC, 0.0
    inside_C = basis_XC.T @ unit_X
    share = float(inside_C.square().sum())
    if share < least:
        return basis_XC, share
    _, _, right = torch.linalg.svd(inside_C[None])
    return basis_XC @ right.T[:, 1:], share


def _share_of(name: str, at_states: Sequence[StateFindings]) -> float:
    """Median share of a blind field within the directions that the search found blind."""
    index = list(at_states[0].fields).index(name)
    inside = (one.fate.bases["blind"].T @ one.field_rows[index] for one in at_states)
    return statistics.median(float(inside_C.square().sum()) for inside_C in inside)


def _loop_row(k: int, at_states: Sequence[StateFindings]) -> LoopDirections:
    """Median over states of how many directions end in each class."""
    return LoopDirections(
        k=k,
        hidden=statistics.median_low([one.hidden.basis_XH.shape[1] for one in at_states]),
        weak=statistics.median_low([one.hidden.weak for one in at_states]),
        **{name: statistics.median_low([one.fate.bases[name].shape[1] for one in at_states]) for name in CLASSES},
    )


def _common(at_states: Sequence[StateFindings], bases: Sequence[Tensor], dimension: int) -> Tensor:
    """Those directions of h that most states find: the leading ones of their mean projector."""
    where = at_states[0].columns["h"]
    projectors = [basis_XC[where] @ basis_XC[where].T for basis_XC in bases]
    _, vectors_DD = torch.linalg.eigh(torch.stack(projectors).mean(0))
    return vectors_DD[:, vectors_DD.shape[1] - min(dimension, vectors_DD.shape[1]) :]


# --- names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Name:
    name: str
    share: float
    dimensions: int


def _names(
    at_states: Sequence[StateFindings], bases: Sequence[Tensor], fields: Sequence[str], dimension: int
) -> tuple[list[NamedDirection], int]:
    """Names of the directions besides the blind fields that most states agree on; what is left is unnamed."""
    if dimension == 0:
        return [], 0
    components_XC = _principal_components(at_states)
    per_state = [
        {one.name: one for one in _names_at(state, basis_XC, fields, components_XC)}
        for state, basis_XC in zip(at_states, bases, strict=True)
        if basis_XC.shape[1] == dimension
    ]
    counts = Counter(name for names in per_state for name in names)
    common = [name for name, count in counts.items() if count > len(per_state) / 2]
    shares = {name: statistics.median(names[name].share for names in per_state if name in names) for name in common}
    taken = sum(max(names[name].dimensions for names in per_state if name in names) for name in common)
    return [NamedDirection(name=name, share=shares[name]) for name in common], max(dimension - taken, 0)


def _names_at(state: StateFindings, basis_XC: Tensor, fields: Sequence[str], components_XC: Tensor) -> list[_Name]:
    """At one state: fields that are near, whole tensors and their scales, channels, principal components of h."""
    found: list[_Name] = []

    def take(name: str, unit_X: Tensor, least: float) -> None:
        nonlocal basis_XC
        without_XC, share = _without(basis_XC, unit_X, least)
        if without_XC.shape[1] < basis_XC.shape[1]:
            found.append(_Name(name, share, 1))
            basis_XC = without_XC

    names = list(state.fields)
    near = max(NEAR, min(EXPLAINED, BY_CHANCE * basis_XC.shape[1] / len(basis_XC)))
    for name in fields:
        take(f"a direction near {name}", state.field_rows[names.index(name)], near)
    for name, where in state.columns.items():
        if name == "h":
            continue
        width = where.stop - where.start
        share = float(basis_XC[where].square().sum()) / width
        if share >= EXPLAINED:
            found.append(_Name(name, share, width))
            basis_XC = _outside(basis_XC, list(range(where.start, where.stop)))
        else:
            unit_X = torch.zeros_like(state.x_X)
            unit_X[where] = state.x_X[where] / state.x_X[where].norm().clamp(min=1e-300)
            take(f"scale of {name}", unit_X, EXPLAINED)
    inside = (state.fate.bases["blind"].square().sum(-1) >= EXPLAINED).nonzero().flatten().tolist()
    if 0 < len(inside) <= basis_XC.shape[1]:
        found.append(_Name(_spoken(inside, state.columns), EXPLAINED, len(inside)))
        basis_XC = _outside(basis_XC, inside)
    if (channels := _channels(basis_XC, state.columns)) is not None:
        return [*found, _Name(channels, EXPLAINED, basis_XC.shape[1])]
    for index in range(components_XC.shape[1]):
        take(f"principal component {index + 1}", components_XC[:, index], EXPLAINED)
    return found


def _channels(basis_XC: Tensor, columns: Mapping[str, slice]) -> str | None:
    """The few channels that hold the whole subspace, if there are such (one more than dimensions at most)."""
    dimension = basis_XC.shape[1]
    if dimension == 0:
        return None
    energy_X = basis_XC.square().sum(-1)
    held, order = energy_X.sort(descending=True)
    count = int((held.cumsum(0) < EXPLAINED * dimension).sum()) + 1
    if count > dimension + 1 or count == len(energy_X):
        return None
    return _spoken(sorted(order[:count].tolist()), columns)


def _outside(basis_XC: Tensor, channels: list[int]) -> Tensor:
    """What is left of a subspace that holds some channels when they are taken away."""
    outside_XC = basis_XC.clone()
    outside_XC[channels] = 0
    left_XC, _, _ = torch.linalg.svd(outside_XC, full_matrices=False)
    return left_XC[:, : max(basis_XC.shape[1] - len(channels), 0)]


def _spoken(chosen: list[int], columns: Mapping[str, slice]) -> str:
    """Channels in words, each counted within its own tensor."""
    spoken = []
    for name, where in columns.items():
        own = [str(channel - where.start) for channel in chosen if where.start <= channel < where.stop]
        if own:
            spoken.append("channels " + ", ".join(own) + ("" if name == "h" else f" of {name}"))
    return " and ".join(spoken)


def _principal_components(at_states: Sequence[StateFindings]) -> Tensor:
    """Of h over the states, as columns of the joint state."""
    where = at_states[0].columns["h"]
    states_SD = torch.stack([one.x_X[where] for one in at_states])
    _, _, right = torch.linalg.svd(states_SD - states_SD.mean(0), full_matrices=False)
    return torch.nn.functional.pad(right[:PRINCIPAL_COMPONENTS].T, (0, 0, 0, len(at_states[0].x_X) - where.stop))


# --- variables -------------------------------------------------------------------------------------------------------


def _field_variable(name: str, findings: Findings, ranges: FreeRange) -> Variable:
    """The worst verdict over loops: how far it is free, and where it is, its most frequent fate over states."""
    by_loop: dict[int, VariableVerdict] = {}
    for k in findings[0]:
        if not ranges.is_free(k):
            by_loop[k] = "weak" if ranges.median[k] >= WEAKLY_HELD else "visible"
            continue
        fates = Counter(fate for one in findings if (fate := one[k].fields[name].fate) is not None)
        by_loop[k] = max(fates, key=lambda fate: (fates[fate], SEVERITY.index(fate)))
    worst = max(by_loop, key=lambda k: (SEVERITY.index(by_loop[k]), ranges.median[k], -k))
    visibility, delayed, activity = _medians([one[worst].fields[name] for one in findings])
    return Variable(
        kind="field",
        name=name,
        verdict=by_loop[worst],
        loop=worst,
        visibility=visibility,
        delayed_visibility=delayed,
        activity=activity,
        free_range=min(ranges.median[worst], FURTHEST),
        free_tokens=ranges.tenfold[worst],
        held_from=ranges.term_norm.get(worst),
    )


def _medians(found: Sequence[Strength]) -> tuple[float, float, float]:
    """Visibility, delayed visibility and activity, each the median over states."""
    return (
        statistics.median(one.visibility for one in found),
        statistics.median(one.delayed for one in found),
        statistics.median(one.activity for one in found),
    )


def _tensor_variable(name: str, findings: Findings) -> Variable:
    """A carried tensor: blind if any of it is; else what becomes of most of it at the loop where that is worst."""
    where = next(iter(findings[0].values())).columns[name]
    width = where.stop - where.start
    by_loop: dict[int, tuple[VariableVerdict, float]] = {}
    for k in findings[0]:
        held = {fate: [one[k].fate.bases[fate][where] for one in findings] for fate in CLASSES}
        shares = {fate: statistics.median(float(one.square().sum()) for one in held[fate]) for fate in CLASSES}
        public: dict[VariableVerdict, float] = {"visible": width - sum(shares.values())}
        for fate, share in shares.items():
            public[PUBLIC[fate]] = public.get(PUBLIC[fate], 0.0) + share
        most = max(public, key=public.__getitem__)
        by_loop[k] = ("blind" if shares["blind"] >= NEAR else most, shares["blind"])
    worst = max(by_loop, key=lambda k: (SEVERITY.index(by_loop[k][0]), by_loop[k][1], -k))
    verdict, blind = by_loop[worst]
    along = [one[worst].tensors[name] for one in findings if name in one[worst].tensors]
    visibility, delayed, activity = _medians(along) if along else (0.0, 0.0, 0.0)
    free = [one[worst].fate.strengths["blind"].free for one in findings if "blind" in one[worst].fate.strengths]
    far = min(statistics.median(free), FURTHEST) if verdict == "blind" and free else None
    return Variable(
        kind="tensor",
        name=name,
        verdict=verdict,
        loop=worst,
        visibility=visibility,
        delayed_visibility=delayed,
        activity=activity,
        free_range=far,
        directions=round(blind),
        width=width,
        is_zero=not along,
    )


def _discovered(k: int, findings: Findings, found: BlindDirections, known: Sequence[str]) -> list[Variable]:
    """What the search found besides named fields and tensors; numbers are the largest of all such directions."""
    of_known = tuple(f" of {name}" for name in known)
    names = [one.name for one in found.named if one.name not in known and not one.name.endswith(of_known)]
    if found.unnamed:
        names.append(f"unnamed ({found.unnamed} dimension{'s' if found.unnamed > 1 else ''})")
    return [replace(_class_variable("found", name, "blind", k, findings), agreement=found.agreement) for name in names]


def _memory(findings: Findings, found: BlindDirections) -> list[Variable]:
    """What is carried in sight of no exit, and bounded."""
    k, count = max(((row.k, row.memory) for row in found.loops), key=lambda row: row[1])
    if not count:
        return []
    name = f"hidden memory ({count} dimension{'s' if count > 1 else ''})"
    return [replace(_class_variable("memory", name, "memory", k, findings), directions=count)]


def _class_variable(
    kind: VariableKind, name: str, fate: Literal["blind", "memory"], k: int, findings: Findings
) -> Variable:
    """A class of hidden directions as a variable: medians over the states that have it."""
    at = [one[k].fate.strengths[fate] for one in findings if fate in one[k].fate.strengths]
    visibility, delayed, activity = _medians(at)
    return Variable(
        kind=kind,
        name=name,
        verdict=fate,
        loop=k,
        visibility=visibility,
        delayed_visibility=delayed,
        activity=activity,
        free_range=min(statistics.median(one.free for one in at), FURTHEST),
    )
