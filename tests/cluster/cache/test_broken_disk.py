"""Real worker processes on a file system that is full, and on files that the kernel cannot read: serving goes on."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import processes
from tests.cluster.cache.test_tiers import OPTIONS, PACED, PAGES, PROMPTS, of_worker, prompt
from tests.cluster.processes import PATIENCE_S, Client, ProcessCluster, running_cluster
from twostroke.config import CacheConfig

WORKER = "decode-0"
FULL = "tmpfs -o size=128k"
"""A file system for about a dozen pages of 4096 bytes with their headers."""
WITHOUT_DIRECT_IO = "ramfs"
"""Its files are opened like those below /proc, of which none takes direct I/O."""


def can_mount() -> bool:
    """Tells whether a process here may mount file systems that nobody else sees."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64k none /mnt"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="needs root, and unshare with a mount namespace")


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Lets workers that start from now on see such a file system at the returned path."""

    def mount(kind: str) -> Path:
        folder, plain = tmp_path / "disk", processes.command_of
        folder.mkdir()

        def command_of(module: str) -> list[str]:
            if module == "router":
                return plain(module)
            script = f'mount -t {kind} none "$0" && exec "$@"'
            return ["unshare", "-m", "sh", "-c", script, str(folder), *plain(module)]

        monkeypatch.setattr(processes, "command_of", command_of)
        return folder

    return mount


async def until_off(cluster: ProcessCluster) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await asyncio.to_thread(of_worker, cluster, WORKER, "up"):
            await asyncio.sleep(0.05)


def break_segments(folder: Path, process: int) -> None:
    """Mounts a file over each segment that the kernel answers with EIO: nothing is mapped at such low addresses."""
    segments = list(Path(f"/proc/{process}/root{folder}").rglob("*.pages"))
    assert segments
    for segment in segments:
        path = folder / segment.relative_to(f"/proc/{process}/root{folder}")
        mount = ["mount", "--bind", f"/proc/{process}/mem", str(path)]
        subprocess.run(["nsenter", "--target", str(process), "--mount", *mount], check=True)


def warnings_of(cluster: ProcessCluster) -> list[str]:
    return [line for line in cluster.logs().splitlines() if "disk tier" in line and "WARNING" in line]


async def answers(client: Client) -> list[list[int]]:
    return [await client.tokens(prompt(number), **OPTIONS) for number in range(PROMPTS)]


async def test_a_file_system_that_is_full_turns_the_tier_off_and_serving_goes_on(mounted) -> None:
    folder = mounted(FULL)
    cache = CacheConfig(kv_cache_memory_bytes=PAGES * 4096, disk_cache_bytes=8 << 20, disk_cache_dir=str(folder))
    async with running_cluster(prefill=0, decode=1, model=PACED, cache=cache) as cluster:
        client = Client(cluster.grpc)
        assert await asyncio.to_thread(of_worker, cluster, WORKER, "up") == 1
        expected = await answers(client)
        await until_off(cluster)
        assert await answers(client) == expected
        (warning,) = warnings_of(cluster)
        assert "disk tier turned off" in warning
        assert "No space left on device" in warning or "took only a part" in warning
        assert not list(folder.iterdir()), "only the worker sees the file system"
        await client.close()


async def test_files_that_the_kernel_cannot_read_turn_the_tier_off_and_serving_goes_on(mounted) -> None:
    folder = mounted(WITHOUT_DIRECT_IO)
    cache = CacheConfig(kv_cache_memory_bytes=PAGES * 4096, disk_cache_bytes=2 << 20, disk_cache_dir=str(folder))
    async with running_cluster(prefill=0, decode=1, model=PACED, cache=cache) as cluster:
        client = Client(cluster.grpc)
        assert "is_direct=False" in cluster.logs()
        expected = await answers(client)
        break_segments(folder, cluster.workers[WORKER].process.pid)
        assert await answers(client) == expected
        await until_off(cluster)
        assert await answers(client) == expected
        (warning,) = warnings_of(cluster)
        assert "Input/output error" in warning
        await client.close()
