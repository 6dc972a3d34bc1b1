"""Finds stop strings in text as it comes: constant work per character, however many and long they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class StopNode:
    """A beginning of stop strings: the longest one that the text so far ends with."""

    __slots__ = ("depth", "fail", "following", "matched_chars")

    def __init__(self, depth: int, following: dict[str, StopNode | tuple[int, int]]) -> None:
        self.depth = depth
        """Its length in characters."""
        self.following = following
        """Nodes by the character that leads to them; until a text goes there, the range of sorted stop strings that go
        on so."""
        self.fail = self
        """The longest beginning that this one ends with, itself excluded. The root's is itself."""
        self.matched_chars = 0
        """Characters of the longest stop string that is complete here; 0: none is."""


class StopStrings:
    """The automaton of Aho and Corasick, for all choices of a request.

    Its nodes are made when a text first comes to them: 16 strings of 1,024 characters would cost every other stream
    tens of milliseconds at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self.root = StopNode(0, self._following(0, len(self._stops), 0))

    def after(self, node: StopNode, char: str) -> StopNode:
        """Returns the node that `char` leads to. Following `fail` is paid for by the characters that led as deep."""
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
        """Makes a node; at most one of each string, as beginnings of one string are made in their order."""
        depth = node.depth + 1
        child = StopNode(depth, self._following(first, last, depth))
        child.fail = self.root if node is self.root else self.after(node.fail, char)
        # Of strings with a common beginning the shortest sorts first.
        child.matched_chars = depth if len(self._stops[first]) == depth else child.fail.matched_chars
        node.following[char] = child
        return child

    def _following(self, first: int, last: int, depth: int) -> dict[str, StopNode | tuple[int, int]]:
        ranges: dict[str, StopNode | tuple[int, int]] = {}
        for char, places in itertools.groupby(range(first, last), lambda place: self._stops[place][depth : depth + 1]):
            if char:
                begins = next(places)
                ranges[char] = (begins, begins + 1 + sum(1 for _ in places))
        return ranges


class StopScanner:
    """Finds the first stop string to be complete; holds back only text that could be the beginning of one."""

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._node = stops.root
        self._held = ""
        """Text held back: as many characters as `_node` is deep."""
        self.is_stopped = False
        """A stop string was found: this is the end of the output."""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, new: str) -> str:
        """Returns what may be sent now."""
        node = self._node
        for place, char in enumerate(new, 1):
            node = self._stops.after(node, char)
            if node.matched_chars:
                text = self._held + new[:place]
                self.flush()
                self.is_stopped = True
                begins = len(text) - node.matched_chars
                self.found = text[begins:]
                return text if self._include_stop else text[:begins]
        text = self._held + new
        certain_chars = len(text) - node.depth
        self._node, self._held = node, text[certain_chars:]
        return text[:certain_chars]

    def flush(self) -> str:
        """Returns what was held back, when the output ends for another reason."""
        rest, self._held, self._node = self._held, "", self._stops.root
        return rest
