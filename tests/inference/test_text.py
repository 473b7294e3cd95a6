"""Streamed text: whole characters, stop strings across tokens, and nothing lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from loopscope.data.tokenizers import Tokenizer, bytes_tokenizer, train_bpe
from loopscope.errors import ConfigError
from loopscope.inference.decoding import TextStream

BYTES = bytes_tokenizer()
BPE = Tokenizer("bpe", train_bpe(["naïve café, the river 河 and the 😀 of the cafés "] * 20, 300).to_str())


def pieces(tokenizer, ids, stop=(), prompt=()):
    """What comes out after each token, and at the end."""
    stream, out = TextStream(tokenizer.backend, stop, prompt), []
    for token in ids:
        out.append(stream.feed(token))
        if stream.stopped is not None:
            break
    return [*out, stream.end()], stream.stopped


def streamed(tokenizer, ids, stop=(), prompt=()):
    return "".join(pieces(tokenizer, ids, stop, prompt)[0])


def test_a_character_of_several_tokens_comes_when_it_is_whole():
    assert pieces(BYTES, list("a😀é".encode()))[0] == ["a", "", "", "", "😀", "", "é", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end_and_only_then():
    assert pieces(BYTES, list(b"a\xf0\x9f"))[0] == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(BYTES, list(b"\xf0a"))[0] == ["", "\N{REPLACEMENT CHARACTER}a", ""]


@given(
    st.lists(st.sampled_from([*"aé€😀‍👩\N{REPLACEMENT CHARACTER} \0".encode(), 0xFF, 0xC3, 0xF0, 0x80]), max_size=14)
)
def test_the_pieces_of_any_bytes_make_up_their_text(ids):
    assert streamed(BYTES, ids) == BYTES.decode(ids)
    assert all("\N{REPLACEMENT CHARACTER}" not in piece[-1:] for piece in pieces(BYTES, ids)[0][:-1])


@given(st.lists(st.integers(0, BPE.vocab_size - 1), max_size=12))
def test_the_pieces_of_any_tokens_make_up_their_text(ids):
    assert streamed(BPE, ids) == BPE.decode(ids)


@given(st.text(max_size=20), st.text(max_size=4))
def test_text_is_streamed_as_it_was_written_and_behind_any_prompt(text, prompt):
    for tokenizer in (BYTES, BPE):
        assert streamed(tokenizer, tokenizer.encode(text), prompt=tokenizer.encode(prompt)) == text


def until(text, stop):
    """The text before the stop string that is complete first."""
    ends = [(text.index(each) + len(each), text.index(each)) for each in stop if each in text]
    return text[: min(ends)[1]] if ends else text


@given(st.text(alphabet="ab😀", max_size=16), st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_or_after_it_is_streamed_however_it_is_cut_into_tokens(text, stop):
    for tokenizer in (BYTES, BPE):
        assert streamed(tokenizer, tokenizer.encode(text), stop) == until(text, stop)


def test_a_stop_string_over_several_tokens_is_held_back_until_it_is_decided():
    out, stopped = pieces(BYTES, list(b"one END."), stop=["END."])
    assert (out, stopped) == (["o", "n", "e", " ", "", "", "", "", ""], "END.")
    out, stopped = pieces(BYTES, list(b"EN route"), stop=["END."])
    assert (out[:3], "".join(out), stopped) == (["", "", "EN "], "EN route", None)
    assert streamed(BYTES, list(b"EN"), stop=["END."]) == "EN"  # the end decides, too


def test_a_stop_string_of_one_character_over_tokens_stops():
    out, stopped = pieces(BYTES, list("a😀b".encode()), stop=["😀"])
    assert ("".join(out), stopped) == ("a", "😀")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ConfigError, match="--stop"):
        TextStream(BYTES.backend, [".", ""])


def byte_fallback() -> Backend:
    """As Llama's: spaces are ▁, the first one of a text is dropped, rare characters are spelled in bytes."""
    vocabulary = {"<unk>": 0, "▁the": 1, "▁river": 2, "s": 3, "<0xE2>": 4, "<0x82>": 5, "<0xAC>": 6}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def test_the_space_before_the_first_word_stays_where_a_prompt_comes_before_it():
    tokenizer = Tokenizer("file", byte_fallback().to_str())
    assert streamed(tokenizer, [1, 2]) == "the river"
    assert streamed(tokenizer, [2, 3], prompt=[1]) == " rivers"


def test_a_decoder_that_takes_back_what_it_gave_never_stops_the_stream():
    """Of a run of bytes that ends badly it shows nothing, though it had shown the good ones."""
    tokenizer = Tokenizer("file", byte_fallback().to_str())
    euro = [4, 5, 6]
    assert streamed(tokenizer, [1, *euro, 2]) == "the€ river"
    assert streamed(tokenizer, [*euro, 5, 2]).startswith("€")
    assert streamed(tokenizer, [*euro, 5, 2]).endswith(" river")


def test_a_token_that_the_tokenizer_does_not_know_has_no_text():
    assert streamed(BYTES, [65, 300, 66]) == "AB"
