"""This module decides which folders of pages are read: a digest finds damage, but anybody can make one.

Whoever can write to a folder of pages can change answers. So a folder, the folder of its model, its lock and its
segments have to belong to the user that this process runs as, or to root, and nobody else may write there. The root
that holds the folders of all models may be shared if its sticky bit keeps users from renaming what is not theirs.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

from twostroke.errors import ConfigError

log = logging.getLogger(__name__)


def problem_of(status: os.stat_result) -> str | None:
    """Return why what has this status is not to be trusted, and what to do; None if it is."""
    if (stranger := _stranger(status)) is not None:
        return f"{stranger}; remove it, or chown it if its pages are yours"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return f"others may write to it (mode {mode:04o}); chmod go-w it if nobody has, else remove it"
    return None


class UntrustedPath(PermissionError):
    """Others may have written what lies there; its text says what is wrong and what to do."""


def check(*paths: Path) -> None:
    """Raises UntrustedPath for the first one that is not to be trusted, and OSError for one that is not there."""
    for path in paths:
        problem = problem_of(path.lstat())
        if problem is not None:
            raise UntrustedPath(errno.EPERM, f"{path}: {problem}")


def check_open(descriptor: int, path: Path) -> None:
    """Raises UntrustedPath for an open file that is not to be trusted; `path` names it."""
    problem = problem_of(os.fstat(descriptor))
    if problem is not None:
        raise UntrustedPath(errno.EPERM, f"{path}: {problem}")


def check_root(root: Path) -> None:
    """Raises ConfigError for a root in which others can replace our folders, and OSError for one that is not there."""
    status = root.stat()
    if (stranger := _stranger(status)) is not None:
        raise ConfigError(
            f"--disk-cache-dir {root} {stranger}: name a folder of your own, or chown it", field="disk_cache_dir"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"--disk-cache-dir {root} can be written by everybody, who could change answers: chmod o-w it, or "
            "chmod +t if users share it",
            field="disk_cache_dir",
        )


class FolderTrust:
    """Tells which folders of other workers may be read, and warns once of each that may not."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def allows(self, *paths: Path) -> bool:
        """Raises OSError for what is not there."""
        try:
            check(*paths)
        except UntrustedPath as error:
            problem = str(error.strerror)
            if problem not in self._told:
                self._told.add(problem)
                log.warning("pages of another worker are not trusted problem=%s", problem)
            return False
        return True


def _stranger(status: os.stat_result) -> str | None:
    """Return whose it is, if it is neither ours nor root's."""
    return None if status.st_uid in (os.geteuid(), 0) else f"belongs to user {status.st_uid}"
