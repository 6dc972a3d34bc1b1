"""Waits without a timer until its raylet ends: `python -I -S idle_agent.py`, in place of an agent of Ray's node.

It sets the death signal and then becomes a program that is smaller than Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.getppid()
    if parent == 1 or Path(f"/proc/{parent}/exe").readlink().name != "raylet":
        sys.exit("the raylet was gone before this process was bound to it")
    os.execvp("sleep", ["sleep", "infinity"])


if __name__ == "__main__":
    main()
