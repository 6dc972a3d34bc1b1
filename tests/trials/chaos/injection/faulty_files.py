"""Segment files on a disk that is full, slow, broken, or that never answers."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.kv_cache.tiers.files import SegmentFile, SegmentFiles


@dataclass
class DiskFaults:
    """What the disk does from now on; a test changes it while a worker runs."""

    read_delay_s: float = 0.0
    read_errno: int = 0
    write_errno: int = 0
    flips: int = 0
    """Reads of which one bit arrives wrong."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Reads wait for it."""
    reads: int = 0
    writes: int = 0

    def __post_init__(self) -> None:
        self.answers.set()


class FaultyFiles(SegmentFiles):
    def __init__(self, faults: DiskFaults) -> None:
        super().__init__()
        self._faults = faults

    def open(self, path: Path, flags: int) -> SegmentFile:
        opened = super().open(path, flags)
        return _FaultyFile(opened, self._faults)


class _FaultyFile(SegmentFile):
    def __init__(self, real: SegmentFile, faults: DiskFaults) -> None:
        super().__init__(real._descriptor)
        self._faults = faults

    def read(self, buffer: memoryview, offset: int) -> int:
        faults = self._faults
        faults.reads += 1
        faults.answers.wait()
        time.sleep(faults.read_delay_s)
        _raise(faults.read_errno)
        count = super().read(buffer, offset)
        if faults.flips:
            faults.flips -= 1
            buffer[count // 2] ^= 1
        return count

    def write(self, buffer: memoryview, offset: int) -> None:
        self._faults.writes += 1
        _raise(self._faults.write_errno)
        super().write(buffer, offset)


def _raise(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))
