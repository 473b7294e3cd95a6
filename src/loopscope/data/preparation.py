"""From a configuration to tokens: corpus, tokenizer, packed splits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopscope.config import Config, DataConfig
from loopscope.data.corpora import Corpus, Split, open_corpus
from loopscope.data.packing import SplitTokens, pack
from loopscope.data.task import TaskText
from loopscope.data.tokenizers import MANIFEST_FILE, Tokenizer, check_vocabulary, fit_tokenizer, load_tokenizer
from loopscope.errors import DataError
from loopscope.results.run import DataRecord, SplitSizes

Say = Callable[[str], None]
REPORT_SECONDS = 5.0
"""Between two lines of progress while packing: nobody should wait longer for a sign of life."""


@dataclass(frozen=True)
class Prepared:
    """A corpus in the tokens of its run."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: SplitTokens
    valid: SplitTokens

    def record(self) -> DataRecord:
        """What a run's manifest keeps of its data."""
        endless = self.corpus.task is not None
        return DataRecord(
            corpus=self.corpus.name,
            corpus_sha256=self.corpus.sha256,
            tokenizer=self.tokenizer.kind,
            tokenizer_sha256=self.tokenizer.fingerprint,
            tokens=SplitSizes(train=None if endless else len(self.train), valid=len(self.valid)),
            bytes=SplitSizes(train=None if endless else self.train.num_bytes, valid=self.valid.num_bytes),
        )


def prepare(config: Config, tokenizer_folder: Path, say: Say) -> Prepared:
    """Open the corpus, load the run's tokenizer or fit it on the training split, and pack both splits."""
    corpus = open_corpus(config.data)
    tokenizer = _tokenizer(config, corpus, tokenizer_folder, say)
    train, valid = (pack_split(corpus, split, tokenizer, say) for split in ("train", "valid"))
    return Prepared(corpus, tokenizer, train, valid)


def pack_split(corpus: Corpus, split: Split, tokenizer: Tokenizer, say: Say) -> SplitTokens:
    """The packed tokens of a split, telling about progress where it takes long; a task is never packed."""
    if corpus.task is not None:
        return TaskText(corpus.task, split, symbol_ids(corpus, tokenizer))
    told = time.monotonic()

    def on_progress(documents: int, tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= REPORT_SECONDS:
            told = time.monotonic()
            say(f"packing {split}: {documents:,} documents, {tokens:,} tokens")

    return pack(corpus, split, tokenizer, on_progress=on_progress)


def symbol_ids(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, int]:
    """The token of every symbol of a task, each its own."""
    assert corpus.task is not None
    ids = {symbol: tokenizer.encode(symbol) for symbol in corpus.task.symbols}
    if any(len(tokens) != 1 for tokens in ids.values()) or len({tokens[0] for tokens in ids.values()}) < len(ids):
        raise DataError(
            f"{corpus.name} needs a token of its own for each of its symbols, which the tokenizer ({tokenizer.kind}) "
            "does not have; bytes and byte-level ones do"
        )
    return {symbol: tokens[0] for symbol, tokens in ids.items()}


def evaluation_corpus(sources: tuple[str, ...], text_field: str) -> Corpus:
    """Other text as a corpus whose validation split is all of it; of a task its own, which no training reads."""
    return open_corpus(DataConfig(data=sources, valid=sources, text_field=text_field))


def _tokenizer(config: Config, corpus: Corpus, folder: Path, say: Say) -> Tokenizer:
    vocab_size = config.model.vocab_size
    if (folder / MANIFEST_FILE).exists():
        tokenizer = load_tokenizer(folder)
        check_vocabulary(tokenizer, vocab_size)
        return tokenizer
    name = config.data.tokenizer
    if corpus.task is not None and name in ("bpe", "word"):
        say(f"{corpus.name} is read in bytes: it has few symbols, and each is a token")
        name = "bytes"
    if name in ("bpe", "word"):
        say(f"training the {name} tokenizer on the training split")
    tokenizer = fit_tokenizer(name, corpus.documents("train"), vocab_size)
    tokenizer.save(folder)
    return tokenizer
