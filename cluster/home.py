"""The folder of one launcher, and the janitor who removes it with everything that lives in it, whatever happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster import janitor, state_file

LONGEST_BASE = 27
"""Characters. A socket's path may have 107, of which Ray takes up to 64 below its folder, and we 16 above it."""
JANITOR_S = janitor.PATIENCE_S + 5.0


class Home:
    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="ts-", dir=base if len(base) <= LONGEST_BASE else "/tmp"))
        self.log_dir = self.folder / "logs"
        self.log_dir.mkdir()
        # Ray opens the folder that it is given to everybody; the one around it stays this user's alone.
        self.ray_dir = self.folder / "ray"
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", janitor.__file__, str(self.folder), str(state_file.path_of(os.getpid()))],
            stdin=subprocess.PIPE,
            env={},
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        try:
            self._janitor.wait(JANITOR_S)
        except subprocess.TimeoutExpired:
            shutil.rmtree(self.folder, ignore_errors=True)
