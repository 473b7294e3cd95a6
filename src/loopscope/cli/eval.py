"""`loopscope eval`: what exiting after each loop costs, each token once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from loopscope.checks import check_at_least, check_not_negative
from loopscope.cli.terminal import bar, print_json, print_record, print_tables, print_text, progress, say
from loopscope.cli.verb import Verb
from loopscope.data.files import check_sources
from loopscope.errors import EXIT_FINDINGS, EXIT_OK, ConfigError, RunError
from loopscope.options import AsJson, EvaluateOptions, OpenedAs, Questions, Target, TaskFolder
from loopscope.show.numbers import span
from loopscope.show.table import Column, Table, columns
from loopscope.words import check_policy, check_tokenizer, check_word

if TYPE_CHECKING:
    from loopscope.api.evaluation import EvaluationResult
    from loopscope.inference.exit_gap import ExitGap
    from loopscope.results.evaluation import CacheTable, TaskEvaluation, Timing
    from loopscope.targets import Opened


@dataclass(frozen=True, kw_only=True)
class Eval(
    EvaluateOptions,
    Verb,
    command="eval",
    example=("eval runs/NAME --depths 1..8", "what exiting after each loop costs"),
):
    """Flags of `loopscope eval`."""

    target: Target
    dtype: OpenedAs = None
    tasks: str | None = None
    """Downstream tasks of lm-evaluation-harness instead of text, as lambada_openai,piqa (the eval extra)."""
    task_folder: TaskFolder = None
    fewshot: int | None = None
    """Examples before every question of a task; by default as the task says."""
    limit: Questions = None
    json: AsJson = False

    help: ClassVar[str] = """Cross-entropy, perplexity, bits per byte and norm at every depth, each token once.

Depths beyond the trained one get a verdict: better until, flat until, worse from, broken from. The scores of a run's
newest checkpoint are also left in its eval.json, where reports find them.

