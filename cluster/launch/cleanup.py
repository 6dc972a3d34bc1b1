"""Removes what a launcher leaves behind, however it ended: `python -I -S cleanup.py FOLDER STATE_FILE`.

The launcher holds the other end of the pipe on stdin and never writes. End of file means that the launcher is gone.
Then every process of its Ray cluster is killed: each Python or Ray binary with an open file below FOLDER. FOLDER and
STATE_FILE are removed. The script uses only the standard library, so it starts in milliseconds.
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
"""Seconds to wait for killed processes. One that is still there is in an uninterruptible system call."""


def processes_of(folder: Path) -> list[int]:
    """Returns our processes with a file open below `folder`. Somebody's `less` of a log file is not ours.

    A launcher that is still alive is left out: it closed the pipe itself and waits for this process.
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
    with contextlib.suppress(OSError):  # other servers' files are there, or it is gone already
        state_file.parent.rmdir()


def main() -> None:
    folder, state_file = (Path(argument) for argument in sys.argv[1:])
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.buffer.read()
    tidy(folder, state_file)


if __name__ == "__main__":
    main()
