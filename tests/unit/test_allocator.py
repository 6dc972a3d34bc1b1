"""Buffers of long requests leave no memory behind in a process that goes on with small things."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
from twostroke.allocator import give_large_buffers_back

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "set":
    give_large_buffers_back()
bytes(24 << 20)  # the first large buffer raises glibc's own threshold
before, kept = resident_bytes(), []
buffers = []
for _ in range(8):
    buffers.append(bytearray(b"x" * (4 << 20)))
    kept.append(bytes(2000))
del buffers
print(resident_bytes() - before)
"""


def kept_bytes(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(run.stdout)


def test_freed_buffers_are_given_back_although_small_objects_came_after_them():
    assert kept_bytes("set") < 8 << 20
    assert kept_bytes("unset") > 2 * (8 << 20)
