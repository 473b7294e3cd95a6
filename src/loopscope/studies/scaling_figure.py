"""The figure of a law of loops: does it fit, and what is the next loop worth? As SVG and PDF. No torch here."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from loopscope.results.scaling import ScalingRecord
from loopscope.studies.figures import SETTINGS, new_figure, save

COLOURS = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#56b4e9")
MARKERS = "osD^vP"


def draw(found: ScalingRecord, folder: Path) -> list[Path]:
    """scaling.svg and scaling.pdf; the same numbers give the same bytes."""
    with mpl.rc_context(SETTINGS):
        figure = _figure(found)
    return list(save(figure, folder / "scaling"))


def _figure(found: ScalingRecord) -> Figure:
    figure, (fits, right) = new_figure(2, width=10.0)
    loops = sorted({p.loops for p in found.points})
    for place, r in enumerate(loops):
        pairs = [(p.loss, p.predicted) for p in found.points if p.loops == r and p.predicted is not None]
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        label = f"{r} loop{'' if r == 1 else 's'}"
        measured, expected = ([pair[side] for pair in pairs] for side in (0, 1))
        fits.scatter(measured, expected, s=24, linewidths=0, label=label, color=colour, marker=marker)
    ends = [min(p.loss for p in found.points), max(p.loss for p in found.points)]
    fits.plot(ends, ends, color="0.5", linewidth=0.8)
    fits.set_xlabel("measured loss, nats per token")
    fits.set_ylabel("loss by the law")
    fits.set_title(f"Every run; missed by {found.fit.error:.2%} on average")
    fits.legend(loc="lower right")
    if found.worth:
        xs = [each.loop for each in found.worth]
        ys = [each.worth for each in found.worth]
        bars = [[y - each.low for y, each in zip(ys, found.worth, strict=True)]]
        bars.append([each.high - y for y, each in zip(ys, found.worth, strict=True)])
        right.errorbar(xs, ys, yerr=bars, fmt="o", color=COLOURS[0], capsize=3)
        right.axhline(1, color="0.5", linewidth=0.8)
        right.axhline(0, color="0.5", linewidth=0.8)
        right.set_xticks(xs)
        right.set_xlabel("loop r")
        right.set_ylabel("worth in recurrent parameters, r^φ − (r−1)^φ")
        right.set_title(f"φ = {found.told_phi}")
    else:
        for place, r in enumerate(loops):
            for p in (p for p in found.points if p.loops == r and len(p.depths) > 1):
                ks, losses = zip(*p.depths, strict=True)
                right.plot([k / r for k in ks], losses, color=COLOURS[place % len(COLOURS)], linewidth=0.8)
        right.set_xlabel("loops at test time over loops trained, T/μ")
        right.set_ylabel("loss, nats per token")
        told = "" if found.test_time is None else f": z = {found.test_time.z:.2f}"
        right.set_title(f"Loops at test time{told}")
    return figure
