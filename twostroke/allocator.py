"""Memory of large buffers goes back to the system as soon as they are freed.

glibc takes a buffer above a threshold from a mapping of its own, which it gives back when the buffer is freed. But it
raises the threshold to the size of every such buffer, up to 32 MiB. After the first long request, the buffers of all
others come from the heap. There a small object behind them keeps their memory: hundreds of MiB in a router. A threshold
that the process has set stays where it is (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD).
"""

from __future__ import annotations

import ctypes

OWN_MAPPING_BYTES = 512 << 10
"""Buffers from this size on have a mapping of their own. A mapping costs some microseconds; smaller ones are many."""
KEPT_BYTES = 4 << 20
"""The end of the heap that may stay free."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_large_buffers_back() -> None:
    """To be called at the start of a process that reads what strangers send. Does nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
