"""Records on disk: what is read back is what was written, whatever a crash, a disk or another worker did meanwhile."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tiers import record
from twostroke.kv_cache.tiers.files import AlignedBuffer, SegmentFile, SegmentFiles
from twostroke.kv_cache.tiers.folders import (
    ScannedSegment,
    SegmentFolder,
    claim_left,
    claim_own,
    model_folder,
    remove_beyond,
    remove_unused,
    scan_segment,
)
from twostroke.kv_cache.tiers.record import HEADER_BYTES, SECTOR, RecordFormat, RecordHeader, identity_of

PAGE_BYTES = 5000
FORM = RecordFormat(identity_of("model=m", "bfloat16"), PAGE_BYTES)
RECORDS = 4


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def page(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


def header(number: int) -> RecordHeader:
    return RecordHeader(block(number), block(number - 1), xxhash.xxh3_64_digest(page(number)))


def written(path: Path, form: RecordFormat = FORM, records: int = RECORDS) -> Path:
    """A segment of so many records, the first of which is block 1."""
    files, buffer = SegmentFiles(), AlignedBuffer(form.record_bytes)
    files.probe(path.parent)
    with files.writing(path) as file:
        for number in range(1, records + 1):
            buffer.view[:HEADER_BYTES] = form.pack(header(number))
            form.page_of(buffer.view)[:] = page(number)
            file.write(buffer.view, (number - 1) * form.record_bytes)
    buffer.close()
    return path


def intact(path: Path, scanned: ScannedSegment) -> list[int]:
    """The blocks whose page is read back and has its digest. Asserts that each of these has the right bytes."""
    data, found = path.read_bytes() if path.exists() else b"", []
    for index, each in enumerate(scanned.records):
        at = index * FORM.record_bytes
        body = bytes(FORM.page_of(memoryview(data)[at : at + FORM.record_bytes]))
        if FORM.parse(data[at:]) == each and xxhash.xxh3_64_digest(body) == each.page_digest:
            number = int.from_bytes(each.block_hash, "big")
            assert body == page(number), f"block {number} has other bytes"
            found.append(number)
    return found


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory, where there is such a file system: thousands of files take a second there."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    path = written(tmp_path / "00000001.pages")
    assert FORM.record_bytes % SECTOR == 0
    assert path.stat().st_size == RECORDS * FORM.record_bytes
    scanned = scan_segment(SegmentFiles(), path, FORM)
    assert scanned.records == tuple(header(number) for number in range(1, RECORDS + 1))
    assert intact(path, scanned) == [1, 2, 3, 4]


def borders() -> list[int]:
    """Lengths at and beside every border that a crash may leave."""
    size, ends = FORM.record_bytes, (0, 1, 8, HEADER_BYTES, HEADER_BYTES + PAGE_BYTES, SECTOR)
    near = {index * size + end + by for index in range(RECORDS + 1) for end in ends for by in (-1, 0, 1)}
    return sorted(at for at in near if 0 <= at <= RECORDS * size)


@pytest.mark.parametrize("length", borders())
def test_a_torn_tail_is_cut_and_the_whole_records_before_it_stay(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "00000001.pages")
    os.truncate(path, length)
    scanned = scan_segment(SegmentFiles(), path, FORM)
    whole = length // FORM.record_bytes
    assert intact(path, scanned) == list(range(1, whole + 1))
    assert path.exists() is (whole > 0)
    assert not whole or path.stat().st_size == whole * FORM.record_bytes


def test_a_loss_of_power_at_any_byte_leaves_the_whole_records_and_nothing_else(
    in_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # one warning for each length is many
    path = written(in_memory / "00000001.pages", records=2)
    good, files = path.read_bytes(), SegmentFiles()
    files.probe(in_memory)
    for length in range(len(good) + 1):
        path.write_bytes(good[:length])
        whole = length // FORM.record_bytes
        assert intact(path, scan_segment(files, path, FORM)) == list(range(1, whole + 1)), length
        assert path.exists() is (whole > 0), length
        assert not whole or path.stat().st_size == whole * FORM.record_bytes, length


def test_a_flipped_bit_anywhere_never_gives_other_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "00000001.pages", records=2)
    good = path.read_bytes()
    places = [*range(HEADER_BYTES), *range(HEADER_BYTES, FORM.record_bytes, 97)]
    for at in places:
        damaged = bytearray(good)
        damaged[at] ^= 1 << (at % 8)
        path.write_bytes(damaged)
        found = intact(path, scan_segment(SegmentFiles(), path, FORM))
        if at < HEADER_BYTES:
            assert found == [2], f"a bit of the header at {at} flipped: that costs its own record only"
            assert path.stat().st_size == len(good)
        elif at < HEADER_BYTES + PAGE_BYTES:
            assert found == [2], f"a bit of the page at {at} flipped"
        else:
            assert found == [1, 2], "the padding means nothing"


@pytest.mark.parametrize("lost", [(2,), (1,), (1, 2, 3), (2, 4), (3, 4)])
def test_lost_writes_cost_their_own_records_only(tmp_path: Path, lost: tuple[int, ...]) -> None:
    path = written(tmp_path / "00000001.pages")
    with path.open("r+b") as file:
        for number in lost:
            file.seek((number - 1) * FORM.record_bytes)
            file.write(bytes(FORM.record_bytes))
    kept = [number for number in range(1, RECORDS + 1) if number not in lost]
    scanned = scan_segment(SegmentFiles(), path, FORM)
    assert intact(path, scanned) == kept
    assert path.stat().st_size == kept[-1] * FORM.record_bytes == len(scanned.records) * FORM.record_bytes
    assert scan_segment(SegmentFiles(), path, FORM) == scanned


def test_a_segment_that_cannot_be_read_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class OneBroken(SegmentFiles):
        def open(self, path: Path, flags: int) -> SegmentFile:
            if path == paths[1]:
                raise OSError(errno.EIO, "the disk is broken there")
            return super().open(path, flags)

    folder = claim_own(tmp_path, "decode-0")
    paths = [written(folder.next_segment()) for _ in range(3)]
    assert [segment.path for segment in folder.scan(OneBroken(), FORM)] == [paths[0], paths[2]]
    assert [each.message.split(" path=")[0] for each in caplog.records] == ["segment cannot be read"]
    assert paths[1].exists(), "it may be readable at the next start"
    folder.close()


@pytest.mark.parametrize(
    "other",
    [
        RecordFormat(identity_of("model=other", "bfloat16"), PAGE_BYTES),
        RecordFormat(identity_of("model=m", "int8"), PAGE_BYTES),
        dataclasses.replace(FORM, page_bytes=PAGE_BYTES - 1),
    ],
)
def test_a_record_of_another_model_or_form_is_never_used(tmp_path: Path, other: RecordFormat) -> None:
    path = written(tmp_path / "00000001.pages")
    assert scan_segment(SegmentFiles(), path, other).records == ()


def test_a_record_of_another_version_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "VERSION", 2)
    path = written(tmp_path / "00000001.pages")
    monkeypatch.undo()
    assert scan_segment(SegmentFiles(), path, FORM).records == ()


def test_the_parts_of_an_identity_cannot_run_into_each_other() -> None:
    assert identity_of("ab", "c") != identity_of("a", "bc")
    assert len(identity_of("a", "b")) == record.IDENTITY_BYTES


def test_a_folder_has_one_owner_until_that_dies(tmp_path: Path) -> None:
    first = claim_own(tmp_path, "decode-0")
    second = claim_own(tmp_path, "decode-0")
    assert (first.path.name, second.path.name) == ("decode-0", "decode-0.2")
    written(first.next_segment())
    assert not list(claim_left(tmp_path, unseen_s=0)), "its owner lives"
    first.close()
    assert not list(claim_left(tmp_path, unseen_s=60)), "its owner was here just now, and may be starting again"
    (left,) = claim_left(tmp_path, unseen_s=0)
    (segment,) = left.scan(SegmentFiles(), FORM)
    assert intact(segment.path, segment) == [1, 2, 3, 4]
    assert claim_own(tmp_path, "decode-0").path.name == "decode-0.3", "the successor keeps what it found"
    left.close()


def folder_of(root: Path, model: str) -> Path:
    return model_folder(root, identity_of(model, "bfloat16"))


def test_pages_that_no_model_has_used_for_long_are_removed(tmp_path: Path) -> None:
    kept, unused, in_use = (folder_of(tmp_path, name) for name in ("kept", "unused", "in-use"))
    for path in (kept, unused, in_use):
        folder = claim_own(path, "decode-0")
        written(folder.next_segment())
        if path != in_use:
            folder.close()
    assert remove_unused(tmp_path, kept=[kept.name], unseen_s=3600) == 0
    assert remove_unused(tmp_path, kept=[kept.name], unseen_s=0) == 1
    assert set(tmp_path.iterdir()) == {in_use, kept}
    folder.close()


def test_pages_of_other_models_give_way_the_longest_unseen_first_until_the_rest_fits(tmp_path: Path) -> None:
    kept, *others, in_use = (folder_of(tmp_path, name) for name in ("kept", "a", "b", "c", "in-use"))
    folders = [claim_own(path, "decode-0") for path in (*others, in_use, kept)]
    sizes = []
    for age_s, folder in zip((300, 900, 600, 1200, 5000), folders, strict=True):
        path = folder.next_segment()
        written(path)
        sizes.append(path.stat().st_size)
        if folder is not folders[3]:
            folder.close()
        os.utime(folder.path / "lock", (time.time() - age_s,) * 2)
    one = sizes[0]
    assert remove_beyond(tmp_path, kept=[kept.name], unseen_s=60, most_bytes=4 * one) == 0
    assert remove_beyond(tmp_path, kept=[kept.name], unseen_s=3600, most_bytes=0) == 0, "seen too recently"
    assert remove_beyond(tmp_path, kept=[kept.name], unseen_s=60, most_bytes=2 * one) == 1
    assert set(tmp_path.iterdir()) == {kept, others[0], others[2], in_use}, "the oldest of the dead ones has gone"
    assert remove_beyond(tmp_path, kept=[kept.name], unseen_s=60, most_bytes=one - 1) == 2
    assert set(tmp_path.iterdir()) == {kept, in_use}
    assert (in_use / "decode-0" / "00000001.pages").stat().st_size == one, "its owner lives"
    folders[3].close()


def test_looking_at_folders_of_other_models_does_not_make_them_look_used(tmp_path: Path) -> None:
    folder = claim_own(folder_of(tmp_path, "other"), "decode-0")
    written(folder.next_segment())
    folder.close()
    os.utime(folder.path / "lock", (1000.0, 1000.0))
    assert remove_beyond(tmp_path, kept=[], unseen_s=60, most_bytes=1 << 40) == 0
    assert (folder.path / "lock").stat().st_mtime == 1000.0


def tree(root: Path) -> set[Path]:
    return set(root.rglob("*"))


def test_nothing_is_removed_that_is_not_ours_and_no_foreign_lock_is_taken(tmp_path: Path) -> None:
    root, ours = tmp_path / "lib", f"v1-{'ab' * 16}"
    foreign = (
        "dpkg/lock", "apt/lists/lock", "models/a/lock", "models/a/00000001.pages", f"{ours}x/decode-0/lock",
        f"v1-{'AB' * 16}/decode-0/lock", "v1-ab/decode-0/00000001.pages", f"{ours}/lost+found/lock", f"{ours}/lock",
        f"{ours}/notes/readme", "decode-0/lock",
    )  # fmt: skip
    for name in foreign:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    elsewhere = claim_own(folder_of(tmp_path / "elsewhere", "m"), "decode-0")
    written(elsewhere.next_segment())
    elsewhere.close()
    (root / f"v1-{'cd' * 16}").symlink_to(elsewhere.path.parent)
    (root / ours / "linked").symlink_to(elsewhere.path)
    before = tree(tmp_path)
    assert remove_unused(root, kept=[], unseen_s=0) == 0
    assert remove_beyond(root, kept=[], unseen_s=0, most_bytes=0) == 0
    assert not list(claim_left(root / ours, unseen_s=0))
    assert tree(tmp_path) == before


def test_foreign_files_in_our_own_folders_survive_their_removal(tmp_path: Path) -> None:
    folder = claim_own(folder_of(tmp_path, "unused"), "decode-0")
    foreign = {folder.path / name for name in ("notes.txt", "1.pages", "a.pages", "00000001.pages.bak", "sub/lock")}
    (folder.path / "sub").mkdir()
    for path in foreign:
        path.write_bytes(b"mine")
    written(folder.next_segment())
    (folder.path / "probe").write_bytes(b"")
    folder.close()
    assert remove_unused(tmp_path, kept=[], unseen_s=0) == 1
    assert tree(folder.path) == {*foreign, folder.path / "sub"}
    assert remove_unused(tmp_path, kept=[], unseen_s=0) == 0, "without a lock it is not a worker's folder"


def test_a_folder_in_trouble_is_left_out_and_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for worker in ("bad", "good"):
        claim_own(folder_of(tmp_path, "unused"), worker).close()
    touch = SegmentFolder.touch

    def failing(folder: SegmentFolder) -> None:
        if folder.path.name == "bad":
            raise OSError(errno.EIO, "the disk is broken there")
        touch(folder)

    monkeypatch.setattr(SegmentFolder, "touch", failing)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert remove_unused(tmp_path, kept=[], unseen_s=0) == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "no lock stays open"
    assert [path.name for path in folder_of(tmp_path, "unused").iterdir()] == ["bad"]
    assert [record.message.split(" folder=")[0] for record in caplog.records] == ["folder of pages cannot be claimed"]
    assert not list(claim_left(tmp_path / "gone", unseen_s=0)), "another worker removed it meanwhile"


def test_a_new_segment_never_has_the_name_of_an_old_one(tmp_path: Path) -> None:
    folder = claim_own(tmp_path, "decode-0")
    paths = [written(folder.next_segment()) for _ in range(3)]
    folder.close()
    again = SegmentFolder.claim(folder.path)
    assert again is not None
    assert again.next_segment() not in paths
    assert [segment.path for segment in again.scan(SegmentFiles(), FORM)] == paths


def test_a_write_that_the_disk_takes_in_part_is_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, buffer = SegmentFiles(), AlignedBuffer(2 * SECTOR)
    files.probe(tmp_path)
    with files.writing(tmp_path / "00000001.pages") as file:
        monkeypatch.setattr(os, "pwrite", lambda *_: SECTOR // 2)
        with pytest.raises(OSError, match="part of a record") as caught:
            file.write(buffer.view, 0)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo, os.mkdir])
def test_what_only_has_the_name_of_a_segment_is_neither_read_nor_written_nor_waited_for(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    files, path = SegmentFiles(), tmp_path / "00000001.pages"
    files.probe(tmp_path)
    make(path)
    for opened in (files.reading, files.writing):
        with pytest.raises(OSError, match=path.name), opened(path):
            pass


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def without_direct(path, flags: int, mode: int = 0o777) -> int:  # type: ignore[no-untyped-def]  # any path
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", without_direct)
    files = SegmentFiles()
    files.probe(tmp_path)
    assert not files.is_direct
    assert list(tmp_path.iterdir()) == []
