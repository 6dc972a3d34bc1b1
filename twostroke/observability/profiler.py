"""Records where a process's time goes while a profile is wanted: slices of its threads, kernels, ended spans.

While no profile is wanted, each place that can record takes one branch and does nothing else. What is recorded is
bounded: the oldest makes room, and it is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from twostroke.base.errors import Overloaded
from twostroke.tracing.span import Span

ENGINE: Final = "engine"
"""Track of the engine thread: steps and their parts."""
WORK_LOOP: Final = "work loop"
"""Track of a worker's event loop: what it does before and after each step."""

MOST_BYTES: Final = 24 << 20
"""Memory for one profile: half a million kernels, or some thousand spans and slices."""
ITEM_BYTES: Final = 1000
"""Memory of a slice or span, apart from its kernels."""

KERNELS: Final = (
    *("embedding", "norm", "qkv", "head norm", "rope and store", "attention"),
    *("output", "gate and up", "down", "head"),
    *("router", "experts' gate and up", "experts' down", "experts' sum"),
    *("queries of latents", "queries into latents", "values of latents"),
    *("adapters", "activation after adapters"),
    "sum over ranks",
)
"""Names of the kinds of kernels: `KernelKind` of kernels/cpu/native/profile.h, in that order."""
MOST_KERNELS: Final = 2048
"""Kernels of one forward pass that are recorded: those of 170 layers, or of 120 with adapters."""


KernelRecord: Final = struct.Struct("=qqddiiii")
"""Start and end in nanoseconds, bytes, operations, kind, layer, rows, threads: `KernelRecord` of native/profile.h."""


class KernelRecords(ctypes.Structure):
    """The kernels of one forward pass: `KernelRecords` of kernels/cpu/native/profile.h."""

    _fields_ = (("records", ctypes.c_char * (MOST_KERNELS * KernelRecord.size)), ("count", ctypes.c_int64))

    def packed(self) -> bytes:
        """Returns the records end to end."""
        return ctypes.string_at(ctypes.addressof(self), self.count * KernelRecord.size)


class Slice(NamedTuple):
    """A part of a thread's time, between two readings of the monotonic clock in nanoseconds."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    facts: Mapping[str, float]
    kernels: bytes
    """Packed KernelRecords, or nothing."""


@dataclass(slots=True)
class Profile:
    """What was recorded; threads may add to it at the same time."""

    most_bytes: int = MOST_BYTES
    items: deque[Slice | Span] = field(default_factory=deque)
    dropped: int = 0
    """Slices, kernels and spans that made room for later ones."""
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, item: Slice | Span) -> None:
        with self._lock:
            self.items.append(item)
            self._bytes += size_bytes_of(item)
            while self._bytes > self.most_bytes:
                size_bytes = size_bytes_of(self.items.popleft())
                self._bytes -= size_bytes
                self.dropped += 1 + (size_bytes - ITEM_BYTES) // KernelRecord.size


class Profiler:
    """The switch of one process: what its threads ask before they record."""

    def __init__(self) -> None:
        self._profile: Profile | None = None

    @property
    def is_on(self) -> bool:
        return self._profile is not None

    def slice(
        self, track: str, name: str, facts: Mapping[str, float] | None = None, kernels: KernelRecords | None = None
    ) -> AbstractContextManager[None]:
        """Records the time that the block takes, and the kernels that it filled in."""
        profile = self._profile
        return _NOTHING if profile is None else _recorded(profile, track, name, facts or {}, kernels)

    @contextlib.contextmanager
    def recording(self, most_bytes: int = MOST_BYTES) -> Iterator[Profile]:
        """Records until the block ends. Raises Overloaded if another profile is being taken."""
        if self._profile is not None:
            raise Overloaded("a profile of this process is being recorded; ask again when it is over")
        self._profile = profile = Profile(most_bytes)
        try:
            yield profile
        finally:
            self._profile = None


_NOTHING: Final = contextlib.nullcontext()


@contextlib.contextmanager
def _recorded(
    profile: Profile, track: str, name: str, facts: Mapping[str, float], kernels: KernelRecords | None
) -> Iterator[None]:
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        end_ns = time.monotonic_ns()
        profile.add(Slice(track, name, start_ns, end_ns, facts, b"" if kernels is None else kernels.packed()))


def size_bytes_of(item: Slice | Span) -> int:
    return ITEM_BYTES + len(item.kernels) if isinstance(item, Slice) else ITEM_BYTES
