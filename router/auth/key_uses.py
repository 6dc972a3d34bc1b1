"""Counts what each key uses at all routers of a launcher, in a table in their shared memory.

A key's digest selects a row, and the key has one place of that row. In each place every process has a field for its
own open choices, so that those of a dead process can be dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from router.shared_memory import MOST_PROCESSES, PROCESS_BYTES, RouterMemory

ROWS = 1024
PLACES = 16
"""Most keys of one row. A further key replaces the one used longest ago, preferably one without open choices."""
DIGEST_BYTES = 16

_HEAD = struct.Struct(f"={DIGEST_BYTES}s4d")
"""Digest of the key's id; used requests and their time; used tokens and their time."""
_CHOICES = struct.Struct(f"={MOST_PROCESSES}I")
"""Number of open choices of each process."""
_CHOICE = struct.Struct("=I")
_PLACE_BYTES = _HEAD.size + _CHOICES.size
_ROW_BYTES = PLACES * _PLACE_BYTES
_START = MOST_PROCESSES * PROCESS_BYTES


class Bucket:
    """A token bucket. A minute's allowance may be used at once, and is refilled evenly within a minute."""

    def __init__(self, now_s: float, used: float = 0.0) -> None:
        self.amount = used
        """The amount that was used up at `at_s`."""
        self.at_s = now_s

    def used(self, per_minute: float, now_s: float) -> float:
        """Returns the amount that is used up now. It may be more than `per_minute`."""
        self.amount = max(0.0, self.amount - max(0.0, now_s - self.at_s) * per_minute / 60)
        self.at_s = max(self.at_s, now_s)
        return self.amount

    def take(self, count: float) -> None:
        self.amount += count

    def wait_s(self, count: float, per_minute: float, now_s: float) -> float:
        """Returns the seconds until `count` more fit. More than `per_minute` fit once nothing is used up."""
        return max(0.0, self.used(per_minute, now_s) + count - max(count, per_minute)) * 60 / per_minute


@dataclass(slots=True)
class KeyUse:
    """The use of one key, over all routers."""

    requests: Bucket
    tokens: Bucket
    answers: int = 0
    """Open choices. A call counts at least one."""


class KeyUses:
    def __init__(self, shared: RouterMemory | None = None) -> None:
        self._shared = shared or RouterMemory.alone()
        assert len(self._shared.bytes) >= _START + ROWS * _ROW_BYTES
        if self._shared.is_shared:
            with self._shared.locked():
                self._forget_process(self._shared.number)

    @contextlib.contextmanager
    def use_of(self, key_id: str, now_s: float) -> Iterator[KeyUse]:
        """Yields the use of a key, and stores it after the block. No other process uses the table meanwhile."""
        digest = hashlib.blake2b(key_id.encode(), digest_size=DIGEST_BYTES).digest()
        with self._shared.locked():
            place, use = self._find(digest, now_s)
            before = use.answers
            try:
                yield use
            finally:
                _HEAD.pack_into(
                    *(self._shared.bytes, place, digest, use.requests.amount, use.requests.at_s),
                    *(use.tokens.amount, use.tokens.at_s),
                )
                self._count(place, use.answers - before)

    def _find(self, digest: bytes, now_s: float) -> tuple[int, KeyUse]:
        """Returns the index of the key's place, and its use. A key without a place gets one."""
        memory = self._shared.bytes
        start = _START + int.from_bytes(digest[:4]) % ROWS * _ROW_BYTES
        oldest, oldest_s = start, (True, float("inf"))
        for place in range(start, start + _ROW_BYTES, _PLACE_BYTES):
            found, requests, requests_s, tokens, tokens_s = _HEAD.unpack_from(memory, place)
            if found == digest:
                return place, KeyUse(Bucket(requests_s, requests), Bucket(tokens_s, tokens), self._open(place))
            used_s = (self._open(place) > 0, max(requests_s, tokens_s))
            if used_s < oldest_s:
                oldest, oldest_s = place, used_s
        memory[oldest : oldest + _PLACE_BYTES] = bytes(_PLACE_BYTES)
        return oldest, KeyUse(Bucket(now_s), Bucket(now_s))

    def _open(self, place: int) -> int:
        """Returns the open choices of all processes that run. Drops those of processes that have ended."""
        counts: tuple[int, ...] = _CHOICES.unpack_from(self._shared.bytes, place + _HEAD.size)
        total = counts[self._shared.number]
        if total == sum(counts):
            return total
        for number in self._shared.others:
            if counts[number] and self._shared.has_ended(number):
                self._forget_process(number)
            else:
                total += counts[number]
        return total

    def _count(self, place: int, more: int) -> None:
        """Adds open choices of this process. Fewer than 0 are 0: another key may have taken the place meanwhile."""
        if more:
            field = place + _HEAD.size + self._shared.number * _CHOICE.size
            (own,) = _CHOICE.unpack_from(self._shared.bytes, field)
            _CHOICE.pack_into(self._shared.bytes, field, max(0, own + more))

    def _forget_process(self, number: int) -> None:
        """Sets the open choices of a process to 0 in all places: it has ended, or begins."""
        memory = self._shared.bytes
        first = _START + _HEAD.size + number * _CHOICE.size
        for field in range(first, _START + ROWS * _ROW_BYTES, _PLACE_BYTES):
            if memory[field : field + _CHOICE.size] != _NONE:
                memory[field : field + _CHOICE.size] = _NONE


_NONE = bytes(_CHOICE.size)
