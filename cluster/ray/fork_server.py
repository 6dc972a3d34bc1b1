"""Forks a local cluster's Ray workers from one process, which has imported what they need.

`python -P -m cluster.ray.fork_server MODULE...` with a listening socket as its stdin. Ray and torch take a second to
import, and 180 MB: a forked worker has them at once, and shares the memory of all that it does not change. The process
has one thread, because a fork copies only the thread that calls it. It ends with the launcher.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from dataclasses import dataclass

from cluster.ray.forked_worker import MOST_BYTES, STREAMS

JOB = "RAY_JOB_ID"
"""The variable that Ray reads when it is imported: a worker of another job cannot be forked here."""
SCRIPT = "default_worker.py"
"""The script of Ray that is a worker's process."""
NOT_FOR_SCRIPT = ("--language=", "--serialized-runtime-env-context=")
"""Arguments of the script that Ray runs before it, which sets up the environment that a job asks for. Ours ask for
none."""


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What Ray's raylet asks for."""

    command: list[str]
    environment: dict[str, str]
    streams: list[int]
    """File descriptors that become standard output and standard error."""

    def run(self) -> None:
        """Become the worker."""
        os.setpgid(0, 0)  # when a worker has ended, the raylet ends its process group
        for stream, received in zip(STREAMS, self.streams, strict=True):
            os.dup2(received, stream)
            os.close(received)
        os.environ.clear()
        os.environ.update(self.environment)
        script = next(index for index, word in enumerate(self.command) if word.endswith(SCRIPT))
        sys.argv = [word for word in self.command[script:] if not word.startswith(NOT_FOR_SCRIPT)]
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would write to each object, and so copy its page
    with socket.socket(fileno=sys.stdin.fileno()) as listener:
        start = _until_forked(listener)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start.run()


def _until_forked(listener: socket.socket) -> WorkerStart:
    """Fork a process for each start that is asked for. Returns in the forked processes alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that end: nobody waits for them here
    while True:
        connection, _ = listener.accept()
        with connection:
            start = _received(connection)
            if start is None or start.environment.get(JOB) != os.environ[JOB]:
                continue  # who asked finds the connection closed
            if (pid := os.fork()) == 0:
                return start
            connection.send(str(pid).encode())
            for stream in start.streams:
                os.close(stream)


def _received(connection: socket.socket) -> WorkerStart | None:
    said, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, len(STREAMS))
    if not said:
        return None
    asked = json.loads(said)
    return WorkerStart(asked["command"], asked["environment"], list(streams))


if __name__ == "__main__":
    main()
