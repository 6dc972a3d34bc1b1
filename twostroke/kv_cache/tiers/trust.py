"""This module decides which folders of pages are read.

A digest detects damage, but an attacker can compute a valid one.

A user who can write to a folder of pages can change answers. So a folder, the folder of its model, its lock and its
segments must belong to the user of this process or to root. No other user may write there. The root with the folders of
all models may be shared if its sticky bit is set: then users cannot rename folders of others.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.security.trusted_paths import UntrustedPath, check, stranger_of

log = logging.getLogger(__name__)


def check_root(root: Path) -> None:
    """Refuses a root in which other users can replace our folders. Raises ConfigError, OSError for a missing root."""
    status = root.stat()
    if (stranger := stranger_of(status)) is not None:
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
    """Decides which folders of other workers may be read, and warns once of each that may not."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def allows(self, *paths: Path) -> bool:
        """Returns whether these paths may be read, and warns once of each problem. Raises OSError for a missing one."""
        try:
            check(*paths)
        except UntrustedPath as error:
            problem = str(error.strerror)
            if problem not in self._told:
                self._told.add(problem)
                log.warning("pages of another worker are not trusted problem=%s", problem)
            return False
        return True
