"""Asks the fork server for a worker of Ray, and ends: `python -I -S forked_worker.py SOCKET COMMAND...`.

The raylet runs this in place of COMMAND and takes the process that registers with it for the worker. Where no fork
server answers, this process becomes COMMAND. The script uses only the standard library, so it starts in milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys

STREAMS = (1, 2)
"""Standard output and standard error, which the worker gets."""
MOST_BYTES = 128 << 10
"""Size of a request: a command and its environment."""


def is_forked(path: str, command: list[str]) -> bool:
    said = json.dumps({"command": command, "environment": dict(os.environ)}).encode()
    if len(said) > MOST_BYTES:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(path)
            socket.send_fds(connection, [said], STREAMS)
            return connection.recv(len(str(sys.maxsize))) != b""
    except OSError:
        return False


def main() -> None:
    path, *command = sys.argv[1:]
    if not is_forked(path, command):
        os.execv(command[0], command)


if __name__ == "__main__":
    main()
