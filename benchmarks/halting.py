"""Certified halting: do promises hold while loops are saved, do exits follow the steps a token needs, and is it faster?

    python benchmarks/halting.py [--hops RUN] [--text RUN] [--verify 200] [--tokens 2000]

RUN is any target whose exits are trained and whose scale is controlled. By default the model of `loopscope train
--preset hops` and the nano model with a norm penalty of benchmarks/trained.py, trained on first use and kept in the
cache folder.

  promises   every rule is calibrated at 1 % and 95 % and recalibrated 200 times on articles drawn again
  steps      mean exit of answers of `task:hops` by the steps they take, on test instances that nothing was chosen on
  speed      known text decoded at batch 1 at depth 1, at full depth and under the cheapest adaptive rule, in turns,
             with copied keys and values; T₀ and T_r come from the first two, d̄ is counted in the third
  check      seconds of the probe's check against those of a readout, of one token and of 64

The exit code is 1 where a target is missed; the lines above it are the profile that says why.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import loopscope as ls
from loopscope.api.calibration import policy_of
from loopscope.data.stream import answer_batches, evaluation_batches
from loopscope.data.task import TaskText
from loopscope.inference.decoding import CachedRunner, Runner
from loopscope.inference.halting import Halting, HaltingRunner, halt_on_text
from loopscope.inference.rules import Fixed, Look, Probe
from loopscope.machine import cache_folder
from loopscope.protocol import Cached
from loopscope.results.halting import Calibration, Certificate
from loopscope.targets import Opened, open_target, tokens_for
from side_by_side import machine, measure
from trained import trained

FAILURES = 0.075
"""Share of recalibrations that may fail: 15 of 200, two standard errors above 5 %."""
RANK, RIGHT, COUNTS = 0.8, 0.9, 6
SPEED, CHECK = 0.9, 0.1
WITHOUT_READOUT = (Probe.name, "state-difference", "cosine", "gate")
"""Rules whose check multiplies by no vocabulary."""
ROUNDS = 200
"""Of the timing of a check, each of which takes microseconds."""


@dataclass
class Targets:
    """Verdicts as they come."""

    missed: bool = False

    def say(self, met: bool, text: str) -> None:
        """A line that `bench.py` keeps."""
        self.missed |= not met
        print(f"  {'met' if met else 'MISSED'}: {text}", flush=True)


@dataclass
class Decoded:
    """Known text under one way of decoding it."""

    seconds: list[float] = field(default_factory=list)
    """A token, by text."""
    loops: list[int] = field(default_factory=list)


# --- promises --------------------------------------------------------------------------------------------------------


def promises(name: str, opened: Opened, verify: int, max_units: int, targets: Targets) -> Calibration:
    """Calibrate every rule, and print what each saves beside how often its promise held."""
    found = ls.calibrate(
        opened, rules=["all"], verify=verify, max_units=max_units, progress=lambda what, share: told(f"{name}: {what}")
    )
    units = ", ".join(f"{split} {count}" for split, count in found.units.items())
    print(f"\n{name}: K = {found.num_loops}, {units} units of {found.unit_tokens} tokens")
    for each in (found.fixed, *found.certificates):
        if each.mean_loops is None or each.ppl_increase is None:
            print(f"  {each.rule:17} nothing is promised: {found.units_needed} calibration units would do")
            continue
        saved = "" if each.rule == "fixed" else f"{found.saved_beyond_fixed(each):+.2f}"
        print(
            f"  {each.rule:17} {each.mean_loops:5.2f} loops  saved beyond fixed {saved:6} "
            f"perplexity {100 * each.ppl_increase:+6.2f} %  held {each.verified} of {verify}"
        )
    made = [each for each in found.certificates if each.verified is not None]
    if not made:
        targets.say(False, f"{name}: no rule is certified: there is too little text for a promise, see --max-units")
        return found
    failures, allowed = max(verify - (each.verified or 0) for each in made), int(FAILURES * verify)
    targets.say(failures <= allowed, f"{name}: at most {failures} of {verify} recalibrations fail; target {allowed}")
    return found


def saves(found: Calibration, certificate: Certificate) -> float:
    """Loops a token beyond the smallest certified fixed depth."""
    return found.saved_beyond_fixed(certificate) or 0.0


def halting_of(found: Calibration, certificate: Certificate) -> Halting:
    """A certified rule with its threshold."""
    return Halting.of_policy(policy_of(found, certificate), "halting")


# --- steps -----------------------------------------------------------------------------------------------------------


def exits_by_steps(opened: Opened, halting: Halting) -> dict[int, tuple[int, float, float]]:
    """By the steps they take, answers of test instances: how many, the share right at full depth, the mean exit."""
    model, depth = Cached.needed(opened.model, "halting"), opened.model.num_loops
    text = tokens_for(opened, None, told, split="test")
    assert isinstance(text, TaskText), "steps are known of tasks alone"
    found: dict[int, list[tuple[bool, int]]] = {}
    for ids_BT, targets_BT, steps_BT in answer_batches(text, opened.sequence_length, 64):
        halted = halt_on_text(model, ids_BT, targets_BT, halting, num_loops=depth)
        with torch.no_grad():
            state = ls.run_loops(opened.model, ids_BT).states[depth]
            right_BT = opened.model.readout(state, depth).argmax(-1) == targets_BT
        for steps, right, loop in zip(
            steps_BT.flatten().tolist(), right_BT.flatten().tolist(), halted.exits_BT.flatten().tolist(), strict=True
        ):
            if steps:
                found.setdefault(steps, []).append((right, loop))
    return {
        steps: (len(each), statistics.fmean(right for right, _ in each), statistics.fmean(loop for _, loop in each))
        for steps, each in sorted(found.items())
    }


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's, of values without ties."""
    ours, theirs = (np.argsort(np.argsort(values)).astype(float) for values in (left, right))
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    return float(ours @ theirs / np.sqrt((ours @ ours) * (theirs @ theirs)))


