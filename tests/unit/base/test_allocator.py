"""Buffers of long requests leave no memory behind in a process that goes on with small things."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
from twostroke.base.allocator import give_large_buffers_back

def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "set":
    give_large_buffers_back()
bytes(24 << 20)  # the first large buffer raises glibc's own threshold
before, kept = rss_bytes(), []
buffers = []
for _ in range(8):
    buffers.append(bytearray(b"x" * (4 << 20)))
    kept.append(bytes(2000))
del buffers
print(rss_bytes() - before)
"""


SMALL = """
import asyncio, sys
from twostroke.base import allocator

async def main():
    allocator.LOOK_S = 0.05
    before = allocator.rss_bytes()
    waiting = asyncio.create_task(allocator.give_freed_memory_back()) if sys.argv[1] == "set" else None
    await asyncio.sleep(0.1)
    pieces = [bytes(1000) for _ in range(80_000)]
    kept = pieces[::100]
    del pieces
    await asyncio.sleep(0.5)
    print(allocator.rss_bytes() - before)

asyncio.run(main())
"""


def kept_bytes(how: str, script: str = SCRIPT) -> int:
    run = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_freed_buffers_are_given_back_although_small_objects_came_after_them():
    assert kept_bytes("set") < 8 << 20
    assert kept_bytes("unset") > 2 * (8 << 20)


def test_small_pieces_are_given_back_although_objects_lie_between_them():
    assert kept_bytes("set", SMALL) < 24 << 20
    assert kept_bytes("unset", SMALL) > 60 << 20
