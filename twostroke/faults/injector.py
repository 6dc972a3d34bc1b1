"""Counts how often each point is reached, and lets the armed fault happen there."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

from twostroke.faults.plan import ENVIRONMENT, Fault, Kind
from twostroke.lifetime import Point

log = logging.getLogger(__name__)

BY_CALL = "control"
"""As TWOSTROKE_FAULT: nothing is armed, and anything can be."""
JOURNAL = "TWOSTROKE_FAULT_JOURNAL"
"""Names a file to which a line of JSON is appended before each fault happens: who, where, what, when."""

LinkFault = Callable[[Fault], None]


class Injector:
    """Of one process. Points are reached on any thread."""

    def __init__(self, process: str, journal: str | None = None) -> None:
        self.process = process
        """Its name in the journal."""
        self._journal = journal
        self._lock = threading.Lock()
        self._reached: Counter[Point] = Counter()
        self._armed: Fault | None = None
        self._left = 0
        self._link_faults: list[LinkFault] = []

    @property
    def reached(self) -> Mapping[str, int]:
        with self._lock:
            return {point.value: count for point, count in self._reached.items()}

    def arm(self, fault: Fault | None) -> None:
        """Counts from now on; it replaces what was armed before."""
        with self._lock:
            self._armed = fault
            self._left = 0 if fault is None else fault.count

    def on_link_fault(self, happen: LinkFault) -> None:
        """`happen` is called, on whichever thread, with every fault that is not the process's own end or sleep."""
        self._link_faults.append(happen)

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
        self._happen(fault)
        return fault.kind is Kind.LOSE

    def _happen(self, fault: Fault) -> None:
        log.warning("fault happens fault=%s", fault)
        self._write_down(fault)
        if fault.kind is Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is Kind.STOP:
            freeze(fault.seconds)
        else:
            for happen in self._link_faults:
                happen(fault)

    def _write_down(self, fault: Fault) -> None:
        if self._journal is None:
            return
        line = {"process": self.process, "pid": os.getpid(), "fault": str(fault), "at_s": time.time()}
        with open(self._journal, "ab", buffering=0) as journal:
            journal.write(json.dumps(line).encode() + b"\n")


def freeze(seconds: float) -> None:
    """Stop this process; a child that outlives it wakes it up."""
    pid = os.getpid()
    subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)


_injector: Injector | None = None
"""A process has one, as it has one set of signal handlers; set once, when it starts."""


def install(process: str) -> Injector | None:
    """What TWOSTROKE_FAULT asks for, or None where it is not set. Raises ConfigError for what is no fault."""
    global _injector  # noqa: PLW0603
    wanted = os.environ.get(ENVIRONMENT)
    if not wanted:
        return None
    fault = None if wanted == BY_CALL else Fault.parse(wanted)
    if _injector is None or _injector.process != process:
        _injector = Injector(process, os.environ.get(JOURNAL))
        _injector.arm(fault)
    return _injector


def reach(point: Point) -> bool:
    """The code has come to `point`. True where it is to drop what it has at hand; never, unless a test asks for it."""
    return _injector is not None and _injector.reach(point)
