"""Cuts a text into segments that can be tokenized one by one, so that known segments are not tokenized again.

The tokens of the segments, one after the other, are exactly those of the whole text. A tokenizer first takes the added
tokens out of a text. The text between two of them is normalized, split and encoded by itself. So a text may be cut
before an added token, if the tokenizer has no rule that looks beyond the cut. If that is not known of a tokenizer, its
texts are never cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

Piece = tuple[str, bool]
"""A text, and whether it is a special token. Pieces are tokenized one by one."""

LEAST_CHARS = 1024
"""Least characters of a segment: each one is hashed, stored and looked up separately."""
MOST_EVEN = 256
"""The first 256 segments of a text may be as short as `LEAST_CHARS`. After these, a segment has at least 1/256 of the
characters before it. So even the longest texts have only some hundreds of segments more."""
PIECEWISE: Final = frozenset(
    {
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend"),
        *("Replace", "Strip", "StripAccents", "BertPreTokenizer", "CharDelimiterSplit", "Digits", "Metaspace"),
        *("Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit", "Sequence"),
    }
)
"""Normalizers and pre-tokenizers that see only the text between two added tokens. Metaspace treats the very first text
differently. That is no problem: a segment begins with an added token, so none of its texts is the first."""


class Cutter:
    """Finds where the texts of one tokenizer can be cut."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        raw = [each for each in added if not each.normalized and each.content]
        self._tokens: AddedTexts | None = None
        """Finds the added tokens as the tokenizer does. None: no text is cut."""
        self._may_begin = frozenset(each.content for each in raw if _may_begin(each))
        if self._may_begin and _is_piecewise(tokenizer) and not any(each.single_word for each in raw):
            self._tokens = AddedTexts([each.content for each in raw])

    @property
    def may_begin(self) -> frozenset[str]:
        """Added tokens that a segment may begin with."""
        return self._may_begin

    @property
    def cuts(self) -> bool:
        return self._tokens is not None

    def segments(self, text: str) -> list[str]:
        """Returns the segments. Each but the first begins with an added token.

        A cut depends only on the text before it: texts with a common prefix are cut alike there.
        """
        at, found = 0, list[str]()
        for cut in self._cuts(text):
            if cut - at >= _least_chars(at):
                found.append(text[at:cut])
                at = cut
        return [*found, text[at:]]

    def _cuts(self, text: str) -> Iterator[int]:
        if self._tokens is not None:
            for at, end in self._tokens.places(text):
                if text[at:end] in self._may_begin:
                    yield at


class _Node(dict[str, "_Node"]):
    """A node of a trie: one prefix of the texts. Its items are the nodes of longer prefixes by the next character."""

    __slots__ = ("is_text",)

    def __init__(self) -> None:
        super().__init__()
        self.is_text = False


class AddedTexts:
    """Finds added tokens in a text, leftmost and longest, with a trie: some models have thousands of them.

    At each position where one may begin, it takes at most as many steps as the longest has characters.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._root = _Node()
        for text in texts:
            node = self._root
            for char in text:
                node = node.setdefault(char, _Node())
            node.is_text = True
        self._first = re.compile(f"[{''.join(map(re.escape, self._root))}]")

    def places(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the start and the end of each one that is found."""
        at = 0
        while (begin := self._first.search(text, at)) is not None:
            first = at = begin.start()
            end = None
            node = self._root.get(text[at])
            while node is not None:
                at += 1
                if node.is_text:
                    end = at
                node = node.get(text[at : at + 1])
            at = first + 1 if end is None else end
            if end is not None:
                yield first, end


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
    """Returns the least length of a segment that begins at `at`. It depends on nothing after that."""
    return max(LEAST_CHARS, at // MOST_EVEN)


def _may_begin(token: AddedToken) -> bool:
    """Returns whether a segment may begin with the token: no token takes text from the other side of the cut."""
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
