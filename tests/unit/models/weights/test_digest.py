"""What two models differ in, however little, and what is not read twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from twostroke.models.file_versions import FileVersions
from twostroke.models.weights import digest
from twostroke.models.weights.stored.tensor_header import SHARD_INDEX


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", 1000)
    monkeypatch.setattr(digest, "SETTLED_S", -1)
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


def weights_digest(directory: Path) -> str:
    return digest.weights_digest(FileVersions.now(directory))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which pieces that were read began."""
    starts: list[int] = []
    pread = os.pread

    def noted(descriptor: int, count: int, start: int) -> bytes:
        starts.append(start)
        return pread(descriptor, count, start)

    monkeypatch.setattr(os, "pread", noted)
    return starts


def model(directory: Path, content: bytes = bytes(range(250)) * 10, *, name: str = "model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("byte", [0, 999, 1000, 1250, 2499])
def test_one_bit_anywhere_makes_another_digest(tmp_path: Path, byte: int) -> None:
    content = bytearray(bytes(range(250)) * 10)
    same = weights_digest(model(tmp_path / "a", bytes(content)))
    assert same == weights_digest(model(tmp_path / "b", bytes(content)))
    content[byte] ^= 1
    assert weights_digest(model(tmp_path / "c", bytes(content))) != same


def test_an_index_that_means_other_files_makes_another_digest(tmp_path: Path) -> None:
    """Both have the tensors that it names: weights packed of one must not be served for the other."""
    directory = model(model(tmp_path / "a", b"x", name="1.safetensors"), b"y", name="2.safetensors")
    found = {weights_digest(directory)}
    for shard in ("1.safetensors", "2.safetensors"):
        (directory / SHARD_INDEX).write_text(json.dumps({"weight_map": {"tensor": shard}}))
        found.add(weights_digest(directory))
    assert len(found) == 3


def test_files_that_change_places_make_another_digest(tmp_path: Path) -> None:
    one, other = (
        weights_digest(model(model(tmp_path / name, first, name="1.safetensors"), second, name="2.safetensors"))
        for name, first, second in (("a", b"x", b"y"), ("b", b"y", b"x"))
    )
    assert one != other


def test_a_file_is_read_once_and_again_when_it_has_changed(tmp_path: Path, reads: list[int]) -> None:
    directory = model(tmp_path / "a")
    first = weights_digest(directory)
    assert sorted(reads) == [0, 1000, 2000]
    assert weights_digest(directory) == first
    assert len(reads) == 3
    os.utime(directory / "model.safetensors", (1, 1))
    assert weights_digest(directory) == first
    assert len(reads) == 6


def test_other_weights_with_the_same_size_and_time_are_not_taken_for_what_was_read(tmp_path: Path) -> None:
    """An archive, or a copy that keeps times, writes such weights over the ones before."""
    digests = set()
    for content in (b"one" * 900, b"two" * 900):
        directory = model(tmp_path / "a", content)
        os.utime(directory / "model.safetensors", (1, 1))
        digests.add(weights_digest(directory))
        time.sleep(0.02)  # more than a tick of the file system's clock
    assert len(digests) == 2


def test_a_file_that_has_just_been_written_is_read_again(
    tmp_path: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SETTLED_S", 3600)
    directory = model(tmp_path / "a")
    os.utime(directory / "model.safetensors", (1, 1))
    for _ in range(2):
        weights_digest(directory)
    assert len(reads) == 6


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"path": 1}'])
def test_what_was_remembered_and_is_damaged_is_not_believed(tmp_path: Path, damage: str) -> None:
    directory = model(tmp_path / "a")
    first = weights_digest(directory)
    [memory] = (tmp_path / "cache").rglob("*.json")
    memory.write_text(damage)
    assert weights_digest(directory) == first


def test_a_cache_that_cannot_be_written_costs_a_second_reading_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "file"))
    assert weights_digest(model(tmp_path / "a"))
    assert "digest not remembered" in caplog.text
