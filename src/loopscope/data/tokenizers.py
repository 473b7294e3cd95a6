"""Tokenizers: text to token ids and back. What is trained is trained on the training split only.

Every one of them is a `tokenizer.json` of the `tokenizers` library; bytes and the paper's words included.

Shape legend: N tokens, C characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from loopscope.data.corpora import joined
from loopscope.data.files import first_line
from loopscope.errors import ConfigError, DataError, RunError
from loopscope.files import read_text, write_atomically
from loopscope.results.record import Count, Record, load_record, write_record
from loopscope.words import check_tokenizer

NUM_BYTES = 256
PAD, UNKNOWN = "<pad>", "<unk>"
WORD_PATTERN = r"\s+|[A-Za-z0-9_]+|[^\w\s]"
"""The paper's pieces (arXiv 2606.24898): white space, ASCII words, single other signs."""
_PYTHON_SPACE = r"\s\x1c-\x1f"
"""What Python's regular expressions call white space, in those of the `tokenizers` library."""
_WORD_REGEX = rf"[{_PYTHON_SPACE}]+|[A-Za-z0-9_]+|[^\w{_PYTHON_SPACE}]"
MIN_FREQUENCY = 2
"""Rarer words are unknown (the paper)."""
MOST_TOKENIZER_BYTES = 256 << 20
"""Largest tokenizer.json that is read; those of 260,000 tokens have 35 MB."""
MOST_IDS = 1 << 24
"""Ids of a tokenizer that is read; the largest in use have 260,000, and tables as long as the largest id are made."""
TOKENIZER_FILE, MANIFEST_FILE = "tokenizer.json", "tokenizer-manifest.json"
SETTINGS_FILE = "tokenizer_config.json"
COMPANIONS = (SETTINGS_FILE, "special_tokens_map.json", "chat_template.jinja")
"""Files that other people's libraries keep beside a tokenizer.json: special tokens, chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerManifest(Record):
    """What lies beside a tokenizer.json that we have saved."""

    kind: str
    vocab_size: Count
    sha256: str
    """Of the tokenizer.json."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and the bytes of text behind each of its tokens."""

    kind: str
    """bytes, bpe, word, or file for somebody else's tokenizer.json."""
    definition: str
    """The text of its tokenizer.json."""
    companions: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The text of files beside it, by name: they travel with it, and loopscope itself goes without them."""

    @cached_property
    def backend(self) -> Backend:
        """The tokenizer of the `tokenizers` library; it neither truncates nor pads."""
        backend = Backend.from_str(self.definition)
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of its tokenizer.json."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of the text alone; nothing is added at its ends."""
        return self._encodings([text])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def encode_counted(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text its ids_N and, for each token, the UTF-8 bytes it stands for; they sum to the text's bytes."""
        return [self._counted(text, encoding) for text, encoding in zip(texts, self._encodings(texts), strict=True)]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Its tokenizer_config.json; empty where there is none."""
        return json.loads(self.companions.get(SETTINGS_FILE, "{}"))

    def special_id(self, name: str) -> int | None:
        """The id of a special token (eos_token, pad_token …) by its settings; None where they name none."""
        token = self.settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        return self.backend.token_to_id(content) if isinstance(content, str) else None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The token that ends a text, where its settings name one."""
        end = self.special_id("eos_token")
        return () if end is None else (end,)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, what travels with it and, after them, the manifest with its checksum."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / TOKENIZER_FILE, self.definition)
        for name, text in self.companions.items():
            write_atomically(folder / name, text)
        manifest = TokenizerManifest(kind=self.kind, vocab_size=self.vocab_size, sha256=self.fingerprint)
        write_record(folder / MANIFEST_FILE, manifest)

    def _encodings(self, texts: Sequence[str]) -> list[Encoding]:
        try:
            return self.backend.encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"the tokenizer ({self.kind}) cannot encode this text: {first_line(error)}") from None

    def _counted(self, text: str, encoding: Encoding) -> tuple[np.ndarray, np.ndarray]:
        ids_N = np.array(encoding.ids, dtype=np.int64)
        if self._bytes_V is not None:
            bytes_N = self._bytes_V[ids_N]
            # A prefix space, a normaliser or an odd special token breaks the sum; character offsets then decide.
            if bytes_N.sum() == len(text.encode()):
                return ids_N, bytes_N
        return ids_N, _bytes_by_offsets(text, encoding)

    @cached_property
    def _bytes_V(self) -> np.ndarray | None:
        """Bytes of each token of a byte-level tokenizer, whose tokens are spelled with one character a byte."""
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            return None
        bytes_V = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self.backend.get_vocab(with_added_tokens=True).items():
            bytes_V[index] = len(token)
        return bytes_V