def steps(opened: Opened, found: Calibration, targets: Targets) -> None:
    """Does the rule that saves most let tokens leave later that need more?"""
    best = found.best
    if best is None or best.threshold is None:
        targets.say(False, "hops: no rule is certified")
        return
    targets.say(saves(found, best) > 0, f"hops: {best.rule} saves {saves(found, best):+.2f} loops beyond fixed depth")
    table = exits_by_steps(opened, halting_of(found, best))
    for count, (answers, right, loop) in table.items():
        print(f"  {count:2} steps: {answers:4} answers, {100 * right:5.1f} % right at full depth, mean exit {loop:.2f}")
    known = {count: loop for count, (_, right, loop) in table.items() if right >= RIGHT}
    enough = len(known) >= COUNTS
    targets.say(enough, f"hops: {len(known)} step counts are answered at {RIGHT:.0%}; target {COUNTS}")
    rank = rank_correlation(list(known), list(known.values())) if len(known) > 1 else 0.0
    targets.say(rank >= RANK, f"hops: rank correlation of mean exit with steps needed {rank:.2f}; target {RANK}")


# --- speed -----------------------------------------------------------------------------------------------------------


def windows(opened: Opened) -> Iterator[list[int]]:
    """Known texts as long as the model was trained on."""
    text = tokens_for(opened, None, told)
    for ids_BT, _ in evaluation_batches(text, opened.sequence_length, 1):
        yield ids_BT[0].tolist()


def decode_known(make: Callable[[], Runner], ids: Sequence[int], into: Decoded) -> None:
    """Feed the second half of a text token by token, as decoding would."""
    half, runner = len(ids) // 2, make()
    runner.prefill([ids[:half]])
    loops = []
    started = time.perf_counter()
    for token in ids[half:]:
        runner.step([0], [token])
        loops.append(runner.spent(0))
    into.seconds.append((time.perf_counter() - started) / len(loops))
    into.loops += loops


