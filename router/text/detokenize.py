"""Turns token ids into text as they come: whole characters only, and stop strings applied wherever tokens split
them."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from router.text.stop_strings import StopScanner

REPLACEMENT = "\ufffd"
UNFINISHED_CHARS = 3
"""Most bytes of an incomplete UTF-8 character. Each of them may be decoded as a replacement character."""
RECENT_TOKENS = 8
"""Tokens that are decoded again with each new one. When there are as many, the first ones are dropped."""
KEPT_TOKENS = 4
"""Tokens that are kept when the first ones are dropped: enough context for any joining rule of a tokenizer."""
KEPT_BROKEN_TOKENS = 16
"""Tokens that are kept if the text ends in incomplete characters: more than these can have."""
MOST_TOKENS = 64
"""Most tokens before the first ones are dropped, even if all characters are incomplete. Long invalid text would take
quadratic time otherwise."""


class Decoder(Protocol):
    """Decodes one output."""

    def feed(self, token: int) -> str:
        """Returns the text that is certain now; never part of a character."""

    def flush(self) -> str:
        """Returns what was held back, at the end of the output."""


class ByteDecoder:
    """Decodes tokens that each stand for their own bytes."""

    def __init__(
        self, token_bytes: Callable[[int], bytes], silent: frozenset[int] = frozenset(), context: Sequence[int] = ()
    ) -> None:
        """`silent` tokens are not text. `context`: the last tokens of the prompt, which may end within a character."""
        self._token_bytes = token_bytes
        self._silent = silent
        self._held = b""
        """Bytes of a character that is not complete."""
        for token in context:
            self.feed(token)

    def feed(self, token: int) -> str:
        if token in self._silent:
            return ""
        data = self._token_bytes(token)
        if self._held:
            data = self._held + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._held = data[used:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class RecentTokensDecoder:
    """Decodes the last few tokens, for any tokenizer, and sends what has become certain of their text."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        silent: frozenset[int],
        context: Sequence[int],
        *,
        is_context_whole: bool = False,
    ) -> None:
        """`is_context_whole`: the context ends with a character that no token completes, even if it shows as one."""
        self._decode = decode
        self._silent = silent
        self._recent = list(context)
        self._text = decode(self._recent) if self._recent else ""
        self._sent = self._text if is_context_whole else self._text[: len(self._text) - _unfinished(self._text)]
        """The prefix of `_text` that was sent, or belongs to the prompt."""

    def feed(self, token: int) -> str:
        if token in self._silent:
            return ""
        self._recent.append(token)
        self._text = self._decode(self._recent)
        is_broken = self._text.endswith(REPLACEMENT) and not self._text.startswith(self._sent)
        if is_broken and len(self._recent) < MOST_TOKENS:
            return ""  # some tokenizers show a run of bytes as broken until its last character is complete
        certain = self._text[: len(self._text) - _unfinished(self._text)]
        new = certain[len(self._sent) :]
        if len(certain) >= len(self._sent):
            self._sent = certain
        self._drop_first_tokens()
        return new

    def flush(self) -> str:
        rest = self._text[len(self._sent) :]
        self._sent = self._text
        return rest

    def _drop_first_tokens(self) -> None:
        if len(self._recent) < RECENT_TOKENS:
            return
        kept = self._recent[-KEPT_TOKENS:]
        text = self._decode(kept)
        is_clean = len(self._sent) == len(self._text) and REPLACEMENT not in text
        if not is_clean:
            if len(self._recent) < MOST_TOKENS:
                return
            kept = self._recent[-KEPT_BROKEN_TOKENS:]
            text = self._decode(kept)
        held = len(self._text) - len(self._sent)
        self._recent, self._text, self._sent = kept, text, text[: len(text) - held]


def is_whole(data: bytes) -> bool:
    """Returns whether text ends with a whole character, or with bytes of which no further one makes a character."""
    return codecs.utf_8_decode(data, "replace")[1] == len(data)


def _unfinished(text: str) -> int:
    """Counts characters at the end of `text` that may still become another one."""
    trailing = len(text) - len(text.rstrip(REPLACEMENT))
    return min(trailing, UNFINISHED_CHARS)


class OutputText:
    """The text of one output: tokens in, text out, stop strings applied."""

    def __init__(
        self, decoder: Decoder, scanner: StopScanner | None, *, mute: frozenset[int] = frozenset(), min_tokens: int = 0
    ) -> None:
        """`scanner` is None where there are no stop strings. `mute` are tokens that end the output and are not part of
        its text. Nothing ends it before `min_tokens`."""
        self._decoder = decoder
        self._scanner = scanner
        self._mute = mute
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens so far."""
        self.is_stopped = False
        """Whether a stop string was found: nothing more belongs to the output."""

    parts = None
    """No parser takes the text apart."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return None if self._scanner is None else self._scanner.found

    def feed(self, token: int) -> str:
        self.tokens += 1
        if token in self._mute and self.tokens >= self._min_tokens:
            return ""
        new = self._decoder.feed(token)
        return new if self._scanner is None or self.tokens <= self._min_tokens else self._scan(self._scanner, new)

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns the rest of an output that no stop string has ended, whether or not the model would have
        continued.
        """
        if self.is_stopped:
            return ""
        last = self._decoder.flush()
        if self._scanner is None:
            return last
        last = self._scan(self._scanner, last)
        return last if self.is_stopped else last + self._scanner.flush()

    def _scan(self, scanner: StopScanner, new: str) -> str:
        certain = scanner.feed(new)
        self.is_stopped = scanner.is_stopped
        return certain
