"""What the processes of a server on this machine hold for themselves: page pools, which are shared, do not count."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from cluster.launch import state_file
from tools.bench.options import Target

PROC = Path("/proc")


def own_bytes(target: Target) -> dict[str, int]:
    """Return bytes by "command (pid)"; none where no `twostroke serve` of this machine has the target's port."""
    port = str(urlsplit(f"//{target.grpc}" if target.grpc else target.url).port)
    launchers = [s.pid for s in state_file.running() if port in (s.grpc.rpartition(":")[2], s.http.rpartition(":")[2])]
    return {
        name: held for pid in sorted(_with_descendants(launchers)) if (found := _held(pid)) for name, held in (found,)
    }


def _with_descendants(roots: list[int]) -> set[int]:
    parents: dict[int, int] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            status = _status(int(folder.name))
            if status is not None:
                parents[int(folder.name)] = int(status["PPid"])
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _held(pid: int) -> tuple[str, int] | None:
    status = _status(pid)
    if status is None or "RssAnon" not in status:
        return None
    return f"{status['Name']} ({pid})", int(status["RssAnon"].removesuffix(" kB")) << 10


def _status(pid: int) -> dict[str, str] | None:
    """None for a process that has ended meanwhile."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
