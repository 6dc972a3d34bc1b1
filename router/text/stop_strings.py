"""Finds stop strings in text as it arrives: constant work per character, however many and long they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class StopNode:
    """A node of the automaton: one prefix of one or more stop strings.

    The scanner is at the node of the longest such prefix that the text so far ends with.
    """

    __slots__ = ("depth", "fail", "following", "matched_chars")

    def __init__(self, depth: int, following: dict[str, StopNode | tuple[int, int]]) -> None:
        self.depth = depth
        """Length of the prefix in characters."""
        self.following = following
        """Nodes by the next character. A node that no text has come to yet is the range of the sorted stop strings that
        have its prefix."""
        self.fail = self
        """Node of the longest shorter prefix that this prefix ends with. The root's is the root."""
        self.matched_chars = 0
        """Characters of the longest stop string that ends here; 0: none does."""


class StopStrings:
    """The Aho-Corasick automaton of the stop strings, shared by all choices of a request.

    A node is made when a text first gets to it: making all nodes of 16 strings of 1,024 characters at once
    would delay every other stream by tens of milliseconds.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self.root = StopNode(0, self._following(0, len(self._stops), 0))

    def after(self, node: StopNode, char: str) -> StopNode:
        """Returns the node that `char` leads to. Amortised O(1): a step along `fail` undoes an earlier one."""
        while True:
            child = node.following.get(char)
            if isinstance(child, StopNode):
                return child
            if child is not None:
                return self._grow(node, char, *child)
            if node is self.root:
                return node
            node = node.fail

    def _grow(self, node: StopNode, char: str, first: int, last: int) -> StopNode:
        """Makes a node of the strings from `first` to `last`. One character makes at most one node for each string."""
        depth = node.depth + 1
        child = StopNode(depth, self._following(first, last, depth))
        child.fail = self.root if node is self.root else self.after(node.fail, char)
        # Of strings with a common prefix the shortest sorts first.
        child.matched_chars = depth if len(self._stops[first]) == depth else child.fail.matched_chars
        node.following[char] = child
        return child

    def _following(self, first: int, last: int, depth: int) -> dict[str, StopNode | tuple[int, int]]:
        ranges: dict[str, StopNode | tuple[int, int]] = {}
        for char, indices in itertools.groupby(range(first, last), lambda index: self._stops[index][depth : depth + 1]):
            if char:
                begin = next(indices)
                ranges[char] = (begin, begin + 1 + sum(1 for _ in indices))
        return ranges


class StopScanner:
    """Finds the first stop string that is complete. Holds back only text that could be the start of one."""

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = stops.root
        self._held = ""
        """Text held back: as many characters as `_node` is deep."""
        self.is_stopped = False
        """Whether a stop string was found: this is the end of the output."""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, new: str) -> str:
        """Returns what may be sent now."""
        node = self._node
        for end, char in enumerate(new, 1):
            node = self._stops.after(node, char)
            if node.matched_chars:
                text = self._held + new[:end]
                self.flush()
                self.is_stopped = True
                begin = len(text) - node.matched_chars
                self.found = text[begin:]
                return text if self._include_stop else text[:begin]
        text = self._held + new
        certain_chars = len(text) - node.depth
        self._node, self._held = node, text[certain_chars:]
        return text[:certain_chars]

    def flush(self) -> str:
        """Returns what was held back, when the output ends for another reason."""
        rest, self._held, self._node = self._held, "", self._stops.root
        return rest
