"""Text as it is generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

from loopscope.errors import ConfigError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder shows for bytes that are no character, or none yet."""
PROMPT_TOKENS = 8
"""Tokens of the prompt that new ones are decoded behind: some decoders drop the space that a text begins with."""


class TextStream:
    """Tokens in, text out, as soon as it is certain.

    A character may span tokens, and a stop string may: what could still become either is held back until the next token
    decides, or the end does. What stands after a stop string is dropped. New tokens are decoded behind those before
    them, and what these gave already is taken off: a decoder may see a token differently where nothing comes before.
    """

    def __init__(self, backend: Backend, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        if "" in stop:
            raise ConfigError.of("stop", "", "an empty string would stop every text at once")
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._backend, self._stop = backend, stop
        self._ids = list(prompt[-PROMPT_TOKENS:])
        self._window = 0
        """Where decoding begins: at the tokens that gave text last."""
        self._given = len(self._ids)
        """Tokens whose text has been given out."""
        self._held = ""

    def feed(self, token: int) -> str:
        """What is certain after one more token."""
        self._ids.append(token)
        new = self._new_text()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._window, self._given = self._given, len(self._ids)
        return self._release(self._held + new)

    def end(self) -> str:
        """What was held back; bytes that never became a character are shown as U+FFFD."""
        if self.stopped is not None:
            return ""
        text, self._held = self._release(self._held + self._new_text()) + self._held, ""
        return text

    def _new_text(self) -> str:
        before, now = (
            self._backend.decode(self._ids[self._window : end], skip_special_tokens=False)
            for end in (self._given, len(self._ids))
        )
        return now[len(before) :]

    def _release(self, text: str) -> str:
        # The one that is complete first, so that it does not matter how the text is cut into tokens.
        found = [(place + len(each), place, each) for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            _, place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