examples:
  loopscope eval runs/nano-per-loop-rmsnorm-s42 --depths 1..8
  loopscope eval downloads/Ouro-1.4B --data wiki/test.txt --depths 1..8
  loopscope eval runs/raw --data wiki/test.txt --json
  loopscope eval runs/raw --depths 1..8 --speed
  loopscope eval runs/raw --cache-policies
  loopscope eval runs/raw --policies margin.json,probe.json --speed
  loopscope eval runs/raw --exit-gap               are its exits badly read, or not yet computed?
  loopscope eval downloads/Ouro-1.4B --tasks lambada_openai,piqa --depths 1..4"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "limit")
        check_not_negative(self, "fewshot")
        of_text = ("data", "length", "max_tokens", "speed", "cache_policies", "exit_gap")
        of_tasks = ("task_folder", "fewshot", "limit")
        for name in of_tasks if self.tasks is None else of_text:
            if getattr(self, name) not in (None, False):
                why = "is for --tasks" if self.tasks is None else "is about text, and --tasks asks for tasks"
                raise ConfigError.of(name, getattr(self, name), why)

    def run(self) -> int:
        """Evaluate and print."""
        check_word(self.target)
        check_tokenizer(self.tokenizer)
        for policy in self.policies or ():
            check_policy(policy, "policies")
        if self.task_folder is not None and not Path(self.task_folder).is_dir():
            raise ConfigError.of("task_folder", self.task_folder, "no such folder")
        if self.tasks is not None:
            return self._run_tasks(self.tasks)
        check_sources(self.data or ())
        from loopscope.api.evaluation import evaluate
        from loopscope.targets import open_target

        with progress(self.target) as advance:
            result = evaluate(open_target(self.target, dtype=self.dtype), self, say=say, progress=advance)
        if result.opened.run is not None and self.dtype is None:
            try:  # what was measured is printed whether or not it can be kept
                say(f"scores are in {result.keep()}")
            except (RunError, OSError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                say(f"scores are not kept in eval.json: {why}")
        if self.json:
            print_json(**result.to_json())
        else:
            print_tables(_table(result), *([_answer_table(result)] if result.scores.answers else []))
            if result.speed:
                print_text(_chart(result))
            if result.cache is not None:
                print_tables(_cache_table(result.cache))
                print_text(result.cache.summary)
            if result.exit_gaps:
                print_tables(_exit_table(result.exit_gaps))
                for note in dict.fromkeys(note for gap in result.exit_gaps for note in gap.notes):
                    print_text(f"note: {note}")
        if (loop := _first_not_finite(result)) is None:
            return EXIT_OK
        say(f"{result.opened.name} is not finite: its CE or norm after loop {loop} is not a number")
        return EXIT_FINDINGS

    def _run_tasks(self, tasks: str) -> int:
        from loopscope.api.downstream import evaluate_tasks
        from loopscope.targets import open_target

        with progress(self.target) as advance:
            opened = open_target(self.target)
            result = evaluate_tasks(
                opened,
                [name for name in tasks.split(",") if name],
                depths=self.depths,
                task_folder=self.task_folder,
                num_fewshot=self.fewshot,
                limit=self.limit,
                tokenizer=self.tokenizer,
                batch=self.batch,
                say=say,
                progress=advance,
            )
        if self.json:
            print_record(result)
        else:
            print_tables(_task_table(opened, result))
            print_text(_task_chart(result))
        return EXIT_OK


def _task_table(opened: Opened, result: TaskEvaluation) -> Table:
    stage = opened.stage if opened.step is None else f"step {opened.step}"
    rows: list[list[object]] = []
    for score in result.tasks:
        cells = [
            ""
            if depth.value is None
            else f"{depth.value:.4g}" + ("" if depth.stderr is None else f" ±{depth.stderr:.2g}")
            for depth in score.depths
        ]
        arrow = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
        rows.append([score.task, score.metric + arrow, score.samples, *cells])
    header = [Column("task"), Column("metric"), *columns("d", "n")]
    header += columns(".4g", *(f"{each.k} loop{'s' if each.k > 1 else ''}" for each in result.tasks[0].depths))
    title = f"{opened.name}, {stage}, lm-evaluation-harness {result.harness}"
    return Table(title, header, rows, absent="")


def _task_chart(result: TaskEvaluation) -> str:
    """Every metric by depth as bars, each beside the largest of its own."""
    lines = []
    for score in result.tasks:
        values = {depth.k: depth.value for depth in score.depths if depth.value is not None}
        largest = max(map(abs, values.values()), default=0.0)
        lines.append(f"{score.task}, {score.metric}")
        lines += [
            f"{k:>5}  {bar(abs(value) / largest if largest else 0.0, 40):<40} {value:.4g}"
            for k, value in values.items()
        ]
    return "\n".join(lines)


def _first_not_finite(result: EvaluationResult) -> int | None:
    """The first loop whose scores are not finite numbers."""
    for depth in result.scores.depths:
        if not all(value is not None and math.isfinite(value) for value in (depth.ce, depth.norm)):
            return depth.k
    return None


def _answer_table(result: EvaluationResult) -> Table:
    """Accuracy over steps and loops; a row is a number of steps, so that a staircase shows what a loop does."""
    depths = [depth.k for depth in result.scores.depths]
    percents = [{k: 100 * share for k, share in row.accuracy.items()} for row in result.scores.answers]
    rows = [
        [row.steps, row.count, *map(shares.get, depths)]
        for row, shares in zip(result.scores.answers, percents, strict=True)
    ]
    header = [*columns("d", "steps", "answers"), *columns(".0f", *map(str, depths))]
    return Table("right answers in %, by the steps they take and the loops run", header, rows, absent="")


def _table(result: EvaluationResult) -> Table:
    opened, scores = result.opened, result.scores
    parts = [opened.name, opened.stage if opened.step is None else f"step {opened.step}"]
    parts += [] if opened.tokenizer is None else [f"{opened.tokenizer.kind} tokenizer"]
    counted = "answers" if scores.answers else "tokens"
    timed = list(dict.fromkeys(each.what for each in result.speed))
    kept = {each.k: each.bytes_per_token for each in result.speed if each.bytes_per_token is not None}
    rows: list[list[object]] = []
    for score in scores.depths:
        speeds = [_rate(_timing(result, score.k, what)) for what in timed]
        numbers = (score.ce, score.perplexity, score.bits_per_byte, score.norm)
        rows.append([str(score.k), *numbers, *speeds, kept.get(score.k)])
    for halted in scores.halting:
        rate = None if halted.tokens_per_second is None else f"{halted.tokens_per_second:,.0f}"
        decoded = (rate if what == "decode" else None for what in timed)
        numbers = (halted.ce, halted.perplexity, halted.bits_per_byte, None)
        rows.append([f"{halted.policy}: {halted.mean_loops:.2f}", *numbers, *decoded, None])
    header = [Column("loops", align="right"), Column("CE (nats/token)", ".4f"), Column("perplexity", ".2f")]
    header += [Column("bits per byte", ".4f"), Column("‖h‖", ".4g")]
    header += [*(Column(f"{what} (tokens/s)", align="right") for what in timed), Column("cache (B/token)", ",")]
    title = ", ".join([*parts, f"{scores.tokens:,} {counted}"])
    note = "" if result.beyond is None else result.beyond.sentence
    table = Table(title, header, rows, note, absent="", parts=(len(scores.depths),) if scores.halting else ())
    return table if kept else table.without("cache (B/token)")


def _timing(result: EvaluationResult, k: int, what: str) -> Timing:
    return next(each for each in result.speed if (each.k, each.what) == (k, what))


def _rate(timing: Timing) -> str:
    """The median, and half of the distance between the quartiles as a share of it."""
    rate, low, high = timing.tokens_per_second or 0.0, timing.low or 0.0, timing.high or 0.0
    return f"{rate:,.0f} ±{(high - low) / 2 / rate:.0%}"


def _chart(result: EvaluationResult) -> str:
    """Speed of decoding and perplexity at every depth and under every policy, as bars."""
    scores = result.scores
    points: list[tuple[str, float, float | None]] = [
        (str(depth.k), _timing(result, depth.k, "decode").tokens_per_second or 0.0, depth.perplexity)
        for depth in scores.depths
    ]
    points += [(f"{each.mean_loops:.2f}", each.tokens_per_second or 0.0, each.perplexity) for each in scores.halting]
    found = [perplexity for _, _, perplexity in points if perplexity is not None]
    best, worst, fastest = min(found, default=0.0), max(found, default=0.0), max(speed for _, speed, _ in points)
    lines = ["loops  decoding, tokens/s                 perplexity, and by how much it is above the best"]
    for loops, speed, perplexity in points:
        above = 0.0 if perplexity is None or worst == best else (perplexity - best) / (worst - best)
        shown = "" if perplexity is None else f"{perplexity:,.2f}"
        lines.append(
            f"{loops:>5}  {bar(speed / fastest, 20):<20} {speed:>10,.0f}  {shown:>10} {bar(above, 20)}".rstrip()
        )
    return "\n".join(lines)


def _exit_table(gaps: Sequence[ExitGap]) -> Table:
    first = gaps[0]
    rows: list[list[object]] = []
    for gap in gaps:
        shares = [None if it.share is None else f"{it.share:.0%} {span(it.low, it.high, '.0%')}" for it in gap.mends]
        cost = f"{gap.gap:+.4f} {span(gap.gap_low, gap.gap_high, '+.4f')}"
        rows.append([gap.loop, cost, *shares, gap.verdict])
    names = (f"CE − CE({first.num_loops})", *(mend.name for mend in first.mends))
    header = [*columns("d", "exit"), *(Column(name, align="right") for name in names), Column("the exit is")]
    title = f"exits: fitted on {first.fit_tokens:,} tokens, asked on {first.test_tokens:,} in {first.units} windows"
    note = "shares of the gap that a map would mend, with 95 % intervals"
    return Table(title, header, rows, note, absent="")


def _cache_table(cache: CacheTable) -> Table:
    rows: list[list[object]] = []
    for cost in cache.policies:
        numbers = (cost.bytes_per_token, cost.share, cost.delta_ce, cost.standard_error)
        exact = cost.policy == "exact"
        rows.append([cost.policy, "" if exact else cost.applies_to, *numbers, "" if exact else cost.verdict])
    header = [Column("policy"), Column("applies to"), Column("bytes/token", ",d"), Column("of exact", ".3g")]
    header += [Column("ΔCE (nats/token)", "+.4f"), Column("± s.e.", ".4f"), Column("verdict")]
    title = f"cache policies at {cache.num_loops} loops: {cache.windows} windows, {cache.tokens:,} decoded tokens"
    return Table(title, header, rows, absent="not finite")
