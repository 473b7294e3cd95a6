"""From run folders to the points that a law of loops is fitted to: parameters, loops, tokens, loss."""

from __future__ import annotations

from collections.abc import Sequence

from loopscope.errors import ConfigError, DataError
from loopscope.model.attention import ValueEmbedding
from loopscope.model.looped_lm import LoopedLM, build
from loopscope.readings import Run
from loopscope.results.scaling import Point
from loopscope.training.counting import PARTS, parameters_by_part

EMBEDDING = ("embedding", "positions", "head")
"""Parts that the laws do not count: they look tokens up, or answer with one. Nor do they count tables of values."""


def points_of(runs: Sequence[Run]) -> tuple[list[Point], list[str]]:
    """A point for every run that is finished and scored, and a sentence for every other.

    Losses are compared, so runs must share text and tokenizer.
    """
    points, left_out, read_in = [], [], dict[tuple[str, str], str]()
    for run in runs:
        point = _point(run)
        if isinstance(point, str):
            left_out.append(f"{run.name} is left out: {point}")
            continue
        points.append(point)
        read_in.setdefault(
            (run.manifest.data.corpus_sha256 if run.manifest.data else "", run.tokenizer_sha256), run.name
        )
    if len(read_in) > 1:
        first, other = list(read_in.values())[:2]
        raise DataError(
            f"{first} and {other} were trained on other text, or in other tokens: their losses do not compare"
        )
    return points, left_out


def _point(run: Run) -> Point | str:
    """The point of a run, or why there is none."""
    try:
        if run.config is None:
            return f"config.yaml {run.problems.get('config.yaml', 'is not there')}"
        design = run.config.design("a law of loops")
    except ConfigError as error:
        return str(error)
    full = run.depth(run.num_loops)
    if run.state != "finished":
        return run.state_in_words
    if full is None or full.ce is None or full.ce <= 0:
        return "it has no validation loss at its trained depth"
    once, recurrent = counted_by_the_laws(build(design, device="meta"))
    return Point(
        name=run.name,
        loops=design.num_loops,
        once=once,
        recurrent=recurrent,
        tokens=run.step * run.config.training.batch * run.config.sequence_length,
        loss=full.ce,
        depths=tuple((depth.k, depth.ce) for depth in run.depths if depth.ce is not None),
    )


def counted_by_the_laws(model: LoopedLM) -> tuple[int, int]:
    """Parameters outside the loop and in it, without what is looked up by a token."""
    counted = {part: count for part, count in parameters_by_part(model).items() if part not in EMBEDDING}
    for name, module in model.named_modules():
        if isinstance(module, ValueEmbedding):
            counted[PARTS[name.split(".")[0]]] -= module.table.weight.numel()
    recurrent = counted.pop("core")
    return sum(counted.values()), recurrent
