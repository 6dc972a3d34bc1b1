"""What somebody, or a disk, has done to a worker's folder of pages: it starts, serves, and uses no wrong page."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.covering import later
from tests.unit.worker.callers import router_to
from tests.unit.worker.rig import PAGE_BYTES, paced
from tests.unit.worker.tiers.tiered import A, B, announced, ask, of_tier, tiered, written
from twostroke.kv_cache.tier import Tier
from twostroke.kv_cache.tiers.record import HEADER_BYTES, MOST_SEGMENT_BYTES, record_bytes

MODEL = paced(prefill_tokens_per_s=4000)
"""4 ms per block: more than a disk takes for its page."""
RECORD = record_bytes(PAGE_BYTES)
FOREIGN = "9" * 8 + ".pages"
"""A name that a segment may have."""

Deed = Callable[[Path], None]


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pages"))


def flips(at: int) -> Deed:
    """Flip one bit, so many bytes from the begin of every record."""

    def flip(folder: Path) -> None:
        for path in segments(folder):
            data = bytearray(path.read_bytes())
            for begin in range(0, len(data), RECORD):
                data[begin + at] ^= 0x10
            path.write_bytes(data)

    return flip


def holds(data: bytes) -> Deed:
    """Replaces every segment by these bytes."""

    def write(folder: Path) -> None:
        for path in segments(folder):
            path.write_bytes(data)

    return write


def cut(folder: Path) -> None:
    for path in segments(folder):
        os.truncate(path, path.stat().st_size - RECORD // 3)


def zeroed_in_the_middle(folder: Path) -> None:
    for path in segments(folder):
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + PAGE_BYTES // 2)
            file.write(bytes(PAGE_BYTES // 4))


def swapped(folder: Path) -> None:
    """The bodies of the first two records of each segment change places: each has another's bytes behind its header."""
    for path in segments(folder):
        data = bytearray(path.read_bytes())
        one, other = slice(HEADER_BYTES, RECORD), slice(RECORD + HEADER_BYTES, 2 * RECORD)
        if len(data) >= 2 * RECORD:
            data[one], data[other] = data[other], data[one]
            path.write_bytes(data)


def shifted(folder: Path) -> None:
    for path in segments(folder):
        path.write_bytes(b"x" * 512 + path.read_bytes())


def copied(folder: Path) -> None:
    shutil.copy(segments(folder)[0], folder / FOREIGN)


def linked(folder: Path) -> None:
    victim = folder.parent / "notes.txt"
    victim.write_text("not ours" * 10_000)
    (folder / FOREIGN).symlink_to(victim)


def looped(folder: Path) -> None:
    (folder / FOREIGN).symlink_to(folder / FOREIGN)


def of_a_device(folder: Path) -> None:
    (folder / FOREIGN).symlink_to("/dev/zero")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / FOREIGN)


def linked_probe(folder: Path) -> None:
    victim = folder.parent / "notes.txt"
    victim.write_text("not ours" * 10_000)
    (folder / "probe").symlink_to(victim)


def hard_linked_probe(folder: Path) -> None:
    victim = folder.parent / "notes.txt"
    victim.write_text("not ours" * 10_000)
    (folder / "probe").hardlink_to(victim)


def piped_probe(folder: Path) -> None:
    os.mkfifo(folder / "probe")


def subfolder(folder: Path) -> None:
    (folder / FOREIGN).mkdir()
    (folder / FOREIGN / "notes.txt").write_text("not ours")


def huge(folder: Path) -> None:
    with (folder / FOREIGN).open("wb") as file:
        file.truncate(1 << 40)


def removed(folder: Path) -> None:
    for path in segments(folder):
        path.unlink()


def without_lock(folder: Path) -> None:
    (folder / "lock").unlink()


def foreign(folder: Path) -> None:
    for name in ("notes.txt", "12345.pages.bak", "x.pages", "1.pages", "probe~"):
        (folder / name).write_text("not ours")


