"""Memory goes back to the system as soon as it is freed, and what is loaded for good is never collected.

glibc takes a buffer above a threshold from a mapping of its own, which it gives back when the buffer is freed. But it
raises the threshold to the size of every such buffer, up to 32 MiB. After the first long request, the buffers of all
others come from the heap. There a small object behind them keeps their memory: hundreds of MiB in a router. A threshold
that the process has set stays where it is (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
from pathlib import Path

OWN_MAPPING_BYTES = 512 << 10
"""Buffers from this size on have a mapping of their own. A mapping costs some microseconds; smaller ones are many."""
KEPT_BYTES = 4 << 20
"""Bytes at the end of the heap that may stay free."""

LOOK_S = 5.0
"""Seconds between two looks at how much memory the process has."""
MOST_WAIT_S = 8 * LOOK_S
"""While it stays as large, the process looks again after twice the time. After this it is taken to need the memory."""
GROWN_BYTES = 32 << 20
"""Growth after which the process looks for free memory between the objects of its heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_large_buffers_back() -> None:
    """Gives freed memory back at once, from the start of a process that reads what strangers send. Needs glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_holes_back() -> None:
    """Returns the free memory between the objects of the heap to the system. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def give_freed_memory_back() -> None:
    """Returns free memory to the system whenever the process has grown, until cancelled. Does nothing without glibc.

    Thousands of calls that wait at the same time take small pieces of the heap. When they have ended, the objects that
    lie between those pieces keep them (malloc_trim(3)).
    """
    usual_bytes, wait_s = rss_bytes(), LOOK_S
    while True:
        await asyncio.sleep(wait_s)
        before_bytes = rss_bytes()
        usual_bytes = min(usual_bytes, before_bytes)
        if before_bytes < usual_bytes + GROWN_BYTES:
            wait_s = LOOK_S
            continue
        await asyncio.to_thread(give_holes_back)
        after_bytes = rss_bytes()
        if wait_s < MOST_WAIT_S:  # what is in use now may be free soon
            wait_s *= 2
        else:
            usual_bytes, wait_s = after_bytes, LOOK_S


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


YOUNG_OBJECTS = 10_000
"""New objects between two looks at the young ones: some hundred tokens' worth instead of a few."""


def release_unused_memory() -> None:
    """Frees what a closed model leaves, frozen objects too, and gives their memory back to the system."""
    gc.unfreeze()
    gc.collect()
    give_holes_back()


def freeze_loaded_objects() -> None:
    """Freezes modules, model and tokenizer once everything is loaded: the collector never looks at them again.

    A full collection over them takes tenths of a second, in which no token leaves the process. The last one is now:
    garbage among them would stay for good. Loading has left a hole in the heap for every buffer that it has freed:
    hundreds of MiB on a worker.
    """
    gc.collect()
    give_holes_back()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
