"""Starts the fork server of a local cluster (see `cluster.ray.fork_server`), before Ray itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from cluster.routers import parent_death_guard

MODULES = (
    "ray",
    "ray.actor",
    "ray._private.node",
    "ray._private.async_compat",
    "ray._private.runtime_env.setup_hook",
    "cluster.supervisor.supervisor",
    "prefill_worker.worker",
    "decode_worker.worker",
)
"""The modules that every process of a local cluster needs, or most."""
MODEL_MODULES = ("twostroke.engine.runner", "twostroke.engine.device_fit", "twostroke.models.known_specs")
"""The modules that load torch. Paced models do without."""
FIRST_JOB = "01000000"
"""Ray's name for the first job of a cluster, which is the launcher's."""
BACKLOG = 64
"""Workers that may wait until the modules are imported."""


class ForkServer:
    """The process. Create it in the main thread: the process dies with the thread that started it."""

    def __init__(self, folder: Path, log_path: Path, *, is_paced: bool) -> None:
        self.path = folder / "fork.sock"
        """The socket that takes requests, from now on."""
        command = [sys.executable, "-P", "-m", "cluster.ray.fork_server", *MODULES]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, log_path.open("ab") as log_file:
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", parent_death_guard.__file__, str(os.getpid()), *command),
                    *(() if is_paced else MODEL_MODULES),
                ],
                stdin=listener.fileno(),
                stdout=log_file,
                stderr=log_file,
                env=os.environ | _environment(),
                start_new_session=True,
            )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    return {
        # A library for matrices starts threads when it is imported; a fork would not have them.
        "OPENBLAS_NUM_THREADS": "1",
        # Ray reads these when it is imported. A worker ends with the process of the second, which for others is the
        # raylet: it is not there yet, and ends with the launcher.
        "RAY_JOB_ID": FIRST_JOB,
        "RAY_RAYLET_PID": str(os.getpid()),
    }
