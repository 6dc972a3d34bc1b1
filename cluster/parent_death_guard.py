"""Runs a command that dies with its parent: `python -I -S parent_death_guard.py PARENT_PID COMMAND...`.

The wrapper sets the death signal and then becomes the command. Doing that between fork and exec (`preexec_fn`) may
deadlock in a process full of gRPC and Ray threads. The script uses only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit("the parent was gone before this process was bound to it")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
