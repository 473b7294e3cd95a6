"""Tokenizers: text to token ids and back, trained on the training split only."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from loopscope.errors import ConfigError

NUM_BYTES = 256


def train_bpe(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE: the 256 bytes and the most frequent merges; every text round-trips."""
    if vocab_size < NUM_BYTES:
        raise ConfigError.of("vocab_size", vocab_size, f"byte-level BPE needs at least the {NUM_BYTES} bytes")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer
