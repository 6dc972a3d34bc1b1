"""`python -m tests.cluster.fork_server DESCRIPTOR`: begins processes that have their modules already.

The descriptor is a socket of whole messages. Each asks for one process: JSON, and four descriptors, which become its
standard input, output and error and the place where its end is told. The answer is its pid. All end with the socket.
A process for which no modules are named loads everything itself, as a user's does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import Any

MOST_BYTES = 1 << 20
"""Bytes of one message: it holds an environment."""


class ForkServer:
    def __init__(self, asking: socket.socket) -> None:
        self._asking = asking
        self._selector = selectors.DefaultSelector()
        self._selector.register(asking, selectors.EVENT_READ)
        self._children: dict[int, tuple[int, int]] = {}
        """The pid of each process, and the descriptor where its end is told, by its pidfd."""

    def run(self) -> dict[str, Any] | None:
        """Returns what to run in each process that it begins, and nothing in the server itself, when it has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._asking:
                    self._reap(key.fd)
                    continue
                message, descriptors, *_ = socket.recv_fds(self._asking, MOST_BYTES, 4)
                if not message:
                    return self._end()
                asked = json.loads(message)
                _load(asked["modules"])
                if self._begin(descriptors):
                    return dict(asked)

    def _begin(self, descriptors: list[int]) -> bool:
        """Returns whether this is the new process."""
        assert len(os.listdir("/proc/self/task")) == 1, "a lock that another thread holds would stay locked for ever"
        pid = os.fork()
        *standard, told = descriptors
        if pid == 0:
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            for descriptor in (*descriptors, *self._children, *(told for _, told in self._children.values())):
                os.close(descriptor)
            self._selector.close()
            self._asking.close()
            return True
        for descriptor in standard:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, told)
        self._selector.register(pidfd, selectors.EVENT_READ)
        self._asking.send(str(pid).encode())
        return False

    def _reap(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        pid, told = self._children.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(told)

    def _end(self) -> None:
        for pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)
        for pidfd in tuple(self._children):
            self._reap(pidfd)


def _load(names: list[str]) -> None:
    """Loads what is not there yet. Collections in the new processes, and at their ends, pass over all of it."""
    if not sys.modules.keys() >= set(names):
        for name in names:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test ends it
    asked = ForkServer(socket.socket(fileno=int(sys.argv[1]))).run()
    if asked is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(asked["environment"])
    command = asked["command"]
    if not asked["modules"]:
        os.execvp(command[0], command)
    sys.argv[1:] = command[3:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
