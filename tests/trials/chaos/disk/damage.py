"""What is done to the segment files of workers that are dead."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

from twostroke.kv_cache.tiers.record import HEADER_BYTES, SECTOR, record_bytes


def segments(folder: Path) -> list[Path]:
    """All segments below a folder, those that were written last at the end."""
    return sorted((path for path in folder.rglob("*.pages") if path.is_file()), key=lambda path: path.stat().st_mtime)


def borders(records: int, page_bytes: int) -> Iterator[int]:
    """Yields lengths to which a loss of power may cut a segment: at and beside every border of every record."""
    size = record_bytes(page_bytes)
    for index in range(records):
        for end in (
            0,
            1,
            HEADER_BYTES - 1,
            HEADER_BYTES,
            HEADER_BYTES + 1,
            SECTOR,
            HEADER_BYTES + page_bytes,
            size - 1,
        ):
            yield index * size + min(end, size)


def flip_in_every_record(path: Path, page_bytes: int, draws: random.Random) -> dict[str, int]:
    """Flip one bit of each record: of its header, its page, or the padding behind; return how many of each."""
    size, data, done = record_bytes(page_bytes), bytearray(path.read_bytes()), dict.fromkeys(PARTS, 0)
    for number, begin in enumerate(range(0, len(data) - size + 1, size)):
        part = PARTS[number % len(PARTS)]
        first, end = {
            "header": (0, HEADER_BYTES),
            "page": (HEADER_BYTES, HEADER_BYTES + page_bytes),
            "padding": (HEADER_BYTES + page_bytes, size),
        }[part]
        data[begin + draws.randrange(first, end)] ^= 1 << draws.randrange(8)
        done[part] += 1
    path.write_bytes(data)
    return done


PARTS = ("header", "page", "padding")


def cut(path: Path, length: int) -> None:
    os.truncate(path, length)
