"""A byte budget: so many bytes per second, of which some seconds may be saved up (a token bucket)."""

from __future__ import annotations

SAVED_S = 4.0
"""Seconds of budget that can be saved up for a burst, as when a long prompt evicts many pages at once."""


class ByteBudget:
    def __init__(self, bytes_per_s: float, least_bytes: int) -> None:
        """Even a small budget can save up `least_bytes`, the size of one write."""
        self._bytes_per_s = bytes_per_s
        self._most_bytes = max(SAVED_S * bytes_per_s, float(least_bytes))
        self._bytes = self._most_bytes
        self._at_s = 0.0

    def take(self, size_bytes: int, now_s: float, *, keep: float = 0.0) -> bool:
        """Take bytes if they are there and at least the share `keep` of what can be saved up remains."""
        refilled = self._bytes + (now_s - self._at_s) * self._bytes_per_s
        self._bytes, self._at_s = min(self._most_bytes, max(self._bytes, refilled)), now_s
        if self._bytes - size_bytes < keep * self._most_bytes:
            return False
        self._bytes -= size_bytes
        return True
