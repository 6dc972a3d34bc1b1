"""The processes below one process, as psutil shows them. A process that ends while it is read shows nothing."""

from __future__ import annotations

import contextlib

import psutil


def below(pid: int) -> list[psutil.Process]:
    """Returns its children, theirs and so on; zombies are left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process for process in psutil.Process(pid).children(recursive=True) if title_of(process)]
    return []


def with_all_below(pid: int) -> list[psutil.Process]:
    """Returns the process itself and all below it. Raises psutil.NoSuchProcess."""
    return [psutil.Process(pid), *below(pid)]


def title_of(process: psutil.Process) -> str:
    """Returns what it was started with, or calls itself since."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).strip()
    return ""


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Returns the environment as it was when the process began."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return dict(process.environ())
    return {}


def listening_ports(process: psutil.Process) -> frozenset[int]:
    """Returns the TCP ports on which it listens."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = process.net_connections(kind="tcp")
        return frozenset(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN)
    return frozenset()


def has_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped it, or ended it."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
