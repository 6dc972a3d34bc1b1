"""A suffix tree over whole answers: it finds what followed the last tokens of an answer in earlier answers.

After SuffixDecoding (Oliaro et al., NeurIPS 2025), with counts in each node, and cut at a depth. A node stands for all
tokens up to the next place where suffixes differ or end. It points into one text that has these tokens (path
compression). So a suffix adds two nodes at most, however many texts have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

DEPTH = 24
"""Most tokens of a suffix that the tree distinguishes."""
LEAST_SHARE = 0.5
"""A draft ends where the most frequent continuation has less than this share of all of them."""
MOST_NEW_NODES = 2
"""Most nodes that one suffix adds: its own leaf, and one where it branches off from others."""
MOST_LOOKED_AT = 64
"""Most continuations that are compared, those seen first, to take the most frequent one. Some text has thousands."""


class _Node:
    """All suffixes that begin with the tokens on the path to this node and with its label, which is a run of tokens in
    one text."""

    __slots__ = ("begin", "children", "count", "length", "text")

    def __init__(self, text: Sequence[int], begin: int, length: int) -> None:
        self.text = text
        self.begin = begin
        self.length = length
        """Number of tokens in its label."""
        self.count = 1
        self.children: dict[int, _Node] | None = None
        """Nodes by the first token of their label. None in a leaf: its suffixes continue as its text does."""

    def matched(self, tokens: Sequence[int], start: int, end: int) -> int:
        """Returns how many of the tokens from `start` on are those of its label."""
        most = min(self.length, end - start)
        for offset in range(1, most):
            if self.text[self.begin + offset] != tokens[start + offset]:
                return offset
        return most  # the first token of the label led to this node

    def split(self, length: int) -> _Node:
        """Splits the node: returns a new parent, with the first tokens of the label, of which it is the only child."""
        above = _Node(self.text, self.begin, length)
        above.count = self.count
        self.begin += length
        self.length -= length
        above.children = {self.text[self.begin]: self}
        return above


class SuffixTree:
    def __init__(self) -> None:
        self._root = _Node((), 0, 0)
        self._root.children = {}
        self.nodes = 1

    def add(self, text: Sequence[int], start: int) -> None:
        """Adds the suffix of a text that begins at `start`. The text must not change afterwards.

        Nodes on the suffix's path point into this text from now on, so a text that was removed is not kept in memory
        for others.
        """
        node, place, end = self._root, start, min(start + DEPTH, len(text))
        while place < end:
            if node.children is None:
                node.children = {}
            token = text[place]
            child = node.children.get(token)
            if child is None:
                node.children[token] = _Node(text, place, end - place)
                self.nodes += 1
                return
            length = child.matched(text, place, end)
            if length < child.length:
                child = node.children[token] = child.split(length)
                self.nodes += 1
            child.count += 1
            child.text, child.begin = text, place
            node, place = child, place + length

    def remove(self, text: Sequence[int], start: int) -> None:
        """Removes a suffix that was added."""
        above, node, place, end = self._root, self._root, start, min(start + DEPTH, len(text))
        while place < end and node.children is not None:
            child = node.children[text[place]]
            child.count -= 1
            if not child.count:
                del node.children[text[place]]
                self.nodes -= _chain_length(child)
                self._join(above, node)
                return
            above, node, place = node, child, place + child.length

    def continued(self, last: Sequence[int], most: int) -> list[int]:
        """Returns up to `most` tokens that mostly followed the tokens `last`, or none if `last` was never seen."""
        node, used = self._find(last)
        tokens = list[int]()
        while node is not None and len(tokens) < most:
            left = most - len(tokens)
            begin = node.begin + used
            if node.children is None:
                return [*tokens, *node.text[begin : begin + left]]
            tokens += node.text[begin : min(begin + left, node.begin + node.length)]
            if len(tokens) == most:
                break
            first = itertools.islice(node.children.values(), MOST_LOOKED_AT)
            child = max(first, key=lambda each: each.count, default=None)
            if child is None or child.count < LEAST_SHARE * node.count:
                break
            node, used = child, 0
        return tokens

    def _find(self, tokens: Sequence[int]) -> tuple[_Node | None, int]:
        """Returns the node in whose label the tokens end, and how many tokens of the label they cover."""
        node, used, place = self._root, 0, 0
        while place < len(tokens):
            if node.children is None:
                rest = node.text[node.begin + used : node.begin + used + len(tokens) - place]
                return (node, used + len(rest)) if list(rest) == list(tokens[place:]) else (None, 0)
            child = node.children.get(tokens[place])
            if child is None:
                return None, 0
            used = child.matched(tokens, place, len(tokens))
            node, place = child, place + used
            if used < child.length and place < len(tokens):
                return None, 0
        return node, used

    def _join(self, above: _Node, node: _Node) -> None:
        """Makes one node of a node and its only child, where no suffix ends between them."""
        if node is self._root or node.children is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.count == node.count and above.children is not None:
            child.begin -= node.length
            child.length += node.length
            above.children[child.text[child.begin]] = child
            self.nodes -= 1


def _chain_length(node: _Node) -> int:
    """Returns how many nodes a suffix has from this node on. No other suffix has them."""
    count = 1
    while node.children:
        (node,) = node.children.values()
        count += 1
    return count
