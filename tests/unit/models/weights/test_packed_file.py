"""A file of packed weights is whole or not there, and only what this user alone can write to is read."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from twostroke.kernels.cpu.weights.packing import LARGE_PAGE_BYTES
from twostroke.models.weights import packed_file
from twostroke.models.weights.packed_file import mapped, mapped_bytes

CONTENT = bytes(range(256)) * (LARGE_PAGE_BYTES // 256)
DIES_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from twostroke.models.weights.packed_file import mapped

def write(file):
    file.write(bytes(1 << 20))
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

mapped(Path(sys.argv[1]), write)
"""

MAPS = """
import mmap, sys

with open(sys.argv[1], "rb") as file:
    region = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of tests may lie on a file system without them."""
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "packed" / "model.weights"


def write(file: BinaryIO) -> None:
    file.write(CONTENT)


def never(file: BinaryIO) -> None:
    raise AssertionError("it is there already")


def content(region: mmap.mmap | None) -> bytes:
    assert region is not None
    return region[:]


def test_the_second_worker_maps_what_the_first_one_wrote(path: Path) -> None:
    assert content(mapped(path, write)) == content(mapped(path, never)) == CONTENT
    region = mapped(path, never)
    assert region is not None
    with pytest.raises(TypeError):
        region[0:1] = b"x"


def test_what_a_process_has_mapped_is_measured_by_another_one_until_it_ends(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    command = [sys.executable, "-c", MAPS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert mapped_bytes(path.parent, process.pid) == len(CONTENT)
        assert mapped_bytes(path.parent, os.getpid()) == 0
    assert mapped_bytes(path.parent, process.pid) == 0


def test_whoever_dies_while_writing_leaves_no_half_file_and_no_lock(path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", DIES_WHILE_WRITING, str(path)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert not path.exists()
    assert content(mapped(path, write)) == CONTENT


def test_an_error_of_the_writer_leaves_nothing_and_is_raised(path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(CONTENT)
        raise KeyError("a tensor")

    with pytest.raises(KeyError):
        mapped(path, fail)
    assert [file.suffix for file in path.parent.iterdir()] == [".lock"]


def test_a_full_disk_is_no_reason_to_fail(path: Path) -> None:
    def fill(file: BinaryIO) -> None:
        raise OSError("no space left on device")

    assert mapped(path, fill) is None


def test_nobody_waits_forever_for_a_writer_that_hangs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "WAIT_S", 0.0)
    path.parent.mkdir()
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert mapped(path, never) is None


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_write_to_is_not_read(path: Path, what: str) -> None:
    mapped(path, write)
    (path if what == "file" else path.parent).chmod(0o777)
    assert mapped(path, never) is None


def test_another_user_s_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped(path, write)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert mapped(path, never) is None


def test_a_link_is_not_followed_and_a_cut_file_is_not_read(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_bytes(CONTENT)
    path.symlink_to(tmp_path / "elsewhere")
    assert mapped(path, never) is None
    path.unlink()
    path.write_bytes(CONTENT[:-1])
    assert mapped(path, never) is None


def test_where_pages_are_small_nothing_is_shared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 0.25)
    assert mapped(path, write) is None


def test_files_that_nobody_has_used_for_long_are_removed(path: Path) -> None:
    region, other, third = mapped(path, write), path.with_name("other.weights"), path.with_name("third.weights")
    assert region is not None
    os.utime(path, (1.0, 1.0))
    mapped(other, write)
    assert path.exists(), "somebody has it mapped"
    region.close()
    mapped(third, write)
    assert not path.exists()
    assert content(mapped(third, never)) == CONTENT


@pytest.mark.parametrize("free_share", [0.05, 0.5])
def test_on_a_full_disk_files_go_that_were_used_last_longest_ago(
    path: Path, monkeypatch: pytest.MonkeyPatch, free_share: float
) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        is_full = len(list(folder.glob("*.weights"))) > 2
        return SimpleNamespace(total=100, free=100 * (free_share if is_full else 0.5))

    monkeypatch.setattr(packed_file.shutil, "disk_usage", usage)
    files = [path.with_name(f"{number}.weights") for number in range(4)]
    for number, file in enumerate(files[:3]):
        region = mapped(file, write)
        assert region is not None
        region.close()
        os.utime(file, (time.time() - 7200.0 + number,) * 2)
    mapped(files[3], write)
    assert [file.exists() for file in files] == [free_share == 0.5, True, True, True]
