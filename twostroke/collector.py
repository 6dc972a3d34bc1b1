"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc

from twostroke import allocator

YOUNG_OBJECTS = 10_000
"""New objects between two looks at the young ones: some hundred tokens' worth instead of a few."""


def release_unused_memory() -> None:
    """Call when a model is closed: objects that were frozen are looked at again, and their memory is given back."""
    gc.unfreeze()
    gc.collect()
    allocator.give_holes_back()


def freeze_loaded_objects() -> None:
    """Call when everything is loaded: modules, model and tokenizer are never looked at again.

    A full collection over them takes tenths of a second, in which no token leaves the process. The last one is now:
    garbage among them would stay for good. Loading has left a hole in the heap for every buffer that it has freed:
    hundreds of MiB on a worker.
    """
    gc.collect()
    allocator.give_holes_back()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
