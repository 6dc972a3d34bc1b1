"""Counts how often each point is reached, and lets the armed fault happen there."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from tests.trials.chaos.injection import control
from tests.trials.chaos.injection.links import Links
from tests.trials.chaos.injection.plan import BREAK, ENVIRONMENT, Fault, Guard, Kind
from twostroke.base.fault_points import Point

log = logging.getLogger(__name__)

BY_CALL = "control"
"""The value of TWOSTROKE_FAULT that arms nothing: anything can be."""
JOURNAL = "TWOSTROKE_FAULT_JOURNAL"
"""Names a file to which a line of JSON is appended before each fault happens: who, where, what, when, and how
long ago tokens of a draft model were run there."""
NEXT_EPOCH = "{journal}.{process}"
"""Names a file with a fault for the next process of that name: points are reached before a call could arm anything."""
ONE = "{journal}.{fault}.one"
"""Names a file that one process of all in which the fault is armed takes away: in the others it does not happen then.
Where there never was one, it happens in all."""
HIT = " has hit pages"
"""Ends the fault's name in a second line, when pages are spoilt: they may come long after the point."""


class RankProcess(Protocol):
    """Another rank, as the first one knows it."""

    @property
    def process(self) -> subprocess.Popen[bytes]: ...

    @property
    def connection(self) -> Connection: ...


class Injector:
    """The faults of one process. Points are reached on any thread; no lock is held while a fault happens."""

    def __init__(self, process: str = "", journal: str | None = None, off: Guard | None = None) -> None:
        self.process = process
        """The name of the process in the journal; empty until `begin`."""
        self.off = off
        self.links = Links(self._has_hit)
        self.ranks: list[RankProcess] = []
        """The other ranks that this process has started; the last ones are those of its epoch."""
        self.last_draft_s: float | None = None
        """When tokens of a draft model were last run in this process."""
        self.journal = journal
        self._lock = threading.Lock()
        self._reached: Counter[Point] = Counter()
        self._armed: Fault | None = None
        self._left = 0

    def begin(self, process: str) -> None:
        """The process is `process` from now on: it can be told what to do, and may have been left a fault."""
        if self.process:
            return
        self.process = process
        if self.journal is None:
            return
        control.serve(self, control.port_file(self.journal, process))
        note = Path(NEXT_EPOCH.format(journal=self.journal, process=process))
        if note.exists():
            fault = Fault.parse(note.read_text())
            note.unlink()
            self.arm(fault)

    def is_off(self, guard: Guard) -> bool:
        return self.off is guard

    @property
    def reached(self) -> Mapping[str, int]:
        with self._lock:
            return {point.value: count for point, count in self._reached.items()}

    def arm(self, fault: Fault) -> None:
        """Counts from now on; it replaces what was armed before."""
        with self._lock:
            self._armed, self._left = fault, fault.count

    def heal(self) -> None:
        """Nothing is armed any more, and links are as they were."""
        with self._lock:
            self._armed = None
        self.links.heal()

    def reach(self, point: Point) -> bool:
        """True where the caller is to drop what it has at hand."""
        with self._lock:
            self._reached[point] += 1
            fault = self._armed
            if fault is None or fault.point is not point:
                return False
            self._left -= 1
            if self._left:
                return False
            self._armed = None
        if not self._is_first(fault):
            return False
        self._happen(fault)
        return fault.kind is Kind.LOSE

    def _is_first(self, fault: Fault) -> bool:
        """Returns whether it happens here, where it is to happen in one of all processes."""
        if self.journal is None:
            return True
        note = Path(ONE.format(journal=self.journal, fault=fault))
        taken = note.with_suffix(".taken")
        try:
            note.rename(taken)
        except FileNotFoundError:
            return not taken.exists()
        return True

    def _happen(self, fault: Fault) -> None:
        log.warning("fault happens fault=%s", fault)
        self._write_down(str(fault))
        match fault.kind:
            case Kind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.STOP:
                freeze(fault.seconds)
            case Kind.KILL_RANK:
                self.ranks[-1].process.send_signal(signal.SIGKILL)
            case Kind.STOP_RANK:
                self.ranks[-1].process.send_signal(signal.SIGSTOP)
            case Kind.CUT_RANK:
                cut(self.ranks[-1].connection)
            case Kind.LOSE:
                pass  # by whoever came to the point
            case _:
                self.links.spoil(fault)

    def _has_hit(self, fault: Fault) -> None:
        self._write_down(f"{fault}{HIT}")

    def _write_down(self, what: str) -> None:
        if self.journal is None:
            return
        now_s = time.time()
        draft_age_s = None if self.last_draft_s is None else now_s - self.last_draft_s
        line = {"process": self.process, "pid": os.getpid(), "fault": what, "at_s": now_s, "draft_age_s": draft_age_s}
        # One write of one line: processes share the file. What the kernel has outlives SIGKILL.
        with open(self.journal, "ab", buffering=0) as journal:
            journal.write(json.dumps(line).encode() + b"\n")


def freeze(seconds: float) -> None:
    """Stops this process; a grandchild that outlives it wakes it up."""
    pid = os.getpid()
    # The seconds count from when it stands still: on a busy machine that may be later than the grandchild's start.
    asleep = f"while grep -qs '^State:.[^TXZ]' /proc/{pid}/status; do sleep 0.01; done"
    waker = f"({asleep}; sleep {seconds:.3f}; kill -CONT {pid}) &"
    # Without our stdout, which others read to its end; reparented at once, so that nobody has to wait for it.
    nowhere = subprocess.DEVNULL
    subprocess.run(
        ["/bin/sh", "-c", waker], stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True, check=True
    )
    # To this thread: it takes the signal before its next instruction, where os.kill might wake another one first and
    # let this one do what the point is before.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def cut(connection: Connection) -> None:
    """Ends a connection at both of its ends, which stay open."""
    with socket.socket(fileno=os.dup(connection.fileno())) as way:
        way.shutdown(socket.SHUT_RDWR)


def from_environment() -> Injector | None:
    """The injector of a process that was started with TWOSTROKE_FAULT; None for every other process.

    Raises ConfigError for what is not a fault.
    """
    wanted = os.environ.get(ENVIRONMENT)
    if not wanted:
        return None
    off = os.environ.get(BREAK)
    injector = Injector(journal=os.environ.get(JOURNAL), off=Guard(off) if off else None)
    if wanted != BY_CALL:
        injector.arm(Fault.parse(wanted))
    return injector
