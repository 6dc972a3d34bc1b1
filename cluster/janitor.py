"""Stands by a launcher and tidies up after it, however it ended: `python -I -S janitor.py FOLDER STATE_FILE`.

The launcher holds the other end of the pipe on stdin and never writes. Its end of file means that the launcher is gone,
so every process of its Ray cluster (a Python or Ray binary with an open file below FOLDER) is killed, and FOLDER and
STATE_FILE are removed. Standalone on purpose: standard library only, starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

PATIENCE_S = 10.0
"""A killed process that is still there by then is in an uninterruptible call; nobody can wait for that."""


def processes_of(folder: Path) -> list[int]:
    """Living processes of ours with a file open below `folder`. Somebody's `less` of a log file is not ours.

    Nor is a launcher that still lives: it closed the pipe to have this done and waits for it.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        with contextlib.suppress(OSError):
            if _is_our_binary(entry.joinpath("exe").readlink()) and _has_file_below(entry, folder):
                found.append(int(entry.name))
    return found


def _is_our_binary(binary: Path) -> bool:
    return binary == Path(sys.executable).resolve() or "ray" in binary.parts


def _has_file_below(process: Path, folder: Path) -> bool:
    for link in process.joinpath("fd").iterdir():
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(folder):
                return True
    return False


def tidy(folder: Path, state_file: Path) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := processes_of(folder)) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if left:
        print(f"twostroke: still there {PATIENCE_S:.0f} s after SIGKILL: {', '.join(map(str, left))}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    state_file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others have their state there, or it is gone already
        state_file.parent.rmdir()


def main() -> None:
    folder, state_file = (Path(argument) for argument in sys.argv[1:])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    tidy(folder, state_file)


if __name__ == "__main__":
    main()
