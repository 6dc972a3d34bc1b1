"""Tokens of text that was tokenized before, by segment. A segment's key covers all text from the beginning to its end.

A key is a keyed hash, which also covers the owner of the text and the client's salt. So a segment is found again only
by texts of the same owner that begin with the same characters.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

KEY_BYTES: Final = 16
LEAST_KNOWN_CHARS = 4096
"""Least characters of a text whose tokens are kept: to tokenize a shorter one takes at most a millisecond."""

Segment = TypeVar("Segment")


class KnownSegments(Protocol):
    """The segments of texts that were tokenized before, for the process that prepares a request."""

    def find(self, keys: Sequence[bytes]) -> Sequence[array[int]]:
        """Returns the tokens of the leading keys, up to the first key that is not known."""

    def keep(self, key: bytes, tokens: array[int]) -> None: ...


class KnownText:
    """Tokenizes the texts of one owner, and reuses the tokens of known segments."""

    def __init__(self, root: bytes, segments: KnownSegments | None) -> None:
        """`root` is the key of the owner. `segments` None: no tokens are reused or kept."""
        self._root = root
        self._segments = segments
        self._own: dict[bytes, array[int]] = {}
        """Segments of this request: its further texts may begin like its first one."""

    def may_know(self, text: str) -> bool:
        return self._segments is not None and len(text) >= LEAST_KNOWN_CHARS

    def tokens(
        self,
        segments: Sequence[Segment],
        kind: bytes,
        content_of: Callable[[Segment], bytes],
        encode: Callable[[Segment], Sequence[int]],
    ) -> array[int]:
        """Returns the tokens of all segments.

        `kind` names the way in which segments are tokenized. `content_of` returns a segment as bytes, for its key. The
        last segment is always tokenized: it ends with the text, and a longer text need not be cut there.
        """
        keys = self._keys(segments[:-1], kind, content_of)
        tokens = array("I")
        known = self._found(keys)
        for each in known:
            tokens.extend(each)
        for key, segment in zip(keys[len(known) :], segments[len(known) :], strict=False):
            made = self._own[key] = array("I", encode(segment))
            tokens.extend(made)
            if self._segments is not None:
                self._segments.keep(key, made)
        tokens.extend(encode(segments[-1]))
        return tokens

    def _keys(self, segments: Sequence[Segment], kind: bytes, content_of: Callable[[Segment], bytes]) -> list[bytes]:
        """Returns the keys of the segments. Each key also covers the key before it."""
        keys = []
        key = _keyed(self._root, kind)
        for segment in segments:
            key = _keyed(key, content_of(segment))
            keys.append(key)
        return keys

    def _found(self, keys: Sequence[bytes]) -> list[array[int]]:
        found = []
        for key in keys:
            if key not in self._own:
                break
            found.append(self._own[key])
        left = keys[len(found) :]
        if left and self._segments is not None:
            others = self._segments.find(left)
            self._own.update(zip(left, others, strict=False))
            found += others
        return found


NOTHING_KNOWN: Final = KnownText(b"", None)


def owner_root(key: bytes, owner: bytes, salt: bytes) -> bytes:
    """Returns the root of the keys of one owner's text. Only who knows `key` can know it.

    `owner` is unique among the users of `key`. It is hashed with its length, so that no salt makes it another one.
    """
    return _keyed(key, len(owner).to_bytes(4, "little") + owner + salt)


def _keyed(key: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES, key=key, person=b"prepared text").digest()
