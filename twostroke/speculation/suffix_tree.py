"""A suffix tree over whole answers: it finds what followed the last tokens of an answer in earlier answers.

After SuffixDecoding (Oliaro et al., NeurIPS 2025), with counts in each node, and cut at a depth. Suffixes that nobody
shares end in a leaf that points into its text (path compression), so that a tree has few more nodes than tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

DEPTH = 24
"""Most tokens of a suffix that the tree distinguishes."""
LEAST_SHARE = 0.5
"""A draft ends where the most frequent continuation has less than this share of all of them."""
MOST_LOOKED_AT = 64
"""The most frequent of this many continuations is taken, those seen first: some text has thousands."""


class _Node:
    """The suffixes that begin with the tokens on the way to it."""

    __slots__ = ("children", "count", "rest", "text")

    def __init__(self, text: Sequence[int], rest: int) -> None:
        self.count = 1
        self.children: dict[int, _Node] | None = None
        """None in a leaf: its suffixes go on as `text` does from `rest` on, as far as they are told apart."""
        self.text = text
        self.rest = rest


class SuffixTree:
    def __init__(self) -> None:
        self._root = _Node((), 0)
        self._root.children = {}

    def add(self, text: Sequence[int], start: int) -> None:
        """Add the suffix of a text that begins at `start`; the text is not changed afterwards."""
        node = self._root
        for depth in range(1, min(DEPTH, len(text) - start) + 1):
            place = start + depth
            if node.children is None:
                node.children = {}
                if node.rest < len(node.text):
                    node.children[node.text[node.rest]] = _Node(node.text, node.rest + 1)
            child = node.children.get(text[place - 1])
            if child is None:
                node.children[text[place - 1]] = _Node(text, place)
                return
            child.count += 1
            node = child

    def remove(self, text: Sequence[int], start: int) -> None:
        """Remove a suffix that was added."""
        node = self._root
        for token in text[start : start + DEPTH]:
            if node.children is None:
                return
            child = node.children[token]
            child.count -= 1
            if not child.count:
                del node.children[token]
                return
            node = child

    def continued(self, last: Sequence[int], most: int) -> list[int]:
        """Return up to `most` tokens that mostly followed the tokens `last`, or none if `last` was never seen."""
        node, tokens = self._find(last), list[int]()
        while node is not None and len(tokens) < most:
            if node.children is None:
                return [*tokens, *node.text[node.rest : node.rest + most - len(tokens)]]
            first = itertools.islice(node.children.items(), MOST_LOOKED_AT)
            token, child = max(first, key=lambda item: item[1].count, default=(0, None))
            if child is None or child.count < LEAST_SHARE * node.count:
                break
            tokens.append(token)
            node = child
        return tokens

    def _find(self, tokens: Sequence[int]) -> _Node | None:
        node: _Node | None = self._root
        for rank, token in enumerate(tokens):
            assert node is not None
            if node.children is None:
                left = len(tokens) - rank
                if list(node.text[node.rest : node.rest + left]) != list(tokens[rank:]):
                    return None
                return _Node(node.text, node.rest + left)
            node = node.children.get(token)
            if node is None:
                return None
        return node
