"""The folder of one launcher, and the cleanup process that removes it and ends every process that uses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.clients import state_file
from cluster.launch import cleanup

LONGEST_BASE = 27
"""Most characters of the path above the folder. A socket's path may have 107: Ray takes up to 64, and 16 are ours."""
CLEANUP_S = cleanup.PATIENCE_S + 5.0


class RunFolder:
    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="ts-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
        self.log_dir = self.path / "logs"
        self.log_dir.mkdir()
        # Ray opens its folder to all users; only this user may enter the folder around it.
        self.ray_dir = self.path / "ray"
        self._cleanup = subprocess.Popen(
            [sys.executable, "-I", "-S", cleanup.__file__, str(self.path), str(state_file.path_of(os.getpid()))],
            stdin=subprocess.PIPE,
            env={},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._cleanup.stdin is not None
        self._cleanup.stdin.close()
        try:
            self._cleanup.wait(CLEANUP_S)
        except subprocess.TimeoutExpired:
            shutil.rmtree(self.path, ignore_errors=True)
