"""The text that a model is evaluated or audited on: what it was trained on, what the user names, or random ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from loopscope.data.corpora import Corpus, Split, open_corpus
from loopscope.data.packing import SplitTokens
from loopscope.data.preparation import evaluation_corpus, pack_split
from loopscope.data.tokenizers import fit_tokenizer
from loopscope.errors import ConfigError, DataError
from loopscope.targets import Opened
from loopscope.training.session import read_data_record

Say = Callable[[str], None]


def with_tokenizer(opened: Opened, tokenizer: str | None) -> Opened:
    """The target with a tokenizer of the user's choice, for one that brings none; `bytes`, or a tokenizer.json."""
    if tokenizer is None:
        return opened
    if opened.tokenizer is not None:
        raise ConfigError.of("tokenizer", tokenizer, f"{opened.name} has a tokenizer of its own")
    if tokenizer in ("bpe", "word"):
        raise ConfigError.of("tokenizer", tokenizer, "would have to be trained; name bytes, or a tokenizer.json")
    return replace(opened, tokenizer=fit_tokenizer(tokenizer, (), opened.vocab_size))


def tokens_for(opened: Opened, data: Sequence[str] | None, say: Say, split: Split = "valid") -> SplitTokens:
    """The text of `data`, all of it, or a split of the target's own text, in the target's tokens."""
    if opened.tokenizer is None:
        raise ConfigError(
            f"{opened.name} has no tokenizer.json or other tokenizer to read text (--data) with; name one with "
            "--tokenizer, or return loopscope.Opened with one from the factory"
        )
    tokens = pack_split(corpus_for(opened, data), "valid" if data is not None else split, opened.tokenizer, say)
    if data is None and (before := other_text_of(opened, tokens)) is not None:
        say(
            f"{opened.name} was trained on text of SHA-256 {before}, and its sources (training and validation) now "
            f"have {tokens.corpus_sha256}: what follows is about what they hold now"
        )
    return tokens


def corpus_for(opened: Opened, data: Sequence[str] | None) -> Corpus:
    """The corpus behind `tokens_for`; its validation split is the text."""
    if data is not None:
        return evaluation_corpus(tuple(data), opened.data.text_field)
    try:
        return open_corpus(opened.data)
    except DataError as error:
        raise DataError(
            f"{opened.name} has a text of its own, which cannot be opened (--data names another): {error}"
        ) from error


def other_text_of(opened: Opened, tokens: SplitTokens) -> str | None:
    """The hash of the text a run was trained on, where its sources now hold another; None where they do not."""
    if opened.run is None or opened.config is None or opened.data != opened.run.config().data:
        return None
    record = read_data_record(opened.run.path)
    before = "" if record is None else record.corpus_sha256
    return before if before and before != tokens.corpus_sha256 else None