def fit_tokenizer(name: str, documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """The tokenizer a configuration names, trained on these documents where it is trained at all.

    It has at most `vocab_size` tokens, the number the model embeds.
    """
    if name == "bytes":
        tokenizer = bytes_tokenizer()
    elif name == "bpe":
        tokenizer = Tokenizer("bpe", train_bpe(joined(documents), vocab_size).to_str())
    elif name == "word":
        tokenizer = train_word(joined(documents), vocab_size)
    else:
        path = Path(name).expanduser()
        if not path.is_dir():
            check_tokenizer(name)
            tokenizer = read_tokenizer(path)
        elif (path / MANIFEST_FILE).exists():
            tokenizer = load_tokenizer(path)
        else:
            tokenizer = read_tokenizer(path / TOKENIZER_FILE)
    check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Every token of the tokenizer must have a row in the model's embedding."""
    if tokenizer.vocab_size > vocab_size:
        why = f"is smaller than the {tokenizer.vocab_size} tokens of the tokenizer ({tokenizer.kind})"
        raise ConfigError.of("vocab_size", vocab_size, why)


def bytes_tokenizer() -> Tokenizer:
    """The 256 bytes of UTF-8; a token's id is the byte."""
    # Byte-level tokenizers spell printable characters as themselves, and the other bytes from U+0100 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    vocabulary = {chr(byte if byte in printable else next(others)): byte for byte in range(NUM_BYTES)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer("bytes", backend.to_str())


def train_bpe(documents: Iterable[str], vocab_size: int) -> Backend:
    """Byte-level BPE: the 256 bytes and the most frequent merges; every text round-trips."""
    if vocab_size < NUM_BYTES:
        raise ConfigError.of("vocab_size", vocab_size, f"byte-level BPE needs at least the {NUM_BYTES} bytes")
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def train_word(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """The paper's words: <pad>, <unk>, then pieces seen at least twice, ordered by (−count, piece).

    Runs of characters the pattern does not match (letters beyond ASCII) are pieces too, where `re.findall` would drop
    them from the text: what is not predicted must not count as read.
    """
    if vocab_size < 3:
        raise ConfigError.of("vocab_size", vocab_size, f"words need {PAD}, {UNKNOWN} and at least one word")
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=MIN_FREQUENCY, special_tokens=[PAD, UNKNOWN], show_progress=False
    )
    trained = _word_backend({})
    trained.train_from_iterator(documents, trainer)
    # Built anew from the vocabulary: the trainer makes "<unk>" in a text the unknown token itself, the paper does not.
    return Tokenizer("word", _word_backend(trained.get_vocab()).to_str())


def read_tokenizer(path: Path) -> Tokenizer:
    """Somebody's tokenizer.json, with what lies beside it."""
    companions = _companions(path.parent)
    try:
        tokenizer = Tokenizer("file", read_text(path, MOST_TOKENIZER_BYTES), companions)
        _ = tokenizer.backend, tokenizer.vocab_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the library raises nothing more specific
        raise DataError(f"{path} is not a tokenizer.json: {first_line(error)}") from None
    if tokenizer.vocab_size > MOST_IDS:
        raise DataError(f"{path} has the token id {tokenizer.vocab_size - 1:,}; ids are below {MOST_IDS:,}")
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` wrote, unchanged since."""
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE)
    try:
        manifest = load_record(folder / MANIFEST_FILE, TokenizerManifest)
    except RunError as error:
        raise DataError(str(error)) from None
    if tokenizer.fingerprint != manifest.sha256:
        raise DataError(
            f"{folder / TOKENIZER_FILE} has changed since it was saved: its sha256 is not {manifest.sha256}"
        )
    return replace(tokenizer, kind=manifest.kind)


def _companions(folder: Path) -> dict[str, str]:
    """The text of every companion file of a folder; those that are JSON hold an object."""
    found = {}
    for path in (folder / name for name in COMPANIONS):
        if not path.exists():
            continue
        try:
            found[path.name] = read_text(path, MOST_TOKENIZER_BYTES)
            if path.suffix == ".json" and not isinstance(json.loads(found[path.name]), dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError, RecursionError) as error:
            why = error.strerror if isinstance(error, OSError) else first_line(error)
            raise DataError(f"{path} cannot be read: {why}") from None
    return found


def _word_backend(vocabulary: dict[str, int]) -> Backend:
    backend = Backend(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD_REGEX), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def _bytes_by_offsets(text: str, encoding: Encoding) -> np.ndarray:
    """Bytes of text up to the end of each token, less those up to the token before; the last one takes what is left."""
    code_points_C = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths_C = 1 + sum((code_points_C >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    ends_C = np.concatenate([[0], np.cumsum(widths_C)])
    ends_N = np.maximum.accumulate(ends_C[np.array([end for _, end in encoding.offsets], dtype=np.int64)])
    ends_N[-1:] = ends_C[-1]
    return np.diff(ends_N, prepend=0)
