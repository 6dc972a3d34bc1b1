"""Files and folders that are executed or believed: who may have written them.

Whoever can write to a cache of kernels, weights, tokenizers or pages can change answers, or run code. So what lies in
one is used only if it belongs to this process's user or to root. No other user may be able to write to it. The folders
above it are looked at, too: a user who may rename one of them could put another in its place. A folder that others may
write to is allowed there if its sticky bit is set, as in /tmp. Then others cannot rename files that are not theirs. The
volumes of a Kubernetes pod are open to the pod's group (fsGroup), and the folder that a volume is mounted at is open to
all. That is allowed, because no other user is in the pod. A group that a distribution has made only for this user
counts as the user: there the umask is 002, and new folders have 0775.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

OURS_TO_WRITE: Final = 0o755
"""The mode of folders and programs that others may use and not change."""

MOST_RUNTIME_BYTES = 40
"""The longest `XDG_RUNTIME_DIR` that is used: the path of a Unix socket has 107 bytes at most, with its name."""


MOST_LINKS = 40
"""Links of one path that Linux follows."""
OVERFLOW_USER = 65534
"""Linux shows this one for users that a namespace does not have."""


class UntrustedPath(PermissionError):
    """Others may have written what lies there; its text says what is wrong and what to do."""


def problem_of(status: os.stat_result, *, may_be_sticky: bool = False) -> str | None:
    """Returns why what has this status is not to be trusted, and what to do; None if it is."""
    if (stranger := stranger_of(status)) is not None:
        return f"{stranger}; remove it, or chown it if it is yours"
    # A link has no mode of its own: what it leads to and the folder that holds it are looked at.
    others_write = not stat.S_ISLNK(status.st_mode) and (
        status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_our_group(status))
    )
    if others_write and not (may_be_sticky and status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        return f"others may write to it (mode {mode:04o}); chmod go-w it if nobody has, else remove it"
    return None


def stranger_of(status: os.stat_result) -> str | None:
    """Returns its owner, if that is neither this process's user nor root."""
    return None if status.st_uid in (os.geteuid(), 0) else f"belongs to user {status.st_uid}"


def check(*paths: Path) -> None:
    """Raises UntrustedPath for the first one that is not to be trusted, and OSError for one that is not there."""
    for path in paths:
        _refuse(path, problem_of(path.lstat()))


def check_open(descriptor: int, path: Path) -> None:
    """Raises UntrustedPath for an open file that is not to be trusted; `path` names it."""
    _refuse(path, problem_of(os.fstat(descriptor)))


def check_cache(path: Path) -> None:
    """Raises UntrustedPath where others may have written the file or folder at `path`, or may put another there.

    It, what its links lead to, and all folders above are looked at. Raises OSError where it is not there.
    """
    real = path.resolve(strict=True)
    ways = (*_followed(Path(os.path.abspath(path))), real)
    for each in ways:
        _refuse(each, problem_of(each.lstat()))
    for folder in dict.fromkeys(folder for each in ways for folder in each.parents):
        if not (is_in_pod() and os.path.ismount(folder)):
            status = folder.lstat()
            if _has_hidden_owner(status, Path("/proc/self/uid_map")):
                status = os.stat_result((*status[:4], 0, *status[5:10]))
            _refuse(folder, problem_of(status, may_be_sticky=True))


def _followed(path: Path) -> Iterator[Path]:
    """Yields the path as it is spelled, and as it is with one link after the other replaced by what it leads to."""
    for _ in range(MOST_LINKS):
        yield path
        link = next((each for each in (*reversed(path.parents), path) if each.is_symlink()), None)
        if link is None:
            return
        path = Path(os.path.abspath(link.parent / link.readlink() / path.relative_to(link)))


def _has_hidden_owner(status: os.stat_result, map_of_users: Path) -> bool:
    """Returns whether the owner is outside of this user namespace: so is root in one of a single user (Apptainer).

    All such owners show as one user that the namespace does not have. Folders above a cache are root's then.
    """
    if status.st_uid != OVERFLOW_USER:
        return False
    try:
        ranges = [tuple(map(int, line.split())) for line in map_of_users.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return False
    return all(not first <= OVERFLOW_USER < first + count for first, _, count in ranges)


def is_in_pod() -> bool:
    """Returns whether this is a container of a Kubernetes pod. The kubelet sets this variable in every one."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def _is_our_group(status: os.stat_result) -> bool:
    is_of_our_pod = is_in_pod() and status.st_gid in {os.getegid(), *os.getgroups()}
    return is_of_our_pod or _is_private_group(status.st_gid, os.geteuid())


def make_folder(folder: Path) -> None:
    """Makes a folder of a cache and those above it, where they are missing, so that no umask opens them to others.

    Raises OSError.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.is_dir():
            each.mkdir(mode=OURS_TO_WRITE, exist_ok=True)


@functools.lru_cache(64)
def _is_private_group(group: int, user: int) -> bool:
    """Returns whether the group is the user's own: of the same name, its first group, without another member.

    Root's group is shared.
    """
    if group == 0:
        return False
    try:
        owner, entry = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return (group, entry.gr_name) == (owner.pw_gid, owner.pw_name) and set(entry.gr_mem) <= {owner.pw_name}


def private_folder(name: str) -> Path:
    """Returns this user's own folder of that name for what lasts as long as the machine runs, made if need be.

    Nobody else may enter it. Raises UntrustedPath where others could have made what lies there.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/none")
    is_short = len(os.fsencode(runtime)) <= MOST_RUNTIME_BYTES
    is_ours = is_short and os.access(runtime, os.W_OK | os.X_OK) and runtime.stat().st_uid == os.geteuid()
    folder = runtime / f"twostroke-{name}" if is_ours else Path("/tmp") / f"twostroke-{name}-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UntrustedPath(
            errno.EPERM, f"{folder} must be a folder that this user alone may enter; remove it, or set XDG_RUNTIME_DIR"
        )
    return folder


def remove_abandoned_sockets(folder: Path, suffix: str, least_age_s: float = 0.0) -> None:
    """Removes Unix sockets without a listener: their processes have ended. `least_age_s`: for those whose processes
    may not listen yet.
    """
    for path in folder.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_mtime <= time.time() - least_age_s and _is_abandoned(path):
                path.unlink()


def _is_abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def _refuse(path: Path, problem: str | None) -> None:
    if problem is not None:
        raise UntrustedPath(errno.EPERM, f"{path}: {problem}")