def speed(name: str, opened: Opened, found: Calibration, tokens: int, targets: Targets) -> None:
    """Tokens per second under the cheapest adaptive rule against what its loops allow."""
    adaptive = [each for each in found.certificates if each.is_certified and saves(found, each) > 0]
    cheap = [each for each in adaptive if each.rule in WITHOUT_READOUT] or adaptive
    if not cheap:
        print(f"  {name}: no rule saves loops beyond the fixed depth: this text does not need depth, or not unequally")
        cheap = [each for each in found.certificates if each.is_certified]
    chosen = min(cheap, key=lambda each: each.mean_loops or 0.0, default=None)
    if chosen is None:
        print(f"  {name}: none is certified, and none can be timed")
        return
    model, depth = Cached.needed(opened.model, "halting"), opened.model.num_loops
    halting = halting_of(found, chosen)
    ways: dict[str, Callable[[], Runner]] = {
        "depth 1": lambda: CachedRunner(model, 1),
        "full depth": lambda: CachedRunner(model, depth),
        "never leaving": lambda: HaltingRunner(model, depth, Halting(Fixed(), float(depth))),
        chosen.rule: lambda: HaltingRunner(model, depth, halting),
    }
    decoded = {way: Decoded() for way in ways}
    for number, ids in enumerate(windows(opened)):
        for way, make in ways.items():
            decode_known(make, ids, Decoded() if number == 0 else decoded[way])  # the first warms up
        if len(decoded[chosen.rule].loops) >= tokens:
            break
    one, full, never, ours = (statistics.median(each.seconds) for each in decoded.values())
    loop = (full - one) / (depth - 1)
    rest, mean = one - loop, statistics.fmean(decoded[chosen.rule].loops)
    ratios = [a / b for a, b in zip(decoded["full depth"].seconds, decoded[chosen.rule].seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    bound = (rest + depth * loop) / (rest + mean * loop)
    print(
        f"  {name}, batch 1, {len(decoded[chosen.rule].loops):,} tokens under {chosen.rule}, mean {mean:.2f} of "
        f"{depth} loops: T₀ {1e6 * rest:.0f} µs, T_r {1e6 * loop:.0f} µs; a token {1e6 * full:.0f} µs at full depth, "
        f"{1e6 * never:.0f} µs where nobody leaves, {1e6 * ours:.0f} µs halting"
    )
    reached = middle / bound
    targets.say(
        reached >= SPEED,
        f"{name}: {middle:.2f}× [{low:.2f}, {high:.2f}] the tokens per second of full depth, {reached:.2f} of the "
        f"{bound:.2f}× that its loops allow; target {SPEED}",
    )


# --- check -----------------------------------------------------------------------------------------------------------


def check(name: str, opened: Opened, targets: Targets | None) -> None:
    """The probe's check against a full readout; without targets it is there to be read."""
    model, depth = opened.model, opened.model.num_loops
    width = model.embed(torch.zeros(1, 1, dtype=torch.long)).h_BTD.shape[-1]
    probe = Probe(torch.randn(depth - 1, width).tolist(), [0.0] * (depth - 1))
    for tokens in (1, 64):
        ids_BT = torch.randint(opened.vocab_size, (tokens, 1))
        with torch.no_grad():
            state = ls.run_loops(model, ids_BT).states[1]

            def checked(state: ls.LoopState = state) -> object:
                return [probe.score(Look(model, state, 1, depth, None, None)) for _ in range(10)]  # type: ignore[arg-type]

            def read(state: ls.LoopState = state) -> object:
                return [model.readout(state, 1) for _ in range(10)]

            times = measure({"check": checked, "readout": read}, ROUNDS // 10)
        ratio, low, high = times["check"].ratio_to(times["readout"])
        micro = {what: 1e5 * statistics.median(each.seconds) for what, each in times.items()}
        text = (
            f"{name}, {tokens} token{'s' if tokens > 1 else ''}: a check takes {micro['check']:.1f} µs, a readout over "
            f"V = {opened.vocab_size:,} × d = {width} {micro['readout']:.1f} µs: {ratio:.3f} [{low:.3f}, {high:.3f}]"
        )
        if targets is None:
            print(f"  profile: {text}; 1/V = {1 / opened.vocab_size:.5f}")
        else:
            targets.say(ratio <= CHECK, f"{text}; target {CHECK}")


# --- all of it -------------------------------------------------------------------------------------------------------


def told(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def hops_model() -> Opened:
    """The model of `loopscope train --preset hops`, trained now if it is not there."""
    out = cache_folder() / "benchmarks" / "hops"
    result = ls.train(ls.preset("hops"), out, say=told)
    assert result.outcome == "finished", f"{out} ended with {result.outcome}"
    return open_target(out)


def main() -> int:
    """Both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", help="a target that was trained on task:hops; by default trained now, in minutes")
    parser.add_argument("--text", help="a target that was trained on text; by default trained now, in minutes")
    parser.add_argument("--verify", type=int, default=200, help="recalibrations of every rule")
    parser.add_argument("--max-units", type=int, default=400, help="most units of each text; fewer are quicker")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens that are decoded each way")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    targets = Targets()
    hops = open_target(options.hops) if options.hops else hops_model()
    text = open_target(options.text) if options.text else trained("nano", "controlled")
    for name, opened in (("hops", hops), ("text", text)):
        found = promises(name, opened, options.verify, options.max_units, targets)
        if name == "hops":
            steps(opened, found, targets)
        speed(name, opened, found, options.tokens, targets)
        check(name, opened, targets)
    check("paper-44m, untrained", open_target("preset:paper-44m"), None)
    return int(targets.missed)


if __name__ == "__main__":
    sys.exit(main())
