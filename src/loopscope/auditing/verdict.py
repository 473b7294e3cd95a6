"""From findings at many states to verdicts: how many directions, a name for what is blind, evidence, remedy.

Shape legend: M named fields, X width of a token's share of the joint state, C blind directions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loopscope.auditing.drift import Drift
from loopscope.auditing.free_range import FreeRange
from loopscope.auditing.hidden import HIDDEN
from loopscope.auditing.result import BlindDirections, Variable
from loopscope.auditing.search import CLASSES, PUBLIC, FieldFinding, StateFindings, median_dimension
from loopscope.config import PAPER_PENALTY
from loopscope.readings import free_to_grow
from loopscope.results.thresholds import FURTHEST, WEAKLY_HELD
from loopscope.show.numbers import fold

SEVERITY = ("visible", "weak", "removed", "damped", "inert", "memory", "blind")
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

REMEDIES: dict[str, tuple[str, str | None]] = {
    "scale": (
        "let a loss see the scale (a norm penalty; a raw or final-only readout) or take it out of the loop "
        "(an inter-loop norm)",
        f"--norm-penalty {PAPER_PENALTY}",
    ),
    "mean": ("read out through RMSNorm or raw, or norm between loops with LayerNorm", "--readout rmsnorm"),
}
OTHER_REMEDY = ("let the readout see these directions, or add a loss term on them", f"--norm-penalty {PAPER_PENALTY}")
TENSOR_REMEDY = ("let an exit read this tensor, add a loss term on it, or norm it between loops", None)

EVIDENCE = {
    "visible": "{free}, from loop {k} on",
    "weak": "{free}{held}, from loop {k} on",
    "removed": "{free}, but no loop carries or writes it (loop {k}, gain {activity:.2g})",
    "damped": "{free}, but dying out by more than 5 % a loop (loop {k}, gain {activity:.2g})",
    "inert": "{free} and carried (loop {k}), but nothing ever reads it; only its range is at risk",
    "memory": "{free}, carried and read (loop {k}), but bounded by the loop",
    "blind": "{free}{held}. At loop {k}, {share:.0f} % of tokens are free tenfold or more, the next loop carries it on "
    "with gain {activity:.2g}, and later exits depend on it ({delayed:.1g})",
}
"""What is claimed; where it is blind, the numbers behind it in a sentence of their own."""

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
    besides = {
        k: [_besides(one[k], [list(ranges).index(name) for name in blind]) for one in findings] for k in findings[0]
    }
    medians = {k: median_dimension([basis_XC.shape[1] for basis_XC in bases]) for k, bases in besides.items()}
    worst = max(medians, key=lambda k: (medians[k][0], medians[k][1], -k))
    at_worst = [one[worst] for one in findings]
    extra, agreement = medians[worst]
    named, unnamed = _names(at_worst, besides[worst], [name for name in ranges if name not in blind], extra)
    named = [{"name": name, "share": _share_of(name, at_worst)} for name in blind] + named
    spectrum = torch.stack([one.hidden.spectrum for one in at_worst]).median(0).values
    directions = BlindDirections(
        dimension=len(blind) + extra,
        agreement=agreement,
        states=len(findings),
        spectrum=spectrum.tolist(),
        gap=_gap(spectrum),
        named=named,
        unnamed=unnamed,
        loops=[_loop_row(k, [one[k] for one in findings]) for k in findings[0]],
    )
    beside_h = [name for name in at_worst[0].columns if name != "h"]
    tensors = [_tensor_variable(name, findings) for name in beside_h]
    others = _discovered(worst, findings, directions, [*blind, *beside_h])
    found = Found(directions, [one.name for one in others], _common(at_worst, besides[worst], extra))
    return found, [*fields, *tensors, *map(_constant, constant), *others, *_memory(findings, directions)]


def _common(at_states: Sequence[StateFindings], bases: Sequence[Tensor], dimension: int) -> Tensor:
    """Those directions of h that most states find: the leading ones of their mean projector."""
    where = at_states[0].columns["h"]
    projectors = [basis_XC[where] @ basis_XC[where].T for basis_XC in bases]
    _, vectors_DD = torch.linalg.eigh(torch.stack(projectors).mean(0))
    return vectors_DD[:, vectors_DD.shape[1] - min(dimension, vectors_DD.shape[1]) :]


def _besides(one: StateFindings, fields: Sequence[int]) -> Tensor:
    """The blind directions of a state without the blind fields, each of which takes away the one that is nearest.

    What is harmless of a field does not count: of h = (h₁, h₂) whose first half is removed, h₂ is the blind direction.
    """
    nothing_X0 = one.field_rows.T[:, :0]
    basis_XC = one.fate.bases.get("blind", nothing_X0)
    harmless_XC = torch.cat([nothing_X0, *(one.fate.bases[fate] for fate in HARMLESS if fate in one.fate.bases)], dim=1)
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
    shares = []
    for one in at_states:
        basis_XC = one.fate.bases.get("blind", one.field_rows.T[:, :0])
        shares.append(float((basis_XC.T @ one.field_rows[index]).square().sum()))
    return statistics.median(shares)


def _loop_row(k: int, at_states: Sequence[StateFindings]) -> dict[str, int]:
    """Median over states of how many directions end in each class."""
    hidden = statistics.median_low([one.hidden.basis_XH.shape[1] for one in at_states])
    weak = statistics.median_low([one.hidden.weak for one in at_states])
    classes = {name: statistics.median_low([one.fate.counts[name] for one in at_states]) for name in CLASSES}
    return {"k": k, "hidden": int(hidden), "weak": int(weak), **{name: int(count) for name, count in classes.items()}}


def _gap(spectrum: Tensor) -> float | None:
    """Smallest shown over largest hidden singular value; None when nothing is hidden."""
    hidden, shown = spectrum[spectrum <= HIDDEN], spectrum[spectrum > HIDDEN]
    return float(shown.min() / hidden.max().clamp(min=1e-300)) if len(hidden) and len(shown) else None


# --- names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Name:
    name: str
    share: float
    dimensions: int


def _names(
    at_states: Sequence[StateFindings], bases: Sequence[Tensor], fields: Sequence[str], dimension: int
) -> tuple[list[dict[str, object]], int]:
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
    return [{"name": name, "share": shares[name]} for name in common], max(dimension - taken, 0)


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
    by_loop = {}
    for k in findings[0]:
        if not ranges.is_free(k):
            by_loop[k] = "weak" if ranges.median[k] >= WEAKLY_HELD else "visible"
            continue
        fates = Counter(one[k].fields[name].fate for one in findings)
        by_loop[k] = max(fates, key=lambda fate: (fates[fate], SEVERITY.index(fate)))
    worst = max(by_loop, key=lambda k: (SEVERITY.index(by_loop[k]), ranges.median[k], -k))
    verdict = by_loop[worst]
    visibility, delayed, activity = _medians([one[worst].fields[name] for one in findings])
    remedy, flag = REMEDIES.get(name, OTHER_REMEDY) if verdict == "blind" else (None, None)
    evidence = EVIDENCE[verdict].format(
        k=worst,
        free=free_to_grow(ranges.median[worst], ranges.tenfold[worst] if ranges.is_free(worst) else None),
        held=ranges.held_by(worst),
        share=100 * ranges.tenfold[worst],
        delayed=delayed,
        activity=activity,
    )
    return Variable(
        name,
        verdict,
        visibility,
        delayed,
        activity,
        evidence,
        remedy,
        flag,
        min(ranges.median[worst], FURTHEST),
        ranges.tenfold[worst],
    )


def _medians(found: Sequence[FieldFinding]) -> tuple[float, float, float]:
    """Visibility, delayed visibility and activity, each the median over states."""
    visibility, delayed, activity = (
        statistics.median(getattr(one, number) for one in found) for number in ("visibility", "delayed", "activity")
    )
    return visibility, delayed, activity


def with_drift(variable: Variable, found: Drift) -> Variable:
    """The variable with what training does to it, said before the numbers of its evidence."""
    claim, stop, numbers = variable.evidence.partition(". ")
    evidence = f"{claim}; {found.sentence()}{stop}{numbers}"
    return replace(variable, drift=found.rate, driven=found.driven, evidence=evidence)


def _tensor_variable(name: str, findings: Findings) -> Variable:
    """A carried tensor: blind if any of it is; else what becomes of most of it at the loop where that is worst."""
    where = next(iter(findings[0].values())).columns[name]
    width = where.stop - where.start
    by_loop = {}
    for k in findings[0]:
        shares = {fate: statistics.median(_held(one[k], fate, where) for one in findings) for fate in CLASSES}
        public = Counter({"visible": width - sum(shares.values())})
        for fate, share in shares.items():
            public[PUBLIC.get(fate, fate)] += share  # type: ignore[assignment]  # shares of directions, not whole ones
        by_loop[k] = (
            "blind" if shares["blind"] >= NEAR else max(public, key=lambda fate: public[fate]),
            shares["blind"],
        )
    worst = max(by_loop, key=lambda k: (SEVERITY.index(by_loop[k][0]), by_loop[k][1], -k))
    verdict, blind = by_loop[worst]
    along = [one[worst].tensors[name] for one in findings if name in one[worst].tensors]
    visibility, delayed, activity = _medians(along) if along else (0.0, 0.0, 0.0)
    strengths = [one[worst].fate.strengths.get("blind") for one in findings]
    free = [one.free for one in strengths if one is not None]
    far = min(statistics.median(free), FURTHEST) if verdict == "blind" and free else None
    what = f"{blind:.0f} of its {width} directions are blind" if verdict == "blind" else f"most of it is {verdict}"
    what += "" if far is None else f", {_lengths(far)} along them go unnoticed"
    numbers = (
        f"along itself its exit shows {visibility:.1g} of an average direction, the next loop passes on "
        f"{activity:.2g}, later exits depend on it by {delayed:.1g}"
    )
    numbers = numbers if along else "zero at every token that was searched"
    evidence = f"carried beside h: {what} (loop {worst}; {numbers})"
    remedy, flag = TENSOR_REMEDY if verdict == "blind" else (None, None)
    return Variable(name, verdict, visibility, delayed, activity, evidence, remedy, flag, far)


def _lengths(free: float) -> str:
    many = "any number of" if free >= FURTHEST else fold(free).removesuffix("-fold")
    return f"{many} lengths of the state"


def _held(one: StateFindings, fate: str, where: slice) -> float:
    """How many directions of a class lie in some channels."""
    basis_XC = one.fate.bases.get(fate)
    return 0.0 if basis_XC is None else float(basis_XC[where].square().sum())


def _constant(name: str) -> Variable:
    evidence = "carried beside h, and the same after every loop: no loop writes it"
    return Variable(name, "removed", 0.0, 0.0, 1.0, evidence, None, None)


def _discovered(k: int, findings: Findings, found: BlindDirections, known: Sequence[str]) -> list[Variable]:
    """What the search found besides named fields and tensors; numbers are the largest of all such directions."""
    names = [str(one["name"]) for one in found.named if one["name"] not in known]
    names = [name for name in names if not any(name.endswith(f" of {tensor}") for tensor in known)]
    if found.unnamed:
        names.append(f"unnamed ({found.unnamed} dimension{'s' if found.unnamed > 1 else ''})")
    if not names:
        return []
    visibility, delayed, activity, free = _strength("blind", k, findings)
    evidence = (
        f"{_lengths(free)} along it go unnoticed. At loop {k} the next loop carries it on with gain "
        f"{activity:.2g}, and later exits depend on it ({delayed:.1g}); found by the search at "
        f"{100 * found.agreement:.0f} % of the states"
    )
    near = {f"a direction near {name}": remedy for name, remedy in REMEDIES.items()}
    return [
        Variable(
            name, "blind", visibility, delayed, activity, evidence, *near.get(name, OTHER_REMEDY), min(free, FURTHEST)
        )
        for name in names
    ]


def _memory(findings: Findings, found: BlindDirections) -> list[Variable]:
    """What is carried in sight of no exit, and bounded."""
    k, count = max(((row["k"], row["memory"]) for row in found.loops), key=lambda row: row[1])
    if not count:
        return []
    visibility, delayed, activity, free = _strength("memory", k, findings)
    evidence = (
        f"loop {k}: {count} hidden directions ({visibility:.0e}) are carried (gain {activity:.2g}) and read later "
        f"({delayed:.1g}), but the loop bounds the state as a whole"
    )
    name = f"hidden memory ({count} dimension{'s' if count > 1 else ''})"
    return [Variable(name, "memory", visibility, delayed, activity, evidence, None, None, min(free, FURTHEST))]


def _strength(name: str, k: int, findings: Findings) -> tuple[float, float, float, float]:
    """Visibility, delayed visibility, activity and free lengths of a class: medians over the states that have it."""
    at = [one[k].fate.strengths[name] for one in findings if name in one[k].fate.strengths]
    visibility, delayed, activity, free = (
        statistics.median(getattr(one, number) for one in at)
        for number in ("visibility", "delayed", "activity", "free")
    )
    return visibility, delayed, activity, free


def summary(verdict: str, found: BlindDirections, known: list[Variable]) -> str:
    """The audit in one sentence."""
    if verdict == "controlled":
        scale = next(one for one in known if one.name == "scale")
        return f"No blind spot: every direction that the loop carries is shown to a loss; scale is {scale.verdict}."
    names = ", ".join(one.name for one in known if one.verdict == "blind")
    plural, them = ("s", "them") if found.dimension > 1 else ("", "it")
    return f"{found.dimension} blind direction{plural} ({names}): the loop carries {them} on and no loss sees {them}."
