"""The text of one answer that a parser takes apart."""

from __future__ import annotations

from collections.abc import Iterable

from router.text.detokenize import OutputText
from router.text.output.parts import OutputParser, Part, TextPart
from router.text.stop_strings import StopScanner


class ParsedText:
    """The text and the parts of one answer. Stop strings are only found in text, and not across a call or reasoning."""

    def __init__(
        self, text: OutputText, parser: OutputParser, scanner: StopScanner | None, *, min_tokens: int = 0
    ) -> None:
        """`text` has no stop strings of its own. No stop string ends the answer before `min_tokens`."""
        self._text = text
        self._parser = parser
        self._scanner = scanner
        self._min_tokens = min_tokens
        self.parts: tuple[Part, ...] = ()
        """Parts that the last call of `feed` or `flush` made certain."""
        self.is_stopped = False
        """Whether a stop string was found: nothing more belongs to the output."""

    @property
    def tokens(self) -> int:
        return self._text.tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return None if self._scanner is None else self._scanner.found

    def feed(self, token: int) -> str:
        """Returns the text as the model writes it."""
        new = self._text.feed(token)
        self.parts = self._scanned(self._parser.feed(new)) if new else ()
        return new

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns the rest of an output that no stop string has ended. `is_cut`: the model would have continued."""
        self.parts = ()
        if self.is_stopped:
            return ""
        last = self._text.flush()
        parts = self._scanned([*self._parser.feed(last), *self._parser.flush(is_cut=is_cut)])
        if not self.is_stopped:
            parts += self._held_back()
        self.parts = parts
        return last

    def _scanned(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        scanner = self._scanner
        if scanner is None or self.tokens <= self._min_tokens:
            return tuple(parts)
        certain: list[Part] = []
        for part in parts:
            if not isinstance(part, TextPart):
                certain += [*self._held_back(), part]
                continue
            if text := scanner.feed(part.text):
                certain.append(TextPart(text))
            if scanner.is_stopped:
                self.is_stopped = True
                break
        return tuple(certain)

    def _held_back(self) -> tuple[Part, ...]:
        rest = "" if self._scanner is None else self._scanner.flush()
        return (TextPart(rest),) if rest else ()
