"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

from twostroke.base import allocator

YOUNG_OBJECTS = 10_000
"""New objects between two looks at the young ones: some hundred tokens' worth instead of a few."""


def release_unused_memory() -> None:
    """Frees what a closed model leaves. Frozen objects are collected again, and their memory goes back to
    the system.
    """
    gc.unfreeze()
    gc.collect()
    allocator.give_holes_back()


def freeze_loaded_objects() -> None:
    """Freezes modules, model and tokenizer once everything is loaded: the collector never looks at them again.

    A full collection over them takes tenths of a second, in which no token leaves the process. The last one is now:
    garbage among them would stay for good. Loading has left a hole in the heap for every buffer that it has freed:
    hundreds of MiB on a worker.
    """
    gc.collect()
    allocator.give_holes_back()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