DEEDS: dict[str, Deed] = {
    "a flipped bit in the magic": flips(0),
    "a flipped bit in the version": flips(8),
    "a flipped bit in the block hash": flips(20),
    "a flipped bit in the parent's hash": flips(36),
    "a flipped bit in the identity": flips(52),
    "a flipped bit in the size": flips(66),
    "a flipped bit in the page's digest": flips(75),
    "a flipped bit in the header's digest": flips(HEADER_BYTES - 1),
    "a flipped bit in the page's first byte": flips(HEADER_BYTES),
    "a flipped bit in the page": flips(HEADER_BYTES + PAGE_BYTES // 2),
    "a flipped bit in the page's last byte": flips(HEADER_BYTES + PAGE_BYTES - 1),
    "a flipped bit behind the page": flips(RECORD - 1),
    "an empty segment": holds(b""),
    "a segment of one byte": holds(b"\0"),
    "a segment of zeros": holds(bytes(3 * RECORD)),
    "a segment of random bytes": holds(random.Random(1).randbytes(3 * RECORD + 7)),
    "a segment of text": holds(b"#!/bin/sh\necho hello\n"),
    "a last record that is cut": cut,
    "zeros in the middle of a page": zeroed_in_the_middle,
    "bodies that changed places": swapped,
    "records that begin elsewhere": shifted,
    "a copy of a segment": copied,
    "a link to somebody's file": linked,
    "a link to itself": looped,
    "a link to an endless device": of_a_device,
    "a pipe that nobody writes to": pipe,
    "a probe that links to somebody's file": linked_probe,
    "a probe that is another name of somebody's file": hard_linked_probe,
    "a probe that is a pipe": piped_probe,
    "a folder with a segment's name": subfolder,
    "a file that is larger than any disk": huge,
    "no segments": removed,
    "no lock": without_lock,
    "foreign files": foreign,
}
HARMLESS = {"a flipped bit behind the page", "a copy of a segment", "no lock", "foreign files"} | {
    name
    for name, deed in DEEDS.items()
    if deed in (linked, looped, of_a_device, pipe, linked_probe, hard_linked_probe, piped_probe, subfolder, huge)
}
"""All pages are found as before."""
IN_GATE = (
    "a flipped bit in the magic",
    "a flipped bit in the block hash",
    "a flipped bit in the page's digest",
    "a flipped bit in the page",
    "a segment of random bytes",
    "a last record that is cut",
    "bodies that changed places",
    "a copy of a segment",
    "a link to somebody's file",
    "a pipe that nobody writes to",
    "a probe that links to somebody's file",
    "a file that is larger than any disk",
    "foreign files",
)
"""At least one of each kind."""


def others(folder: Path) -> dict[str, bytes | int]:
    """Everything below the folder that is not a segment of ours: a file's bytes, or its size if it has too many."""
    return {
        str(path): path.read_bytes() if path.is_file() and path.stat().st_size < 1 << 20 else path.lstat().st_size
        for path in folder.rglob("*")
        if not path.is_dir() and path.name not in ("lock", "probe")
        if path.suffix != ".pages"
        or path.is_symlink()
        or not path.is_file()
        or path.stat().st_size > MOST_SEGMENT_BYTES
    }


@pytest.mark.parametrize("what", later(DEEDS, *IN_GATE))
async def test_a_damaged_folder_costs_pages_and_nothing_else(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with tiered(tmp_path, model=MODEL) as worker, router_to(worker) as router:
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(worker)
        folder, told = worker.lower.tiers.full.disk.folder, announced(worker, Tier.DISK)
    DEEDS[what](folder)
    left, caplog_before = others(tmp_path), len(caplog.records)
    async with tiered(tmp_path, model=MODEL) as again, router_to(again) as router:
        shown = announced(again, Tier.DISK)
        assert shown <= told
        assert what not in HARMLESS or shown == told
        await ask(router, A)
        await ask(router, B, request_id="b")
        await written(again)
        assert of_tier(again, "up") == 1
    assert others(tmp_path) == left, "what is not ours is as it was"
    for record in caplog.records[caplog_before:]:
        assert record.levelno < logging.ERROR, record.getMessage()
        assert record.exc_info is None, record.getMessage()
        assert "\n" not in record.getMessage()
