"""Text as it is generated: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from loopscope.errors import ConfigError


class TextStream:
    """Tokens in, text out, as soon as it is certain.

    A character may span tokens, and a stop string may: what could still become either is held back until the next token
    decides, or the end does. What stands after a stop string is dropped.
    """

    def __init__(self, backend: Backend, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ConfigError.of("stop", "", "an empty string would stop every text at once")
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._backend, self._stop = backend, stop
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._decoded = 0
        """Tokens whose text the stream has given out."""
        self._held = ""

    def feed(self, token: int) -> str:
        """What is certain after one more token."""
        self._ids.append(token)
        piece = self._stream.step(self._backend, token)
        if piece is None:
            return ""
        self._decoded = len(self._ids)
        return self._release(self._held + piece)

    def end(self) -> str:
        """What was held back; bytes that never became a character are shown as U+FFFD."""
        if self.stopped is not None:
            return ""
        rest = self._backend.decode(self._ids[self._decoded :], skip_special_tokens=False)
        text, self._held = self._release(self._held + rest) + self._held, ""
        return text

    def _release(self, text: str) -> str:
        found = [(place, each) for each in self._stop if (place := text.find(each)) >= 0]
        if found:
            place, self.stopped = min(found)
            self._held = ""
            return text[:place]
        keep = max((_overlap(text, each) for each in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of the text that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
