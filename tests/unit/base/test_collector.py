"""The garbage collector keeps out of the way of a process that serves."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
gc.disable()  # so that nothing takes the garbage away before
from twostroke.base import allocator
class Cycle: pass
garbage = Cycle(); garbage.self = garbage; left = weakref.ref(garbage); del garbage
loaded = [[number] for number in range(100_000)]
allocator.freeze_loaded_objects()
assert left() is None, "garbage of the start is not kept for good"
assert gc.get_freeze_count() > 100_000
assert len(gc.get_objects()) < 1_000, "a full collection looks at next to nothing"
cycle = Cycle(); cycle.self = cycle; del cycle
assert gc.collect() > 0, "what comes later is collected as ever"
"""


def test_what_was_loaded_is_never_looked_at_again_and_what_comes_later_is_collected() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


HOLES = """
from twostroke.base import allocator

buffers = [bytearray(100_000) for _ in range(2_000)]
del buffers[::2]
before = allocator.rss_bytes()
allocator.freeze_loaded_objects()
assert before - allocator.rss_bytes() > 50 << 20, "holes of 100 MB stay"
"""


def test_the_holes_that_loading_has_left_go_back_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", HOLES], check=True)
