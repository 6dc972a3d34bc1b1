"""Faults of the disk in processes that run: a file says what the disk does from now on.

The file is JSON with fields of `DiskFaults`; while it is not there, the disk is well. Workers that were started with
its name in the environment read it whenever they open a segment.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from tests.trials.chaos.injection.faulty_files import DiskFaults, FaultyFiles
from twostroke.kv_cache.tiers.files import SegmentFile

ENVIRONMENT = "TWOSTROKE_DISK_FAULTS"


class NotedFiles(FaultyFiles):
    """Segment files of a disk that does what a note says."""

    def __init__(self, note: Path) -> None:
        self._disk = DiskFaults()
        self._note = note
        super().__init__(self._disk)

    def open(self, path: Path, flags: int) -> SegmentFile:
        said = {}
        with contextlib.suppress(FileNotFoundError):
            said = json.loads(self._note.read_text())
        self._disk.read_delay_s = said.get("read_delay_s", 0.0)
        self._disk.read_errno = said.get("read_errno", 0)
        self._disk.write_errno = said.get("write_errno", 0)
        return super().open(path, flags)


def write(note: Path, **said: float) -> None:
    """Lets the disk do this from now on; nothing: it is well again."""
    new = note.with_suffix(".new")
    new.write_text(json.dumps(said))
    new.replace(note)
