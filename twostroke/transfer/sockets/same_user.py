"""Unix sockets between processes of one user: where they lie, and which user owns the process at the other end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path

from twostroke.base.errors import Unauthenticated
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.tls import PlainWrapper

SUFFIX = ".sock"
_CREDENTIALS = struct.Struct("3i")
"""Linux' `struct ucred`: process, user and group."""


def check_same_user(sock: socket.socket) -> None:
    """Raises Unauthenticated unless the process that made the other end is one of this user's, or of root's."""
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.geteuid(), 0):
        raise Unauthenticated(f"the process at the other end belongs to user {user}, not to {os.geteuid()} or root")


class SameUserWrapper(PlainWrapper):
    """Leaves connections as they are, and refuses those of other users before anything is read."""

    def shake_hands(self, sock: socket.socket, deadline: Deadline) -> None:
        check_same_user(sock)


def listen_in(folder: Path, backlog: int) -> tuple[Path, socket.socket]:
    """Listens on a new Unix socket in `folder`. Those without a listener are removed.

    A socket gets its name when it listens. So the process of a socket that refuses connections has ended.
    """
    for path in folder.glob(f"*{SUFFIX}"):
        if _is_abandoned(path):
            path.unlink(missing_ok=True)
    name = secrets.token_hex(16)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    beginning = folder / f".{name}"
    listening.bind(str(beginning))
    listening.listen(backlog)
    path = folder / f"{name}{SUFFIX}"
    beginning.rename(path)
    return path, listening


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
