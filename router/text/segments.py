"""Cuts a text where its parts have the tokens that they have within the whole, so that known parts are not tokenized
again.

A tokenizer first takes the added tokens out of a text. The text between two of them is normalized, split and encoded
by itself. So a text may be cut before an added token, if the tokenizer has no rule that looks beyond the cut. One for
which that is not known is never cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

Piece = tuple[str, bool]
"""A text that is tokenized by itself, and whether it is a special token."""

LEAST_CHARS = 1024
"""Characters of a segment at least: each is hashed, kept and asked for by itself."""
MOST_EVEN = 256
"""Segments of the least length at the beginning of a text. Behind them the least length grows with the place, so that
the longest texts have some hundreds more."""
PIECEWISE: Final = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Replace", "Strip", "StripAccents", "BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace"),
        *("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "Sequence"),
    }
)
"""Normalizers and pre-tokenizers that see one text between two added tokens at a time. Metaspace may look at whether a
text stands at the very beginning: a segment begins with its added token, so that its texts do not, as in the whole."""


class Cutter:
    """Finds where the texts of one tokenizer can be cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        raw = [each for each in added if not each.normalized and each.content]
        self._pattern: re.Pattern[str] | None = None
        """Matches the added tokens as the tokenizer does, leftmost and longest. None: no text is cut."""
        self._may_begin = frozenset(each.content for each in raw if _may_begin(each))
        if self._may_begin and _is_piecewise(tokenizer) and not any(each.single_word for each in raw):
            texts = sorted((each.content for each in raw), key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, texts)))

    @property
    def cuts(self) -> bool:
        return self._pattern is not None

    def segments(self, text: str) -> list[str]:
        """Returns the text in parts, each but the first beginning with an added token. Cuts depend on nothing behind
        them: texts that begin alike have the same ones there.
        """
        at, found = 0, list[str]()
        for cut in self._places(text):
            if cut - at >= _least_chars(at):
                found.append(text[at:cut])
                at = cut
        return [*found, text[at:]]

    def _places(self, text: str) -> Iterator[int]:
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                if match[0] in self._may_begin:
                    yield match.start()


def pieces_in_segments(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Returns the pieces in segments, each but the first beginning with a special token."""
    found: list[list[Piece]] = [[]]
    at = begun_at = 0
    for text, is_special in pieces:
        if is_special and at - begun_at >= _least_chars(begun_at):
            found.append([])
            begun_at = at
        found[-1].append((text, is_special))
        at += len(text)
    return found


def _least_chars(at: int) -> int:
    """Returns the least length of a segment that begins at a place. It depends on nothing behind that."""
    return max(LEAST_CHARS, at // MOST_EVEN)


def _may_begin(token: AddedToken) -> bool:
    """Tells whether a segment may begin with the token: neither it nor one before it takes text across the cut."""
    return not (token.lstrip or token.rstrip or token.single_word or token.content != token.content.strip())


def _is_piecewise(tokenizer: Tokenizer) -> bool:
    model = tokenizer.model
    is_random = isinstance(model, BPE) and bool(model.dropout)
    return not is_random and _types(tokenizer.normalizer) | _types(tokenizer.pre_tokenizer) <= PIECEWISE


def _types(component: Any) -> set[str]:
    """Returns the names of a component and of those in it."""
    if component is None:
        return set()
    waiting, found = [json.loads(component.__getstate__())], set[str]()
    while waiting:
        state = waiting.pop()
        found.add(state["type"])
        waiting += [*state.get("normalizers", ()), *state.get("pretokenizers", ())]
    return found
