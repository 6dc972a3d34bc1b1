"""A byte budget (a token bucket): this many bytes per second. The bytes of some seconds may be saved up."""

from __future__ import annotations

SAVED_S = 4.0
"""Seconds of budget that can be saved up for a burst, as when a long prompt evicts many pages at once."""
FIRST_SIGHT_SHARE = 0.25
"""Fraction of the write budget that pages seen once may use: most of these are never wanted again."""
KEPT_FOR_REUSED = 0.5
"""Fraction of what can be saved up that pages seen once must leave to pages that were wanted again."""


class ByteBudget:
    def __init__(self, bytes_per_s: float, least_bytes: int) -> None:
        """Even a small budget can save up `least_bytes`, the size of one write."""
        self._bytes_per_s = bytes_per_s
        self._most_bytes = max(SAVED_S * bytes_per_s, float(least_bytes))
        self._bytes = self._most_bytes
        self._at_s = 0.0

    def take(self, size_bytes: int, now_s: float, *, keep: float = 0.0) -> bool:
        """Takes bytes, and returns whether it did: at least the fraction `keep` of what can be saved up must remain."""
        if not self.has(size_bytes, now_s, keep=keep):
            return False
        self._bytes -= size_bytes
        return True

    def has(self, size_bytes: int, now_s: float, *, keep: float = 0.0) -> bool:
        """Returns whether `take` would take these bytes now."""
        refilled = self._bytes + (now_s - self._at_s) * self._bytes_per_s
        self._bytes, self._at_s = min(self._most_bytes, max(self._bytes, refilled)), now_s
        return self._bytes - size_bytes >= keep * self._most_bytes


class WriteBudget:
    """The bytes that a worker may write to its disk, page by page."""

    def __init__(self, bytes_per_s: float, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._all = ByteBudget(bytes_per_s, page_bytes)
        self._first_sight = ByteBudget(FIRST_SIGHT_SHARE * bytes_per_s, page_bytes)

    def take_page(self, now_s: float, *, wanted_again: bool) -> bool:
        """Takes the bytes of one page, and returns whether it did. A page that was seen once has to fit into a smaller
        budget, too, and must leave half of what can be saved up."""
        if wanted_again:
            return self._all.take(self._page_bytes, now_s)
        is_spared = self._all.has(self._page_bytes, now_s, keep=KEPT_FOR_REUSED)
        return is_spared and self._first_sight.take(self._page_bytes, now_s) and self._all.take(self._page_bytes, now_s)
