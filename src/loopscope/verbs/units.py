"""Units of text, whose mean losses are the evidence of a calibration, and how they are dealt.

A unit is a fixed number of whole windows of one article, so that its mean loss is a mean over as many tokens as any
other's. Windows never cross from one article into the next; what is left over of an article is dropped and counted.
Of a task a unit is a fixed number of instances, which are drawn independently. Where a text does not tell where its
articles begin, blocks of neighbouring units stand in for them.

Articles, not units, are dealt to fit, calibration and test: what is proposed on one article is never tested on it.

Shape legend: B windows of a unit, T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from loopscope.data.corpora import joined
from loopscope.data.packing import PackedTokens
from loopscope.data.stream import evaluation_batches
from loopscope.data.tasks import TaskText
from loopscope.data.tokenizers import Tokenizer
from loopscope.errors import DataError
from loopscope.targets import Opened
from loopscope.verbs.text import Say, corpus_for, tokens_for

UNIT_TOKENS = 512
"""Tokens of a unit, as whole windows."""
UNIT_INSTANCES = 8
"""Instances of a unit of a task."""
BLOCK_UNITS = 4
"""Units of a block."""
MOST_OF_ARTICLE = 16
"""Units that one article gives at most: a book among short notes would otherwise be half of a split."""
READ_TIMES = 8
"""Units that are read for one that is wanted, before articles take turns."""
SHARES = {"fit": 0.2, "calibration": 0.5, "test": 0.3}
"""How articles are dealt."""

Homes = Literal["article", "block", "instances"]
"""What a unit belongs to as a whole: an article; a block where articles are unknown; of a task nothing but itself."""


@dataclass(frozen=True)
class Unit:
    """Windows of one article."""

    ids_BT: Tensor
    targets_BT: Tensor
    article: int
    """Number of its article, or of what stands in for one."""


@dataclass(frozen=True, kw_only=True)
class UnitText:
    """A text as units."""

    units: list[Unit]
    homes: Homes
    dropped_tokens: int = 0
    """Ends of articles that are no whole unit, as far as the text was read."""
    dropped_articles: int = 0
    """Articles that are shorter than one unit."""

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return self.units[0].ids_BT.numel()


def units_of(
    opened: Opened,
    data: Sequence[str] | None,
    max_units: int | None,
    say: Say,
    *,
    unit_tokens: int = UNIT_TOKENS,
    seed: int = 0,
) -> UnitText:
    """Whole units of a text, up to `max_units`, of as many articles as there are."""
    tokens, length = tokens_for(opened, data, say), opened.sequence_length
    rows = max(1, unit_tokens // length)
    if isinstance(tokens, TaskText):
        batches = evaluation_batches(tokens, length, UNIT_INSTANCES)
        whole = [pair for pair in batches if len(pair[0]) == UNIT_INSTANCES][:max_units]
        return UnitText(units=[Unit(*pair, number) for number, pair in enumerate(whole)], homes="instances")
    articles = corpus_for(opened, data).articles("valid")
    if articles is None:
        text = _blocks(tokens, rows, length, max_units)
    else:
        assert opened.tokenizer is not None
        encoded = (_encoded(opened.tokenizer, each) for each in articles)
        text = _cut(encoded, rows, length, max_units, np.random.default_rng(seed))
    if not text.units:
        raise DataError(
            f"no article of the text has the {rows * length + 1:,} tokens of one unit; name longer text with --data, "
            "or shorter units with --unit-tokens"
        )
    return text


def _blocks(tokens: PackedTokens, rows: int, length: int, max_units: int | None) -> UnitText:
    """A text without articles, from its beginning."""
    size = rows * length
    count = (len(tokens) - 1) // size
    count = count if max_units is None else min(count, max_units)
    units = [_unit(tokens[at * size : (at + 1) * size + 1], rows, at // BLOCK_UNITS) for at in range(count)]
    return UnitText(units=units, homes="block", dropped_tokens=(len(tokens) - 1) % size)


def _cut(
    articles: Iterable[np.ndarray], rows: int, length: int, max_units: int | None, rng: np.random.Generator
) -> UnitText:
    """Articles in units of `rows` windows.

    Where there are more units than wanted, articles take turns to give one, of a place in them that is drawn: many
    articles are better evidence than much of a few, and beginnings are not what articles are like.
    """
    size, found, dropped, short = rows * length, [], 0, 0
    most = None if max_units is None else READ_TIMES * max_units
    for number, ids in enumerate(articles):
        whole = (len(ids) - 1) // size
        dropped, short = dropped + len(ids) - whole * size, short + (whole == 0)
        for turn, at in enumerate(rng.permutation(whole)[:MOST_OF_ARTICLE].tolist()):
            found.append((turn, number, at, ids[at * size : (at + 1) * size + 1]))
        if most is not None and len(found) >= most:
            break
    chosen = sorted(sorted(found, key=lambda each: each[:2])[:max_units], key=lambda each: each[1:3])
    units = [_unit(ids, rows, number) for _, number, _, ids in chosen]
    return UnitText(units=units, homes="article", dropped_tokens=dropped, dropped_articles=short)


def _unit(ids: np.ndarray, rows: int, article: int) -> Unit:
    """A target is the token after; the last one of a window is the first token of the next."""
    ids_N = torch.from_numpy(ids.astype(np.int64))
    return Unit(ids_N[:-1].view(rows, -1), ids_N[1:].view(rows, -1), article)


def _encoded(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """The tokens of an article's documents, joined as they are for training."""
    return np.concatenate([ids_N for ids_N, _ in tokenizer.encode_counted(list(joined(documents)))])


def dealt(units: Sequence[Unit], seed: int) -> dict[str, list[Unit]]:
    """Units by split, each in an order of its own; an article goes to one split as a whole."""
    articles = sorted({unit.article for unit in units})
    order = np.random.default_rng(seed).permutation(len(articles))
    ends = np.round(np.cumsum(list(SHARES.values())) * len(articles)).astype(int)
    splits: dict[str, list[Unit]] = {}
    for name, start, end in zip(SHARES, (0, *ends[:-1]), ends, strict=True):
        chosen = {articles[index] for index in order[start:end]}
        splits[name] = [unit for unit in units if unit.article in chosen]
        if not splits[name]:
            raise DataError(
                f"{len(articles)} articles or blocks, {len(units)} units, are too few to deal into "
                f"{', '.join(SHARES)}; name more --data"
            )
        np.random.default_rng(seed).shuffle(splits[name])
    return splits
