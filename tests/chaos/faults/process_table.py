"""The processes below one process, as the kernel shows them: titles, ports, memory. Linux only, like the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    title: str
    """What it was started with, or calls itself since."""

    def ports(self) -> frozenset[int]:
        """On which it listens; none where it is gone."""
        sockets = _sockets(self.pid)
        return frozenset(port for inode, port in _listening(self.pid) if inode in sockets)

    def environment(self) -> dict[str, str]:
        """Return the environment as it was when the process began."""
        pairs = (entry.partition("=") for entry in Path(f"/proc/{self.pid}/environ").read_text().split("\0") if entry)
        return {name: value for name, _, value in pairs}

    def command(self) -> list[str]:
        return Path(f"/proc/{self.pid}/cmdline").read_text().split("\0")[:-1]

    def resident_bytes(self) -> int:
        """0 where it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE_BYTES
        except OSError:
            return 0

    def open_files(self) -> int:
        return len(_links(self.pid))


def below(pid: int) -> list[Process]:
    """Its children, theirs and so on; zombies are none."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (parent := _parent(path)) is not None:
            children.setdefault(parent, []).append(int(path.name))
    return list(_walk(pid, children))


def _walk(pid: int, children: dict[int, list[int]]) -> Iterator[Process]:
    for child in children.get(pid, ()):
        title = _title(child)
        if title:
            yield Process(child, title)
        yield from _walk(child, children)


def _parent(path: Path) -> int | None:
    try:
        stat = (path / "stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold anything; what follows the last ")" is field 3.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[1])


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    """Inode and port of every listening TCP socket in the process's network."""
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == _LISTENING:
                yield fields[9], int(fields[1].rpartition(":")[2], 16)


def _sockets(pid: int) -> frozenset[str]:
    """Inodes of its sockets."""
    return frozenset(link[len("socket:[") : -1] for link in _links(pid) if link.startswith("socket:["))


def _links(pid: int) -> list[str]:
    """What its file descriptors stand for."""
    links = []
    try:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.append(str(path.readlink()))
            except OSError:
                continue
    except OSError:
        return []
    return links
