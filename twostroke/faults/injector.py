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
from pathlib import Path

from twostroke.faults.links import Links
from twostroke.faults.plan import BREAK, ENVIRONMENT, Fault, Guard, Kind
from twostroke.lifetime import Point

log = logging.getLogger(__name__)

BY_CALL = "control"
"""As TWOSTROKE_FAULT: nothing is armed, and anything can be."""
JOURNAL = "TWOSTROKE_FAULT_JOURNAL"
"""Names a file to which a line of JSON is appended before each fault happens: who, where, what, when."""
NEXT_LIFE = "{journal}.{process}"
"""Names a file with a fault that is armed when the process begins, once: beside the journal."""
ONE = "{journal}.{fault}.one"
"""Names a file that one process of all in which the fault is armed takes away: in the others it does not happen then.
Where there never was one, it happens in all."""
HIT = " has hit pages"
"""Ends the fault's name in a second line, when pages are spoilt: they may come long after the point."""


class Injector:
    """Of one process. Points are reached on any thread; no lock is held while a fault happens."""

    def __init__(self, process: str, journal: str | None = None, off: Guard | None = None) -> None:
        self.process = process
        """Its name in the journal."""
        self.off = off
        self.links = Links(self._has_hit)
        self._journal = journal
        self._lock = threading.Lock()
        self._reached: Counter[Point] = Counter()
        self._armed: Fault | None = None
        self._left = 0

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
        """Of all processes, where it is to happen in one."""
        if self._journal is None:
            return True
        note = Path(ONE.format(journal=self._journal, fault=fault))
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
            case Kind.LOSE:
                pass  # by whoever came to the point
            case _:
                self.links.spoil(fault)

    def _has_hit(self, fault: Fault) -> None:
        self._write_down(f"{fault}{HIT}")

    def _write_down(self, what: str) -> None:
        if self._journal is None:
            return
        line = {"process": self.process, "pid": os.getpid(), "fault": what, "at_s": time.time()}
        # One write of one line: processes share the file. What the kernel has outlives SIGKILL.
        with open(self._journal, "ab", buffering=0) as journal:
            journal.write(json.dumps(line).encode() + b"\n")


def freeze(seconds: float) -> None:
    """Stop this process; a grandchild that outlives it wakes it up."""
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


_injector: Injector | None = None
"""A process has one, as it has one set of signal handlers; set once, when it starts."""


def install(process: str) -> Injector | None:
    """What TWOSTROKE_FAULT asks for, or None where it is not set. Raises ConfigError for what is no fault."""
    global _injector  # noqa: PLW0603
    if not os.environ.get(ENVIRONMENT):
        return None
    fault = planned()
    if _injector is None or _injector.process != process:
        journal = os.environ.get(JOURNAL)
        off = os.environ.get(BREAK)
        _injector = Injector(process, journal, Guard(off) if off else None)
        fault = fault or _left_for(process, journal)
        if fault is not None:
            _injector.arm(fault)
    return _injector


def planned() -> Fault | None:
    """The fault that TWOSTROKE_FAULT names. Raises ConfigError for what is no fault."""
    wanted = os.environ.get(ENVIRONMENT)
    return Fault.parse(wanted) if wanted and wanted != BY_CALL else None


def _left_for(process: str, journal: str | None) -> Fault | None:
    """What this life is to begin with: points that are reached before a call could arm anything."""
    note = Path(NEXT_LIFE.format(journal=journal, process=process))
    if journal is None or not note.exists():
        return None
    text = note.read_text()
    note.unlink()
    return Fault.parse(text)


def announced(address: str, *, pages: bool = False) -> str:
    """What peers are told of this process's port at `address`. `pages`: it is where they read pages."""
    return address if _injector is None else _injector.links.announce(address, pages=pages)


def dialled(address: str) -> str:
    """What to connect to in order to reach a peer at `address`; `hang_up` when it is no longer needed."""
    return address if _injector is None else _injector.links.dial(address)


def hang_up(dialled_address: str) -> None:
    if _injector is not None:
        _injector.links.hang_up(dialled_address)


def carried(connected: socket.socket) -> socket.socket:
    """What to use instead of a socket that is connected to a peer's pages."""
    return connected if _injector is None else _injector.links.carry(connected)


def links() -> Links | None:
    """Of this process; None where nothing can go wrong with them on purpose."""
    return None if _injector is None else _injector.links


def is_off(guard: Guard) -> bool:
    """True only where a test proves that it notices."""
    return _injector is not None and _injector.off is guard


def reach(point: Point) -> bool:
    """The code has come to `point`. True where it is to drop what it has at hand; never, unless a test asks for it."""
    return _injector is not None and _injector.reach(point)
