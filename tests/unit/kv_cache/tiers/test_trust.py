"""A worker reads only folders of pages that nobody but its user and root can write to."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from twostroke.base.errors import ConfigError
from twostroke.base.ids import BlockHash
from twostroke.kv_cache.tiers import trust
from twostroke.kv_cache.tiers.files import SegmentFiles
from twostroke.kv_cache.tiers.folders import claim_left, claim_own, model_folder, remove_unused
from twostroke.kv_cache.tiers.record import RecordFormat, RecordHeader
from twostroke.kv_cache.tiers.trust import FolderTrust

FORM = RecordFormat(bytes(16), 64)
MODEL = model_folder(Path(), FORM.identity)
STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def left_folder(root: Path) -> Path:
    """The folder of a dead worker with one record."""
    folder = claim_own(root / MODEL, "dead")
    record = FORM.pack(RecordHeader(BlockHash(b"1" * 16), BlockHash(bytes(16)), bytes(8)))
    segment = folder.next_segment()
    segment.write_bytes(record + bytes(FORM.record_bytes - len(record)))
    segment.chmod(0o600)
    folder.close()
    return folder.path


def adopted(root: Path, folder_trust: FolderTrust) -> int:
    records = 0
    for folder in claim_left(root / MODEL, unseen_s=0, folder_trust=folder_trust):
        records += sum(len(each.records) for each in folder.scan(SegmentFiles(), FORM))
        folder.close()
    return records


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
@pytest.mark.parametrize("what", ["model", "worker", "lock", "segment"])
def test_what_others_may_write_to_is_not_adopted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, mode: int
) -> None:
    folder, folder_trust = left_folder(tmp_path), FolderTrust()
    assert adopted(tmp_path, folder_trust) == 1
    paths = {"model": folder.parent, "worker": folder, "lock": folder / "lock", "segment": folder / "00000001.pages"}
    paths[what].chmod(mode)
    for _ in range(3 if what != "segment" else 1):
        assert adopted(tmp_path, folder_trust) == 0
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert f"{paths[what]}: others may write to it" in told.getMessage()
    assert "chmod go-w" in told.getMessage()
    if what != "segment":
        assert remove_unused(tmp_path, kept=[], unseen_s=0) == 0


@needs_root
@pytest.mark.parametrize("what", ["model", "worker", "lock", "segment"])
def test_what_belongs_to_another_user_is_not_adopted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    folder = left_folder(tmp_path)
    paths = {"model": folder.parent, "worker": folder, "lock": folder / "lock", "segment": folder / "00000001.pages"}
    os.chown(paths[what], STRANGER, STRANGER)
    assert adopted(tmp_path, FolderTrust()) == 0
    (told,) = caplog.records
    assert f"{paths[what]}: belongs to user {STRANGER}; remove it" in told.getMessage()


def test_a_worker_does_not_use_its_own_folder_if_others_may_write_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left_folder(tmp_path).chmod(0o707)
    folder = claim_own(tmp_path / MODEL, "dead")
    folder.close()
    assert folder.path.name == "dead.2"
    assert "own folder of pages is not trusted" in caplog.text


def test_a_root_that_everybody_may_write_to_needs_the_sticky_bit(tmp_path: Path) -> None:
    for mode in (0o700, 0o755, 0o775, 0o1777):
        tmp_path.chmod(mode)
        trust.check_root(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"can be written by everybody.*chmod o-w it, or chmod \+t"):
        trust.check_root(tmp_path)
    tmp_path.chmod(0o700)


@needs_root
def test_a_root_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}: name a folder of your own"):
        trust.check_root(tmp_path)


def test_folders_are_made_so_that_they_are_trusted_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        left_folder(tmp_path / "new" / "root")
    finally:
        os.umask(before)
    trust.check_root(tmp_path / "new" / "root")
    assert adopted(tmp_path / "new" / "root", FolderTrust()) == 1
