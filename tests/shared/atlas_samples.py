"""A made-up atlas: every kind of cell that a design can have, written by the classes that write real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from made_up import sample_variable

from loopscope.designs import DESIGNS
from loopscope.machine import provenance
from loopscope.results.atlas import (
    HOPS,
    NOT_BUILT,
    SETTINGS,
    AtlasRecord,
    AtlasRequest,
    Audited,
    Entry,
    FirstExit,
    MendedShare,
    Moves,
    Probed,
    Setting,
    TokenCost,
)
from loopscope.results.audit import Variable, VariableVerdict
from loopscope.results.evaluation import Accuracy, Answers, CacheTable, Depth, PolicyCost, Split
from loopscope.results.record import write_record
from loopscope.studies.atlas import described

PAPER, MODERN, ON_HOPS = SETTINGS
LOOPS = 4


def variable(name: str, verdict: VariableVerdict, free: float | None) -> Variable:
    free_tokens = None if free is None else float(free >= 10)
    return sample_variable(name, verdict, 0.5, free_range=free, free_tokens=free_tokens, drift=0.04, driven=True)


def audited(
    scale: VariableVerdict = "blind", free: float | None = 1e6, growth: float = 1.1, start: float = 10.0
) -> Audited:
    return Audited(
        verdict="blind-spot" if scale == "blind" else "controlled",
        summary=f"The scale is {scale}.",
        variables=[variable("mean", "visible", 1.02), variable("scale", scale, free)],
        norms=[start * growth**k for k in range(30)],
        notes=["a note"],
    )


def probe(step: int = 300, fixed: float = 0.9, gap: float = 0.5, safe: bool = True) -> Probed:
    policies = [
        PolicyCost("exact", "prefill and decode", 4096, 1.0, 4.0, 0.0, 0.0),
        PolicyCost("last-loop", "decode", 1024, 0.25, 4.0, 0.001 if safe else 0.4, 0.001),
    ]
    return Probed(
        step=step,
        motion=Moves(
            loops=64,
            shares={"fixed": fixed, "orbit": 0.0, "slider": 1 - fixed, "unknown": 0.0},
            period=None,
            purity=None,
            contraction_rate=0.97,
            settled_at=3.0,
            settled_by_trained_depth=0.8,
            median_cosine=[k / 64 for k in range(1, 65)],
            summary="Over 64 loops 256 tokens are mostly fixed.",
        ),
        exit_gap=FirstExit(
            loop=1,
            ce_exit=4.0 + gap,
            ce_full=4.0,
            gap=gap,
            gap_low=gap - 0.1,
            gap_high=gap + 0.1,
            verdict="not yet computed",
            summary="The exit after loop 1 costs something.",
            mends=[MendedShare(name="temperature", share=0.1, low=0.0, high=0.2)],
            notes=[],
        ),
        cache=CacheTable(
            num_loops=LOOPS,
            windows=32,
            tokens=2048,
            policies=policies,
            update_ratio=0.9,
            turning_ratio=0.3,
            scale_ratio=2.0,
        ),
        cost=TokenCost(parameters=164_000, flops_per_token=1.38e6, cache_bytes_per_token=4096),
    )


def scores(ce: float = 4.0, beyond: float = 0.0, right: float | None = None) -> Split:
    depths = [Depth(k, ce + (beyond if k > LOOPS else 0.0), 10.0 * k) for k in range(1, LOOPS + 5)]
    shares = [] if right is None else [Accuracy(k, right) for k in range(1, LOOPS + 5)]
    answers = [Answers(steps, 100, shares) for steps in (1, 2)] if shares else []
    return Split(depths=depths, tokens=1000, bytes=3000, answers=answers)


def entry(design: str, setting: Setting = MODERN, **changes) -> Entry:
    """A finished row in which everything was measured."""
    made = Entry(
        design=design,
        recipe=setting.recipe,
        text=setting.text,
        row="-".join(filter(None, (design, "" if setting.recipe == "paper" else "modern", setting.text, "s42"))),
        state="finished",
        seconds=60.0,
        steps=300,
        num_loops=LOOPS,
        scores=scores(right=0.9 if setting.text == HOPS else None),
        unigram_ce=5.0,
        untrained=audited(growth=1.02),
        trained=audited(start=200.0),
        probe=probe(),
    )
    return replace(made, **changes)


def sample_atlas() -> AtlasRecord:
    """Designs of the registry under both recipes; one failed, one not built, one that did not learn its task."""
    names = list(DESIGNS)
    held = audited("visible", 1.3, growth=1.001)
    entries = [entry(name, setting) for name in names for setting in (PAPER, MODERN)]
    entries += [entry(name, ON_HOPS) for name in names[:2]]
    changed = {
        (names[1], MODERN): {"trained": held, "probe": probe(fixed=0.1, gap=0.01, safe=False)},
        (names[2], MODERN): {"trained": held, "scores": scores(ce=3.0, beyond=0.5)},
        (names[3], MODERN): {
            "state": "failed",
            "stage": "auditing",
            "error": "exit code 1: RuntimeError",
            "trained": None,
            "probe": None,
        },
        (names[4], MODERN): {
            "probe": replace(probe(), cache=None, problems={"cache": "keeps no keys and values between tokens"})
        },
        (names[1], ON_HOPS): {"scores": scores(right=0.1)},
    }
    entries = [replace(each, **changed.get((each.design, each.setting), {})) for each in entries]
    place = next(n for n, each in enumerate(entries) if (each.design, each.setting) == (names[5], MODERN))
    entries[place] = Entry(
        design=names[5], recipe="modern", text="", state=NOT_BUILT, error="width = 64: not for this design"
    )
    entries.sort(key=lambda each: (names.index(each.design), SETTINGS.index(each.setting)))
    asked = AtlasRequest(
        size="demo",
        steps=300,
        hops_steps=1000,
        seed=42,
        data=["builtin"],
        corpus_sha256="0" * 64,
        on_hops={names[0]: "because <b>it</b> is first"},
    )
    made = {**provenance(), "started": "2026-01-01T00:00:00+0000", "git": None}
    designs = [described(DESIGNS[name]) for name in names]
    return AtlasRecord(asked=asked, commands=[["loopscope", "atlas"]], designs=designs, entries=entries, **made)


def write_atlas(out: Path, record: AtlasRecord | None = None) -> Path:
    """Its folder, without rows: a record that was committed."""
    out.mkdir(parents=True, exist_ok=True)
    write_record(out / "atlas.json", record or sample_atlas())
    return out
