"""What the processes of a server on this machine hold for themselves: page pools, which are shared, do not count."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

import psutil

from cluster.clients import state_file
from tests import process_table
from tools.bench.options import Target


def own_bytes(target: Target) -> dict[str, int]:
    """Returns bytes by "command (pid)"; none where no `twostroke serve` of this machine has the target's port."""
    port = str(urlsplit(f"//{target.grpc}" if target.grpc else target.url).port)
    found: dict[str, int] = {}
    for state in state_file.running():
        if port in (state.grpc.rpartition(":")[2], state.http.rpartition(":")[2]):
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= bytes_by_name(psutil.Process(state.pid))
    return found


def bytes_by_name(launcher: psutil.Process) -> dict[str, int]:
    """Returns what a process and all below it share with nobody, by "command (pid)"."""
    found: dict[str, int] = {}
    for process in process_table.with_all_below(launcher.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_info()
            found[f"{process.name()} ({process.pid})"] = int(memory.rss - memory.shared)
    return found
